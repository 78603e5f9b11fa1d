"""What the hook costs a step, beside a call of an empty function, at a 50 ms step whose work has cooled the caches.

The agent's end of the socket is another process, as it really is; both calls are timed in the same steps, in turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.hook_folder import hook_folder
from tests.bench.report import report

NAMES = ("hook_cost",)
STEPS, STEP_S, BOUND_US = 120, 0.05, 50.0

AGENT = """
import socket, sys
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen(); print("ready", flush=True)
stream = listener.accept()[0]
while stream.recv(65536): pass
"""

TRAINER = """
import sys, time
import keepstep
try:
    import torch
    torch.set_num_threads(1)
    def number(step): return torch.tensor(float(step))
except ImportError:
    def number(step): return float(step)
assert keepstep.active()
keepstep.set_peak(1e12)
def empty(step, *, loss=None, grad_norm=None, tokens=None, flops=None): pass
block = bytearray(8 << 20)
costs = {empty: [], keepstep.step: []}
clock = time.perf_counter
for step in range(int(sys.argv[1])):
    until = clock() + float(sys.argv[2])
    while clock() < until:  # a step's work goes over more memory than the caches hold
        block[::64] = bytes(len(block) // 64)
    loss, norm = number(step), number(step)
    for call in (empty, keepstep.step) if step % 2 else (keepstep.step, empty):
        begun = clock()
        call(step, loss=loss, grad_norm=norm, tokens=4096, flops=1e9)
        costs[call].append(clock() - begun)
for call in (empty, keepstep.step):
    print(*(round(cost * 1e9) for cost in costs[call]))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        agent = subprocess.Popen([sys.executable, "-S", "-c", AGENT, str(path)], stdout=subprocess.PIPE)
        try:
            assert agent.stdout is not None
            agent.stdout.readline()
            environment = os.environ | {
                "PYTHONPATH": str(hook_folder()),
                "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": "1",
                "KEEPSTEP_JOB": "bench",
                "KEEPSTEP_ATTEMPT": "1",
                "KEEPSTEP_RANK": "0",
                "KEEPSTEP_SOCKET": str(path),
            }
            environment.pop("KEEPSTEP_CLAIMED_PID", None)
            run = subprocess.run(
                [sys.executable, "-c", TRAINER, str(STEPS), str(STEP_S)],
                env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300,
            )  # fmt: skip
        finally:
            agent.kill()
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()
    empty_us, hook_us = (statistics.median(map(int, line.split())) / 1000 for line in run.stdout.splitlines())
    report(
        "hook_cost",
        hook_us - empty_us,
        "us",
        bound=BOUND_US,
        peer="an empty call",
        peer_value=empty_us,
        ratio=hook_us / empty_us,
        n=STEPS,
        whole_call_us=round(hook_us, 2),
    )


if __name__ == "__main__":
    main()
