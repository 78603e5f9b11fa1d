"""What a person chose in place of the ladder. Pure."""

from __future__ import annotations

from typing import Any

from events.envelope import Fact
from processors import revisions
from processors.decisions import Base, decision, hand_over, no_standby, restore_below, spares_for
from processors.state import Fleet, Job


def overridden(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """It is taken at once; budgets and attempts do not stand against it, and what is not there does. It waits for the end of a hold."""
    chosen = job.override
    if chosen is None or (fleet.held(job.name) and job.override_held):
        return []
    incident = job.incident
    why = f"{chosen.author} chose it: {chosen.reason}"
    nodes = job.gone
    revision, below = "", restore_below(job)
    against = "" if job.wanted == "running" else "the job is stopped or finished by plan"
    if chosen.expires_ns and fleet.now_ns > chosen.expires_ns:
        against = against or "it ran out while a hold stood"
    if chosen.remedy == "evict":
        nodes = tuple(dict.fromkeys((*nodes, chosen.node)))
        against = against or ("" if chosen.node in job.by_node else f"{chosen.node} runs no rank of the job")
    elif chosen.remedy == "roll_back":
        target = revisions.Target(chosen.revision, -1) if chosen.revision else revisions.target(job)
        if isinstance(target, str):
            against = against or target
        else:
            revision = target.revision
            below = min((step for step in (target.restore_below_step, below) if step >= 0), default=-1)
    standbys = spares_for(fleet, job, nodes)
    if standbys is None:
        against = against or no_standby(fleet, job, nodes)
    what: dict[str, Any] = {"rung": chosen.remedy, "rule": "override", "mode": "auto", "nodes": nodes}
    if against and not fleet.held(job.name):
        because = f"{why}; it can't be done: {against}"
        veto = decision(fleet, job, incident, base, because=because, vetoed="no_standby", **what)
        if incident is not None:
            return [veto]
        return [veto, *hand_over(fleet, job, None, base, "hand_over", because, after=1, reason="planned_failed")]
    return [
        decision(
            fleet,
            job,
            incident,
            base,
            because=why,
            standbys=standbys or (),
            revision=revision,
            restore_below_step=below,
            **what,
        )
    ]
