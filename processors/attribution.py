"""User code or infrastructure: a judgement of symptoms that both cause (illegal memory access, Xid 13, 31, 43 and 45, a hang, NaN), from
what is known of the job and of its nodes together. Pure: plain values in, a judgement with its reasons out.

It begins with how often each turned out to be infrastructure (ByteRobust, Table 2), and each kind of evidence multiplies the odds by a
stated factor. The factors are a choice; that they are few and said is what lets a person disagree with them. Nothing here evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from events.clock import NS
from processors.policy import Attribution

Fault = Literal["infra", "user", "undecided"]

#: Share of each symptom that was infrastructure, in jobs of over 2,000 GPUs in a month: 21 of 62 illegal accesses, 21 of 26 hangs, 3 of 4
#: NaN (ByteRobust, Table 2). Xid 13, 31 and 43 are what the driver says of an illegal access.
PRIOR: Mapping[str, float] = {
    "illegal_access": 0.34,
    "xid-13": 0.34,
    "xid-31": 0.34,
    "xid-43": 0.34,
    "hang": 0.81,
    "nan": 0.75,
}
#: What a crash leaves behind on every machine of its job (NVSentinel: 77 nodes in 11 racks flagged after one): it counts for nothing.
ECHOES = frozenset({"xid-45"})
#: Trouble of a node that raises infrastructure where it stands beside the symptom.
BESIDE = frozenset(
    {"gpu_memory_error", "gpu_thermal", "gpu_unavailable", "gpu_driver_hang", "nvlink_error", "os_kernel_panic", "disk_fault"}
)


class Sighting(NamedTuple):
    """An ambiguous symptom, seen once. `kind`: a key of PRIOR, or of ECHOES. Empty and -1: not known."""

    kind: str
    job: str
    node: str
    seen_ns: int
    attempt: int = 0
    device: str = ""
    rack: str = ""
    step: int = -1


class Beside(NamedTuple):
    """A trouble that names a node (its symptom, by the taxonomy)."""

    symptom: str
    node: str
    seen_ns: int
    device: str = ""


class Judgement(NamedTuple):
    """`infra`: the probability that it is infrastructure. `node`: the machine that it points at, '' for none."""

    fault: Fault
    infra: float
    because: str
    node: str = ""


class _Weight(NamedTuple):
    factor: float
    words: str


def attributed(
    what: Sighting,
    history: Iterable[Sighting],
    beside: Iterable[Beside],
    rules: Attribution,
    *,
    racks: int = 0,
    code_is_new: bool = False,
) -> Judgement:
    """A judgement of `what`, the first of its kind in this trouble. `history`: what else was seen, of any job and node, in any order.
    `racks`: how many the job stands in (0: not known); `code_is_new`: its revision has not yet run long enough to be stable."""
    all_ = [what, *history]
    roots = [one for one in all_ if one.kind not in ECHOES]
    if what.kind in ECHOES:
        first = _cause_of_echo(what, roots, rules)
        if first is None:
            return Judgement("undecided", 0.5, f"{what.kind} is what an ended process leaves behind; nothing says why it ended")
        judged = attributed(first, [one for one in roots if one != first], beside, rules, racks=racks, code_is_new=code_is_new)
        return judged._replace(because=f"an echo of {first.kind} on {first.node}: {judged.because}")
    prior = PRIOR.get(what.kind)
    if prior is None:
        return Judgement("undecided", 0.5, f"{what.kind} is none of the symptoms that are judged here")
    odds = prior / (1 - prior)
    words = []
    for weight in _weights(what, _same(what, roots, rules), list(beside), rules, racks, code_is_new):
        odds *= weight.factor
        words.append(weight.words)
    infra = odds / (1 + odds)
    fault: Fault = "infra" if infra >= rules.infra_min else "user" if infra <= rules.user_max else "undecided"
    text = f"{what.kind}: infrastructure in {prior:.0%} of cases"
    if words:
        text += f", here {infra:.0%}: {'; '.join(words)}"
    return Judgement(fault, round(infra, 4), text, what.node if fault == "infra" else "")


def _cause_of_echo(what: Sighting, roots: Sequence[Sighting], rules: Attribution) -> Sighting | None:
    """The first other symptom of the same job, or on the same node, that came before it."""
    since_ns = what.seen_ns - int(rules.before_s * NS)
    before = [
        one
        for one in roots
        if since_ns <= one.seen_ns <= what.seen_ns
        and ((what.node and one.node == what.node) or (what.job and one.job == what.job))
    ]
    return min(before, key=lambda one: (one.seen_ns, one.node, one.device), default=None)


def _same(what: Sighting, roots: Sequence[Sighting], rules: Attribution) -> list[Sighting]:
    """The same trouble, seen within the time in which repeats count. Illegal accesses and their Xids are one."""
    since_ns = what.seen_ns - int(rules.repeat_window_s * NS)
    until_ns = what.seen_ns + int(rules.after_s * NS)
    family = _family(what.kind)
    return [one for one in roots if _family(one.kind) == family and since_ns <= one.seen_ns <= until_ns]


def _family(kind: str) -> str:
    return "illegal_access" if kind.startswith("xid-") else kind


def _weights(
    what: Sighting, same: Sequence[Sighting], beside: Sequence[Beside], rules: Attribution, racks: int, code_is_new: bool
) -> Iterable[_Weight]:
    strong, weak = rules.strong_factor, rules.weak_factor
    found = sorted(
        {
            one.symptom
            for one in beside
            if one.symptom in BESIDE
            and one.node == what.node
            and what.seen_ns - int(rules.before_s * NS) <= one.seen_ns <= what.seen_ns + int(rules.after_s * NS)
        }
    )
    if found:
        yield _Weight(strong, f"beside {', '.join(found)} on {what.node}")
    jobs = {one.job for one in same if what.node and one.node == what.node and one.job}
    if len(jobs) >= rules.jobs_min:
        yield _Weight(strong, f"{len(jobs)} jobs met it on {what.node}")
    yield from _spread(what, same, rules, racks)
    yield from _repeats(what, same, rules)
    if code_is_new:
        yield _Weight(1 / weak, "the code is new")


def _spread(what: Sighting, same: Sequence[Sighting], rules: Attribution, racks: int) -> Iterable[_Weight]:
    """One attempt that shows it on many nodes at once: the job, unless they have a rack in common that the job has not."""
    window_ns = int(rules.together_s * NS)
    now = [
        one
        for one in same
        if what.job
        and one.node  # what runs for no job has no code in common, and no machine is none
        and (one.job, one.attempt) == (what.job, what.attempt)
        and abs(one.seen_ns - what.seen_ns) <= window_ns
    ]
    nodes = {one.node for one in now}
    if len(nodes) < rules.nodes_min:
        return
    theirs = {one.rack for one in now}
    if racks > 1 and len(theirs) == 1 and "" not in theirs:
        yield _Weight(rules.weak_factor, f"{len(nodes)} nodes at once, all in rack {min(theirs)}")
    else:
        yield _Weight(1 / rules.strong_factor, f"{len(nodes)} nodes of job {what.job} at once")


def _repeats(what: Sighting, same: Sequence[Sighting], rules: Attribution) -> Iterable[_Weight]:
    """Other attempts of the job: it stays with a machine, or it goes with the job. What no machine showed (a hang) does neither."""
    others = [one for one in same if one.job == what.job and one.attempt != what.attempt]
    if not others:
        return
    attempts = len({one.attempt for one in others}) + 1
    if what.node and all(one.node == what.node for one in others):
        where = f"GPU {what.device} of " if what.device and all(one.device == what.device for one in others) else ""
        yield _Weight(rules.weak_factor, f"{where}{what.node} in {attempts} attempts, no other node")
    elif what.node and all(one.node not in ("", what.node) for one in others):
        yield _Weight(1 / rules.weak_factor, f"another node in each of {attempts} attempts")
    if what.step >= 0 and all(one.step == what.step for one in others) and any(one.node != what.node for one in others):
        yield _Weight(1 / rules.strong_factor, f"at step {what.step} each time")
