"""A disk of a few megabytes that a test can fill: a tmpfs, which takes root and the right to mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.streams import Limits, ensure_streams

_MIB = 1 << 20
SIZE_MIB = 64
#: Streams that such a disk holds.
LIMITS = Limits(telemetry_bytes=6 * _MIB, deadletter_bytes=_MIB, changelog_bytes=2 * _MIB)


async def small_streams(nc: Any, replicas: int = 1) -> None:
    await ensure_streams(nc, replicas, LIMITS)


@dataclass(frozen=True, slots=True)
class SmallDisk:
    folder: Path

    def fill(self) -> None:
        """Not a byte is left, until `empty`."""
        with (self.folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
            for chunk in (bytes(_MIB), bytes(4096), b"\0"):
                with suppress(OSError):
                    while file.write(chunk) == len(chunk):
                        pass

    def empty(self) -> None:
        (self.folder / "filler").unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Skips the test where nothing can be mounted."""
    folder.mkdir()
    run = partial(subprocess.run, capture_output=True, timeout=20, check=False)
    if os.geteuid() or run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "tmpfs", str(folder)]).returncode:
        pytest.skip("a disk to fill takes the right to mount one")
    try:
        yield SmallDisk(folder)
    finally:
        run(["umount", "-l", str(folder)])
