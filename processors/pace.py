"""How fast a job goes: against its own recent past, and each rank's own work against its peers'. A part of the detector "job". Pure.

In synchronous training every rank takes as long as the slowest, so the step time says that something is slow and never who. What names
a node is the time that its ranks spent in their own compute before they waited (`busy_s`), where scripts tell it; and, beside a decline,
that its GPUs alone run below their peers' clocks (clocks.py).

Speed is judged in blocks of steps, of which one long one (a checkpoint that the others wait for, an evaluation that is not declared)
does not move the median. The hook leaves out what it spent in other phases.
"""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from events.clock import NS
from events.envelope import Fact
from events.gpu import GpuClocks
from events.incident import Confidence, Signal, SignalCleared
from events.presence import Tick
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from processors import clocks as clocks_
from processors import policy
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.ranks import CHUNK, RANKS_MAX, ByRank, each, get, put
from processors.voices import Voice, told

#: No step, and no rank's own work, takes longer or less (s); no step has more tokens. What is beyond is nonsense, and says nothing.
LONGEST_S, SHORTEST_S, TOKENS_MAX = 1e7, 1e-7, 1 << 50
#: What a speed may be in, the best first.
KINDS = ("MFU", "tokens a second and rank", "steps a second")
SUSPECTS_MAX = 16


class Own(NamedTuple):
    """A rank's own work in a step, in seconds, in the last few messages: one hiccup moves nothing. `usual_s`: what it usually takes (a rank
    of the last stage of a pipeline does more than others); 0 before it was held against the others."""

    node: str
    recent_s: tuple[float, ...]
    seen_ns: int
    usual_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return sorted(self.recent_s)[len(self.recent_s) // 2]


class Suspect(NamedTuple):
    """A node that is slower than its peers, beside how they usually compare, for `rounds` on end."""

    node: str
    rank: int
    ratio: float
    rounds: int


class PaceState(NamedTuple):
    """`voice`: whose steps are followed; `kind`: what its speed is in, which `lacks` steps on end did not tell; `changed_step`: the last
    that the script told a change of. `block`: speeds of the present block; `past`: medians of the good ones, oldest first; `slow`: blocks on end that were slow, of `slow_step` on. `told`: the rule by
    which a decline is claimed, `told_node` the node that it named; `told_slow`: the node that was told of as slower than its peers.
    `best`: the most that was ever usual, and `told_ramp` that it is far from that. `rounds`: of the attempt, in which ranks were held against each other, last at `round_ns`; `looked_ns`: when that was tried last."""

    job: str = ""
    attempt: int = -1
    world_size: int = 0
    voice: Voice = Voice()
    changed_step: int = -1
    kind: str = ""
    lacks: int = 0
    grace_step: int = -1
    block: tuple[float, ...] = ()
    block_s: float = 0.0
    past: tuple[float, ...] = ()
    slow: int = 0
    slow_step: int = -1
    share: float = 0.0
    own: ByRank[Own] = ()
    rounds: int = 0
    round_ns: int = 0
    looked_ns: int = 0
    suspects: tuple[Suspect, ...] = ()
    told: bool = False
    told_node: str = ""
    told_slow: str = ""
    cause: str = ""
    best: float = 0.0
    told_ramp: bool = False
    clocks: clocks_.Clocks = ()


_EMPTY = PaceState()


class PaceHealth:
    """`pace` of the settings."""

    name = "pace"
    reads: frozenset[type[Fact]] | None = frozenset((TrainingProgress, RankStarted, RankExit, GpuClocks, Tick))

    def key_of(self, seen: Seen) -> str:
        return seen.job

    def empty(self, key: str) -> PaceState:
        return PaceState(key)

    def dump(self, state: PaceState) -> Any:
        out: dict[str, Any] = {
            name: value for name, value, none in zip(state._fields, state, _EMPTY, strict=True) if value != none
        }
        if state.own:
            nodes: dict[str, int] = {}
            rows = [(n, nodes.setdefault(o[0], len(nodes)), *o[1:]) for n, o in each(state.own)]
            out["own"] = {"nodes": list(nodes), "rows": rows}
        if state.clocks:
            out["clocks"] = clocks_.dump(state.clocks)
        if state.suspects:
            out["suspects"] = [list(one) for one in state.suspects]
        return out

    def load(self, key: str, value: Any) -> PaceState:
        changes = dict(value)
        if "step" in changes:  # an earlier version's, which did not tell when the rank was heard last
            changes["voice"] = (changes.pop("voice"), changes.pop("step"), changes.get("looked_ns", 0))
        if "own" in changes:
            nodes, own = changes["own"]["nodes"], changes["own"]["rows"]
            chunks: list[list[Own | None]] = []
            for number, node, recent, *rest in own:
                while len(chunks) <= number // CHUNK:
                    chunks.append([None] * CHUNK)
                chunks[number // CHUNK][number % CHUNK] = Own(nodes[node], tuple(recent), *rest)
            changes["own"] = tuple(tuple(chunk) for chunk in chunks)
        if "voice" in changes:
            changes["voice"] = Voice(*changes["voice"])
        for name in ("block", "past"):
            if name in changes:
                changes[name] = tuple(changes[name])
        if "clocks" in changes:
            changes["clocks"] = clocks_.load(changes["clocks"])
        if "suspects" in changes:
            changes["suspects"] = tuple(Suspect(*one) for one in changes["suspects"])
        return PaceState(**changes)

    def detect(self, state: PaceState, clock: PartitionClock, seen: Seen) -> tuple[PaceState, tuple[Claim, ...]]:
        data = seen.event.data
        kind = type(data)
        if kind is TrainingProgress and not data.samples and seen.event.attempt == state.attempt:
            return state, ()
        rules = clock.settings.pace
        claims: list[Claim] = []
        if kind is Tick:
            if not state.own or clock.now_ns - state.looked_ns < int(rules.round_s * NS):
                return state, ()
            return _round(state, clock.now_ns, rules, claims), tuple(claims)
        attempt = seen.event.attempt
        if kind is GpuClocks:
            if attempt != state.attempt:
                return state, ()
            return state._replace(clocks=clocks_.heard(state.clocks, seen.node, seen.seen_ns, data)), ()
        if attempt < state.attempt or not data.rank < data.world_size <= RANKS_MAX:
            return state, ()
        if attempt > state.attempt:
            state = _begun(state, attempt, data.world_size)
        if kind is TrainingProgress and data.samples:
            state = _progress(state, seen, clock.settings, data, claims)
        return state, tuple(claims)


def _begun(state: PaceState, attempt: int, world_size: int) -> PaceState:
    """Another attempt: ranks may be elsewhere. With as many of them, how fast it was still says how fast it should be."""
    if world_size != state.world_size:
        return PaceState(state.job, attempt, world_size)
    return PaceState(
        state.job, attempt, world_size, kind=state.kind, past=state.past, best=state.best, told_ramp=state.told_ramp
    )


def _progress(
    state: PaceState, seen: Seen, settings: policy.Detectors, data: TrainingProgress, claims: list[Claim]
) -> PaceState:
    rank, rules = data.rank, settings.pace
    busy = [sample.busy_s for sample in data.samples if sample.busy_s is not None and sample.busy_s < LONGEST_S]
    known = get(state.own, rank)
    if busy and not (known and seen.seen_ns < known.seen_ns):  # what waited says nothing of now
        mean_s = sum(busy) / len(busy)
        if known is None or known.node != seen.node:
            own = Own(seen.node, (round(mean_s, 6),), seen.seen_ns)
        else:
            recent_s = (*known.recent_s, round(mean_s, 6))[-rules.recent_messages :]
            own = Own(seen.node, recent_s, seen.seen_ns, known.usual_s)
        state = state._replace(own=put(state.own, rank, own))
    silence_ns = int(settings.voice_silence_s * NS)
    for sample in data.samples:
        if sample.changed and sample.step > max(state.changed_step, state.voice.step - rules.grace_steps):
            state = state._replace(changed_step=sample.step, kind="")  # whichever rank tells of it
        before = state.voice
        voice, follows = told(before, rank, sample.step, seen.seen_ns, silence_ns)
        if voice != before:
            state = state._replace(voice=voice)
        if follows:
            state = _step(state, seen, rules, sample, before.rank < 0, claims)
    return state


# --- against its own past -----------------------------------------------------------------------------------------------------


def _step(state: PaceState, seen: Seen, rules: policy.Pace, sample: StepSample, first: bool, claims: list[Claim]) -> PaceState:
    speeds = _speeds(sample)
    best = next(iter(speeds), "")
    better = best and (not state.kind or KINDS.index(best) < KINDS.index(state.kind))
    lacks = 0 if state.kind in speeds else state.lacks + 1
    kind = best if better or lacks > rules.lacks_steps else state.kind
    state = state._replace(lacks=min(lacks, rules.lacks_steps + 1))
    if first or kind != state.kind:
        # What was learned holds on from one attempt to the next, but not for another kind of speed, nor after a change.
        anew = kind != state.kind
        if anew and state.told:
            _clear(claims, state, seen.seen_ns, seen.event.id, "how fast it goes is learned anew")
        state = state._replace(
            kind=kind, grace_step=sample.step + rules.grace_steps, block=(), block_s=0.0, past=() if anew else state.past, slow=0,
            told=state.told and not anew, best=0.0 if anew else state.best, told_ramp=state.told_ramp and not anew,
        )  # fmt: skip
    if kind not in speeds or sample.step < state.grace_step:
        return state
    state = state._replace(block=(*state.block, speeds[kind]), block_s=state.block_s + sample.step_time_s)
    if len(state.block) < rules.block_steps or state.block_s < rules.block_s:
        return state._replace(block=state.block[-1024:])
    return _block(state, seen, rules, median(state.block), claims)


def _speeds(sample: StepSample) -> dict[str, float]:
    """By what the speed of a step can be told, the best measure first: of MFU and tokens a second, longer inputs change nothing."""
    if not SHORTEST_S <= sample.step_time_s <= LONGEST_S:
        return {}
    speeds: dict[str, float] = {}
    if sample.mfu is not None and isfinite(sample.mfu) and sample.mfu > 0:
        speeds["MFU"] = sample.mfu
    if sample.tokens and sample.tokens <= TOKENS_MAX:
        speeds["tokens a second and rank"] = sample.tokens / sample.step_time_s
    speeds["steps a second"] = 1 / sample.step_time_s
    return speeds


def _block(state: PaceState, seen: Seen, rules: policy.Pace, speed: float, claims: list[Claim]) -> PaceState:
    state = state._replace(block=(), block_s=0.0)
    if len(state.past) < rules.learn_blocks:
        return state._replace(past=(*state.past, speed))
    usual = median(state.past)
    if speed >= usual * (1 - rules.decline_min):
        if state.told:
            _clear(claims, state, seen.seen_ns, seen.event.id, f"{speed:.4g} {state.kind} again, usually {usual:.4g}")
        past = (*state.past, speed)[-rules.past_blocks :]
        state = state._replace(past=past, slow=0, told=False, told_node="")
        return _ramp(state, seen, rules, usual, claims) if len(past) == rules.past_blocks else state
    first = state.slow == 0
    state = state._replace(
        slow=state.slow + 1, share=1 - speed / usual, slow_step=state.voice.step if first else state.slow_step,
        cause=seen.event.id if first else state.cause,
    )  # fmt: skip
    if state.slow >= rules.past_blocks:  # so long that it is how fast it goes now
        if state.told:
            _clear(claims, state, seen.seen_ns, seen.event.id, f"{speed:.4g} {state.kind} is what it does now")
        return state._replace(past=(speed,), slow=0, told=False, told_node="")
    return _decline(state, seen.seen_ns, seen.event.id, rules, claims)


def _ramp(state: PaceState, seen: Seen, rules: policy.Pace, usual: float, claims: list[Claim]) -> PaceState:
    """What is usual may sink so slowly that no block is slow beside the last ones: it is held against the best that was usual. Recorded, since
    it has been so for long, and a person may know why."""
    best = max(state.best, usual)
    low = usual < best * (1 - rules.ramp_min)
    if low and not state.told_ramp:
        text = f"{1 - usual / best:.0%} less {state.kind} than at its best ({usual:.4g}, at best {best:.4g}), little by little"
        _signal(claims, state, "", -1, "low", "pace_ramp", text, seen.seen_ns, seen.event.id, len(state.past))
    return state._replace(best=best, told_ramp=low or (state.told_ramp and usual < best * (1 - rules.ramp_min / 2)))


def _decline(state: PaceState, seen_ns: int, trigger: str, rules: policy.Pace, claims: list[Claim]) -> PaceState:
    """A decline that lasts: told once, and once more when a node can be named for it."""
    if state.slow < rules.decline_blocks:
        return state
    sole = state.suspects[0] if len(state.suspects) == 1 and state.suspects[0].rounds >= rules.decline_rounds else None
    low, clocks = clocks_.slower(state.clocks, seen_ns, rules)
    node, rank = (sole.node, sole.rank) if sole else (low[0].node, -1) if len(low) == 1 and not state.suspects else ("", -1)
    if state.told and (not node or state.told_node):
        return state
    usual = median(state.past)
    text = (
        f"{state.share:.0%} less {state.kind} than usual ({usual * (1 - state.share):.4g}, usually {usual:.4g}), "
        f"in {state.slow} blocks on end since about step {state.slow_step}"
    )
    if sole is not None:
        text += f"; {_who(sole)}"
    elif state.suspects:
        some = ", ".join(one.node[:60] for one in state.suspects[:8])
        text += f"; {len(state.suspects)} nodes are slower than their peers: {some}"
    elif state.own:
        text += "; no node's own work stands out beside its peers'"
    text += f"; {clocks}" if clocks else ""
    _signal(claims, state, node, rank, "high", "pace_decline", text, seen_ns, trigger, state.slow)
    return state._replace(told=True, told_node=node)


# --- against its peers --------------------------------------------------------------------------------------------------------


def _round(state: PaceState, now_ns: int, rules: policy.Pace, claims: list[Claim]) -> PaceState:
    """Each rank's own work, by what it usually takes, held against the median of all that told of theirs since the last round."""
    state = state._replace(looked_ns=now_ns)
    fresh = [(number, own) for number, own in each(state.own) if own.seen_ns > state.round_ns and own.busy_s > 0]
    if len({own.node for _, own in fresh}) < rules.peers_min or 2 * len(fresh) < state.world_size:
        return state
    learning = state.rounds < rules.learn_rounds
    ratios = [own.busy_s if learning or not own.usual_s else own.busy_s / own.usual_s for _, own in fresh]
    middle = median(ratios)
    before = {one.node: one.rounds for one in state.suspects}
    worst: dict[str, Suspect] = {}
    chunks = [list(chunk) for chunk in state.own]
    for (number, own), ratio in zip(fresh, ratios, strict=True):
        if ratio >= (1 + rules.slow_min) * middle:
            known = worst.get(own.node)
            if known is None or ratio / middle > known.ratio:
                worst[own.node] = Suspect(own.node, number, round(ratio / middle, 4), before.get(own.node, 0) + 1)
            if own.usual_s and not learning:
                continue
        part = 1 / (state.rounds + 1) if learning else rules.follow_share if own.usual_s else 1.0
        usual_s = own.usual_s + part * (own.busy_s - own.usual_s)
        chunks[number // CHUNK][number % CHUNK] = own._replace(usual_s=round(usual_s, 6))
    suspects = tuple(sorted(worst.values(), key=lambda one: (-one.ratio, one.rank))[:SUSPECTS_MAX])
    state = state._replace(
        own=tuple(tuple(chunk) for chunk in chunks), rounds=state.rounds + 1, round_ns=now_ns, suspects=suspects
    )
    return _slow_node(_decline(state, now_ns, "", rules, claims) if state.slow else state, now_ns, rules, learning, claims)


def _slow_node(state: PaceState, now_ns: int, rules: policy.Pace, learning: bool, claims: list[Claim]) -> PaceState:
    """One node that is slower than its peers, whatever the job's speed says: recorded, since nothing is lost by it yet."""
    sole = state.suspects[0] if len(state.suspects) == 1 else None
    if state.told_slow and not learning and state.told_slow not in {one.node for one in state.suspects}:
        if state.told:
            return state._replace(told_slow="")
        _clear(claims, state, now_ns, "", "it takes no longer than it usually does, beside its peers", state.told_slow)
        return state._replace(told_slow="")
    if sole is None or state.told_slow or state.told_node:
        return state
    from_start = learning and state.rounds == rules.learn_rounds and sole.rounds == rules.learn_rounds
    if not from_start and (learning or sole.rounds < rules.slow_rounds):
        return state
    since = "since the attempt began" if from_start else f"in {sole.rounds} rounds on end"
    _signal(claims, state, sole.node, sole.rank, "low", "slow_node", f"{_who(sole)}, {since}", now_ns, "", sole.rounds)
    return state._replace(told_slow=sole.node)


def _who(one: Suspect) -> str:
    return f"rank {one.rank} on {one.node[:60]} takes {one.ratio:.2f} times its peers' time for its own work"


# --- claims -------------------------------------------------------------------------------------------------------------------


def _signal(
    claims: list[Claim], state: PaceState, node: str, rank: int, confidence: Confidence, rule: str, text: str, seen_ns: int,
    trigger: str, count: int,
) -> None:  # fmt: skip
    signal = Signal(
        symptom="mfu_decline", node=node, rank=rank, confidence=confidence, rule=rule,
        evidence=quote(text), seen_ns=seen_ns, step=state.voice.step, count=count,
    )  # fmt: skip
    causes = tuple(dict.fromkeys(cause for cause in (state.cause, trigger) if cause))
    claims.append(Claim(state.job, state.attempt, signal, causes))


def _clear(claims: list[Claim], state: PaceState, seen_ns: int, trigger: str, text: str, node: str = "") -> None:
    fact = SignalCleared(symptom="mfu_decline", node=node, seen_ns=seen_ns, evidence=quote(text))
    claims.append(Claim(state.job, state.attempt, fact, (trigger,) if trigger else ()))
