"""What this device can do at most, measured: a matrix product, the best of many."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

ROUNDS_MAX = 200


def measure(device: Any, dtype: Any, seconds: float) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    try:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = torch.device(device)
        on_host = place.type == "cpu"
        size = 512 if on_host else 8192
        kind = dtype or (torch.float32 if on_host else torch.bfloat16)
        backend = getattr(torch, place.type)
        with torch.no_grad():
            left = torch.ones((size, size), dtype=kind, device=place)
            out = left @ left
            best_s = float("inf")
            until = perf_counter() + seconds
            for _ in range(ROUNDS_MAX):
                if not on_host:
                    backend.synchronize(place)
                start = perf_counter()
                torch.mm(left, left, out=out)
                if not on_host:
                    backend.synchronize(place)
                end = perf_counter()
                best_s = min(best_s, end - start)
                if end > until:
                    break
        return 2.0 * size**3 / best_s
    except Exception as error:  # measuring is no reason to end a job
        sys.stderr.write(f"keepstep: could not measure the peak of {device} ({type(error).__name__}: {error}); no MFU\n")
        return None
