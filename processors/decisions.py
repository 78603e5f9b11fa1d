"""The shapes of what is decided: evict, reattempt, hand over, and the intents that carry them out; what stands against each (a hold,
the budget, no standby) and the sentence that says so. Pure."""

from __future__ import annotations

from typing import Any

from events.clock import NS
from events.decision import DecisionMade, HandOverReason, IntentIssued
from events.envelope import TEXT_MAX, Fact
from events.ids import derived_id
from events.job import Mode
from processors.budget import Over, over_budget
from processors.ladder import Situation, rule_of
from processors.state import Fleet, Incident, Job, Plan, lost_standbys, usable_standbys

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
    trouble = incident.named.get(node) or job.silent.get(node) or job.borne[node]
    why = f"{situation.value}: {node} ({trouble.symptom})"
    return out(fleet, job, incident, base, rule_of(situation, "evict"), situation, (node,), why)


def out(
    fleet: Fleet,
    job: Job,
    incident: Incident,
    base: Base,
    rule: str,
    situation: Situation,
    bad: tuple[str, ...],
    why: str,
    group: tuple[str, int] = ("", 0),
) -> list[Fact]:
    """These machines are to go, and what stands against it is a veto, told to a person."""
    what: dict[str, Any] = {
        "rung": "evict",
        "rule": rule,
        "situation": situation.word,
        "group": group[0],
        "group_size": group[1],
    }
    mode = fleet.policy.mode_of(rule)
    if mode != "observe" and fleet.held(job.name):  # made again when it is released, by what is then known
        return [decision(fleet, job, incident, base, nodes=bad, because=why, **what)]
    kept = [node for node in bad if stays(fleet, job, node)]
    if kept:
        text = f"{why}; a person keeps {', '.join(kept)} in"
        return [decision(fleet, job, incident, base, nodes=bad, because=text, vetoed="kept", **what)]
    before_it = () if rule == "evict_group" else bad  # a group counts as one
    spent = ((node, before_it[:i]) for i, node in enumerate(bad))
    over = next((found for node, also in spent if (found := over_for(fleet, job, incident, node, also)) is not None), None)
    if over is not None:
        veto = decision(fleet, job, incident, base, nodes=bad, because=f"{why}; {over}", vetoed="budget", **what)
        return [veto, *hand_over(fleet, job, incident, base, "hand_over", f"{why}, but {over}", after=1, reason="budget_spent")]
    planned = job.plan.nodes if job.plan and job.plan.incident else ()
    before = tuple(n for n in dict.fromkeys((*planned, *job.gone)) if n not in bad and n in job.by_node)
    nodes = (*with_ailing(fleet, job, (*before, *bad), mode)[len(before) + len(bad) :], *before, *bad)
    standbys = spares_for(fleet, job, nodes)
    if standbys is None:
        text = f"{why}; {no_standby(fleet, job, nodes)}"
        veto = decision(fleet, job, incident, base, nodes=nodes, because=text, vetoed="no_standby", **what)
        if fleet.policy.decider.no_standby == "hold":
            return [veto]
        return [veto, *lacking(fleet, job, incident, base, text)]
    because = f"{why}; in {'its' if len(bad) == 1 else 'their'} place {', '.join(standbys[-len(bad) :])}"
    made = decision(
        fleet,
        job,
        incident,
        base,
        nodes=nodes,
        standbys=standbys,
        because=because,
        restore_below_step=restore_below(job),
        **what,
    )
    return [made, *ask(fleet, job, made, base)]


def stays(fleet: Fleet, job: Job, node: str) -> bool:
    """Whether a person keeps it in, now."""
    return node in job.kept and (job.kept[node] == 0 or fleet.now_ns < job.kept[node])


def restore_below(job: Job) -> int:
    """The step below which a checkpoint must be, so that none of what was computed wrongly is restored; -1: any."""
    return job.poisoned.first if job.poisoned else -1


#: Modes, the most careful first.
CAREFUL: tuple[Mode, ...] = ("observe", "approve", "auto")


def with_ailing(fleet: Fleet, job: Job, nodes: tuple[str, ...], mode: Mode) -> tuple[str, ...]:
    """The machines that go with a restart, and those that ail and whose time has come, as far as standbys and budget reach."""
    allowed = CAREFUL[CAREFUL.index(mode) :]
    if not job.ailing or fleet.policy.mode_of("evict_ailing") not in allowed:
        return nodes
    for node in job.ailing:
        place = job.by_node.get(node)
        if place is None or node in nodes or node in job.evicted or stays(fleet, job, node):
            continue
        also = tuple(job.by_node[n] for n in nodes if n in job.by_node and n not in job.evicted)
        if spares_for(fleet, job, (*nodes, node)) is not None and over_budget(fleet, job, place, also) is None:
            nodes = (*nodes, node)
    return nodes


_VETOES = ("budget", "no_standby", "kept")


def over_for(fleet: Fleet, job: Job, incident: Incident, node: str, also: tuple[str, ...] = ()) -> Over | None:
    """The budget that evicting this node after `also` would break. What was decided in the incident and is not spent yet (it waits for
    a yes, or is only observed) counts as well."""
    decided = (n for n, by in incident.answered.items() if by not in _VETOES)
    promised = [n for n in dict.fromkeys((*decided, *also)) if n in job.by_node and n not in job.evicted]
    return over_budget(fleet, job, job.by_node[node], tuple(job.by_node[n] for n in promised if n != node))


def hand_over(
    fleet: Fleet,
    job: Job,
    incident: Incident | None,
    base: Base,
    rule: str,
    because: str,
    after: int = 0,
    situation: Situation | None = None,
    mode: Mode | None = None,
    reason: HandOverReason = "",
) -> list[Fact]:
    """A person is called, with the trail in one sentence; `keepstep explain` tells it whole. What a person asked for and does not
    come to pass is told whatever the mode."""
    left_down = job.ended and job.wanted == "running" and fleet.policy.mode_of(rule) == "observe"  # by us, before it observed
    what: dict[str, Any] = {} if incident and mode is None and not left_down else {"mode": mode or "auto"}
    if situation is not None:
        what["situation"] = situation.word
    what["reason"] = reason
    made = decision(fleet, job, incident, base, rung="hand_over", rule=rule, because=because, after=after, **what)
    if made.mode == "observe" or made.vetoed:
        return [made]
    if incident is None:
        return [made, intent(fleet, job, made, base, verb="notify", text=cut(f"job {job.name}: {because}"))]
    text = f"job {job.name}, incident {incident.id} ({incident.symptom}, attempt {job.attempt}): {cut(because, 3400)}"
    return [made, intent(fleet, job, made, base, verb="notify", text=cut(f"{text}. See: keepstep explain {incident.id}"))]


def ask(fleet: Fleet, job: Job, made: DecisionMade, base: Base) -> list[Fact]:
    """What waits for a person's yes is told to one."""
    if made.mode != "approve" or made.vetoed:
        return []
    text = f"job {job.name}: {cut(made.because, 3400)}. This waits for your yes: keepstep approve {made.decision} --reason '…'"
    return [intent(fleet, job, made, base, verb="notify", text=cut(text))]


# --- standbys ------------------------------------------------------------------------------------------------------------------


def spares_for(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> tuple[str, ...] | None:
    """A standby for each machine that goes, or None if there are too few."""
    if not nodes:
        return ()
    spares = usable_standbys(fleet, job)
    return tuple(place.node for place in spares[: len(nodes)]) if len(spares) >= len(nodes) else None


def no_standby(fleet: Fleet, job: Job, nodes: tuple[str, ...]) -> str:
    return f"{len(nodes)} standbys are needed and {len(usable_standbys(fleet, job))} are left"


def lacking(fleet: Fleet, job: Job, incident: Incident | None, base: Base, why: str, after: int = 1) -> list[Fact]:
    """A person is called for want of standbys, after the veto that says so."""
    because = f"{why}; it goes on by itself when there are enough: keepstep standby NODE --job {job.name}"
    return hand_over(fleet, job, incident, base, "hand_over", because, after=after, reason="no_standby")


def still_right(fleet: Fleet, job: Job, plan: Plan) -> str:
    """Why a plan that waited can't be carried out as it was decided; '' if it can."""
    for standby in lost_standbys(fleet, job, plan):
        return f"standby {standby} is not to be used any more"
    if plan.rule == "override":  # no budget stands against a person's own choice
        return ""
    new = [job.by_node[node] for node in plan.nodes if node in job.by_node and node not in job.evicted]
    for i, place in enumerate(new):  # a group counts as one
        over = over_budget(fleet, job, place, () if plan.rule == "evict_group" else tuple(new[:i]))
        if over is not None:
            return f"{place.node}: {over}"
    return ""


# --- intents -------------------------------------------------------------------------------------------------------------------


def intent(fleet: Fleet, job: Job, made: DecisionMade | Plan, base: Base, **what: Any) -> IntentIssued:
    """What an actuator is told; its key is the same however often the same step is derived."""
    step = f"{what['verb']}/{what.get('node', '')}"
    if isinstance(made, Plan) and made.refusals:
        step = f"{step}/{made.refusals}"  # it was refused without a try, and is another one
    if isinstance(made, Plan) and made.weighed:
        step = f"{step}/round-{made.weighed.rounds + 1}"
    key = derived_id("intent", job.name, made.decision, step, made.epoch)
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
