"""The Faust consumer: leases decide what it reads, feeds read it, frames hand it over; committed offsets are the broker's to keep.

Offsets are stream sequences and have gaps, so what was delivered and what was acknowledged are matched in order, not counted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any

from faust.transport.base import Consumer as BaseConsumer
from faust.types import TP, ConsumerMessage
from mode import Service

from events.ports import LogError, LogUnavailable, StaleWriter
from infra.faust_transport import topics
from infra.faust_transport.feeds import Feed, Fetched
from infra.faust_transport.fences import last_of
from infra.faust_transport.frames import Frame
from infra.faust_transport.patience import patiently

_IDLE_S, _AGAIN_S = 0.05, 0.2


class Consumer(BaseConsumer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._topics: frozenset[str] = frozenset()
        self._assigned: set[TP] = set()
        self._feeds: dict[TP, Feed] = {}
        self._arrived = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._delivered: dict[TP, deque[int]] = defaultdict(deque)
        self._changed = asyncio.Event()
        #: What is assigned: when each partition was taken, and the topics.
        self._takings: dict[int, int] = {}
        self._topics_assigned: set[str] = set()
        #: A rebalance was begun and did not come to its end.
        self._owed = False

    # -- what is read --------------------------------------------------------------------------------------------------

    async def subscribe(self, topics: Iterable[str]) -> None:
        self._topics = frozenset(topics)
        self._subscribed.set()
        self._changed.set()

    def assignment(self) -> set[TP]:
        return set(self._assigned)

    def holds(self, partition: int) -> bool:
        """Whether this worker's lease on the partition is not over, by its own clock."""
        return partition in self.transport.leases.held

    def lose(self, partition: int) -> None:
        """Someone else was seen to have taken a partition: give it up now."""
        self.transport.leases.lose(partition)
        self._changed.set()

    @Service.task  # type: ignore[untyped-decorator]
    async def _renew_leases(self) -> None:
        await self._subscribed.wait()
        leases = self.transport.leases
        pause_s = leases.renew_s
        while not self.should_stop:
            await self.sleep(pause_s)
            began = self.loop.time()
            try:
                renewed = await leases.renew()
            except LogError as error:
                self.transport.fail(error)
                return
            pause_s = max(_IDLE_S, leases.renew_s - (self.loop.time() - began)) if renewed else _AGAIN_S

    @Service.task  # type: ignore[untyped-decorator]
    async def _keep_assignment(self) -> None:
        await self._subscribed.wait()
        leases = self.transport.leases
        while not self.should_stop and not self.transport.closing:
            self._changed.clear()
            try:
                beyond = await leases.poll()
                await self._reassign(beyond)
            except StaleWriter:
                continue  # someone else took it between lease and fence
            except LogUnavailable:
                pass
            except LogError as error:
                self.transport.fail(error)
                return
            try:
                await asyncio.wait_for(self._changed.wait(), leases.poll_s)
            except TimeoutError:
                pass

    async def _reassign(self, beyond: frozenset[int]) -> None:
        leases, fences = self.transport.leases, self.transport.fences
        takings = {p: taking for p, taking in leases.takings.items() if p not in beyond}
        if takings == self._takings and self._topics_assigned == self._all_topics() and not self._owed:
            return
        self._owed = True
        still = {p for p, taking in leases.takings.items() if self._takings.get(p) == taking}
        lost = frozenset(set(self._takings) - still)
        if self._takings and self.app.before_rebalance is not None:
            await self.app.before_rebalance(lost)
        await leases.release(beyond)
        takings, wanted = leases.takings, self._all_topics()
        assigned = {TP(topic, p) for p in takings for topic in wanted}
        kept = {tp for tp in self._assigned & assigned if self._takings.get(tp.partition) == takings[tp.partition]}
        for tp in self._assigned - kept:
            fences.drop(tp)
        self._takings = {p: taking for p, taking in self._takings.items() if takings.get(p) == taking}
        for tp in sorted(assigned - kept):
            try:
                await fences.take(tp)
            except StaleWriter:
                leases.lose(tp.partition)
                raise
        self._takings, self._topics_assigned = takings, wanted
        self.app.on_rebalance_start()
        self.app.consumer_generation_id += 1
        generation = self.app.consumer_generation_id
        await self.on_partitions_revoked(self._assigned - kept)
        for tp in self._assigned - kept:
            self._feeds.pop(tp).close()
        self._assigned = assigned
        for tp in assigned:
            if tp not in self._feeds:
                self._feeds[tp] = self.transport.feed(tp, self._arrived.set)
        self._owed = False
        await self.on_partitions_assigned(set(assigned), generation)

    def _all_topics(self) -> set[str]:
        return set(self._topics) | set(self.app.tables.changelog_topics)

    async def let_go(self) -> None:
        """The end: leases and membership are given back, so that others take over at once."""
        for feed in self._feeds.values():
            feed.close()
        await self.transport.leases.close()

    # -- reading --------------------------------------------------------------------------------------------------------

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> dict[TP, list[Fetched]]:
        """What waits now: a frame of each telemetry partition, single records of changelogs. Taking and handing over happen
        without a pause in between, so no seek can come between them."""
        deadline = self.loop.time() + timeout
        frame_max = self.app.nats.frame_records_max
        wanted = sorted(active_partitions if active_partitions is not None else self._assigned)
        while not self.should_stop:
            self._arrived.clear()
            found: dict[TP, list[Fetched]] = {}
            if self._may_grow(wanted, frame_max):
                await asyncio.sleep(self.app.nats.linger_s)
            for tp in wanted:
                feed = self._feeds.get(tp)
                if feed is None:
                    continue
                if feed.error is not None:
                    self.transport.fail(feed.error)
                    return {}
                feed.start()
                if feed.waiting:
                    if topics.is_source(tp.topic):
                        found[tp] = [feed.take(frame_max)]
                    else:
                        found[tp] = [feed.take(1) for _ in range(min(256, feed.waiting))]
            left = deadline - self.loop.time()
            if found or left <= 0:
                return found
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return {}
        return {}

    def _may_grow(self, wanted: list[TP], frame_max: int) -> bool:
        """Whether something waits and yet no frame would be full. Changelogs are read through without delay."""
        if not all(topics.is_source(tp.topic) for tp in wanted):
            return False
        most = max((self._feeds[tp].waiting for tp in wanted if tp in self._feeds), default=0)
        return 0 < most < frame_max

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, Any]]:
        """Unlike Faust's own: what a seek has overtaken is not delivered, and what can't be delivered now is put back."""
        if not self.flow_active:
            await self.wait(self.can_resume_flow)
        active = self._get_active_partitions()
        if not active:
            await self.sleep(_IDLE_S)
            return
        records = await self._getmany(active, timeout)
        generation = self.app.consumer_generation_id
        undelivered: dict[TP, list[Fetched]] = {}
        for tp, fetched in self.scheduler.iterate(records):
            feed = self._feeds.get(tp)
            if feed is None or fetched.epoch != feed.epoch:
                continue
            deliverable = tp in self._active_partitions or tp in self._buffered_partitions
            if not self.flow_active or not deliverable or tp in undelivered or generation != self.app.consumer_generation_id:
                undelivered.setdefault(tp, []).append(fetched)
                continue
            yield tp, self._to_message(tp, fetched)
        for tp, rest in undelivered.items():
            for fetched in reversed(rest):
                self._feeds[tp].put_back(fetched) if tp in self._feeds else None

    async def _drain_messages(self, fetcher: Any) -> None:
        """Faust's own also keeps a read offset, which a seek during a delivery sets back and the delivery then overwrites."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                async for tp, message in self.getmany(timeout=1.0):
                    if self.should_stop or fetcher.should_stop:
                        return
                    if self.app.topics.acks_enabled_for(tp.topic):
                        self._delivered[tp].append(message.offset)
                    await self.wait_first(self.callback(message), self.suspend_flow.wait())
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise
        except Exception as error:
            self.transport.fail(error)
            raise

    def _to_message(self, tp: TP, fetched: Fetched) -> ConsumerMessage:
        last = fetched.records[-1]
        is_frame = topics.is_source(tp.topic)
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            last.sequence,
            timestamp=last.time_ns / 1e9,
            timestamp_type=0,
            headers=None,
            key=None if is_frame else topics.key_of(last.subject),
            value=Frame(fetched.records, fetched.after) if is_frame else last.data,
            checksum=None,
            serialized_key_size=0,
            serialized_value_size=0,
            tp=tp,
            generation_id=self.app.consumer_generation_id,
        )

    # -- places ---------------------------------------------------------------------------------------------------------

    async def _seek(self, partition: TP, offset: int) -> None:
        feed = self._feeds.get(partition)
        if feed is not None:
            feed.seek(offset or 0)
            self._forget(partition)
            self._arrived.set()

    async def seek_wait(self, partitions: Mapping[TP, int]) -> None:
        for tp, offset in partitions.items():
            await self.seek(tp, offset)

    async def seek_to_beginning(self, *partitions: TP) -> None:
        for tp in partitions:
            await self.seek(tp, 0)

    async def seek_to_committed(self) -> dict[TP, int]:
        """Of telemetry only: a changelog's place is recovery's to say."""
        sources = {tp for tp in self._assigned if topics.is_source(tp.topic)}
        ends = {topic: await self.transport.last_sequence(topic) for topic in {tp.topic for tp in sources}}
        committed = self.transport.fences.committed
        offsets = {tp: min(committed(tp), ends[tp.topic] + 1) for tp in sources}  # a broker may have lost its end
        for tp, offset in offsets.items():
            await self._seek(tp, offset)
        return offsets

    async def position(self, tp: TP) -> int | None:
        feed = self._feeds.get(tp)
        return None if feed is None else feed.position

    async def earliest_offsets(self, *partitions: TP) -> dict[TP, int | None]:
        return dict.fromkeys(partitions, 1)

    async def highwaters(self, *partitions: TP) -> dict[TP, int | None]:
        """One past the last message of each; None for an empty one."""
        found: dict[TP, int | None] = {}
        for tp in partitions:
            what = (self.transport.nc, topics.stream_of(tp.topic), topics.subjects_of(tp.topic, tp.partition))
            last = await patiently(partial(last_of, *what), self.app.nats.patience_s)
            found[tp] = last.sequence + 1 if last.sequence else None
        return found

    def highwater(self, tp: TP) -> int:
        return 0

    def topic_partitions(self, topic: str) -> int | None:
        partitions: int = self.app.nats.partitions
        return partitions

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    def key_partition(self, topic: str, key: bytes | None, partition: int | None = None) -> int | None:
        if partition is not None or key is None:
            return partition
        found: int = self.app.producer.key_partition(topic, key).partition
        return found

    async def create_topic(self, topic: str, partitions: int, replication: int, **_options: Any) -> None:
        await self.transport.check(topic)

    # -- acknowledging ----------------------------------------------------------------------------------------------------

    def ack(self, message: Any) -> bool:
        """An acknowledgement from before a rebalance speaks of frames that are read again in other pieces."""
        if message.generation_id != self.app.consumer_generation_id:
            return False
        acked: bool = super().ack(message)
        return acked

    def _forget(self, tp: TP) -> None:
        self._delivered[tp].clear()
        self._acked_index[tp].clear()
        self._acked[tp].clear()

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Sequences of other subjects are no gap."""

    def _new_offset(self, tp: TP) -> int | None:
        """One past the last of the frames that were acknowledged without a hole since the last commit."""
        delivered, acked = self._delivered[tp], self._acked_index[tp]
        last = None
        while delivered and delivered[0] in acked:
            last = delivered.popleft()
            acked.discard(last)
        self._acked[tp].clear()
        return None if last is None else last + 1

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        for tp, offset in offsets.items():
            try:
                await self.transport.fences.commit(tp, offset)
            except StaleWriter:
                self.lose(tp.partition)
            except LogUnavailable:
                pass  # an offset is where reading starts again, no more: the next commit says it anew
        return True
