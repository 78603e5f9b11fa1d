"""One rank slot as the agent sees it: its record on disk, the talk with its shim, and its end by force if the shim is no help.

A slot is a folder: slot.json (ours), shim.json, worker.json, exit.json, stdout.log and stderr.log (the shim's), control.sock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actuators.files import load, save
from actuators.processes import Process, alive, descendants, marked, send_exact

SHIM = Path(__file__).with_name("rank_shim.py")
LINE_BYTES_MAX = 8 << 20
#: A shim answers within a millisecond; one that does not in this time is stopped or stuck, and force takes over.
ANSWER_S = 1.0
SPAWN_S = 15.0


class SlotFailed(Exception):
    """A slot could not be made or told: one sentence."""


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What is kept of a slot. `attempt` 0: parked, of nobody yet, or of a replay (its command's key), which is no attempt. `*_reported`:
    the news was taken by the agent."""

    slot: str
    job: str
    boot_id: str
    plan: str = ""
    parked: bool = False
    attempt: int = 0
    replay: str = ""
    rank: int = -1
    local_rank: int = 0
    world_size: int = 1
    restore: str = ""
    #: Where it runs: of a revision, its worktree.
    directory: str = ""
    warm: bool = False
    gone_to: bool = False
    asked: bool = False
    started_reported: bool = False
    exit_reported: bool = False


class Slot:
    """`on_exit(slot)`: its worker ended, `ended` says how. `on_gone(slot)`: its shim is gone, so nothing of it is left."""

    def __init__(
        self, folder: Path, record: SlotRecord, on_exit: Callable[[Slot], None], on_gone: Callable[[Slot], None], mark: str
    ) -> None:
        self.folder, self.record, self.mark = folder, record, mark
        self.on_exit, self.on_gone = on_exit, on_gone
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.hello = asyncio.Event()
        self.phase = "parked"
        self.worker: Process | None = None
        self.shim: Process | None = None
        #: What exit.json holds; {} if it ended while nothing watched; None while it lives.
        self.ended: dict[str, Any] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._answers: dict[str, list[asyncio.Future[dict[str, Any]]]] = {}
        self._diagnosed: dict[str, asyncio.Future[dict[str, Any]]] = {}

    @property
    def live(self) -> bool:
        return self.ended is None and not self.gone.is_set()

    @property
    def ran(self) -> bool:
        """Its worker was told to be a rank, and heard it."""
        return self.record.gone_to or (self.ended or {}).get("phase") == "running"

    def note(self, **changes: Any) -> None:
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            with contextlib.suppress(OSError):  # a full disk must not keep a rank from being stopped
                save(self.folder / "slot.json", asdict(record))

    async def spawn(
        self,
        *,
        parked: list[str] | None,
        environment: Mapping[str, str],
        directory: str,
        secrets: tuple[str, ...],
        quiet: bool,
        log_bytes_max: int,
        idle_s: float,
    ) -> None:
        """Starts the shim (and with `parked`, its worker). Raises SlotFailed."""
        self.folder.mkdir(mode=0o700, parents=True)
        save(self.folder / "slot.json", asdict(self.record))
        spec = {
            "parked": parked,
            "environment": dict(environment) if parked else {},
            "directory": directory,
            "boot_id": self.record.boot_id,
            "secrets": secrets,
            "quiet": quiet,
            "log_bytes_max": log_bytes_max,
            "idle_s": idle_s,
        }
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(SHIM),
                str(self.folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
            async with asyncio.timeout(SPAWN_S):
                _, stderr = await process.communicate(json.dumps(spec).encode())
        except (OSError, TimeoutError) as error:
            raise SlotFailed(f"the shim of a rank could not be started: {error or 'no answer in time'}") from None
        finally:
            if process is not None and process.returncode is None:
                process.kill()
        if process.returncode != 0:
            last = stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
            raise SlotFailed(f"the shim of a rank ended with {process.returncode}: {last[:300]}")
        if not await self.connect():
            raise SlotFailed("the shim of a rank started and does not listen")
        try:
            async with asyncio.timeout(SPAWN_S):
                await self.hello.wait()
        except TimeoutError:
            raise SlotFailed("the shim of a rank started and says nothing") from None
        if parked:
            await self.ask("park")

    async def connect(self) -> bool:
        """To the shim that is there; False if there is none."""
        try:
            fd = os.open(self.folder, os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:  # through the folder's descriptor: the path may be longer than a socket's may
            reader, self._writer = await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/control.sock", limit=LINE_BYTES_MAX)
        except OSError:
            return False
        finally:
            os.close(fd)
        self._learn()
        self._listening = asyncio.create_task(self._listen(reader), name=f"slot {self.record.slot}")
        return True

    def _learn(self) -> None:
        """What the shim wrote of itself and its worker; a pid of another boot is nobody's."""
        for name in ("shim", "worker"):
            value = load(self.folder / f"{name}.json")
            if isinstance(value, dict) and value.get("boot_id") == self.record.boot_id and value.get("start_time"):
                setattr(self, name, Process(int(value["pid"]), int(value["start_time"])))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except (OSError, ValueError):
            pass
        if self._writer is not None:
            self._writer.close()
        self._learn()
        # A shim writes exit.json, closes and ends: a moment. One that lives on has lost us, and is no reason to end its rank.
        waited_s = 0.0
        while self.shim is not None and alive(self.shim):
            await asyncio.sleep(0.005 if waited_s < 0.5 else 1.0)
            waited_s += 0.005
            if waited_s >= 0.5 and await self.connect():
                return
        await self.finish()

    def _hear(self, said: Any) -> None:
        if not isinstance(said, dict):
            return
        if said.get("event") == "exit":
            self.ended_with(said)
        elif said.get("event") == "ready":
            self.ready.set()
        elif said.get("event") == "diagnosed":
            found = self._diagnosed.get(str(said.get("id")))
            if found is not None and not found.done():
                found.set_result(said)
        elif kind := said.get("re"):
            if said.get("pid") and said.get("start_time"):
                self.worker = Process(int(said["pid"]), int(said["start_time"]))
            if said.get("ready"):
                self.ready.set()
            if kind == "status":
                self.phase = said.get("phase", self.phase)
                self.shim = Process(int(said["shim"]), int(said["shim_start_time"]))
                self.hello.set()
            waiting = self._answers.get(kind)
            if waiting:
                future = waiting.pop(0)
                if not future.done():
                    future.set_result(said)

    def ended_with(self, ended: dict[str, Any]) -> None:
        if self.ended is None:
            self.ended = ended
            self.phase = "ended"
            self.on_exit(self)

    async def finish(self) -> None:
        """The shim is gone, or of no use: nothing of the slot is left after this, and its end is known as well as it can be."""
        if self.gone.is_set():
            return
        self._learn()
        told = load(self.folder / "exit.json")
        if not isinstance(told, dict):
            await self.fence()
            told = load(self.folder / "exit.json")
        self.ended_with(told if isinstance(told, dict) else {})
        if not self.gone.is_set():
            self.gone.set()
            self.on_gone(self)

    async def fence(self, within_s: float = 5.0) -> list[Process]:
        """Kills shim, worker and whatever carries the slot's mark, by force; what is left after `within_s`."""
        left: dict[Process, None] = {}
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while True:
            self._learn()
            roots = [process for process in (self.shim, self.worker) if process is not None]
            below = await asyncio.to_thread(descendants, roots) if any(map(alive, roots)) else []
            found = [process for process, mark in await asyncio.to_thread(marked, self.mark) if mark == self.mark]
            left = {process: None for process in (*roots, *below, *found, *left) if alive(process)}
            if not left or loop.time() > end:
                return list(left)
            for process in left:
                send_exact(process, signal.SIGKILL)
            await asyncio.sleep(0.005)

    async def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Raises SlotFailed if the shim does not answer."""
        if self._writer is None or self.gone.is_set():
            raise SlotFailed("its shim is gone")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers.setdefault(what, []).append(future)
        try:
            self._writer.write(json.dumps({"do": what, **more}).encode() + b"\n")
            await self._writer.drain()
            async with asyncio.timeout(ANSWER_S):
                return await future
        except (OSError, TimeoutError) as error:
            raise SlotFailed(f"its shim does not answer {what} ({error or 'no word within a second'})") from None
        finally:
            waiting = self._answers.get(what, [])
            if future in waiting:
                waiting.remove(future)

    async def go(self, argv: list[str], environment: Mapping[str, str], directory: str) -> None:
        """Raises SlotFailed."""
        said = await self.ask("go", argv=argv, environment=dict(environment), directory=directory)
        if not said.get("ok"):
            raise SlotFailed(str(said.get("because", "its shim refused")))
        self.phase = "running"
        for found in self._diagnosed.values():
            if not found.done():
                found.set_exception(SlotFailed("a start took the worker whose tester it was"))
        self.note(gone_to=True, warm=bool(said.get("warm")))

    async def diagnose(self, spec: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """What the tester of this parked worker answers to `spec` (with an `id` of its own). Raises SlotFailed, and TimeoutError if it
        does not come to an answer by itself."""
        found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._diagnosed[str(spec["id"])] = found
        gone = asyncio.create_task(self.gone.wait())
        try:
            said = await self.ask("diagnose", spec=spec)
            if not said.get("ok"):
                raise SlotFailed(str(said.get("because", "its shim refused")))
            ends: set[asyncio.Future[Any]] = {found, gone}
            done, _ = await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if found in done:
                return found.result()
            if gone in done:
                raise SlotFailed("its worker ended in the middle of a test")
            raise TimeoutError
        finally:
            gone.cancel()
            del self._diagnosed[str(spec["id"])]

    async def end(self, grace_s: float, within_s: float = 5.0) -> list[Process]:
        """Ends the worker and all that it started; what could not be ended within `grace_s + within_s` (uninterruptible sleep)."""
        if self.live:
            try:
                await self.ask("terminate" if grace_s > 0 else "kill", grace_s=grace_s)
                async with asyncio.timeout(grace_s + within_s / 2):
                    await self.gone.wait()
            except (SlotFailed, TimeoutError):
                pass
        if not self.gone.is_set():
            if self.ended is not None:  # told, and something of it dies slowly: the shim keeps at it
                try:
                    async with asyncio.timeout(within_s):
                        await self.gone.wait()
                except TimeoutError:
                    return [process for process in (self.worker, self.shim) if process is not None]
                return []
            left = await self.fence(within_s)
            if left:
                return left
            await self.finish()
        return []

    async def close(self) -> None:
        """Lets go of the shim, which goes on."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
