"""What becomes of the fleet by what the decider decided. Each change reads the recorded event alone and suffers one that does not fit
(of a job that is not known, say), so that what is recorded stands, whatever the rules of today would have said. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from events.clock import NS
from events.decision import (
    AttemptEnded,
    DecisionMade,
    EvidenceJudged,
    IncidentClosed,
    IncidentOpened,
    IntentIssued,
    Rung,
    SharedCause,
    TimerSet,
)
from events.job import Place
from processors.state import NAMING, Eviction, Fleet, Incident, Job, Plan, Told, Trouble, counted, with_incident

#: The longest window that a policy can give a budget: what is older counts for none.
WINDOW_NS_MAX = 30 * 24 * 3600 * NS


def _opened(fleet: Fleet, event: Told, data: IncidentOpened) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    incident = Incident(data.incident, data.epoch, data.symptom, event.time, data.first_evidence_ns, data.attempt, data.step)
    incident = incident._replace(troubled=counted({}, (job.by_node[node] for node in job.silent if node in job.by_node)))
    return fleet.put(job._replace(incident=incident, epoch=data.epoch))


def _judged(fleet: Fleet, event: Told, data: EvidenceJudged) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    silent = data.symptom == "node_silent"
    if data.verdict == "not_in_job":
        if silent or data.confidence == "high":
            return fleet.put(job._replace(unfit={**job.unfit, data.node: data.symptom}))
        return fleet
    trouble = Trouble(data.symptom, data.seen_ns, event.time)
    new = data.node in job.by_node and data.node not in job.silent
    if silent and data.verdict in ("attached", "recorded") and data.node in job.by_node:
        job = job._replace(silent={**job.silent, data.node: trouble})
        fleet = fleet.put(job)
    incident = job.incident
    if data.verdict != "attached" or incident is None:
        return fleet
    changes: dict[str, Any] = {"last_evidence_ns": event.time}
    if new and data.node not in incident.named and (silent or data.symptom in NAMING):
        changes["troubled"] = counted(incident.troubled, (job.by_node[data.node],))
    if data.symptom in NAMING and data.node and data.node not in incident.named:
        changes["named"] = {**incident.named, data.node: trouble}
    elif data.symptom == "rank_exit" and not _answered_attempt(job, data.attempt):
        changes |= {"crash": True, "crashed": True, "root": incident.root or data.confidence != "sympathetic"}
    elif data.symptom == "job_hang" and not _answered_attempt(job, data.attempt):
        changes |= {"stall": True, "hung": True}
    return fleet.put(with_incident(job, **changes))


def _answered_attempt(job: Job, attempt: int) -> bool:
    """Whether the end of this attempt is decided already, so that its late cries add nothing to act on."""
    return job.plan is not None and job.plan.stage in ("awaiting", "decided", "stopping") and attempt <= job.attempt


def _shared(fleet: Fleet, event: Told, data: SharedCause) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or job.incident is None:
        return fleet
    return fleet.put(with_incident(job, shared={**job.incident.shared, (data.scope, data.name): data.nodes}))


def _timer(fleet: Fleet, event: Told, data: TimerSet) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if data.purpose == "recovery_deadline":
        return fleet.put(job._replace(plan=job.plan._replace(deadline=data.timer))) if job.plan else fleet
    incident = job.incident
    if incident is None or incident.id != data.incident:
        return fleet
    window = data.note if data.purpose == "culprit_window" else incident.window
    timers, due = {**incident.timers, data.purpose: data.timer}, incident.due - {data.purpose}
    return fleet.put(with_incident(job, timers=timers, due=due, window=window, timers_set=incident.timers_set + 1))


def _decided(fleet: Fleet, event: Told, data: DecisionMade) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    job = job._replace(ordinal=data.ordinal)
    acts = not data.vetoed and data.mode != "observe"
    if job.incident is not None and data.incident == job.incident.id:
        job = with_incident(job, **_answer(fleet, job.incident, event.time, data, acts))
    if data.rung == "planned":
        job = _planned(job, data)
    elif data.rung in ("evict", "reattempt"):
        if acts:
            stage = "awaiting" if data.mode == "approve" else "decided"
            job = job._replace(plan=Plan(data.decision, data.incident, data.epoch, data.rung, stage, data.nodes, data.standbys))
        elif not data.vetoed:
            job = _watched(job)
    elif data.rung == "hand_over" and acts:
        job = job._replace(plan=None)
    elif data.rung == "hand_over" and not data.vetoed:
        job = _watched(job)
    return fleet.put(job)


def _watched(job: Job) -> Job:
    """Observing: what failed is answered by watching; a recovery that is under way already goes on."""
    return job._replace(plan=None) if job.plan and (job.plan.failed or job.plan.overdue) else job


def _answer(fleet: Fleet, incident: Incident, time_ns: int, data: DecisionMade, acts: bool) -> dict[str, Any]:
    """What a decision changes in its incident."""
    changes: dict[str, Any] = {"decided_ns": time_ns}
    if data.vetoed == "hold":
        return changes | {"blocked": "held"}
    if data.vetoed == "no_standby" and fleet.policy.decider.no_standby == "hold":
        return changes | {"blocked": "no_standby"}
    if data.rung == "hand_over":
        return changes | {"rung": "hand_over", "blocked": "handed_over", "crash": False, "stall": False}
    if data.vetoed:
        return changes | {"answered": {**incident.answered, **dict.fromkeys(data.nodes, data.vetoed)}}
    changes |= {
        "crash": False, "root": False, "stall": False,
        "recoveries": incident.recoveries + 1,
        "reattempts": incident.reattempts + (data.rung == "reattempt"),
        "answered": {**incident.answered, **dict.fromkeys(data.nodes, data.decision)},
        "due": incident.due - {"culprit_window"}, "window": "",
    }  # fmt: skip
    if acts and data.mode != "approve":
        changes |= acting(incident, data.rung, data.nodes)
    return changes


def acting(incident: Incident, rung: Rung, nodes: tuple[str, ...]) -> dict[str, Any]:
    """What the incident remembers of a remedy that is carried out, for its end to tell. A machine that is replaced is an eviction,
    whatever made the attempt start anew."""
    changes: dict[str, Any] = {"rung": "evict" if nodes else rung}
    if nodes:
        named = incident.named.get(nodes[-1])
        changes["cause"] = incident.cause or (named.symptom if named else "node_silent")
        changes["nodes_out"] = tuple(dict.fromkeys((*incident.nodes_out, *nodes)))
    return changes


def _planned(job: Job, data: DecisionMade) -> Job:
    """A request stays while a hold stands; one that can't be met (no standby for a machine that is gone) is over."""
    if data.vetoed == "no_standby":
        return job._replace(request="")
    stage = "held" if data.vetoed else "decided"
    plan = Plan(
        data.decision, "", job.epoch, "planned", stage, data.nodes, data.standbys,
        stop_only=job.wanted == "stopped", graceful=True,
    )  # fmt: skip
    return job._replace(plan=plan, request=job.request if data.vetoed else "")


def _intent(fleet: Fleet, event: Told, data: IntentIssued) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    plan = job.plan
    if plan is not None and plan.decision == data.decision and data.verb != "notify":
        stage = "starting" if data.verb == "start_attempt" else "stopping"
        job = job._replace(plan=plan._replace(pending={**plan.pending, data.key: data.verb}, stage=stage))
    if data.verb == "evict_node":
        if data.node not in job.evicted:
            place = next((p for p in (*job.places, *job.standbys) if p.node == data.node), Place(node=data.node))
            recent = tuple(e for e in fleet.evictions if e.at_ns > fleet.now_ns - WINDOW_NS_MAX)
            bad = {**fleet.bad_serials, place.serial: data.node} if place.serial else fleet.bad_serials
            eviction = Eviction(event.time, job.name, data.node, place.rack)
            fleet = fleet._replace(evictions=(*recent, eviction), bad_serials=bad)
            job = job._replace(evicted={**job.evicted, data.node: event.time})
        job = job._replace(evicting={**job.evicting, data.key: data.node})
    elif data.verb == "start_attempt":
        job = _started(job, data)
    return fleet.put(job)


def _started(job: Job, data: IntentIssued) -> Job:
    spares = {place.node: place for place in job.standbys}
    places = tuple(job.by_node.get(p.node) or spares.get(p.node) or Place(node=p.node) for p in data.places)
    used = {place.node for place in places}
    standbys = tuple(place for place in job.standbys if place.node not in used and place.node not in job.evicted)
    job = job._replace(standbys=standbys, attempt=data.attempt, ended=False, ranks=data.places)
    job = job if places == job.places else job.at(places)
    if job.incident is None:
        return job
    # What was settled is settled of the attempt before: new trouble is looked at anew.
    timers = {purpose: timer for purpose, timer in job.incident.timers.items() if purpose != "shared_window"}
    return with_incident(job, hung=False, timers=timers, due=job.incident.due - {"shared_window"})


def _attempt_ended(fleet: Fleet, event: Told, data: AttemptEnded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or data.attempt != job.attempt:
        return fleet
    return fleet.put(job._replace(ended=True, plan=None if data.reason == "finished" else job.plan))


def _closed(fleet: Fleet, event: Told, data: IncidentClosed) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    return fleet.put(job._replace(incident=None, plan=None if job.plan and job.plan.incident else job.plan))


DECIDED: Mapping[type, Callable[[Fleet, Told, Any], Fleet]] = {
    IncidentOpened: _opened, EvidenceJudged: _judged, SharedCause: _shared, TimerSet: _timer, DecisionMade: _decided,
    IntentIssued: _intent, AttemptEnded: _attempt_ended, IncidentClosed: _closed,
}  # fmt: skip
