"""The embedded server: it starts fast, keeps its store, ends with its parent however that ends, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from events.ports import DEADLETTER, LEDGER, TELEMETRY_NODE, LogUnavailable
from events.subjects import JOB, NODE, PARTITIONS, ledger, telemetry_node, tick
from infra import clock
from infra.bus import connect, connect_to_store
from infra.deadletter import DeadLetters
from infra.embedded import EmbeddedError, EmbeddedServer, find_binary, find_connection
from infra.jetstream import JetStreamLog, Publisher
from infra.streams import (
    CLOCK,
    SMALL_BYTES,
    TICK_BODY,
    TICKS_KEPT,
    Limits,
    StreamProblem,
    api,
    configurations,
    ensure,
    ensure_streams,
)


def _until(done: Callable[[], bool], seconds: float = 30) -> bool:
    deadline_s = time.monotonic() + seconds
    while not (answer := done()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return answer


def _gone(pid: int) -> bool:
    return clock.process_start_ticks(pid) is None


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "a store"


# -- its life ---------------------------------------------------------------------------------------------------------


async def test_it_keeps_its_store_its_port_and_its_keys(store: Path) -> None:
    with EmbeddedServer(store) as server:
        url, options = server.url, server.role_options("admin")
        nc = await connect(url, options)
        await ensure_streams(nc)
        await JetStreamLog(nc, LEDGER).append(ledger("j", "operator", "k"), b"kept")
        await nc.close()
        pid = server.pid
    assert _gone(pid) and not (store / "connection.json").exists()
    with EmbeddedServer(store) as server:
        assert (server.url, server.role_options("admin")) == (url, options)
        nc = await connect_to_store(store, "observer")
        assert [r.data async for r in JetStreamLog(nc, LEDGER).read()] == [b"kept"]
        await nc.close()


def test_it_starts_fast_and_leaves_what_others_need(store: Path) -> None:
    began_s = time.monotonic()
    with EmbeddedServer(store) as server:
        assert time.monotonic() - began_s < 5, "0.1 s on an idle machine"
        found = find_connection(store)
        assert (found.url, found.pid) == (server.url, server.pid)
        assert found.options("decider") == server.role_options("decider")
        with pytest.raises(EmbeddedError, match="no key for node-x"):
            found.options("node-x")
        secret = [store / "connection.json", store / "server.conf", *(store / "keys").iterdir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
        assert stat.S_IMODE(store.stat().st_mode) == stat.S_IMODE((store / "keys").stat().st_mode) == 0o700
        assert "sync_interval: always" in (store / "server.conf").read_text()
        assert "Server is ready" in (store / "server.log").read_text()
        seeds = [path.read_text().strip() for path in (store / "keys").iterdir()]
        assert not any(seed in path.read_text() for seed in seeds for path in (store / "server.conf", store / "server.log"))


_PARENT = """
import sys, time
from pathlib import Path
from infra.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1])).start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(store: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", _PARENT, str(store)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    yield process, pid
    process.kill()
    process.wait()
    assert _until(lambda: _gone(pid))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(store: Path, parent: tuple[subprocess.Popen[str], int], how: signal.Signals) -> None:
    process, pid = parent
    assert find_connection(store).pid == pid
    process.send_signal(how)
    process.wait(30)
    assert _until(lambda: _gone(pid), 30)
    with pytest.raises(EmbeddedError, match=rf"has ended \(process {pid}\)"):
        find_connection(store)
    with EmbeddedServer(store) as server:
        assert server.pid != pid


def test_a_store_is_one_servers_alone(store: Path, parent: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = parent
    with pytest.raises(EmbeddedError, match=rf"already runs over .*a store \(process {pid}, started by {process.pid}\)"):
        EmbeddedServer(store).start()
    with EmbeddedServer(store.with_name("another")) as server:
        with pytest.raises(EmbeddedError, match="already runs"):
            EmbeddedServer(server.store).start()
        assert server.running and not _gone(pid)
        refused = EmbeddedServer(server.store)
        with pytest.raises(EmbeddedError, match="already runs"):
            refused.start()
        refused.stop()  # as a second `up` on the same home does on its way out
        assert find_connection(server.store).pid == server.pid


def test_it_lives_on_when_the_thread_that_started_it_ends(store: Path) -> None:
    """PDEATHSIG is sent when the thread that forked ends, not the process."""
    server = EmbeddedServer(store)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        assert not _until(lambda: not server.running, 0.3)
        assert find_connection(store).pid == server.pid
    finally:
        server.stop()


def test_its_own_end_is_told_and_a_stop_is_not(store: Path) -> None:
    codes: list[int] = []
    server = EmbeddedServer(store, on_exit=codes.append).start()
    server.restart()
    os.kill(server.pid, signal.SIGKILL)
    assert _until(lambda: bool(codes)) and codes == [-signal.SIGKILL] and not server.running
    server.start()
    server.stop()
    assert codes == [-signal.SIGKILL]


@pytest.mark.parametrize(("set_by_user", "holds"), [(None, "25"), ("off", "off")])
def test_its_heap_is_kept_small_unless_someone_says_otherwise(
    set_by_user: str | None, holds: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOGC", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("GOGC", set_by_user)
    with EmbeddedServer(store) as server:
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    assert [word for word in environment if word.startswith("GOGC=")] == [f"GOGC={holds}"]


async def test_clients_come_back_after_a_restart_and_a_stop_is_no_hang(store: Path) -> None:
    with EmbeddedServer(store) as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)
        log = JetStreamLog(nc, LEDGER)
        await asyncio.to_thread(server.restart)
        async with asyncio.timeout(30):
            while True:
                try:
                    await log.append(ledger("j", "operator", "k"), b"after")
                    break
                except LogUnavailable:
                    await asyncio.sleep(0.02)
        server.kill()
        began_s = time.monotonic()
        with pytest.raises(LogUnavailable):
            await log.append(ledger("j", "operator", "k"), b"gone")
        assert time.monotonic() - began_s < 4, "a broken connection is known at once, not after a timeout"
        await nc.close()


async def test_nodes_are_added_while_it_runs_and_nobody_is_thrown_off(store: Path) -> None:
    with EmbeddedServer(store, nodes=["a"]) as server:
        a = await connect(server.url, server.node_options("a"))
        server.add_nodes([f"n {i}" for i in range(50)])
        b = await connect(server.url, server.node_options("ž.>*"))
        c = await connect_to_store(store, "node-n%2049")
        assert a.is_connected and a.stats["reconnects"] == 0 and b.is_connected and c.is_connected
        for client in (a, b, c):
            await client.close()
        server.restart()
        (await connect(server.url, server.node_options("ž.>*"))).problems.clear()


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_one_sentence(store: Path, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"no bus runs over .*keepstep up"):
        find_connection(store)
    with pytest.raises(EmbeddedError, match=r"was not found .*pip install"):
        EmbeddedServer(store, binary=str(tmp_path / "absent")).start()
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.11.4\n")
    old.chmod(0o755)
    with pytest.raises(EmbeddedError, match=r"v2\.11\.4.*needs nats-server 2\.15 or later"):
        EmbeddedServer(store, binary=str(old)).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match="can't be made"):
        EmbeddedServer(tmp_path / "file" / "x").start()
    with EmbeddedServer(store) as server:
        with pytest.raises(EmbeddedError, match=rf"port {server.port} .* is taken"):
            EmbeddedServer(tmp_path / "b", port=server.port).start()
    ending = tmp_path / "ends"
    ending.write_text('#!/bin/sh\n[ "$1" = --version ] && echo v2.15.1 && exit\necho "[ERR] cannot go on" >&2; exit 1\n')
    ending.chmod(0o755)
    with pytest.raises(EmbeddedError, match=r"ended at its start: .*cannot go on"):
        EmbeddedServer(store, binary=str(ending)).start()
    with EmbeddedServer(store):
        pass


def test_a_stale_or_broken_connection_file_is_recognised(store: Path) -> None:
    with EmbeddedServer(store):
        good = json.loads((store / "connection.json").read_text())
    for change in ({"pid": os.getpid()}, {"boot_id": "another"}, {"pid": 0}, {"pid": "x"}, {"pid": 1}):
        (store / "connection.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(EmbeddedError, match="has ended"):
            find_connection(store)
    (store / "connection.json").write_text("{")
    with pytest.raises(EmbeddedError, match="no bus runs"):
        find_connection(store)
    assert find_binary().endswith("nats-server")


# -- its streams ------------------------------------------------------------------------------------------------------


async def test_streams_are_made_once_and_ticks_come_each_second(store: Path) -> None:
    with EmbeddedServer(store) as server:
        nc = await connect(server.url, server.role_options("admin"))
        await asyncio.gather(ensure_streams(nc), ensure_streams(nc))
        await ensure_streams(nc)
        names = (await api(nc, "STREAM.NAMES"))["streams"]
        assert sorted(names) == sorted(config["name"] for config in configurations())
        for stream, subject in ((TELEMETRY_NODE, tick(NODE, 7)), ("TELEMETRY_JOB", tick(JOB, 0))):
            times = []
            async with asyncio.timeout(30):
                async for record in JetStreamLog(nc, stream).read(subjects=[subject], follow=True):
                    times.append(record.time_ns)
                    if len(times) == 3:
                        break
            assert 0.5e9 < times[2] - times[1] < 1.9e9
        assert (await api(nc, f"STREAM.MSG.GET.{CLOCK}", {"last_by_subj": "tick.schedule.7"}))["message"]["seq"] == 8
        await nc.close()


async def test_ticks_never_push_a_schedule_out_of_its_small_stream(store: Path) -> None:
    with EmbeddedServer(store) as server:
        nc = await connect(server.url, server.role_options("admin"))
        config = next(c for c in configurations() if c["name"] == CLOCK)
        await ensure(nc, {**config, "max_msgs_per_subject": 60, "max_bytes": -1})  # as it was made before
        await ensure_streams(nc)  # how many ticks are kept changes nothing
        await api(nc, f"STREAM.UPDATE.{CLOCK}", config)
        headers = {
            "Test-Scheduler": "tick.schedule.7",
            "Test-Schedule-Next": "2026-11-30T07:12:56Z",
        }  # as long as the server's own
        for i in range((TICKS_KEPT + 10) * PARTITIONS):
            await nc.jetstream().publish(f"tick.second.{i % PARTITIONS}", TICK_BODY, headers=headers)
        state = (await api(nc, f"STREAM.INFO.{CLOCK}"))["state"]
        assert state["messages"] == (TICKS_KEPT + 1) * PARTITIONS and state["first_seq"] == 1
        assert state["bytes"] < 0.7 * SMALL_BYTES, "with room for what another server may add to a tick"
        await nc.close()


async def test_a_stream_that_is_otherwise_is_a_clear_error_and_is_left_alone(store: Path) -> None:
    with EmbeddedServer(store) as server:
        nc = await connect(server.url, server.role_options("admin"))
        await api(
            nc, f"STREAM.CREATE.{LEDGER}", {"name": LEDGER, "subjects": ["ledger.>"], "storage": "file", "retention": "limits"}
        )
        with pytest.raises(StreamProblem, match=r"LEDGER exists with another subjects: .* never deletes"):
            await ensure_streams(nc)
        assert (await api(nc, f"STREAM.INFO.{LEDGER}"))["config"]["subjects"] == ["ledger.>"]
        await api(nc, f"STREAM.DELETE.{LEDGER}", {})
        config = next(c for c in configurations() if c["name"] == LEDGER)
        await api(nc, f"STREAM.CREATE.{LEDGER}", {**config, "max_age": 3600 * 10**9})
        with pytest.raises(StreamProblem, match="would lose history"):
            await ensure(nc, config)
        await api(nc, f"STREAM.DELETE.{LEDGER}", {})
        await ensure_streams(nc, limits=Limits(telemetry_bytes=1 << 30))
        await ensure_streams(nc)  # another limit is the administrator's choice
        await nc.close()


# -- publishing and dead letters --------------------------------------------------------------------------------------


async def test_every_publish_is_acknowledged_or_handed_back(store: Path) -> None:
    with EmbeddedServer(store, nodes=["n"]) as server:
        admin = await connect(server.url, server.role_options("admin"))
        await ensure_streams(admin)
        nc = await connect(server.url, server.node_options("n"))
        publisher = Publisher(nc, in_flight_max=50, ack_s_max=2)
        refused: list[bytes] = []

        async def send(first: int, last: int) -> None:
            for i in range(first, last):
                body = b"%06d" % i
                try:
                    await publisher.publish(telemetry_node("n", "k"), body)
                except LogUnavailable:
                    refused.append(body)
                assert publisher.in_flight <= 50

        await send(0, 500)
        server.kill()
        await send(500, 600)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(30):
            while not nc.is_connected:
                await asyncio.sleep(0.02)
        await send(600, 700)
        handed_back = {f.data for f in await publisher.drain()} | set(refused)
        assert publisher.acknowledged + len(handed_back) == 700 and handed_back
        stored = [r.data async for r in JetStreamLog(admin, TELEMETRY_NODE).read(subjects=["tn.*.*.*"])]
        assert len(set(stored)) == len(stored), "none is stored twice by us"
        assert {b"%06d" % i for i in range(600, 700)} <= set(stored)
        await publisher.publish("telemetry.n.elsewhere", b"")
        (failed,) = await publisher.drain()
        assert failed.again and "no stream takes this subject" in failed.reason
        await publisher.close()
        await nc.close()
        await admin.close()


async def test_a_flood_of_dead_letters_is_kept_to_a_hundred_a_source_and_minute_then_counted(store: Path) -> None:
    with EmbeddedServer(store) as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)
        await nc.close()
        nc = await connect(server.url, server.role_options("detector"))
        log = JetStreamLog(nc, DEADLETTER)
        letters = DeadLetters(lambda subject, data, headers: log.append(subject, data, headers=headers))
        minute_ns = 60_000_000_000
        for i in range(250):
            body = b"\xff" * 9000 if i == 0 else b"not json"
            await letters.refuse(TELEMETRY_NODE, "tn.1.n%201.k", i + 1, minute_ns + i, body, "no JSON", "n 1")
            if i < 3:
                await letters.refuse(TELEMETRY_NODE, "tn.1.b.k", i + 1, minute_ns + i, b"x", "no JSON", "b")
        await letters.refuse(TELEMETRY_NODE, "tn.1.n%201.k", 999, 2 * minute_ns, b"y", "no JSON", "n 1")
        await letters.close()
        bodies = [(r.subject, json.loads(r.data)) async for r in log.read()]
        assert letters.refused == 254 and letters.lost == 0
        mine = [body for subject, body in bodies if subject == "deadletter.TELEMETRY_NODE.n%201"]
        kept, counts = [b for b in mine if "count" not in b], [b for b in mine if "count" in b]
        assert len(kept) == 101 and len(bodies) == 101 + 3 + 1
        assert counts == [
            {
                "count": 150,
                "minute": "1970-01-01T00:01:00.000000000Z",
                "reasons": {"no JSON": 150},
                "source": "n 1",
                "stream": TELEMETRY_NODE,
            }
        ]
        assert kept[0]["bytes"] == 9000 and len(kept[0]["data_base64"]) == 5464 and kept[0]["sequence"] == 1
        assert kept[1] == {
            "bytes": 8, "data": "not json", "reason": "no JSON", "sequence": 2, "source": "n 1", "stream": TELEMETRY_NODE,
            "subject": "tn.1.n%201.k", "time": "1970-01-01T00:01:00.000000001Z",
        }  # fmt: skip
        await nc.close()


async def test_dead_letters_never_raise_into_the_stream_and_bound_their_memory() -> None:
    async def broken(subject: str, data: bytes, headers: object) -> None:
        raise LogUnavailable("away")

    letters = DeadLetters(broken)
    for i in range(5000):
        await letters.refuse("S", "s", i, i, b"", "r", f"source {i}")
    assert letters.lost > 4000 and len(letters._tallies) <= 4097
    await letters.refuse("S", "s", 1, 1, b"", "r" * 10_000, "\ud800")
    await letters.close()
    assert letters._tallies == {}
