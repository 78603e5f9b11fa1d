"""The one interface of everything that acts on a cluster, and what its adapters are told and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from events.action import CommandAnswered, NodeCommand, Result
from events.decision import IntentIssued
from events.finding import CheckResult, ReplayResult, StackRound
from events.job import JobDeclared


@dataclass(frozen=True, slots=True)
class Work:
    """An intent with what is known of its job. `standbys`: spare nodes that were not evicted, in order. `reference`: what its machines
    agreed on in earlier tests, to the bit: what must be equal for it -> digest."""

    intent: IntentIssued
    declared: JobDeclared
    standbys: tuple[str, ...] = ()
    reference: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it: `detail` a sentence, `nodes` those for which it did not come to pass. `again`: it may succeed if it is
    simply tried again."""

    result: Result
    detail: str = ""
    nodes: tuple[str, ...] = ()
    again: bool = field(default=False)
    restored_step: int = -1
    stacks: tuple[StackRound, ...] = ()
    tests: tuple[CheckResult, ...] = ()
    replays: tuple[ReplayResult, ...] = ()


class Unanswered(Exception):
    """A node's agent did not answer in time."""


class Nodes(Protocol):
    """How an actuator speaks to agents (actuators.channel)."""

    async def ask(self, node: str, command: NodeCommand, within_s: float) -> CommandAnswered:
        """Sends the command until it is answered. Raises Unanswered."""
        ...


class Backend(Protocol):
    """One way to act. Each call carries out one intent and may be made again for the same one: it must then come to the same."""

    async def stop_attempt(self, work: Work, nodes: Nodes) -> Done: ...
    async def evict_node(self, work: Work, nodes: Nodes) -> Done: ...
    async def wake_standby(self, work: Work, nodes: Nodes) -> Done: ...
    async def start_attempt(self, work: Work, nodes: Nodes) -> Done: ...
    async def notify(self, work: Work, nodes: Nodes) -> Done: ...
    async def capture_stacks(self, work: Work, nodes: Nodes) -> Done: ...
    async def diagnose(self, work: Work, nodes: Nodes) -> Done: ...
    async def examine(self, work: Work, nodes: Nodes) -> Done: ...
    async def group_test(self, work: Work, nodes: Nodes) -> Done: ...
    async def finished(self, declared: JobDeclared, key: str, standbys: tuple[str, ...], nodes: Nodes) -> None:
        """The job is over: what was kept ready for it can go. Best effort, nothing is recorded."""
        ...


async def carry_out(backend: Backend, work: Work, nodes: Nodes) -> Done:
    """The backend's own call for an intent's verb."""
    match work.intent.verb:
        case "stop_attempt":
            return await backend.stop_attempt(work, nodes)
        case "evict_node":
            return await backend.evict_node(work, nodes)
        case "wake_standby":
            return await backend.wake_standby(work, nodes)
        case "start_attempt":
            return await backend.start_attempt(work, nodes)
        case "notify":
            return await backend.notify(work, nodes)
        case "capture_stacks":
            return await backend.capture_stacks(work, nodes)
        case "diagnose":
            return await backend.diagnose(work, nodes)
        case "examine":
            return await backend.examine(work, nodes)
        case "group_test":
            return await backend.group_test(work, nodes)
