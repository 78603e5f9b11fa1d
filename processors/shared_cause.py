"""Shared causes come first: many nodes of one rack, one switch or the whole bus in trouble together have one cause, and nobody is
evicted for it (DESIGN section 7; NVSentinel issue 1710: 77 nodes in 11 racks flagged after one crash). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from events.clock import NS
from events.job import Place
from processors.policy import SharedCauses
from processors.state import Fleet, Incident, Job, Scope, Trouble, counted, scopes

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
    hung = _hung(rules, job, incident)
    if not _any_due(rules, job, incident, hung):
        return []
    since = fleet.now_ns - int(rules.window_s * NS)
    troubled: dict[str, Trouble] = dict(hung)
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


def _hung(rules: SharedCauses, job: Job, incident: Incident) -> dict[str, Trouble]:
    """The machines whose driver hung, or whose link was down, while the job went on, which its crash or stall names: those of which it was
    learnt together, however long ago. A driver that is loaded anew on a whole rack hangs for whoever asks it; a switch takes all links."""
    if not job.ailing or not (incident.crash or incident.stall):
        return {}
    hung = job.borne
    since = max((what.learnt_ns for what in hung.values()), default=0) - int(rules.window_s * NS)
    return {node: what for node, what in hung.items() if what.learnt_ns >= since}


def _any_due(rules: SharedCauses, job: Job, incident: Incident, hung: Mapping[str, Trouble]) -> bool:
    """Whether a count may be due: what was ever in trouble bounds what is now."""
    more = [job.by_node[node] for node in hung if node not in incident.named and node not in job.silent]
    return any(
        count >= rules.nodes_min and scope not in incident.shared and count >= _needed(rules, job, scope)
        for scope, count in (counted(incident.troubled, more) if more else incident.troubled).items()
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
