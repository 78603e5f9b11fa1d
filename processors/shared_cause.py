"""Shared causes come first: many nodes of one rack, one switch or the whole bus in trouble together have one cause, and nobody is
evicted for it (DESIGN section 7; NVSentinel issue 1710: 77 nodes in 11 racks flagged after one crash). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from events.clock import NS
from processors.state import Fleet, Incident, Job, Trouble


@dataclass(frozen=True, slots=True)
class Cause:
    scope: str
    name: str
    nodes: int
    of: int
    symptom: str


def causes(fleet: Fleet, job: Job, incident: Incident) -> list[Cause]:
    """The shared causes that the incident's present evidence shows and that are not named yet, in the order of the places."""
    rules = fleet.policy.shared_causes
    since = fleet.now_ns - int(rules.window_s * NS)
    troubled: dict[str, Trouble] = {}
    for trouble in (incident.named, job.silent):
        for node, what in trouble.items():
            if what.learnt_ns >= since and node in job.index:
                troubled[node] = what
    if len(troubled) < rules.nodes_min:
        return []
    found: list[Cause] = []
    for scope in ("rack", "switch"):
        bad: dict[str, int] = {}
        symptoms: dict[str, str] = {}
        for node, what in troubled.items():
            name = getattr(job.index[node], scope)
            if name:
                bad[name] = bad.get(name, 0) + 1
                symptoms.setdefault(name, what.symptom)
        if not any(count >= rules.nodes_min and (scope, name) not in incident.shared for name, count in bad.items()):
            continue
        size = _sizes(job, scope)
        for name, count in bad.items():
            if count >= rules.nodes_min and count >= rules.share_min * size[name] and (scope, name) not in incident.shared:
                found.append(Cause(scope, name, count, size[name], symptoms[name]))
    whole = len(job.places)
    if ("fleet", "") not in incident.shared and len(troubled) >= max(rules.nodes_min, rules.fleet_share * whole):
        found.append(Cause("fleet", "", len(troubled), whole, next(iter(troubled.values())).symptom))
    return found


def _sizes(job: Job, scope: str) -> Mapping[str, int]:
    size: dict[str, int] = {}
    for place in job.places:
        size[getattr(place, scope)] = size.get(getattr(place, scope), 0) + 1
    return size


def covered(job: Job, incident: Incident, node: str) -> bool:
    """Whether a node's trouble is explained by a shared cause that is named."""
    if not incident.shared:
        return False
    place = job.index[node]
    return (
        ("fleet", "") in incident.shared
        or bool(place.rack and ("rack", place.rack) in incident.shared)
        or bool(place.switch and ("switch", place.switch) in incident.shared)
    )
