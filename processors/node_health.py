"""What is wrong with a node: silence, and what its kernel says. A pure fold by node over TELEMETRY_NODE (detector "node").

Silence is judged at ticks alone. Every list in the state has a bound, so that no flood grows it. What a claim opens is the
decider's to judge: here a standby, an evicted node and a node of an ended attempt are all just nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from events.clock import NS, text_of
from events.envelope import NAME_MAX, Fact
from events.hardware import EvidenceGap, KernelLog
from events.incident import Confidence, EvidenceMissing, Signal, SignalCleared, Symptom
from events.presence import AgentState, Heartbeat, Tick
from processors.catalogue import Catalogue, Finding
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.numbers import Numbers, advanced, overdue, restarted

#: The same symptom of the same device within this time is one signal, and its repeats are told of once in it.
REPEAT_WINDOW_NS = 60 * NS
REPEATS_MAX = 32
CAUSES_MAX = 16
#: Notes of missing evidence a node and minute; beyond it they are counted.
NOTES_PER_MINUTE = 8
#: A heartbeat this long after an announced stop: the agent runs after all.
STOP_OVER_NS = 2 * NS
#: A line may name the device of this many lines after it (one message over three lines).
CONTEXT_LINES = 3


@dataclass(frozen=True, slots=True)
class Repeat:
    """A claim of the last minute, and how often it was seen again since it was last told of."""

    symptom: Symptom
    device: str
    confidence: Confidence
    rule: str
    job: str
    attempt: int
    told_ns: int
    unsaid: int = 0
    seen_ns: int = 0
    evidence: str = ""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quota:
    """What may be said within a minute, and how much was not."""

    since_ns: int = 0
    said: int = 0
    unsaid: int = 0


@dataclass(frozen=True, slots=True)
class Rare:
    """What most observations leave as it is. `silent_since_ns`: when a silence that is claimed began, 0 for none.
    `stopped_ns`: when the agent announced its end, 0 for none; `started_ns`: when one started last."""

    node: str = ""
    boot: str = ""
    silent_since_ns: int = 0
    stopped_ns: int = 0
    stop_noted: bool = False
    started_ns: int = 0
    repeats: tuple[Repeat, ...] = ()
    echoes: Quota = Quota()
    #: The last echo that was not said, for the count.
    echo: Repeat | None = None
    notes: Quota = Quota()
    device: str = ""
    device_lines: int = 0


class NodeState(NamedTuple):
    """`heard_ns`: broker time of the last sign of life (a spooled one proves it for the time it was seen). `numbers`: each
    producer's running numbers, the latest first."""

    heard_ns: int = 0
    heard_id: str = ""
    job: str = ""
    attempt: int = 0
    numbers: tuple[Numbers, ...] = ()
    rare: Rare = Rare()


_ADAPTER: TypeAdapter[NodeState] = TypeAdapter(NodeState)


class NodeHealth:
    """`silence_s`, `grace_s` and `echoes_per_minute` of the settings; a catalogue of kernel lines."""

    name = "health"
    reads: frozenset[type[Fact]] | None = None

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> NodeState:
        return NodeState(rare=Rare(node=key))

    def dump(self, state: NodeState) -> Any:
        return _ADAPTER.dump_python(state, mode="json", exclude_defaults=True)

    def load(self, key: str, value: Any) -> NodeState:
        return _ADAPTER.validate_python(value)

    def repeats(self, state: NodeState, seen: Seen) -> bool:
        """Whether an observation came before: publishers whose acknowledgement was lost send again."""
        return advanced(state.numbers, seen.event.source, seen.event.number, seen.time_ns) is None

    def detect(self, state: NodeState, clock: PartitionClock, seen: Seen) -> tuple[NodeState, tuple[Claim, ...]]:
        event = seen.event
        data = event.data
        kind: type[Any] | None = type(data)
        if kind is Tick:
            return _tick(state, clock)
        numbers = advanced(state.numbers, event.source, event.number, seen.time_ns)
        if kind is AgentState and data.state == "started" and data.producer == "agent":
            numbers = restarted(state.numbers, event.source, event.number)
        elif numbers is None:  # told twice: a sign of life, and nothing else
            numbers, kind = state.numbers, None
        seen_ns = seen.seen_ns
        rare = state.rare
        claims: list[Claim] = []
        job, attempt = state.job, state.attempt
        latest = seen_ns >= state.heard_ns
        if latest:
            if kind is Heartbeat or (kind and event.job):
                job, attempt = event.job, event.attempt
            if rare.silent_since_ns or rare.stopped_ns or event.bootid != rare.boot:
                rare = _alive(state, rare, clock, seen, claims)
        if kind is not Heartbeat:
            if kind is KernelLog:
                rare = self._kernel(seen, data, rare, clock, job, attempt, claims)
            elif kind is AgentState:
                rare = _agent(seen, data, rare, claims)
            elif kind is EvidenceGap:
                gap = EvidenceMissing(
                    node=seen.node,
                    producer=data.producer[:NAME_MAX],
                    reason=data.reason,
                    missing=data.missing,
                    detail=data.detail,
                )
                rare = _note(rare, seen.time_ns, event.job, event.attempt, gap, (event.id,), claims)
        if latest:
            return NodeState(seen_ns, event.id, job, attempt, numbers, rare), tuple(claims)
        return NodeState(state.heard_ns, state.heard_id, job, attempt, numbers, rare), tuple(claims)

    # --- the kernel's lines -----------------------------------------------------------------------------------------------

    def _kernel(
        self, seen: Seen, log: KernelLog, rare: Rare, clock: PartitionClock, job: str, attempt: int, claims: list[Claim]
    ) -> Rare:
        if seen.event.job:
            job, attempt = seen.event.job, seen.event.attempt
        for record in log.records:
            if record.history or record.hearsay:
                continue
            device, lines = rare.device, rare.device_lines
            named = self.catalogue.device_named(record.text)
            if named:
                rare = replace(rare, device=named, device_lines=CONTEXT_LINES)
            elif lines:
                rare = replace(rare, device=device if lines > 1 else "", device_lines=lines - 1)
            finding = self.catalogue.classify(record.text)
            if finding and not (record.own and finding.row.confidence != "high"):  # a probe's own noise
                if not finding.device and lines:
                    finding = Finding(finding.row, finding.xid, device)
                rare = _found(seen, record.text, finding, rare, clock, job, attempt, claims)
        return rare


def _found(
    seen: Seen, text: str, finding: Finding, rare: Rare, clock: PartitionClock, job: str, attempt: int, claims: list[Claim]
) -> Rare:
    """One line that the catalogue knows: a claim, or one more of what was claimed within the minute."""
    row, now_ns, trigger = finding.row, seen.time_ns, seen.event.id
    # A kernel's word of a process that ended is no rank's end, which the agent tells; as one it would stop the job for any program's crash.
    symptom: Symptom = "unknown" if row.symptom == "rank_exit" else row.symptom
    one = Repeat(symptom, finding.device, row.confidence, row.id, job, attempt, now_ns, 0, seen.seen_ns)
    echo = row.confidence != "high"
    for i, known in enumerate(rare.repeats):
        same = known.symptom == one.symptom and known.device == one.device and known.confidence == one.confidence
        if same and known.job == job and known.attempt == attempt and now_ns - known.told_ns < REPEAT_WINDOW_NS:
            if echo:
                return _unsaid_echo(rare, one, text, trigger)
            again = _again(known, text, trigger, seen.seen_ns)
            return replace(rare, repeats=(*rare.repeats[:i], again, *rare.repeats[i + 1 :]))
    if echo:
        quota = rare.echoes
        if now_ns - quota.since_ns >= REPEAT_WINDOW_NS and not quota.unsaid:
            quota = Quota(now_ns)
        if quota.said >= clock.settings.echoes_per_minute:
            return _unsaid_echo(rare, one, text, trigger)
        rare = replace(rare, echoes=replace(quota, said=quota.said + 1))
    elif len(rare.repeats) >= REPEATS_MAX and all(
        now_ns - r.told_ns < REPEAT_WINDOW_NS and r.confidence == "high" for r in rare.repeats
    ):
        # So many different certainties of one node within a minute say nothing more.
        return _unsaid_echo(rare, one, text, trigger)
    claims.append(_signal(seen.node, one, 1, text, (trigger,)))
    return replace(rare, repeats=(*_room(rare.repeats), one))


def _room(repeats: tuple[Repeat, ...]) -> tuple[Repeat, ...]:
    """Makes room for one more: an echo goes first, then the oldest."""
    if len(repeats) < REPEATS_MAX:
        return repeats
    gone = min(range(len(repeats)), key=lambda i: (repeats[i].confidence == "high", repeats[i].told_ns))
    return (*repeats[:gone], *repeats[gone + 1 :])


def _again(known: Repeat, text: str, trigger: str, seen_ns: int) -> Repeat:
    causes = known.causes if trigger in known.causes else (*known.causes, trigger)[-CAUSES_MAX:]
    return replace(
        known, unsaid=known.unsaid + 1, seen_ns=max(known.seen_ns, seen_ns), evidence=quote(text, 400), causes=causes
    )


def _unsaid_echo(rare: Rare, one: Repeat, text: str, trigger: str) -> Rare:
    known = replace(one, causes=rare.echo.causes if rare.echo else ())
    return replace(
        rare,
        echoes=replace(rare.echoes, unsaid=rare.echoes.unsaid + 1),
        echo=_again(known, text, trigger, max(one.seen_ns, rare.echo.seen_ns if rare.echo else 0)),
    )


def _signal(node: str, what: Repeat, count: int, text: str, causes: tuple[str, ...]) -> Claim:
    fact = Signal(
        symptom=what.symptom,
        node=node,
        device=what.device,
        confidence=what.confidence,
        rule=what.rule,
        evidence=quote(text),
        seen_ns=what.seen_ns,
        count=count,
    )
    return Claim(what.job, what.attempt, fact, causes)


# --- presence -----------------------------------------------------------------------------------------------------------------


def _alive(state: NodeState, rare: Rare, clock: PartitionClock, seen: Seen, claims: list[Claim]) -> Rare:
    """An observation newer than all before it: an end of silence, a stop that did not happen, another boot."""
    event = seen.event
    if rare.silent_since_ns and seen.time_ns - seen.seen_ns <= int(clock.settings.silence_s * NS):
        since_ns = rare.silent_since_ns
        text = f"heard again after {(seen.seen_ns - since_ns) / NS:.1f} s; silent since {text_of(since_ns)}"
        cleared = SignalCleared(symptom="node_silent", node=seen.node, seen_ns=seen.seen_ns, evidence=text)
        claims.append(Claim(event.job or state.job, event.attempt or state.attempt, cleared, (event.id,)))
        rare = replace(rare, silent_since_ns=0)
    if rare.stopped_ns and seen.seen_ns > rare.stopped_ns + STOP_OVER_NS:
        rare = replace(rare, stopped_ns=0, stop_noted=False)
    if event.bootid and event.bootid != rare.boot:
        if rare.boot:
            text = f"boot {rare.boot} is over, boot {event.bootid} runs"
            fact = EvidenceMissing(node=seen.node, producer="agent", reason="rebooted", detail=text)
            rare = _note(rare, seen.time_ns, event.job, event.attempt, fact, (event.id,), claims)
        rare = replace(rare, boot=event.bootid)
    return rare


def _agent(seen: Seen, data: AgentState, rare: Rare, claims: list[Claim]) -> Rare:
    causes = (seen.event.id,)
    if data.producer == "agent":
        if data.state == "stopping":
            return replace(rare, stopped_ns=max(rare.stopped_ns, seen.seen_ns), stop_noted=False)
        if data.state in ("started", "resumed"):
            return replace(rare, started_ns=max(rare.started_ns, seen.seen_ns), stopped_ns=0, stop_noted=False)
    if data.state in ("stalled", "skipped", "failed"):
        producer = data.producer[:NAME_MAX]
        fact = EvidenceMissing(node=seen.node, producer=producer, reason=data.state, detail=data.detail)
        return _note(rare, seen.time_ns, seen.event.job, seen.event.attempt, fact, causes, claims)
    return rare


def _tick(state: NodeState, clock: PartitionClock) -> tuple[NodeState, tuple[Claim, ...]]:
    now_ns = clock.now_ns
    rare = state.rare
    numbers = state.numbers
    claims: list[Claim] = []
    if rare.repeats or rare.echoes.unsaid or rare.notes.unsaid:
        rare = _counted(rare, now_ns, claims)
    for entry in numbers:
        if entry.holes:
            numbers, missing = overdue(numbers, now_ns - int(clock.settings.grace_s * NS))
            for source, first, last in missing:
                text = f"numbers {first} to {last} did not come" if last > first else f"number {first} did not come"
                fact = EvidenceMissing(
                    node=rare.node, producer=source[:NAME_MAX], reason="numbers", missing=last - first + 1, detail=text
                )
                rare = _note(rare, now_ns, state.job, state.attempt, fact, (), claims)
            break
    if state.heard_ns and not rare.silent_since_ns and not rare.stop_noted and clock.absence_judged:
        settings = clock.settings
        since_ns = max(state.heard_ns, clock.heard_from_ns)
        if rare.started_ns >= state.heard_ns:  # an agent that has just started takes its time until its first beat
            since_ns = max(since_ns, rare.started_ns + int(settings.grace_s * NS))
        if now_ns - since_ns > int(settings.silence_s * NS):
            rare = _silent(state, rare, clock, claims)
    if rare is state.rare and numbers is state.numbers:
        return state, ()
    return NodeState(state.heard_ns, state.heard_id, state.job, state.attempt, numbers, rare), tuple(claims)


def _silent(state: NodeState, rare: Rare, clock: PartitionClock, claims: list[Claim]) -> Rare:
    now_ns, causes = clock.now_ns, (state.heard_id,) if state.heard_id else ()
    if rare.stopped_ns:
        text = f"the agent said at {text_of(rare.stopped_ns)} that it stops; silence after that is not the node's"
        missing = EvidenceMissing(node=rare.node, producer="agent", reason="stopped", detail=text)
        claims.append(Claim(state.job, state.attempt, missing, causes))
        return replace(rare, stop_noted=True)
    text = (
        f"nothing heard for {(now_ns - state.heard_ns) / NS:.1f} s (limit {clock.settings.silence_s:g} s), "
        f"last at {text_of(state.heard_ns)}"
    )
    fact = Signal(symptom="node_silent", node=rare.node, confidence="low", rule="silence", evidence=text, seen_ns=now_ns)
    claims.append(Claim(state.job, state.attempt, fact, causes))
    return replace(rare, silent_since_ns=state.heard_ns)


# --- counts -------------------------------------------------------------------------------------------------------------------


def _counted(rare: Rare, now_ns: int, claims: list[Claim]) -> Rare:
    """What was counted instead of said, once its minute is over."""
    kept: list[Repeat] = []
    for known in rare.repeats:
        if now_ns - known.told_ns < REPEAT_WINDOW_NS:
            kept.append(known)
        elif known.unsaid:
            text = f"{known.unsaid} more like it within {(now_ns - known.told_ns) / NS:.0f} s, the last: {known.evidence}"
            claims.append(_signal(rare.node, known, known.unsaid, text, known.causes))
            kept.append(replace(known, told_ns=now_ns, unsaid=0, causes=()))
    if len(kept) != len(rare.repeats) or claims:
        rare = replace(rare, repeats=tuple(kept))
    echoes = rare.echoes
    if echoes.unsaid and rare.echo and now_ns - echoes.since_ns >= REPEAT_WINDOW_NS:
        text = f"{echoes.unsaid} more lines like a crash's echo, the last: {rare.echo.evidence}"
        what = replace(rare.echo, confidence="sympathetic", rule="echoes_counted")
        claims.append(_signal(rare.node, what, echoes.unsaid, text, rare.echo.causes))
        rare = replace(rare, echoes=Quota(now_ns), echo=None)
    notes = rare.notes
    if notes.unsaid and now_ns - notes.since_ns >= REPEAT_WINDOW_NS:
        text = f"{notes.unsaid} more notes of missing evidence were counted, not said"
        fact = EvidenceMissing(node=rare.node, producer="agent", reason="notes", missing=notes.unsaid, detail=text)
        claims.append(Claim("", 0, fact))
        rare = replace(rare, notes=Quota(now_ns))
    return rare


def _note(
    rare: Rare, now_ns: int, job: str, attempt: int, fact: EvidenceMissing, causes: tuple[str, ...], claims: list[Claim]
) -> Rare:
    """Missing evidence: noted, at most so often a minute."""
    notes = rare.notes
    if now_ns - notes.since_ns >= REPEAT_WINDOW_NS and not notes.unsaid:
        notes = Quota(now_ns)
    if notes.said >= NOTES_PER_MINUTE:
        return replace(rare, notes=replace(notes, unsaid=notes.unsaid + 1))
    claims.append(Claim(job, attempt, fact, causes))
    return replace(rare, notes=replace(notes, said=notes.said + 1))
