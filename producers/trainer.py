"""The socket that training processes' hooks speak to: a Unix stream socket that only this user's ranks may use.

Who speaks is the kernel's word (SO_PEERCRED), and job, attempt and rank are what the agent knows of that process; the line's own
claim must agree. The other side is not trusted: too many connections, lines too long, nonsense and floods cost their sender the
connection or make it wait, are counted and told, and stop nothing. What a line means is trainer_lines.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from events.envelope import TEXT_MAX
from events.presence import AgentState, RankProcess
from producers.observe import Desk
from producers.trainer_lines import LINE_BYTES_MAX, BadLine, Hello, Progress, parse

PRODUCER = "trainer"
#: What the kernel's address of a Unix socket holds. A longer path is reached through its folder's descriptor, as the hook does.
PATH_BYTES_MAX = 107
NAME_BYTES_MAX = 80
#: A process that connects before its start is known here is waited for.
KNOWN_S_MAX = 2.0
#: A connection says hello within this.
HELLO_S_MAX = 10.0
_REPORT_S = 10.0
_ANCESTORS_MAX = 64


class BadSocketPath(ValueError):
    """A path where no socket can be. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """`any_process`: also processes that the agent has not started may report progress, for scripts under another launcher; while
    no job of the agent's own runs, their job and attempt are what they say."""

    any_process: bool = False
    connections_max: int = 256
    connections_a_process_max: int = 4
    #: More make the sender wait, so its ring overwrites the oldest.
    lines_per_s: float = 100.0


def check_path(path: Path) -> None:
    """Raises BadSocketPath."""
    length = len(os.fsencode(path.name))
    if length > NAME_BYTES_MAX:
        raise BadSocketPath(
            f"the socket's name {path.name!r} has {length} bytes and there is room for {NAME_BYTES_MAX}; give a shorter one"
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadSocketPath(f"{path} is there and is no socket; remove it or give another path")


class TrainerSocket:
    """`ranks()`: the rank processes that run here; `current()`: their job and attempt ('' and 0: none)."""

    def __init__(
        self,
        path: Path,
        desk: Desk,
        ranks: Callable[[], tuple[RankProcess, ...]],
        current: Callable[[], tuple[str, int]],
        settings: TrainerSettings | None = None,
    ) -> None:
        check_path(path)
        self.path = path
        self.desk = desk
        self.settings = settings or TrainerSettings()
        self.lines = 0
        #: Everything turned away since the start, by reason.
        self.refused: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._report: asyncio.TimerHandle | None = None
        self._ranks = ranks
        self._current = current
        self._by_pid: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves until cancelled."""
        listener = _listen(self.path)
        server = await asyncio.start_unix_server(self._connected, sock=listener, limit=LINE_BYTES_MAX)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._report is not None:
                self._report.cancel()
                self._report_now()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pid = 0
        try:
            pid, uid = _peer(writer)
            if uid not in (os.getuid(), 0):
                raise _Refuse("another user's process")
            self._by_pid[pid] += 1
            if len(self._tasks) > self.settings.connections_max:
                raise _Refuse("more connections than allowed")
            if self._by_pid[pid] > self.settings.connections_a_process_max:
                raise _Refuse("more connections of one process than allowed")
            await self._serve(reader, pid)
        except _Refuse as refusal:
            self._turn_away(str(refusal))
        except BadLine as bad:
            self._turn_away(f"bad line: {bad}")
        except (asyncio.LimitOverrunError, ValueError):
            self._turn_away(f"bad line: longer than {LINE_BYTES_MAX} bytes")
        except TimeoutError:
            self._turn_away("no hello in time")
        except (asyncio.IncompleteReadError, OSError):
            pass  # the other side is gone, as a process that ends is
        finally:
            self._tasks.discard(task)
            self._by_pid[pid] -= 1
            if not self._by_pid[pid]:
                del self._by_pid[pid]
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, pid: int) -> None:
        async with asyncio.timeout(HELLO_S_MAX):
            hello = parse(await reader.readuntil(b"\n"))
        if not isinstance(hello, Hello):
            raise BadLine("progress before a hello")
        job, attempt = await self._identify(hello, pid)
        loop = asyncio.get_running_loop()
        tokens, at_s = self.settings.lines_per_s, loop.time()
        producer = f"{PRODUCER}/{hello.rank}/{attempt}"
        while True:
            said = parse(await reader.readuntil(b"\n"))
            now_s = loop.time()
            tokens = min(self.settings.lines_per_s, tokens + (now_s - at_s) * self.settings.lines_per_s) - 1
            at_s = now_s
            if tokens < 0:
                await asyncio.sleep(-tokens / self.settings.lines_per_s)
            if isinstance(said, Progress):
                self.lines += 1
                for fact in said.facts(hello.rank, hello.world_size):
                    self.desk.about_job(producer, job, attempt, fact, bulk=True)
            elif said != hello:
                raise BadLine("a second hello that differs from the first")

    async def _identify(self, hello: Hello, pid: int) -> tuple[str, int]:
        """Job and attempt as the agent knows them. A process just started may be known a moment later."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + KNOWN_S_MAX
        while True:
            job, attempt = self._current()
            if self.settings.any_process and not job and hello.job and hello.attempt:
                return hello.job, hello.attempt  # another launcher's: nobody here knows better
            why = self._objection(hello, pid, job, attempt)
            if not why:
                return job, attempt
            if loop.time() > until_s:
                raise _Refuse(why)
            await asyncio.sleep(0.1)

    def _objection(self, hello: Hello, pid: int, job: str, attempt: int) -> str:
        """Why this process may not speak for what it says, '' if it may."""
        if not job:
            return "no job runs here"
        if (hello.job, hello.attempt) != (job, attempt):
            return "a job or attempt that is not the one running here"
        if self.settings.any_process:
            return ""
        rank = next((process for process in self._ranks() if process.rank == hello.rank), None)
        if rank is None:
            return "a rank that does not run here"
        return "" if _descends(pid, rank.pid) else "a process that is not the rank's"

    def _turn_away(self, reason: str) -> None:
        self.refused[reason[:200]] += 1
        self._unreported[reason[:200]] += 1
        if self._report is None:
            self._report_now()
            self._report = asyncio.get_running_loop().call_later(_REPORT_S, self._report_again)

    def _report_again(self) -> None:
        self._report = None
        if self._unreported:
            self._report_now()
            self._report = asyncio.get_running_loop().call_later(_REPORT_S, self._report_again)

    def _report_now(self) -> None:
        if not self._unreported:
            return
        counts = "; ".join(f"{count} x {reason}" for reason, count in self._unreported.most_common(8))
        self._unreported.clear()
        self.desk.about_node(
            PRODUCER, AgentState(producer=PRODUCER, state="skipped", detail=f"connections dropped: {counts}"[:TEXT_MAX])
        )


class _Refuse(Exception):
    """A connection that is not for us."""


def _listen(path: Path) -> socket.socket:
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)  # a former agent's; the lock on the state folder says that none is alive
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    short = len(os.fsencode(path)) <= PATH_BYTES_MAX
    mask = os.umask(0o177)
    try:
        listener.bind(str(path) if short else f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
        os.close(folder)
    listener.listen(128)
    return listener


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Process and user id of the other side when it connected."""
    peer: socket.socket = writer.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _descends(pid: int, ancestor: int) -> bool:
    """Whether a process is the other or below it."""
    for _ in range(_ANCESTORS_MAX):
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read(4096).rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
