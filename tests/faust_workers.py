"""A tiny detector, telemetry for it, and what its claims must be: the tests' yardstick for the Faust transport and its host.

Also a program, `python -m tests.faust_workers STORE NAME`, so that a worker can be killed or stopped as a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from events import subjects
from events.incident import EvidenceMissing
from events.ports import LEDGER, TELEMETRY_NODE, Record
from events.presence import Heartbeat, Tick
from events.registry import canonical, make, parse
from infra.bus import connect_to_store
from infra.detector_worker import Worker, WorkerSettings, _serve
from infra.jetstream import JetStreamLog
from infra.publisher import Publisher
from processors.detector import Claim, Detector, PartitionClock, PartitionFold, Seen
from tests.nats_fixture import Bus

POISON = "poison"


class Count(NamedTuple):
    heartbeats: int = 0
    last: str = ""


class Counter:
    """Claims each heartbeat of a node with its ordinal and the one before it: loss, repetition and disorder all show."""

    name = "counter"

    def __init__(self, *, raises_on: str = "") -> None:
        self.raises_on = raises_on

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> Count:
        return Count()

    def detect(self, state: Count, clock: PartitionClock, seen: Seen) -> tuple[Count, tuple[Claim, ...]]:
        if isinstance(seen.event.data, Tick):
            return state, ()
        if self.raises_on and seen.node == self.raises_on:
            raise RuntimeError(f"no sense can be made of {seen.node}")
        fact = EvidenceMissing(node=seen.node, reason="count", missing=state.heartbeats + 1, detail=f"after {state.last}")
        return Count(state.heartbeats + 1, seen.event.id), (Claim("", 0, fact, (seen.event.id,)),)

    def dump(self, state: Count) -> Any:
        return list(state)

    def load(self, key: str, value: Any) -> Count:
        return Count(*value)


async def beat(bus: Bus, nodes: Sequence[str], count: int, first: int = 0) -> None:
    """`count` heartbeats of each node."""
    publisher = Publisher(bus.admin)
    for number in range(first, first + count):
        for node in nodes:
            event = make(
                Heartbeat(), id=f"{node}-{number}", source=f"node/{node}/heartbeat", subject=node, time=1, number=number
            )
            await publisher.publish(subjects.telemetry_node(node, "heartbeat"), canonical(event))
    assert await publisher.close() == []


async def records(bus: Bus, stream: str, *wanted: str) -> list[Record]:
    return [record async for record in JetStreamLog(bus.admin, stream).read(subjects=wanted)]


async def expected(bus: Bus) -> dict[str, list[bytes]]:
    """What the whole telemetry gives, folded in memory, by key in order."""
    detector: Detector[Any] = Counter()
    folds = {p: PartitionFold(detector) for p in range(subjects.PARTITIONS)}
    found: dict[str, list[bytes]] = {}
    for record in await records(bus, TELEMETRY_NODE):
        parts = record.subject.split(".")
        for p in folds if parts[0] == "clock" else (int(parts[1]),):
            for out in folds[p].feed(record)[0]:
                if out.event.data.TYPE == EvidenceMissing.TYPE and out.event.subject != "clock":
                    found.setdefault(out.event.subject, []).append(canonical(out.event))
    return found


async def claimed(bus: Bus) -> list[Record]:
    """All that stands in LEDGER, repeats included."""
    kind = EvidenceMissing.kind()
    found = await records(bus, LEDGER, f"ledger.*.detector.{kind}")
    return [record for record in found if parse(record.data).subject != "clock"]


def by_key(claims: Sequence[Record]) -> dict[str, list[bytes]]:
    """Claims by key in order, what is repeated with the same id left out, as a reader of LEDGER does it."""
    found: dict[str, list[bytes]] = {}
    seen: set[str] = set()
    for record in claims:
        event = parse(record.data)
        if event.id not in seen:
            seen.add(event.id)
            found.setdefault(event.subject, []).append(record.data)
    return found


async def until(
    what: Callable[[], Awaitable[bool]] | Callable[[], bool], timeout_s: float = 60.0, every_s: float = 0.1
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        answer = what()
        if (await answer) if not isinstance(answer, bool) else answer:
            return
        assert time.monotonic() < deadline, f"did not come true within {timeout_s:g} s"
        await asyncio.sleep(every_s)


async def count(bus: Bus, stream: str, wanted: str) -> int:
    info = await bus.admin.jetstream().stream_info(stream, subjects_filter=wanted)
    return sum((info.state.subjects or {}).values())


async def all_claimed(bus: Bus, but: int = 0) -> bool:
    """Whether LEDGER holds everything that the telemetry so far must give, `but` so many that can't be read."""
    wanted = await count(bus, TELEMETRY_NODE, "tn.*.*.*") - but
    if await count(bus, LEDGER, f"ledger.*.detector.{EvidenceMissing.kind()}") < wanted:
        return False
    return sum(map(len, by_key(await claimed(bus)).values())) >= wanted


def worker(bus: Bus, name: str, detector: Detector[Any] | None = None, **more: Any) -> Worker:
    settings = WorkerSettings("node", name, connect=lambda: bus.connect("detector"), **{"state_interval_s": 0.1, **more})
    return Worker(settings, detector or Counter())


def partitions(running: Worker) -> set[int]:
    return {tp.partition for tp in running.app.consumer.assignment()}


class Running:
    """A worker in a task of this loop: `async with Running(worker): …` stops it cleanly at the end."""

    def __init__(self, what: Worker) -> None:
        self.worker, self.stop = what, asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(self.worker.run(self.stop))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        assert self.task is not None
        await asyncio.wait_for(self.task, 30)


class Process:
    """A worker as a process. Its log is kept; it is killed at the end, stopped or not."""

    def __init__(self, bus: Bus, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faust_workers", str(bus.server.store), name],
                cwd=Path(__file__).resolve().parent.parent,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


async def holders(bus: Bus, group: str = "detector-node") -> dict[int, str]:
    """Which worker's lease stands for each partition."""
    found = {}
    for record in await records(bus, "KV_LEASES", f"$KV.LEASES.{group}.lease.*"):
        if record.data:
            found[int(record.subject.rpartition(".")[2])] = str(json.loads(record.data)["worker"])
    return found


def main() -> int:
    store, name = sys.argv[1:]
    settings = WorkerSettings("node", name, connect=lambda: connect_to_store(Path(store), "detector"), state_interval_s=0.1)
    return asyncio.run(_serve(settings, Counter()))


if __name__ == "__main__":
    sys.exit(main())
