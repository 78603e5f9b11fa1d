"""The job detector: exits, stalls in each phase, who stands out, healthy starts, the end."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from events.incident import EvidenceMissing, JobFinished, ProgressNoted, Signal, SignalCleared
from events.network import LinkTraffic
from events.training import StepSample, TrainingProgress
from processors.detector import Outgoing, PartitionFold
from processors.job_health import JobDetector
from processors.policy import Detectors, PhaseLimits
from tests.telemetry import Story, facts, ns, told

JOB = JobDetector()
LIMITS = Detectors(phase_limit_s=PhaseLimits(startup=20, step=5, evaluation=30, checkpoint=15, undeclared=8))
PEER_GONE = (
    'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2231\n"
)
USER_ERROR = (
    'NCCL INFO Bootstrap : Using eth0\nTraceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
    "    loss = batch[7]\nIndexError: list index out of range\n"
)


def claims(story: Story) -> list[Any]:
    return facts(told(JOB, story))


def of(kind: type[Any], story: Story) -> list[Any]:
    return [fact for fact in claims(story) if isinstance(fact, kind)]


def running(story: Story, from_s: int, to_s: int, *, step: int | None = None, attempt: int = 1, world: int = 2) -> Story:
    """Each rank finishes a step a second, from `step` on."""
    first = from_s if step is None else step
    for second in range(from_s, to_s):
        done = first + second - from_s
        for rank in range(world):
            story.progress(second, rank, 2 * done + 2, done, losses=(1.0,), attempt=attempt, world=world)
        story.tick(second + 0.5)
    return story


def begun(*, attempt: int = 1, world: int = 2, at_s: float = 0) -> Story:
    story = Story("job")
    story.adopt(at_s, LIMITS)
    for second in range(-12, 0):
        story.tick(second + 0.5)
    for rank in range(world):
        story.started(at_s, rank, attempt=attempt, world=world)
    return story


def ticks(
    story: Story, from_s: int, to_s: int, *, stuck: dict[int, tuple[int, int, str]] | None = None, world: int = 2
) -> Story:
    """Seconds without progress. `stuck`: what each rank's hook still says: progress, step, phase."""
    for second in range(from_s, to_s):
        for rank, (progress, step, phase) in (stuck or {}).items():
            story.progress(second, rank, progress, step, phase=phase, world=world)
        story.tick(second + 0.5)
    return story


# --- exits --------------------------------------------------------------------------------------------------------------------


def test_a_killed_rank_and_its_echo() -> None:
    story = running(begun(), 1, 10)
    story.exited(10.0, 1, signal=9)
    story.exited(10.2, 0, code=1, stderr=PEER_GONE)
    ticks(story, 11, 60)
    killed, echo = of(Signal, story)
    assert (killed.symptom, killed.rank, killed.node, killed.rule, killed.confidence) == (
        "rank_exit",
        1,
        "n1",
        "rank_killed",
        "low",
    )
    assert killed.seen_ns == ns(10) and killed.step == 9 and "signal 9 (SIGKILL)" in killed.evidence
    assert (echo.rank, echo.rule, echo.confidence) == (0, "rank_traceback", "sympathetic")
    assert "Connection closed by peer" in echo.evidence


@pytest.mark.parametrize(
    ("more", "rule", "confidence"),
    [
        ({"code": 1, "stderr": USER_ERROR}, "rank_traceback", "low"),
        ({"code": 1, "stderr": "[rank1]: " + PEER_GONE.replace("\n", "\n[rank1]: ")}, "rank_traceback", "sympathetic"),
        ({"code": 3}, "rank_exit", "low"),
        ({}, "rank_gone", "low"),
        (
            {"signal": 6, "stderr": "terminate called\n  what():  [PG ID 0] ProcessGroupNCCL's watchdog"},
            "rank_killed",
            "sympathetic",
        ),
        ({"signal": 11, "stderr": PEER_GONE}, "rank_killed", "low"),
        ({"signal": 64}, "rank_killed", "low"),
    ],
)
def test_how_an_exit_is_read(more: dict[str, Any], rule: str, confidence: str) -> None:
    story = running(begun(), 1, 5)
    story.exited(5, 1, **more)
    (signal,) = [one for one in of(Signal, story) if one.symptom == "rank_exit"]
    assert (signal.rule, signal.confidence) == (rule, confidence)


def test_an_exit_is_told_once_and_long_stderr_keeps_its_end() -> None:
    story = running(begun(), 1, 5)
    for _ in range(2):
        story.exited(5, 1, code=1, stderr="x" * 3000 + "\n" + USER_ERROR[-40:])
    (signal,) = of(Signal, story)
    assert len(signal.evidence.encode()) <= 1024
    assert (
        signal.evidence.startswith("rank 1 on n1 ended with code 1")
        and "IndexError: list index out of range" in signal.evidence
    )


def test_exits_that_were_asked_for_are_no_signal_and_what_follows_them_is_an_echo() -> None:
    story = running(begun(), 1, 5)
    story.exited(5, 0, signal=15, asked=True)
    story.exited(5, 1, code=1, stderr=USER_ERROR)
    ticks(story, 6, 60)
    (signal,) = of(Signal, story)
    assert signal.rank == 1 and signal.confidence == "sympathetic"


def test_what_an_earlier_attempt_still_says_opens_nothing() -> None:
    story = running(begun(attempt=3), 1, 5, attempt=3)
    story.exited(5, 1, signal=9, attempt=2)
    story.progress(5, 1, 99, 99, attempt=2, losses=(float("nan"),))
    running(story, 5, 9, attempt=3)
    assert of(Signal, story) == []


def test_a_first_word_that_is_an_exit_begins_the_attempt() -> None:
    story = running(begun(), 1, 5)
    story.exited(6, 0, code=1, attempt=2)
    out = told(JOB, story)[-1]
    assert isinstance(out.event.data, Signal) and out.event.attempt == 2


def test_beyond_a_number_exits_are_counted() -> None:
    story = running(begun(world=30), 1, 4, world=30)
    story.adopt(4, LIMITS.model_copy(update={"exits_each_max": 4}))
    for rank in range(30):
        story.exited(5, rank, code=1, stderr=PEER_GONE, world=30)
    story.tick(5.5)
    story.tick(6.5)
    signals = of(Signal, story)
    assert [signal.count for signal in signals] == [1, 1, 1, 1, 26]
    assert signals[-1].rule == "rank_exits_counted" and signals[-1].rank == -1
    assert told(JOB, story)[-1].event.causes[-1].startswith("e")


def test_a_late_exit_tells_its_age() -> None:
    story = running(begun(), 1, 200)
    story.exited(300, 1, signal=9, held_s=100)
    (signal,) = of(Signal, story)
    assert signal.seen_ns == ns(200)


# --- the end ------------------------------------------------------------------------------------------------------------------


def test_a_job_is_finished_when_every_rank_ended_well_at_whatever_times() -> None:
    story = running(begun(), 1, 10)
    story.exited(10, 0, code=0)
    ticks(story, 10, 14)
    story.exited(14, 1, code=0)
    ticks(story, 14, 60)
    (finished,) = of(JobFinished, story)
    assert finished.step == 9 and finished.seen_ns == ns(14) and of(Signal, story) == []


def test_a_rank_that_hangs_after_the_others_ended_is_a_hang() -> None:
    story = running(begun(), 1, 10)
    story.exited(10, 0, code=0)
    ticks(story, 10, 20, stuck={1: (20, 9, "step")})
    (hang,) = of(Signal, story)
    assert (hang.symptom, hang.rule) == ("job_hang", "no_progress")


def test_a_number_of_ranks_that_one_alone_tells_of_is_not_believed() -> None:
    story = running(begun(), 1, 10)
    story.progress(10, 0, 30, 10, world=200_000, losses=(1.0,))
    running(story, 11, 20, step=11)
    for rank in range(2):
        story.exited(20, rank, code=0)
    ticks(story, 20, 90)
    assert len(of(JobFinished, story)) == 1 and of(Signal, story) == []


def test_ranks_that_join_are_waited_for() -> None:
    story = running(begun(), 1, 10)
    running(story, 10, 20, step=10, world=4)
    for rank in range(3):
        story.exited(20, rank, code=0, world=4)
    assert of(JobFinished, story) == []
    story.exited(21, 3, code=0, world=4)
    assert len(of(JobFinished, story)) == 1


def test_an_unwatched_exit_among_good_ones_counts_as_good() -> None:
    story = running(begun(), 1, 10)
    story.exited(10, 0, code=0)
    story.exited(11, 1)
    assert len(of(JobFinished, story)) == 1


def test_a_failed_rank_is_no_finish() -> None:
    story = running(begun(), 1, 10)
    story.exited(10, 0, code=0)
    story.exited(11, 1, code=1)
    assert of(JobFinished, story) == [] and len(of(Signal, story)) == 1


# --- stalls -------------------------------------------------------------------------------------------------------------------


def test_no_progress_in_a_step_names_the_stopped_rank() -> None:
    story = running(begun(world=4), 1, 10, world=4)
    for second in range(10, 30):
        for rank in (0, 1, 3):
            story.progress(second, rank, 20, 9, world=4)
        for rank in range(4):
            story.processes(second, rank, "T" if rank == 2 else "S")
        story.tick(second + 0.5)
    out: list[Outgoing] = [o for o in told(JOB, story) if isinstance(o.event.data, Signal)]
    (one,) = out
    hang = one.event.data
    assert (hang.symptom, hang.rule, hang.rank, hang.node, hang.step) == ("job_hang", "no_progress", 2, "n2", 9)
    # Last progress at 9 s, the limit is 5 s.
    assert hang.seen_ns == ns(14.5) and "phase step (limit 5 s), last step 9" in hang.evidence
    assert "rank 2 on n2 (T)" in hang.evidence and "silent: rank 2" in hang.evidence and one.event.causes
    # It moves again.
    running(story, 30, 40, step=10, world=4)
    (cleared,) = of(SignalCleared, story)
    assert cleared.symptom == "job_hang" and "after 21.0 s" in cleared.evidence
    # And stalls once more: another signal.
    ticks(story, 40, 50, stuck=dict.fromkeys(range(4), (40, 19, "step")), world=4)
    assert len(of(Signal, story)) == 2


@pytest.mark.parametrize(
    ("phase", "limit_s"), [("startup", 20), ("step", 5), ("evaluation", 30), ("checkpoint", 15), ("undeclared", 8)]
)
def test_every_phase_has_its_limit(phase: str, limit_s: int) -> None:
    story = running(begun(), 1, 10)
    stuck = {0: (30, 9, phase), 1: (30, 9, phase)}
    ticks(story, 10, 60, stuck=stuck)
    (hang,) = of(Signal, story)
    assert hang.seen_ns == ns(10 + limit_s + 0.5) and f"phase {phase}" in hang.evidence


def test_ranks_that_wait_for_one_that_writes_a_checkpoint_do_not_hang_early() -> None:
    story = running(begun(world=4), 1, 10, world=4)
    stuck = dict.fromkeys((1, 2, 3), (20, 9, "step")) | {0: (21, 9, "checkpoint")}
    ticks(story, 10, 25, stuck=stuck, world=4)
    assert of(Signal, story) == []
    ticks(story, 25, 30, stuck=stuck, world=4)
    (hang,) = of(Signal, story)
    assert (hang.rank, hang.node) == (0, "n0") and "in another phase: rank 0 on n0" in hang.evidence


def test_a_start_up_that_never_ends() -> None:
    story = begun(world=3)
    ticks(story, 0, 30, stuck={0: (0, -1, "startup"), 1: (0, -1, "startup")}, world=3)
    (hang,) = of(Signal, story)
    assert (hang.rule, hang.rank, hang.node) == ("no_progress", 2, "n2") and hang.seen_ns == ns(20.5)


def test_a_rank_that_was_never_heard_counts_too() -> None:
    story = begun(world=2)
    for second in range(30):
        story.progress(second, 0, 0, -1, phase="startup", world=3)
        story.progress(second, 1, 0, -1, phase="startup", world=3)
        story.tick(second + 0.5)
    (hang,) = of(Signal, story)
    assert hang.rank == 2 and "never heard: rank 2" in hang.evidence


def test_a_script_without_the_hook_is_said_to_be_one() -> None:
    (hang,) = of(Signal, ticks(begun(), 0, 30))
    assert hang.rule == "startup_silent" and "no rank's hook was ever heard" in hang.evidence


def test_a_broker_that_stood_still_is_no_hang() -> None:
    story = running(begun(), 1, 10)
    running(story, 300, 310, step=10)
    assert of(Signal, story) == []
    assert [fact.reason for fact in of(EvidenceMissing, story)] == ["ticks"]


def test_silence_of_all_is_not_a_hang_where_agents_used_to_speak() -> None:
    story = running(begun(), 1, 10)
    for rank in range(2):
        story.processes(9.6, rank, "S")
    ticks(story, 10, 60)
    assert of(Signal, story) == []
    (missing,) = of(EvidenceMissing, story)
    assert (missing.producer, missing.reason) == ("job", "silent")


def test_ranks_cut_off_while_the_job_goes_on_are_noted_only() -> None:
    story = running(begun(), 1, 10)
    for second in range(10, 60):
        story.progress(second, 0, 2 * second + 2, second, losses=(1.0,))
        story.tick(second + 0.5)
    assert of(Signal, story) == []
    (missing,) = of(EvidenceMissing, story)
    assert (missing.producer, missing.reason, missing.missing) == ("hook", "silent", 1)
    # A spool drains: still no news.
    for second in range(10, 60):
        story.progress(60 + second / 1000, 1, 2 * second + 2, second, losses=(1.0,), held_s=60 - second)
    running(story, 61, 70)
    assert of(Signal, story) == []


def test_one_rank_that_stays_behind_while_others_go_on() -> None:
    story = running(begun(world=3), 1, 10, world=3)
    for second in range(10, 30):
        for rank in (0, 1):
            story.progress(second, rank, 2 * second + 2, second, losses=(1.0,), world=3)
        story.progress(second, 2, 20, 9, world=3)
        story.tick(second + 0.5)
    (hang,) = of(Signal, story)
    assert (hang.rule, hang.rank, hang.node) == ("rank_behind", 2, "n2")
    running(story, 30, 40, step=30, world=3)
    assert len(of(SignalCleared, story)) == 1


def test_ranks_that_never_report_steps_are_not_behind() -> None:
    story = begun(world=2)
    for second in range(60):
        story.progress(second, 0, 2 * second + 2, second, losses=(1.0,))
        story.progress(second, 1, 0, -1, phase="startup")
        story.tick(second + 0.5)
    assert of(Signal, story) == []
    assert [fact.first for fact in of(ProgressNoted, story)][:2] == [True, False]


# --- progress -----------------------------------------------------------------------------------------------------------------


def test_a_healthy_start_is_noted_once_then_every_so_often() -> None:
    story = running(begun(), 1, 35)
    notes = of(ProgressNoted, story)
    assert [note.first for note in notes] == [True, False, False, False]
    # The second step of the first rank to finish it, with each rank past its first.
    assert (notes[0].step, notes[0].seen_ns) == (2, ns(2))
    assert [note.step for note in notes[1:]] == [12, 22, 32]


def test_a_step_that_is_not_finite_does_not_confirm_health() -> None:
    story = begun()
    for second in range(1, 5):
        for rank in range(2):
            story.progress(second, rank, second, second, losses=(float("nan"),))
    assert of(ProgressNoted, story) == []
    running(story, 5, 8)
    (note,) = of(ProgressNoted, story)
    assert note.first and note.step == 6


def test_a_rank_that_has_not_finished_a_step_keeps_the_attempt_unconfirmed() -> None:
    story = begun(world=3)
    for second in range(1, 6):
        for rank in range(2):
            story.progress(second, rank, second, second, losses=(1.0,), world=3)
    assert of(ProgressNoted, story) == []
    story.progress(6, 2, 1, 5, losses=(1.0,), world=3)
    assert len(of(ProgressNoted, story)) == 1


def test_a_restored_attempt_says_where_from() -> None:
    story = running(begun(), 1, 10)
    story.exited(10, 1, signal=9)
    for rank in range(2):
        story.started(12, rank, attempt=2)
        story.progress(13, rank, 1, -1, phase="startup", attempt=2, restored=7)
    for second in (14, 15):
        for rank in range(2):
            story.progress(second, rank, second, second - 6, losses=(1.0,), attempt=2, restored=7)
    note = of(ProgressNoted, story)[-1]
    assert note.first and (note.step, note.restored_step) == (9, 7)


# --- limits that are learned, and traffic --------------------------------------------------------------------------------------

DEFAULTS = Detectors()


def job(story: Story, steps: int, took_s: float, *, at_s: float = 0, first: int = 0, world: int = 2) -> float:
    """Steps of all ranks, with a tick a second; returns when the last was over."""
    for step in range(first, first + steps):
        at_s = waits(story, at_s, took_s, dict.fromkeys(range(world), (2 * step + 1, step - 1, "step")))
        for rank in range(world):
            story.progress(at_s, rank, 2 * step + 2, step, losses=(1.0,), took_s=took_s, world=world)
    return at_s


def waits(story: Story, at_s: float, for_s: float, said: dict[int, tuple[int, int, str]]) -> float:
    """Time passes: ticks, and a hook's word a second of what each rank does."""
    world = max(said) + 1
    for second in range(int(for_s)):
        for rank, (progress, step, phase) in said.items():
            story.progress(at_s + second, rank, progress, step, phase=phase, world=world)
        story.tick(at_s + second + 0.5)
    return at_s + for_s


def default_job() -> Story:
    story = Story("job")
    story.adopt(0, DEFAULTS)
    for second in range(-12, 0):
        story.tick(second + 0.5)
    for rank in range(2):
        story.started(0, rank)
    return story


def test_long_phases_do_not_alarm_under_default_limits() -> None:
    """A first step of ten minutes, an evaluation five times as long as a step, a checkpoint of a minute, which the other rank waits for."""
    story = default_job()
    at_s = waits(story, 0, 615, {0: (0, -1, "startup"), 1: (0, -1, "startup")})
    at_s = job(story, 20, 60, at_s=at_s)
    at_s = waits(story, at_s, 300, {0: (50, 19, "evaluation"), 1: (50, 19, "evaluation")})
    at_s = job(story, 5, 60, at_s=at_s, first=26)
    at_s = waits(story, at_s, 60, {0: (90, 30, "checkpoint"), 1: (91, 30, "step")})
    job(story, 5, 60, at_s=at_s, first=50)
    assert of(Signal, story) == []


def test_a_worker_stuck_in_an_evaluation_is_a_hang_by_the_limit_that_was_learned() -> None:
    """Four evaluations of half a minute, then one that never ends: claimed after ten minutes, not the half hour that is stated."""
    story = default_job()
    at_s = 0.0
    for number in range(4):
        at_s = job(story, 20, 2, at_s=at_s, first=25 * number)
        progress = 2 * (25 * number + 20) + 1
        at_s = waits(story, at_s, 30, dict.fromkeys((0, 1), (progress, 25 * number + 19, "evaluation")))
    at_s = job(story, 3, 2, at_s=at_s, first=100)
    waits(story, at_s, 700, {0: (300, 102, "evaluation"), 1: (299, 102, "evaluation")})
    (hang,) = of(Signal, story)
    assert "in phase evaluation (limit 600 s)" in hang.evidence
    assert 600 <= (hang.seen_ns - ns(at_s)) / 1e9 <= 608


def test_the_stated_limit_holds_for_a_phase_that_was_not_seen_often() -> None:
    story = default_job()
    at_s = job(story, 20, 2)
    waits(story, at_s, 1790, {0: (300, 19, "evaluation"), 1: (299, 19, "evaluation")})
    assert of(Signal, story) == []
    waits(story, at_s + 1790, 40, {0: (300, 19, "evaluation"), 1: (299, 19, "evaluation")})
    (hang,) = of(Signal, story)
    assert "(limit 1800 s)" in hang.evidence


def test_a_learned_limit_grows_with_what_was_seen_and_none_with_a_stall() -> None:
    story = default_job()
    at_s = job(story, 20, 2)
    for _ in range(3):
        at_s = waits(story, at_s, 200, dict.fromkeys((0, 1), (int(at_s) + 100, 19, "evaluation")))
        at_s = waits(story, at_s, 2, dict.fromkeys((0, 1), (int(at_s) + 100, 19, "step")))
    at_s = waits(story, at_s, 990, dict.fromkeys((0, 1), (int(at_s) + 100, 19, "evaluation")))
    assert of(Signal, story) == []
    waits(story, at_s, 30, dict.fromkeys((0, 1), (int(at_s) - 890, 19, "evaluation")))
    (hang,) = of(Signal, story)
    assert "in phase evaluation (limit 1000 s)" in hang.evidence


def evaluated(story: Story, at_s: float, for_s: float, step: int, world: int = 2) -> float:
    """All ranks in an evaluation, which they leave one after another; returns when."""
    said = dict.fromkeys(range(world), (2 * step + 3, step, "evaluation"))
    at_s = waits(story, at_s, for_s, said)
    for rank in range(world):
        story.progress(at_s + rank / 1000, rank, 2 * step + 4, step, phase="step", world=world)
    return at_s


def test_one_evaluation_of_many_ranks_is_one() -> None:
    """A look at two batches at the start, by eight ranks, says nothing of the real one of a quarter of an hour."""
    story = default_job()
    at_s = job(story, 3, 2, world=8)
    at_s = evaluated(story, at_s, 5, 2, world=8)
    at_s = job(story, 3, 2, at_s=at_s, first=10, world=8)
    evaluated(story, at_s, 900, 12, world=8)
    assert of(Signal, story) == []


def test_an_evaluation_that_a_learned_limit_cut_short_is_held_to_the_stated_one_the_next_time() -> None:
    """Else it would be ended each time, and never be learned of."""
    story = default_job()
    at_s = 0.0
    for number in range(4):
        at_s = job(story, 3, 2, at_s=at_s, first=10 * number)
        at_s = evaluated(story, at_s, 30, 10 * number + 2)
    at_s = job(story, 3, 2, at_s=at_s, first=100)
    at_s = waits(story, at_s, 650, dict.fromkeys((0, 1), (300, 102, "evaluation")))
    assert ["(limit 600 s)" in one.evidence for one in of(Signal, story)] == [True]
    for rank in range(2):
        story.exited(at_s, rank, signal=9, asked=True)
    for second in range(2000):
        for rank in range(2):
            phase = "startup" if second < 10 else "step" if second < 20 else "evaluation"
            story.progress(
                at_s + second, rank, min(second, 21), second - 10 if 10 <= second < 20 else -1, phase=phase, attempt=2
            )
        story.tick(at_s + second + 0.5)
    first, second_ = of(Signal, story)
    assert first.step == 102 and "in phase evaluation (limit 1800 s)" in second_.evidence


def test_one_monster_makes_a_limit_the_stated_one_and_never_longer() -> None:
    story = default_job()
    at_s = evaluated(story, job(story, 3, 2), 1700, 2)
    for number in range(1, 6):
        at_s = evaluated(story, job(story, 3, 2, at_s=at_s, first=10 * number), 30, 10 * number + 2)
    at_s = job(story, 3, 2, at_s=at_s, first=100)
    waits(story, at_s, 1900, dict.fromkeys((0, 1), (300, 102, "evaluation")))
    (hang,) = of(Signal, story)
    assert 1800 <= (hang.seen_ns - ns(at_s)) / 1e9 <= 1808


def test_what_a_broker_slept_through_is_learned_by_no_limit() -> None:
    story = default_job()
    at_s = 0.0
    for number in range(4):
        at_s = evaluated(story, job(story, 3, 2, at_s=at_s, first=10 * number), 30, 10 * number + 2)
        at_s = job(story, 3, 2, at_s=at_s, first=10 * number + 4)
        for rank in range(2):
            story.progress(at_s, rank, 20 * number + 15, 10 * number + 6, phase="evaluation")
        at_s += 1500  # the bus was down
        story.tick(at_s)
        for rank in range(2):
            story.progress(at_s + 5, rank, 20 * number + 16, 10 * number + 6)
        at_s += 15
    at_s = job(story, 3, 2, at_s=at_s, first=5000)
    waits(story, at_s, 700, dict.fromkeys((0, 1), (30_000, 5002, "evaluation")))
    (hang,) = of(Signal, story)
    assert "in phase evaluation (limit 600 s)" in hang.evidence


def test_a_rank_that_evaluates_alone_while_the_others_train_is_not_behind() -> None:
    """A quarter of an hour each time: below what is stated, above what is learned of all ranks together."""
    story = default_job()
    step, progress = 0, 0
    for second in range(5 * 1000):
        part = second % 1000
        step += part % 2
        story.progress(second, 1, 2 * step + 2, step)
        if part < 100:
            progress += 1
            story.progress(second, 0, progress, step)
        else:
            story.progress(second, 0, progress + 1, step - (part - 100) // 2, phase="evaluation")
            progress += part == 100
        story.tick(second + 0.5)
    assert of(Signal, story) == []


def test_processes_that_a_launcher_starts_anew_within_the_attempt_make_progress_from_nothing() -> None:
    """torchrun's own restart: hooks count from nothing again, and steps go back to the checkpoint's."""
    story = running(begun(), 1, 200)
    ticks(story, 200, 204)
    running(story, 204, 260, step=100)
    assert of(Signal, story) == []
    ticks(story, 260, 270, stuck=dict.fromkeys((0, 1), (314, 155, "step")))
    assert [one.rule for one in of(Signal, story)] == ["no_progress"]


def test_words_that_overtook_each_other_are_no_progress() -> None:
    story = running(begun(), 1, 10)
    for second in range(10, 30):
        for rank in range(2):
            for progress in (20, 18, 19, 20):
                story.progress(second + progress / 1000, rank, progress, 9)
        story.tick(second + 0.5)
    (hang,) = of(Signal, story)
    assert hang.rule == "no_progress" and hang.seen_ns <= ns(16)


def test_phases_that_come_and_go_without_a_step_are_a_hang_in_the_end() -> None:
    """A checkpoint that fails and is tried again, for ever."""
    story = running(begun(), 1, 10)
    story.adopt(9.6, LIMITS.model_copy(update={"hang": LIMITS.hang.model_copy(update={"stepless_s": 60.0})}))
    for second in range(10, 80):
        for rank in range(2):
            story.progress(second, rank, 20 + second, 9, phase="checkpoint" if second % 2 else "step")
        story.tick(second + 0.5)
    (hang,) = of(Signal, story)
    assert (hang.symptom, hang.rule, hang.step) == ("job_hang", "no_step", 9) and hang.seen_ns <= ns(70.5)
    assert of(SignalCleared, story) == []
    running(story, 80, 90, step=60)
    assert len(of(SignalCleared, story)) == 1 and len(of(Signal, story)) == 1


def test_a_state_that_an_earlier_version_stored_is_no_hang() -> None:
    """It did not tell when a step was finished last."""
    story = running(begun(), 1, 90)
    story.adopt(89.6, Detectors(hang=LIMITS.hang.model_copy(update={"stepless_s": 60.0})))
    fold = PartitionFold(JOB)
    for record in story.records:
        fold.feed(record)
    stored = {name: value for name, value in JOB.dump(fold.keys["gpt"].state).items() if name != "stepped_ns"}
    fold.keys["gpt"].state = JOB.load("gpt", json.loads(json.dumps(stored)))
    before = len(story.records)
    ticks(story, 90, 100)
    running(story, 100, 105, step=90)
    told_after = [out.event.data for record in story.records[before:] for out in fold.feed(record)[0]]
    assert not [fact for fact in told_after if isinstance(fact, Signal)]


def test_many_evaluations_one_after_another_are_no_hang() -> None:
    story = default_job()
    at_s = job(story, 3, 2)
    for part in range(12):
        at_s = waits(story, at_s, 900, dict.fromkeys((0, 1), (100 + part, 2, "evaluation")))
    assert of(Signal, story) == []


def test_a_script_that_speaks_by_one_rank_is_held_to_the_limit_of_the_phase_that_it_tells() -> None:
    """The others never tell of a step: they are not in their start-up for ever."""
    story = running(begun(world=1), 1, 10, world=1)
    for rank in range(1, 8):
        story.started(9, rank, world=8)
    waits(story, 10, 10, {0: (20, 9, "step")} | dict.fromkeys(range(1, 4), (0, -1, "startup")))
    (hang,) = of(Signal, story)
    assert "in phase step (limit 5 s)" in hang.evidence


def test_a_broker_that_stumbles_again_and_again_hides_no_hang() -> None:
    story = default_job()
    at_s = job(story, 10, 2)
    for second in range(2000):
        for rank in range(2):
            story.progress(at_s + second, rank, 20, 9)
        if second % 300 > 5:  # six seconds without a tick, every five minutes
            story.tick(at_s + second + 0.5)
    (hang,) = of(Signal, story)
    assert 600 < (hang.seen_ns - ns(at_s)) / 1e9 <= 1250


def test_progress_that_waited_out_an_outage_is_no_hang() -> None:
    story = default_job()
    at_s = job(story, 10, 2)
    after_s = at_s + 7200
    story.tick(after_s)
    for rank in range(2):
        story.progress(after_s + 5, rank, 60, 30, held_s=7000)
    waits(story, after_s + 6, 550, dict.fromkeys((0, 1), (60, 30, "step")))
    assert of(Signal, story) == []


def links(story: Story, at_s: float, until_s: float, carried: dict[int, float], step: int = 9) -> None:
    """Hooks that still speak, and a sample of every node's links each half minute: bytes a second."""
    for second in range(int(at_s), int(until_s)):
        for rank in carried:
            story.progress(second, rank, 1000, step)
        if second % 30 == 0:
            for rank, rate in carried.items():
                fact = LinkTraffic(period_s=30, bytes_per_s=rate, links=8)
                story.say(second, f"n{rank}", fact, job="gpt", attempt=1, on_job=True, producer="nic")
        story.tick(second + 0.5)


def trained(declares: bool) -> tuple[Story, float]:
    story = default_job()
    at_s = job(story, 10, 2)
    if declares:
        at_s = waits(story, at_s, 5, {0: (21, 9, "checkpoint"), 1: (21, 9, "step")})
    for rank in range(2):
        story.progress(at_s, rank, 1000, 9, losses=(1.0,))
    return story, at_s


def after_s(story: Story, at_s: float) -> float:
    (hang,) = of(Signal, story)
    return (hang.seen_ns - ns(at_s)) / 1e9


def test_a_job_whose_links_are_idle_hangs_sooner() -> None:
    story, at_s = trained(declares=True)
    links(story, at_s, at_s + 700, {0: 20_000.0, 1: 0.0})
    assert 300 <= after_s(story, at_s) <= 308
    assert "the links of all 2 nodes are idle" in of(Signal, story)[0].evidence


def test_not_sooner_than_its_steps_take_anyway() -> None:
    """Gradients of six minutes, summed at their end: the links are idle meanwhile in every step."""
    story = default_job()
    at_s = job(story, 4, 360)
    at_s = waits(story, at_s, 5, {0: (21, 3, "checkpoint"), 1: (21, 3, "step")})
    for rank in range(2):
        story.progress(at_s, rank, 1000, 3, losses=(1.0,))
    links(story, at_s, at_s + 700, {0: 0.0, 1: 0.0}, step=3)
    assert 600 <= after_s(story, at_s) <= 608


def test_not_sooner_where_the_script_declares_no_phases() -> None:
    story, at_s = trained(declares=False)
    links(story, at_s, at_s + 700, {0: 0.0, 1: 0.0})
    assert 600 <= after_s(story, at_s) <= 608


def test_a_job_that_still_carries_something_is_given_more_time() -> None:
    story, at_s = trained(declares=True)
    links(story, at_s, at_s + 1300, {0: 0.0, 1: 3e9})
    assert 1200 <= after_s(story, at_s) <= 1208
    assert "but the links of n1 carry 3000 MB/s: it may be slow" in of(Signal, story)[0].evidence


def test_a_node_that_tells_of_no_links_leaves_the_limit_as_it_is() -> None:
    story, at_s = trained(declares=True)
    for second in range(int(at_s), int(at_s) + 700):
        story.progress(second, 0, 1000, 9)
        if second % 30 == 0:
            story.say(second, "n0", LinkTraffic(period_s=30, bytes_per_s=0, links=8), job="gpt", attempt=1, on_job=True)
        story.tick(second + 0.5)
    assert 600 <= after_s(story, at_s) <= 608


def test_skipped_updates_do_not_unconfirm_health() -> None:
    story = begun()
    for step in range(4):
        for rank in range(2):
            sample = StepSample(step=step, ended_ns=0, step_time_s=1, loss=float("inf"), skipped=True)
            fact = TrainingProgress(rank=rank, world_size=2, phase="step", progress=step + 2, step=step, samples=(sample,))
            story.say(step + 1, f"n{rank}", fact, job="gpt", attempt=1, on_job=True)
    assert len(of(ProgressNoted, story)) == 1


TIMERS = Path(__file__).parents[2] / "shared/cases/training/dlrover_xpu_timer.csv"


@pytest.mark.skipif(not TIMERS.exists(), reason="needs ../shared")
@pytest.mark.parametrize(
    ("case", "rule"), [("normal/xpu_timer_metric_0", ""), ("hang/xpu_timer_metric_all", "no_progress"), ("hang/xpu_timer_metric_some", "rank_behind")]
)  # fmt: skip
def test_ranks_that_hang_in_a_real_recording_are_claimed_and_those_of_a_normal_job_are_not(case: str, rule: str) -> None:
    """Which of eight ranks' kernels hang, as a timer in them found: those make no progress here, and the others do."""
    hung = set()
    for row in csv.DictReader(TIMERS.open(newline="")):
        if row["file"] == case and row["metric"] == "XPU_TIMER_COMMON_HANG" and float(row["value"]):
            hung.add(int(row["labels"].split('rank=""')[-1].split('rank="')[-1].strip('"}')))
    story = running(begun(world=8), 1, 10, world=8)
    for second in range(10, 40):
        for rank in range(8):
            done = 9 if rank in hung else second
            story.progress(second, rank, 2 * done + 2, done, world=8)
        story.tick(second + 0.5)
    found = of(Signal, story)
    assert [one.rule for one in found] == ([rule] if rule else [])
    if rule == "rank_behind":
        assert hung == {0, 2, 5} and all(f"rank {rank} on" in found[0].evidence for rank in hung)
