"""What must hold of every ledger, whatever was put into it: a checker that reads only events, with plain models of its own (holds,
budgets, approvals), and knows nothing of how the decider is made."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from events.action import OutcomeRecorded
from events.clock import NS
from events.decision import (
    AttemptEnded,
    DecisionMade,
    EvidenceJudged,
    IncidentClosed,
    IncidentOpened,
    IntentIssued,
    MachineJudged,
    RevisionStable,
    TimerSet,
)
from events.envelope import AnyEvent
from events.incident import JobFinished, ProgressNoted, Signal, SignalCleared
from events.job import (
    ApprovalGiven,
    HoldPlaced,
    HoldReleased,
    JobDeclared,
    OverrideGiven,
    Place,
    PolicyAdopted,
    RestartRequested,
    StandbyAdded,
    StopRequested,
)
from events.ports import Record
from events.registry import Malformed, parse
from processors import policy as policies
from processors.decider import is_own
from processors.policy import Budget, Policy
from processors.state import METRICS, REFUSED


@dataclass
class JobSeen:
    """A job as the checker reckons it."""

    declared: JobDeclared
    places: list[Place]
    spares: dict[str, Place]
    attempt: int = 0
    epoch: int = 0
    ordinal: int = 0
    incident: str = ""
    recoveries: Counter[str] = field(default_factory=Counter)
    #: Whether a person wants it to run; and since which sequence it is down by our doing, 0 if it is not.
    wanted: bool = True
    down: int = 0
    #: No attempt runs, for whatever reason.
    ended: bool = True
    paged: int = 0
    #: Steps that were computed wrongly, from and to, and in which attempt, until a later one is beyond them.
    wrong: tuple[int, int, int] | None = None
    #: Whether a person's choice waits to be decided.
    chosen: int = 0
    choice: OverrideGiven | None = None


@dataclass
class Checker:
    """Feed it the ledger in order; it asserts."""

    policy: Policy = field(default_factory=Policy)
    policy_digest: str = "default"
    now_ns: int = 0
    last: int = 0
    jobs: dict[str, JobSeen] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, DecisionMade] = field(default_factory=dict)
    approved: set[str] = field(default_factory=set)
    intents: dict[str, IntentIssued] = field(default_factory=dict)
    old_intents: dict[str, IntentIssued] = field(default_factory=dict)
    outcomes: dict[str, OutcomeRecorded] = field(default_factory=dict)
    evictions: list[tuple[int, str, str, str, str]] = field(default_factory=list)
    stable: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    judged: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    timers: set[str] = field(default_factory=set)
    #: Jobs declared once more: a new run of the same name, if the one before was over; numbers go on.
    again: dict[str, JobDeclared] = field(default_factory=dict)

    def read(self, record: Record) -> None:
        try:
            event = parse(record.data)
        except Malformed:
            assert not is_own(record.subject)
            return
        if is_own(record.subject):
            self._own(event)
            return
        self.last = record.sequence
        if event.id in self.inputs:
            return
        self.inputs.add(event.id)
        self.now_ns = max(self.now_ns, record.time_ns)
        self._input(event, event.data)

    def _input(self, event: AnyEvent, data: Any) -> None:
        if isinstance(data, PolicyAdopted):
            try:
                self.policy = policies.parse(data.text)
            except policies.BadPolicy:
                return
            self.policy_digest = policies.digest(data.text)
        elif isinstance(data, HoldPlaced):
            self.holds[data.job] = data.expires_ns
        elif isinstance(data, HoldReleased):
            self.holds.pop(data.job, None)
        elif isinstance(data, ApprovalGiven) and data.granted:
            self.approved.add(data.decision)
        elif isinstance(data, OutcomeRecorded):
            self.outcomes.setdefault(data.key, data)
        elif isinstance(data, JobDeclared) and data.job in self.jobs:
            self.again[data.job] = data
        elif isinstance(data, JobDeclared):
            self.jobs[data.job] = JobSeen(data, list(data.nodes), {p.node: p for p in data.standbys})
        elif isinstance(data, RestartRequested | StopRequested) and data.job in self.jobs:
            self.jobs[data.job].wanted = isinstance(data, RestartRequested)
            self.jobs[data.job].chosen = 0
        elif isinstance(data, JobFinished) and event.job in self.jobs and event.attempt == self.jobs[event.job].attempt:
            self.jobs[event.job].wanted = self.jobs[event.job].wanted and self.jobs[event.job].down > 0
        elif isinstance(data, SignalCleared) and event.job in self.jobs and data.symptom in METRICS:
            self.jobs[event.job].wrong = None  # the run got over it: after how many steps it counts is the decider's affair
        elif isinstance(data, ProgressNoted) and event.job in self.jobs:
            job = self.jobs[event.job]
            if job.wrong is not None and event.attempt == job.attempt > job.wrong[2] and data.step > job.wrong[1]:
                job.wrong = None
        elif isinstance(data, OverrideGiven) and data.job in self.jobs and data.remedy != "keep":
            self.jobs[data.job].chosen = self.last if not data.expires_ns else 0
            self.jobs[data.job].choice = data
        elif isinstance(data, OverrideGiven) and data.job in self.jobs:
            self._kept(data, self.jobs[data.job])
        elif isinstance(data, StandbyAdded) and data.job in self.jobs:
            self._added(data.place, self.jobs[data.job])

    def _added(self, place: Place, job: JobSeen) -> None:
        """A person brings a machine: one that was evicted is like any other, but for its serial number."""
        job.spares.setdefault(place.node, place)
        known = {p.serial for j in self.jobs.values() for p in (*j.declared.nodes, *j.declared.standbys) if p.serial}
        if place.node not in {p.node for p in job.places} and place.serial not in known:
            for key in [k for k, i in self.intents.items() if i.node == place.node and i.verb == "evict_node"]:
                self.old_intents[key] = self.intents.pop(key)

    def _kept(self, data: OverrideGiven, job: JobSeen) -> None:
        """The latest word counts: another's choice to evict it is over, and so is an eviction of which no part was tried."""
        if job.choice is not None and job.choice.remedy == "evict" and job.choice.node == data.node:
            job.chosen = 0
        keys = [key for key, i in self.intents.items() if i.job == data.job and i.node == data.node and i.verb == "evict_node"]
        if keys and all(key in self.outcomes and self.outcomes[key].result in REFUSED for key in keys):
            for key in keys:
                self.old_intents[key] = self.intents.pop(key)
            self.evictions = [e for e in self.evictions if e[1] != data.job or e[4] != data.node]

    def held(self, job: str) -> bool:
        return any(key in self.holds and (not self.holds[key] or self.now_ns < self.holds[key]) for key in ("", job))

    def settled(self) -> None:
        """Long after the last event: what we took down is up again, or a person knows, or one keeps us from it."""
        for name, job in self.jobs.items():
            assert not job.chosen or self.held(name), f"{name}: a person's choice at {job.chosen} was never decided"
            if job.down and job.wanted and not self.held(name):
                assert job.paged >= job.down or self._watched(job), f"{name} is down since {job.down} and nobody was told"

    def _watched(self, job: JobSeen) -> bool:
        """The policy changed to watching or to waiting for a standby while it was down."""
        made = [d for d in self.decisions.values() if d.job == job.declared.job and d.rule != "examine_evicted"]
        return made[-1].mode == "observe" or (made[-1].vetoed == "no_standby" and self.policy.decider.no_standby == "hold")

    # -- the decider's

    def _own(self, event: AnyEvent) -> None:
        fact = event.data
        assert event.id not in self.ids, "said twice"
        self.ids.add(event.id)
        assert fact.trigger == self.last, "decided at another input than the last"
        job = self.jobs.get(fact.job) if fact.job else None
        if isinstance(fact, EvidenceJudged):
            self.judged[fact.signal] += 1
            assert self.judged[fact.signal] == 1, "judged twice"
            if fact.symptom in METRICS and fact.verdict == "attached" and job is not None:
                from_ = min(step for step in (fact.bad_step, max(fact.step, 0), *(job.wrong or ())[:1]) if step >= 0)
                job.wrong = (from_, max(fact.step, *(job.wrong or (0,))[1:2], from_), job.attempt)
        elif isinstance(fact, TimerSet):
            assert fact.timer not in self.timers, "a timer's id is used twice"
            self.timers.add(fact.timer)
        elif isinstance(fact, IncidentOpened):
            assert job is not None and not job.incident, "a second incident is open"
            assert fact.epoch > job.epoch, "epochs do not increase"
            job.incident, job.epoch, job.recoveries = fact.incident, fact.epoch, Counter()
        elif isinstance(fact, IncidentClosed):
            assert job is not None and job.incident == fact.incident, "closed what is not open"
            job.incident = ""
        elif isinstance(fact, DecisionMade):
            assert job is not None
            if fact.rung == "planned" and fact.because.startswith("the job was declared") and fact.job in self.again:
                job = self._another_run(job, self.again.pop(fact.job))
            self._decision(fact, job)
        elif isinstance(fact, IntentIssued):
            assert job is not None
            self._intent(fact, job)
        elif isinstance(fact, RevisionStable):
            assert job is not None and fact.attempt == job.attempt
            self.stable[fact.job].add(fact.revision)
        elif isinstance(fact, MachineJudged):
            assert job is not None
            self._machine(fact, job)
        elif isinstance(fact, AttemptEnded):
            assert job is not None and fact.attempt == job.attempt
            job.down, job.ended = self.last if fact.reason == "stopped" else 0, True

    def _machine(self, fact: MachineJudged, job: JobSeen) -> None:
        """One that comes back may serve, and be evicted, again."""
        keys = [key for key, i in self.intents.items() if i.job == fact.job and i.node == fact.node and i.verb == "evict_node"]
        assert keys, "a machine is judged that was not evicted"
        if fact.back:
            assert fact.verdict != "confirmed" and fact.node not in {p.node for p in job.places}
            places = (*job.declared.nodes, *job.declared.standbys, *job.spares.values())
            job.spares[fact.node] = next(p for p in places if p.node == fact.node)
            for key in keys:
                self.old_intents[key] = self.intents.pop(key)

    def _another_run(self, old: JobSeen, declared: JobDeclared) -> JobSeen:
        assert not old.incident
        spares = {p.node: p for p in declared.standbys}
        new = JobSeen(
            declared, list(declared.nodes), spares, attempt=old.attempt, epoch=old.epoch, ordinal=old.ordinal, down=self.last
        )
        self.jobs[declared.job] = new
        for key in [key for key, i in self.intents.items() if i.job == declared.job and i.verb == "evict_node"]:
            self.old_intents[key] = self.intents.pop(key)
        return new

    def _decision(self, fact: DecisionMade, job: JobSeen) -> None:
        assert fact.decision not in self.decisions, "a decision's id is used twice"
        self.decisions[fact.decision] = fact
        assert fact.ordinal > job.ordinal
        job.ordinal = fact.ordinal
        assert fact.policy_digest == self.policy_digest
        if fact.rule == "override" and fact.vetoed != "hold":
            job.chosen = 0
        if fact.rule == "examine_evicted":
            assert fact.mode == ("observe" if self.policy.mode_of(fact.rule) == "observe" else "auto")
        elif fact.rung == "planned" or not fact.incident or fact.rule == "override":
            assert fact.mode == "auto"
        else:
            assert fact.incident == job.incident, "decided in an incident that is not open"
            modes = {self.policy.mode_of(fact.rule)}
            if fact.rung in ("diagnose", "group_test"):  # as careful as what would start the job again
                modes |= {self.policy.mode_of("reattempt_crash"), self.policy.mode_of("reattempt_hang")}
            assert fact.mode in modes or (fact.rung == "hand_over" and job.ended), f"decided in mode {fact.mode}"
        if fact.mode != "observe" and not fact.vetoed:
            assert not self.held(fact.job), "decided to act under a hold"
        if not fact.vetoed and fact.rung == "reattempt" and fact.rule != "override":
            job.recoveries["reattempt"] += 1
            assert job.recoveries["reattempt"] <= self.policy.decider.reattempts_max
        if fact.rule == "evict_group" and not fact.vetoed:
            assert len(fact.nodes) < len(job.places), "the whole job is evicted as a group"
        if fact.rung == "roll_back" and not fact.vetoed and fact.rule != "override":
            assert fact.revision in self.stable[fact.job], "a rollback to what was never stable"
        if fact.rung == "evict" and not fact.vetoed:
            assert len(fact.nodes) == len(set(fact.nodes)) == len(fact.standbys) == len(set(fact.standbys)) > 0
            assert set(fact.nodes) <= {p.node for p in job.places}

    def _intent(self, fact: IntentIssued, job: JobSeen) -> None:
        assert fact.key not in self.intents and fact.key not in self.old_intents, "an intent is issued twice"
        self.intents[fact.key] = fact
        made = self.decisions[fact.decision]
        assert not made.vetoed, "an intent of a vetoed decision"
        assert made.mode != "observe", "an intent of a decision that only watches"
        assert not self.held(fact.job), "an intent under a hold"
        if fact.verb == "notify":
            job.paged = self.last
            return
        if fact.verb == "examine":
            gone = {i.node for i in self.intents.values() if i.job == fact.job and i.verb == "evict_node"}
            assert fact.node in gone, "a machine that was not evicted is examined as if it were"
            return
        if made.mode == "approve":
            assert made.decision in self.approved, "an intent without the yes"
        mine = [d for d in self.decisions.values() if d.job == fact.job and d.rule != "examine_evicted"]
        newest = [d for d in mine if not d.vetoed and d.mode != "observe"][-1]
        assert newest.decision == fact.decision, "an intent of a decision that another took the place of"
        if fact.verb == "evict_node":
            self._eviction(fact, job)
        elif fact.verb == "start_attempt":
            self._start(fact, made, job)

    def _eviction(self, fact: IntentIssued, job: JobSeen) -> None:
        before = [i for i in self.intents.values() if i.verb == "evict_node" and i.node == fact.node and i.key != fact.key]
        assert all(i.key not in self.outcomes or self.outcomes[i.key].result != "done" for i in before), "evicted twice"
        if before:
            return
        place = next(p for p in job.places if p.node == fact.node)
        everyone = {p.node: p for j in self.jobs.values() for p in (*j.declared.nodes, *j.places, *j.spares.values())}
        rules = self.policy.budget
        scopes: list[tuple[Budget, int, int]] = [
            (rules.job, 1, len(job.places)),
            (rules.fleet, 0, len(everyone)),
        ]
        if place.rack:
            scopes.append((rules.rack, 2, sum(p.rack == place.rack for p in everyone.values())))
        made = self.decisions[fact.decision]
        if made.rule == "override":
            return
        group = fact.decision if made.rule == "evict_group" and len(made.nodes) > 1 else fact.node
        mine = (self.now_ns, fact.job, place.rack, group, fact.node)
        for budget, field_, machines in scopes:
            of_scope = [
                e
                for e in self.evictions
                if e[0] > self.now_ns - int(budget.window_s * NS) and (field_ == 0 or e[field_] == mine[field_])
            ]
            most = min(budget.evictions_max, max(1, int(budget.share_max * machines)))
            others = [e for e in of_scope if e[3] == fact.node] + sorted(
                {e[:4] for e in of_scope if e[3] not in (group, fact.node)}
            )
            assert len(others) < most, f"over a budget of {most}: {of_scope} and {mine}"
        self.evictions.append(mine)

    def _start(self, fact: IntentIssued, made: DecisionMade, job: JobSeen) -> None:
        assert fact.attempt == job.attempt + 1, "attempts do not count up"
        nodes = [p.node for p in fact.places]
        assert len(nodes) == len(set(nodes)) == len(job.places), "a machine has two places, or a place is lost"
        gone = {i.node for i in self.intents.values() if i.verb == "evict_node" and i.job == fact.job}
        assert not gone & set(nodes), f"a start on evicted machines: {gone & set(nodes)}"
        stops = [
            i for i in self.intents.values() if i.verb == "stop_attempt" and i.job == fact.job and i.attempt == job.attempt
        ]
        mine = [i for i in stops if i.decision == fact.decision]
        if mine or not any(i.key in self.outcomes and self.outcomes[i.key].result == "done" for i in stops):
            stops = mine
        else:  # it was stopped to be looked at
            stops = [i for i in stops if i.key in self.outcomes and self.outcomes[i.key].result == "done"]
        stops = [i for i in stops if i.key not in self.outcomes or self.outcomes[i.key].result not in REFUSED]  # not tried
        for stop in stops:
            outcome = self.outcomes.get(stop.key)
            assert outcome is not None, "a start while a stop is pending"
            assert outcome.result == "done" or (outcome.nodes and set(outcome.nodes) <= gone), (
                "a start after a stop that failed"
            )
        if not stops:
            assert job.attempt == 0 or {p.node for p in job.places} <= set(made.nodes), "a start without a stop"
        at = [p.node for p in job.places]
        for old, new in zip(at, nodes, strict=True):
            assert old == new or (old in gone and new in job.spares), "ranks changed places"
        known = {p.node: p for p in (*job.places, *job.spares.values())}
        job.places = [known[node] for node in nodes]
        job.attempt, job.down, job.ended = fact.attempt, 0, False
        if job.wrong is not None:
            assert 0 <= fact.restore_below_step <= job.wrong[0], (
                f"it may restore what was computed wrongly from {job.wrong[0]} on"
            )
        assert fact.world_size == len(nodes) * job.declared.ranks_per_node


def by_trigger(records: list[Record]) -> list[Record]:
    """The same with each decision right after its input, where a decider was late: their order is kept."""
    own: dict[int, list[Record]] = {}
    for record in records:
        if is_own(record.subject):
            trigger = parse(record.data).data.trigger
            assert trigger < record.sequence and (not own or trigger >= max(own)), "decided out of order"
            own.setdefault(trigger, []).append(record)
    return [r for record in records if not is_own(record.subject) for r in (record, *own.pop(record.sequence, ()))]


def check(records: list[Record], *, late: bool = False) -> Checker:
    """Reads a whole ledger. Raises AssertionError at the first that breaks a law. `late`: the decider may have been down."""
    checker = Checker()
    records = by_trigger(records) if late else records
    for record in records:
        try:
            checker.read(record)
        except AssertionError as error:
            raise AssertionError(f"LEDGER sequence {record.sequence}: {error}\n{record.subject} {record.data!r}") from error
    return checker


def signals(records: list[Record]) -> list[AnyEvent]:
    found = []
    for record in records:
        try:
            event = parse(record.data)
        except Malformed:
            continue
        if isinstance(event.data, Signal):
            found.append(event)
    return found
