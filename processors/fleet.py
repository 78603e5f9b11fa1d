"""What the decider knows: jobs, their incidents and recoveries, holds, evictions. State is frozen; `evolve` is the one way it changes,
and every change comes from an event of the ledger, so that whoever folds the ledger knows the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from events.action import OutcomeRecorded
from events.clock import NS
from events.decision import (
    AttemptEnded,
    DeciderStarted,
    DecisionMade,
    EvidenceJudged,
    IncidentClosed,
    IncidentOpened,
    IntentIssued,
    Rung,
    SharedCause,
    TimerFired,
    TimerSet,
)
from events.envelope import AnyEvent
from events.incident import JobFinished, ProgressNoted, SignalCleared
from events.job import (
    ApprovalGiven,
    CatalogueAdopted,
    HoldPlaced,
    HoldReleased,
    JobDeclared,
    Place,
    PolicyAdopted,
    RestartRequested,
    StandbyAdded,
    StopRequested,
)
from processors.policy import BadPolicy, Policy
from processors.policy import parse as parse_policy

#: High-confidence symptoms that name a machine (ByteRobust section 4.1: skip the diagnostics).
NAMING = frozenset({"gpu_unavailable", "os_kernel_panic", "disk_fault"})
#: Bounds of what is remembered; beyond them the oldest goes.
RECENT_IDS = 2048


@dataclass(frozen=True, slots=True)
class Trouble:
    """A node in trouble: what it was, when it was seen, when the decider learnt of it."""

    symptom: str
    seen_ns: int
    learnt_ns: int


@dataclass(frozen=True, slots=True)
class Incident:
    """A run of trouble on one job. `named`: nodes that high-confidence evidence names. `crash`, `stall`: unanswered ones.
    `root`: the crash's first failing rank is known, it is not all echoes. `crashed`: there was one at any time."""

    id: str
    epoch: int
    symptom: str
    opened_ns: int
    first_evidence_ns: int
    attempt: int
    step: int = -1
    named: Mapping[str, Trouble] = field(default_factory=dict)
    answered: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[tuple[str, str], int] = field(default_factory=dict)
    crash: bool = False
    crashed: bool = False
    root: bool = False
    stall: bool = False
    last_evidence_ns: int = 0
    evidence: int = 0
    #: purpose -> timer that was set last for it; and the purposes whose timer has fired.
    timers: Mapping[str, str] = field(default_factory=dict)
    #: What the culprit window waits for: '' (not set), root or echo.
    window: str = ""
    due: frozenset[str] = frozenset()
    reattempts: int = 0
    recoveries: int = 0
    decided_ns: int = 0
    rung: Rung = "none"
    #: The symptom that the remedy answered, where it is a finer one than what opened the incident.
    cause: str = ""
    nodes_out: tuple[str, ...] = ()
    #: '' (open), 'held', 'no_standby', 'observed' or 'handed_over': why nothing more is decided for now.
    blocked: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a decision set in motion. `stage`: awaiting (an approval), decided, stopping, starting, confirming."""

    decision: str
    incident: str
    epoch: int
    rung: Rung
    stage: str
    nodes: tuple[str, ...] = ()
    standbys: tuple[str, ...] = ()
    pending: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    stop_only: bool = False
    graceful: bool = False
    deadline: str = ""
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One training run. `places`: its machines in rank order; `standbys`: spares, in order. `wanted`: running, stopped or finished."""

    declared: JobDeclared
    places: tuple[Place, ...]
    standbys: tuple[Place, ...]
    attempt: int = 0
    ended: bool = True
    epoch: int = 0
    ordinal: int = 0
    wanted: str = "running"
    request: str = "declared"
    incident: Incident | None = None
    plan: Plan | None = None
    evicted: Mapping[str, int] = field(default_factory=dict)
    #: Standbys that are not to be used, and why.
    unfit: Mapping[str, str] = field(default_factory=dict)
    #: Nodes that are not heard, also after their incident closed.
    silent: Mapping[str, Trouble] = field(default_factory=dict)
    confirmed: int = 0
    last_progress_ns: int = 0
    last_step: int = -1

    #: The step that the current attempt was restored at.
    last_restored: int = -1
    #: Places by node.
    index: Mapping[str, Place] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.declared.job


@dataclass(frozen=True, slots=True)
class Eviction:
    at_ns: int
    job: str
    node: str
    rack: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything. `now_ns`: the greatest broker time seen."""

    now_ns: int = 0
    code_version: str = ""
    policy: Policy = field(default_factory=Policy)
    policy_digest: str = "default"
    catalogue_digest: str = ""
    jobs: Mapping[str, Job] = field(default_factory=dict)
    holds: Mapping[str, int] = field(default_factory=dict)
    evictions: tuple[Eviction, ...] = ()
    bad_serials: Mapping[str, str] = field(default_factory=dict)
    recent: Mapping[str, None] = field(default_factory=dict)
    older: Mapping[str, None] = field(default_factory=dict)
    #: node -> job, of every place and standby declared.
    owners: Mapping[str, str] = field(default_factory=dict)

    def held(self, job: str) -> bool:
        """Whether a hold on the job or the fleet stands now."""
        return any(key in self.holds and (self.holds[key] == 0 or self.now_ns < self.holds[key]) for key in ("", job))


def seen_before(fleet: Fleet, event_id: str) -> bool:
    return event_id in fleet.recent or event_id in fleet.older


def remember(fleet: Fleet, event_id: str) -> Fleet:
    """Two generations of ids, so that remembering costs the same at any age of the ledger."""
    if len(fleet.recent) >= RECENT_IDS // 2:
        return replace(fleet, older=fleet.recent, recent={event_id: None})
    return replace(fleet, recent={**fleet.recent, event_id: None})


def evolve(fleet: Fleet, event: AnyEvent, time_ns: int) -> Fleet:
    """The fleet after an event of the ledger that was stored at `time_ns` (own events: their trigger's time)."""
    if time_ns > fleet.now_ns:
        fleet = replace(fleet, now_ns=time_ns)
    change = _CHANGES.get(type(event.data))
    return change(fleet, event, event.data) if change else fleet


def _put(fleet: Fleet, job: Job) -> Fleet:
    return replace(fleet, jobs={**fleet.jobs, job.name: job})


def _incident(job: Job, **changes: Any) -> Job:
    return replace(job, incident=replace(job.incident, **changes)) if job.incident else job


# --- what operators say -------------------------------------------------------------------------------------------------------


def _decider_started(fleet: Fleet, event: AnyEvent, data: DeciderStarted) -> Fleet:
    return replace(fleet, code_version=data.code_version)


def _policy(fleet: Fleet, event: AnyEvent, data: PolicyAdopted) -> Fleet:
    try:
        return replace(fleet, policy=parse_policy(data.text), policy_digest=data.digest)
    except BadPolicy:  # it was refused where it was read; a ledger that holds one all the same keeps its old policy
        return fleet


def _catalogue(fleet: Fleet, event: AnyEvent, data: CatalogueAdopted) -> Fleet:
    return replace(fleet, catalogue_digest=data.digest)


def _declared(fleet: Fleet, event: AnyEvent, data: JobDeclared) -> Fleet:
    job = Job(declared=data, places=data.nodes, standbys=data.standbys, index={p.node: p for p in data.nodes})
    known = fleet.jobs.get(data.job)
    if known is not None:
        if known.wanted == "running":
            return fleet
        # A run of the same name after its end: numbers go on, so that nothing of the old one can be taken for the new.
        job = replace(job, attempt=known.attempt, epoch=known.epoch, ordinal=known.ordinal)
    owners = {**fleet.owners, **{place.node: data.job for place in (*data.standbys, *data.nodes)}}
    return _put(replace(fleet, owners=owners), job)


def _standby(fleet: Fleet, event: AnyEvent, data: StandbyAdded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or any(place.node == data.place.node for place in (*job.places, *job.standbys)):
        return fleet
    if data.place.node in job.evicted or (data.place.serial and data.place.serial in fleet.bad_serials):
        return fleet
    job = replace(job, standbys=(*job.standbys, data.place))
    if job.incident and job.incident.blocked == "no_standby":
        job = _incident(job, blocked="")
    return _put(replace(fleet, owners={**fleet.owners, data.place.node: data.job}), job)


def _hold(fleet: Fleet, event: AnyEvent, data: HoldPlaced) -> Fleet:
    return replace(fleet, holds={**fleet.holds, data.job: data.expires_ns})


def _release(fleet: Fleet, event: AnyEvent, data: HoldReleased) -> Fleet:
    return _unheld(replace(fleet, holds={key: value for key, value in fleet.holds.items() if key != data.job}))


def _unheld(fleet: Fleet) -> Fleet:
    for job in fleet.jobs.values():
        if job.incident and job.incident.blocked == "held" and not fleet.held(job.name):
            fleet = _put(fleet, _incident(job, blocked=""))
    return fleet


def _restart(fleet: Fleet, event: AnyEvent, data: RestartRequested) -> Fleet:
    job = fleet.jobs.get(data.job)
    return fleet if job is None else _put(fleet, replace(job, wanted="running", request=data.symptom))


def _stop(fleet: Fleet, event: AnyEvent, data: StopRequested) -> Fleet:
    job = fleet.jobs.get(data.job)
    return fleet if job is None else _put(fleet, replace(job, wanted="stopped", request="stop"))


def _approval(fleet: Fleet, event: AnyEvent, data: ApprovalGiven) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or job.plan is None or job.plan.decision != data.decision or job.plan.stage != "awaiting":
        return fleet
    if data.granted:
        return _put(fleet, replace(job, plan=replace(job.plan, stage="decided")))
    return _put(fleet, _incident(replace(job, plan=None), blocked="handed_over"))


# --- what detectors and actuators say -----------------------------------------------------------------------------------------


def _cleared(fleet: Fleet, event: AnyEvent, data: SignalCleared) -> Fleet:
    name = fleet.owners.get(data.node, event.job) if data.node else event.job
    job = fleet.jobs.get(name)
    if job is None:
        return fleet
    if data.symptom == "node_silent":
        if job.unfit.get(data.node) == "node_silent":
            job = replace(job, unfit={key: value for key, value in job.unfit.items() if key != data.node})
        job = replace(job, silent={key: value for key, value in job.silent.items() if key != data.node})
    elif data.symptom == "job_hang" and event.attempt == job.attempt:
        job = _incident(job, stall=False)
    return _put(fleet, job)


def _progress(fleet: Fleet, event: AnyEvent, data: ProgressNoted) -> Fleet:
    job = fleet.jobs.get(event.job)
    if job is None or event.attempt != job.attempt:
        return fleet
    confirmed = job.attempt if data.first else job.confirmed
    if confirmed == job.attempt and job.plan is not None and not job.plan.incident and job.plan.stage == "confirming":
        job = replace(job, plan=None)
    return _put(
        fleet,
        replace(
            job,
            last_progress_ns=max(job.last_progress_ns, data.seen_ns),
            last_step=data.step,
            last_restored=data.restored_step,
            confirmed=confirmed,
        ),
    )


def _finished(fleet: Fleet, event: AnyEvent, data: JobFinished) -> Fleet:
    job = fleet.jobs.get(event.job)
    if job is None or event.attempt != job.attempt:
        return fleet
    return _put(fleet, replace(job, wanted="finished", last_step=max(data.step, job.last_step)))


def _outcome(fleet: Fleet, event: AnyEvent, data: OutcomeRecorded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or job.plan is None or data.key not in job.plan.pending:
        return fleet
    pending = {key: verb for key, verb in job.plan.pending.items() if key != data.key}
    failed = job.plan.failed
    # An eviction or a wake-up that failed does not stop the recovery: what counts is whether the attempt starts.
    if data.result != "done" and data.verb in ("stop_attempt", "start_attempt"):
        failed = failed or f"{data.verb} {data.result}: {data.detail}"[:1000]
    stage = "confirming" if data.verb == "start_attempt" and data.result == "done" else job.plan.stage
    if stage == "confirming" and not job.plan.incident and job.confirmed == job.attempt:
        return _put(fleet, replace(job, plan=None))
    return _put(fleet, replace(job, plan=replace(job.plan, pending=pending, failed=failed, stage=stage)))


def _fired(fleet: Fleet, event: AnyEvent, data: TimerFired) -> Fleet:
    if data.purpose == "hold_expiry":
        return _unheld(fleet)
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if job.plan is not None and job.plan.deadline == data.timer:
        job = replace(job, plan=replace(job.plan, overdue=True))
    if job.incident and job.incident.id == data.incident and job.incident.timers.get(data.purpose) == data.timer:
        job = _incident(job, due=job.incident.due | {data.purpose})
    return _put(fleet, job)


# --- what the decider decided --------------------------------------------------------------------------------------------------


def _opened(fleet: Fleet, event: AnyEvent, data: IncidentOpened) -> Fleet:
    job = fleet.jobs[data.job]
    incident = Incident(data.incident, data.epoch, data.symptom, event.time, data.first_evidence_ns, data.attempt, data.step)
    return _put(fleet, replace(job, incident=incident, epoch=data.epoch))


def _judged(fleet: Fleet, event: AnyEvent, data: EvidenceJudged) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if (data.verdict == "not_in_job" and data.confidence == "high") or (
        data.verdict == "not_in_job" and data.symptom == "node_silent"
    ):
        return _put(fleet, replace(job, unfit={**job.unfit, data.node: data.symptom}))
    incident = job.incident
    if data.verdict != "attached" or incident is None:
        return fleet
    trouble = Trouble(data.symptom, data.seen_ns, event.time)
    changes: dict[str, Any] = {"evidence": incident.evidence + 1, "last_evidence_ns": event.time}
    if data.symptom in NAMING and data.node and data.node not in incident.named:
        changes["named"] = {**incident.named, data.node: trouble}
    elif data.symptom == "node_silent":
        job = replace(job, silent={**job.silent, data.node: trouble})
    elif data.symptom == "rank_exit":
        if not _answered_attempt(job, data.attempt):
            changes |= {"crash": True, "crashed": True}
            changes["root"] = incident.root or data.confidence != "sympathetic"
    elif data.symptom == "job_hang" and not _answered_attempt(job, data.attempt):
        changes["stall"] = True
    return _put(fleet, _incident(job, **changes))


def _answered_attempt(job: Job, attempt: int) -> bool:
    """Whether the end of this attempt is decided already, so that its late cries add nothing to act on."""
    return job.plan is not None and job.plan.stage in ("awaiting", "decided", "stopping") and attempt <= job.attempt


def _shared(fleet: Fleet, event: AnyEvent, data: SharedCause) -> Fleet:
    job = fleet.jobs[data.job]
    if job.incident is None:
        return fleet
    return _put(fleet, _incident(job, shared={**job.incident.shared, (data.scope, data.name): data.nodes}))


def _timer(fleet: Fleet, event: AnyEvent, data: TimerSet) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if data.purpose == "recovery_deadline" and job.plan is not None:
        job = replace(job, plan=replace(job.plan, deadline=data.timer))
    elif job.incident and job.incident.id == data.incident:
        timers = {**job.incident.timers, data.purpose: data.timer}
        job = _incident(job, timers=timers, due=job.incident.due - {data.purpose})
        if data.purpose == "culprit_window":
            job = _incident(job, window=data.note)
    return _put(fleet, job)


def _decided(fleet: Fleet, event: AnyEvent, data: DecisionMade) -> Fleet:
    job = replace(fleet.jobs[data.job], ordinal=data.ordinal)
    incident = job.incident if data.incident else None
    acts = not data.vetoed and data.mode != "observe"
    if incident is not None:
        changes: dict[str, Any] = {"decided_ns": event.time}
        if data.vetoed == "hold":
            changes["blocked"] = "held"
        elif data.vetoed == "no_standby" and fleet.policy.decider.no_standby == "hold":
            changes["blocked"] = "no_standby"
        elif data.rung == "hand_over":
            changes |= {"rung": "hand_over", "blocked": "handed_over", "crash": False, "stall": False}
        elif data.vetoed == "":
            changes |= {
                "rung": data.rung if acts else incident.rung, "crash": False, "root": False, "stall": False,
                "recoveries": incident.recoveries + 1,
                "reattempts": incident.reattempts + (data.rung == "reattempt"),
                "answered": {**incident.answered, **dict.fromkeys(data.nodes, data.decision)},
                "nodes_out": tuple(dict.fromkeys((*incident.nodes_out, *(data.nodes if acts else ())))),
                "due": incident.due - {"culprit_window"}, "window": "",
            }  # fmt: skip
            if acts and data.nodes:
                named = incident.named.get(data.nodes[-1])
                changes["cause"] = incident.cause or (named.symptom if named else "node_silent")
        else:
            changes["answered"] = {**incident.answered, **dict.fromkeys(data.nodes, data.vetoed)}
        job = _incident(job, **changes)
    if data.rung == "planned":
        stop_only = job.wanted == "stopped"
        stage = "decided" if not data.vetoed else "held"
        job = replace(job, plan=Plan(data.decision, "", job.epoch, "planned", stage, stop_only=stop_only, graceful=True))
        if not data.vetoed:
            job = replace(job, request="")
    elif data.rung in ("evict", "reattempt"):
        if acts:
            stage = "awaiting" if data.mode == "approve" else "decided"
            job = replace(job, plan=Plan(data.decision, data.incident, data.epoch, data.rung, stage, data.nodes, data.standbys))
        elif not data.vetoed:
            job = replace(job, plan=None)
    elif data.rung == "hand_over":
        job = replace(job, plan=None)
    return _put(fleet, job)


def _intent(fleet: Fleet, event: AnyEvent, data: IntentIssued) -> Fleet:
    job = fleet.jobs[data.job]
    plan = job.plan
    if plan is not None and plan.decision == data.decision and data.verb != "notify":
        stage = "starting" if data.verb == "start_attempt" else "stopping"
        plan = replace(plan, pending={**plan.pending, data.key: data.verb}, stage=stage)
    job = replace(job, plan=plan)
    if data.verb == "evict_node":
        place = next((p for p in (*job.places, *job.standbys) if p.node == data.node), Place(node=data.node))
        if data.node not in job.evicted:
            evictions = (*_recent(fleet), Eviction(event.time, job.name, data.node, place.rack))
            bad = {**fleet.bad_serials, place.serial: data.node} if place.serial else fleet.bad_serials
            fleet = replace(fleet, evictions=evictions, bad_serials=bad)
        job = replace(job, evicted={**job.evicted, data.node: event.time})
    elif data.verb == "start_attempt":
        known = {place.node: place for place in (*job.standbys, *job.places)}
        places = tuple(known.get(p.node, Place(node=p.node)) for p in data.places)
        used = {place.node for place in places}
        standbys = tuple(place for place in job.standbys if place.node not in used and place.node not in job.evicted)
        job = replace(job, places=places, standbys=standbys, attempt=data.attempt, ended=False)
        job = replace(job, index={place.node: place for place in places})
    return _put(fleet, job)


def _recent(fleet: Fleet) -> tuple[Eviction, ...]:
    """Evictions that some budget still counts: the log keeps the rest."""
    budget = fleet.policy.budget
    window = max(budget.job.window_s, budget.rack.window_s, budget.fleet.window_s)
    return tuple(e for e in fleet.evictions if e.at_ns > fleet.now_ns - int(window * NS))


def _attempt_ended(fleet: Fleet, event: AnyEvent, data: AttemptEnded) -> Fleet:
    job = fleet.jobs[data.job]
    if data.attempt != job.attempt:
        return fleet
    return _put(fleet, replace(job, ended=True, plan=None if data.reason == "finished" else job.plan))


def _closed(fleet: Fleet, event: AnyEvent, data: IncidentClosed) -> Fleet:
    job = fleet.jobs[data.job]
    return _put(fleet, replace(job, incident=None, plan=None if job.plan and job.plan.incident else job.plan))


_CHANGES: Mapping[type, Callable[[Fleet, AnyEvent, Any], Fleet]] = {
    DeciderStarted: _decider_started, PolicyAdopted: _policy, CatalogueAdopted: _catalogue, JobDeclared: _declared,
    StandbyAdded: _standby, HoldPlaced: _hold, HoldReleased: _release, RestartRequested: _restart, StopRequested: _stop,
    ApprovalGiven: _approval, SignalCleared: _cleared, ProgressNoted: _progress, JobFinished: _finished,
    OutcomeRecorded: _outcome, TimerFired: _fired, IncidentOpened: _opened, EvidenceJudged: _judged, SharedCause: _shared,
    TimerSet: _timer, DecisionMade: _decided, IntentIssued: _intent, AttemptEnded: _attempt_ended, IncidentClosed: _closed,
}  # fmt: skip
