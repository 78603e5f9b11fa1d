"""What the training processes do."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

Phase = Literal["startup", "step", "evaluation", "checkpoint", "undeclared"]
#: What a script says it changed, so that its curves may jump for a good reason; '' for nothing.
Change = Literal["", "data", "rate", "context", "other"]


class StepSample(Fact):
    """One finished step of one rank. Quantities that the script did not give are None. `mfu`: model FLOPs utilisation, 0 to 1
    over the stated or measured peak."""

    step: int = Field(ge=0)
    ended_ns: int = Field(ge=0, description="wall clock of the rank's host, ns")
    step_time_s: float = Field(ge=0)
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int | None = Field(default=None, ge=0)
    mfu: float | None = None
    #: The optimizer was not stepped (a loss scaler's overflow): what this step's loss and gradient norm are is no fault.
    skipped: bool = False
    #: The part of `step_time_s` in this rank's own work, before it waited for others; None: not told.
    busy_s: float | None = Field(default=None, ge=0)
    #: Changed with this step, or since the one before.
    changed: Change = ""


class TrainingProgress(Fact):
    """What a rank's hook sent since the last time: its phase, when that phase began, the steps it finished (newest last, at most
    256), and how many samples the ring overwrote. Sent at least once a second while the process lives and is not stopped."""

    TYPE: ClassVar[str] = "keepstep.training_progress.v1"
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    phase: Phase
    #: Counts up at each change of phase and each finished step: progress is this number growing.
    progress: int = Field(ge=0)
    #: The last step finished, -1 before the first.
    step: int = Field(ge=-1)
    #: The step that the run was restored at, -1 for none.
    restored_step: int = Field(default=-1, ge=-1)
    samples: tuple[StepSample, ...] = Field(default=(), max_length=256)
    dropped: int = Field(default=0, ge=0)


class RankStarted(Fact):
    """A rank's process runs."""

    TYPE: ClassVar[str] = "keepstep.rank_started.v1"
    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    pid: int = Field(ge=0)
    #: From a parked worker (torch imported) rather than cold.
    warm: bool = False
    restore: str = Field(default="", max_length=TEXT_MAX)


class RankExit(Fact):
    """A rank's process ended. Exactly one of `code` and `signal` is set; both None: it ended while nothing watched. `asked`: on
    command, which is no failure. `stderr_tail`: its last lines."""

    TYPE: ClassVar[str] = "keepstep.rank_exit.v1"
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    code: int | None = None
    signal: int | None = None
    asked: bool = False
    ended_ns: int = Field(default=0, ge=0, description="wall clock of the host, ns; 0: not known")
    stderr_tail: str = Field(default="", max_length=TEXT_MAX)
    host: str = Field(default="", max_length=NAME_MAX)
