"""Which part of the control plane is not at work, as `status` tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra import parts as told
from infra.cli.status import is_amiss
from infra.faust_transport.leases import Leases, this_process
from infra.lease import Lease
from infra.parts import Part, keeps, parts
from infra.streams import LEASES, OFFSETS
from infra.watch import Watch
from tests.nats_fixture import Bus, real_bus

TTL_S = 2.0


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with real_bus(tmp_path, lease_ttl_s=TTL_S) as bus:
        yield bus


async def problems(bus: Bus) -> dict[str, str]:
    nc = await bus.connect("observer")
    try:
        return {part.part: part.problem for part in await parts(nc) if part.problem}
    finally:
        await nc.close()


async def hold_all(bus: Bus) -> list[Lease | Leases]:
    held: list[Lease | Leases] = [Lease(bus.admin, name, f"{name}@here") for name in ("decider", "actuators")]
    for lease in held:
        assert isinstance(lease, Lease) and await lease.try_acquire()
    for which in ("node", "job"):
        group = f"detector-{which}"
        leases = Leases(bus.admin, bucket=LEASES, group=group, me=this_process(f"{which}@here"), partitions=8)
        await leases.open()
        await leases.poll()
        assert len(leases.held) == 8
        held.append(leases)
    return held


async def test_parts_that_hold_their_leases_are_at_work_and_those_that_hold_none_are_not(bus: Bus) -> None:
    without = await problems(bus)
    assert set(without) == {"decider", "detector-node", "detector-job", "actuators"}
    assert all("holds no lease" in problem for problem in without.values())
    decider, actuators, node, job = await hold_all(bus)
    assert await problems(bus) == {}
    found = {part.part: part for part in await parts(bus.admin)}
    assert found["decider"].by == ("decider@here",) and (found["decider"].held, found["decider"].of) == (1, 1)
    assert found["detector-job"].by == ("job@here",) and (found["detector-job"].held, found["detector-job"].of) == (8, 8)
    assert isinstance(decider, Lease) and isinstance(node, Leases)
    await decider.release()
    await node.release([3, 5])
    after = await problems(bus)
    assert "holds no lease" in after["decider"] and "6 of 8 partitions" in after["detector-node"] and len(after) == 2
    await asyncio.sleep(TTL_S + 0.5)
    assert set(await problems(bus)) == set(without), "nobody renewed them"
    assert isinstance(actuators, Lease) and not actuators.held and isinstance(job, Leases) and not job.held


async def test_a_lease_that_a_broken_store_no_longer_forgets_is_over_all_the_same(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold_all(bus)
    real = told.api

    async def later(nc: object, call: str, body: object = None, timeout_s: float = 5.0) -> dict[str, object]:
        answer = await real(nc, call, body, timeout_s)  # type: ignore[arg-type]
        if call == f"STREAM.INFO.KV_{LEASES}":
            answer["ts"] = "2999-01-01T00:00:00.123456789Z"
        return answer

    monkeypatch.setattr(told, "api", later)
    assert set(await problems(bus)) == {"decider", "detector-node", "detector-job", "actuators"}


async def test_a_detector_that_commits_nothing_is_told(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await hold_all(bus)
    offset = json.dumps({"offset": 7, "owner": "node@here"}).encode()
    await bus.admin.jetstream().publish(f"$KV.{OFFSETS}.detector-node.telemetry_node.0", offset)
    assert await problems(bus) == {}
    monkeypatch.setattr(told, "OFFSET_S_MAX", 0.3)
    await asyncio.sleep(0.5)
    found = await problems(bus)
    assert set(found) == {"detector-node"} and "has written nothing for" in found["detector-node"]


async def test_a_bus_that_does_not_tick_or_answer_is_told(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await hold_all(bus)
    monkeypatch.setattr(told, "TICK_S_MAX", -1.0)
    assert "it stores nothing" in (await problems(bus))["bus"]
    await bus.admin.close()
    found = await parts(bus.admin)
    assert not keeps(found) and "it keeps nothing now" in found[0].problem


@pytest.mark.parametrize("problem", ["", "holds no lease"])
def test_what_is_not_at_work_is_amiss(problem: str) -> None:
    assert is_amiss(Watch(), {"n0": 3600}, [Part("bus"), Part("decider", problem=problem)]) is bool(problem)
