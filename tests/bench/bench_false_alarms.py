"""false_alarms: wrong evictions in a simulated thousand node-days of machines with nothing wrong, through the real detectors and the real
decider in mode auto, with actuators that do what they are told, and tests of machines that fail as often as is stated of sound ones
(tests/simulation). Each seed is a fleet of 500 nodes for a day, with ticks
for nodes once a minute; two dozen nodes beside it live second by second, since absence is judged only then.

`unexplained`: incidents that were opened though no code had crashed and no driver was loaded anew; they cost as well, and are listed.
It takes 8 minutes of processor time; KEEPSTEP_BENCH_NODE_DAYS makes it shorter."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.bench.report import report
from tests.simulation.fleet import DENSE, SPARSE, Fleet, Shape

NAMES = ("false_alarms",)
NODE_DAYS = float(os.environ.get("KEEPSTEP_BENCH_NODE_DAYS", "1000"))
FLEETS = 2


def lived(shape: Shape, seed: int) -> dict[str, Any]:
    return Fleet(shape, seed).run()


def main() -> None:
    sizes = sum(size + SPARSE.standbys for _, size, _ in SPARSE.jobs)
    sparse = SPARSE._replace(days=max(0.01, NODE_DAYS / FLEETS / sizes))
    began = time.perf_counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(lived, sparse, seed) for seed in range(1, FLEETS + 1)]
        futures += [pool.submit(lived, DENSE, seed) for seed in (11, 12)]
        results = [future.result() for future in futures]
    happened: Counter[str] = Counter()
    rungs: Counter[str] = Counter()
    for result in results:
        happened.update(result["happened"])
        rungs.update(result["rungs"])
    unexplained = [one for result in results for one in result["unexplained"]]
    evictions = [one for result in results for one in result["evictions"]]
    report(
        "false_alarms", len(evictions), "evictions", bound=0, n=round(sum(result["node_days"] for result in results)),
        per="simulated node-days", unexplained=[list(one) for one in unexplained],
        events=sum(result["events"] for result in results), dense_node_hours=round(24 * sum(r["node_days"] for r in results[FLEETS:])),
        crashes_of_user_code=sum(result["crashes"] for result in results), happened=dict(sorted(happened.items())),
        failed_tests=sum(result["failed_tests"] for result in results), rungs=dict(sorted(rungs.items())), took_s=round(time.perf_counter() - began, 1), wrong=[list(one) for one in evictions[:10]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
