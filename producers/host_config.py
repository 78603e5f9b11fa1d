"""How a node is set up: kernel, modules, firmware, and the part of its ranks' environment that makes collectives behave. A reader with
a root beside pure parts. Names begin with their group (`kernel.release`, `nic.firmware`, `env.NCCL_DEBUG`).

Of an environment only names with these prefixes are looked at, and of these none that sounds like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from events.gpu import GpuSample
from events.host import Configuration
from producers.host_probes import HostFiles

PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "UCX_", "FI_", "OMP_")
VALUE_CHARACTERS_MAX = 120
VALUES_MAX = 256
ENVIRONMENT_BYTES_MAX = 256 * 1024
#: Values by rank that are shown side by side.
SIDE_BY_SIDE_MAX = 8

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
_BY_ID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
#: Names whose value is a node's or rank's own by design.
_OWN = re.compile(r"NCCL_HOSTID|NCCL_COMM_ID|OMP_PROC_BIND_RANK|TORCH_NCCL_DUMP_.*|.*_(?:FILE|DIR|PATH|LOG|PIPE)\Z")

#: File below the root -> name.
FILES: Mapping[str, str] = {
    "proc/sys/kernel/osrelease": "kernel.release",
    "sys/kernel/mm/transparent_hugepage/enabled": "kernel.huge_pages",
    "proc/sys/kernel/numa_balancing": "kernel.numa_balancing",
    "proc/sys/vm/zone_reclaim_mode": "kernel.zone_reclaim",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "kernel.governor",
    "sys/devices/system/cpu/smt/control": "kernel.smt",
    "sys/module/nvidia/version": "kernel.nvidia",
    "sys/module/nvidia_peermem/version": "kernel.nvidia_peermem",
    "sys/module/mlx5_core/version": "kernel.mlx5_core",
    "sys/module/gdrdrv/version": "kernel.gdrdrv",
}
#: Words of the kernel's command line that change what a collective costs.
_BOOT_WORD = re.compile(
    r"(?:iommu|intel_iommu|amd_iommu|pci|pcie_aspm|mitigations|nosmt|isolcpus|transparent_hugepage|numa_balancing)(?:=|\Z)"
)


def environment(raw: bytes) -> dict[str, str]:
    """What may be shown of /proc/PID/environ, by name."""
    out: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.decode("utf-8", "replace").partition("=")
        if equals and name.startswith(PREFIXES) and name.isascii() and not _SECRET.search(name) and not _OWN.match(name):
            out[name[:100]] = shown(value)
    return out


def shown(value: str) -> str:
    """A value as it may be compared and read: in one line, cut, users in addresses blanked, ids of devices counted."""
    if _BY_ID.search(value):
        return f"{len(_BY_ID.findall(value))} by id"
    plain = _USER_IN_URL.sub(r"\1[redacted]@", value)
    plain = "".join(c if c.isprintable() else "?" for c in plain).strip()
    if len(plain) <= VALUE_CHARACTERS_MAX:
        return plain
    return f"{plain[:VALUE_CHARACTERS_MAX]}… #{sha256(value.encode('utf-8', 'replace')).hexdigest()[:8]}"


def of_ranks(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One value a name of all ranks' here: where they differ, the different ones side by side in the ranks' order."""
    out: dict[str, str] = {}
    for name in sorted({name for one in each for name in one}):
        values = list(dict.fromkeys(one.get(name, "(not set)") for one in each))
        more = f" and {len(values) - SIDE_BY_SIDE_MAX} more" if len(values) > SIDE_BY_SIDE_MAX else ""
        out[f"env.{name}"] = " | ".join(values[:SIDE_BY_SIDE_MAX]) + more
    return out


def chosen(text: str) -> str:
    """Of a file that marks its choice, `always [madvise] never`, the choice; others as they are."""
    marked = re.search(r"\[([^\]]+)\]", text)
    return shown(marked[1] if marked else text.strip())


def of_host(files: HostFiles) -> dict[str, str]:
    out: dict[str, str] = {}
    for path, name in FILES.items():
        if text := files.text(path, expected=False).strip():
            out[name] = chosen(text)
    words = [word for word in files.text("proc/cmdline", expected=False).split() if _BOOT_WORD.match(word)]
    if words:
        out["kernel.boot"] = shown(" ".join(words))
    return out


def of_nics(files: HostFiles) -> dict[str, str]:
    """Firmware and model of the InfiniBand and RoCE devices: the different ones, and how many have each."""
    folder = files.root / "sys/class/infiniband"
    try:
        devices = sorted(path.name for path in folder.iterdir())[:64]
    except OSError:
        return {}
    out: dict[str, str] = {}
    for name, file in (("nic.firmware", "fw_ver"), ("nic.model", "hca_type")):
        values = [files.text(f"sys/class/infiniband/{device}/{file}", expected=False).strip() for device in devices]
        counts = {value: values.count(value) for value in sorted(set(values)) if value}
        if counts:
            out[name] = shown(", ".join(f"{count} x {value}" for value, count in counts.items()))
    return out


def of_gpus(sample: GpuSample | None) -> dict[str, str]:
    """How the GPUs are set up: what all have, or how many have which."""
    if sample is None or not (sample.gpus or sample.driver):
        return {}
    out = {"gpu.driver": sample.driver, "gpu.count": str(len(sample.gpus))}
    for name in (
        "model",
        "vbios",
        "ecc",
        "persistence",
        "mig",
        "power_cap_w",
        "application_sm_clock_mhz",
        "application_memory_clock_mhz",
    ):
        values = [getattr(gpu, name) for gpu in sample.gpus]
        texts = [
            f"{value:g}" if isinstance(value, float) else str(value).lower() for value in values if value not in (None, "")
        ]
        counts = {text: texts.count(text) for text in sorted(set(texts))}
        if len(counts) == 1 and len(texts) == len(values):
            out[f"gpu.{name}"] = texts[0]
        elif counts:
            out[f"gpu.{name}"] = ", ".join(f"{count} x {text}" for text, count in counts.items())
    return {name: shown(value) for name, value in out.items() if value}


def configuration(parts: Iterable[Mapping[str, str]], groups: Iterable[str]) -> Configuration:
    """One fact of all parts; `groups` were read, so that what is not there is not set."""
    values: dict[str, str] = {}
    for part in parts:
        values.update(part)
    known = sorted({*groups, *(name.partition(".")[0] for name in values)})
    return Configuration(
        groups=tuple(known[:16]),
        values=tuple((name[:120], shown(value)[:400]) for name, value in sorted(values.items())[:VALUES_MAX]),
    )
