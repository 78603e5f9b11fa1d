"""The clocks and the randomness of this machine: the only place in the product that asks for them. Everything else is told."""

from __future__ import annotations

import os
import time

from events.ids import random_id


def wall_ns() -> int:
    """Nanoseconds since 1970 by this machine's settable clock: for labels and event times, never for durations."""
    return time.time_ns()


def boot_ns() -> int:
    """Nanoseconds since boot, suspended time included; nobody can set it. For durations and deadlines."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def entropy(size: int = 10) -> bytes:
    return os.urandom(size)


def new_event_id(time_ns: int | None = None) -> str:
    """A random id that sorts by time, for what a person or a device did."""
    return random_id(wall_ns() if time_ns is None else time_ns, entropy(10))


def boot_id() -> str:
    """This boot's id: a process id and a boot clock mean nothing in another boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of /proc/PID/stat), None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
