"""Loss and gradient norm: values that are no numbers, and jumps that last. A part of the detector "job". Pure.

Losses differ by rank in data-parallel training, so a curve is one rank's: the lowest that gives its values (voices.py), which of the
loss may be another than of the norm: in a pipeline only the last stage has one. What is no finite number counts from any rank. A trouble
is told once: when it lasts (high confidence), or when it was over before that (low: recorded, and nothing is stopped for it). Skipped
updates are no steps here.
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
from processors.voices import Voice, told

#: How events call what a script tells.
METRIC = {"loss": "loss", "gradient norm": "grad_norm"}
#: A ratio above it says no more.
RATIO_MAX = 1e9
#: Ranks that are named as the first to have shown a value that is no number.
NAMED_MAX = 8


class Run(NamedTuple):
    """Of one curve: steps that jump in the present run of them, `calm` steps on end that do not, jumps and highest ratio of the trouble."""

    steps: int = 0
    calm: int = 0
    jumps: int = 0
    peak: float = 0.0

    def step(self, ratio: float, calm_steps: int) -> Run:
        if ratio:
            return Run(self.steps + 1, 0, self.jumps + 1, max(self.peak, ratio))
        return Run(self.steps if self.calm + 1 < calm_steps else 0, self.calm + 1, self.jumps, self.peak)


class Jump(NamedTuple):
    """Steps from `bad_step` on of which some jump. Loss and gradient norm last each by itself: a few spikes of the loss do not add up over
    a long one of the norm."""

    bad_step: int
    cause: str
    last_step: int = -1
    loss: Run = Run()
    norm: Run = Run()
    told: bool = False


class NotANumber(NamedTuple):
    """Steps from `bad_step` to `last_step`, of which `steps` were seen whose value is no finite number. `ranks`: which showed it at the
    first, as far as they were heard; `elsewhere`: another rank had a number at the first: it showed one then or later, or none only later."""

    bad_step: int
    cause: str
    last_step: int
    node: str
    ranks: tuple[int, ...]
    elsewhere: bool = False
    told: bool = False
    steps: int = 1


class Said(NamedTuple):
    """When a trouble that did not last was told, and how many since were not."""

    told_ns: int = 0
    unsaid: int = 0


class CurvesState(NamedTuple):
    """`loss`, `norm`: whose curves are followed. `losses`, `norms`: the last good values, oldest first. `grace_step`: jumps count from this
    step on, -1 until the attempt's first; `changed_step`: the last that the script told a change of. `loss_step`, `norm_step`: where the
    last trouble with values that are no numbers was over: what is told of steps before is told late. `unsaid`: jumps that did not last and
    were not told; `loss_said`, `norm_said`: the same of values that are no numbers."""

    job: str = ""
    attempt: int = -1
    loss: Voice = Voice()
    norm: Voice = Voice()
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    grace_step: int = -1
    changed_step: int = -1
    jump: Jump | None = None
    nan_loss: NotANumber | None = None
    nan_norm: NotANumber | None = None
    loss_step: int = -1
    norm_step: int = -1
    told_ns: int = 0
    unsaid: int = 0
    loss_said: Said = Said()
    norm_said: Said = Said()


_ADAPTER: TypeAdapter[CurvesState] = TypeAdapter(CurvesState)


class CurvesHealth:
    """`curves` and `voice_silence_s` of the settings."""

    name = "curves"
    reads: frozenset[type[Fact]] | None = frozenset((TrainingProgress, RankStarted, RankExit))

    def key_of(self, seen: Seen) -> str:
        return seen.job

    def empty(self, key: str) -> CurvesState:
        return CurvesState(key)

    def dump(self, state: CurvesState) -> Any:
        return dict(zip(state._fields, _ADAPTER.dump_python(state, mode="json"), strict=True))

    def load(self, key: str, value: Any) -> CurvesState:
        """What an earlier version stored without names is learned anew."""
        return _ADAPTER.validate_python(value) if isinstance(value, dict) else CurvesState(key)

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
                state.job, attempt, losses=state.losses, norms=state.norms, told_ns=state.told_ns, unsaid=state.unsaid,
                loss_said=state.loss_said, norm_said=state.norm_said,
            )  # fmt: skip
        if kind is TrainingProgress:
            for sample in data.samples:
                state = _sample(state, seen, clock.settings, sample, data.rank, claims)
        elif kind is RankExit and not data.asked and (data.code or data.signal):
            state = _exit(state, seen, claims)
        return state, tuple(claims)


def _sample(
    state: CurvesState, seen: Seen, settings: policy.Detectors, sample: StepSample, rank: int, claims: list[Claim]
) -> CurvesState:
    rules, loss, norm = settings.curves, sample.loss, sample.grad_norm
    if sample.changed:  # also with a step that was skipped, or whose values nobody logs
        state = _changed(state, seen, rules, sample, claims)
    if sample.skipped or (loss is None and norm is None):
        return state
    if loss is not None and (state.nan_loss or (not isfinite(loss) and sample.step >= state.loss_step)):
        state, after = _number(state, state.nan_loss, seen, rules, sample.step, rank, isfinite(loss), "loss", claims)
        state = state._replace(nan_loss=after, loss_step=state.loss_step if after else sample.step)
    if norm is not None and (state.nan_norm or (not isfinite(norm) and sample.step >= state.norm_step)):
        state, after = _number(state, state.nan_norm, seen, rules, sample.step, rank, isfinite(norm), "gradient norm", claims)
        state = state._replace(nan_norm=after, norm_step=state.norm_step if after else sample.step)
    silence_ns = int(settings.voice_silence_s * NS)
    begins = False
    if loss is not None:
        voice, follows = told(state.loss, rank, sample.step, seen.seen_ns, silence_ns)
        begins, loss = follows and state.loss.rank < 0, loss if follows else None
        state = state if voice == state.loss else state._replace(loss=voice)
    if norm is not None:
        voice, follows = told(state.norm, rank, sample.step, seen.seen_ns, silence_ns)
        begins, norm = begins or (follows and state.norm.rank < 0), norm if follows else None
        state = state if voice == state.norm else state._replace(norm=voice)
    if begins:
        state = _begun(state, rules, sample.step)
    return state if loss is None and norm is None else _value(state, seen, rules, sample.step, loss, norm, claims)


def _changed(state: CurvesState, seen: Seen, rules: policy.Curves, sample: StepSample, claims: list[Claim]) -> CurvesState:
    """What the script says it changed with a step, whichever rank says so: nothing of before counts, and jumps have grace."""
    if sample.step <= max(state.changed_step, max(state.loss.step, state.norm.step) - rules.grace_steps):
        return state  # told by another rank, or long ago
    state = _over(state, seen, rules, claims, f"the script changed its {sample.changed}")
    return state._replace(losses=(), norms=(), changed_step=sample.step, grace_step=sample.step + rules.grace_steps)


def _begun(state: CurvesState, rules: policy.Curves, step: int) -> CurvesState:
    """A curve begins with this step, of a start or a restore: grace."""
    if step < rules.warmup_steps:
        state = state._replace(losses=(), norms=())
    return state._replace(grace_step=max(state.grace_step, step + rules.grace_steps))


# --- jumps --------------------------------------------------------------------------------------------------------------------


def _value(
    state: CurvesState, seen: Seen, rules: policy.Curves, step: int, loss: float | None, norm: float | None, claims: list[Claim]
) -> CurvesState:
    judged = step >= rules.warmup_steps and step >= state.grace_step
    losses, loss_ratio = _held(state.losses, loss, rules, judged)
    norms, norm_ratio = _held(state.norms, norm, rules, judged)
    state = state._replace(losses=losses, norms=norms)
    jump = state.jump
    if jump is None and not (loss_ratio or norm_ratio):
        return state
    jump = jump or Jump(step, seen.event.id)
    if loss_ratio or norm_ratio:
        jump = jump._replace(bad_step=min(jump.bad_step, step), last_step=max(jump.last_step, step))
    if loss is not None:
        jump = jump._replace(loss=jump.loss.step(loss_ratio, rules.calm_steps))
    if norm is not None:
        jump = jump._replace(norm=jump.norm.step(norm_ratio, rules.calm_steps))
    if not (jump.loss.steps or jump.norm.steps):
        return _jump_over(state, seen, rules, jump, claims, f"{rules.calm_steps} steps without")
    if not jump.told and (jump.loss.steps >= rules.loss_steps or jump.norm.steps >= rules.grad_norm_steps):
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
                return values, min(value / middle, RATIO_MAX)
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
        f"{name} up to {run.peak:.1f} times the rolling median in {run.jumps} steps"
        for name, run in (("loss", jump.loss), ("gradient norm", jump.norm))
        if run.jumps
    ]
    return f"from step {jump.bad_step} to {jump.last_step}: " + ", ".join(parts)


# --- no numbers ---------------------------------------------------------------------------------------------------------------


def _number(
    state: CurvesState, bad: NotANumber | None, seen: Seen, rules: policy.Curves, step: int, rank: int, finite: bool, what: str,
    claims: list[Claim],
) -> tuple[CurvesState, NotANumber | None]:  # fmt: skip
    """One value of one rank: no number, or a finite one, which ends a trouble if the rank is one that showed it. Of others it does so
    only after some steps: one rank's loss may be none, step after step, beside those that have one."""
    if finite:
        if bad is None:
            return state, None
        if step <= bad.last_step or (rank not in bad.ranks and step <= bad.last_step + rules.calm_steps):
            seen_elsewhere = rank not in bad.ranks and step >= bad.bad_step
            return state, bad._replace(elsewhere=True) if seen_elsewhere and not bad.elsewhere else bad
        if bad.told:
            claims.append(_cleared(seen, "nan_value", f"the {what} is a number again at step {step}", METRIC[what]))
            return state, None
        return _passed(state, seen, rules, bad, what, f"at step {step} it is one again", claims), None
    if bad is None:
        bad = NotANumber(step, seen.event.id, step, seen.node, (rank,))
    elif step > bad.bad_step:
        bad = bad._replace(
            last_step=max(bad.last_step, step), elsewhere=bad.elsewhere or rank not in bad.ranks, steps=bad.steps + (step > bad.last_step)
        )  # fmt: skip
    elif step < bad.bad_step and not bad.told:  # heard later, and earlier in steps
        elsewhere = bad.elsewhere or rank not in bad.ranks
        bad = NotANumber(step, seen.event.id, bad.last_step, seen.node, (rank,), elsewhere, steps=bad.steps + 1)
    elif step == bad.bad_step and rank not in bad.ranks and len(bad.ranks) < NAMED_MAX:
        bad = bad._replace(ranks=(*bad.ranks, rank))
    if not bad.told and bad.steps >= (rules.nan_steps if what == "loss" else rules.nan_grad_norm_steps):
        claims.append(_nan(seen, bad, "high", "not_a_number", f"{_not_a_number(bad, what)}, and it lasts", what))
        bad = bad._replace(told=True)
    return state, bad


def _passed(
    state: CurvesState, seen: Seen, rules: policy.Curves, bad: NotANumber, what: str, then: str, claims: list[Claim]
) -> CurvesState:
    """A trouble with no numbers that did not last: told, but not more often than once in a while."""
    said = state.loss_said if what == "loss" else state.norm_said
    if said.told_ns and seen.time_ns - said.told_ns < int(rules.told_every_s * NS):
        after = said._replace(unsaid=said.unsaid + 1)
    else:
        after = Said(seen.time_ns)
        more = f"; and {said.unsaid} times more since it was last told" if said.unsaid else ""
        claim = _nan(seen, bad, "low", "not_a_number_once", f"{_not_a_number(bad, what)}; {then}{more}", what)
        claims.append(Claim(state.job, state.attempt, claim.fact, claim.causes))
    return state._replace(loss_said=after) if what == "loss" else state._replace(norm_said=after)


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
            state = _passed(state, seen, rules, bad, what, f"then {why}", claims)
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
