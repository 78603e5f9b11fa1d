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
    MachineJudged,
    RevisionStable,
    Rung,
    SharedCause,
    TimerSet,
)
from events.job import Place
from processors.attribution import BESIDE, Beside, Sighting
from processors.ladder import AFTER, EVICTIONS, EXAMINATIONS, Situation
from processors.state import (
    METRICS,
    NAMING,
    Eviction,
    Fleet,
    Incident,
    Job,
    Lapse,
    Plan,
    Poison,
    Told,
    Trouble,
    ails,
    counted,
    lost_standbys,
    more_spares,
    stands,
    usable_standbys,
    with_incident,
    with_trouble,
    without_trouble,
)

#: The longest window that a policy can give a budget: what is older counts for none.
WINDOW_NS_MAX = 30 * 24 * 3600 * NS


def relapsed(fleet: Fleet, lapse: Lapse, step: int, time_ns: int) -> bool:
    """Whether new trouble is the old one: the job did not get beyond it, or hardly lived since. The ladder then goes on where it stood."""
    rules = fleet.policy
    beyond = lapse.step + rules.detectors.healthy_steps
    return 0 <= step <= beyond or time_ns < lapse.closed_ns + int(rules.decider.relapse_s * NS)


def _opened(fleet: Fleet, event: Told, data: IncidentOpened) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    incident = Incident(data.incident, data.epoch, data.symptom, event.time, data.first_evidence_ns, data.attempt, data.step)
    if job.lapse is not None and relapsed(fleet, job.lapse, data.step, event.time):
        lapse = job.lapse
        incident = incident._replace(
            last=lapse.last, reattempts=lapse.reattempts, recoveries=lapse.recoveries, relapse_of=lapse.step
        )
    incident = incident._replace(troubled=counted({}, (job.by_node[node] for node in job.silent if node in job.by_node)))
    return fleet.put(job._replace(incident=incident, epoch=data.epoch))


#: So many sightings are remembered.
SIGHTINGS_MAX = 64


def _remembered(fleet: Fleet, data: EvidenceJudged) -> Fleet:
    """What a later judgement of code or machine will be joined from."""
    place = fleet.machines.get(data.node)
    if data.ambiguous:
        rack = place.rack if place else ""
        seen = Sighting(data.ambiguous, data.job, data.node, data.seen_ns, data.attempt, rack=rack, step=data.step)
        return fleet._replace(sightings=(*fleet.sightings[-SIGHTINGS_MAX + 1 :], seen))
    if data.symptom in BESIDE and data.node and data.confidence != "sympathetic":
        return fleet._replace(beside=(*fleet.beside[-SIGHTINGS_MAX + 1 :], Beside(data.symptom, data.node, data.seen_ns)))
    return fleet


def _judged(fleet: Fleet, event: Told, data: EvidenceJudged) -> Fleet:
    fleet = _remembered(fleet, data)
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    silent = data.symptom == "node_silent"
    trouble = Trouble(data.symptom, data.seen_ns, event.time)
    if data.verdict == "not_in_job":
        if silent or data.confidence == "high":
            return fleet.put(job._replace(unfit=with_trouble(job.unfit, data.node, trouble)))
        return fleet
    new = data.node in job.by_node and data.node not in job.silent
    if silent and data.verdict in ("attached", "recorded") and data.node in job.by_node:
        job = job._replace(silent={**job.silent, data.node: trouble})
        fleet = fleet.put(job)
    if data.verdict == "recorded" and ails(data.symptom, data.confidence) and data.node in job.by_node:
        fleet = fleet.put(job := job._replace(ailing=with_trouble(job.ailing, data.node, trouble)))
    if data.symptom in METRICS and data.confidence == "high" and data.verdict in ("attached", "ended_attempt", "recorded"):
        fleet = fleet.put(job := _poisoned(job, data))
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
    elif data.symptom == "user_code_error" and not _answered_attempt(job, data.attempt):
        changes |= {"crash": True, "crashed": True, "root": True, "code": data.quote, "cause": incident.cause or data.symptom}
    elif data.symptom == "user_code_error" and job.plan is not None and job.plan.rung == "diagnose":
        changes |= {"code": data.quote, "cause": incident.cause or data.symptom}  # it decides where the ladder goes on
    elif data.symptom in METRICS:  # what is not to be restored counts even where the attempt's end is decided already
        bad = min(step for step in (data.bad_step, incident.bad_step, max(data.step, 0)) if step >= 0)
        changes |= {"crashed": True, "bad_step": bad}
        if not _answered_attempt(job, data.attempt):
            changes["metric"] = incident.metric | {(data.symptom, data.metric)}
    elif data.symptom == "mfu_decline" and not _answered_attempt(job, data.attempt):
        changes |= {"slow": True, "crashed": True}
    return fleet.put(with_incident(job, **changes))


def _poisoned(job: Job, data: EvidenceJudged) -> Job:
    """What is not to be restored counts even where the attempt's end is decided already, or the next one runs."""
    attempt = data.attempt if data.verdict != "attached" and data.attempt else job.attempt
    if attempt > job.attempt:
        return job
    bad = min((step for step in (data.bad_step, data.step) if step >= 0), default=0)
    of, old = frozenset({(data.symptom, data.metric)}), job.poisoned
    last = max(data.step, job.last_step, bad)
    if old is None:
        return job._replace(poisoned=Poison(bad, last, attempt, of))
    # Of what stands already, no attempt got beyond.
    return job._replace(poisoned=Poison(min(bad, old.first), max(last, old.last), max(attempt, old.attempt), of | old.of))


def _answered_attempt(job: Job, attempt: int) -> bool:
    """Whether the end of this attempt is decided already, so that its late cries add nothing to act on."""
    plan = job.plan
    if plan is None or attempt > job.attempt or not plan.ends_attempt:
        return False
    return plan.stage in ("decided", "stopping", "examining")


def _shared(fleet: Fleet, event: Told, data: SharedCause) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or job.incident is None:
        return fleet
    return fleet.put(with_incident(job, shared={**job.incident.shared, (data.scope, data.name): data.nodes}))


def _timer(fleet: Fleet, event: Told, data: TimerSet) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if data.purpose == "update_window":
        return fleet.put(job._replace(update_timer=data.timer))
    if data.purpose == "recovery_deadline":
        plan = job.plan
        return fleet.put(job._replace(plan=plan._replace(deadline=data.timer, deadlines=plan.deadlines + 1))) if plan else fleet
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
    if "no_standby" in (data.vetoed, data.reason):
        job = job._replace(too_few=len(usable_standbys(fleet, job)))
    if job.incident is not None and data.incident == job.incident.id:
        job = with_incident(job, **_answer(fleet, job.incident, event.time, data, acts))
    if data.rule == "override":
        job = job._replace(override=job.override if data.vetoed == "hold" else None, override_held=data.vetoed == "hold")
    if data.rule == "examine_evicted":
        gone = {node: of for node, of in job.unexamined.items() if node not in data.nodes}
        job = job._replace(unexamined=gone)
    elif data.rung == "planned":
        job = _planned(job, data)
    elif data.rung in RESTARTS or data.rung in EXAMINATIONS:
        if acts:
            stage = "awaiting" if data.mode == "approve" else "decided"
            plan = Plan(data.decision, data.incident, data.epoch, data.rung, stage, data.nodes, data.standbys)
            job = job._replace(
                plan=plan._replace(
                    rule=data.rule, situation=data.situation, revision=data.revision, restore_below_step=data.restore_below_step
                )
            )
        elif not data.vetoed:
            job = _watched(job)
    elif data.rung == "hand_over" and acts:
        job = _wanting(job, data)
        job = job._replace(plan=None)
    elif data.rung == "hand_over" and not data.vetoed:
        job = _watched(job)
    return fleet.put(job)


def _wanting(job: Job, data: DecisionMade) -> Job:
    """What was given up for want of standbys goes on with what failed, or with what a person asked for."""
    plan, incident = job.plan, job.incident
    if data.reason != "no_standby" or plan is None:
        return job
    if not plan.incident:
        return job._replace(lacking=job.lacking or "operator_restart")
    if incident is None or not (plan.failed or plan.overdue or plan.begun):
        return job
    finding = plan.failed or ("it came too late" if plan.overdue else "a standby was lost on the way")
    return with_incident(job, going_on=Situation.FAILED.word, suspects=(), finding=finding)


def _watched(job: Job) -> Job:
    """Observing: what failed, or was not begun, is answered by watching; a recovery that is under way already goes on."""
    plan = job.plan
    return job._replace(plan=None) if plan and (plan.failed or plan.overdue or plan.stage == "decided") else job


def _answer(fleet: Fleet, incident: Incident, time_ns: int, data: DecisionMade, acts: bool) -> dict[str, Any]:
    """What a decision changes in its incident."""
    changes: dict[str, Any] = {"decided_ns": time_ns}
    if data.vetoed == "hold":
        return changes | {"blocked": "held"}
    if data.vetoed == "no_standby" and fleet.policy.decider.no_standby == "hold":
        return changes | {"blocked": "no_standby"}
    if data.rung == "hand_over":
        changes |= {"rung": "hand_over", "blocked": "handed_over"}
        return changes | dict({"lacking": True} if data.reason == "no_standby" else SETTLED)
    if data.vetoed:
        return changes | {"answered": {**incident.answered, **dict.fromkeys(data.nodes, data.vetoed)}}
    changes |= {
        **SETTLED,
        "recoveries": incident.recoveries + (data.rung in RESTARTS),
        "reattempts": incident.reattempts + (data.rung == "reattempt" and data.rule != "override"),
        "answered": {**incident.answered, **dict.fromkeys(data.nodes, data.decision)},
        "due": incident.due - {"culprit_window"}, "window": "",
    }  # fmt: skip
    if data.rule == "override":
        changes["blocked"] = ""  # the ladder goes on from what the person chose
    if acts and data.mode != "approve":
        changes |= acting(fleet, incident, data.rung, data.rule, data.nodes)
    return changes


#: What a decision answers, or a person's yes or no to one: nothing of it is open after that.
SETTLED: Mapping[str, Any] = {
    "crash": False, "root": False, "stall": False, "metric": frozenset(), "slow": False, "code": "", "going_on": "",
}  # fmt: skip

#: Rungs after which the attempt starts anew.
RESTARTS = ("evict", "reattempt", "roll_back")


def acting(fleet: Fleet, incident: Incident, rung: Rung, rule: str, nodes: tuple[str, ...]) -> dict[str, Any]:
    """What the incident remembers of a remedy that is carried out, for its end to tell and for the ladder to go on from. A machine
    that is replaced is an eviction, whatever made the attempt start anew; the mechanism of one that an examination named is that."""
    if rung in EXAMINATIONS:
        return {"last": AFTER[rung]}
    last, mechanism = EVICTIONS.get(rule, (AFTER.get(rung, incident.last), "evict" if nodes and rung != "roll_back" else rung))
    if rung == "reattempt" and incident.reattempts + 1 < fleet.policy.decider.reattempts_max:
        last = incident.last  # there is another before the ladder goes on
    changes: dict[str, Any] = {"rung": mechanism, "last": last}
    if nodes:
        named = incident.named.get(nodes[-1])
        silent = "node_silent" if rule == "evict_silent" else ""
        changes["cause"] = incident.cause or (named.symptom if named else silent)
        changes["nodes_out"] = tuple(dict.fromkeys((*incident.nodes_out, *nodes)))
    return changes


def _planned(job: Job, data: DecisionMade) -> Job:
    """A request stays while a hold stands; one that can't be met (no standby for a machine that is gone) is over."""
    if data.vetoed == "no_standby":
        return job._replace(request="", lacking=job.request)
    stage = "held" if data.vetoed else "decided"
    plan = Plan(
        data.decision, "", job.epoch, "planned", stage, data.nodes, data.standbys,
        stop_only=job.wanted == "stopped", graceful=True,
    )  # fmt: skip
    return job._replace(plan=plan, request=job.request if data.vetoed else "", lacking="")


STAGES = {"start_attempt": "starting", "capture_stacks": "examining", "diagnose": "examining", "group_test": "examining"}


def _intent(fleet: Fleet, event: Told, data: IntentIssued) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    plan = job.plan
    if data.verb == "examine":
        job = job._replace(examined={**job.examined, data.key: (data.node, data.incident, data.text, max(1, data.world_size))})
    elif plan is not None and plan.decision == data.decision and data.verb != "notify":
        earlier = plan.stage if plan.stage in ("starting", "confirming") else "stopping"  # an eviction that is issued anew
        stage, step = STAGES.get(data.verb, earlier), (data.verb, data.node)
        plan = _instead(fleet, job, plan, data) if data.verb == "wake_standby" else plan
        job = job._replace(plan=plan._replace(pending={**plan.pending, data.key: step}, stage=stage, refused=()))
    if data.verb == "evict_node":
        if data.node not in job.evicted:
            place = next((p for p in (*job.places, *job.standbys) if p.node == data.node), Place(node=data.node))
            recent = tuple(e for e in fleet.evictions if e.at_ns > fleet.now_ns - WINDOW_NS_MAX)
            bad = {**fleet.bad_serials, place.serial: data.node} if place.serial else fleet.bad_serials
            group = data.decision if plan is not None and plan.rule == "evict_group" and len(plan.nodes) > 1 else ""
            eviction = Eviction(event.time, job.name, data.node, place.rack, group)
            fleet = fleet._replace(evictions=(*recent, eviction), bad_serials=bad)
            job = job._replace(
                evicted={**job.evicted, data.node: event.time},
                ailing=without_trouble(job.ailing, data.node),
            )
            if fleet.policy.decider.examine_s > 0:
                rule, machines = (plan.rule, len(plan.nodes)) if plan else ("", 1)
                job = job._replace(unexamined={**job.unexamined, data.node: (data.incident, rule, machines)})
        job = job._replace(evicting={**job.evicting, data.key: data.node})
    elif data.verb == "start_attempt":
        job = _started(job, data, event.time)
    return fleet.put(job)


def _instead(fleet: Fleet, job: Job, plan: Plan, data: IntentIssued) -> Plan:
    """The plan with this standby in the place of the first that was lost."""
    lost = lost_standbys(fleet, job, plan)
    if data.node in plan.standbys or not lost:
        return plan
    pending = {key: step for key, step in plan.pending.items() if step != ("wake_standby", lost[0])}  # not waited for any more
    return plan._replace(standbys=tuple(data.node if node == lost[0] else node for node in plan.standbys), pending=pending)


def _started(job: Job, data: IntentIssued, time_ns: int) -> Job:
    spares = {place.node: place for place in job.standbys}
    places = tuple(job.by_node.get(p.node) or spares.get(p.node) or Place(node=p.node) for p in data.places)
    used = {place.node for place in places}
    standbys = tuple(place for place in job.standbys if place.node not in used and place.node not in job.evicted)
    job = job._replace(standbys=standbys, attempt=data.attempt, ended=False, ranks=data.places, last_restored=-1)
    if (
        data.restore_below_step >= 0
    ):  # what was passed over is not restored later either, until this attempt or another is beyond it
        old = job.poisoned or Poison(data.restore_below_step, -1, 0)
        reached = max(old.last, job.last_step, job.incident.step if job.incident else -1)
        job = job._replace(poisoned=Poison(min(old.first, data.restore_below_step), reached, data.attempt - 1, old.of))
    if data.revision:
        job = _runs(job, data.revision)
    job = job if places == job.places else job.at(places)
    for node in (place.node for place in places if stands(job.unfit, place.node, "node_silent")):
        # As a standby; it is silence of the job's own now.
        silent = {**job.silent, node: Trouble("node_silent", time_ns, time_ns)}
        job = job._replace(silent=silent, unfit=without_trouble(job.unfit, node, "node_silent"))
    if job.incident is None:
        return job
    # What was settled is settled of the attempt before: new trouble is looked at anew.
    timers = {purpose: timer for purpose, timer in job.incident.timers.items() if purpose != "shared_window"}
    return with_incident(job, hung=False, timers=timers, due=job.incident.due - {"shared_window"})


def _runs(job: Job, revision: str) -> Job:
    """The job on this revision. Where it goes back, what newer ones computed is given up: a later rollback need not go back behind them.
    A lazy update that waits goes on waiting."""
    order = list(job.revisions)
    newer = order[order.index(revision) + 1 :] if revision in job.revisions else ()
    revisions = {**job.revisions, **dict.fromkeys(newer, -1), revision: job.revisions.get(revision, -1)}
    waits = bool(job.update_timer) and job.next_revision != revision
    return job._replace(revision=revision, revisions=revisions, next_revision=job.next_revision if waits else "")


def _attempt_ended(fleet: Fleet, event: Told, data: AttemptEnded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or data.attempt != job.attempt:
        return fleet
    if job.poisoned is not None and job.poisoned.attempt == data.attempt:
        job = job._replace(poisoned=job.poisoned._replace(last=max(job.poisoned.last, job.last_step)))
    return fleet.put(job._replace(ended=True, plan=None if data.reason == "finished" else job.plan))


def _closed(fleet: Fleet, event: Told, data: IncidentClosed) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    old, lapse = job.incident, job.lapse  # one that went by itself, or that a person ended, says nothing of the one before
    if data.outcome == "recovered" and old is not None:
        step = max(old.bad_step, old.step, old.relapse_of)
        lapse = Lapse(old.last, old.reattempts, old.recoveries, step, event.time)
    return fleet.put(job._replace(incident=None, lapse=lapse, plan=None if job.plan and job.plan.incident else job.plan))


def _stable(fleet: Fleet, event: Told, data: RevisionStable) -> Fleet:
    job = fleet.jobs.get(data.job)
    return fleet if job is None else fleet.put(job._replace(stable=data.revision))


def _machine_judged(fleet: Fleet, event: Told, data: MachineJudged) -> Fleet:
    """One that comes back is a standby like any other, and its serial number no reason against it."""
    job = fleet.jobs.get(data.job)
    if job is not None:
        job = job._replace(examined={key: of for key, of in job.examined.items() if of[0] != data.node})
        fleet = fleet.put(job)
    if job is None or not data.back or data.node not in job.evicted or data.node in job.by_node:
        return fleet
    place = fleet.machines.get(data.node, Place(node=data.node))
    bad = {serial: node for serial, node in fleet.bad_serials.items() if serial != place.serial}
    evicted = {node: at for node, at in job.evicted.items() if node != data.node}
    standbys = (*(spare for spare in job.standbys if spare.node != data.node), place)
    unfit = without_trouble(job.unfit, data.node)
    job = job._replace(evicted=evicted, out=job.out - {data.node}, standbys=standbys, unfit=unfit)
    fleet = fleet._replace(bad_serials=bad)
    return fleet.put(more_spares(fleet, job))


DECIDED: Mapping[type, Callable[[Fleet, Told, Any], Fleet]] = {
    IncidentOpened: _opened, EvidenceJudged: _judged, SharedCause: _shared, TimerSet: _timer, DecisionMade: _decided,
    IntentIssued: _intent, AttemptEnded: _attempt_ended, IncidentClosed: _closed, RevisionStable: _stable,
    MachineJudged: _machine_judged,
}  # fmt: skip
