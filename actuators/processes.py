"""Processes by identity: a pid together with its start time, signalled through a pidfd; and which processes carry our mark.

Readers of /proc live here; nothing here decides anything. A pid alone is never signalled: it may be someone else's by now.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

#: Each worker is started with this in its environment, and so is all that it starts:
#: `<installation>/<node>/<job>/<slot>`, names as subject tokens.
MARK = "KEEPSTEP_MARK"
#: An environment longer than this is not read to its end (the mark comes early: it is put first).
ENVIRON_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """One process for certain: `start_time` is field 22 of /proc/PID/stat (clock ticks since boot)."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Stat:
    """`state`: the letter of /proc/PID/stat."""

    state: str
    parent: int
    start_time: int


def parse_stat(raw: bytes) -> Stat:
    """/proc/PID/stat. The name (field 2) may hold blanks and parentheses: fields are counted from the last one. Raises ValueError."""
    end = raw.rfind(b")")
    fields = raw[end + 2 :].split()
    if end < 0 or len(fields) < 20:
        raise ValueError("not a line of /proc/PID/stat")
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]))


def stat(pid: int) -> Stat | None:
    """None: there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read(4096))
    except (OSError, ValueError):
        return None


def state_of(process: Process) -> str:
    """The state's letter, `-` if the process is gone (or its pid is another's now)."""
    seen = stat(process.pid)
    return seen.state if seen and seen.start_time == process.start_time else "-"


def alive(process: Process) -> bool:
    return state_of(process) not in "-ZX"


def open_exact(process: Process) -> int | None:
    """A pidfd of exactly this process; None if it is gone. The caller closes it."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    seen = stat(process.pid)  # read after the pidfd holds the process: equal start times mean that it is the one
    if seen is None or seen.start_time != process.start_time:
        os.close(fd)
        return None
    return fd


def send_exact(process: Process, signal_number: int) -> bool:
    """Signals exactly this process. False: it is gone, or not ours to signal."""
    fd = open_exact(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, signal_number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def mark_in(environ: bytes) -> str:
    """The mark in a /proc/PID/environ, '' if it has none."""
    prefix = MARK.encode() + b"="
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return ""


def mark_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark_in(file.read(ENVIRON_BYTES_MAX))
    except OSError:
        return ""


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isascii() and name.isdigit()]


def marked(prefix: str) -> list[tuple[Process, str]]:
    """Live processes whose mark begins with `prefix`, with their marks."""
    found = []
    for pid in pids():
        if not mark_of(pid).startswith(prefix):
            continue
        seen = stat(pid)
        if seen is None or seen.state in "ZX":
            continue
        mark = mark_of(pid)  # read again, now that the start time says whose pid it is
        if mark.startswith(prefix) and alive(process := Process(pid, seen.start_time)):
            found.append((process, mark))
    return found


def descendants(roots: Iterable[Process]) -> list[Process]:
    """The live processes below `roots` (not themselves), by parent pids as of now."""
    children: dict[int, list[Process]] = {}
    for pid in pids():
        seen = stat(pid)
        if seen is not None and seen.state not in "ZX":
            children.setdefault(seen.parent, []).append(Process(pid, seen.start_time))
    found: list[Process] = []
    waiting = [root.pid for root in roots if alive(root)]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found.extend(below)
        waiting.extend(process.pid for process in below)
    return found
