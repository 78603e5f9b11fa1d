"""How a decision that acts is carried through: stop (and evict, and wake), then start, then wait for health. Pure: each step follows
from the plan's stage and from the outcomes that came back."""

from __future__ import annotations

from typing import Any

from events.clock import NS
from events.decision import AttemptEnded, DecisionMade, IntentIssued, RankPlace, TimerSet
from events.envelope import Fact
from events.ids import derived_id
from processors.fleet import Fleet, Job, Plan

Base = dict[str, Any]


def carry_on(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """The next intents of the job's plan, if its stage calls for some."""
    plan = job.plan
    if plan is None or fleet.held(job.name) or plan.overdue:
        return _planned_failed(fleet, job, base)
    if plan.stage == "decided":
        return _begin(fleet, job, plan, base)
    if plan.stage == "stopping" and not plan.pending and not plan.failed and not plan.stop_only:
        return [_start(fleet, job, plan, base)]
    return _planned_failed(fleet, job, base)


def _begin(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    facts: list[Fact] = []
    if not job.ended:
        facts.append(AttemptEnded(job=job.name, attempt=job.attempt, reason="stopped", **base))
    if not plan.stop_only:
        at_ns = fleet.now_ns + int(fleet.policy.decider.recovery_deadline_s * NS)
        timer = derived_id("timer", job.name, plan.decision, "recovery_deadline", 0)
        facts.append(
            TimerSet(timer=timer, job=job.name, incident=plan.incident, purpose="recovery_deadline", at_ns=at_ns, **base)
        )
    nodes = tuple(place.node for place in job.places)
    if job.attempt > 0:
        facts.append(_of(fleet, job, plan, base, verb="stop_attempt", nodes=nodes, attempt=job.attempt, graceful=plan.graceful))
    facts.extend(_of(fleet, job, plan, base, verb="evict_node", node=node, attempt=job.attempt) for node in plan.nodes)
    facts.extend(_of(fleet, job, plan, base, verb="wake_standby", node=node, attempt=job.attempt) for node in plan.standbys)
    if job.attempt == 0 and not plan.stop_only:
        facts.append(_start(fleet, job, plan, base))
    return facts or [AttemptEnded(job=job.name, attempt=job.attempt, reason="stopped", **base)]


def _start(fleet: Fleet, job: Job, plan: Plan, base: Base) -> IntentIssued:
    """Ranks keep their order: a standby takes the very place of the machine that it replaces."""
    instead = dict(zip(plan.nodes, plan.standbys, strict=True))
    per_node = job.declared.ranks_per_node
    places = tuple(
        RankPlace(node=instead.get(place.node, place.node), first_rank=i * per_node, count=per_node)
        for i, place in enumerate(job.places)
    )
    return _of(
        fleet, job, plan, base, verb="start_attempt", attempt=job.attempt + 1, places=places,
        nodes=tuple(p.node for p in places), world_size=per_node * len(places),
    )  # fmt: skip


def _planned_failed(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """A plan of a person's that did not come to pass has no incident to go on in: the person is told."""
    plan = job.plan
    if plan is None or plan.incident or not (plan.failed or plan.overdue):
        return []
    ordinal = job.ordinal + 1
    decision = DecisionMade(
        decision=derived_id("decision", job.name, plan.decision, "hand_over", ordinal),
        incident="",
        job=job.name,
        epoch=job.epoch,
        ordinal=ordinal,
        rung="hand_over",
        rule="hand_over",
        mode="auto",
        attempt=job.attempt,
        because=f"what was asked for did not come to pass: {plan.failed or 'no healthy step before the deadline'}",
        policy_digest=fleet.policy_digest,
        catalogue_digest=fleet.catalogue_digest,
        code_version=fleet.code_version,
        **base,
    )
    return [decision, intent(fleet, job, decision, base, verb="notify", text=f"job {job.name}: {decision.because}"[:4000])]


def _of(fleet: Fleet, job: Job, plan: Plan, base: Base, **what: Any) -> IntentIssued:
    return _intent(fleet, job, plan.decision, plan.incident, plan.epoch, base, **what)


def intent(fleet: Fleet, job: Job, decision: DecisionMade, base: Base, **what: Any) -> IntentIssued:
    return _intent(fleet, job, decision.decision, decision.incident, decision.epoch, base, **what)


def _intent(fleet: Fleet, job: Job, decision: str, incident: str, epoch: int, base: Base, **what: Any) -> IntentIssued:
    key = derived_id("intent", job.name, decision, f"{what['verb']}/{what.get('node', '')}", epoch)
    expires = fleet.now_ns + int(fleet.policy.decider.action_deadline_s * NS)
    return IntentIssued(
        key=key, decision=decision, incident=incident, job=job.name, epoch=epoch, expires_ns=expires, **what, **base
    )
