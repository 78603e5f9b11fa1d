"""What a node's kernel says."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import TEXT_MAX, Fact


class KernelRecord(Fact):
    """One line of a kernel log. `facility` 0 is the kernel's own; a record that user space wrote (any other) is hearsay unless
    a setting of the agent trusts it. `since_boot_us` and `sequence` are the ring's (0 where the source has none)."""

    text: str = Field(max_length=TEXT_MAX)
    priority: int = Field(default=6, ge=0, le=7)
    facility: int = Field(default=0, ge=0)
    sequence: int = Field(default=0, ge=0)
    since_boot_us: int = Field(default=0, ge=0)
    hearsay: bool = False
    #: From before this boot's agent saw the attempt begin, or before the boot: history, not news.
    history: bool = False
    #: It names a process of keepstep's own: the noise of a probe, unless the machine is at fault for certain.
    own: bool = False


class KernelLog(Fact):
    """Lines of the kernel log, in order, as many as came together (at most 64). `origin`: kmsg, or the file's path."""

    TYPE: ClassVar[str] = "keepstep.kernel_log.v1"
    records: tuple[KernelRecord, ...] = Field(max_length=64)
    origin: str = Field(default="kmsg", max_length=TEXT_MAX)


class EvidenceGap(Fact):
    """Evidence is missing: an overrun ring, a full spool, a hole in a producer's numbers, a file that was cut. `missing`: how
    many records, -1 where it can't be told."""

    TYPE: ClassVar[str] = "keepstep.evidence_gap.v1"
    producer: str
    reason: Literal["overrun", "spool_full", "numbers", "truncated", "unreadable", "clock", "ticks", "thinned"]
    missing: int = -1
    detail: str = Field(default="", max_length=TEXT_MAX)
