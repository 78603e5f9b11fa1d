"""What the decider does next, read off the state: `moves(fleet, job)` gives the facts that follow from it, and the decider folds them
and asks again until nothing follows. Pure; no rule here knows which event came last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.clock import NS
from events.decision import AttemptEnded, IncidentClosed, SharedCause, TimerSet
from events.envelope import Fact
from events.ids import derived_id
from processors import plan_moves
from processors.decisions import (
    Base,
    cut,
    decision,
    evict,
    hand_over,
    lacking,
    no_standby,
    over_for,
    spares_for,
    stays,
    still_right,
    with_ailing,
)
from processors.examinations import examine
from processors.judge import restored_wrongly
from processors.ladder import Situation, rule_of
from processors.overrides import overridden
from processors.remedies import answer, go_on, looks_first
from processors.shared_cause import causes, uncovered
from processors.state import Fleet, Incident, Job

Rule = Callable[[Fleet, Job, Base], list[Fact]]


def moves(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """The next facts about one job; empty when nothing follows. Each rule either has something to say, or passes."""
    if job.quiet:
        return []
    for rule in RULES:
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
    held = fleet.held(job.name)
    if held and job.plan is not None and job.plan.stage == "held":
        return []
    asked = {"declared": "the job was declared", "stop": "a stop was asked for"}
    what = asked.get(job.request, f"a restart was asked for ({job.request})")
    gone = with_ailing(fleet, job, job.gone, "auto") if job.wanted == "running" else ()
    standbys = spares_for(fleet, job, gone)
    if standbys is None and not held:
        why = f"{what}, but {no_standby(fleet, job, gone)}"
        veto = decision(
            fleet, job, None, base, rung="planned", rule="planned", mode="auto", nodes=gone, because=why, vetoed="no_standby"
        )
        return [veto, *lacking(fleet, job, None, base, why)]
    facts: list[Fact] = []
    if job.incident:
        outcome = "handed_over" if job.incident.blocked == "handed_over" else "superseded"
        facts.append(closing(fleet, job, job.incident, outcome, base))
    facts.append(
        decision(
            fleet, job, None, base, rung="planned", rule="planned", mode="auto",
            nodes=gone if standbys else (), standbys=standbys or (), because=what,
        )
    )  # fmt: skip
    return facts


# --- evidence ------------------------------------------------------------------------------------------------------------------


def _name_shared_causes(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """Each one named makes the page wait a moment more, so that it names every rack and switch of one event."""
    incident = _open(job)
    if incident is None:
        return []
    facts: list[Fact] = [
        SharedCause(
            incident=incident.id, job=job.name, scope=c.scope, name=c.name, nodes=c.nodes, of=c.of, symptom=c.symptom, **base
        )
        for c in causes(fleet, job, incident)
    ]
    if facts:
        facts.append(_settling(fleet, job, incident, base))
    return facts


def _page_for_shared_cause(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.shared or "shared_window" not in incident.due:
        return []
    names = ", ".join(
        f"{scope} {name} ({count} nodes)" if name else f"the whole job ({count} nodes)"
        for (scope, name), count in incident.shared.items()
    )
    before = [node for node in incident.nodes_out if node in job.evicted]
    nobody = f"none more is evicted (before it showed: {', '.join(before)})" if before else "nobody is evicted for it"
    because = cut(f"one cause for many: {names}", 3000) + "; " + nobody
    return hand_over(fleet, job, incident, base, "shared_cause", because, reason="shared_cause")


def _evict(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None:
        return []
    suspects = [(Situation.NAMED, incident.named)]
    if incident.crash or incident.stall:  # what was borne while it went on names its machine now
        suspects.append((Situation.NAMED, job.borne))
    if _second_channel(job, incident):
        suspects.append((Situation.SILENT, job.silent))
    settled, waits = "shared_window" in incident.due, False
    for situation, troubled in suspects:
        spent: set[str] = set()
        for place in uncovered(job, incident, troubled):
            node = place.node
            if node in job.evicted or (node in incident.answered and not _free_again(fleet, job, incident, node)):
                continue
            # Silence, or what goes beyond a budget or the standbys, may be of many: whether it is shared shows within a moment.
            if not settled and (situation is Situation.SILENT or place.rack in spent):
                waits = True
                continue
            if _chosen_instead(fleet, job, situation):
                continue
            facts = evict(fleet, job, incident, base, situation, node)
            if settled or getattr(facts[0], "vetoed", "") not in ("budget", "no_standby"):
                return facts
            waits = True
            over = over_for(fleet, job, incident, node)
            if over is None or over.scope != "rack":
                break  # as it would be of the others
            spent.add(place.rack)
    return [_settling(fleet, job, incident, base)] if waits and "shared_window" not in incident.timers else []


def _chosen_instead(fleet: Fleet, job: Job, situation: Situation) -> bool:
    """Whether a person's choice is being carried out, where an eviction would only ask for a yes: it is not stopped for that."""
    plan = job.plan
    if plan is None or plan.rule != "override" or plan.failed or plan.overdue:
        return False
    return fleet.policy.mode_of(rule_of(situation, "evict")) == "approve"


def _free_again(fleet: Fleet, job: Job, incident: Incident, node: str) -> bool:
    """A person kept it in, and does not any more."""
    return incident.answered[node] == "kept" and not stays(fleet, job, node)


def _settling(fleet: Fleet, job: Job, incident: Incident, base: Base) -> TimerSet:
    return timer(fleet, job, incident, "shared_window", fleet.policy.shared_causes.settle_s, base)


#: Stages in which the job's processes are being ended, looked at or started.
ON_THE_WAY = ("decided", "stopping", "examining", "starting")


def _second_channel(job: Job, incident: Incident) -> bool:
    """A silent node alone may have lost its agent only. A stalled or crashed job agrees, and so does a recovery that needs it."""
    plan = job.plan
    recovering = plan is not None and bool(plan.incident) and plan.ends_attempt and plan.stage in ON_THE_WAY
    failing = plan is not None and bool(plan.incident) and bool(plan.failed or plan.overdue)
    return incident.crash or incident.stall or recovering or failing


def _still_right(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """What waited for a yes, or was held after it, is looked at again before it acts."""
    incident, plan = job.incident, job.plan
    if incident is None or plan is None or not (plan.stage == "decided" or plan.refused) or fleet.held(job.name):
        return []
    why = still_right(fleet, job, plan) if plan.stage == "decided" else ""
    if plan.good_until_ns and fleet.now_ns > plan.good_until_ns:
        why = "the yes to it ran out before it could be begun"
    if not why:
        return []
    because = f"what was decided can't be done any more: {why}"
    return hand_over(fleet, job, incident, base, "hand_over", because, reason="no_longer_possible")


def _go_on(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.going_on or job.plan is not None:
        return []
    return go_on(fleet, job, incident, base)


def _answer_metric(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.metric or (job.plan and job.plan.stage == "awaiting"):
        return []
    why = f"from step {incident.bad_step} on; nothing of it is restored"
    return answer(fleet, job, incident, base, Situation.METRIC, why)


def _answer_slow(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.slow or job.plan is not None or incident.crash or incident.stall:
        return []
    return answer(fleet, job, incident, base, Situation.SLOW, "it trains on meanwhile")


def _answer_failure(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident, plan = _open(job), job.plan
    if incident is None or plan is None or not (plan.failed or plan.overdue):
        return []
    why = plan.failed or f"not healthy {fleet.policy.decider.recovery_deadline_s:g} s after the decision"
    return answer(fleet, job, incident, base, Situation.FAILED, why)


def _answer_crash(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    waits = (
        job.plan is not None and job.plan.stage == "awaiting" and job.plan.ends_attempt
    )  # stacks of a dead job are of no use
    if incident is None or not incident.crash or waits:
        return []
    rules = fleet.policy.decider
    wanted = "root" if incident.root else "echo"
    at_once = incident.root and not incident.code and looks_first(fleet, incident)
    if "culprit_window" not in incident.due and not at_once:
        if incident.window in (wanted, "root"):
            return []
        window_s = rules.culprit_window_s if incident.root else rules.root_window_s
        return [timer(fleet, job, incident, "culprit_window", window_s, base, note=wanted)]
    if _silence_settles(job, incident):
        return []
    if at_once:
        return answer(fleet, job, incident, base, Situation.CRASH, "no line has named a machine")
    waited = rules.culprit_window_s if incident.window == "root" else rules.root_window_s
    if incident.code:
        why = f"at step {max(job.last_step, incident.step)}: {incident.code}"
        return answer(fleet, job, incident, base, Situation.USER_CODE, why)
    return answer(fleet, job, incident, base, Situation.CRASH, f"no line named a machine within {waited:g} s")


def _answer_stall(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or not incident.stall or (job.plan and job.plan.stage == "awaiting"):
        return []
    if _silence_settles(job, incident):
        return []
    return answer(fleet, job, incident, base, Situation.STALL, f"the last step was {job.last_step}")


def _silence_settles(job: Job, incident: Incident) -> bool:
    """Whether a silent machine is about to be judged: the crash or stall is then answered together with it."""
    return incident.waits_for("shared_window") and any(node in job.by_node for node in job.silent)


def _watch_silence(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = _open(job)
    if incident is None or job.plan is not None:
        return []
    silent = [node for node in job.silent if node in job.by_node]
    if not silent or incident.named or incident.crash or incident.stall or incident.shared:
        return []
    if incident.waits_for("silence_window"):
        return []
    since = max(job.silent[node].seen_ns for node in silent)
    if "silence_window" in incident.due and job.last_progress_ns > since:  # it trains on: the monitor is lost, not the machine
        return [closing(fleet, job, incident, "cleared", base, symptom="monitor_lost")]
    return [timer(fleet, job, incident, "silence_window", fleet.policy.decider.silence_window_s, base)]


# --- endings -------------------------------------------------------------------------------------------------------------------


def _recovered(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident, plan = job.incident, job.plan
    if incident is None or plan is None or plan.incident != incident.id or plan.stage not in ("starting", "confirming"):
        return []
    if job.confirmed != job.attempt:
        return []
    return [closing(fleet, job, incident, "recovered", base)]


def _nothing_left(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    incident = job.incident
    if incident is None or job.plan is not None or incident.crash or incident.stall or incident.metric or incident.going_on:
        return []
    if incident.blocked not in ("", "handed_over") or any(node in job.by_node for node in job.silent):
        return []
    if job.ended and job.wanted == "running":  # by us, and what would start it again only watches by now
        why = "the job was stopped to be looked at, and the rule that would start it again observes"
        if incident.blocked:
            return []
        return hand_over(fleet, job, incident, base, "hand_over", why, mode="auto", reason="left_stopped")
    if not (incident.crashed or incident.named or incident.hung):  # silence or a stall that went by itself
        symptom = "monitor_lost" if incident.symptom == "node_silent" else incident.symptom
        return [closing(fleet, job, incident, "cleared", base, symptom=symptom)]
    quiet_ns = int(fleet.policy.decider.quiet_s * NS)
    if job.last_progress_ns >= incident.last_evidence_ns + quiet_ns:
        return [closing(fleet, job, incident, "handed_over" if incident.blocked else "cleared", base)]
    return []


RULES: tuple[Rule, ...] = (
    _finished,
    _requested,
    restored_wrongly,
    _name_shared_causes,
    _evict,
    _page_for_shared_cause,
    overridden,
    _still_right,
    plan_moves.carry_on,
    _recovered,
    _answer_failure,
    _go_on,
    _answer_crash,
    _answer_stall,
    _answer_metric,
    _answer_slow,
    _watch_silence,
    _nothing_left,
    examine,
)


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


def timer(fleet: Fleet, job: Job, incident: Incident, purpose: Any, after_s: float, base: Base, note: str = "") -> TimerSet:
    timer_id = derived_id("timer", job.name, incident.id, f"{purpose}{note}", incident.timers_set)
    at_ns = fleet.now_ns + int(after_s * NS)
    return TimerSet(timer=timer_id, job=job.name, incident=incident.id, purpose=purpose, at_ns=at_ns, note=note, **base)
