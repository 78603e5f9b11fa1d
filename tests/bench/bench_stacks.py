"""aggregate: the stacks of 9,600 ranks to outliers, beside what is done by hand with py-spy's dumps, `sort | uniq -c` over a line a
process. culprit_accuracy: precision and recall of the ranks that are named at fault, on recorded hangs and on situations with known
culprits, beside the plain readings: of stacks, that all but the most frequent are outliers; of flight recordings, that those are which
miss the last collective of a group. Disagreements go to standard error. `best_f1_there_is`: of whoever names all culprits, and with them
those ranks whose evidence is the same to the byte."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actuators.flight_recorder import recording
from events.finding import ProcessStack
from events.rank_set import expand
from processors.parallel_groups import Layout, smallest_cover
from processors.stacks import aggregate
from tests.bench.report import report
from tests.hang_cases import WORKER_IDLE, Case, cases, figure_7, processes

NAMES = ("aggregate", "culprit_accuracy")
RANKS, ROUNDS, BOUND_MS = 9_600, 7, 200.0
LAYOUT = Layout(tp=8, pp=12, dp=100, ranks_per_node=8)
SICK = range(4_800, 4_896)
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "cases" / "flight-recorder"


def main() -> None:
    _aggregate()
    _accuracy()


def _aggregate() -> None:
    """A data loader for each rank; one pipeline is stuck, as in the paper's figure 7."""

    def where(rank: int) -> str:
        return figure_7(24 + rank % 8 if rank in SICK else rank % 24) + f";0x7f{rank:06x} (libc.so.6)"

    made = processes(RANKS, where, lambda rank: (f"{WORKER_IDLE};0x7e{rank:06x} (libc.so.6)",))
    messages = [process.model_dump_json() for process in made]
    read = [ProcessStack.model_validate_json(message) for message in messages]
    took = []
    for _ in range(ROUNDS):
        fresh = [process.model_copy(update={"threads": tuple(map(str, process.threads))}) for process in read]
        start = time.perf_counter()
        found = aggregate(fresh, RANKS)
        group = smallest_cover(LAYOUT, found.outliers)
        took.append((time.perf_counter() - start) * 1e3)
    assert set(found.outliers) == set(SICK) and group is not None and group.size == 12, (found.outliers, group)
    lines = "".join(f"{process.threads[0].rpartition(';')[0]}\n" for process in made).encode()
    by_hand = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run("sort | uniq -c | sort -rn", shell=True, input=lines, stdout=subprocess.DEVNULL, check=True)
        by_hand.append((time.perf_counter() - start) * 1e3)
    report(
        "aggregate", min(took), "ms", bound=BOUND_MS, peer="sort | uniq -c | sort -rn, a line a process, addresses cut off before",
        peer_value=min(by_hand), n=len(made), ranks=RANKS, groups_seen=found.groups_seen, outliers=len(found.outliers),
        group=group.name, machines=group.size, median_ms=round(sorted(took)[ROUNDS // 2], 2),
    )  # fmt: skip


@dataclass(slots=True)
class Score:
    right: int = 0
    wrong: int = 0
    missed: int = 0
    exact: int = 0

    def count(self, named: set[int], expected: frozenset[int]) -> None:
        self.right += len(named & expected)
        self.wrong += len(named - expected)
        self.missed += len(expected - named)
        self.exact += named == expected

    @property
    def precision(self) -> float:
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)

    @property
    def f1(self) -> float:
        return 2 * self.right / max(1, 2 * self.right + self.wrong + self.missed)


def _accuracy() -> None:
    every = cases()
    told = {
        "recorded": list(_recorded()),
        "stacks": [case for case in every if not any(process.recorded for process in case.processes)],
        "simulated": [case for case in every if any(process.recorded for process in case.processes)],
    }
    for name, some in told.items():
        if some:
            _report(f"culprit_accuracy_{name}", some)


def _recorded() -> Iterable[Case]:
    for file in sorted(RECORDED.glob("*.json.gz")) if RECORDED.is_dir() else ():
        case = json.loads(gzip.decompress(file.read_bytes()))
        found = [ProcessStack(rank=int(rank), pid=0, **recording(dump).fields()) for rank, dump in case["dumps"].items()]
        yield Case(f"{case['case']} (recorded)", tuple(found), Layout(dp=len(found)), frozenset(case["faulty_ranks"]))


def _report(name: str, some: Sequence[Case]) -> None:
    ours, plain = Score(), Score()
    best = Score()
    for case in some:
        named = set(aggregate(case.processes, case.layout.world).outliers)
        ours.count(named, case.expected)
        plain.count(_plainly(case), case.expected)
        best.count({*case.expected, *case.alike}, case.expected)
        if named != case.expected:
            why = f", whose evidence is that of {sorted(case.alike)} to the byte" if case.alike else ""
            print(f"{case.name}: expected {sorted(case.expected)}{why}, named {sorted(named)}", file=sys.stderr)
    report(
        name, ours.f1, "F1 of ranks", peer="the plain reading", peer_value=plain.f1, n=len(some), exact=ours.exact,
        precision=round(ours.precision, 3), recall=round(ours.recall, 3), best_f1_there_is=round(best.f1, 3),
        peer_precision=round(plain.precision, 3), peer_recall=round(plain.recall, 3), peer_exact=plain.exact,
    )  # fmt: skip


def _plainly(case: Case) -> set[int]:
    mains = {process.rank: process for process in reversed(case.processes)}
    if any(process.recorded for process in mains.values()):
        return _missing(mains)
    stacks = {rank: process.threads[0] if process.threads else "" for rank, process in mains.items()}
    most = Counter(stacks.values()).most_common(1)[0][0]
    return {rank for rank in range(case.layout.world) if stacks.get(rank) != most}


def _missing(recorded: dict[int, ProcessStack]) -> set[int]:
    """Members of a group that are not in its last collective that anyone waits in."""
    at: dict[str, dict[int, int]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for rank, process in recorded.items():
        members.update({group.group: expand(group.ranks) for group in process.groups})
        for op in process.pending:
            if op.peer < 0:
                at[op.group][rank] = max(op.seq, at[op.group].get(rank, -1))
    return {rank for group, ranks in at.items() for rank in members.get(group, ()) if ranks.get(rank, -1) < max(ranks.values())}


if __name__ == "__main__":
    main()
