"""The ladder's table: every pair of trouble and what was tried last has a rung, every way ends at a person, and README draws the same."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from events.decision import Rung
from processors.ladder import AFTER, EVICTIONS, EXAMINATIONS, LADDER, Last, Situation, drawn, rule_of
from processors.policy import RULES, Decider
from processors.remedies import REMEDIES

PAIRS = list(product(Situation, Last))

#: What ByteRobust (sections 3 to 6) and DESIGN section 7 say of each, read aloud: the trouble, what was tried last, and the rung.
SAID = [
    (Situation.CRASH, Last.NOTHING, "diagnose"),  # ③ stop-time checks
    (Situation.CRASH, Last.TESTS_PASSED, "reattempt"),  # ⑤ all tests pass: assume transient
    (Situation.CRASH, Last.REATTEMPTED, "roll_back"),  # ⑥ reattempt fails
    (Situation.CRASH, Last.EVICTED, "diagnose"),  # section 4.1: again after a real-time eviction
    (Situation.CRASH, Last.GROUP_EVICTED, "diagnose"),
    (Situation.CRASH, Last.TESTED_EVICTED, "roll_back"),  # ⑦ again after a stop-time eviction
    (Situation.CRASH, Last.ROLLED_BACK, "group_test"),  # ⑧ still fails
    (Situation.CRASH, Last.REPLAYS_CLEAR, "hand_over"),
    (Situation.CRASH, Last.REPLAYED_EVICTED, "hand_over"),
    (Situation.METRIC, Last.NOTHING, "diagnose"),
    (Situation.METRIC, Last.TESTS_PASSED, "reattempt"),
    (Situation.USER_CODE, Last.NOTHING, "roll_back"),  # ②
    (Situation.USER_CODE, Last.ROLLED_BACK, "reattempt"),
    (Situation.USER_CODE, Last.REATTEMPTED, "hand_over"),
    (Situation.STALL, Last.NOTHING, "aggregate_stacks"),
    (Situation.STALL, Last.STACKS_CLEAR, "diagnose"),
    (Situation.STALL, Last.GROUP_EVICTED, "diagnose"),
    (Situation.SLOW, Last.NOTHING, "aggregate_stacks"),
    (Situation.SLOW, Last.STACKS_CLEAR, "hand_over"),
    (Situation.SLOW, Last.GROUP_EVICTED, "hand_over"),
    (Situation.FAILED, Last.EVICTED, "diagnose"),
    (Situation.NAMED, Last.NOTHING, "evict"),
    (Situation.SILENT, Last.NOTHING, "evict"),
    (Situation.SHARED, Last.NOTHING, "hand_over"),
]


@pytest.mark.parametrize(("situation", "last", "rung"), SAID)
def test_the_pairs_that_the_paper_names(situation: Situation, last: Last, rung: Rung) -> None:
    assert LADDER[situation][last] == rung


@pytest.mark.parametrize(("situation", "last"), PAIRS)
def test_every_pair_has_a_rung_a_rule_and_an_end(situation: Situation, last: Last) -> None:
    """Passing over every rung from here, one never comes to the same rung twice, and comes to a person (or to an eviction, which has
    a budget)."""
    seen: list[Rung] = []
    while (rung := LADDER[situation][last]) not in ("hand_over", "evict"):
        assert rung in get_args(Rung) and rung_is_taken(rung)
        assert rule_of(situation, rung) in RULES
        assert rung not in seen, f"{situation.name} goes round: {seen}"
        seen.append(rung)
        last = AFTER[rung]
    assert rule_of(situation, rung) in RULES


def rung_is_taken(rung: Rung) -> bool:
    """There is code for it, and a policy may leave it out."""
    return rung in REMEDIES and rung in Decider().rungs


def test_each_way_of_evicting_is_a_rule_that_a_policy_can_name() -> None:
    assert set(EVICTIONS) == {rule for rule in RULES if rule.startswith("evict_")}
    assert {rule for _, rule in EXAMINATIONS.values()} <= set(EVICTIONS)
    assert all(mechanism in ("evict", *EXAMINATIONS) for _, mechanism in EVICTIONS.values())


def test_no_rung_but_an_eviction_is_reached_with_only_a_person_left() -> None:
    """After a person nothing follows: `hand_over` is in no way a step to something else."""
    assert "hand_over" not in AFTER


def test_the_readme_draws_this_table() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert drawn() in readme, (
        "README's drawing of the ladder is not the table of processors/ladder.py: paste what drawn() gives"
    )
