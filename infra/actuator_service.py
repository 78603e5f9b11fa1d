"""The actuators, live: reads LEDGER from its beginning, carries out the intents that are current, records tries and outcomes.

What is to be done is decided in actuators/intents.py, how it is done in the backends; here is the order of writes. An intent is
acted on only after it was read from LEDGER, TryStarted is stored before the backend is called, and one OutcomeRecorded after. A
crash in between leads to another try of what the nodes do once. `python -m infra.actuator_service --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from nats.errors import Error as NatsError

from actuators.channel import CommandChannel
from actuators.exec_backend import BadScript, Exec
from actuators.intents import BEGUN_MAX, CarryOut, Pending, Refuse, Seen, State, due, fold, judge, passed
from actuators.local import Local
from actuators.port import Backend, Done, Work, carry_out
from events import subjects
from events.action import CommandAnswered, NodeCommand, OutcomeRecorded, TryStarted
from events.decision import IntentIssued
from events.envelope import TEXT_MAX, AnyEvent, Fact
from events.finding import ProcessStack, StackRound
from events.ids import derived_id
from events.incident import JobFinished
from events.ports import LEDGER, TELEMETRY_JOB, EventLog, Expect, LogError, LogUnavailable, Record, StaleWriter
from events.registry import Malformed, canonical, make, parse
from infra.clock import new_event_id, wall_ns
from infra.notify_settings import BadNotify, NotifySettings, channels_of, load
from infra.pager import Pager
from infra.tasks import ended
from processors.policy import Stacks
from processors.runbooks import runbook_of_page
from processors.stacks import aggregate

log = logging.getLogger("keepstep.actuators")

SOURCE = "actuator"
#: Tries of one intent in one life of the service, when the backend says that trying again may help.
TRIES_MAX = 3
PAUSE_S = 1.0
APPEND_TRIES = 240
APPEND_WAIT_S = 0.25

Send = Callable[[str, NodeCommand], Awaitable[None]]
Answers = AsyncIterator[tuple[str, CommandAnswered]]


#: Whose word each kind is: the server lets a role write under its own name only, so the subject's role is what is believed.
ROLE_OF = {
    "job_declared": "operator", "standby_added": "operator", "hold_placed": "operator", "hold_released": "operator",
    "approval_given": "operator", "page_acknowledged": "operator", "restart_requested": "operator", "stop_requested": "operator",
    "decision_made": "decider", "intent_issued": "decider", "incident_closed": "decider", "machine_judged": "decider", "job_finished": "detector",
    "try_started": "actuator", "outcome_recorded": "actuator", "page_repeated": "actuator",
    "page_ended": "actuator", "override_given": "operator", "progress_noted": "detector",
}  # fmt: skip


class HeldLease(Protocol):
    """What is asked of a lease (infra.lease.Lease)."""

    @property
    def held(self) -> bool: ...


class Superseded(RuntimeError):
    """Other actuators write, or the lease is over: these must stop before they do anything more."""


class Actuators:
    """One term of the actuators: from taking over until superseded or cancelled. `caught_up` is set once history is read."""

    def __init__(
        self,
        ledger: EventLog,
        send: Send,
        answers: Answers,
        lease: HeldLease | None,
        backends: Mapping[str, Backend],
        *,
        pause_s: float = PAUSE_S,
        repeat_s: float = 0.5,
        pager: Pager | None = None,
    ) -> None:
        self.ledger, self.answers, self.lease, self.backends = ledger, answers, lease, backends
        self.channel = CommandChannel(send, repeat_s)
        self.state = State()
        self.pager = pager or Pager()
        self.caught_up = asyncio.Event()
        self._pause_s = pause_s
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._withdrawn: dict[str, Refuse] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._last_own: dict[str, int] = {}

    async def run(self) -> None:
        """Raises Superseded when its term is over, LogUnavailable when the ledger stays out of reach."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hear())
                tasks.create_task(self._read(tasks))
                tasks.create_task(self._keep_paging())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _hear(self) -> None:
        async for node, answer in self.answers:
            self.channel.answered(node, answer)

    async def _keep_paging(self) -> None:
        await self.caught_up.wait()
        await self.pager.run(self._work_of, self._by_backend, self._append)

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        end = await self.ledger.last_sequence()
        if end == 0:
            self.caught_up.set()
        async with aclosing(self.ledger.read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                event = heard(record)
                if event is None:
                    self.state = passed(self.state, record.sequence, record.time_ns)
                else:
                    seen = Seen(record.sequence, record.time_ns, event)
                    self.state = fold(self.state, seen)
                    self.pager.hear(seen)
                if record.sequence < end:
                    continue
                self.caught_up.set()
                self._act(tasks)
                if event is not None and isinstance(event.data, JobFinished) and record.sequence > end:
                    tasks.create_task(self._finished(event))

    def _act(self, tasks: asyncio.TaskGroup) -> None:
        """Begins what is due, and calls back what was current when it was begun and is not any more."""
        for key in [key for key in self._busy if key not in self.state.pending]:
            del self._busy[key]
            self._withdrawn.pop(key, None)
        for action in due(self.state):
            key = action.pending.intent.key
            running = self._busy.get(key)
            if running is None:
                work = self._carry_out(action) if isinstance(action, CarryOut) else self._refuse(action)
                self._busy[key] = tasks.create_task(work, name=f"intent {key}")
            elif isinstance(action, Refuse) and action.result == "refused_stale" and key not in self._withdrawn:
                self._withdrawn[key] = action
                running.cancel()

    async def _refuse(self, refusal: Refuse) -> None:
        await self._outcome(refusal.pending, Done(refusal.result, refusal.detail))

    async def _carry_out(self, action: CarryOut) -> None:
        pending, key = action.pending, action.pending.intent.key
        try:
            done = await self._try(pending, action.ordinal)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if key not in self._withdrawn or task is None or task.uncancel() > 0:
                raise
            withdrawn = self._withdrawn[key]
            done = Done(withdrawn.result, f"called back while it was carried out: {withdrawn.detail}")
        finally:
            self._withdrawn.setdefault(key, Refuse(pending, "refused_stale", ""))  # from here on its outcome stands
        await self._outcome(pending, done)

    async def _try(self, pending: Pending, ordinal: int) -> Done:
        intent = pending.intent
        for round_ in range(TRIES_MAX):
            fact = TryStarted(key=intent.key, job=intent.job, verb=intent.verb, ordinal=ordinal)
            await self._append(pending, fact, ordinal)
            done = await self._call(pending)
            ordinal += 1
            if not done.again or round_ == TRIES_MAX - 1 or ordinal > BEGUN_MAX:
                return done
            log.info("%s of %s, try %d: %s", intent.verb, intent.job, ordinal - 1, done.detail)
            await asyncio.sleep(self._pause_s * 2**round_)
            now = judge(self.state, pending)
            if isinstance(now, Refuse):
                return Done(now.result, f"{now.detail}; before that: {done.detail}", done.nodes)
        raise AssertionError

    async def _call(self, pending: Pending) -> Done:
        work = self._work_of(pending.intent)
        assert work is not None
        try:
            if work.intent.verb == "notify":
                return await self.pager.page(work, self._by_backend)
            return await self._by_backend(work)
        except Exception as error:  # a fault of ours is an outcome too: the decider must hear that it did not come to pass
            log.exception("%s of %s", pending.intent.verb, pending.intent.job)
            return Done("failed", f"{type(error).__name__}: {error}")

    def _work_of(self, intent: IntentIssued) -> Work | None:
        view = self.state.job(intent.job)
        if view.declared is None:
            return None
        standbys = tuple(node for node in view.standbys if node not in view.evicted)
        return Work(intent, view.declared, standbys, view.reference)

    async def _by_backend(self, work: Work) -> Done:
        backend = self.backends.get(work.declared.backend)
        if backend is None:
            there = ", ".join(sorted(self.backends))
            return Done("failed", f"the job names the backend {work.declared.backend!r}; these actuators have: {there}")
        return await carry_out(backend, work, self.channel)

    async def _finished(self, event: AnyEvent) -> None:
        view = self.state.job(event.job)
        backend = self.backends.get(view.declared.backend) if view.declared else None
        if backend is not None and view.declared is not None:
            try:
                await backend.finished(view.declared, event.id, view.standbys, self.channel)
            except Exception as error:  # nothing depends on it
                log.warning("letting go of what was kept ready for %s: %s", event.job, error)

    async def _outcome(self, pending: Pending, done: Done) -> None:
        intent = pending.intent
        fact = OutcomeRecorded(
            key=intent.key,
            incident=intent.incident,
            job=intent.job,
            verb=intent.verb,
            result=done.result,
            detail=done.detail[:TEXT_MAX],
            nodes=done.nodes,
            restored_step=done.restored_step,
            stacks=done.stacks,
            tests=done.tests,
            replays=done.replays,
        )
        await self._append(pending, fact, 0)

    async def _append(self, pending: Pending, fact: Fact, ordinal: int) -> None:
        """Appends one event of the job's, fenced by the last one that actuators wrote for it. Raises Superseded, LogUnavailable."""
        job = pending.intent.job
        event = make(
            fact,
            id=derived_id(SOURCE, job, pending.event_id, fact.kind(), ordinal),
            source=SOURCE,
            subject=job,
            time=pending.issued_ns,
            causes=(pending.event_id,),
            job=job,
            attempt=pending.intent.attempt,
        )
        subject, own = subjects.ledger(job, "actuator", fact.kind()), subjects.ledger(job, "actuator", "*")
        async with self._locks.setdefault(job, asyncio.Lock()):
            for left in range(APPEND_TRIES, 0, -1):
                if self.lease is not None and not self.lease.held:
                    raise Superseded("the actuators' lease is over")
                last = max(self._last_own.get(job, 0), self.state.last_own.get(job, 0))
                try:
                    ack = await self.ledger.append(subject, canonical(event), message_id=event.id, expect=Expect(own, last))
                except StaleWriter as error:
                    raise Superseded(f"other actuators wrote first: {error}") from None
                except LogUnavailable:
                    if left == 1:
                        raise
                    await asyncio.sleep(APPEND_WAIT_S)
                    continue
                self._last_own[job] = max(last, ack.sequence)
                return


def heard(record: Record) -> AnyEvent | None:
    """What a record of LEDGER tells actuators; None for what is not for them, or not its role's to say."""
    _, _, role, kind = record.subject.split(".")
    if ROLE_OF.get(kind) != role:
        return None
    try:
        event = parse(record.data)
    except Malformed as error:
        log.warning("LEDGER sequence %d is not readable and is passed over: %s", record.sequence, error)
        return None
    return event if event.data.kind() == kind else None


async def run_actuators(
    ledger: EventLog,
    send: Send,
    answers: Answers,
    lease: HeldLease | None,
    backends: Mapping[str, Backend],
    **more: Any,
) -> None:
    """Carries out intents until superseded (raises) or cancelled."""
    await Actuators(ledger, send, answers, lease, backends, **more).run()


async def answers_in(telemetry: EventLog) -> Answers:
    """What agents answer from now on, with the node that the subject names. Commands are repeated, so nothing earlier is missed."""
    after = await telemetry.last_sequence()
    async for record in telemetry.read(after=after, subjects=("tj.*.*.*.command_answered",), follow=True):
        try:
            node = subjects.name(record.subject.split(".")[2])
            fact = parse(record.data).data
        except (Malformed, subjects.BadName):
            continue  # the job detector has dead-lettered it
        if isinstance(fact, CommandAnswered):
            yield node, fact


def sender(publish: Callable[[str, bytes], Awaitable[Any]]) -> Send:
    """Commands as core messages: not stored, lost while the bus or the agent is away, and repeated by the channel."""

    async def send(node: str, command: NodeCommand) -> None:
        event = make(
            command,
            id=new_event_id(),
            source=SOURCE,
            subject=node,
            time=wall_ns(),
            job=command.job,
            attempt=command.attempt,
        )
        with contextlib.suppress(NatsError, OSError, LogError):
            await publish(subjects.command(node, command.verb), canonical(event))

    return send


def _aggregate(processes: Sequence[ProcessStack], world_size: int, cut: Mapping[str, float]) -> StackRound:
    return aggregate(processes, world_size, Stacks(**cut))


def backends_for(script: str, *, within_s: float, unreachable_s: float, limit_s: float) -> dict[str, Backend]:
    """Raises BadScript."""
    local = Local(within_s=within_s, unreachable_s=unreachable_s, aggregate=_aggregate)
    return {"local": local} | ({"exec": Exec(script, local, limit_s=limit_s)} if script else {})


def pager_for(path: str) -> Pager:
    """Raises BadNotify."""
    settings = load(Path(path)) if path else NotifySettings()
    return Pager(channels_of(settings), settings, runbook_of_page)


async def serve(options: argparse.Namespace) -> None:
    """Connects, waits for the lease, acts. Raises what main turns into a sentence."""
    from infra.home import Address, Home
    from infra.jetstream import JetStreamLog
    from infra.lease import Lease

    backends = backends_for(
        options.exec, within_s=options.within_s, unreachable_s=options.unreachable_s, limit_s=options.script_limit_s
    )
    pager = pager_for(options.notify)
    nc = await Address(Home.default(options.home), options.bus, options.key).connect("actuator", wait_s=30.0)
    try:
        stop = asyncio.Event()
        lost = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        owner = f"{os.uname().nodename}/{os.getpid()}/{new_event_id()}"
        waiting = asyncio.create_task(_term(nc, JetStreamLog, Lease(nc, "actuators", owner, on_lost=lost.set), backends, pager))
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(lost.wait())]
        await asyncio.wait({waiting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        result, *_ = await ended(waiting, *ends)
        if isinstance(result, Exception):
            raise result
        if lost.is_set() and not stop.is_set():
            raise Superseded("the actuators' lease is over")
    finally:
        await nc.close()


async def _term(
    nc: Any, log_of: Callable[[Any, str], EventLog], lease: Any, backends: Mapping[str, Backend], pager: Pager
) -> None:
    log.info("waiting for the lease")
    async with lease:
        paging = ", ".join(channel.name for channel in pager.channels) or "none"
        log.info("acting, with the backends %s; channels for pages: %s", ", ".join(sorted(backends)), paging)
        answers = answers_in(log_of(nc, TELEMETRY_JOB))
        await run_actuators(log_of(nc, LEDGER), sender(nc.publish), answers, lease, backends, pager=pager)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m infra.actuator_service", description="Carries out what the decider decided.")
    made.add_argument("--home", type=Path, default=None, help="the installation's folder (its embedded bus is used)")
    made.add_argument("--url", "--bus", dest="bus", default="", help="URL of a bus instead, nats://host:port")
    made.add_argument("--key", default="", help="seed file of the actuator's key on that bus; {user} stands for the role")
    made.add_argument("--exec", default="", help="the site's own script for evict, replace and notify (backend exec)")
    made.add_argument("--notify", default="", help="file that says where pages go (webhooks, Alertmanager, scripts)")
    made.add_argument("--within-s", type=float, default=60.0, help="time for one action as a whole")
    made.add_argument("--unreachable-s", type=float, default=3.0, help="a silent agent holds others up this long at most")
    made.add_argument("--script-limit-s", type=float, default=60.0, help="time for one call of the script")
    return made


def main(arguments: list[str] | None = None) -> int:
    """0 stopped as asked; 1 to be started again; 2 wrong use, with a sentence."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(options))
    except (BadScript, BadNotify) as error:
        print(error, file=sys.stderr)
        return 2
    except (Superseded, LogError, RuntimeError, OSError) as error:
        print(f"the actuators end: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
