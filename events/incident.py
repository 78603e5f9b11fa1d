"""What detectors claim. All of it is in LEDGER under the detector's role."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

Explicit = Literal[
    "cuda_error", "cpu_overload", "host_oom", "disk_space", "ib_error", "fs_mount", "storage_error", "container_error",
    "os_kernel_panic", "gpu_memory_error", "external_service", "gpu_unavailable", "disk_fault", "rank_exit", "node_silent",
    "nic_down", "nic_flap", "switch_down", "gpu_driver_hang", "gpu_thermal", "nvlink_error", "user_code_error", "monitor_lost",
    "unknown",
]  # fmt: skip
Implicit = Literal["job_hang", "mfu_decline", "nan_value", "loss_spike"]
Manual = Literal["code_update", "data_update", "operator_restart"]
#: DESIGN section 6; the names are the census's rows.
Symptom = Explicit | Implicit | Manual

Confidence = Literal["high", "low", "sympathetic"]


class Signal(Fact):
    """A detector's claim: `symptom` of `node` (empty: of the job as a whole), standing on the events in `causes`, quoted in
    `evidence` (up to 1 KB). Its job and attempt (0: not known) are the envelope's. `seen_ns`: when the evidence was seen, in
    broker time; the record's time less this is the evidence's age. `count`: how many observations it stands for.
    `confidence` sympathetic: what a crash of the job itself leaves behind on healthy machines."""

    TYPE: ClassVar[str] = "keepstep.signal.v1"
    symptom: Symptom
    node: str = Field(default="", max_length=NAME_MAX)
    rank: int = Field(default=-1, ge=-1)
    device: str = Field(default="", max_length=NAME_MAX)
    confidence: Confidence = "low"
    rule: str = Field(default="", max_length=NAME_MAX)
    evidence: str = Field(default="", max_length=1024)
    seen_ns: int = Field(ge=0)
    count: int = Field(default=1, ge=1)
    #: The job's highest finished step when it was claimed (-1: none, or not a job's).
    step: int = Field(default=-1, ge=-1)
    #: Of NaN, jumps and corruption: the first step that showed it. A restore goes back to before it.
    bad_step: int = Field(default=-1, ge=-1)
    #: Of NaN: whose (`loss`, `grad_norm`); each clears by itself.
    metric: str = Field(default="", max_length=NAME_MAX)


class SignalCleared(Fact):
    """What a signal claimed is over: a silent node is heard again, a stalled job moves. `metric`: of NaN, whose; empty: of all."""

    TYPE: ClassVar[str] = "keepstep.signal_cleared.v1"
    symptom: Symptom
    node: str = Field(default="", max_length=NAME_MAX)
    metric: str = Field(default="", max_length=NAME_MAX)
    seen_ns: int = Field(ge=0)
    evidence: str = Field(default="", max_length=1024)


class ProgressNoted(Fact):
    """The job trains: at `step` in the envelope's attempt. `first`: the attempt's healthy start is confirmed by it (its first
    steps all finite); later ones come every so often, so that the ledger knows of progress without holding each step."""

    TYPE: ClassVar[str] = "keepstep.progress_noted.v1"
    step: int = Field(ge=0)
    first: bool = False
    restored_step: int = -1
    seen_ns: int = Field(ge=0)


class JobFinished(Fact):
    """Every rank of the envelope's attempt ended with code 0, at whatever times. Not an incident."""

    TYPE: ClassVar[str] = "keepstep.job_finished.v1"
    step: int = -1
    seen_ns: int = Field(ge=0)


class EvidenceMissing(Fact):
    """A hole in what a detector should have seen: rules may not read it as health, nor as silence."""

    TYPE: ClassVar[str] = "keepstep.evidence_missing.v1"
    node: str = Field(default="", max_length=NAME_MAX)
    producer: str = Field(default="", max_length=NAME_MAX)
    reason: str = Field(max_length=NAME_MAX)
    missing: int = -1
    detail: str = Field(default="", max_length=TEXT_MAX)


class DetectorStarted(Fact):
    """A worker took up a detector's partitions. `settings` is what it judges by (canonical JSON)."""

    TYPE: ClassVar[str] = "keepstep.detector_started.v1"
    detector: str
    worker: str
    partitions: tuple[int, ...]
    code_version: str
    settings: str
