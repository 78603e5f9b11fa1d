"""The closed loop: what nodes and ranks say goes through the detectors' folds into a ledger, the decider answers, and actuators do what
they are told. A seed decides everything; nothing here knows a clock."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any

from events import subjects
from events.action import OutcomeRecorded
from events.clock import NS
from events.decision import DeciderStarted, DecisionMade, IncidentClosed, IncidentOpened, IntentIssued, TimerSet
from events.envelope import Fact
from events.finding import CheckResult, ReplayResult, StackRound
from events.incident import Signal
from events.job import JobDeclared, Place, PolicyAdopted
from events.ports import HELD_HEADER, LEDGER, Record
from events.presence import SettingsAdopted, Tick
from events.registry import canonical, make
from infra.catalogue_files import catalogue_text
from processors import policy as policies
from processors.catalogue import parse
from processors.decider import Decider, timer_event
from processors.detector import PartitionFold
from processors.diagnosis import ALONE, RATES
from processors.job import job_detector
from processors.node import node_detector

START_NS = 1_800_000_000 * NS
#: Not partition 0, which tells of gaps in the ticks: with sparse ticks there is nothing else.
PARTITION = 1
_NUMBER, _ATTEMPT = 777_000_777, 888_000_888
#: Places in a fact for a rank's number and its own work: the same template serves all ranks.
RANK, BUSY_S = 999_000_999, 0.555000555


class Template:
    """An observation of any node, made once: canonical bytes with places for what differs."""

    def __init__(self, fact: Fact, producer: str, job: str = "", boot: str = "boot-1") -> None:
        event = make(
            fact, id="@id@", source=f"node/@node@/{producer}", subject="@node@", time=START_NS, number=_NUMBER, bootid=boot, job=job,
            attempt=_ATTEMPT if job else 0,
        )  # fmt: skip
        self.kind, self.producer, self.job = fact.kind(), producer, job
        self._parts = canonical(event)

    def data(self, id_: str, node: str, number: int, attempt: int = 0, rank: int = 0, busy_s: float = 0.0) -> bytes:
        raw = self._parts.replace(b"@id@", id_.encode()).replace(b"@node@", node.encode())
        raw = raw.replace(b"777000777", b"%d" % number)
        if not self.job:
            return raw
        return (
            raw.replace(b"888000888", b"%d" % attempt)
            .replace(b"999000999", b"%d" % rank)
            .replace(b"0.555000555", b"%.4f" % busy_s)
        )


class World:
    """`actions`: what the decider had done, by verb; `opened`: incidents (seconds, job, symptom); `evictions`: (seconds, node, why); `on_start`, `on_stop`: called with a job's name and
    the intent when an attempt starts or ends."""

    def __init__(self, seed: int, policy: str = "mode: auto\n") -> None:
        self.chance = Random(seed)
        self.now_ns = START_NS
        self.node_fold: PartitionFold[Any] = PartitionFold(node_detector(parse(catalogue_text(), examples=False)))
        self.job_fold: PartitionFold[Any] = PartitionFold(job_detector())
        self.decider = Decider()
        self.ledger = 0
        self.observed = 0
        self.actions: Counter[str] = Counter()
        self.signals: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.opened: list[tuple[float, str, str]] = []
        self.evictions: list[tuple[float, str, str]] = []
        self._because: dict[str, str] = {}
        self.on_start: Callable[[IntentIssued], None] = lambda intent: None
        self.on_stop: Callable[[IntentIssued], None] = lambda intent: None
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._sequences = {"tn": 0, "tj": 0}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._ids = count(1)
        self.say(DeciderStarted(worker="w", code_version="1", read_up_to=0, ledger_digest=""), "decider", "")
        self.adopt(policy)

    # --- time ---------------------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return (self.now_ns - START_NS) / NS

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ns + int(seconds * NS), next(self._order), call))

    def every(self, seconds: float, call: Callable[[], None], first_s: float | None = None) -> None:
        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(seconds if first_s is None else first_s, again)

    def run(self, until_s: float) -> None:
        until_ns = START_NS + int(until_s * NS)
        queue = self._queue
        while queue and queue[0][0] <= until_ns:
            self.now_ns, _, call = heapq.heappop(queue)
            call()
        self.now_ns = until_ns

    # --- telemetry ----------------------------------------------------------------------------------------------------------

    def observe(
        self, template: Template, node: str, attempt: int = 0, held_s: float = 0.0, times: int = 1, rank: int = 0, busy_s: float = 0.0
    ) -> None:  # fmt: skip
        """A node says something now, or said it `held_s` ago (a spool that drains), `times` times over."""
        key = (node, template.producer, template.job)
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        data = template.data(f"t{next(self._ids)}", node, number, attempt, rank, busy_s)
        job = template.job
        subject = f"tj.{PARTITION}.{node}.{job}.{template.kind}" if job else f"tn.{PARTITION}.{node}.{template.kind}"
        headers = {HELD_HEADER: str(int(held_s * NS))} if held_s else {}
        for _ in range(times):
            self._feed(subject, data, headers)

    def tick(self, stream: str) -> None:
        prefix = subjects.NODE if stream == "tn" else subjects.JOB
        self._feed(subjects.tick(prefix, PARTITION), _TICK, {}, stream)

    def _feed(self, subject: str, data: bytes, headers: dict[str, str], stream: str = "") -> None:
        stream = stream or subject[:2]
        self._sequences[stream] += 1
        self.observed += 1
        fold = self.node_fold if stream == "tn" else self.job_fold
        out, refused = fold.feed(Record(stream, self._sequences[stream], self.now_ns, subject, data, headers))
        assert refused is None, refused
        for outgoing in out:
            fact = outgoing.event.data
            if isinstance(fact, Signal):
                self.signals[f"{fact.symptom}/{fact.confidence}/{fact.rule}"] += 1
            self._put(outgoing.subject, canonical(outgoing.event))

    # --- the ledger ---------------------------------------------------------------------------------------------------------

    def say(self, fact: Fact, role: str, job: str) -> None:
        event = make(fact, id=f"in{next(self._ids)}", source=role, subject=job or "x", time=self.now_ns, job=job)
        self._put(subjects.ledger(job or subjects.FLEET, role, fact.kind()), canonical(event))

    def adopt(self, text: str) -> None:
        policy = policies.parse(text)
        self.say(PolicyAdopted(text=text, digest=policies.digest(text)), "operator", "")
        settings = SettingsAdopted(settings=policies.detector_settings(policy), policy_digest="d")
        event = canonical(make(settings, id=f"s{next(self._ids)}", source="cli", subject="clock", time=0))
        for stream, prefix in (("tn", subjects.NODE), ("tj", subjects.JOB)):
            self._feed(subjects.settings(prefix, PARTITION), event, {}, stream)

    def declare(self, job: str, nodes: Sequence[Place], standbys: Sequence[Place]) -> None:
        fact = JobDeclared(
            job=job, nodes=tuple(nodes), standbys=tuple(standbys), dp=len(nodes), command=("train",), checkpoints="/ckpt"
        )
        self.say(fact, "operator", job)

    def _put(self, subject: str, data: bytes) -> None:
        self.ledger += 1
        for out in self.decider.feed(Record(LEDGER, self.ledger, self.now_ns, subject, data)):
            self.ledger += 1
            self._decided(out.fact)

    def _decided(self, fact: Fact) -> None:
        if isinstance(fact, TimerSet):
            event = canonical(timer_event(fact))
            where = subjects.ledger(fact.job or subjects.FLEET, "timer", "timer_fired")
            self.after(max(0.0, (fact.at_ns - self.now_ns) / NS), lambda: self._put(where, event))
        elif isinstance(fact, IntentIssued):
            self.actions[fact.verb] += 1
            if fact.verb == "evict_node":
                self.evictions.append((round(self.now_s, 1), fact.node, self._because.get(fact.decision, "")))
            self.after(_TAKES_S.get(fact.verb, 1.0), lambda: self._carry_out(fact))
        elif isinstance(fact, DecisionMade):
            self.actions[f"rung {fact.rung}"] += 1
            self._because[fact.decision] = f"{fact.rule}: {fact.because}"
        elif isinstance(fact, IncidentOpened):
            self.opened.append((self.now_s, fact.job, fact.symptom))
        elif isinstance(fact, IncidentClosed):
            self.closed[f"{fact.symptom}/{fact.mechanism}/{fact.outcome}"] += 1

    def _carry_out(self, intent: IntentIssued) -> None:
        """Actuators that do what they are told on machines with nothing wrong with them: tests fail as often as is stated of each."""
        found: dict[str, Any] = {}
        nodes = intent.nodes or tuple(place.node for place in intent.places) or ((intent.node,) if intent.node else ())
        if intent.verb == "stop_attempt":
            self.on_stop(intent)
        elif intent.verb == "start_attempt":
            self.on_start(intent)
        elif intent.verb == "capture_stacks":
            found["stacks"] = (StackRound(groups_seen=1, dominant=len(nodes), ranks=len(nodes)),) * max(1, intent.rounds)
        elif intent.verb in ("diagnose", "examine"):
            found["tests"] = tuple(self._tested(test, node) for node in nodes for test in intent.tests if test in ALONE)
        elif intent.verb == "group_test":
            phases: tuple[Any, ...] = ("horizontal", "vertical")
            found["replays"] = tuple(
                ReplayResult(phase=phase, group=i, nodes=group, failed=False)
                for phase, groups in zip(phases, intent.groups, strict=True)
                for i, group in enumerate(groups)
            )
        fact = OutcomeRecorded(
            key=intent.key, incident=intent.incident, job=intent.job, verb=intent.verb, result="done", **found
        )
        self.say(fact, "actuator", intent.job)

    def _tested(self, test: str, node: str) -> CheckResult:
        failed = self.chance.random() < RATES[test].false_alarm
        self.actions["sound machines that failed a test"] += failed
        return CheckResult(test=test, node=node, passed=not failed, detail="it took too long" if failed else "")

    def summary(self) -> dict[str, Any]:
        alarms = self.actions["sound machines that failed a test"]
        rungs = {name.removeprefix("rung "): n for name, n in sorted(self.actions.items()) if name.startswith("rung ")}
        return json.loads(json.dumps({"failed_tests": alarms, "rungs": rungs, "incidents": dict(sorted(self.closed.items()))}))  # type: ignore[no-any-return]


_TICK = canonical(make(Tick(), id="tick", source="bus/clock", subject="clock", time=0))
#: Seconds that an action takes.
_TAKES_S = {
    "stop_attempt": 5.0,
    "start_attempt": 3.0,
    "capture_stacks": 12.0,
    "diagnose": 60.0,
    "group_test": 120.0,
    "examine": 300.0,
}
