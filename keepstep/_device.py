"""Numbers out of whatever a script hands in, without ever waiting for a device.

A value on a GPU is copied into pinned memory on the current stream and read once an event says that the copy is over: at the
next step, as a rule. `.item()` would stall the GPU's queue. torch is only ever found in what is handed in, never imported for it.
"""

from __future__ import annotations

import sys
from typing import Any

#: Values whose `float()` costs nothing and waits for nothing, by the package that their type comes from.
_PLAIN = ("builtins", "numpy", "decimal", "fractions", "ml_dtypes")
#: Steps whose values may be on their way at once. A value that takes longer is given up, and reported as not given.
PENDING_MAX = 8


def plain(value: Any) -> float | None:
    """A number that is at hand: Python's, numpy's, or a tensor in the CPU's memory. None for all else."""
    if getattr(value, "is_cpu", False):
        # A DTensor's item is a collective over all ranks, and a meta tensor's does not exist.
        return None if hasattr(value, "full_tensor") else float(value.item())
    if type(value).__module__.split(".", 1)[0] in _PLAIN:
        return float(value)
    return None


def is_elsewhere(value: Any) -> bool:
    """A tensor that lies on a device with streams and events (CUDA, ROCm, XPU ...)."""
    return getattr(value, "is_cpu", True) is False and not hasattr(value, "full_tensor") and value.device.type != "meta"


class Copies:
    """Pinned slots for the values of the steps on their way; two values a step (loss, gradient norm)."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._next = 0

    def start(self, values: list[Any]) -> Copy | None:
        """Begins to copy `values` (None: not given). None where this device or torch can't do it without waiting."""
        torch = sys.modules.get("torch")
        first = next((value for value in values if value is not None), None)
        if torch is None or first is None:
            return None
        backend = getattr(torch, first.device.type, None)
        if backend is None or not hasattr(backend, "Event"):
            return None
        if self._slots is None:  # once: allocating pinned memory may wait for the device
            self._slots = torch.empty((PENDING_MAX + 2, 2), dtype=torch.float32, pin_memory=True)
        row = self._slots[self._next % (PENDING_MAX + 2)]
        self._next += 1
        with torch.no_grad(), backend.device(first.device):
            for column, value in enumerate(values):
                if value is not None:
                    # Same type on both sides: a copy that has to convert goes through pageable memory, and waits.
                    row[column].copy_(value.detach().to(torch.float32).reshape(()), non_blocking=True)
            event = backend.Event()
            event.record()
        return Copy(row, event, [value is not None for value in values])


class Copy:
    """One step's values on their way."""

    __slots__ = ("_event", "_given", "_row")

    def __init__(self, row: Any, event: Any, given: list[bool]) -> None:
        self._row, self._event, self._given = row, event, given

    def over(self) -> bool:
        return bool(self._event.query())

    def values(self) -> list[float | None]:
        return [float(number) if given else None for number, given in zip(self._row.tolist(), self._given)]
