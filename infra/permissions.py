"""Who may say and hear what on the bus: one table of identities, and the server's configuration text made from it. Pure.

An identity is a role of the control plane or one node. Whatever is not listed is refused by the server. Rules that a reader
should hold on to:

- a node publishes under its own token and hears its own commands; it has no JetStream interface at all, only acknowledgements
  in its own inbox, so it can't read, change or delete a stream;
- a role writes only its own role's part of LEDGER; nobody but the admin creates, changes, purges or deletes a stream;
- each identity has its own inbox prefix, so that no one hears another's answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from events.subjects import JOB, NODE, settings, token

ROLES = ("admin", "detector", "decider", "actuator", "operator", "observer")

#: What reading a stream or a bucket takes: looking it up, and consumers of one's own.
_READ = (
    "$JS.API.INFO",
    "$JS.API.STREAM.INFO.*",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.MSG.GET.*",
    "$JS.API.DIRECT.GET.>",
    "$JS.API.CONSUMER.CREATE.>",
    "$JS.API.CONSUMER.DURABLE.CREATE.>",
    "$JS.API.CONSUMER.INFO.>",
    "$JS.API.CONSUMER.NAMES.*",
    "$JS.API.CONSUMER.LIST.*",
    "$JS.API.CONSUMER.DELETE.>",
    "$JS.API.CONSUMER.MSG.NEXT.>",
    "$JS.ACK.>",
    "$JS.FC.>",
)
_SETTINGS = (settings(NODE, "*"), settings(JOB, "*"))

#: What each role may publish beside `_READ`. `ks.changelog.>` and `$KV.*.>`: tables and leases of the processors.
_WRITES: dict[str, tuple[str, ...]] = {
    "detector": ("ledger.*.detector.*", "deadletter.>", "ks.changelog.>", "$KV.*.>"),
    "decider": ("ledger.*.decider.*", "timer.*", "deadletter.>", "ks.changelog.>", "$KV.*.>", *_SETTINGS),
    "actuator": ("ledger.*.actuator.*", "command.*.*", "deadletter.>", "$KV.LEASES.>"),
    "operator": ("ledger.*.operator.*", *_SETTINGS),
    "observer": (),
}
#: What an actuator hears from the nodes directly, and the roles' own inbox; nothing else arrives outside consumers.
_HEARS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of the bus. `user` is also its file's name and part of its inbox prefix."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    @property
    def inbox_prefix(self) -> str:
        return inbox_prefix(self.user)


def inbox_prefix(user: str) -> str:
    return f"_INBOX_{user}"


def role(name: str) -> Identity:
    """The identity of a role of the control plane."""
    if name not in ROLES:
        raise ValueError(f"there is no role {name!r}; roles are {', '.join(ROLES)}")
    if name == "admin":
        return Identity("admin", (">",), (">",))
    return Identity(name, (*_READ, *_WRITES[name]), (f"{inbox_prefix(name)}.>", *_HEARS.get(name, ())))


def node_user(node: str) -> str:
    return f"node-{token(node)}"


def node(name: str) -> Identity:
    """The identity of one node's agent. Raises BadName for a name that can't be a subject token."""
    own, user = token(name), node_user(name)
    return Identity(user, (f"telemetry.{own}.>",), (f"command.{own}.>", f"{inbox_prefix(user)}.>"))


def users_block(identities: Sequence[tuple[Identity, str]], indent: str = "  ") -> str:
    """`authorization { … }` for a nats-server configuration: each identity with its public nkey."""
    lines = ["authorization {", f"{indent}users: ["]
    for identity, public_key in identities:
        lines.append(f"{indent * 2}# {_comment(identity.user)}")
        lines.append(f"{indent * 2}{{ nkey: {public_key}, permissions: {{")
        lines.append(f"{indent * 3}publish: {_array(identity.publish)},")
        lines.append(f"{indent * 3}subscribe: {_array(identity.subscribe)} }} }}")
    return "\n".join([*lines, f"{indent}]", "}", ""])


def _array(subjects: Sequence[str]) -> str:
    return "[" + ", ".join(json.dumps(s) for s in subjects) + "]"


def _comment(text: str) -> str:
    return "".join(c for c in text if c.isprintable())
