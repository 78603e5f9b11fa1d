"""What waits for a person is listed with the command that answers it, and each answer reaches the ledger with author and reason."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.scenarios.harness import JOB, Scenario, policy
from tests.test_notify import Server, serving

pytestmark = pytest.mark.slow


async def test_a_person_woken_at_night_copies_a_command(tmp_path: Path) -> None:
    scenario = Scenario(
        tmp_path, nodes=2, policy=policy("auto", rules={"reattempt_crash": "approve"}, decider={"rungs": ["reattempt"]})
    )
    async with serving(503, 200) as server:
        notify = tmp_path / "notify.yaml"
        notify.write_text(f"repeat_after_s: 4\nrepeats_max: 1\nchannels: [{{kind: webhook, url: '{server.url}'}}]\n")
        scenario.pipeline.notify = str(notify)
        await answers(scenario, server)


async def answers(scenario: Scenario, server: Server) -> None:
    async with scenario as s:
        await s.declare()
        for words in (
            ("approve", "--latest"),
            ("deny", "nosuch"),
            ("ack", "--latest"),
            ("override", JOB, "evict"),
            ("approve",),
        ):
            await s.cli(*words, "--reason", "x", code=2)
        before = s.at
        s.kill_rank(1)
        await s.until(lambda: s.watch.waiting(), "decision that waits")
        status = await s.cli_json("status", code=1)
        (waits,) = status["waiting"]
        assert (waits["job"], waits["rung"], waits["runbook"]) == (JOB, "reattempt", "approval-wanted")
        command = shlex.split(waits["approve"])
        assert command[0] == "keepstep" and waits["approve"] in await s.cli("status", code=1)
        await s.until(lambda: len(server.told) == 3, "page, after one try that failed, and its first repeat")
        first, again = server.bodies()[1:]
        assert (first["number"], again["number"], first["key"]) == (0, 1, again["key"])
        assert first["runbook"] == "approval-wanted" and first["decision"] == waits["decision"] and first["asks"]
        await s.kill("actuators")
        await s.cli("ack", "--latest", "--reason", "on it")
        paged = len(server.told)
        await s.cli(*command[1:-1], "looked at it", "--expires", "soon", code=2)
        await s.cli(*command[1:-1], "looked at it", "--expires", "30m")
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism) == ("recovered", "reattempt")
        await s.cli(*command[1:-1], "again", code=2)

        override = await s.cli_json("override", JOB, "keep", "--node", "n1", "--reason", "in repair talks", "--expires", "2h")
        assert override["said"].startswith(f"override of job {JOB}: keep n1 until ")
        await s.cli("override", JOB, "keep", "--node", "n9", "--reason", "x", code=2)
        await s.until(lambda: s.of("override_given"), "override in the ledger")
        (acked,), (approved,), (kept,) = s.of("page_acknowledged"), s.of("approval_given"), s.of("override_given")
        assert acked.data.reason == "on it" and acked.data.incident == closed.incident
        assert approved.data.granted and approved.data.expires_ns > approved.event.time + 29 * 60 * 10**9
        assert kept.data.node == "n1" and kept.data.author and ".operator." in kept.subject
        await s.until(lambda: len(server.told) > paged, "end of the page")
        (end,) = server.bodies()[paged:]
        assert end["status"] == "resolved" and "yes by " in end["over"], "repeated though it was acknowledged"
        told = await s.cli("explain", closed.incident[:8])
        assert "see: keepstep runbook approval-wanted" in told and "page acknowledged: on it" in told
        assert (await s.cli("runbook", "approval-wanted", home=False)).startswith("# A decision waits")
        await s.cli("runbook", "nosuch", home=False, code=2)
        await s.finish()
        await s.check()
