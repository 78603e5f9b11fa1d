"""The decider: a pure fold of LEDGER's inputs into decisions. One record in, the decider's events out, the same for whoever folds
the same ledger: live, on taking over, and in replay.

    Decider().feed(record) -> list[Outgoing]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from events import subjects
from events.decision import DeciderStarted, Diverged, TimerFired, TimerSet
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import Signal
from events.job import HoldPlaced, HoldReleased, PolicyAdopted
from events.ports import Record
from events.registry import Malformed, canonical, make, parse
from processors.detector import Outgoing
from processors.fleet import Fleet, evolve, remember, seen_before
from processors.judge import judge, owner_of
from processors.moves import moves

#: More rounds than any input can need; reaching it is a fault of the rules, and is said rather than looped.
ROUNDS_MAX = 200

#: Kinds of the decider's own that are not derived from an input.
UNDERIVED = ("decider_started", "diverged")


class Unsettled(RuntimeError):
    """The rules kept answering each other."""


@dataclass(slots=True)
class _Turn:
    """One input being answered."""

    fleet: Fleet
    trigger: AnyEvent
    record: Record
    base: dict[str, Any]
    out: list[Outgoing]

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
            self.out.append(Outgoing(subjects.ledger(job or subjects.FLEET, "decider", kind), event))
            self.fleet = evolve(self.fleet, event, self.record.time_ns)


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


class Decider:
    """Folds inputs in sequence. `fleet` is the state, `digest` the running digest of the ledger as folded."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._digest = b""
        #: Inputs that could not be read: (sequence, why). Bounded.
        self.unread: list[tuple[int, str]] = []

    @property
    def digest(self) -> str:
        return sha256(self._digest).hexdigest()[:32]

    def feed(self, record: Record, recorded: list[AnyEvent] | None = None, *, whole: bool = False) -> list[Outgoing]:
        """Folds one input and returns what follows from it. With `recorded`, the events that were appended for this input stand:
        the state goes on from them. `whole`: nothing was left out when they were appended, so nothing is added to them either
        (else, what is derived beyond them is still owed). What is returned is what was derived, for the caller to compare."""
        before = self._digest
        self._mix(f"{record.sequence}\x1f{record.subject}\x1f".encode() + record.data)
        event = self._read(record)
        if event is None or seen_before(self.fleet, event.id):
            return []
        start = evolve(remember(self.fleet, event.id), event, record.time_ns)
        base = {"trigger": record.sequence, "ledger_digest": sha256(before).hexdigest()[:32]}
        turn = _Turn(start, event, record, base, [])
        self._answer(turn)
        self.fleet = turn.fleet
        derived = [out.event for out in turn.out]
        stands = derived
        if recorded is not None:
            stands = recorded if whole else [*recorded, *derived[len(recorded) :]]
            if stands != derived:  # what was recorded differs: it stands, and nothing is added to it
                stands = recorded
                self.fleet = start
                for kept in stands:
                    self.fleet = evolve(self.fleet, kept, record.time_ns)
        for kept in stands:
            self._mix(canonical(kept))
        return turn.out

    def _mix(self, data: bytes) -> None:
        self._digest = sha256(self._digest + data).digest()

    def _read(self, record: Record) -> AnyEvent | None:
        parts = record.subject.split(".")
        try:
            event = parse(record.data)
        except Malformed as error:
            self._skip(record, str(error))
            return None
        kind = event.data.kind()
        if len(parts) != 4 or parts[3] != kind or ROLE_OF.get(kind) != parts[2]:
            self._skip(record, f"a {kind} is not believed on {record.subject[:200]}")
            return None
        return event

    def _skip(self, record: Record, why: str) -> None:
        if len(self.unread) < 1000:
            self.unread.append((record.sequence, why))

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
                facts = moves(turn.fleet, job, turn.base) if job else []
                if not facts:
                    break
                turn.say(facts)
            else:
                raise Unsettled(f"job {name}: the rules did not settle at LEDGER sequence {turn.record.sequence}")

    @staticmethod
    def _concerned(turn: _Turn) -> list[str]:
        """The jobs whose moves an input can change."""
        data = turn.trigger.data
        if isinstance(data, HoldReleased | PolicyAdopted) or (isinstance(data, TimerFired) and data.purpose == "hold_expiry"):
            return sorted(turn.fleet.jobs)
        if isinstance(data, DeciderStarted | Diverged):
            return []
        node = getattr(data, "node", "")
        owner = owner_of(turn.fleet, turn.trigger, node) if node else None
        name = owner.name if owner else (getattr(data, "job", "") or turn.trigger.job)
        return [name] if name else []


def timer_event(fact: TimerSet, source_id: str) -> AnyEvent:
    """The finished event that the broker delivers when a timer fires."""
    fired = TimerFired(timer=fact.timer, job=fact.job, incident=fact.incident, purpose=fact.purpose)
    return make(
        fired,
        id=derived_id("timer", fact.job, fact.timer, "timer_fired", 0),
        source="timer",
        subject=fact.job,
        time=fact.at_ns,
        causes=(source_id,),
        job=fact.job,
    )
