"""Group testing: which machine makes the job fail, when nothing else names one. Pure.

The job is replayed twice, shortened, in groups of machines; all groups of a phase run at once, each as a world of its own with TP and PP
kept and DP cut. First machines that stand together (horizontal), then machines a stride apart (vertical): the machine that both failing
groups share is the one. Source: ByteRobust (SOSP 2025), dual-phase replay, Algorithm 1 and Figure 6.

    m = k pipelines of machines make a group, n groups a phase:   horizontal  x // m        vertical  x mod n
    two groups of different phases share at most ceil(m / n) machines: one where m <= n.

All groups have the same size, since only replays of one shape can be compared bit for bit. What is left over (z mod m machines) sits out, in
each phase another part of it, so that every machine is replayed at least once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import lcm
from typing import Literal, NamedTuple

from events.finding import REPLAY_PHASES as PHASES
from events.finding import ReplayPhase as Phase
from events.finding import ReplayResult
from events.job import RankOrder


class Groups(NamedTuple):
    """The machines of each group, by phase; a group's number is its place."""

    horizontal: tuple[tuple[str, ...], ...]
    vertical: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`machines` in the order of their ranks. `m` machines a group, `n` groups a phase. `together`: machines that hold one TP group (1:
    it fits into a machine) and are never parted, so that no answer is finer. `suspects_max`: machines that two failing groups can share."""

    machines: tuple[str, ...]
    tp: int
    pp: int
    dp: int
    ranks_per_node: int
    k: int
    m: int
    n: int
    together: int
    suspects_max: int
    groups: Groups
    notes: tuple[str, ...] = ()

    @property
    def ranks_a_group(self) -> int:
        return self.m * self.ranks_per_node

    @property
    def dp_a_group(self) -> int:
        """Copies of the model that train together in one replay."""
        return self.ranks_a_group // (self.tp * self.pp)

    def left_out(self, phase: Phase) -> tuple[str, ...]:
        used = {machine for group in getattr(self.groups, phase) for machine in group}
        return tuple(machine for machine in self.machines if machine not in used)


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why there is none: one sentence."""

    because: str


def plan(
    machines: int | Sequence[str],
    *,
    pp: int,
    dp: int,
    tp: int = 1,
    ranks_per_node: int | None = None,
    k: int | None = None,
    rank_order: RankOrder = "tp-pp-dp",
) -> Plan | NoPlan:
    """Groups for machines in the order of their ranks (see processors.parallel_groups); a number stands for machines "0", "1", ...
    `ranks_per_node`: by default TP fills a machine. `k`: pipelines (or sets of pipelines that end at a machine's edge) to a group. A group's
    machines are in the order that the job has them in, so that the ranks of its own world are laid out alike."""
    names = tuple(map(str, range(machines))) if isinstance(machines, int) else tuple(machines)
    per_node = tp if ranks_per_node is None else ranks_per_node
    if min(pp, dp, tp, per_node) < 1 or (k is not None and k < 1):
        return NoPlan("TP, PP, DP, ranks a machine and k count from 1")
    if len(set(names)) != len(names):
        return NoPlan(f"a machine is named twice: {Counter(names).most_common(1)[0][0]}")
    together = lcm(tp, per_node) // per_node
    pipeline = lcm(tp * pp, per_node) // per_node // together
    blocks = [names[at : at + together] for at in range(0, len(names) - together + 1, together)]
    count = len(blocks)
    if rank_order == "tp-dp-pp" and pp > 1 and count % pp == 0 and count * together * per_node == tp * pp * dp:
        # A stage fills machines, and the next one begins after all of its copies: number them pipeline by pipeline.
        pipeline = pp
        blocks = [blocks[stage * (count // pp) + copy] for copy in range(count // pp) for stage in range(pp)]
    if count < 2 * pipeline:
        return NoPlan(
            f"TP {tp} and PP {pp} at {per_node} ranks a machine take {_machines(pipeline * together)}: "
            f"{_machines(len(names))} make no two groups to compare"
        )
    chosen = _k(count, pipeline, pipeline * together * per_node // (tp * pp)) if k is None else k
    m = chosen * pipeline
    n = count // m
    if n < 2:
        most = count // (2 * pipeline)
        return NoPlan(
            f"k {chosen} makes groups of {_machines(m * together)}, and of {len(names)} no two of them; k goes to {most} here"
        )
    place = {name: at for at, name in enumerate(names)}
    horizontal, vertical = (
        tuple(tuple(sorted(group, key=place.__getitem__)) for group in phase) for phase in _partitions(blocks, m, n)
    )
    return Plan(
        machines=names, tp=tp, pp=pp, dp=dp, ranks_per_node=per_node, k=chosen, m=m * together, n=n, together=together,
        suspects_max=-(-m // n) * together, groups=Groups(horizontal, vertical), notes=_notes(names, tp, pp, dp, per_node, m, n, together),
    )  # fmt: skip


def _k(count: int, pipeline: int, copies: int) -> int:
    """The best k. In this order: one suspect (m <= n), three groups for a majority, two copies of the model on two machines or more so
    that gradients are synchronised between machines as in the job, few machines left over, small groups (they leave more pairs empty, which shows noise)."""
    best, found = (True, True, count), 1
    k = 1
    while (m := k * pipeline) <= (n := count // m):
        rank = (n < 3, k * copies < 2 or m < 2, count - m * n)
        if rank < best:
            best, found = rank, k
        k += 1
    return found


def _partitions(blocks: list[tuple[str, ...]], m: int, n: int) -> Groups:
    rest = len(blocks) - m * n
    # Those that sit out of the vertical phase are of different horizontal groups, as far as there are so many.
    out = {(i % n) * m + i // n for i in range(rest)}
    strided = [block for x, block in enumerate(blocks) if x not in out]
    return Groups(
        tuple(tuple(name for block in blocks[a * m : (a + 1) * m] for name in block) for a in range(n)),
        tuple(tuple(name for block in strided[b::n] for name in block) for b in range(n)),
    )


def _notes(names: tuple[str, ...], tp: int, pp: int, dp: int, per_node: int, m: int, n: int, together: int) -> tuple[str, ...]:
    notes = []
    if len(names) * per_node != tp * pp * dp:
        notes.append(
            f"{_machines(len(names))} of {per_node} ranks are not TP {tp} x PP {pp} x DP {dp} = {tp * pp * dp}: planned for the machines"
        )
    if together > 1:
        notes.append(f"a TP group spans {together} machines, which stay together: no answer is finer than that")
    if m > n:
        notes.append(f"groups of {m} meet in {n} others: two failing groups may share up to {-(-m // n) * together} machines")
    if n < 3:
        notes.append(
            "two groups a phase have no majority: a wrong result that is no NaN is told only if the four replays take one side"
        )
    if rest := (len(names) // together) - m * n:
        notes.append(f"{_machines(rest * together)} of {len(names)} left over: in each phase others sit out")
    if m == 1:
        notes.append("each machine replays alone: what goes wrong between machines does not show")
    if tail := len(names) % together:
        notes.append(f"the last {_machines(tail)} hold no whole TP group, and are in no replay")
    return tuple(notes)


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


# --- what came of it -----------------------------------------------------------------------------------------------------------

Outcome = Literal[
    "located",  # one machine is in the failing group of both phases
    "located_once",  # one machine explains it, and only one phase could show it: it sat out of the other, or its group could not run there
    "one_of_several",  # several machines could each be the only faulty one
    "several_faulty",  # no single machine explains it: at least two are faulty, or the replays are not to be relied on
    "phases_disagree",  # a group failed whose machines all passed in the other phase: it did not reproduce, or something else failed
    "everything_failed",  # no group passed: the fault is not a machine's
    "nothing_failed",  # every machine passed: it did not reproduce
    "not_determined",  # too many groups could not run
]


@dataclass(frozen=True, slots=True)
class Located:
    """`suspects`: the machines of the explanations with the fewest faulty ones (it is almost always one). `certain`: faulty however many
    there are, provided that a replay fails exactly if a faulty machine takes part. `untested`: machines that no replay cleared or accused. `because`: one sentence."""

    outcome: Outcome
    suspects: tuple[str, ...] = ()
    certain: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    because: str = ""


def locate(groups: Groups, results: Iterable[ReplayResult]) -> Located:
    """Who it is, by the groups that failed. A group without a result, or with `failed` None, could not run and says nothing."""
    said = {(result.phase, result.group): result.failed for result in results}
    failing: list[tuple[str, tuple[str, ...]]] = []
    cleared: set[str] = set()
    unheard: list[str] = []
    for phase in PHASES:
        for number, members in enumerate(getattr(groups, phase)):
            failed = said.get((phase, number))
            if failed is None:
                unheard.append(f"{phase} {number}")
            elif failed:
                failing.append((f"{phase} {number}", members))
            else:
                cleared.update(members)
    order = tuple(dict.fromkeys(machine for phase in groups for members in phase for machine in members))
    accused = {machine for _, members in failing for machine in members}
    untested = tuple(machine for machine in order if machine not in cleared and machine not in accused)
    if not failing:
        return _nothing_failed(untested, unheard)
    if not cleared:
        return _nothing_passed(failing, unheard, untested)
    candidates = [[machine for machine in members if machine not in cleared] for _, members in failing]
    certain = {named[0] for named in candidates if len(named) == 1}
    names = _listed([name for name, _ in failing])
    if orphan := next((name for (name, _), named in zip(failing, candidates, strict=True) if not named), ""):
        left = tuple(machine for machine in order if any(machine in named for named in candidates))
        return Located(
            "phases_disagree", left, (), untested,
            f"{names} failed, and each machine of {orphan} passed in the other phase: the fault did not reproduce, or it is no machine's",
        )  # fmt: skip
    suspects, size = _fewest([set(named) for named in candidates])
    ordered = tuple(machine for machine in order if machine in suspects)
    sure = tuple(machine for machine in order if machine in certain)
    if size > 1:
        return Located(
            "several_faulty", ordered, sure, untested,
            f"{names} failed, and no one machine is in all of them: at least {size} of {_listed(ordered)} are faulty",
        )  # fmt: skip
    if len(ordered) > 1:
        return Located("one_of_several", ordered, sure, untested, f"{names} failed, which {_listed(ordered)} share")
    if len(failing) > 1:
        return Located("located", ordered, sure, untested, f"{names} failed, and {ordered[0]} is the machine that they share")
    why = (
        f"{names} failed, and of its machines only {ordered[0]} did not pass in the other phase, in which no replay with it ran"
    )
    return Located("located_once", ordered, sure, untested, why)


def groups_of(results: Iterable[ReplayResult]) -> Groups:
    """The groups as the results themselves name them. A number that is missing is a group of nobody."""
    found: dict[Phase, dict[int, tuple[str, ...]]] = {phase: {} for phase in PHASES}
    for result in results:
        found[result.phase][result.group] = result.nodes
    horizontal, vertical = (
        tuple(by_number.get(number, ()) for number in range(max(by_number, default=-1) + 1)) for by_number in found.values()
    )
    return Groups(horizontal, vertical)


def _nothing_failed(untested: tuple[str, ...], unheard: list[str]) -> Located:
    if untested:
        why = f"no group failed, and no replay with {_listed(untested)} ran ({_listed(unheard)} could not)"
        return Located("not_determined", (), (), untested, why)
    told = f" ({_listed(unheard)} could not run)" if unheard else ""
    return Located(
        "nothing_failed", because=f"each machine passed{told}: the fault did not reproduce in so short a replay, or is gone"
    )


def _nothing_passed(failing: list[tuple[str, tuple[str, ...]]], unheard: list[str], untested: tuple[str, ...]) -> Located:
    """One faulty machine leaves a group that passes in each phase, as far as its groups ran."""
    if not unheard or all(sum(1 for name, _ in failing if name.startswith(phase)) > 1 for phase in PHASES):
        return Located("everything_failed", (), (), untested, "no group passed in either phase: the fault is not a machine's")
    why = f"{_listed([name for name, _ in failing])} failed, nothing passed, and {_listed(unheard)} could not run"
    return Located("not_determined", (), (), untested, why)


def _fewest(candidates: list[set[str]]) -> tuple[set[str], int]:
    """The machines of all smallest sets that meet each failing group's candidates, and the size of such a set. From three on, no set is
    looked for: all candidates, and a bound."""
    one = set.intersection(*candidates)
    if one:
        return one, 1
    every = sorted(set().union(*candidates))
    at_least = _disjoint(candidates)
    if at_least <= 2:
        two = {m for pair in combinations(every, 2) if all(named.intersection(pair) for named in candidates) for m in pair}
        if two:
            return two, 2
    return set(every), max(3, at_least)


def _disjoint(candidates: list[set[str]]) -> int:
    """Of groups that share nobody, each needs a faulty machine of its own. A bound, not the largest such set."""
    seen: set[str] = set()
    count = 0
    for named in sorted(candidates, key=len):
        if not named & seen:
            seen |= named
            count += 1
    return count


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
