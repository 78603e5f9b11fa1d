"""The decider: a pure fold of LEDGER's inputs into decisions. One record in, the decider's events out, the same for whoever folds
the same ledger: live, on taking over, and in replay.

    Decider().feed(record) -> list[Derived]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

from events import subjects
from events.decision import DeciderStarted, Diverged, TimerFired, TimerSet
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import Signal
from events.job import HoldPlaced, HoldReleased, PolicyAdopted
from events.ports import Record
from events.registry import Malformed, canonical, make, parse
from processors.fleet import evolve, refusal
from processors.judge import judge, owner_of
from processors.moves import moves
from processors.state import Fleet

#: More rounds than any input can need; reaching it is a fault of the rules, and is said rather than looped.
ROUNDS_MAX = 200

#: Kinds of the decider's own that are not derived from an input.
UNDERIVED = ("decider_started", "diverged")


#: Ids of inputs that are remembered, so that one delivered twice is folded once; beyond them the oldest go.
IDS_MAX = 65_536


class Unsettled(RuntimeError):
    """The rules kept answering each other."""


class Derived(NamedTuple):
    """An event that follows from an input: where it is appended, and its canonical bytes."""

    subject: str
    event: AnyEvent
    data: bytes


def is_own(subject: str) -> bool:
    """Whether a LEDGER subject holds what the decider derived (and so is compared, not folded as input)."""
    parts = subject.split(".")
    return len(parts) == 4 and parts[2] == "decider" and parts[3] not in UNDERIVED


#: role -> kinds that are believed from it.
ROLE_OF: dict[str, str] = {
    **dict.fromkeys(
        ("job_declared", "policy_adopted", "catalogue_adopted", "hold_placed", "hold_released", "restart_requested",
         "stop_requested", "standby_added", "approval_given"), "operator",
    ),
    **dict.fromkeys(
        ("signal", "signal_cleared", "progress_noted", "job_finished", "evidence_missing", "detector_started"), "detector"
    ),
    **dict.fromkeys(("try_started", "outcome_recorded"), "actuator"),
    "timer_fired": "timer",
    **dict.fromkeys(UNDERIVED, "decider"),
}  # fmt: skip


class _Turn:
    """One input being answered."""

    def __init__(self, fleet: Fleet, trigger: AnyEvent, record: Record, digest: Any) -> None:
        self.start = self.fleet = fleet
        self.trigger, self.record, self._digest = trigger, record, digest
        self.out: list[Derived] = []
        self._base: dict[str, Any] | None = None

    @property
    def base(self) -> dict[str, Any]:
        """What every fact that follows carries."""
        if self._base is None:
            self._base = {"trigger": self.record.sequence, "ledger_digest": _short(self._digest)}
        return self._base

    def say(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            job = getattr(fact, "job", "") or ""
            kind = fact.kind()
            event = make(
                fact,
                id=derived_id("decider", job, self.trigger.id, kind, len(self.out)),
                source="decider",
                subject=job,
                time=self.record.time_ns,
                causes=(self.trigger.id,),
                job=job,
                attempt=getattr(fact, "attempt", 0),
            )
            self.out.append(Derived(subjects.ledger(job or subjects.FLEET, "decider", kind), event, canonical(event)))
            self.fleet = evolve(self.fleet, event, self.record.time_ns)


class Decider:
    """Folds inputs in sequence. `fleet` is the state, `digest` the running digest of the ledger as folded."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._digest = sha256()
        self._ids: dict[str, None] = {}
        self._older_ids: dict[str, None] = {}
        #: Inputs that could not be read or were refused: (sequence, why), the last thousand, and how many there were.
        self.unread: deque[tuple[int, str]] = deque(maxlen=1000)
        self.unread_count = 0

    @property
    def digest(self) -> str:
        return _short(self._digest)

    def feed(self, record: Record, recorded: list[AnyEvent] | None = None, *, whole: bool = False) -> list[Derived]:
        """Folds one input and returns what follows from it. With `recorded`, the events that were appended for this input stand:
        the state goes on from them. `whole`: nothing was left out when they were appended, so nothing is added to them either
        (else, what is derived beyond them is still owed). What is returned is what was derived, for the caller to compare."""
        before = self._digest.copy()
        self._mix(f"{record.sequence} {record.time_ns} {record.subject} {len(record.data)} ".encode(), record.data)
        event = self._read(record)
        turn = None
        if event is not None:
            turn = _Turn(evolve(self.fleet, event, record.time_ns), event, record, before)
            self._answer(turn)
            self.fleet = turn.fleet
        derived = turn.out if turn else []
        if recorded is not None:
            stands = recorded if whole else [*recorded, *(out.event for out in derived[len(recorded) :])]
            if stands != [out.event for out in derived]:  # what was recorded differs: it stands, and nothing is added to it
                self.fleet = turn.start if turn else self.fleet
                for kept in recorded:
                    self.fleet = evolve(self.fleet, kept, record.time_ns)
                self._mix(*(canonical(kept) for kept in recorded))
                return derived
        self._mix(*(out.data for out in derived))
        return derived

    def _mix(self, *parts: bytes) -> None:
        for part in parts:
            self._digest.update(part)

    def _read(self, record: Record) -> AnyEvent | None:
        """The input, if it is readable, believed from where it comes, new, and not refused."""
        parts = record.subject.split(".")
        try:
            event = parse(record.data)
            kind = event.data.kind()
            job = getattr(event.data, "job", "") or event.job or subjects.FLEET
            if len(parts) != 4 or parts[3] != kind or ROLE_OF.get(kind) != parts[2] or parts[1] != subjects.token(job):
                raise Malformed(f"a {kind} of job {job[:80]!r} is not believed on {record.subject[:200]}")
        except (Malformed, subjects.BadName) as error:
            self._skip(record, str(error))
            return None
        if event.id in self._ids or event.id in self._older_ids:
            return None
        self._ids[event.id] = None
        if len(self._ids) >= IDS_MAX // 2:  # two generations, so that remembering costs the same at any age of the ledger
            self._ids, self._older_ids = {}, self._ids
        why = refusal(self.fleet, event)
        if why:
            self._skip(record, why)
            return None
        return event

    def _skip(self, record: Record, why: str) -> None:
        self.unread.append((record.sequence, why))
        self.unread_count += 1

    def _answer(self, turn: _Turn) -> None:
        data = turn.trigger.data
        if isinstance(data, Signal):
            turn.say(judge(turn.fleet, turn.trigger, turn.base))
        elif isinstance(data, HoldPlaced) and data.expires_ns:
            timer = derived_id("timer", data.job, turn.trigger.id, "hold_expiry", 0)
            turn.say(
                [TimerSet(timer=timer, job=data.job, incident="", purpose="hold_expiry", at_ns=data.expires_ns, **turn.base)]
            )
        for name in self._concerned(turn):
            for _ in range(ROUNDS_MAX):
                job = turn.fleet.jobs.get(name)
                facts = moves(turn.fleet, job, turn.base) if job and not job.quiet else []
                if not facts:
                    break
                turn.say(facts)
            else:
                raise Unsettled(f"job {name}: the rules did not settle at LEDGER sequence {turn.record.sequence}")

    @staticmethod
    def _concerned(turn: _Turn) -> list[str]:
        """The jobs whose moves an input can change. A new decider looks at all: its rules may not be those of the one before."""
        data = turn.trigger.data
        everyone = isinstance(data, HoldReleased | PolicyAdopted | DeciderStarted)
        if everyone or (isinstance(data, TimerFired) and data.purpose == "hold_expiry"):
            return sorted(turn.fleet.jobs)
        if isinstance(data, Diverged):
            return []
        owner = owner_of(turn.fleet, turn.trigger, getattr(data, "node", ""))
        name = owner.name if owner else (getattr(data, "job", "") or turn.trigger.job)
        return [name] if name else []


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:32])


def timer_event(fact: TimerSet) -> AnyEvent:
    """The finished event that the broker delivers when a timer fires."""
    fired = TimerFired(timer=fact.timer, job=fact.job, incident=fact.incident, purpose=fact.purpose)
    return make(
        fired,
        id=derived_id("timer", fact.job, fact.timer, "timer_fired", 0),
        source="timer",
        subject=fact.job,
        time=fact.at_ns,
        job=fact.job,
    )
