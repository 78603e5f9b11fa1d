"""What only the real log can show: history that changed under a reader, large messages within bounds, many readers, slow ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import nats
import pytest

import infra.jetstream as jetstream
from events.ports import LEDGER, TELEMETRY_NODE, LogError, LogUnavailable
from events.subjects import ledger, telemetry_node
from infra.bus import BusClient, connect, decode_headers, encode_headers, header
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog, LogWentBack, Publisher, parse_ack
from infra.streams import api, configurations, ensure, ensure_streams


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "bus") as server:
        yield server


@pytest.fixture
async def nc(server: EmbeddedServer) -> AsyncIterator[BusClient]:
    nc = await connect(server.url, server.role_options("admin"))
    await ensure_streams(nc)
    yield nc
    await nc.close()


async def _fill(nc: BusClient, n: int, size: int = 10) -> None:
    publisher = Publisher(nc)
    for i in range(n):
        await publisher.publish(telemetry_node("n", "k"), b"%06d" % i + b"x" * size)
    assert await publisher.close() == []


@pytest.mark.parametrize("before", [3, 0])
async def test_history_that_changed_under_a_follower_is_noticed_not_believed(nc: BusClient, before: int) -> None:
    log = JetStreamLog(nc, LEDGER)
    for i in range(3):
        await log.append(ledger("j", "detector", "k"), b"old %d" % i)
    async with aclosing(log.read(follow=True)) as records:  # type: ignore[type-var]
        async with asyncio.timeout(30):
            for _ in range(3):
                await anext(records)
            await api(nc, f"STREAM.DELETE.{LEDGER}", {})
            await ensure(nc, next(c for c in configurations() if c["name"] == LEDGER))
            for i in range(before):
                await log.append(ledger("j", "detector", "k"), b"new %d" % i)
            with pytest.raises(LogWentBack, match="another message at 3" if before else "ends at 0, before 3"):
                await anext(records)


async def test_a_reader_whose_consumer_is_deleted_goes_on_where_it_was(nc: BusClient) -> None:
    await _fill(nc, 3000)
    log, seen = JetStreamLog(nc, TELEMETRY_NODE), []
    async with asyncio.timeout(20):
        async for record in log.read(subjects=["tn.*.*.*"]):
            seen.append(record.data)
            if len(seen) in (700, 1500):
                for name in (await api(nc, f"CONSUMER.NAMES.{TELEMETRY_NODE}"))["consumers"]:
                    await api(nc, f"CONSUMER.DELETE.{TELEMETRY_NODE}.{name}")
    assert [int(d[:6]) for d in seen] == list(range(3000))


async def test_what_waits_in_memory_is_bounded_in_messages_and_bytes(nc: BusClient, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[tuple[int, int]] = []
    take = jetstream._Consumer._take

    def spy(self: jetstream._Consumer, *message: object) -> None:
        take(self, *message)  # type: ignore[arg-type]
        waiting.append((len(self._waiting), self._bytes))

    monkeypatch.setattr(jetstream._Consumer, "_take", spy)
    monkeypatch.setattr(jetstream, "BATCH_BYTES_MAX", 1 << 21)
    await _fill(nc, 40, 900_000)
    await _fill(nc, 4000)
    n = 0
    async for _ in JetStreamLog(nc, TELEMETRY_NODE).read(subjects=["tn.*.*.*"]):
        n += 1
        if n % 100 == 1:
            await asyncio.sleep(0.01)  # a slow reader
    assert n == 4040
    assert max(messages for messages, _ in waiting) <= 2 * jetstream.BATCH
    assert max(size for _, size in waiting) <= 3 << 21


async def test_readers_leave_no_consumers_behind(nc: BusClient) -> None:
    await _fill(nc, 10)
    log = JetStreamLog(nc, TELEMETRY_NODE)
    before = len((await api(nc, f"CONSUMER.NAMES.{TELEMETRY_NODE}"))["consumers"] or ())
    for _ in range(3):
        assert len([r async for r in log.read(subjects=["tn.*.*.*"])]) == 10
        async with aclosing(log.read(follow=True)) as records:  # type: ignore[type-var]
            await anext(records)
    # The server deletes a consumer in its own time, after the reader's request.
    for _ in range(100):
        await nc.flush()
        left = len((await api(nc, f"CONSUMER.NAMES.{TELEMETRY_NODE}"))["consumers"] or ())
        if left == before:
            break
        await asyncio.sleep(0.05)
    assert left == before
    assert not nc.on_reconnect and not nc._takers


async def test_a_plain_nats_client_serves_as_well(server: EmbeddedServer, nc: BusClient) -> None:
    plain = await nats.connect(server.url, **server.role_options("admin"))
    log = JetStreamLog(plain, LEDGER)
    for i in range(1200):
        await log.append(ledger("j", "detector", "k"), b"%d" % i, headers={"Keepstep-Held-Ns": "7"})
    records = [r async for r in log.read()]
    assert records == [r async for r in JetStreamLog(nc, LEDGER).read()]
    assert len(records) == 1200 and dict(records[0].headers) == {"Keepstep-Held-Ns": "7"}
    publisher = Publisher(plain)
    await publisher.publish(telemetry_node("n", "k"), b"")
    assert await publisher.close() == [] and publisher.acknowledged == 1
    await plain.close()


async def test_a_stream_that_is_not_there_and_a_closed_connection_are_sentences(nc: BusClient) -> None:
    for call in (JetStreamLog(nc, "NOWHERE").last_sequence(), anext(JetStreamLog(nc, "NOWHERE").read(follow=True))):
        with pytest.raises(LogError, match="has no stream NOWHERE; make the streams with `keepstep up`"):
            await call
    log = JetStreamLog(nc, LEDGER)
    await nc.close()
    for call in (log.append(ledger("j", "detector", "k"), b""), log.last_sequence(), anext(log.read(follow=True))):
        with pytest.raises(LogUnavailable):
            await asyncio.wait_for(call, 10)


def test_headers_come_off_the_wire_as_nats_py_would_read_them() -> None:
    raw = b"NATS/1.0\r\nKeepstep-Held-Ns: 12\r\nNats-Msg-Id: a:b\r\nEmpty:\r\nx: a:b \r\n\r\n"
    assert decode_headers(raw) == {"Keepstep-Held-Ns": "12", "Empty": "", "x": "a:b"}
    assert header(raw, b"Nats-Msg-Id") == "a:b" and header(raw, b"Absent") == ""
    assert decode_headers(b"NATS/1.0 409 Batch Completed\r\nNats-Pending-Messages: 3\r\n\r\n") == {
        "Status": "409",
        "Description": "Batch Completed",
    }
    assert decode_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503", "Description": ""}
    assert decode_headers(b"") == {} and decode_headers(b"NATS/1.0\r\n\xff\xfe: \xff\r\n\r\n")
    for headers in ({}, {"a": "b", "c": "d"}, {"Status": "100", "Description": "Idle"}):
        assert decode_headers(encode_headers(headers)) == headers


def test_an_acknowledgement_subject_is_read_in_whole_nanoseconds() -> None:
    assert parse_ack("$JS.ACK.LEDGER.c.1.22.3.1767225600123456789.4") == (22, 3, 1767225600123456789, 4)
    assert parse_ack("$JS.ACK._.hash.LEDGER.c.1.22.3.1767225600123456789.4") == (22, 3, 1767225600123456789, 4)
    assert parse_ack("$JS.ACK._.hash.LEDGER.c.1.22.3.1767225600123456789.4.rnd") == (22, 3, 1767225600123456789, 4)
