"""decision_latency: from an observation's publishing to the decision it leads to, with 1,200 nodes' heartbeats and their ranks' progress
once a second for a minute. Every message must be accounted for: acknowledged, stored, folded, no hole in any producer's numbers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import yaml

from events.clock import NS
from events.decision import DecisionMade
from events.hardware import KernelLog, KernelRecord
from events.incident import EvidenceMissing, ProgressNoted
from events.job import Place
from events.ports import TELEMETRY_JOB, TELEMETRY_NODE
from events.presence import Heartbeat, RankProcess
from events.training import StepSample, TrainingProgress
from infra.clock import wall_ns
from infra.publisher import Publisher
from processors.numbers import Numbers
from tests.bench.live import JOB, Executor, Plane, Source, control_plane, folded, quiet_machine, stage
from tests.bench.report import report

NAMES = ("decision_latency_p99", "decision_latency_p50")
NODES, RACK, STANDBYS = 1200, 16, 100
SECONDS = int(os.environ.get("KEEPSTEP_BENCH_LATENCY_S", "60"))
WARM_UP_S = 5
#: A second is sent in this many parts, as nodes that don't know of each other would.
PARTS = 50
BOUND_MS = 250.0
#: Budgets that let every fault be answered by an eviction; each is in another rack, so none is taken for a shared cause.
POLICY = yaml.safe_dump(
    {
        "mode": "auto",
        "budget": {scope: {"evictions_max": 10_000, "share_max": 1.0} for scope in ("job", "rack", "fleet")},
        "decider": {"recoveries_max": 10_000, "reattempts_max": 10_000},
    }
)


class Fleet:
    """The nodes as their telemetry: a beat and a step a second each, by those that the running attempt has."""

    def __init__(self, source: Source, executor: Executor, everyone: list[str]) -> None:
        self.source, self.executor, self.everyone = source, executor, everyone
        self.progress: dict[tuple[int, int], int] = {}

    async def second(self, part: int) -> None:
        """One part of a second."""
        attempt, places = self.executor.attempt, self.executor.places
        rank_of = {node: rank for rank, node in enumerate(places)}
        for node in self.everyone[part::PARTS]:
            rank = rank_of.get(node)
            if rank is None:
                await self.source.observe(node, "heartbeat", Heartbeat(parked=1))
                continue
            beat = Heartbeat(ranks=(RankProcess(rank=rank, pid=4000 + rank, state="S"),))
            await self.source.observe(node, "heartbeat", beat, job=JOB, attempt=attempt)
            step = self.progress[attempt, rank] = self.progress.get((attempt, rank), -1) + 1
            sample = StepSample(step=step, ended_ns=wall_ns(), step_time_s=1.0, loss=2.5, grad_norm=1.0, tokens=4096, mfu=0.4)
            fact = TrainingProgress(
                rank=rank, world_size=len(places), phase="step", progress=step + 1, step=step, samples=(sample,)
            )
            await self.source.observe(node, "trainer", fact, job=JOB, attempt=attempt, of_job=True)


async def main() -> None:
    with quiet_machine() as load:
        async with control_plane(POLICY) as plane:
            executor = Executor(plane.ledger.log)
            plane.ledger.on_event.append(executor.hear)
            nodes = [Place(node=f"n{i:04d}", rack=f"rack-{i // RACK:02d}") for i in range(NODES)]
            spares = [Place(node=f"s{i:03d}", rack=f"spares-{i // RACK}") for i in range(STANDBYS)]
            source = Source(Publisher(plane.admin, in_flight_max=4000))
            await plane.declare(nodes, spares)
            await plane.until(lambda: executor.attempt == 1, 30, "the first attempt")
            fleet = Fleet(source, executor, [place.node for place in (*nodes, *spares)])
            stage(f"{NODES} nodes for {WARM_UP_S + SECONDS} s")
            asked, late_s = await _run(plane, fleet, executor)
            stage(f"{sum(source.published.values())} messages published, {late_s:.2f} s late at worst; counting them")
            await source.settle()
            latency = await _latencies(plane, asked)
            await _account(plane, source)
    latency.sort()
    at: Callable[[float], float] = lambda share: latency[min(len(latency) - 1, int(share * len(latency)))]  # noqa: E731
    more = {"messages": sum(source.published.values()), "sent_again": source.again, "max": round(latency[-1], 1), "generator_late_s": round(late_s, 2), **load}  # fmt: skip
    report("decision_latency_p99", at(0.99), "ms", bound=BOUND_MS, n=len(latency), **more)
    report("decision_latency_p50", at(0.5), "ms", bound=BOUND_MS, n=len(latency))


async def _run(plane: Plane, fleet: Fleet, executor: Executor) -> tuple[dict[str, int], float]:
    """Node -> when its fault was published; and how late the load was at worst."""
    loop = asyncio.get_running_loop()
    asked: dict[str, int] = {}
    begun_s, late_s = loop.time(), 0.0
    for tick in range((WARM_UP_S + SECONDS) * PARTS):
        due_s = begun_s + tick / PARTS
        late_s = max(late_s, loop.time() - due_s)
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        await fleet.second(tick % PARTS)
        second, part = divmod(tick, PARTS)
        if second >= WARM_UP_S and part == second * 7 % PARTS:  # once a second, each time at another moment of it
            node = _victim(executor, asked)
            line = f"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. ({node})"
            log = KernelLog(records=(KernelRecord(text=line, priority=3, sequence=second + 1),))
            asked[node] = wall_ns()
            await fleet.source.observe(node, "kernel_log", log, job=JOB, attempt=executor.attempt)
    return asked, late_s


def _victim(executor: Executor, asked: dict[str, int]) -> str:
    """A running node of a rack that had no fault yet."""
    used = {int(node[1:]) // RACK for node in asked}
    return next(n for n in executor.places if n[0] == "n" and n not in asked and int(n[1:]) // RACK not in used)


async def _latencies(plane: Plane, asked: dict[str, int]) -> list[float]:
    """Milliseconds from a fault's publishing to the first decision that answers it."""
    decided: dict[str, int] = {}

    def read() -> bool:
        for record, event in plane.ledger.of(DecisionMade):
            if event.data.rung == "evict" and not event.data.vetoed:
                for node in event.data.nodes:
                    decided.setdefault(node, record.time_ns)
        return set(asked) <= set(decided)

    await plane.until(read, 20, "a decision for each fault")
    extra = set(decided) - set(asked)
    if extra:
        raise RuntimeError(f"nodes without a fault were evicted: {', '.join(sorted(extra)[:5])}")
    return [(decided[node] - at_ns) / NS * 1000 for node, at_ns in asked.items()]


async def _account(plane: Plane, source: Source) -> None:
    """Raises RuntimeError unless all that was published is stored, and all that is stored is folded."""
    for which, stream, pattern in (("node", TELEMETRY_NODE, "tn.*.*.*"), ("job", TELEMETRY_JOB, "tj.*.*.*.*")):
        stored = await plane.stored(stream, pattern)
        if stored != source.published[which] + source.again:
            raise RuntimeError(f"{source.published[which]} {which} observations were published and {stored} are stored")
    wanted = {producer: number for producer, number in source.numbers.items() if not producer.endswith("/trainer")}
    for left in range(40, -1, -1):
        states = await folded(plane)
        have = {one.source: one for state in states.values() for one in state.numbers}
        missing = [producer for producer, number in wanted.items() if have.get(producer) != Numbers(producer, number)]
        if not missing:
            break
        if not left:
            raise RuntimeError(f"{len(missing)} of {len(wanted)} producers were not folded whole: {missing[0]}: {have.get(missing[0])}")  # fmt: skip
        await asyncio.sleep(0.5)
    holes = [e.data for _, e in plane.ledger.of(EvidenceMissing)]
    letters = await plane.letters()
    if holes or letters:
        raise RuntimeError(f"{len(holes)} notes of missing evidence, {letters} dead letters")
    if not plane.ledger.of(ProgressNoted):
        raise RuntimeError("the job's telemetry led to no note of progress")


if __name__ == "__main__":
    asyncio.run(main())
