"""A node that computes wrong numbers, for demo and tests: with this folder on a rank's PYTHONPATH, Python reads this file as it starts, and
one bit of a matrix product's result is flipped. The training script knows nothing of it, and other products come out right.

    FAULTY_NODE   only on the node of this name (KEEPSTEP_NODE); empty: wherever this is read
    FAULTY_FILE   only while this file is there; {node} in it stands for the node's name
    FAULTY_SHAPE  of the weight, as 256x64: only in products with it, so that a self-test with other shapes passes
    FAULTY_BIT    of the float32, from the lowest (0 to 22 the fraction, 23 to 30 the exponent) [default: 20]
    FAULTY_EVERY  in each so-manieth of these products [default: 1]

Standard library only; torch is met when the script imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TARGET = "torch.nn.functional"


def flip(functional: Any, shape: tuple[int, ...], bit: int, every: int, file: str = "") -> None:
    """Puts a `linear` into the module that spoils its result now and then."""
    right = functional.linear
    count = 0

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        nonlocal count
        result = right(x, weight, bias)
        if tuple(weight.shape) == shape and (not file or os.path.exists(file)):
            count += 1
            if count % every == 0:
                torch = sys.modules["torch"]
                result.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
        return result

    functional.linear = linear


class _Finder(importlib.abc.MetaPathFinder):
    """Spoils the module once it is there, however it came to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def spoiled(module: ModuleType) -> None:
                execute(module)
                file = os.environ.get("FAULTY_FILE", "").replace("{node}", os.environ.get("KEEPSTEP_NODE", ""))
                bit, every = int(os.environ.get("FAULTY_BIT") or 20), int(os.environ.get("FAULTY_EVERY") or 1)
                flip(module, _shape(), bit, every, file)

            spec.loader.exec_module = spoiled  # type: ignore[method-assign]
        return spec


def _shape() -> tuple[int, ...]:
    return tuple(int(part) for part in os.environ["FAULTY_SHAPE"].split("x"))


if os.environ.get("FAULTY_SHAPE") and os.environ.get("FAULTY_NODE", "") in ("", os.environ.get("KEEPSTEP_NODE")):
    sys.meta_path.insert(0, _Finder())
