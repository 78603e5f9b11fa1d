"""The process that asks NVML, seen from outside: lines to and from it, what /proc says of it while it does not answer, its end.

Nothing here waits for it: a process in a driver's call may not even be killable. What its lines mean is nvml.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Eight GPUs of 18 links take 30 KB; what is longer is no answer.
LINE_BYTES_MAX = 1024 * 1024
_TASKS_MAX = 64


class Standing(NamedTuple):
    """What /proc says of a process: the letter of its state (D if any thread of it is in D; `-`: gone), the kernel function it
    sleeps in ('' where this user may not know), and the GPU that it was asking (-1: none, or not known)."""

    state: str = "-"
    waits_in: str = ""
    gpu: int = -1


def standing(pid: int, proc: Path = Path("/proc")) -> Standing:
    """Never raises, never blocks: of a process in a driver's call only what needs none of its locks is read."""
    found = Standing()
    try:
        tasks = sorted(os.listdir(proc / str(pid) / "task"), key=lambda name: (name != str(pid), name))[:_TASKS_MAX]
    except OSError:
        return found
    for task in tasks:
        folder = proc / str(pid) / "task" / task
        try:
            _, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
            state = rest.split()[0]
            name = (folder / "comm").read_text(errors="replace").strip()
        except (OSError, IndexError):
            continue
        index = int(number) if (number := name.removeprefix("nvml gpu ")).isdecimal() and len(number) < 4 else -1
        if found.state == "-" or (state == "D" and found.state != "D"):
            found = Standing(state, _wait_channel(folder), max(index, found.gpu))
    return found


def _wait_channel(folder: Path) -> str:
    try:
        name = (folder / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return name[:200] if name != "0" else ""


class Child:
    """One process. `on_line` is called with each JSON object it writes, `on_end` once, when it has closed its output."""

    def __init__(self, command: Sequence[str], on_line: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Starts it. Raises OSError."""
        self._on_line = on_line
        self._on_end = on_end
        self._partial = bytearray()
        # A session of its own: a signal to the agent's terminal is not for it. It ends when its input does, or the agent.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._reading = True
        self._loop.add_reader(self._out.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it is there."""
        return self._process.poll()

    def ask(self, line: str) -> bool:
        """False if it does not take it: it reads nothing any more, or is gone."""
        with contextlib.suppress(OSError, ValueError):
            raw = f"{line}\n".encode()
            return self._in.write(raw) == len(raw)
        return False

    def dismiss(self) -> None:
        """Closes its input, which ends it once it listens again."""
        with contextlib.suppress(OSError):
            self._in.close()

    def kill(self) -> None:
        self.dismiss()
        self._stop_reading()
        if self.exit_code is None:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGKILL)

    def standing(self) -> Standing:
        return standing(self.pid) if self.exit_code is None else Standing()

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._out.fileno())
            self._out.close()

    def _readable(self) -> None:
        try:
            raw = os.read(self._out.fileno(), 65536)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if not raw:
            self._stop_reading()
            self._on_end()
            return
        self._partial += raw
        if b"\n" in raw:
            *lines, rest = self._partial.split(b"\n")
            self._partial = bytearray(rest)
            for line in lines:
                self._take(line)
        if len(self._partial) > LINE_BYTES_MAX:
            self._partial.clear()

    def _take(self, line: bytes | bytearray) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict) and self._reading:
            self._on_line(value)
