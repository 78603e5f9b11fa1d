"""A growing file followed as `tail -F` would, and from where it was left: rotation, truncation, a last line not yet whole, a file
that is not there yet. Reads only, and never waits; what a line means is the parser's (kernel_lines.py).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: Longer lines are handed out cut, and the rest is skipped.
LINE_BYTES_MAX = 64 * 1024
#: Read in one poll, so that a flood does not hold up what else the agent does.
POLL_BYTES_MAX = 1024 * 1024
#: Of what was there before the first start, this much from the end is handed out, as history.
HISTORY_BYTES_MAX = 64 * 1024
#: A last line without its newline is handed out after this long.
PARTIAL_NS_MAX = 2_000_000_000
#: Bytes before the place read up to, by which the file is known again: an inode's number may be another file's by now.
_KNOWN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a reading stood: device, inode, offset, and the bytes just before it (hex)."""

    device: int
    inode: int
    offset: int
    before: str

    @classmethod
    def of(cls, value: Any) -> Cursor | None:
        """From plain JSON values; None if they are no cursor."""
        try:
            cursor = cls(int(value["device"]), int(value["inode"]), int(value["offset"]), str(value["before"]))
            bytes.fromhex(cursor.before)
        except (KeyError, TypeError, ValueError):
            return None
        return cursor if cursor.offset >= 0 else None


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line without its newline. `history`: it stood in the file before the first start in this boot."""

    raw: bytes
    history: bool = False


@dataclass(frozen=True, slots=True)
class Hole:
    """Lines may be missing here."""

    reason: Literal["truncated", "unreadable"]
    detail: str


class FileFollower:
    """`first`: nothing of this file was followed in this boot yet, so what is there now is history. With a `cursor` reading goes on
    from there."""

    def __init__(self, path: Path, cursor: Cursor | None, *, first: bool) -> None:
        self.path = path
        self._name = str(path)
        #: More is ready than one poll reads.
        self.more = False
        self._resume = cursor
        self._first = first
        self._opened_before = cursor is not None
        self._absent_at_start = False
        self._descriptor = -1
        self._device = self._inode = 0
        self._offset = 0
        self._before = b""
        self._partial = bytearray()
        self._partial_since_ns = 0
        self._skipping = False
        self._history_end = 0

    @property
    def present(self) -> bool:
        return self._descriptor >= 0

    @property
    def holds_part(self) -> bool:
        """A line's beginning was read and not its end."""
        return bool(self._partial)

    @property
    def cursor(self) -> Cursor | None:
        """Up to where whole lines were handed out; None before anything was opened."""
        if self._descriptor < 0 and not self._inode:
            return self._resume
        known = self._before[: len(self._before) - len(self._partial)] if self._partial else self._before
        return Cursor(self._device, self._inode, self._offset - len(self._partial), known[-_KNOWN_BYTES:].hex())

    def poll(self, now_ns: int) -> list[RawLine | Hole]:
        """What came since the last call, at most a megabyte. Raises OSError if the file is there and can't be read."""
        out: list[RawLine | Hole] = []
        self.more = False
        if self._descriptor < 0:
            if not self._open(out):
                return out
        elif not self._partial and self._unchanged():
            return out  # what nearly every poll finds
        budget = POLL_BYTES_MAX
        for _ in range(4):  # the file, what took its place, and what took that one's
            budget = self._read(out, now_ns, budget)
            if budget <= 0:
                self.more = True
                return out
            if not self._replaced():
                break
            budget = self._read(out, now_ns, budget)  # what was written between the last read and the look at the path
            if budget <= 0:
                self.more = True
                return out
            self._flush_partial(out)
            self.close()
            if not self._open(out):
                break
        if self._partial and now_ns - self._partial_since_ns > PARTIAL_NS_MAX:
            self._flush_partial(out)
        return out

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # Opening

    def _open(self, out: list[RawLine | Hole]) -> bool:
        resume, self._resume = self._resume, None
        if resume is not None and not self._is(self.path, resume):
            rotated = self._rotated(resume)
            if rotated is not None and self._take(rotated, resume.offset, bytes.fromhex(resume.before)):
                self._history_end = self._size() if self._first else 0
                return True
            out.append(Hole("truncated", f"{self.path} is not the file that was followed before; what it said last is lost"))
            resume = None
        try:
            offset = resume.offset if resume else 0
            if not self._take(self.path, offset, bytes.fromhex(resume.before) if resume else b""):
                self._absent_at_start = self._absent_at_start or not self._opened_before
                return False
        except OSError:
            self._resume = resume
            raise
        if self._first and not self._absent_at_start:
            self._history_end = self._size()
            if not self._opened_before and self._history_end > HISTORY_BYTES_MAX:
                self._offset = self._history_end - HISTORY_BYTES_MAX
                self._before = b""
                self._skipping = True  # up to the next whole line
        else:
            self._history_end = 0
        self._first = False
        self._opened_before = True
        return True

    def _take(self, path: Path, offset: int, before: bytes) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(0, f"{path} is no regular file")
        self._descriptor, self._device, self._inode = descriptor, status.st_dev, status.st_ino
        self._offset, self._before, self._skipping = offset, before, False
        self._partial.clear()
        return True

    @staticmethod
    def _is(path: Path, cursor: Cursor) -> bool:
        """Whether the file at `path` is the one that the cursor was made on, grown or equal."""
        before = bytes.fromhex(cursor.before)
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != (cursor.device, cursor.inode) or status.st_size < cursor.offset:
                    return False
                return os.pread(file.fileno(), len(before), max(0, cursor.offset - len(before))) == before
        except OSError:
            return False

    def _rotated(self, cursor: Cursor) -> Path | None:
        """The followed file under the name that rotation gave it (`name.1`, `name-20260101`), uncompressed."""
        try:
            with os.scandir(self.path.parent) as entries:
                for entry in entries:
                    if entry.name.startswith(self.path.name) and entry.inode() == cursor.inode:
                        found = Path(entry.path)
                        return found if self._is(found, cursor) else None
        except OSError:
            pass
        return None

    # Reading

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _unchanged(self) -> bool:
        try:
            status = os.stat(self._name)
        except OSError:
            return False
        return status.st_size == self._offset and status.st_ino == self._inode and status.st_dev == self._device

    def _replaced(self) -> bool:
        """Another file stands at the path now. While none does, the old one is still read."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) != (self._device, self._inode)

    def _read(self, out: list[RawLine | Hole], now_ns: int, budget: int) -> int:
        size = self._size()
        if size != self._offset:
            known = os.pread(self._descriptor, len(self._before), max(0, self._offset - len(self._before)))
            if size < self._offset or known != self._before:
                out.append(Hole("truncated", f"{self.path} was cut or written anew while it was followed"))
                self._offset, self._before, self._skipping, self._history_end = 0, b"", False, 0
                self._partial.clear()
        while budget > 0:
            data = os.pread(self._descriptor, min(65536, budget), self._offset)
            if not data:
                break
            budget -= len(data)
            self._offset += len(data)
            self._before = (self._before + data)[-(_KNOWN_BYTES + LINE_BYTES_MAX) :]
            self._split(data, out, now_ns)
        self._before = self._before[-(_KNOWN_BYTES + len(self._partial)) :]
        return budget

    def _split(self, data: bytes, out: list[RawLine | Hole], now_ns: int) -> None:
        if not self._partial:
            self._partial_since_ns = now_ns
        place = self._offset - len(data) - len(self._partial)
        *lines, rest = (bytes(self._partial) + data).split(b"\n")
        self._partial.clear()
        for line in lines:
            if self._skipping:
                self._skipping = False
            else:
                out.append(RawLine(line[:LINE_BYTES_MAX], place < self._history_end))
            place += len(line) + 1
        if lines:
            self._partial_since_ns = now_ns
        if self._skipping:
            return
        if len(rest) > LINE_BYTES_MAX:
            out.append(RawLine(rest[:LINE_BYTES_MAX], place < self._history_end))
            self._skipping = True
        else:
            self._partial.extend(rest)

    def _flush_partial(self, out: list[RawLine | Hole]) -> None:
        if self._partial:
            out.append(RawLine(bytes(self._partial), self._offset - len(self._partial) < self._history_end))
            self._partial.clear()
