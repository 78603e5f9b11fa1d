"""Loss and gradient norm: values that are no numbers, and jumps that last. A part of the detector "job". Pure.

Losses differ by rank in data-parallel training, so the curve is one rank's: the lowest that gives values. What is no finite number
counts from any rank. A trouble is told once: when it lasts (high confidence), or when it was over before that (low: recorded, and
nothing is stopped for it). Skipped updates are no steps here.
"""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from events.clock import NS
from events.envelope import Fact
from events.incident import Confidence, Signal, SignalCleared, Symptom
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from processors import policy
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.ranks import RANKS_MAX

#: How events call what a script tells.
METRIC = {"loss": "loss", "gradient norm": "grad_norm"}
#: Ranks that are named as the first to have shown a value that is no number.
NAMED_MAX = 8


class Jump(NamedTuple):
    """Steps from `bad_step` on of which some jump. `loss`, `norm`: how many did, and the highest ratios to the median; `calm`: steps on
    end that did not."""

    bad_step: int
    cause: str
    last_step: int = -1
    loss: int = 0
    norm: int = 0
    loss_peak: float = 0.0
    norm_peak: float = 0.0
    calm: int = 0
    told: bool = False


class NotANumber(NamedTuple):
    """Steps from `bad_step` to `last_step` whose value is no finite number. `ranks`: which showed it at the first, as far as they were
    heard; `elsewhere`: another rank showed it at a later one, so it had a number at the first."""

    bad_step: int
    cause: str
    last_step: int
    node: str
    ranks: tuple[int, ...]
    elsewhere: bool = False
    told: bool = False


class CurvesState(NamedTuple):
    """`voice`: the rank whose curve is followed, `step` its last step here. `losses`, `norms`: the last good values, oldest first.
    `grace_step`: jumps count from this step on, -1 until the attempt's first. `loss_step`, `norm_step`: where the last trouble
    with values that are no numbers was over: what is told of steps before is told late. `unsaid`: troubles that did not last and were not told."""

    job: str = ""
    attempt: int = -1
    voice: int = -1
    step: int = -1
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    grace_step: int = -1
    jump: Jump | None = None
    nan_loss: NotANumber | None = None
    nan_norm: NotANumber | None = None
    loss_step: int = -1
    norm_step: int = -1
    told_ns: int = 0
    unsaid: int = 0


_ADAPTER: TypeAdapter[CurvesState] = TypeAdapter(CurvesState)


class CurvesHealth:
    """`curves` of the settings."""

    name = "curves"
    reads: frozenset[type[Fact]] | None = frozenset((TrainingProgress, RankStarted, RankExit))

    def key_of(self, seen: Seen) -> str:
        return seen.job

    def empty(self, key: str) -> CurvesState:
        return CurvesState(key)

    def dump(self, state: CurvesState) -> Any:
        return _ADAPTER.dump_python(state, mode="json")

    def load(self, key: str, value: Any) -> CurvesState:
        return _ADAPTER.validate_python(value)

    def detect(self, state: CurvesState, clock: PartitionClock, seen: Seen) -> tuple[CurvesState, tuple[Claim, ...]]:
        data = seen.event.data
        attempt = seen.event.attempt
        kind = type(data)
        if kind is TrainingProgress and not data.samples and attempt == state.attempt:
            return state, ()
        if attempt < state.attempt or not data.rank < data.world_size <= RANKS_MAX:
            return state, ()
        rules = clock.settings.curves
        claims: list[Claim] = []
        if attempt > state.attempt:
            state = _over(state, seen, rules, claims, "the attempt ended")
            state = CurvesState(
                state.job, attempt, -1, -1, state.losses, state.norms, told_ns=state.told_ns, unsaid=state.unsaid
            )
        if kind is TrainingProgress:
            for sample in data.samples:
                state = _sample(state, seen, rules, sample, data.rank, claims)
        elif kind is RankExit and not data.asked and (data.code or data.signal):
            state = _exit(state, seen, claims)
        return state, tuple(claims)


def _sample(
    state: CurvesState, seen: Seen, rules: policy.Curves, sample: StepSample, rank: int, claims: list[Claim]
) -> CurvesState:
    loss, norm = sample.loss, sample.grad_norm
    if sample.skipped or (loss is None and norm is None):
        return state
    if loss is not None and (state.nan_loss or (not isfinite(loss) and sample.step >= state.loss_step)):
        after = _number(state.nan_loss, seen, sample.step, rank, isfinite(loss), "loss", rules.nan_steps, claims)
        state = state._replace(nan_loss=after, loss_step=state.loss_step if after else sample.step)
    if norm is not None and (state.nan_norm or (not isfinite(norm) and sample.step >= state.norm_step)):
        steps = rules.nan_grad_norm_steps
        after = _number(state.nan_norm, seen, sample.step, rank, isfinite(norm), "gradient norm", steps, claims)
        state = state._replace(nan_norm=after, norm_step=state.norm_step if after else sample.step)
    if 0 <= state.voice < rank:
        return state
    if sample.step <= state.step:
        return state if state.voice == rank else state._replace(voice=rank)
    if state.voice < 0 or sample.changed:
        state = _anew(state, seen, rules, sample, claims)
    state = state._replace(voice=rank, step=sample.step)
    return _value(state, seen, rules, sample.step, loss, norm, claims)


def _anew(state: CurvesState, seen: Seen, rules: policy.Curves, sample: StepSample, claims: list[Claim]) -> CurvesState:
    """The curve begins, or begins anew, with this step: grace, and after a change nothing of before counts."""
    if sample.changed:
        state = _over(state, seen, rules, claims, f"the script changed its {sample.changed}")
        state = state._replace(losses=(), norms=())
    elif sample.step < rules.warmup_steps:
        state = state._replace(losses=(), norms=())
    return state._replace(grace_step=sample.step + rules.grace_steps)


# --- jumps --------------------------------------------------------------------------------------------------------------------


def _value(
    state: CurvesState, seen: Seen, rules: policy.Curves, step: int, loss: float | None, norm: float | None, claims: list[Claim]
) -> CurvesState:
    judged = step >= rules.warmup_steps and step >= state.grace_step
    losses, loss_ratio = _held(state.losses, loss, rules, judged)
    norms, norm_ratio = _held(state.norms, norm, rules, judged)
    state = state._replace(losses=losses, norms=norms)
    jump = state.jump
    if not (loss_ratio or norm_ratio):
        if jump is None:
            return state
        jump = jump._replace(calm=jump.calm + 1)
        if jump.calm < rules.calm_steps:
            return state._replace(jump=jump)
        return _jump_over(state, seen, rules, jump, claims, f"{jump.calm} steps without")
    jump = jump or Jump(step, seen.event.id)
    jump = jump._replace(
        last_step=step, loss=jump.loss + bool(loss_ratio), norm=jump.norm + bool(norm_ratio), calm=0,
        loss_peak=max(jump.loss_peak, loss_ratio), norm_peak=max(jump.norm_peak, norm_ratio),
    )  # fmt: skip
    if not jump.told and (jump.loss >= rules.loss_steps or jump.norm >= rules.grad_norm_steps):
        text = f"{_words(jump)}, and it lasts"
        _claim(claims, state, seen, "loss_spike", "high", "curve_jump", text, jump.bad_step, step, jump.cause)
        jump = jump._replace(told=True)
    return state._replace(jump=jump)


def _held(
    values: tuple[float, ...], value: float | None, rules: policy.Curves, judged: bool
) -> tuple[tuple[float, ...], float]:
    """A value held against the window: the window after it, and its ratio to the median if that is a jump, else 0."""
    if value is None or not isfinite(value):
        return values, 0.0
    if judged and len(values) >= rules.learn_steps:
        middle = median(values)
        # A curve that crosses zero (of a reward, or a norm that is not given) has no ratio to its median.
        if middle > 0 and value > rules.jump_ratio * middle:
            spread = median([abs(one - middle) for one in values])
            if value - middle > rules.spread_factor * spread:
                return values, value / middle
    return (*values, value)[-rules.window_steps :], 0.0


def _jump_over(state: CurvesState, seen: Seen, rules: policy.Curves, jump: Jump, claims: list[Claim], why: str) -> CurvesState:
    state = state._replace(jump=None)
    if jump.told:
        return _clear(claims, state, seen, "loss_spike", f"the jump since step {jump.bad_step} is over: {why}")
    if state.told_ns and seen.time_ns - state.told_ns < int(rules.told_every_s * NS):
        return state._replace(unsaid=state.unsaid + 1)
    text = f"{_words(jump)}; it did not last: {why}"
    _claim(
        claims,
        state,
        seen,
        "loss_spike",
        "low",
        "curve_spike",
        text,
        jump.bad_step,
        jump.last_step,
        jump.cause,
        state.unsaid + 1,
    )
    return state._replace(told_ns=seen.time_ns, unsaid=0)


def _words(jump: Jump) -> str:
    parts = [
        f"{name} up to {peak:.1f} times the rolling median in {count} steps"
        for name, count, peak in (("loss", jump.loss, jump.loss_peak), ("gradient norm", jump.norm, jump.norm_peak))
        if count
    ]
    return f"from step {jump.bad_step} to {jump.last_step}: " + ", ".join(parts)


# --- no numbers ---------------------------------------------------------------------------------------------------------------


def _number(
    bad: NotANumber | None, seen: Seen, step: int, rank: int, finite: bool, what: str, lasts: int, claims: list[Claim]
) -> NotANumber | None:
    """One value of one rank: no number, or the finite one that ends a trouble."""
    if finite:
        if bad is None or step <= bad.last_step:
            return bad
        if bad.told:
            said = f"the {what} is a number again at step {step}"
            claims.append(_cleared(seen, "nan_value", said, METRIC[what]))
        else:
            text = f"{_not_a_number(bad, what)}; at step {step} it is one again"
            claims.append(_nan(seen, bad, "low", "not_a_number_once", text, what))
        return None
    if bad is None:
        bad = NotANumber(step, seen.event.id, step, seen.node, (rank,))
    elif step > bad.bad_step:
        bad = bad._replace(last_step=max(bad.last_step, step), elsewhere=bad.elsewhere or rank not in bad.ranks)
    elif step < bad.bad_step and not bad.told:  # heard later, and earlier in steps
        bad = NotANumber(step, seen.event.id, bad.last_step, seen.node, (rank,), bad.elsewhere or rank not in bad.ranks)
    elif step == bad.bad_step and rank not in bad.ranks and len(bad.ranks) < NAMED_MAX:
        bad = bad._replace(ranks=(*bad.ranks, rank))
    if not bad.told and bad.last_step - bad.bad_step + 1 >= lasts:
        claims.append(_nan(seen, bad, "high", "not_a_number", f"{_not_a_number(bad, what)}, and it lasts", what))
        bad = bad._replace(told=True)
    return bad


def _not_a_number(bad: NotANumber, what: str) -> str:
    some = ", ".join(map(str, bad.ranks)) + (" and others" if len(bad.ranks) >= NAMED_MAX else "")
    place = f" on {bad.node[:60]}" if len(bad.ranks) == 1 else ""
    lasted = f" to {bad.last_step}" if bad.last_step > bad.bad_step else ""
    return f"no finite {what} from step {bad.bad_step}{lasted}, first of rank {some}{place}"


def _nan(seen: Seen, bad: NotANumber, confidence: Confidence, rule: str, text: str, what: str) -> Claim:
    """The node is named only where the others are known to have had a number at the first bad step."""
    alone = len(bad.ranks) == 1
    signal = Signal(
        symptom="nan_value", node=bad.node if alone and bad.elsewhere else "", rank=bad.ranks[0] if alone else -1,
        confidence=confidence, rule=rule, evidence=quote(text), seen_ns=seen.seen_ns, step=bad.last_step, bad_step=bad.bad_step,
        count=bad.last_step - bad.bad_step + 1, metric=METRIC[what],
    )  # fmt: skip
    return Claim(seen.job, seen.event.attempt, signal, tuple(dict.fromkeys((bad.cause, seen.event.id))))


# --- endings ------------------------------------------------------------------------------------------------------------------


def _exit(state: CurvesState, seen: Seen, claims: list[Claim]) -> CurvesState:
    """Scripts that look at their loss end themselves at the first one that is no number."""
    bad = state.nan_loss
    if bad is None or bad.told:
        return state
    text = f"{_not_a_number(bad, 'loss')}, and a rank failed after it"
    claims.append(_nan(seen, bad, "high", "not_a_number_exit", text, "loss"))
    return state._replace(nan_loss=bad._replace(told=True))


def _over(state: CurvesState, seen: Seen, rules: policy.Curves, claims: list[Claim], why: str) -> CurvesState:
    """What is not told yet will not last any more."""
    if state.jump is not None:
        state = _jump_over(state, seen, rules, state.jump, claims, why)
    for bad, what in ((state.nan_loss, "loss"), (state.nan_norm, "gradient norm")):
        if bad is not None and not bad.told:
            claim = _nan(seen, bad, "low", "not_a_number_once", f"{_not_a_number(bad, what)}; then {why}", what)
            claims.append(Claim(state.job, state.attempt, claim.fact, claim.causes))
        elif bad is not None:
            _clear(claims, state, seen, "nan_value", why, METRIC[what])
    return state._replace(nan_loss=None, nan_norm=None)


def _claim(
    claims: list[Claim], state: CurvesState, seen: Seen, symptom: Symptom, confidence: Confidence, rule: str, text: str,
    bad_step: int, step: int, cause: str, count: int = 1,
) -> None:  # fmt: skip
    signal = Signal(
        symptom=symptom, rank=-1, confidence=confidence, rule=rule, evidence=quote(text), seen_ns=seen.seen_ns, step=step,
        bad_step=bad_step, count=count,
    )  # fmt: skip
    claims.append(Claim(state.job, state.attempt, signal, tuple(dict.fromkeys((cause, seen.event.id)))))


def _clear(claims: list[Claim], state: CurvesState, seen: Seen, symptom: Symptom, text: str, metric: str = "") -> CurvesState:
    claim = _cleared(seen, symptom, text, metric)
    claims.append(Claim(state.job, state.attempt, claim.fact, claim.causes))
    return state


def _cleared(seen: Seen, symptom: Symptom, text: str, metric: str = "") -> Claim:
    fact = SignalCleared(symptom=symptom, metric=metric, seen_ns=seen.seen_ns, evidence=quote(text))
    return Claim(seen.job, seen.event.attempt, fact, (seen.event.id,))
