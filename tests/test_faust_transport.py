"""The contract of the Faust transport and its host, over a real server: order, resuming, tables, sharing, losing, raising."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from faust.types import TP

from events import subjects
from events.incident import DetectorStarted
from events.ports import DEADLETTER, LEDGER, TELEMETRY_NODE, LogError, LogUnavailable, StaleWriter
from events.registry import parse
from infra.bus import connect
from infra.detector_worker import Worker, WorkerSettings
from infra.faust_transport import topics
from infra.faust_transport.appends import Append, Appender
from infra.faust_transport.fences import Fences
from infra.faust_transport.patience import patiently
from infra.publisher import Publisher
from infra.streams import ensure_streams
from tests.cluster_fixture import clean_bus
from tests.faust_workers import (
    POISON,
    Counter,
    Process,
    Running,
    all_claimed,
    beat,
    by_key,
    claimed,
    count,
    each_once,
    expected,
    holders,
    partitions,
    records,
    until,
    worker,
)
from tests.nats_fixture import Bus, real_bus

NODES = [f"n{i}" for i in range(24)]
ALL = set(range(subjects.PARTITIONS))


@pytest_asyncio.fixture
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    kind, led = getattr(request, "param", ("embedded", ""))
    if kind == "embedded":
        made = real_bus(tmp_path)
    elif kind == "cluster":
        made = clean_bus(request.getfixturevalue("cluster"), led=led)
    else:
        made = clean_bus(request.getfixturevalue("container"))
    async with made as found:
        yield found


_EMBEDDED = pytest.param(("embedded", ""), id="embedded")
_CONTAINED = pytest.param(("container", ""), id="docker", marks=pytest.mark.docker)


def everywhere(led: str) -> pytest.MarkDecorator:
    """On one server, in a container, and on three, where the leader of the stream `led` is killed in the middle of the load."""
    cluster = pytest.param(("cluster", led), id="cluster", marks=pytest.mark.slow)
    return pytest.mark.parametrize("bus", [_EMBEDDED, cluster, _CONTAINED], indirect=True)


on_one_server = pytest.mark.parametrize("bus", [_EMBEDDED, _CONTAINED], indirect=True)


@everywhere("KV_KS_OFFSETS")
async def test_order_is_kept_and_a_stopped_worker_resumes_where_it_was(bus: Bus) -> None:
    await beat(bus, NODES, 20, calm=True)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    await each_once(bus, len(NODES) * 20)
    await beat(bus, NODES, 10, first=20)
    async with Running(worker(bus, "w2")) as running:
        await until(lambda: all_claimed(bus))
        assert running.worker.host.records < len(NODES) * 20, "what was committed is not read again"
    await each_once(bus, len(NODES) * 30)
    started = [parse(r.data).data for r in await records(bus, LEDGER, "ledger.*.detector.detector_started")]
    assert [(s.worker, set(s.partitions)) for s in started if isinstance(s, DetectorStarted)] == [("w1", ALL), ("w2", ALL)]


@everywhere("KS_CHANGELOG_NODE")
async def test_state_comes_back_from_the_changelog_alone(bus: Bus) -> None:
    await beat(bus, NODES, 5, calm=True)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    await bus.admin.jetstream().purge_stream("KV_KS_OFFSETS")  # offsets are a hint: reading starts at 1 and repeats nothing
    await beat(bus, NODES, 5, first=5)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    await each_once(bus, len(NODES) * 10)


@on_one_server
async def test_a_lost_changelog_is_rebuilt_from_telemetry(bus: Bus) -> None:
    await beat(bus, NODES, 5)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    await bus.admin.jetstream().purge_stream("KS_CHANGELOG_NODE")
    await beat(bus, NODES, 5, first=5)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    assert by_key(await claimed(bus)) == await expected(bus)


@on_one_server
async def test_two_workers_share_and_one_that_leaves_is_taken_over_from(bus: Bus) -> None:
    async with Running(worker(bus, "a")) as a, Running(worker(bus, "b")) as b:
        await until(lambda: len(partitions(a.worker)) == 4 and len(partitions(b.worker)) == 4)
        assert partitions(a.worker) | partitions(b.worker) == ALL
        await beat(bus, NODES, 10)
        await until(lambda: all_claimed(bus))
        assert a.worker.host.records and b.worker.host.records
        a.stop.set()
        await until(lambda: partitions(b.worker) == ALL)
        await beat(bus, NODES, 10, first=10)
        await until(lambda: all_claimed(bus))
    await each_once(bus, len(NODES) * 20)


@everywhere(TELEMETRY_NODE)
async def test_one_of_two_is_killed_under_load_and_nothing_is_lost(bus: Bus, tmp_path: Path) -> None:
    with Process(bus, tmp_path, "a") as a, Process(bus, tmp_path, "b") as b:

        async def both() -> bool:
            held = list((await holders(bus)).values())
            return held.count("a") == 4 and held.count("b") == 4

        await until(both)
        load = asyncio.create_task(beat(bus, NODES, 100))
        await until(lambda: _some(bus, 100))
        a.process.send_signal(signal.SIGKILL)
        await load
        await until(lambda: all_claimed(bus))

        async def taken_over() -> bool:  # what the dead one had claimed already may have been all
            return list((await holders(bus)).values()) == ["b"] * 8

        await until(taken_over)
        b.process.send_signal(signal.SIGTERM)
        await until(lambda: b.process.poll() is not None)
        assert b.process.returncode == 0, b.log.read_text()
        assert await holders(bus) == {}, "leases are given back"
    assert by_key(await claimed(bus)) == await expected(bus)


async def _some(bus: Bus, wanted: int) -> bool:
    return await count(bus, LEDGER, "ledger.*.detector.evidence_missing") >= wanted


@everywhere("KV_LEASES")
async def test_nothing_takes_effect_from_a_worker_whose_lease_is_over(bus: Bus, tmp_path: Path) -> None:
    with Process(bus, tmp_path, "a") as a:
        await beat(bus, NODES, 20, calm=True)
        await until(lambda: all_claimed(bus))
        load = asyncio.create_task(beat(bus, NODES, 60, first=20))
        await asyncio.sleep(0.05)
        a.process.send_signal(signal.SIGSTOP)
        await load
        async with Running(worker(bus, "b")) as b:
            await until(lambda: partitions(b.worker) == ALL)
            await until(lambda: all_claimed(bus))
            await asyncio.sleep(0.3)
            before = [r for r in await records(bus, "KS_CHANGELOG_NODE") if ".fence." in r.subject]
            a.process.send_signal(signal.SIGCONT)
            await until(lambda: len(partitions(b.worker)) == 4)  # it is back among the members, with a share of its own
            await beat(bus, NODES, 5, first=80, calm=True)
            await until(lambda: all_claimed(bus))
        owners = {r.data for r in before}
        assert len(owners) == 1
    assert by_key(await claimed(bus)) == await expected(bus)


@everywhere("KV_KS_OFFSETS")
async def test_writes_behind_a_fence_that_fell_are_refused(bus: Bus) -> None:
    nc = await bus.connect("detector")
    appender = Appender(nc, patience_s=30)
    await appender.open()
    old, new = (Fences(nc, owner, "g", "KS_OFFSETS") for owner in (b"old", b"new"))
    table, source = TP("changelog_node", 3), TP("telemetry_node", 3)
    for tp in (table, source):
        await old.take(tp)
    behind_old = [Append(topics.changelog_subject("changelog_node", 3, b"k"), b"1", old.headers(table)) for _ in range(50)]
    await appender.append(behind_old, in_flight_max=old.in_flight_max(table))
    await old.commit(source, 10)
    await bus.trouble()
    for tp in (table, source):
        await patiently(partial(new.take, tp), 30)
    assert new.committed(source) == 10
    with pytest.raises(StaleWriter):
        await appender.append(behind_old[:1])
    other_key = Append(topics.changelog_subject("changelog_node", 3, b"never written"), b"1", old.headers(table))
    with pytest.raises(StaleWriter):
        await appender.append([other_key])
    with pytest.raises(StaleWriter):
        await patiently(lambda: old.commit(source, 20), 30)
    await patiently(lambda: new.commit(source, 11), 30)
    await appender.append([Append(topics.changelog_subject("changelog_node", 3, b"k"), b"2", new.headers(table))])
    await appender.close()
    await nc.close()


@on_one_server
async def test_a_processor_that_raises_ends_the_worker_and_loses_no_record(bus: Bus) -> None:
    await beat(bus, NODES, 5)
    await beat(bus, [POISON], 1)
    await beat(bus, NODES, 5, first=5)
    running = Running(worker(bus, "w1", Counter(raises_on=POISON)))
    with pytest.raises(RuntimeError, match="no sense"):
        async with running:
            assert running.task is not None
            await asyncio.wait({running.task}, timeout=60)
    poisoned = subjects.partition(POISON)
    committed = await records(bus, "KV_KS_OFFSETS", f"$KV.KS_OFFSETS.*.telemetry_node.{poisoned}")
    (poison,) = await records(bus, "TELEMETRY_NODE", f"tn.{poisoned}.{POISON}.*")
    assert all(json.loads(record.data)["offset"] <= poison.sequence for record in committed)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    await each_once(bus, len(NODES) * 10 + 1)


@on_one_server
async def test_what_can_not_be_read_is_set_aside_and_stops_nothing(bus: Bus) -> None:
    await beat(bus, NODES, 2)
    publisher = Publisher(bus.admin)
    for i in range(300):
        await publisher.publish(subjects.telemetry_node("n1", "heartbeat"), b"\xff{" + bytes(8000) if i % 2 else b"{}")
    assert await publisher.close() == []
    await beat(bus, NODES, 2, first=2)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus, but=300))
    assert by_key(await claimed(bus)) == await expected(bus)
    letters = [json.loads(r.data) for r in await records(bus, DEADLETTER, "deadletter.TELEMETRY_NODE.n1")]
    kept = [letter for letter in letters if "reason" in letter]
    assert 100 <= len(kept) <= 200, "the first hundred of each minute (the flood may span two)"
    assert all(letter["sequence"] and letter["source"] == "n1" for letter in kept)
    assert max(len(letter.get("data", "")) for letter in kept) <= 4096
    stored = [r for r in await records(bus, "KS_CHANGELOG_NODE") if r.subject.endswith("@clock")]
    tallies = [tally for r in stored for tally in json.loads(r.data)["letters"]]
    counted = sum(letter["count"] for letter in letters if "count" in letter)
    assert len(kept) + counted + sum(seen - kept for *_, seen, kept, _ in tallies) == 300, "each is kept or counted"


@everywhere(LEDGER)
async def test_a_seek_at_any_time_loses_and_repeats_nothing(bus: Bus) -> None:
    await beat(bus, NODES, 40)
    async with Running(worker(bus, "w1", frame_records_max=7)) as running:
        consumer = running.worker.app.consumer
        await until(lambda: bool(running.worker.host.records))
        for i in range(60):
            for partition in partitions(running.worker):
                await consumer.seek(TP("telemetry_node", partition), 1 + (i * 37) % 900)
            await asyncio.sleep(0.005)
        await until(lambda: all_claimed(bus))
    await each_once(bus, len(NODES) * 40)


@everywhere(TELEMETRY_NODE)
async def test_a_bus_that_goes_and_comes_back_loses_nothing(bus: Bus) -> None:
    async with Running(worker(bus, "w1")) as running:
        await beat(bus, NODES, 10)
        await until(lambda: bool(running.worker.host.records))
        await asyncio.to_thread(bus.server.restart)
        await until(lambda: bus.admin.is_connected)
        await beat(bus, NODES, 10, first=10, calm=True)
        await until(lambda: all_claimed(bus))
    assert by_key(await claimed(bus)) == await expected(bus)


async def test_a_worker_that_comes_back_takes_up_its_own_leases_at_once(tmp_path: Path) -> None:
    async with real_bus(tmp_path, lease_ttl_s=120.0) as bus:
        with Process(bus, tmp_path, "a") as first:
            await beat(bus, NODES, 5)
            await until(lambda: all_claimed(bus))
            first.process.kill()
            first.process.wait()
        await beat(bus, NODES, 5, first=5)
        with Process(bus, tmp_path, "a"):
            await until(lambda: all_claimed(bus))
        assert by_key(await claimed(bus)) == await expected(bus)


async def test_a_cancelled_worker_stores_what_it_folded_and_gives_its_leases_back(bus: Bus) -> None:
    await beat(bus, NODES, 5)
    task = asyncio.create_task(worker(bus, "w1", state_interval_s=60.0).run(asyncio.Event()))
    await until(lambda: all_claimed(bus))
    assert not [r for r in await records(bus, "KS_CHANGELOG_NODE") if "=" in r.subject]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    assert len([r for r in await records(bus, "KS_CHANGELOG_NODE") if "=" in r.subject]) == len(NODES)
    assert await holders(bus) == {}


async def test_telemetry_that_was_lost_and_begins_again_is_read_from_there(bus: Bus) -> None:
    await beat(bus, NODES, 10)
    async with Running(worker(bus, "w1")):
        await until(lambda: all_claimed(bus))
    before = len(await claimed(bus))
    await bus.admin.jetstream().delete_stream("TELEMETRY_NODE")
    await ensure_streams(bus.admin)
    await beat(bus, NODES, 1, first=1000)
    async with Running(worker(bus, "w1")) as running:
        await until(lambda: bool(running.worker.host.records))
        await beat(bus, NODES, 2, first=1001)
        await until(lambda: _some(bus, before + 2 * len(NODES)))
        assert not (running.task and running.task.done())


async def test_a_bus_without_its_streams_is_said_in_a_sentence(tmp_path: Path) -> None:
    async with real_bus(tmp_path) as bus:
        await bus.admin.jetstream().delete_stream("KS_CHANGELOG_NODE")
        with pytest.raises(LogError, match="no stream KS_CHANGELOG_NODE"):
            await asyncio.wait_for(worker(bus, "w1").run(asyncio.Event()), 60)


async def test_a_bus_out_of_reach_is_said_in_a_sentence() -> None:
    settings = WorkerSettings("node", "w1", connect=lambda: connect("nats://127.0.0.1:1", wait_s=0.5))
    with pytest.raises(LogUnavailable, match="out of reach"):
        await asyncio.wait_for(Worker(settings, Counter()).run(asyncio.Event()), 60)
