"""NVRx's ft_launcher, as back_at_work is measured beside it: installed on first use, at pinned versions, into a folder of the user's
cache; torch is ours. Nothing of it reaches keepstep's own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from infra.hook_folder import hook_folder
from tests.bench.live import stage

PINNED = Path(__file__).resolve().parent / "constraints-peer.txt"
#: Restarts that never run out within a benchmark.
RESTARTS = 100
START_S = 120


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = sha256(PINNED.read_bytes() + sys.version.encode()).hexdigest()[:12]
    return cache / "keepstep" / f"bench-peer-{digest}"


def installed() -> None:
    """Raises RuntimeError."""
    if (folder() / "complete").exists():
        return
    stage(f"installing NVRx into {folder()}, once")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade",
            "--target", str(folder()), "--requirement", str(PINNED),
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"NVRx could not be installed: {done.stderr.strip()[-500:]}")
    (folder() / "complete").touch()


def command(ranks: int, limit_s: float, script: list[str]) -> list[str]:
    """The launcher with the heartbeat limit, looked at once a second."""
    return [
        sys.executable, "-c", "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()",
        "--nnodes=1", f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}", "--monitor-interval=0.1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=bench",
        "--ft-workload-check-interval=1", f"--ft-rank-heartbeat-timeout={limit_s}",
        f"--ft-initial-rank-heartbeat-timeout={START_S}", "--ft-enable-nic-monitor=False",
        *script,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder()), str(hook_folder()))),
        "OMP_NUM_THREADS": "1",
    }
