"""Whether an attempt makes no progress, and which rank stands out. Pure: ranks, times and limits in, a judgement out.

A phase's limit is that of the phase which most ranks are in; but where one rank evaluates or writes a checkpoint and the others
wait for it in their step, the longer limit of that phase holds (decisions/060). The limit is the stated one, or a shorter one that the
job's own times have shown to do; and it depends on what the links carry meanwhile (decisions/176).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from events.clock import NS
from processors.detector import PartitionClock, quote
from processors.policy import Detectors
from processors.ranks import RUNS, Rank, Ranks, each, get

#: All ranks are looked at no later than this after the last time, whatever the limits were then.
SCAN_S = 5.0
NAMED_MAX = 8
#: Stretches are counted up to this many.
TIMES_MAX = 1000
_WAITED_FOR = ("evaluation", "checkpoint")
PHASES: tuple[str, ...] = ("startup", "step", "evaluation", "checkpoint", "undeclared")


class Longest(NamedTuple):
    """How long a job went without progress in a phase at most, and how many stretches like it were seen."""

    most_ns: int = 0
    times: int = 0


class Traffic(NamedTuple):
    """What the links of the job's nodes carried in periods that lie wholly after its last progress. `idle`: nodes that carried nothing;
    `carried_ns`: when a node was last seen to carry something, `bytes_per_s` and `node` of it; 0: none was."""

    idle: tuple[str, ...] = ()
    carried_ns: int = 0
    bytes_per_s: float = 0.0
    node: str = ""


NO_TRAFFIC = Traffic()


def longer(longest: tuple[Longest, ...], phase: str, gap_ns: int, own_ns: int) -> tuple[Longest, ...]:
    """After a stretch without progress of any rank, ended by one that was in a phase and had made none for `own_ns`; the same value where
    nothing is learned. Of start-ups nothing is: a restore that takes a second says nothing of the compilation that follows it. A stretch
    counts if it is like the longest: ranks that leave an evaluation after the first are no more evaluations, and one that takes far
    longer than those before begins the count anew."""
    if phase not in PHASES[1:] or (phase in _WAITED_FOR and 2 * gap_ns < own_ns):
        return longest
    place = PHASES.index(phase)
    longest = longest or (Longest(),) * len(PHASES)
    known = longest[place]
    if 2 * gap_ns < known.most_ns or (gap_ns <= known.most_ns and known.times >= TIMES_MAX):
        return longest
    times = 1 if gap_ns > 2 * known.most_ns else min(known.times + 1, TIMES_MAX)
    return (*longest[:place], Longest(max(gap_ns, known.most_ns), times), *longest[place + 1 :])


def unlearned(longest: tuple[Longest, ...], phase: str) -> tuple[Longest, ...]:
    """After a stall that a learned limit found: it may have been too short, so the next one is found by the stated limit, until what is
    usual was seen again. Else an evaluation longer than any before would be ended, and never be learned of."""
    if phase not in PHASES or not longest:
        return longest
    place = PHASES.index(phase)
    return (*longest[:place], Longest(), *longest[place + 1 :])


class Stall(NamedTuple):
    """`rule`: no_progress; startup_silent (no hook was ever heard: the script may have none); no_step (phases come and go, and no step);
    rank_behind (others go on); '' for none. `rank` and `node` where exactly one stands out, -1 and ''. `quiet`: ranks not heard while the
    job goes on. `scan_ns`: a stall is not possible before. `learned`: the phase by whose learned limit it was found, or ''."""

    rule: str = ""
    rank: int = -1
    node: str = ""
    evidence: str = ""
    quiet: tuple[int, ...] = ()
    scan_ns: int = 0
    learned: str = ""


def limits_ns(settings: Detectors, longest: Sequence[Longest] = ()) -> Mapping[str, int]:
    """The limit of each phase: as stated, or less where the job's own times allow it."""
    rules = settings.hang
    stated = {phase: int(getattr(settings.phase_limit_s, phase) * NS) for phase in PHASES}
    if not rules.learn_factor:
        return stated
    least = int(rules.learned_least_s * NS)
    return stated | {
        phase: min(stated[phase], max(least, int(seen.most_ns * rules.learn_factor)))
        for phase, seen in zip(PHASES, longest, strict=False)
        if seen.times >= rules.learn_count
    }


def judged(
    ranks: Ranks, world_size: int, step: int, moved_ns: int, began_ns: int, stepped_ns: int, clock: PartitionClock,
    longest: Sequence[Longest] = (), traffic: Traffic = NO_TRAFFIC,
) -> Stall:  # fmt: skip
    """`moved_ns`, `stepped_ns`: when progress and steps grew last. Where ticks had gaps, time counts anew from the last one; but that
    at most doubles a limit, or a broker that stumbles now and then would hide every hang."""
    settings, now_ns, heard_from_ns = clock.settings, clock.now_ns, clock.heard_from_ns
    stated, limits = limits_ns(settings), limits_ns(settings, longest)
    silence_ns = int(settings.silence_s * NS)
    heard = list(each(ranks))
    live = [(number, rank) for number, rank in heard if rank.exit == RUNS]
    phase, limit_ns = _phase(live, max(0, world_size - len(heard)), limits)
    learned = phase if limit_ns < stated[phase] else ""
    factor, carried = _carried(live, phase, longest, traffic, now_ns, settings)
    usual_ns = longest[PHASES.index(phase)].most_ns if longest else 0
    # Gradients that are summed at the end of a long step leave the links idle in each: that shortens no limit below twice what is usual.
    limit_ns = max(int(limit_ns * factor), min(limit_ns, 2 * usual_ns))
    since_ns = max(moved_ns, min(heard_from_ns, moved_ns + clock.lost_ns(moved_ns) + limit_ns))
    if now_ns - since_ns > limit_ns:
        what = (
            f"no progress for {(now_ns - since_ns) / NS:.1f} s in phase {phase} (limit {limit_ns / NS:g} s), last step {step}"
        )
        never = all(rank.progress < 0 for _, rank in live)
        if never:
            what += "; no rank's hook was ever heard"
        number, node, who = _suspects(ranks, live, world_size, now_ns, silence_ns)
        rule = "startup_silent" if never else "no_progress"
        return Stall(rule, number, node, quote(f"{what}{carried}{who}"), learned=learned)
    stepless_ns = int(settings.hang.stepless_s * NS)
    if (
        step >= 0
        and now_ns - max(stepped_ns, min(heard_from_ns, stepped_ns + clock.lost_ns(stepped_ns) + stepless_ns)) > stepless_ns
    ):
        text = f"phases come and go, but no step was finished for {(now_ns - stepped_ns) / NS:.0f} s, the last was {step}"
        number, node, who = _suspects(ranks, live, world_size, now_ns, silence_ns)
        return Stall("no_step", number, node, quote(f"{text}{who}"))
    behind: list[tuple[int, Rank]] = []
    quiet: list[int] = []
    earliest_ns = since_ns
    for number, rank in live:
        if rank.step < 0 or rank.step >= step:
            continue
        rank_since_ns = max(rank.moved_ns, began_ns, heard_from_ns)
        # What is learned is of all ranks together: one may evaluate alone for long, again and again.
        if now_ns - rank_since_ns <= stated.get(rank.phase, stated["undeclared"]):
            earliest_ns = min(earliest_ns, rank_since_ns)
        # An uninterruptible sleep is a moment's sample: seen last before an agent was lost, it tells nothing of the time since.
        elif rank.state not in ("", "D") or now_ns - rank.hook_ns <= silence_ns:
            behind.append((number, rank))
        else:
            quiet.append(number)
    scan_ns = min(earliest_ns + int(min(limits.values()) * settings.hang.idle_factor), now_ns + int(SCAN_S * NS))
    if behind:
        one = behind[0] if len(behind) == 1 else None
        text = f"{_named(behind)} made no progress within the limit of their phase while the job went on to step {step}"
        return Stall("rank_behind", one[0] if one else -1, one[1].node if one else "", quote(text), tuple(quiet), scan_ns)
    return Stall(quiet=tuple(quiet), scan_ns=scan_ns)


def _carried(
    live: Sequence[tuple[int, Rank]], phase: str, longest: Sequence[Longest], traffic: Traffic, now_ns: int, settings: Detectors
) -> tuple[float, str]:
    """What the links' traffic makes of the limit, and words for it. A job whose nodes carry nothing is believed to hang sooner, in a step of
    a script that declares its other phases: one that does not may be evaluating. One that carries something may be slow."""
    rules = settings.hang
    if traffic.carried_ns and now_ns - traffic.carried_ns <= int(rules.traffic_s * NS):
        text = f"; but the links of {traffic.node[:60]} carry {traffic.bytes_per_s / 1e6:.0f} MB/s: it may be slow"
        return rules.traffic_factor, text
    nodes = {rank.node for _, rank in live}
    if not traffic.idle or not nodes.issubset(traffic.idle):
        return 1.0, ""
    declares = any(seen.times for name, seen in zip(PHASES, longest, strict=False) if name in _WAITED_FOR)
    text = f"; the links of all {len(nodes)} nodes are idle"
    return (rules.idle_factor if phase == "step" and declares else 1.0), text


def _phase(live: Sequence[tuple[int, Rank]], unheard: int, limits: Mapping[str, int]) -> tuple[str, int]:
    """The phase that the most live ranks are in (those never heard are starting, until the first finished a step: then those that tell of
    none are of a script that speaks by some ranks only; of equals the one with the longer limit), and its limit, or the longer one of a
    phase that the others wait for."""
    count = dict.fromkeys(limits, 0)
    votes = count.copy()
    stepping = any(rank.step >= 0 for _, rank in live)
    votes["startup"] = 0 if stepping else unheard
    for _, rank in live:
        name = rank.phase if rank.phase in count else "startup"
        count[name] += 1
        votes[name] += rank.step >= 0 or not stepping
    phase = max(votes, key=lambda name: (votes[name], limits[name]))
    limit = limits[phase]
    for name in _WAITED_FOR:
        if count[name] and limits[name] > limit:
            phase, limit = name, limits[name]
    return phase, limit


def _suspects(
    ranks: Ranks, live: Sequence[tuple[int, Rank]], world_size: int, now_ns: int, silence_ns: int
) -> tuple[int, str, str]:
    """Who stands out, by the strongest sign that some but not all show: rank and node where it is one, and words."""
    unheard = [(n, Rank()) for n in range(world_size) if get(ranks, n) is None] if len(live) < world_size else []
    steps = [rank.step for _, rank in live]
    ahead = max(steps, default=-1)
    phases = [rank.phase for _, rank in live]
    common = max(sorted(set(phases)), key=phases.count, default="")
    everyone = len(live) + len(unheard)
    signs = (
        ("stopped or stuck (by process state)", [(n, r) for n, r in live if r.state], everyone - 1),
        ("never heard", unheard, everyone - 1),
        ("silent", [(n, r) for n, r in live if r.progress >= 0 and now_ns - r.hook_ns > silence_ns], everyone - 1),
        # What most ranks show is no sign of the few.
        ("behind in steps", [(n, r) for n, r in live if r.step < ahead], everyone // 2),
        ("in another phase", [(n, r) for n, r in live if r.phase != common], everyone // 2),
        ("without a hook's word", [(n, r) for n, r in live if r.progress < 0], everyone // 2),
    )
    words: list[str] = []
    chosen: list[tuple[int, Rank]] = []
    for sign, some, most in signs:
        if some and len(some) <= most:
            words.append(f"{sign}: {_named(some)}")
            chosen = chosen or some
    text = "".join(f"; {word}" for word in words)
    if len(chosen) == 1:
        return chosen[0][0], chosen[0][1].node, text
    nodes = {rank.node for _, rank in chosen}
    return -1, next(iter(nodes)) if len(nodes) == 1 else "", text


def _named(some: Sequence[tuple[int, Rank]]) -> str:
    parts = []
    for number, rank in some[:NAMED_MAX]:
        place = f" on {rank.node[:60]}" if rank.node else ""
        state = f" ({rank.state})" if rank.state else ""
        parts.append(f"rank {number}{place}{state}")
    more = f" and {len(some) - NAMED_MAX} more" if len(some) > NAMED_MAX else ""
    return ", ".join(parts) + more
