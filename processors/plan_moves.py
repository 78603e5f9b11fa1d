"""How a decision that acts is carried through: stop (and evict, and wake), then start, then wait for health. Pure: each step follows
from the plan's stage and from the outcomes that came back."""

from __future__ import annotations

from events.clock import NS
from events.decision import AttemptEnded, IntentIssued, RankPlace, TimerSet
from events.envelope import Fact
from events.ids import derived_id
from processors.decisions import Base, hand_over, intent, lacking, no_standby, restore_below
from processors.examinations import look
from processors.ladder import EXAMINATIONS
from processors.state import Fleet, Job, Plan, lost_standbys, usable_standbys


def carry_on(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """The next intents of the job's plan, if its stage calls for some."""
    plan = job.plan
    if plan is None or fleet.held(job.name):
        return []
    if plan.failed or plan.overdue:
        return _planned_failed(fleet, job, plan, base)
    if plan.stage == "decided":
        return _begin(fleet, job, plan, base)
    if plan.refused:
        return _again(fleet, job, plan, base)
    if plan.begun and not plan.deadline:  # it passed while a hold stood
        return [_deadline(fleet, job, plan, base)]
    if plan.stage == "stopping" and (facts := _instead(fleet, job, plan, base)):
        return facts
    if plan.stage == "stopping" and not plan.stop_only and _may_start(job, plan):
        return [_look_or_start(fleet, job, plan, base)]
    return []


def _look_or_start(fleet: Fleet, job: Job, plan: Plan, base: Base) -> IntentIssued:
    """What comes when all is stopped."""
    return look(fleet, job, plan, base) if plan.rung in EXAMINATIONS else _start(fleet, job, plan, base)


def _instead(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    """A standby that was lost on the way is replaced by another; where there is none, a person is called. One that only did not wake is
    then tried all the same."""
    lost = lost_standbys(fleet, job, plan)
    if not lost:
        return []
    spares = [p.node for p in usable_standbys(fleet, job) if p.node not in plan.standbys and p.node not in plan.unwoken]
    if spares:
        text = f"in place of {lost[0]}, which is not to be used any more, or did not wake"
        return [_wake(fleet, job, plan, base, spares[0], text=text)]
    incident = job.incident
    if all(node in plan.unwoken for node in lost) or (incident and incident.blocked):
        return []
    why = f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost on the way; {no_standby(fleet, job, lost)}"
    return lacking(fleet, job, incident, base, why, after=0)


def _may_start(job: Job, plan: Plan) -> bool:
    """All is stopped and the standbys are awake. An eviction that still goes on is of a machine that takes no part any more. Not
    while it is being settled whether silent machines have one cause: a start would count on them."""
    if any(verb != "evict_node" for verb, _ in plan.pending.values()):
        return False
    return not (plan.incident and job.incident and job.incident.waits_for("shared_window"))


def _begin(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    facts: list[Fact] = []
    if not job.ended and plan.ends_attempt:
        facts.append(AttemptEnded(job=job.name, attempt=job.attempt, reason="stopped", **base))
    facts.append(_deadline(fleet, job, plan, base))
    if not plan.ends_attempt:
        return [*facts, look(fleet, job, plan, base)]
    if job.attempt > 0 and (job.stopped != job.attempt or plan.stop_only):
        facts += _stop(fleet, job, plan, base)
    facts += [_evict(fleet, job, plan, base, node) for node in plan.nodes if node not in job.out]
    facts += [_wake(fleet, job, plan, base, node) for node in plan.standbys]
    if not any(isinstance(fact, IntentIssued) for fact in facts) and not plan.stop_only:
        facts.append(_look_or_start(fleet, job, plan, base))
    return facts


def _stop(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    """A machine that goes and is not heard anyway is not waited for: its eviction fences it. Empty: there is no other."""
    lost = {node for node in plan.nodes if node in job.silent or node in job.out}
    nodes = tuple(place.node for place in job.places if place.node not in lost)
    if not nodes:
        return []
    return [intent(fleet, job, plan, base, verb="stop_attempt", nodes=nodes, attempt=job.attempt, graceful=plan.graceful)]


def _evict(fleet: Fleet, job: Job, plan: Plan, base: Base, node: str) -> IntentIssued:
    return intent(fleet, job, plan, base, verb="evict_node", node=node, attempt=job.attempt)


def _wake(fleet: Fleet, job: Job, plan: Plan, base: Base, node: str, text: str = "") -> IntentIssued:
    code = revision_of(job, plan)
    return intent(fleet, job, plan, base, verb="wake_standby", node=node, attempt=job.attempt, revision=code, text=text)


def _again(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    """What actuators refused without a try is issued anew; what was done is not done twice."""
    facts: list[Fact] = []
    for verb, node in plan.refused:
        if verb == "stop_attempt":
            if not job.ended:  # a start was refused: it may have been begun
                facts.append(AttemptEnded(job=job.name, attempt=job.attempt, reason="stopped", **base))
            facts += _stop(fleet, job, plan, base)
        elif verb == "evict_node":
            facts.append(_evict(fleet, job, plan, base, node))
        elif verb == "wake_standby":
            facts.append(_wake(fleet, job, plan, base, node))
        else:
            facts.append(look(fleet, job, plan, base))
    if not any(isinstance(fact, IntentIssued) for fact in facts) and _may_start(
        job, plan
    ):  # who was to be stopped is out by now
        facts.append(_look_or_start(fleet, job, plan, base))
    return facts


def _deadline(fleet: Fleet, job: Job, plan: Plan, base: Base) -> TimerSet:
    timer = derived_id("timer", job.name, plan.decision, "recovery_deadline", plan.deadlines)
    at_ns = fleet.now_ns + int(_deadline_s(fleet, plan) * NS)
    return TimerSet(timer=timer, job=job.name, incident=plan.incident, purpose="recovery_deadline", at_ns=at_ns, **base)


def _deadline_s(fleet: Fleet, plan: Plan) -> float:
    """Until the first healthy step, or until an examination is over: the stop, and the look itself."""
    rules = fleet.policy.decider
    looking_s = {
        "aggregate_stacks": rules.slow_rounds * rules.slow_every_s, "diagnose": rules.tests_within_s, "group_test": rules.replay_within_s,
    }  # fmt: skip
    return rules.recovery_deadline_s if plan.rung not in looking_s else looking_s[plan.rung] + 2 * rules.action_deadline_s


def revision_of(job: Job, plan: Plan) -> str:
    """The code that the plan's attempt runs."""
    return plan.revision or job.next_revision or job.revision


def _start(fleet: Fleet, job: Job, plan: Plan, base: Base) -> IntentIssued:
    """Ranks keep their order: a standby takes the very place of the machine that it replaces."""
    instead = dict(zip(plan.nodes, plan.standbys, strict=False))
    per_node = job.declared.ranks_per_node
    nodes = [instead.get(place.node, place.node) for place in job.places]
    before = job.ranks if len(job.ranks) == len(nodes) else (None,) * len(nodes)
    places = tuple(
        old if old and old.node == node else RankPlace(node=node, first_rank=i * per_node, count=per_node)
        for i, (node, old) in enumerate(zip(nodes, before, strict=True))
    )
    below = min((step for step in (plan.restore_below_step, restore_below(job)) if step >= 0), default=-1)
    most = fleet.policy.decider.from_the_beginning_steps_max
    return intent(
        fleet, job, plan, base, verb="start_attempt", attempt=job.attempt + 1, places=places,
        nodes=tuple(nodes), world_size=per_node * len(places), revision=revision_of(job, plan),
        restore_below_step=below, from_the_beginning=below <= most or not job.declared.checkpoints,
    )  # fmt: skip


def _planned_failed(fleet: Fleet, job: Job, plan: Plan, base: Base) -> list[Fact]:
    """A plan of a person's that did not come to pass has no incident to go on in: the person is told."""
    if plan.incident:
        return []
    late = "no word of the stop before the deadline" if plan.stop_only else "no healthy step before the deadline"
    because = f"what was asked for did not come to pass: {plan.failed or late}"
    return hand_over(fleet, job, None, base, "hand_over", because, reason="planned_failed")
