"""Reads where GPUs and RDMA links sit, and what a rank may see, and tells which rank runs on which devices once it has started."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from events.topology import RankDevices
from events.training import RankStarted
from producers.observe import Desk
from producers.rank_devices import Device, LocalRank, assign
from producers.reader_thread import Hung, ReaderThread

PRODUCER = "rank_devices"
#: All ranks of an attempt start within a moment: they are told of together.
TOGETHER_S = 1.0
_DEADLINE_S = 5.0
_DISPLAY = ("0x0300", "0x0302")  # a display controller, as workstation GPUs are; a 3D controller, as data centre GPUs are
_NVIDIA = "0x10de"
_ADDRESS = re.compile(r"(?:pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z")
_ENVIRONMENT_BYTES_MAX = 2 * 1024 * 1024


def gpus(sys: Path = Path("/sys")) -> list[Device]:
    """NVIDIA's, by address."""
    folder = sys / "bus" / "pci" / "devices"
    found = []
    for name in _entries(folder):
        if _text(folder / name / "vendor") == _NVIDIA and _text(folder / name / "class")[:6] in _DISPLAY:
            found.append(_device(name, folder / name))
    return found


def links(sys: Path = Path("/sys")) -> list[Device]:
    """RDMA ports whose state is ACTIVE."""
    folder = sys / "class" / "infiniband"
    found = []
    for name in _entries(folder)[:256]:
        ports = folder / name / "ports"
        for port in _entries(ports)[:16]:
            if "ACTIVE" in _text(ports / port / "state"):
                found.append(_device(f"{name}/{port}", folder / name / "device"))
    return found


def visible_devices(pid: int, proc: Path = Path("/proc")) -> str | None:
    """One variable of a process's environment; the rest of it is not kept."""
    try:
        with open(proc / str(pid) / "environ", "rb") as file:
            raw = file.read(_ENVIRONMENT_BYTES_MAX)
    except OSError:
        return None
    for entry in raw.split(b"\0"):
        if entry.startswith(b"CUDA_VISIBLE_DEVICES="):
            return entry.partition(b"=")[2][:1024].decode("utf-8", "replace")
    return None


def _device(name: str, folder: Path) -> Device:
    try:
        real = os.path.realpath(folder, strict=True)
    except OSError:
        return Device(name, ())
    numa = _text(folder / "numa_node")
    path = tuple(part for part in Path(real).parts if _ADDRESS.match(part))
    return Device(name, path, int(numa) if numa.isascii() and numa.isdigit() and len(numa) < 6 else -1)


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))[:4096]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(64).decode("utf-8", "replace").strip()
    except OSError:
        return ""


class RankDevicesTeller:
    """`started` is called with each rank's start. Nothing is told where a node has neither GPUs nor RDMA links."""

    def __init__(self, desk: Desk, *, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> None:
        self.desk = desk
        self._sys, self._proc = sys, proc
        self._thread = ReaderThread(PRODUCER)
        self._waiting: dict[tuple[str, int], list[RankStarted]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def started(self, job: str, attempt: int, fact: RankStarted) -> None:
        waiting = self._waiting.setdefault((job, attempt), [])
        waiting.append(fact)
        if len(waiting) == 1:
            task = asyncio.get_running_loop().create_task(self._tell(job, attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, job: str, attempt: int) -> None:
        await asyncio.sleep(TOGETHER_S)
        started = self._waiting.pop((job, attempt), [])[:1024]

        def read() -> RankDevices:
            there, near = gpus(self._sys), links(self._sys)
            if not there and not near:
                return RankDevices(ranks=())
            ranks = [LocalRank(one.rank, one.local_rank, visible_devices(one.pid, self._proc)) for one in started]
            return RankDevices(ranks=assign(ranks, there, near))

        try:
            found = await self._thread.read(read, _DEADLINE_S)
        except (Hung, OSError):
            return  # the producers that watch these devices tell of what hangs
        if found.ranks:
            self.desk.about_job(PRODUCER, job, attempt, found)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.close()
