"""Checkpoints on disk that are whole or not there: `step-<NNNNNNNN>/` with the script's files and manifest.json.

Written under a temporary name, each file synced, the manifest last, then renamed: whatever dies in between leaves no folder of
the final name. What a disk loses later is found by size and SHA-256. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Callable, Union

MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 20
_FOLDER = re.compile(r"step-(\d{8,15})\Z", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(\d+)-step-", re.ASCII)
#: A temporary folder of the same attempt is some killed writer's once it is this old.
TEMPORARY_AGE_S = 3600.0
_BLOCK_BYTES = 1 << 20

Content = Union[bytes, Callable[[BinaryIO], Any]]
Folder = Union[str, "os.PathLike[str]"]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Folder) -> int | None:
    """The step that a checkpoint's folder is named for; None where it isn't one."""
    match = _FOLDER.match(os.path.basename(os.fspath(path)))
    return int(match.group(1)) if match else None


def save(folder: Folder, step: int, files: Mapping[str, Content], *, keep: int = 3, attempt: int = 0) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest `keep` of those up to it. `files`: bytes, or a callable that
    writes into the open file. Raises OSError, ValueError, and what a callable raises; then no folder of that name is left
    behind that wasn't there before."""
    if step < 0 or not files:
        raise ValueError("a checkpoint has a step from 0 on and at least one file")
    for name in files:
        if not _is_file_name(name):
            raise ValueError(f"{name!r} can't be a checkpoint's file: give a plain name without a slash or a leading dot")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root, attempt)
    temporary = root / f".tmp-{attempt}-{name_of(step)}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        listed: dict[str, dict[str, Any]] = {}
        for name, content in files.items():
            path = temporary / name
            with path.open("xb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Read back rather than summed while written: a writer may seek, and this sees what the file really holds.
            listed[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        with (temporary / MANIFEST).open("xb") as file:
            file.write(json.dumps({"files": listed, "step": step}, sort_keys=True).encode())
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        final = root / name_of(step)
        if final.exists():
            # The same step again, of an attempt that went on from an earlier one: the newer history is the truth.
            aside = root / f".tmp-{attempt}-{name_of(step)}-{os.getpid()}-{secrets.token_hex(4)}"
            final.rename(aside)
            temporary.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            temporary.rename(final)
        _sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(root, step, keep)
    return final


def latest_whole(folder: Folder, at_most: int | None = None) -> Path | None:
    """The newest checkpoint (of a step up to `at_most`) of which every file is there as it was written; None where there is none."""
    for path in reversed(steps_in(folder)):
        if (at_most is None or (step_of(path) or 0) <= at_most) and is_whole(path):
            return path
    return None


def steps_in(folder: Folder) -> list[Path]:
    """Folders named as checkpoints are, oldest step first; whole or not."""
    try:
        found = [path for path in Path(folder).iterdir() if step_of(path) is not None]
    except OSError:
        return []
    return sorted(found, key=lambda path: step_of(path) or 0)


def is_whole(path: Folder) -> bool:
    manifest = read_manifest(path)
    if manifest is None:
        return False
    for name, entry in manifest.items():
        file = Path(path) / name
        try:
            if file.is_symlink() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
                return False
        except OSError:
            return False
    return True


def read_manifest(path: Folder) -> dict[str, dict[str, Any]] | None:
    """The files that a checkpoint must hold, by name; None where its manifest is missing, torn or another step's."""
    try:
        with (Path(path) / MANIFEST).open("rb") as file:
            text = file.read(MANIFEST_BYTES_MAX + 1)
        value = json.loads(text) if len(text) <= MANIFEST_BYTES_MAX else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] != step_of(path):
        return None
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        return None
    for name, entry in files.items():
        if not _is_file_name(name) or not isinstance(entry, dict):
            return None
        if type(entry.get("bytes")) is not int or not isinstance(entry.get("sha256"), str):
            return None
    return files


def _is_file_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= 200
        and not name.startswith(".")
        and "/" not in name
        and "\0" not in name
        and name != MANIFEST
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, step: int, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints up to `step`. Later ones belong to another history, and aren't touched."""
    upto = [path for path in steps_in(root) if (step_of(path) or 0) <= step]
    whole = 0
    for path in reversed(upto):
        # Not summed again: one without a readable manifest counts as not whole, and doesn't push a whole one out.
        if read_manifest(path) is not None:
            whole += 1
            if whole <= max(keep, 1):
                continue
        elif whole < max(keep, 1):
            continue
        # Under another name first: a removal that is cut short must not leave half a checkpoint under a good name.
        doomed = root / f".tmp-0-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.rename(doomed)
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)


def _sweep(root: Path, attempt: int) -> None:
    """Removes what killed writers left: temporary folders of earlier attempts, and old ones."""
    old_before_s = time.time() - TEMPORARY_AGE_S
    for path in root.glob(".tmp-*-step-*"):
        match = _TEMPORARY.match(path.name)
        try:
            if match and (int(match.group(1)) < attempt or path.stat().st_mtime < old_before_s):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
