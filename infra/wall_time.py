"""Each job's wall time from its two streams, merged by broker time, for the census and the demo."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from events.clock import NS
from events.envelope import AnyEvent
from events.job import JobDeclared, RestartRequested, StopRequested
from events.ports import LEDGER, Record
from events.registry import Malformed, parse
from events.subjects import BadName
from processors.detector import Seen, read
from processors.ettr import CAUSES, Split, WallTime, observe, split, told

#: Heartbeats and answers say nothing of steps; only these are folded.
_TELLING = ("training_progress", "rank_started", "rank_exit")
_TOLD = (JobDeclared, RestartRequested, StopRequested)


def fold(walls: dict[str, WallTime], record: Record) -> None:
    """One record of LEDGER or of TELEMETRY_JOB, into the jobs' wall times. What is not readable changes nothing."""
    if record.stream == LEDGER:
        event = _operators(record)
        if event is not None:
            walls[event.job] = told(walls.get(event.job, WallTime()), record.time_ns, event.data)
        return
    seen = _training(record)
    if seen is not None:
        walls[seen.job] = observe(walls.get(seen.job, WallTime()), seen)


def _operators(record: Record) -> AnyEvent | None:
    if ".operator." not in record.subject:
        return None
    try:
        event = parse(record.data)
    except Malformed:
        return None
    return event if event.job and isinstance(event.data, _TOLD) else None


def _training(record: Record) -> Seen | None:
    if record.subject.rpartition(".")[2] not in _TELLING:
        return None
    try:
        seen = read(record)
    except (Malformed, BadName):
        return None
    return seen if seen.job else None


def wall_times(ledger: Iterable[Record], telemetry_job: Iterable[Record]) -> dict[str, Split]:
    """Job -> where its time went, up to what was last seen of it."""
    walls: dict[str, WallTime] = {}
    for record in heapq.merge(ledger, telemetry_job, key=lambda r: r.time_ns):
        fold(walls, record)
    return {job: split(wall) for job, wall in walls.items()}


def bins(split_: Split) -> dict[str, float]:
    """Seconds by bin; the lost ones by cause. They sum to the whole, exactly in nanoseconds."""
    named = {"productive": split_.productive_ns, "recomputed": split_.recomputed_ns, "overhead": split_.overhead_ns}
    named |= {f"lost: {cause}": getattr(split_.lost, cause) for cause in CAUSES}
    return {name: ns / NS for name, ns in named.items() if ns}


def wall_bins(ledger: Iterable[Record], telemetry_job: Iterable[Record]) -> Iterator[tuple[str, str, float]]:
    """Rows of the census's table: job, bin, seconds."""
    for job, where in wall_times(ledger, telemetry_job).items():
        for name, seconds in bins(where).items():
            yield job, name, seconds
