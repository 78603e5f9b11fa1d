"""One JSON line a figure."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
from typing import Any


@functools.cache
def machine() -> dict[str, Any]:
    """What the figure was measured on: processor model, cores this process may use, memory in GiB, Python."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    model = line.partition(":")[2].strip()
                    break
    except OSError:
        pass
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
    }


def report(
    name: str,
    value: float,
    unit: str,
    *,
    bound: float | None = None,
    peer: str | None = None,
    peer_value: float | None = None,
    ratio: float | None = None,
    n: int = 1,
    **more: Any,
) -> None:
    """Prints the figure. `bound`: what it must keep, in `unit`; `peer`: what `peer_value` was measured on, in the same run;
    `ratio`: ours over the peer's (worked out where it is not given); `n`: how many things or rounds the value stands on."""
    if ratio is None and peer_value:
        ratio = value / peer_value
    figure = {
        "name": name,
        "value": _short(value),
        "unit": unit,
        "bound": bound,
        "peer": peer,
        "peer_value": _short(peer_value),
        "ratio": _short(ratio),
        "n": n,
        **more,
        "machine": machine(),
    }
    print(json.dumps(figure, ensure_ascii=False), flush=True)


def _short(value: float | None) -> float | str | None:
    """Five significant digits; what is no finite number as text, so that each line stays JSON."""
    if value is None:
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
