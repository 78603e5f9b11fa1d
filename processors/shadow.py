"""What `auto` would have done over a period of `observe` (or of `approve`), rule by rule, beside what people did. Pure.

How far that can honestly go: an observed decision is what the rules said to the world as it was, and the first one that would have acted
in an incident is what `auto` would have done there. From then on the log tells of a world in which it was not done. So of each incident
the first imagined action is held against people, and what the rules said in it afterwards is counted as beyond it, no more. What earlier
imagined evictions would have spent (budget, standbys) is reckoned with, and a machine that they would have taken out is beyond too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from events.clock import NS
from events.decision import DecisionMade, IncidentClosed, IncidentOpened, Rung
from events.incident import ProgressNoted
from events.job import (
    ApprovalGiven,
    HoldPlaced,
    JobDeclared,
    OverrideGiven,
    RestartRequested,
    StandbyAdded,
    StopRequested,
)
from events.ports import Record
from events.registry import Malformed, parse
from processors.budget import over_budget
from processors.decider import ROLE_OF, is_own
from processors.fleet import evolve
from processors.state import Eviction, Fleet, Job, usable_standbys

Verdict = Literal["agreed", "differed", "not_acted", "cannot_be_told", "open_yet", "barred"]
#: Rungs that change nothing in the world.
PAGES: frozenset[Rung] = frozenset(("hand_over", "wait", "none"))
WINDOW_S = 1800.0


@dataclass(frozen=True, slots=True)
class Act:
    """What a person did. `gone`: machines that a new declaration left out. `decision`: the one that was answered."""

    kind: str
    job: str
    at_ns: int
    author: str
    text: str
    remedy: str = ""
    node: str = ""
    gone: tuple[str, ...] = ()
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One decision that `auto` would have acted on. `barred`: what would have stood against it. `went_on`: the attempt that it was about
    made steps afterwards. `saved_s`: by how much a person's same act (after an examination: any act) came later; less than 0: it came
    before. Times in broker ns."""

    made: DecisionMade
    at_ns: int
    opened_ns: int
    barred: str = ""
    verdict: Verdict = "not_acted"
    went_on: bool = False
    saved_s: float | None = None
    acts: tuple[Act, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One rule's cases, counted. `saved_s`: of each that has one."""

    rule: str
    rungs: tuple[str, ...]
    cases: int
    counts: Mapping[Verdict, int]
    went_on: int
    saved_s: tuple[float, ...]

    @property
    def saved_s_median(self) -> float | None:
        return median(self.saved_s) if self.saved_s else None


@dataclass(frozen=True, slots=True)
class Shadow:
    """What `shadow` finds. `beyond`: decisions that came after the first imagined action of their incident, in `beyond_incidents`
    incidents, or named a machine that was out by then. `acted`: decisions of rules that were `auto` already."""

    rows: tuple[Row, ...]
    cases: tuple[Case, ...]
    begin_ns: int
    end_ns: int
    window_s: float
    incidents: int
    beyond: int
    beyond_incidents: int
    acted: int


@dataclass(slots=True)
class _Log:
    """The ledger as it is read."""

    fleet: Fleet = field(default_factory=Fleet)
    cases: list[Case] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    opened: dict[str, tuple[str, int]] = field(default_factory=dict)
    closed: dict[str, int] = field(default_factory=dict)
    #: (job, attempt) -> when it made progress last.
    progress: dict[tuple[str, int], int] = field(default_factory=dict)
    imagined: set[str] = field(default_factory=set)
    spent: list[Eviction] = field(default_factory=list)
    out: set[tuple[str, str]] = field(default_factory=set)
    used: set[tuple[str, str]] = field(default_factory=set)
    beyond: list[DecisionMade] = field(default_factory=list)
    acted: int = 0
    begin_ns: int = 0
    end_ns: int = 0


def shadow(records: Iterable[Record], window_s: float = WINDOW_S) -> Shadow:
    """Of LEDGER's records in sequence. A person's act counts for a decision from the opening of its incident until `window_s` after the
    decision, or the opening of the job's next incident."""
    log = _Log()
    for record, event in _believed(records):
        log.begin_ns, log.end_ns = log.begin_ns or record.time_ns, max(log.end_ns, record.time_ns)
        _take(log, record.time_ns, event)
        log.fleet = evolve(log.fleet, event, record.time_ns)
    cases = tuple(_judged(log, case, window_s) for case in log.cases)
    rows = tuple(_row(rule, [c for c in cases if c.made.rule == rule]) for rule in sorted({c.made.rule for c in cases}))
    beyond = {made.incident for made in log.beyond}
    return Shadow(
        rows, cases, log.begin_ns, log.end_ns, window_s, len(log.opened), len(log.beyond), len(beyond), log.acted
    )  # fmt: skip


def _believed(records: Iterable[Record]) -> Iterator[tuple[Record, Any]]:
    """Each event once, if it stands where its kind may."""
    seen: set[str] = set()
    for record in records:
        parts = record.subject.split(".")
        try:
            event = parse(record.data)
        except Malformed:
            continue
        if event.id in seen or len(parts) != 4 or (not is_own(record.subject) and ROLE_OF.get(event.data.kind()) != parts[2]):
            continue
        seen.add(event.id)
        yield record, event


def _take(log: _Log, time_ns: int, event: Any) -> None:
    data = event.data
    if isinstance(data, IncidentOpened):
        log.opened.setdefault(data.incident, (data.job, time_ns))
    elif isinstance(data, IncidentClosed):
        log.closed.setdefault(data.incident, time_ns)
    elif isinstance(data, ProgressNoted):
        log.progress[event.job, event.attempt] = time_ns
    elif isinstance(data, DecisionMade):
        _consider(log, time_ns, data)
    else:
        act = act_of(data, time_ns, log.fleet)
        if act is not None:
            log.acts.append(act)
        if isinstance(data, JobDeclared):  # what is used from here on is what was declared
            log.out = {(job, node) for job, node in log.out if job != data.job}
            log.used = {(job, node) for job, node in log.used if job != data.job}


def act_of(data: Any, time_ns: int, fleet: Fleet) -> Act | None:
    """A person's word as an act; None for what is no answer to trouble."""
    job, author = getattr(data, "job", ""), getattr(data, "author", "")
    match data:
        case RestartRequested():
            changed = data.symptom != "operator_restart" or bool(data.revision)
            how = f"restart as {data.symptom.replace('_', ' ')}" + (f" to {data.revision}" if data.revision else "")
            return Act("restart", job, time_ns, author, how, "roll_back" if changed else "reattempt")
        case StopRequested():
            return Act("stop", job, time_ns, author, "stop")
        case HoldPlaced():
            return Act("hold", job, time_ns, author, "hold")
        case StandbyAdded():
            return Act("standby", job, time_ns, author, f"standby {data.place.node} added", node=data.place.node)
        case OverrideGiven():
            text = f"override: {data.remedy.replace('_', ' ')} {data.node}".rstrip()
            return Act("override", job, time_ns, author, text, data.remedy, data.node)
        case ApprovalGiven():
            text = "approved" if data.granted else "denied"
            return Act("answer", job, time_ns, author, text, text, decision=data.decision)
        case JobDeclared() if job in fleet.jobs:
            kept = {place.node for place in data.nodes}
            gone = tuple(place.node for place in fleet.jobs[job].places if place.node not in kept)
            text = f"declared anew without {', '.join(gone)}" if gone else "declared anew on the same machines"
            return Act("declared", job, time_ns, author, text, gone=gone)
    return None


def _consider(log: _Log, time_ns: int, made: DecisionMade) -> None:
    """A decision is a case if it would have acted, and the log still tells of the world that it would have acted in."""
    job = log.fleet.jobs.get(made.job)
    if made.rung == "planned" or job is None:
        return
    if made.mode == "auto":
        log.acted += not made.vetoed
        return
    if made.mode == "approve" and made.rung == "hand_over":
        log.acted += not made.vetoed  # a page goes out all the same
        return
    if made.incident in log.imagined or any((made.job, node) in log.out for node in made.nodes):
        log.beyond.append(made)
        return
    barred = made.vetoed or _barred(log, job, made)
    opened_ns = log.opened.get(made.incident, ("", time_ns))[1]
    log.cases.append(Case(made, time_ns, opened_ns, barred))
    if barred or made.rung in PAGES or made.mode != "observe":
        return
    if made.incident:
        log.imagined.add(made.incident)
    racks = {place.node: place.rack for place in job.places}
    out = _evicted_by(made)
    log.spent.extend(Eviction(time_ns, made.job, node, racks.get(node, "")) for node in out)
    log.out.update((made.job, node) for node in out)
    log.used.update((made.job, node) for node in _spares(log, job)[: len(out)])


def _evicted_by(made: DecisionMade) -> tuple[str, ...]:
    """The machines that would go. One that is examined is out already."""
    return () if made.rung == "diagnose" else made.nodes


def _barred(log: _Log, job: Job, made: DecisionMade) -> str:
    """What would have stood against an imagined action: a hold, or what earlier imagined ones would have spent."""
    if made.mode != "observe" or made.rung in PAGES:
        return ""
    if log.fleet.held(job.name):
        return "hold"
    fleet = log.fleet._replace(evictions=(*log.fleet.evictions, *log.spent))
    out = _evicted_by(made)
    places = [job.by_node[node] for node in out if node in job.by_node]
    if any(over_budget(fleet, job, place, tuple(places[:i])) for i, place in enumerate(places)):
        return "budget"
    return "no_standby" if len(_spares(log, job)) < len(out) else ""


def _spares(log: _Log, job: Job) -> list[str]:
    return [place.node for place in usable_standbys(log.fleet, job) if (job.name, place.node) not in log.used]


# --- beside what people did -----------------------------------------------------------------------------------------------------


def _evict(made: DecisionMade, act: Act) -> bool | None:
    if act.kind == "override":
        if act.remedy == "keep":
            return False if act.node in made.nodes else None
        return act.remedy == "evict" and act.node in made.nodes
    if act.kind == "declared":
        return bool(set(act.gone) & set(made.nodes))
    return None if act.kind == "standby" else False


def _reattempt(made: DecisionMade, act: Act) -> bool | None:
    if act.kind == "declared":
        return not act.gone
    if act.kind == "standby" or act.remedy == "keep":
        return None
    return act.remedy == "reattempt"


def _roll_back(made: DecisionMade, act: Act) -> bool | None:
    if act.kind in ("standby", "declared") or act.remedy == "keep":
        return None
    return act.remedy == "roll_back"


def _any(made: DecisionMade, act: Act) -> bool | None:
    return None if act.kind == "standby" or act.remedy == "keep" else True


#: Rung -> whether an act is the same (True), another choice (False), or neither. What an examination would have led to is not known: only
#: whether people acted at all.
SAME: Mapping[Rung, Callable[[DecisionMade, Act], bool | None]] = {
    "evict": _evict, "reattempt": _reattempt, "roll_back": _roll_back, "hand_over": _any,
}  # fmt: skip


def _judged(log: _Log, case: Case, window_s: float) -> Case:
    made = case.made
    later = [at_ns for job, at_ns in log.opened.values() if job == made.job and at_ns > case.at_ns]
    end_ns = min([case.at_ns + int(window_s * NS), *later])
    acts = tuple(
        act
        for act in log.acts
        if act.job in ("", made.job) and case.opened_ns <= act.at_ns <= end_ns and act.decision in ("", made.decision)
    )
    went_on = log.progress.get((made.job, made.attempt), 0) > case.at_ns
    case = replace(case, acts=acts, went_on=went_on)
    if case.barred:
        return replace(case, verdict="barred")
    answer = next((act for act in acts if act.decision), None)
    if answer is not None:
        return replace(case, verdict="agreed" if answer.text == "approved" else "differed")
    told = [(SAME.get(made.rung, _any)(made, act), act) for act in acts]
    same = next((act for agrees, act in told if agrees), None)
    if same is not None:
        saved_s = round((same.at_ns - case.at_ns) / NS, 3)
        return replace(case, verdict="agreed" if made.rung in SAME else "cannot_be_told", saved_s=saved_s)
    if any(agrees is False for agrees, _ in told):
        return replace(case, verdict="differed")
    over = log.end_ns >= end_ns or made.incident in log.closed
    return replace(case, verdict="not_acted" if over else "open_yet")


def _row(rule: str, cases: list[Case]) -> Row:
    verdicts: tuple[Verdict, ...] = ("agreed", "differed", "not_acted", "cannot_be_told", "open_yet", "barred")
    counts = {verdict: sum(case.verdict == verdict for case in cases) for verdict in verdicts}
    went_on = sum(case.verdict == "not_acted" and case.went_on for case in cases)
    saved = tuple(case.saved_s for case in cases if case.saved_s is not None)
    return Row(rule, tuple(sorted({c.made.rung for c in cases})), len(cases), counts, went_on, saved)
