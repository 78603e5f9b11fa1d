"""Budgets of evictions and shared causes against plain models that count everything anew each time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from events.clock import NS
from events.decision import IncidentOpened
from events.job import JobDeclared, Place
from processors.budget import allowed, over_budget
from processors.decided import WINDOW_NS_MAX
from processors.policy import Budget, Budgets, Policy, SharedCauses
from processors.shared_cause import causes, uncovered
from processors.state import Eviction, Fleet, Incident, Job, Trouble, counted

NODES = [f"n{i}" for i in range(12)]
RACKS = ["", "r0", "r1", "r2"]

budgets = st.builds(
    Budget,
    evictions_max=st.integers(0, 4),
    share_max=st.sampled_from([0, 0.1, 0.25, 0.5, 1]),
    window_s=st.sampled_from([1, 10, 60]),
)
racks_of = st.lists(st.sampled_from(RACKS), min_size=12, max_size=12)


def fleet_of(racks: list[str], policy: Policy, evictions: list[tuple[int, int]], now_s: int) -> Fleet:
    places = [
        Place(node=node, rack=rack, switch=f"w{rack[1:]}" if rack else "") for node, rack in zip(NODES, racks, strict=True)
    ]
    fleet = Fleet(policy=policy, now_ns=now_s * NS)
    for name, mine, spares in (("gpt", places[:6], places[6:8]), ("llm", places[8:11], places[11:])):
        declared = JobDeclared(job=name, nodes=tuple(mine), standbys=tuple(spares), command=("x",))
        fleet = fleet.with_machines(name, (*mine, *spares))
        fleet = fleet.put(Job(declared=declared, places=(), standbys=tuple(spares)).at(tuple(mine)))
    gone = tuple(Eviction(at_s * NS, "gpt" if i < 8 else "llm", NODES[i], racks[i]) for at_s, i in sorted(evictions))
    return fleet._replace(evictions=gone)


@settings(max_examples=120, deadline=None)
@given(
    racks=racks_of,
    rules=st.builds(Budgets, job=budgets, rack=budgets, fleet=budgets),
    evictions=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 11)), max_size=8),
    now_s=st.integers(0, 120),
    index=st.integers(0, 5),
    also=st.lists(st.integers(0, 5), max_size=3, unique=True),
)
def test_budget_against_a_plain_model(
    racks: list[str], rules: Budgets, evictions: list[tuple[int, int]], now_s: int, index: int, also: list[int]
) -> None:
    evictions = [(at_s, i) for at_s, i in evictions if at_s <= now_s]
    fleet = fleet_of(racks, Policy(budget=rules), evictions, now_s)
    job = fleet.jobs["gpt"]
    planned = [i for i in also if i != index]
    every = [*evictions, *((now_s, i) for i in planned)]

    def spent(rule: Budget, members: set[int]) -> int:
        return len([1 for at_s, i in every if now_s - at_s < rule.window_s and i in members])

    def most(rule: Budget, machines: int) -> int:
        return min(rule.evictions_max, max(1, int(machines * rule.share_max)))

    broken = []
    if spent(rules.job, set(range(8))) >= most(rules.job, 6):
        broken.append("job")
    if spent(rules.fleet, set(range(12))) >= most(rules.fleet, 12):
        broken.append("fleet")
    same = {i for i in range(12) if racks[i] == racks[index]}
    if racks[index] and spent(rules.rack, same) >= most(rules.rack, len(same)):
        broken.append("rack")
    found = over_budget(fleet, job, job.places[index], tuple(job.places[i] for i in planned))
    assert (found.scope if found else "") == (broken[0] if broken else "")


def test_what_a_budget_allows() -> None:
    assert allowed(Budget(evictions_max=4, share_max=0.25), 1000) == 4
    assert allowed(Budget(evictions_max=4, share_max=0.25), 8) == 2
    assert allowed(Budget(evictions_max=4, share_max=0.25), 1) == 1  # a small scope may lose one
    assert allowed(Budget(evictions_max=0, share_max=1), 8) == 0  # unless the policy says none


def test_evicted_machines_count_in_the_share() -> None:
    """Or each eviction would tighten the budget that is left."""
    policy = Policy(budget=Budgets(fleet=Budget(evictions_max=9, share_max=0.5, window_s=60)))
    fleet = fleet_of([""] * 12, policy, [(1, i) for i in range(5)], 2)
    job = fleet.jobs["gpt"]
    fleet = fleet.put(job.at(job.places[5:])._replace(standbys=()))
    found = over_budget(fleet, job, job.places[5])
    assert found is None or found.scope == "job"
    assert over_budget(fleet, fleet.jobs["llm"], fleet.jobs["llm"].places[0]) is None


def test_no_window_is_longer_than_what_is_remembered() -> None:
    assert Budget(window_s=30 * 24 * 3600).window_s * NS <= WINDOW_NS_MAX


@settings(max_examples=120, deadline=None)
@given(
    racks=racks_of,
    rules=st.builds(
        SharedCauses, window_s=st.sampled_from([1, 5, 10]), nodes_min=st.integers(2, 4),
        share_min=st.sampled_from([0.1, 0.5, 1]), fleet_share=st.sampled_from([0.3, 0.5, 1]),
    ),
    named=st.dictionaries(st.integers(0, 11), st.integers(0, 20), max_size=8),
    silent=st.dictionaries(st.integers(0, 11), st.integers(0, 20), max_size=8),
    known=st.sets(st.sampled_from(["r0", "r1"])),
    now_s=st.integers(20, 30),
)  # fmt: skip
def test_shared_causes_against_a_plain_model(
    racks: list[str], rules: SharedCauses, named: dict[int, int], silent: dict[int, int], known: set[str], now_s: int
) -> None:
    fleet = fleet_of(racks, Policy(shared_causes=rules), [], now_s)
    job = fleet.jobs["gpt"]

    def troubles(found: dict[int, int], symptom: str) -> dict[str, Trouble]:
        return {NODES[i]: Trouble(symptom, at_s * NS, at_s * NS) for i, at_s in found.items()}

    job = job._replace(silent=troubles(silent, "node_silent"))
    ever = [job.by_node[NODES[i]] for i in {*named, *silent} if i < 6]
    incident = Incident(
        "i", 1, "gpu_unavailable", 0, 0, 1, named=troubles(named, "gpu_unavailable"), troubled=counted({}, ever),
        shared={("rack", rack): 3 for rack in known},
    )  # fmt: skip
    found = {(c.scope, c.name): (c.nodes, c.of) for c in causes(fleet, job, incident)}

    bad = {i for i in range(6) for when in (named, silent) if i in when and now_s - when[i] <= rules.window_s}
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    for scope, name in {("rack", r) for r in RACKS if r} | {("switch", f"w{r[1:]}") for r in RACKS if r}:
        members = {i for i in range(6) if racks[i] == f"r{name[1:]}"}
        count = len(bad & members)
        if count >= rules.nodes_min and count >= rules.share_min * len(members) and not (scope == "rack" and name in known):
            expected[scope, name] = (count, len(members))
    if len(bad) >= max(rules.nodes_min, rules.fleet_share * 6):
        expected["fleet", ""] = (len(bad), 6)
    assert found == expected

    incident = incident._replace(shared={**incident.shared, **dict.fromkeys(found, 1)})
    for i in range(6):
        explained = ("fleet", "") in incident.shared or any(
            key in incident.shared for key in (("rack", racks[i]), ("switch", f"w{racks[i][1:]}")) if racks[i]
        )
        assert (not list(uncovered(job, incident, [NODES[i]]))) == explained


def test_what_was_silent_before_counts_in_the_next_incident() -> None:
    fleet = fleet_of(["r0"] * 12, Policy(), [], 5)
    job = fleet.jobs["gpt"]._replace(silent={n: Trouble("node_silent", 4 * NS, 4 * NS) for n in NODES[:3]})
    from processors.fleet import evolve
    from processors.state import Told

    class Event:
        data: Any = IncidentOpened(
            incident="i", job="gpt", epoch=1, attempt=0, symptom="rank_exit", first_evidence_ns=0, trigger=1, ledger_digest=""
        )
        time, job, attempt = 5 * NS, "gpt", 0

    told: Told = Event()
    fleet = evolve(fleet.put(job), told, 5 * NS)
    job = fleet.jobs["gpt"]
    assert job.incident is not None
    assert [(c.scope, c.nodes) for c in causes(fleet, job, job.incident)] == [("rack", 3), ("switch", 3), ("fleet", 3)]
