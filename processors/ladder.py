"""The ladder: which rungs answer which situation, in order (DESIGN section 7, ByteRobust section 3, figure 5). A table, to be read
aloud. Rungs that this version has not built stand in their place and are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from events.decision import Rung


class Situation(StrEnum):
    NAMED = "high-confidence evidence names a machine"
    SILENT = "a node is silent, and its job stalled or crashed"
    CRASH = "a crash without a culprit"
    STALL = "no progress past the phase's limit"
    FAILED = "a recovery failed"
    SHARED = "many nodes of one rack, switch or bus at once"


LADDER: Mapping[Situation, tuple[Rung, ...]] = {
    Situation.NAMED: ("evict", "hand_over"),
    Situation.SILENT: ("evict", "hand_over"),
    Situation.CRASH: ("diagnose", "reattempt", "roll_back", "group_test", "hand_over"),
    Situation.STALL: ("aggregate_stacks", "reattempt", "roll_back", "group_test", "hand_over"),
    Situation.FAILED: ("diagnose", "reattempt", "roll_back", "group_test", "hand_over"),
    Situation.SHARED: ("hand_over",),
}

BUILT: frozenset[Rung] = frozenset({"evict", "reattempt", "hand_over"})

#: The policy's rule under which a rung is taken in a situation.
RULE: Mapping[tuple[Situation, Rung], str] = {
    (Situation.NAMED, "evict"): "evict_named",
    (Situation.SILENT, "evict"): "evict_silent",
    (Situation.CRASH, "reattempt"): "reattempt_crash",
    (Situation.FAILED, "reattempt"): "reattempt_crash",
    (Situation.STALL, "reattempt"): "reattempt_hang",
    (Situation.SHARED, "hand_over"): "shared_cause",
}


def rung_for(situation: Situation, spent: frozenset[Rung]) -> tuple[Rung, str]:
    """The first rung that is built and not spent, and its rule."""
    for rung in LADDER[situation]:
        if rung in BUILT and rung not in spent:
            return rung, RULE.get((situation, rung), "hand_over")
    return "hand_over", "hand_over"
