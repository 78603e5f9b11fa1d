"""Feeds: one partition's records read ahead of Faust, up to a bound, in stream order, from a place that can be changed at any time.

A seek begins a new epoch. What was taken before it carries the old one, and is neither delivered nor put back: that is what makes
a seek during a fetch harmless.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from events.ports import LogError, Record
from infra.bus import BusClient
from infra.jetstream import JetStreamLog


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records taken together. `after`: where the feed stood before them."""

    epoch: int
    after: int
    records: list[Record]


class Feed:
    def __init__(self, nc: BusClient, stream: str, subjects: str, waiting_max: int, arrived: Callable[[], object]) -> None:
        self._log, self._subjects, self._waiting_max, self._arrived = (
            JetStreamLog(nc, stream),
            (subjects,),
            waiting_max,
            arrived,
        )
        self._waiting: deque[Record] = deque()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._after: int | None = None
        self.epoch = 0
        self.error: Exception | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def position(self) -> int | None:
        """The sequence that is asked for next, None before the first seek."""
        return None if self._after is None else self._after + 1

    def seek(self, offset: int) -> None:
        """The next record taken is the first one with this sequence or a later one."""
        self.close()
        self.epoch += 1
        self._after = max(0, offset - 1)

    def start(self) -> None:
        """Reads on; nothing before the first seek."""
        if self._task is None and self._after is not None and self.error is None:
            self._task = asyncio.create_task(self._read(self._after, self.epoch))

    def take(self, records_max: int) -> Fetched:
        after, waiting = self._after or 0, self._waiting
        records = [waiting.popleft() for _ in range(min(records_max, len(waiting)))]
        if records:
            self._after = records[-1].sequence
        if len(waiting) < self._waiting_max and not self._room.is_set():
            self._room.set()
        return Fetched(self.epoch, after, records)

    def put_back(self, fetched: Fetched) -> None:
        """What was taken last and could not be delivered, unless a seek came in between."""
        if fetched.epoch == self.epoch and fetched.records:
            self._waiting.extendleft(reversed(fetched.records))
            self._after = fetched.after

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._waiting.clear()

    async def _read(self, after: int, epoch: int) -> None:
        waiting = self._waiting
        try:
            async with aclosing(self._log.read(after=after, subjects=self._subjects, follow=True)) as records:  # type: ignore[type-var]
                async for record in records:
                    if epoch != self.epoch:
                        return
                    waiting.append(record)
                    if len(waiting) == 1:
                        self._arrived()
                    while len(waiting) >= self._waiting_max:
                        self._room.clear()
                        await self._room.wait()
        except LogError as error:
            if epoch == self.epoch:
                self.error = error
                self._arrived()
