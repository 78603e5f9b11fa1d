"""A job's wall time, each nanosecond in exactly one bin, and its effective training time ratio. A pure fold over the job's
observations; serialisable at any point.

Productive is the first completion of a step; finishing it again after a restart is recomputed; an evaluation or checkpoint that
the script declares is overhead; the rest is lost, by cause. (ByteRobust defines ETTR as productive over wall time of the job's
run, cumulative and over a sliding hour, and leaves recomputed steps open; here, as in RSC, they are not productive.)

Time is broker time (`Seen.seen_ns`) alone, so a node's clock can be hours off. What a rank says its steps took only splits the
time between two reports, and never beyond it. The job finishes a step when the first rank reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from math import isfinite
from typing import Any, Literal

from events.clock import NS
from events.envelope import Fact
from events.job import JobDeclared, RestartRequested, StopRequested
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from processors.detector import Seen

#: startup: until the first attempt's first step. restart: the same of a later one. stall: an attempt ran and no step was
#: finished. down: between an exit and the next attempt. planned: down or restarting because someone asked. ending: ranks leave
#: at the end. unsettled: now, since the last report (only of a run that goes on).
Cause = Literal["startup", "restart", "stall", "down", "planned", "ending", "unsettled"]
CAUSES: tuple[Cause, ...] = ("startup", "restart", "stall", "down", "planned", "ending", "unsettled")

WINDOW_S = 3600
#: Reports come up to a second late and uneven: so much time may wait for the step that it belongs to, or be owed to one.
SLACK_NS = 2 * NS
#: A step this much longer than typical ones held a stall: all but a typical step's time of it is lost, not productive.
OUTLIER_FACTOR, OUTLIER_NS = 5, NS
_STEP_TIME_MAX_NS = 30 * 86_400 * NS
_BUCKET_NS = 10 * NS
_BUCKETS_MAX = WINDOW_S * NS // _BUCKET_NS + 2
_TYPICAL_AFTER = 3
_RANKS_MAX = 262_144


@dataclass(frozen=True, slots=True)
class Lost:
    """Nanoseconds by cause."""

    startup: int = 0
    restart: int = 0
    stall: int = 0
    down: int = 0
    planned: int = 0
    ending: int = 0
    unsettled: int = 0

    def plus(self, cause: Cause, ns: int) -> Lost:
        return replace(self, **{cause: getattr(self, cause) + ns}) if ns else self

    def total(self) -> int:
        return sum(getattr(self, cause) for cause in CAUSES)


@dataclass(frozen=True, slots=True)
class WallTime:
    """`cursor_ns`: up to where time is binned or waits in `open_ns` (for the step that is under way) or `phase_ns` (for the end
    of a declared phase). `stage`: '' (not begun), starting, stepping, down, ending or ended. `step`: the highest finished in this
    attempt, `step_high` in any. `owed_ns`: step time that a report claimed before it had passed."""

    stage: Literal["", "starting", "stepping", "down", "ending", "ended"] = ""
    start_ns: int = 0
    cursor_ns: int = 0
    attempt: int = -1
    first_attempt: int = -1
    planned_since: int = -1
    step: int = -1
    step_high: int = -1
    stride: int = 0
    steps: int = 0
    typical_ns: int = 0
    lead: int = -1
    phase: str = ""
    world_size: int = 0
    ended: int = 0
    open_ns: int = 0
    phase_ns: int = 0
    owed_ns: int = 0
    productive_ns: int = 0
    recomputed_ns: int = 0
    overhead_ns: int = 0
    lost: Lost = field(default_factory=Lost)
    steps_recomputed: int = 0
    #: Productive time by ten seconds, of the last hour: (index, ns).
    recent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time went. `productive + recomputed + overhead + lost.total() == total`, exactly."""

    total_ns: int
    productive_ns: int
    recomputed_ns: int
    overhead_ns: int
    lost: Lost

    @property
    def ettr(self) -> float:
        return self.productive_ns / self.total_ns if self.total_ns else 0.0


def observe(wall: WallTime, seen: Seen) -> WallTime:
    """One observation of the job. Of an ended attempt only the steps that it finished are taken."""
    data, attempt = seen.event.data, seen.event.attempt
    if attempt < wall.attempt:
        if isinstance(data, TrainingProgress) and data.step > wall.step_high:
            return replace(wall, step_high=data.step)
        return wall
    if attempt > wall.attempt:
        if not isinstance(data, (TrainingProgress, RankStarted, RankExit)):
            return wall
        wall = _begun(wall, attempt, seen.seen_ns)
    if wall.stage == "ended":
        return wall
    wall = _advanced(wall, seen.seen_ns)
    if isinstance(data, (TrainingProgress, RankStarted, RankExit)) and wall.world_size < data.world_size <= _RANKS_MAX:
        wall = replace(wall, world_size=data.world_size)
    if isinstance(data, TrainingProgress):
        return _progress(wall, data)
    if isinstance(data, RankExit) and data.rank < _RANKS_MAX:
        return _exited(wall, data)
    return wall


def told(wall: WallTime, time_ns: int, fact: Fact) -> WallTime:
    """What the ledger says of the job, at its broker time: its declaration begins the run, a planned stop or restart names the
    cause of the time until the next attempt's first step. Other facts change nothing."""
    if isinstance(fact, JobDeclared):
        return wall if wall.stage else replace(wall, stage="starting", start_ns=time_ns, cursor_ns=time_ns)
    asked = isinstance(fact, StopRequested) or (isinstance(fact, RestartRequested) and not fact.at_next_restart)
    if asked and wall.stage not in ("", "ended"):
        return replace(_advanced(wall, time_ns), planned_since=wall.attempt)
    return wall


def split(wall: WallTime, now_ns: int = 0) -> Split:
    """Where the time went, up to `now_ns` (of a run that goes on) or what was last seen."""
    wall = _advanced(wall, now_ns)
    lost = wall.lost.plus("unsettled", wall.open_ns + wall.phase_ns)
    total_ns = wall.cursor_ns - wall.start_ns
    return Split(total_ns, wall.productive_ns, wall.recomputed_ns, wall.overhead_ns, lost)


def sliding_ettr(wall: WallTime, now_ns: int = 0, window_s: int = WINDOW_S) -> float:
    """The ratio over the last hour (or the run so far), to ten seconds."""
    now_ns = max(now_ns, wall.cursor_ns) if wall.stage != "ended" else wall.cursor_ns
    from_ns = max(wall.start_ns, now_ns - window_s * NS)
    productive_ns = 0
    for index, ns in wall.recent:
        begin_ns = index * _BUCKET_NS
        if begin_ns >= from_ns:
            productive_ns += ns
        elif begin_ns + _BUCKET_NS > from_ns:
            productive_ns += min(ns, begin_ns + _BUCKET_NS - from_ns)
    total_ns = now_ns - from_ns
    return min(1.0, productive_ns / total_ns) if total_ns > 0 else 0.0


def steps_lost(step_before: int, step_restored: int) -> int:
    """Steps to be done again: finished before trouble (up to `step_before`), not in what was restored (-1: nothing was)."""
    return max(0, step_before - max(-1, step_restored)) if step_before >= 0 else 0


def dump(wall: WallTime) -> dict[str, Any]:
    """Plain JSON values."""
    return {**asdict(wall), "ended": f"{wall.ended:x}", "recent": [list(pair) for pair in wall.recent]}


def load(value: Mapping[str, Any]) -> WallTime:
    known = {f.name for f in fields(WallTime)}
    rest = {name: item for name, item in value.items() if name in known and name not in ("ended", "lost", "recent")}
    return WallTime(
        **rest,
        ended=int(value["ended"], 16),
        lost=Lost(**value["lost"]),
        recent=tuple((int(i), int(ns)) for i, ns in value["recent"]),
    )


# --- the fold -----------------------------------------------------------------------------------------------------------------


def _advanced(wall: WallTime, time_ns: int) -> WallTime:
    """Time passes: it waits for what it turns out to be, or is lost at once where nothing runs."""
    passed_ns = time_ns - wall.cursor_ns
    if passed_ns <= 0 or wall.stage in ("", "ended"):
        return wall
    if wall.stage in ("down", "ending"):
        cause: Cause = "ending" if wall.stage == "ending" else ("planned" if wall.planned_since >= 0 else "down")
        return replace(wall, cursor_ns=time_ns, lost=wall.lost.plus(cause, passed_ns))
    if wall.stage == "stepping" and wall.phase in ("evaluation", "checkpoint"):
        return replace(wall, cursor_ns=time_ns, phase_ns=wall.phase_ns + passed_ns)
    return replace(wall, cursor_ns=time_ns, open_ns=wall.open_ns + passed_ns)


def _begun(wall: WallTime, attempt: int, time_ns: int) -> WallTime:
    """A new attempt: what waited for the old one's next step is lost."""
    if not wall.stage:
        wall = replace(wall, start_ns=time_ns, cursor_ns=time_ns)
    elif wall.attempt >= 0:
        down = replace(wall, stage="down") if wall.stage == "ended" else wall
        wall = _forfeited(_advanced(down, time_ns))
    return replace(
        wall,
        stage="starting",
        attempt=attempt,
        first_attempt=attempt if wall.first_attempt < 0 else wall.first_attempt,
        step=-1,
        stride=0,
        steps=0,
        typical_ns=0,
        lead=-1,
        phase="",
        ended=0,
        world_size=0,
        owed_ns=0,
    )


def _forfeited(wall: WallTime) -> WallTime:
    lost = wall.lost.plus(_cause(wall), wall.open_ns + wall.phase_ns)
    return replace(wall, lost=lost, open_ns=0, phase_ns=0, owed_ns=0)


def _cause(wall: WallTime) -> Cause:
    """Of time that no step took while an attempt ran."""
    if wall.stage == "ending":
        return "ending"
    if wall.planned_since >= 0:
        return "planned"
    if wall.step >= 0:
        return "stall"
    return "startup" if wall.attempt == wall.first_attempt else "restart"


def _exited(wall: WallTime, data: RankExit) -> WallTime:
    if data.code == 0 and not data.asked:
        ended = wall.ended | 1 << data.rank
        if wall.stage in ("starting", "stepping"):
            wall = replace(wall, stage="ending")
        wall = replace(wall, ended=ended, overhead_ns=wall.overhead_ns + wall.phase_ns, phase_ns=0)
        if ended.bit_count() >= wall.world_size and wall.stage == "ending":
            return replace(_forfeited(wall), stage="ended")
        return wall
    if wall.stage in ("starting", "stepping", "ending"):
        return replace(wall, stage="down")
    return wall


def _progress(wall: WallTime, data: TrainingProgress) -> WallTime:
    if wall.lead < 0 or data.rank < wall.lead:
        wall = replace(wall, lead=data.rank)
    if data.rank == wall.lead and data.phase != wall.phase:
        # A declared phase that came to its end was overhead; one in which the attempt died was a stall.
        wall = replace(wall, phase=data.phase, overhead_ns=wall.overhead_ns + wall.phase_ns, phase_ns=0)
    new = sorted((s for s in data.samples if s.step > wall.step), key=lambda s: s.step)
    top = max([data.step, *(s.step for s in new[-1:])])
    return _finished(wall, new, top) if top > wall.step else wall


def _finished(wall: WallTime, new: list[StepSample], top: int) -> WallTime:
    """Steps beyond the attempt's last one are finished: the time that waited is theirs, as far as they took it."""
    before, high = wall.step, wall.step_high
    stride = _stride(wall, new)
    again_ns = ahead_ns = again = 0
    typical_ns, steps = wall.typical_ns, wall.steps
    for sample in new:
        took_ns = _took(sample)
        limit_ns = OUTLIER_FACTOR * typical_ns + OUTLIER_NS if steps >= _TYPICAL_AFTER else _STEP_TIME_MAX_NS
        learnt_ns = min(took_ns, limit_ns)  # so that steps which stay longer become typical
        took_ns = took_ns if took_ns <= limit_ns else typical_ns
        if steps:  # an attempt's first step warms up; it says nothing of the others
            typical_ns = learnt_ns if steps == 1 else typical_ns + (learnt_ns - typical_ns) // 8
        steps += 1
        if sample.step <= high:
            again, again_ns = again + 1, again_ns + took_ns
        else:
            ahead_ns += took_ns
    # Steps whose samples did not come: as long as those that did.
    mean_ns = (again_ns + ahead_ns) // len(new) if new else typical_ns
    unseen = max(0, (top - before) // stride - len(new)) if before >= 0 and stride else 0
    unseen_again = min(unseen, max(0, (min(top, high) - before) // stride - again)) if unseen else 0
    again_ns += mean_ns * unseen_again
    ahead_ns += mean_ns * (unseen - unseen_again)
    if again_ns + ahead_ns == 0:  # nobody said how long: all that waited
        again_ns, ahead_ns = (wall.open_ns, 0) if top <= high else (0, wall.open_ns)
    wanted_ns = again_ns + ahead_ns + wall.owed_ns
    used_ns = min(wall.open_ns, wanted_ns)
    recomputed_ns = used_ns * again_ns // (again_ns + ahead_ns) if again_ns else 0
    left_ns = wall.open_ns - used_ns
    kept_ns = min(left_ns, SLACK_NS) if before >= 0 else 0
    running = wall.stage in ("starting", "stepping")
    return replace(
        wall,
        stage="stepping" if running else wall.stage,
        planned_since=-1 if wall.planned_since < wall.attempt else wall.planned_since,
        step=top,
        step_high=max(high, top),
        stride=stride,
        steps=steps,
        typical_ns=typical_ns,
        open_ns=kept_ns,
        owed_ns=min(wanted_ns - used_ns, SLACK_NS) if before >= 0 else 0,
        productive_ns=wall.productive_ns + used_ns - recomputed_ns,
        recomputed_ns=wall.recomputed_ns + recomputed_ns,
        steps_recomputed=wall.steps_recomputed + again + unseen_again,
        lost=wall.lost.plus(_cause(wall), left_ns - kept_ns),
        recent=_placed(wall.recent, wall.cursor_ns, used_ns - recomputed_ns),
    )


def _stride(wall: WallTime, new: list[StepSample]) -> int:
    """How far apart the steps are that the script reports (some report every tenth)."""
    marks = [*([wall.step] if wall.step >= 0 else []), *(s.step for s in new)]
    gaps = [later - earlier for earlier, later in pairwise(marks) if later > earlier]
    return min([*gaps, *([wall.stride] if wall.stride else [])], default=0)


def _took(sample: StepSample) -> int:
    seconds = sample.step_time_s
    return min(int(seconds * NS), _STEP_TIME_MAX_NS) if isfinite(seconds) and seconds > 0 else 0


def _placed(recent: tuple[tuple[int, int], ...], end_ns: int, ns: int) -> tuple[tuple[int, int], ...]:
    """`ns` of productive time that ended at `end_ns`, laid into its tens of seconds from the end backwards."""
    if ns <= 0:
        return recent
    added: list[tuple[int, int]] = []
    index, room = end_ns // _BUCKET_NS, end_ns % _BUCKET_NS
    while ns > 0 and len(added) < _BUCKETS_MAX:
        part = min(ns, room)
        if part:
            added.append((index, part))
        ns -= part
        index, room = index - 1, _BUCKET_NS
    if recent and added and recent[-1][0] == added[0][0] and len(added) == 1:
        return (*recent[:-1], (added[0][0], recent[-1][1] + added[0][1]))
    merged: dict[int, int] = dict(recent)
    for index, part in added:
        merged[index] = min(_BUCKET_NS, merged.get(index, 0) + part)
    oldest = end_ns // _BUCKET_NS - _BUCKETS_MAX
    return tuple((index, merged[index]) for index in sorted(merged) if index > oldest)
