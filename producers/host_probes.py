"""What /proc and /sys say of a host: pure parsers of their texts, beside readers that take the root of the tree.

Nothing here can hang on a dead disk or server: what may (statvfs, another process's memory) is slow_reads.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from events.host import ReadOnly

READ_BYTES_MAX = 1 << 20
MOUNTS_MAX = 4096
#: A control group without a limit shows a number near 2^63.
_NO_LIMIT = 1 << 60

_PRESSURE = re.compile(r"^(some|full) avg10=(\d+(?:\.\d+)?) ", re.MULTILINE | re.ASCII)
_OCTAL = re.compile(r"\\([0-7]{3})")


class Pressure(NamedTuple):
    """Percent of the last 10 s in which some, or all, tasks waited."""

    some: float | None = None
    full: float | None = None


class Mount(NamedTuple):
    """A line of mountinfo. `options` are the mount's, `super_options` the file system's."""

    point: str
    filesystem: str
    source: str
    options: frozenset[str]
    super_options: frozenset[str]

    @property
    def local(self) -> bool:
        """On a disk of this machine. A loop device may stand on anything."""
        return self.source.startswith("/dev/") and not self.source.startswith("/dev/loop")

    @property
    def read_only(self) -> ReadOnly:
        """`error`: the file system took itself out of service. `mount -o remount,ro` by a person sets the mount's own option too;
        ext4's errors=remount-ro sets only the file system's (since Linux 6.15 it shows emergency_ro, or shutdown)."""
        if self.super_options & {"emergency_ro", "shutdown"}:
            return "error"
        if "ro" in self.options:
            return "mount"
        return "error" if "ro" in self.super_options and self.local else "mount" if "ro" in self.super_options else ""


class ProcessState(NamedTuple):
    """`start_time` tells two processes of one number apart; `ran`: clock ticks of processor time so far."""

    state: str
    start_time: int
    ran: int


# Parsers


def pressure(text: str) -> Pressure:
    """Of /proc/pressure/*: `some avg10=1.53 avg60=… total=…`."""
    found = {match[1]: float(match[2]) for match in _PRESSURE.finditer(text)}
    return Pressure(found.get("some"), found.get("full"))


def meminfo(text: str) -> Mapping[str, int]:
    """Bytes by name, of /proc/meminfo's lines in kB."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            out[name] = int(words[0]) * 1024
    return out


def counter(text: str, name: str) -> int | None:
    """A counter by name of /proc/vmstat, memory.events and their like: `oom_kill 3`."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def load1(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def up_s(text: str) -> float:
    """Of /proc/uptime; 0 where it can't be read, which counts as just booted."""
    return load1(text) or 0.0


def mounts(text: str) -> list[Mount]:
    """Of /proc/self/mountinfo, in its order: a later one lies over an earlier one at the same point."""
    out: list[Mount] = []
    for line in text.splitlines()[:MOUNTS_MAX]:
        words = line.split(" ")
        try:
            dash = words.index("-", 6)
            point, options = words[4], words[5]
            filesystem, source, super_options = words[dash + 1], words[dash + 2], words[dash + 3]
        except (ValueError, IndexError):
            continue
        out.append(
            Mount(
                _unescaped(point),
                filesystem,
                _unescaped(source),
                frozenset(options.split(",")),
                frozenset(super_options.split(",")),
            )
        )
    return out


def mount_of(path: str, known: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path lies on: the longest point above it, the last of equals."""
    best: Mount | None = None
    for mount in known:
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def process_state(raw: bytes) -> ProcessState | None:
    """Of /proc/PID/stat, whose second field may hold anything."""
    words = raw[raw.rfind(b")") + 2 :].split()
    try:
        return ProcessState(words[0].decode("ascii"), int(words[19]), int(words[11]) + int(words[12]))
    except (IndexError, ValueError):
        return None


def switches(text: str) -> int:
    """How often a process was scheduled out, of /proc/PID/status: one that sleeps through has not moved it."""
    total = 0
    for line in text.splitlines():
        if "ctxt_switches:" in line:
            value = line.rpartition(":")[2].strip()
            total += int(value) if value.isdecimal() else 0
    return total


class Group(NamedTuple):
    """Where a control group's memory is told of: `limit`, `used` and `events` are paths below the root."""

    limit: str
    used: str
    events: str


def memory_group(text: str) -> Group | None:
    """Of /proc/self/cgroup: version 1 has a line with `memory`, version 2 the one line with nothing."""
    second = ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.rstrip("/")
        if "memory" in controllers.split(","):
            base = f"sys/fs/cgroup/memory{path}"
            return Group(f"{base}/memory.limit_in_bytes", f"{base}/memory.usage_in_bytes", f"{base}/memory.oom_control")
        if not controllers:
            second = f"sys/fs/cgroup{path}"
    if not second:
        return None
    return Group(f"{second}/memory.max", f"{second}/memory.current", f"{second}/memory.events")


def bytes_of(text: str) -> int:
    """A limit or use in bytes; -1 for none (`max`, or version 1's huge number)."""
    word = text.strip()
    return int(word) if word.isdecimal() and int(word) < _NO_LIMIT else -1


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text) if "\\" in text else text


# Readers


class HostFiles:
    """Reads below a root (`/`; tests give a tree of their own). Unreadable is '' and remembered in `blind`, by path."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.blind: dict[str, str] = {}

    def text(self, path: str, *, expected: bool = True) -> str:
        """A small file of the kernel's. `expected`: say so where it can't be read."""
        return self.raw(path, expected=expected).decode("utf-8", "replace")

    def raw(self, path: str, *, expected: bool = True) -> bytes:
        try:
            with open(self.root / path, "rb", buffering=0) as file:
                data = file.read(READ_BYTES_MAX)
                # /proc gives a page at a time where a text is long.
                while len(data) < READ_BYTES_MAX and (more := file.read(READ_BYTES_MAX - len(data))):
                    data += more
        except OSError as error:
            if expected:
                self.blind[path] = (error.strerror or str(error))[:100]
            return b""
        self.blind.pop(path, None)
        return data
