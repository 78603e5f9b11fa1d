"""A person keeps a machine in: what becomes of an eviction that is decided and not begun. Pure.

The latest word on a machine counts. What was to be evicted by a rule, by a yes or by another person's choice stays; a plan that is about
others too goes on without it; one that was about it alone is dropped, and the ladder goes on as if it could not have been taken.
"""

from __future__ import annotations

from typing import Any

from processors.ladder import EXAMINATIONS, Situation
from processors.state import Fleet, Job, Plan, with_incident

BY_EXAMINATION = frozenset(rule for _, rule in EXAMINATIONS.values())


def keeping(fleet: Fleet, job: Job, node: str) -> Fleet:
    """The fleet after a person kept it in. An eviction that was begun is not taken back."""
    if job.override and job.override.remedy == "evict" and job.override.node == node:
        job = job._replace(override=None, override_held=False)
    plan = job.plan
    if plan is None or node not in plan.nodes:
        return fleet.put(job)
    if node in job.evicted and ("evict_node", node) not in plan.refused:
        return fleet.put(job)
    fleet, job = _taken_back(fleet, job, node)
    without = _without(plan, node)
    if plan.rung != "evict" or (plan.rule != "evict_group" and _about(job, plan) & set(without.nodes)):
        job = job._replace(plan=without)
        if plan.incident:
            job = with_incident(job, answered=_answered(job, node), nodes_out=_out(job, node))
        return fleet.put(job)
    job = job._replace(plan=None)
    if not plan.incident:
        return fleet.put(job._replace(request=job.request or ("operator_restart" if job.ended else "")))
    return fleet.put(with_incident(job, **_goes_on(job, plan, node)))


def _about(job: Job, plan: Plan) -> set[str]:
    """Whom the plan is about: others go with them."""
    if plan.rule in BY_EXAMINATION:
        return set(job.incident.suspects) if job.incident else set()
    named = job.incident.named if job.incident else {}
    return {*named, *job.silent, *(node for node in plan.nodes if plan.rule == "override")}


def _answered(job: Job, node: str) -> dict[str, str]:
    return {**job.incident.answered, node: "kept"} if job.incident else {}


def _out(job: Job, node: str) -> tuple[str, ...]:
    return tuple(one for one in job.incident.nodes_out if one != node) if job.incident else ()


def _goes_on(job: Job, plan: Plan, node: str) -> dict[str, Any]:
    """What changes in the incident: a job that is down, or in trouble, needs something else; one that steps on needs nothing."""
    incident = job.incident
    assert incident is not None
    answered = {one: by for one, by in _answered(job, node).items() if by != plan.decision or one == node}
    changes: dict[str, Any] = {"answered": answered, "nodes_out": _out(job, node)}
    if plan.rule in BY_EXAMINATION:  # what it found is known still, and reckoned with again
        return changes | {"going_on": plan.situation}
    unanswered = incident.crash or incident.stall or incident.metric or incident.slow
    if not unanswered and (job.ended or incident.crashed or incident.hung):
        return changes | {"going_on": Situation.FAILED.word, "suspects": (), "finding": f"a person keeps {node} in"}
    return changes


def _without(plan: Plan, node: str) -> Plan:
    """The plan without the machine, and the standby that was to take its place."""
    at = plan.nodes.index(node)
    standbys = (*plan.standbys[:at], *plan.standbys[at + 1 :])
    spared = {("evict_node", node), *(("wake_standby", spare) for spare in plan.standbys[at : at + 1])}
    return plan._replace(
        nodes=(*plan.nodes[:at], *plan.nodes[at + 1 :]), standbys=standbys,
        refused=tuple(one for one in plan.refused if one not in spared),
    )  # fmt: skip


def _taken_back(fleet: Fleet, job: Job, node: str) -> tuple[Fleet, Job]:
    """An eviction that was issued, and refused without a try: as if it had not been decided."""
    if node not in job.evicted:
        return fleet, job
    place = fleet.machines.get(node)
    mine = [e for e in fleet.evictions if e.job == job.name and e.node == node][-1:]
    fleet = fleet._replace(
        evictions=tuple(e for e in fleet.evictions if e not in mine),
        bad_serials={serial: of for serial, of in fleet.bad_serials.items() if not place or serial != place.serial},
    )
    return fleet, job._replace(
        evicted={one: at for one, at in job.evicted.items() if one != node},
        unexamined={one: of for one, of in job.unexamined.items() if one != node},
    )
