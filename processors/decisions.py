"""The shapes of what is decided: evict, reattempt, hand over, and the intents that carry them out; what stands against each (a hold,
the budget, no standby) and the sentence that says so. Pure."""

from __future__ import annotations

from typing import Any

from events.clock import NS
from events.decision import DecisionMade, IntentIssued, Rung
from events.envelope import TEXT_MAX, Fact
from events.ids import derived_id
from events.job import Place
from processors.budget import Over, over_budget
from processors.ladder import Situation, rung_for
from processors.state import Fleet, Incident, Job, Plan

Base = dict[str, Any]


def cut(text: str, length: int = TEXT_MAX) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def decision(
    fleet: Fleet, job: Job, incident: Incident | None, base: Base, *, after: int = 0, because: str, **what: Any
) -> DecisionMade:
    """One decision, held if it would act and a hold stands. `after`: how many of the job's decisions come before it in this step."""
    ordinal = job.ordinal + 1 + after
    key = derived_id("decision", job.name, incident.id if incident else f"planned-{job.epoch}", what["rule"], ordinal)
    what.setdefault("mode", fleet.policy.mode_of(what["rule"]))
    if what["mode"] != "observe" and not what.get("vetoed") and fleet.held(job.name):
        what["vetoed"], because = "hold", because + "; a hold stands"
    return DecisionMade(
        decision=key,
        incident=incident.id if incident else "",
        job=job.name,
        epoch=incident.epoch if incident else job.epoch,
        ordinal=ordinal,
        attempt=job.attempt,
        because=cut(because),
        policy_digest=fleet.policy_digest,
        catalogue_digest=fleet.catalogue_digest,
        code_version=fleet.code_version,
        **what,
        **base,
    )


def evict(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, node: str) -> list[Fact]:
    """A machine is to go: with it, those whose going was decided in this recovery and may not have come to pass."""
    rung, rule = rung_for(situation, frozenset())
    trouble = incident.named.get(node) or job.silent[node]
    why = f"{situation.value}: {node} ({trouble.symptom})"
    mode = fleet.policy.mode_of(rule)
    if mode != "observe" and fleet.held(job.name):  # made again when it is released, by what is then known
        return [decision(fleet, job, incident, base, rung=rung, rule=rule, nodes=(node,), because=why)]
    over = over_for(fleet, job, incident, node)
    if over is not None:
        veto = decision(
            fleet, job, incident, base, rung=rung, rule=rule, nodes=(node,), because=f"{why}; {over}", vetoed="budget"
        )
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", f"{why}, but {over}", after=1)]
    planned = job.plan.nodes if job.plan and job.plan.incident else ()
    nodes = tuple(dict.fromkeys((*(n for n in (*planned, *job.gone) if n != node and n in job.by_node), node)))
    standbys = spares_for(fleet, job, nodes)
    if standbys is None:
        text = f"{why}; {no_standby(fleet, job, nodes)}"
        veto = decision(fleet, job, incident, base, rung=rung, rule=rule, nodes=nodes, because=text, vetoed="no_standby")
        if fleet.policy.decider.no_standby == "hold":
            return [veto]
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", text, after=1)]
    because = f"{why}; in its place {standbys[-1]}"
    made = decision(fleet, job, incident, base, rung=rung, rule=rule, nodes=nodes, standbys=standbys, because=because)
    return [made, *_ask(fleet, job, made, base)]


_VETOES = ("budget", "no_standby")


def over_for(fleet: Fleet, job: Job, incident: Incident, node: str) -> Over | None:
    """The budget that evicting this node would break. What was decided in the incident and is not spent yet (it waits for a yes, or
    is only observed) counts as well."""
    promised = [n for n, by in incident.answered.items() if by not in _VETOES and n in job.by_node and n not in job.evicted]
    return over_budget(fleet, job, job.by_node[node], tuple(job.by_node[n] for n in promised if n != node))


def answer(fleet: Fleet, job: Job, incident: Incident, base: Base, situation: Situation, why: str) -> list[Fact]:
    """A reattempt in place, or the next rung when those are spent. Machines that are gone already are replaced in it."""
    rules = fleet.policy.decider
    spent: set[Rung] = set()
    if incident.reattempts >= rules.reattempts_max or incident.recoveries >= rules.recoveries_max:
        spent.add("reattempt")
    rung, rule = rung_for(situation, frozenset(spent))
    if rung == "hand_over":
        used = f"reattempt {incident.reattempts} of at most {rules.reattempts_max} are used"
        if incident.reattempts < rules.reattempts_max:
            used = f"{incident.recoveries} of at most {rules.recoveries_max} recoveries are used"
        return hand_over(fleet, job, incident, base, rule, f"{situation.value}; {why}; {used}")
    because = f"{situation.value}; {why}; reattempt {incident.reattempts + 1} of at most {rules.reattempts_max}"
    nodes = job.gone
    standbys = spares_for(fleet, job, nodes)
    if standbys is None:
        text = f"{because}; {no_standby(fleet, job, nodes)}"
        veto = decision(fleet, job, incident, base, rung=rung, rule=rule, nodes=nodes, because=text, vetoed="no_standby")
        if fleet.policy.decider.no_standby == "hold" and not fleet.held(job.name):
            return [veto]
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", text, after=1)]
    made = decision(fleet, job, incident, base, rung=rung, rule=rule, because=because, nodes=nodes, standbys=standbys)
    return [made, *_ask(fleet, job, made, base)]


def hand_over(
    fleet: Fleet, job: Job, incident: Incident | None, base: Base, rule: str, because: str, after: int = 0
) -> list[Fact]:
    """A person is called, with the trail in one sentence; `keepstep explain` tells it whole. What a person asked for and does not
    come to pass is told whatever the mode."""
    what: dict[str, Any] = {} if incident else {"mode": "auto"}
    made = decision(fleet, job, incident, base, rung="hand_over", rule=rule, because=because, after=after, **what)
    if made.mode == "observe" or made.vetoed:
        return [made]
    if incident is None:
        return [made, intent(fleet, job, made, base, verb="notify", text=cut(f"job {job.name}: {because}"))]
    text = f"job {job.name}, incident {incident.id} ({incident.symptom}, attempt {job.attempt}): {cut(because, 3400)}"
    return [made, intent(fleet, job, made, base, verb="notify", text=cut(f"{text}. See: keepstep explain {incident.id}"))]


def _ask(fleet: Fleet, job: Job, made: DecisionMade, base: Base) -> list[Fact]:
    """What waits for a person's yes is told to one."""
    if made.mode != "approve" or made.vetoed:
        return []
    text = f"job {job.name}: {cut(made.because, 3400)}. This waits for your yes: keepstep approve {made.decision}"
    return [intent(fleet, job, made, base, verb="notify", text=cut(text))]


# --- standbys ------------------------------------------------------------------------------------------------------------------


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


def spares_for(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> tuple[str, ...] | None:
    """A standby for each machine that goes, or None if there are too few."""
    if not nodes:
        return ()
    spares = usable_standbys(fleet, job)
    return tuple(place.node for place in spares[: len(nodes)]) if len(spares) >= len(nodes) else None


def no_standby(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> str:
    return f"{len(nodes)} standbys are needed and {len(usable_standbys(fleet, job))} are left"


def still_right(fleet: Fleet, job: Job, plan: Plan) -> str:
    """Why a plan that waited can't be carried out as it was decided; '' if it can."""
    usable = {place.node for place in usable_standbys(fleet, job)}
    for standby in plan.standbys:
        if standby not in usable:
            return f"standby {standby} is not to be used any more"
    new = [job.by_node[node] for node in plan.nodes if node in job.by_node and node not in job.evicted]
    for i, place in enumerate(new):
        over = over_budget(fleet, job, place, tuple(new[:i]))
        if over is not None:
            return f"{place.node}: {over}"
    return ""


# --- intents -------------------------------------------------------------------------------------------------------------------


def intent(fleet: Fleet, job: Job, made: DecisionMade | Plan, base: Base, **what: Any) -> IntentIssued:
    """What an actuator is told; its key is the same however often the same step is derived."""
    key = derived_id("intent", job.name, made.decision, f"{what['verb']}/{what.get('node', '')}", made.epoch)
    expires = fleet.now_ns + int(fleet.policy.decider.action_deadline_s * NS)
    return IntentIssued(
        key=key,
        decision=made.decision,
        incident=made.incident,
        job=job.name,
        epoch=made.epoch,
        expires_ns=expires,
        **what,
        **base,
    )
