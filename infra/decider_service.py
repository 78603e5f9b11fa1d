"""The one active decider, live: reads the whole LEDGER, appends what `processors.decider` derives, and keeps the timers.

Not a Faust worker: its state is the fold of one ordered log, which a table would only copy (infra/decisions/080-decider-host.md).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nats.aio.client import Client

from events import subjects
from events.decision import Decided, DeciderStarted, Diverged, TimerSet
from events.envelope import AnyEvent
from events.ids import derived_id
from events.ports import LEDGER, EventLog, Expect, LogError, LogUnavailable, Record, StaleWriter, TimerService
from events.registry import Malformed, canonical, make, parse
from infra.clock import new_event_id, wall_ns
from infra.embedded import EmbeddedError
from infra.tasks import ended
from processors.decider import Decider, Derived, is_own, timer_event

log = logging.getLogger("keepstep.decider")

#: All subjects that the decider writes: every append expects their last sequence, so that a second decider is refused.
OWN = "ledger.*.decider.*"
APPEND_TRIES = 240
APPEND_WAIT_S = 0.25
#: Inputs that are answered together, and events that are stored together, at most.
GROUP_MAX = 256


class HeldLease(Protocol):
    """What the decider asks of a lease (infra.lease.Lease)."""

    @property
    def held(self) -> bool: ...


class Superseded(RuntimeError):
    """Another decider writes, or the lease is over: this one must stop before it says anything more."""


class Said(NamedTuple):
    """An event to be stored."""

    subject: str
    event: AnyEvent
    data: bytes


async def together(records: AsyncIterator[Record], most: int) -> AsyncGenerator[list[Record], None]:
    """Whatever has come meanwhile, in order, up to `most` at once; one alone does not wait for another."""
    came: asyncio.Queue[Record | None] = asyncio.Queue(most)

    async def read() -> None:
        try:
            async for record in records:
                await came.put(record)
        except Exception:
            await came.put(None)
            raise
        await came.put(None)

    reading = asyncio.create_task(read())
    try:
        while (record := await came.get()) is not None:
            group = [record]
            while len(group) < most and not came.empty():
                if (record := came.get_nowait()) is None:
                    yield group
                    await reading
                    return
                group.append(record)
            yield group
        await reading
    finally:
        await ended(reading)


class Recorded:
    """What was decided before, read beside the inputs and just ahead of them, so that a ledger of any length takes little memory. The
    decider's events stand in the order of the inputs that they answer."""

    def __init__(self, ledger: EventLog) -> None:
        self._records = ledger.read(subjects=(OWN,))
        self._next: AnyEvent | None = None
        self._ended = False

    async def of(self, sequence: int) -> tuple[list[AnyEvent], bool]:
        """What was appended for the input at `sequence`, and whether anything was appended for a later one."""
        found: list[AnyEvent] = []
        while True:
            if self._next is None and not self._ended:
                self._next = await self._read()
            if self._next is None or self._next.data.trigger > sequence:
                return found, self._next is not None
            if self._next.data.trigger == sequence and all(self._next.id != event.id for event in found):
                found.append(self._next)
            self._next = None

    async def _read(self) -> AnyEvent | None:
        async for record in self._records:
            if not is_own(record.subject):
                continue
            try:
                event = parse(record.data)
                if not isinstance(event.data, Decided):
                    raise Malformed(f"a {event.data.kind()} is nothing that a decider says")
                return event
            except Malformed as error:
                log.warning("LEDGER sequence %d is not readable as a decision and is passed over: %s", record.sequence, error)
        self._ended = True
        return None

    async def close(self) -> None:
        await self._records.aclose()  # type: ignore[attr-defined]


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
        #: Inputs whose recorded decisions this version would not have made.
        self.diverged = 0
        #: The last LEDGER sequence that was taken in and answered.
        self.position = 0
        self._last_own = 0
        #: What follows from inputs taken in, not stored yet.
        self._owed: list[Said] = []
        self._started = 0
        self._unread = 0
        self._wanted: dict[str, TimerSet] = {}

    async def run(self) -> None:
        """Raises Superseded when its term is over, LogUnavailable when the ledger stays out of reach."""
        self._last_own = await self.ledger.last_sequence(OWN)
        recorded = Recorded(self.ledger)
        try:
            async with aclosing(self.ledger.read(follow=True)) as records:  # type: ignore[type-var]
                self._started = await self._announce()
                async with aclosing(together(records, GROUP_MAX)) as groups:
                    async for group in groups:
                        await self._take_all(group, recorded)
        finally:
            await recorded.close()

    async def _take_all(self, group: Sequence[Record], recorded: Recorded) -> None:
        """What came together is answered together: in order, input by input, and stored as few batches. The disk is synced once a
        batch, not once an event (infra/batch.py)."""
        try:
            for record in group:
                await self._take(record, recorded)
                if len(self._owed) >= GROUP_MAX:
                    await self._flush()
        except (Superseded, LogError):
            raise
        except Exception:  # a fault of the rules at one input must not keep back what follows from those before it
            await self._flush()
            raise
        await self._flush()
        self.position = group[-1].sequence

    async def _take(self, record: Record, recorded: Recorded) -> None:
        if is_own(record.subject):
            if record.sequence > max(self._started, self._last_own):
                raise Superseded(f"another decider wrote LEDGER sequence {record.sequence}")
            return
        if record.sequence > self._started and record.subject.endswith(".decider.decider_started"):
            raise Superseded(f"another decider took over at LEDGER sequence {record.sequence}")
        await self._answer(record, recorded)
        if record.sequence >= self._started and not self.caught_up.is_set():
            await self._flush()
            if self.diverged:
                log.warning("%d inputs were decided otherwise than this version would; what is recorded stands", self.diverged)
            await self._keep_timers()
            self.caught_up.set()

    async def _announce(self) -> int:
        fact = DeciderStarted(
            worker=self.worker, code_version=self.code_version, read_up_to=self._last_own, ledger_digest=self.decider.digest
        )
        event = make(fact, id=new_event_id(), source="decider", subject=self.worker, time=wall_ns())
        return await self._store([Said(subjects.ledger(subjects.FLEET, "decider", fact.kind()), event, canonical(event))])

    async def _answer(self, record: Record, recorded: Recorded) -> None:
        """An input before our term: what is recorded for it stands, and what its decider still owed is appended. After: all is."""
        stands, later = await recorded.of(record.sequence) if record.sequence < self._started else ([], False)
        derived = self.decider.feed(record, stands, whole=later)
        same = stands == [out.event for out in derived][: len(stands)] and (len(stands) == len(derived) or not later)
        if not same:
            self.diverged += 1
            if self.diverged == 1:
                await self._tell_divergence(record, stands, derived)
        for event in stands:
            self._note(event)
        if same:
            self._owed += [Said(out.subject, out.event, out.data) for out in derived[len(stands) :]]
        self._forget(record)
        while self._unread < self.decider.unread_count:
            self._unread += 1
            if record.sequence > self._started:
                log.warning("LEDGER sequence %d changes nothing: %s", *self.decider.unread[-1])

    async def _tell_divergence(self, record: Record, stands: list[AnyEvent], derived: Sequence[Derived]) -> None:
        """What was recorded stands; that this code would have said otherwise is an event of its own, for the first such input: what
        comes after it may differ for no other reason."""
        fact = Diverged(
            trigger=record.sequence,
            ledger_digest=self.decider.digest,
            recorded=" ".join(e.data.kind() for e in stands)[:2000],
            derived=" ".join(o.event.data.kind() for o in derived)[:2000],
        )
        event_id = derived_id("decider", "", str(record.sequence), "diverged", 0)
        event = make(fact, id=event_id, source="decider", subject="", time=record.time_ns)
        where = subjects.ledger(subjects.FLEET, "decider", "diverged")
        log.warning("LEDGER sequence %d: this version derives something else than was recorded", record.sequence)
        async for known in self.ledger.read(after=record.sequence, subjects=(where,)):
            if event_id.encode() in known.data:  # told by an earlier term
                return
        await self._flush()
        await self._store([Said(where, event, canonical(event))])

    async def _flush(self) -> None:
        """Appends what follows from the inputs so far; a timer is set once its event is stored."""
        owed, self._owed = self._owed, []
        if not owed:
            return
        await self._store(owed)
        for out in owed:
            self._note(out.event)
            if isinstance(out.event.data, TimerSet):
                await self._schedule(out.event.data)

    async def _store(self, outs: Sequence[Said]) -> int:
        """Appends events, fenced, and returns the last one's sequence. A ledger that is away is waited for, up to a minute."""
        tries = APPEND_TRIES
        while True:
            if self.lease is not None and not self.lease.held:
                raise Superseded("the decider's lease is over")
            expect = Expect(OWN, self._last_own)
            try:
                if len(outs) == 1:
                    one = outs[0]
                    last = (await self.ledger.append(one.subject, one.data, message_id=one.event.id, expect=expect)).sequence
                else:
                    last = await self.ledger.append_all([(o.subject, o.data, o.event.id) for o in outs], expect=expect)
                stored = len(outs)
            except StaleWriter as error:
                stored, last = await self._found(outs)
                if not stored:
                    raise Superseded(f"another decider wrote first: {error}") from None
            except LogUnavailable:
                tries -= 1
                if not tries:
                    raise
                await asyncio.sleep(APPEND_WAIT_S)
                continue
            self._last_own = max(self._last_own, last)
            if self.on_event is not None:
                for out in outs[:stored]:
                    self.on_event(out.event)
            if stored == len(outs):
                return last
            outs = outs[stored:]

    async def _found(self, outs: Sequence[Said]) -> tuple[int, int]:
        """How many of these stand as the only ones after our last, and the last one's sequence: an append's answer was lost."""
        found = [record async for record in self.ledger.read(after=self._last_own, subjects=(OWN,))]
        ours = 0 < len(found) <= len(outs) and all(r.data == o.data for r, o in zip(found, outs, strict=False))
        return (len(found), found[-1].sequence) if ours else (0, 0)

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event.data, TimerSet):
            self._wanted[event.data.timer] = event.data

    def _forget(self, record: Record) -> None:
        if not record.subject.endswith(".timer.timer_fired"):
            return
        try:
            self._wanted.pop(parse(record.data).data.timer, None)
        except (Malformed, AttributeError):
            return

    async def _keep_timers(self) -> None:
        """Timers whose schedule may have been lost with the last decider are set again; the same id replaces the first, and one that
        fired meanwhile has the same event's id and is folded once."""
        for fact in list(self._wanted.values()):
            await self._schedule(fact)

    async def _schedule(self, fact: TimerSet) -> None:
        event = timer_event(fact)
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
        lost = asyncio.Event()
        async with Lease(nc, "decider", worker, on_lost=lost.set) as lease:
            log.info("%s decides", worker)
            live = LiveDecider(
                JetStreamLog(nc, LEDGER), JetStreamTimers(nc), worker=worker, code_version=code_version(), lease=lease
            )
            try:
                await _until(live.run(), lost)
            except Superseded as over:
                log.warning("the term is over: %s", over)
        await asyncio.sleep(APPEND_WAIT_S)


async def _until(term: Coroutine[Any, Any, None], lost: asyncio.Event) -> None:
    """Runs a term; raises Superseded when the lease is lost before it ends."""
    running, over = asyncio.create_task(term), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise Superseded("the decider's lease is over")
        await running
    finally:
        await ended(running, over)


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
        result, _ = await ended(deciding, stopped)
        if isinstance(result, Exception):
            raise result
    finally:
        await nc.close()


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
