"""The one active decider, live: reads the whole LEDGER, appends what `processors.decider` derives, and keeps the timers.

Not a Faust worker: its state is the fold of one ordered log, which a table would only copy (infra/decisions/080-decider-host.md).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from nats.aio.client import Client
from nats.errors import Error as NatsError

from events import subjects
from events.decision import DeciderStarted, Diverged, TimerFired, TimerSet
from events.envelope import AnyEvent
from events.ids import derived_id
from events.ports import LEDGER, EventLog, Expect, LogError, LogUnavailable, Record, StaleWriter, TimerService
from events.registry import Malformed, canonical, make, parse
from infra.clock import new_event_id, wall_ns
from infra.embedded import EmbeddedError
from processors.decider import Decider, is_own, timer_event
from processors.detector import Outgoing

log = logging.getLogger("keepstep.decider")

#: All subjects that the decider writes: every append expects their last sequence, so that a second decider is refused.
OWN = "ledger.*.decider.*"
APPEND_TRIES = 240
APPEND_WAIT_S = 0.25


class HeldLease(Protocol):
    """What the decider asks of a lease (infra.lease.Lease)."""

    @property
    def held(self) -> bool: ...


class Superseded(RuntimeError):
    """Another decider writes, or the lease is over: this one must stop before it says anything more."""


class LiveDecider:
    """One term of a decider: from taking over until it is superseded or cancelled."""

    def __init__(
        self,
        ledger: EventLog,
        timers: TimerService,
        *,
        worker: str,
        code_version: str,
        lease: HeldLease | None = None,
        on_event: Callable[[AnyEvent], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self.timers = timers
        self.worker = worker
        self.code_version = code_version
        self.lease = lease
        self.on_event = on_event
        self.decider = Decider()
        self.caught_up = asyncio.Event()
        self._last_own = 0
        self._wanted: dict[str, TimerSet] = {}

    async def run(self) -> None:
        """Raises Superseded when its term is over, LogUnavailable when the ledger stays out of reach."""
        self._last_own = await self.ledger.last_sequence(OWN)
        recorded, decided_up_to = await self._history()
        started = await self._announce()
        async with aclosing(self.ledger.read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                if is_own(record.subject) and record.sequence < started:
                    continue
                if is_own(record.subject):
                    if record.sequence > self._last_own:
                        raise Superseded(f"another decider wrote LEDGER sequence {record.sequence}")
                    continue
                if record.sequence > started and record.subject.endswith(".decider.decider_started"):
                    raise Superseded(f"another decider took over at LEDGER sequence {record.sequence}")
                await self._answer(record, recorded, decided_up_to)
                if record.sequence >= started and not self.caught_up.is_set():
                    await self._keep_timers()
                    self.caught_up.set()

    async def _history(self) -> tuple[dict[int, list[AnyEvent]], int]:
        """What was decided before, by the sequence of the input that it was decided at, and the last such sequence."""
        recorded: dict[int, list[AnyEvent]] = {}
        last = 0
        async for record in self.ledger.read(subjects=(OWN,)):
            if not is_own(record.subject):
                continue
            try:
                event = parse(record.data)
            except Malformed as error:
                log.warning("LEDGER sequence %d is not readable as a decision and is passed over: %s", record.sequence, error)
                continue
            known = recorded.setdefault(event.data.trigger, [])
            if not any(event.id == before.id for before in known):
                known.append(event)
            last = max(last, event.data.trigger)
        return recorded, last

    async def _announce(self) -> int:
        fact = DeciderStarted(
            worker=self.worker, code_version=self.code_version, read_up_to=self._last_own, ledger_digest=self.decider.digest
        )
        event = make(fact, id=new_event_id(), source="decider", subject=self.worker, time=wall_ns())
        return await self._append(Outgoing(subjects.ledger(subjects.FLEET, "decider", fact.kind()), event))

    async def _answer(self, record: Record, recorded: dict[int, list[AnyEvent]], decided_up_to: int) -> None:
        stands = recorded.pop(record.sequence, [])
        if record.sequence > decided_up_to:
            derived = self.decider.feed(record)
            owed = derived
        else:
            whole = record.sequence < decided_up_to
            derived = self.decider.feed(record, stands, whole=whole)
            same = stands == [out.event for out in derived][: len(stands)]
            owed = derived[len(stands) :] if same and not whole else []
            for event in stands:
                self._note(event)
            if not same or (whole and len(stands) != len(derived)):
                await self._diverged(record, stands, derived)
        for out in owed:
            await self._append(out)
            self._note(out.event)
            if isinstance(out.event.data, TimerSet):
                await self._schedule(out.event)
        self._forget(record)

    async def _diverged(self, record: Record, stands: list[AnyEvent], derived: list[Outgoing]) -> None:
        """What was recorded stands; that this code would have said otherwise is an event of its own, once."""
        fact = Diverged(
            trigger=record.sequence,
            ledger_digest=self.decider.digest,
            recorded=" ".join(e.data.kind() for e in stands)[:2000],
            derived=" ".join(o.event.data.kind() for o in derived)[:2000],
        )
        event_id = derived_id("decider", "", str(record.sequence), "diverged", 0)
        event = make(fact, id=event_id, source="decider", subject="", time=record.time_ns)
        log.warning(
            "LEDGER sequence %d: this version derives something else than was recorded; the record stands", record.sequence
        )
        await self._append(Outgoing(subjects.ledger(subjects.FLEET, "decider", "diverged"), event))

    async def _append(self, out: Outgoing) -> int:
        """Appends one event, fenced. A ledger that is away is waited for, up to a minute."""
        data = canonical(out.event)
        for left in range(APPEND_TRIES, 0, -1):
            if self.lease is not None and not self.lease.held:
                raise Superseded("the decider's lease is over")
            try:
                ack = await self.ledger.append(out.subject, data, message_id=out.event.id, expect=Expect(OWN, self._last_own))
            except StaleWriter as error:
                found = await self._find(out.event.id, data)
                if found:  # an append whose acknowledgement was lost
                    self._last_own = found
                    return found
                raise Superseded(f"another decider wrote first: {error}") from None
            except LogUnavailable:
                if left == 1:
                    raise
                await asyncio.sleep(APPEND_WAIT_S)
                continue
            if ack.sequence > self._last_own:
                self._last_own = ack.sequence
            if self.on_event is not None:
                self.on_event(out.event)
            return ack.sequence
        raise LogUnavailable("LEDGER was out of reach for too long")

    async def _find(self, event_id: str, data: bytes) -> int:
        """The sequence at which this very event stands as the only one after our last, else 0."""
        found = [record async for record in self.ledger.read(after=self._last_own, subjects=(OWN,))]
        return found[0].sequence if len(found) == 1 and found[0].data == data else 0

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event.data, TimerSet):
            self._wanted[event.data.timer] = event.data

    def _forget(self, record: Record) -> None:
        if record.subject.split(".")[2:3] == ["timer"]:
            try:
                fired = parse(record.data).data
            except Malformed:
                return
            if isinstance(fired, TimerFired):
                self._wanted.pop(fired.timer, None)

    async def _keep_timers(self) -> None:
        """Timers whose schedule may have been lost with the last decider are set again; the same id replaces the first."""
        for fact in list(self._wanted.values()):
            await self._schedule_fact(fact, "")

    async def _schedule(self, event: AnyEvent) -> None:
        await self._schedule_fact(event.data, event.id)

    async def _schedule_fact(self, fact: TimerSet, cause: str) -> None:
        event = timer_event(fact, cause or fact.timer)
        for left in range(APPEND_TRIES, 0, -1):
            try:
                await self.timers.set_timer(
                    fact.timer, fact.at_ns, fact.job or subjects.FLEET, event.data.kind(), canonical(event)
                )
                return
            except LogUnavailable:
                if left == 1:
                    raise
                await asyncio.sleep(APPEND_WAIT_S)


# The process


def code_version() -> str:
    """What decisions name: the distribution's version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("keepstep-pipeline")
    except PackageNotFoundError:
        return "checkout"


async def run_decider(nc: Client, *, worker: str) -> None:
    """Terms of a decider on a connection: waits for the lease, decides until the term is over, and waits again. Raises LogUnavailable
    when the bus stays away, and whatever the rules raise: a fault of the rules must not be passed over."""
    from infra.jetstream import JetStreamLog, JetStreamTimers
    from infra.lease import Lease

    while True:
        async with Lease(nc, "decider", worker) as lease:
            log.info("%s decides", worker)
            live = LiveDecider(
                JetStreamLog(nc, LEDGER), JetStreamTimers(nc), worker=worker, code_version=code_version(), lease=lease
            )
            try:
                await live.run()
            except Superseded as over:
                log.warning("the term is over: %s", over)
        await asyncio.sleep(APPEND_WAIT_S)


async def _serve(options: argparse.Namespace) -> None:
    from infra.home import Address, Home

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    nc = await Address(Home.default(options.home), options.url, options.key).connect("decider", wait_s=30.0)
    try:
        worker = options.worker or f"{os.uname().nodename}/{os.getpid()}/{new_event_id()}"
        deciding = asyncio.create_task(run_decider(nc, worker=worker))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({deciding, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (deciding, stopped):
            task.cancel()
        (result,) = await asyncio.gather(deciding, return_exceptions=True)
        if isinstance(result, Exception):
            raise result
    finally:
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            await asyncio.wait_for(nc.close(), 2.0)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 after a stop that was asked for, 1 after a fault."""
    parser = argparse.ArgumentParser(prog="python -m infra.decider_service", description=__doc__)
    parser.add_argument("--home", type=Path, default=None, help="the installation whose embedded bus is used")
    parser.add_argument("--url", "--bus", default="", help="a bus elsewhere instead, nats://host:port")
    parser.add_argument("--key", default="", help="seed file of the decider's key on that bus; {user} stands for the role")
    parser.add_argument("--worker", default="", help="its name in the ledger (default: host, pid and a random id)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        asyncio.run(_serve(options))
    except (LogError, EmbeddedError) as error:
        print(f"keepstep decider: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        log.exception("the decider stops: nothing more is decided until it is started again")
        print(f"keepstep decider: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
