"""The Faust producer: writes to changelogs, each behind its partition's fence. Telemetry is the nodes' to write, never a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from faust.transport.base import Producer as BaseProducer
from faust.types import TP, RecordMetadata

from events import subjects
from infra.faust_transport import topics
from infra.faust_transport.appends import Append


class Producer(BaseProducer):  # type: ignore[misc]
    async def on_start(self) -> None:
        await self.transport.open()
        await super().on_start()

    async def on_stop(self) -> None:
        await super().on_stop()
        await self.transport.close()

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        timestamp: float | None,
        headers: Any,
        *,
        transactional_id: str | None = None,
    ) -> Awaitable[RecordMetadata]:
        return asyncio.ensure_future(self.send_and_wait(topic, key, value, partition, timestamp, headers))

    async def send_and_wait(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        timestamp: float | None,
        headers: Any,
        *,
        transactional_id: str | None = None,
    ) -> RecordMetadata:
        if partition is None:
            partition = self.key_partition(topic, key or b"").partition
        (sequence,) = await self.write(TP(topic, partition), [(key or b"", value or b"")])
        return RecordMetadata(topic, partition, TP(topic, partition), sequence)

    async def write(self, tp: TP, items: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Keys and values into a changelog's partition, all in flight together. Raises StaleWriter, LogUnavailable, LogError."""
        if topics.is_source(tp.topic):
            raise topics.NoSuchTopic(f"{tp.topic} is written by the nodes' agents, not by a worker")
        fences = self.transport.fences
        headers = fences.headers(tp)
        appends = [Append(topics.changelog_subject(tp.topic, tp.partition, key), value, headers) for key, value in items]
        written: list[int] = await self.transport.appender.append(
            appends, still=lambda: self.app.consumer.holds(tp.partition), in_flight_max=fences.in_flight_max(tp)
        )
        return written

    async def flush(self) -> None:
        await self.buffer.flush()

    async def create_topic(self, topic: str, partitions: int, replication: int, **_options: Any) -> None:
        """Streams are made in one place, by the admin (infra/streams.py); here is only looked whether this one is there."""
        await self.transport.check(topic)

    def key_partition(self, topic: str, key: bytes) -> TP:
        """As the server's `partition()` has it."""
        return TP(topic, subjects.partition(key.decode("utf-8", "surrogateescape"), self.app.nats.partitions))
