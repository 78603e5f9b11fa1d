"""A tiny detector, telemetry for it, and what its claims must be: the tests' yardstick for the Faust transport and its host.

Also a program, `python -m tests.faust_workers URL KEY NAME`, so that a worker can be killed or stopped as a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nats.errors import Error as NatsError

from events import subjects
from events.incident import EvidenceMissing
from events.ports import LEDGER, TELEMETRY_NODE, LogUnavailable, Record
from events.presence import Heartbeat, Tick
from events.registry import canonical, make, parse
from infra.detector_worker import Worker, WorkerSettings, _serve
from infra.home import Address, Home
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


async def beat(bus: Bus, nodes: Sequence[str], count: int, first: int = 0, *, calm: bool = False) -> None:
    """`count` heartbeats of each node. Where the bus has trouble, it has it in the middle of a load that is not `calm`, and what was
    not acknowledged is sent again, as agents do."""
    publisher = Publisher(bus.admin)
    for number in range(first, first + count):
        if number == first + count // 2 and not calm:
            await bus.trouble()
        for node in nodes:
            event = make(
                Heartbeat(), id=f"{node}-{number}", source=f"node/{node}/heartbeat", subject=node, time=1, number=number
            )
            await _publish(bus, publisher, subjects.telemetry_node(node, "heartbeat"), canonical(event))
    failed = await publisher.drain()
    deadline = time.monotonic() + 60
    while failed and bus.is_troubled and time.monotonic() < deadline:
        for one in failed:
            await _publish(bus, publisher, one.subject, one.data)
        failed = await publisher.drain()
    assert failed == [] == await publisher.close()


async def _publish(bus: Bus, publisher: Publisher, subject: str, data: bytes) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await publisher.publish(subject, data)
        except LogUnavailable:
            if not bus.is_troubled or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def records(bus: Bus, stream: str, *wanted: str) -> list[Record]:
    return [record async for record in JetStreamLog(bus.admin, stream).read(subjects=wanted)]


async def expected(bus: Bus) -> dict[str, list[bytes]]:
    """What the whole telemetry gives, folded in memory, by key in order. A beat that was sent twice (its acknowledgement was lost) is
    counted twice and claimed once: the second claim has the first one's id."""
    detector: Detector[Any] = Counter()
    folds = {p: PartitionFold(detector) for p in range(subjects.PARTITIONS)}
    found: dict[str, list[bytes]] = {}
    seen: set[str] = set()
    for record in await records(bus, TELEMETRY_NODE):
        parts = record.subject.split(".")
        for p in folds if parts[0] == "clock" else (int(parts[1]),):
            for out in folds[p].feed(record)[0]:
                of_a_node = out.event.data.TYPE == EvidenceMissing.TYPE and out.event.subject != "clock"
                if of_a_node and out.event.id not in seen:
                    seen.add(out.event.id)
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
        with contextlib.suppress(LogUnavailable, NatsError):  # no leader just now
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
    if bus.is_troubled:
        wanted = sum(map(len, (await expected(bus)).values()))
    else:
        wanted = await count(bus, TELEMETRY_NODE, "tn.*.*.*") - but
    if await count(bus, LEDGER, f"ledger.*.detector.{EvidenceMissing.kind()}") < wanted:
        return False
    return sum(map(len, by_key(await claimed(bus)).values())) >= wanted


async def each_once(bus: Bus, beats: int) -> None:
    """LEDGER holds the claims that follow from the telemetry, in order, each once."""
    claims, wanted = await claimed(bus), await expected(bus)
    assert by_key(claims) == wanted
    assert len(claims) == sum(map(len, wanted.values())) == beats


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
                [sys.executable, "-m", "tests.faust_workers", bus.server.url, bus.key, name],
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
    url, key, name = sys.argv[1:]
    where = Address(Home(Path()), url, key)
    settings = WorkerSettings("node", name, connect=lambda: where.connect("detector", wait_s=30), state_interval_s=0.1)
    return asyncio.run(_serve(settings, Counter()))


if __name__ == "__main__":
    sys.exit(main())
