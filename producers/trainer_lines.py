"""What a training process's hook says, line by line: JSON objects, one a line. Pure: bytes in, a value or `BadLine` out.

    {"v":1,"type":"hello","job":…,"attempt":…,"rank":…,"world_size":…,"pid":…,"restored_step":…}
    {"v":1,"type":"progress","phase":…,"progress":…,"step":…,"restored_step":…,"dropped":…,
     "samples":[[step, ended_ns, step_time_s, loss, grad_norm, tokens, mfu], …]}

A sample may have three more: skipped (0 or 1), busy_s, changed.

The other side is a user's process: whatever it sends, this raises nothing but BadLine, and its output is bounded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, get_args

from events.envelope import NAME_MAX
from events.training import Change, Phase, StepSample, TrainingProgress

VERSION = 1
LINE_BYTES_MAX = 256 * 1024
#: Samples an event may carry; a line with more becomes several.
SAMPLES_MAX = 256
_INTEGER_MAX = 2**63 - 1
_RANKS_MAX = 10_000_000
_PHASES = frozenset(get_args(Phase))
_CHANGES = frozenset(get_args(Change))
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class BadLine(ValueError):
    """A line that is none of the hook's. The text is one sentence and holds nothing of the line's content but short names."""


@dataclass(frozen=True, slots=True)
class Hello:
    job: str
    attempt: int
    rank: int
    world_size: int
    restored_step: int


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    progress: int
    step: int
    restored_step: int
    dropped: int
    samples: tuple[StepSample, ...]

    def facts(self, rank: int, world_size: int) -> list[TrainingProgress]:
        """As facts of at most 256 samples each; what the ring dropped is told by the first."""
        parts = [self.samples[i : i + SAMPLES_MAX] for i in range(0, len(self.samples), SAMPLES_MAX)] or [()]
        return [
            TrainingProgress(
                rank=rank,
                world_size=world_size,
                phase=self.phase,
                progress=self.progress,
                step=self.step,
                restored_step=self.restored_step,
                samples=part,
                dropped=self.dropped if i == 0 else 0,
            )
            for i, part in enumerate(parts)
        ]


def parse(line: bytes) -> Hello | Progress:
    """Raises BadLine."""
    if len(line) > LINE_BYTES_MAX:
        raise BadLine(f"a line of more than {LINE_BYTES_MAX} bytes")
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadLine("not JSON") from None
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    if value.get("v") != VERSION:
        raise BadLine(f"not version {VERSION} of the hook's protocol; use the hook that came with this agent")
    match value.get("type"):
        case "hello":
            return _hello(value)
        case "progress":
            return _progress(value)
    raise BadLine("neither a hello nor a progress")


def _no_constant(text: str) -> float:
    raise ValueError(text)


def _hello(value: dict[str, Any]) -> Hello:
    job = value.get("job")
    if not isinstance(job, str) or len(job) > NAME_MAX:
        raise BadLine("a hello without a job's name")
    world_size = _integer(value, "world_size", 1, _RANKS_MAX)
    rank = _integer(value, "rank", 0, _RANKS_MAX)
    if rank >= world_size:
        raise BadLine("a rank that is not in its world")
    return Hello(job, _integer(value, "attempt", 0), rank, world_size, _integer(value, "restored_step", -1, default=-1))


def _progress(value: dict[str, Any]) -> Progress:
    phase = value.get("phase")
    if not isinstance(phase, str) or phase not in _PHASES:
        raise BadLine("a phase that there is not")
    rows = value.get("samples", [])
    if not isinstance(rows, list):
        raise BadLine("samples that are no list")
    return Progress(
        phase,  # type: ignore[arg-type]
        _integer(value, "progress", 0),
        _integer(value, "step", -1),
        _integer(value, "restored_step", -1, default=-1),
        _integer(value, "dropped", 0, default=0),
        tuple(_sample(row) for row in rows),
    )


def _sample(row: Any) -> StepSample:
    if not isinstance(row, list) or len(row) not in (7, 10):
        raise BadLine("a sample that is no list of seven or ten")
    step, ended_ns, step_time_s, loss, grad_norm, tokens, mfu = row[:7]
    more: dict[str, Any] = {}
    if len(row) == 10:
        skipped, busy_s, changed = row[7:]
        if not isinstance(changed, str) or changed not in _CHANGES:
            raise BadLine("a sample's change that there is not")
        busy_s = _number(busy_s, "a sample's own time")
        if busy_s is not None and not 0 <= busy_s < math.inf:
            raise BadLine("a sample's own time that is no duration")
        more = {"skipped": bool(_whole(skipped, "a sample's skip", 0, 1)), "busy_s": busy_s, "changed": changed}
    seconds = _number(step_time_s, "a sample's step time")
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise BadLine("a sample's step time that is no duration")
    return StepSample(
        step=_whole(step, "a sample's step", 0),
        ended_ns=_whole(ended_ns, "a sample's end", 0),
        step_time_s=seconds,
        loss=_number(loss, "a loss"),
        grad_norm=_number(grad_norm, "a gradient norm"),
        tokens=None if tokens is None else _whole(tokens, "a count of tokens", 0),
        mfu=_number(mfu, "an MFU"),
        **more,
    )


def _integer(value: dict[str, Any], key: str, least: int, most: int = _INTEGER_MAX, default: int | None = None) -> int:
    found = value.get(key, default)
    return _whole(found, key, least, most)


def _whole(value: Any, what: str, least: int, most: int = _INTEGER_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadLine(f"{what} that is no whole number from {least} to {most}")
    return value


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{what} that is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
