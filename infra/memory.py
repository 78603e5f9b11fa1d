"""The log in memory, for tests and simulation: the semantics of JetStreamLog without a server, and a clock moved by hand.

One MemoryBus holds the streams; what a stream stores, transforms and refuses follows infra/streams.py. Nothing here waits or
asks for the time: `advance` is the only way that time passes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from events.clock import NS
from events.ports import (
    DEADLETTER,
    LEDGER,
    TELEMETRY_JOB,
    TELEMETRY_NODE,
    Ack,
    Expect,
    LogError,
    Record,
    StaleWriter,
)
from events.subjects import JOB, NODE, PARTITIONS, matches, partition, settings, tick, token

DUPLICATE_WINDOW_NS = 120 * NS
PAYLOAD_BYTES_MAX = 1 << 20
#: Midnight of 2026-01-01, so that a simulation's times look like times.
START_NS = 1_767_225_600 * NS

_SUBJECTS: Mapping[str, tuple[str, ...]] = {
    TELEMETRY_NODE: ("telemetry.*.node.*", settings(NODE, "*")),
    TELEMETRY_JOB: ("telemetry.*.job.*.*", settings(JOB, "*")),
    LEDGER: ("ledger.*.*.*",),
    DEADLETTER: ("deadletter.>",),
}
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*\Z")


def stored_subject(stream: str, subject: str) -> str:
    """The subject under which a stream stores a message (its subject transform)."""
    parts = subject.split(".")
    if stream == TELEMETRY_NODE and matches(subject, "telemetry.*.node.*"):
        return f"{NODE}.{partition(parts[1])}.{parts[1]}.{parts[3]}"
    if stream == TELEMETRY_JOB and matches(subject, "telemetry.*.job.*.*"):
        return f"{JOB}.{partition(parts[3])}.{parts[1]}.{parts[3]}.{parts[4]}"
    return subject


@dataclass(slots=True)
class _Stream:
    records: list[Record] = field(default_factory=list)
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)  # message id -> (sequence, time)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(order=True, slots=True)
class _Timer:
    at_ns: int
    number: int
    subject: str = field(compare=False)
    data: bytes = field(compare=False)


class MemoryBus:
    """Streams by name, one clock, timers and ticks. `log`, `timers`, `advance`."""

    def __init__(self, start_ns: int = START_NS, *, ticks: bool = False) -> None:
        self.now_ns = start_ns
        self._ticks, self._next_tick_ns = ticks, (start_ns // NS + 1) * NS
        self._streams: dict[str, _Stream] = {}
        self._timers: dict[str, _Timer] = {}
        self._number = 0

    def log(self, stream: str) -> MemoryLog:
        return MemoryLog(self, stream)

    def timers(self) -> MemoryTimers:
        return MemoryTimers(self)

    def records(self, stream: str) -> list[Record]:
        """Everything stored, in order: for a test to look at."""
        return list(self._stream(stream).records)

    def advance(self, by_ns: int) -> None:
        """Time passes: ticks and timers fire in the order of their times, each stored at its own time."""
        if by_ns < 0:
            raise ValueError("time does not go back")
        end_ns = self.now_ns + by_ns
        while True:
            due = min((t for t in self._timers.values() if t.at_ns <= end_ns), default=None)
            tick_due = self._ticks and self._next_tick_ns <= end_ns
            if tick_due and (due is None or self._next_tick_ns <= due.at_ns):
                self.now_ns = max(self.now_ns, self._next_tick_ns)
                self._next_tick_ns += NS
                self.tick()
            elif due is not None:
                self.now_ns = max(self.now_ns, due.at_ns)
                self._timers = {key: timer for key, timer in self._timers.items() if timer is not due}
                self.store(LEDGER, due.subject, due.data, {})
            else:
                break
        self.now_ns = end_ns

    def tick(self) -> None:
        """One tick into each partition of both telemetry streams, now."""
        from infra.streams import TICK_BODY

        for part in range(PARTITIONS):
            self.store(TELEMETRY_NODE, tick(NODE, part), TICK_BODY, {})
            self.store(TELEMETRY_JOB, tick(JOB, part), TICK_BODY, {})

    def store(self, stream: str, subject: str, data: bytes, headers: Mapping[str, str]) -> Record:
        """Stores without asking anything; each record is a nanosecond later than the one before."""
        own = self._stream(stream)
        time_ns = max(self.now_ns, own.records[-1].time_ns + 1 if own.records else 0)
        record = Record(stream, len(own.records) + 1, time_ns, stored_subject(stream, subject), data, dict(headers))
        own.records.append(record)
        waiters, own.waiters = own.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return record

    def set_timer(self, timer_id: str, at_ns: int, subject: str, data: bytes) -> None:
        self._number += 1
        self._timers[timer_id] = _Timer(at_ns, self._number, subject, data)
        if at_ns <= self.now_ns:
            self.advance(0)

    def _stream(self, stream: str) -> _Stream:
        return self._streams.setdefault(stream, _Stream())


class MemoryLog:
    """One stream of a MemoryBus; events.ports.EventLog."""

    def __init__(self, bus: MemoryBus | None = None, stream: str = LEDGER) -> None:
        self.bus = bus or MemoryBus()
        self._stream = stream

    @property
    def stream(self) -> str:
        return self._stream

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        expect: Expect | None = None,
    ) -> Ack:
        allowed = _SUBJECTS.get(self._stream)
        if not _SUBJECT.match(subject) or (allowed and not any(matches(subject, pattern) for pattern in allowed)):
            raise LogError(f"{self._stream} takes no message on {subject!r}; it stores {allowed}")
        if len(data) > PAYLOAD_BYTES_MAX:
            raise LogError(f"a message of {len(data)} bytes on {subject} is too large; the bus takes {PAYLOAD_BYTES_MAX}")
        if any(not (k.isascii() and v.isascii()) or "\n" in v or "\r" in v for k, v in (headers or {}).items()):
            raise LogError(f"a header of the message on {subject} is not plain ASCII; put other text into the data")
        own = self.bus._stream(self._stream)
        if message_id is not None:
            seen = own.seen.get(message_id)
            if seen is not None and self.bus.now_ns - seen[1] < DUPLICATE_WINDOW_NS:
                return Ack(seen[0], duplicate=True)
        if expect is not None:
            last = await self.last_sequence(expect.subjects)
            if last != expect.last_sequence:
                if message_id is not None and message_id in own.seen:
                    return Ack(own.seen[message_id][0], duplicate=True)
                raise StaleWriter(f"{self._stream}, {subject}: wrong last sequence: {last}; someone else wrote meanwhile")
        record = self.bus.store(self._stream, subject, bytes(data), headers or {})
        if message_id is not None:
            own.seen[message_id] = (record.sequence, record.time_ns)
        return Ack(record.sequence)

    async def read(self, *, after: int = 0, subjects: Sequence[str] = (), follow: bool = False) -> AsyncIterator[Record]:
        own = self.bus._stream(self._stream)
        end = len(own.records)
        position = max(after, 0)
        while follow or position < end:
            if position >= len(own.records):
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                own.waiters.append(waiter)
                await waiter
                continue
            record = own.records[position]
            position = record.sequence
            if not subjects or any(matches(record.subject, pattern) for pattern in subjects):
                yield record

    async def append_all(self, messages: Sequence[tuple[str, bytes, str]], *, expect: Expect | None = None) -> int:
        last = 0
        for subject, data, message_id in messages:
            ack = await self.append(subject, data, message_id=message_id, expect=expect)
            last = ack.sequence
            expect = Expect(expect.subjects, max(last, expect.last_sequence)) if expect else None
        return last

    async def last_sequence(self, subjects: str = ">") -> int:
        for record in reversed(self.bus._stream(self._stream).records):
            if matches(record.subject, subjects):
                return record.sequence
        return 0


class MemoryTimers:
    """Timers of a MemoryBus; events.ports.TimerService. They fire when `advance` passes their time."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus

    async def set_timer(self, timer_id: str, at_ns: int, job: str, kind: str, data: bytes) -> None:
        token(timer_id)
        self.bus.set_timer(timer_id, at_ns, f"ledger.{token(job)}.timer.{kind}", bytes(data))

    def advance(self, by_ns: int) -> None:
        self.bus.advance(by_ns)
