"""Shared causes come first: many nodes of one rack, one switch or the whole bus in trouble together have one cause, and nobody is
evicted for it (DESIGN section 7; NVSentinel issue 1710: 77 nodes in 11 racks flagged after one crash). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from events.clock import NS
from events.job import Place
from processors.policy import SharedCauses
from processors.state import Fleet, Incident, Job, Scope, Trouble, scopes


#: What machines have in common, the narrowest page first.
SCOPES = ("rack", "nvlink_domain", "switch", "fleet")


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
    if not _any_due(rules, job, incident):
        return []
    since = fleet.now_ns - int(rules.window_s * NS)
    troubled: dict[str, Trouble] = {}
    for trouble in (incident.named, job.silent):
        for node, what in trouble.items():
            if what.learnt_ns >= since and node in job.by_node:
                troubled[node] = what
    bad: dict[Scope, int] = {}
    symptoms: dict[Scope, str] = {}
    for node, what in troubled.items():
        for scope in scopes(job.by_node[node]):
            bad[scope] = bad.get(scope, 0) + 1
            symptoms.setdefault(scope, what.symptom)
    return [
        Cause(*scope, count, job.sizes[scope], symptoms[scope])
        for scope, count in sorted(bad.items(), key=_rank_of)
        if scope not in incident.shared and count >= _needed(rules, job, scope)
    ]


def _rank_of(item: tuple[Scope, int]) -> int:
    """Each kind of scope in the order of the places (sorting keeps it)."""
    return SCOPES.index(item[0][0])


def _any_due(rules: SharedCauses, job: Job, incident: Incident) -> bool:
    """Whether a count may be due: what was ever in trouble bounds what is now."""
    return any(
        count >= rules.nodes_min and scope not in incident.shared and count >= _needed(rules, job, scope)
        for scope, count in incident.troubled.items()
    )


def _needed(rules: SharedCauses, job: Job, scope: Scope) -> float:
    share = rules.fleet_share if scope[0] == "fleet" else rules.share_min
    return max(rules.nodes_min, share * job.sizes.get(scope, 0))


def uncovered(job: Job, incident: Incident, nodes: Iterable[str]) -> Iterator[Place]:
    """The places, of these nodes, whose trouble is not explained by a shared cause that is named."""
    for node in nodes:
        place = job.by_node.get(node)
        if place is not None and not any(scope in incident.shared for scope in scopes(place)):
            yield place
