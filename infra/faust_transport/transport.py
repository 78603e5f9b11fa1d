"""The Faust transport for `nats://`: one connection, and what consumer and producer share over it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from faust.transport.base import Transport as BaseTransport
from faust.types import TP

from events.ports import LogError
from infra.bus import BusClient
from infra.faust_transport import topics
from infra.faust_transport.appends import Appender
from infra.faust_transport.consumer import Consumer
from infra.faust_transport.feeds import Feed
from infra.faust_transport.fences import Fences
from infra.faust_transport.leases import Leases, this_process
from infra.faust_transport.patience import patiently
from infra.faust_transport.producer import Producer
from infra.streams import api


class Transport(BaseTransport):  # type: ignore[misc]
    """Of a `NatsApp`. `failure` is set by what this worker can't go on from."""

    Consumer = Consumer
    Producer = Producer
    default_port = 4222
    driver_version = "keepstep-nats"

    nc: BusClient
    appender: Appender
    fences: Fences
    leases: Leases

    def __init__(self, url: Any, app: Any, loop: Any = None) -> None:
        super().__init__(url, app, loop)
        self.failure: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self.closing = False
        self._open = False

    async def open(self) -> None:
        """Connects and joins the group. Raises LogUnavailable, LogError."""
        nats = self.app.nats
        self.nc = await self.app.nats_connect()
        self._open = True
        self.appender = Appender(self.nc, patience_s=nats.patience_s)
        await self.appender.open()
        me = this_process(nats.worker)
        self.fences = Fences(self.nc, me.incarnation.encode(), nats.group, nats.offsets)
        self.leases = Leases(self.nc, bucket=nats.leases, group=nats.group, me=me, partitions=nats.partitions)
        await patiently(self.leases.open, nats.patience_s)

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self.appender.close()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.nc.close(), 2)

    def fail(self, error: BaseException) -> None:
        """This worker can't go on; whoever runs it waits for `failure`."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def feed(self, tp: TP, arrived: Callable[[], object]) -> Feed:
        return Feed(
            self.nc,
            topics.stream_of(tp.topic),
            topics.subjects_of(tp.topic, tp.partition),
            self.app.nats.waiting_records_max,
            arrived,
        )

    async def check(self, topic: str) -> None:
        """Raises LogError if the topic's stream is not there."""
        await self.last_sequence(topic)

    async def last_sequence(self, topic: str) -> int:
        """Of the topic's whole stream."""
        call = f"STREAM.INFO.{topics.stream_of(topic)}"
        answer = await patiently(lambda: api(self.nc, call), self.app.nats.patience_s)
        if "error" in answer:
            raise LogError(f"the bus has no stream {topics.stream_of(topic)}; make the streams with `keepstep up`")
        return int(answer["state"]["last_seq"])
