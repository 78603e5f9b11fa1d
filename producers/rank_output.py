"""One output file of a rank, followed: the rank's shim writes NAME.log and, once it is full, moves it to NAME.log.1 and begins NAME.log anew,
with the number of bytes that came before in NAME.base. Reads at most what it is given a budget for, the newest of what is there, and counts
what it passed over. The writer knows nothing of it and is never slowed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 64 * 1024
#: A line longer than this is handed out cut.
LINE_BYTES_MAX = 16 * 1024
#: Polls for which a new file's number of bytes before it is waited for.
_BASE_POLLS = 4


@dataclass(slots=True)
class Got:
    """`lines` in order, without their newlines; `bytes` that were looked at, `skipped` that were not."""

    lines: list[bytes]
    bytes: int = 0
    skipped: int = 0


class OutputFile:
    """`place`: bytes of the whole output up to where it was read; a former agent's `place` goes on from there."""

    def __init__(self, path: Path, place: int = 0) -> None:
        self.path = str(path)
        self._base_path = str(path.with_suffix(".base"))
        self.place = place
        self._descriptor = -1
        self._inode = 0
        self._base = 0
        self._partial = b""
        self._cutting = False
        self._unbased = 0

    def poll(self, budget: int) -> Got:
        """What came since the last time. Never raises: a file that can't be read is one that says nothing."""
        got = Got([])
        try:
            self._follow(got, budget)
        except OSError:
            self.close()
        return got

    def rest(self) -> bytes:
        """A last line without its newline, which is taken."""
        partial, self._partial = self._partial, b""
        return partial

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _follow(self, got: Got, budget: int) -> None:
        if self._descriptor < 0 and not self._open():
            return
        status = _status(self.path)
        if status is not None and status.st_ino == self._inode and self._base + status.st_size == self.place:
            return  # what nearly every poll finds
        # With a newer file there, what is left of this one is not the newest.
        replaced = status is not None and status.st_ino != self._inode
        budget -= self._read(got, budget // 2 if replaced else budget)
        if replaced:
            end = self._base + os.fstat(self._descriptor).st_size
            self._read(got, 0)  # what the budget did not reach
            if self._open(after=end):
                self._pass_over(got, self._base)
                self._read(got, max(budget, READ_BYTES))

    def _open(self, after: int = 0) -> bool:
        """The file at the path and how much came before it; False if that is not there yet."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        base = _number(self._base_path)
        if base < after:  # it is being begun: its number is written next
            self._unbased += 1
            if self._unbased <= _BASE_POLLS:
                os.close(descriptor)
                return False
            base = after
        self._unbased = 0
        self.close()
        self._descriptor, self._inode, self._base = descriptor, os.fstat(descriptor).st_ino, base
        if self.place < base and after == 0 and self.place == 0 and base:
            self.place = base  # nothing of it was read by anybody: what was before is not counted as passed over
        return True

    def _read(self, got: Got, budget: int) -> int:
        end = self._base + os.fstat(self._descriptor).st_size
        if end < self.place:  # cut: begun anew under the same name, or by someone else
            self._base = _number(self._base_path)
            end = self._base + os.fstat(self._descriptor).st_size
            self.place, self._partial, self._cutting = min(self.place, end), b"", False
        begin = max(self.place, end - max(0, budget))
        self._pass_over(got, begin)
        took = 0
        while self.place < end:
            data = os.pread(self._descriptor, min(READ_BYTES, end - self.place), self.place - self._base)
            if not data:
                break
            self.place += len(data)
            took += len(data)
            self._split(got, data)
        got.bytes += took
        return took

    def _pass_over(self, got: Got, place: int) -> None:
        if place > self.place:
            got.skipped += place - self.place
            self.place, self._partial, self._cutting = place, b"", True

    def _split(self, got: Got, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            if self._cutting:
                self._cutting = False  # the end of a line whose beginning was passed over
            else:
                got.lines.append(line[:LINE_BYTES_MAX])
        if len(rest) > LINE_BYTES_MAX:
            if not self._cutting:
                got.lines.append(rest[:LINE_BYTES_MAX])
            self._cutting, rest = True, b""
        self._partial = b"" if self._cutting else rest


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _number(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def place_of(value: Any) -> int:
    """A kept place: a number, or 0."""
    return value if isinstance(value, int) and value >= 0 else 0
