"""The stub library, compiled, and the script by which it answers: eight healthy GPUs, changed by a test as it goes on.

There is no GPU where the tests run. The stub has NVML's own calls (stub.c says which), so that the real pynvml runs over it; what is
not tested so is what a real driver does in them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "stub.c"
LINKS = 4

HEALTHY: dict[str, object] = {
    "gpus": 8, "driver": "570.86.15", "gpm": 1,
    "*.temperature": 45, "*.slowdown": 87, "*.utilization": 98, "*.memory_utilization": 40, "*.memory_used": 1 << 34,
    "*.power_mw": 350_000, "*.power_cap_mw": 700_000, "*.power_cap_default_mw": 700_000, "*.sm_clock": 1755, "*.sm_clock_max": 1980,
    "*.memory_clock": 2619, "*.application_sm_clock": 1980, "*.application_memory_clock": 2619, "*.clock_reasons": 0,
    "*.persistence": 1, "*.ecc": 1, "*.mig": 0,
    "*.remapped_corrected": 0, "*.remapped_uncorrected": 0, "*.remap_pending": 0, "*.remap_failed": 0,
    "*.pcie_width": 16, "*.pcie_width_max": 16, "*.pcie_generation": 5, "*.pcie_generation_max": 5, "*.pcie_replays": 0,
    "*.field.3": 0, "*.field.4": 0, "*.field.5": 3, "*.field.6": 0, "*.field.82": 55, "*.field.230": 0,
    "*.gpm.2": 81.5, "*.gpm.3": 30, "*.gpm.5": 42.25, "*.gpm.10": 60, "*.gpm.20": 100, "*.gpm.21": 50, "*.gpm.60": 2000, "*.gpm.61": 1000,
    "0.process": 4242,
    **{f"*.link.{link}.active": 1 for link in range(LINKS)},
    **{f"*.link.{link}.counter.{counter}": 0 for link in range(LINKS) for counter in range(4)},
}  # fmt: skip


class Stub:
    """A script in a folder of its own. `set(...)`, `drop(...)` change what the library answers from its next call on."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.path = folder / "script"
        self.library = library
        self.lines = dict(HEALTHY)
        self._write()

    def set(self, key: str, value: object) -> None:
        self.lines[key] = value
        self._write()

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.lines.pop(key, None)
        self._write()

    def _write(self) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(f"{key} {value}\n" for key, value in self.lines.items()))
        temporary.replace(self.path)


def compiled(folder: Path, *options: str) -> Path:
    """A folder that holds the stub as libnvidia-ml.so.1. Skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: the stub of NVIDIA's library can't be built")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *options, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder
