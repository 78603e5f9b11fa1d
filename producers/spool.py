"""A bounded queue of observations on disk, for while the bus is away: segments of framed records, oldest first.

Crash-safe: each record carries its length and checksum; a torn end is cut off when it is read again, and what was read before a
crash is read at most once more (the head's place is a file of its own, replaced after each step). Over the bound the oldest segment
goes, and what it held is counted. Blocking I/O, safe between threads: the outbox calls it from a thread of its own.

    segment: b"KSPOOL1 <boot id>\\n", then records: u32 length, u32 crc32(payload), payload
    payload: i64 boot_ns, i64 wall_ns, u16 length of subject, subject, data
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<qqH")
_MAGIC = b"KSPOOL1 "
#: No observation is longer; a length above it is a torn or foreign frame.
RECORD_BYTES_MAX = 8 * 1024 * 1024
#: Segments the bound is divided into: a drop loses at most this share.
_SEGMENTS = 16


@dataclass(frozen=True, slots=True)
class Observation:
    """An event's canonical bytes and where they go. `boot_ns` and `wall_ns`: when it was seen, by both clocks."""

    subject: str
    data: bytes
    wall_ns: int
    boot_ns: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record at the head of the spool. `boot_id`: the boot whose clock its `boot_ns` is of. `segment`, `end`: where it is."""

    observation: Observation
    boot_id: str
    segment: int
    end: int


@dataclass(slots=True)
class _Segment:
    index: int
    boot_id: str
    first: int
    size: int
    records: int


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _locked(method: Callable[Concatenate[Spool, _P], _R]) -> Callable[Concatenate[Spool, _P], _R]:
    @wraps(method)
    def locked(self: Spool, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


def _frame(seen: Observation) -> bytes:
    subject = seen.subject.encode()
    payload = _HEAD.pack(seen.boot_ns, seen.wall_ns, len(subject)) + subject + seen.data
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class Spool:
    """`pending`: records that wait. `dropped`: records lost to the bound or to damage since it was last reported (kept on disk)."""

    def __init__(self, folder: Path, boot_id: str, *, bytes_max: int = 64 * 1024 * 1024) -> None:
        self.folder = folder
        self.boot_id = boot_id
        self.bytes_max = bytes_max
        self.segment_bytes_max = max(4096, bytes_max // _SEGMENTS)
        self.pending = 0
        self.dropped = 0
        self._segments: list[_Segment] = []
        self._head_offset = 0
        self._next_index = 0
        self._writer: BinaryIO | None = None
        self._dirty = False
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._recover()

    # Writing

    @_locked
    def append(self, observations: list[Observation]) -> None:
        """Adds records at the end; drops the oldest segments beyond the bound. Raises OSError (a full disk): then none of those
        after the failing one were added, and the caller may try again with the rest of what `pending` did not grow by."""
        for seen in observations:
            frame = _frame(seen)
            segment = self._segments[-1] if self._segments else None
            if self._writer is None or segment is None or segment.size + len(frame) > self.segment_bytes_max:
                segment = self._new_segment()
            assert self._writer is not None
            try:
                if self._writer.write(frame) != len(frame):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._cut_writer(segment)
                raise
            segment.size += len(frame)
            segment.records += 1
            self.pending += 1
            self._dirty = True
        self._enforce_bound()

    @_locked
    def sync(self) -> None:
        """Through to the disk, for a machine that loses power."""
        if self._writer is not None and self._dirty:
            os.fdatasync(self._writer.fileno())
            self._dirty = False

    @_locked
    def close(self) -> None:
        if self._writer is not None:
            try:
                self.sync()
            finally:
                self._writer.close()
                self._writer = None

    # Reading

    @_locked
    def peek(self, records_max: int) -> list[Waiting]:
        """Up to `records_max` records from the head, without taking them. Damaged ones are skipped and counted as dropped."""
        while self._segments:
            segment = self._segments[0]
            out: list[Waiting] = []
            offset, broken = self._head_offset, False
            with open(self._path(segment.index), "rb") as file:
                file.seek(offset)
                while len(out) < records_max and offset < segment.size:
                    seen, length = _read_frame(file)
                    if seen is None:
                        broken = True
                        break
                    offset += length
                    out.append(Waiting(seen, segment.boot_id, segment.index, offset))
            if out:
                return out
            if broken:
                self.dropped += segment.records
            self._drop_head(segment)
        return []

    @_locked
    def advance(self, taken: list[Waiting]) -> None:
        """Takes the first records of a `peek`, now on the bus. If their segment was dropped meanwhile that changes nothing."""
        if not taken or not self._segments or self._segments[0].index != taken[-1].segment:
            return
        segment = self._segments[0]
        segment.records -= len(taken)
        self.pending -= len(taken)
        self._head_offset = taken[-1].end
        if self._head_offset >= segment.size:
            self._drop_head(segment)
        self._save_head()

    @_locked
    def reported(self, count: int) -> None:
        """`count` dropped records are now reported."""
        self.dropped -= count
        self._save_head()

    # Housekeeping

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:016d}.spool"

    def _new_segment(self) -> _Segment:
        if self._writer is not None:
            self.close()
        index = self._segments[-1].index + 1 if self._segments else self._next_index
        self._next_index = index + 1
        header = _MAGIC + self.boot_id.encode() + b"\n"
        descriptor = os.open(self._path(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._writer = open(descriptor, "wb", buffering=0)  # noqa: SIM115  kept open until the segment is full
        self._writer.write(header)
        segment = _Segment(index, self.boot_id, len(header), len(header), 0)
        if not self._segments:
            self._head_offset = len(header)
        self._segments.append(segment)
        return segment

    def _cut_writer(self, segment: _Segment) -> None:
        """After a failed write: back to the last whole record, so that what follows can be read."""
        assert self._writer is not None
        try:
            os.ftruncate(self._writer.fileno(), segment.size)
            self._writer.seek(segment.size)
        except OSError:
            self._writer.close()
            self._writer = None

    def _enforce_bound(self) -> None:
        while len(self._segments) > 1 and sum(s.size for s in self._segments) > self.bytes_max:
            segment = self._segments[0]
            self.dropped += segment.records
            self._drop_head(segment)
            self._save_head()

    def _drop_head(self, segment: _Segment) -> None:
        """The oldest segment goes, read or not."""
        self.pending -= segment.records
        self._segments.pop(0)
        if not self._segments and self._writer is not None:
            self._writer.close()
            self._writer = None
        self._path(segment.index).unlink(missing_ok=True)
        self._head_offset = self._segments[0].first if self._segments else 0

    def _save_head(self) -> None:
        head = {
            "segment": self._segments[0].index if self._segments else -1,
            "offset": self._head_offset,
            "dropped": self.dropped,
            "next": self._next_index,
        }
        temporary = self.folder / "head.tmp"
        temporary.write_text(json.dumps(head))
        temporary.replace(self.folder / "head")

    def _recover(self) -> None:
        head = _load_head(self.folder / "head")
        self.dropped = head.get("dropped", 0)
        self._next_index = head.get("next", 0)
        for path in sorted(self.folder.glob("*.spool")):
            if not path.stem.isdecimal():
                continue
            index = int(path.stem)
            self._next_index = max(self._next_index, index + 1)
            start = head.get("offset", 0) if index == head.get("segment", -1) else 0
            segment, offset = _scan(path, index, start)
            if index < head.get("segment", -1) or segment is None or not segment.records:
                path.unlink(missing_ok=True)
                continue
            if not self._segments:
                self._head_offset = offset
            self._segments.append(segment)
            self.pending += segment.records


def _load_head(path: Path) -> dict[str, int]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: number for key, number in value.items() if isinstance(number, int)}


def _read_frame(file: BinaryIO) -> tuple[Observation | None, int]:
    """The next record and its length on disk; None for a torn or damaged one."""
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None, 0
    length, checksum = _FRAME.unpack(head)
    if not _HEAD.size <= length <= RECORD_BYTES_MAX:
        return None, 0
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return None, 0
    boot_ns, wall_ns, subject_length = _HEAD.unpack_from(payload)
    end = _HEAD.size + subject_length
    try:
        subject = payload[_HEAD.size : end].decode()
    except UnicodeDecodeError:
        return None, 0
    return Observation(subject, payload[end:], wall_ns, boot_ns), _FRAME.size + length


def _scan(path: Path, index: int, start: int) -> tuple[_Segment | None, int]:
    """A segment as it is on disk up to the last whole record, counted from `start` (0: from its first record)."""
    with open(path, "rb") as file:
        header = file.readline(256)
        if not header.startswith(_MAGIC) or not header.endswith(b"\n"):
            return None, 0
        first = max(start, len(header))
        file.seek(first)
        offset, records = first, 0
        while True:
            seen, length = _read_frame(file)
            if seen is None:
                break
            offset += length
            records += 1
    boot_id = header[len(_MAGIC) : -1].decode("ascii", "replace")
    return _Segment(index, boot_id, len(header), offset, records), first
