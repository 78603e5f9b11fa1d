"""NATS subjects: names of nodes, jobs and ranks as single tokens, and the shapes that each stream stores.

A name may hold anything (dots, blanks, `*`, `>`, any Unicode): it is percent-encoded as UTF-8 outside [A-Za-z0-9_-], and the
empty name is a lone `%`. Token -> name -> token is the identity for every token this module makes.
"""

from __future__ import annotations

import re
from functools import lru_cache

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+\Z|%\Z")

#: NATS refuses nothing below 4 KB of subject; a name longer than this is no name.
TOKEN_LENGTH_MAX = 512

#: The job token of what concerns the whole fleet, in LEDGER. No job can have it: a name's `~` would be encoded.
FLEET = "~fleet"


class BadName(ValueError):
    """A name or token that cannot stand in a subject."""


@lru_cache(maxsize=65536)
def token(name: str) -> str:
    """The subject token of a name. Raises BadName if it is too long or not encodable (a lone surrogate)."""
    if name == FLEET:
        return FLEET
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadName(f"the name {name!r} is not valid Unicode") from error
    text = "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in raw) or "%"
    if len(text) > TOKEN_LENGTH_MAX:
        raise BadName(f"the name {name[:40]!r}… needs {len(text)} characters as a subject token; at most {TOKEN_LENGTH_MAX}")
    return text


@lru_cache(maxsize=65536)
def name(token_: str) -> str:
    """The name behind a token. Raises BadName for what `token` cannot have made."""
    if token_ == FLEET:
        return FLEET
    if token_ == "%":
        return ""
    if len(token_) > TOKEN_LENGTH_MAX or not _TOKEN.match(token_):
        raise BadName(f"{token_[:80]!r} is not a name encoded for a subject")
    raw = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), token_.encode("ascii"))
    try:
        plain = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadName(f"{token_[:80]!r} does not decode to UTF-8") from error
    if token(plain) != token_:
        raise BadName(f"{token_[:80]!r} is not in the form that keepstep writes")
    return plain


PARTITIONS = 8
#: First tokens of what the telemetry streams store. All of a partition is under one prefix, ticks and settings too, so that a reader
#: needs one filter: with three, nats-server 2.15 took twenty times as long to find the next message (decisions/025).
NODE, JOB = "tn", "tj"


def tick(stream: str, partition: int | str) -> str:
    """Where a partition's ticks are stored; `stream`: NODE or JOB."""
    return f"{stream}.{partition}.tick"


def settings(stream: str, partition: int | str) -> str:
    """Where a partition's settings are published and stored; `stream`: NODE or JOB."""
    return f"{stream}.{partition}.settings"


def is_clocks(stored: str) -> bool:
    """Whether a stored telemetry subject is a tick's or settings', of a whole partition and no node."""
    return stored.count(".") == 2


def telemetry_node(node: str, kind: str) -> str:
    """What a producer publishes about its node; stored as `tn.<partition>.<node>.<kind>`."""
    return f"telemetry.{token(node)}.node.{kind}"


def telemetry_job(node: str, job: str, kind: str) -> str:
    """What a producer publishes about a job; stored as `tj.<partition>.<node>.<job>.<kind>`."""
    return f"telemetry.{token(node)}.job.{token(job)}.{kind}"


def ledger(job: str, role: str, kind: str) -> str:
    """LEDGER subject. `role`: operator, detector, decider, actuator or timer."""
    return f"ledger.{token(job)}.{role}.{kind}"


def command(node: str, verb: str) -> str:
    return f"command.{token(node)}.{verb}"


def partition(key_token: str, partitions: int = PARTITIONS) -> int:
    """The partition that nats-server's `{{partition(n,i)}}` computes: FNV-1a, 32 bits, modulo n."""
    value = 2166136261
    for byte in key_token.encode("utf-8"):
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value % partitions


def matches(subject: str, pattern: str) -> bool:
    """Whether a subject matches a NATS pattern (`*` one token, `>` one or more at the end)."""
    have, want = subject.split("."), pattern.split(".")
    for i, part in enumerate(want):
        if part == ">":
            return len(have) > i
        if i >= len(have) or (part != "*" and part != have[i]):
            return False
    return len(have) == len(want)
