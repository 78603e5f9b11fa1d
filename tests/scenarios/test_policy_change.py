"""A policy changed in the middle of an incident: what was decided stands under the old one, what comes after names the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from processors.policy import digest
from tests.scenarios.harness import Scenario, policy

pytestmark = pytest.mark.slow


async def test_old_decisions_name_the_old_policy_and_new_ones_the_new(tmp_path: Path) -> None:
    old, new = policy("approve"), policy("auto", decider={"reattempts_max": 4})
    async with Scenario(tmp_path, nodes=2, policy=old) as s:
        await s.declare()
        before = s.at
        s.kill_rank(1)
        waiting = await s.until(
            lambda: [d for d in s.of("decision_made", after=before) if d.data.mode == "approve"], "decision that waits"
        )
        assert (waiting[0].data.mode, waiting[0].data.policy_digest) == ("approve", digest(old))
        (tmp_path / "new.yaml").write_text(new)
        adopted = await s.cli_json("policy", "adopt", str(tmp_path / "new.yaml"))
        assert adopted == {"digest": digest(new), "new": True}
        changed = s.at
        approved = await s.cli_json("approve", waiting[0].data.decision[:12], "--reason", "looked at it")
        assert approved["event"]
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism) == ("recovered", "reattempt")

        before = s.at
        s.kill_rank(1)
        assert (await s.closed(before)).mechanism == "reattempt"
        for seen in s.of("decision_made"):
            wanted = digest(old) if seen.sequence <= changed else digest(new)
            assert seen.data.policy_digest == wanted, seen.data
        assert s.of("decision_made")[-1].data.mode == "auto"
        await s.finish()
        await s.check()
