"""What actuators and agents did. Tries and outcomes are in LEDGER under the actuator's role; an agent answers in telemetry."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.decision import RankPlace, Verb
from events.envelope import NAME_MAX, TEXT_MAX, Fact
from events.finding import CheckResult, ProcessStack, ReplayedRank, ReplayResult, StackRound

Result = Literal["done", "failed", "refused_stale", "refused_expired", "refused_held", "unreachable"]


class TryStarted(Fact):
    """An actuator begins to carry out an intent, for the `ordinal`th time."""

    TYPE: ClassVar[str] = "keepstep.try_started.v1"
    key: str
    job: str = Field(max_length=NAME_MAX)
    verb: Verb
    ordinal: int = Field(ge=1)


class OutcomeRecorded(Fact):
    """What came of an intent; one for each key. `detail` is a sentence, `nodes` the ones for which it did not come to pass."""

    TYPE: ClassVar[str] = "keepstep.outcome_recorded.v1"
    key: str
    incident: str = ""
    job: str = Field(max_length=NAME_MAX)
    verb: Verb
    result: Result
    detail: str = Field(default="", max_length=TEXT_MAX)
    nodes: tuple[str, ...] = ()
    #: Of start_attempt, the step that the attempt was restored at; -1: not known, or from the beginning.
    restored_step: int = Field(default=-1, ge=-1)
    #: What an examination found, by verb: capture_stacks; diagnose and examine; group_test.
    stacks: tuple[StackRound, ...] = ()
    tests: tuple[CheckResult, ...] = ()
    replays: tuple[ReplayResult, ...] = ()


class PageRepeated(Fact):
    """A page that nobody acknowledged was sent again, for the `number`th time. `key`: its intent's."""

    TYPE: ClassVar[str] = "keepstep.page_repeated.v1"
    key: str
    incident: str = ""
    job: str = Field(max_length=NAME_MAX)
    number: int = Field(ge=1)
    result: Result
    detail: str = Field(default="", max_length=TEXT_MAX)


class PageEnded(Fact):
    """Over the channels that want it, it was told that nothing is asked any more. `key`: the page's intent's; `why`: what ended it."""

    TYPE: ClassVar[str] = "keepstep.page_ended.v1"
    key: str
    incident: str = ""
    job: str = Field(max_length=NAME_MAX)
    why: str = Field(max_length=TEXT_MAX)
    result: Result
    detail: str = Field(default="", max_length=TEXT_MAX)


class NodeCommand(Fact):
    """To one node's agent, over `command.<node>.<verb>`: not stored, repeated until it is answered. `key` makes it idempotent; an
    agent refuses an attempt below the newest it has been told of for the job."""

    TYPE: ClassVar[str] = "keepstep.node_command.v1"
    key: str
    verb: Literal["stop", "start", "prepare", "park", "fence", "stacks", "diagnose", "replay"]
    job: str = Field(max_length=NAME_MAX)
    attempt: int = Field(ge=0)
    epoch: int = Field(default=0, ge=0)
    place: RankPlace | None = None
    world_size: int = Field(default=0, ge=0)
    ranks_per_node: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)
    master_address: str = ""
    master_port: int = Field(default=0, ge=0, le=65535)
    command: tuple[str, ...] = ()
    directory: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    checkpoints: str = ""
    restore: str = Field(default="", max_length=TEXT_MAX)
    graceful: bool = False
    #: The code revision that `start`, `park` and `replay` run (empty: what lies in `directory`); `prepare` finds the newest whole
    #: checkpoint below this step (-1: the newest of all).
    revision: str = Field(default="", max_length=NAME_MAX)
    restore_below_step: int = Field(default=-1, ge=-1)
    #: stacks: with native frames, for which a process is suspended ten times as long.
    native: bool = True
    #: diagnose: tests by name, the time that all of them may take, for how long they are repeated (0: once), and the machines that do
    #: them together, `node_rank` this one's place. `replay`: the steps to run (0: what replays of the job's is ended), and the time that
    #: they may take.
    tests: tuple[str, ...] = ()
    repeat_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    nodes: tuple[str, ...] = ()
    within_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    steps: int = Field(default=0, ge=0)


class CommandAnswered(Fact):
    """A node's agent answers a command (telemetry, by job). For `prepare`: `port` free on it, `restore` the newest whole
    checkpoint (empty: none) and its step."""

    TYPE: ClassVar[str] = "keepstep.command_answered.v1"
    key: str
    verb: str
    ok: bool
    detail: str = Field(default="", max_length=TEXT_MAX)
    port: int = 0
    address: str = ""
    restore: str = Field(default="", max_length=TEXT_MAX)
    restore_step: int = -1
    stacks: tuple[ProcessStack, ...] = ()
    tests: tuple[CheckResult, ...] = ()
    replayed: tuple[ReplayedRank, ...] = ()
