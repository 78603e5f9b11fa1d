"""What a test changes around it, and the proof that it was put back: environment, torch's switches, the GPUs' clocks, limit of power and
modes. (Clocks that were locked by `nvidia-smi -lgc` are told by none of its queries, and can't be put back.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

#: Of nvidia-smi, one line a GPU. What the tests or NVIDIA's tool may leave changed.
PERSISTENCE, GRAPHICS, MEMORY, POWER, COMPUTE = (
    "persistence_mode",
    "clocks.applications.graphics",
    "clocks.applications.memory",
    "power.limit",
    "compute_mode",
)
GPU_FIELDS = ("index", PERSISTENCE, GRAPHICS, MEMORY, POWER, COMPUTE)
COMPUTE_MODES = {"Default": "0", "Exclusive_Thread": "1", "Prohibited": "2", "Exclusive_Process": "3"}
SMI_S = 20.0


class Surroundings:
    """`with Surroundings(devices=True) as around:` … then `around.changed` (what differed at the end, `name: before -> after`) and
    `around.restored` (whether all of it is as before again, looked at anew). `devices`: also the GPUs', which takes a moment."""

    def __init__(self, devices: bool = False) -> None:
        self.devices = devices
        self.changed: list[str] = []
        self.restored = True

    def __enter__(self) -> Surroundings:
        self._before = self._seen()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._seen()
        differs = {name: value for name, value in self._before.items() if after.get(name) != value}
        differs.update({name: None for name in after if name not in self._before})
        for name, before in differs.items():
            self.changed.append(f"{name}: {_shown(before)} -> {_shown(after.get(name))}"[:200])
            try:
                self._put_back(name, before)
            except Exception as error:
                self.changed.append(f"{name} could not be put back: {error}"[:200])
        if differs:
            self.restored = self._seen() == self._before

    def _seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = {f"environment {name}": value for name, value in os.environ.items()}
        seen.update({f"torch {name}": read() for name, (read, _) in _switches().items()})
        if self.devices:
            seen.update(_devices())
        return seen

    def _put_back(self, name: str, value: Any) -> None:
        kind, _, rest = name.partition(" ")
        if kind == "environment":
            if value is None:
                del os.environ[rest]
            else:
                os.environ[rest] = value
        elif kind == "torch":
            _switches()[rest][1](value)
        else:
            index, _, field = rest.partition(" ")
            _put_back_device(index, field, value, self._before)


def _shown(value: Any) -> str:
    return "(none)" if value is None else str(value)


def _switches() -> dict[str, tuple[Any, Any]]:
    """Those of torch's switches that the tests set: how each is read, and set."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def attribute(owner: Any, name: str) -> tuple[Any, Any]:
        return (lambda: getattr(owner, name), lambda value: setattr(owner, name, value))

    return {
        "determinism": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "TF32 in products": attribute(matmul, "allow_tf32"),
        "reduced precision in bf16 sums": attribute(matmul, "allow_bf16_reduced_precision_reduction"),
        "reduced precision in fp16 sums": attribute(matmul, "allow_fp16_reduced_precision_reduction"),
        "TF32 in cuDNN": attribute(cudnn, "allow_tf32"),
        "cuDNN benchmark": attribute(cudnn, "benchmark"),
    }


def _devices() -> dict[str, Any]:
    """Of each GPU, what nvidia-smi says. Empty without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"GPU query": f"not readable ({type(error).__name__})"}
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.strip()]
    return {
        f"GPU {row[0]} {field}": value
        for row in rows
        if len(row) == len(GPU_FIELDS)
        for field, value in zip(GPU_FIELDS[1:], row[1:], strict=True)
    }


def _put_back_device(index: str, field: str, value: Any, before: dict[str, Any]) -> None:
    """Raises what keeps it from being put back."""
    if field in (GRAPHICS, MEMORY):  # set together, memory first
        call = ["-ac", f"{int(before[f'GPU {index} {MEMORY}'])},{int(before[f'GPU {index} {GRAPHICS}'])}"]
    elif field == PERSISTENCE:
        call = ["-pm", "1" if value == "Enabled" else "0"]
    elif field == POWER:
        call = ["-pl", f"{float(value):g}"]
    else:
        call = ["-c", COMPUTE_MODES[value]]
    subprocess.run([str(shutil.which("nvidia-smi")), "-i", index, *call], capture_output=True, timeout=SMI_S, check=True)


def exact(torch: Any) -> None:
    """Sets torch's switches so that a computation repeated, here or on an equal machine, gives the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import the compiler: over a second
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
