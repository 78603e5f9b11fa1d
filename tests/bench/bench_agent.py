"""agent_cost: what a node's agent takes from the machine that trains: share of a core and resident memory, its children counted, at rest
with every producer on, and with 64 KB a second of kernel log noise in the file that it follows."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from events.ports import TELEMETRY_NODE
from tests.bench.agents import AgentProcess, bus_alone, start_agent
from tests.bench.live import quiet_machine, stage
from tests.bench.report import report

NAMES = ("agent_cost_cpu", "agent_cost_memory", "agent_cost_noise")
SECONDS = float(os.environ.get("KEEPSTEP_BENCH_AGENT_S", "60"))
#: An agent's start is not its rest.
SETTLE_S = 15.0
CPU_BOUND, MEMORY_BOUND_MB, NOISE_BOUND = 1.0, 150.0, 3.0
NOISE_BYTES_PER_S = 64 * 1024
#: What a busy host's kernel says all day: nothing that the catalogue could know.
CHATTER = (
    'audit: type=1400 audit({n}): apparmor="ALLOWED" operation="open" profile="/usr/sbin/x" pid={n} comm="x"',
    "docker0: port {n}(veth{n:07x}) entered forwarding state",
    "IPv6: ADDRCONF(NETDEV_CHANGE): veth{n:07x}: link becomes ready",
    "systemd-journald[{n}]: Received client request to rotate journal, rotating.",
    "perf: interrupt took too long ({n} > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
    "device veth{n:07x} left promiscuous mode",
    "veth{n:07x}: renamed from eth0",
)
#: One line in a hundred names what a fault would name, and so can't be left out.
COULD_MATCH, ONE_IN = "nvidia-uvm: Loaded the UVM driver, major device number {n}.", 100


async def main() -> None:
    with quiet_machine() as load:
        async with bus_alone(TELEMETRY_NODE) as (server, heard, folder):
            log = folder / "kern.log"
            log.touch()
            kmsg = ("--kernel-log", "kmsg") if os.access("/dev/kmsg", os.R_OK) else ()
            agent = start_agent(server, folder / "agent", "bench", *kmsg, "--kernel-log", str(log))
            try:
                await heard.first(lambda event: event.data.kind() == "heartbeat", 0, 30, "a heartbeat")
                stage(f"the agent beats; it settles for {SETTLE_S:g} s")
                await asyncio.sleep(SETTLE_S)
                stage(f"at rest for {SECONDS:g} s")
                rest, memory = await _cost(agent)
                resident = {name: round(mb, 1) for name, mb in agent.rss_mb().items()}
                stage(f"{rest:.2f} % of a core, {memory:.0f} MB; now with noise")
                async with _noise(log) as written:
                    await asyncio.sleep(3)
                    noisy, noisy_memory = await _cost(agent)
                beats = sum(1 for _, event in heard.events if event.data.kind() == "heartbeat")
                kinds = sorted({event.data.kind() for _, event in heard.events})
            finally:
                await asyncio.to_thread(agent.end)
    more = {"seconds": SECONDS, "beats": beats, "told": kinds, **load}
    report("agent_cost_cpu", rest, "% of a core", bound=CPU_BOUND, **more)
    report("agent_cost_memory", memory, "MB", bound=MEMORY_BOUND_MB, n=len(resident), resident_mb=resident)
    report(
        "agent_cost_noise", noisy - rest, "points of a core", bound=NOISE_BOUND, n=written[0], cpu=round(noisy, 2),
        memory_mb=round(noisy_memory, 1), bytes_per_s=round(written[1] / (SECONDS + 3)), **load,
    )  # fmt: skip


async def _cost(agent: AgentProcess) -> tuple[float, float]:
    """(% of a core, most resident MB) over the time."""
    began_s, before = time.monotonic(), agent.cpu_s()
    most = 0.0
    while (left := began_s + SECONDS - time.monotonic()) > 0:
        await asyncio.sleep(min(5.0, left))
        most = max(most, sum(agent.rss_mb().values()))
    return (agent.cpu_s() - before) / (time.monotonic() - began_s) * 100, most


@asynccontextmanager
async def _noise(log: Path) -> AsyncIterator[list[int]]:
    """Writes into the log, ten times a second; [lines, bytes] so far."""
    written = [0, 0]
    pick = random.Random(7)

    async def write() -> None:
        loop = asyncio.get_running_loop()
        due_s, began_s = loop.time(), loop.time()
        with log.open("a", buffering=1 << 20) as file:
            while True:
                while written[1] < (loop.time() - began_s + 0.1) * NOISE_BYTES_PER_S:
                    text = pick.choice(CHATTER) if written[0] % ONE_IN else COULD_MATCH
                    line = f"<6>{text.format(n=pick.randrange(100, 60000))}\n"
                    file.write(line)
                    written[0] += 1
                    written[1] += len(line)
                file.flush()
                due_s += 0.1
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    task = asyncio.create_task(write())
    try:
        yield written
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, psutil.Error):
            await task


if __name__ == "__main__":
    asyncio.run(main())
