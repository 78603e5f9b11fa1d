"""memory: resident memory of each service with 1,200 nodes' heartbeats and their ranks' progress once a second for ten minutes: what each
has grown by from the second minute to the end. It must be flat: a service runs for months."""

from __future__ import annotations

import asyncio
import os
import statistics
from dataclasses import dataclass, field

import psutil

from events.job import Place
from infra.publisher import Publisher
from infra.supervise import module
from tests.bench.agents import AgentProcess, start_agent
from tests.bench.bench_latency import NODES, PARTS, POLICY, RACK, STANDBYS, Fleet
from tests.bench.live import Executor, Plane, Source, control_plane, quiet_machine, stage
from tests.bench.report import report

NAMES = ("memory",)
SECONDS = float(os.environ.get("KEEPSTEP_BENCH_MEMORY_S", "600"))
#: What a service takes at first (caches fill, buffers grow to their bounds) is its size, not its growth.
SETTLED_AFTER = 0.2
GROWTH_BOUND_MB, GROWTH_BOUND_SHARE = 5.0, 0.05
SAMPLE_S = 1.0


@dataclass(slots=True)
class Sizes:
    """Resident megabytes of each service, second by second."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def look(self, plane: Plane, agent: AgentProcess, at_s: float) -> None:
        pids = {name: child.pid for name, child in plane.supervisor.children.items()} | {"nats-server": plane.server.pid}
        for name, pid in pids.items():
            if not pid or (name in plane.supervisor.children and plane.supervisor.children[name].restarts):
                raise RuntimeError(f"{name} ended while it was measured")
            self.seen.setdefault(name, []).append((at_s, psutil.Process(pid).memory_info().rss / 1e6))
        self.seen.setdefault("agent", []).append((at_s, sum(agent.rss_mb().values())))

    def growth(self, name: str) -> tuple[float, float, float]:
        """(MB at the second minute, at the end, most), the first two medians of a tenth of the time."""
        width = SECONDS * 0.1
        settled_s = SECONDS * SETTLED_AFTER

        def middle(from_s: float, to_s: float) -> float:
            return statistics.median(mb for at, mb in self.seen[name] if from_s <= at <= to_s)

        most = max(mb for _, mb in self.seen[name])
        return middle(settled_s - width / 2, settled_s + width / 2), middle(SECONDS - width, SECONDS), most


async def main() -> None:
    with quiet_machine() as load:
        async with control_plane(POLICY) as plane:
            executor = Executor(plane.ledger.log)
            plane.ledger.on_event.append(executor.hear)
            nodes = [Place(node=f"n{i:04d}", rack=f"rack-{i // RACK:02d}") for i in range(NODES)]
            spares = [Place(node=f"s{i:03d}", rack=f"spares-{i // RACK}") for i in range(STANDBYS)]
            source = Source(Publisher(plane.admin, in_flight_max=4000))
            agent = start_agent(plane.server, plane.home.path / "agent", "real")
            try:
                await plane.declare(nodes, spares)
                await plane.until(lambda: executor.done >= 1, 30, "the first attempt")
                # Only now: no machine stands behind these nodes, and what is done already is left alone.
                await plane.supervisor.start("actuators", module("infra.actuator_service", "--home", str(plane.home.path)))
                stage(f"{NODES} nodes for {SECONDS:g} s")
                sizes = Sizes()
                late_s = await _run(plane, agent, Fleet(source, executor, [p.node for p in (*nodes, *spares)]), sizes)
                await source.settle()
            finally:
                await asyncio.to_thread(agent.end)
    found = {name: sizes.growth(name) for name in sizes.seen}
    services = {
        name: {"at_2_min_mb": round(a, 1), "at_end_mb": round(b, 1), "most_mb": round(most, 1), "growth_mb": round(b - a, 1)}
        for name, (a, b, most) in found.items()
    }
    # What each has grown beyond what it may: 5 MB, or a twentieth of itself where that is more.
    flat = {name: b - a <= max(GROWTH_BOUND_MB, GROWTH_BOUND_SHARE * a) for name, (a, b, _) in found.items()}
    worst = max(found, key=lambda name: (not flat[name], found[name][1] - found[name][0]))
    a, b, _ = found[worst]
    report(
        "memory", b - a, "MB", bound=round(max(GROWTH_BOUND_MB, GROWTH_BOUND_SHARE * a), 1), n=len(found), worst=worst,
        flat=all(flat.values()), services=services, seconds=SECONDS, messages=sum(source.published.values()),
        generator_late_s=round(late_s, 2), **load,
    )  # fmt: skip


async def _run(plane: Plane, agent: AgentProcess, fleet: Fleet, sizes: Sizes) -> float:
    """Publishes at the rate and looks at sizes; seconds that the load was late at worst."""
    loop = asyncio.get_running_loop()
    begun_s, late_s, look_s = loop.time(), 0.0, 0.0
    for tick in range(int(SECONDS * PARTS)):
        due_s = begun_s + tick / PARTS
        late_s = max(late_s, loop.time() - due_s)
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        await fleet.second(tick % PARTS)
        at_s = loop.time() - begun_s
        if at_s >= look_s:
            look_s = at_s + SAMPLE_S
            sizes.look(plane, agent, at_s)
            plane.ledger.records.clear()  # this process's memory is not what is measured, but it shares the machine
    sizes.look(plane, agent, SECONDS)
    return late_s


if __name__ == "__main__":
    asyncio.run(main())
