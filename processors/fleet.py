"""How what is known changes with each event of the ledger: `evolve`, the one way, so that whoever folds the ledger knows the same.
Here the inputs: what operators, detectors, actuators and timers say. What the decider decided is in processors.decided. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from events import subjects
from events.action import OutcomeRecorded
from events.decision import DeciderStarted, TimerFired
from events.incident import JobFinished, ProgressNoted, SignalCleared
from events.job import (
    ApprovalGiven,
    CatalogueAdopted,
    HoldPlaced,
    HoldReleased,
    JobDeclared,
    OverrideGiven,
    PolicyAdopted,
    RestartRequested,
    StandbyAdded,
    StopRequested,
)
from processors import policy as policies
from processors.decided import DECIDED, SETTLED, acting
from processors.examinations import METRIC, concluded
from processors.keeping import keeping
from processors.ladder import EXAMINED_BY
from processors.state import (
    METRICS,
    NAMING,
    REFUSED,
    Eviction,
    Fleet,
    Incident,
    Job,
    Plan,
    Told,
    Trouble,
    more_spares,
    with_incident,
    with_trouble,
    without_trouble,
)

__all__ = ["NAMING", "Eviction", "Fleet", "Incident", "Job", "Plan", "Trouble", "evolve", "refusal"]


def evolve(fleet: Fleet, event: Told, time_ns: int) -> Fleet:
    """The fleet after an event of the ledger that was stored at `time_ns` (own events: their trigger's time)."""
    if time_ns > fleet.now_ns:
        fleet = Fleet(time_ns, *fleet[1:])
    change = _CHANGES.get(type(event.data))
    return change(fleet, event, event.data) if change else fleet


#: Kinds of which one may be refused.
REFUSABLE = frozenset((JobDeclared, PolicyAdopted))


def refusal(fleet: Fleet, event: Told) -> str:
    """Why an operator's word changes nothing, if so: one sentence. `evolve` refuses the same."""
    data = event.data
    if isinstance(data, JobDeclared):
        return _unfit_declaration(fleet, data)
    if isinstance(data, PolicyAdopted):
        try:
            policies.parse(data.text)
        except policies.BadPolicy as error:
            return f"the policy in force stays: {error}"
    return ""


def _unfit_declaration(fleet: Fleet, data: JobDeclared) -> str:
    known = fleet.jobs.get(data.job)
    if data.job == subjects.FLEET:
        return f"no job can be called {subjects.FLEET}"
    over = known is None or (known.wanted != "running" and known.ended and known.incident is None)
    if known is not None and (not over or (known.plan and known.plan.pending)):
        return f"job {data.job} is declared already; stop it first, and declare it again when it is down"
    nodes = [place.node for place in (*data.nodes, *data.standbys)]
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        return f"job {data.job} names node {twice} twice; each machine has one place"
    for node in nodes:
        other = fleet.jobs.get(fleet.owners.get(node, ""))
        if other is None or other.name == data.job or node in other.evicted or (other.wanted != "running" and other.ended):
            continue
        return f"node {node} belongs to job {other.name}, which is not over; a machine serves one job"
    return ""


# --- what operators say -------------------------------------------------------------------------------------------------------


def _decider_started(fleet: Fleet, event: Told, data: DeciderStarted) -> Fleet:
    return fleet._replace(code_version=data.code_version)


def _policy(fleet: Fleet, event: Told, data: PolicyAdopted) -> Fleet:
    try:
        return fleet._replace(policy=policies.parse(data.text), policy_digest=policies.digest(data.text))
    except policies.BadPolicy:  # it was refused where it was read; a ledger that holds one all the same keeps its old policy
        return fleet


def _catalogue(fleet: Fleet, event: Told, data: CatalogueAdopted) -> Fleet:
    return fleet._replace(catalogue_digest=data.digest)


def _declared(fleet: Fleet, event: Told, data: JobDeclared) -> Fleet:
    if _unfit_declaration(fleet, data):
        return fleet
    job = Job(declared=data, places=(), standbys=data.standbys).at(data.nodes)
    known = fleet.jobs.get(data.job)
    if known is not None:
        job = _again(known, job)
    if data.code_revision:
        job = job._replace(next_revision=data.code_revision)
    return fleet.with_machines(data.job, (*data.nodes, *data.standbys)).put(job)


#: So many folders of checkpoints of one job are remembered.
FOLDERS_MAX = 8


def checkpoints_of(declared: JobDeclared) -> str:
    """The folder of the job's checkpoints; empty: none is declared."""
    return posixpath.normpath(posixpath.join(declared.directory, declared.checkpoints)) if declared.checkpoints else ""


def _again(known: Job, job: Job) -> Job:
    """A run of the same name after its end. Numbers go on, so that nothing of the old one can be taken for the new; and what is true of
    checkpoints, code and machines stays true. What of a folder's checkpoints is not to be restored is so whatever the code and the
    size; another folder has its own, and its own steps. What a person or the ladder was about to do is over."""
    old, new = checkpoints_of(known.declared), checkpoints_of(job.declared)
    before = {folder: poison for folder, poison in known.poisoned_before.items() if folder not in (old, new)}
    poisoned, revisions = known.poisoned_before.get(new), dict.fromkeys(known.revisions, -1)
    if old == new:
        poisoned, revisions = known.poisoned if new else None, dict(known.revisions)
    elif known.poisoned and old:
        before = dict([*before.items(), (old, known.poisoned)][-FOLDERS_MAX:])
    nodes = {place.node for place in (*job.places, *job.standbys)}
    unfit = known.unfit
    for node, trouble in known.silent.items():
        unfit = with_trouble(unfit, node, trouble)
    looked_at = {*known.unexamined, *(of[0] for of in known.examined.values())} - nodes
    return job._replace(
        attempt=known.attempt, epoch=known.epoch, ordinal=known.ordinal, revisions=revisions, stable=known.stable,
        poisoned=poisoned, poisoned_before=before,
        kept={node: until for node, until in known.kept.items() if node in nodes},
        unfit={node: why for node, why in unfit.items() if node in nodes},
        silent={node: trouble for node, trouble in known.silent.items() if node in job.by_node},
        evicted={node: at for node, at in known.evicted.items() if node in looked_at}, out=known.out & looked_at,
        unexamined={node: of for node, of in known.unexamined.items() if node in looked_at},
        examined={key: of for key, of in known.examined.items() if of[0] in looked_at},
    )  # fmt: skip


def _standby(fleet: Fleet, event: Told, data: StandbyAdded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or data.place.node in job.by_node or (data.place.serial and data.place.serial in fleet.bad_serials):
        return fleet
    node = data.place.node
    owner = fleet.jobs.get(fleet.owners.get(node, ""))
    if owner is not None and owner is not job and node in owner.by_node and owner.wanted == "running":
        return fleet
    known = next((place for place in job.standbys if place.node == node), None)
    job = job._replace(  # a person says that it is well: also one that was evicted is a machine like any other
        standbys=job.standbys if known else (*job.standbys, data.place), unfit=without_trouble(job.unfit, node), out=job.out - {node},
        evicted={one: at for one, at in job.evicted.items() if one != node},
        unexamined={one: of for one, of in job.unexamined.items() if one != node},
        examined={key: of for key, of in job.examined.items() if of[0] != node},
    )  # fmt: skip
    fleet = fleet.with_machines(data.job, (known or data.place,))
    return fleet.put(more_spares(fleet, job))


def _hold(fleet: Fleet, event: Told, data: HoldPlaced) -> Fleet:
    return fleet._replace(holds={**fleet.holds, data.job: data.expires_ns})


def _release(fleet: Fleet, event: Told, data: HoldReleased) -> Fleet:
    return _unheld(fleet._replace(holds={key: value for key, value in fleet.holds.items() if key != data.job}))


def _unheld(fleet: Fleet) -> Fleet:
    for job in fleet.jobs.values():
        if job.incident and job.incident.blocked == "held" and not fleet.held(job.name):
            fleet = fleet.put(with_incident(job, blocked=""))
    return fleet


def _restart(fleet: Fleet, event: Told, data: RestartRequested) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    job = job._replace(next_revision=data.revision or job.next_revision)
    if data.at_next_restart:
        return fleet.put(job)
    return fleet.put(
        job._replace(wanted="running", request=data.symptom, update_timer="", lapse=None, override=None, lacking="")
    )


def _stop(fleet: Fleet, event: Told, data: StopRequested) -> Fleet:
    job = fleet.jobs.get(data.job)
    return fleet if job is None else fleet.put(job._replace(wanted="stopped", request="stop", override=None, lacking=""))


def _approval(fleet: Fleet, event: Told, data: ApprovalGiven) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None or job.plan is None or job.plan.decision != data.decision or job.plan.stage != "awaiting":
        return fleet
    plan = job.plan
    if data.expires_ns and fleet.now_ns > data.expires_ns:
        return fleet
    if not data.granted:
        return fleet.put(with_incident(job._replace(plan=None), **SETTLED, blocked="handed_over", rung="hand_over"))
    incident = job.incident
    if incident:
        settled = dict(SETTLED) if plan.ends_attempt else {}  # of what came while it waited, too
        if plan.rung == "diagnose":  # an exception of the code's decides where the ladder goes on after the tests
            settled["code"] = incident.code
        job = with_incident(job, **settled, **acting(fleet, incident, plan.rung, plan.rule, plan.nodes))
    return fleet.put(job._replace(plan=plan._replace(stage="decided", good_until_ns=data.expires_ns)))


def _override(fleet: Fleet, event: Told, data: OverrideGiven) -> Fleet:
    """What a person chose is decided at once, whatever keeps the ladder waiting; but a hold stands for it, too."""
    job = fleet.jobs.get(data.job)
    if job is None or (data.expires_ns and fleet.now_ns > data.expires_ns):
        return fleet
    if data.remedy == "keep":
        return keeping(fleet, job._replace(kept={**job.kept, data.node: data.expires_ns}), data.node)
    if data.remedy == "evict":  # the latest word on a machine counts
        job = job._replace(kept={node: until for node, until in job.kept.items() if node != data.node})
    return fleet.put(job._replace(override=data, override_held=False))


# --- what detectors and actuators say -----------------------------------------------------------------------------------------


def _cleared(fleet: Fleet, event: Told, data: SignalCleared) -> Fleet:
    of_the_job = data.symptom in OF_THE_JOB and event.job in fleet.jobs
    name = event.job if of_the_job or not data.node else fleet.owners.get(data.node, event.job)
    job = fleet.jobs.get(name)
    if job is None:
        return fleet
    job = job._replace(unfit=without_trouble(job.unfit, data.node, data.symptom))
    if data.symptom == "node_silent":
        job = job._replace(silent={key: value for key, value in job.silent.items() if key != data.node})
    elif data.symptom == "job_hang" and event.attempt == job.attempt:
        if job.incident and not (job.incident.crashed or job.incident.named):
            job = _not_begun(job)  # it moves again
        if job.plan and not job.plan.ends_attempt and job.incident and not job.incident.named:
            job = job._replace(plan=None)  # nor are stacks of it
        job = with_incident(job, stall=False, hung=False)
    elif data.symptom == "mfu_decline" and event.attempt == job.attempt:
        if job.plan and not job.plan.ends_attempt and job.plan.situation == "slow":
            job = job._replace(plan=None)
        job = with_incident(job, slow=False)
    elif data.symptom in METRICS and event.attempt == job.attempt:
        job = _metric_over(fleet, job, data)
    else:
        job = job._replace(ailing=without_trouble(job.ailing, data.node, data.symptom))
    if any(place.node == data.node for place in job.standbys):
        job = more_spares(fleet, job)
    return fleet.put(job)


def _not_begun(job: Job) -> Job:
    """Without what the incident's plan would do, if that waits for a yes, or after it for the end of a hold: it is not wanted any more."""
    if job.plan is None or not job.plan.incident or job.plan.begun:
        return job
    job = job._replace(plan=None)
    return with_incident(job, rung="none") if job.incident and not job.incident.nodes_out else job


def _metric_over(fleet: Fleet, job: Job, data: SignalCleared) -> Job:
    """The run got over it by itself. Once all that showed it is over, and as many steps bear that out as prove a revision, its checkpoints
    are good again."""
    over = {key for key in (*_metrics(job), *(job.poisoned.of if job.poisoned else ())) if _is(key, data)}
    if job.incident:
        job = with_incident(job, metric=job.incident.metric - over)
    poison = job.poisoned
    if poison is None or poison.attempt != job.attempt or job.ended or not poison.of & over:
        return job
    poison = poison._replace(of=poison.of - over)
    if not poison.of:
        if job.plan and job.plan.situation == METRIC:
            job = _not_begun(job)
        poison = poison._replace(last=max(poison.last, job.last_step) + fleet.policy.decider.stable_steps)
    return job._replace(poisoned=poison)


def _metrics(job: Job) -> frozenset[tuple[str, str]]:
    return job.incident.metric if job.incident else frozenset()


def _is(key: tuple[str, str], data: SignalCleared) -> bool:
    return key[0] == data.symptom and data.metric in ("", key[1])


#: What is said of the job as a whole, on whatever node it was seen.
OF_THE_JOB = frozenset({"job_hang", "mfu_decline", *METRICS})


def _progress(fleet: Fleet, event: Told, data: ProgressNoted) -> Fleet:
    job = fleet.jobs.get(event.job)
    if job is None or event.attempt != job.attempt or job.ended:
        return fleet
    job = job._replace(
        last_progress_ns=max(job.last_progress_ns, data.seen_ns),
        last_step=data.step,
        last_restored=data.restored_step if data.restored_step >= 0 else job.last_restored,
        confirmed=job.attempt if data.first else job.confirmed,
    )
    poison = job.poisoned
    past = poison is not None and (event.attempt > poison.attempt or not poison.of) and data.step > poison.last
    if past and not job.stands_on_poison:
        job = job._replace(poisoned=None)
    if job.revisions.get(job.revision, 0) < 0:
        job = job._replace(revisions={**job.revisions, job.revision: max(data.restored_step, 0)})
    return fleet.put(_healthy(job))


def _healthy(job: Job) -> Job:
    """What a person asked for is done once its attempt is healthy, whether or not the actuator's own word of it has come."""
    plan = job.plan
    if plan is None or plan.incident or plan.stage not in ("starting", "confirming") or job.confirmed != job.attempt:
        return job
    return job._replace(plan=None)


def _finished(fleet: Fleet, event: Told, data: JobFinished) -> Fleet:
    job = fleet.jobs.get(event.job)
    if job is None or event.attempt != job.attempt or job.ended:  # ranks that end with 0 because they were told to stop
        return fleet
    return fleet.put(job._replace(wanted="finished", last_step=max(data.step, job.last_step)))


#: So often the steps of a plan that were refused are issued anew, all together.
REFUSALS_MAX = 4


def _refused(plan: Plan, key: str) -> Plan:
    """The plan with this step to be issued anew, and its time given anew. A start of which some nodes may have heard is stopped first."""
    verb, node = plan.pending[key]
    pending = {other: step for other, step in plan.pending.items() if other != key}
    again, stage = ((verb, node), plan.stage) if verb != "start_attempt" else (("stop_attempt", ""), "stopping")
    refusals = plan.refusals + (not plan.refused)
    return plan._replace(pending=pending, stage=stage, refused=(*plan.refused, again), refusals=refusals, deadline="")


def _outcome(fleet: Fleet, event: Told, data: OutcomeRecorded) -> Fleet:
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if data.key in job.evicting:
        node = job.evicting[data.key]
        evicting = {key: value for key, value in job.evicting.items() if key != data.key}
        job = job._replace(evicting=evicting, out=job.out | {node} if data.result == "done" else job.out)
    if data.key in job.examined and data.result in REFUSED:
        node, incident, rule, machines = job.examined[data.key]
        examined = {key: one for key, one in job.examined.items() if key != data.key}
        job = job._replace(examined=examined, unexamined={**job.unexamined, node: (incident, rule, machines)})
    plan = job.plan
    if plan is None or data.key not in plan.pending:
        return fleet.put(job)
    if data.result in REFUSED and (plan.refused or plan.refusals < REFUSALS_MAX):
        return fleet.put(job._replace(plan=_refused(plan, data.key)))
    if data.verb in EXAMINED_BY:
        return fleet.put(concluded(fleet, job, plan, data))
    _, woken = plan.pending[data.key]
    plan = plan._replace(pending={key: step for key, step in plan.pending.items() if key != data.key})
    bad = data.result != "done"
    if data.verb == "stop_attempt" and bad and data.nodes:  # machines that are taken out need not have answered
        bad = any(node not in job.evicted for node in data.nodes)
    if data.verb == "stop_attempt" and not bad and not data.nodes:
        job = job._replace(stopped=job.attempt)
    # An eviction or a wake-up that failed does not stop the recovery: what counts is whether the attempt starts.
    if bad and data.verb in ("stop_attempt", "start_attempt"):
        plan = plan._replace(failed=plan.failed or f"{data.verb} {data.result}: {data.detail}"[:1000])
    elif data.verb == "start_attempt":
        plan, job = plan._replace(stage="confirming"), job._replace(last_restored=max(data.restored_step, job.last_restored))
        if job.revisions.get(job.revision, 0) < 0 <= data.restored_step:  # what a rollback must go back behind
            job = job._replace(revisions={**job.revisions, job.revision: data.restored_step})
    elif data.verb == "wake_standby" and bad:
        plan = plan._replace(unwoken=plan.unwoken | {woken})
    elif data.verb == "stop_attempt" and plan.stop_only:
        return fleet.put(job._replace(plan=None))
    return fleet.put(_healthy(job._replace(plan=plan)))


def _fired(fleet: Fleet, event: Told, data: TimerFired) -> Fleet:
    if data.purpose == "hold_expiry":
        return _unheld(fleet)
    job = fleet.jobs.get(data.job)
    if job is None:
        return fleet
    if data.purpose == "update_window" and job.update_timer == data.timer and job.next_revision and job.wanted == "running":
        job = job._replace(
            request=job.request or "code_update", update_timer=""
        )  # it waited long enough for a restart to go with
    if job.plan is not None and job.plan.deadline == data.timer:
        held = fleet.held(job.name)  # nobody may do anything about it: it is given its time anew afterwards
        job = job._replace(plan=job.plan._replace(**{"deadline": ""} if held else {"overdue": True}))
    if job.incident and job.incident.id == data.incident and job.incident.timers.get(data.purpose) == data.timer:
        job = with_incident(job, due=job.incident.due | {data.purpose})
    return fleet.put(job)


_CHANGES: Mapping[type, Callable[[Fleet, Told, Any], Fleet]] = {
    DeciderStarted: _decider_started, PolicyAdopted: _policy, CatalogueAdopted: _catalogue, JobDeclared: _declared,
    StandbyAdded: _standby, HoldPlaced: _hold, HoldReleased: _release, RestartRequested: _restart, StopRequested: _stop,
    ApprovalGiven: _approval, SignalCleared: _cleared, ProgressNoted: _progress, JobFinished: _finished,
    OverrideGiven: _override, OutcomeRecorded: _outcome, TimerFired: _fired, **DECIDED,
}  # fmt: skip
