"""Loss and gradient norm: what is no number, jumps that last, and all that is no trouble; and curves of real runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from events.incident import Signal, SignalCleared
from events.training import StepSample, TrainingProgress
from processors.curves import CurvesHealth
from processors.detector import PartitionFold, dump_clock, load_clock
from processors.policy import Curves, Detectors
from tests.telemetry import Story, facts, ns, told

CURVES = CurvesHealth()
NAN = math.nan
CASES = Path(__file__).parents[2] / "shared/cases/training/bigscience_steps.csv"
RULES = Detectors(curves=Curves(warmup_steps=0, grace_steps=3))


def run(
    story: Story, values: Iterable[tuple[float | None, float | None]], *, first: int = 0, rank: int = 0, attempt: int = 1, world: int = 4,
    skipped: Sequence[int] = (), changed: dict[int, str] | None = None, at_s: float | None = None,
) -> int:  # fmt: skip
    """A sample a second of one rank: loss and gradient norm from step `first` on; the step after them."""
    step = first
    for loss, norm in values:
        sample = StepSample(
            step=step, ended_ns=0, step_time_s=1, loss=loss, grad_norm=norm, skipped=step in skipped, changed=(changed or {}).get(step, "")  # type: ignore[arg-type]
        )  # fmt: skip
        fact = TrainingProgress(rank=rank, world_size=world, phase="step", progress=step + 2, step=step, samples=(sample,))
        when_s = step if at_s is None else at_s
        story.say(when_s, f"n{rank}", fact, job="gpt", attempt=attempt, on_job=True, producer=f"trainer-{rank}")
        step += 1
    return step


def begun(rules: Detectors = RULES) -> Story:
    story = Story("job")
    story.adopt(0, rules)
    return story


def steady(count: int, loss: float = 2.5, norm: float = 0.2) -> list[tuple[float, float]]:
    """A curve as healthy as they are: some scatter around a slow decline."""
    return [
        (loss * (1 + 0.03 * math.sin(7.3 * i)) * (1 - 1e-4 * i), norm * (1 + 0.3 * math.sin(3.1 * i))) for i in range(count)
    ]


def claims(story: Story) -> list[Any]:
    return facts(told(CURVES, story))


def signals(story: Story) -> list[Signal]:
    return [fact for fact in claims(story) if isinstance(fact, Signal)]


# --- jumps --------------------------------------------------------------------------------------------------------------------


def test_a_jump_that_lasts_is_told_once_with_its_first_step_and_cleared() -> None:
    story = begun()
    step = run(story, steady(100))
    step = run(story, [(13.0, 0.2)] * 30, first=step)
    run(story, steady(20), first=step)
    high, cleared = claims(story)
    assert (high.symptom, high.confidence, high.rule, high.bad_step, high.step) == (
        "loss_spike",
        "high",
        "curve_jump",
        100,
        104,
    )
    assert high.node == "" and high.rank == -1 and high.seen_ns == ns(104)
    assert "loss up to 5." in high.evidence
    assert isinstance(cleared, SignalCleared) and cleared.symptom == "loss_spike"


def test_a_spike_that_does_not_last_is_recorded_and_of_low_confidence() -> None:
    story = begun()
    step = run(story, steady(100))
    step = run(story, [(20.0, 4.0), (15.0, 3.0)], first=step)
    run(story, steady(50), first=step)
    (low,) = claims(story)
    assert (low.symptom, low.confidence, low.rule, low.bad_step) == ("loss_spike", "low", "curve_spike", 100)
    assert "it did not last" in low.evidence and "gradient norm up to" in low.evidence


def test_below_five_times_nothing_is_a_jump() -> None:
    story = begun()
    step = run(story, steady(100))
    run(story, [(11.0, 0.9)] * 100, first=step)
    assert claims(story) == []


def test_a_norm_must_last_longer_than_a_loss() -> None:
    story = begun()
    step = run(story, steady(100))
    step = run(story, [(2.5, 4.0)] * 49, first=step)
    step = run(story, steady(10), first=step)
    step = run(story, [(2.5, 4.0)] * 50, first=step)
    low, high = signals(story)
    assert (low.confidence, low.bad_step, high.confidence, high.bad_step, high.step) == ("low", 100, "high", 159, 208)


def test_short_spikes_of_the_loss_do_not_add_up_over_a_long_one_of_the_norm() -> None:
    story = begun()
    calm = steady(100)
    bad = [(30.0 if i % 9 < 2 else 2.5, 40.0) for i in range(41)]
    end = run(story, [*calm, *bad])
    assert claims(story) == []
    run(story, [(30.0, 40.0)] * 5, first=end)
    (told_one,) = claims(story)
    assert (told_one.rule, told_one.bad_step, told_one.step) == ("curve_jump", 100, end + 4)


def test_the_window_does_not_learn_a_jump() -> None:
    """However long it lasts, it stays what it is."""
    story = begun()
    step = run(story, steady(100))
    run(story, [(20.0, 5.0)] * 500, first=step)
    (high,) = claims(story)
    assert high.confidence == "high"


def test_troubles_that_do_not_last_are_told_once_a_minute_and_counted() -> None:
    story = begun()
    step = run(story, steady(100))
    for _ in range(40):
        step = run(story, [(2.5, 9.0), *steady(5)], first=step)
    lows = signals(story)
    assert 3 <= len(lows) <= 5 and {low.confidence for low in lows} == {"low"}
    assert 40 - 12 <= sum(low.count for low in lows) <= 40


def test_warm_up_is_no_trouble() -> None:
    story = begun(Detectors())
    step = run(story, [*steady(30, 12, 60), *[(76.0, 400.0)] * 20, *steady(50, 12, 60)])
    assert step == 100
    run(story, [*[(76.0, 400.0)] * 20], first=step)
    (high,) = signals(story)
    assert high.bad_step == 100


def test_the_first_steps_after_a_restore_are_no_trouble_and_lasting_ones_are() -> None:
    """Values as a run of 176B gave after it was reshaped: ten times the norm, for three steps."""
    story = begun()
    run(story, steady(100, 1.94, 0.13))
    step = run(story, [(2.04, 1.335), (2.0, 0.9), (2.0, 0.7), *steady(80, 1.94, 0.13)], first=90, attempt=2, at_s=120)
    assert claims(story) == []
    # A copy of the state that is wrong: it is told beside what was before.
    run(story, [(11.0, 1.0)] * 20, first=step - 20, attempt=3, at_s=400)
    (high,) = signals(story)
    assert high.bad_step == step - 20 + 3 and high.confidence == "high"


@pytest.mark.parametrize("what", ["data", "rate", "context", "other"])
def test_what_the_script_says_it_changed_is_learned_anew(what: str) -> None:
    story = begun()
    step = run(story, steady(100))
    step = run(story, steady(100, 14, 3), first=step, changed={step: what})
    assert claims(story) == []
    run(story, [(90.0, 3.0)] * 10, first=step)
    assert [one.bad_step for one in signals(story)] == [step]


def test_a_curve_that_crosses_zero_does_not_jump() -> None:
    """A reward, or a norm that is given as 0."""
    story = begun()
    run(story, [(math.sin(i * 1.7) * 3 + 0.1, 0.0) for i in range(300)])
    assert claims(story) == []


def test_the_lowest_rank_that_gives_values_is_followed() -> None:
    story = begun()
    for step in range(150):
        for rank in (3, 1, 2):
            wild = rank != 1 and step > 120
            run(story, [(50.0 if wild else 2.5 + rank, None)], first=step, rank=rank)
        run(story, [(None, None)], first=step, rank=0)
    assert claims(story) == []


# --- no numbers ---------------------------------------------------------------------------------------------------------------


def test_a_loss_that_stays_no_number_is_told_at_its_second_step_from_any_rank() -> None:
    story = begun(Detectors())
    for rank in range(4):
        run(story, steady(10), rank=rank)
    run(story, [(NAN, None)], first=10, rank=2)
    for rank in (0, 1, 3):
        run(story, [(2.5, 0.2)], first=10, rank=rank)
    for rank in range(4):
        run(story, [(NAN, NAN)] * 3, first=11, rank=rank)
    (high,) = signals(story)
    assert (high.symptom, high.confidence, high.rule, high.bad_step) == ("nan_value", "high", "not_a_number", 10)
    assert (high.rank, high.node) == (2, "n2") and "first of rank 2 on n2" in high.evidence


def test_where_all_ranks_show_it_at_once_no_node_is_named() -> None:
    story = begun()
    for rank in range(4):
        run(story, [(math.inf, 0.2)], first=10, rank=rank)
    for rank in range(4):
        run(story, [(NAN, 0.2)], first=11, rank=rank)
    (high,) = signals(story)
    assert (high.rank, high.node, high.bad_step) == (-1, "", 10) and "rank 0, 1, 2, 3" in high.evidence


def test_one_loss_that_is_no_number_is_recorded() -> None:
    story = begun()
    step = run(story, steady(10))
    run(story, [(NAN, NAN), *steady(10)], first=step)
    low, norm = signals(story)
    assert (low.symptom, low.confidence, low.bad_step) == ("nan_value", "low", 10)
    assert norm.confidence == "low" and "gradient norm" in norm.evidence


def test_a_rank_that_fails_after_one_makes_it_certain() -> None:
    story = begun()
    run(story, [*steady(10), (NAN, None)])
    story.exited(11, 0, code=1, stderr="AssertionError: loss is nan")
    (high,) = signals(story)
    assert (high.confidence, high.rule, high.bad_step) == ("high", "not_a_number_exit", 10)


def test_an_end_that_was_asked_for_makes_nothing_certain() -> None:
    story = begun()
    run(story, [*steady(10), (NAN, None)])
    story.exited(11, 0, signal=15, asked=True)
    run(story, steady(3), first=5, attempt=2)
    (low,) = signals(story)
    assert low.confidence == "low" and "the attempt ended" in low.evidence
    assert told(CURVES, story)[0].event.attempt == 1


def test_skipped_updates_are_no_trouble() -> None:
    """A loss scaler that comes down by halves from its first scale, and overflows again now and then."""
    story = begun(Detectors())
    bad = [*range(18), 40, 41, 300, 301, 302]
    run(story, [(NAN if i in bad else 2.5, math.inf if i in bad else 0.2) for i in range(400)], skipped=bad)
    assert claims(story) == []


def test_a_scaler_that_is_not_told_of_is_none_either() -> None:
    """Scripts that do not say which updates were skipped: the norm is infinite, the loss is not."""
    story = begun(Detectors())
    bad = [*range(18), 200, 201, 202]
    run(story, [(2.5, math.inf if i in bad else 0.2) for i in range(300)])
    assert [one.confidence for one in signals(story)] == ["low", "low"]


def test_a_norm_that_stays_no_number_is_certain_in_the_end() -> None:
    story = begun()
    run(story, [(2.5, math.inf)] * 30, first=50)
    (high,) = signals(story)
    assert (high.symptom, high.confidence, high.bad_step, high.step) == ("nan_value", "high", 50, 69)


def test_loss_and_norm_clear_each_by_itself() -> None:
    story = begun()
    step = run(story, steady(10))
    step = run(story, [(NAN, NAN)] * 25, first=step)
    run(story, [(2.5, NAN)] * 3, first=step)
    assert [(one.metric, type(one)) for one in claims(story)] == [
        ("loss", Signal), ("grad_norm", Signal), ("loss", SignalCleared),
    ]  # fmt: skip


def test_late_and_doubled_messages_change_nothing() -> None:
    def story(twice: bool) -> Story:
        made = begun()
        values = [*steady(100), (NAN, 0.2), *steady(5), *[(20.0, 3.0)] * 3, *steady(30), *[(20.0, 3.0)] * 9]
        for step, value in enumerate(values):
            run(made, [value], first=step)
            if twice:
                run(made, [value], first=step)
                if step > 7:
                    run(made, [values[step - 5]], first=step - 5, at_s=step)
        return made

    once = claims(story(False))
    assert len(once) == 3
    found = claims(story(True))
    assert [(f.symptom, f.confidence, f.bad_step) for f in found] == [(f.symptom, f.confidence, f.bad_step) for f in once]


def test_the_state_survives_its_own_text() -> None:
    story = begun()
    step = run(story, steady(100))
    run(story, [(20.0, NAN), (21.0, NAN), (20.0, 3.0)], first=step)
    fold = PartitionFold(CURVES)
    for record in story.records:
        fold.feed(record)
    state = fold.keys["gpt"].state
    assert state.jump and state.nan_norm is None
    assert CURVES.load("gpt", CURVES.dump(state)) == state
    assert load_clock(dump_clock(fold.clock)) == fold.clock


# --- more than one rank, and samples that say less ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["skipped", "without values"])
def test_a_change_that_is_told_with_a_skipped_step_or_one_without_values_counts(how: str) -> None:
    story = begun()
    step = run(story, steady(100))
    step = run(
        story, [(None, None) if how == "without values" else (2.5, 0.2)], first=step, changed={100: "data"},
        skipped=[100] if how == "skipped" else [],
    )  # fmt: skip
    run(story, [(25.0, 9.0)] * 100, first=step)
    assert claims(story) == []


def test_a_change_counts_once_whichever_rank_tells_it_and_however_late() -> None:
    story = begun()
    step = run(story, steady(100))
    run(story, [(2.5, 0.2)], first=99, rank=3, changed={99: "rate"})
    step = run(story, [(25.0, 2.0)] * 40, first=step)
    assert claims(story) == []
    run(story, [(2.5, 0.2)], first=99, rank=2, changed={99: "rate"}, at_s=step)  # waited in a spool
    run(story, [(250.0, 2.0)] * 9, first=step)
    (high,) = signals(story)
    assert (high.confidence, high.bad_step) == ("high", 140)


def test_the_loss_of_a_pipelines_last_stage_is_followed_beside_the_norm_of_its_first() -> None:
    """Only the last stage has a loss; a norm is the same on all. Each rank's words come in batches of several steps."""
    story = begun()
    for first in range(0, 160, 5):
        at_s = first + 5
        for rank in (0, 3):
            values = [(15.0 if i >= 120 else 2.5, None) if rank == 3 else (None, 0.2) for i in range(first, first + 5)]
            run(story, values, first=first, rank=rank, at_s=at_s)
    (high,) = signals(story)
    assert (high.confidence, high.bad_step, high.step) == ("high", 120, 124) and "loss up to 6.0" in high.evidence


def test_where_the_followed_rank_falls_silent_another_is_followed_until_it_is_back() -> None:
    story = begun()
    for step in range(400):
        for rank in (0, 1):
            if rank or not 100 <= step < 300:
                run(story, [(15.0 if 200 <= step < 220 else 2.5, 0.2)], first=step, rank=rank)
    high, cleared = claims(story)
    assert (high.confidence, high.bad_step, high.step) == ("high", 200, 204) and isinstance(cleared, SignalCleared)
    fold = PartitionFold(CURVES)
    for record in story.records:
        fold.feed(record)
    assert fold.keys["gpt"].state.loss.rank == 0


def test_one_ranks_loss_that_stays_no_number_is_told_though_the_others_have_one() -> None:
    """Its updates are skipped by a scaler that nobody tells of, so nothing spreads and nothing is learned any more."""
    story = begun()
    for step in range(100, 160):
        for rank in range(4):
            run(story, [(NAN if rank == 2 and step >= 120 else 2.5, 0.2)], first=step, rank=rank)
    (high,) = claims(story)
    assert (high.confidence, high.bad_step, high.step, high.node, high.rank) == ("high", 120, 121, "n2", 2)


def test_two_losses_of_two_ranks_that_are_no_number_far_apart_do_not_last() -> None:
    story = begun()
    for step in range(100, 400):
        for rank in range(4):
            run(
                story,
                [(NAN if (rank, step) in ((2, 120), (3, 300)) else None if rank > 1 else 2.5, 0.2)],
                first=step,
                rank=rank,
            )
    assert [(one.confidence, one.bad_step) for one in signals(story)] == [("low", 120), ("low", 300)]


def test_a_norm_that_is_no_number_counts_by_steps_that_were_not_skipped() -> None:
    story = begun()
    skipped = [i for i in range(100, 140) if i not in (100, 139)]
    run(story, [(2.5, math.inf if 100 <= i < 140 else 0.2) for i in range(80, 200)], first=80, skipped=skipped)
    assert [one.confidence for one in signals(story)] == ["low"]


def test_what_an_attempt_that_is_over_still_says_counts_for_nothing() -> None:
    story = begun()
    step = run(story, steady(100), attempt=3)
    for attempt in (2, 1):
        run(story, [(NAN, NAN)] * 30, first=90, attempt=attempt, at_s=step)
        run(story, [(90.0, 90.0)] * 60, first=120, rank=1, attempt=attempt, at_s=step)
    run(story, steady(40), first=step, attempt=3)
    assert claims(story) == []


def test_two_jobs_on_the_same_nodes_have_a_curve_each() -> None:
    story = begun()
    for step in range(160):
        for job in ("gpt", "llama"):
            loss = NAN if job == "llama" and step >= 150 else 2.5 if job == "gpt" else 90.0
            sample = StepSample(step=step, ended_ns=0, step_time_s=1, loss=loss, grad_norm=0.2)
            fact = TrainingProgress(rank=0, world_size=1, phase="step", progress=step + 2, step=step, samples=(sample,))
            story.say(step, "n0", fact, job=job, attempt=1, on_job=True, producer=f"trainer-{job}")
    assert [(one.event.job, one.event.data.confidence) for one in told(CURVES, story)] == [("llama", "high")]


def test_values_as_large_as_floats_are() -> None:
    story = begun()
    step = run(story, [(1e308, 5e-324)] * 60)
    step = run(story, steady(60), first=step)
    run(story, [(1e308, 1e308)] * 60, first=step)
    assert {(one.symptom, one.confidence) for one in signals(story)} <= {("loss_spike", "high"), ("loss_spike", "low")}
    assert signals(story)[-1].confidence == "high"


def test_losses_that_are_no_number_now_and_then_are_told_once_a_minute() -> None:
    story = begun()
    run(story, [(NAN if i % 5 == 4 else 2.5, 0.2) for i in range(300)])
    lows = signals(story)
    assert 4 <= len(lows) <= 6 and {low.confidence for low in lows} == {"low"} and "times more since" in lows[-1].evidence


# --- real curves --------------------------------------------------------------------------------------------------------------


def _real() -> list[tuple[str, list[dict[str, str]]]]:
    """Stretches of steps that follow each other in one source, as they were logged."""
    rows = list(csv.DictReader(CASES.open(newline="")))
    runs: list[tuple[str, list[dict[str, str]]]] = []
    for source, group in groupby(rows, key=lambda row: row["source"]):
        stretch: list[dict[str, str]] = []
        for row in group:
            if not row["lm_loss"] or (stretch and not 0 < int(row["iteration"]) - int(stretch[-1]["iteration"]) <= 40):
                if stretch:
                    runs.append((source, stretch))
                stretch = []
            if row["lm_loss"]:
                stretch.append(row)
        if stretch:
            runs.append((source, stretch))
    return runs


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared")
def test_no_curve_of_a_real_run_is_a_false_alarm() -> None:
    """Each stretch as it was logged, and once more (unless it is a run's first steps) with steps that are not in the log filled in by the
    worse of their neighbours, behind a steady history at its first value: spikes of 13B, 104B and 176B runs that their runs got over, or
    that people stopped for at less than five times the loss."""
    seen = 0
    for source, stretch in _real():
        first = int(stretch[0]["iteration"])
        values: list[tuple[float | None, float | None]] = []
        for row, after in zip(stretch, [*stretch[1:], stretch[-1]], strict=True):
            value = (float(row["lm_loss"]), float(row["grad_norm"] or "nan"))
            filled = max(value, (float(after["lm_loss"]), float(after["grad_norm"] or "nan")), key=lambda v: v[1])
            values += [value, *[filled] * (int(after["iteration"]) - int(row["iteration"]) - 1)]
        values = [(loss, None if norm is None or math.isnan(norm) else norm) for loss, norm in values]
        story = begun(Detectors())
        if first > 100:
            start_loss, start_norm = values[0]
            history = [(start_loss, start_norm)] * 70
            run(story, history, first=first - 70)
        run(story, values, first=first)
        seen += len(values)
        high = [one for one in signals(story) if one.confidence == "high"]
        assert not high, (source, first, high)
    assert seen > 800


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared")
def test_a_real_spike_is_recorded() -> None:
    """The 176B run's, at step 31,217: 960 times the usual norm, over within 30 steps."""
    _, stretch = next(
        (source, rows) for source, rows in _real() if source.startswith("train/tr11") and rows[0]["iteration"] == "31214"
    )
    story = begun(Detectors())
    run(story, steady(70, 2.2, 0.2), first=31144)
    for row in stretch:
        run(story, [(float(row["lm_loss"]), float(row["grad_norm"]))], first=int(row["iteration"]))
    run(story, steady(20, 2.2, 0.2), first=31252)
    (low,) = signals(story)
    assert low.confidence == "low" and low.bad_step == 31216
