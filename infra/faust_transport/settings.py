"""How a transport connects and reads, and the Faust app that carries it. Names are given by hand: no Python path gets into data."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import faust
from faust.transport.drivers import TRANSPORTS

from events.subjects import PARTITIONS
from infra.bus import BusClient, connect
from infra.faust_transport.assignor import LeaseAssignor

#: Given the partitions whose lease is over already, finishes and commits what may still be: before any change of assignment.
BeforeRebalance = Callable[[frozenset[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """`group`: the workers that share partitions. `worker`: unique among them; the same name again takes up its own leases. A frame
    holds up to `frame_records_max` records; `waiting_records_max` bounds what waits in memory a partition."""

    group: str
    worker: str
    connect: Callable[[], Awaitable[BusClient]] | None = None
    partitions: int = PARTITIONS
    frame_records_max: int = 256
    waiting_records_max: int = 1024
    #: How long a frame that isn't full waits for more: each costs Faust the same, full or not.
    linger_s: float = 0.02
    leases: str = "LEASES"
    offsets: str = "KS_OFFSETS"
    #: How long a write waits for a bus that is away before the worker gives up.
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.frame_records_max <= self.waiting_records_max:
            raise ValueError(
                f"a frame of {self.frame_records_max} records doesn't fit what may wait ({self.waiting_records_max}); "
                "it holds at least 1 and at most that many"
            )


class QuietMonitor(faust.Monitor):  # type: ignore[misc]
    """Faust's monitor measures each message; ours counts nothing."""

    def on_tp_commit(self, tp_offsets: Any) -> None: ...
    def track_tp_end_offset(self, tp: Any, offset: int) -> None: ...


class NatsApp(faust.App):  # type: ignore[misc]
    """A Faust app on this transport: no web server, no folder on disk, no leader, nothing per message."""

    def __init__(self, *, url: str, nats: NatsSettings, **options: Any) -> None:
        TRANSPORTS.aliases.setdefault("nats", "infra.faust_transport:Transport")
        self.nats = nats
        self.nats_url = url
        self.before_rebalance: BeforeRebalance | None = None
        defaults: dict[str, Any] = {
            "broker": "nats://",
            "store": "memory://",
            "autodiscover": False,
            "web_enabled": False,
            "topic_disable_leader": True,
            "topic_partitions": nats.partitions,
            "PartitionAssignor": LeaseAssignor,
            "Monitor": QuietMonitor,
            "stream_wait_empty": False,
            "stream_buffer_maxsize": 64,
            "key_serializer": "raw",
            "value_serializer": "raw",
        }
        super().__init__(nats.group, **{**defaults, **options})

    def _create_directories(self) -> None:
        """Nothing of ours is on disk here."""

    async def nats_connect(self) -> BusClient:
        if self.nats.connect is not None:
            return await self.nats.connect()
        return await connect(self.nats_url, name=f"keepstep-{self.nats.group}-{self.nats.worker}")


def quiet_faust() -> None:
    """Faust tells of each rebalance and recovery at INFO; only what is wrong is of interest."""
    for name in ("faust", "mode", "aiokafka", "infra.faust_transport"):
        logging.getLogger(name).setLevel(logging.WARNING)
