"""How fast a job goes: declines that last, who is slow, and all that is no decline."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from events.gpu import GpuClocks
from events.incident import Signal, SignalCleared
from events.training import StepSample, TrainingProgress
from processors.detector import PartitionFold
from processors.pace import PaceHealth
from processors.policy import Detectors
from tests.telemetry import Story, facts, told

PACE = PaceHealth()
CASES = Path(__file__).parents[2] / "shared/cases/training"
WORLD = 8  # two ranks a node


def train(
    story: Story, steps: int, took_s: Callable[[int], float], *, first: int = 0, at_s: float = 0, attempt: int = 1, world: int = WORLD,
    busy_s: Callable[[int, int], float | None] = lambda step, rank: None, changed: dict[int, Any] | None = None, **more: Any,
) -> float:  # fmt: skip
    """Synchronous steps of all ranks; returns when the last was over."""
    ticked = math.floor(at_s)
    for step in range(first, first + steps):
        at_s += took_s(step)
        while ticked < at_s:
            story.tick(ticked + 0.5)
            ticked += 1
        for rank in range(world):
            sample = StepSample(
                step=step, ended_ns=0, step_time_s=took_s(step), busy_s=busy_s(step, rank), changed=(changed or {}).get(step, ""), **more
            )  # fmt: skip
            fact = TrainingProgress(rank=rank, world_size=world, phase="step", progress=step + 2, step=step, samples=(sample,))
            story.say(at_s, f"n{rank // 2}", fact, job="gpt", attempt=attempt, on_job=True, producer=f"trainer-{rank}")
    return at_s


def begun(settings: Detectors | None = None) -> Story:
    story = Story("job")
    story.adopt(0, settings or Detectors())
    return story


def claims(story: Story) -> list[Any]:
    return [fact for fact in facts(told(PACE, story)) if isinstance(fact, Signal | SignalCleared)]


def signals(story: Story) -> list[Signal]:
    return [fact for fact in claims(story) if isinstance(fact, Signal)]


def noise(step: int) -> float:
    return 1 + 0.03 * math.sin(7.3 * step)


def test_a_decline_that_lasts_is_told_once_and_cleared() -> None:
    story = begun()
    at_s = train(story, 200, lambda i: 2.0 * noise(i))
    at_s = train(story, 60, lambda i: 2.4 * noise(i), first=200, at_s=at_s)
    train(story, 40, lambda i: 2.0 * noise(i), first=260, at_s=at_s)
    high, cleared = claims(story)
    assert (high.symptom, high.confidence, high.rule, high.node, high.rank) == ("mfu_decline", "high", "pace_decline", "", -1)
    assert "less steps a second than usual" in high.evidence and high.step <= 220
    assert isinstance(cleared, SignalCleared) and cleared.symptom == "mfu_decline"


def test_a_swing_of_the_day_is_no_decline() -> None:
    """1 to 2 % (Llama 3), and a slow drift of 5 %."""
    story = begun()
    train(story, 3000, lambda i: 2.0 * noise(i) * (1 + 0.02 * math.sin(i / 200) + 0.05 * i / 3000))
    assert claims(story) == []


def test_a_job_that_gets_slower_little_by_little_is_recorded_once() -> None:
    """No block is a tenth slower than those before it, and in the end it takes half as long again."""
    story = begun()
    at_s = train(story, 4000, lambda i: 2.0 * noise(i) * (1 + i / 8000))
    (low,) = claims(story)
    assert (low.confidence, low.rule, low.node) == ("low", "pace_ramp", "") and "little by little" in low.evidence
    train(story, 500, lambda i: 2.0 * noise(i), first=4000, at_s=at_s)
    assert len(claims(story)) == 1


def test_long_steps_now_and_then_are_no_decline() -> None:
    """A minute's checkpoint that the others wait for in their step, an evaluation that is not declared, a first step that compiles."""
    story = begun()
    train(story, 600, lambda i: 600.0 if i == 0 else 62.0 if i % 50 == 49 else 10.0 if i % 7 == 3 else 2.0)
    assert claims(story) == []


def test_after_a_restart_the_first_steps_are_not_judged_and_a_slower_machine_is() -> None:
    story = begun()
    at_s = train(story, 200, lambda i: 2.0)
    at_s = train(story, 200, lambda i: 30.0 if i < 198 else 2.0, first=190, at_s=at_s + 60, attempt=2)
    assert claims(story) == []
    train(story, 100, lambda i: 2.6, first=380, at_s=at_s + 60, attempt=3)
    (high,) = signals(story)
    assert high.confidence == "high" and told(PACE, story)[-1].event.attempt == 3


def test_fewer_ranks_or_a_change_that_was_told_is_learned_anew() -> None:
    story = begun()
    at_s = train(story, 200, lambda i: 2.0)
    at_s = train(story, 100, lambda i: 3.0, first=200, at_s=at_s, changed={200: "context"})
    train(story, 100, lambda i: 6.0, first=300, at_s=at_s + 60, attempt=2, world=4)
    assert claims(story) == []


def test_mfu_and_tokens_are_better_than_time() -> None:
    """Longer inputs take longer and are no decline; a lower MFU at the same pace is one."""
    story = begun()
    for first, took_s, tokens, mfu in ((0, 2.0, 4096, 0.4), (200, 4.0, 8192, 0.4), (300, 4.0, 8192, 0.3)):
        train(story, 200 if not first else 100, lambda i, s=took_s: s, first=first, at_s=first * 4.0, tokens=tokens, mfu=mfu)  # type: ignore[misc]
    (high,) = signals(story)
    assert "25% less MFU than usual" in high.evidence


def slow_from(step: int, rank: int, factor: float, base_s: float = 1.0) -> Callable[[int, int], float]:
    """Work of uneven stages (the first ranks do half as much again); one node's takes longer from a step on."""

    def busy_s(i: int, r: int) -> float:
        stage = 1.5 if r < 4 else 1.0
        return base_s * stage * noise(i + 3 * r) * (factor if i >= step and r // 2 == rank // 2 else 1.0)

    return busy_s


def test_the_slow_node_is_named_by_its_own_work() -> None:
    story = begun()
    train(story, 300, lambda i: 2.0 if i < 150 else 3.0, busy_s=slow_from(150, 6, 1.6))
    first, *rest = signals(story)
    named = [one for one in (first, *rest) if one.confidence == "high" and one.node]
    assert [(one.node, one.symptom, one.rule) for one in named] == [("n3", "mfu_decline", "pace_decline")]
    assert "times its peers' time for its own work" in named[0].evidence
    assert len([one for one in (first, *rest) if one.confidence == "high"]) <= 2


def test_a_slow_node_that_slows_nothing_is_recorded() -> None:
    story = begun()
    at_s = train(story, 300, lambda i: 2.0, busy_s=slow_from(150, 6, 1.6))
    train(story, 60, lambda i: 2.0, first=300, at_s=at_s, busy_s=slow_from(9999, 6, 1))
    low, cleared = claims(story)
    assert (low.confidence, low.rule, low.node, low.rank) == ("low", "slow_node", "n3", low.rank) and low.rank in (6, 7)
    assert isinstance(cleared, SignalCleared) and cleared.node == "n3"


def test_uneven_stages_are_no_slow_nodes() -> None:
    story = begun()
    train(story, 400, lambda i: 2.0, busy_s=slow_from(9999, 0, 1))
    assert claims(story) == []


def test_a_node_that_is_slow_from_the_start_is_recorded() -> None:
    story = begun()
    train(story, 100, lambda i: 2.0, busy_s=lambda i, r: 2.0 if r // 2 == 2 else 1.0)
    (low,) = signals(story)
    assert (low.confidence, low.node) == ("low", "n2") and "since the attempt began" in low.evidence


def test_many_slow_nodes_are_not_named() -> None:
    story = begun()
    train(
        story, 300, lambda i: 2.0 if i < 150 else 3.0, world=16,
        busy_s=lambda i, r: (1.0 if i < 150 or r < 10 else 1.6) * noise(i + r),
    )  # fmt: skip
    high = signals(story)
    assert [(one.confidence, one.node) for one in high] == [("high", "")] and "3 nodes are slower" in high[0].evidence


def test_of_two_nodes_neither_is_named() -> None:
    story = begun()
    train(story, 300, lambda i: 2.0, world=4, busy_s=lambda i, r: 1.0 if i < 100 or r < 2 else 3.0)
    assert claims(story) == []


def test_late_and_doubled_messages_change_nothing() -> None:
    story = begun()
    train(story, 200, lambda i: 2.0)
    train(story, 50, lambda i: 9.0, first=100, at_s=400)  # long over
    train(story, 50, lambda i: 2.0, first=200, at_s=900)
    assert claims(story) == []


def test_the_state_survives_its_own_text() -> None:
    story = begun()
    train(story, 170, lambda i: 2.0 if i < 150 else 3.0, busy_s=slow_from(150, 6, 1.6))
    clocked(story, 100, lambda at_s, node: 0.7)
    fold = PartitionFold(PACE)
    for record in story.records:
        fold.feed(record)
    state = fold.keys["gpt"].state
    assert state.suspects and state.past and state.own and state.clocks
    assert PACE.load("gpt", PACE.dump(state)) == state


def test_a_state_that_an_earlier_version_stored_goes_on() -> None:
    """It knew the rank that is followed, and its last step, by their numbers."""
    story = begun()
    at_s = train(story, 200, lambda i: 2.0 * noise(i))
    before = len(story.records)
    train(story, 60, lambda i: 2.4 * noise(i), first=200, at_s=at_s)
    fold = PartitionFold(PACE)
    for record in story.records[:before]:
        fold.feed(record)
    state = fold.keys["gpt"].state
    stored = {**PACE.dump(state), "voice": state.voice.rank, "step": state.voice.step}
    fold.keys["gpt"].state = PACE.load("gpt", json.loads(json.dumps(stored)))
    outs = [out for record in story.records[before:] for out in fold.feed(record)[0]]
    assert [(out.event.data.rule, out.event.data.confidence) for out in outs] == [("pace_decline", "high")]


def said(story: Story, at_s: float, rank: int, sample: StepSample, attempt: int = 1, **more: Any) -> None:
    fact = TrainingProgress(
        rank=rank, world_size=WORLD, phase="step", progress=sample.step + 2, step=sample.step, samples=(sample,)
    )
    story.say(at_s, f"n{rank // 2}", fact, job="gpt", attempt=attempt, on_job=True, producer=f"trainer-{rank}", **more)


def test_where_the_followed_rank_falls_silent_another_is_followed() -> None:
    story = begun()
    for step in range(300):
        for rank in range(WORLD):
            if rank or step < 100:
                took_s = 2.0 if step < 200 else 3.0
                said(story, 2 * step, rank, StepSample(step=step, ended_ns=0, step_time_s=took_s))
    (high,) = signals(story)
    assert high.confidence == "high" and 200 <= high.step <= 220


def test_what_an_attempt_that_is_over_still_says_counts_for_nothing() -> None:
    story = begun()
    at_s = train(story, 200, lambda i: 2.0, attempt=3)
    train(story, 200, lambda i: 9.0, first=200, at_s=at_s, attempt=2, busy_s=slow_from(0, 6, 3.0))
    train(story, 50, lambda i: 2.0, first=200, at_s=at_s + 2000, attempt=3)
    assert claims(story) == []


def test_tokens_that_are_told_only_when_the_script_logs_do_not_blind_it() -> None:
    story = begun()
    for step in range(900):
        tokens = 4096 if step % 10 == 0 and step < 600 else None
        said(story, 2 * step, 0, StepSample(step=step, ended_ns=0, step_time_s=2.0 if step < 400 else 3.0, tokens=tokens))
    (high,) = signals(story)
    assert "less tokens a second and rank" in high.evidence
    fold = PartitionFold(PACE)
    for record in story.records:
        fold.feed(record)
    assert fold.keys["gpt"].state.kind == "steps a second"


def test_a_change_that_any_rank_tells_is_learned_anew() -> None:
    story = begun()
    at_s = train(story, 200, lambda i: 2.0)
    said(story, at_s, 7, StepSample(step=200, ended_ns=0, step_time_s=2, changed="context"))
    train(story, 100, lambda i: 4.0, first=200, at_s=at_s)
    assert claims(story) == []


def test_where_all_are_slow_together_nobody_is_named() -> None:
    story = begun()
    train(story, 300, lambda i: 2.0 if i < 150 else 3.0, busy_s=lambda i, r: (1.0 if i < 150 else 1.6) * noise(i + r))
    (high,) = signals(story)
    assert (high.confidence, high.node) == ("high", "") and "no node's own work stands out beside its peers'" in high.evidence


def test_what_waited_in_a_spool_says_nothing_of_a_ranks_present_work() -> None:
    """An agent's old words drain while its ranks work as ever."""
    story = begun()
    at_s = train(story, 100, lambda i: 2.0, busy_s=lambda i, r: noise(i + r))
    for step in range(100, 200):
        at_s = train(story, 1, lambda i: 2.0, first=step, at_s=at_s, busy_s=lambda i, r: noise(i + r))
        for rank in (6, 7):
            sample = StepSample(step=step - 90, ended_ns=0, step_time_s=2, busy_s=5.0)
            said(story, at_s, rank, sample, held_s=100)
    assert claims(story) == []


def clocked(
    story: Story, until_s: float, shares: Callable[[float, int], float], nodes: int = 4, heat: float = 60, **more: Any
) -> None:
    """Each node's word of its clocks, twice a minute, in its place among what is told already."""
    for at_s in range(0, int(until_s), 30):
        for node in range(nodes):
            share = shares(at_s, node)
            reasons: Any = ("hw_slowdown", "hw_thermal") if share < 0.8 else ()
            fact = GpuClocks(
                gpus=8, slowest=3, slowest_share=share, reasons=reasons, temperature_celsius=heat if share > 0.8 else 92
            )
            story.say(at_s, f"n{node}", fact, job="gpt", attempt=1, on_job=True, producer="nvml", **more)
    records = sorted(story.records, key=lambda record: record.time_ns)
    story.records = [replace(record, sequence=i) for i, record in enumerate(records, 1)]


def test_a_throttled_node_is_named_beside_a_decline() -> None:
    story = begun()
    end_s = train(story, 300, lambda i: 2.0 if i < 150 else 2.6)
    clocked(story, end_s, lambda at_s, node: 0.7 if at_s >= 300 and node == 2 else 0.95)
    (high,) = signals(story)
    assert (high.node, high.rank, high.confidence) == ("n2", -1, "high")
    assert "below their peers' clocks (95%): GPU 3 of n2 at 70% at 92 °C, hw_slowdown, hw_thermal" in high.evidence


def test_low_clocks_without_a_decline_are_nothing() -> None:
    story = begun()
    end_s = train(story, 300, lambda i: 2.0)
    clocked(story, end_s, lambda at_s, node: 0.5 if node == 2 else 0.95)
    assert claims(story) == []


def test_where_all_are_throttled_nobody_is_named_and_the_heat_is_told() -> None:
    story = begun()
    end_s = train(story, 300, lambda i: 2.0 if i < 150 else 2.6)
    clocked(story, end_s, lambda at_s, node: 0.7 if at_s >= 300 else 0.95)
    (high,) = signals(story)
    assert (
        high.node == ""
        and "no node's clocks stand out (the middle is 70% of what they can, the hottest GPU at 92 °C)" in high.evidence
    )


def test_a_rank_whose_work_is_slow_goes_before_a_node_whose_clocks_are() -> None:
    story = begun()
    end_s = train(story, 300, lambda i: 2.0 if i < 150 else 3.0, busy_s=slow_from(150, 6, 1.6))
    clocked(story, end_s, lambda at_s, node: 0.7 if at_s >= 300 and node == 1 else 0.95)
    named = [one for one in signals(story) if one.node]
    assert {one.node for one in named} == {"n3"} and "GPU 3 of n1 at 70%" in named[-1].evidence


def test_several_throttled_nodes_are_listed_and_none_is_named() -> None:
    story = begun()
    end_s = train(story, 300, lambda i: 2.0 if i < 150 else 2.6)
    clocked(story, end_s, lambda at_s, node: 0.7 if at_s >= 300 and node in (1, 2) else 0.95, nodes=6)
    (high,) = signals(story)
    assert high.node == "" and "GPU 3 of n1" in high.evidence and "GPU 3 of n2" in high.evidence


def test_clocks_that_were_told_long_ago_name_nobody() -> None:
    story = begun()
    train(story, 300, lambda i: 2.0 if i < 150 else 2.6)
    clocked(story, 100, lambda at_s, node: 0.7 if node == 2 else 0.95)
    (high,) = signals(story)
    assert high.node == "" and "clocks" not in high.evidence


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared")
def test_the_straggler_of_a_real_job_is_named_and_no_other_worker() -> None:
    """Ten workers' batch times, of which the sixth is slowed for a tenth of the time; all drift by a tenth."""
    rows: dict[int, list[float]] = defaultdict(list)
    for row in csv.DictReader((CASES / "alibaba_v2020_minibatch_job_1_norm.csv").open(newline="")):
        rows[int(row["worker"])].append(float(row["batch_time_norm"]) / 1000)
    count = min(map(len, rows.values()))
    story = begun()
    for i in range(count):
        story.tick(10 * i + 9)
        for worker, times in rows.items():
            sample = StepSample(step=i, ended_ns=0, step_time_s=max(t[i] for t in rows.values()), busy_s=times[i])
            fact = TrainingProgress(rank=worker, world_size=10, phase="step", progress=i + 2, step=i, samples=(sample,))
            story.say(10 * i + 5, f"w{worker}", fact, job="ali", attempt=1, on_job=True)
    named = {one.node for one in signals(story) if one.node}
    assert named == {"w6"}


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared")
@pytest.mark.parametrize("metric", ["AVG", "MAX", "P99"])
def test_kernel_times_of_a_normal_job_name_nobody(metric: str) -> None:
    """Matrix products of one size class, a rank each, as a timer in the ranks measured them."""
    times: dict[int, float] = {}
    for row in csv.DictReader((CASES / "dlrover_xpu_timer.csv").open(newline="")):
        labels = dict(part.split("=", 1) for part in row["labels"].strip("{}").replace('"', "").split(",") if "=" in part)
        if (
            row["file"].startswith("normal")
            and row["metric"] == f"XPU_TIMER_MM_KERNEL_{metric}_LATENCY"
            and labels["level"] == "8"
        ):
            times[int(labels["rank"])] = float(row["value"]) / 1e6
    assert len(times) == 8
    story = begun()
    train(story, 100, lambda i: 2.0, busy_s=lambda i, r: times[r])
    assert claims(story) == []
