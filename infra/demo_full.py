"""The whole ladder, broken and mended for real: hangs, a slow node, bad code revisions, wrong numbers, and what only a person can end.
`keepstep demo --full`; the pipeline is the user's own, as in infra/demo.py."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

from events.clock import NS
from events.job import JobDeclared, RestartRequested
from events.ports import LEDGER
from infra import demo_code
from infra.clock import wall_ns
from infra.demo import FAULT_S_MAX, JOB, POLICY, Demo, DemoFailed, Score
from infra.jetstream import JetStreamLog
from infra.pipeline import say as tell
from infra.watch import IncidentStory

STANDBYS = ("standby-0", "standby-1", "standby-2", "standby-3")


def _full_policy() -> str:
    """The short demo's, with little time for what takes long by nature."""
    policy = yaml.safe_load(POLICY)
    policy["detectors"] |= {
        "curves": {"warmup_steps": 20, "learn_steps": 10, "grace_steps": 5},
        "pace": {
            "decline_min": 0.5,
            "block_s": 1.0,
            "learn_blocks": 4,
            "grace_steps": 5,
            "round_s": 1.0,
            "slow_min": 1.0,
            "slow_rounds": 3,
        },
    }
    policy["decider"] |= {
        "slow_every_s": 1.0, "stable_steps": 25, "replay_steps": 12, "replay_within_s": 60.0, "tests_within_s": 30.0,
        "examine_s": 15.0, "unproven": "watch",
    }  # fmt: skip
    policy["budget"] = {scope: {"evictions_max": 9, "share_max": 1.0} for scope in ("job", "rack", "fleet")}
    return yaml.safe_dump(policy, sort_keys=False)


#: What a revision changes in the training script, and what becomes of it.
TYPE_ERROR = ("        loss.backward()\n", "        loss.backward(retain_graph=False, gradients=3)\n")
SILENT_EXIT = ("        loss.backward()\n", "        loss.backward()\n        os._exit(7)\n")


@dataclass(slots=True)
class FullDemo(Demo):
    standbys: tuple[str, ...] = STANDBYS
    policy: str = _full_policy()

    def faults(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return (
            self._stopped_in_a_step,
            self._loader_stuck,
            self._slow_node,
            self._type_error,
            self._silent_exit,
            self._reset_once,
            self._spike,
            self._wrong_numbers,
            self._same_exception,
        )

    # -- the job: its code in a repository of its own, its faults told by files --------------------------------------------

    @property
    def told(self) -> Path:
        return self.home.path / "faults"

    def declaration(self, revision: str) -> JobDeclared:
        if not revision:
            raise DemoFailed("the full demo rolls code back by git, and there is no git here; install git, or leave out --full")
        self.told.mkdir(exist_ok=True)
        made = super(FullDemo, self).declaration(revision)
        environment = {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(demo_code.JOB / "faulty"), "FAULTY_SHAPE": "256x64", "FAULTY_BIT": "30",
            "FAULTY_FILE": str(self.told / "flip-{node}"),
        }  # fmt: skip
        command = (*made.command, "--faults", str(self.told), "--evaluate-every", "40")
        return made.model_copy(update={"command": command, "environment": tuple(environment.items())})

    async def _restart(self, reason: str, revision: str = "") -> None:
        """As a person does: keepstep restart."""
        assert self._nc is not None
        symptom = "code_update" if revision else "operator_restart"
        fact = RestartRequested(job=JOB, reason=reason, author="demo", symptom=symptom, revision=revision)
        await tell(JetStreamLog(self._nc, LEDGER), fact, JOB)

    # -- the faults --------------------------------------------------------------------------------------------------------

    async def _stopped_in_a_step(self) -> None:
        import signal

        victim = self._node_of_rank(1)
        score = self._new("a rank stopped in the middle of a step (SIGSTOP)", f"stacks, evict {victim}")
        await self._break(score, "aggregate_stacks", (victim,), lambda: self._signal_rank(1, signal.SIGSTOP))
        await self._steady()

    async def _loader_stuck(self) -> None:
        victim = self._node_of_rank(2)
        score = self._new("a data-loader worker stuck in a lock, in evaluation", f"stacks, evict {victim}")
        before, phases = set(self.watch.incidents), list[str]()
        held = await asyncio.to_thread(_hold, self.told / "lock-2")

        async def hangs() -> None:
            """The fault is there already: what is waited for is the phase that it is seen in."""
            if await self._until(lambda: bool(set(self.watch.incidents) - before), FAULT_S_MAX, score.fault):
                phases.append(self.watch.jobs[JOB].phase)

        try:
            await self._break(score, "aggregate_stacks", (victim,), hangs)
        finally:
            held.close()
            (self.told / "lock-2").unlink()
        if not score.missed and phases != ["evaluation"]:
            score.missed = f"it hung in phase {', '.join(phases)}, not in the evaluation"
        await self._steady()

    async def _slow_node(self) -> None:
        victim = self._node_of_rank(3)
        score = self._new(f"{victim} slow in its compute", f"five rounds of stacks, evict {victim}")
        await self._steady(40)  # it must have a recent past to be slower than
        await self._break(score, "aggregate_stacks", (victim,), lambda: self._tell(f"slow-{victim}", "0.4"))
        if not score.missed and "of 5 rounds of stacks" not in score.note:
            score.missed = f"it was not voted for in five rounds: {score.note}"
        await self._steady()

    async def _type_error(self) -> None:
        await self._bad_revision("a revision that raises TypeError", TYPE_ERROR, "TypeError")

    async def _silent_exit(self) -> None:
        rungs = ("diagnose", "reattempt", "roll_back")
        await self._bad_revision("a revision that ends without a traceback", SILENT_EXIT, "without a culprit", rungs)

    async def _bad_revision(self, fault: str, change: tuple[str, str], why: str, trail: tuple[str, ...] = ()) -> None:
        """`why`: words that the reason of the rollback must have; `trail`: the rungs that lead to it."""
        if not await self._until(lambda: bool(self.watch.fleet.jobs[JOB].stable), 60, "a stable revision"):
            raise DemoFailed("no revision proved stable within 60 s")
        good = self.watch.fleet.jobs[JOB].stable
        score = self._new(fault, f"roll back to {good[:8]}")
        script = self.code / "train.py"
        text = await asyncio.to_thread(script.read_text)
        assert change[0] in text
        script.write_text(text.replace(*change))
        bad = await demo_code.commit(self.code, fault)
        await self._break(score, "roll_back", (), lambda: self._restart(fault, bad), trail=trail)
        if not score.missed and self.watch.fleet.jobs[JOB].revision != good:
            score.missed = f"it runs {self.watch.fleet.jobs[JOB].revision[:8]}, not {good[:8]}"
        if not score.missed and why not in score.note:
            score.missed = f"it was rolled back for another reason: {score.note}"
        script.write_text(text)
        await demo_code.commit(self.code, "as it was")
        await self._steady()

    async def _wrong_numbers(self) -> None:
        victim = self._node_of_rank(2)
        score = self._new(f"{victim} flips a bit in the job's matmul", f"tests or replays name {victim}")
        before = set(self.watch.incidents)
        await self._break(score, ("diagnose", "group_test"), (victim,), lambda: self._tell(f"flip-{victim}", ""))
        if not score.missed:
            score.missed = self._restored_rightly(next(s for i, s in self.watch.incidents.items() if i not in before))
        await self._steady()

    @staticmethod
    def _restored_rightly(story: IncidentStory) -> str:
        """Why what was restored is not from before the first evidence; '' if it is."""
        below = story.decisions[-1].restore_below_step
        if story.closed is None or below < 0:
            return "no step was named below which it is restored"
        restored = story.closed.step_restored
        return "" if 0 <= restored < below else f"restored at {restored}, and from step {below} on it was computed wrongly"

    async def _reset_once(self) -> None:
        score = self._new("a connection reset, once", "tests pass, reattempt")
        await self._break(score, "reattempt", (), lambda: self._tell("reset-1", ""), trail=("diagnose", "reattempt"))
        await self._steady()

    async def _spike(self) -> None:
        """Recorded, and nothing stopped."""
        score = self._new("one bad batch: loss 8 times as high, once", "recorded, nothing stopped")
        before, attempt = set(self.watch.incidents), self.watch.fleet.jobs[JOB].attempt
        await self._tell("spike-0", "")

        def seen() -> bool:
            return any(e.symptom == "loss_spike" and e.seen_ns >= score.injected_ns for e in self.watch.unheeded)

        detected = await self._until(seen, 20, "the spike")
        step = self.step()
        await self._until(lambda: self.step() > step + 10, 20, "steps")
        self._nobody(score, before)
        if detected:
            score.detected_s = next(
                (e.seen_ns - score.injected_ns) / NS for e in self.watch.unheeded
                if e.symptom == "loss_spike" and e.seen_ns >= score.injected_ns
            )  # fmt: skip
        elif not score.missed:
            score.missed = "it was not recorded"
        if not score.missed and self.watch.fleet.jobs[JOB].attempt != attempt:
            score.missed = "the job was stopped for it"
        self._close(score)

    async def _same_exception(self) -> None:
        """Attempts are used up; a person is told the step and the words, mends it, and asks for a restart."""
        score = self._new("the same IndexError at the same step each time", "hand over, naming both")
        before = set(self.watch.incidents)
        step = self.step() + 8
        score.injected_ns = wall_ns()
        await self._tell(f"index-{step}", "")

        def handed() -> bool:
            # It may be healthy for the steps up to the one that fails, and is then told as two incidents of one ladder.
            return any(s.mechanism == "hand_over" for i, s in self.watch.incidents.items() if i not in before)

        over = await self._until(handed, FAULT_S_MAX, score.fault)
        stories = [s for i, s in self.watch.incidents.items() if i not in before]
        if stories:
            self._fill(score, stories[-1], step)
        score.missed = self._judge_hand_over(score, over, step, stories)
        (self.told / f"index-{step}").unlink()
        attempt = self.watch.fleet.jobs[JOB].attempt
        await self._restart("the batch is mended")
        back = await self._until(lambda: self._confirmed(attempt + 1), FAULT_S_MAX, "the restart")
        if not score.missed and not back:
            score.missed = "the job did not come back after the person's restart"
        self._close(score)
        await self._steady(6)

    @staticmethod
    def _judge_hand_over(score: Score, over: bool, step: int, stories: list[IncidentStory]) -> str:
        if not over:
            return "it was not handed over in time"
        said = score.note
        if "IndexError" not in said:
            return f"the hand-over does not name the exception: {said}"
        if f"step {step - 1}" not in said and f"step {step}" not in said:
            return f"the hand-over does not name step {step}: {said}"
        made = [d for story in stories for d in story.decisions if not d.vetoed]
        acted = [d.rung for d in made if d.rung in ("evict", "roll_back") or d.nodes]
        if acted:
            return f"it led to {acted[0]}"
        return "" if any(d.rung == "reattempt" for d in made) else "no attempt was used up before it"

    # -- breaking things ---------------------------------------------------------------------------------------------------

    async def _tell(self, name: str, text: str) -> None:
        (self.told / name).write_text(text)


def _hold(path: Path) -> IO[str]:
    """The lock on a file, held until it is closed."""
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
