"""Recordings: what is read back is what was stored, byte for byte; what is cut off is said and costs only itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, LogError, Record
from events.subjects import PARTITIONS, ledger, telemetry_node
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog, connect
from infra.memory import MemoryBus
from infra.recording import (
    BadRecording,
    RecordedLog,
    StreamWriter,
    decode,
    encode,
    open_text,
    read_file,
    read_stream,
    record,
    record_logs,
    recorded_streams,
)
from infra.streams import ensure_streams

_TEXT = st.text(max_size=40)
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | _TEXT, lambda c: st.dictionaries(_TEXT, c, max_size=3)
)
_DATA = st.one_of(
    st.binary(max_size=200),
    _TEXT.map(lambda t: t.encode("utf-8", "replace")),
    st.dictionaries(_TEXT, _JSON, max_size=3).map(lambda v: json.dumps(v, ensure_ascii=False).encode("utf-8", "replace")),
    st.sampled_from(
        [b"{}", b'{"a":NaN}', b'{"a":1}\n', b'{"a":1}}', b'{"a":"\\u0000"}', b'{"a":1,"a":2}', b"{" * 2000 + b"}" * 2000]
    ),
)
_SUBJECT = st.one_of(st.sampled_from(["ledger.j.detector.k", "tn.3.n%201.k"]), _TEXT)


@given(
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    _SUBJECT,
    _DATA,
    st.dictionaries(st.one_of(st.just("Keepstep-Held-Ns"), _TEXT), _TEXT, max_size=3),
)
def test_a_line_gives_back_the_same_record(
    sequence: int, time_ns: int, subject: str, data: bytes, headers: dict[str, str]
) -> None:
    before = Record("S", sequence, time_ns, subject, data, headers)
    line = encode(before)
    assert b"\n" not in line
    assert decode("S", line) == before
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON that DuckDB reads"))


def _records(n: int) -> list[Record]:
    return [
        Record(LEDGER, 2 * i + 1, 1_700_000_000_000_000_000 + i, ledger(f"j{i % 3}", "detector", "k"), f'{{"n":{i}}}'.encode())
        for i in range(n)
    ]


def _write(folder: Path, records: list[Record]) -> Path:
    with StreamWriter(folder, LEDGER) as writer:
        for each in records:
            writer.write(each)
    return writer.path


async def test_a_recorded_log_reads_like_a_log(tmp_path: Path) -> None:
    records = _records(10_000)
    _write(tmp_path, records)
    log = RecordedLog(tmp_path, LEDGER)
    assert [r async for r in log.read()] == records
    assert [r async for r in log.read(after=19_000)] == records[9500:]
    assert [r.sequence async for r in log.read(subjects=["ledger.j1.*.*"], after=19_980)] == [19983, 19989, 19995]
    assert await log.last_sequence() == 19_999
    assert await log.last_sequence("ledger.j1.>") == 19_995
    assert await log.last_sequence("ledger.nobody.>") == 0
    assert log.losses == []
    with pytest.raises(LogError, match="recording"):
        await log.append("ledger.j.detector.k", b"")
    assert list(read_stream(tmp_path, LEDGER)) == list(read_stream(log._path, LEDGER)) == records


def test_events_stand_in_the_line_as_json_and_text_readers_can_open_it(tmp_path: Path) -> None:
    path = _write(tmp_path, _records(3))
    with open_text(path) as file:
        lines = [json.loads(line) for line in file]
    assert [line["e"] for line in lines] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert list(lines[0]) == ["seq", "t", "s", "e"]


def test_a_file_cut_off_anywhere_keeps_whole_lines_and_says_what_it_lost(tmp_path: Path) -> None:
    records = _records(9000)
    path = _write(tmp_path, records)
    whole = path.read_bytes()
    for cut in (1, 5, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        said: list[str] = []
        kept = list(read_file(path, said.append))
        assert kept == records[: len(kept)]
        assert said and all("cut off" in sentence for sentence in said), (cut, said)
        if cut > len(whole) // 2 - 1:
            assert len(kept) >= 4096, "whole frames before the cut are kept"


def test_damage_in_the_middle_is_said_and_keeps_what_is_before(tmp_path: Path) -> None:
    records = _records(9000)
    path = _write(tmp_path, records)
    content = bytearray(path.read_bytes())
    content[-200:-100] = bytes(100)
    path.write_bytes(content)
    said: list[str] = []
    kept = list(read_file(path, said.append))
    assert 4096 <= len(kept) < 9000 and kept == records[: len(kept)]
    assert said


def test_lines_that_are_no_records_are_left_out_and_said(tmp_path: Path) -> None:
    good = [encode(r) for r in _records(4)]
    lines = [
        good[0],
        b"",
        b"nonsense",
        b'{"seq":"x","t":1,"s":"a","d":""}',
        good[2],
        good[1],
        b"[" * 10_000,
        b'{"seq":9}',
        good[3],
    ]
    path = tmp_path / "LEDGER.jsonl.zst"
    path.write_bytes(zstandard.compress(b"\n".join(lines) + b"\n"))
    said: list[str] = []
    assert [r.sequence for r in read_file(path, said.append)] == [1, 5, 7]
    assert len(said) == 6 and all("left out" in sentence for sentence in said)


def test_the_writer_refuses_what_would_not_be_a_recording(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, LEDGER) as writer:
        writer.write(_records(2)[1])
        with pytest.raises(LogError, match="sequence order"):
            writer.write(_records(1)[0])
    for name in ("../LEDGER", "", "a/b"):
        with pytest.raises(BadRecording):
            StreamWriter(tmp_path, name)


def test_what_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    _write(tmp_path, _records(1))
    with pytest.raises(BadRecording, match=r"no recording of TELEMETRY_JOB \(streams there: LEDGER\)"):
        RecordedLog(tmp_path, TELEMETRY_JOB)
    with pytest.raises(FileNotFoundError):
        read_stream(tmp_path, TELEMETRY_JOB)
    assert recorded_streams(tmp_path) == [LEDGER]


async def test_a_running_recording_can_be_read_up_to_its_last_frame(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path, LEDGER)
    records = _records(100)
    for each in records[:50]:
        writer.write(each)
    writer.flush()
    for each in records[50:]:
        writer.write(each)
    said: list[str] = []
    assert list(read_file(writer.path, said.append)) == records[:50] and not said
    writer.close()
    assert list(read_file(writer.path)) == records


async def test_memory_logs_are_recorded(tmp_path: Path) -> None:
    bus = MemoryBus(ticks=True)
    bus.advance(2_000_000_000)
    await bus.log(TELEMETRY_NODE).append(telemetry_node("n", "heartbeat"), b"\xff", headers={"Keepstep-Held-Ns": "5"})
    counts = await record_logs([bus.log(LEDGER), bus.log(TELEMETRY_NODE)], tmp_path)
    assert counts == {LEDGER: 0, TELEMETRY_NODE: 2 * PARTITIONS + 1}
    assert [r async for r in RecordedLog(tmp_path, TELEMETRY_NODE).read()] == bus.records(TELEMETRY_NODE)
    assert [r async for r in RecordedLog(tmp_path, LEDGER).read()] == []


async def test_a_bus_is_recorded_as_it_is(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "bus") as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)
        log = JetStreamLog(nc, LEDGER)
        bodies = [b'{"id":"1"}', b"\xff\x00", b"", "ž\n".encode(), b'{"loss":"NaN"}', b"after the end"]
        await asyncio.gather(*(log.append(ledger("j", "detector", f"k{i}"), body) for i, body in enumerate(bodies)))
        await log.append(ledger("j", "operator", "k"), b"{}", headers={"Keepstep-Held-Ns": "12"}, message_id="m")
        seen: list[int] = []
        counts = await record(nc, tmp_path / "rec", [LEDGER], {LEDGER: 5}, seen.append)
        assert counts == {LEDGER: 5} and seen == [5]
        assert await record(nc, tmp_path / "all") and recorded_streams(tmp_path / "all") == sorted(
            [LEDGER, TELEMETRY_JOB, TELEMETRY_NODE]
        )
        live = [r async for r in log.read()]
        assert [r async for r in RecordedLog(tmp_path / "rec", LEDGER).read()] == live[:5]
        assert [r async for r in RecordedLog(tmp_path / "all", LEDGER).read()] == live
        await nc.close()
