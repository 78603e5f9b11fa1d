"""The decider: a pure fold of LEDGER's inputs into decisions. One record in, the decider's events out, the same for whoever folds
the same ledger: live, on taking over, and in replay.

    Decider().feed(record) -> list[Derived]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from pydantic_core import to_json

from events import subjects
from events.action import OutcomeRecorded
from events.clock import NS, text_of
from events.decision import DeciderStarted, Diverged, TimerFired, TimerSet
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import ProgressNoted, Signal
from events.job import HoldPlaced, HoldReleased, OverrideGiven, PolicyAdopted, RestartRequested
from events.ports import Record
from events.registry import FACTS, Malformed, canonical, make, parse
from processors.examinations import judged
from processors.fleet import REFUSABLE, evolve, refusal
from processors.judge import judge, owner_of
from processors.moves import moves
from processors.revisions import proven
from processors.state import Fleet

#: More rounds than any input can need; reaching it is a fault of the rules, and is said rather than looped.
ROUNDS_MAX = 200

#: Kinds of the decider's own that are not derived from an input.
UNDERIVED = ("decider_started", "diverged")


#: Ids of inputs that are remembered, so that one delivered twice is folded once; beyond them the oldest go.
IDS_MAX = 65_536


class Unsettled(RuntimeError):
    """The rules kept answering each other."""


class Said(NamedTuple):
    """A fact of the decider's with its place in time: what the fold needs of an event."""

    data: Fact
    time: int
    job: str
    attempt: int


class Derived:
    """An event that follows from an input: where it is appended, and its canonical bytes. They are put together here from the fact's,
    which are half of the work; `event` reads them back."""

    __slots__ = ("_event", "data", "fact", "id", "subject")

    def __init__(self, fact: Fact, id_: str, trigger_id: str, time: str, said: Said) -> None:
        kind, job = KINDS[type(fact)], _quoted(said.job)
        self.fact, self.id, self.subject = fact, id_, subjects.ledger(said.job or subjects.FLEET, "decider", kind)
        self.data = b"".join((
            b'{"attempt":%d,"causes":' % said.attempt if said.attempt else b'{"causes":', to_json(trigger_id), b',"data":',
            fact.__pydantic_serializer__.to_json(fact, exclude_defaults=True), b',"id":"%b",' % id_.encode(),
            b'"job":%b,' % job if said.job else b"", b'"source":"decider","specversion":"1.0","subject":', job,
            b',"time":"%b","type":"%b"}' % (time.encode(), fact.TYPE.encode()),
        ))  # fmt: skip
        self._event: AnyEvent | None = None

    @property
    def event(self) -> AnyEvent:
        if self._event is None:
            self._event = parse(self.data)
        return self._event


KINDS = {fact: fact.kind() for fact in FACTS}
#: Kinds of fact that name a job or a node themselves: asking a model for what it does not have is slow.
_HAVE_JOB = frozenset(fact for fact in FACTS if "job" in fact.model_fields)
_HAVE_NODE = frozenset(fact for fact in FACTS if "node" in fact.model_fields)
_HAVE_ATTEMPT = frozenset(fact for fact in FACTS if "attempt" in fact.model_fields)


@lru_cache(maxsize=4096)
def _quoted(name: str) -> bytes:
    return to_json(name)


def _job_of(event: AnyEvent) -> str:
    """The job that an event speaks of; '' for none."""
    return (event.data.job if type(event.data) in _HAVE_JOB else "") or event.job


@lru_cache(maxsize=4096)
def is_own(subject: str) -> bool:
    """Whether a LEDGER subject holds what the decider derived (and so is compared, not folded as input)."""
    parts = subject.split(".")
    return len(parts) == 4 and parts[2] == "decider" and parts[3] not in UNDERIVED


#: role -> kinds that are believed from it.
ROLE_OF: dict[str, str] = {
    **dict.fromkeys(
        ("job_declared", "policy_adopted", "catalogue_adopted", "hold_placed", "hold_released", "restart_requested",
         "stop_requested", "standby_added", "approval_given", "override_given", "page_acknowledged"), "operator",
    ),
    **dict.fromkeys(
        ("signal", "signal_cleared", "progress_noted", "job_finished", "evidence_missing", "detector_started", "configuration_drift"),
        "detector",
    ),
    **dict.fromkeys(("try_started", "outcome_recorded", "page_repeated", "page_ended"), "actuator"),
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
        trigger_id, time_ns = self.trigger.id, self.record.time_ns
        time = text_of(time_ns)
        for fact in facts:
            job: str = fact.job or ""  # type: ignore[attr-defined]  # all that the decider derives has one
            attempt = fact.attempt if type(fact) in _HAVE_ATTEMPT else 0  # type: ignore[attr-defined]
            said = Said(fact, time_ns, job, attempt)
            id_ = derived_id("decider", job, trigger_id, KINDS[type(fact)], len(self.out))
            self.out.append(Derived(fact, id_, trigger_id, time, said))
            self.fleet = evolve(self.fleet, said, time_ns)


@lru_cache(maxsize=4096)
def _believed(subject: str, kind: Hashable, job: str) -> bool:
    """Whether a fact of this kind and job may stand on the subject: the server lets each role write under its own name only."""
    parts = subject.split(".")
    name = KINDS[kind]  # type: ignore[index]
    return len(parts) == 4 and parts[1] == subjects.token(job) and parts[2] == ROLE_OF.get(name) and parts[3] == name


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
        event = self._read(record)
        turn = None
        if event is not None:
            turn = _Turn(evolve(self.fleet, event, record.time_ns), event, record, self._digest)
            self._answer(turn)
            self.fleet = turn.fleet
        derived = turn.out if turn else []
        said = [out.data for out in derived]
        if recorded is not None:
            stands = [canonical(event) for event in recorded]
            if (stands if whole else stands + said[len(stands) :]) != said:  # it differs: it stands, and nothing is added to it
                said = stands
                self.fleet = turn.start if turn else self.fleet
                for kept in recorded:
                    self.fleet = evolve(self.fleet, kept, record.time_ns)
        place = f"{record.sequence} {record.time_ns} {record.subject} {len(record.data)} "
        self._digest.update(b"".join((place.encode(), record.data, *said)))
        return derived

    def _read(self, record: Record) -> AnyEvent | None:
        """The input, if it is readable, believed from where it comes, new, and not refused."""
        try:
            event = parse(record.data)
            kind = type(event.data)
            if not _believed(record.subject, kind, _job_of(event) or subjects.FLEET):  # type: ignore[arg-type]  # classes are
                raise Malformed(f"a {KINDS[kind]} of job {_job_of(event)[:80]!r} is not believed on {record.subject[:200]}")
        except (Malformed, subjects.BadName) as error:
            self._skip(record, str(error))
            return None
        if event.id in self._ids or event.id in self._older_ids:
            return None
        self._ids[event.id] = None
        if len(self._ids) >= IDS_MAX // 2:  # two generations, so that remembering costs the same at any age of the ledger
            self._ids, self._older_ids = {}, self._ids
        why = refusal(self.fleet, event) if kind in REFUSABLE else ""
        if why:
            self._skip(record, why)
            return None
        return event

    def _skip(self, record: Record, why: str) -> None:
        self.unread.append((record.sequence, why))
        self.unread_count += 1

    def _answer(self, turn: _Turn) -> None:
        data = turn.trigger.data
        kind = type(data)
        if kind is OutcomeRecorded and data.verb == "examine" and (known := turn.fleet.jobs.get(data.job)) is not None:
            turn.say(judged(turn.fleet, known, data, turn.base))
        elif kind is ProgressNoted and (known := turn.fleet.jobs.get(turn.trigger.job)) is not None:
            turn.say(proven(turn.fleet, known, turn.base))
        if kind is Signal:
            job = owner_of(turn.fleet, turn.trigger, data.node)
            turn.say(judge(turn.fleet, job, turn.trigger, turn.base))
            self._settle(turn, job.name if job else "")
        elif kind in _OF_ALL or (kind is TimerFired and data.purpose == "hold_expiry"):
            for name in sorted(turn.fleet.jobs):
                self._settle(turn, name)
        elif kind is not Diverged:
            if kind is HoldPlaced and data.expires_ns:
                timer = derived_id("timer", data.job, turn.trigger.id, "hold_expiry", 0)
                at_ns = data.expires_ns
                turn.say([TimerSet(timer=timer, job=data.job, incident="", purpose="hold_expiry", at_ns=at_ns, **turn.base)])
            if kind is RestartRequested and data.at_next_restart and data.job in turn.fleet.jobs:
                timer = derived_id("timer", data.job, turn.trigger.id, "update_window", 0)
                at_ns = turn.fleet.now_ns + int(turn.fleet.policy.decider.update_window_s * NS)
                turn.say([TimerSet(timer=timer, job=data.job, incident="", purpose="update_window", at_ns=at_ns, **turn.base)])
            of_node = kind in _HAVE_NODE and data.node and kind is not OverrideGiven  # a person names the job
            owner = owner_of(turn.fleet, turn.trigger, data.node) if of_node else None
            self._settle(turn, owner.name if owner else _job_of(turn.trigger))

    def _settle(self, turn: _Turn, name: str) -> None:
        """Says what follows for one job, until nothing does."""
        for _ in range(ROUNDS_MAX):
            job = turn.fleet.jobs.get(name)
            facts = moves(turn.fleet, job, turn.base) if job and not job.quiet else ()
            if not facts:
                return
            turn.say(facts)
        raise Unsettled(f"job {name}: the rules did not settle at LEDGER sequence {turn.record.sequence}")


#: After these, every job is looked at. A new decider does so because its rules may not be those of the one before.
_OF_ALL = frozenset((HoldReleased, PolicyAdopted, DeciderStarted))


def _short(digest: Any) -> str:
    text: str = digest.digest()[:16].hex()
    return text


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
