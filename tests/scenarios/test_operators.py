"""What people do to a running pipeline, through the real command: planned restart and stop, hold and release, a spare, and all that
can be read of a running bus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.pipeline import Node
from tests.scenarios.harness import JOB, Scenario, policy

pytestmark = pytest.mark.slow


async def test_the_command_line_against_a_running_pipeline(tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2, standbys=1) as s:
        await s.declare()
        status = await s.cli_json("status")
        assert [(j["job"], j["state"], j["attempt"]) for j in status["jobs"]] == [(JOB, "training", 1)]
        assert set(status["heard_s"]) == {"n0", "n1", "s0"}

        # A planned restart is no incident, and counted as manual.
        await s.cli_json("restart", "--reason", "new data", "--as", "data_update")
        await s.trains(2)

        # A hold stops the eviction until it is released.
        await s.cli_json("hold", "--reason", "network maintenance")
        before = s.at
        s.lose_gpu("n1")
        held = await s.until(lambda: s.of("decision_made", after=before), "held decision")
        assert (held[0].data.rung, held[0].data.vetoed, held[0].data.nodes) == ("evict", "hold", ("n1",))
        assert (await s.cli_json("status", code=1))["jobs"][0]["held"]
        assert not s.of("intent_issued", after=before), "something was done under a hold"
        await s.cli_json("release", "--reason", "done")
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism, closed.nodes) == ("recovered", "evict", ("n1",))

        lines = [json.loads(line) for line in (await s.cli("tail", "--no-follow", "--json", "-n", "5")).splitlines()]
        assert len(lines) == 5 and lines[-1]["stream"] == "LEDGER"
        told = await s.cli("explain", closed.incident[:8])
        assert "n1" in told and "evict" in told
        await s.cli("explain", "nosuchincident", code=2)
        replayed = await s.cli_json("replay")
        assert replayed["identical"] and replayed["divergence"] is None
        census = await s.cli_json("census")
        by_symptom = {row["symptom"]: row for row in census["census_by_symptom"]}
        assert by_symptom["data_update"]["category"] == "manual" and by_symptom["data_update"]["incidents"] == 1
        assert by_symptom["gpu_unavailable"]["incidents"] == 1
        counted = await s.cli_json("census", "--sql", "SELECT count(*) AS n FROM incidents")
        assert counted == [{"n": 2}]
        await s.cli("census", "--sql", "SELECT nonsense", code=2)
        recorded = await s.cli_json("record", str(tmp_path / "recording"))
        assert recorded["LEDGER"] > 10
        again = json.loads(await s.cli("replay", str(tmp_path / "recording"), "--json", home=False))
        assert again["identical"]

        await s.cli("restart", code=2)
        await s.cli("stop", "nosuchjob", "--reason", "x", code=2)
        await s.cli("approve", "nosuchdecision", "--reason", "x", code=2)
        before = s.at
        await s.cli("stop", "--reason", "end of the day")
        await s.until(lambda: s.job().ended and not s.watch.open_incidents(), "stop of the job")
        assert not s.of("incident_opened", after=before)
        assert s.job().wanted == "stopped"
        # Workers stay parked for the restart that may come, so not everything is gone.
        await s.check(evicted=["n1"], left=False)


@pytest.mark.parametrize("no_standby", ["hand_over", "hold"])
async def test_no_standby_left_is_said_and_a_new_one_carries_on(no_standby: str, tmp_path: Path) -> None:
    async with Scenario(
        tmp_path, nodes=2, standbys=0, policy=policy(decider={"no_standby": no_standby, "quiet_s": 600.0})
    ) as s:
        await s.declare()
        before = s.at
        s.lose_gpu("n1")
        vetoed = await s.until(lambda: [d for d in s.of("decision_made", after=before) if d.data.vetoed], "vetoed decision")
        assert (vetoed[0].data.vetoed, vetoed[0].data.nodes) == ("no_standby", ("n1",))
        if no_standby == "hand_over":
            await s.until(lambda: [i for i in s.of("intent_issued", after=before) if i.data.verb == "notify"], "page")
        status = await s.cli_json("status", code=1)
        assert status["jobs"][0]["state"] == "waits for a standby", status
        node = Node("s9", "none")
        await s.pipeline.start_agent(node)
        await s.until(lambda: "s9" in s.watch.nodes, "heartbeat of the spare")
        await s.cli("standby", "s9", "--job", JOB)
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism, closed.nodes) == ("recovered", "evict", ("n1",))
        assert [s.node_of(rank) for rank in range(2)] == ["n0", "s9"]
        await s.finish()
        await s.check(evicted=["n1"])
