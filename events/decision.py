"""What the decider writes, and the timers it is told of. Each carries `trigger` (LEDGER sequence of the input it was decided at)
and `ledger_digest` (running digest of the ledger as folded up to that input), so that lost or split history is noticed."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact
from events.incident import Confidence, Symptom
from events.job import Mode

Rung = Literal[
    "evict", "diagnose", "reattempt", "aggregate_stacks", "roll_back", "group_test", "hand_over", "wait", "planned", "none"
]
Verb = Literal[
    "stop_attempt", "evict_node", "wake_standby", "start_attempt", "notify", "capture_stacks", "diagnose", "group_test", "examine"
]  # fmt: skip

Verdict = Literal["confirmed", "exonerated", "unproven"]
#: Why a person is called; each has a runbook page (infra/deploy/runbooks). Empty: the decider did not say.
HandOverReason = Literal[
    "", "attempts_used_up", "budget_spent", "no_standby", "shared_cause", "start_failed", "recovery_late", "rollback_impossible",
    "group_test_disagreed", "stacks_name_whole_job", "diagnosis_failed", "same_exception", "no_longer_possible", "planned_failed",
    "slow_run", "left_stopped",
]  # fmt: skip


class Decided(Fact):
    """What all of the decider's events hold."""

    trigger: int = Field(ge=1)
    ledger_digest: str


class DeciderStarted(Fact):
    """A decider took over, with this code. Not decided from an input: the only event of the decider's with a random id."""

    TYPE: ClassVar[str] = "keepstep.decider_started.v1"
    worker: str
    code_version: str
    read_up_to: int = Field(ge=0)
    ledger_digest: str


class IncidentOpened(Decided):
    """Trouble on a job begins. `epoch` counts the job's incidents from 1. `first_evidence_ns`: when it was first seen."""

    TYPE: ClassVar[str] = "keepstep.incident_opened.v1"
    incident: str
    job: str = Field(max_length=NAME_MAX)
    epoch: int = Field(ge=1)
    attempt: int = Field(ge=0)
    symptom: Symptom
    first_evidence_ns: int = Field(ge=0)
    step: int = -1


class EvidenceJudged(Decided):
    """What the decider made of one signal: it belongs to an incident, or it is recorded and opens nothing, and why."""

    TYPE: ClassVar[str] = "keepstep.evidence_judged.v1"
    incident: str = ""
    job: str = Field(default="", max_length=NAME_MAX)
    signal: str
    verdict: Literal["attached", "recorded", "stale", "ended_attempt", "sympathetic", "evicted_node", "not_in_job"]
    because: str = Field(default="", max_length=TEXT_MAX)
    #: Of the signal, what the decider reckons with.
    symptom: Symptom
    node: str = Field(default="", max_length=NAME_MAX)
    rank: int = -1
    confidence: Confidence = "low"
    attempt: int = 0
    step: int = -1
    seen_ns: int = 0
    bad_step: int = Field(default=-1, ge=-1)
    metric: str = Field(default="", max_length=NAME_MAX)
    #: Of what both code and machines cause: what it is (processors.attribution).
    ambiguous: str = Field(default="", max_length=NAME_MAX)
    #: Of an exception that the code causes: its own words, and where.
    quote: str = Field(default="", max_length=1024)


class SharedCause(Decided):
    """Many nodes of one rack, switch or of the whole bus in trouble together: one cause, one page."""

    TYPE: ClassVar[str] = "keepstep.shared_cause.v1"
    incident: str
    job: str = Field(max_length=NAME_MAX)
    scope: Literal["rack", "nvlink_domain", "switch", "fleet"]
    name: str = Field(max_length=NAME_MAX)
    nodes: int = Field(ge=1)
    of: int = Field(ge=1)
    symptom: Symptom


class TimerSet(Decided):
    """A question to be asked again at `at_ns`. `purpose` says which; a timer that is no longer wanted is ignored when it fires."""

    TYPE: ClassVar[str] = "keepstep.timer_set.v1"
    timer: str
    job: str = Field(max_length=NAME_MAX)
    incident: str
    purpose: Literal["culprit_window", "silence_window", "shared_window", "recovery_deadline", "hold_expiry", "update_window"]
    at_ns: int = Field(ge=0)
    note: str = ""


class TimerFired(Fact):
    """Delivered by the broker at its time, under the timer's role."""

    TYPE: ClassVar[str] = "keepstep.timer_fired.v1"
    timer: str
    job: str = Field(max_length=NAME_MAX)
    incident: str
    purpose: str


class DecisionMade(Decided):
    """The decider's choice. `because`: the rule and its numbers in one sentence. `mode`: observe (this is what it would have
    done), approve (waits for a yes) or auto. `vetoed`: what stood against acting (budget, no standby, a hold), if anything."""

    TYPE: ClassVar[str] = "keepstep.decision_made.v1"
    decision: str
    incident: str
    job: str = Field(max_length=NAME_MAX)
    epoch: int = Field(ge=0)
    ordinal: int = Field(ge=1)
    rung: Rung
    rule: str
    mode: Mode
    #: The machines to be evicted, and the standbys that take their places, in the same order.
    nodes: tuple[str, ...] = ()
    standbys: tuple[str, ...] = ()
    #: The attempt that it answers.
    attempt: int = Field(default=0, ge=0)
    because: str = Field(max_length=TEXT_MAX)
    vetoed: Literal["", "budget", "no_standby", "hold", "kept"] = ""
    #: What it answers, by the ladder's own word (processors.ladder.Situation); empty for what a person asked for.
    situation: str = Field(default="", max_length=NAME_MAX)
    #: Of a hand-over: why. Empty where the decider did not say (processors.runbooks reads `situation` and `because` then).
    reason: HandOverReason = ""
    #: Of an eviction of a parallel group: which (`pp 3`), and how many machines it has.
    group: str = Field(default="", max_length=NAME_MAX)
    group_size: int = Field(default=0, ge=0)
    #: Of a rollback, the revision that is gone back to; of any restart, the step below which it restores (-1: the newest).
    revision: str = Field(default="", max_length=NAME_MAX)
    restore_below_step: int = Field(default=-1, ge=-1)
    policy_digest: str
    catalogue_digest: str
    code_version: str


class RankPlace(Fact):
    """Ranks `first_rank` to `first_rank + count - 1` on a node."""

    node: str = Field(max_length=NAME_MAX)
    first_rank: int = Field(ge=0)
    count: int = Field(ge=1)


class IntentIssued(Decided):
    """What an actuator is told to do. `key` is a digest of incident, epoch, rung and ordinal: the same key is done once.
    `attempt`: the one that is stopped or started. Not to be begun after `expires_ns` (broker time)."""

    TYPE: ClassVar[str] = "keepstep.intent_issued.v1"
    key: str
    decision: str
    incident: str
    job: str = Field(max_length=NAME_MAX)
    epoch: int = Field(ge=0)
    verb: Verb
    attempt: int = Field(default=0, ge=0)
    node: str = Field(default="", max_length=NAME_MAX)
    nodes: tuple[str, ...] = ()
    places: tuple[RankPlace, ...] = ()
    world_size: int = Field(default=0, ge=0)
    graceful: bool = False
    text: str = Field(default="", max_length=TEXT_MAX)
    expires_ns: int = Field(ge=0)
    #: capture_stacks: so many times, so far apart.
    rounds: int = Field(default=1, ge=1, le=100)
    every_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    #: capture_stacks: `stacks` of the policy in force, where it says something else than the defaults.
    cut: tuple[tuple[str, float], ...] = ()
    #: diagnose, examine: tests by name, in order, and the time that they may take together.
    tests: tuple[str, ...] = ()
    within_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    #: group_test: the machines of each group, phase by phase, and the steps of a replay; `within_s` is the time for both phases.
    groups: tuple[tuple[tuple[str, ...], ...], ...] = ()
    steps: int = Field(default=0, ge=0)
    #: start_attempt, group_test: the code revision that is run (empty: what lies in the job's directory), and the newest whole
    #: checkpoint below this step is restored (-1: the newest of all).
    revision: str = Field(default="", max_length=NAME_MAX)
    restore_below_step: int = Field(default=-1, ge=-1)
    #: Whether it may start from the beginning where no checkpoint lies below that step.
    from_the_beginning: bool = True


class IncidentClosed(Decided):
    """The incident is over. `mechanism`: the rung that ended it, as the census counts it. Times in broker ns, 0 where there is
    none; `decided_ns` is the last decision before health, `back_ns` the first confirmed healthy step."""

    TYPE: ClassVar[str] = "keepstep.incident_closed.v1"
    incident: str
    job: str = Field(max_length=NAME_MAX)
    epoch: int = Field(ge=1)
    symptom: Symptom
    mechanism: Rung
    outcome: Literal["recovered", "handed_over", "cleared", "superseded", "job_ended"]
    nodes: tuple[str, ...] = ()
    first_evidence_ns: int
    opened_ns: int
    decided_ns: int = 0
    back_ns: int = 0
    step_before: int = -1
    step_restored: int = -1


class AttemptEnded(Decided):
    """An attempt is over: its telemetry opens nothing any more."""

    TYPE: ClassVar[str] = "keepstep.attempt_ended.v1"
    job: str = Field(max_length=NAME_MAX)
    attempt: int
    reason: Literal["stopped", "finished", "failed"]


class RevisionStable(Decided):
    """A code revision ran the policy's number of healthy steps: a rollback may go back to it."""

    TYPE: ClassVar[str] = "keepstep.revision_stable.v1"
    job: str = Field(max_length=NAME_MAX)
    revision: str = Field(min_length=1, max_length=NAME_MAX)
    step: int = Field(ge=0)
    attempt: int = Field(ge=0)


class MachineJudged(Decided):
    """What the examination of an evicted machine, off the critical path, came to. `confirmed`: it is bad and stays out; `exonerated`: it
    passed all tests, and is a standby again; `unproven`: neither, and `back` says whether it returns under watch."""

    TYPE: ClassVar[str] = "keepstep.machine_judged.v1"
    job: str = Field(max_length=NAME_MAX)
    node: str = Field(max_length=NAME_MAX)
    #: The incident that it was evicted in, and the rule.
    incident: str = ""
    rule: str = ""
    verdict: Verdict
    back: bool = False
    because: str = Field(default="", max_length=TEXT_MAX)


class Diverged(Decided):
    """On taking over, deriving an input again gave something else than what was recorded. The recorded decision stands."""

    TYPE: ClassVar[str] = "keepstep.diverged.v1"
    recorded: str
    derived: str
