"""What a person is shown: the fold of LEDGER and of the training telemetry into jobs, nodes and the story of each incident. The same
fold serves the live view, `status` and the demo's table."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from events.clock import NS
from events.decision import DecisionMade, EvidenceJudged, IncidentClosed, IncidentOpened, IntentIssued, SharedCause
from events.envelope import AnyEvent
from events.incident import JobFinished, ProgressNoted
from events.job import ApprovalGiven, JobDeclared, OverrideGiven, PageAcknowledged, RestartRequested, StopRequested
from events.ports import Record
from events.presence import Heartbeat
from events.registry import Malformed, parse
from events.subjects import is_clocks
from events.training import RankExit, RankStarted, TrainingProgress
from processors.detector import read
from processors.ettr import WallTime, observe, told
from processors.fleet import Fleet, evolve


@dataclass(slots=True)
class IncidentStory:
    """One incident as it unfolds. Times in broker ns, 0: not yet."""

    id: str
    job: str
    epoch: int
    symptom: str
    first_evidence_ns: int
    opened_ns: int
    attempt: int
    evidence: int = 0
    decisions: list[DecisionMade] = field(default_factory=list)
    decided_ns: int = 0
    shared: list[SharedCause] = field(default_factory=list)
    closed: IncidentClosed | None = None
    closed_ns: int = 0

    @property
    def mechanism(self) -> str:
        if self.closed is not None:
            return self.closed.mechanism
        return self.decisions[-1].rung if self.decisions else ""


@dataclass(slots=True)
class JobView:
    """A job's training as its hook tells it."""

    name: str
    attempt: int = 0
    step: int = -1
    phase: str = "undeclared"
    loss: float | None = None
    mfu: float | None = None
    step_time_s: float = 0.0
    losses: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Asked:
    """A decision that waited, or waits, for a person's yes; what was answered, if anything."""

    made: DecisionMade
    at_ns: int
    answer: ApprovalGiven | None = None
    answered_ns: int = 0


@dataclass(slots=True)
class Watch:
    fleet: Fleet = field(default_factory=Fleet)
    incidents: dict[str, IncidentStory] = field(default_factory=dict)
    jobs: dict[str, JobView] = field(default_factory=dict)
    walls: dict[str, WallTime] = field(default_factory=dict)
    #: node -> (broker ns of its last observation, its last heartbeat).
    nodes: dict[str, tuple[int, Heartbeat | None]] = field(default_factory=dict)
    now_ns: int = 0
    unread: int = 0
    deadletters: int = 0
    progress: dict[str, ProgressNoted] = field(default_factory=dict)
    #: The last evidence that opened nothing.
    unheeded: deque[EvidenceJudged] = field(default_factory=lambda: deque(maxlen=100))
    #: decision -> what was asked, in the order of asking.
    asked: dict[str, Asked] = field(default_factory=dict)
    #: What a person was paged with, in order.
    pages: list[IntentIssued] = field(default_factory=list)
    #: job -> why a person was called for it outside of any incident, and when, until it is acknowledged, the next word is given, or a new
    #: attempt made a healthy step.
    calls: dict[str, tuple[DecisionMade, int]] = field(default_factory=dict)

    def ledger(self, record: Record) -> AnyEvent | None:
        """Folds one LEDGER record; None if it is not readable."""
        try:
            event = parse(record.data)
        except Malformed:
            self.unread += 1
            return None
        self.now_ns = max(self.now_ns, record.time_ns)
        self.fleet = evolve(self.fleet, event, record.time_ns)
        data = event.data
        if event.job and ".operator." in record.subject:
            self.walls[event.job] = told(self.walls.get(event.job, WallTime()), record.time_ns, data)
        if isinstance(data, IncidentOpened):
            self.incidents[data.incident] = IncidentStory(
                data.incident, data.job, data.epoch, data.symptom, data.first_evidence_ns, event.time, data.attempt
            )
        if isinstance(data, EvidenceJudged) and not data.incident:
            self.unheeded.append(data)
        story = self.incidents.get(getattr(data, "incident", ""))
        if story is not None:
            if isinstance(data, EvidenceJudged):
                story.evidence += 1
            elif (
                isinstance(data, DecisionMade) and story.closed is None
            ):  # what is decided of its machines after it is another matter
                story.decisions.append(data)
                story.decided_ns = record.time_ns
            elif isinstance(data, SharedCause):
                story.shared.append(data)
            elif isinstance(data, IncidentClosed):
                story.closed, story.closed_ns = data, record.time_ns
        self._call(event, record.time_ns)
        if isinstance(data, ProgressNoted):
            self.progress[event.job] = data
        elif isinstance(data, DecisionMade) and data.mode == "approve" and not data.vetoed and data.rung != "hand_over":
            self.asked.setdefault(data.decision, Asked(data, record.time_ns))
        elif isinstance(data, IntentIssued) and data.verb == "notify":
            self.pages.append(data)
        elif isinstance(data, ApprovalGiven) and ".operator." in record.subject:
            asked = self.asked.get(data.decision)
            if asked is not None and asked.answer is None:
                asked.answer, asked.answered_ns = data, record.time_ns
        return event

    def _call(self, event: AnyEvent, time_ns: int) -> None:
        data = event.data
        if isinstance(data, JobFinished | IncidentOpened) or (isinstance(data, ProgressNoted) and data.first):
            self.calls.pop(event.job, None)
        elif isinstance(data, JobDeclared | RestartRequested | StopRequested | OverrideGiven):
            self.calls.pop(data.job, None)
        elif isinstance(data, PageAcknowledged) and not data.incident:
            self.calls = {job: call for job, call in self.calls.items() if call[0].decision != data.decision}
        elif isinstance(data, DecisionMade) and data.rung == "hand_over" and not data.incident and data.mode != "observe":
            self.calls[data.job] = data, time_ns

    def telemetry(self, record: Record) -> None:
        """Folds one record of either telemetry stream."""
        self.now_ns = max(self.now_ns, record.time_ns)
        if is_clocks(record.subject):
            return
        try:
            seen = read(record)
        except (Malformed, ValueError):
            self.unread += 1
            return
        data = seen.event.data
        if isinstance(data, Heartbeat):
            self.nodes[seen.node] = (seen.seen_ns, data)
        if not seen.job:
            return
        if isinstance(data, TrainingProgress | RankStarted | RankExit):
            view = self.jobs.setdefault(seen.job, JobView(seen.job))
            self.walls[seen.job] = observe(self.walls.get(seen.job, WallTime()), seen)
            if isinstance(data, TrainingProgress) and seen.event.attempt >= view.attempt:
                self._training(view, seen.event.attempt, data)

    @staticmethod
    def _training(view: JobView, attempt: int, data: TrainingProgress) -> None:
        if attempt > view.attempt:
            view.attempt, view.step, view.phase = attempt, -1, "startup"
        view.phase = data.phase
        if data.step > view.step:
            view.step = data.step
            for sample in data.samples[-1:]:
                view.loss, view.mfu, view.step_time_s = sample.loss, sample.mfu, sample.step_time_s
                if sample.loss is not None:
                    view.losses = [*view.losses[-199:], sample.loss]

    def waiting(self) -> list[Asked]:
        """The decisions that wait for a yes now, in the order of asking, each with the machines that it is still about."""
        plans = (job.plan for job in self.fleet.jobs.values())
        now = {plan.decision: plan for plan in plans if plan is not None and plan.stage == "awaiting"}
        waits = ((asked, now[decision]) for decision, asked in self.asked.items() if decision in now)
        return [
            replace(asked, made=asked.made.model_copy(update={"nodes": plan.nodes, "standbys": plan.standbys}))
            for asked, plan in waits
        ]

    def open_incidents(self) -> list[IncidentStory]:
        return [story for story in self.incidents.values() if story.closed is None]


def seconds(ns: int) -> float:
    return ns / NS


def plain(value: Any) -> Any:
    """Models as plain JSON values."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
