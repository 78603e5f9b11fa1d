"""A short replay of the job, in a world of its own: the script runs as ever, and the hook ends it after some steps.

    KEEPSTEP_REPLAY_STEPS   how many
    KEEPSTEP_REPLAY_TRACE   the file that each step is written to, one JSON object a line; the values bit for bit (float.hex)
    KEEPSTEP_REPLAY_SEED    for scripts that have no seed of their own
    KEEPSTEP_REPLAY_LAYERS  how many layers to keep, for scripts that can cut them (the job's own setting; 0 or none: all)

Nothing is told to the node's agent meanwhile, and no checkpoint is written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from keepstep import _device
from keepstep._hook import Hook, warn

_STEPS, _TRACE, _SEED, _LAYERS = (f"KEEPSTEP_REPLAY_{name}" for name in ("STEPS", "TRACE", "SEED", "LAYERS"))
#: How long the ranks wait for each other at the end, and for values on their way from a device.
FAREWELL_S = 20.0
VALUES_S = 30.0
#: Exit code of a rank that could not write its trace.
UNRECORDED = 97


class Replay(NamedTuple):
    """`steps` will be run; `layers` to keep (0: all); `seed`: the same in every replay of a test."""

    steps: int
    layers: int
    seed: int


def told(environment: Mapping[str, str]) -> Replay | None:
    """None: this is no replay."""
    if not environment.get(_TRACE):
        return None
    return Replay(max(1, _count(environment.get(_STEPS))), _count(environment.get(_LAYERS)), _count(environment.get(_SEED)))


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


class _Nobody:
    """In the place of the sender."""

    def start(self) -> None: ...
    def flush(self) -> None: ...
    def abandon(self) -> None: ...


class ReplayHook(Hook):
    """A hook whose samples go into the trace."""

    __slots__ = ("_models", "_read_to", "_replay", "_trace", "_written")

    def __init__(self, environment: Mapping[str, str], replay: Replay) -> None:
        """Raises what Hook raises, and OSError where the trace can't be written."""
        import random

        super().__init__(environment, _Nobody())
        self._replay = replay
        self._trace = os.open(environment[_TRACE], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read_to = self._written = 0
        self._models: list[Any] = []
        random.seed(replay.seed)

    def step(
        self, step: int, loss: Any, grad_norm: Any, tokens: Any, flops: Any, skipped: Any = False, busy_s: Any = None
    ) -> None:
        try:
            if (
                len(self._pending) >= _device.PENDING_MAX - 1
            ):  # none is given up here: a missing value would look like a difference
                self._await_values()
            super().step(step, loss, grad_norm, tokens, flops, skipped, busy_s)
            self._write()
            if self._written + len(self._pending) < self._replay.steps:
                return
            self._await_values()
            self._write()
            if self._models:
                os.write(self._trace, json.dumps({"parameters": _checksum(self._models)}).encode() + b"\n")
        except Exception as error:  # the machine is not to be blamed for it
            warn(f"this replay can't be recorded ({type(error).__name__}: {error})")
            os._exit(UNRECORDED)
        self._leave()

    def watch(self, objects: Iterable[Any]) -> None:
        """What the script restores: the parameters of models among it are compared at the end. Of a small error a loss may show nothing."""
        self._models = [value for value in objects if callable(getattr(value, "parameters", None))]

    def _await_values(self) -> None:
        end_s = time.monotonic() + VALUES_S
        while self._pending and time.monotonic() < end_s:
            self.settle()
            if self._pending:
                time.sleep(0.001)

    def _write(self) -> None:
        samples, self._read_to, _ = self.ring.read(self._read_to, self._replay.steps)
        for _, step, _, _, loss, grad_norm, _, _, skipped, *_ in samples:
            line = {"step": step, "loss": _bits(loss), "grad_norm": _bits(grad_norm), "skipped": skipped}
            os.write(self._trace, json.dumps(line).encode() + b"\n")
            self._written += 1

    def flush(self) -> None:
        """At the exit of a script that ended before it had run all steps."""
        if os.getpid() == self.pid:
            self._await_values()
            self._write()

    def _leave(self) -> None:
        """Ends the process when all ranks have come as far: none of them may need this one for the step that it is in. Not by an exception
        or an exit handler: they would run what the script does at its end, as writing a checkpoint."""
        _farewell()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # a closed or full one is no reason to stay
                pass
        os._exit(0)


def _bits(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _checksum(models: Iterable[Any]) -> str:
    """Of all parameters that lie on this rank, bit for bit; summed where they lie, so that no model is copied from its device."""
    torch: Any = sys.modules["torch"]
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = sha256()
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if local.numel():
                    bits = local.detach().contiguous().view(-1)
                    bits = torch.view_as_real(bits).view(-1) if bits.is_complex() else bits
                    total = int(bits.view(as_integers[bits.element_size()]).sum(dtype=torch.int64).item())
                    digest.update(b"%d %d;" % (local.numel(), total))
    return digest.hexdigest()[:16]


def _farewell() -> None:
    """Through the store that the process group met in: a collective would have to know which groups and devices there are."""
    torch = sys.modules.get("torch")
    try:
        dist = torch.distributed if torch is not None else None
        if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        from datetime import timedelta

        store = dist.distributed_c10d._get_default_store()
        if store.add("keepstep/replayed", 1) >= dist.get_world_size():
            store.set("keepstep/replayed/all", "1")
        store.wait(["keepstep/replayed/all"], timedelta(seconds=FAREWELL_S))
        if dist.get_rank() == 0:
            time.sleep(0.2)  # it may be the store's host: the others' waits are to be answered
    except Exception as error:
        warn(f"the replay's ranks did not all meet at its end ({type(error).__name__}: {error})")
