"""A pipeline that observes, two failures, one person: what the running bus tells of what auto would have done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import Scenario, policy

pytestmark = pytest.mark.slow


async def test_what_auto_would_have_done_of_a_running_bus(tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2, standbys=1, policy=policy("observe", decider={"rungs": ["reattempt"]})) as s:
        await s.declare()
        before = s.at
        s.kill_rank(1)
        await s.until(
            lambda: [d for d in s.of("decision_made", after=before) if d.data.rung == "reattempt"], "observed decision"
        )
        assert not s.of("intent_issued", after=before)
        await s.cli("restart", "--reason", "a rank died")
        await s.trains(2)

        before = s.at
        s.lose_gpu("n1")
        await s.until(lambda: [d for d in s.of("decision_made", after=before) if d.data.rung == "evict"], "observed decision")
        await s.cli("override", "job", "keep", "--node", "n1", "--reason", "the line is known to be wrong")
        await s.until(lambda: s.of("override_given"), "override")
        told = await s.cli_json("shadow", "--window", "10m")
        rules = {row["rule"]: row for row in told["rules"]}
        assert rules["reattempt_crash"]["agreed"] == 1 and rules["reattempt_crash"]["saved_s"] > 0
        assert rules["evict_named"]["differed"] == 1
        people = {case["rule"]: [act["did"] for act in case["people"]] for case in told["cases"]}
        assert people["reattempt_crash"] == ["restart as operator restart"] and people["evict_named"] == ["override: keep n1"]
        assert "evict_named" in await s.cli("shadow")
        await s.finish()
        await s.check()
