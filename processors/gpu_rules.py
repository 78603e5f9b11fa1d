"""What a GPU's sample says is wrong, rule by rule: a table that can be read aloud. Pure, and without memory of its own: what must
last before it is said, and whether it was said, is gpu_health.py's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from events.gpu import Gpu
from events.incident import Confidence, Symptom
from processors.policy import GpuLimits


class Grown(NamedTuple):
    """What changed since the sample before. `down`: links that were active in this boot and are not. Errors are sums over links."""

    down: tuple[int, ...] = ()
    link_errors: int = 0
    crc_per_s: float = 0.0


class Rule(NamedTuple):
    """`wrong(gpu, grown, limits)`: what is wrong in words, '' for nothing. `samples`: the limit that says how many samples on end
    make it so ('': one). `over`: whether its absence is told as well."""

    name: str
    symptom: Symptom
    confidence: Confidence
    wrong: Callable[[Gpu, Grown, GpuLimits], str]
    samples: str = ""
    over: bool = True


#: The driver's own word on what brings a GPU back.
_ACTIONS: Mapping[str, tuple[Symptom, Confidence, str]] = {
    "reset": ("gpu_unavailable", "high", "it needs a reset"),
    "bus_reset": ("gpu_unavailable", "high", "it needs a reset of its bus"),
    "reboot": ("gpu_driver_hang", "high", "the node needs a reboot"),
    "system_reboot": ("gpu_driver_hang", "high", "the system needs a reboot"),
    "drain_p2p": ("gpu_unavailable", "low", "traffic between GPUs must end before it can be judged"),
    "drain_and_reset": ("gpu_unavailable", "low", "it works with less than all of it, and needs a reset once its work is done"),
    "recover_imex_domain": ("nvlink_error", "low", "its IMEX domain must be recovered"),
    "other": ("gpu_unavailable", "low", "something that this version does not know"),
}


def _recovery(action: str) -> Rule:
    symptom, confidence, words = _ACTIONS[action]

    def wrong(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
        return f"the driver's recovery action is {action}: {words}" if gpu.recovery_action == action else ""

    return Rule(f"gpu_recovery_{action}", symptom, confidence, wrong, "" if confidence == "high" else "steady_samples")


def _hot(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    if "hw_thermal" not in (gpu.clock_reasons or ()):
        return ""
    slowdown = f" (slows down at {gpu.slowdown_celsius:g} °C)" if gpu.slowdown_celsius is not None else ""
    heat = f" at {gpu.temperature_celsius:g} °C{slowdown}" if gpu.temperature_celsius is not None else ""
    clock = f", {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz" if gpu.sm_clock_mhz and gpu.sm_clock_max_mhz else ""
    return f"the hardware slows it down because of heat{heat}{clock}"


def _remap_failed(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    return "a row of its memory could not be remapped: no spare is left, or the remapping failed" if gpu.remap_failed else ""


def _remap_pending(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    if gpu.remap_pending:
        return f"a row remapping waits for the next reset (rows remapped so far: {_number(gpu.remapped_uncorrected)} uncorrectable)"
    return "a page retirement waits for the next reset" if gpu.retire_pending else ""


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _link_down(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    if not grown.down:
        return ""
    links = ", ".join(map(str, grown.down))
    return f"NVLink {links} was active and is not; {len(gpu.links_active or ())} links are"


def _link_errors(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    if grown.crc_per_s >= limits.link_crc_per_s:
        return f"{grown.crc_per_s:.0f} NVLink CRC errors a second"
    return f"{grown.link_errors} more NVLink replays, recoveries and unrepaired errors in a sample" if grown.link_errors else ""


def _narrow(gpu: Gpu, grown: Grown, limits: GpuLimits) -> str:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    if not width or not most or width >= most or (gpu.utilization_percent or 0) < limits.load_percent:
        return ""
    return f"its PCIe link is {width} lanes wide of {most}, at {gpu.utilization_percent:g} % utilisation"


RULES: tuple[Rule, ...] = (
    Rule("gpu_row_remap_failed", "gpu_memory_error", "high", _remap_failed, over=False),
    Rule("gpu_row_remap_pending", "gpu_memory_error", "low", _remap_pending, "steady_samples", over=False),
    *(_recovery(action) for action in _ACTIONS),
    Rule("gpu_hw_thermal", "gpu_thermal", "low", _hot, "thermal_samples"),
    Rule("gpu_link_inactive", "nvlink_error", "low", _link_down, "steady_samples"),
    Rule("gpu_link_errors", "nvlink_error", "low", _link_errors, "steady_samples"),
    Rule("gpu_pcie_narrow", "gpu_unavailable", "low", _narrow, "pcie_samples"),
)
