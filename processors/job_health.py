"""What is wrong with a job: ranks that end, progress that stops; and that it trains, or is done. A pure fold by job over
TELEMETRY_JOB (detector "job").

Only the highest attempt that was seen counts: what an earlier one still says is history. Steps, losses and phases come from the
ranks' hooks, exits and process states from the nodes' agents. Stalls are judged in stalls.py, exits are read in exits.py.

Loss and gradient norm are judged in curves.py, speed in pace.py.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

from events.clock import NS
from events.envelope import Fact
from events.incident import EvidenceMissing, JobFinished, ProgressNoted, Signal, SignalCleared
from events.network import LinkTraffic
from events.presence import Heartbeat, Tick
from events.rank_log import RankLog
from events.training import RankExit, RankStarted, TrainingProgress
from processors import blame
from processors import ranks as ranks_
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.exits import Ending, reading
from processors.ranks import ASKED, ENDED_WELL, FAILED, RANKS_MAX, RUNS, STUCK, Rank, Ranks
from processors.stalls import NO_TRAFFIC, Longest, Traffic, judged, longer, unlearned

CAUSES_MAX = 16
#: No node's links carry more bytes a second; a larger number is nonsense.
RATE_MAX = 1e15
#: A hook whose numbers fall back after so long without a word is a new process's; sooner, one word overtook another.
RESTARTED_NS = 2 * NS
#: Ranks of whose logs the last line of note is kept, and how much of it.
WORDS_MAX, WORD_BYTES = 16, 300


class JobState(NamedTuple):
    """One attempt. `larger`: a larger world size that one rank told of, and which. `moved_ns`: when any rank's progress grew last (at first:
    when the attempt began); `heard_ns`: when anything of the attempt was heard; `step`: the highest finished, at `stepped_ns`; `healthy`:
    steps finished since the last non-finite loss; `stepped`: ranks that finished one; `words`: the last of note in the logs of a few ranks,
    newest last; `stall`: the rule by which a hang is claimed; `scan_ns`: before it, no stall is possible. `longest`: by phase, of all
    attempts; `traffic`: since the last progress."""

    job: str = ""
    attempt: int = -1
    world_size: int = 0
    larger: tuple[int, int] = (0, -1)
    began_ns: int = 0
    moved_ns: int = 0
    moved_id: str = ""
    heard_ns: int = 0
    heartbeats: bool = False
    ranks: Ranks = ()
    step: int = -1
    restored_step: int = -1
    healthy: int = 0
    stepped: int = 0
    stepped_ns: int = 0
    confirmed: bool = False
    noted_ns: int = 0
    noted_step: int = -1
    ended_well: int = 0
    failed: int = 0
    asked: int = 0
    said: int = 0
    unsaid: int = 0
    unsaid_seen_ns: int = 0
    unsaid_causes: tuple[str, ...] = ()
    unsaid_evidence: str = ""
    stall: str = ""
    scan_ns: int = 0
    silence_noted: bool = False
    finished: bool = False
    words: tuple[tuple[int, str], ...] = ()
    longest: tuple[Longest, ...] = ()
    traffic: Traffic = NO_TRAFFIC
    roots: blame.Roots = blame.NONE


_EMPTY = JobState()


class JobDetector:
    """`phase_limit_s`, `hang`, `healthy_steps`, `progress_note_s`, `exits_each_max` and `silence_s` of the settings."""

    name = "job"
    reads: frozenset[type[Fact]] | None = frozenset(
        (Tick, Heartbeat, TrainingProgress, RankStarted, RankExit, RankLog, LinkTraffic)
    )

    def key_of(self, seen: Seen) -> str:
        return seen.job

    def empty(self, key: str) -> JobState:
        return JobState(job=key)

    def dump(self, state: JobState) -> Any:
        out: dict[str, Any] = {}
        for name, value, default in zip(state._fields, state, _EMPTY, strict=True):
            if value != default:
                out[name] = value
        if state.ranks:
            out["ranks"] = ranks_.dump(state.ranks)
        if state.unsaid_causes:
            out["unsaid_causes"] = list(state.unsaid_causes)
        if state.words:
            out["words"] = [list(word) for word in state.words]
        if state.longest:
            out["longest"] = [list(one) for one in state.longest]
        if "traffic" in out:
            out["traffic"] = [list(state.traffic.idle), *state.traffic[1:]]
        if "roots" in out:
            out["roots"] = blame.dump(state.roots)
        return out

    def load(self, key: str, value: Any) -> JobState:
        # An earlier version did not tell when a step was finished: not since the attempt began, or each long one would hang.
        changes = {"stepped_ns": value.get("moved_ns", 0), **value}
        if "ranks" in changes:
            changes["ranks"] = ranks_.load(changes["ranks"])
        if "larger" in changes:
            changes["larger"] = tuple(changes["larger"])
        if "unsaid_causes" in changes:
            changes["unsaid_causes"] = tuple(changes["unsaid_causes"])
        if "words" in changes:
            changes["words"] = tuple((rank, text) for rank, text in changes["words"])
        if "longest" in changes:
            changes["longest"] = tuple(Longest(*one) for one in changes["longest"])
        if "traffic" in changes:
            idle, *rest = changes["traffic"]
            changes["traffic"] = Traffic(tuple(idle), *rest)
        if "roots" in changes:
            changes["roots"] = blame.load(changes["roots"])
        return JobState(**changes)

    def detect(self, state: JobState, clock: PartitionClock, seen: Seen) -> tuple[JobState, tuple[Claim, ...]]:
        data = seen.event.data
        kind = type(data)
        if kind is Tick:
            return _tick(state, clock)
        attempt = seen.event.attempt
        if attempt < state.attempt:
            return state, ()
        claims: list[Claim] = []
        if kind is Heartbeat:
            return (_heartbeat(state, seen, data), ()) if attempt == state.attempt else (state, ())
        if kind is LinkTraffic:
            return (_traffic(state, clock, seen, data), ()) if attempt == state.attempt else (state, ())
        if kind is RankLog:
            return (_words(state, data), ()) if attempt == state.attempt else (state, ())
        if kind not in (TrainingProgress, RankStarted, RankExit):
            return state, ()
        if not data.rank < data.world_size <= RANKS_MAX:
            return state, ()
        if attempt > state.attempt:
            _unsaid(state, claims)
            state = JobState(
                job=state.job, attempt=attempt, began_ns=seen.seen_ns, moved_ns=seen.seen_ns, moved_id=seen.event.id,
                stepped_ns=seen.seen_ns, longest=state.longest,
            )  # fmt: skip
        if data.world_size > state.world_size:
            state = _larger(state, data.rank, data.world_size)
        if kind is TrainingProgress:
            state = _progress(state, clock, seen, data, claims)
        elif kind is RankStarted:
            state = _started(state, seen, data)
        else:
            state = _exit(state, clock, seen, data, claims)
        return state, tuple(claims)


def _larger(state: JobState, rank: int, world_size: int) -> JobState:
    """A larger number of ranks than was known is believed of one beyond that number, or of two: a stray process that inherited its rank may
    have any, and ranks that do not exist would be waited for."""
    size, teller = state.larger
    if not state.world_size or rank >= state.world_size or (size == world_size and teller != rank):
        return state._replace(world_size=world_size, larger=(0, -1))
    return state if size == world_size else state._replace(larger=(world_size, rank))


# --- what ranks and agents say ------------------------------------------------------------------------------------------------


def _started(state: JobState, seen: Seen, data: RankStarted) -> JobState:
    known = ranks_.get(state.ranks, data.rank)
    heard_ns = max(state.heard_ns, seen.seen_ns)
    if known is not None:
        return state if heard_ns == state.heard_ns else state._replace(heard_ns=heard_ns)
    return state._replace(heard_ns=heard_ns, ranks=ranks_.put(state.ranks, data.rank, Rank(seen.node)))


def _heartbeat(state: JobState, seen: Seen, data: Heartbeat) -> JobState:
    ranks = state.ranks
    for process in data.ranks:
        known = ranks_.get(ranks, process.rank) if process.rank < RANKS_MAX else None
        letter = process.state if process.state in STUCK else ""
        if known and known.exit == RUNS and known.state != letter and known.node == seen.node:
            ranks = ranks_.put(ranks, process.rank, known._replace(state=letter))
    return state._replace(ranks=ranks, heard_ns=max(state.heard_ns, seen.seen_ns), heartbeats=True)


def _progress(state: JobState, clock: PartitionClock, seen: Seen, data: TrainingProgress, claims: list[Claim]) -> JobState:
    event, seen_ns = seen.event, seen.seen_ns
    known = ranks_.get(state.ranks, data.rank) or Rank()
    if data.progress < known.progress and seen_ns - known.hook_ns > RESTARTED_NS:
        known = Rank(
            seen.node, state=known.state, exit=known.exit
        )  # its process was started anew within the attempt (torchrun)
    # The first word of a hook is no progress: a start-up's time counts from the attempt's beginning.
    grew = data.progress > max(known.progress, 0)
    newest = data.progress >= known.progress
    rank = Rank(
        seen.node if newest else known.node,
        max(known.progress, data.progress),
        max(known.step, data.step),
        data.phase if newest else known.phase,
        max(known.moved_ns, seen_ns) if grew or known.progress < 0 else known.moved_ns,
        max(known.hook_ns, seen_ns),
        known.state,
        known.exit,
    )
    healthy, counted = state.healthy, state.step
    for sample in data.samples:
        if sample.step > counted:
            counted = sample.step
            healthy += 1
        if sample.loss is not None and not isfinite(sample.loss) and not sample.skipped:
            healthy = 0
    if data.step > counted:  # its sample was overwritten: a step without a loss that anyone gave
        counted = data.step
        healthy += 1
    advanced = counted > state.step
    again = advanced and seen_ns > state.stepped_ns if state.stall == "no_step" else grew and seen_ns > state.moved_ns
    if state.stall and again and state.stall != "rank_behind":
        text = f"progress again after {(seen_ns - state.moved_ns) / NS:.1f} s, by rank {data.rank} on {seen.node}"
        cleared = SignalCleared(symptom="job_hang", seen_ns=seen_ns, evidence=quote(text))
        claims.append(Claim(seen.job, state.attempt, cleared, (event.id,)))
        state = state._replace(stall="")
    moved = grew and seen_ns >= state.moved_ns
    # What the broker or the agents slept through is no phase's usual time.
    if moved and not state.stall and not state.silence_noted and state.moved_ns >= clock.heard_from_ns:
        longest = longer(state.longest, known.phase, seen_ns - state.moved_ns, seen_ns - known.moved_ns)
        if longest is not state.longest:
            state = state._replace(longest=longest)
    if moved and state.traffic != NO_TRAFFIC:
        state = state._replace(traffic=NO_TRAFFIC)
    state = state._replace(
        ranks=ranks_.put(state.ranks, data.rank, rank),
        heard_ns=max(state.heard_ns, seen_ns),
        moved_ns=seen_ns if moved else state.moved_ns,
        moved_id=event.id if moved else state.moved_id,
        step=counted,
        stepped_ns=max(state.stepped_ns, seen_ns) if advanced else state.stepped_ns,
        restored_step=max(state.restored_step, data.restored_step),
        healthy=healthy,
        stepped=state.stepped + (known.step < 0 <= rank.step),
    )
    return _noted(state, clock, seen, claims) if advanced or not state.confirmed else state


def _noted(state: JobState, clock: PartitionClock, seen: Seen, claims: list[Claim]) -> JobState:
    """That the attempt is healthy, once; and every so often how far it is."""
    settings = clock.settings
    first = not state.confirmed
    if first:
        wanted = settings.healthy_steps
        if state.failed or state.asked or state.healthy < wanted:
            return state
        if state.stepped < state.world_size and state.healthy < wanted * settings.healthy_sparse_factor:
            return state
    elif state.step <= state.noted_step or seen.time_ns - state.noted_ns < int(settings.progress_note_s * NS):
        return state
    fact = ProgressNoted(step=state.step, first=first, restored_step=state.restored_step, seen_ns=seen.seen_ns)
    claims.append(Claim(seen.job, state.attempt, fact, (seen.event.id,)))
    return state._replace(confirmed=True, noted_ns=seen.time_ns, noted_step=state.step)


def _traffic(state: JobState, clock: PartitionClock, seen: Seen, data: LinkTraffic) -> JobState:
    """What a node's links carried, if nothing moved since before: while a job trains there is nothing to learn from it."""
    if seen.seen_ns - data.period_s * NS < state.moved_ns:
        return state
    idle = tuple(node for node in state.traffic.idle if node != seen.node)
    if data.bytes_per_s <= clock.settings.hang.idle_bytes_per_s:
        return state._replace(traffic=state.traffic._replace(idle=(*idle, seen.node)[:RANKS_MAX]))
    return state._replace(
        traffic=Traffic(idle, max(seen.seen_ns, state.traffic.carried_ns), min(data.bytes_per_s, RATE_MAX), seen.node)
    )


def _words(state: JobState, data: RankLog) -> JobState:
    """The newest of note that a rank printed. It opens nothing by itself: it is quoted where the rank's exit is."""
    state = state._replace(roots=blame.logged(state.roots, data)) if data.traceback else state
    launcher = next((one for one in data.launcher if one.root_cause), None)
    if launcher is not None:
        text = f"the launcher saw rank {launcher.rank} on {launcher.host} fail first, with code {launcher.code}"
    elif data.traceback:
        text = data.traceback.rstrip().rpartition("\n")[2]
    elif data.lines:
        text = data.lines[-1].text
    else:
        return state
    others = [word for word in state.words if word[0] != data.rank]
    return state._replace(words=(*others[-WORDS_MAX + 1 :], (data.rank, quote(text, WORD_BYTES))))


def _exit(state: JobState, clock: PartitionClock, seen: Seen, data: RankExit, claims: list[Claim]) -> JobState:
    known = ranks_.get(state.ranks, data.rank) or Rank(seen.node)
    if known.exit != RUNS:
        return state
    heard_ns = max(state.heard_ns, seen.seen_ns)
    if data.asked:
        ranks = ranks_.put(state.ranks, data.rank, known._replace(exit=ASKED))
        return state._replace(ranks=ranks, heard_ns=heard_ns, asked=state.asked + 1)
    # One that ended unwatched, while its peers end well, is taken to have done so too.
    well = data.code == 0 or (data.code is None and data.signal is None and state.ended_well > 0)
    if well:
        ranks = ranks_.put(state.ranks, data.rank, known._replace(exit=ENDED_WELL))
        state = state._replace(ranks=ranks, heard_ns=heard_ns, ended_well=state.ended_well + 1)
        if state.ended_well == state.world_size and not state.finished:
            fact = JobFinished(step=state.step, seen_ns=seen.seen_ns)
            claims.append(Claim(seen.job, state.attempt, fact, (seen.event.id,)))
            state = state._replace(finished=True)
        return state
    ranks = ranks_.put(state.ranks, data.rank, known._replace(exit=FAILED))
    state = state._replace(ranks=ranks, heard_ns=heard_ns, failed=state.failed + 1)
    apart_ns = int(clock.settings.host.clock_offset_s_max * NS)
    ended_ns = blame.ended_ns(data, seen.event.time, seen.seen_ns, state.began_ns, apart_ns)
    whole = blame.worth_reading(state.roots, ended_ns)
    ending = reading(data, seen.node, dict(state.words).get(data.rank, ""), whole=whole)
    if whole and not state.asked:
        state = _blamed(state, seen, data, ending, ended_ns, claims)
    if state.said >= clock.settings.exits_each_max:
        return state._replace(
            unsaid=state.unsaid + 1,
            unsaid_seen_ns=max(state.unsaid_seen_ns, seen.seen_ns),
            unsaid_causes=(*state.unsaid_causes, seen.event.id)[-CAUSES_MAX:],
            unsaid_evidence=quote(ending.evidence, 700),
        )
    signal = Signal(
        symptom="rank_exit",
        node=seen.node,
        rank=data.rank,
        # What dies while the attempt is being stopped heard its peers go.
        confidence="sympathetic" if state.asked else ending.confidence,
        rule=ending.rule,
        evidence=ending.evidence,
        seen_ns=seen.seen_ns,
        step=state.step,
    )
    claims.append(Claim(seen.job, state.attempt, signal, (seen.event.id,)))
    return state._replace(said=state.said + 1)


def _blamed(state: JobState, seen: Seen, data: RankExit, ending: Ending, ended_ns: int, claims: list[Claim]) -> JobState:
    """That the code is to blame, if it is: beside the exit, and before it."""
    roots, found = blame.blamed(state.roots, data, ending, ended_ns)
    if found is not None:
        signal = Signal(
            symptom="user_code_error",
            node=seen.node,
            rank=data.rank,
            confidence=found.confidence,
            rule="exception_by_code" if found.confidence == "high" else "exception_unclear",
            evidence=quote(found.evidence),
            seen_ns=seen.seen_ns,
            step=state.step,
        )
        claims.append(Claim(seen.job, state.attempt, signal, (seen.event.id,)))
    return state._replace(roots=roots)


# --- time passes --------------------------------------------------------------------------------------------------------------


def _unsaid(state: JobState, claims: list[Claim]) -> JobState:
    """The exits that were counted, as one."""
    if not state.unsaid:
        return state
    signal = Signal(
        symptom="rank_exit",
        confidence="sympathetic",
        rule="rank_exits_counted",
        evidence=quote(f"{state.unsaid} more ranks ended, the last: {state.unsaid_evidence}"),
        seen_ns=state.unsaid_seen_ns,
        count=state.unsaid,
        step=state.step,
    )
    claims.append(Claim(state.job, state.attempt, signal, state.unsaid_causes))
    return state._replace(unsaid=0, unsaid_seen_ns=0, unsaid_causes=(), unsaid_evidence="")


def _tick(state: JobState, clock: PartitionClock) -> tuple[JobState, tuple[Claim, ...]]:
    claims: list[Claim] = []
    if state.unsaid:
        state = _unsaid(state, claims)
    # After an exit that counts or was asked for, the exit is the signal, and what stalls does so for it.
    over = state.attempt < 0 or state.failed or state.asked or state.finished or state.ended_well >= state.world_size
    now_ns = clock.now_ns
    if (
        over
        or not clock.absence_judged
        or now_ns < state.scan_ns
        or state.stall in ("no_progress", "startup_silent", "no_step")
    ):
        return state, tuple(claims)
    settings = clock.settings
    silence_ns = int(settings.silence_s * NS)
    found = judged(
        state.ranks, state.world_size, state.step, state.moved_ns, state.began_ns, state.stepped_ns or state.began_ns, clock,
        state.longest, state.traffic,
    )  # fmt: skip
    causes = (state.moved_id,) if state.moved_id else ()
    unheard_ns = now_ns - max(state.heard_ns, clock.heard_from_ns)
    missing: EvidenceMissing | None = None
    if found.rule and state.heartbeats and unheard_ns > silence_ns:
        # Not even the agents are heard: nobody knows whether the job hangs, and the nodes' silence is told of by itself.
        found = found._replace(rule="", scan_ns=0)
        text = f"nothing of the job was heard for {unheard_ns / NS:.1f} s: whether it makes progress is not known"
        missing = EvidenceMissing(producer="job", reason="silent", detail=text)
    elif found.quiet:
        some = ", ".join(map(str, found.quiet[:16])) + (" …" if len(found.quiet) > 16 else "")
        text = f"ranks whose hooks are not heard while the job goes on: {some}"
        missing = EvidenceMissing(producer="hook", reason="silent", missing=len(found.quiet), detail=text)
    if missing and not state.silence_noted:
        claims.append(Claim(state.job, state.attempt, missing, causes))
    state = state._replace(silence_noted=missing is not None, scan_ns=found.scan_ns)
    if found.rule and not state.stall:
        signal = Signal(
            symptom="job_hang",
            node=found.node,
            rank=found.rank,
            confidence="low",
            rule=found.rule,
            evidence=found.evidence,
            seen_ns=now_ns,
            step=state.step,
        )
        claims.append(Claim(state.job, state.attempt, signal, causes))
        state = state._replace(stall=found.rule, longest=unlearned(state.longest, found.learned))
    elif state.stall == "rank_behind" and found.rule != "rank_behind":
        cleared = SignalCleared(symptom="job_hang", seen_ns=now_ns, evidence="the ranks that were behind make progress again")
        claims.append(Claim(state.job, state.attempt, cleared, causes))
        state = state._replace(stall="")
    return state, tuple(claims)
