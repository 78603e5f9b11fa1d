"""What a node's rank host must know again after its agent was replaced: answers given, and each job's newest attempt and fence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actuators.environment import Plan
from actuators.files import load, save
from events.action import CommandAnswered

ANSWERS_MAX = 256
JOBS_MAX = 64


@dataclass(frozen=True, slots=True)
class JobMark:
    """`newest`: the highest attempt told of; `stopped`: the highest that was stopped, never to be started again; `fenced`: the
    epoch of a fence that stands (-1: none); `parked_wanted` of `plan` are kept ready."""

    newest: int = 0
    stopped: int = 0
    epoch: int = 0
    fenced: int = -1
    plan: Plan | None = None
    parked_wanted: int = 0


class NodeMemory:
    """Both maps are bounded, oldest out first, and written through."""

    def __init__(self, folder: Path) -> None:
        self._jobs_path, self._answers_path = folder / "jobs.json", folder / "answers.json"
        self.jobs: dict[str, JobMark] = {}
        self.answers: dict[str, CommandAnswered] = {}
        self._dumped: dict[str, Any] = {}

    def recover(self) -> None:
        for job, raw in _entries(load(self._jobs_path)):
            mark = _mark(raw)
            if mark is not None:
                self.jobs[job] = mark
        for key, raw in _entries(load(self._answers_path)):
            try:
                self.answers[key] = CommandAnswered.model_validate(raw)
                self._dumped[key] = raw
            except ValidationError:
                continue

    def job(self, job: str) -> JobMark:
        return self.jobs.get(job, JobMark())

    def note(self, job: str, **changes: Any) -> JobMark:
        mark = replace(self.job(job), **changes)
        if self.jobs.get(job) != mark:
            self.jobs.pop(job, None)
            self.jobs[job] = mark
            while len(self.jobs) > JOBS_MAX:
                del self.jobs[next(iter(self.jobs))]
            save(self._jobs_path, {name: asdict(m) for name, m in self.jobs.items()})
        return mark

    def answered(self, answer: CommandAnswered) -> None:
        self.answers[answer.key] = answer
        self._dumped[answer.key] = answer.model_dump(mode="json", exclude_defaults=True)
        while len(self.answers) > ANSWERS_MAX:
            oldest = next(iter(self.answers))
            del self.answers[oldest], self._dumped[oldest]
        save(self._answers_path, self._dumped)


def _entries(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _mark(raw: Any) -> JobMark | None:
    try:
        plan = raw.get("plan")
        return JobMark(
            newest=int(raw["newest"]),
            stopped=int(raw["stopped"]),
            epoch=int(raw["epoch"]),
            fenced=int(raw["fenced"]),
            parked_wanted=int(raw["parked_wanted"]),
            plan=Plan(
                tuple(map(str, plan["command"])),
                str(plan["directory"]),
                tuple((str(name), str(value)) for name, value in plan["environment"]),
            )
            if plan
            else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
