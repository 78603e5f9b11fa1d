"""All rank slots of a node: made, found again, ended, swept and pruned. What they are used for is the rank host's business."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from actuators.environment import Plan, base, host_mark, mark_prefix, parked_form
from actuators.files import load
from actuators.processes import Process, alive, marked, send_exact, state_of
from actuators.slots import Slot, SlotFailed, SlotRecord
from actuators.tail import secrets_in

ENDED_SLOTS_KEPT = 32
KILL_S = 5.0
#: Mark of a parked worker: it has no job's attempt yet.
HELLO_S = 1.0


class SlotSet:
    """`on_exit(slot)`: a worker ended; `on_found(slot)`: one that was there before is there again, at work."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        boot_id: str,
        hook_folder: str,
        socket_path: str,
        log_bytes_max: int,
        parked_idle_s: float,
        on_exit: Callable[[Slot], None],
        on_found: Callable[[Slot], None],
    ) -> None:
        self.folder, self.node, self.boot_id = folder, node, boot_id
        self.mark = host_mark(folder.parent)
        self.hook_folder, self.socket_path = hook_folder, socket_path
        self.log_bytes_max, self.parked_idle_s = log_bytes_max, parked_idle_s
        self._on_exit, self._on_found = on_exit, on_found
        self.all: dict[str, Slot] = {}

    async def recover(self) -> None:
        """Finds the slots of before: live ones again, and the ends that were missed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in sorted(self.folder.iterdir(), key=lambda path: path.name):
            try:
                record = SlotRecord(**load(folder / "slot.json"))
            except TypeError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            slot = self._slot(folder, record)
            if record.boot_id != self.boot_id:  # nothing of another boot is alive
                slot.ended_with(load(folder / "exit.json") or {})
                slot.gone.set()
            elif not await slot.connect():
                await slot.finish()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HELLO_S):
                        await slot.hello.wait()
                if slot.phase == "running" and record.attempt:
                    slot.note(gone_to=True)
                    self._on_found(slot)
                elif not record.attempt and slot.worker is None:  # half made
                    await self.end(slot, 0)
        self.prune()

    def _prefix(self, job: str) -> str:
        return mark_prefix(self.mark, self.node, job)

    def _slot(self, folder: Path, record: SlotRecord) -> Slot:
        slot = Slot(folder, record, self._on_exit, lambda _: self.prune(), self._prefix(record.job) + record.slot)
        self.all[record.slot] = slot
        return slot

    async def make(self, job: str, plan: Plan, *, parked: bool) -> Slot:
        """A slot with its shim, and with `parked` its worker warming up at a low priority. Raises SlotFailed."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"  # sorts by age
        slot = self._slot(self.folder / name, SlotRecord(name, job, self.boot_id, plan.digest, parked))
        form = parked_form(plan.command) if parked else None
        environment = self.environment(slot, plan)
        try:
            await slot.spawn(
                parked=form[0] if form else None,
                environment=environment,
                directory=plan.directory,
                secrets=secrets_in(environment),
                quiet=parked,
                log_bytes_max=self.log_bytes_max,
                idle_s=self.parked_idle_s,
            )
            if slot.record.asked or slot.gone.is_set():
                raise SlotFailed("it was ended while it was made")
        except BaseException:
            self.all.pop(name, None)
            await slot.close()
            await slot.fence(1.0)
            shutil.rmtree(slot.folder, ignore_errors=True)
            raise
        return slot

    def environment(self, slot: Slot, plan: Plan) -> Mapping[str, str]:
        return base(
            os.environ,
            plan,
            node=self.node,
            job=slot.record.job,
            mark=slot.mark,
            hook_folder=self.hook_folder,
            socket_path=self.socket_path,
        )

    def there(self, job: str) -> list[Slot]:
        """The job's slots of which something may be left, parked ones included."""
        return [slot for slot in self.all.values() if slot.record.job == job and not slot.gone.is_set()]

    def attempt(self, job: str, attempt: int) -> list[Slot]:
        """The slots of one attempt, ended ones included as long as they are kept."""
        return [slot for slot in self.all.values() if slot.record.job == job and slot.record.attempt == attempt]

    def idle(self, job: str, plan: Plan | None = None) -> list[Slot]:
        """Parked workers of the job's that nobody uses yet."""
        return [
            slot
            for slot in self.all.values()
            if slot.live
            and slot.record.parked
            and slot.record.job == job
            and not slot.record.attempt
            and not slot.record.replay
            and not slot.record.asked
            and (plan is None or slot.record.plan == plan.digest)
        ]

    def fit(self, job: str, plan: Plan, revision: str) -> list[Slot]:
        """Parked workers that can become ranks of a revision, ready ones first. They have read nothing of the job's code, so that they can be
        of any, unless they were told to import it ahead."""
        if revision and dict(plan.environment).get("KEEPSTEP_PARKED_IMPORTS"):
            return []
        return sorted(self.idle(job, plan), key=lambda slot: (not slot.ready.is_set(), slot.record.slot))

    async def end(self, slot: Slot, grace_s: float) -> list[Process]:
        """Ends it on command; what does not die."""
        slot.note(asked=True)
        return [process for process in await slot.end(grace_s, KILL_S) if alive(process)]

    async def sweep(self, job: str, spared: set[str]) -> int:
        """Kills what carries a mark of the job's here, but for the spared marks. Raises SlotFailed if something does not die."""
        prefix = self._prefix(job)
        killed: set[Process] = set()
        end = asyncio.get_running_loop().time() + KILL_S
        while True:
            found = [process for process, mark in await asyncio.to_thread(marked, prefix) if mark not in spared]
            if not found:
                return len(killed)
            if asyncio.get_running_loop().time() > end:
                raise SlotFailed(f"processes of the job do not die (uninterruptible?): {pids(found)}")
            for process in found:
                send_exact(process, signal.SIGKILL)
            killed.update(found)
            await asyncio.sleep(0.005)

    def prune(self) -> None:
        """Keeps the folders (logs) of the last ended slots."""
        ended = sorted(
            (s for s in self.all.values() if s.gone.is_set() and s.record.exit_reported), key=lambda s: s.record.slot
        )
        for slot in ended[:-ENDED_SLOTS_KEPT]:
            del self.all[slot.record.slot]
            shutil.rmtree(slot.folder, ignore_errors=True)

    async def close(self) -> None:
        """Lets go of the shims, which go on."""
        await asyncio.gather(*(slot.close() for slot in self.all.values()))


def pids(processes: list[Process]) -> str:
    return ", ".join(f"pid {p.pid} ({state_of(p)})" for p in processes[:10]) + ("…" if len(processes) > 10 else "")
