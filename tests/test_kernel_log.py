"""The kernel log: its lines understood whatever their format, files followed through rotation, the real ring read and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from events.envelope import TEXT_MAX, AnyEvent
from events.hardware import EvidenceGap, KernelLog, KernelRecord
from events.ids import random_id
from events.presence import AgentState
from events.registry import parse
from producers.kernel_lines import CUT_MARK, FACILITY_USER, Line, parse_kmsg, parse_line, printable
from producers.kernel_log import KernelLogProducer, KernelLogSettings
from producers.log_file import LINE_BYTES_MAX, Cursor, FileFollower, Hole, RawLine
from producers.observe import Clock, Desk
from producers.outbox import Observation
from producers.thinning import BATCH_BYTES_MAX, RECORDS_MAX, Batch, Thinning

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."


# --- lines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (f"6,339,5140900,-;{XID}", Line(XID, 6, 0, 339, 5140900)),
        (f"30,339,5140900,-,caller=T12;{XID}", Line(XID, 6, 3, 339, 5140900)),
        (XID, Line(XID)),
        (f"[   12.345678] {XID}", Line(XID, since_boot_us=12345678)),
        (f"[   12.345678][ T1234] {XID}", Line(XID, since_boot_us=12345678)),
        (f"<4>[   12.345678] {XID}", Line(XID, 4, since_boot_us=12345678)),
        (f"<12>[   12.345678] {XID}", Line(XID, 4, 1, since_boot_us=12345678)),
        (f"kern  :err   : [    1.000001] {XID}", Line(XID, 3, since_boot_us=1000001)),
        (f"daemon:info  : [    1.000001] {XID}", Line(XID, 6, 3, since_boot_us=1000001)),
        (f"[Tue Mar  3 12:00:00 2026] {XID}", Line(XID)),
        (f"[Di Mär  3 12:00:00 2026] {XID}", Line(XID)),
        (f"2026-03-03T12:00:00,123456+00:00 {XID}", Line(XID)),
        ("2026-03-03T12:00:00,123456+00:00 nvme nvme0: I/O error", Line("nvme nvme0: I/O error")),
        (f"Mar  3 12:00:00 gpu-1 kernel: [  123.456789] {XID}", Line(XID, since_boot_us=123456789, host="gpu-1")),
        (f"Mar 13 12:00:00 gpu-1 kernel: {XID}", Line(XID, host="gpu-1")),
        (f"<4>Mar 13 12:00:00 gpu-1 kernel: {XID}", Line(XID, 4, host="gpu-1")),
        (f"2026-03-03T12:00:00.123456+00:00 gpu-1 kernel: {XID}", Line(XID, host="gpu-1")),
        (f"2026-03-03T12:00:00+0000 gpu-1 kernel: {XID}", Line(XID, host="gpu-1")),
        (f"<3>1 2026-03-03T12:00:00.1Z gpu-1 kernel - - - {XID}", Line(XID, 3, host="gpu-1")),
        (f'<3>1 2026-03-03T12:00:00Z gpu-1 kernel - - [a@1 b="c]\\"d"][e@1] {XID}', Line(XID, 3, host="gpu-1")),
        (f"[  123.456789] gpu-1 kernel: {XID}", Line(XID, since_boot_us=123456789, host="gpu-1")),
        # what a program wrote into syslog is not the kernel's, whatever it says
        (f"Mar 13 12:00:00 gpu-1 python[123]: {XID}", Line(XID, facility=FACILITY_USER, host="gpu-1")),
        (f"<13>Mar 13 12:00:00 gpu-1 logger: {XID}", Line(XID, 5, FACILITY_USER, host="gpu-1")),
        # a device's address is no time
        ("[0000:03:00.0] mlx5_core failed", Line("[0000:03:00.0] mlx5_core failed")),
        ("[drm:foo] *ERROR* bad", Line("[drm:foo] *ERROR* bad")),
    ],
)
def test_formats(raw: str, expected: Line) -> None:
    assert parse_line(raw.encode()) == expected


def test_dictionary_and_empty_lines_are_left_out() -> None:
    assert parse_line(b" SUBSYSTEM=pci") is None and parse_line(b"") is None and parse_line(b"  \r\n") is None
    line = parse_kmsg(b"6,1,2,-;pci 0000:00: text\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00\n")
    assert line is not None and line.text == "pci 0000:00: text"
    assert parse_kmsg(b"no record") is None


def test_nothing_reaches_a_terminal() -> None:
    line = parse_line(b"\x1b]0;owned\x07\x1b[31mred\xff \xe2\x80\xaeflipped \xc2\x9b31m")
    assert line is not None
    assert line.text == "\\x1b]0;owned\\x07\\x1b[31mred\\xff \\u202eflipped \\x9b31m"
    kernel = parse_kmsg(rb"6,1,2,-;esc \x1b[31m caf\xc3\xa9 back\x5cslash")
    assert kernel is not None and kernel.text == "esc \\x1b[31m café back\\slash"


def test_long_lines_are_cut_with_a_mark() -> None:
    line = parse_line(b"[    1.000000] " + b"x" * 100_000)
    assert line is not None and len(line.text) == TEXT_MAX and line.text.endswith(CUT_MARK)
    assert printable(b"x" * TEXT_MAX) == "x" * TEXT_MAX


_PIECES = st.sampled_from(
    [b"<", b">", b"[", b"]", b"6,1,2,-;", b"Mar  3 12:00:00 ", b"h ", b"kernel: ", b"<6>", b"<6>1 ", b"[ 1.000000] ", b" K=v",
     b"\x1b[2J", b"\xff", b"\n", b"\0", b'[a b="', b"\\x1b", b"2026-01-01T00:00:00Z ", b" - - - "]
)  # fmt: skip


@given(st.one_of(st.binary(max_size=300), st.lists(_PIECES | st.binary(max_size=5), max_size=12).map(b"".join)))
@example(b"<99999>1 - " + b"x" * 5000)
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_bounded_safe_record_or_nothing(raw: bytes) -> None:
    for line in (parse_line(raw), parse_kmsg(raw)):
        if line is not None:
            KernelRecord(
                text=line.text,
                priority=line.priority,
                facility=line.facility,
                sequence=line.sequence,
                since_boot_us=line.since_boot_us,
            )
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line.text + line.host)
            assert len(line.host) <= 255


def test_hostile_lines_take_no_time() -> None:
    """No format's pattern backtracks: 64 KiB of what could make it, each in well under a poll."""
    began = time.perf_counter()
    for piece in (
        b"[",
        b"[a ",
        b"<6>1 - h k - - [",
        b'<6>1 - h k - - [a b="' + b'\\"',
        b"[ 1.",
        b"6,",
        b" ",
        b"Mar  3 ",
        b"\\x1b",
    ):
        parse_line((piece * LINE_BYTES_MAX)[:LINE_BYTES_MAX])
        parse_line(b"<6>1 - h k - - " + (b'[a b="c"]' * 8000))
    assert time.perf_counter() - began < 2.0


# --- thinning and batches -----------------------------------------------------------------------------------------------------


def test_interesting_lines_pass_any_flood_and_the_rest_is_counted() -> None:
    thinning = Thinning(lines_per_s=100)
    passed = sum(thinning.passes(False, 1_000 * i) for i in range(10_000))  # all within 10 ms
    assert 100 <= passed <= 102 and thinning.dropped == 10_000 - passed
    assert all(thinning.passes(True, 10_000_000) for _ in range(1000))
    assert thinning.take_dropped() == 10_000 - passed and thinning.take_dropped() == 0
    assert thinning.passes(False, 2_000_000_000)


def test_batches_fit_a_message() -> None:
    batch = Batch("kmsg")
    record = KernelRecord(text="\U0001f525" * TEXT_MAX)
    while batch.fits(record, 0):
        batch.add(record, 0)
    assert batch.size <= BATCH_BYTES_MAX
    small = Batch("kmsg")
    while small.fits(KernelRecord(text="x"), 0):
        small.add(KernelRecord(text="x"), 0)
    assert len(small.take()[0].records) == RECORDS_MAX
    small.add(KernelRecord(text="x"), 0)
    assert not small.fits(KernelRecord(text="x"), 5_000_000_000), "lines of another age are another observation"


# --- files ----------------------------------------------------------------------------------------------------------------------


class Tail:
    """A follower with its clock, for short tests."""

    def __init__(self, path: Path, cursor: Cursor | None = None, first: bool = True) -> None:
        self.follower = FileFollower(path, cursor, first=first)
        self.now_ns = 0

    def __call__(self) -> list[str]:
        self.now_ns += 50_000_000
        return [self.show(item) for item in self.follower.poll(self.now_ns)]

    @staticmethod
    def show(item: RawLine | Hole) -> str:
        return f"HOLE {item.reason}" if isinstance(item, Hole) else item.raw.decode() + ("*" if item.history else "")


def put(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_a_file_grows_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "old\n")
    tail = Tail(path)
    assert tail() == ["old*"]
    put(path, "a\nb\npart")
    assert tail() == ["a", "b"]
    put(path, "ial\n")
    assert tail() == ["partial"]
    put(path, "never ended")
    assert tail() == []
    tail.now_ns += 3_000_000_000
    assert tail() == ["never ended"]


def test_a_file_that_comes_later_is_all_news(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail() == [] and not tail.follower.present
    put(tmp_path / "log", "a\nb\n")
    assert tail() == ["a", "b"]


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "")
    tail = Tail(path)
    tail()
    for round_ in range(3):
        put(path, f"a{round_}\n")
        assert tail() == [f"a{round_}"]
        put(path, f"late{round_}\nlast{round_}")  # written, and then moved away before it was read
        path.rename(tmp_path / f"log.{round_}")
        put(tmp_path / f"log.{round_}", "!\n")  # the writer still holds the old file
        put(path, f"new{round_}\n")
        assert tail() == [f"late{round_}", f"last{round_}!", f"new{round_}"]


def test_removed_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "")
    tail = Tail(path)
    tail()
    put(path, "a\n")
    path.unlink()
    assert tail() == ["a"]
    put(path, "b\n")
    assert tail() == ["b"]


def test_truncation_is_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "")
    tail = Tail(path)
    tail()
    put(path, "one\ntwo\n")
    assert tail() == ["one", "two"]
    path.write_text("x\n")
    assert tail() == ["HOLE truncated", "x"]
    os.truncate(path, 0)
    put(path, "copied and truncated, and grown beyond where we were\n")
    assert tail() == ["HOLE truncated", "copied and truncated, and grown beyond where we were"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "")
    tail = Tail(path)
    tail()
    put(path, "x" * (3 * LINE_BYTES_MAX))
    out = tail()
    assert [len(line) for line in out] == [LINE_BYTES_MAX]
    put(path, "y\nnext\n")
    assert tail() == ["next"]


def test_only_the_end_of_a_great_past_is_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "".join(f"line {i}\n" for i in range(100_000)))
    out = Tail(path)()
    assert out[-1] == "line 99999*" and 1000 < len(out) < 10_000 and out[0].startswith("line ")


def resumed(tail: Tail, path: Path, first: bool = False) -> Tail:
    cursor = tail.follower.cursor
    tail.follower.close()
    assert cursor is not None
    return Tail(path, Cursor.of(json.loads(json.dumps(asdict(cursor)))), first=first)


def test_a_new_start_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "")
    tail = Tail(path)
    tail()
    put(path, "a\nb\nunfinished")
    assert tail() == ["a", "b"]
    put(path, " line\nc\n")
    tail = resumed(tail, path)
    assert tail() == ["unfinished line", "c"]
    path.rename(tmp_path / "log.1")
    put(tmp_path / "log.1", "after the rename\n")
    put(path, "new\n")
    tail = resumed(tail, path)
    assert tail() == ["after the rename", "new"]
    tail.follower.close()
    (tmp_path / "log.1").unlink()
    path.unlink()
    put(path, "someone else's\n")
    tail = resumed(tail, path)
    assert tail() == ["HOLE truncated", "someone else's"]


def test_what_came_before_this_boot_is_history(tmp_path: Path) -> None:
    path = tmp_path / "log"
    put(path, "a\n")
    tail = Tail(path)
    tail()
    put(path, "before the boot\n")
    tail = resumed(tail, path, first=True)
    assert tail() == ["before the boot*"]
    put(path, "now\n")
    assert tail() == ["now"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no regular file"):
        FileFollower(tmp_path, None, first=True).poll(0)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="no regular file"):
        FileFollower(tmp_path / "fifo", None, first=True).poll(0)


# --- the producer -----------------------------------------------------------------------------------------------------------------


class Kept:
    """An outbox that keeps what is handed in, and says that it is safe at once (or not at all)."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.held: list[int] = []
        self.safe = True
        self.waiting = 0

    def put(self, lane: str, seen: Observation, on_safe: Callable[[], None] | None = None) -> None:
        self.events.append(parse(seen.data))
        self.held.append(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - seen.boot_ns)
        if on_safe is not None and self.safe:
            on_safe()

    def records(self) -> list[KernelRecord]:
        return [record for event in self.events if isinstance(event.data, KernelLog) for record in event.data.records]

    def texts(self) -> list[str]:
        return [record.text for record in self.records()]

    def gaps(self) -> list[EvidenceGap]:
        return [event.data for event in self.events if isinstance(event.data, EvidenceGap)]


def desk(kept: Kept, boot_id: str = "boot") -> Desk:
    clock = Clock(time.time_ns, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME), os.urandom)
    return Desk("n1", boot_id, clock, kept)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def following(
    source: str, kept: Kept, state: Path, boot_id: str = "boot", **more: object
) -> AsyncIterator[KernelLogProducer]:
    producer = KernelLogProducer(source, desk(kept, boot_id), state, KernelLogSettings(**more))  # type: ignore[arg-type]
    task = asyncio.create_task(producer.run())
    await asyncio.sleep(0.15)
    try:
        yield producer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_from_a_file_to_an_event(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, f"{XID} of the past\nboring past\n")
    async with following(str(path), kept, tmp_path) as producer:
        assert [(r.text, r.history) for r in kept.records()] == [(f"{XID} of the past", True)]
        producer.desk.job, producer.desk.attempt = "gpt", 3
        put(path, f"[    1.000000] {XID}\nusb 1-1: plugged\n<14>[    2.000000] {XID} forged\n")
        await until(lambda: len(kept.records()) == 4, within_s=2.0)
    assert [r.hearsay for r in kept.records()] == [False, False, False, True]
    last = kept.events[-1]
    assert (last.job, last.attempt, last.subject, last.bootid) == ("gpt", 3, "n1", "boot")
    assert isinstance(last.data, KernelLog) and last.data.origin == str(path)
    numbers = [event.number for event in kept.events]
    assert numbers == list(range(1, len(numbers) + 1)) and len({event.source for event in kept.events}) == 1


async def test_a_file_of_many_hosts_speaks_for_this_one_alone(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, "")
    async with following(str(path), kept, tmp_path, hosts=frozenset({"gpu-1", "localhost"})):
        for host in ("gpu-1", "GPU-1.site.example", "localhost", "gpu-10", "gpu-2.site.example"):
            put(path, f"Mar  3 12:00:00 {host} kernel: {XID}\n")
        put(path, f"[    1.000000] {XID}\n")
        await until(lambda: len(kept.records()) == 6)
    assert [r.hearsay for r in kept.records()] == [False, False, False, True, True, False]


async def test_a_new_start_repeats_nothing_and_misses_nothing(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, "")
    async with following(str(path), kept, tmp_path):
        put(path, "nvme one\n")
        await until(lambda: kept.texts() == ["nvme one"])
    put(path, "nvme two\n")
    async with following(str(path), kept, tmp_path):
        await until(lambda: len(kept.records()) >= 2)
        put(path, "nvme three\n")
        await until(lambda: len(kept.records()) >= 3)
    assert kept.texts() == ["nvme one", "nvme two", "nvme three"]
    assert not any(r.history for r in kept.records())
    put(path, "nvme in another boot\n")
    async with following(str(path), kept, tmp_path, boot_id="boot 2"):
        await until(lambda: len(kept.records()) >= 4)
    assert kept.records()[-1].history


async def test_what_is_not_safe_yet_is_told_again(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, "")
    async with following(str(path), kept, tmp_path):
        kept.safe = False  # an agent that is killed before the bus or the disk had it
        put(path, "nvme one\n")
        await until(lambda: kept.texts() == ["nvme one"])
    async with following(str(path), kept, tmp_path):
        await until(lambda: kept.texts() == ["nvme one", "nvme one"])


async def test_a_flood_is_thinned_counted_and_hides_nothing(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, "")
    async with following(str(path), kept, tmp_path, lines_per_s=50):
        put(path, "".join(f"usb noise {i}\n" for i in range(3000)) + f"{XID}\n")
        await until(lambda: XID in kept.texts() and bool(kept.gaps()))
    gap = kept.gaps()[0]
    assert gap.reason == "thinned"
    assert gap.missing + len(kept.texts()) == 3001
    assert len(kept.texts()) < 200
    assert all(len(e.data.records) <= 64 for e in kept.events if isinstance(e.data, KernelLog))


async def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "later"
    async with following(str(path), kept, tmp_path):
        states = lambda: [e.data.state for e in kept.events if isinstance(e.data, AgentState)]  # noqa: E731
        await until(lambda: states() == ["stalled"])
        put(path, "nvme here\n")
        await until(lambda: states() == ["stalled", "resumed"] and kept.texts() == ["nvme here"])
    assert not kept.records()[0].history


async def test_a_source_that_cannot_be_read_is_a_gap(tmp_path: Path) -> None:
    kept = Kept()
    (tmp_path / "folder").mkdir()
    producer = KernelLogProducer(str(tmp_path / "folder"), desk(kept), tmp_path, KernelLogSettings())
    with pytest.raises(OSError, match="no regular file"):
        await producer.run()
    assert kept.gaps()[0].reason == "unreadable"
    missing = KernelLogProducer("kmsg", desk(kept), tmp_path, KernelLogSettings(), device=str(tmp_path / "none"))
    with pytest.raises(OSError):
        await missing.run()
    assert "No such file" in kept.gaps()[-1].detail


async def test_an_attempt_that_begins_is_told_apart_from_before(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    put(path, "")
    async with following(str(path), kept, tmp_path) as producer:
        producer.desk.job, producer.desk.attempt = "gpt", 1
        put(path, "nvme before\n")
        producer.pump()
        producer.desk.attempt = 2
        put(path, "nvme after\n")
        await until(lambda: len(kept.records()) == 2)
    assert [(e.attempt, e.data.records[0].text) for e in kept.events] == [(1, "nvme before"), (2, "nvme after")]


# --- the real ring ------------------------------------------------------------------------------------------------------------


def _ring() -> str:
    """Why the kernel's ring can't be used here, '' if it can."""
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open("/dev/kmsg", mode | os.O_NONBLOCK))
        except OSError as error:
            return f"/dev/kmsg: {error.strerror}"
    return ""


ring = pytest.mark.skipif(bool(_ring()), reason=_ring() or "usable")


def say(text: str) -> None:
    """Into the kernel's ring; a fresh opening each time, since it is rate-limited by opening."""
    descriptor = os.open("/dev/kmsg", os.O_WRONLY)
    try:
        os.write(descriptor, f"<12>{text}\n".encode())
    finally:
        os.close(descriptor)


def marker() -> str:
    return f"keepstep test {random_id(time.time_ns(), secrets.token_bytes(10))} nvme"


@ring
async def test_the_ring_from_a_line_to_an_event(tmp_path: Path) -> None:
    """What user space writes has a facility other than 0: hearsay, unless a setting trusts it."""
    past, text = marker(), marker()
    say(past)
    kept, trusting = Kept(), Kept()
    (tmp_path / "t").mkdir()
    async with (
        following("kmsg", kept, tmp_path),
        following("kmsg", trusting, tmp_path / "t", trust_user_facility=True),
    ):
        say(f"{text} \x1b[31m")
        await until(lambda: any(text in t for t in kept.texts()) and any(text in t for t in trusting.texts()), within_s=2.0)
    record = next(r for r in kept.records() if text in r.text)
    assert (record.hearsay, record.history, record.facility, record.priority) == (True, False, 1, 4)
    assert record.text == f"{text} \\x1b[31m" and record.sequence > 0 and record.since_boot_us > 0
    assert next(r for r in trusting.records() if text in r.text).hearsay is False
    assert next(r for r in kept.records() if past in r.text).history is True


@ring
async def test_the_ring_is_resumed_by_sequence(tmp_path: Path) -> None:
    kept, texts = Kept(), [marker() for _ in range(3)]
    mine = lambda: [r.text for r in kept.records() if r.text in texts]  # noqa: E731
    async with following("kmsg", kept, tmp_path):
        say(texts[0])
        await until(lambda: mine() == texts[:1])
    say(texts[1])
    await asyncio.sleep(0.3)
    held_from = len(kept.events)
    async with following("kmsg", kept, tmp_path):
        await until(lambda: mine() == texts[:2])
        say(texts[2])
        await until(lambda: mine() == texts)
    assert not any(r.history for r in kept.records() if r.text in texts)
    missed = next(i for i, e in enumerate(kept.events) if i >= held_from and isinstance(e.data, KernelLog))
    assert kept.held[missed] > 200_000_000, "a line that was missed is told with its age"
    (state,) = tmp_path.glob("kernel-*.json")
    state.write_text(json.dumps({**json.loads(state.read_text()), "boot_id": "an earlier boot"}))
    async with following("kmsg", kept, tmp_path):
        await until(lambda: len(mine()) == 6)
    assert all(r.history for r in kept.records()[-3:] if r.text in texts)


async def test_an_overrun_ring_is_a_gap_with_its_count(tmp_path: Path) -> None:
    """Overrunning the real ring would drown other monitors: its records come through a pipe, one a write, with some left out."""
    kept, device = Kept(), tmp_path / "kmsg"
    os.mkfifo(device)
    writer = os.open(device, os.O_RDWR | os.O_NONBLOCK)
    producer = KernelLogProducer("kmsg", desk(kept), tmp_path, KernelLogSettings(), device=str(device))
    task = asyncio.create_task(producer.run())
    try:
        await asyncio.sleep(0.05)
        for i, sequence in enumerate((5, 6, 20, 19, 21)):
            os.write(writer, f"6,{sequence},1000,-;nvme {sequence}\n SUBSYSTEM=pci\n".encode())
            await until(lambda i=i: len(kept.records()) >= min(i + 1, 3) and not task.done())  # type: ignore[misc]
            await asyncio.sleep(0.02)
        os.write(writer, b"nonsense\n")
        await until(lambda: len(kept.gaps()) == 2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.close(writer)
    assert kept.texts() == ["nvme 5", "nvme 6", "nvme 20", "nvme 21"], "what came before is not told again"
    assert [(gap.reason, gap.missing) for gap in kept.gaps()] == [("overrun", 13), ("unreadable", 1)]
