"""`python -m tests.nic_on_the_bus FOLDER [TIMES]`, in a network name space of its own: a bus and an agent in it, and a veth link that is
taken down. Prints one line of JSON with the milliseconds from the real event to the observation in the stream, of each time.
`run()` makes the name space; tests and benchmarks call it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

from events.network import LinkChanged, NicBaseline
from events.ports import TELEMETRY_NODE
from events.registry import parse
from infra.clock import wall_ns
from infra.jetstream import JetStreamLog
from tests.nats_fixture import real_bus

ROOT = Path(__file__).resolve().parent.parent
_BEGIN = (
    "mount -t sysfs sysfs /sys && ip link set lo up && ip link add ks0 type veth peer name ks0p && ip link set ks0 up && "
    'ip link set ks0p up && exec "$0" -m tests.nic_on_the_bus "$@"'
)


def run(folder: Path, times: int = 5, within_s: float = 120) -> list[float]:
    """Milliseconds. Needs root."""
    command = ["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", _BEGIN, sys.executable, str(folder), str(times)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])["link_down_ms"]
    return found


async def _ip(*words: str) -> int:
    """Runs `ip link set …`; the time before."""
    before_ns = wall_ns()
    process = await asyncio.create_subprocess_exec("ip", "link", "set", *words)
    assert await process.wait() == 0
    return before_ns


async def main(folder: Path, times: int) -> None:
    took: list[float] = []
    async with real_bus(folder) as bus:
        seed = bus.server.node_options("n1")["nkeys_seed"]
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "infra.agent", "--node", "n1", "--state", str(folder / "agent"), "--bus", bus.server.url,
            "--seed-file", seed, "--kernel-log", "none", "--nvml", "off", "--nic", "ks0",
        )  # fmt: skip
        try:
            async with aclosing(JetStreamLog(bus.admin, TELEMETRY_NODE).read(subjects=("tn.*.*.*",), follow=True)) as records:  # type: ignore[type-var]
                since_ns = 0
                async for record in records:
                    data = parse(record.data).data
                    if isinstance(data, NicBaseline) and data.links:
                        since_ns = await _ip("ks0p", "down")
                    elif isinstance(data, LinkChanged) and data.state == "down":
                        took.append((record.time_ns - since_ns) / 1e6)
                        await _ip("ks0p", "up")
                    elif isinstance(data, LinkChanged):
                        if len(took) >= times:
                            break
                        await asyncio.sleep(0.3)
                        since_ns = await _ip("ks0p", "down")
        finally:
            agent.terminate()
            await agent.wait()
    print(json.dumps({"link_down_ms": [round(ms, 2) for ms in took]}))


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(Path(sys.argv[1]), int(sys.argv[2])), 100))
