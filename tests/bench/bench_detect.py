"""detect_throughput: node observations through a detector worker (telemetry, fold, table), beside one message a record on the same
transport. Timed from the first record folded to the last, all of them stored before; `per_cpu_second` is what a busy machine spares."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from events import subjects
from events.presence import Heartbeat, RankProcess
from events.registry import canonical, make
from infra.detector_worker import Worker, WorkerSettings, load_detector
from infra.faust_transport import quiet_faust
from infra.publisher import Publisher
from tests.bench.report import report
from tests.nats_fixture import Bus, real_bus

NAMES = ("detect_throughput",)
BOUND = 15_000
NODES = 1_000
RECORDS = int(os.environ.get("KEEPSTEP_BENCH_DETECT_RECORDS", "90000"))
PEER_SHARE = 8
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Rate:
    records: int
    wall_s: float
    cpu_s: float


async def main() -> None:
    quiet_faust()
    ours = await _measure(RECORDS, 256)
    peer = await _measure(RECORDS // PEER_SHARE, 1)
    report(
        "detect_throughput",
        ours.records / ours.wall_s,
        "observations/s",
        bound=BOUND,
        peer="faust, one message a record, same transport",
        peer_value=peer.records / peer.wall_s,
        n=ours.records,
        per_cpu_second=round(ours.records / ours.cpu_s),
        peer_per_cpu_second=round(peer.records / peer.cpu_s),
        nodes=NODES,
    )


async def _measure(records: int, frame: int) -> Rate:
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        async with real_bus(Path(folder), lease_ttl_s=6.0) as bus:
            await _publish(bus, records)
            settings = WorkerSettings("node", "bench", connect=lambda: bus.connect("detector"), frame_records_max=frame)
            worker = Worker(settings, await load_detector("node", bus.admin))
            stop = asyncio.Event()
            task = asyncio.create_task(worker.run(stop))
            try:
                return await _timed(worker, task, records)
            finally:
                stop.set()
                await asyncio.wait_for(task, 30)


async def _timed(worker: Worker, task: asyncio.Task[None], records: int) -> Rate:
    host = worker.host
    deadline_s = time.monotonic() + LIMIT_S
    while not host.records:
        if task.done() or time.monotonic() > deadline_s:
            raise RuntimeError("the worker folded nothing")
        await asyncio.sleep(0.001)
    before, wall_s, cpu_s = host.records, time.perf_counter(), time.process_time()
    while host.records < records:
        if task.done() or time.monotonic() > deadline_s:
            raise RuntimeError(f"the worker folded {host.records} of {records} records and no more")
        await asyncio.sleep(0.05)
    return Rate(host.records - before, time.perf_counter() - wall_s, time.process_time() - cpu_s)


async def _publish(bus: Bus, records: int) -> None:
    publisher = Publisher(bus.admin)
    ranks = tuple(RankProcess(rank=rank, pid=4000 + rank, state="S") for rank in range(8))
    for number in range(records):
        node = f"node-{number % NODES:04d}"
        event = make(
            Heartbeat(ranks=ranks),
            id=f"{number:026d}",
            source=f"node/{node}/heartbeat",
            subject=node,
            time=1_700_000_000_000_000_000 + number,
            bootid="4b0ef2a1-5a1c-4f0e-9d51-000000000000",
            number=number // NODES + 1,
            job="pretrain",
            attempt=1,
        )
        await publisher.publish(subjects.telemetry_node(node, "heartbeat"), canonical(event))
    failed = await publisher.close()
    if failed:
        raise RuntimeError(f"{len(failed)} observations were not stored: {failed[0].reason}")


if __name__ == "__main__":
    asyncio.run(main())
