"""Tests of this machine, on a node: run by the testers beside the job's parked workers, which stay parked and warm; workers are started
for it where none is parked. What hung or died is a failed test; what could not be run says nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from actuators.environment import Plan, parked_form
from actuators.slot_set import SlotSet
from actuators.slots import Slot, SlotFailed
from events.action import NodeCommand
from events.envelope import TEXT_MAX
from events.finding import CheckResult

#: Where the command says no time.
WITHIN_S = 60.0
#: Beyond its tests' time a tester has this long to answer; then it hangs itself.
ANSWER_S = 4.0
#: Of the time that is left when the workers are there, the part in which rounds may be begun.
REPEAT_SHARE = 0.7


class TestsEnded(Exception):
    """They were ended before they came to a result: the machine is wanted for something else."""


@dataclass
class _Run:
    """Tests that go on here. `over` is set to end them."""

    job: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class NodeTests:
    """`folder`: where ranks of this machine meet, through files."""

    def __init__(self, node: str, folder: Path, slots: SlotSet) -> None:
        self.node, self.folder, self._slots = node, folder, slots
        self._runs: list[_Run] = []

    async def end(self, job: str) -> int:
        """Ends the job's tests here, warm workers stay so, and waits until nothing of them runs; how many there were."""
        runs = [run for run in self._runs if run.job == job]
        for run in runs:
            run.over.set()
        await asyncio.gather(*(run.done.wait() for run in runs))
        return len(runs)

    async def run(self, command: NodeCommand, plan: Plan, kept: int) -> tuple[str, tuple[CheckResult, ...]]:
        """A sentence and the results. Afterwards no more than `kept` workers of the job's are parked. Raises SlotFailed where no
        worker could be had, TestsEnded."""
        run = _Run(command.job)
        self._runs.append(run)
        try:
            return await self._run(run, command, plan, kept)
        finally:
            self._runs.remove(run)
            run.done.set()

    async def _run(self, run: _Run, command: NodeCommand, plan: Plan, kept: int) -> tuple[str, tuple[CheckResult, ...]]:
        begun_s = time.monotonic()
        within_s = command.within_s or WITHIN_S
        count = command.place.count if command.place else 1
        if parked_form(plan.command) is None:  # no Python program: our own interpreter, which may have no torch
            plan = Plan((sys.executable, "tests"), plan.directory, plan.environment)
        warm = sum(1 for slot in self._slots.idle(command.job, plan) if slot.ready.is_set())
        try:
            workers = await self._workers(run, plan, count, begun_s + within_s * 0.8)
        except TestsEnded:
            await self._let_go(command.job, plan, kept)
            raise
        token = secrets.token_hex(8)
        folder = self.folder / token
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            left_s = within_s - (time.monotonic() - begun_s)
            specs = [
                {
                    "id": f"{token}/{rank}",
                    "tests": list(command.tests),
                    "within_s": left_s,
                    "repeat_s": min(command.repeat_s, left_s * REPEAT_SHARE),
                    "local_rank": rank,
                    "local_size": count,
                    "local_store": str(folder / "store"),
                    "nodes": list(command.nodes) or [self.node],
                    "node_rank": command.node_rank,
                    "store": [command.master_address, command.master_port, command.job] if command.master_port else None,
                }
                for rank in range(count)
            ]
            asked = asyncio.gather(*(self._ask(slot, spec, left_s) for slot, spec in zip(workers, specs, strict=True)))
            try:
                await first_of(asked, run.over)
                if run.over.is_set():
                    await asyncio.gather(*(self._call_back(slot, token) for slot in workers))
                answers = await asked
            finally:
                asked.cancel()
            if run.over.is_set():
                raise TestsEnded("its tests were ended for something else")
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)
            await self._let_go(command.job, plan, kept)
        results = merged(self.node, answers)
        failed = sorted({result.test for result in results if result.passed is False})
        said = f"failed {', '.join(failed)}" if failed else "no test failed"
        return f"{said}; {min(warm, count)} of {count} workers warm, {time.monotonic() - begun_s:.2f} s", results

    async def _workers(self, run: _Run, plan: Plan, count: int, end_s: float) -> list[Slot]:
        """Parked workers, warm ones first; missing ones are started. Raises SlotFailed, TestsEnded."""
        job = run.job
        idle = sorted(self._slots.idle(job, plan), key=lambda slot: (not slot.ready.is_set(), slot.record.slot))[:count]
        missing = [self._slots.make(job, plan, parked=True) for _ in range(count - len(idle))]
        workers = [*idle, *await asyncio.gather(*missing)]
        for slot in workers:
            left_s = max(0.0, end_s - time.monotonic())
            await first_of(slot.ready.wait(), slot.gone, run.over, timeout_s=left_s)
            if run.over.is_set():
                raise TestsEnded("its tests were ended before they began")
            if not slot.ready.is_set() or not slot.live:
                tail = str((slot.ended or {}).get("stderr_tail", "")).strip().rsplit("\n", 1)[-1][:300]
                raise SlotFailed(f"no worker to run the tests: {tail or 'it did not get ready in time'}")
        return workers

    async def _ask(self, slot: Slot, spec: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        try:
            return list((await slot.diagnose(spec, within_s + ANSWER_S))["results"])
        except SlotFailed as error:
            return [{"test": test, "passed": None, "detail": str(error)} for test in spec["tests"]]
        except TimeoutError:  # not even its deadline works there: it is replaced
            await self._slots.end(slot, 0)
            detail = f"its tester hangs: no answer in {within_s + ANSWER_S:.0f} s"
            return [{"test": spec["tests"][0] if spec["tests"] else "gpu_self_test", "passed": False, "detail": detail}]

    async def _call_back(self, slot: Slot, token: str) -> None:
        """A request of no tests takes the place of the one that runs."""
        if slot.record.attempt or slot.record.replay:  # it is a rank by now, and its tester gone
            return
        try:
            await slot.diagnose({"id": f"{token}/{slot.record.slot}", "tests": [], "within_s": ANSWER_S}, ANSWER_S)
        except (SlotFailed, TimeoutError):
            await self._slots.end(slot, 0)

    async def _let_go(self, job: str, plan: Plan, kept: int) -> None:
        idle = sorted(self._slots.idle(job, plan), key=lambda slot: (not slot.ready.is_set(), slot.record.slot))
        await asyncio.gather(*(self._slots.end(slot, 0) for slot in idle[kept:]))


async def first_of(work: Awaitable[Any], *events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Until the work is done (a future goes on, anything else is cancelled), an event is set, or the time is over."""
    ours = [asyncio.create_task(event.wait()) for event in events]
    first: asyncio.Future[Any] = work if isinstance(work, asyncio.Future) else asyncio.ensure_future(work)
    try:
        await asyncio.wait({first, *ours}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*ours, *(() if first is work else (first,))):
            task.cancel()


def merged(node: str, answers: Sequence[Iterable[dict[str, Any]]]) -> tuple[CheckResult, ...]:
    """One result a test (and peer) out of those of the machine's ranks, in their order: failed if one failed, done if one was done; the
    lowest rate; a digest of all digests."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[int, dict[str, Any]]]] = {}
    for rank, results in enumerate(answers):
        for result in results:
            found.setdefault((str(result["test"]), tuple(map(str, result.get("peers", ())))), []).append((rank, result))
    return tuple(_of_ranks(node, test, peers, ranks, len(answers)) for (test, peers), ranks in found.items())


def _of_ranks(node: str, test: str, peers: tuple[str, ...], ranks: list[tuple[int, dict[str, Any]]], count: int) -> CheckResult:
    passed = [result["passed"] for _, result in ranks]
    verdict = False if False in passed else True if True in passed else None
    telling = [(rank, result) for rank, result in ranks if result["passed"] is verdict]
    details = dict.fromkeys(
        f"local rank {rank}: {r['detail']}" if count > 1 and verdict is False else r["detail"] for rank, r in telling
    )
    digests = [str(result.get("digest", "")) for _, result in ranks]
    values = [result["value"] for _, result in telling if result.get("value") is not None]
    return CheckResult(
        test=test[:128],
        node=node,
        passed=verdict,
        detail="; ".join(details)[:TEXT_MAX],
        peers=peers,
        value=min(values) if values else None,
        unit=next((str(result["unit"]) for _, result in ranks if result.get("unit")), ""),
        duration_s=max(float(result.get("duration_s", 0)) for _, result in ranks),
        digest=_digest(digests) if verdict else "",
        software=next((str(result["software"]) for _, result in ranks if result.get("software")), "") if verdict else "",
        rounds=max(int(result.get("rounds", 1)) for _, result in ranks),
        changed=tuple(sorted({str(change) for _, result in ranks for change in result.get("changed", ())})),
        restored=all(bool(result.get("restored", True)) for _, result in ranks),
    )


def _digest(digests: list[str]) -> str:
    if not all(digests):
        return ""
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()[:32]


def clear(folder: Path) -> None:
    """What runs that were cut off by the agent's own end left."""
    if folder.is_dir():
        for name in os.listdir(folder):
            shutil.rmtree(folder / name, ignore_errors=True)
