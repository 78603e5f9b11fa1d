"""Silence that is not the nodes': everything frozen and thawed, the bus stopped, half of the agents cut off. Nobody is evicted."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from events.ports import TELEMETRY_JOB
from events.registry import parse
from infra.wall_time import wall_times
from tests.scenarios.harness import JOB, Scenario, policy

pytestmark = pytest.mark.slow

SHORT = {"startup": 20.0, "step": 4.0, "evaluation": 4.0, "checkpoint": 4.0, "undeclared": 20.0}
FROZEN_S = 10.0


async def test_everything_frozen_beyond_every_limit_evicts_nobody(tmp_path: Path) -> None:
    """Longer than a node's silence, a phase's limit, every lease and the broker's patience; the ranks too, as when a machine
    sleeps."""
    async with Scenario(tmp_path, nodes=2, standbys=1, policy=policy(detectors={"phase_limit_s": SHORT})) as s:
        await s.declare()
        everything = s.processes()
        assert len(everything) >= 9
        for process in everything:
            process.suspend()
        await asyncio.sleep(FROZEN_S)
        for process in everything:
            process.resume()
        step, noted = s.step(0), s.job().last_progress_ns
        await s.until(lambda: s.job().last_progress_ns > noted and s.step(0) > step + 20, "progress after the thaw")
        await s.until(lambda: [e for e in s.of("evidence_missing") if e.data.reason == "ticks"], "the gap in the ticks")
        assert not [d for d in s.of("decision_made") if d.data.rung != "planned"], s.story()
        s.assert_unbroken(range(2), longest_s=FROZEN_S + 5)

        before = s.at
        s.kill_rank(1)
        assert (await s.closed(before)).mechanism == "reattempt"
        await s.finish()
        records = await s.check()
        split = wall_times(records["LEDGER"], records[TELEMETRY_JOB])[JOB]
        assert split.lost.stall > (FROZEN_S - 3) * 1e9, "what stood still is lost time, not productive"


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_a_bus_that_is_away_stops_nothing_and_loses_nothing(how: str, tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2, policy=policy(detectors={"phase_limit_s": SHORT})) as s:
        await s.declare()
        assert s.pipeline.server is not None
        if how == "frozen":
            s.signal(signal.SIGSTOP, "bus")
        else:
            s.pipeline.server.kill()
        away_from = s.step(0)
        await asyncio.sleep(FROZEN_S)
        away_to = s.step(0)
        assert away_to > away_from + 20
        if how == "frozen":
            s.signal(signal.SIGCONT, "bus")
        else:
            await asyncio.to_thread(s.pipeline.server.start)
        await s.until(lambda: s.watch.jobs[JOB].step > away_to + 20, "steps heard of after the outage")
        at = s.job().last_progress_ns
        await s.until(lambda: s.job().last_progress_ns > at, "progress noted after the outage")
        # The gap is told at the next tick, which may come after the job's own progress.
        await s.until(lambda: [e for e in s.of("evidence_missing") if e.data.reason == "ticks"], "the gap in the ticks")
        assert not s.of("incident_opened"), s.story()
        s.assert_unbroken(range(2))
        await s.finish()
        records = await s.check()
        for rank in range(2):
            told: set[int] = set()
            held = 0
            for record in records[TELEMETRY_JOB]:
                if not record.subject.endswith(".training_progress"):
                    continue
                event = parse(record.data)
                if event.data.rank == rank:
                    told |= {sample.step for sample in event.data.samples}
                    held += "Keepstep-Held-Ns" in record.headers
            assert held, f"nothing of rank {rank} was held while the bus was away"
            # What a killed bus had acknowledged in its last moment may be gone: its telemetry is persisted asynchronously (decision 012).
            missing = set(range(away_from + (how == "killed"), away_to)) - told
            assert not missing, f"rank {rank}: steps that nobody was told of: {sorted(missing)[:20]}"


async def test_half_of_the_agents_cut_off_is_one_page_and_nobody_evicted(tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=6, standbys=1) as s:
        await s.declare()
        half = ["agent-n0", "agent-n1", "agent-n2"]
        s.signal(signal.SIGSTOP, *half)
        await s.until(lambda: [d for d in s.of("decision_made") if d.data.rule == "shared_cause"], "page for what they share")
        await s.until(lambda: len([e for e in s.of("signal") if e.data.symptom == "node_silent"]) >= 3, "three silent nodes")
        s.signal(signal.SIGCONT, *half)
        await s.until(lambda: len(s.of("signal_cleared")) >= 3, "nodes heard again")
        await s.until(lambda: not s.watch.open_incidents(), "end of the incident")
        pages = [i for i in s.of("intent_issued") if i.data.verb == "notify"]
        assert len(pages) == 1, s.story()
        assert {i.data.verb for i in s.of("intent_issued")} == {"start_attempt", "notify"}
        s.assert_unbroken(range(6))
        await s.finish()
        await s.check()
