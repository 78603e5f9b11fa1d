"""The ladder, gone along: the next rung that can be taken, or a person, with what was passed over and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from events.clock import NS
from events.decision import HandOverReason, Rung
from events.envelope import Fact
from processors import revisions
from processors.attribution import ECHOES, PRIOR, attributed
from processors.budget import over_budget
from processors.decisions import (
    CAREFUL,
    Base,
    ask,
    decision,
    hand_over,
    lacking,
    no_standby,
    out,
    restore_below,
    spares_for,
    stays,
    with_ailing,
)
from processors.examinations import groups_for, is_whole
from processors.ladder import AFTER, LADDER, Last, Situation, rule_of
from processors.state import Fleet, Incident, Job

#: Facts of a rung that is taken; or why it can't be, in words that go on a sentence.
Remedy = Callable[[Fleet, Job, Incident, Base, Situation, str], "list[Fact] | str"]


def answer(
    fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str, tried: Last | None = None
) -> list[Fact]:
    """The next rung of the incident's ladder. Each that can't be taken is passed over, and said."""
    last, because = tried or incident.last, f"{situation.value}; {why}"
    if last is Last.NOTHING and (stated := judgement(fleet, job, incident, situation)):
        because = f"{because}; {stated}"
    while (rung := LADDER[situation][last]) in REMEDIES:
        last = AFTER[rung]
        if rung not in fleet.policy.decider.rungs:
            continue
        made = REMEDIES[rung](fleet, job, incident, base, situation, because)
        if not isinstance(made, str):
            return made
        because = f"{because}; {made}"
    rules = fleet.policy.decider
    used = f"reattempts {incident.reattempts} of at most {rules.reattempts_max}, recoveries {incident.recoveries} of at most "
    because = f"{because}; used: {used}{rules.recoveries_max}"
    rule, reason = rule_of(situation, "hand_over"), _reason(job, incident, situation)
    return hand_over(fleet, job, incident, base, rule, because, situation=situation, reason=reason)


def _reason(job: Job, incident: Incident, situation: Situation) -> HandOverReason:
    """Why the ladder ended here: which runbook helps."""
    if situation is Situation.USER_CODE:
        return "rollback_impossible" if isinstance(revisions.target(job), str) and not incident.reattempts else "same_exception"
    if situation is Situation.SLOW:
        return "slow_run"
    if situation is Situation.FAILED and job.plan is not None:
        return "recovery_late" if job.plan.overdue else "start_failed"
    if incident.last is Last.REPLAYS_CLEAR and not incident.in_vain:
        return "group_test_disagreed"
    if incident.last in (Last.STACKS_CLEAR, Last.TESTS_PASSED, Last.REPLAYS_CLEAR) and incident.in_vain:
        return "diagnosis_failed"
    return "stacks_name_whole_job" if incident.last is Last.STACKS_CLEAR and incident.suspects else "attempts_used_up"


#: What is judged in which trouble; in others, a crash's own words.
_JUDGED: Mapping[Situation, frozenset[str]] = {
    Situation.STALL: frozenset({"hang"}),
    Situation.METRIC: frozenset({"nan"}),
    Situation.CRASH: frozenset(PRIOR) - {"hang", "nan"} | ECHOES,
}


def judgement(fleet: Fleet, job: Job, incident: Incident, situation: Situation) -> str:
    """Of what both code and machines cause, seen in this incident: which it is more likely, from all that is known of job and nodes."""
    since = incident.first_evidence_ns - int(fleet.policy.attribution.together_s * NS)
    kinds = _JUDGED.get(situation, frozenset())
    mine = [s for s in fleet.sightings if s.job == job.name and s.seen_ns >= since and s.kind in kinds]
    roots = [s for s in mine if s.kind in PRIOR] or mine
    if not roots:
        return ""
    racks = len({place.rack for place in job.places if place.rack})
    new = bool(job.revision) and job.revision != job.stable
    others = [s for s in fleet.sightings if s is not roots[0]]
    found = attributed(roots[0], others, fleet.beside, fleet.policy.attribution, racks=racks, code_is_new=new)
    return f"{_FAULT[found.fault]} ({found.because})"


_FAULT = {"infra": "likely a machine's", "user": "likely the code's", "undecided": "the code's or a machine's"}


def looks_first(fleet: Fleet, incident: Incident) -> bool:
    """Whether a crash is answered by tests, at once: they take the time in which a line may name the culprit."""
    rules = fleet.policy
    if LADDER[Situation.CRASH][incident.last] != "diagnose" or "diagnose" not in rules.decider.rungs:
        return False
    return rules.mode_of("diagnose") == rules.mode_of("reattempt_crash") == "auto"


def go_on(fleet: Fleet, job: Job, incident: Incident, base: Base) -> list[Fact]:
    """An examination is over: whom it named goes, or the ladder goes on."""
    situation = Situation[incident.going_on.upper()]
    suspects = tuple(node for node in incident.suspects if node in job.by_node and node not in job.evicted)
    why = incident.finding or "nobody was named"
    if not suspects and incident.code:  # told while the machines were being tested
        return answer(
            fleet, job, incident, base, Situation.USER_CODE, f"at step {max(job.last_step, incident.step)}: {incident.code}"
        )
    if not suspects:
        return answer(fleet, job, incident, base, situation, why)
    if incident.suspected_by == "evict_group":
        too_many = _too_many(fleet, job, suspects)
        if too_many:
            return answer(fleet, job, incident, base, situation, f"{why}; not evicted, since {too_many}")
        against = _against_group(fleet, job, suspects)
        if against:
            because = f"{why}; not evicted, since {against}"
            return answer(fleet, job, incident, base, situation, because, tried=Last.GROUP_STAYS)
    kept = [node for node in suspects if stays(fleet, job, node)]
    if kept:
        suspects = tuple(node for node in suspects if node not in kept)
        why = f"{why}; a person keeps {', '.join(kept)} in"
        if not suspects:
            return answer(fleet, job, incident, base, situation, why)
    group = (incident.group, len(suspects)) if incident.group else ("", 0)
    return out(fleet, job, incident, base, incident.suspected_by, situation, suspects, f"{situation.value}; {why}", group)


def _too_many(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> str:
    """Who covers so much of the job is not named by it."""
    rules = fleet.policy.decider
    if is_whole(job, nodes):
        return "that is the whole job"
    if len(nodes) > max(1, min(rules.group_machines_max, int(rules.group_share_max * len(job.places)))):
        return (
            f"{len(nodes)} machines are more than the policy lets go with a group (at most {rules.group_machines_max}, "
            f"and {rules.group_share_max:g} of the job)"
        )
    return ""


def _against_group(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> str:
    """Stacks are weak evidence: where anything stands against evicting a group, the job is not shrunk and nobody is called for it."""
    kept = [node for node in nodes if stays(fleet, job, node)]
    if kept:
        return f"a person keeps {', '.join(kept)} in"
    over = next((found for node in nodes if (found := over_budget(fleet, job, job.by_node[node])) is not None), None)
    if over is not None:
        return str(over)
    all_out = tuple(dict.fromkeys((*job.gone, *nodes)))
    return "" if spares_for(fleet, job, all_out) is not None else no_standby(fleet, job, all_out)


# --- rungs ---------------------------------------------------------------------------------------------------------------------


def _examine(rung: Rung) -> Remedy:
    def made(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str) -> list[Fact] | str:
        if rung == "aggregate_stacks" and job.ended:
            return "there are no stacks of an attempt that is over"
        if rung == "group_test":
            groups = groups_for(job)
            if isinstance(groups, str):
                return groups
        mode = fleet.policy.mode_of(rung)
        if rung != "aggregate_stacks":  # what is stopped to be looked at must be able to start again
            mode = min(mode, fleet.policy.mode_of(rule_of(situation, "reattempt")), key=CAREFUL.index)
        taken = decision(fleet, job, incident, base, rung=rung, rule=rung, mode=mode, situation=situation.word, because=why)
        return [taken, *ask(fleet, job, taken, base)]

    return made


def _restart(
    fleet: Fleet, job: Job, incident: Incident, base: Base, rung: Rung, situation: Situation, because: str, **what: Any
) -> list[Fact] | str:
    """In place, but for machines that are gone already, or ail."""
    rules = fleet.policy.decider
    if incident.recoveries >= rules.recoveries_max:
        return "no recovery is left"
    rule = rule_of(situation, rung)
    nodes = with_ailing(fleet, job, job.gone, fleet.policy.mode_of(rule))
    what |= {"rung": rung, "rule": rule, "nodes": nodes, "situation": situation.word}
    standbys = spares_for(fleet, job, nodes)
    if standbys is None:
        text = f"{because}; {no_standby(fleet, job, nodes)}"
        veto = decision(fleet, job, incident, base, because=text, vetoed="no_standby", **what)
        if rules.no_standby == "hold" and not fleet.held(job.name):
            return [veto]
        return [veto, *lacking(fleet, job, incident, base, text)]
    made = decision(fleet, job, incident, base, because=because, standbys=standbys, **what)
    return [made, *ask(fleet, job, made, base)]


def _reattempt(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str) -> list[Fact] | str:
    rules = fleet.policy.decider
    if incident.reattempts >= rules.reattempts_max:
        return "no reattempt is left"
    because = f"{why}; reattempt {incident.reattempts + 1} of at most {rules.reattempts_max}"
    below = restore_below(job)
    return _restart(fleet, job, incident, base, "reattempt", situation, because, restore_below_step=below)


def _roll_back(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str) -> list[Fact] | str:
    target = revisions.target(job)
    if isinstance(target, str):
        return f"no rollback, since {target}"
    because = f"{why}; back from revision {job.revision[:12]} to {target.revision[:12]}, the last stable one"
    below = min((step for step in (target.restore_below_step, restore_below(job)) if step >= 0), default=-1)
    return _restart(
        fleet, job, incident, base, "roll_back", situation, because, revision=target.revision, restore_below_step=below
    )


REMEDIES: Mapping[Rung, Remedy] = {
    "aggregate_stacks": _examine("aggregate_stacks"),
    "diagnose": _examine("diagnose"),
    "group_test": _examine("group_test"),
    "reattempt": _reattempt,
    "roll_back": _roll_back,
}
