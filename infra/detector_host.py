"""The host of a detector in a Faust worker: frames in; outputs acknowledged, then state, then offsets, and never another order.

- An output carries a derived id, so whoever reads LEDGER skips one that it has. Within two minutes the broker drops a repeat; after
  a longer outage the same event may be stored twice, with the same id, and that is harmless.
- Claims are appended while folding goes on, all that wait together; a state is stored only when those that it stands on are.
- State is held in memory. What changed is written to the table at most once each `state_interval_s`, the clock last; frames are
  acknowledged only then.
- A processor that raises ends the worker: nothing of its frame was acknowledged, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from faust.types import TP

from events import subjects
from events.incident import DetectorStarted
from events.ports import LogError, LogUnavailable, StaleWriter
from events.registry import canonical, canonical_json, make
from infra.clock import new_event_id, wall_ns
from infra.faust_transport import topics
from infra.faust_transport.appends import Append
from infra.partition_state import PartitionState, split_key
from processors.detector import Detector

log = logging.getLogger("keepstep.detector")

#: Claims folded and not yet acknowledged; beyond it folding waits for the bus.
CLAIMS_MAX = 2048
#: Frames folded and not yet acknowledged, a partition; beyond it folding waits for the table.
UNSTORED_FRAMES_MAX = 4096


class _Part:
    def __init__(self, state: PartitionState) -> None:
        self.state = state
        #: Frames whose outputs are acknowledged and whose state is not stored yet.
        self.unstored: list[Any] = []


class DetectorHost:
    def __init__(
        self, app: Any, table: Any, detector: Detector[Any], *, topic: str, state_interval_s: float, code_version: str
    ) -> None:
        self.app, self.table, self.detector = app, table, detector
        self.topic, self.state_interval_s, self.code_version = topic, state_interval_s, code_version
        self.records = 0
        self._parts: dict[int, _Part] = {}
        #: The assignment whose states are in `_parts`, and the last one that is over.
        self._generation = self._over = 0
        self._folding = asyncio.Lock()
        self._storing = asyncio.Lock()
        self._stored = asyncio.Event()
        #: Claims of folded frames that are not acknowledged yet, with their partitions; what folds meanwhile is appended with them.
        self._claims: list[tuple[int, Append]] = []
        self._appending = asyncio.Lock()
        self._claimed = asyncio.Event()
        self._closed = False
        app.before_rebalance = self.before_rebalance

    # -- frames ---------------------------------------------------------------------------------------------------------

    async def take(self, event: Any) -> None:
        """One frame. An error that isn't of the bus's making ends the worker."""
        try:
            async with self._folding:
                if not self._closed:
                    await self._take(event)
        except StaleWriter:
            self.app.consumer.lose(event.message.partition)
        except Exception as error:
            self._closed = True
            self.app.transport.fail(error)

    async def _take(self, event: Any) -> None:
        message = event.message
        partition, frame = message.partition, event.value
        generation = message.generation_id
        if generation != self.app.consumer_generation_id or generation == self._over or not self.app.consumer.holds(partition):
            return
        if self._generation != generation:
            await self._begin(generation)
        part = self._parts.get(partition)
        if part is None:
            return
        state = part.state
        if frame.after > state.sequence:
            log.warning("partition %d: reading goes back to %d, up to where its state is stored", partition, state.sequence)
            await self.app.consumer.seek(TP(self.topic, partition), state.sequence + 1)
            return
        out = await state.feed(frame)
        if out:
            self._claims += ((partition, one) for one in out)
            self._claimed.set()
            if len(self._claims) > CLAIMS_MAX:
                await self._append_claims()
        self.records += len(frame)
        frame.clear()  # only its acknowledgement is wanted from here on
        part.unstored.append(event)
        while len(part.unstored) >= UNSTORED_FRAMES_MAX and not self._closed:
            self._stored.clear()
            self._folding.release()
            try:
                await self._stored.wait()
            finally:
                await self._folding.acquire()

    async def _begin(self, generation: int) -> None:
        """After an assignment: every partition's state as the recovered table has it, and a word about it in LEDGER."""
        self._parts.clear()
        assigned = sorted({tp.partition for tp in self.app.consumer.assignment()})
        stored: dict[int, list[tuple[bytes, bytes]]] = {partition: [] for partition in assigned}
        for key, value in self.table.data.items():
            partition, _ = split_key(key)
            if partition in stored:
                stored[partition].append((key, value))
        stream = topics.stream_of(self.topic)
        last_sequence = await self.app.transport.last_sequence(self.topic)
        for partition in assigned:
            state = PartitionState(self.detector, partition, stream)
            state.restore(stored[partition])
            if state.clamp(last_sequence):
                log.warning(
                    "partition %d: %s ends at %d, before what was folded: the broker lost history",
                    partition,
                    stream,
                    last_sequence,
                )
            self._parts[partition] = _Part(state)
        await self._announce(assigned)
        self._generation = generation

    async def _announce(self, partitions: list[int]) -> None:
        settings = self._parts[partitions[0]].state.fold.clock.settings
        fact = DetectorStarted(
            detector=self.detector.name,
            worker=self.app.nats.worker,
            partitions=tuple(partitions),
            code_version=self.code_version,
            settings=canonical_json(settings.model_dump(mode="json")).decode(),
        )
        source = f"detector/{self.detector.name}"
        event = make(fact, id=new_event_id(), source=source, subject=self.app.nats.worker, time=wall_ns())
        subject = subjects.ledger(subjects.FLEET, "detector", fact.kind())
        await self.app.transport.appender.append([Append(subject, canonical(event), {"Nats-Msg-Id": event.id})])

    async def _append_claims(self) -> None:
        """All claims so far. Those of a partition that was lost are its new owner's to make."""
        async with self._appending:
            while self._claims:
                claims, self._claims = self._claims, []
                try:
                    held = {partition: self.app.consumer.holds(partition) for partition, _ in claims}
                    for partition in (partition for partition, holds in held.items() if not holds):
                        self.app.consumer.lose(partition)
                    kept = [(partition, one) for partition, one in claims if held[partition]]
                    if kept:
                        still = partial(self._all_held, {partition for partition, _ in kept})
                        await self.app.transport.appender.append([one for _, one in kept], still=still)
                except StaleWriter:  # one of the partitions went meanwhile: the others' again, known by their ids
                    self._claims = [*claims, *self._claims]
                except BaseException:
                    self._claims = [*claims, *self._claims]
                    raise

    def _all_held(self, partitions: set[int]) -> bool:
        return all(map(self.app.consumer.holds, partitions))

    async def keep_appending(self) -> None:
        """Appends what is claimed, as it comes, until cancelled."""
        while not self._closed:
            await self._claimed.wait()
            self._claimed.clear()
            try:
                await self._append_claims()
            except LogError as error:
                self._closed = True
                self.app.transport.fail(error)
                return

    # -- state ------------------------------------------------------------------------------------------------------------

    async def keep_storing(self) -> None:
        """Writes what changed, each partition once each `state_interval_s`, until cancelled. One after the other, so that claims never
        wait for the states of all nodes at once."""
        while not self._closed:
            partitions = sorted(self._parts) or [-1]
            for partition in partitions:
                await asyncio.sleep(self.state_interval_s / len(partitions))
                try:
                    await self.store((partition,))
                except LogError as error:
                    self._closed = True
                    self.app.transport.fail(error)
                    return

    async def store(self, only: Iterable[int] | None = None) -> None:
        """State, then offsets, of every partition, or of those. Raises LogUnavailable, LogError; a partition that another worker
        took is given up."""
        async with self._storing:
            if self._closed:
                return
            asked = set(self._parts if only is None else only)
            async with self._folding:
                await self._append_claims()
                wanted = [
                    (partition, part.state.snapshot(), part.unstored)
                    for partition, part in self._parts.items()
                    if partition in asked and part.state.is_dirty
                ]
                for partition, _, _ in wanted:
                    self._parts[partition].unstored = []
            results = await asyncio.gather(*(self._store(*one) for one in wanted), return_exceptions=True)
            self._stored.set()
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            if wanted:
                await self.app.consumer.commit()

    async def _store(self, partition: int, snapshot: Any, events: list[Any]) -> None:
        tp = TP(self.table.changelog_topic.get_topic_name(), partition)
        producer, data = self.app.producer, self.table.data
        try:
            if snapshot.keys:
                await producer.write(tp, snapshot.keys)
            await producer.write(tp, [snapshot.clock])
        except StaleWriter as error:
            log.warning("partition %d is another worker's now: %s", partition, error)
            self._parts.pop(partition, None)
            self.app.consumer.lose(partition)
            return
        for key, value in (*snapshot.keys, snapshot.clock):
            data[key] = value
        for event in events:
            event.ack()

    async def before_rebalance(self, lost: frozenset[int]) -> None:
        """What is folded is stored before partitions change hands; of those that are lost already, nothing is."""
        for partition in lost:
            self._parts.pop(partition, None)
        try:
            await self.store()
        except LogUnavailable as error:
            log.warning("state could not be stored before partitions change hands; it is read again: %s", error)
        self._over = self.app.consumer_generation_id
        self._parts.clear()

    async def close(self, *, store: bool) -> None:
        """No more frames. With `store`, all that is folded is stored and committed first."""
        if store:
            async with self._folding:
                pass
            await self.store()
        self._closed = True
