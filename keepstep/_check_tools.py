"""`dcgm` and `ib_write_bw`: what NVIDIA's diagnostic and the InfiniBand tools say, where they are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from typing import Any

#: Levels of `dcgmi diag`: 1 takes seconds, 2 about two minutes, 3 about half an hour (DCGM documentation, "Run Levels and Tests").
LEVEL_NEEDS_S = ((3, 2400.0), (2, 240.0), (1, 0.0))
PASSED, FAILED = ("pass", "passed"), ("fail", "failed")
_RATE = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", re.MULTILINE)


def dcgm(within_s: float, thorough: bool) -> tuple[bool | None, str]:
    """Passed, and what it said. None: it is not there, or could not run."""
    tool = shutil.which("dcgmi")
    if tool is None:
        return None, "dcgmi is not installed"
    level = next(level for level, needs_s in LEVEL_NEEDS_S if level == 1 or (thorough and within_s >= needs_s))
    try:
        said = subprocess.run(
            [tool, "diag", "-r", str(level), "-j"], capture_output=True, text=True, timeout=max(1.0, within_s), check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"dcgmi diag -r {level} did not end within {within_s:.0f} s"
    except OSError as error:
        return None, f"dcgmi could not be run: {error.strerror}"
    try:
        told = json.loads(said.stdout[said.stdout.index("{") :])
    except ValueError:
        return None, f"dcgmi diag -r {level} ended with {said.returncode} and no report: {_end(said.stderr or said.stdout)}"
    statuses = statuses_of(told)
    failed = [f"{name}: {text}" if text else name for name, status, text in statuses if status in FAILED]
    if failed:
        return False, f"dcgmi diag -r {level}: {'; '.join(dict.fromkeys(failed))}"[:1500]
    ran = sum(1 for _, status, _ in statuses if status in PASSED)
    if not ran:
        return None, f"dcgmi diag -r {level} ran no test: {_end(said.stderr or said.stdout)}"
    return True, f"dcgmi diag -r {level}: {ran} results, none failed"


def statuses_of(told: Any, name: str = "") -> list[tuple[str, str, str]]:
    """(test, status, what was said) of each result, wherever the release of DCGM puts it."""
    if isinstance(told, list):
        return [found for part in told for found in statuses_of(part, name)]
    if not isinstance(told, dict):
        return []
    name = str(told.get("name") or told.get("category") or name)
    found = []
    status = told.get("status")
    if isinstance(status, str):
        said = told.get("warnings") or told.get("warning") or told.get("info") or ""
        said = (
            "; ".join(str(p.get("warning", p) if isinstance(p, dict) else p) for p in said)
            if isinstance(said, list)
            else str(said)
        )
        where = told.get("gpu_ids", told.get("gpu_id", told.get("entity_id")))
        found.append((name if where is None else f"{name} (GPU {where})", status.lower(), said))
    return found + [more for value in told.values() if isinstance(value, (dict, list)) for more in statuses_of(value, name)]


def _end(text: str) -> str:
    return " ".join(text.split())[-300:]


def has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband")) and shutil.which("ib_write_bw") is not None
    except OSError:
        return False


def ib_write_bw(peer_host: str, port: int, seconds: int, within_s: float) -> tuple[float | None, str]:
    """Gb/s to a peer that runs the server (`peer_host` empty: as the server). None, and why, where it gave none."""
    command = [
        str(shutil.which("ib_write_bw")),
        "--report_gbits",
        "-p",
        str(port),
        "-D",
        str(seconds),
        *filter(None, [peer_host]),
    ]
    end_s = time.monotonic() + within_s
    while True:
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, end_s - time.monotonic()), check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"ib_write_bw did not end within {within_s:.0f} s"
        rates = _RATE.findall(said.stdout)
        if said.returncode == 0 and rates:
            return float(rates[-1]), ""
        if not peer_host or time.monotonic() + 1 > end_s:
            return None, f"ib_write_bw ended with {said.returncode}: {_end(said.stderr or said.stdout)}"
        time.sleep(0.2)  # the server is not listening yet


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
