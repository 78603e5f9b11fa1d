"""What the hook's tests talk to: the agent's end of the Unix socket, and scripts run as a rank."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from producers.trainer_lines import parse

ROOT = Path(__file__).resolve().parent.parent
HOOK = ROOT / "infra" / "hook"


class Agent:
    """Listens, and keeps every line that came. Single-threaded: it reads while a test waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.connections = 0
        self._rests: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.open()

    def open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            self._listener.bind(f"/proc/self/fd/{folder}/{self.path.name}")
        finally:
            os.close(folder)
        self._listener.listen(8)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        for stream in [*self._rests, *([self._listener] if self._listener else [])]:
            self._selector.unregister(stream)
            stream.close()
        self._rests, self._listener = {}, None

    def read(self, timeout_s: float = 0.0) -> None:
        for key, _ in self._selector.select(timeout_s):
            stream: Any = key.fileobj
            if stream is self._listener:
                assert self._listener is not None
                accepted = self._listener.accept()[0]
                self.connections += 1
                self._rests[accepted] = b""
                self._selector.register(accepted, selectors.EVENT_READ)
                continue
            block = stream.recv(1 << 16)
            if not block:
                self._selector.unregister(stream)
                del self._rests[stream]
                stream.close()
                continue
            *lines, self._rests[stream] = (self._rests[stream] + block).split(b"\n")
            for line in lines:
                parse(line)  # as the real agent does: raises BadLine
                self.lines.append(json.loads(line))

    def until(self, holds: Callable[[], bool], limit_s: float = 20.0) -> None:
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, f"not within {limit_s} s; last lines: {self.lines[-3:]}"
            self.read(0.05)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    @property
    def samples(self) -> list[list[Any]]:
        return [sample for line in self.of("progress") for sample in line["samples"]]


def rank_environment(socket_path: Path | str, **more: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PYTHON", "RANK", "WORLD_SIZE"))}
    return environment | {
        "PYTHONPATH": str(HOOK),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "KEEPSTEP_JOB": "job é",
        "KEEPSTEP_ATTEMPT": "2",
        "KEEPSTEP_NODE": "n",
        "KEEPSTEP_RANK": "0",
        "KEEPSTEP_SOCKET": str(socket_path),
        **more,
    }


def start(script: str, environment: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
