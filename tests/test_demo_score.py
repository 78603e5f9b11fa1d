"""The demo's score is strict: what it must not pass, it does not, and says why. (That it passes what is right, the demo itself shows.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from events.decision import DecisionMade, IncidentClosed
from infra.cli.common import FINE, FOUND
from infra.cli.demo_command import finish
from infra.demo import JOB, Score
from infra.demo_full import FullDemo
from infra.home import Home
from infra.watch import IncidentStory

DECIDED: dict[str, Any] = {"trigger": 1, "ledger_digest": "", "incident": "i", "job": JOB, "epoch": 1}


def made(rung: str, **what: Any) -> DecisionMade:
    fields = {"decision": "d", "ordinal": 1, "rule": rung, "mode": "auto", "because": "x"}
    digests = {"policy_digest": "", "catalogue_digest": "", "code_version": ""}
    return DecisionMade.model_validate({**DECIDED, **fields, **digests, "rung": rung, **what})


def story(*decisions: DecisionMade, mechanism: str = "reattempt", name: str = "i", **closed: Any) -> IncidentStory:
    end = {"symptom": "rank_exit", "outcome": "recovered", "first_evidence_ns": 1, "opened_ns": 1, "mechanism": mechanism}
    told = IncidentStory(name, JOB, 1, "rank_exit", 1, 1, 1, decisions=list(decisions))
    told.closed = IncidentClosed.model_validate({**DECIDED, **end, **closed})
    return told


@pytest.fixture
def demo(tmp_path: Path) -> FullDemo:
    return FullDemo(Home(tmp_path))


@pytest.mark.parametrize("rung", ["diagnose", "aggregate_stacks", "roll_back", "evict", "hand_over"])
def test_what_should_lead_to_nothing_led_to_something(demo: FullDemo, rung: str) -> None:
    """A job that is stopped for its machines to be tested was not left alone."""
    demo.watch.incidents["i"] = story(made(rung))
    score = Score("f", "nothing")
    demo._nobody(score, set())
    assert score.missed == f"it led to {rung}"
    demo._nobody(score, {"i"})
    assert score.missed == "" and score.decided == "nothing"


def test_the_way_to_a_mechanism_counts(demo: FullDemo) -> None:
    trail = ("diagnose", "reattempt", "roll_back")
    right = [story(*map(made, trail), mechanism="roll_back")]
    assert demo._judge(right, True, ("roll_back",), (), trail) == ""
    short = [story(made("roll_back"), mechanism="roll_back")]
    assert demo._judge(short, True, ("roll_back",), (), trail) == (
        "it came to that by roll_back, not by diagnose, reattempt, roll_back"
    )
    assert demo._judge(short, True, ("roll_back",), ()) == ""
    assert "the mechanism was roll_back" in demo._judge(short, True, ("reattempt",), ())
    assert "evicted were none" in demo._judge(short, True, ("roll_back",), ("node-1",))
    assert "2 incidents" in demo._judge(short * 2, True, ("roll_back",), ())


@pytest.mark.parametrize(
    ("below", "restored", "right"), [(400, 399, True), (400, 400, False), (400, -1, False), (-1, 399, False)]
)
def test_what_is_restored_after_wrong_numbers_is_from_before_them(below: int, restored: int, right: bool) -> None:
    told = story(made("diagnose"), made("evict", restore_below_step=below), step_restored=restored)
    assert (FullDemo._restored_rightly(told) == "") == right


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["reattempt"], ["hand_over"], ""),
        ([], ["reattempt", "hand_over"], ""),
        (["evict", "reattempt"], ["hand_over"], "it led to evict"),
        (["reattempt"], ["roll_back", "hand_over"], "it led to roll_back"),
        ([], ["hand_over"], "no attempt was used up before it"),
    ],
)
def test_a_hand_over_that_evicts_or_rolls_back_on_its_way_is_none(first: list[str], second: list[str], said: str) -> None:
    """Whichever of the two incidents that it may be told as."""
    told = [story(*map(made, rungs), name=name) for name, rungs in (("i", first), ("j", second)) if rungs]
    score = Score("f", "hand over", note="at step 12: IndexError: out of bounds")
    assert FullDemo._judge_hand_over(score, True, 12, told) == said
    score.note = "at step 11: KeyError"
    assert "does not name the exception" in FullDemo._judge_hand_over(score, True, 12, told)


@pytest.mark.parametrize(
    ("replayed", "problem", "said"),
    [
        ({"identical": True, "signals": {"TELEMETRY_JOB": {"checked": True}}}, "", []),
        ({"identical": False, "signals": {}}, "", ["the replay is not identical"]),
        (
            {"identical": True, "signals": {"TELEMETRY_JOB": {"checked": False, "why": "not in this recording"}}},
            "",
            ["not all was replayed: TELEMETRY_JOB (not in this recording)"],
        ),
        ({}, "", ["nothing was recorded, so that nothing could be replayed"]),
        ({}, "it was stopped", ["it was stopped"]),
    ],
)
def test_without_an_identical_replay_of_all_it_does_not_end_well(
    demo: FullDemo, capsys: pytest.CaptureFixture[str], replayed: dict[str, Any], problem: str, said: list[str]
) -> None:
    assert finish(demo, replayed, problem, as_json=True) == (FOUND if said else FINE)
    assert json.loads(capsys.readouterr().out)["missed"] == said
