"""Which code revision proved stable, and where a rollback may go (ByteRobust sections 3 and 7.1). Pure."""

from __future__ import annotations

from typing import NamedTuple

from events.decision import RevisionStable
from events.envelope import Fact
from processors.decisions import Base
from processors.state import Fleet, Job


class Target(NamedTuple):
    """A revision to go back to, and the step below which the checkpoint must be: the first that the newer code computed, so that what is
    restored was written by the revision that reads it, or by one before it."""

    revision: str
    restore_below_step: int


def proven(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """The present revision ran the policy's number of healthy steps, for the first time."""
    first = job.revisions.get(job.revision, -1)
    if not job.revision or job.revision == job.stable or first < 0 or job.incident is not None or job.confirmed != job.attempt:
        return []
    if job.last_step - first < fleet.policy.decider.stable_steps:
        return []
    return [RevisionStable(job=job.name, revision=job.revision, step=job.last_step, attempt=job.attempt, **base)]


def target(job: Job) -> Target | str:
    """Where a rollback goes, or why there is none, in words that go on a sentence."""
    if not job.revision:
        return "the job's code has no revision that is known"
    if not job.stable:
        return "no revision has proved stable yet"
    order = list(job.revisions)
    if order.index(job.revision) <= order.index(job.stable):
        return f"revision {job.revision[:12]} is not newer than the last stable one"
    newer = [job.revisions[revision] for revision in order[order.index(job.stable) + 1 :] if job.revisions[revision] >= 0]
    return Target(job.stable, min(newer) + 1 if newer else -1)
