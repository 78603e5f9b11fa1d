"""A detector as a Faust worker: `python -m infra.detector_worker --detector node --worker w1`, or `run_detector_worker` in a task.

It reads its share of a telemetry stream's partitions, appends what its detector claims to LEDGER, and keeps the detector's state
in a table. Exit codes: 0 stopped when asked, 1 ended by an error (start it again), 2 wrong use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

from events import subjects
from events.job import CatalogueAdopted
from events.ports import LEDGER, LogError
from events.registry import Malformed, parse
from infra.bus import BusClient, connect
from infra.catalogue_files import catalogue_text
from infra.detector_host import DetectorHost
from infra.embedded import EmbeddedError
from infra.faust_transport import FrameSchema, NatsApp, NatsSettings, quiet_faust
from infra.home import Address, Home
from infra.jetstream import JetStreamLog
from infra.partition_state import UnreadableState
from infra.tasks import ended
from processors.detector import Detector

log = logging.getLogger("keepstep.detector")

#: Names of topics, tables and groups follow from these, given by hand.
DETECTORS = ("job", "node")
STOP_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`detector`: `node` or `job`. `connect` wins over `url` with `options` (those of nats.connect: keys, TLS, inbox prefix)."""

    detector: str
    worker: str
    url: str = "nats://127.0.0.1:4222"
    options: Mapping[str, Any] | None = None
    connect: Callable[[], Awaitable[BusClient]] | None = None
    state_interval_s: float = 1.0
    frame_records_max: int = 256
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        if self.detector not in DETECTORS:
            raise ValueError(f"there is no detector {self.detector[:80]!r}; detectors are {', '.join(DETECTORS)}")
        if not self.worker:
            raise ValueError("a worker needs a name; give it with --worker")
        NatsSettings(group=self.detector, worker=self.worker, frame_records_max=self.frame_records_max)
        if not 0.01 <= self.state_interval_s <= 3600:
            raise ValueError(f"state is stored each {self.state_interval_s} s: choose 0.01 to 3600")

    async def dial(self) -> BusClient:
        if self.connect is not None:
            return await self.connect()
        return await connect(self.url, self.options, name=f"keepstep-detector-{self.worker}")


async def load_detector(which: str, nc: BusClient) -> Detector[Any]:
    """The detector of that name; the node's judges by the catalogue that is adopted in LEDGER, else by the one that is shipped."""
    if which == "job":
        return cast("Detector[Any]", import_module("processors.job").job_detector())
    text = ""
    subject = subjects.ledger(subjects.FLEET, "operator", CatalogueAdopted.kind())
    ledger = JetStreamLog(nc, LEDGER)
    last = await ledger.last_sequence(subject)
    async for record in ledger.read(after=max(0, last - 1), subjects=(subject,)):
        with contextlib.suppress(Malformed):
            text = getattr(parse(record.data).data, "text", text)
    if not text:
        text = catalogue_text()
    return cast(
        "Detector[Any]",
        import_module("processors.node").node_detector(import_module("processors.catalogue").parse(text, examples=False)),
    )


def code_version() -> str:
    try:
        return metadata.version("keepstep-pipeline")
    except metadata.PackageNotFoundError:
        return "unknown"


class Worker:
    """One run of a worker inside a running event loop."""

    def __init__(self, settings: WorkerSettings, detector: Detector[Any]) -> None:
        which = settings.detector
        topic_name = f"telemetry_{which}"
        self.app = NatsApp(
            url=settings.url,
            nats=NatsSettings(
                group=f"detector-{which}",
                worker=settings.worker,
                connect=settings.dial,
                frame_records_max=settings.frame_records_max,
                patience_s=settings.patience_s,
            ),
        )
        partitions = self.app.nats.partitions
        topic = self.app.topic(topic_name, schema=FrameSchema(), partitions=partitions)
        changelog = self.app.topic(
            f"changelog_{which}",
            partitions=partitions,
            key_type=bytes,
            value_type=bytes,
            internal=True,
            acks=False,
            compacting=True,
        )
        table = self.app.Table(
            f"detector_{which}", partitions=partitions, key_type=bytes, value_type=bytes, changelog_topic=changelog
        )
        self.host = DetectorHost(
            self.app,
            table,
            detector,
            topic=topic_name,
            state_interval_s=settings.state_interval_s,
            code_version=code_version(),
        )
        host = self.host

        async def detect(stream: Any) -> None:
            async for event in stream.noack().events():
                await host.take(event)

        self.app.agent(topic, name=f"detect_{which}")(detect)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, or raises what ended it."""
        app = self.app
        failure = app.transport.failure
        failed: BaseException | None = None
        tasks = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self.host.keep_storing())]
        tasks.append(asyncio.ensure_future(self.host.keep_appending()))
        start = asyncio.ensure_future(app.start())
        crash = asyncio.ensure_future(app._crashed.wait())
        try:
            await asyncio.wait({start, failure, tasks[0], crash}, return_when=asyncio.FIRST_COMPLETED)
            if start.done() and not start.cancelled() and start.exception() is None:
                await asyncio.wait({failure, tasks[0], crash}, return_when=asyncio.FIRST_COMPLETED)
            for future in (failure, start):
                if future.done() and not future.cancelled():
                    failed = failed or future.exception()
            if failed is None and app._crash_reason is not None:
                failed = app._crash_reason
        finally:
            await self._end(failed, [*tasks, start, crash])
        if failed is not None:
            raise failed

    async def _end(self, failed: BaseException | None, tasks: list[asyncio.Future[Any]]) -> None:
        app = self.app
        app.transport.closing = True
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await self.host.close(store=failed is None)
                await app.consumer.let_go()
        except (TimeoutError, LogError, AttributeError) as error:
            if failed is None:
                log.warning("state was not stored at the end; it is read again: %s", error)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError, Exception):
            async with asyncio.timeout(STOP_S_MAX):
                await app.stop()
        await app.transport.close()
        await ended(*tasks)


async def run_detector_worker(
    settings: WorkerSettings, *, detector: Detector[Any] | None = None, stop: asyncio.Event | None = None
) -> None:
    """Runs until `stop` is set or the task is cancelled (state and offsets stored, leases given back), or raises what ended it:
    a processor's exception, LogUnavailable, LogError, UnreadableState."""
    quiet_faust()
    if detector is None:
        nc = await settings.dial()
        try:
            detector = await load_detector(settings.detector, nc)
        finally:
            await nc.close()
    await Worker(settings, detector).run(stop or asyncio.Event())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.detector_worker", description=__doc__)
    parser.add_argument("--detector", required=True, choices=DETECTORS)
    parser.add_argument("--worker", required=True, metavar="NAME", help="unique among this detector's workers")
    parser.add_argument("--home", type=Path, help="the installation whose embedded bus is read")
    parser.add_argument("--url", default="", help="a bus elsewhere, nats://host:port")
    parser.add_argument("--key", "--creds", default="", dest="key", metavar="FILE", help="seed file; may hold {user}")
    parser.add_argument("--state-interval-s", type=float, default=1.0)
    parser.add_argument("--frame-records-max", type=int, default=256)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    address = Address(Home.default(given.home), given.url, given.key)
    try:
        settings = WorkerSettings(
            given.detector,
            given.worker,
            connect=lambda: address.connect("detector"),
            state_interval_s=given.state_interval_s,
            frame_records_max=given.frame_records_max,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return asyncio.run(_serve(settings))


async def _serve(settings: WorkerSettings, detector: Detector[Any] | None = None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await run_detector_worker(settings, detector=detector, stop=stop)
    except (LogError, EmbeddedError, UnreadableState) as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        log.exception("the %s detector failed on a record and stops; nothing of its frame was acknowledged", settings.detector)
        print(f"the {settings.detector} detector failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
