"""The ladder: which rung answers which trouble, after what was tried last in the same incident (DESIGN section 7; ByteRobust section 3,
figure 5). A table, to be read aloud; README's drawing is made from it. Pure.

A rung that can't be taken (no standby, no older revision, attempts used up, not among the policy's rungs) is passed over: the ladder
goes on as if it had been taken and had not helped. Every way ends at a person.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from events.decision import Rung


class Situation(StrEnum):
    NAMED = "high-confidence evidence names a machine"
    SILENT = "a node is silent, and its job stalled or crashed"
    CRASH = "a crash without a culprit"
    USER_CODE = "an exception that the code causes"
    METRIC = "NaN, or a jump that lasts, of loss or gradient norm"
    STALL = "no progress past the phase's limit"
    SLOW = "the run is slow"
    FAILED = "a recovery failed"
    SHARED = "many nodes of one rack, switch or bus at once"

    @property
    def word(self) -> str:
        """As events hold it."""
        return self.name.lower()


class Last(StrEnum):
    """What was tried last in the incident, and what came of it."""

    NOTHING = "nothing yet"
    EVICTED = "a machine was evicted"
    STACKS_CLEAR = "stacks named nobody"
    GROUP_STAYS = "stacks named a group that has to stay"
    GROUP_EVICTED = "stacks named a group, evicted"
    TESTS_PASSED = "tests passed"
    TESTED_EVICTED = "tests named a machine, evicted"
    REATTEMPTED = "reattempted"
    ROLLED_BACK = "rolled back"
    REPLAYS_CLEAR = "replays named nobody"
    REPLAYED_EVICTED = "replays named a machine, evicted"


_CRASH: Mapping[Last, Rung] = {
    Last.NOTHING: "diagnose",
    # A re-failure after a real-time eviction goes to the tests, after a stop-time eviction to the code (ByteRobust sections 4.1, 4.2).
    Last.EVICTED: "diagnose",
    Last.STACKS_CLEAR: "diagnose",
    Last.GROUP_STAYS: "diagnose",
    Last.GROUP_EVICTED: "diagnose",
    Last.TESTS_PASSED: "reattempt",
    Last.TESTED_EVICTED: "roll_back",
    Last.REATTEMPTED: "roll_back",
    Last.ROLLED_BACK: "group_test",
    Last.REPLAYS_CLEAR: "hand_over",
    Last.REPLAYED_EVICTED: "hand_over",
}

LADDER: Mapping[Situation, Mapping[Last, Rung]] = {
    Situation.NAMED: dict.fromkeys(Last, "evict"),
    Situation.SILENT: dict.fromkeys(Last, "evict"),
    Situation.CRASH: _CRASH,
    Situation.METRIC: _CRASH,
    Situation.FAILED: _CRASH,
    # Who stands in the way is known, and can't be replaced: no test tells more, and a restart may free it.
    Situation.STALL: {
        **_CRASH,
        Last.NOTHING: "aggregate_stacks",
        Last.EVICTED: "aggregate_stacks",
        Last.GROUP_STAYS: "reattempt",
    },
    # The job trains on: nothing but an eviction helps, and a person.
    Situation.SLOW: {
        **dict.fromkeys(Last, "hand_over"),
        **dict.fromkeys((Last.NOTHING, Last.EVICTED, Last.REATTEMPTED, Last.ROLLED_BACK), "aggregate_stacks"),
    },
    # Machines do not raise TypeError: after the code, one more try, then its author.
    Situation.USER_CODE: {
        **dict.fromkeys(Last, "roll_back"),
        Last.ROLLED_BACK: "reattempt",
        Last.REATTEMPTED: "hand_over",
        Last.REPLAYS_CLEAR: "hand_over",
        Last.REPLAYED_EVICTED: "hand_over",
    },
    Situation.SHARED: dict.fromkeys(Last, "hand_over"),
}

#: How a rung that did not help, or was passed over, counts as tried.
AFTER: Mapping[Rung, Last] = {
    "evict": Last.EVICTED,
    "aggregate_stacks": Last.STACKS_CLEAR,
    "diagnose": Last.TESTS_PASSED,
    "reattempt": Last.REATTEMPTED,
    "roll_back": Last.ROLLED_BACK,
    "group_test": Last.REPLAYS_CLEAR,
}

#: Evictions by the rule that names the machines: how they count as tried, and the mechanism that the census counts.
EVICTIONS: Mapping[str, tuple[Last, Rung]] = {
    "evict_named": (Last.EVICTED, "evict"),
    "evict_silent": (Last.EVICTED, "evict"),
    "evict_ailing": (Last.EVICTED, "evict"),
    "evict_tested": (Last.TESTED_EVICTED, "diagnose"),
    "evict_group": (Last.GROUP_EVICTED, "aggregate_stacks"),
    "evict_replayed": (Last.REPLAYED_EVICTED, "group_test"),
}

#: Rungs that look before anything is changed: the verb that carries them out, and the rule for evicting whom it names.
EXAMINATIONS: Mapping[Rung, tuple[str, str]] = {
    "aggregate_stacks": ("capture_stacks", "evict_group"),
    "diagnose": ("diagnose", "evict_tested"),
    "group_test": ("group_test", "evict_replayed"),
}
EXAMINED_BY: Mapping[str, Rung] = {verb: rung for rung, (verb, _) in EXAMINATIONS.items()}


def rule_of(situation: Situation, rung: Rung) -> str:
    """The policy's rule under which a rung is taken."""
    if rung == "evict":
        return "evict_silent" if situation is Situation.SILENT else "evict_named"
    if rung == "reattempt":
        return "reattempt_hang" if situation is Situation.STALL else "reattempt_crash"
    if rung == "hand_over":
        return "shared_cause" if situation is Situation.SHARED else "hand_over"
    return rung


def drawn() -> str:
    """The table as Markdown: a row for what was tried last, a column for each trouble."""
    shown = [s for s in Situation if s not in (Situation.NAMED, Situation.SILENT, Situation.SHARED)]
    lines = [
        "| tried last | " + " | ".join(s.name.lower().replace("_", " ") for s in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for last in Last:
        cells = [LADDER[situation][last].replace("_", " ") for situation in shown]
        lines.append(f"| {last.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
