"""Credentials on a real server: what each identity may do, and above all what it may not."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import stat
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from nats.errors import StaleConnectionError
from typer.testing import CliRunner

from events.ports import DEADLETTER, LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, Expect, LogError, LogUnavailable
from events.subjects import command, ledger, telemetry_job, telemetry_node
from infra.bus import BusClient, connect, connect_to_store, connect_with_seed
from infra.cli.app import app
from infra.cli.common import Refused
from infra.embedded import EmbeddedServer, Tls, find_binary
from infra.jetstream import JetStreamLog, JetStreamTimers, Publisher
from infra.keys import (
    KeyProblem,
    UnsafeListen,
    check_listen,
    ensure_key,
    identity_of,
    is_loopback,
    keys_in,
    public_key_of,
    server_configuration,
)
from infra.permissions import ROLES, inbox_prefix, node, node_user, role
from infra.streams import CLOCK, TICK_SCHEDULE, TIMERS, api, ensure_streams

NODE, OTHER = "n 1.*", "ž>"
Open = Callable[[str], Awaitable[BusClient]]


@pytest.fixture
async def open_as(tmp_path: Path) -> AsyncIterator[Open]:
    """Connects as a role, or as a node for `node:<name>`."""
    clients: list[BusClient] = []
    with EmbeddedServer(tmp_path / "bus", nodes=[NODE, OTHER]) as server:

        async def open_(who: str) -> BusClient:
            user = node_user(who[5:]) if who.startswith("node:") else who
            client = await connect_to_store(server.store, user)
            clients.append(client)
            return client

        await ensure_streams(await open_("admin"))
        yield open_
        for client in clients:
            await client.close()


async def _refused(nc: BusClient, subject: str, data: bytes = b"{}", headers: dict[str, str] | None = None) -> bool:
    """Whether the server refuses this publish: it says so, and nothing is stored."""
    before = nc.problems["Error"]
    await nc.publish(subject, data, reply=nc.new_inbox(), headers=headers)
    await nc.flush()
    for _ in range(200):
        await asyncio.sleep(0.01)
        if nc.problems["Error"] > before:
            break
    return nc.problems["Error"] > before and "permissions violation" in nc.last_problem


async def _deaf(nc: BusClient, subject: str) -> bool:
    before = nc.problems["Error"]
    await nc.subscribe(subject)
    await nc.flush()
    for _ in range(200):
        await asyncio.sleep(0.01)
        if nc.problems["Error"] > before:
            break
    return nc.problems["Error"] > before and "permissions violation for subscription" in nc.last_problem


async def test_a_node_speaks_for_itself_and_for_nobody_else(open_as: Open) -> None:
    nc, admin = await open_as(f"node:{NODE}"), await open_as("admin")
    publisher = Publisher(nc, ack_s_max=2)
    await publisher.publish(telemetry_node(NODE, "heartbeat"), b"{}")
    await publisher.publish(telemetry_job(NODE, "gpt", "progress"), b"{}")
    assert await publisher.drain() == [] and publisher.acknowledged == 2
    assert await JetStreamLog(admin, TELEMETRY_NODE).last_sequence("tn.*.*.*") > 0
    for subject in (
        telemetry_node(OTHER, "heartbeat"), telemetry_job(OTHER, "gpt", "progress"), "tn.1.x.heartbeat", "tn.1.tick",
        "tn.1.settings", "tick.second.1", f"{TICK_SCHEDULE}.1", "timer.x", "fired.j.k", command(OTHER, "stop"), command(NODE, "stop"),
        *(ledger("gpt", r, "k") for r in (*ROLES, "timer", "node")), "deadletter.x", "$KV.LEASES.x", "ks.changelog.x",
        inbox_prefix("decider") + ".x", "$JS.ACK.LEDGER.c.1.1.1.1.0",
    ):  # fmt: skip
        assert await _refused(nc, subject), subject


async def test_a_node_hears_its_own_commands_and_nothing_else(open_as: Open) -> None:
    nc, actuator = await open_as(f"node:{NODE}"), await open_as("actuator")
    heard = await nc.subscribe(command(NODE, ">"))
    await nc.flush()
    await actuator.publish(command(NODE, "stop"), b"now")
    assert (await heard.next_msg(30)).data == b"now"
    for subject in (
        command(OTHER, ">"),
        "command.>",
        ">",
        "ledger.>",
        "telemetry.>",
        inbox_prefix("decider") + ".>",
        "_INBOX.>",
        "$JS.>",
    ):
        assert await _deaf(nc, subject), subject


async def test_a_node_has_no_interface_to_streams(open_as: Open) -> None:
    nc = await open_as(f"node:{NODE}")
    for call in (
        "INFO", f"STREAM.INFO.{LEDGER}", f"STREAM.DELETE.{TELEMETRY_NODE}", f"STREAM.PURGE.{TELEMETRY_NODE}",
        f"STREAM.MSG.GET.{LEDGER}", f"CONSUMER.CREATE.{LEDGER}", f"DIRECT.GET.{LEDGER}", f"CONSUMER.MSG.NEXT.{LEDGER}.x",
    ):  # fmt: skip
        assert await _refused(nc, f"$JS.API.{call}"), call


async def test_a_node_cannot_use_headers_against_the_stream(open_as: Open) -> None:
    """On a stream that allows schedules, the first of these wipes it, and the next speak for others (decisions/010)."""
    nc, admin = await open_as(f"node:{NODE}"), await open_as("admin")
    for stream, subject in ((TELEMETRY_NODE, telemetry_node(NODE, "k")), (TELEMETRY_JOB, telemetry_job(NODE, "j", "k"))):
        log = JetStreamLog(nc, stream)
        await log.append(subject, b"kept")
        for headers in (
            {"Nats-Rollup": "all"},
            {"Nats-Rollup": "sub"},
            {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "tn.1.tick"},
            {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": telemetry_node(OTHER, "k")},
            {"Nats-TTL": "1s"},
            {"Nats-Stream-Source": f"{CLOCK} 99999 > >"},
            {"Nats-Expected-Stream": LEDGER},
        ):
            with pytest.raises(LogError) as error:
                await log.append(subject, b"evil", headers=headers)
            assert not isinstance(error.value, LogUnavailable), headers
        kept = [r.data async for r in JetStreamLog(admin, stream).read(subjects=["tn.*.*.*", "tj.*.*.*.*"])]
        assert kept == [b"kept"]


@pytest.mark.parametrize("who", ["detector", "decider", "actuator", "operator", "observer"])
async def test_a_role_writes_its_own_part_of_the_ledger_and_reads_everything(open_as: Open, who: str) -> None:
    nc = await open_as(who)
    log = JetStreamLog(nc, LEDGER)
    if who != "observer":
        await log.append(ledger("gpt", who, "k"), b"{}", expect=Expect(f"ledger.*.{who}.*", 0))
    for other in (*ROLES, "timer", "node"):
        if other != who:
            assert await _refused(nc, ledger("gpt", other, "k")), other
    assert [r.subject async for r in log.read()] == ([ledger("gpt", who, "k")] if who != "observer" else [])
    assert await JetStreamLog(nc, TELEMETRY_NODE).last_sequence() >= 0
    bucket = await nc.jetstream().key_value("LEASES")
    assert (await bucket.status()).bucket == "LEASES"


@pytest.mark.parametrize("who", [r for r in ROLES if r != "admin"])
async def test_nobody_but_the_admin_changes_a_stream(open_as: Open, who: str) -> None:
    nc = await open_as(who)
    for call in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "RESTORE", "SNAPSHOT", "LEADER.STEPDOWN"):
        for stream in (LEDGER, TELEMETRY_NODE, TIMERS, CLOCK):
            assert await _refused(nc, f"$JS.API.STREAM.{call}.{stream}"), call
    for subject in (
        telemetry_node(NODE, "k"),
        "tick.second.1",
        f"{TICK_SCHEDULE}.1",
        "tn.1.tick",
        "fired.j.k",
        "$SYS.REQ.SERVER.PING",
    ):
        assert await _refused(nc, subject), subject
    for subject in (inbox_prefix("admin") + ".>", "_INBOX.>", ">", "command.>"):
        assert await _deaf(nc, subject), subject


async def test_timers_are_the_deciders_and_fire_into_the_ledger_alone(open_as: Open) -> None:
    decider = await open_as("decider")
    await JetStreamTimers(decider).set_timer("t", 1, "j", "k", b"{}")
    records = JetStreamLog(decider, LEDGER).read(follow=True)
    async with asyncio.timeout(30):
        assert (await anext(records)).subject == ledger("j", "timer", "k")
    await records.aclose()  # type: ignore[attr-defined]
    for who in ("detector", "actuator", "operator", "observer"):
        assert await _refused(await open_as(who), "timer.x")
    for target in (ledger("j", "decider", "k"), "tn.1.tick", telemetry_node(NODE, "k")):
        headers = {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": target}
        reply = await decider.request("timer.y", b"{}", timeout=2, headers=headers)
        assert json.loads(reply.data)["error"]["description"] == "message schedules target is invalid", target


async def test_not_even_the_admin_takes_from_the_ledger(open_as: Open) -> None:
    admin = await open_as("admin")
    await JetStreamLog(admin, LEDGER).append(ledger("j", "operator", "k"), b"{}")
    assert "error" in await api(admin, f"STREAM.PURGE.{LEDGER}", {})
    assert "error" in await api(admin, f"STREAM.MSG.DELETE.{LEDGER}", {"seq": 1})
    with pytest.raises(LogError):
        await JetStreamLog(admin, LEDGER).append(ledger("j", "operator", "k"), b"{}", headers={"Nats-Rollup": "all"})
    assert await JetStreamLog(admin, LEDGER).last_sequence() == 1


async def test_a_consumer_does_not_carry_a_message_into_a_nodes_commands(open_as: Open) -> None:
    """A push consumer delivers to a subject of its maker's choice, which the server doesn't hold against the maker's permissions.
    What it delivers keeps the subject under which it is stored, and no stream stores a command: so agents look at the subject."""
    detector, node_ = await open_as("detector"), await open_as(f"node:{NODE}")
    heard = await node_.subscribe(command(NODE, "stop"))
    await node_.flush()
    await JetStreamLog(detector, LEDGER).append(ledger("j", "detector", "k"), b'{"verb":"stop"}')
    config = {"deliver_subject": command(NODE, "stop"), "deliver_policy": "all", "ack_policy": "none"}
    answer = await api(detector, f"CONSUMER.CREATE.{LEDGER}", {"stream_name": LEDGER, "config": config})
    assert "error" not in answer
    try:
        message = await heard.next_msg(1)
    except TimeoutError:
        return
    assert message.subject == ledger("j", "detector", "k") and message.reply.startswith("$JS.ACK.")


async def test_a_dead_letter_can_be_written_by_processors(open_as: Open) -> None:
    for who in ("detector", "decider", "actuator"):
        await JetStreamLog(await open_as(who), DEADLETTER).append("deadletter.LEDGER.x", b"{}")


async def test_without_a_key_or_with_another_servers_there_is_a_sentence(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "bus") as server:
        stranger = ensure_key(tmp_path / "keys", role("decider"))
        for options in ({}, stranger.connect_options(), {"user": "admin", "password": "admin"}):
            with pytest.raises(LogUnavailable, match=r"refused this key; use the one"):
                await connect(server.url, options, wait_s=30)
        url = server.url
    with pytest.raises(LogUnavailable, match="out of reach"):
        await connect(url, {}, wait_s=0.3)


# -- keys and files ---------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_its_seed_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    key = ensure_key(folder, identity_of(node_name=NODE))
    assert ensure_key(folder, identity_of(node_name=NODE)) == key
    assert re.fullmatch(r"U[A-Z2-7]{55}", key.public_key)
    assert stat.S_IMODE(key.seed_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    seed = key.seed_file.read_text().strip()
    assert seed.startswith("SU") and seed not in key.permissions() and seed not in repr(key)
    assert '"telemetry.n%201%2E%2A.>"' in key.permissions()
    assert [p.name for p in folder.iterdir()] == [key.seed_file.name]
    assert ensure_key(folder, node("x" * 400)).public_key != key.public_key


def test_a_seed_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    key = ensure_key(tmp_path, role("decider"))
    key.seed_file.chmod(0o640)
    with pytest.raises(KeyProblem, match=r"chmod 600"):
        public_key_of(key.seed_file)
    key.seed_file.chmod(0o600)
    for junk in (b"", b"SUAAAA", b"\xff" * 58, key.seed_file.read_bytes()[:-8]):
        key.seed_file.write_bytes(junk)
        with pytest.raises(KeyProblem, match="no nkey seed"):
            public_key_of(key.seed_file)
    with pytest.raises(FileNotFoundError):
        public_key_of(tmp_path / "absent.nk")


def test_a_name_for_one_of_the_two() -> None:
    assert identity_of(role_name="observer").user == "observer"
    for wrong in ({}, {"node_name": "a", "role_name": "decider"}, {"role_name": "root"}):
        with pytest.raises(ValueError):
            identity_of(**wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_listen(host, False, False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com", "", "127.0.0.1.example.com"])
def test_beyond_loopback_a_server_needs_credentials_and_tls(host: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafeListen, match="without credentials and TLS"):
        check_listen(host, False, False)
    with pytest.raises(UnsafeListen, match="without TLS"):
        check_listen(host, True, False)
    with pytest.raises(UnsafeListen, match="without credentials: make keys"):
        check_listen(host, False, True)
    check_listen(host, True, True)
    with pytest.raises(UnsafeListen):
        EmbeddedServer(tmp_path, listen=host)


def _certificate(folder: Path) -> Tls:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command_ = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(
        [*command_, "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    return Tls(cert, key)


async def test_with_tls_the_bus_is_spoken_to_over_tls_only(tmp_path: Path) -> None:
    import ssl

    try:
        tls = _certificate(tmp_path)
    except FileNotFoundError:
        pytest.skip("openssl is not here to make a certificate")
    with EmbeddedServer(tmp_path / "bus", tls=tls) as server:
        assert server.url.startswith("tls://")
        context = ssl.create_default_context(cafile=str(tls.cert_file))
        nc = await connect(server.url, server.role_options("admin"), tls=context)
        await ensure_streams(nc)
        await nc.close()
        with pytest.raises(LogUnavailable):
            await connect(server.url, server.role_options("admin"), tls=ssl.create_default_context(), wait_s=1)


def test_a_clusters_configuration_is_one_that_the_server_takes(tmp_path: Path) -> None:
    keys = [ensure_key(tmp_path, identity) for identity in (role("admin"), role("decider"), node(NODE))]
    text = server_configuration(keys, server="n2")
    assert "sync_interval: always" in text and "verify: true" in text
    for key in keys:
        assert key.public_key in text and key.seed_file.read_text().strip() not in text
    tls = tmp_path / "x.pem"
    tls.write_text("")
    path = tmp_path / "server.conf"
    path.write_text(
        re.sub(r'"<[^>]*(certificate|key|authority)[^>]*>"', json.dumps(str(tls)), text)
        .replace("<host", "host")
        .replace(">:", ":")
    )
    said = subprocess.run([find_binary(), "-t", "-c", path], capture_output=True, text=True)
    # It reads the whole of it and stops only at the certificate that we did not give.
    assert "PEM" in said.stderr or "certificate" in said.stderr or "valid" in said.stdout + said.stderr, said.stderr


async def test_tls_is_meant_and_a_password_is_not_said(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "bus") as server:
        with pytest.raises(LogUnavailable, match="it speaks no TLS, which tls:// asks for"):
            await connect(server.url.replace("nats://", "tls://"), server.role_options("admin"), wait_s=3)
    with pytest.raises(LogUnavailable) as error:
        await connect("nats://ann:s3cret@127.0.0.1:1", wait_s=0.5)
    assert "s3cret" not in str(error.value) and "nats://127.0.0.1:1" in str(error.value)


@pytest.mark.parametrize("words", [["hold", "--reason", "x"], ["status"]])
async def test_the_key_of_another_role_is_said_to_be_one(tmp_path: Path, words: list[str]) -> None:
    with EmbeddedServer(tmp_path / "bus") as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)
        await nc.close()
        where = ["--url", server.url, "--key", str(tmp_path / "bus" / "keys" / "detector.nk")]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*words, *where])
    assert isinstance(done.exception, Refused) and "this key is not the " in str(done.exception), (done.output, done.exception)


def test_the_servers_configuration_is_of_all_keys_in_the_folder(tmp_path: Path) -> None:
    folder, config = tmp_path / "keys", tmp_path / "nats.conf"
    for words in ([], ["--node", "gpu-1", "--node", "a/b é"]):
        done = CliRunner().invoke(app, ["keys", str(folder), *words, "--config", str(config), "--json"])
        assert done.exit_code == 0, done.output
    (folder / "other.nk").write_text("no key of ours")
    assert [key.identity for key in keys_in(folder)] == [*map(role, sorted(ROLES)), node("a/b é"), node("gpu-1")]
    text = config.read_text()
    assert all(key.public_key in text for key in keys_in(folder)) and text.count("nkey:") == len(ROLES) + 2
    (folder / "observer.nk").chmod(0o644)
    done = CliRunner().invoke(app, ["keys", str(folder), "--node", "gpu-3", "--config", str(config)])
    assert isinstance(done.exception, KeyProblem) and "chmod 600" in str(done.exception)


async def test_a_seed_file_alone_is_enough_to_connect(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "bus", nodes=[NODE]) as server:
        seed = server.key(node(NODE)).seed_file
        nc = await connect_with_seed(server.url, seed)
        assert await _deaf(nc, "telemetry.>")
        await nc.close()
        assert not os.environ.get("KEEPSTEP_SEED")


async def test_a_request_that_nobody_waits_for_fails_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    client = BusClient()
    waited: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    client._resp_map = {"waited": waited, "left": asyncio.get_running_loop().create_future()}
    client.fail_requests()
    client._resp_map.clear()
    with pytest.raises(StaleConnectionError):
        await waited
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records
