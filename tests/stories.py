"""Tells a story to the decider: a text file of inputs, line by line, with what was decided under each. Time passes between the lines;
timers fire by themselves, and actuators answer `done` after 0.1 s unless the story says `actuators silent`.

    policy auto                                   adopt a policy (a mode; further lines `key.path=value`)
    job gpt nodes a@r1 b@r1 c@r2 standbys s@r3    declare (node@rack, %NVLink domain, /switch and #serial may follow)
    +2.5 signal rank_exit b rank=1 attempt=1      2.5 s later
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

import yaml

from events import subjects
from events.action import OutcomeRecorded
from events.clock import NS
from events.decision import DeciderStarted, IntentIssued, TimerSet
from events.finding import CheckResult, ReplayResult, StackRound
from events.ids import derived_id
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
from events.ports import LEDGER, Record
from events.registry import canonical, make
from processors import policy as policies
from processors.decider import Decider, timer_event

START = 1_700_000_000 * NS


class Story:
    """A ledger being written by a story and the decider."""

    def __init__(self) -> None:
        self.now = START
        self.decider = Decider()
        self.records: list[Record] = []
        self.timers: list[tuple[int, int, Any]] = []
        self.answers = True
        self.told: list[str] = []
        self.names: dict[str, str] = {}
        self.intents: dict[str, IntentIssued] = {}
        self.answered: set[str] = set()
        #: What the next examination by a verb will find.
        self.findings: dict[str, dict[str, Any]] = {}
        self.kinds: Counter[str] = Counter()
        self._count = 0
        self.say_started()

    # -- the ledger

    def append(self, subject: str, data: bytes) -> Record:
        record = Record(LEDGER, len(self.records) + 1, self.now, subject, data)
        self.records.append(record)
        return record

    def say(self, fact: Any, role: str, job: str, *, attempt: int = 0, time_ns: int | None = None) -> None:
        self._count += 1
        event = make(
            fact, id=f"in-{self._count}", source=role, subject=job or "x", time=time_ns or self.now, job=job, attempt=attempt
        )
        self.put(subjects.ledger(job or subjects.FLEET, role, fact.kind()), canonical(event))

    def put(self, subject: str, data: bytes) -> None:
        """An input arrives; the decider answers at once."""
        for out in self.decider.feed(self.append(subject, data)):
            self.append(out.subject, canonical(out.event))
            self.told.append(self.line(out.event.data))
            fact = out.event.data
            if isinstance(fact, TimerSet):
                event = timer_event(fact)
                where = subjects.ledger(fact.job or subjects.FLEET, "timer", "timer_fired")
                heapq.heappush(self.timers, (fact.at_ns, len(self.records), (where, canonical(event))))
            elif isinstance(fact, IntentIssued):
                self.intents[fact.key] = fact
                if self.answers:
                    heapq.heappush(self.timers, (self.now + NS // 10, len(self.records), self._word_of(fact, "done")))

    def _word_of(self, intent: IntentIssued, result: Any, detail: str = "", nodes: tuple[str, ...] = ()) -> tuple[str, bytes]:
        """An actuator's outcome: where it is appended, and its bytes."""
        self.answered.add(intent.key)
        fact = OutcomeRecorded(
            key=intent.key,
            incident=intent.incident,
            job=intent.job,
            verb=intent.verb,
            result=result,
            detail=detail,
            nodes=nodes,
            **(self._finding(intent) if result == "done" else {}),
        )
        event = make(
            fact,
            id=derived_id("actuator", intent.job, intent.key, "outcome", 0),
            source="actuator",
            subject=intent.job,
            time=self.now,
            job=intent.job,
        )
        return subjects.ledger(intent.job, "actuator", "outcome_recorded"), canonical(event)

    def outcome(self, intent: IntentIssued, result: Any, nodes: tuple[str, ...] = (), detail: str = "") -> None:
        self.put(*self._word_of(intent, result, detail, nodes))

    def say_started(self) -> None:
        """A decider takes over."""
        self.say(DeciderStarted(worker="w", code_version="1", read_up_to=0, ledger_digest=""), "decider", "")

    def until(self, time_ns: int) -> None:
        while self.timers and self.timers[0][0] <= time_ns:
            at, _, (subject, data) = heapq.heappop(self.timers)
            self.now = max(self.now, at)
            self.put(subject, data)
        self.now = time_ns

    # -- the language

    def line(self, fact: Any) -> str:
        """A decision as the story shows it: the kind, and what a reader needs."""
        shown = []
        for key, value in fact.model_dump(mode="json", exclude_defaults=True).items():
            if key in (
                "trigger",
                "ledger_digest",
                "policy_digest",
                "catalogue_digest",
                "code_version",
                "epoch",
                "job",
                "signal",
                "text",
                "world_size",
            ):
                continue
            if key in ("incident", "decision", "timer", "key"):
                if value not in self.names:
                    self.kinds[key] += 1
                    self.names[value] = f"{key}-{self.kinds[key]}"
                value = self.names[value]
            elif key.endswith("_ns"):
                key, value = key[:-3], f"{(value - START) / NS:g}"
            elif key == "places":
                value = ",".join(f"{p['node']}:{p['first_rank']}" for p in (fact.model_dump()["places"]))
            elif isinstance(value, list):
                value = "|".join("/".join(map(",".join, v)) for v in value) if key == "groups" else ",".join(map(_word, value))
            shown.append(f"{key}={value!r}" if isinstance(value, str) and " " in value else f"{key}={value}")
        return f"{fact.kind()} " + " ".join(shown)

    def tell(self, text: str) -> list[str]:
        """Plays one line; returns what was decided because of it and of the time before it."""
        self.told = []
        words = text.split()
        if words[0].startswith("+"):
            self.until(self.now + int(float(words.pop(0)[1:]) * NS))
        if words:
            options = dict(w.split("=", 1) for w in words[1:] if "=" in w)
            plain = [w for w in words[1:] if "=" not in w]
            getattr(self, f"_{words[0]}")(plain, options)
        return self.told

    def _policy(self, plain: list[str], options: dict[str, str]) -> None:
        raw: dict[str, Any] = {"mode": plain[0]}
        for path, value in options.items():
            at = raw
            *heads, last = path.split(".")
            for head in heads:
                at = at.setdefault(head, {})
            at[last] = yaml.safe_load(value)
        text = yaml.safe_dump(raw)
        policies.parse(text)
        self.say(PolicyAdopted(text=text, digest=policies.digest(text)), "operator", "")

    def _job(self, plain: list[str], options: dict[str, str]) -> None:
        cut = plain.index("standbys") if "standbys" in plain else len(plain)
        nodes, standbys = plain[2:cut], plain[cut + 1 :]
        declared = JobDeclared(
            job=plain[0],
            nodes=tuple(map(place, nodes)),
            standbys=tuple(map(place, standbys)),
            tp=int(options.get("tp", 1)),
            pp=int(options.get("pp", 1)),
            dp=int(options.get("dp", len(nodes))),
            ranks_per_node=int(options.get("ranks", 1)),
            command=("train",),
            code_revision=options.get("revision", ""),
            checkpoints=options.get("checkpoints", ""),
        )
        self.say(declared, "operator", plain[0])

    def _signal(self, plain: list[str], options: dict[str, str]) -> None:
        job = options.get("job", "")
        seen = self.now - int(float(options.get("age", 0)) * NS)
        fact = Signal(
            symptom=plain[0], node=plain[1] if len(plain) > 1 else "", rank=int(options.get("rank", -1)), rule=options.get("rule", ""),
            confidence=options.get("confidence", "low"), evidence=options.get("evidence", ""), seen_ns=seen,
            step=int(options.get("step", -1)), bad_step=int(options.get("bad_step", -1)), metric=options.get("metric", ""),
        )  # fmt: skip
        self.say(fact, "detector", job, attempt=int(options.get("attempt", 0)))

    def _clear(self, plain: list[str], options: dict[str, str]) -> None:
        node, metric = plain[1] if len(plain) > 1 else "", options.get("metric", "")
        fact = SignalCleared(symptom=plain[0], node=node, metric=metric, seen_ns=self.now)
        self.say(fact, "detector", options.get("job", ""), attempt=int(options.get("attempt", 0)))

    def _progress(self, plain: list[str], options: dict[str, str]) -> None:
        fact = ProgressNoted(
            step=int(options["step"]), first="first" in plain, restored_step=int(options.get("restored", -1)), seen_ns=self.now
        )
        self.say(fact, "detector", plain[0], attempt=int(options["attempt"]))

    def _finished(self, plain: list[str], options: dict[str, str]) -> None:
        self.say(
            JobFinished(step=int(options.get("step", -1)), seen_ns=self.now),
            "detector",
            plain[0],
            attempt=int(options["attempt"]),
        )

    def _hold(self, plain: list[str], options: dict[str, str]) -> None:
        expires = self.now + int(float(options["for"]) * NS) if "for" in options else 0
        self.say(
            HoldPlaced(job=plain[0] if plain else "", reason="r", author="a", expires_ns=expires),
            "operator",
            plain[0] if plain else "",
        )

    def _release(self, plain: list[str], options: dict[str, str]) -> None:
        self.say(HoldReleased(job=plain[0] if plain else "", reason="r", author="a"), "operator", plain[0] if plain else "")

    def _restart(self, plain: list[str], options: dict[str, str]) -> None:
        self.say(
            RestartRequested(
                job=plain[0],
                reason="r",
                author="a",
                symptom=options.get("symptom", "operator_restart"),
                revision=options.get("revision", ""),
                at_next_restart="lazily" in plain,
            ),
            "operator",
            plain[0],
        )

    def _stop(self, plain: list[str], options: dict[str, str]) -> None:
        self.say(StopRequested(job=plain[0], reason="r", author="a"), "operator", plain[0])

    def _standby(self, plain: list[str], options: dict[str, str]) -> None:
        self.say(StandbyAdded(job=plain[0], place=place(plain[1]), author="a"), "operator", plain[0])

    def _approve(self, plain: list[str], options: dict[str, str]) -> None:
        decision = next(key for key, name in self.names.items() if name == plain[1])
        expires = self.now + int(float(options["for"]) * NS) if "for" in options else 0
        self.say(
            ApprovalGiven(
                decision=decision, job=plain[0], granted="no" not in plain, reason="r", author="a", expires_ns=expires
            ),
            "operator",
            plain[0],
        )

    def _actuators(self, plain: list[str], options: dict[str, str]) -> None:
        self.answers = plain[0] != "silent"

    def _outcome(self, plain: list[str], options: dict[str, str]) -> None:
        key = next(key for key, name in self.names.items() if name == plain[1])
        nodes = tuple(options["nodes"].split(",")) if "nodes" in options else ()
        self.outcome(self.intents[key], options["result"], nodes, options.get("detail", ""))

    def _override(self, plain: list[str], options: dict[str, str]) -> None:
        expires = self.now + int(float(options["for"]) * NS) if "for" in options else 0
        fact = OverrideGiven(
            job=plain[0], remedy=plain[1], node=options.get("node", ""), revision=options.get("revision", ""), reason="r", author="a",
            expires_ns=expires,
        )  # fmt: skip
        self.say(fact, "operator", plain[0])

    def _finding(self, intent: IntentIssued) -> dict[str, Any]:
        found = self.findings.pop(f"{intent.verb} {intent.node}", None) or self.findings.pop(intent.verb, {})
        if again := self.findings.pop(f"{intent.verb} again", None):
            self.findings[intent.verb] = again
        return found

    def _found(self, plain: list[str], options: dict[str, str]) -> None:
        """What the next examination finds: `found stacks 3,4 [5]` (outlying ranks, a round each), `found tests b` (`test=dcgm`, `well=c,d`, and with `again=yes` when they are tested once more), `found replays 0 1` (the
        failing groups of the two phases), `found examined b` (one machine's own, `passed=yes`: nothing)."""
        what, *rest = plain
        if what == "stacks":
            rounds = tuple(StackRound(outliers=tuple(map(int, r.split(","))), ranks=1, stuck_at=("all_reduce",)) for r in rest)
            self.findings["capture_stacks"] = {"stacks": rounds}
        elif what == "tests":
            test = options.get("test", "gpu_self_test")
            bad = [CheckResult(test=test, node=node, passed=False, detail="bits differ") for node in rest]
            good = [CheckResult(test=test, node=node, passed=True) for node in options.get("well", "").split(",") if node]
            again = "again" in options
            self.findings["diagnose again" if again else "diagnose"] = {"tests": (*bad, *good)}
        elif what == "examined":
            passed = options.get("passed") == "yes"
            for node in rest:
                self.findings[f"examine {node}"] = {
                    "tests": (CheckResult(test="reference_step", node=node, passed=passed, detail="bits differ"),)
                }
        else:
            groups = next(i for i in reversed(self.intents.values()) if i.verb == "group_test").groups
            self.findings["group_test"] = {"replays": _replays(groups, tuple(map(int, rest)))}

    def _bytes(self, plain: list[str], options: dict[str, str]) -> None:
        """Anything, anywhere: `bytes <subject> <data>`."""
        self.put(plain[0], " ".join(plain[1:]).encode())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ":".join(map(str, value))


def _replays(groups: tuple[tuple[tuple[str, ...], ...], ...], bad: tuple[int, ...]) -> tuple[ReplayResult, ...]:
    phases: tuple[Any, ...] = ("horizontal", "vertical")
    return tuple(
        ReplayResult(phase=phase, group=i, nodes=nodes, failed=i == failing)
        for phase, of_phase, failing in zip(phases, groups, bad, strict=True)
        for i, nodes in enumerate(of_phase)
    )


def place(text: str) -> Place:
    text, _, serial = text.partition("#")
    text, _, switch = text.partition("/")
    text, _, domain = text.partition("%")
    node, _, rack = text.partition("@")
    return Place(node=node, rack=rack, nvlink_domain=domain, switch=switch, serial=serial)
