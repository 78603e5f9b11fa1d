"""Reads that may hang for ever (statvfs on a dead server, another process's memory), made by a child process, each with a deadline.

A thread would not do: one that hangs in the kernel keeps its whole process from ending, and with it the agent's lock. A child that
hangs is given up and another is begun, a few at most; with all of them stuck, answers are refused at once. What it runs is slow_reads_child.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("slow_reads_child.py")
#: Children given up that have not ended yet; beyond it nothing is asked any more.
STUCK_MAX = 3
ANSWER_BYTES_MAX = 1 << 20


class Hung(Exception):
    """No answer by the deadline: the read hangs, and whoever else reads there will too."""


class TooManyHang(Exception):
    """Nothing can be asked: all children hang."""


@dataclass(frozen=True, slots=True)
class Space:
    total_bytes: int
    free_bytes: int
    #: None: the file system has no limit on inodes.
    inodes_free: float | None


class SlowReads:
    """One request at a time; `stuck` children are counted. Not before the loop runs."""

    def __init__(self, *, program: tuple[str, ...] = ()) -> None:
        self._program = program or (sys.executable, "-I", "-S", str(CHILD))
        self._process: asyncio.subprocess.Process | None = None
        self._given_up: list[asyncio.subprocess.Process] = []
        self._one = asyncio.Lock()

    @property
    def stuck(self) -> int:
        self._given_up = [process for process in self._given_up if process.returncode is None]
        return len(self._given_up)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all children that are there."""
        here = [self._process] if self._process is not None else []
        return tuple(process.pid for process in (*here, *self._given_up) if process.returncode is None)

    async def space(self, path: str, within_s: float) -> Space:
        """Raises Hung, TooManyHang, OSError."""
        total, free, inodes, inodes_free = await self._ask({"space": path}, within_s)
        return Space(total, free, inodes_free / inodes if inodes else None)

    async def read(self, path: str, bytes_max: int, within_s: float) -> bytes:
        """The first bytes of a file. Raises Hung, TooManyHang, OSError."""
        text: str = await self._ask({"read": path, "most": bytes_max}, within_s)
        return text.encode("latin-1")

    async def close(self) -> None:
        """Ends the child, or leaves it to the kernel if it hangs."""
        for process in [self._process, *self._given_up]:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.5)
        self._process, self._given_up = None, []

    async def _ask(self, request: dict[str, Any], within_s: float) -> Any:
        async with self._one:
            process = await self._child()
            assert process.stdin is not None and process.stdout is not None
            try:
                async with asyncio.timeout(within_s):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                answer = json.loads(line)
            except TimeoutError:
                self._give_up(process)
                raise Hung(f"no answer within {within_s:g} s") from None
            except asyncio.CancelledError:
                self._give_up(process)  # its answer would be taken for that of the next question
                raise
            except (OSError, ValueError) as error:
                self._give_up(process)
                raise OSError(0, f"the reading child ended ({error})") from None
        if "error" in answer:
            raise OSError(int(answer["error"]), str(answer["text"]), next(iter(request.values())))
        return answer["is"]

    async def _child(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self.stuck >= STUCK_MAX:
            raise TooManyHang(f"{STUCK_MAX} reads hang already")
        self._process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
            limit=ANSWER_BYTES_MAX,
            start_new_session=True,
        )
        return self._process

    def _give_up(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # takes effect when the kernel lets go of it
        self._given_up.append(process)
        if self._process is process:
            self._process = None
