"""The demo: a real training job, broken for real, one fault after another, and brought back by the pipeline as a user runs it. Nothing
here decides or repairs: this module only breaks things, waits for the ledger to tell what came of it, and keeps the score."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from events import subjects
from events.clock import NS
from events.job import JobDeclared, Place
from events.ports import DEADLETTER, LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, LogError
from infra import demo_code
from infra.bus import BusClient
from infra.clock import wall_ns
from infra.home import Home
from infra.jetstream import JetStreamLog
from infra.pipeline import Node, Pipeline
from infra.pipeline import say as tell
from infra.tasks import ended
from infra.watch import IncidentStory, Watch

JOB = "demo"
NODES = ("node-0", "node-1", "node-2", "node-3")
STANDBYS = ("standby-0", "standby-1")
RACKS = {
    "node-0": "rack-a",
    "node-1": "rack-a",
    "node-2": "rack-b",
    "node-3": "rack-b",
    "standby-0": "rack-c",
    "standby-1": "rack-c",
}
DEVICE = "0000:3b:00"

#: Short limits, so that a stall shows within seconds; and since other programs run on this machine too, half the speed is the least that
#: counts as a decline. Every other threshold is the default.
POLICY = yaml.safe_dump(
    {
        "mode": "auto",
        "detectors": {
            "progress_note_s": 2.0,
            "phase_limit_s": {"startup": 90.0, "step": 4.0, "evaluation": 8.0, "checkpoint": 8.0, "undeclared": 90.0},
            "pace": {"decline_min": 0.5},
        },
        "decider": {"recovery_deadline_s": 90.0, "quiet_s": 5.0, "relapse_s": 1.0},
        "budget": {scope: {"evictions_max": 4, "share_max": 1.0} for scope in ("job", "rack", "fleet")},
    },
    sort_keys=False,
)
#: A fault that is not over after this long is not going to be.
FAULT_S_MAX = 75.0
START_S_MAX = 90.0


class DemoFailed(Exception):
    """The demo could not go on. One sentence."""


@dataclass(slots=True)
class Score:
    """One fault and what came of it. Seconds count from the fault; None: it did not happen. `missed`: why it does not count."""

    fault: str
    expected: str
    injected_ns: int = 0
    detected_s: float | None = None
    decided_s: float | None = None
    decided: str = ""
    mechanism: str = ""
    back_s: float | None = None
    steps_lost: int | None = None
    note: str = ""
    missed: str = ""
    done: bool = False


@dataclass(slots=True)
class Demo:
    """Runs the whole. `on_change` is called when there is something new to show; `phase` says what is going on."""

    home: Home
    real_kmsg: bool = False
    nodes: tuple[str, ...] = NODES
    standbys: tuple[str, ...] = STANDBYS
    policy: str = POLICY
    on_change: Callable[[], None] = lambda: None
    watch: Watch = field(default_factory=Watch)
    scores: list[Score] = field(default_factory=list)
    phase: str = "starting"
    pipeline: Pipeline = field(init=False)
    began_ns: int = 0
    ended_ns: int = 0
    finished: bool = False
    recording: Path = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _nc: BusClient | None = None
    _readers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recording = self.home.path / "recording"
        nodes = [
            Node(name, self._kernel_log(name), trust_user_facility=self.real_kmsg and name == NODES[2])
            for name in self.everyone
        ]
        self.pipeline = Pipeline(self.home, self.policy, nodes, "demo")

    @property
    def everyone(self) -> tuple[str, ...]:
        return (*self.nodes, *self.standbys)

    def _kernel_log(self, node: str) -> str:
        return "kmsg" if self.real_kmsg and node == NODES[2] else str(self.home.path / "kernel" / f"{node}.log")

    # -- the whole ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The whole story. Raises DemoFailed, and whatever the pipeline says when it does not start. `scores` holds what was reached.
        `close` must be awaited afterwards, however this ended."""
        (self.home.path / "kernel").mkdir(parents=True, exist_ok=True)
        for node in self.everyone:
            (self.home.path / "kernel" / f"{node}.log").touch()
        await self.pipeline.start()
        self._nc = nc = await self.pipeline.address.connect("operator")
        self._readers = [asyncio.create_task(self._read(nc, stream)) for stream in (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB)]
        await self._start_job(nc)
        for fault in self.faults():
            await fault()
        await self._finish()

    def faults(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """What is broken, in order."""
        return (
            self._rank_killed,
            self._echo_storm,
            self._gpu_lost,
            self._agent_killed,
            self._flood,
            self._node_dead,
            self._rank_stopped,
        )

    async def close(self) -> None:
        """Records what there is, and ends all that was started: no process of this demo's outlives it."""
        self.ended_ns = wall_ns()
        if self._nc is not None and self.began_ns:
            self.say("recording")
            with contextlib.suppress(LogError):
                await self._record(self._nc)
        await ended(*self._readers)
        if self._nc is not None:
            await self._nc.close()
        self.say("stopping")
        agents = [name for name in self.pipeline.supervisor.children if name.startswith("agent-")]
        await asyncio.gather(*(self.pipeline.supervisor.stop(name) for name in agents))
        await asyncio.to_thread(self.end_ranks)
        await self.pipeline.stop()

    def say(self, phase: str) -> None:
        self.phase = phase
        self.on_change()

    async def _read(self, nc: BusClient, stream: str) -> None:
        async with aclosing(JetStreamLog(nc, stream).read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                if stream == LEDGER:
                    self.watch.ledger(record)
                else:
                    self.watch.telemetry(record)
                self._changed.set()
                self.on_change()

    async def _until(self, true: Callable[[], bool], seconds: float, what: str) -> bool:
        """Waits for something to be so; False if it does not come to be. A part that died for good ends the demo."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not true():
            self.pipeline.supervisor.check()
            left = deadline - loop.time()
            if left <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 0.25))
        return True

    # -- the job -----------------------------------------------------------------------------------------------------------

    async def _start_job(self, nc: BusClient) -> None:
        self.say("waiting for the agents")
        everyone = set(self.everyone)
        if not await self._until(lambda: everyone <= set(self.watch.nodes), 30, "agents"):
            lost = ", ".join(sorted(everyone - set(self.watch.nodes)))
            raise DemoFailed(f"no heartbeat of {lost} within 30 s; see the logs in {self.home.logs}")
        self.say("starting the training job")
        code = await demo_code.make(self.code)
        self.stop_file.unlink(missing_ok=True)
        fact = self.declaration(code.revision)
        await tell(JetStreamLog(nc, LEDGER), fact, JOB)
        if not await self._until(lambda: self._confirmed(1), START_S_MAX, "training"):
            raise DemoFailed(
                f"the training job made no healthy step within {START_S_MAX:.0f} s; see {self.home.path}/nodes and {self.home.logs}"
            )
        self.began_ns = wall_ns()
        await self._steady()

    def declaration(self, revision: str) -> JobDeclared:
        """The job, as `keepstep run` would declare it."""
        return JobDeclared(
            job=JOB, nodes=tuple(map(self._place, self.nodes)), standbys=tuple(map(self._place, self.standbys)), dp=len(self.nodes),
            command=(sys.executable, demo_code.SCRIPT.name, *self._options()), directory=str(self.code),
            environment=(("OMP_NUM_THREADS", "1"),), checkpoints=str(self.home.path / "checkpoints"), code_revision=revision, author="demo",
        )  # fmt: skip

    def _options(self) -> tuple[str, ...]:
        return ("--steps", "6000", "--until-file", str(self.stop_file), "--checkpoint-every", "20")

    @staticmethod
    def _place(name: str) -> Place:
        return Place(node=name, rack=RACKS.get(name, "rack-c"), serial=f"serial-{name}")

    @property
    def code(self) -> Path:
        """The job's folder: a git repository, where git is installed."""
        return self.home.path / "code"

    @property
    def stop_file(self) -> Path:
        return self.home.path / "finish"

    def _confirmed(self, attempt: int) -> bool:
        job = self.watch.fleet.jobs.get(JOB)
        return job is not None and job.confirmed >= attempt and job.confirmed == job.attempt

    def step(self) -> int:
        view = self.watch.jobs.get(JOB)
        return view.step if view else -1

    async def _steady(self, steps: int = 12) -> None:
        """Lets the job train on a while, until spare workers are warm again and it is beyond where it last failed: a fault a day, not a fault
        a second, is the rule."""
        self.say("training")
        job = self.watch.fleet.jobs.get(JOB)
        goal = max(self.step() + steps, job.lapse.step + 4 if job and job.lapse else 0)
        await self._until(lambda: self.step() >= goal and not self.watch.open_incidents() and self._warm(), 60, "steps")

    def _warm(self) -> bool:
        job = self.watch.fleet.jobs.get(JOB)
        if job is None:
            return False

        def parked(node: str) -> bool:
            beat = self.watch.nodes.get(node, (0, None))[1]
            return beat is not None and beat.parked >= 1

        # A machine that came back from its examination is a spare too, and gets warm with the next start.
        spares = [place.node for place in job.standbys]
        return all(parked(place.node) for place in job.places) and (not spares or any(map(parked, spares)))

    async def _finish(self) -> None:
        score = self._new("the job finishes", "no incident")
        self.stop_file.touch()
        done = await self._until(lambda: self._wanted() == "finished", 30, "the end")
        score.note = "ranks ended with 0 at different times" if done else ""
        score.missed = "" if done else "the job did not finish within 30 s"
        if not score.missed and any(s.opened_ns > score.injected_ns for s in self.watch.incidents.values()):
            score.missed = "an incident was opened for it"
        self.finished = done
        self._close(score)

    def _wanted(self) -> str:
        job = self.watch.fleet.jobs.get(JOB)
        return job.wanted if job else ""

    # -- the faults --------------------------------------------------------------------------------------------------------

    def _new(self, fault: str, expected: str) -> Score:
        score = Score(fault, expected, injected_ns=wall_ns())
        self.scores.append(score)
        self.say(fault)
        return score

    def _close(self, score: Score) -> None:
        score.done = True
        self.on_change()

    async def _rank_killed(self) -> None:
        score = self._new("a rank killed (SIGKILL)", "reattempt")
        await self._break(score, "reattempt", (), lambda: self._signal_rank(1, signal.SIGKILL), storm=True)
        await self._steady()

    async def _gpu_lost(self) -> None:
        score = self._new("Xid 79 on node-2" + (" (/dev/kmsg)" if self.real_kmsg else ""), "evict node-2")
        line = f"NVRM: Xid (PCI:{DEVICE}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
        await self._break(score, "evict", (NODES[2],), lambda: self._kernel_line(NODES[2], line))
        await self._steady()

    async def _node_dead(self) -> None:
        victim = self._node_of_rank(3)
        score = self._new(f"{victim} dies: agent and rank gone", f"evict {victim}")
        await self._break(score, "evict", (victim,), lambda: self._kill_node(victim))
        await self._steady()

    async def _rank_stopped(self) -> None:
        score = self._new("a rank stopped (SIGSTOP)", "reattempt")
        await self._break(score, "reattempt", (), lambda: self._signal_rank(1, signal.SIGSTOP))
        await self._steady(10)

    async def _break(
        self,
        score: Score,
        rung: str | tuple[str, ...],
        nodes: tuple[str, ...],
        inject: Callable[[], Awaitable[None]],
        *,
        storm: bool = False,
        trail: tuple[str, ...] = (),
    ) -> None:
        """Injects a fault and waits until its incident is closed; then holds what happened against what the policy says: the mechanism
        (one of several, where the ladder's way depends on what is found), who was evicted, and if `trail` is given the rungs that led
        there, in order."""
        before_incidents, step_before = set(self.watch.incidents), self.step()
        score.injected_ns = wall_ns()
        await inject()
        if storm:
            self._storm()

        def mine() -> list[IncidentStory]:
            return [s for i, s in self.watch.incidents.items() if i not in before_incidents]

        over = await self._until(
            lambda: any(s.closed for s in mine()) and not self.watch.open_incidents(), FAULT_S_MAX, score.fault
        )
        stories = mine()
        if stories:
            self._fill(score, stories[0], step_before)
        score.missed = self._judge(stories, over, (rung,) if isinstance(rung, str) else rung, nodes, trail)
        self._close(score)
        if not over:
            raise DemoFailed(f"{score.fault}: {score.missed}; the job is not back, so the rest was not tried")

    def _fill(self, score: Score, story: IncidentStory, step_before: int) -> None:
        def since(ns: int) -> float | None:
            return (ns - score.injected_ns) / NS if ns else None

        score.detected_s, score.decided_s = since(story.opened_ns), since(story.decided_ns)
        score.mechanism = story.mechanism
        if story.decisions:
            last = story.decisions[-1]
            score.decided = " ".join((last.rung, *last.nodes))
            score.note = last.because
        if story.closed:
            score.back_s = since(story.closed.back_ns)
            if story.closed.step_restored >= 0:
                score.steps_lost = max(0, max(step_before, story.closed.step_before) - story.closed.step_restored)

    def _judge(
        self,
        stories: list[IncidentStory],
        over: bool,
        rungs: tuple[str, ...],
        nodes: tuple[str, ...],
        trail: tuple[str, ...] = (),
    ) -> str:
        if not stories:
            return "it was not detected"
        if not over:
            return "it was not over in time"
        if len(stories) > 1:
            return f"it became {len(stories)} incidents"
        closed = stories[0].closed
        assert closed is not None
        if closed.outcome != "recovered":
            return f"it was {closed.outcome}, not recovered"
        if closed.mechanism not in rungs:
            return f"the mechanism was {closed.mechanism}, not {' or '.join(rungs)}"
        if closed.nodes != nodes:
            return f"evicted were {', '.join(closed.nodes) or 'none'}, not {', '.join(nodes) or 'none'}"
        taken = tuple(made.rung for made in stories[0].decisions)
        if trail and taken != trail:
            return f"it came to that by {', '.join(taken)}, not by {', '.join(trail)}"
        return ""

    async def _echo_storm(self) -> None:
        """The lines were written in the crash above; here it is seen that they flagged nobody."""
        score = self._new("storm of Xid 45 and 13 on all nodes after the crash", "nobody evicted")
        self._storm()
        await asyncio.sleep(3)
        self._nobody(score, set(self.watch.incidents))

    def _storm(self) -> None:
        for node in self.nodes:
            if self._kernel_log(node) == "kmsg":
                continue
            for i in range(20):
                code, text = (45, "Ch 00000010") if i % 2 else (13, "Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0)")
                self._write_line(node, f"NVRM: Xid (PCI:{DEVICE}): {code}, pid=4242, name=python, {text}")

    async def _agent_killed(self) -> None:
        before = set(self.watch.incidents)
        score = self._new("an agent killed alone, away for 6 s", "nobody evicted")
        name = f"agent-{subjects.token(NODES[0])}"
        step = self.step()
        child = self.pipeline.supervisor.children[name]
        child.wanted = False
        self.pipeline.supervisor.kill(name, signal.SIGKILL)
        await asyncio.sleep(6)
        trained = self.step() - step
        node = next(n for n in self.pipeline.nodes if n.name == NODES[0])
        await self.pipeline.start_agent(node)
        await self._until(lambda: bool(set(self.watch.incidents) - before) and not self.watch.open_incidents(), 20, score.fault)
        self._nobody(score, before)
        score.note = f"{trained} steps went on without it"
        if trained <= 0 and not score.missed:
            score.missed = "the job stood still without its agent"
        self._close(score)

    async def _flood(self) -> None:
        before = set(self.watch.incidents)
        score = self._new("500 malformed messages on node-1's subject", "dead letters, nothing stops")
        nc = await self.pipeline.address.connect("admin")
        log = JetStreamLog(nc, DEADLETTER)
        letters, step = await log.last_sequence(), self.step()
        node = await self._connect_as(NODES[1])
        try:
            for i in range(500):
                await node.publish(subjects.telemetry_node(NODES[1], "heartbeat"), b"\x00\xff not an event %d" % i)
            await node.flush()
            arrived = await self._wait_letters(log, letters)
        finally:
            await node.close()
            await nc.close()
        await self._until(lambda: self.step() > step + 5, 15, "steps")
        self._nobody(score, before)
        score.note = f"{arrived} dead letters"
        if not score.missed and (arrived == 0 or self.step() <= step + 5):
            score.missed = "no dead letter was kept" if arrived == 0 else "the job stood still"
        self._close(score)

    @staticmethod
    async def _wait_letters(log: JetStreamLog, before: int) -> int:
        for _ in range(40):
            now = await log.last_sequence()
            if now - before >= 100:
                return now - before
            await asyncio.sleep(0.25)
        return await log.last_sequence() - before

    async def _connect_as(self, node: str) -> BusClient:
        from infra.bus import connect

        assert self.pipeline.server is not None
        return await connect(self.pipeline.server.url, await asyncio.to_thread(self.pipeline.server.node_options, node))

    def _nobody(self, score: Score, before: set[str]) -> None:
        new = [s for i, s in self.watch.incidents.items() if i not in before]
        acted = [d for s in new for d in s.decisions]  # a job that is stopped to be tested lost its time, too
        if new:
            score.detected_s = (new[0].opened_ns - score.injected_ns) / NS
            score.mechanism = new[0].mechanism
        score.decided = "nothing" if not acted else " ".join((acted[0].rung, *acted[0].nodes))
        score.missed = "" if not acted else f"it led to {score.decided}"
        self._close(score)

    # -- breaking things ---------------------------------------------------------------------------------------------------

    def _node_of_rank(self, rank: int) -> str:
        return self.watch.fleet.jobs[JOB].places[rank].node

    async def _signal_rank(self, rank: int, number: int) -> None:
        node = self._node_of_rank(rank)
        await self._until(lambda: self._pid_of(node, rank) > 0, 10, "its pid")
        pid = self._pid_of(node, rank)
        if not pid:
            raise DemoFailed(f"no heartbeat of {node} names the process of rank {rank}")
        os.kill(pid, number)

    def _pid_of(self, node: str, rank: int) -> int:
        beat = self.watch.nodes.get(node, (0, None))[1]
        return next((p.pid for p in beat.ranks if p.rank == rank and p.state not in "-ZX"), 0) if beat else 0

    async def _kernel_line(self, node: str, line: str) -> None:
        if self._kernel_log(node) == "kmsg":
            # A record without its newline may be continued, and is shown to nobody before the next one comes.
            await asyncio.to_thread(Path("/dev/kmsg").write_text, f"<3>{line}\n")
        else:
            self._write_line(node, line)

    def _write_line(self, node: str, line: str) -> None:
        with (self.home.path / "kernel" / f"{node}.log").open("a") as log:
            log.write(f"<3>{line}\n")

    async def _kill_node(self, node: str) -> None:
        """All that a dead machine takes with it: its agent, its ranks, its parked workers and their keepers."""
        child = self.pipeline.supervisor.children[f"agent-{subjects.token(node)}"]
        child.wanted = False
        state = str(self.home.node(node))
        self.pipeline.supervisor.kill(child.name, signal.SIGKILL)
        for process in processes_of(node, state):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def end_ranks(self) -> None:
        """Ends the ranks, parked workers and their keepers, which outlive everything else by design: those of this home only."""
        for node in self.everyone:
            for process in processes_of(node, str(self.home.node(node))):
                if process.pid != os.getpid():
                    with contextlib.suppress(psutil.Error):
                        process.kill()

    async def _record(self, nc: BusClient) -> None:
        from infra.recording import record

        await record(nc, self.recording, (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB))


def processes_of(node: str, state: str) -> list[psutil.Process]:
    """The processes of one node of this home: those that carry its state folder in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            environment = process.environ() if words else {}
            inside = state + "/"
            named = any(word == state or word.startswith(inside) for word in words)
            if named or environment.get("KEEPSTEP_SOCKET", "").startswith(inside):
                found.append(process)
    return found
