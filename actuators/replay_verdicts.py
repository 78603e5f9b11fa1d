"""Which groups of a group test failed, by what their ranks did. Pure: told, it answers.

A group fails if a rank crashed, got nowhere, or told a loss or gradient norm that is no finite number; and if what its ranks computed
differs bit for bit from what most groups of its shape computed, which ran the same steps on the same data with the same seeds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from events.envelope import TEXT_MAX
from events.finding import ReplayedRank, ReplayPhase, ReplayResult

#: The port was free when it was chosen, a moment before.
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
#: A replay's ranks' traces, in the order of the ranks.
Traces = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupRun:
    """`could_not`: why it did not run, if it did not. `ranks` of all its nodes, in order; `hung`: it was ended, and why."""

    phase: ReplayPhase
    group: int
    nodes: tuple[str, ...]
    ranks: tuple[ReplayedRank, ...] = ()
    could_not: str = ""
    hung: str = ""
    duration_s: float = 0.0


def verdicts(runs: Sequence[GroupRun]) -> tuple[ReplayResult, ...]:
    """One result a group, in the same order. Both phases are compared with each other: their groups run the same."""
    clean = [run for run in runs if not run.could_not and not _trouble(run)]  # one whose port was taken is in trouble, too
    most = {
        ranks: _most([_traces(run) for run in clean if len(run.ranks) == ranks]) for ranks in {len(run.ranks) for run in clean}
    }
    return tuple(_result(run, *_verdict(run, most)) for run in runs)


def _verdict(run: GroupRun, most: dict[int, tuple[Traces | None, int, int]]) -> tuple[bool | None, str]:
    if run.could_not:
        return None, run.could_not
    if taken := next((rank for rank in run.ranks if _port_taken(rank)), None):
        return None, f"rank {taken.rank} found its port taken by somebody else: {taken.detail}"
    if trouble := _trouble(run):
        return True, trouble
    reference, alike, of = most[len(run.ranks)]
    steps = f"{len(run.ranks[0].trace)} steps from {run.ranks[0].first_step}"
    if all(rank.blank and not rank.parameters for rank in run.ranks):
        return False, f"{steps}; the script tells neither loss nor gradient norm, so nothing could be compared"
    if of == 1:
        return False, f"{steps}; no other replay of {len(run.ranks)} ranks came through to be compared with"
    if reference is None:
        return (
            None,
            f"{steps}; of {of} replays no {'two' if alike == 1 else 'most'} agree: which of them is right can't be told",
        )
    mine = _traces(run)
    if mine == reference:
        return False, f"{steps}, the same bit for bit in {alike} of {of} replays"
    return True, f"{_first_difference(run, reference)} in {alike} of {of} replays of the same steps"


def _port_taken(rank: ReplayedRank) -> bool:
    return rank.ended == "crashed" and not rank.trace and bool(_PORT_TAKEN.search(rank.detail))


def _trouble(run: GroupRun) -> str:
    """What is wrong by itself, without any other replay beside it."""
    crashed = [rank for rank in run.ranks if rank.ended == "crashed"]
    if crashed:
        return "; ".join(f"rank {rank.rank} crashed {_where(rank)} ({rank.detail})" for rank in crashed[:3])
    if bad := [rank for rank in run.ranks if rank.bad_step >= 0]:
        first = min(bad, key=lambda rank: (rank.bad_step, rank.rank))
        return f"rank {first.rank} told a loss or gradient norm that is no finite number at step {first.bad_step}"
    cut = [rank for rank in run.ranks if rank.ended == "cut"]
    if cut:
        slowest = min(cut, key=lambda rank: len(rank.trace))
        return f"rank {slowest.rank} got no further than {len(slowest.trace)} steps ({slowest.detail}{run.hung and f'; {run.hung}'})"
    if any(not rank.trace for rank in run.ranks):
        return "it ended without a step"
    return ""


def _where(rank: ReplayedRank) -> str:
    return f"after {len(rank.trace)} steps" if rank.trace else "before its first step"


def _traces(run: GroupRun) -> Traces:
    return tuple((*rank.trace, rank.parameters) for rank in run.ranks)


def _most(every: list[Traces]) -> tuple[Traces | None, int, int]:
    """What most have computed (None: no two agree, or two ways are as frequent), how many did, and of how many."""
    counted = Counter(every).most_common(2)
    best, alike = counted[0]
    if (len(every) > 1 and alike == 1) or (len(counted) > 1 and counted[1][1] == alike):
        return None, alike, len(every)
    return best, alike, len(every)


def _first_difference(run: GroupRun, reference: Traces) -> str:
    """The first step, and the ranks that differ in it: all of them where what they tell was summed over the ranks. The parameters, which
    come last, where no step shows it."""
    mine = _traces(run)
    longest = max(len(trace) for trace in (*mine, *reference))
    for at in range(longest):
        differ = [rank for rank, (a, b) in enumerate(zip(mine, reference, strict=True)) if a[at : at + 1] != b[at : at + 1]]
        if differ:
            which = "all ranks" if len(differ) == len(mine) else f"rank {', '.join(map(str, differ[:8]))}"
            if at < len(run.ranks[differ[0]].trace):
                return f"from step {run.ranks[0].first_step + at} on {which} computed something else than"
            return f"after {at} steps {which} did not come to the same parameters, or ended otherwise, than"
    raise AssertionError("they do not differ")


def _result(run: GroupRun, failed: bool | None, detail: str) -> ReplayResult:
    return ReplayResult(
        phase=run.phase, group=run.group, nodes=run.nodes, failed=failed, detail=detail[:TEXT_MAX], duration_s=round(run.duration_s, 3)
    )  # fmt: skip
