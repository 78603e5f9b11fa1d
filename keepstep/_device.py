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

#: What a value's type says of it.
NUMBER, TENSOR, UNKNOWN = 1, 2, 0


def kind_of(cls: type) -> int:
    """Asked once a type: looking is dearer than reading. A DTensor's value is a collective over all ranks: not to be had."""
    if hasattr(cls, "is_cpu"):
        return UNKNOWN if hasattr(cls, "full_tensor") else TENSOR
    return NUMBER if cls.__module__.split(".", 1)[0] in _PLAIN else UNKNOWN


class Copies:
    """Pinned slots for the values of the steps on their way; two values a step (loss, gradient norm)."""

    def __init__(self) -> None:
        self._slots: Any = None
        self._next = 0

    def start(self, values: list[Any]) -> Copy | None:
        """Begins to copy `values` (None: not given). None where this device or torch can't do it without waiting."""
        torch = sys.modules.get("torch")
        first = next((value for value in values if value is not None), None)
        if torch is None or first is None or first.device.type in ("cpu", "meta"):
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
        numbers = self._row.tolist()
        return [float(numbers[at]) if given else None for at, given in enumerate(self._given)]
