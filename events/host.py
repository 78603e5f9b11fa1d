"""What a machine itself is like: load, memory, folders, stuck processes, its clock, how it is set up, and what its last boot left."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

#: A folder's file system cannot be written to: by its mount (a person's doing), or by itself (after an error, or shut down).
ReadOnly = Literal["", "mount", "error"]


class Folder(Fact):
    """A folder that the job uses. Sizes -1: not known. `hung_s`: how long an answer about it has been waited for; what else is said
    of it is then of before."""

    path: str = Field(max_length=TEXT_MAX)
    use: Literal["state", "checkpoints", "working", "temporary", "shared_memory", "other"] = "other"
    mount: str = Field(default="", max_length=TEXT_MAX)
    filesystem: str = Field(default="", max_length=NAME_MAX)
    #: On a disk of this machine, by its device.
    local: bool = False
    total_bytes: int = Field(default=-1, ge=-1)
    free_bytes: int = Field(default=-1, ge=-1)
    #: Share of the file system's inodes that are free; None where it has no limit.
    inodes_free: float | None = None
    read_only: ReadOnly = ""
    #: It was writable when it was first looked at in this boot.
    was_writable: bool = False
    hung_s: float = Field(default=0.0, ge=0)
    #: Why nothing is known of it ('' where something is): it does not exist, or may not be looked at.
    error: str = Field(default="", max_length=NAME_MAX)


class StuckRank(Fact):
    """A rank's process in uninterruptible sleep that has not run since it was first seen so. `where`: the kernel function that it
    sleeps in, as far as this user may know."""

    rank: int = Field(ge=0)
    pid: int = Field(ge=0)
    for_s: float = Field(ge=0)
    where: str = Field(default="", max_length=NAME_MAX)


class HostSample(Fact):
    """Every `interval_s` from each node. None and -1: this machine does not tell. Pressures are the kernel's averages over 10 s, in
    percent of time in which some (or all: `full`) tasks waited."""

    TYPE: ClassVar[str] = "keepstep.host_sample.v1"
    interval_s: float = Field(gt=0)
    up_s: float = Field(ge=0)
    cpus: int = Field(default=1, ge=1)
    load1: float | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    memory_pressure_full: float | None = None
    io_pressure: float | None = None
    io_pressure_full: float | None = None
    memory_total_bytes: int = -1
    memory_available_bytes: int = -1
    #: Of the control group that the agent is in, which in a container is the container's.
    group_limit_bytes: int = -1
    group_used_bytes: int = -1
    #: Processes killed for memory since the sample before: on the whole machine, and in the agent's control group.
    oom_kills: int = Field(default=0, ge=0)
    group_oom_kills: int = Field(default=0, ge=0)
    #: Ranks whose process ended since the sample before.
    ranks_ended: tuple[int, ...] = Field(default=(), max_length=1024)
    folders: tuple[Folder, ...] = Field(default=(), max_length=64)
    stuck: tuple[StuckRank, ...] = Field(default=(), max_length=64)
    #: What the kernel's time discipline says: offset and greatest error; whether anything keeps the clock right.
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    clock_synchronised: bool | None = None
    #: What could not be read, so that nothing above is taken for health.
    blind: tuple[str, ...] = Field(default=(), max_length=32)


class LastBoot(Fact):
    """What an earlier boot left of its end: the last lines of its kernel log. History; told once for each record. `age_s`: how long
    before this was read the record was made, -1 where it can't be told."""

    TYPE: ClassVar[str] = "keepstep.last_boot.v1"
    source: str = Field(max_length=TEXT_MAX)
    panic: bool
    text: str = Field(default="", max_length=TEXT_MAX)
    age_s: float = -1.0


class Configuration(Fact):
    """How a node is set up, told on its job's stream: `values` by name, sorted. A name's first part is its group (`kernel.release`,
    `gpu.driver`, `env.NCCL_DEBUG`); within a group that is in `groups`, a name that is not there is not set."""

    TYPE: ClassVar[str] = "keepstep.configuration.v1"
    groups: tuple[str, ...] = Field(default=(), max_length=16)
    values: tuple[tuple[str, str], ...] = Field(default=(), max_length=256)


class ConfigurationDrift(Fact):
    """A note of the detector's in LEDGER: a node is set up unlike the clear majority of its job's nodes. It opens nothing. `value`
    and `expected` '': not set. `over`: no longer so."""

    TYPE: ClassVar[str] = "keepstep.configuration_drift.v1"
    node: str = Field(max_length=NAME_MAX)
    name: str = Field(max_length=NAME_MAX)
    value: str = Field(default="", max_length=NAME_MAX)
    expected: str = Field(default="", max_length=NAME_MAX)
    #: Nodes that have the expected value, of those whose value is known.
    agree: int = Field(default=0, ge=0)
    of: int = Field(default=0, ge=0)
    over: bool = False
