"""The sending thread: drains the ring about ten times a second and writes JSON lines to the node agent's Unix socket.

It may wait, fail and come back as often as it likes; the training thread neither knows nor cares. Nothing is ever read from
the agent, and an agent that is away, stopped or slow costs samples (counted) and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep._hook import Hook
    from keepstep._ring import Sample

DRAIN_S = 0.1
#: A line is sent at least this often while the process lives, so that silence has a meaning.
BEAT_S = 1.0
SAMPLES_MAX = 256
LINES_A_ROUND_MAX = 16
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
FLUSH_S = 0.15
_UNIX_PATH_MAX = 107
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def _number(value: float | None) -> Any:
    """Finite numbers as they are; the others as text, which JSON has no numbers for."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")


def _sample(sample: Sample, wall_ns: int) -> list[Any]:
    """As it is sent. `wall_ns`: the wall clock at the zero of perf_counter, asked here rather than at every step."""
    _, step, ended_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed = sample
    row = [step, wall_ns + int(ended_s * 1e9), step_time_s, _number(loss), _number(grad_norm), tokens, mfu]
    if skipped or busy_s is not None or changed:
        row += [int(skipped), busy_s, changed]
    return row


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def connect(path: str) -> socket.socket:
    """A connected, non-blocking stream. A path longer than a Unix address may be is reached through its folder's descriptor."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        stream.setblocking(False)
        if len(os.fsencode(path)) > _UNIX_PATH_MAX:
            folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        stream.connect(path)
    except BaseException:
        stream.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return stream


class Sender:
    """One for each hook. `flush` is the exit's, everything else the thread's own."""

    def __init__(self, hook: Hook, path: str) -> None:
        self._hook = hook
        self._path = path
        self._wake = threading.Event()
        self._ending = False
        self._stream: socket.socket | None = None
        self._rest = b""  # of what is being written
        self._line = b""  # the line that it ends with: written again, whole, on the next connection
        self._read_to = 0
        self._sent_progress = -1
        self._sent_at = -math.inf
        self._retry_at = -math.inf
        self._retry_s = RETRY_FIRST_S
        self._thread = threading.Thread(target=self._run, name="keepstep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush(self) -> None:
        """Sends what is left, for at most FLUSH_S; the process is about to end."""
        self._ending = True
        self._wake.set()
        self._thread.join(FLUSH_S + 0.03)

    def abandon(self) -> None:
        """In a forked child: its copy of the connection is closed, so that only the rank itself holds it."""
        if self._stream is not None:
            self._stream.close()

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(DRAIN_S)
            self._round()
        until = time.monotonic() + FLUSH_S
        self._retry_at = -math.inf
        while time.monotonic() < until:
            self._round()
            if self._stream is None:  # no agent: nobody to wait for
                return
            if not self._rest and self._read_to >= self._hook.ring.written and self._sent_progress == self._hook.progress:
                return
            time.sleep(0.005)

    def _round(self) -> None:
        try:
            if self._stream is None and not self._connected():
                return
            for _ in range(LINES_A_ROUND_MAX):
                if not self._written():
                    return
                if not self._next_line():
                    return
        except OSError:
            self._lost()
        except Exception as error:  # never the job's trouble: say so once, drop the line, go on
            self._hook.fault("could not send its telemetry", error)
            self._rest = self._line = b""

    def _connected(self) -> bool:
        now = time.monotonic()
        if now < self._retry_at:
            return False
        try:
            self._stream = connect(self._path)
        except OSError:
            self._retry_at = now + self._retry_s
            self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)
            return False
        self._retry_s = RETRY_FIRST_S
        self._rest = encode(self._hook.hello()) + self._line
        return True

    def _lost(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._retry_at = time.monotonic() + self._retry_s

    def _written(self) -> bool:
        """Writes what it can of the rest without waiting; true when nothing of it is left."""
        assert self._stream is not None
        while self._rest:
            try:
                count = self._stream.send(self._rest, _NO_SIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            self._rest = self._rest[count:]
        self._line = b""
        return True

    def _next_line(self) -> bool:
        hook = self._hook
        now = time.monotonic()
        progress = hook.progress
        if hook.ring.written == self._read_to and progress == self._sent_progress and now - self._sent_at < BEAT_S:
            return False
        phase, step, restored = hook.phase, hook.last_step, hook.restored_step
        samples, self._read_to, dropped = hook.ring.read(self._read_to, SAMPLES_MAX)
        wall_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        self._line = self._rest = encode(
            {
                "v": 1,
                "type": "progress",
                "phase": phase,
                "progress": progress,
                "step": step,
                "restored_step": restored,
                "dropped": dropped,
                "samples": [_sample(sample, wall_ns) for sample in samples],
            }
        )
        self._sent_progress, self._sent_at = progress, now
        return True
