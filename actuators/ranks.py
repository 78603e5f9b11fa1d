"""A node's rank host: starts, parks, stops and fences the rank processes of jobs, as commanded, and tells what becomes of them.

The processes are not the agent's children: each has a shim (rank_shim.py) in its own session. A host that is made again over the
same folder finds them, and reports what it missed, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from actuators.checkpoints import CheckpointReader
from actuators.environment import Plan, parked_form, plan_of, ranked
from actuators.node_memory import NodeMemory
from actuators.node_tests import NodeTests, TestsEnded, clear
from actuators.processes import state_of
from actuators.replays import Replays
from actuators.revisions import RevisionFailed, Revisions
from actuators.slot_set import SlotSet, pids
from actuators.slots import Slot, SlotFailed
from actuators.stack_capture import Target, captured
from actuators.tail import secrets_in, shown
from events.action import CommandAnswered, NodeCommand
from events.envelope import TEXT_MAX
from events.presence import RankProcess
from events.training import RankExit, RankStarted

PARK_FAILURES_MAX = 3


@dataclass(frozen=True, slots=True)
class RankNews:
    """Something became of a rank. `identity` is the same if the same news is told again (a crash between telling and noting)."""

    job: str
    attempt: int
    fact: RankStarted | RankExit
    identity: str = ""


class RankOutput(NamedTuple):
    """A rank's stdout.log and stderr.log in `folder`; `secrets`: values that must not be shown of them."""

    slot: str
    job: str
    attempt: int
    rank: int
    world_size: int
    folder: Path
    ended: bool
    secrets: tuple[str, ...]


@lru_cache(maxsize=64)
def _secrets(plan: Plan | None) -> tuple[str, ...]:
    return secrets_in({**os.environ, **dict(plan.environment)} if plan else os.environ)


class Refused(Exception):
    """A command that must not be carried out, now or when it is repeated: one sentence."""


class RankHost:
    """See the module. `on_event` is called in the loop's thread and must neither block nor raise. `address`: where other nodes reach
    this one; `parked_idle_s`: parked workers without an agent end after it."""

    def __init__(
        self,
        state_dir: Path,
        node: str,
        *,
        hook_folder: Path | None,
        on_event: Callable[[RankNews], None],
        socket_path: Path,
        boot_id: str,
        address: str = "127.0.0.1",
        grace_s: float = 10.0,
        log_bytes_max: int = 8 << 20,
        parked_idle_s: float = 3600.0,
    ) -> None:
        self.folder = Path(state_dir).absolute()
        self.node, self.address, self.grace_s = node, address, grace_s
        self._on_event = on_event
        self._slots = SlotSet(
            self.folder / "slots",
            node=node,
            boot_id=boot_id,
            hook_folder=str(hook_folder or ""),
            socket_path=str(socket_path),
            log_bytes_max=log_bytes_max,
            parked_idle_s=parked_idle_s,
            on_exit=self._exited,
            on_found=self._report_started,
        )
        self._tests = NodeTests(node, self.folder / "tests", self._slots)
        self._memory = NodeMemory(self.folder)
        self._checkpoints = CheckpointReader()
        self.revisions = Revisions(self.folder / "revisions", self._directories, boot_id=boot_id)
        self._replays = Replays(self._slots, self.revisions, refill=self._refill_soon)
        self._running: dict[str, asyncio.Task[CommandAnswered]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._refills: dict[str, asyncio.Task[None]] = {}
        self._asides: set[asyncio.Task[Any]] = set()
        self._park_failures: dict[str, int] = {}
        self._ports: list[int] = []
        self._closing = False

    # Life

    async def start(self) -> None:
        """Finds the ranks of before: live ones again, and the exits that were missed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._memory.recover()
        await self._slots.recover()
        await self._replays.recover()
        clear(self._tests.folder)
        for job, mark in self._memory.jobs.items():
            if mark.parked_wanted and mark.fenced < 0:
                self._refill_soon(job)

    async def close(self, leave_running: bool = True) -> None:
        """Lets go of the ranks, which go on; or (`leave_running` False) ends them all first."""
        self._closing = True
        tasks: list[asyncio.Task[Any]] = [*self._refills.values(), *self._running.values(), *self._asides]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.revisions.close()
        if not leave_running:
            there = [slot for slot in self._slots.all.values() if not slot.gone.is_set()]
            await asyncio.gather(*(self._slots.end(slot, 0) for slot in there))
        await self._slots.close()

    # What the agent shows

    def processes(self) -> tuple[RankProcess, ...]:
        """The ranks of the current attempt, ended ones with state `-`."""
        seen = [slot for slot in self._slots.attempt(*self.current()) if slot.ran]
        return tuple(
            RankProcess(
                rank=slot.record.rank,
                pid=slot.worker.pid if slot.worker else 0,
                state=state_of(slot.worker) if slot.worker and slot.live else "-",
            )
            for slot in sorted(seen, key=lambda slot: slot.record.rank)
        )

    def current(self) -> tuple[str, int]:
        """Job and attempt whose ranks run here; ('', 0): none."""
        live = [slot for slot in self._slots.all.values() if slot.live and slot.record.attempt and slot.ran]
        newest = max(live, key=lambda slot: (slot.record.attempt, slot.record.slot), default=None)
        return (newest.record.job, newest.record.attempt) if newest else ("", 0)

    def outputs(self) -> tuple[RankOutput, ...]:
        """Where the ranks of this node print to, those that ended included for as long as their folders are kept."""
        return tuple(
            RankOutput(
                slot=name,
                job=slot.record.job,
                attempt=slot.record.attempt,
                rank=slot.record.rank,
                world_size=slot.record.world_size,
                folder=slot.folder,
                ended=slot.ended is not None,
                secrets=_secrets(self._memory.job(slot.record.job).plan),
            )
            for name, slot in self._slots.all.items()
            if slot.record.attempt and slot.ran
        )

    def parked(self) -> int:
        """Workers that wait, warm."""
        return sum(
            1
            for slot in self._slots.all.values()
            if slot.live and not slot.record.attempt and not slot.record.replay and slot.ready.is_set()
        )

    # Commands

    async def handle(self, command: NodeCommand) -> CommandAnswered:
        """Never raises. The same key again gets the same answer and nothing is done again; only what failed (neither done nor
        refused) is tried anew."""
        known = self._memory.answers.get(command.key)
        if known is not None:
            return known
        task = self._running.get(command.key)
        if task is None:
            task = asyncio.create_task(self._carry_out(command), name=f"command {command.verb} {command.key}")
            self._running[command.key] = task
            task.add_done_callback(lambda _: self._running.pop(command.key, None))
        return await asyncio.shield(task)

    async def _carry_out(self, command: NodeCommand) -> CommandAnswered:
        final, more = True, dict[str, Any]()
        try:
            self._check_current(command)
            if command.verb in ("start", "stop", "fence"):
                await self._replays.end(command.job)
            if command.verb in ("start", "stop", "fence", "replay", "diagnose"):  # nothing tests a machine that is wanted
                await self._tests.end(command.job)
            match command.verb:
                case "park":
                    detail = await self._park(command)
                case "prepare":
                    detail, more = await self._prepare(command)
                case "start":
                    detail = await self._start(command)
                case "stop":
                    detail = await self._stop(command)
                case "fence":
                    detail = await self._fence(command)
                case "replay":
                    detail, more["replayed"] = await self._replays.handle(command)
                case "stacks":
                    final = False  # each time is another look; the answer would fill the memory of what was done
                    detail, more = await self._stacks(command)
                case "diagnose":
                    detail, more = await self._diagnose(command)
            ok = True
        except (Refused, TestsEnded) as error:
            ok, detail = False, str(error)
        except (SlotFailed, OSError, ValueError) as error:
            ok, final, detail = False, False, str(error) or type(error).__name__
        answer = CommandAnswered(key=command.key, verb=command.verb, ok=ok, detail=detail[:TEXT_MAX], **more)
        if final:
            with contextlib.suppress(OSError):
                self._memory.answered(answer)
        return answer

    def _check_current(self, command: NodeCommand) -> None:
        mark = self._memory.job(command.job)
        if command.verb != "park" and command.attempt and command.attempt < mark.newest:
            raise Refused(f"stale attempt: {command.verb} names attempt {command.attempt}, the newest told of is {mark.newest}")
        if command.verb == "fence" and command.epoch < mark.epoch:
            raise Refused(f"stale epoch: the fence is of epoch {command.epoch}, the newest told of is {mark.epoch}")
        if command.verb in ("start", "park", "prepare") and mark.fenced >= 0:
            if command.epoch <= mark.fenced:
                raise Refused(
                    f"fenced: {self.node!r} was evicted from the job in epoch {mark.fenced}, only a later one may use it"
                )
            if command.verb != "prepare":
                self._memory.note(command.job, fenced=-1)
        self._memory.note(command.job, epoch=max(mark.epoch, command.epoch))

    def _lock(self, job: str) -> asyncio.Lock:
        return self._locks.setdefault(job, asyncio.Lock())

    async def _park(self, command: NodeCommand) -> str:
        """Answers at once; workers get warm in their own time. No place: what is parked is let go."""
        count = command.place.count if command.place else 0
        plan = plan_of(command)
        if count and parked_form(plan.command) is None:
            return f"nothing to park: {plan.command[:1]} is no Python script or module, it is started cold"
        self._memory.note(command.job, plan=plan, parked_wanted=count)
        self._park_failures.pop(command.job, None)
        if count == 0:
            await asyncio.gather(*(self._slots.end(slot, 0) for slot in self._slots.idle(command.job)))
        self._refill_soon(command.job)
        if count and command.revision:
            self._in_background(self._checked_out(command))
        warm = sum(1 for slot in self._slots.idle(command.job, plan) if slot.ready.is_set())
        return f"{count} to be parked, {warm} warm"

    async def _checked_out(self, command: NodeCommand) -> None:
        """Ahead of the start that will need it, which says what is the matter if it can't be."""
        with contextlib.suppress(RevisionFailed):
            await self.revisions.at(command)

    def _directories(self) -> list[str]:
        return [slot.record.directory for slot in self._slots.all.values() if slot.record.directory and not slot.gone.is_set()]

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def _prepare(self, command: NodeCommand) -> tuple[str, dict[str, Any]]:
        self._memory.note(command.job, newest=max(self._memory.job(command.job).newest, command.attempt))
        address = command.master_address or self.address
        answer: dict[str, Any] = {"address": address, "port": self._free_port(address)}
        detail = "no folder of checkpoints is declared"
        if command.checkpoints:
            folder = os.path.join(command.directory, command.checkpoints)
            below = command.restore_below_step
            found, passed = await asyncio.to_thread(self._checkpoints.newest_whole, folder, below)
            if found:
                answer |= {"restore": found.path, "restore_step": found.step}
            none = "no whole checkpoint" if below < 0 else f"no whole checkpoint below step {below}"
            detail = "; ".join([f"restore at step {found.step}" if found else none, *passed[:5]])
        return detail, answer

    def _free_port(self, address: str) -> int:
        """A free port of the address, not one given out lately (its job may not have bound it yet)."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for _ in range(64):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((address, 0))
                except OSError:  # a name or an address that is not this host's own, behind a translation
                    probe.bind(("", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports:
                self._ports = [*self._ports[-63:], port]
                return port
        raise SlotFailed(f"no free port on {address}")

    async def _start(self, command: NodeCommand) -> str:
        place = command.place
        if place is None or not command.command or command.attempt < 1 or command.world_size < place.first_rank + place.count:
            raise Refused("a start names a command, an attempt from 1, ranks and a world they fit in")
        job, attempt = command.job, command.attempt
        plan = plan_of(command)
        try:  # before the lock: a stop must not wait for git
            command = await self.revisions.at(command)
        except RevisionFailed as error:
            raise (SlotFailed if error.again else Refused)(str(error)) from None
        async with self._lock(job):
            self._check_current(command)
            if attempt <= self._memory.job(job).stopped:
                raise Refused(f"stale attempt: {attempt} was stopped; start a later one")
            self._memory.note(job, newest=attempt, plan=plan, parked_wanted=place.count if parked_form(plan.command) else 0)
            older = [slot for slot in self._slots.there(job) if 0 < slot.record.attempt < attempt]
            left = [p for ended in await asyncio.gather(*(self._slots.end(slot, 0) for slot in older)) for p in ended]
            if left:
                raise SlotFailed(f"processes of an earlier attempt do not die: {pids(left)}")
            mine = {slot.record.rank: slot for slot in self._slots.attempt(job, attempt) if slot.live or slot.ran}
            idle = self._slots.fit(job, plan, command.revision)
            ranks = range(place.first_rank, place.first_rank + place.count)
            starts = [
                self._start_rank(command, plan, rank, mine.get(rank), idle.pop(0) if rank not in mine and idle else None)
                for rank in ranks
            ]
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        self._park_failures.pop(job, None)
        self._refill_soon(job)
        warm = sum(1 for slot in self._slots.attempt(job, attempt) if slot.record.warm)
        at = f", revision {command.revision[:12]}" if command.revision else ""
        return f"{place.count} ranks started, {warm} of them warm{at}"

    async def _start_rank(self, command: NodeCommand, plan: Plan, rank: int, slot: Slot | None, idle: Slot | None) -> None:
        """`slot`: the rank's own from an earlier, cut-off carrying out of the same start; it is not started twice."""
        if slot is not None and slot.ran:
            return
        if slot is None and idle is not None:
            try:
                await self._send_go(idle, command, rank)
                return
            except SlotFailed:
                await self._slots.end(idle, 0)
        if slot is None:
            slot = await self._slots.make(command.job, plan, parked=False)
        await self._send_go(slot, command, rank)

    async def _send_go(self, slot: Slot, command: NodeCommand, rank: int) -> None:
        assert command.place is not None
        plan = plan_of(command)  # at its revision
        slot.note(
            attempt=command.attempt,
            rank=rank,
            local_rank=rank - command.place.first_rank,
            world_size=command.world_size,
            restore=command.restore,
            directory=plan.directory if command.revision else "",
        )
        form = parked_form(plan.command) if slot.record.parked else None
        argv = form[1] if form else list(plan.command)
        await slot.go(argv, ranked(self._slots.environment(slot, plan), command, rank), plan.directory)
        self._report_started(slot)

    async def _stop(self, command: NodeCommand) -> str:
        job, attempt = command.job, command.attempt
        mark = self._memory.job(job)
        self._memory.note(job, newest=max(mark.newest, attempt), stopped=max(mark.stopped, attempt))
        async with self._lock(job):
            theirs = [slot for slot in self._slots.there(job) if 0 < slot.record.attempt <= attempt]
            grace_s = self.grace_s if command.graceful else 0
            await asyncio.gather(*(self._slots.end(slot, grace_s) for slot in theirs))
            spared = {slot.mark for slot in self._slots.there(job) if slot not in theirs}
            strays = await self._slots.sweep(job, spared)
        return f"{len(theirs)} ranks stopped, {strays} stray processes killed, nothing up to attempt {attempt} is left"

    async def _stacks(self, command: NodeCommand) -> tuple[str, dict[str, Any]]:
        slots = [slot for slot in self._slots.attempt(command.job, command.attempt) if slot.ran and slot.worker]
        if not slots:
            raise Refused(f"no rank of attempt {command.attempt} ran here")
        targets = [Target(slot.record.rank, slot.worker) for slot in slots if slot.worker]
        return await captured(targets, command.within_s, command.native)

    async def _fence(self, command: NodeCommand) -> str:
        job = command.job
        mark = self._memory.job(job)
        self._memory.note(
            job,
            newest=max(mark.newest, command.attempt),
            stopped=max(mark.stopped, mark.newest, command.attempt),
            fenced=max(mark.fenced, command.epoch),
            parked_wanted=0,
        )
        async with self._lock(job):
            theirs = self._slots.there(job)
            await asyncio.gather(*(self._slots.end(slot, 0) for slot in theirs))
            strays = await self._slots.sweep(job, set())
        return f"{len(theirs)} workers ended, {strays} stray processes killed; starts up to epoch {command.epoch} are refused"

    async def _diagnose(self, command: NodeCommand) -> tuple[str, dict[str, Any]]:
        """A fenced machine is tested like any other; what was started for it is ended afterwards."""
        job = command.job
        if running := [slot for slot in self._slots.there(job) if slot.record.attempt and slot.live]:
            raise Refused(f"{len(running)} ranks of {job!r} run here; its machines are tested while it is stopped")
        mark = self._memory.job(job)
        kept = mark.parked_wanted if mark.fenced < 0 else 0
        try:
            detail, results = await self._tests.run(command, plan_of(command), kept)
        finally:
            self._refill_soon(job)
        return detail, {"tests": results}

    # Parking

    def _refill_soon(self, job: str) -> None:
        task = self._refills.get(job)
        if (task is None or task.done()) and not self._closing:
            self._refills[job] = asyncio.create_task(self._refill(job), name=f"park for {job}")

    async def _refill(self, job: str) -> None:
        """Parks what is wanted and missing, at a low priority. Gives up after a few failures in a row."""
        while not self._closing:
            mark = self._memory.job(job)
            plan = mark.plan
            for slot in self._slots.idle(job):
                if plan is None or slot.record.plan != plan.digest:
                    await self._slots.end(slot, 0)
            idle = self._slots.idle(job, plan) if plan is not None else []
            for slot in idle[mark.parked_wanted :]:  # let go while it was being made
                await self._slots.end(slot, 0)
            if plan is None or mark.fenced >= 0 or len(idle) >= mark.parked_wanted:
                return
            failures = self._park_failures.get(job, 0)
            if failures >= PARK_FAILURES_MAX:
                return
            if failures:
                await asyncio.sleep(min(5.0, 0.5 * 2**failures))
            try:
                await self._slots.make(job, plan, parked=True)
            except (SlotFailed, OSError):
                self._park_failures[job] = self._park_failures.get(job, 0) + 1

    # News

    def _report_started(self, slot: Slot) -> None:
        record = slot.record
        if record.started_reported:
            return
        fact = RankStarted(
            rank=record.rank,
            local_rank=record.local_rank,
            world_size=record.world_size,
            pid=slot.worker.pid if slot.worker else 0,
            warm=record.warm,
            restore=record.restore,
        )
        self._on_event(RankNews(record.job, record.attempt, fact, f"{record.slot}/started"))
        slot.note(started_reported=True)

    def _exited(self, slot: Slot) -> None:
        record, ended = slot.record, slot.ended or {}
        if record.exit_reported:
            return
        if not record.attempt or not slot.ran:  # a parked worker, or a replay: no rank, no news
            slot.note(exit_reported=True)
            if not record.asked and not record.replay:
                self._park_failures[record.job] = self._park_failures.get(record.job, 0) + 1
                self._refill_soon(record.job)
            return
        self._report_started(slot)
        fact = RankExit(
            rank=record.rank,
            world_size=record.world_size,
            code=ended.get("code"),
            signal=ended.get("signal"),
            asked=record.asked,
            ended_ns=int(ended.get("ended_ns", 0)),
            stderr_tail=shown(str(ended.get("stderr_tail", "")).encode("utf-8", "replace"), secrets_in(os.environ)),
            host=socket.gethostname(),
        )
        self._on_event(RankNews(record.job, record.attempt, fact, f"{record.slot}/exit"))
        slot.note(exit_reported=True)
        self._let_go_when_finished(slot)

    def _let_go_when_finished(self, slot: Slot) -> None:
        """All ranks of the attempt here ended by themselves with 0: the job is finished, and nobody will need what is parked."""
        attempt = [s for s in self._slots.attempt(slot.record.job, slot.record.attempt) if s.live or s.ran]
        if all(s.ended is not None and s.ended.get("code") == 0 and not s.record.asked for s in attempt):
            self._memory.note(slot.record.job, parked_wanted=0)
            for idle in self._slots.idle(slot.record.job):
                self._in_background(self._slots.end(idle, 0))
