"""What ranks print, as far as it may matter."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact


class RankLine(Fact):
    """A line that a rank printed, shown as text and with secrets blanked. `count`: how often it came (numbers in it aside)."""

    text: str = Field(max_length=TEXT_MAX)
    stream: Literal["stdout", "stderr"] = "stderr"
    count: int = Field(default=1, ge=1)


class LauncherExit(Fact):
    """One process in a launcher's summary of its failures (torchrun's). `code`: negative for a signal."""

    rank: int = Field(default=-1, ge=-1)
    local_rank: int = Field(default=-1, ge=-1)
    host: str = Field(default="", max_length=NAME_MAX)
    pid: int = Field(default=0, ge=0)
    code: int = 0
    time: str = Field(default="", max_length=64)
    #: The launcher saw it fail first.
    root_cause: bool = False


class RankLog(Fact):
    """What was of interest in a rank's output since the last time. `read_bytes` of it were looked at; `skipped_bytes` were not,
    because the rank prints more than is read a second (then what is here is a sample); `dropped` lines were of interest and
    too many. `last`: the rank has ended, and this is the end of its output."""

    TYPE: ClassVar[str] = "keepstep.rank_log.v1"
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    lines: tuple[RankLine, ...] = Field(default=(), max_length=64)
    #: The newest whole traceback that ended since the last time, its middle left out where it is long.
    traceback: str = Field(default="", max_length=TEXT_MAX)
    launcher: tuple[LauncherExit, ...] = Field(default=(), max_length=32)
    read_bytes: int = Field(default=0, ge=0)
    skipped_bytes: int = Field(default=0, ge=0)
    dropped: int = Field(default=0, ge=0)
    last: bool = False
