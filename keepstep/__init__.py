"""keepstep's hook: what a training script imports. It tells the node's agent of the script's steps; without an agent it does nothing.

    import keepstep

    keepstep.init_process_group("gloo")                          # optional: each attempt meets in a store prefix of its own
    start = keepstep.restore(model=model, optimizer=optimizer)   # the first step to do
    for step in range(start, steps):
        ...
        keepstep.step(step, loss=loss, grad_norm=norm, tokens=tokens, flops=flops)
        keepstep.save(step, model=model, optimizer=optimizer)    # when a checkpoint is due; rank 0 writes

Telling never raises into the job, never waits and never synchronises a device. Only what the script itself depends on may raise:
a process group that can't be made, a checkpoint that can't be restored. Standard library only; torch where it is there.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep import _hook as _hooks
from keepstep import _replay
from keepstep._hook import Hook, Phase
from keepstep._replay import Replay

__all__ = [
    "Replay",
    "active",
    "changed",
    "checkpoint_to_restore",
    "computed",
    "init_process_group",
    "measure_peak",
    "phase",
    "replay",
    "restore",
    "save",
    "set_peak",
    "step",
    "tick",
]
__version__ = "0.1.0"

_hook: Hook | None = None
_tried = False


def _activate() -> Hook | None:
    """The hook of this process: made once, None where the environment isn't a rank's or another process speaks for the rank."""
    global _hook, _tried
    if _tried:
        return _hook
    _tried = True
    replayed = _replay.told(os.environ)
    if replayed is None and not os.environ.get("KEEPSTEP_SOCKET"):
        return None
    try:
        if not _hooks.claimed(os.environ):
            return None
        _hook = _replay.ReplayHook(os.environ, replayed) if replayed is not None else Hook(os.environ)
        atexit.register(_hook.flush)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forked)
    except Exception as error:
        _hooks.warn(f"no telemetry from this rank: the environment is not a rank's ({type(error).__name__}: {error})")
    return _hook


def _forked() -> None:
    """A forked child (a data loader's worker) isn't the rank: it keeps silent."""
    global _hook
    hook, _hook = _hook, None
    if hook is not None:
        hook.abandon()


def replay() -> Replay | None:
    """None in a run. In a short replay, which the hook ends after `steps` steps without any help of the script's: what it may reckon with:
    `layers` to keep, where the model can be cut (0: all), and a `seed`, where it has none of its own."""
    return _replay.told(os.environ)


def active() -> bool:
    """Whether this process's steps are told to an agent."""
    return _activate() is not None


def step(
    step: int,
    *,
    loss: Any = None,
    grad_norm: Any = None,
    tokens: Any = None,
    flops: Any = None,
    skipped: Any = False,
    busy_s: Any = None,
) -> None:
    """Marks the end of step `step` (from 0). `loss` and `grad_norm` are numbers or tensors of one element, on any device; `tokens`
    and `flops` what this rank worked on in the step (the whole model's, where it is replicated). `skipped`: the optimizer was not
    stepped, as a loss scaler does after an overflow (with torch's: `scaler.get_scale() < before`); a loss or norm of such a step is no
    fault. `busy_s`: this rank's own work in it, without waiting for others, where the script knows it (from CUDA events);
    `computed()` measures it otherwise."""
    hook = _hook
    if hook is None and (_tried or (hook := _activate()) is None):
        return
    try:
        hook.step(step, loss, grad_norm, tokens, flops, skipped, busy_s)
    except Exception as error:
        hook.fault("could not take down a step", error)


def phase(name: str) -> Phase:
    """`with keepstep.phase("evaluation"):`; also "checkpoint", "startup". Any other name counts as "undeclared"."""
    return Phase(_activate(), name)


def computed() -> None:
    """This rank's own work of the present step is done up to here, before it waits for any other: after the forward pass, say. In
    synchronous training all ranks take as long as the slowest, and only this tells which that is. The last call in a step counts. On a
    GPU whose work is only queued, give `step` a `busy_s` instead."""
    hook = _activate()
    if hook is not None:
        hook.computed()


def changed(what: str) -> None:
    """The curves may jump for a good reason from the next step on: "data", "rate" (a schedule's edge), "context" (its length), or
    "other". Loss, gradient norm and speed are learned anew."""
    hook = _activate()
    if hook is not None:
        hook.change(what)


def tick() -> None:
    """Something moved within a long phase (a batch of an evaluation, a shard of a checkpoint): not a hang."""
    hook = _activate()
    if hook is not None:
        hook.progress += 1


def set_peak(flops_per_s: float) -> None:
    """The peak that MFU is a share of: this rank's device, FLOP/s. KEEPSTEP_PEAK_FLOPS states it from outside."""
    hook = _activate()
    if hook is not None:
        hook.peak_flops = float(flops_per_s) if flops_per_s and flops_per_s > 0 else 0.0


def measure_peak(device: Any = None, *, dtype: Any = None, seconds: float = 0.2) -> float | None:
    """Times a matrix product on `device` and takes that as the peak; FLOP/s, None without torch. Waits for the device: for start-up."""
    from keepstep import _peak

    peak = _peak.measure(device, dtype, seconds)
    if peak is not None:
        set_peak(peak)
    return peak


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """torch.distributed.init_process_group, whose ranks meet under the attempt's own prefix in the store: a late rank of an earlier
    attempt can't be taken for one of this. Outside keepstep, or with a `store` or `init_method` given, exactly torch's own."""
    from keepstep import _group

    _activate()
    _group.init(backend, options)


def checkpoint_to_restore(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """The whole checkpoint that this attempt was told to go on from. Outside keepstep: the newest whole one in `folder`."""
    from keepstep import _state

    return _state.to_restore(folder, _activate())


def restore(model: Any = None, optimizer: Any = None, *, folder: str | os.PathLike[str] | None = None, **others: Any) -> int:
    """Loads each given object (by load_state_dict, or a callable that takes the file's path) from `<name>.pt` of the checkpoint to
    go on from; returns the first step to do, 0 where there is none. Raises where that checkpoint can't be loaded: to begin at
    step 0 instead would silently throw the run away."""
    from keepstep import _state

    return _state.restore({"model": model, "optimizer": optimizer, **others}, folder, _activate())


def save(
    step: int,
    files: Mapping[str, Any] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    keep: int = 3,
    **objects: Any,
) -> Path | None:
    """Writes a checkpoint after `step`, whole or not at all, as rank 0 (others return at once): each of `objects` into `<name>.pt`,
    and `files` by name (bytes, a callable that writes into a binary file, or what torch.save takes). Keeps the newest `keep`.
    Returns its folder; None where nothing was written: a full disk is told on stderr and costs the run only the checkpoint. A replay
    writes none."""
    from keepstep import _state

    return _state.save(step, files or {}, objects, folder, keep, _activate())


# `python -m` reads packages on its way to the module (argv[0] is then "-m"): keepstep.parked is no rank yet.
if sys.argv[:1] != ["-m"]:
    _activate()
