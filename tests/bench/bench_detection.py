"""detection_time: from a real event to the observation of it stored on the bus, by broker time, through a real agent with its default
settings: a kernel line, a link taken down, a driver that hangs, a GPU that disappears; and from a node's freezing to the signal that
it is silent. Each is caused here. A part whose means this machine lacks is skipped, and says so."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from events.envelope import AnyEvent
from events.ports import LEDGER, TELEMETRY_NODE
from tests.bench.agents import Heard, bus_alone, start_agent
from tests.bench.live import control_plane, stage
from tests.bench.report import report

NAMES = (
    "detection_time_kernel_file", "detection_time_kernel_ring", "detection_time_link_down", "detection_time_driver_hang",
    "detection_time_gpu_lost", "detection_time_node_frozen",
)  # fmt: skip
ROUNDS, SLOW_ROUNDS, FROZEN_NODES, FROZEN_ROUNDS = 30, 4, 5, 3
#: Only these parts: kernel_file, kernel_ring, link_down, driver_hang, gpu_lost, node_frozen.
PARTS = os.environ.get("KEEPSTEP_BENCH_DETECTION", "").split()
ROOT = Path(__file__).resolve().parent.parent.parent
NS_PER_S, NS_PER_MS = 1e9, 1e6
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. (bench {n})"


class Skipped(Exception):
    """Why a part can't be measured here. One sentence."""


async def main(argv: list[str] | None = None) -> None:
    if argv:  # this program in a name space of its own
        print(json.dumps(await _links()))
        return
    for name, bound, unit, measure in (
        ("kernel_file", 100.0, "ms", _kernel_file),
        ("kernel_ring", 100.0, "ms", _kernel_ring),
        ("link_down", 1.0, "s", _link_down),
        ("driver_hang", 10.0, "s", _driver_hang),
        ("gpu_lost", 10.0, "s", _gpu_lost),
        ("node_frozen", 3.0, "beats of 1 s", _node_frozen),
    ):
        if not PARTS or name in PARTS:
            await _part(name, bound, unit, measure)


async def _part(name: str, bound: float, unit: str, measure: Callable[[], Awaitable[tuple[list[int], dict[str, Any]]]]) -> None:
    stage(name.replace("_", " "))
    try:
        took_ns, more = await measure()
    except Skipped as why:
        report(f"detection_time_{name}", float("nan"), unit, bound=bound, n=0, skipped=str(why))
        return
    scale = NS_PER_MS if unit == "ms" else NS_PER_S
    took = sorted(ns / scale for ns in took_ns)
    report(
        f"detection_time_{name}", statistics.median(took), unit, bound=bound, n=len(took), max=round(took[-1], 3),
        least=round(took[0], 3), **more, load=round(os.getloadavg()[0], 1),
    )  # fmt: skip


# --- kernel lines -----------------------------------------------------------------------------------------------------------------


async def _kernel_file() -> tuple[list[int], dict[str, Any]]:
    return await _lines(None)


async def _kernel_ring() -> tuple[list[int], dict[str, Any]]:
    if not os.access("/dev/kmsg", os.R_OK | os.W_OK):
        raise Skipped("/dev/kmsg can't be written here (it takes root)")
    found, more = await _lines("/dev/kmsg")
    return found, more | {"note": "written by user space, as a kernel line can't be caused: read by --trust-user-facility"}


async def _lines(ring: str | None) -> tuple[list[int], dict[str, Any]]:
    async with bus_alone(TELEMETRY_NODE) as (server, heard, folder):
        log = folder / "kern.log"
        log.touch()
        how = ("--kernel-log", "kmsg", "--trust-user-facility") if ring else ("--kernel-log", str(log))
        agent = start_agent(server, folder / "agent", "bench", *how)
        try:
            await _beating(heard)
            took = []
            for n in range(ROUNDS):
                await asyncio.sleep(0.3 + random.random() * 0.3)
                # The word that tells the rounds apart; none that would alarm another monitor where it goes into the machine's ring.
                mark = f"{os.getpid()}-{n}"
                line = f"keepstep bench: a line to be found ({mark})" if ring else XID.format(n=mark)
                at_ns = time.time_ns()
                _write(ring or str(log), f"<3>{line}\n")
                took.append(await heard.first(_says(f"{mark})"), at_ns, 10, "the line") - at_ns)
            return took, {}
        finally:
            await asyncio.to_thread(agent.end)


def _write(path: str, text: str) -> None:
    to = os.open(path, os.O_WRONLY | (0 if path.startswith("/dev/") else os.O_APPEND))
    try:
        os.write(to, text.encode())
    finally:
        os.close(to)


def _says(text: str) -> Callable[[AnyEvent], bool]:
    return lambda event: event.data.kind() == "kernel_log" and any(text in r.text for r in event.data.records)  # type: ignore[attr-defined]


async def _beating(heard: Heard, *names: str) -> None:
    for name in names or ("bench",):
        await heard.first(lambda e, name=name: e.data.kind() == "heartbeat" and e.subject == name, 0, 30, f"a beat of {name}")  # type: ignore[misc]
    await asyncio.sleep(3)  # its start is over


# --- links ------------------------------------------------------------------------------------------------------------------------

_SPACE = (
    "mount -t sysfs sysfs /sys && ip link set lo up && ip link add ks0 type veth peer name ks0p && ip link set ks0 up && "
    "ip link set ks0p up && exec {python} -m tests.bench.bench_detection links"
)


async def _link_down() -> tuple[list[int], dict[str, Any]]:
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            raise Skipped(f"there is no `{tool}` here (Debian: iproute2, util-linux)")
    words = ["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", _SPACE.format(python=sys.executable)]
    done = await asyncio.to_thread(subprocess.run, words, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise Skipped(f"no network name space with a veth pair can be made here: {done.stderr.strip()[-200:]}")
    return json.loads(done.stdout), {"note": "the other end of a veth pair is taken down, as when a cable is pulled"}


async def _links() -> list[int]:
    """Bus, agent and link in one name space. The moment counted from is before `ip` is started."""
    async with bus_alone(TELEMETRY_NODE) as (server, heard, folder):
        agent = start_agent(server, folder / "agent", "bench", "--kernel-log", "none", "--nic", "ks0")
        try:
            await _beating(heard)

            def fits(state: str) -> Callable[[AnyEvent], bool]:
                return lambda e: e.data.kind() == "link_changed" and e.data.device == "ks0" and e.data.state == state  # type: ignore[attr-defined]

            took = []
            for _ in range(ROUNDS):
                at_ns = time.time_ns()
                await _ip("link", "set", "ks0p", "down")
                took.append(await heard.first(fits("down"), at_ns, 10, "the link's going down") - at_ns)
                at_ns = time.time_ns()
                await _ip("link", "set", "ks0p", "up")
                await heard.first(fits("up"), at_ns, 10, "the link's coming back")
                await asyncio.sleep(0.3 + random.random() * 0.3)
            return took
        finally:
            await asyncio.to_thread(agent.end)


async def _ip(*words: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", *words)
    if await process.wait():
        raise RuntimeError(f"ip {' '.join(words)} failed")


# --- GPUs -------------------------------------------------------------------------------------------------------------------------


async def _driver_hang() -> tuple[list[int], dict[str, Any]]:
    return await _gpus("5.hang_d", 600, lambda e: e.data.kind() == "gpu_watch" and e.data.state == "missed")  # type: ignore[attr-defined]


async def _gpu_lost() -> tuple[list[int], dict[str, Any]]:
    return await _gpus("3.lost", 15, lambda e: e.data.kind() == "gpu_sample" and bool(e.data.lost))  # type: ignore[attr-defined]


async def _gpus(key: str, value: object, fits: Callable[[AnyEvent], bool]) -> tuple[list[int], dict[str, Any]]:
    """Under the stub of NVIDIA's library: no driver hangs and no GPU is lost at will."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise Skipped("no C compiler: the stub of NVIDIA's library can't be built")
    from tests.nvml_stub import Stub, compiled

    async with bus_alone(TELEMETRY_NODE) as (server, heard, folder):
        (folder / "stub").mkdir()
        stub = Stub(folder / "stub", compiled(folder / "library"))
        environment = {"LD_LIBRARY_PATH": str(stub.library), "NVML_STUB": str(stub.path)}
        agent = start_agent(server, folder / "agent", "bench", "--kernel-log", "none", environment=environment)
        try:
            await _beating(heard)
            took = []
            for _ in range(SLOW_ROUNDS):
                before_ns = time.time_ns()
                await heard.first(_all_well, before_ns, 150, "a sample with every GPU")
                await asyncio.sleep(random.random() * 3)
                at_ns = time.time_ns()
                stub.set(key, value)
                took.append(await heard.first(fits, at_ns, 60, f"what tells of {key}") - at_ns)
                stub.drop(key)
            return took, {"note": "under a stub of NVIDIA's library and the real pynvml: there is no GPU here"}
        finally:
            await asyncio.to_thread(agent.end)


def _all_well(event: AnyEvent) -> bool:
    return event.data.kind() == "gpu_sample" and not event.data.lost and len(event.data.gpus) == 8  # type: ignore[attr-defined]


# --- a frozen node ----------------------------------------------------------------------------------------------------------------


async def _node_frozen() -> tuple[list[int], dict[str, Any]]:
    """From SIGSTOP to each agent's process group to the signal of its silence in LEDGER. A beat comes each second at a moment of
    its own, and so does the tick at which silence is judged; several agents at random moments show them all."""
    names = [f"frozen{i}" for i in range(FROZEN_NODES)]
    took: list[int] = []
    since_beat: list[float] = []
    async with control_plane(yaml.safe_dump({"mode": "observe"})) as plane:
        heard, ledger = Heard(plane.admin, TELEMETRY_NODE), Heard(plane.admin, LEDGER)
        following = [asyncio.create_task(one.follow()) for one in (heard, ledger)]
        agents = []
        try:
            for name in names:
                agents.append(start_agent(plane.server, plane.home.path / name, name, "--kernel-log", "none"))
                await asyncio.sleep(random.random())
            await _beating(heard, *names)
            for _ in range(FROZEN_ROUNDS):
                await asyncio.sleep(2 + random.random() * 2)
                frozen: dict[str, int] = {}
                for agent in agents:
                    await asyncio.sleep(random.random() * 0.4)
                    frozen[agent.name] = time.time_ns()
                    agent.signal(signal.SIGSTOP)
                for name, at_ns in frozen.items():
                    told_ns = await ledger.first(_silent(name), at_ns, 30, f"the signal that {name} is silent")
                    took.append(told_ns - at_ns)
                    last_ns = max(
                        record.time_ns for record, event in heard.events if event.subject == name and record.time_ns < told_ns
                    )
                    since_beat.append((told_ns - last_ns) / NS_PER_S)
                for agent in agents:
                    agent.signal(signal.SIGCONT)
                at_ns = time.time_ns()
                for name in names:
                    await ledger.first(_heard_again(name), at_ns, 30, f"that {name} is heard again")
            more = {
                "since_last_beat_s": {"median": round(statistics.median(since_beat), 3), "max": round(max(since_beat), 3)},
                "note": "to the signal in LEDGER, from the moment of the freezing; the last beat before it may be a second old",
            }
            return took, more
        finally:
            for agent in agents:
                await asyncio.to_thread(agent.end)
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def _silent(node: str) -> Callable[[AnyEvent], bool]:
    return lambda e: e.data.kind() == "signal" and e.data.symptom == "node_silent" and e.data.node == node  # type: ignore[attr-defined]


def _heard_again(node: str) -> Callable[[AnyEvent], bool]:
    return lambda e: e.data.kind() == "signal_cleared" and e.data.node == node  # type: ignore[attr-defined]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
