"""What an examination found: stacks, tests, replays. Parts of an actuator's outcome and of an agent's answer, never events of their own.
The decider judges by them, so what they hold is small: whole stacks stay in telemetry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

#: Of a group test: groups of neighbours, then groups with a stride.
ReplayPhase = Literal["horizontal", "vertical"]
REPLAY_PHASES: tuple[ReplayPhase, ...] = ("horizontal", "vertical")


class GroupState(Fact):
    """How far a rank is in one process group of the job, by PyTorch's flight recorder. `group`: the group's name, the same on all its
    members; `description`: what the job calls such groups (`TENSOR_MODEL_PARALLEL_GROUP`); `ranks`: its members (events.rank_set), empty if
    the dump does not say. `entered`: number of the last collective that the rank enqueued, -1: not known. `transfers`: sends and receives of
    the group are in the dump; the recorder's own status counts those too, so `entered` is then by the dump's operations alone.
    `done`: number of the last collective that the dump shows as completed (0: none yet, -1: not known); `since`: the transfers (peer; 1: sent to it, 0: received
    from it) that completed after it, less those before it that have not, as far as that is not 0."""

    group: str = Field(max_length=NAME_MAX)
    description: str = Field(default="", max_length=NAME_MAX)
    ranks: str = Field(default="", max_length=TEXT_MAX)
    entered: int = -1
    transfers: bool = False
    done: int = -1
    since: tuple[tuple[int, int, int], ...] = ()


class PendingOperation(Fact):
    """An operation that a rank enqueued and that has not completed on its device. `peer`: the other rank of a send or receive, -1 of a
    collective (`seq` then counts the group's collectives). `started`: its kernel runs, where the recorder times kernels."""

    group: str = Field(max_length=NAME_MAX)
    op: str = Field(max_length=64)
    seq: int
    peer: int = -1
    started: bool = False


class ProcessStack(Fact):
    """One training process of a node: a rank, or a child of one (data loader, checkpoint writer; `parent_pid` leads to the rank's
    process). `state` as the kernel tells it (R, S, D, T, Z), '-' if it is gone. `threads`: one stack a thread, outermost frame first,
    frames `function (file:line)` joined by ';', the main thread's first. `error`: why there is none. `unread`: that is a reason of the reader's (no right, no time, no room in the message),
    and says nothing of the process."""

    rank: int = Field(ge=-1)
    pid: int = Field(ge=0)
    parent_pid: int = Field(default=0, ge=0)
    command: str = Field(default="", max_length=NAME_MAX)
    state: str = Field(default="", max_length=1)
    threads: tuple[str, ...] = ()
    #: Of PyTorch's flight recorder, the collective that the rank waits in, and its number in its group; -1: no recording.
    collective: str = Field(default="", max_length=NAME_MAX)
    collective_seq: int = -1
    #: The recording itself: the groups that the rank is in, and what it waits for, in the order it was enqueued (the first ones).
    #: `recorded`: there was a recording; with nothing pending the rank waits for nobody.
    recorded: bool = False
    groups: tuple[GroupState, ...] = ()
    pending: tuple[PendingOperation, ...] = ()
    error: str = Field(default="", max_length=1024)
    unread: bool = False


class StackRound(Fact):
    """One capture of all processes, aggregated: `outliers` are the ranks whose stacks (or whose children's) are not the dominant
    ones', `silent` those of them that gave none. `groups_seen`: how many different stacks there were; `dominant`: ranks in the
    healthy ones. `stuck_at`: one line to each outlying stack, with its ranks."""

    outliers: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    groups_seen: int = Field(default=0, ge=0)
    dominant: int = Field(default=0, ge=0)
    ranks: int = Field(default=0, ge=0)
    stuck_at: tuple[str, ...] = ()


class CheckResult(Fact):
    """One test on one machine. `passed` None: it could not run, and says nothing. `peers`: the machines that it was done with (a
    neighbour in an all-gather, all others in a bit-wise comparison). `value`: what it measured, in `unit`."""

    test: str = Field(max_length=NAME_MAX)
    node: str = Field(max_length=NAME_MAX)
    passed: bool | None
    detail: str = Field(default="", max_length=TEXT_MAX)
    peers: tuple[str, ...] = ()
    value: float | None = None
    unit: str = Field(default="", max_length=32)
    duration_s: float = Field(default=0, ge=0)
    #: Of a test that equal machines do alike to the bit: what came out, and what must be equal for it to be (versions, device, layout).
    digest: str = Field(default="", max_length=64)
    software: str = Field(default="", max_length=TEXT_MAX)
    #: How often it was done; the first failure counts.
    rounds: int = Field(default=1, ge=1)
    #: What the test changed on the machine (clocks, persistence, environment), and whether it was proven put back.
    changed: tuple[str, ...] = ()
    restored: bool = True


class ReplayResult(Fact):
    """One group's short replay of the job. `failed` None: it could not run, and says nothing."""

    phase: ReplayPhase
    group: int = Field(ge=0)
    nodes: tuple[str, ...]
    failed: bool | None
    detail: str = Field(default="", max_length=TEXT_MAX)
    duration_s: float = Field(default=0, ge=0)


class ReplayedRank(Fact):
    """What one rank did in a replay. `rank` counts in the replay's own world. `ended`: `done` (all steps, or the script ended by itself
    with 0), `crashed` by itself, `cut` (it was ended: past its deadline, or another rank had failed). `trace`: after each step a digest
    of step, loss and gradient norm of all steps so far, bit for bit, so that two ranks can be compared and the first difference found;
    `blank` if the script tells no values. `bad_step`: the first step that was not skipped and whose loss or
    gradient norm is no finite number (-1: none). `parameters`: a checksum of the model's parameters on this rank after the last step, bit for
    bit, where the script lets the hook restore it."""

    rank: int = Field(ge=0)
    ended: Literal["done", "crashed", "cut"]
    first_step: int = -1
    trace: tuple[str, ...] = ()
    blank: bool = False
    bad_step: int = -1
    parameters: str = Field(default="", max_length=64)
    detail: str = Field(default="", max_length=TEXT_MAX)
