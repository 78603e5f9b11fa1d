"""`group_plan`: both rounds of a group test planned for 2,048 machines. `group_plan_rounds`: rounds of replays until one machine is named,
beside bisection (halves of what is still suspect, at once), each tried on every machine as the faulty one."""

from __future__ import annotations

import statistics
import time

from events.finding import REPLAY_PHASES as PHASES
from events.finding import ReplayResult
from processors.group_test import Plan, locate, plan
from tests.bench.report import report

NAMES = ("group_plan", "group_plan_rounds")

MACHINES, TP, PP, DP = 2048, 8, 8, 256
ROUNDS = 15
BOUND_MS = 10.0


def bisection(machines: int, faulty: int, whole: int = 1) -> tuple[int, int]:
    """Rounds, and machines left: `whole` of them can't be parted (a pipeline, where PP is kept)."""
    low, high, rounds = 0, machines // whole, 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faulty < middle * whole else (middle, high)
        rounds += 1
    return rounds, (high - low) * whole


def planned() -> Plan:
    made = plan(MACHINES, pp=PP, dp=DP, tp=TP)
    assert isinstance(made, Plan)
    return made


def main() -> None:
    times_ms, locate_ms = [], []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        made = planned()
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    for x in range(MACHINES):
        results = [
            ReplayResult(phase=phase, group=number, nodes=nodes, failed=str(x) in nodes)
            for phase in PHASES
            for number, nodes in enumerate(getattr(made.groups, phase))
        ]
        begun_s = time.perf_counter()
        found = locate(made.groups, results)
        locate_ms.append((time.perf_counter() - begun_s) * 1e3)
        assert found.outcome == "located" and found.suspects == (str(x),), (x, found)
    report(
        "group_plan", statistics.median(times_ms), "ms", bound=BOUND_MS, n=ROUNDS, machines=MACHINES, groups=made.n, machines_a_group=made.m,
        locate_ms=round(statistics.median(locate_ms), 3),
    )  # fmt: skip
    halves = max(bisection(MACHINES, x)[0] for x in range(MACHINES))
    whole = [bisection(MACHINES, x, whole=PP) for x in range(MACHINES)]
    report(
        "group_plan_rounds", len(PHASES), "rounds", bound=len(PHASES), peer="bisection of machines", peer_value=halves, n=MACHINES,
        suspects=1, bisection_of_pipelines_rounds=max(rounds for rounds, _ in whole), bisection_of_pipelines_suspects=max(left for _, left in whole),
    )  # fmt: skip


if __name__ == "__main__":
    main()
