"""The way from a node to the bus: at once while it is there, through a bounded spool on disk while it is away.

Nothing a producer does waits here. Four ways, by what an observation is worth:

- ranks (their starts and exits): on disk before `put_durable` returns, since who told them forgets them then; in order;
- news (kernel lines, states, gaps): strictly in order, one in flight;
- bulk (training progress): in order, many in flight;
- beats: only the latest of each counts, so while the bus is away nothing of them is kept, and none waits behind a spool. That is
  no loss of evidence: that a node was there is what its next beat says again, and what was seen meanwhile is in the other two.

Whatever could not be kept is counted and reported (`on_dropped`) once the bus is back. What waited carries Keepstep-Held-Ns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from events.clock import NS
from events.ports import HELD_HEADER, LogUnavailable
from producers.spool import Observation, Spool, Waiting

__all__ = ["BULK", "NEWS", "RANKS", "Bus", "Observation", "Outbox", "Refused", "Waiting"]

RANKS = "ranks"
NEWS = "news"
BULK = "bulk"

#: In memory, before the disk: this many observations or bytes a lane.
QUEUE_MAX = 16_384
QUEUE_BYTES_MAX = 16 * 1024 * 1024
#: Told as held from here on: less is the bus's own latency.
_HELD_NS_MIN = 20_000_000
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 1.0
_DRAIN_BATCH = 256
#: An acknowledgement lost must not hold the next beat back: three of those would be silence.
_BEAT_TIMEOUT_S = 1.0


class Refused(Exception):
    """The bus will never take this observation, whoever tries (too long, not allowed): it is dropped and counted."""


class Bus(Protocol):
    """What an outbox needs of the bus."""

    @property
    def present(self) -> bool:
        """Whether trying is worth it."""
        ...

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Returns once it is stored. Raises LogUnavailable (try again later) and Refused (never again)."""
        ...


@dataclass(slots=True)
class _Queued:
    observation: Observation
    on_safe: Callable[[], None] | None


@dataclass(slots=True)
class _Lane:
    name: str
    in_flight_max: int
    spool: Spool
    queue: deque[_Queued] = field(default_factory=deque)
    queue_bytes: int = 0
    #: Dropped and not yet reported, beside the spool's own count.
    dropped: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Beat:
    latest: Callable[[], Observation] | None = None
    #: Numbered, sent, not acknowledged: goes again, the same bytes, before any newer one.
    unacknowledged: Observation | None = None


class Outbox:
    """`on_dropped(lane, count)`: report the loss of that many observations. `on_trouble(sentence)`: the spool can't be written."""

    def __init__(
        self,
        folder: Path,
        boot_id: str,
        bus: Bus,
        *,
        wall_ns: Callable[[], int],
        boot_ns: Callable[[], int],
        spool_bytes_max: int = 64 * 1024 * 1024,
        drain_per_s: float = 2000.0,
        on_dropped: Callable[[str, int], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.bus = bus
        self.on_dropped = on_dropped
        self.on_trouble = on_trouble
        self._boot_id = boot_id
        self._wall_ns = wall_ns
        self._boot_ns = boot_ns
        self._drain_per_s = drain_per_s
        # What is rare must not be lost to a flood of progress: half of the room is its own.
        quarter = spool_bytes_max // 4
        self._lanes = {
            RANKS: _Lane(RANKS, 1, Spool(folder / RANKS, boot_id, bytes_max=quarter)),
            NEWS: _Lane(NEWS, 1, Spool(folder / NEWS, boot_id, bytes_max=quarter)),
            BULK: _Lane(BULK, 64, Spool(folder / BULK, boot_id, bytes_max=spool_bytes_max - 2 * quarter)),
        }
        self._beats: dict[str, _Beat] = {}
        self._beat_wake = asyncio.Event()
        self._retry_at_ns = 0
        self._retry_s = _RETRY_S_MIN
        self._closing = False
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._tasks: list[asyncio.Task[None]] = []
        self._troubled = False

    # What producers call

    def put(self, lane: str, seen: Observation, on_safe: Callable[[], None] | None = None) -> None:
        """Takes an observation; `on_safe` is called once the bus or the disk has it."""
        into = self._lanes[lane]
        if len(into.queue) >= QUEUE_MAX or into.queue_bytes + len(seen.data) > QUEUE_BYTES_MAX:
            into.dropped += 1
            return
        into.queue.append(_Queued(seen, on_safe))
        into.queue_bytes += len(seen.data)
        into.wake.set()

    def put_durable(self, seen: Observation) -> None:
        """Takes an observation that is on disk when this returns (in memory alone if the disk refuses)."""
        lane = self._lanes[RANKS]
        try:
            lane.spool.append([seen])
        except OSError as error:
            self._trouble(f"can't write to {lane.spool.folder}: {error.strerror or error}; observations wait in memory")
            self.put(RANKS, seen)
        lane.wake.set()

    def beat(self, key: str, build: Callable[[], Observation]) -> None:
        """The latest beat of a key; `build` is called when it is sent."""
        self._beats.setdefault(key, _Beat()).latest = build
        self._beat_wake.set()

    @property
    def waiting(self) -> int:
        """Observations on disk, not on the bus yet."""
        return sum(lane.spool.pending for lane in self._lanes.values())

    # Life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(partial(self._run_lane, lane))) for lane in self._lanes.values()]
        self._tasks += [asyncio.create_task(self._keep(run)) for run in (self._run_beats, self._run_sync)]

    async def _keep(self, run: Callable[[], Awaitable[None]]) -> None:
        """A fault of ours in one lane is told, and ends neither it nor the others."""
        while not self._closing:
            try:
                await run()
            except Exception as error:
                self._troubled = False
                self._trouble(f"the outbox failed: {type(error).__name__}: {error}")
                await asyncio.sleep(1.0)

    async def close(self, grace_s: float = 1.0) -> None:
        """Sends what it can within `grace_s`, writes the rest to disk."""
        deadline = self._boot_ns() + int(grace_s * NS)
        while self._boot_ns() < deadline and self._trying() and any(lane.queue for lane in self._lanes.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._closing = True
        for lane in self._lanes.values():
            lane.wake.set()
        lanes, others = self._tasks[: len(self._lanes)], self._tasks[len(self._lanes) :]
        if lanes:
            await asyncio.wait(lanes, timeout=0.5)  # so that none is cut off in the middle of a write
        for task in (*lanes, *others):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for lane in self._lanes.values():
            await self._spill(lane)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().run_in_executor(self._disk, self._close_spools)
        self._disk.shutdown(wait=False)

    def _close_spools(self) -> None:
        for lane in self._lanes.values():
            lane.spool.close()

    # The lanes

    def _trying(self) -> bool:
        return self.bus.present and self._boot_ns() >= self._retry_at_ns

    def _failed(self) -> None:
        if self._boot_ns() < self._retry_at_ns:
            return  # one of many in flight that failed together
        self._retry_at_ns = self._boot_ns() + int(self._retry_s * NS)
        self._retry_s = min(_RETRY_S_MAX, self._retry_s * 2)

    def _held_ns(self, seen: Observation, boot_id: str) -> int:
        same_boot = boot_id == self._boot_id
        return max(0, self._boot_ns() - seen.boot_ns if same_boot else self._wall_ns() - seen.wall_ns)

    async def _publish(self, seen: Observation, boot_id: str) -> bool:
        """True if it is stored or never will be."""
        held_ns = self._held_ns(seen, boot_id)
        headers = {HELD_HEADER: str(held_ns)} if held_ns >= _HELD_NS_MIN else {}
        try:
            await self.bus.publish(seen.subject, seen.data, headers)
        except LogUnavailable:
            self._failed()
            return False
        except Refused as error:
            self._lanes[NEWS].dropped += 1
            self._trouble(f"the bus refused an observation on {seen.subject[:200]}: {error}")
            return True
        self._retry_s = _RETRY_S_MIN
        return True

    async def _run_lane(self, lane: _Lane) -> None:
        while not self._closing:
            if not lane.queue and not lane.spool.pending:
                if self._trying() and (lane.dropped or lane.spool.dropped):
                    await self._report_dropped(lane)
                await _wait(lane.wake, 1.0 if lane.dropped or lane.spool.dropped else None)
            elif not self._trying():
                if not lane.queue or not await self._spill(lane):
                    await _wait(lane.wake, 0.1)
                elif lane.spool.pending:
                    await asyncio.sleep(0.02)  # a batch's worth: one write for what comes together
            elif lane.spool.pending:
                await self._spill(lane)
                await self._drain(lane)
            else:
                await self._send(lane)

    async def _send(self, lane: _Lane) -> None:
        """What waits in memory, straight to the bus."""
        batch = [lane.queue[i] for i in range(min(lane.in_flight_max, len(lane.queue)))]
        if len(batch) == 1:
            stored = [await self._publish(batch[0].observation, self._boot_id)]
        else:
            stored = await asyncio.gather(*(self._publish(q.observation, self._boot_id) for q in batch))
        kept = []
        for queued, done in zip(batch, stored, strict=True):
            lane.queue.popleft()
            if done:
                lane.queue_bytes -= len(queued.observation.data)
                self._safe(queued)
            else:
                kept.append(queued)
        lane.queue.extendleft(reversed(kept))

    async def _spill(self, lane: _Lane) -> bool:
        """What waits in memory, to disk. False if the disk would not."""
        if not lane.queue:
            return True
        batch = list(lane.queue)
        before = lane.spool.pending + lane.spool.dropped
        loop = asyncio.get_running_loop()
        sentence = ""
        try:
            await loop.run_in_executor(self._disk, lane.spool.append, [q.observation for q in batch])
            written = len(batch)
        except OSError as error:
            written = lane.spool.pending + lane.spool.dropped - before
            sentence = f"can't spool observations to {lane.spool.folder}: {error.strerror or error}; they wait in memory"
        for queued in batch[:written]:
            lane.queue.popleft()
            lane.queue_bytes -= len(queued.observation.data)
            self._safe(queued)
        if sentence:
            self._trouble(sentence)
        else:
            self._troubled = False
        return not sentence

    async def _drain(self, lane: _Lane) -> None:
        """One batch from disk to the bus, in order, at a bounded rate."""
        loop = asyncio.get_running_loop()
        began_ns = self._boot_ns()
        size = _DRAIN_BATCH if lane.in_flight_max > 1 else 32
        try:
            batch = await loop.run_in_executor(self._disk, lane.spool.peek, size)
        except OSError as error:
            self._trouble(f"can't read the spool in {lane.spool.folder}: {error.strerror or error}")
            await asyncio.sleep(1.0)
            return
        sent = 0
        while sent < len(batch):
            window = batch[sent : sent + lane.in_flight_max]
            stored = await asyncio.gather(*(self._publish(w.observation, w.boot_id) for w in window))
            if not all(stored):
                sent += stored.index(False)
                break
            sent += len(window)
        with contextlib.suppress(OSError):  # read once more after a restart: repeats are known by their number
            await loop.run_in_executor(self._disk, lane.spool.advance, batch[:sent])
        if sent == len(batch) and (lane.dropped or lane.spool.dropped):
            await self._report_dropped(lane)
        took_s = (self._boot_ns() - began_ns) / NS
        await asyncio.sleep(max(0.0, sent / self._drain_per_s - took_s))

    async def _report_dropped(self, lane: _Lane) -> None:
        count, on_disk = lane.dropped + lane.spool.dropped, lane.spool.dropped
        lane.dropped = 0
        if self.on_dropped is not None and count:
            self.on_dropped(lane.name, count)
        if on_disk:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().run_in_executor(self._disk, lane.spool.reported, on_disk)

    @staticmethod
    def _safe(queued: _Queued) -> None:
        if queued.on_safe is not None:
            queued.on_safe()

    def _trouble(self, sentence: str) -> None:
        if not self._troubled and self.on_trouble is not None:
            self._troubled = True
            self.on_trouble(sentence)

    async def _run_sync(self) -> None:
        """What a machine that loses power would lose: a second."""
        while not self._closing:
            await asyncio.sleep(1.0)
            if any(lane.spool.pending for lane in self._lanes.values()):
                with contextlib.suppress(OSError):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._disk, lambda: [lane.spool.sync() for lane in self._lanes.values()])

    # The beats

    async def _run_beats(self) -> None:
        while not self._closing:
            await _wait(self._beat_wake, None)
            while any(beat.latest or beat.unacknowledged for beat in self._beats.values()):
                if self._trying():
                    await asyncio.gather(*(self._send_beat(beat) for beat in list(self._beats.values())))
                else:
                    await asyncio.sleep(0.05)

    async def _send_beat(self, beat: _Beat) -> None:
        if beat.unacknowledged is None:
            if beat.latest is None:
                return
            build, beat.latest = beat.latest, None
            beat.unacknowledged = build()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_TIMEOUT_S):
                if await self._publish(beat.unacknowledged, self._boot_id):
                    beat.unacknowledged = None


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    event.clear()
