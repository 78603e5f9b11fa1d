"""Set-ups held against the majority of a job's nodes."""

from __future__ import annotations

from typing import Any

from events.host import Configuration, ConfigurationDrift
from processors.detector import PartitionFold
from processors.drift import NODES_MAX, SETUPS_MAX, ConfigurationDrifts, DriftState
from processors.job import JobParts, job_detector
from tests.telemetry import Story, facts, told

DRIFT = JobParts((ConfigurationDrifts(),))
USUAL = {"gpu.driver": "550.54.15", "env.NCCL_DEBUG": "WARN", "kernel.release": "6.8.0"}


def setup(**changes: str | None) -> Configuration:
    values = {**USUAL, **{name.replace("__", "."): value for name, value in changes.items()}}
    known = {name: value for name, value in values.items() if value is not None}
    return Configuration(groups=("env", "gpu", "kernel"), values=tuple(sorted(known.items())))


def tells(story: Story, at_s: float, node: str, fact: Configuration, attempt: int = 1) -> None:
    story.say(at_s, node, fact, job="gpt", attempt=attempt, on_job=True, producer="configuration")


def drifts(story: Story, detector: Any = DRIFT) -> list[tuple[str, str, str, str, bool]]:
    return [
        (fact.node, fact.name, fact.value, fact.expected, fact.over)
        for fact in facts(told(detector, story))
        if isinstance(fact, ConfigurationDrift)
    ]


def job(*setups: Configuration) -> Story:
    story = Story("job")
    for i, one in enumerate(setups):
        tells(story, 1 + i, f"n{i}", one)
    return story


def test_the_odd_one_out_is_noted_once_it_has_settled() -> None:
    story = job(*[setup()] * 4, setup(gpu__driver="550.40.07"))
    story.tick(60)
    assert drifts(story) == []
    story.tick(96)
    story.tick(200)
    assert drifts(story, job_detector()) == [("n4", "gpu.driver", "550.40.07", "550.54.15", False)]
    (fact,) = [fact for fact in facts(told(DRIFT, story)) if isinstance(fact, ConfigurationDrift)]
    assert (fact.agree, fact.of) == (4, 5)


def test_a_name_that_is_not_set_differs_from_one_that_is() -> None:
    story = job(setup(), setup(), setup(env__NCCL_IB_DISABLE="1"), setup(env__NCCL_DEBUG=None))
    story.tick(200)
    assert drifts(story) == [("n3", "env.NCCL_DEBUG", "", "WARN", False), ("n2", "env.NCCL_IB_DISABLE", "1", "", False)]


def test_a_group_that_was_not_read_is_not_held_against_anyone() -> None:
    blind = Configuration(groups=("kernel",), values=(("kernel.release", "6.8.0"),))
    story = job(setup(), setup(), setup(), blind)
    story.tick(200)
    assert drifts(story) == []


def test_no_clear_majority_names_nobody() -> None:
    other = setup(gpu__driver="1")
    for setups in ([setup(), other], [setup(), setup(), other, other], [setup(), other, setup(gpu__driver="2")]):
        story = job(*setups)
        story.tick(200)
        assert drifts(story) == []
    story = job(setup(), setup(), other)
    story.tick(200)
    assert [d[0] for d in drifts(story)] == ["n2"]


def test_it_is_over_when_it_is_put_right() -> None:
    story = job(*[setup()] * 3, setup(gpu__driver="1"))
    story.tick(200)
    tells(story, 210, "n3", setup())
    story.tick(310)
    assert drifts(story) == [("n3", "gpu.driver", "1", "550.54.15", False), ("n3", "gpu.driver", "1", "550.54.15", True)]


def test_a_machine_that_was_replaced_takes_its_drift_along() -> None:
    story = job(*[setup()] * 3, setup(gpu__driver="1"))
    story.tick(200)
    for i in (0, 1, 2, 9):
        tells(story, 210 + i, f"n{i}", setup(), attempt=2)
    tells(story, 220, "n3", setup(gpu__driver="1"), attempt=1)  # of the attempt before: history
    story.tick(400)
    assert [d[4] for d in drifts(story)] == [False, True]


def test_a_roll_out_ends_with_the_last_ones_named() -> None:
    story = job(*[setup()] * 6)
    story.tick(200)
    for i in range(4):
        tells(story, 210 + 60 * i, f"n{i}", setup(gpu__driver="560"))
        story.tick(220 + 60 * i)
    story.tick(600)
    assert drifts(story) == [(f"n{i}", "gpu.driver", "550.54.15", "560", False) for i in (4, 5)]


def test_what_each_node_has_its_own_of_is_not_compared() -> None:
    story = job(*[setup(env__NCCL_HOST=f"h{i}") for i in range(300)])
    tells(story, 320, "odd", setup(env__NCCL_HOST="h", gpu__driver="1"))
    story.tick(500)
    assert drifts(story) == [("odd", "gpu.driver", "1", "550.54.15", False)]
    fold = folded(story)
    state: DriftState = fold.keys["gpt"].state[0]
    assert state.own == ("env.NCCL_HOST",) and len(state.setups) <= SETUPS_MAX and len(state.nodes) == 301


def folded(story: Story) -> PartitionFold[Any]:
    fold: PartitionFold[Any] = PartitionFold(DRIFT)
    for record in story.records:
        assert fold.feed(record)[1] is None
    return fold


def test_its_state_is_bounded_and_survives_a_round_trip() -> None:
    story = job(*[setup(**{f"env__NCCL_{i % 7}": str(i % 6), f"env__NCCL_X{i % 100}": "1"}) for i in range(2000)])
    story.tick(2200)
    fold = folded(story)
    state = fold.keys["gpt"].state
    assert DRIFT.load("gpt", DRIFT.dump(state)) == state
    assert len(state[0].setups) <= SETUPS_MAX and len(state[0].told) <= 64 and len(state[0].nodes) <= NODES_MAX
    assert DRIFT.load("x", DRIFT.dump(DRIFT.empty("x"))) == DRIFT.empty("x")
