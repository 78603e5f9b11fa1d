"""Batches of appends through JetStream: all in flight together, each acknowledgement awaited, tried again while the bus is away.

Every message here may be stored twice without harm: an output carries its id, a table's write replaces itself behind its fence.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from events.ports import LogError, LogUnavailable, StaleWriter
from infra.batch import Message, NotAtomic, batches, store
from infra.bus import BusClient

IN_FLIGHT_MAX = 512
ACK_S_MAX = 5.0
_RETRY_S = 0.2
#: What is stored as a batch: claims into LEDGER, which syncs the disk each time. A table on one server is not synced, and its writes
#: may all be in flight; one with replicas takes one at a time behind a fence, or a batch.
_TOGETHER = "ledger."
_EXPECTED = ("Nats-Expected-Last-Subject-Sequence", "Nats-Expected-Last-Subject-Sequence-Subject")
_STALE = (10071,)
#: With replicas: another write of this id or that expects the same subject, an earlier try of this one perhaps, is not through yet.
#: Only its end tells what becomes of this one.
_IN_FLIGHT = (10158, 10164)
_TRANSIENT = (408, 429, 503)


@dataclass(frozen=True, slots=True)
class Append:
    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class _Batch:
    def __init__(self, appends: Sequence[Append]) -> None:
        self.appends = appends
        self.sequences = [0] * len(appends)
        self.left: dict[int, Append] = dict(enumerate(appends))
        self.error: LogError | None = None
        self.again: set[int] = set()
        self.wake = asyncio.Event()


def _into_ledger(appends: Sequence[Append]) -> list[int]:
    return [at for at, append in enumerate(appends) if append.subject.startswith(_TOGETHER)]


def _unfenced(message: Message) -> Message:
    """A batch is stored whole or not at all: its first message's expectation is all of theirs."""
    return message._replace(headers={name: value for name, value in message.headers.items() if name not in _EXPECTED})


class Appender:
    """One a connection. `open` before, `close` after."""

    def __init__(self, nc: BusClient, *, patience_s: float) -> None:
        self._nc, self._patience_s = nc, patience_s
        self._prefix, self._number = "", 0
        self._sent: dict[str, tuple[_Batch, int]] = {}
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        self._prefix = self._nc.new_inbox() + "."
        self._subscription = await self._nc.subscribe_raw(self._prefix + "*", self._take)
        self._nc.on_disconnect.add(self._on_disconnect)

    async def close(self) -> None:
        self._nc.on_disconnect.discard(self._on_disconnect)
        if self._subscription is not None:
            await self._nc.unsubscribe_raw(self._subscription)
            self._subscription = None

    async def append(
        self, appends: Sequence[Append], *, still: Callable[[], bool] = lambda: True, in_flight_max: int = IN_FLIGHT_MAX
    ) -> list[int]:
        """Stores all and returns their sequences. Raises StaleWriter for an expectation that did not hold, LogUnavailable after
        `patience_s` without any progress, LogError for what will never be taken. `still` false: StaleWriter at once.
        `in_flight_max` 1: a table with replicas, all behind one fence."""
        done: dict[int, int] = {}
        batched = range(len(appends)) if in_flight_max == 1 else _into_ledger(appends)
        if len(batched) > 1 and still():
            done.update(zip(batched, await self._together([appends[at] for at in batched], still), strict=False))
        left = [at for at in range(len(appends)) if at not in done]
        for start in range(0, len(left), in_flight_max):
            part = left[start : start + in_flight_max]
            done.update(zip(part, await self._append([appends[at] for at in part], still), strict=True))
        return [done[at] for at in range(len(appends))]

    async def _together(self, appends: Sequence[Append], still: Callable[[], bool]) -> list[int]:
        """As batches, each stored with one sync of the disk. What did not come to pass is left out: then one by one, and what is
        stored already is a repeat, known by its id, or replaces itself."""
        done: list[int] = []
        try:
            for part in batches([Message(a.subject, a.data, a.headers) for a in appends]):
                if not still():
                    break
                last = await store(self._nc, part[0].subject.partition(".")[0], [part[0], *map(_unfenced, part[1:])], ACK_S_MAX)
                done += range(last - len(part) + 1, last + 1)
        except (NotAtomic, LogUnavailable, StaleWriter):
            pass
        return done

    async def _append(self, appends: Sequence[Append], still: Callable[[], bool]) -> list[int]:
        batch = _Batch(appends)
        keys: dict[int, str] = {}
        give_up_s = time.monotonic() + self._patience_s
        try:
            wanted = list(batch.left)
            while batch.left:
                if not still():
                    raise StaleWriter("the lease on the partition is over")
                before = len(batch.left)
                for at in wanted:
                    if at in batch.left:
                        await self._send(batch, at, keys)
                wanted = await self._wait(batch)
                if len(batch.left) < before:
                    give_up_s = time.monotonic() + self._patience_s
                elif time.monotonic() > give_up_s:
                    left = next(iter(batch.left.values()))
                    raise LogUnavailable(f"no acknowledgement for {left.subject} within {self._patience_s:g} s: is the bus up?")
        finally:
            for key in keys.values():
                self._sent.pop(key, None)
        return batch.sequences

    async def _send(self, batch: _Batch, at: int, keys: dict[int, str]) -> None:
        self._sent.pop(keys.get(at, ""), None)
        self._number += 1
        key = keys[at] = str(self._number)
        self._sent[key] = (batch, at)
        append = batch.appends[at]
        try:
            await self._nc.publish(append.subject, append.data, reply=self._prefix + key, headers=dict(append.headers) or None)
        except MaxPayloadError:
            raise LogError(
                f"{len(append.data)} bytes on {append.subject} are more than the bus takes ({self._nc.max_payload})"
            ) from None
        except (NatsError, OSError):
            batch.again.add(at)

    async def _wait(self, batch: _Batch) -> list[int]:
        """Until all are stored, or some are to be sent again: those."""
        deadline_s = time.monotonic() + ACK_S_MAX
        while batch.left and not batch.again:
            batch.wake.clear()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return list(batch.left)
            try:
                await asyncio.wait_for(batch.wake.wait(), left_s)
            except TimeoutError:
                return list(batch.left)
            if batch.error is not None:
                raise batch.error
        again, batch.again = batch.again, set()
        if batch.error is not None:
            raise batch.error
        if batch.left:
            await asyncio.sleep(_RETRY_S)
        return sorted(again)

    def _take(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        batch, at = self._sent.pop(subject[len(self._prefix) :], (None, 0))
        if batch is None or at not in batch.left:
            return
        try:
            answer: Any = json.loads(data) if data else {"error": {"code": 503}}
            error = answer.get("error")
        except (ValueError, AttributeError):
            error = {"code": 503}
        if error is None:
            batch.sequences[at] = int(answer["seq"])
            del batch.left[at]
            if not batch.left:
                batch.wake.set()
            return
        append = batch.appends[at]
        why = f"{append.subject}: {error.get('description', 'no stream answers')} ({error.get('err_code', error.get('code'))})"
        if error.get("err_code") in _STALE:
            batch.error = batch.error or StaleWriter(f"{why}; someone else writes here")
        elif error.get("code") in _TRANSIENT or error.get("err_code") in _IN_FLIGHT:
            batch.again.add(at)
        else:
            batch.error = batch.error or LogError(why)
        batch.wake.set()

    def _on_disconnect(self) -> None:
        sent, self._sent = self._sent, {}
        for batch, at in sent.values():
            batch.again.add(at)
            batch.wake.set()
