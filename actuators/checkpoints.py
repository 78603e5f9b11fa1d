"""Checkpoints on disk as an agent reads them: which is the newest whole one. The format is the hook's (keepstep/checkpoint.py), read
here on its own, since nothing of the hook is imported outside the training process.

    step-00000120/manifest.json   {"step":120,"files":{"model.pt":{"bytes":n,"sha256":"…"}}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"step-(\d{1,18})\Z", re.ASCII)
MANIFEST_BYTES_MAX = 16 << 20
#: Newest first, at most this many are looked at: beyond it something else is wrong.
CANDIDATES_MAX = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: str


class NotWhole(ValueError):
    """Why a checkpoint can't be restored from: one sentence."""


def parse_manifest(raw: bytes) -> tuple[int, dict[str, tuple[int, str]]]:
    """The step, and each file's size in bytes and SHA-256. Raises NotWhole."""
    try:
        value = json.loads(raw)
        step, files = value["step"], value["files"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotWhole("its manifest is not one") from None
    if type(step) is not int or step < 0:
        raise NotWhole("its manifest has no step")
    for name, (size, digest) in listed.items():
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts or "" in parts or "\0" in name:
            raise NotWhole(f"its manifest names a file outside of it: {name[:80]!r}")
        if type(size) is not int or not isinstance(digest, str):
            raise NotWhole(f"its manifest says nothing usable of {name[:80]!r}")
    return step, listed


class CheckpointReader:
    """Finds and checks. A file that was checked is not read again while size, inode and times stay the same (at most 4,096)."""

    def __init__(self) -> None:
        self._checked: dict[tuple[int, int, int, int, int], str] = {}

    def newest_whole(self, folder: str, below_step: int = -1) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, of a step below `below_step` (-1: of any), and why newer ones were passed over; None: there is
        none. Reads whole files: not for an event loop's thread."""
        passed: list[str] = []
        try:
            names = os.listdir(folder)
        except OSError as error:
            return None, [f"{folder}: {error.strerror or error}"]
        found = sorted(((int(m[1]), name) for name in names if (m := NAME.match(name))), reverse=True)
        wanted = [one for one in found if below_step < 0 or one[0] < below_step]
        if newer := len(found) - len(wanted):
            passed.append(f"{newer} of step {below_step} or later passed over")
        for step, name in wanted[:CANDIDATES_MAX]:
            path = Path(folder, name)
            try:
                self.check(path, step)
            except NotWhole as error:
                passed.append(f"{name}: {error}")
                continue
            return Checkpoint(step, str(path)), passed
        return None, passed

    def check(self, path: Path, step: int) -> None:
        """Raises NotWhole."""
        try:
            with open(path / "manifest.json", "rb") as file:
                raw = file.read(MANIFEST_BYTES_MAX + 1)
        except OSError as error:
            raise NotWhole(f"no manifest ({error.strerror or error})") from None
        if len(raw) > MANIFEST_BYTES_MAX:
            raise NotWhole(f"its manifest is over {MANIFEST_BYTES_MAX >> 20} MiB")
        stated, files = parse_manifest(raw)
        if stated != step:
            raise NotWhole(f"its manifest is of step {stated}")
        for name, (size, digest) in sorted(files.items()):
            self._check_file(path / name, name, size, digest)

    def _check_file(self, path: Path, name: str, size: int, digest: str) -> None:
        try:
            with open(path, "rb") as file:
                seen = os.fstat(file.fileno())
                if seen.st_size != size:
                    raise NotWhole(f"{name} has {seen.st_size} bytes, not {size}")
                key = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
                actual = self._checked.get(key)
                if actual is None:
                    actual = hashlib.file_digest(file, "sha256").hexdigest()
                    if len(self._checked) >= 4096:
                        self._checked.clear()
                    self._checked[key] = actual
        except OSError as error:
            raise NotWhole(f"{name} can't be read ({error.strerror or error})") from None
        if actual != digest.lower():
            raise NotWhole(f"{name} is not what was written: its SHA-256 differs")
