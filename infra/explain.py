"""One incident told from LEDGER, from first evidence to close: who said what, what was decided, by which rule, and what came of it.

Pure: records in, lines out. The order is the ledger's own; a signal's time is when its evidence was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from events import subjects
from events.clock import NS, text_of
from events.envelope import AnyEvent
from events.ports import LEDGER, Record
from events.registry import Malformed, parse
from processors.runbooks import runbook_of

#: A story longer than this is cut in its middle, and says so.
LINES_MAX = 2_000


class UnknownIncident(ValueError):
    """No incident of that name, or more than one. The text lists those that there are."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened. `offset_s`: since the incident's first evidence (negative: before it)."""

    time_ns: int
    offset_s: float
    who: str
    text: str
    event_id: str


@dataclass(frozen=True, slots=True)
class Known:
    """An incident that the ledger holds."""

    incident: str
    job: str
    epoch: int
    symptom: str
    first_evidence_ns: int
    #: '' while it is open.
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    sequence: int
    time_ns: int
    role: str
    event: AnyEvent

    @property
    def kind(self) -> str:
        return str(self.event.data.kind())


def read(records: Iterable[Record]) -> list[_Entry]:
    """LEDGER's events in sequence, each once; what can't be read is left out (the census counts it)."""
    entries: dict[tuple[str, str], _Entry] = {}
    for record in sorted(records, key=lambda r: r.sequence):
        parts = record.subject.split(".")
        if record.stream != LEDGER or len(parts) != 4:
            continue
        try:
            event = parse(record.data)
            subjects.name(parts[1])
        except (Malformed, subjects.BadName):
            continue
        if event.data.kind() == parts[3]:
            entries.setdefault((parts[2], event.id), _Entry(record.sequence, record.time_ns, parts[2], event))
    return list(entries.values())


def known(records: Iterable[Record]) -> list[Known]:
    """Every incident of the ledger, in the order of their opening."""
    return _known(read(records))


def _known(entries: Iterable[_Entry]) -> list[Known]:
    found: dict[str, Known] = {}
    for entry in entries:
        data = entry.event.data
        if entry.role != "decider":
            continue
        if entry.kind == "incident_opened":
            found.setdefault(data.incident, Known(data.incident, data.job, data.epoch, data.symptom, data.first_evidence_ns))
        elif entry.kind == "incident_closed" and data.incident in found and not found[data.incident].outcome:
            old = found[data.incident]
            found[data.incident] = Known(old.incident, old.job, old.epoch, data.symptom, old.first_evidence_ns, data.outcome)
    return list(found.values())


def find(incidents: list[Known], wanted: str) -> Known:
    """The incident whose id is or begins with `wanted`; or `JOB/EPOCH`; or `last`. Raises UnknownIncident."""
    exact = [k for k in incidents if k.incident == wanted or f"{k.job}/{k.epoch}" == wanted]
    if not exact and wanted == "last" and incidents:
        exact = incidents[-1:]
    chosen = exact or [k for k in incidents if wanted and k.incident.startswith(wanted)]
    if len(chosen) == 1:
        return chosen[0]
    listed = chosen or incidents
    if not listed:
        raise UnknownIncident("this ledger holds no incident; keepstep explain needs one that was opened")
    names = "; ".join(f"{k.incident} ({k.job}/{k.epoch}, {k.symptom}, {k.outcome or 'open'})" for k in listed[-20:])
    more = f" (the last 20 of {len(listed)})" if len(listed) > 20 else ""
    what = f"{wanted!r} fits {len(chosen)} incidents" if chosen else f"no incident is called {wanted!r}"
    raise UnknownIncident(f"{what}; there are{more}: {names}")


def explain(records: Iterable[Record], incident: str) -> list[Line]:
    """The story of one incident (see `find` for how it may be named). Raises UnknownIncident."""
    entries = read(records)
    subject = find(_known(entries), incident)
    chosen = _chosen(entries, subject)
    verdicts = {e.event.data.signal: e.event.data for e in chosen if e.kind == "evidence_judged" and e.role == "decider"}
    told = {e.event.id for e in chosen if e.kind == "signal"}
    lines: list[Line] = []
    for entry in chosen:
        if entry.kind == "evidence_judged" and entry.event.data.signal in told:
            continue  # told with its signal
        time_ns, text = entry.time_ns, ""
        if entry.kind == "signal":
            time_ns = min(entry.event.data.seen_ns, entry.time_ns)
            text = _signal(entry, verdicts.get(entry.event.id))
        elif entry.kind in _TEXTS:
            text = _TEXTS[entry.kind](entry.event.data)
        if text:
            offset_s = round((time_ns - subject.first_evidence_ns) / NS, 3)
            lines.append(Line(time_ns, offset_s, _who(entry), text, entry.event.id))
    return _cut(lines)


def to_json(incident: Known, lines: Iterable[Line]) -> dict[str, Any]:
    """What `keepstep explain --json` prints."""
    return {
        **asdict(incident),
        "outcome": incident.outcome or "open",
        "first_evidence": text_of(incident.first_evidence_ns),
        "lines": [{**asdict(line), "time": text_of(line.time_ns)} for line in lines],
    }


def _cut(lines: list[Line]) -> list[Line]:
    if len(lines) <= LINES_MAX:
        return lines
    head, tail = lines[: LINES_MAX // 2], lines[-(LINES_MAX // 2) + 1 :]
    left_out = len(lines) - len(head) - len(tail)
    gap = Line(head[-1].time_ns, head[-1].offset_s, "explain", f"… {left_out} lines are left out here …", "")
    return [*head, gap, *tail]


#: What is about the job rather than one incident, and belongs to the story when it falls between its opening and its close.
_AROUND = frozenset(
    {"attempt_ended", "hold_placed", "hold_released", "restart_requested", "stop_requested", "standby_added", "policy_adopted"}
    | {
        "decider_started",
        "diverged",
        "evidence_missing",
        "override_given",
        "revision_stable",
        "job_finished",
        "signal_cleared",
        "configuration_drift",
    }
)


def _chosen(entries: list[_Entry], incident: Known) -> list[_Entry]:
    """The entries that belong to the story."""
    mine = [e for e in entries if e.role == "decider" and getattr(e.event.data, "incident", None) == incident.incident]
    ends = [e.sequence for e in mine if e.kind == "incident_closed"]
    begin, end = mine[0].sequence, (ends[0] if ends else entries[-1].sequence)
    judged = {e.event.data.signal for e in mine if e.kind == "evidence_judged"}
    opened_by = {cause for e in mine if e.kind == "incident_opened" for cause in e.event.causes}
    # What opened nothing in this time is part of the story too: it says what was seen and not believed.
    unheeded = [
        e for e in entries
        if e.role == "decider" and e.kind == "evidence_judged" and not e.event.data.incident
        and e.event.data.job == incident.job and begin <= e.sequence <= end
    ]  # fmt: skip
    judged |= {e.event.data.signal for e in unheeded}
    keys = {e.event.data.key for e in mine if e.kind == "intent_issued"}
    decisions = {e.event.data.decision for e in mine if e.kind == "decision_made"}
    timers = {e.event.data.timer for e in mine if e.kind == "timer_set"}
    chosen = {e.sequence for e in (*mine, *unheeded)}
    progressed = False
    for e in entries:
        data = e.event.data
        if (
            (e.role == "detector" and e.kind == "signal" and e.event.id in judged | opened_by)
            or (e.role == "actuator" and getattr(data, "key", "") in keys)
            or (e.role == "timer" and e.kind == "timer_fired" and data.timer in timers)
            or (e.kind == "approval_given" and data.decision in decisions)
            or (e.kind == "page_acknowledged" and (data.incident == incident.incident or data.decision in decisions))
        ):
            chosen.add(e.sequence)
        elif begin <= e.sequence <= end and e.event.job in ("", incident.job):
            first = e.kind == "progress_noted" and e.event.job == incident.job and data.first and not progressed
            progressed = progressed or first
            if first or e.kind in _AROUND:
                chosen.add(e.sequence)
    return [e for e in entries if e.sequence in chosen]


def _who(entry: _Entry) -> str:
    author = getattr(entry.event.data, "author", "")
    return f"{entry.role} {author}" if author and entry.role == "operator" else entry.role


def _signal(entry: _Entry, verdict: Any) -> str:
    data = entry.event.data
    where = " ".join(
        part for part in (data.node and f"of {data.node}", data.rank >= 0 and f"rank {data.rank}", data.device) if part
    )
    head = f"signal {data.symptom} {where or 'of the job'} (confidence {data.confidence}"
    head += f", rule {data.rule}" if data.rule else ""
    head += f", {data.count} observations)" if data.count > 1 else ")"
    quoted = f": “{_short(data.evidence)}”" if data.evidence else ""
    late_s = (entry.time_ns - data.seen_ns) / NS
    late = f"; in the ledger {_seconds(late_s)} later" if late_s >= 0.1 else ""
    judged = " → not judged yet"
    if verdict is not None:
        judged = f" → {verdict.verdict.replace('_', ' ')}" + (f": {verdict.because}" if verdict.because else "")
    return f"{head}{quoted}{late}{judged}"


def _judged(data: Any) -> str:
    return f"signal {data.signal} → {data.verdict.replace('_', ' ')}" + (f": {data.because}" if data.because else "")


def _decision(data: Any) -> str:
    nodes = f" of {_names(data.nodes)}" if data.nodes else ""
    standbys = f", {_names(data.standbys)} in" if data.standbys else ""
    veto = f"; not acted on: {data.vetoed.replace('_', ' ')}" if data.vetoed else ""
    page = runbook_of(data)
    runbook = f"; see: keepstep runbook {page}" if page else ""
    mode = {"observe": " (observe: this is what it would have done)", "approve": " (waits for a yes)"}.get(data.mode, "")
    return (
        f"decision {data.decision if data.mode == 'approve' else _id(data.decision)}: {data.rung.replace('_', ' ')}{nodes}{standbys} by rule {data.rule}{mode}, because "
        f"{_short(data.because, 600)} [policy {data.policy_digest or 'none'}]{veto}{runbook}"
    )


def _intent(data: Any) -> str:
    what: dict[str, str] = {
        "stop_attempt": f"stop attempt {data.attempt}" + (" gracefully" if data.graceful else ""),
        "evict_node": f"evict {data.node}",
        "wake_standby": f"wake standby {data.node}",
        "start_attempt": f"start attempt {data.attempt} with {data.world_size} ranks on {_names(data.nodes) or 'no node'}",
        "notify": f"notify: {_short(data.text)}",
        "capture_stacks": "take the stacks of all processes" + (f", {data.rounds} times" if data.rounds > 1 else ""),
        "diagnose": f"test {_names(data.nodes)}: {', '.join(data.tests)}",
        "group_test": f"replay {data.steps} steps in {sum(map(len, data.groups))} groups, two rounds",
        "examine": f"examine {data.node}, which is out: {', '.join(data.tests)}",
    }
    if data.verb == "start_attempt":
        what["start_attempt"] += f", revision {data.revision[:12]}" if data.revision else ""
        what["start_attempt"] += f", restored from below step {data.restore_below_step}" if data.restore_below_step >= 0 else ""
    return f"intent {_id(data.key)}: {what.get(data.verb, data.verb)}"


def _outcome(data: Any) -> str:
    parts = [f"outcome of {_id(data.key)}: {data.verb.replace('_', ' ')} {data.result.replace('_', ' ')}"]
    if data.detail:
        parts[0] += f" ({_short(data.detail)})"
    if data.nodes:
        parts.append(f"not on {_names(data.nodes)}")
    for i, round_ in enumerate(data.stacks, 1):
        stuck = f": {_short('; '.join(round_.stuck_at))}" if round_.stuck_at else ""
        which = f"round {i}: " if len(data.stacks) > 1 else ""
        parts.append(f"{which}ranks {', '.join(map(str, round_.outliers)) or 'none'} of {round_.ranks} stand apart{stuck}")
    bad = [r for r in data.tests if r.passed is False]
    if data.tests:
        passed = sum(1 for r in data.tests if r.passed)
        parts.append(
            f"{passed} of {len(data.tests)} tests passed"
            + "".join(f"; {r.test} of {r.node}: {_short(r.detail)}" for r in bad[:8])
        )
    parts += [f"replay {r.phase} {r.group} ({_names(r.nodes)}) failed: {_short(r.detail)}" for r in data.replays if r.failed]
    return "; ".join(parts)


def _closed(data: Any) -> str:
    parts = [f"closed: {data.outcome.replace('_', ' ')} by {data.mechanism.replace('_', ' ')} ({data.symptom})"]
    if data.nodes:
        parts.append(f"out: {_names(data.nodes)}")
    parts.append(f"opened {_seconds((data.opened_ns - data.first_evidence_ns) / NS)} after the first evidence")
    if data.decided_ns:
        parts.append(f"decided {_seconds((data.decided_ns - data.first_evidence_ns) / NS)} after it")
    if data.back_ns:
        parts.append(f"back at work {_seconds((data.back_ns - data.first_evidence_ns) / NS)} after it")
        if data.step_before >= 0:
            restored = f"restored at {data.step_restored}" if data.step_restored >= 0 else "started from the beginning"
            if data.step_restored > data.step_before:  # it had come further than the ledger was told, every so often
                parts.append(f"{restored}, beyond step {data.step_before}, the last that the ledger was told of")
            else:
                parts.append(f"at step {data.step_before}, {restored}: {data.step_before - data.step_restored} steps lost")
    return "; ".join(parts)


def _timer(data: Any) -> str:
    return f"timer {data.purpose.replace('_', ' ')} set for {text_of(data.at_ns)}"


def _hold(data: Any) -> str:
    until = f" until {text_of(data.expires_ns)}" if data.expires_ns else ""
    return f"hold on {data.job or 'the fleet'}{until}: {_short(data.reason)}"


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "incident_opened": lambda d: (
        f"incident {d.incident} opened: {d.symptom} in attempt {d.attempt} of {d.job} (epoch {d.epoch})"
        + (f", at step {d.step}" if d.step >= 0 else "")
    ),
    "evidence_judged": _judged,
    "shared_cause": lambda d: f"shared cause: {d.nodes} of {d.of} nodes of {d.scope} {d.name} ({d.symptom})",
    "timer_set": _timer,
    "timer_fired": lambda d: f"timer {d.purpose.replace('_', ' ')} fired",
    "decision_made": _decision,
    "intent_issued": _intent,
    "try_started": lambda d: f"try {d.ordinal} of {_id(d.key)}: {d.verb.replace('_', ' ')}",
    "outcome_recorded": _outcome,
    "override_given": lambda d: f"{d.remedy.replace('_', ' ')} {d.node or d.revision} chosen: {_short(d.reason)}",
    "revision_stable": lambda d: f"revision {d.revision[:12]} is stable: healthy up to step {d.step}",
    "machine_judged": lambda d: (
        f"{d.node} is {d.verdict}: {_short(d.because)}" + ("; back among the standbys" if d.back else "; it stays out")
    ),
    "incident_closed": _closed,
    "attempt_ended": lambda d: f"attempt {d.attempt} ended: {d.reason}",
    "approval_given": lambda d: f"{'yes' if d.granted else 'no'} to decision {_id(d.decision)}: {_short(d.reason)}",
    "page_acknowledged": lambda d: f"page acknowledged: {_short(d.reason)}",
    "page_repeated": lambda d: (
        f"page of {_id(d.key)} repeated, {d.number}. time: {d.result}" + (f" ({_short(d.detail)})" if d.detail else "")
    ),
    "page_ended": lambda d: (
        f"told that the page of {_id(d.key)} is over ({_short(d.why)}): {d.result}"
        + (f" ({_short(d.detail)})" if d.detail else "")
    ),
    "hold_placed": _hold,
    "hold_released": lambda d: f"hold on {d.job or 'the fleet'} released: {_short(d.reason)}",
    "restart_requested": lambda d: (
        f"{'an update with the next restart' if d.at_next_restart else 'restart'} asked for ({d.symptom}): {_short(d.reason)}"
        + (f", to revision {d.revision[:12]}" if d.revision else "")
    ),
    "stop_requested": lambda d: f"stop asked for: {_short(d.reason)}",
    "standby_added": lambda d: f"standby {d.place.node} added",
    "policy_adopted": lambda d: f"policy {d.digest} adopted",
    "decider_started": lambda d: f"decider {d.worker} took over (code {d.code_version}, read up to {d.read_up_to})",
    "diverged": lambda d: f"a re-derivation differs from what was recorded: {_short(d.recorded)} / {_short(d.derived)}",
    "evidence_missing": lambda d: f"evidence missing {d.node and f'of {d.node} '}({d.reason}): {_short(d.detail)}",
    "configuration_drift": lambda d: (
        f"{d.node} is set up unlike the others: {d.name} is {_short(d.value) or 'not set'}, "
        f"{d.agree} of {d.of} nodes have {_short(d.expected) or 'it not set'}"
        if not d.over
        else f"{d.node} is set up like the others again, or gone: {d.name} was {_short(d.value) or 'not set'}"
    ),
    "progress_noted": lambda d: (
        f"healthy: step {d.step}" + (f", restored at {d.restored_step}" if d.restored_step >= 0 else "")
    ),
    "job_finished": lambda d: f"the job finished at step {d.step}",
    "signal_cleared": lambda d: f"cleared: {d.symptom}{f' of {d.node}' if d.node else ''}: {_short(d.evidence)}",
}


def _id(long: str) -> str:
    """Enough of an id to tell it from its neighbours; the whole one is in the event that the line names."""
    return long[:8]


def _short(text: str, most: int = 300) -> str:
    """One line of what may be many."""
    flat = " ⏎ ".join(line.strip() for line in text.splitlines() if line.strip())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) < 10 else f"{seconds:.1f} s"
