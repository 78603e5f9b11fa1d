"""What the decider does next, read off the state: `moves(fleet, job)` gives the facts that follow from it, and the decider folds them
and asks again until nothing follows. Pure; no rule here knows which event came last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.clock import NS
from events.decision import AttemptEnded, DecisionMade, IncidentClosed, Rung, SharedCause, TimerSet
from events.envelope import Fact
from events.ids import derived_id
from events.job import Place
from processors import plan_moves
from processors.budget import over_budget
from processors.fleet import Fleet, Incident, Job
from processors.ladder import Situation, rung_for
from processors.shared_cause import causes, covered

Base = dict[str, Any]


def moves(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """The next facts about one job; empty when nothing follows. Each rule either has something to say, or passes."""
    rules: tuple[Callable[[Fleet, Job, Base], list[Fact]], ...] = (
        _finished,
        _requested,
        _name_shared_causes,
        _evict,
        _page_for_shared_cause,
        plan_moves.carry_on,
        _recovered,
        _answer_failure,
        _answer_crash,
        _answer_stall,
        _watch_silence,
        _nothing_left,
    )
    for rule in rules:
        facts = rule(fleet, job, base)
        if facts:
            return facts
    return []


def _open(job: Job) -> Incident | None:
    """The incident, if decisions are still to be made in it."""
    return job.incident if job.incident and not job.incident.blocked and job.wanted == "running" else None


# --- plans of people -----------------------------------------------------------------------------------------------------------


def _finished(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    if job.wanted != "finished":
        return []
    facts: list[Fact] = []
    if not job.ended:
        facts.append(AttemptEnded(job=job.name, attempt=job.attempt, reason="finished", **base))
    if job.incident:
        facts.append(closing(fleet, job, job.incident, "job_ended", base))
    return facts


def _requested(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    if not job.request:
        return []
    waits = job.plan is not None and job.plan.stage == "held"
    held = fleet.held(job.name)
    if waits and held:
        return []
    facts: list[Fact] = []
    if job.incident:
        outcome = "handed_over" if job.incident.blocked == "handed_over" else "superseded"
        facts.append(closing(fleet, job, job.incident, outcome, base))
    what = {"declared": "the job was declared", "stop": "a stop was asked for"}.get(
        job.request, f"a restart was asked for ({job.request})"
    )
    facts.append(
        _decision(
            fleet, job, None, base, rung="planned", rule="planned", mode="auto",
            because=what + (", and a hold stands" if held else ""), vetoed="hold" if held else "",
        )
    )  # fmt: skip
    return facts


# --- evidence ------------------------------------------------------------------------------------------------------------------


def _name_shared_causes(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None:
        return []
    facts: list[Fact] = [
        SharedCause(
            incident=incident.id, job=job.name, scope=c.scope, name=c.name, nodes=c.nodes, of=c.of, symptom=c.symptom, **base
        )  # fmt: skip
        for c in causes(fleet, job, incident)
    ]
    if facts and "shared_window" not in incident.timers:
        facts.append(timer(fleet, job, incident, "shared_window", fleet.policy.shared_causes.settle_s, base))
    return facts


def _page_for_shared_cause(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.shared or "shared_window" not in incident.due:
        return []
    names = ", ".join(
        f"{scope} {name} ({count} nodes)".replace("fleet  ", "the whole job ")
        for (scope, name), count in incident.shared.items()
    )
    because = f"one cause for many: {names}; nobody is evicted for it"
    return hand_over(fleet, job, incident, base, "shared_cause", because)


def _evict(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None:
        return []
    for situation, troubled in _suspects(job, incident):
        for node in troubled:
            if (
                node in job.index
                and node not in job.evicted
                and node not in incident.answered
                and not covered(job, incident, node)
            ):
                if situation is Situation.SILENT and "shared_window" not in incident.due:
                    return _settle(fleet, job, incident, base)
                return _evict_node(fleet, job, incident, base, situation, node)
    return []


def _settle(fleet: Fleet, job: Job, incident: Incident, base: Base) -> list[Fact]:
    """Silence of one node may be the first of a rack's: whether it is shared shows within a moment."""
    if "shared_window" in incident.timers:
        return []
    return [timer(fleet, job, incident, "shared_window", fleet.policy.shared_causes.settle_s, base)]


def _suspects(job: Job, incident: Incident) -> list[tuple[Situation, list[str]]]:
    found = [(Situation.NAMED, list(incident.named))]
    # A silent node alone may have lost its agent only: a stalled or crashed job is the second channel.
    recovering = job.plan is not None and bool(job.plan.incident) and job.plan.stage in ("decided", "stopping", "starting")
    if incident.crash or incident.stall or recovering:
        found.append((Situation.SILENT, list(job.silent)))
    return found


def _evict_node(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, node: str) -> list[Fact]:
    rung, rule = rung_for(situation, frozenset())
    place = job.index[node]
    trouble = incident.named.get(node) or job.silent[node]
    why = f"{situation.value}: {node} ({trouble.symptom})"
    over = over_budget(fleet, job, place)
    if over is not None:
        veto = _decision(
            fleet, job, incident, base, rung=rung, rule=rule, nodes=(node,), because=f"{why}; {over}", vetoed="budget"
        )
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", f"{why}, but {over}", after=1)]
    # What an earlier decision of this recovery evicts and may not have finished is asked for again: its intents are superseded.
    earlier = tuple(n for n in (job.plan.nodes if job.plan and job.plan.incident else ()) if n != node and n in job.index)
    out = (*earlier, node)
    spares = usable_standbys(fleet, job)
    if len(spares) < len(out):
        text = f"{why}; {len(out)} standbys are needed and {len(spares)} are left"
        veto = _decision(fleet, job, incident, base, rung=rung, rule=rule, nodes=out, because=text, vetoed="no_standby")
        if fleet.policy.decider.no_standby == "hold":
            return [veto]
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", text, after=1)]
    standbys = tuple(place.node for place in spares[: len(out)])
    return [
        _decision(
            fleet, job, incident, base, rung=rung, rule=rule, nodes=out, standbys=standbys,
            because=f"{why}; in its place {standbys[-1]}", mode=fleet.policy.mode_of(rule),
        )
    ]  # fmt: skip


def usable_standbys(fleet: Fleet, job: Job) -> list[Place]:
    """Spares that may be used, in order: not ailing, not evicted, not a machine (by serial number) that was evicted before."""
    return [
        place
        for place in job.standbys
        if place.node not in job.unfit
        and place.node not in job.evicted
        and place.node not in job.silent
        and not (place.serial and place.serial in fleet.bad_serials)
    ]


def _answer_failure(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident, plan = _open(job), job.plan
    if incident is None or plan is None or not (plan.failed or plan.overdue):
        return []
    why = plan.failed or f"not healthy {fleet.policy.decider.recovery_deadline_s:g} s after the decision"
    return _again(fleet, job, incident, base, Situation.FAILED, why)


def _answer_crash(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.crash or (job.plan and job.plan.stage == "awaiting"):
        return []
    rules = fleet.policy.decider
    wanted = "root" if incident.root else "echo"
    if "culprit_window" not in incident.due:
        if incident.window in (wanted, "root"):
            return []
        window_s = rules.culprit_window_s if incident.root else rules.root_window_s
        return [timer(fleet, job, incident, "culprit_window", window_s, base, note=wanted)]
    waited = rules.culprit_window_s if incident.window == "root" else rules.root_window_s
    return _again(fleet, job, incident, base, Situation.CRASH, f"no line named a machine within {waited:g} s")


def _answer_stall(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.stall or (job.plan and job.plan.stage == "awaiting"):
        return []
    return _again(fleet, job, incident, base, Situation.STALL, "every rank is killed and started again")


def _again(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str) -> list[Fact]:
    """A reattempt in place, or the next rung when those are spent."""
    rules = fleet.policy.decider
    spent: set[Rung] = set()
    if incident.reattempts >= rules.reattempts_max or incident.recoveries >= rules.recoveries_max:
        spent.add("reattempt")
    rung, rule = rung_for(situation, frozenset(spent))
    because = f"{situation.value}; {why}; reattempt {incident.reattempts} of at most {rules.reattempts_max} are used"
    if rung == "hand_over":
        return hand_over(fleet, job, incident, base, rule, because)
    because = f"{situation.value}; {why}; reattempt {incident.reattempts + 1} of at most {rules.reattempts_max}"
    return [_decision(fleet, job, incident, base, rung=rung, rule=rule, because=because, mode=fleet.policy.mode_of(rule))]


def _watch_silence(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or job.plan is not None:
        return []
    silent = [node for node in job.silent if node in job.index]
    if not silent or incident.named or incident.crash or incident.stall or incident.shared:
        return []
    if "silence_window" not in incident.due:
        if "silence_window" in incident.timers:
            return []
        return [timer(fleet, job, incident, "silence_window", fleet.policy.decider.silence_window_s, base)]
    since = max(job.silent[node].seen_ns for node in silent)
    if job.last_progress_ns > since:  # the job trains on: the monitor is lost, not the machine
        return [closing(fleet, job, incident, "cleared", base, symptom="monitor_lost")]
    return [timer(fleet, job, incident, "silence_window", fleet.policy.decider.silence_window_s, base)]


# --- endings -------------------------------------------------------------------------------------------------------------------


def _recovered(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident, plan = job.incident, job.plan
    if incident is None or plan is None or plan.incident != incident.id or plan.stage != "confirming":
        return []
    if job.confirmed != job.attempt:
        return []
    return [closing(fleet, job, incident, "recovered", base)]


def _nothing_left(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = job.incident
    if incident is None or job.plan is not None or incident.crash or incident.stall:
        return []
    if incident.blocked not in ("", "handed_over") or any(node in job.index for node in job.silent):
        return []
    if not incident.crashed and not incident.named:  # silence or a stall that went by itself
        symptom = "monitor_lost" if incident.symptom == "node_silent" else incident.symptom
        return [closing(fleet, job, incident, "cleared", base, symptom=symptom)]
    quiet_ns = int(fleet.policy.decider.quiet_s * NS)
    if job.last_progress_ns >= incident.last_evidence_ns + quiet_ns:
        return [closing(fleet, job, incident, "handed_over" if incident.blocked else "cleared", base)]
    return []


def closing(fleet: Fleet, job: Job, incident: Incident, outcome: Any, base: Base, symptom: Any = None) -> IncidentClosed:
    acted = incident.decided_ns if incident.rung != "none" else 0
    return IncidentClosed(
        incident=incident.id,
        job=job.name,
        epoch=incident.epoch,
        symptom=symptom or incident.cause or incident.symptom,
        mechanism=incident.rung,
        outcome=outcome,
        nodes=incident.nodes_out,
        first_evidence_ns=incident.first_evidence_ns,
        opened_ns=incident.opened_ns,
        decided_ns=acted,
        back_ns=job.last_progress_ns if outcome == "recovered" else 0,
        step_before=incident.step,
        step_restored=job.last_restored if outcome == "recovered" else -1,
        **base,
    )


# --- the shapes of what is decided ----------------------------------------------------------------------------------------------


def _decision(fleet: Fleet, job: Job, incident: Incident | None, base: Base, *, after: int = 0, **what: Any) -> DecisionMade:
    ordinal = job.ordinal + 1 + after
    decision = derived_id("decision", job.name, incident.id if incident else f"planned-{job.epoch}", what["rule"], ordinal)
    what.setdefault("mode", fleet.policy.mode_of(what["rule"]))
    acts = what["mode"] != "observe" and not what.get("vetoed")
    if acts and fleet.held(job.name):
        what |= {"vetoed": "hold", "because": what["because"] + "; a hold stands"}
    return DecisionMade(
        decision=decision,
        incident=incident.id if incident else "",
        job=job.name,
        epoch=incident.epoch if incident else job.epoch,
        ordinal=ordinal,
        attempt=job.attempt,
        policy_digest=fleet.policy_digest,
        catalogue_digest=fleet.catalogue_digest,
        code_version=fleet.code_version,
        **what,
        **base,
    )


def hand_over(fleet: Fleet, job: Job, incident: Incident, base: Base, rule: str, because: str, after: int = 0) -> list[Fact]:
    """A person is called, with the trail in one sentence; `keepstep explain` tells it whole."""
    decision = _decision(fleet, job, incident, base, rung="hand_over", rule=rule, because=because, after=after)
    if decision.mode == "observe" or decision.vetoed:
        return [decision]
    text = f"job {job.name}, incident {incident.id} ({incident.symptom}, attempt {job.attempt}): {because}. See: keepstep explain {incident.id}"
    return [decision, plan_moves.intent(fleet, job, decision, base, verb="notify", text=text[:4000])]


def timer(fleet: Fleet, job: Job, incident: Incident, purpose: Any, after_s: float, base: Base, note: str = "") -> TimerSet:
    timer_id = derived_id("timer", job.name, f"{incident.id}-{base['trigger']}", f"{purpose}{note}", incident.evidence)
    at_ns = fleet.now_ns + int(after_s * NS)
    return TimerSet(timer=timer_id, job=job.name, incident=incident.id, purpose=purpose, at_ns=at_ns, note=note, **base)
