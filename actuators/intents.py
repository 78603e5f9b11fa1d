"""Which intents are to be carried out, and which are refused: a fold of LEDGER. Pure; the service (infra/actuator_service.py) acts.

    fold(state, seen) -> state          due(state) -> (CarryOut | Refuse, ...)

Rules, in this order: an intent with an outcome is over. A notification is always current and never held, an examination of a machine
that is out always current. Any other is stale if its incident is closed (unless it is of FINISHED and has begun) or if a later decision
of its job has issued intents; then expired past its time; then held under a hold on its job or the fleet. What is begun too often
without an outcome is given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from actuators.machine_tests import agreed
from events.action import OutcomeRecorded, PageEnded, PageRepeated, Result, TryStarted
from events.decision import IncidentClosed, IntentIssued, MachineJudged
from events.envelope import AnyEvent
from events.job import HoldPlaced, HoldReleased, JobDeclared, StandbyAdded

#: Tries of one intent, over all actuators that there were: beyond it the outcome is not known, and that is the outcome.
BEGUN_MAX = 6
#: Verbs that belong to no recovery: a page, and the examination of a machine that is out. They are current until they are done.
ASIDE = ("notify", "examine")
#: A machine is evicted for good; and where some ranks step, those that a node's agent was not told of yet are to be started still.
FINISHED = ("evict_node", "start_attempt")
#: Keys whose outcome is remembered, of all jobs: older intents are long superseded or expired.
DONE_MAX = 10_000
EVICTED_MAX = 10_000

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Seen:
    """One event of LEDGER with its place."""

    sequence: int
    time_ns: int
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Pending:
    """An intent without an outcome. `event_id`, `issued_ns`: its event's, from which ids and times of what follows derive."""

    intent: IntentIssued
    event_id: str
    sequence: int
    issued_ns: int
    begun: int = 0


@dataclass(frozen=True, slots=True)
class JobView:
    """What is known of a job. `newest`: the decision whose intents are current. `standbys`: nodes, in the order they came. `reference`:
    what its machines agreed on when they were tested, to the bit (software -> digest)."""

    declared: JobDeclared | None = None
    newest: str = ""
    closed_epoch: int = 0
    standbys: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    reference: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """`now_ns`: broker time of the newest record. `holds`: job ('' the fleet) to its expiry (0: none). `last_own`: job to the
    sequence of the last record that an actuator wrote for it."""

    now_ns: int = 0
    sequence: int = 0
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    pending: Mapping[str, Pending] = field(default_factory=dict)
    done: Mapping[str, None] = field(default_factory=dict)
    holds: Mapping[str, int] = field(default_factory=dict)
    last_own: Mapping[str, int] = field(default_factory=dict)

    def job(self, job: str) -> JobView:
        return self.jobs.get(job, JobView())


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Begin the `ordinal`th try of it."""

    pending: Pending
    ordinal: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Record this outcome; nothing is done."""

    pending: Pending
    result: Result
    detail: str


def _with(mapping: Mapping[K, V], key: K, value: V, most: int = 0) -> dict[K, V]:
    changed = {**mapping, key: value}
    if most and len(changed) > most:
        del changed[next(iter(changed))]
    return changed


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {k: v for k, v in mapping.items() if k != key} if key in mapping else mapping


def passed(state: State, sequence: int, time_ns: int) -> State:
    """A record that says nothing to an actuator still tells the time."""
    return replace(state, sequence=max(state.sequence, sequence), now_ns=max(state.now_ns, time_ns))


def fold(state: State, seen: Seen) -> State:
    """The state after one event. Records at or below the newest folded change nothing."""
    if seen.sequence <= state.sequence:
        return state
    state = passed(state, seen.sequence, seen.time_ns)
    fact: Any = seen.event.data
    match fact:
        case JobDeclared():
            standbys = tuple(place.node for place in fact.standbys)
            view = replace(state.job(fact.job), declared=fact, standbys=standbys, evicted=())
            return replace(state, jobs=_with(state.jobs, fact.job, view))
        case StandbyAdded():
            view = state.job(fact.job)
            evicted = tuple(node for node in view.evicted if node != fact.place.node)
            standbys = (*(node for node in view.standbys if node != fact.place.node), fact.place.node)
            return replace(state, jobs=_with(state.jobs, fact.job, replace(view, standbys=standbys, evicted=evicted)))
        case MachineJudged() if fact.back:  # a spare again
            view = state.job(fact.job)
            evicted = tuple(node for node in view.evicted if node != fact.node)
            standbys = (*(node for node in view.standbys if node != fact.node), fact.node)
            return replace(state, jobs=_with(state.jobs, fact.job, replace(view, standbys=standbys, evicted=evicted)))
        case IntentIssued():
            return _issued(state, seen, fact)
        case TryStarted():
            state = replace(state, last_own=_with(state.last_own, fact.job, seen.sequence))
            pending = state.pending.get(fact.key)
            if pending is None:
                return state
            begun = max(pending.begun, fact.ordinal)
            return replace(state, pending=_with(state.pending, fact.key, replace(pending, begun=begun)))
        case OutcomeRecorded():
            return _outcome(state, seen, fact)
        case PageRepeated() | PageEnded():
            return replace(state, last_own=_with(state.last_own, fact.job, seen.sequence))
        case IncidentClosed():
            view = state.job(fact.job)
            closed = replace(view, closed_epoch=max(view.closed_epoch, fact.epoch))
            return replace(state, jobs=_with(state.jobs, fact.job, closed))
        case HoldPlaced():
            return replace(state, holds=_with(state.holds, fact.job, fact.expires_ns))
        case HoldReleased():
            return replace(state, holds=_without(state.holds, fact.job))
    return state


def _issued(state: State, seen: Seen, fact: IntentIssued) -> State:
    if fact.verb not in ASIDE:  # what goes on beside a recovery takes nothing back
        state = replace(state, jobs=_with(state.jobs, fact.job, replace(state.job(fact.job), newest=fact.decision)))
    if fact.key in state.done or fact.key in state.pending:
        return state
    pending = Pending(fact, seen.event.id, seen.sequence, seen.time_ns)
    return replace(state, pending=_with(state.pending, fact.key, pending))


def _outcome(state: State, seen: Seen, fact: OutcomeRecorded) -> State:
    pending = state.pending.get(fact.key)
    state = replace(
        state,
        last_own=_with(state.last_own, fact.job, seen.sequence),
        pending=_without(state.pending, fact.key),
        done=_with(state.done, fact.key, None, DONE_MAX),
    )
    if fact.verb == "diagnose" and (found := agreed(fact.tests)):
        view = state.job(fact.job)
        state = replace(state, jobs=_with(state.jobs, fact.job, replace(view, reference={**view.reference, **found})))
    if pending is not None and fact.verb == "evict_node" and fact.result == "done":
        view = state.job(fact.job)
        evicted = (*view.evicted, pending.intent.node)[-EVICTED_MAX:]
        state = replace(state, jobs=_with(state.jobs, fact.job, replace(view, evicted=evicted)))
    return state


def stale(state: State, intent: IntentIssued) -> str:
    """Why an intent is not current any more; '' if it is."""
    if intent.verb in ASIDE:
        return ""
    view = state.job(intent.job)
    if intent.incident and intent.epoch <= view.closed_epoch:
        return f"its incident (epoch {intent.epoch}) is closed"
    if intent.decision != view.newest:
        return f"a later decision ({view.newest}) took its place"
    return ""


def held(state: State, job: str) -> bool:
    return any(
        scope in state.holds and (state.holds[scope] == 0 or state.holds[scope] > state.now_ns)
        for scope in dict.fromkeys(("", job))
    )


def judge(state: State, pending: Pending) -> CarryOut | Refuse:
    """What is to be done with an intent, as of now."""
    intent = pending.intent
    why = stale(state, intent)
    # Some that have begun are brought to their end though the job is back before it.
    finishing = intent.verb in FINISHED and pending.begun and intent.decision == state.job(intent.job).newest
    if why and not finishing:
        return Refuse(pending, "refused_stale", why)
    if state.now_ns > intent.expires_ns and intent.verb != "notify":  # a page that stands is sent however late
        return Refuse(
            pending, "refused_expired", f"it was to begin {(state.now_ns - intent.expires_ns) / 1e9:.3f} s ago at the latest"
        )
    if intent.verb != "notify" and held(state, intent.job):
        return Refuse(pending, "refused_held", "a hold stands; nothing is begun until it is released")
    if pending.begun >= BEGUN_MAX:
        return Refuse(
            pending, "failed", f"begun {pending.begun} times and never brought to an end: what came of it is not known"
        )
    if state.job(intent.job).declared is None:
        return Refuse(pending, "failed", f"the job {intent.job!r} is not declared")
    return CarryOut(pending, pending.begun + 1)


def due(state: State) -> tuple[CarryOut | Refuse, ...]:
    """All intents without an outcome, in the order they were issued, and what is to be done with each."""
    return tuple(judge(state, pending) for pending in sorted(state.pending.values(), key=lambda p: p.sequence))
