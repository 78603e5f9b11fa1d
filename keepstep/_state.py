"""save and restore of a script's objects, over keepstep.checkpoint's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from keepstep import _replay, checkpoint
from keepstep._hook import Hook, Phase, warn

_RESTORE, _FOLDER = "KEEPSTEP_RESTORE", "KEEPSTEP_CHECKPOINTS"


def to_restore(folder: Any, hook: Hook | None) -> Path | None:
    """Where keepstep runs the script it says what all ranks restore, even if that is nothing: a rank must not look for itself,
    since a checkpoint may be finished between one rank's look and the next's."""
    told = os.environ.get(_RESTORE)
    path: Path | None
    if told is not None:
        path = Path(told) if told else None
    else:
        place = folder or os.environ.get(_FOLDER)
        path = checkpoint.latest_whole(place) if place else None
    if hook is not None:
        step = checkpoint.step_of(path) if path is not None else None
        hook.restored(-1 if step is None else step)
    return path


def restore(objects: Mapping[str, Any], folder: Any, hook: Hook | None) -> int:
    path = to_restore(folder, None)
    step = -1
    if isinstance(hook, _replay.ReplayHook):
        hook.watch(objects.values())
    if path is not None:
        named = checkpoint.step_of(path)
        if named is None:
            raise ValueError(f"{path} is not a checkpoint of keepstep's: its folder would be called step-<number>")
        step = named
        for name, value in objects.items():
            if value is not None:
                _load(path / f"{name}.pt", value)
    if hook is not None:
        hook.restored(step)
    return step + 1


def _load(path: Path, value: Any) -> None:
    if hasattr(value, "load_state_dict"):
        import torch

        value.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    elif callable(value):
        value(path)
    else:
        raise TypeError(
            f"{path.stem} can't be restored: give an object with load_state_dict, or a callable that takes the file's path"
        )


def save(
    step: int, files: Mapping[str, Any], objects: Mapping[str, Any], folder: Any, keep: int, hook: Hook | None
) -> Path | None:
    if (os.environ.get("RANK") or "0") != "0" or _replay.told(os.environ) is not None:
        return None
    with Phase(hook, "checkpoint"):
        try:
            place = folder or os.environ.get(_FOLDER)
            if not place:
                raise ValueError("no folder: give save one, or set KEEPSTEP_CHECKPOINTS")
            contents: dict[str, checkpoint.Content] = {f"{name}.pt": _content(value) for name, value in objects.items()}
            contents.update((name, _content(value)) for name, value in files.items())
            attempt = hook.attempt if hook is not None else 0
            return checkpoint.save(place, int(step), contents, keep=keep, attempt=attempt)
        except Exception as error:
            warn(f"no checkpoint of step {step} ({type(error).__name__}: {error}); the run goes on from the one before")
            return None


def _content(value: Any) -> checkpoint.Content:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "state_dict"):
        return partial(_dump, value.state_dict())
    if callable(value):
        return value  # type: ignore[no-any-return]
    return partial(_dump, value)


def _dump(value: Any, file: BinaryIO) -> None:
    import torch

    torch.save(value, file)
