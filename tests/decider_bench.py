"""A live decider on the log in memory, driven by a recorded ledger's inputs, and killed where a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from events.ports import LEDGER, Ack, EventLog, Record
from infra.decider_service import LiveDecider
from infra.memory import MemoryBus, MemoryLog
from processors.decider import is_own
from tests.stories import Story

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


class Killed(Exception):
    """The decider's process is gone."""


class Timers:
    """Keeps what it is told; the recording's own timer events are what fires."""

    def __init__(self) -> None:
        self.set: dict[str, tuple[int, str, bytes]] = {}

    async def set_timer(self, timer_id: str, at_ns: int, job: str, kind: str, data: bytes) -> None:
        self.set[timer_id] = (at_ns, job, data)


class KillingLog(MemoryLog):
    """Calls `before` and `after` around each append of what was decided (not of a takeover's announcement)."""

    before: Callable[[], None] = staticmethod(lambda: None)
    after: Callable[[], None] = staticmethod(lambda: None)

    async def append(self, subject: str, data: bytes, **more: Any) -> Ack:
        derived = is_own(subject)
        if derived:
            self.before()
        ack = await super().append(subject, data, **more)
        if derived:
            self.after()
        return ack


def told(path: Path) -> Story:
    """A story played to its end."""
    story = Story()
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith(("#", "    >")):
            story.tell(line)
    return story


def inputs_of(records: Iterable[Record]) -> list[Record]:
    """What others said; the takeovers of that run are not among it."""
    return [r for r in records if not is_own(r.subject) and not r.subject.endswith(".decider_started")]


def plain(records: Iterable[Record]) -> list[str]:
    """What was decided, without what depends on where in the ledger it stands; times in ms, since each record of the log in memory
    is a nanosecond later than the one before."""

    def rounded(key: str, value: Any) -> Any:
        return value // 1_000_000 if key.endswith("_ns") else value

    lines = []
    for record in records:
        if is_own(record.subject):
            event = json.loads(record.data)
            event["time"] = event["time"][:23]
            event["data"] = {k: rounded(k, v) for k, v in event["data"].items() if k not in ("trigger", "ledger_digest")}
            lines.append(f"{record.subject} {json.dumps(event, sort_keys=True)}")
    return lines


class Host:
    """Runs live deciders one after another on a bus: a new one takes over whenever the last was killed."""

    def __init__(self, log: Callable[[], EventLog], timers: Any) -> None:
        self.log, self.timers = log, timers
        self.terms = 0
        self.live: LiveDecider | None = None
        self.task: asyncio.Task[None] | None = None

    async def caught_up(self, sequence: Callable[[], int], terms_max: int = 1000) -> LiveDecider:
        """Returns when a living decider has answered everything."""
        for _ in range(1_000_000):
            if self.task is None or self.task.done():
                if self.task is not None and (error := self.task.exception()) and not isinstance(error, Killed):
                    raise error
                self.terms += 1
                assert self.terms <= terms_max, "too many terms"
                self.live = LiveDecider(self.log(), self.timers, worker=f"w{self.terms}", code_version="1")
                self.task = asyncio.create_task(self.live.run())
            assert self.live is not None
            if self.live.caught_up.is_set() and self.live.position >= sequence() and not self.task.done():
                return self.live
            await asyncio.sleep(0)
        raise AssertionError("the decider does not catch up")

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(BaseException):
                await self.task


async def drive(
    inputs: Sequence[Record], *, log: type[MemoryLog] = MemoryLog, times: int = 1, terms_max: int = 1000
) -> tuple[MemoryBus, Host]:
    """Gives the inputs to a live decider one by one, each `times` times; returns the bus with its ledger, decider stopped."""
    bus = MemoryBus(inputs[0].time_ns)
    host = Host(lambda: log(bus, LEDGER), Timers())
    for record in inputs:
        for _ in range(times):
            bus.now_ns = max(bus.now_ns, record.time_ns)
            bus.store(LEDGER, record.subject, record.data, {})
            await host.caught_up(lambda: len(bus.records(LEDGER)), terms_max)
    await host.stop()
    return bus, host
