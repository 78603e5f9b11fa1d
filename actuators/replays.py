"""Short replays of a job on one node: its own command in a world apart, in workers that were parked where there are some, until the hook
ends it after some steps, or the deadline does. What the ranks computed comes back in the answer; nothing of it is the job's telemetry.

The processes carry the job's mark, so that a stop, a fence or a start of the job ends them as well, and an agent that is made again over
the same folder does so first.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from actuators.environment import parked_form, plan_of, ranked
from actuators.revisions import RevisionFailed, Revisions
from actuators.slot_set import SlotSet
from actuators.slots import Slot, SlotFailed
from actuators.tail import secrets_in, shown
from events.action import NodeCommand
from events.finding import ReplayedRank

TRACE, CHECKPOINTS = "trace.jsonl", "checkpoints"
#: Steps of one replay: it is a test, and its trace is part of an answer.
STEPS_MAX = 1000
TRACE_BYTES_MAX = 1 << 20
#: The same in each replay of any job, so that a script without a seed of its own draws the same numbers.
SEED = 1
DETAIL_CHARACTERS_MAX = 400
#: The hook's exit code where it could not write its trace.
UNRECORDED = 97


@dataclass
class _Run:
    """One replay that goes on here. `over` is set to end it."""

    job: str
    slots: list[Slot] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Replays:
    """The replays of one node. `refill(job)`: parked workers were taken."""

    def __init__(self, slots: SlotSet, revisions: Revisions, *, refill: Callable[[str], None]) -> None:
        self._slots, self._revisions, self._refill = slots, revisions, refill
        self._runs: dict[str, _Run] = {}

    async def recover(self) -> None:
        """Ends what an agent before this one left: nobody waits for it any more."""
        left = [slot for slot in self._slots.all.values() if slot.record.replay and not slot.gone.is_set()]
        await asyncio.gather(*(self._slots.end(slot, 0) for slot in left))

    async def handle(self, command: NodeCommand) -> tuple[str, tuple[ReplayedRank, ...]]:
        """Carries out a `replay`: a sentence, and what each rank here did. Raises SlotFailed where it could not be run."""
        if command.steps == 0:
            return f"{await self.end(command.job)} replays ended", ()
        place = command.place
        if place is None or not command.command or command.world_size < place.first_rank + place.count:
            raise SlotFailed("a replay names a command, ranks and a world they fit in")
        if command.steps > STEPS_MAX or not command.within_s:
            raise SlotFailed(f"a replay is of 1 to {STEPS_MAX} steps and has a deadline")
        at_work = [slot for slot in self._slots.there(command.job) if slot.record.attempt]
        if at_work:
            raise SlotFailed(f"ranks of attempt {at_work[0].record.attempt} are still there: stop it first")
        await self.end(command.job)
        run = self._runs[command.key] = _Run(command.job)
        try:
            return await self._run(command, run)
        finally:
            await asyncio.shield(asyncio.gather(*(self._slots.end(slot, 0) for slot in run.slots)))
            for slot in run.slots:  # of a script that writes there by itself
                await asyncio.to_thread(shutil.rmtree, slot.folder / CHECKPOINTS, ignore_errors=True)
            run.done.set()
            del self._runs[command.key]

    async def end(self, job: str) -> int:
        """Ends the job's replays here, and waits until nothing is left of them; how many there were."""
        runs = [run for run in self._runs.values() if run.job == job]
        for run in runs:
            run.over.set()
        await asyncio.gather(*(run.done.wait() for run in runs))
        return len(runs)

    async def _run(self, command: NodeCommand, run: _Run) -> tuple[str, tuple[ReplayedRank, ...]]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        plan = plan_of(command)  # what parked workers were made of: the job's own directory
        try:
            moved = await self._revisions.at(command)
        except RevisionFailed as error:
            raise SlotFailed(str(error)) from None
        idle = self._slots.fit(command.job, plan, command.revision)
        assert command.place is not None
        for rank in range(command.place.first_rank, command.place.first_rank + command.place.count):
            slot = idle.pop(0) if idle else await self._slots.make(command.job, plan, parked=False)
            directory = moved.directory if command.revision else ""
            slot.note(replay=command.key, rank=rank, world_size=command.world_size, directory=directory)
            run.slots.append(slot)
        await asyncio.gather(*(self._go(slot, moved) for slot in run.slots))
        self._refill(command.job)
        why = await self._wait(run, begun_s + command.within_s)
        await asyncio.gather(*(self._slots.end(slot, 0) for slot in run.slots if slot.ended is None))
        if unrecorded := [slot.record.rank for slot in run.slots if (slot.ended or {}).get("code") == UNRECORDED]:
            raise SlotFailed(f"the hook could not record rank {unrecorded[0]}: is there room in {self._slots.folder}?")
        secrets = secrets_in({**os.environ, **dict(plan.environment)})
        ranks = tuple([await asyncio.to_thread(_replayed, slot, command.steps, why, secrets) for slot in run.slots])
        warm = sum(1 for slot in run.slots if slot.record.warm)
        return f"{len(ranks)} ranks replayed, {warm} of them warm, in {loop.time() - begun_s:.1f} s{why and f': {why}'}", ranks

    async def _go(self, slot: Slot, command: NodeCommand) -> None:
        plan = plan_of(command)
        form = parked_form(plan.command) if slot.record.parked else None
        environment = {
            **ranked(self._slots.environment(slot, plan), command, slot.record.rank),
            # Nothing for the job's telemetry, nor among its checkpoints; the ranks meet under a name of their own.
            "KEEPSTEP_SOCKET": "",
            "KEEPSTEP_CHECKPOINTS": str(slot.folder / CHECKPOINTS),
            "KEEPSTEP_STORE_PREFIX": f"{command.job}/replay/{command.master_port}/{command.attempt}",
            "KEEPSTEP_REPLAY_STEPS": str(command.steps),
            "KEEPSTEP_REPLAY_TRACE": str(slot.folder / TRACE),
            "KEEPSTEP_REPLAY_SEED": str(SEED),
        }
        await slot.go(form[1] if form else list(plan.command), environment, plan.directory)

    async def _wait(self, run: _Run, until_s: float) -> str:
        """Until all ranks have ended, one has failed, or time is up; why it was cut short."""
        loop = asyncio.get_running_loop()
        over = asyncio.create_task(run.over.wait())
        waiting = {asyncio.create_task(slot.gone.wait()): slot for slot in run.slots}
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    {*waiting, over}, timeout=max(0.0, until_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if over in done:
                    return "it was ended"
                if not done:
                    return "its time was up"
                for task in done:
                    slot = waiting.pop(task)
                    if (slot.ended or {}).get("code") != 0:
                        return f"rank {slot.record.rank} failed"
            return ""
        finally:
            for task in (over, *waiting):
                task.cancel()


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rank wrote: see ReplayedRank."""

    first_step: int = -1
    digests: tuple[str, ...] = ()
    bad_step: int = -1
    blank: bool = True
    parameters: str = ""


def _replayed(slot: Slot, steps: int, why: str, secrets: tuple[str, ...]) -> ReplayedRank:
    """Of a rank that has ended."""
    ended = slot.ended or {}
    seen = read_trace(slot.folder / TRACE, steps)
    how = f"exit code {ended['code']}" if ended.get("code") is not None else f"signal {ended.get('signal')}"
    detail, kind = "", "done"
    if slot.record.asked:  # by this module, and nobody else: it had not ended by itself
        detail, kind = why, "cut"
    elif ended.get("code") != 0:
        lines = shown(str(ended.get("stderr_tail", "")).encode("utf-8", "replace"), secrets).strip().split("\n")
        detail, kind = f"{how}: {lines[-1]}"[:DETAIL_CHARACTERS_MAX], "crashed"
    return ReplayedRank(
        rank=slot.record.rank, ended=kind, first_step=seen.first_step, trace=seen.digests, bad_step=seen.bad_step, blank=seen.blank,
        parameters=seen.parameters, detail=detail,
    )  # fmt: skip


def read_trace(path: Path, steps: int) -> Trace:
    """What the script's process wrote is not trusted: bounded, and what is no such line ends it. A value that is no finite number is no
    fault where the step's update was skipped."""
    first_step, bad_step, blank, parameters = -1, -1, True, ""
    digests: list[str] = []
    digest = b""
    try:
        with path.open("rb") as file:
            lines = file.read(TRACE_BYTES_MAX).split(b"\n")
    except OSError:
        return Trace()
    for line in lines[: steps + 1]:
        try:
            value = json.loads(line)
            if "parameters" in value:
                parameters = str(value["parameters"])[:64]
                break
            step = int(value["step"])
            numbers = [None if value[name] is None else float.fromhex(value[name]) for name in ("loss", "grad_norm")]
            packed = b"".join(b"\0" if number is None else struct.pack("<cd", b"\1", number) for number in numbers)
            digest = sha256(digest + struct.pack("<q", step) + packed).digest()[:8]
        except (ValueError, KeyError, TypeError, RecursionError, struct.error, OverflowError):
            break
        if len(digests) == steps:
            break
        first_step = step if not digests else first_step
        digests.append(digest.hex())
        given = [number for number in numbers if number is not None]
        blank = blank and not given
        if bad_step < 0 and not value.get("skipped") and not all(map(math.isfinite, given)):
            bad_step = step
    return Trace(first_step, tuple(digests), bad_step, blank, parameters)
