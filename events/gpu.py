"""What a node's GPUs are and do, as NVIDIA's management library (NVML) tells it, and whether it answers at all."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

GPUS_MAX = 64
LINKS_MAX = 64
PROCESSES_MAX = 64
ERRORS_MAX = 16

#: Why a GPU runs below its clocks; NVML's bits by name.
ClockReason = Literal[
    "idle", "application_clocks", "power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "power_brake",
    "display", "board_limit", "reliability", "other",
]  # fmt: skip
#: What the driver says would bring a GPU back ("other": a number that is not known here).
RecoveryAction = Literal[
    "none", "reset", "reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot", "other"
]
WatchState = Literal["no_driver", "no_gpus", "refused", "watching", "missed"]


class LinkErrors(Fact):
    """One NVLink's error counters since the driver was loaded. Only links with a counter above zero are told."""

    link: int = Field(ge=0)
    replays: int = Field(default=0, ge=0)
    recoveries: int = Field(default=0, ge=0)
    crc: int = Field(default=0, ge=0)
    #: What could not be repaired: failed recoveries, malformed packets, overruns, received errors.
    fatal: int = Field(default=0, ge=0)


class Gpu(Fact):
    """One GPU. What the chip, its driver or this user's rights do not offer is None, never zero. `address` as the kernel writes it
    (`0000:03:00.0`), by which kernel lines name it too. Percentages are 0 to 100; rates are means since the sample before."""

    index: int = Field(ge=0)
    address: str = Field(default="", max_length=64)
    uuid: str = Field(default="", max_length=96)
    serial: str = Field(default="", max_length=64)
    model: str = Field(default="", max_length=96)

    # Work. Plain utilisation says that a kernel was there, which reads 100 in a collective that hangs.
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    #: GPU performance monitoring (Hopper and later): SMs busy, warps resident, tensor cores busy, memory bandwidth used.
    sm_percent: float | None = None
    occupancy_percent: float | None = None
    tensor_percent: float | None = None
    dram_percent: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    processes: tuple[int, ...] | None = Field(default=None, max_length=PROCESSES_MAX, description="process ids that compute")

    # Memory, power, heat, clocks.
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_cap_w: float | None = None
    power_cap_default_w: float | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    slowdown_celsius: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    application_sm_clock_mhz: int | None = None
    application_memory_clock_mhz: int | None = None
    clock_reasons: tuple[ClockReason, ...] | None = Field(default=None, max_length=16)

    # How it is set up.
    vbios: str | None = Field(default=None, max_length=64)
    ecc: bool | None = None
    ecc_pending: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None

    # What went wrong in it. Volatile: since the driver was loaded; aggregate: over its life.
    ecc_corrected_volatile: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_corrected: int | None = None
    retired_uncorrected: int | None = None
    retire_pending: bool | None = None
    recovery_action: RecoveryAction | None = None
    #: Calls that failed otherwise than by not being offered: `nvmlDeviceGetTemperature: GPU requires restart`.
    errors: tuple[str, ...] = Field(default=(), max_length=ERRORS_MAX)

    # Its links.
    links_active: tuple[int, ...] | None = Field(default=None, max_length=LINKS_MAX)
    links_inactive: tuple[int, ...] | None = Field(default=None, max_length=LINKS_MAX)
    link_errors: tuple[LinkErrors, ...] = Field(default=(), max_length=LINKS_MAX)
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_replays: int | None = None


class LostGpu(Fact):
    """A GPU that NVML counts but can't reach. What identified it before, as far as it is known; `code` is NVML's return code."""

    index: int = Field(ge=0)
    address: str = Field(default="", max_length=64)
    uuid: str = Field(default="", max_length=96)
    code: int = 0
    error: str = Field(default="", max_length=NAME_MAX)


class GpuSample(Fact):
    """All of a node's GPUs, looked at in one call, every `interval_s` and whenever one was lost. `up_s`: since the host's boot.
    `on_bus`: GPUs that the kernel's driver holds, reached or not (-1: not known)."""

    TYPE: ClassVar[str] = "keepstep.gpu_sample.v1"
    interval_s: float = Field(gt=0)
    took_s: float = Field(default=0.0, ge=0)
    up_s: float = Field(default=0.0, ge=0)
    driver: str = Field(default="", max_length=80)
    nvml: str = Field(default="", max_length=80)
    on_bus: int = Field(default=-1, ge=-1)
    gpus: tuple[Gpu, ...] = Field(default=(), max_length=GPUS_MAX)
    lost: tuple[LostGpu, ...] = Field(default=(), max_length=GPUS_MAX)


class GpuClocks(Fact):
    """How fast and how hot a node's GPUs run that have work, told on its job's stream twice a minute: what a slow job's nodes are held
    against each other by. `slowest`: the one furthest below the most its clock can, at `slowest_share` of that, and why; `gpus`: how many
    have work; `temperature_celsius`: of the hottest of them."""

    TYPE: ClassVar[str] = "keepstep.gpu_clocks.v1"
    gpus: int = Field(ge=1, le=GPUS_MAX)
    slowest: int = Field(ge=0, le=1_000_000)
    slowest_share: float = Field(gt=0, le=2, allow_inf_nan=False)
    reasons: tuple[ClockReason, ...] = Field(default=(), max_length=16)
    temperature_celsius: float | None = Field(default=None, ge=-1000, le=1000)


class GpuWatch(Fact):
    """How it stands with the watching of GPUs, told when it changes and at each answer that did not come in time.

    no_driver: there is no NVIDIA driver to ask; no_gpus: it has none; refused: it can't be asked, `detail` says why; watching: it
    answers; missed: `misses` questions on end were not answered within `deadline_s`. Of a miss: the GPU that was being asked
    (`index` -1: none), the asking process (`pid`, its state as in /proc, `-` when it is gone, and the kernel function it sleeps in),
    and the ranks in uninterruptible sleep. `stuck`: asking processes that could not be killed."""

    TYPE: ClassVar[str] = "keepstep.gpu_watch.v1"
    state: WatchState
    detail: str = Field(default="", max_length=TEXT_MAX)
    up_s: float = Field(default=0.0, ge=0)
    misses: int = Field(default=0, ge=0)
    deadline_s: float = Field(default=0.0, ge=0)
    #: Whether this process had answered before; the first answer of one may take the driver's whole initialisation.
    answered_before: bool = False
    index: int = Field(default=-1, ge=-1)
    address: str = Field(default="", max_length=64)
    pid: int = Field(default=0, ge=0)
    process_state: str = Field(default="", max_length=1)
    waits_in: str = Field(default="", max_length=NAME_MAX)
    ranks_stuck: tuple[int, ...] = Field(default=(), max_length=1024)
    stuck: int = Field(default=0, ge=0)


class GpuXid(Fact):
    """An Xid that NVML reported the moment it happened: a second way to hear of it where the kernel log may not be read."""

    TYPE: ClassVar[str] = "keepstep.gpu_xid.v1"
    xid: int = Field(ge=0)
    address: str = Field(default="", max_length=64)
    uuid: str = Field(default="", max_length=96)
