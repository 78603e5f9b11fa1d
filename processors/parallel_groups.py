"""A job's parallel groups, the smallest that covers a set of ranks, and the one that several rounds name most often. Pure.

The rule of places, once for all: ranks stand on machines in order, `ranks_per_node` to each, and a rank's number counts its
coordinates in the job's `rank_order`, the first named fastest. `tp-pp-dp` (the default; ByteRobust's figure 7, whose stages follow
each other on neighbouring machines) is rank = (dp * PP + pp) * TP + tp; `tp-dp-pp` is Megatron-LM's own default, DeepSpeed's and torchtitan's.

Groups are compared by the machines that they stand on, since machines are what is evicted: of a pipeline whose stages are tensor
parallel inside a machine, any one of the TP pipelines covers the machines of all. Beside tp, pp and dp there are a model's replica (tp+pp)
and a pipeline stage (tp+dp), which Megatron-LM has as groups of their own: where TP spans machines, a sick replica has no other name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from events.job import RankOrder

Dimension = Literal["tp", "pp", "dp"]
Kind = Literal["node", "tp", "pp", "dp", "tp+pp", "tp+dp", "job"]
_Enough = Callable[[int, int], bool]

#: Of groups on equally many machines the first of these is named.
KINDS: tuple[Kind, ...] = ("node", "tp", "pp", "dp", "tp+pp", "tp+dp", "job")
#: The coordinates that differ inside a group of a kind.
VARIES: dict[Kind, frozenset[Dimension]] = {
    "tp": frozenset({"tp"}),
    "pp": frozenset({"pp"}),
    "dp": frozenset({"dp"}),
    "tp+pp": frozenset({"tp", "pp"}),
    "tp+dp": frozenset({"tp", "dp"}),
    "job": frozenset({"tp", "pp", "dp"}),
}


class BadLayout(ValueError):
    """Sizes that make no layout, or a rank that is not in it. One sentence."""


@dataclass(frozen=True, slots=True)
class Group:
    """`ranks` and `machines` ascending; machines by their place in the job, from 0. `index` counts groups of a kind by their lowest
    rank, from 0. `whole_job`: it stands on all of the job's machines, so it must never be evicted."""

    kind: Kind
    index: int
    ranks: tuple[int, ...]
    machines: tuple[int, ...]
    whole_job: bool

    @property
    def name(self) -> str:
        """As decisions print it: `pp 3`."""
        return f"{self.kind} {self.index}"

    @property
    def size(self) -> int:
        """In machines."""
        return len(self.machines)


@dataclass(frozen=True, slots=True)
class Layout:
    """tp * pp * dp ranks, `ranks_per_node` on each machine. Raises BadLayout if a size is below 1 or the last machine is not full."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ranks_per_node: int = 1
    rank_order: RankOrder = "tp-pp-dp"

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ranks_per_node) < 1:
            raise BadLayout("tp, pp, dp and the ranks of a node are 1 or more")
        if self.rank_order not in ("tp-pp-dp", "tp-dp-pp"):
            raise BadLayout(f"the rank order {self.rank_order!r} is neither tp-pp-dp nor tp-dp-pp")
        if self.world % self.ranks_per_node:
            raise BadLayout(f"{self.world} ranks do not fill machines of {self.ranks_per_node}")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def machines(self) -> int:
        return self.world // self.ranks_per_node

    def machine_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def group(self, kind: Kind, rank: int) -> Group:
        """The group of a kind that a rank belongs to. Raises BadLayout if there is no such rank."""
        if not 0 <= rank < self.world:
            raise BadLayout(f"there is no rank {rank} among {self.world}")
        if kind == "node":
            first = rank - rank % self.ranks_per_node
            return self._made(kind, self.machine_of(rank), tuple(range(first, first + self.ranks_per_node)))
        ranks: tuple[int, ...] = (0,)
        index, groups = 0, 1
        for size, stride, varies, place in self._axes(VARIES[kind], rank):
            if varies:
                ranks = tuple(base + step * stride for base in ranks for step in range(size))
            else:
                ranks = tuple(base + place * stride for base in ranks)
                index += place * groups
                groups *= size
        return self._made(kind, index, tuple(sorted(ranks)))

    def groups(self, kind: Kind) -> Iterator[Group]:
        """All of a kind, by index."""
        seen: set[int] = set()
        for rank in range(self.world):
            if rank not in seen:
                found = self.group(kind, rank)
                seen.update(found.ranks)
                yield found

    def _axes(self, varies: frozenset[Dimension], rank: int) -> Iterator[tuple[int, int, bool, int]]:
        """Of each dimension, fastest first: its size, its stride in ranks, whether it varies, and the rank's place in it."""
        stride = 1
        sizes: dict[str, int] = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        for name in self.rank_order.split("-"):
            size = sizes[name]
            yield size, stride, name in varies, rank // stride % size
            stride *= size

    def _made(self, kind: Kind, index: int, ranks: tuple[int, ...]) -> Group:
        machines = tuple(sorted({self.machine_of(rank) for rank in ranks}))
        return Group(kind, index, ranks, machines, len(machines) == self.machines)


def smallest_cover(layout: Layout, outliers: Iterable[int]) -> Group | None:
    """The group on the fewest machines that stands on every outlier's machine; a node if one machine holds them all. The whole job
    is returned as such (`whole_job`), so that the caller can refuse. None: no outliers. Raises BadLayout for a rank that is not there."""
    return _smallest(layout, outliers, lambda covered, needed: covered == needed)


def flagged(layout: Layout, outliers: Iterable[int], share: float = 0.5) -> Group | None:
    """What one round of a fail-slow job flags: the smallest group whose machines hold more than `share` of the outlying ranks, so
    that a healthy rank caught between two operations does not widen it. None: no outliers, or only the whole job holds as many."""
    found = _smallest(layout, outliers, lambda covered, needed: covered > share * needed)
    return None if found is None or found.whole_job else found


@dataclass(frozen=True, slots=True)
class Vote:
    """The most often flagged group, and in how many of how many rounds it was."""

    group: Group
    flags: int
    rounds: int


def vote(layout: Layout, rounds: Sequence[Iterable[int]], share: float = 0.5) -> Vote | None:
    """Over rounds of outliers (ByteRobust: five, ten seconds apart) the group flagged most often; of equals the smaller, then the
    first of KINDS. None: no round flagged any. How many flags are enough is the policy's to say."""
    counts = Counter(group for outliers in rounds if (group := flagged(layout, outliers, share)) is not None)
    if not counts:
        return None
    best = min(counts, key=lambda group: (-counts[group], group.size, KINDS.index(group.kind), group.index))
    return Vote(best, counts[best], len(rounds))


def _smallest(layout: Layout, outliers: Iterable[int], enough: _Enough) -> Group | None:
    """A group that covers enough of the outliers stands on the machine of at least one, so only the groups of the ranks on those
    machines are looked at: with a few outliers that is a few groups of a hundred thousand ranks."""
    ranks = sorted(set(outliers))
    if not ranks:
        return None
    on: Counter[int] = Counter()
    for rank in ranks:
        if not 0 <= rank < layout.world:
            raise BadLayout(f"there is no rank {rank} among {layout.world}")
        on[layout.machine_of(rank)] += 1
    best: Group | None = None
    for kind in KINDS:
        seen: set[int] = set()
        for machine in on:
            first = machine * layout.ranks_per_node
            for rank in range(first, first + layout.ranks_per_node):
                if rank in seen:
                    continue
                group = layout.group(kind, rank)
                seen.update(group.ranks)
                covered = sum(on[m] for m in group.machines)
                if enough(covered, len(ranks)) and (
                    best is None or (group.size, KINDS.index(kind)) < (best.size, KINDS.index(best.kind))
                ):
                    best = group
    return best


def smallest_named(
    groups: Mapping[str, Sequence[int]], outliers: Iterable[int], world: int
) -> tuple[str, tuple[int, ...]] | None:
    """The same among groups that are given by name, where no layout is known: the one with the fewest ranks that holds every outlier.
    None: no outliers, or none but the whole job holds them."""
    wanted = set(outliers)
    holding = [(len(ranks), name) for name, ranks in groups.items() if len(ranks) < world and wanted.issubset(ranks)]
    if not wanted or not holding:
        return None
    name = min(holding)[1]
    return name, tuple(sorted(groups[name]))
