"""Three servers with routes on loopback and three replicas: the same streams, expectations and timers, and a leader that dies."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.ports import LEDGER, TELEMETRY_NODE, Ack, Expect, LogUnavailable, StaleWriter
from events.subjects import NODE, ledger, telemetry_node, tick
from infra import clock
from infra.bus import BusClient, connect
from infra.embedded import find_binary
from infra.jetstream import JetStreamLog, JetStreamTimers, Publisher
from infra.keys import ensure_key
from infra.lease import Lease
from infra.permissions import role, users_block
from infra.streams import StreamProblem, api, ensure_streams

pytestmark = pytest.mark.slow


def _free_ports(n: int) -> list[int]:
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.key = ensure_key(folder / "keys", role("admin"))
        ports = _free_ports(6)
        self.url = [f"nats://127.0.0.1:{port}" for port in ports[:3]]
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports[3:])
        users = users_block([(self.key.identity, self.key.public_key)])
        self.servers: list[subprocess.Popen[bytes]] = []
        for i in range(3):
            path = folder / f"{i}.conf"
            path.write_text(
                f'server_name: n{i}\nlisten: "127.0.0.1:{ports[i]}"\nlog_file: "{folder}/{i}.log"\n'
                f'jetstream {{ store_dir: "{folder}/store{i}", sync_interval: always }}\n'
                f'cluster {{ name: c, listen: "127.0.0.1:{ports[3 + i]}", routes: [{routes}] }}\n{users}'
            )
            self.servers.append(subprocess.Popen([find_binary(), "-c", str(path)], stderr=subprocess.DEVNULL))

    def kill(self, i: int) -> None:
        self.servers[i].kill()
        self.servers[i].wait()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for i in range(3):
        cluster.kill(i)


async def _ready(cluster: Cluster) -> BusClient:
    async with asyncio.timeout(60):
        nc = await connect(cluster.url, cluster.key.connect_options(), wait_s=30)
        while True:
            try:
                await ensure_streams(nc, replicas=3)
                return nc
            except (LogUnavailable, StreamProblem):  # no leader yet
                await asyncio.sleep(0.3)


async def test_three_replicas_hold_what_one_does_and_survive_their_leader(cluster: Cluster) -> None:
    nc = await _ready(cluster)
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
    leader = (await api(nc, f"STREAM.INFO.{LEDGER}"))["cluster"]["leader"]
    cluster.kill(int(leader.removeprefix("n")))
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
    await nc.close()
