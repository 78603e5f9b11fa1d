"""Hand-made LEDGERs for tests: a story told event by event, through the registry, with the broker's times given."""

from __future__ import annotations

from typing import Any

from events import subjects
from events.action import OutcomeRecorded, TryStarted
from events.clock import NS
from events.decision import DecisionMade, EvidenceJudged, IncidentClosed, IncidentOpened, IntentIssued, TimerFired, TimerSet
from events.envelope import Fact
from events.incident import ProgressNoted, Signal
from events.ports import LEDGER, Record
from events.registry import canonical, make

START_NS = 1_767_225_600 * NS


class Story:
    """Appends events with growing sequences; `at_s` is seconds after the start."""

    def __init__(self, job: str = "gpt", prefix: str = "") -> None:
        self.job = job
        self.prefix = prefix
        self.records: list[Record] = []

    def say(self, role: str, fact: Fact, at_s: float, *, job: str | None = None, attempt: int = 1, **envelope: Any) -> str:
        """Appends the fact, and gives its event's id."""
        job = self.job if job is None else job
        sequence = len(self.records) + 1
        id_ = envelope.pop("id", f"{self.prefix}e{sequence}")
        time_ns = START_NS + round(at_s * 1000) * 1_000_000
        event = make(fact, id=id_, source=role, subject=job, time=time_ns, job=job, attempt=attempt, **envelope)
        subject = subjects.ledger(job or subjects.FLEET, role, fact.kind())
        self.records.append(Record(LEDGER, sequence, time_ns, subject, canonical(event)))
        return str(id_)

    def signal(self, symptom: Any, at_s: float, *, seen_s: float | None = None, **what: Any) -> str:
        seen_ns = START_NS + round((at_s if seen_s is None else seen_s) * 1000) * 1_000_000
        return self.say("detector", Signal(symptom=symptom, seen_ns=seen_ns, **what), at_s)

    def _base(self) -> dict[str, Any]:
        return {"trigger": len(self.records) or 1, "ledger_digest": "d"}

    def opened(self, incident: str, symptom: Any, at_s: float, *, first_s: float, epoch: int = 1, signal: str = "") -> None:
        fact = IncidentOpened(
            incident=incident,
            job=self.job,
            epoch=epoch,
            attempt=1,
            symptom=symptom,
            first_evidence_ns=ns(first_s),
            **self._base(),
        )
        self.say("decider", fact, at_s, causes=(signal,) if signal else ())

    def judged(
        self, incident: str, signal: str, verdict: Any, at_s: float, symptom: Any, because: str = "", **what: Any
    ) -> None:
        fact = EvidenceJudged(
            incident=incident,
            job=self.job,
            signal=signal,
            verdict=verdict,
            because=because,
            symptom=symptom,
            **what,
            **self._base(),
        )
        self.say("decider", fact, at_s)

    def decided(self, incident: str, rung: Any, rule: str, at_s: float, **what: Any) -> str:
        decision = f"{self.prefix}d{len(self.records)}"
        fact = DecisionMade(
            **{
                "decision": decision, "incident": incident, "job": self.job, "epoch": 1, "ordinal": 1, "rung": rung, "rule": rule,
                "mode": "auto", "because": f"{rule} fired", "policy_digest": "p0", "catalogue_digest": "c0", "code_version": "v0",
                **self._base(), **what,
            }
        )  # fmt: skip
        self.say("decider", fact, at_s)
        return decision

    def acted(
        self, incident: str, decision: str, verb: Any, at_s: float, *, result: Any = "done", took_s: float = 0.5, **what: Any
    ) -> str:
        """Intent, try and outcome (none if `result` is empty)."""
        key = f"{self.prefix}k{len(self.records)}"
        intent = IntentIssued(
            key=key, decision=decision, incident=incident, job=self.job, epoch=1, verb=verb, expires_ns=ns(at_s + 60), **what,
            **self._base(),
        )  # fmt: skip
        self.say("decider", intent, at_s)
        self.say("actuator", TryStarted(key=key, job=self.job, verb=verb, ordinal=1), at_s)
        if result:
            outcome = OutcomeRecorded(
                key=key, incident=incident, job=self.job, verb=verb, result=result, detail=f"{verb} {result}"
            )
            self.say("actuator", outcome, at_s + took_s)
        return key

    def timer(self, incident: str, purpose: Any, at_s: float, due_s: float) -> str:
        name = f"{self.prefix}t{len(self.records)}"
        fact = TimerSet(timer=name, job=self.job, incident=incident, purpose=purpose, at_ns=ns(due_s), **self._base())
        self.say("decider", fact, at_s)
        return name

    def fired(self, incident: str, timer: str, purpose: str, at_s: float) -> None:
        self.say("timer", TimerFired(timer=timer, job=self.job, incident=incident, purpose=purpose), at_s)

    def progress(self, step: int, at_s: float, *, first: bool = False, restored: int = -1, attempt: int = 1) -> None:
        fact = ProgressNoted(step=step, first=first, restored_step=restored, seen_ns=ns(at_s))
        self.say("detector", fact, at_s, attempt=attempt)

    def closed(
        self, incident: str, symptom: Any, mechanism: Any, outcome: Any, at_s: float, *, first_s: float, **what: Any
    ) -> None:
        fact = IncidentClosed(
            incident=incident, job=self.job, epoch=1, symptom=symptom, mechanism=mechanism, outcome=outcome,
            first_evidence_ns=ns(first_s), opened_ns=ns(first_s), **what, **self._base(),
        )  # fmt: skip
        self.say("decider", fact, at_s)


def ns(at_s: float) -> int:
    return START_NS + round(at_s * 1000) * 1_000_000


def killed_rank(story: Story, incident: str = "i1", at_s: float = 10.0) -> None:
    """A rank dies, is told of half a second later, and the job is back five seconds after the first evidence."""
    story.progress(20, at_s - 2)
    signal = story.signal(
        "rank_exit", at_s + 0.5, seen_s=at_s, node="n1", rank=1, rule="exit", evidence="rank 1 died of signal 9"
    )
    story.opened(incident, "rank_exit", at_s + 0.5, first_s=at_s, signal=signal)
    story.judged(incident, signal, "attached", at_s + 0.5, "rank_exit", node="n1")
    timer = story.timer(incident, "culprit_window", at_s + 0.5, at_s + 1.5)
    echo = story.signal("gpu_unavailable", at_s + 0.7, node="n2", confidence="sympathetic", evidence="Xid 45")
    story.judged(incident, echo, "sympathetic", at_s + 0.7, "gpu_unavailable", because="what a crash leaves behind", node="n2")
    story.fired(incident, timer, "culprit_window", at_s + 1.5)
    decision = story.decided(incident, "reattempt", "reattempt_crash", at_s + 1.5)
    story.acted(incident, decision, "stop_attempt", at_s + 1.5)
    story.acted(incident, decision, "start_attempt", at_s + 2.0, attempt=2, world_size=4)
    story.progress(17, at_s + 5, first=True, restored=15, attempt=2)
    story.closed(
        incident, "rank_exit", "reattempt", "recovered", at_s + 5, first_s=at_s, decided_ns=ns(at_s + 1.5), back_ns=ns(at_s + 5),
        step_before=20, step_restored=15,
    )  # fmt: skip
