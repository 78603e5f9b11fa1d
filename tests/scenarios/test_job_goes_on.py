"""The job does not depend on keepstep: whatever part of it is killed, frozen or started anew, no step is lost for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from events.decision import IncidentClosed
from tests.scenarios.harness import JOB, Scenario, policy

pytestmark = pytest.mark.slow


async def test_every_part_frozen_then_killed_costs_no_step(tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2, policy=policy(detectors={"silence_s": 15.0})) as s:
        await s.declare()
        parts = [*s.parts(), "bus"]
        for name in parts:
            goal = s.step(0) + 5
            s.signal(signal.SIGSTOP, name)
            await s.until(lambda goal=goal: s.step(0) >= goal, f"step while {name} is frozen")
            s.signal(signal.SIGCONT, name)
        goal = s.step(0) + 10
        s.signal(signal.SIGKILL, *s.parts())
        assert s.pipeline.server is not None
        s.pipeline.server.kill()
        await s.until(lambda: s.step(0) >= goal, "steps while nothing of the pipeline lives")
        await asyncio.to_thread(s.pipeline.server.start)
        at = max(s.job().last_progress_ns, 0)
        await s.until(lambda: s.job().last_progress_ns > at, "progress noted again")
        assert s.job().attempt == 1
        s.assert_unbroken(range(2))
        assert not s.of("incident_opened")
        await s.finish()
        await s.check()


def pipeline_processes(s: Scenario) -> list[psutil.Process]:
    """All of a pipeline's tree but the ranks and their keepers."""
    found = []
    for process in s.processes():
        words = process.cmdline()
        if any(word.startswith("infra.") for word in words) or "nats-server" in words[0]:
            found.append(process)
    return found


def recovered(s: Scenario) -> list[IncidentClosed]:
    return [e.data for e in s.of("incident_closed") if e.data.outcome == "recovered"]


async def test_a_pipeline_killed_whole_finds_its_job_and_what_it_missed(tmp_path: Path) -> None:
    """`keepstep up` and all below it die at once; a rank dies while nobody watches; `up` on the same home goes on with the ledger."""
    s = Scenario(tmp_path, nodes=2)
    s.steps_folder.mkdir()
    try:
        (tmp_path / "policy.yaml").write_text(s.policy)
        arguments: tuple[str, ...] = ("infra.cli", "up", "--home", str(s.home.path), "--policy", str(tmp_path / "policy.yaml"))
        arguments += ("--node", "n0", "--node", "n1", "--kernel-log", "none")
        s.start_part(*arguments)
        await s.until(lambda: s.pipeline.address.runs, "bus")
        await s.listen()
        await s.declare()
        await s.until(lambda: s.step(0) > 25, "steps")

        doomed = pipeline_processes(s)
        assert len(doomed) == 8, [p.cmdline() for p in doomed]
        for process in doomed:
            process.kill()
        await s.deafen()
        goal = s.step(0) + 10
        await s.until(lambda: s.step(0) >= goal, "steps while nothing of the pipeline lives")
        assert not pipeline_processes(s)
        s.assert_unbroken(range(2))
        os.kill(s.pid(1), signal.SIGTERM)

        s.start_part(*arguments)
        await s.until(lambda: s.pipeline.address.runs, "bus again")
        await s.listen()
        # While nothing watched, the agents were silent too: that a monitor was lost may be told first, and clears.
        await s.until(lambda: recovered(s), "the missed exit's incident")
        exits = [e for e in s.of("signal") if e.data.symptom == "rank_exit"]
        assert [(e.data.node, e.data.rank) for e in exits] == [("n1", 1)]
        assert "SIGTERM" in exits[0].data.evidence
        (closed,) = recovered(s)
        assert (closed.symptom, closed.mechanism) == ("rank_exit", "reattempt")
        others = [e.data for e in s.of("incident_closed") if e.data.incident != closed.incident]
        assert all((e.symptom, e.outcome, e.nodes) == ("monitor_lost", "cleared", ()) for e in others), others
        assert s.job().attempt == 2 and s.job().name == JOB
        await s.finish()
        await s.check(left=False)
    finally:
        await s.close()
    assert not s.processes()
