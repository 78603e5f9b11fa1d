"""Training jobs with nothing wrong in their machines: they start slowly, step, evaluate, write checkpoints, skip overflows, spike, and crash by
their own code now and then. One rank a node."""

from __future__ import annotations

import math
from typing import Any

from events.decision import IntentIssued
from events.presence import Heartbeat, RankProcess
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from tests.simulation import noise
from tests.simulation.world import BUSY_S, RANK, Template, World

ILLEGAL = (
    'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n    loss.backward()\n'
    "RuntimeError: CUDA error: an illegal memory access was encountered"
)
PEER_GONE = (
    'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n'
    "RuntimeError: NCCL communicator was aborted on rank 3. Original reason for failure was: remote process exited"
)
CHECKPOINT_EVERY, CHECKPOINT_S = 50, 60.0
EVALUATE_EVERY, EVALUATION_STEPS = 100, 5
#: Of steps: one in so many begins a spike of a few; one in so many begins a run of overflows.
SPIKE_EVERY, OVERFLOW_EVERY = 400, 150


class Job:
    """`declares`: whether the script tells of its phases; else its evaluations are long steps. `flags_skips`: whether it tells of skipped
    updates. `beats`: hooks and agents are heard once a second on the job's stream, as they are live, and twice a minute what links carried."""

    def __init__(
        self, world: World, name: str, nodes: list[str], step_s: float, *, first_step_s: float = 600.0, declares: bool = True,
        flags_skips: bool = True, beats: bool = False, late: float = 0.01, doubled: float = 0.02,
    ) -> None:  # fmt: skip
        self.world, self.name, self.nodes, self.step_s = world, name, nodes, step_s
        self.first_step_s, self.declares, self.flags_skips = first_step_s, declares, flags_skips
        self.late, self.doubled = late, doubled
        self.attempt = 0
        self.step = -1
        self.saved = -1
        self.phase = "startup"
        self.progress = 0
        self.crashes = 0
        self.crashed_s: list[float] = []
        self.spike = self.overflow = 0
        self._norm_spike = 0
        self._run = 0
        #: What a test breaks: no step ends any more and the links are idle; every loss is no number.
        self.stuck = self.broken = False
        if beats:
            world.every(1.0, self._beat)
            world.every(30.0, self._traffic)

    @property
    def runs(self) -> bool:
        return self._run > 0

    # --- what actuators do --------------------------------------------------------------------------------------------------

    def start(self, intent: IntentIssued) -> None:
        self.nodes = [place.node for place in intent.places]
        self.attempt, self.step, self.phase, self.progress = intent.attempt, self.saved, "startup", 0
        self._run = intent.attempt
        for rank, node in enumerate(self.nodes):
            fact = RankStarted(rank=rank, local_rank=0, world_size=len(self.nodes), pid=4000 + rank)
            self._say(Template(fact, f"rank-{rank}", self.name), node)
        self._report(None)
        self._later(self.first_step_s, self._step_over)

    def stop(self, intent: IntentIssued | None = None) -> None:
        if not self._run:
            return
        self._run = 0
        for rank, node in enumerate(self.nodes):
            fact = RankExit(rank=rank, world_size=len(self.nodes), signal=15, asked=True)
            self._say(Template(fact, f"rank-{rank}", self.name), node)

    def crash(self) -> None:
        """User code goes wrong on one rank; its peers hear it, and every machine's kernel tells of ended processes."""
        if not self._run or self.step < 5:
            return
        world, chance = self.world, self.world.chance
        self._run = 0
        self.crashes += 1
        self.crashed_s.append(world.now_s)
        first = chance.randrange(len(self.nodes))
        bus = chance.choice(noise.BUSES)
        xid = chance.choice((noise.XID_13, noise.XID_31, noise.XID_43))
        world.observe(noise.kernel(xid % (bus, 4242)), self.nodes[first])
        self._exit(first, ILLEGAL, code=1)
        storm = noise.kernel(*(noise.XID_45 % (bus, 4242, i) for i, bus in enumerate(noise.BUSES)))
        for rank, node in enumerate(self.nodes):
            delay_s = chance.uniform(0.1, 6.0)
            if rank != first:
                world.after(delay_s, lambda rank=rank: self._exit(rank, PEER_GONE, code=1))  # type: ignore[misc]
            for again in range(4):
                world.after(delay_s + 0.3 * again, lambda node=node: world.observe(storm, node))  # type: ignore[misc]

    def _exit(self, rank: int, stderr: str, **more: Any) -> None:
        fact = RankExit(rank=rank, world_size=len(self.nodes), stderr_tail=stderr, **more)
        self._say(Template(fact, f"rank-{rank}", self.name), self.nodes[rank])

    # --- how it goes --------------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, call: Any) -> None:
        run = self._run
        self.world.after(seconds, lambda: call() if run == self._run else None)

    def _took_s(self) -> float:
        """With a swing by the time of day, noise, and a hiccup of storage now and then."""
        chance = self.world.chance
        swing = 1 + 0.015 * math.sin(self.world.now_s * 2 * math.pi / noise.DAY_S)
        hiccup = chance.uniform(0.5, 3) if chance.random() < 0.01 else 0.0
        return self.step_s * (swing * chance.gauss(1, 0.01) + hiccup)

    def _step_over(self) -> None:
        world = self.world
        if self.stuck:
            return
        self.step += 1
        took_s = self._took_s()
        self.phase = "step"
        self.progress += 1
        self._report(self._sample(took_s))
        next_s = took_s
        if self.step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            next_s += self._phase("evaluation", EVALUATION_STEPS * self.step_s, range(len(self.nodes)))
        elif self.step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            next_s += self._phase("checkpoint", CHECKPOINT_S, (0,))
            self.saved = self.step
        if world.chance.random() < 1 / SPIKE_EVERY and not self.spike:
            self.spike, self._norm_spike = world.chance.randrange(1, 5), world.chance.randrange(1, 40)
        if world.chance.random() < 1 / OVERFLOW_EVERY and not self.overflow:
            self.overflow = world.chance.randrange(1, 4)
        self._later(next_s, self._step_over)

    def _phase(self, name: str, seconds: float, ranks: Any) -> float:
        if self.declares:
            self._report(None, phase=name, ranks=ranks)

            def over() -> None:
                self._report(None, phase="step", ranks=ranks)

            self._later(seconds, over)
        return seconds

    def _sample(self, took_s: float) -> StepSample:
        chance = self.world.chance
        loss = 2.0 + 6 * math.exp(-self.step / 500) + chance.gauss(0, 0.03)
        norm = abs(0.2 + 3 * math.exp(-self.step / 200) + chance.gauss(0, 0.05))
        skipped = False
        if self.overflow:
            self.overflow -= 1
            norm = math.inf
            skipped = self.flags_skips
            loss = math.nan if skipped and chance.random() < 0.5 else loss
        if self.broken:
            loss, skipped = math.nan, False
        if self.spike:
            self.spike -= 1
            loss *= chance.uniform(6, 20)
        if self._norm_spike:
            self._norm_spike -= 1
            norm *= chance.uniform(6, 4000)
        return StepSample(
            step=self.step, ended_ns=0, step_time_s=took_s, loss=loss, grad_norm=norm, tokens=4096, mfu=0.4 * self.step_s / took_s,
            skipped=skipped,
        )  # fmt: skip

    def _report(self, sample: StepSample | None, *, phase: str = "", ranks: Any = None) -> None:
        """Every rank's hook tells of the same step, a few of them late or twice."""
        self.phase = phase or self.phase
        self.progress += 1
        chance, world = self.world.chance, self.world
        own = (sample.model_copy(update={"busy_s": BUSY_S}),) if sample else ()
        fact = TrainingProgress(
            rank=RANK, world_size=len(self.nodes), phase=phase or self.phase, progress=self.progress, step=self.step,
            restored_step=self.saved if self.attempt > 1 else -1, samples=own,
        )  # fmt: skip
        told, attempt = Template(fact, "trainer", self.name), self.attempt
        for rank in ranks if ranks is not None else range(len(self.nodes)):
            node, busy_s = self.nodes[rank], self.step_s * chance.gauss(0.6, 0.02)
            times = 2 if chance.random() < self.doubled else 1
            if chance.random() < self.late:
                delay_s = chance.uniform(0.5, 50)
                held_s = delay_s if chance.random() < 0.5 else 0.0  # spooled, or just slow on its way
                world.after(delay_s, lambda a=(told, node, attempt, held_s, times, rank, busy_s): world.observe(*a))  # type: ignore[misc]
            else:
                world.observe(told, node, attempt, 0.0, times, rank, busy_s)

    def _say(self, template: Template, node: str) -> None:
        self.world.observe(template, node, self.attempt, 0.0, 2 if self.world.chance.random() < self.doubled else 1)

    def _beat(self) -> None:
        """Between steps: agents on the job's stream with the states of its processes, and each hook's word of the present phase."""
        if not self._run:
            return
        fact = TrainingProgress(
            rank=RANK, world_size=len(self.nodes), phase=self.phase, progress=self.progress, step=self.step,
            restored_step=self.saved if self.attempt > 1 else -1,
        )  # fmt: skip
        told = Template(fact, "trainer", self.name)
        beats = {
            s: Template(Heartbeat(ranks=(RankProcess(rank=RANK, pid=4000, state=s),)), "heartbeat", self.name) for s in "SRD"
        }
        for rank, node in enumerate(self.nodes):
            self.world.observe(beats[self.world.chance.choice("SSSRRD")], node, self.attempt, rank=rank)
            self.world.observe(told, node, self.attempt, rank=rank)

    def _traffic(self) -> None:
        """What the links carried: nothing in a phase, and now and then nothing in a step."""
        if self._run:
            quiet = self.stuck or self.phase != "step" or self.world.chance.random() < 0.01
            told = noise.traffic(self.name, 0.0 if quiet else 2e10)
            for node in self.nodes:
                self.world.observe(told, node, self.attempt)
