"""Child processes of `up`, `run` and `demo`: started, restarted with a growing pause when they end unasked, stopped together. They end
with their parent however it ends; ranks do not, since they are nobody's children here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.child import ending_with_parent

PAUSE_S_FIRST, PAUSE_S_MAX = 0.2, 5.0
LOG_BYTES_MAX = 16 << 20
#: A child that lived this long is taken to have started well: its pause begins anew.
WELL_AFTER_S = 10.0


class ChildFailed(RuntimeError):
    """A child that was refused its start: wrong use or a missing part. The text is its own last line."""


@dataclass(slots=True)
class Child:
    name: str
    arguments: list[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None
    wanted: bool = True
    restarts: int = 0
    failure: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process and self.process.returncode is None else 0


def module(name: str, *arguments: str) -> list[str]:
    """The command line of one of our own modules, isolated: no PYTHONPATH, no current folder, no user site."""
    return [sys.executable, "-I", "-m", name, *arguments]


class Supervisor:
    def __init__(self, logs: Path, on_restart: Callable[[Child, int], None] | None = None) -> None:
        self.logs = logs
        self.children: dict[str, Child] = {}
        self.on_restart = on_restart

    async def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Starts a child and keeps it running. The same name again replaces the one that was stopped."""
        self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        child = Child(name, list(arguments), self.logs / f"{name.replace('/', '_')}.log", environment or {})
        self.children[name] = child
        await self._spawn(child)
        child.task = asyncio.create_task(self._keep(child), name=f"keep {name}")
        return child

    async def _spawn(self, child: Child) -> None:
        if child.log.exists() and child.log.stat().st_size > LOG_BYTES_MAX:
            child.log.replace(child.log.with_suffix(".log.1"))
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **child.environment},
                start_new_session=True,
                preexec_fn=ending_with_parent(),
            )

    async def _keep(self, child: Child) -> None:
        pause = PAUSE_S_FIRST
        loop = asyncio.get_running_loop()
        while child.wanted and child.process is not None:
            began = loop.time()
            code = await child.process.wait()
            if not child.wanted:
                return
            if code == 2:  # wrong use: starting it again changes nothing
                child.failure = last_line(child.log)
                child.wanted = False
                return
            pause = PAUSE_S_FIRST if loop.time() - began > WELL_AFTER_S else min(PAUSE_S_MAX, pause * 2)
            if self.on_restart is not None:
                self.on_restart(child, code)
            await asyncio.sleep(pause)
            if child.wanted:
                child.restarts += 1
                await self._spawn(child)

    def check(self) -> None:
        """Raises ChildFailed if a child said that it cannot run as it was started."""
        for child in self.children.values():
            if child.failure:
                raise ChildFailed(f"{child.name} does not start: {child.failure}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a child and returns its pid; it is restarted like any that ends unasked."""
        child = self.children[name]
        if child.pid:
            os.kill(child.pid, number)
        return child.pid

    async def stop(self, name: str, timeout_s: float = 10.0) -> None:
        child = self.children.get(name)
        if child is None:
            return
        child.wanted = False
        process = child.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if child.task is not None:
            child.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await child.task

    async def stop_all(self, order: Sequence[str] = ()) -> None:
        """Stops those named first, one after another, then the rest together."""
        for name in order:
            await self.stop(name)
        await asyncio.gather(*(self.stop(name) for name in self.children))


def last_line(path: Path) -> str:
    try:
        text = path.read_bytes()[-4096:].decode("utf-8", "replace").strip()
    except OSError:
        return "it left no log"
    return text.splitlines()[-1][:500] if text else "it said nothing"
