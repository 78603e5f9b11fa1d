"""What a signal means to the decider: whether it belongs to a job that runs, is fresh, and opens or feeds an incident. Pure."""

from __future__ import annotations

from typing import Any

from events.clock import NS
from events.decision import EvidenceJudged, IncidentOpened
from events.envelope import AnyEvent, Fact
from events.ids import derived_id
from events.incident import Signal, SignalCleared, Symptom
from processors import attribution
from processors.state import AILING, IN_TROUBLE_ONLY, METRICS, NAMING, Fleet, Job

#: Symptoms of the job as a whole that open an incident by themselves.
OF_THE_JOB = frozenset({"rank_exit", "job_hang", "mfu_decline", "user_code_error", *METRICS})
#: Of those, the ones that open nothing unless their confidence is high: a single spike, an exception that machines may raise too.
ONLY_HIGH = frozenset({"mfu_decline", "user_code_error", *METRICS})


_CLAIMS = (Signal, SignalCleared)


def owner_of(fleet: Fleet, event: AnyEvent, node: str) -> Job | None:
    """The job that a claim concerns. What is said of the job as a whole: the envelope's; of a node: whose it is by declaration."""
    if type(event.data) in _CLAIMS and event.data.symptom in OF_THE_JOB and event.job in fleet.jobs:
        return fleet.jobs[event.job]
    return fleet.jobs.get(fleet.owners.get(node, event.job) if node else event.job)


def judge(fleet: Fleet, job: Job | None, event: AnyEvent, base: dict[str, Any]) -> list[Fact]:
    """The verdict on one signal about this job, preceded by the opening of an incident if it opens one."""
    signal: Signal = event.data
    verdict, because = _verdict(fleet, job, event, signal)
    facts: list[Fact] = []
    incident = job.incident.id if job and job.incident else ""
    if verdict == "attached" and job is not None and job.incident is None:
        incident = derived_id("incident", job.name, event.id, "incident", job.epoch + 1)
        facts.append(_opening(job, incident, signal.symptom, signal.seen_ns, max(signal.step, job.last_step), base))
    facts.append(
        _judged(
            incident=incident if verdict in ("attached", "sympathetic") else "",
            job=job.name if job else "",
            signal=event.id,
            verdict=verdict,
            because=because,
            symptom=signal.symptom,
            node=signal.node,
            rank=signal.rank,
            confidence=signal.confidence,
            attempt=event.attempt,
            step=signal.step,
            seen_ns=signal.seen_ns,
            bad_step=signal.bad_step,
            metric=signal.metric,
            ambiguous=ambiguous(signal),
            quote=signal.evidence if signal.symptom == "user_code_error" else "",
            **base,
        )
    )
    return facts


def _opening(job: Job, incident: str, symptom: Symptom, seen_ns: int, step: int, base: dict[str, Any]) -> IncidentOpened:
    return IncidentOpened(
        incident=incident, job=job.name, epoch=job.epoch + 1, attempt=job.attempt, symptom=symptom, first_evidence_ns=seen_ns,
        step=step, **base,
    )  # fmt: skip


def restored_wrongly(fleet: Fleet, job: Job, base: dict[str, Any]) -> list[Fact]:
    """The attempt that runs stands on steps of which it was learnt after its start that they were computed wrongly: so is what it
    computes."""
    poison = job.poisoned
    if poison is None or not job.stands_on_poison:
        return []
    key = derived_id("incident", job.name, f"restored-{job.attempt}", "incident", job.epoch + 1)
    symptom: Symptom = "loss_spike" if poison.of and all(of == "loss_spike" for of, _ in poison.of) else "nan_value"
    facts: list[Fact] = []
    if job.incident is None:
        facts.append(_opening(job, key, symptom, fleet.now_ns, job.last_step, base))
    facts.append(
        EvidenceJudged(
            incident=job.incident.id if job.incident else key, job=job.name, signal=key, verdict="attached",
            because=f"attempt {job.attempt} restored step {job.last_restored}, and from step {poison.first} on was computed wrongly",
            symptom=symptom, confidence="high", attempt=job.attempt, step=job.last_step, seen_ns=fleet.now_ns,
            bad_step=poison.first, **base,
        )
    )  # fmt: skip
    return facts


def ambiguous(signal: Signal) -> str:
    """What it is that code and machines both cause, by the words of processors.attribution; '' for anything else."""
    if signal.rule in attribution.PRIOR or signal.rule in attribution.ECHOES:
        return signal.rule
    if signal.symptom in _AMBIGUOUS:
        return _AMBIGUOUS[signal.symptom]
    return "illegal_access" if "illegal memory access" in signal.evidence else ""


_AMBIGUOUS = {"job_hang": "hang", "nan_value": "nan"}


def _in_trouble(job: Job) -> bool:
    incident = job.incident
    return incident is not None and (incident.crash or incident.stall or incident.hung or job.plan is not None)


_BLANK = {name: None if info.is_required() else info.default for name, info in sorted(EvidenceJudged.model_fields.items())}


def _judged(**values: Any) -> EvidenceJudged:
    """As the class itself would make it, without looking at values again that were looked at when the signal was read: there is one of
    these to each signal, and it is a fifth of replay's work. All fields must be given their places in canonical order."""
    fact = EvidenceJudged.__new__(EvidenceJudged)
    object.__setattr__(fact, "__dict__", _BLANK | values)
    object.__setattr__(fact, "__pydantic_fields_set__", set(values))
    object.__setattr__(fact, "__pydantic_extra__", None)
    object.__setattr__(fact, "__pydantic_private__", None)
    return fact


def _verdict(fleet: Fleet, job: Job | None, event: AnyEvent, signal: Signal) -> tuple[Any, str]:
    if job is None:
        return "not_in_job", "no declared job has this node or name"
    age_s = max(0, event.time - signal.seen_ns) / NS
    if age_s > fleet.policy.decider.evidence_age_max_s:
        return "stale", f"seen {age_s:.1f} s before it arrived: too old to open anything"
    if signal.node and signal.symptom not in METRICS:  # whose numbers were wrong first is no matter of who runs now
        in_places = signal.node in job.by_node
        if not in_places and signal.node in job.evicted:
            return "evicted_node", "the node is evicted already"
        if not in_places:
            return "not_in_job", "the node runs no rank of the job; as a standby it will not be used while this stands"
    if event.attempt > job.attempt:
        return "recorded", f"it speaks of attempt {event.attempt}, which was never started"
    naming = signal.symptom in NAMING and signal.confidence == "high"
    if naming and signal.symptom in IN_TROUBLE_ONLY and not _in_trouble(job):
        what = IN_TROUBLE_ONLY[signal.symptom]
        return "recorded", f"{what} under a job that goes on: the machine is replaced when the job stops for whatever reason"
    if signal.confidence == "sympathetic" and signal.symptom not in OF_THE_JOB:
        return "sympathetic", "what a job's own crash leaves behind on healthy machines names nobody"
    if signal.symptom in ONLY_HIGH and signal.confidence != "high":
        return "recorded", f"{signal.symptom} of {signal.confidence} confidence is no reason to stop a job"
    if not (naming or signal.symptom == "node_silent" or signal.symptom in OF_THE_JOB):
        if signal.symptom in AILING:
            return "recorded", "the machine ails while steps go on: it is replaced at the next restart"
        return "recorded", f"{signal.symptom} of {signal.confidence} confidence opens nothing under this version's rules"
    if job.wanted != "running":
        return "recorded", "the job is stopped or finished by plan"
    first = job.incident.attempt if job.incident else job.attempt
    about_node = naming or signal.symptom == "node_silent"
    if event.attempt and event.attempt < (first if about_node else job.attempt):
        because = f"it belongs to attempt {event.attempt}, and attempt {job.attempt} is current"
        wrong = "; what it computed wrongly is not restored" if signal.symptom in METRICS else ""
        return "ended_attempt", because + wrong
    if job.ended and (job.incident is None or job.plan is None) and not about_node:
        return "ended_attempt", f"attempt {job.attempt} is over"
    return "attached", ""
