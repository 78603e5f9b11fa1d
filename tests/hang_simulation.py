"""A training job over NCCL in miniature, broken at one rank and run until nothing moves: what each rank's flight recorder then holds.

Each rank runs a pipeline's schedule (receive, tensor-parallel collectives, send, and back), a gradient reduction and a norm over
all ranks. Its host enqueues ahead of its device, up to a few operations; its device works in order; a collective completes when all
its members' devices are at it, a transfer when both are. So who waits where is not written down by anyone, it comes about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from processors.parallel_groups import Layout

#: stopped: its program never enqueues the next operation (SIGSTOP, a lock, its data). killed: the same, and no dump. hung: its device
#: never comes to the operation, the host runs ahead. error: its device fails, so its recorder sees nothing more complete. other_call:
#: it calls another collective than its group.
Fault = Literal["stopped", "killed", "hung", "error", "other_call"]


class Op(NamedTuple):
    group: int
    name: str
    seq: int
    peer: int = -1


@dataclass(slots=True)
class Rank:
    program: list[Op]
    enqueued: int = 0
    done: int = 0
    #: As its watchdog noted; less than `done` once the device has failed.
    noted: int = 0
    stop_at: int = 1 << 30
    hang_at: int = 1 << 30
    fail_at: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Job:
    layout: Layout
    groups: list[tuple[str, tuple[int, ...]]]
    of: list[dict[str, int]] = field(default_factory=list)


def job_of(layout: Layout) -> Job:
    """Process groups in the order in which every rank makes them."""
    groups: list[tuple[str, tuple[int, ...]]] = [("default_pg", tuple(range(layout.world)))]
    of: list[dict[str, int]] = [{"world": 0} for _ in range(layout.world)]
    for kind, name in (
        ("dp", "DATA_PARALLEL_GROUP"),
        ("tp", "TENSOR_MODEL_PARALLEL_GROUP"),
        ("pp", "PIPELINE_MODEL_PARALLEL_GROUP"),
    ):
        for group in layout.groups(kind):  # type: ignore[arg-type]
            for rank in group.ranks:
                of[rank][kind] = len(groups)
            groups.append((name, group.ranks))
    return Job(layout, groups, of)


def program(job: Job, rank: int, steps: int, batches: int) -> list[Op]:
    own = job.of[rank]
    pipeline = job.groups[own["pp"]][1]
    stage = pipeline.index(rank)
    numbers: dict[int, int] = defaultdict(int)
    made: list[Op] = []

    def collective(kind: str, name: str) -> None:
        numbers[own[kind]] += 1
        made.append(Op(own[kind], name, numbers[own[kind]]))

    def transfer(name: str, peer_stage: int) -> None:
        if 0 <= peer_stage < len(pipeline):
            made.append(Op(own["pp"], name, 0, pipeline[peer_stage]))

    def layer() -> None:
        if job.layout.tp > 1:
            collective("tp", "_all_gather_base")
            collective("tp", "_reduce_scatter_base")

    for _ in range(steps):
        for _ in range(batches):
            transfer("recv", stage - 1)
            layer()
            transfer("send", stage + 1)
        for _ in range(batches):
            transfer("recv", stage + 1)
            layer()
            transfer("send", stage - 1)
        if job.layout.dp > 1:
            collective("dp", "_reduce_scatter_base")
            collective("dp", "_all_gather_base")
        collective("world", "all_reduce")
    return made


def run(job: Job, faults: dict[int, tuple[Fault, int]], *, steps: int = 3, batches: int = 3, ahead: int = 6) -> list[Rank]:
    """`faults`: what befalls a rank, and at which of its operations. Returns the ranks as they are when nothing moves."""
    ranks = [Rank(program(job, rank, steps, batches)) for rank in range(job.layout.world)]
    for rank, (fault, at) in faults.items():
        state = ranks[rank]
        if fault in ("stopped", "killed"):
            state.stop_at = at
        elif fault == "hung":
            state.hang_at = at
        elif fault == "error":
            state.fail_at = at
        else:
            state.program[at] = state.program[at]._replace(name="broadcast")
    moved = True
    while moved:
        moved = False
        for state in ranks:
            limit = min(len(state.program), state.stop_at, state.done + ahead)
            if state.fail_at <= state.noted:  # the host meets the error at its next call that waits
                limit = min(limit, state.fail_at + ahead)
            if limit > state.enqueued:
                state.enqueued, moved = limit, True
        for number, state in enumerate(ranks):
            if state.done < state.enqueued and _all_there(job, ranks, number):
                for member in _members(job, number, state.program[state.done]):
                    other = ranks[member]
                    other.done += 1
                    other.noted = min(other.done, other.fail_at)
                moved = True
    return ranks


def _members(job: Job, rank: int, op: Op) -> tuple[int, ...]:
    return job.groups[op.group][1] if op.peer < 0 else (rank, op.peer)


def _all_there(job: Job, ranks: list[Rank], number: int) -> bool:
    op = ranks[number].program[ranks[number].done]
    for member in _members(job, number, op):
        state = ranks[member]
        if state.done >= state.enqueued or state.done >= state.hang_at or state.done >= state.fail_at + 3:
            return False
        theirs = state.program[state.done]
        same = (
            theirs[:3] == op[:3]
            if op.peer < 0
            else theirs.group == op.group and theirs.peer == (number if member != number else op.peer)
        )
        if not same:
            return False
    return True


def dump(job: Job, number: int, state: Rank, *, whole: bool, timed: bool, ranks: list[Rank]) -> dict[str, Any]:
    """As PyTorch writes it. `whole`: with what has completed (the recorder's ring), else only what is pending. `timed`: the recorder
    times kernels, and a collective's runs once the device is at it."""
    own = sorted(set(job.of[number].values()))
    local = {
        group: index if index < 2 else index + 2 for index, group in enumerate(own)
    }  # a process numbers its groups with gaps
    transfers: dict[int, int] = defaultdict(int)
    collectives: dict[int, int] = defaultdict(int)
    last: dict[int, int] = {}
    entries = []
    for index, op in enumerate(state.program[: state.enqueued]):
        name, members = job.groups[op.group]
        if op.peer >= 0:
            transfers[op.group] += 1
            arrow = "->" if op.name == "send" else "<-"
            called = f"nccl:{op.name} {members.index(number)}{arrow}{members.index(op.peer)}"
        else:
            collectives[op.group] = op.seq
            called = f"nccl:{op.name}"
        last[op.group] = transfers[op.group] if op.peer >= 0 else op.seq
        if not whole and index < state.noted:
            continue
        starts = timed and index == state.done and state.done < state.hang_at
        entries.append(
            {
                "record_id": index, "pg_id": local[op.group], "process_group": [str(op.group), name], "is_p2p": op.peer >= 0,
                "collective_seq_id": collectives[op.group], "p2p_seq_id": transfers[op.group], "profiling_name": called,
                "state": "completed" if index < state.noted else "started" if starts else "scheduled", "retired": index < state.noted,
            }
        )  # fmt: skip
    return {
        "version": "2.9",
        "pg_config": {
            str(group): {"name": str(group), "desc": job.groups[group][0], "ranks": str(list(job.groups[group][1]))}
            for group in own
        },
        "pg_status": {
            str(local[group]): {"last_enqueued_collective": last.get(group, -1), "last_started_collective": -1} for group in own
        },
        "entries": entries,
    }


def dumps(
    layout: Layout, faults: dict[int, tuple[Fault, int]], *, whole: bool = False, timed: bool = False, ahead: int = 6
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rank and dump, of all that left one."""
    job = job_of(layout)
    ranks = run(job, faults, ahead=ahead)
    for number, state in enumerate(ranks):
        if faults.get(number, ("", 0))[0] != "killed":
            yield number, dump(job, number, state, whole=whole, timed=timed, ranks=ranks)
