"""What every detector is: a pure fold of one key's observations into claims; and the fold of a whole partition around it.

    detect(state, clock, seen) -> (state, claims)

The partition's fold is what the Faust worker, the in-memory pipeline and replay all run: bytes in, events out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from events import subjects
from events.clock import NS
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import EvidenceMissing
from events.ports import HELD_HEADER, Record
from events.presence import SettingsAdopted, Tick
from events.registry import FACTS, Malformed, make, parse
from processors.policy import Detectors

S = TypeVar("S")

#: Keys of one partition. A new name beyond it is refused: nodes and jobs are thousands, never a million.
KEYS_MAX = 100_000
#: Gaps in the ticks that are remembered.
GAPS_MAX = 8
#: Bytes of evidence that a claim quotes.
QUOTE_BYTES = 1024

_KINDS = {fact: fact.kind() for fact in FACTS}


class Seen(NamedTuple):
    """One observation as a detector sees it. `time_ns`: broker time; `seen_ns`: broker time when it was seen, that is less what
    it waited in a spool. `node` and `job` ('' for a node's own) are the subject's, which alone is believed."""

    sequence: int
    time_ns: int
    seen_ns: int
    node: str
    job: str
    event: AnyEvent
    #: What derived ids stand on: the event's id; for a tick, which has the same bytes each time, its sequence.
    trigger: str


class PartitionClock(NamedTuple):
    """A partition's position and time, and the settings in force. `sequence`: the last record folded. `now_ns`: greatest broker
    time seen (0: none). `last_tick_ns`: of the ticks, which alone move the rules of absence. Until `suspended_until_ns`, no absence may be judged: ticks had a gap, so the broker or this history stood still.
    `heard_from_ns`: broker time from which this history is whole; absence that began before counts from there. `gaps`: the last times
    in which there were no ticks."""

    sequence: int = 0
    now_ns: int = 0
    last_tick_ns: int = 0
    suspended_until_ns: int = 0
    heard_from_ns: int = 0
    settings: Detectors = Detectors()
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def absence_judged(self) -> bool:
        return self.now_ns >= self.suspended_until_ns

    def lost_ns(self, since_ns: int) -> int:
        """How much of the time since then had no ticks; rather too much where gaps were many."""
        return sum(max(0, until_ns - max(from_ns, since_ns)) for from_ns, until_ns in self.gaps)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a detector says: a fact for LEDGER about a job ('' for none) and its attempt, and the observations it stands on."""

    job: str
    attempt: int
    fact: Fact
    causes: tuple[str, ...] = ()


class Detector(Protocol[S]):
    """A pure fold by key. States are frozen and survive a round trip through `dump` and `load`."""

    @property
    def name(self) -> str: ...
    def key_of(self, seen: Seen) -> str:
        """The key (a node's or job's name) that an observation belongs to."""
        ...

    def empty(self, key: str) -> S: ...
    def detect(self, state: S, clock: PartitionClock, seen: Seen) -> tuple[S, tuple[Claim, ...]]:
        """`seen.event` is an observation of the key's, or a Tick (of no node), given to each key in key order."""
        ...

    def dump(self, state: S) -> Any:
        """Plain JSON values."""
        ...

    def load(self, key: str, value: Any) -> S: ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An event to append, and where."""

    subject: str
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that cannot be read: for DEADLETTER, with one sentence."""

    record: Record
    reason: str


@dataclass(slots=True)
class Keyed(Generic[S]):
    state: S
    #: The sequence last folded into it: older records are skipped, so that reading again changes nothing.
    sequence: int


class PartitionFold(Generic[S]):
    """All keys of one partition. Mutable only as a container: every change goes through the detector's pure `detect`.

    A record at or below the clock's sequence is folded already and changes nothing. So a host that stores this must write the
    changed keys first and the clock last: a key may then be ahead of the clock after a crash (its own sequence skips what it
    knows), never behind it. To go on: set `clock` and `keys` to what was stored, and read after `clock.sequence`.
    """

    def __init__(self, detector: Detector[S]) -> None:
        self.detector = detector
        self.clock = PartitionClock()
        self.keys: dict[str, Keyed[S]] = {}
        #: Keys whose state changed since the caller last cleared this.
        self.changed: set[str] = set()

    def feed(self, record: Record) -> tuple[list[Outgoing], Refused | None]:
        """Folds one record. Records that are folded already change nothing."""
        clock = self.clock
        if record.sequence <= clock.sequence:
            return [], None
        if subjects.is_clocks(record.subject):
            return self._feed_clock(record)
        self.clock = PartitionClock(
            record.sequence,
            record.time_ns if record.time_ns > clock.now_ns else clock.now_ns,
            clock.last_tick_ns,
            clock.suspended_until_ns,
            clock.heard_from_ns,
            clock.settings,
            clock.gaps,
        )
        try:
            seen = read(record)
        except (Malformed, subjects.BadName) as error:
            return [], Refused(record, str(error))
        key = self.detector.key_of(seen)
        if key not in self.keys and len(self.keys) >= KEYS_MAX:
            return [], Refused(record, f"the partition has {KEYS_MAX} keys already; {key[:80]!r} is one too many")
        out: list[Outgoing] = []
        self._one(key, seen, out)
        return out, None

    def _feed_clock(self, record: Record) -> tuple[list[Outgoing], Refused | None]:
        before = self.clock
        self.clock = before._replace(sequence=record.sequence, now_ns=max(before.now_ns, record.time_ns))
        out: list[Outgoing] = []
        try:
            event = parse(record.data)
        except Malformed as error:
            return out, Refused(record, str(error))
        if isinstance(event.data, SettingsAdopted):
            try:
                settings = Detectors.model_validate_json(event.data.settings)
            except ValueError as error:
                return out, Refused(record, f"settings that do not validate: {str(error)[:300]}")
            self.clock = self.clock._replace(settings=settings)
        elif isinstance(event.data, Tick):
            self.clock = ticked(before, record)
            seen = Seen(record.sequence, record.time_ns, record.time_ns, "", "", event, f"tick-{record.sequence}")
            if before.last_tick_ns and self.clock.heard_from_ns != before.heard_from_ns and record.subject.split(".")[1] == "0":
                out.append(self._stood_still(before, seen))
            for key in sorted(self.keys):
                self._one(key, seen, out)
        else:
            return out, Refused(record, f"a {event.data.kind()} on the clock's subject")
        return out, None

    def _stood_still(self, before: PartitionClock, seen: Seen) -> Outgoing:
        """A gap in the ticks, noted. One broker ticks for all partitions, so one of them speaks."""
        gap_s = max(0, seen.time_ns - before.last_tick_ns) // NS
        text = f"no tick for {gap_s} s: absence is not judged for a while"
        fact = EvidenceMissing(producer="clock", reason="ticks", detail=text)
        return _outgoing(self.detector.name, "clock", seen, Claim("", 0, fact), -1)

    def _one(self, key: str, seen: Seen, out: list[Outgoing]) -> None:
        keyed = self.keys.get(key)
        if keyed is None:
            keyed = self.keys[key] = Keyed(self.detector.empty(key), 0)
        if seen.sequence <= keyed.sequence:
            return
        state, claims = self.detector.detect(keyed.state, self.clock, seen)
        if state is not keyed.state or claims:
            keyed.state = state
            keyed.sequence = seen.sequence
            self.changed.add(key)
        for ordinal, claim in enumerate(claims):
            out.append(_outgoing(self.detector.name, key, seen, claim, ordinal))


def ticked(clock: PartitionClock, record: Record) -> PartitionClock:
    """The clock after a tick: a gap suspends the rules of absence for the grace period."""
    now = max(clock.now_ns, record.time_ns)
    heard = clock.heard_from_ns or now
    suspended = clock.suspended_until_ns
    settings, gaps = clock.settings, clock.gaps
    if clock.last_tick_ns == 0 or now - clock.last_tick_ns > int(settings.tick_gap_s * NS):
        suspended, heard = now + int(settings.grace_s * NS), now
        gaps = (*gaps, (clock.last_tick_ns, now))
        if len(gaps) > GAPS_MAX:  # the oldest two become one, with what was between them
            gaps = ((gaps[0][0], gaps[1][1]), *gaps[2:])
    return PartitionClock(record.sequence, now, now, suspended, heard, settings, gaps)


def read(record: Record) -> Seen:
    """A stored telemetry record (`tn.<p>.<node>.<kind>`, `tj.<p>.<node>.<job>.<kind>`) as an observation. Raises Malformed,
    BadName. The subject's node, job and kind are the truth: an envelope that differs is refused."""
    parts = record.subject.split(".")
    if not ((parts[0] == "tn" and len(parts) == 4) or (parts[0] == "tj" and len(parts) == 5)):
        raise Malformed(f"{record.subject[:200]} is not a subject of telemetry")
    node = subjects.name(parts[2])
    job = subjects.name(parts[3]) if parts[0] == "tj" else ""
    event = parse(record.data)
    kind = _KINDS[type(event.data)]
    if event.subject != node:
        raise Malformed(f"the envelope speaks for {event.subject[:80]!r}, its subject for {node[:80]!r}")
    if parts[0] == "tj" and event.job != job:
        raise Malformed(f"the envelope speaks of job {event.job[:80]!r}, its subject of {job[:80]!r}")
    if kind != parts[-1]:
        raise Malformed(f"a {kind} on the subject of {parts[-1][:80]!r}")
    seen_ns = record.time_ns
    if record.headers:
        held = record.headers.get(HELD_HEADER, "0")
        if held.isascii() and held.isdigit() and len(held) < 20:
            seen_ns = max(0, seen_ns - int(held))
    return Seen(record.sequence, record.time_ns, seen_ns, node, job, event, event.id)


def quote(text: str, bytes_max: int = QUOTE_BYTES) -> str:
    """The text as evidence: what is longer than `bytes_max` in UTF-8 is cut in its middle, with "…" where."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return raw.decode()
    half = max(0, bytes_max - len("…".encode())) // 2
    head = raw[:half].decode("utf-8", "ignore")
    return head + "…" + raw[len(raw) - half :].decode("utf-8", "ignore")


def dump_clock(clock: PartitionClock) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "sequence": clock.sequence,
        "now_ns": clock.now_ns,
        "last_tick_ns": clock.last_tick_ns,
        "suspended_until_ns": clock.suspended_until_ns,
        "heard_from_ns": clock.heard_from_ns,
        "settings": clock.settings.model_dump(mode="json"),
        "gaps": [list(gap) for gap in clock.gaps],
    }


def load_clock(value: dict[str, Any]) -> PartitionClock:
    gaps = tuple((from_ns, until_ns) for from_ns, until_ns in value.get("gaps", ()))
    return PartitionClock(**{**value, "settings": Detectors.model_validate(value["settings"]), "gaps": gaps})


def _outgoing(detector: str, key: str, seen: Seen, claim: Claim, ordinal: int) -> Outgoing:
    kind = claim.fact.kind()
    event = make(
        claim.fact,
        id=derived_id(f"detector/{detector}", key, seen.trigger, kind, ordinal),
        source=f"detector/{detector}",
        subject=key,
        time=seen.time_ns,
        causes=claim.causes,
        job=claim.job,
        attempt=claim.attempt,
    )
    return Outgoing(subjects.ledger(claim.job or subjects.FLEET, "detector", kind), event)


def run(fold: PartitionFold[Any], records: Iterable[Record]) -> tuple[list[Outgoing], list[Refused]]:
    """Feeds many; for tests and replay."""
    outs: list[Outgoing] = []
    refused: list[Refused] = []
    for record in records:
        out, bad = fold.feed(record)
        outs.extend(out)
        if bad:
            refused.append(bad)
    return outs, refused
