"""Real agents as processes of their own, on an embedded bus, and what they cost: for the benchmarks of agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from events.envelope import AnyEvent
from events.ports import Record
from events.registry import Malformed, parse
from infra.bus import BusClient, connect
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog
from infra.keys import identity_of
from infra.streams import ensure_streams

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class AgentProcess:
    """One agent in a session of its own; its children are its own, too."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def family(self) -> list[psutil.Process]:
        try:
            mine = psutil.Process(self.process.pid)
            return [mine, *mine.children(recursive=True)]
        except psutil.NoSuchProcess:
            raise RuntimeError(f"agent {self.name} ended: {self.said()}") from None

    def cpu_s(self) -> float:
        """Of the agent and its children, those included that ended and were waited for."""
        total = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                spent = process.cpu_times()
                total += spent.user + spent.system + (spent.children_user + spent.children_system)
        return total

    def rss_mb(self) -> dict[str, float]:
        """Resident megabytes, by process."""
        found: dict[str, float] = {}
        for i, process in enumerate(self.family()):
            with contextlib.suppress(psutil.Error):
                words = [Path(word).name for word in process.cmdline()[1:] if not word.startswith("-")]
                found["agent" if i == 0 else f"{(words or ['?'])[0]}.{i}"] = process.memory_info().rss / 1e6
        return found

    def said(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")[-500:]

    def signal(self, number: int) -> None:
        """To its whole process group."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        family = []
        with contextlib.suppress(RuntimeError):
            family = self.family()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(family, 5)


def start_agent(
    server: EmbeddedServer, folder: Path, name: str, *more: str, environment: Mapping[str, str] | None = None
) -> AgentProcess:
    """`more`: options of `keepstep agent`, as a user would give them."""
    server.add_nodes([name])
    key = server.key(identity_of(node_name=name))
    folder.mkdir(parents=True, exist_ok=True)
    words = ("--bus", server.url, "--seed-file", str(key.seed_file), "--node", name, "--state", str(folder / "state"))
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "infra.agent", *words, *more],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip
    return AgentProcess(name, folder, process)


@dataclass(slots=True)
class Heard:
    """All of a stream as it comes."""

    nc: BusClient
    stream: str
    events: list[tuple[Record, AnyEvent]] = field(default_factory=list)

    async def follow(self) -> None:
        async with aclosing(JetStreamLog(self.nc, self.stream).read(follow=True)) as records:  # type: ignore[type-var]
            async for record in records:
                with contextlib.suppress(Malformed):
                    self.events.append((record, parse(record.data)))

    async def first(self, fits: Callable[[AnyEvent], bool], after_ns: int, within_s: float, what: str) -> int:
        """Broker time of the first event since that fits. Raises RuntimeError."""
        end_s = time.monotonic() + within_s
        at = len(self.events)
        while at and self.events[at - 1][0].time_ns >= after_ns:
            at -= 1
        while True:
            while at < len(self.events):
                record, event = self.events[at]
                at += 1
                if record.time_ns >= after_ns and fits(event):
                    return record.time_ns
            if time.monotonic() > end_s:
                raise RuntimeError(f"{what} did not come within {within_s:g} s")
            await asyncio.sleep(0.005)


@asynccontextmanager
async def bus_alone(stream: str) -> AsyncIterator[tuple[EmbeddedServer, Heard, Path]]:
    """An embedded bus with its streams, one of them listened to, and a folder."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        server = EmbeddedServer(folder / "bus", start_s_max=30)
        await asyncio.to_thread(server.start)
        nc: BusClient | None = None
        following: asyncio.Task[None] | None = None
        try:
            nc = await connect(server.url, server.role_options("admin"), wait_s=30)
            await ensure_streams(nc)
            heard = Heard(nc, stream)
            following = asyncio.create_task(heard.follow())
            yield server, heard, folder
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            if nc is not None:
                await nc.close()
            await asyncio.to_thread(server.stop)
