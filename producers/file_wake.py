"""Whoever reads a file that grows is told when to look, by inotify, instead of looking twenty times a second. I/O only.

Where that can't be had (no folder yet, the user's limit on watches reached) or is not so (a network file system, whose other writers
the kernel doesn't see), `trusted` is false and the caller looks by the clock. It finds the second itself: `missed` is for it to say
when a look that nobody asked for found something.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

_MODIFY, _MOVED_TO, _CREATE, _DELETE_SELF, _MOVE_SELF = 0x2, 0x80, 0x100, 0x400, 0x800
_OVERFLOW = 0x4000
#: struct inotify_event: watch, mask, cookie, and the length of the name that follows.
_EVENT = struct.Struct("iIII")
_LIBC = ctypes.CDLL(None, use_errno=True)
_READ_BYTES = 16 * 1024


class FileWake:
    """`on_change` is called in the loop when the file at the path was written to, or another may stand there."""

    def __init__(self, path: Path, on_change: Callable[[], None]) -> None:
        self._path, self._on_change = os.fsencode(path), on_change
        folder, self._name = os.path.split(self._path)
        self._folder = folder or b"."
        self._descriptor = -1
        self._watched = self._watched_before = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def trusted(self) -> bool:
        return self._descriptor >= 0

    def open(self) -> None:
        if not hasattr(_LIBC, "inotify_init1"):
            return
        self._descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            return
        if _LIBC.inotify_add_watch(self._descriptor, self._folder, _CREATE | _MOVED_TO) < 0:
            self.close()
            return
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._readable)

    def close(self) -> None:
        if self._descriptor >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = self._watched = self._watched_before = -1

    def watch(self) -> None:
        """The file that stands at the path now. One that was moved away may still be written to, so its watch stays until the next."""
        if self._descriptor < 0:
            return
        found: int = _LIBC.inotify_add_watch(self._descriptor, self._path, _MODIFY | _DELETE_SELF | _MOVE_SELF)
        if found < 0:
            if ctypes.get_errno() != 2:  # ENOENT: its coming is told by its folder
                self.close()
            return
        if found != self._watched:
            if self._watched_before >= 0:
                _LIBC.inotify_rm_watch(self._descriptor, self._watched_before)
            self._watched_before, self._watched = self._watched, found

    def missed(self) -> None:
        """Something was found by a look that nobody asked for: if the kernel has nothing to tell of it, it tells nothing here."""
        if self._descriptor >= 0 and not self._drained():
            self.close()

    def _readable(self) -> None:
        if self._drained():
            self._on_change()

    def _drained(self) -> bool:
        """Whether the kernel had anything to tell of this file. What it was is of no interest: the reader looks at everything."""
        told = False
        try:
            while events := os.read(self._descriptor, _READ_BYTES):
                told = self._is_ours(events) or told
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return True
        return told

    def _is_ours(self, events: bytes) -> bool:
        """Of the folder's other files nothing is wanted."""
        at = 0
        while at + _EVENT.size <= len(events):
            watch, mask, _, length = _EVENT.unpack_from(events, at)
            name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW or watch in (self._watched, self._watched_before) or name == self._name:
                return True
        return False
