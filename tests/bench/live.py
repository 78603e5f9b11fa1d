"""What the live benchmarks stand on: an embedded bus, the detectors and the decider as the processes they are, a fleet that is only
its telemetry, and whoever carries out intents for it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from events import subjects
from events.action import OutcomeRecorded
from events.decision import DeciderStarted, IntentIssued
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import DetectorStarted
from events.job import JobDeclared, Place
from events.ports import DEADLETTER, LEDGER, Record
from events.registry import canonical, make, parse
from infra.bus import BusClient
from infra.catalogue_files import catalogue_text
from infra.clock import new_event_id, wall_ns
from infra.embedded import EmbeddedServer
from infra.faust_transport import topics
from infra.home import Address, Home
from infra.jetstream import JetStreamLog
from infra.partition_state import split_key
from infra.pipeline import adopt, say
from infra.publisher import Publisher
from infra.streams import api, ensure_streams
from infra.supervise import Supervisor, last_line, module
from processors import catalogue
from processors.node import node_detector
from processors.node_health import NodeState

BOOT = "4b0ef2a1-5a1c-4f0e-9d51-000000000000"
JOB = "pretrain"
START_S_MAX = 90.0


def stage(text: str) -> None:
    """What a benchmark is about, on stderr: its figures alone go to stdout."""
    print(f"bench {time.strftime('%H:%M:%S')}: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Ledger:
    """All of LEDGER as it comes."""

    log: JetStreamLog
    records: list[tuple[Record, AnyEvent]] = field(default_factory=list)
    on_event: list[Callable[[Record, AnyEvent], None]] = field(default_factory=list)

    async def follow(self) -> None:
        async with aclosing(self.log.read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                event = parse(record.data)
                self.records.append((record, event))
                for hear in self.on_event:
                    hear(record, event)

    def of(self, kind: type[Fact]) -> list[tuple[Record, AnyEvent]]:
        return [(record, event) for record, event in self.records if isinstance(event.data, kind)]


@dataclass(slots=True)
class Plane:
    """The control plane that runs. `admin` may do everything on the bus."""

    home: Home
    admin: BusClient
    supervisor: Supervisor
    ledger: Ledger
    server: EmbeddedServer

    async def until(self, true: Callable[[], bool], within_s: float, what: str) -> None:
        """Raises RuntimeError with what the parts said last."""
        end_s = time.monotonic() + within_s
        while not true():
            self.supervisor.check()
            if time.monotonic() > end_s:
                said = "; ".join(f"{name}: {last_line(child.log)}" for name, child in self.supervisor.children.items())
                raise RuntimeError(f"{what} did not come within {within_s:g} s ({said})")
            await asyncio.sleep(0.02)

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far, by part."""
        pids = {name: child.pid for name, child in self.supervisor.children.items()} | {"nats-server": self.server.pid}
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items() if pid}

    async def declare(self, nodes: list[Place], standbys: list[Place]) -> None:
        fact = JobDeclared(
            job=JOB, nodes=tuple(nodes), standbys=tuple(standbys), dp=len(nodes), command=("python", "train.py"), author="bench"
        )
        await say(self.ledger.log, fact, JOB)

    async def stored(self, stream: str, pattern: str) -> int:
        """How many messages of a subject a stream holds."""
        total: int = 0
        offset: int = 0
        while True:
            answer = await api(self.admin, f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": offset})
            found = answer.get("state", {}).get("subjects") or {}
            total, offset = total + sum(found.values()), offset + len(found)
            if not found or offset >= int(answer.get("total", 0)):
                return total

    async def letters(self) -> int:
        last: int = await JetStreamLog(self.admin, DEADLETTER).last_sequence()
        return last


@asynccontextmanager
async def control_plane(policy: str) -> AsyncIterator[Plane]:
    """The bus and the processes that decide; not the actuators, since no machine stands behind these nodes."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        home = Home(Path(folder))
        supervisor = Supervisor(home.logs)
        server = EmbeddedServer(home.bus, start_s_max=30)
        await asyncio.to_thread(server.start)
        admin: BusClient | None = None
        following: asyncio.Task[None] | None = None
        try:
            admin = await Address(home).connect("admin")
            await ensure_streams(admin)
            await adopt(admin, policy, "bench")
            stage("starting detectors and decider")
            where = ("--home", str(home.path))
            for which in ("node", "job"):
                arguments = module("infra.detector_worker", *where, "--detector", which, "--worker", which)
                await supervisor.start(f"detector-{which}", arguments)
            await supervisor.start("decider", module("infra.decider_service", *where))
            plane = Plane(home, admin, supervisor, Ledger(JetStreamLog(admin, LEDGER)), server)
            following = asyncio.create_task(plane.ledger.follow())
            await plane.until(
                lambda: len(plane.ledger.of(DetectorStarted)) >= 2 and bool(plane.ledger.of(DeciderStarted)),
                START_S_MAX,
                "the detectors' and the decider's start",
            )
            yield plane
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await supervisor.stop_all()
            if admin is not None:
                await admin.close()
            await asyncio.to_thread(server.stop)


@dataclass(slots=True)
class Executor:
    """Stands for actuators and machines: every intent is done at once. `attempt` and `places` are what now runs."""

    log: JetStreamLog
    attempt: int = 0
    places: list[str] = field(default_factory=list)
    done: int = 0
    notified: list[str] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def hear(self, record: Record, event: AnyEvent) -> None:
        intent = event.data
        if not isinstance(intent, IntentIssued):
            return
        if intent.verb == "start_attempt":
            self.attempt, self.places = intent.attempt, [place.node for place in intent.places]
        elif intent.verb == "notify":
            self.notified.append(intent.text)
        task = asyncio.create_task(self._outcome(event, intent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _outcome(self, event: AnyEvent, intent: IntentIssued) -> None:
        fact = OutcomeRecorded(key=intent.key, incident=intent.incident, job=intent.job, verb=intent.verb, result="done")
        made = make(
            fact, id=derived_id("actuator", intent.job, event.id, fact.kind(), 0), source="actuator", subject=intent.job,
            time=event.time, causes=(event.id,), job=intent.job, attempt=intent.attempt,
        )  # fmt: skip
        await self.log.append(subjects.ledger(intent.job, "actuator", fact.kind()), canonical(made), message_id=made.id)
        self.done += 1


@dataclass(slots=True)
class Source:
    """What nodes' agents would publish, with running numbers a producer, and how much of it was."""

    publisher: Publisher
    published: dict[str, int] = field(default_factory=lambda: {"node": 0, "job": 0})
    numbers: dict[str, int] = field(default_factory=dict)
    again: int = 0

    async def observe(
        self, node: str, producer: str, fact: Fact, *, job: str = "", attempt: int = 0, of_job: bool = False
    ) -> str:
        """Publishes one observation, returns its id."""
        source = f"node/{node}/{producer}"
        self.numbers[source] = number = self.numbers.get(source, 0) + 1
        event = make(
            fact, id=new_event_id(), source=source, subject=node, time=wall_ns(), bootid=BOOT, number=number, job=job, attempt=attempt
        )  # fmt: skip
        where = subjects.telemetry_job(node, job, fact.kind()) if of_job else subjects.telemetry_node(node, fact.kind())
        await self.publisher.publish(where, canonical(event))
        self.published["job" if of_job else "node"] += 1
        return event.id

    async def settle(self) -> None:
        """Waits for every acknowledgement; what failed is sent again, as an agent would from its spool. Raises RuntimeError."""
        for _ in range(20):
            failed = await self.publisher.drain()
            if not failed:
                return
            for one in failed:
                self.again += 1
                await self.publisher.publish(one.subject, one.data, one.headers)
        raise RuntimeError("the bus did not take every observation")


async def folded(plane: Plane) -> dict[str, NodeState]:
    """What the node detector has stored so far, by node."""
    detector = node_detector(catalogue.parse(catalogue_text(), examples=False))
    states: dict[str, NodeState] = {}
    async for record in JetStreamLog(plane.admin, "KS_CHANGELOG_NODE").read(subjects=("ks.changelog.node.*.*",)):
        if ".fence." in record.subject:
            continue
        _, node = split_key(topics.key_of(record.subject))
        if node is not None:
            states[node] = detector.load(node, json.loads(record.data)["state"])[0]
    return states


@contextmanager
def quiet_machine() -> Iterator[dict[str, Any]]:
    """The load beside the figure: what else ran here while it was measured."""
    before = os.getloadavg()[0]
    load: dict[str, Any] = {}
    yield load
    load.update(load_before=round(before, 1), load_after=round(os.getloadavg()[0], 1))
