"""Wall time: each nanosecond in one bin, whatever the order, the clocks and the faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.clock import NS
from events.job import JobDeclared, Place, RestartRequested, StopRequested
from processors.ettr import Split, WallTime, dump, load, observe, sliding_ettr, split, steps_lost, told
from tests.telemetry import Story, ns


def folded(story: Story, wall: WallTime | None = None) -> WallTime:
    wall = wall or WallTime()
    for seen in story.seen():
        wall = observe(wall, seen)
        assert_whole(split(wall))
    return wall


def assert_whole(parts: Split) -> None:
    assert parts.productive_ns + parts.recomputed_ns + parts.overhead_ns + parts.lost.total() == parts.total_ns
    assert min(parts.productive_ns, parts.recomputed_ns, parts.overhead_ns, parts.lost.total()) >= 0


def seconds(ns_: int) -> float:
    return ns_ / NS


def steps(
    story: Story, from_s: float, first: int, many: int, *, took_s: float = 1.0, attempt: int = 1, world: int = 2
) -> float:
    """Both ranks finish steps one after another; returns when the last ends."""
    at_s = from_s
    for step in range(first, first + many):
        at_s += took_s
        for rank in range(world):
            story.progress(at_s, rank, step + 2, step, losses=(1.0,), took_s=took_s, attempt=attempt, world=world)
    return at_s


def begun(story: Story, at_s: float, *, attempt: int = 1) -> Story:
    for rank in range(2):
        story.started(at_s, rank, attempt=attempt)
    return story


def test_a_run_that_only_trains() -> None:
    story = begun(Story("job"), 0)
    steps(story, 10, 0, 100)
    parts = split(folded(story))
    assert seconds(parts.total_ns) == 110 and seconds(parts.productive_ns) == 100
    assert seconds(parts.lost.startup) == 10 and parts.recomputed_ns == 0
    assert parts.ettr == pytest.approx(100 / 110)


def test_recomputed_steps_are_not_productive_again() -> None:
    story = begun(Story("job"), 0)
    steps(story, 10, 0, 20)  # steps 0 to 19, until 30 s
    story.exited(35, 1, signal=9)
    begun(story, 40, attempt=2)
    steps(story, 48, 15, 20, attempt=2)  # restored at 14: 15 to 19 again, 20 to 34 for the first time
    wall = folded(story)
    parts = split(wall)
    assert seconds(parts.productive_ns) == 20 + 15 and seconds(parts.recomputed_ns) == 5 and wall.steps_recomputed == 5
    # 5 s until it died are the stall's, 5 s it was down, 8 s it started again.
    assert (seconds(parts.lost.stall), seconds(parts.lost.down), seconds(parts.lost.restart)) == (5, 5, 8)
    assert seconds(parts.total_ns) == 68


def test_a_planned_restart_is_counted_as_such() -> None:
    story, before = Story("job"), Story("job")
    begun(before, 0)
    steps(before, 2, 0, 10)
    wall = told(folded(before), ns(12), RestartRequested(job="gpt", reason="new data", author="me"))
    for rank in range(2):
        story.exited(13, rank, signal=15, asked=True)
    begun(story, 15, attempt=2)
    steps(story, 17, 10, 10, attempt=2)
    parts = split(folded(story, wall))
    assert seconds(parts.lost.planned) == 5 and parts.lost.down == parts.lost.restart == parts.lost.stall == 0
    assert seconds(parts.productive_ns) == 20


def test_a_stop_stays_planned_until_someone_starts_it_again() -> None:
    before = begun(Story("job"), 0)
    steps(before, 2, 0, 10)
    after = Story("job")
    after.exited(12, 0, signal=15, asked=True)
    wall = folded(after, told(folded(before), ns(12), StopRequested(job="gpt", reason="budget", author="me")))
    assert seconds(split(wall, ns(1012)).lost.planned) == 1000


def test_a_declaration_begins_the_run() -> None:
    declared = JobDeclared(job="gpt", nodes=(Place(node="n0"),), command=("true",))
    wall = told(WallTime(), ns(0), declared)
    story = begun(Story("job"), 30)
    steps(story, 32, 0, 1)
    parts = split(folded(story, wall))
    assert seconds(parts.lost.startup) == 32 and seconds(parts.total_ns) == 33
    assert told(wall, ns(50), declared) == wall


def test_evaluation_and_checkpoints_are_overhead_unless_the_attempt_dies_in_them() -> None:
    story = begun(Story("job"), 0)
    at_s = steps(story, 2, 0, 10)
    story.progress(at_s, 0, 20, 9, phase="checkpoint")
    story.progress(at_s + 4, 0, 21, 9, phase="step")
    at_s = steps(story, at_s + 4, 10, 10)
    story.progress(at_s, 0, 40, 19, phase="checkpoint")
    story.exited(at_s + 60, 0, signal=9)
    parts = split(folded(story))
    assert seconds(parts.overhead_ns) == 4 and seconds(parts.productive_ns) == 20
    begun(story, at_s + 61, attempt=2)
    assert seconds(split(folded(story)).lost.stall) == 60


def test_a_stall_within_a_step_is_not_productive() -> None:
    story = begun(Story("job"), 0)
    at_s = steps(story, 2, 0, 20)
    # The rank was stopped for a minute in the midst of step 20, and its own clock counted that as the step's.
    at_s = steps(story, at_s, 20, 1, took_s=61)
    steps(story, at_s, 21, 10)
    parts = split(folded(story))
    assert seconds(parts.productive_ns) == 31
    assert seconds(parts.lost.stall + parts.lost.unsettled) == 60


def test_uneven_reports_lose_nothing() -> None:
    story = begun(Story("job"), 0)
    steps(story, 2, 0, 1)
    for i, late in enumerate([0.4, 0.9, 0.1, 0.8, 0.0, 0.7, 0.2, 0.9, 0.5, 0.0]):
        story.progress(4 + i + late, 0, 10 + i, 1 + i, losses=(1.0,))
    parts = split(folded(story))
    assert seconds(parts.productive_ns) == pytest.approx(11, abs=0.01) and parts.lost.stall == 0


def test_steps_whose_samples_were_overwritten_count() -> None:
    story = begun(Story("job"), 0)
    steps(story, 2, 0, 5)
    story.progress(107, 0, 200, 104, losses=(1.0, 1.0))
    parts = split(folded(story))
    assert seconds(parts.productive_ns) == pytest.approx(105, abs=0.01)


def test_a_script_that_reports_every_tenth_step() -> None:
    story = begun(Story("job"), 0)
    for i in range(10):
        story.progress(12 + 10 * i, 0, i + 2, 10 * i, losses=(1.0,), took_s=10)
    story.progress(202, 0, 14, 100, losses=(1.0,), took_s=10)
    parts = split(folded(story))
    assert seconds(parts.productive_ns) == pytest.approx(110, abs=0.1)
    assert seconds(parts.lost.stall) + seconds(parts.lost.unsettled) == pytest.approx(90, abs=0.1)


def test_a_spool_that_drains_late_is_binned_by_when_it_was_seen() -> None:
    story = begun(Story("job"), 0)
    steps(story, 2, 0, 10)
    for step in range(10, 40):  # cut off for 30 s, then all at once
        story.progress(42 + step / 1000, 0, step + 2, step, losses=(1.0,), held_s=42 + step / 1000 - (3 + step))
    steps(story, 42.5, 40, 10)
    parts = split(folded(story))
    assert seconds(parts.productive_ns) == pytest.approx(50, abs=0.6)


def test_the_end_and_what_the_clocks_of_hosts_say_do_not_matter() -> None:
    story = begun(Story("job"), 0)
    at_s = steps(story, 2, 0, 10)
    story.exited(at_s + 1, 0, code=0)
    story.exited(at_s + 3, 1, code=0)
    wall = folded(story)
    assert wall.stage == "ended"
    parts = split(wall, ns(5000))
    assert seconds(parts.total_ns) == 15 and seconds(parts.lost.ending) == 3 and seconds(parts.productive_ns) == 10


def test_the_sliding_hour() -> None:
    story = begun(Story("job"), 0)
    at_s = steps(story, 0, 0, 400, took_s=10)
    wall = folded(story)
    assert sliding_ettr(wall) == pytest.approx(1, abs=0.01)
    assert sliding_ettr(wall, ns(at_s + 1800)) == pytest.approx(0.5, abs=0.01)
    assert sliding_ettr(wall, ns(at_s + 7200)) == 0
    assert len(wall.recent) <= 362


def test_steps_lost() -> None:
    assert steps_lost(57, 40) == 17 and steps_lost(57, -1) == 58 and steps_lost(-1, -1) == 0 and steps_lost(5, 9) == 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["started", "progress", "progress", "progress", "exited"]),
        st.integers(0, 5_000),  # ms since the one before
        st.integers(0, 2),  # rank
        st.integers(1, 3),  # attempt
        st.integers(-1, 12),  # step
        st.sampled_from(["startup", "step", "evaluation", "checkpoint", "undeclared"]),
        st.sampled_from([0.0, 0.3, 1.0, 60.0, 1e12, float("inf")]),
        st.integers(0, 4),  # samples
        st.integers(0, 20),  # held, s
        st.sampled_from([0, 1, None]),
    ),
    max_size=40,
)


def random_story(rows: list[tuple[Any, ...]]) -> Story:
    story, at_ms = Story("job"), 30_000
    for kind, later, rank, attempt, step, phase, took_s, samples, held_s, code in rows:
        at_ms += later
        at_s = at_ms / 1000
        if kind == "started":
            story.started(at_s, rank, attempt=attempt, world=3)
        elif kind == "exited":
            story.exited(at_s, rank, code=code, asked=code == 1, attempt=attempt, world=3, held_s=held_s)
        else:
            losses = (1.0,) * min(samples, step + 1)
            story.progress(
                at_s, rank, step + 1, step, phase=phase, attempt=attempt, world=3, losses=losses, took_s=took_s, held_s=held_s
            )
    return story


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(0, 39), st.integers(0, 100))
def test_every_nanosecond_is_in_one_bin_and_a_stored_state_goes_on_as_it_was(
    rows: list[tuple[Any, ...]], cut: int, later: int
) -> None:
    story = random_story(rows)
    wall, other, before_ns = WallTime(), WallTime(), 0
    for i, seen in enumerate(story.seen()):
        wall, other = observe(wall, seen), observe(other, seen)
        if i == cut:
            other = load(json.loads(json.dumps(dump(other))))
        parts = split(wall)
        assert_whole(parts)
        assert parts.total_ns >= before_ns
        before_ns = parts.total_ns
        assert_whole(split(wall, seen.time_ns + later * NS))
        assert 0 <= sliding_ettr(wall, seen.time_ns + later * NS) <= 1
    assert wall == other
