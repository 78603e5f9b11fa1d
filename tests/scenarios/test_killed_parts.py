"""Any one part is killed (-9) at some point of an incident and started again: no decision is lost, doubled or changed, one machine
is evicted once, and what was decided live is what its replay decides. The same at every event boundary, in memory, is in
tests/test_decider_laws.py; here are real processes, for a sample of the points."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import Scenario, policy

pytestmark = pytest.mark.slow

#: A machine that is not quiet takes its time to start an agent again: that alone is no silence here.
POLICY = policy(detectors={"silence_s": 15.0})


@pytest.mark.parametrize("part", ["decider", "detector-node", "detector-job", "actuators", "agent-n0"])
async def test_killed_in_an_incident_it_goes_on_where_it_was(part: str, tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2, standbys=1, policy=POLICY) as s:
        await s.declare()

        # Before anything is known of it: what happens while the part is away is not lost.
        before = s.at
        s.kill_rank(1)
        await s.kill(part)
        first = await s.closed(before, "incident that began while a part was away")

        # Between decision and outcome.
        before = s.at
        s.kill_rank(1)
        await s.until(lambda: s.of("decision_made", after=before), "decision")
        await s.kill(part)
        second = await s.closed(before, "incident whose decision was cut off")

        # While the next attempt is being started, the standby in.
        before = s.at
        s.lose_gpu("n1")
        await s.until(
            lambda: [i for i in s.of("intent_issued", after=before) if i.data.verb == "start_attempt"], "intent to start"
        )
        await s.kill(part)
        third = await s.closed(before, "incident whose start was cut off")

        assert [(c.outcome, c.mechanism, c.nodes) for c in (first, second, third)] == [
            ("recovered", "reattempt", ()),
            ("recovered", "reattempt", ()),
            ("recovered", "evict", ("n1",)),
        ]
        assert s.job().attempt == 4
        assert [s.node_of(rank) for rank in range(2)] == ["n0", "s0"]
        await s.finish()
        await s.check(evicted=["n1"])
        mine = {c.incident for c in (first, second, third)}
        rungs = [d.data.rung for d in s.of("decision_made") if d.data.incident in mine]
        # The second crash may come before the job is beyond the first: then the tests are not made again.
        assert rungs in (
            ["diagnose", "reattempt", "diagnose", "reattempt", "evict"],
            ["diagnose", "reattempt", "reattempt", "evict"],
        )
        starts = [line[1] for line in s.lines(0) if line[0] == "start"]
        assert starts == [1, 2, 3, 4], "each attempt was started once"
