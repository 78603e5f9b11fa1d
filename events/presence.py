"""That a node, its agent and its producers are there."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import TEXT_MAX, Fact


class RankProcess(Fact):
    """A rank's process as the agent sees it. `state`: the letter of /proc/PID/stat (R, S, D, T, Z …), `-` when it is gone."""

    rank: int = Field(ge=0)
    pid: int = Field(ge=0)
    state: str = Field(max_length=1)


class Heartbeat(Fact):
    """Once a second from each node's agent. `spooled`: observations that wait on disk; `parked`: workers that wait, warm."""

    TYPE: ClassVar[str] = "keepstep.heartbeat.v1"
    ranks: tuple[RankProcess, ...] = ()
    parked: int = Field(default=0, ge=0)
    spooled: int = Field(default=0, ge=0)
    interval_s: float = Field(default=1.0, gt=0)


class AgentState(Fact):
    """An agent or one of its producers starts, stops, stalls, skips or fails, and says so. A stop that was asked for is not
    silence."""

    TYPE: ClassVar[str] = "keepstep.agent_state.v1"
    producer: str = "agent"
    state: Literal["started", "stopping", "stalled", "skipped", "failed", "resumed"]
    version: str = ""
    detail: str = Field(default="", max_length=TEXT_MAX)


class Tick(Fact):
    """The broker's clock, once a second in each telemetry stream. Its time is the record's broker time."""

    TYPE: ClassVar[str] = "keepstep.tick.v1"


class SettingsAdopted(Fact):
    """The thresholds by which detectors judge from here on, in the telemetry stream's own order. `settings` is the policy's
    `detectors` section as canonical JSON, `policy_digest` the digest of the policy that it stands in."""

    TYPE: ClassVar[str] = "keepstep.settings_adopted.v1"
    settings: str
    policy_digest: str
