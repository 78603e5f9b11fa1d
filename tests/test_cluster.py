"""Three servers with routes on loopback and three replicas: the same streams, expectations and timers, and a leader that dies."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from faust.types import TP

from events.ports import LEDGER, TELEMETRY_NODE, Ack, Expect, LogUnavailable, StaleWriter
from events.subjects import NODE, ledger, telemetry_node, tick
from infra import clock
from infra.faust_transport import topics
from infra.faust_transport.appends import Append, Appender
from infra.faust_transport.fences import Fences
from infra.jetstream import JetStreamLog, JetStreamTimers, Publisher
from infra.lease import Lease
from infra.streams import api, ensure_streams
from tests.cluster_fixture import Cluster, clean_bus, leader
from tests.nats_fixture import Bus

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def bus(cluster: Cluster) -> AsyncIterator[Bus]:
    async with clean_bus(cluster) as found:
        yield found


async def test_three_replicas_hold_what_one_does_and_survive_their_leader(bus: Bus, cluster: Cluster) -> None:
    nc = bus.admin
    await ensure_streams(nc, replicas=3)
    info = await api(nc, f"STREAM.INFO.{TELEMETRY_NODE}")
    assert info["config"]["num_replicas"] == 3 and info["config"].get("persist_mode", "default") != "async"

    log, mine, subject = JetStreamLog(nc, LEDGER), "ledger.*.decider.*", ledger("a", "decider", "k")
    assert await log.append(subject, b"1", message_id="a", expect=Expect(mine, 0)) == Ack(1)
    assert await log.append(subject, b"1", message_id="a", expect=Expect(mine, 0)) == Ack(1, duplicate=True)
    many = (log.append(subject, b"2", message_id=f"b{i}", expect=Expect(mine, 1)) for i in range(10))
    answers = await asyncio.gather(*many, return_exceptions=True)
    assert sorted(type(answer).__name__ for answer in answers) == ["Ack"] + ["StaleWriter"] * 9
    with pytest.raises(StaleWriter):
        await log.append(subject, b"x", expect=Expect(mine, 7))

    await JetStreamTimers(nc).set_timer("t", clock.wall_ns() + 200_000_000, "j", "k", b"{}")
    async with asyncio.timeout(20):
        timer = await anext(log.read(subjects=["ledger.*.timer.*"], follow=True))
        assert (timer.subject, timer.data) == (ledger("j", "timer", "k"), b"{}")
        await anext(JetStreamLog(nc, TELEMETRY_NODE).read(subjects=[tick(NODE, 0)], follow=True))
    assert await Lease(nc, "x", "a").try_acquire() and not await Lease(nc, "x", "b").try_acquire()

    publisher = Publisher(nc, ack_s_max=10)
    for i in range(2000):
        await publisher.publish(telemetry_node("n", "k"), b"%d" % i)
    assert await publisher.close() == []

    before = [r async for r in log.read()]
    cluster.kill(await leader(nc, LEDGER))
    deadline_s = time.monotonic() + 40
    while True:
        try:
            ack = await log.append(subject, b"3", message_id="c")
            break
        except LogUnavailable:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.2)
    after = [r async for r in log.read()]
    assert after[:-1] == before and after[-1].sequence == ack.sequence


async def test_what_is_stored_is_read_even_from_a_replica_that_lags(bus: Bus, cluster: Cluster) -> None:
    """A consumer reads what its own server holds. One that stood still for a moment does not hold all yet."""
    log = JetStreamLog(bus.admin, LEDGER)
    stored = 0
    for round_ in range(6):
        leads, mine = await leader(bus.admin, LEDGER), cluster.server_of(bus.admin)
        lagging = next(i for i in (round_ % 3, (round_ + 1) % 3, (round_ + 2) % 3) if i not in (leads, mine))
        cluster.signal(lagging, signal.SIGSTOP)
        try:
            many = [(ledger("a", "decider", "k"), bytes(2000), f"{round_}-{i}") for i in range(1000)]
            stored = await log.append_all(many)
        finally:
            cluster.signal(lagging, signal.SIGCONT)
        found = [record.sequence async for record in log.read(subjects=["ledger.a.decider.*"])]
        assert found[-1] == stored and len(found) == 1000 * (round_ + 1)


async def test_a_tables_writes_go_together_behind_their_fence(bus: Bus) -> None:
    nc = await bus.connect("detector")
    appender = Appender(nc, patience_s=20)
    await appender.open()
    fences = Fences(nc, b"me", "g", "KS_OFFSETS")
    table = TP("changelog_node", 3)
    await fences.take(table)
    appends = [
        Append(topics.changelog_subject(table.topic, 3, b"k%d" % (i % 1500)), b"%d" % i, fences.headers(table))
        for i in range(3000)
    ]
    began_s = time.monotonic()
    sequences = await appender.append(appends, in_flight_max=fences.in_flight_max(table))
    took_s = time.monotonic() - began_s
    print(f"{len(appends) / took_s:.0f} writes a second")
    assert sequences == sorted(set(sequences)) and len(sequences) == 3000
    kept = [r async for r in JetStreamLog(nc, "KS_CHANGELOG_NODE").read(subjects=["ks.changelog.node.3.*"])]
    assert [r.data for r in kept] == [b"%d" % i for i in range(1500, 3000)]
    other = Fences(nc, b"other", "g", "KS_OFFSETS")
    await other.take(table)
    with pytest.raises(StaleWriter):
        await appender.append(appends[:700], in_flight_max=1)
    assert [r async for r in JetStreamLog(nc, "KS_CHANGELOG_NODE").read(subjects=["ks.changelog.node.3.*"])] == kept
    await appender.close()
    await nc.close()
