"""Machines' tests through everything: command line or actuators, bus, agents, parked workers, and back; timed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from events.action import OutcomeRecorded
from events.decision import RankPlace
from events.job import JobDeclared, Place
from events.presence import Heartbeat
from tests.test_actuators_live import JOB, SCRIPT, Bus, bus, intent

__all__ = ["bus"]
FAULTS = Path(__file__).parent / "machine_faults"


@pytest.mark.slow
async def test_from_the_intent_to_the_outcome_over_a_real_bus_and_again_for_a_person(bus: Bus) -> None:
    train, faults = bus.folder / "train.py", bus.folder / "faults"
    assert train.read_text() == SCRIPT
    bus.agent("n0"), bus.agent("n1"), bus.actuators()
    environment = {"PYTHONPATH": str(FAULTS), "FAULTS": str(faults), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, str(train), str(bus.folder / "out"))
    declared = JobDeclared(
        job=JOB, nodes=(Place(node="n0"), Place(node="n1")), dp=2, command=command, environment=tuple(environment.items())
    )
    await bus.say(declared, "operator")
    places = (RankPlace(node="n0", first_rank=0, count=1), RankPlace(node="n1", first_rank=1, count=1))
    await bus.say(intent("start_attempt", "k1", attempt=1, places=places, world_size=2))
    await bus.until(OutcomeRecorded, lambda found: len(found) == 1)
    # While its ranks run, nobody tests its machines.
    code, said, err = await keepstep(bus, JOB)
    assert code == 2 and "ranks of 'gpt' run here" in err, (said, err)
    await parked(bus)
    await bus.say(intent("stop_attempt", "k2", attempt=1, nodes=("n0", "n1"), decision="d2"))
    await bus.until(OutcomeRecorded, lambda found: len(found) == 2)
    begun_s = time.monotonic()
    await bus.say(intent("diagnose", "k3", attempt=1, nodes=("n0", "n1"), decision="d2", within_s=30.0))
    *_, outcome = await bus.until(OutcomeRecorded, lambda found: len(found) == 3)
    took_s = time.monotonic() - begun_s
    assert outcome.result == "done" and not [r for r in outcome.tests if r.passed is False], outcome
    assert {r.test for r in outcome.tests if r.passed} == {"gpu_self_test", "all_gather", "reference_step"}
    print(f"over the bus, 2 nodes: {took_s:.2f} s; {outcome.detail}")
    assert took_s < 10
    code, said, err = await keepstep(bus, JOB, "--node", "n1", "--test", "gpu_self_test", "--test", "reference_step")
    assert code == 0 and [r["node"] for r in said["results"]] == ["n1", "n1"], (said, err)
    faults.write_text("flip n0 64 64 64")
    code, said, err = await keepstep(bus, JOB)
    assert code == 1 and set(said["named"]) == {"n0"} and "1 of 4096 elements are wrong" in said["named"]["n0"], (said, err)
    code, said, err = await keepstep(bus, JOB, "--node", "n7")
    assert code == 2 and "n7 is none of the nodes of gpt: n0, n1" in err


async def parked(bus: Bus) -> None:
    """Both nodes' agents say that a worker is warm."""
    from events.ports import TELEMETRY_NODE
    from events.registry import parse
    from infra.jetstream import JetStreamLog

    log = JetStreamLog(bus.ledger._nc, TELEMETRY_NODE)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        last = {}
        async for record in log.read():
            event = parse(record.data)
            if isinstance(event.data, Heartbeat):
                last[event.subject] = event.data.parked
        if len(last) == 2 and all(last.values()):
            return
        await asyncio.sleep(0.5)
    raise AssertionError(last)


async def keepstep(bus: Bus, *words: str) -> tuple[int, dict, str]:  # type: ignore[type-arg]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.cli", "diagnose", *words, "--home", str(bus.home.path), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, json.loads(out or b"{}"), err.decode()
