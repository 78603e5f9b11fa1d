"""Configuration drift: each node's set-up held against the clear majority of its job's nodes. A part of the detector "job". Pure.

Equal set-ups are kept once (nearly all nodes of a job have the same), so a job of ten thousand nodes is a list of names and small
numbers. A name that takes too many values is a node's own and no longer compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from events.clock import NS
from events.envelope import NAME_MAX, Fact
from events.host import Configuration, ConfigurationDrift
from events.presence import Tick
from processors.detector import Claim, PartitionClock, Seen

NODES_MAX = 32_768
SETUPS_MAX = 48
#: A name of which more values than this are there is not configuration.
VALUES_MAX = 8
OWN_NAMES_MAX = 128
#: Differences that are told at a time; the rest waits until these are over.
TOLD_MAX = 64


class Setup(NamedTuple):
    groups: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


class Difference(NamedTuple):
    """A node's value that was told of; '' for not set."""

    node: str
    name: str
    value: str
    expected: str


class DriftState(NamedTuple):
    """`nodes`: sorted (node, place in `setups`). `own`: names that each node has its own value of. `changed_ns`: when a set-up changed
    last and was not judged since, 0 for never."""

    job: str = ""
    attempt: int = -1
    setups: tuple[Setup, ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()
    own: tuple[str, ...] = ()
    told: tuple[Difference, ...] = ()
    changed_ns: int = 0
    cause: str = ""


class ConfigurationDrifts:
    """`drift` of the settings."""

    name = "drift"
    reads: frozenset[type[Fact]] | None = frozenset((Configuration, Tick))

    def key_of(self, seen: Seen) -> str:
        return seen.job

    def empty(self, key: str) -> DriftState:
        return DriftState(key)

    def dump(self, state: DriftState) -> Any:
        by_setup: list[list[str]] = [[] for _ in state.setups]
        for node, place in state.nodes:
            by_setup[place].append(node)
        if state == DriftState(state.job):
            return {}
        return {
            "attempt": state.attempt,
            "setups": [[list(one.groups), [list(pair) for pair in one.values]] for one in state.setups],
            "nodes": by_setup,
            "own": list(state.own),
            "told": [list(one) for one in state.told],
            "changed_ns": state.changed_ns,
            "cause": state.cause,
        }

    def load(self, key: str, value: Any) -> DriftState:
        if not value:
            return DriftState(key)
        return DriftState(
            key,
            value["attempt"],
            tuple(Setup(tuple(groups), tuple((n, v) for n, v in values)) for groups, values in value["setups"]),
            tuple(sorted((node, place) for place, nodes in enumerate(value["nodes"]) for node in nodes)),
            tuple(value["own"]),
            tuple(Difference(*one) for one in value["told"]),
            value["changed_ns"],
            value["cause"],
        )

    def detect(self, state: DriftState, clock: PartitionClock, seen: Seen) -> tuple[DriftState, tuple[Claim, ...]]:
        data = seen.event.data
        if isinstance(data, Configuration):
            return _told(state, seen, data), ()
        if not state.changed_ns or clock.now_ns - state.changed_ns < int(clock.settings.drift.settle_s * NS):
            return state, ()
        return _judged(state, clock)


def _told(state: DriftState, seen: Seen, data: Configuration) -> DriftState:
    attempt = seen.event.attempt
    if attempt < state.attempt:
        return state
    if attempt > state.attempt:  # machines may have changed: those that are there tell again
        state = state._replace(attempt=attempt, setups=(), nodes=(), own=())
    own = set(state.own)
    setup = Setup(data.groups, tuple(pair for pair in data.values if pair[0] not in own))
    node = seen.node
    at = bisect_left(state.nodes, (node, -1))
    known = at < len(state.nodes) and state.nodes[at][0] == node
    if known and state.setups[state.nodes[at][1]] == setup:
        return state
    if not known and len(state.nodes) >= NODES_MAX:
        return state
    try:
        place = state.setups.index(setup)
        setups = state.setups
    except ValueError:
        place, setups = len(state.setups), (*state.setups, setup)
    nodes = (*state.nodes[:at], (node, place), *state.nodes[at + known :])
    state = state._replace(setups=setups, nodes=nodes, changed_ns=max(seen.time_ns, 1), cause=seen.event.id)
    return _fitted(state) if place == len(setups) - 1 else state


def _fitted(state: DriftState) -> DriftState:
    """After a new set-up: names with too many values are dropped from all, equal and unused set-ups are put together; and if there are
    too many still, the nodes of the rarest are forgotten until they tell again."""
    values: dict[str, set[str]] = {}
    for setup in state.setups:
        for name, value in setup.values:
            values.setdefault(name, set()).add(value)
    own = sorted(name for name, different in values.items() if len(different) > VALUES_MAX)
    gone = set(own)
    used: dict[int, int] = {}
    for _, place in state.nodes:
        used[place] = used.get(place, 0) + 1
    if not own and len(state.setups) <= SETUPS_MAX and len(used) == len(state.setups):
        return state
    kept = sorted(used, key=lambda place: (-used[place], place))
    merged: dict[Setup, int] = {}
    moved: dict[int, int] = {}
    for place in kept:
        old = state.setups[place]
        new = Setup(old.groups, tuple(pair for pair in old.values if pair[0] not in gone)) if gone else old
        if new in merged or len(merged) < SETUPS_MAX:
            moved[place] = merged.setdefault(new, len(merged))
    nodes = tuple((node, moved[place]) for node, place in state.nodes if place in moved)
    return state._replace(setups=tuple(merged), nodes=nodes, own=tuple(dict.fromkeys((*state.own, *own)))[:OWN_NAMES_MAX])


def _judged(state: DriftState, clock: PartitionClock) -> tuple[DriftState, tuple[Claim, ...]]:
    causes = (state.cause,) if state.cause else ()
    now = {(one.node, one.name): (one, agree, of) for one, agree, of in differences(state, clock)}
    claims: list[Claim] = []
    kept: list[Difference] = []
    for one in state.told:
        found = now.get((one.node, one.name))
        if found and found[0] == one:
            kept.append(one)
            continue
        if not found or found[0].value != one.value:
            fact = ConfigurationDrift(node=one.node, name=one.name, value=one.value, expected=one.expected, over=True)
            claims.append(Claim(state.job, state.attempt, fact, causes))
    told = {(one.node, one.name, one.value) for one in kept}
    for one, agree, of in now.values():
        if (one.node, one.name, one.value) not in told and len(kept) < TOLD_MAX:
            kept.append(one)
            fact = ConfigurationDrift(node=one.node, name=one.name, value=one.value, expected=one.expected, agree=agree, of=of)
            claims.append(Claim(state.job, state.attempt, fact, causes))
    return state._replace(told=tuple(kept), changed_ns=0), tuple(claims)


def differences(state: DriftState, clock: PartitionClock) -> Iterator[tuple[Difference, int, int]]:
    """Each value unlike the majority's, with how many nodes agree on that, of how many that have the name's group; by name, then node."""
    limits = clock.settings.drift
    used: dict[int, int] = {}
    for _, place in state.nodes:
        used[place] = used.get(place, 0) + 1
    tables: Mapping[int, dict[str, str]] = {place: dict(state.setups[place].values) for place in used}
    groups = {place: frozenset(state.setups[place].groups) for place in used}
    for name in sorted({name for table in tables.values() for name in table}):
        group = name.partition(".")[0]
        counts: dict[str, int] = {}
        for place, count in sorted(used.items()):
            if group in groups[place]:
                value = tables[place].get(name, "")
                counts[value] = counts.get(value, 0) + count
        if not counts:  # a value of a group that nobody says to have
            continue
        of = sum(counts.values())
        expected, agree = max(sorted(counts.items()), key=lambda item: item[1])
        if len(counts) < 2 or of < limits.nodes_min or agree < limits.majority_min * of:
            continue
        for node, place in state.nodes:
            if group in groups[place] and tables[place].get(name, "") != expected:
                yield Difference(node, name, tables[place].get(name, "")[:NAME_MAX], expected[:NAME_MAX]), agree, of
