"""What a rank's process is started with: the environment that launcher and hook agreed on, and how a command can be parked. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path

from actuators.processes import MARK
from events.action import NodeCommand
from events.subjects import token

_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*\Z")
#: Of the agent's own environment, what no rank inherits: its settings and credentials, its service manager's, another launcher's.
_OWN = re.compile(
    r"(?:KEEPSTEP_|NATS_|TORCHELASTIC_|LISTEN_)|(?:RANK|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME|"
    r"LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|"
    r"MASTER_PORT|NOTIFY_SOCKET|WATCHDOG_PID|WATCHDOG_USEC|INVOCATION_ID|JOURNAL_STREAM|PYTHONHOME|PYTHONSAFEPATH)\Z"
)
#: Interpreter options that stand for themselves, and those that take a word. Others (-E, -I, -c, …): started cold.
_FLAGS = re.compile(r"-[uBOdqvb]+\Z")
_FLAGS_WITH_WORD = ("-X", "-W")


@dataclass(frozen=True, slots=True)
class Plan:
    """What parked workers of a job are made of. Two with the same digest can stand for each other."""

    command: tuple[str, ...]
    directory: str
    environment: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        return sha256(dumps([self.command, self.directory, self.environment]).encode()).hexdigest()[:16]


def plan_of(command: NodeCommand) -> Plan:
    return Plan(command.command, command.directory, command.environment)


def parked_form(command: tuple[str, ...]) -> tuple[list[str], list[str]] | None:
    """(argv of the parked worker, argv of what it runs on `go`): `python -u train.py --x` is `python -u -m keepstep.parked` and
    `train.py --x`. None: the command is no Python script or module, so it is started cold."""
    if len(command) < 2 or not _PYTHON.match(command[0]):
        return None
    at = 1
    while at < len(command):
        word = command[at]
        if word in _FLAGS_WITH_WORD:
            at += 2
        elif _FLAGS.match(word):
            at += 1
        else:
            break
    rest = list(command[at:])
    if not rest or (rest[0].startswith("-") and not (rest[0] == "-m" and len(rest) > 1)):
        return None
    return [*command[:at], "-m", "keepstep.parked"], rest


def host_mark(state_dir: Path) -> str:
    """Keeps two installations on one machine apart, which may well use the same names of nodes and jobs."""
    return sha256(str(state_dir.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def mark_prefix(host: str, node: str, job: str) -> str:
    """What the marks of a job's processes on a node begin with."""
    return f"{host}/{token(node)}/{token(job)}/"


def base(
    inherited: Mapping[str, str],
    plan: Plan,
    *,
    node: str,
    job: str,
    mark: str,
    hook_folder: str,
    socket_path: str,
) -> dict[str, str]:
    """The environment of a parked worker; what `ranked` adds to is the rank's own. The mark comes first."""
    own = {name: value for name, value in inherited.items() if not _OWN.match(name)}
    own.update(plan.environment)
    if hook_folder:
        own["PYTHONPATH"] = f"{hook_folder}:{own['PYTHONPATH']}" if own.get("PYTHONPATH") else hook_folder
    own.pop(MARK, None)
    return {
        MARK: mark,
        **own,
        "KEEPSTEP_JOB": job,
        "KEEPSTEP_NODE": node,
        "KEEPSTEP_SOCKET": socket_path,
    }


def ranked(base_environment: Mapping[str, str], command: NodeCommand, rank: int) -> dict[str, str]:
    """The whole environment of one rank of a `start`."""
    if command.place is None:
        raise ValueError("a start names the ranks to start")
    return {
        **base_environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - command.place.first_rank),
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(command.place.count),
        "GROUP_RANK": str(command.node_rank),
        "MASTER_ADDR": command.master_address,
        "MASTER_PORT": str(command.master_port),
        "TORCHELASTIC_RUN_ID": command.job,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, command.attempt - 1)),
        "KEEPSTEP_ATTEMPT": str(command.attempt),
        "KEEPSTEP_RANK": str(rank),
        "KEEPSTEP_STORE_PREFIX": f"{command.job}/{command.attempt}",
        "KEEPSTEP_CHECKPOINTS": command.checkpoints,
        "KEEPSTEP_RESTORE": command.restore,
    }
