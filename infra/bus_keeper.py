"""Keeps the embedded bus at work: started again when it ends unasked, and when it has given up writing. Its clients come back by
themselves.

A nats-server whose write failed once (the disk was full) keeps that error on the stream, or puts JetStream away as a whole, until it
is started anew: room alone heals nothing. Its log tells, and where that had no room either, the tick that is no longer stored
(infra/decisions/150).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.errors import Error as NatsError

from events.ports import LogUnavailable
from infra.bus import BusClient, connect
from infra.embedded import EmbeddedError, EmbeddedServer
from infra.parts import silence_of_bus
from infra.supervise import PAUSE_S_FIRST, PAUSE_S_MAX
from infra.tasks import ended

#: What a server must find free before it is started over a store that it could not write: a twentieth of the disk, at most this.
ROOM_BYTES, ROOM_SHARE = 64 << 20, 0.05
LOOK_S = 1.0
#: So many looks in a row must find no tick: one alone may be a machine that was frozen.
SILENT_LOOKS, SILENT_LOOK_S = 4, 5.0
#: A store that fails although there is room (a dying disk) is not tried again and again: the pause doubles up to this.
AGAIN_S_FIRST, AGAIN_S_MAX = 2.0, 300.0
#: Writing well for this long is taken for healed.
HEALED_AFTER_S = 60.0
_GIVEN_UP = re.compile(r"\[(?:ERR|FTL)\] (?P<said>.*(?:write error|failed to store a msg|will be disabled).*)", re.IGNORECASE)
_LOG_BYTES_A_LOOK = 1 << 20


@dataclass(slots=True)
class WriteErrors:
    """What a server's log says of writes that failed, as it grows; a log that was replaced is read from its beginning."""

    log: Path
    _at: int = 0
    _inode: int = 0

    def look(self) -> str:
        """The first such sentence since the last look, "" if there is none."""
        try:
            with self.log.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._at:
                    self._inode, self._at = stat.st_ino, 0
                file.seek(max(self._at, stat.st_size - _LOG_BYTES_A_LOOK))
                text = file.read()
                self._at = file.tell() - (len(text) - 1 - text.rfind(b"\n"))  # a line that is not whole yet is read again
        except OSError:  # absent for a moment, at a start
            return ""
        match = _GIVEN_UP.search(text[: text.rfind(b"\n") + 1].decode("utf-8", "replace"))
        return match["said"].strip()[:300] if match else ""


def room_missing(folder: Path) -> int:
    """Bytes that the disk lacks for another start; 0 if it has room."""
    disk = os.statvfs(folder)
    wanted = min(ROOM_BYTES, int(disk.f_blocks * disk.f_frsize * ROOM_SHARE))
    return max(0, wanted - disk.f_bavail * disk.f_frsize)


@dataclass(slots=True)
class BusKeeper:
    """`start`, `stop`. `server_options`: those of EmbeddedServer. `tell`: told, a sentence each, what befell the bus."""

    store: Path
    server_options: dict[str, Any]
    tell: Callable[[str], None] = lambda sentence: None
    server: EmbeddedServer = field(init=False)
    _ends: asyncio.Queue[int] = field(init=False)
    _keeping: tuple[asyncio.Task[None], ...] = ()
    #: One at a time starts it.
    _starting: asyncio.Lock = field(init=False)

    async def start(self) -> None:
        """Raises EmbeddedError."""
        loop, self._ends, self._starting = asyncio.get_running_loop(), asyncio.Queue(), asyncio.Lock()
        self.server = EmbeddedServer(self.store, on_exit=lambda code: _soon(loop, self._ends, code), **self.server_options)
        await asyncio.to_thread(self.server.start)
        self._keeping = (
            asyncio.create_task(self._keep_running(), name="keep the bus running"),
            asyncio.create_task(self._keep_writing(), name="keep the bus writing"),
        )

    async def stop(self) -> None:
        await ended(*self._keeping)
        await asyncio.to_thread(self.server.stop)

    async def _keep_running(self) -> None:
        while True:
            code = await self._ends.get()
            self.tell(f"the bus ended unasked (exit code {code}); starting it again")
            async with self._starting:
                await self._start_again()

    async def _start_again(self) -> None:
        pause = PAUSE_S_FIRST
        while True:
            try:
                await asyncio.to_thread(self.server.start)
            except (EmbeddedError, OSError) as error:
                self.tell(f"the bus does not start: {error}")
                await asyncio.sleep(pause)
                pause = min(PAUSE_S_MAX, pause * 2)
            else:
                self.tell(f"the bus is back: {self.server.url}")
                return

    async def _keep_writing(self) -> None:
        loop = asyncio.get_running_loop()
        pause, began_s = AGAIN_S_FIRST, -HEALED_AFTER_S
        while True:
            said = await self._given_up()
            pause = AGAIN_S_FIRST if loop.time() - began_s > HEALED_AFTER_S else min(AGAIN_S_MAX, pause * 2)
            missing = room_missing(self.store)
            waits = f"its disk lacks {-(-missing >> 20)} MiB of room" if missing else f"it is started anew in {pause:.0f} s"
            self.tell(f"the bus has given up writing ({said}): {waits}")
            await asyncio.sleep(pause)
            while room_missing(self.store):  # noqa: ASYNC110  nothing tells of room
                await asyncio.sleep(LOOK_S)
            if missing:
                self.tell("the bus's disk has room again: it is started anew")
            async with self._starting:
                await asyncio.to_thread(self.server.stop)
                await self._start_again()
            began_s = loop.time()

    async def _given_up(self) -> str:
        """Returns once it has, with what says so."""
        by_log, by_tick = asyncio.create_task(self._log_says()), asyncio.create_task(self._ticks_end())
        try:
            done, _ = await asyncio.wait({by_log, by_tick}, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await ended(by_log, by_tick)

    async def _log_says(self) -> str:
        errors = WriteErrors(self.store / "server.log")
        while not (said := await asyncio.to_thread(errors.look)):  # noqa: ASYNC110  nothing tells of a line
            await asyncio.sleep(LOOK_S)
        return said

    async def _ticks_end(self) -> str:
        nc: BusClient | None = None
        silent, said = 0, ""
        try:
            while silent < SILENT_LOOKS:
                await asyncio.sleep(SILENT_LOOK_S)
                try:
                    nc = nc or await connect(self.server.url, self.server.role_options("observer"))
                    await nc.flush(2)  # one that is frozen or gone is not meant here
                except (LogUnavailable, NatsError, OSError):
                    silent = 0
                    continue
                try:
                    said = await silence_of_bus(nc)
                except LogUnavailable as error:
                    said = str(error)
                silent = silent + 1 if said else 0
            return said
        finally:
            if nc is not None:
                await nc.close()


def _soon(loop: asyncio.AbstractEventLoop, ends: asyncio.Queue[int], code: int) -> None:
    """Hands the server's end from the thread that waited for it to the loop, if that one still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(ends.put_nowait, code)
