"""back_at_work: seconds until the job steps again after a killed rank, and beyond the heartbeat limit after a stopped one, beside NVRx's
ft_launcher: the same script and model, machine, 4 ranks and limit, each side measured by the script's own log of its steps."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from events.action import OutcomeRecorded
from events.clock import NS
from events.decision import DecisionMade
from events.incident import Signal
from events.job import JobDeclared, Place
from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE
from infra.demo import processes_of
from infra.home import Home
from infra.jetstream import JetStreamLog
from infra.pipeline import Node, Pipeline, say
from infra.watch import Watch
from tests.bench import peer
from tests.bench.live import quiet_machine, stage
from tests.bench.report import report

NAMES = ("back_at_work_killed", "back_at_work_stopped")
ROUNDS = int(os.environ.get("KEEPSTEP_BENCH_ROUNDS", "5"))
RANKS, VICTIM, LIMIT_S, RATIO = 4, 1, 5.0, 1 / 3
#: Steps of an attempt before it is broken (again).
STEADY_STEPS = 15
BACK_S_MAX, STEADY_S_MAX = 120.0, 240.0
SCRIPT = Path(__file__).resolve().parent / "job_script.py"
JOB = "bench"
POLICY = yaml.safe_dump(
    {
        "mode": "auto",
        "decider": {"relapse_s": 0.5},  # the same is broken again and again, on purpose
        "detectors": {
            "phase_limit_s": {"startup": 120.0, "step": LIMIT_S, "evaluation": 60.0, "checkpoint": 60.0, "undeclared": 120.0}
        },
    }
)
Break = Callable[[int], None]


@dataclass(slots=True)
class Steps:
    """The ranks' logs: who runs, and which steps are finished when (monotonic seconds)."""

    folder: Path
    pids: dict[int, int] = field(default_factory=dict)
    #: Of rank 0: (attempt, step, finished at).
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    _read: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        for rank in range(RANKS):
            with suppress(OSError), (self.folder / f"steps.{rank}").open("rb") as log:
                log.seek(self._read.get(rank, 0))
                text = log.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read[rank] = self._read.get(rank, 0) + len(whole)
                for line in whole.decode().splitlines():
                    what, attempt, number, at_s = line.split()
                    if what == "start":
                        self.pids[rank] = int(number)
                    elif rank == 0:
                        self.steps.append((int(attempt), int(number), float(at_s)))

    @property
    def attempt(self) -> int:
        return self.steps[-1][0] if self.steps else -1

    def finished(self) -> int:
        """Steps of the newest attempt."""
        return sum(1 for attempt, _, _ in reversed(self.steps[-100:]) if attempt == self.attempt)

    async def until(self, true: Callable[[], bool], within_s: float, what: str, alive: Callable[[], None]) -> None:
        end_s = time.monotonic() + within_s
        while True:
            self.look()
            if true():
                return
            alive()
            if time.monotonic() > end_s:
                raise RuntimeError(f"{what} did not come within {within_s:g} s")
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Side:
    """One of the two that keep the job running. `steady`: it is as ready for a fault as it will be."""

    steps: Steps
    alive: Callable[[], None]
    steady: Callable[[], bool] = lambda: True

    async def broken(self, number: int) -> tuple[float, float, float]:
        """Sends the signal to the victim; (monotonic seconds of it, of the next finished step, and until it is steady again)."""
        steps = self.steps
        await self.settled()
        stage(f"{signal.Signals(number).name} to rank {VICTIM}")
        before = steps.attempt
        at_s = time.monotonic()
        os.kill(steps.pids[VICTIM], number)
        await steps.until(lambda: steps.attempt > before, BACK_S_MAX, "the next attempt's first step", self.alive)
        back_s = next(at for attempt, _, at in steps.steps if attempt > before)
        return at_s, back_s, back_s - at_s

    async def settled(self) -> None:
        steady = lambda: self.steps.finished() >= STEADY_STEPS and self.steady()  # noqa: E731
        await self.steps.until(steady, STEADY_S_MAX, "steady training", self.alive)


async def main() -> None:
    await asyncio.to_thread(peer.installed)
    with quiet_machine() as load:
        ours, legs = await _ours()
        theirs = await _theirs()
    for name, at, beyond_s in (("killed", 0, 0.0), ("stopped", 1, LIMIT_S)):
        own, other = ours[at], theirs[at]
        value, peer_value = (statistics.median(times) - beyond_s for times in (own, other))
        report(
            f"back_at_work_{name}", value, "s", bound=round(peer_value * RATIO, 2), peer="nvidia-resiliency-ext 0.4.1, ft_launcher",
            peer_value=peer_value, n=len(own), limit_s=beyond_s or None, rounds=[round(t - beyond_s, 2) for t in own],
            peer_rounds=[round(t - beyond_s, 2) for t in other], legs=legs[at], **load,
        )  # fmt: skip


async def _rounds(side: Side, after: Callable[[float, float], Awaitable[None]] | None = None) -> list[list[float]]:
    """Times to the next step of killed and of stopped ranks."""
    times: list[list[float]] = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        found = []
        for _ in range(ROUNDS):
            at_s, back_s, took_s = await side.broken(number)
            stage(f"{number.name}: back after {took_s:.2f} s")
            found.append(took_s)
            if after is not None:
                await after(at_s, back_s)
        times.append(found)
    return times


# --- ours ----------------------------------------------------------------------------------------------------------------------


async def _ours() -> tuple[list[list[float]], list[dict[str, float]]]:
    stage("keepstep: starting the pipeline and the job")
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        home = Home(folder / "home")
        names = [f"node-{i}" for i in range(RANKS)]
        pipeline = Pipeline(home, POLICY, [Node(node, "none") for node in names], "bench")
        watch = Watch()
        ledger: list[tuple[int, Any]] = []
        try:
            async with _reading(pipeline, watch, ledger) as nc:
                fact = JobDeclared(
                    job=JOB, nodes=tuple(Place(node=node) for node in names), dp=RANKS, author="bench",
                    command=(sys.executable, str(SCRIPT), "--folder", str(folder)), directory=str(folder),
                    environment=(("OMP_NUM_THREADS", "1"),), checkpoints=str(folder / "checkpoints"),
                )  # fmt: skip
                await say(JetStreamLog(nc, LEDGER), fact, JOB)

                def ready() -> bool:
                    beats = [beat for _, beat in watch.nodes.values()]
                    return not watch.open_incidents() and sum(1 for b in beats if b is not None and b.parked >= 1) == RANKS

                legs: list[list[dict[str, float]]] = []

                async def after(at_s: float, back_s: float) -> None:
                    await asyncio.sleep(1.0)
                    legs.append([_legs(ledger, at_s, back_s)])

                side = Side(Steps(folder), pipeline.supervisor.check, ready)
                times = await _rounds(side, after)
            middle = [_medians([leg for one in legs[i * ROUNDS : (i + 1) * ROUNDS] for leg in one]) for i in range(2)]
            return times, middle
        finally:
            await pipeline.stop()
            for node in names:
                for process in processes_of(node, str(home.node(node))):
                    with suppress(psutil.Error):
                        process.kill()
            await asyncio.sleep(0.5)


@asynccontextmanager
async def _reading(pipeline: Pipeline, watch: Watch, ledger: list[tuple[int, Any]]) -> Any:
    """The pipeline, started, and what its ledger and nodes say."""
    await pipeline.start()
    nc = await pipeline.address.connect("operator")

    async def read(stream: str) -> None:
        async with aclosing(JetStreamLog(nc, stream).read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                if stream != LEDGER:
                    watch.telemetry(record)
                elif (event := watch.ledger(record)) is not None:
                    ledger.append((record.time_ns, event.data))

    readers = [asyncio.create_task(read(stream)) for stream in (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB)]
    try:
        yield nc
    finally:
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await nc.close()


def _legs(ledger: list[tuple[int, Any]], at_s: float, back_s: float) -> dict[str, float]:
    """Where the time went: seconds from the fault to each of these."""
    fault_ns = time.time_ns() - int((time.monotonic() - at_s) * NS)

    def first(true: Callable[[Any], bool]) -> float:
        return next(((ns - fault_ns) / NS for ns, fact in ledger if ns > fault_ns and true(fact)), -1.0)

    def outcome(verb: str) -> float:
        return first(lambda fact: isinstance(fact, OutcomeRecorded) and fact.verb == verb)

    return {
        "signal": first(lambda fact: isinstance(fact, Signal)),
        "decision": first(lambda fact: isinstance(fact, DecisionMade)),
        "stopped": outcome("stop_attempt"),
        "started": outcome("start_attempt"),
        "step": back_s - at_s,
    }


def _medians(legs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(leg[name] for leg in legs), 3) for name in legs[0]}


# --- theirs --------------------------------------------------------------------------------------------------------------------


async def _theirs() -> list[list[float]]:
    stage("ft_launcher: starting the job")
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        (folder / "checkpoints").mkdir()
        with (folder / "log").open("wb") as log:
            process = psutil.Popen(
                peer.command(RANKS, LIMIT_S, [str(SCRIPT), "--folder", str(folder)]), stdin=-3, stdout=log, stderr=log,
                env=peer.environment(), cwd=folder, start_new_session=True,
            )  # fmt: skip

        def alive() -> None:
            if process.poll() is not None:
                raise RuntimeError(f"ft_launcher ended with {process.returncode}: {(folder / 'log').read_text()[-1000:]}")

        try:
            return await _rounds(Side(Steps(folder), alive))
        except RuntimeError as error:
            raise RuntimeError(f"{error}; ft_launcher: {(folder / 'log').read_text()[-3000:]}") from None
        finally:
            await asyncio.to_thread(_end, process)


def _end(process: psutil.Popen) -> None:
    """The launcher and all it started, stopped ranks included."""
    children = process.children(recursive=True) if process.poll() is None else []
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    with suppress(psutil.Error):
        process.kill()
    process.wait(10)
    psutil.wait_procs(children, 10)


if __name__ == "__main__":
    asyncio.run(main())
