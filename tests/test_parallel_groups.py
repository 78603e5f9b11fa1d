"""Parallel groups, the smallest cover and the vote, against a slow and plain model that writes every group out."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.parallel_groups import (
    KINDS,
    VARIES,
    BadLayout,
    Group,
    Layout,
    flagged,
    smallest_cover,
    smallest_named,
    vote,
)

FIGURE_7 = Layout(tp=2, pp=4, dp=4, ranks_per_node=2)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world = tp * pp * dp
    per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return Layout(tp, pp, dp, per_node, draw(st.sampled_from(["tp-pp-dp", "tp-dp-pp"])))


def plainly(layout: Layout) -> list[Group]:
    """Every group of every kind: coordinates counted one by one, groups as the ranks that agree in what does not vary."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    order = layout.rank_order.split("-")
    at = {}
    for rank, slow_to_fast in enumerate(product(*(range(sizes[name]) for name in reversed(order)))):
        at[rank] = dict(zip(reversed(order), slow_to_fast, strict=True))
    machines = {rank: rank // layout.ranks_per_node for rank in at}
    found = []
    for kind in KINDS:
        together: dict[object, list[int]] = {}
        for rank, place in at.items():
            key = (
                machines[rank]
                if kind == "node"
                else tuple(value for name, value in sorted(place.items()) if name not in VARIES[kind])
            )
            together.setdefault(key, []).append(rank)
        for index, ranks in enumerate(sorted(together.values())):
            on = tuple(sorted({machines[rank] for rank in ranks}))
            found.append(Group(kind, index, tuple(ranks), on, len(on) == len(set(machines.values()))))
    return found


def covering(layout: Layout, outliers: set[int], share: float = 1.0) -> Group:
    """Of the plain list, the first of the smallest whose machines hold the outliers (or more than a share of them)."""

    def enough(group: Group) -> bool:
        held = sum(rank // layout.ranks_per_node in group.machines for rank in outliers)
        return held == len(outliers) if share == 1.0 else held > share * len(outliers)

    fit = [group for group in plainly(layout) if enough(group)]
    return min(fit, key=lambda group: (group.size, KINDS.index(group.kind)))


@given(layouts())
def test_groups_are_those_of_the_plain_model(layout: Layout) -> None:
    assert [group for kind in KINDS for group in layout.groups(kind)] == plainly(layout)
    for group in plainly(layout):
        assert all(layout.group(group.kind, rank) == group for rank in group.ranks)


@given(layouts(), st.data())
def test_the_smallest_cover_is_that_of_the_plain_model(layout: Layout, data: st.DataObject) -> None:
    outliers = data.draw(st.sets(st.integers(0, layout.world - 1), min_size=1, max_size=6))
    found, plain = smallest_cover(layout, outliers), covering(layout, outliers)
    assert found is not None
    assert (found.size, found.kind, found.whole_job) == (plain.size, plain.kind, plain.whole_job)
    assert {layout.machine_of(rank) for rank in outliers} <= set(found.machines)


@given(layouts(), st.data())
def test_what_a_round_flags_is_that_of_the_plain_model_and_never_the_whole_job(layout: Layout, data: st.DataObject) -> None:
    outliers = data.draw(st.sets(st.integers(0, layout.world - 1), min_size=1, max_size=6))
    found, plain = flagged(layout, outliers), covering(layout, outliers, 0.5)
    assert (found is None) == plain.whole_job
    if found is not None:
        assert (found.size, found.kind) == (plain.size, plain.kind)


def test_the_papers_example_evicts_one_pipeline_of_four_machines() -> None:
    group = smallest_cover(FIGURE_7, range(24, 32))
    assert group is not None
    assert (group.kind, group.machines, group.size, group.whole_job) == ("pp", (12, 13, 14, 15), 4, False)


def test_ranks_of_one_machine_are_that_machine() -> None:
    group = smallest_cover(FIGURE_7, [30, 31])
    assert group is not None and (group.name, group.ranks, group.size) == ("node 15", (30, 31), 1)


def test_megatrons_order_puts_data_parallel_ranks_side_by_side() -> None:
    """TP 2, DP 2, PP 4 over 16 ranks: its own groups are [0, 1], [0, 2] and [0, 4, 8, 12]."""
    layout = Layout(2, 4, 2, 2, "tp-dp-pp")
    assert [layout.group(kind, 0).ranks for kind in ("tp", "dp", "pp")] == [(0, 1), (0, 2), (0, 4, 8, 12)]
    group = smallest_cover(layout, [12, 14])
    assert group is not None and (group.kind, group.ranks, group.size) == ("dp", (12, 14), 2)


def test_a_replica_whose_stages_span_machines_is_a_group() -> None:
    layout = Layout(tp=4, pp=2, dp=3, ranks_per_node=2)
    group = smallest_cover(layout, range(8, 16))
    assert group is not None and (group.kind, group.machines) == ("tp+pp", (4, 5, 6, 7))


def test_outliers_all_over_are_covered_by_the_whole_job_alone_and_that_is_said() -> None:
    group = smallest_cover(FIGURE_7, [0, 13, 30])
    assert group is not None and group.whole_job
    only_pipeline = smallest_cover(Layout(pp=4, ranks_per_node=1), [0, 3])
    assert only_pipeline is not None and only_pipeline.kind == "pp" and only_pipeline.whole_job
    assert smallest_cover(FIGURE_7, []) is None


def test_the_most_often_flagged_group_wins_over_noise() -> None:
    """One machine is slow in four rounds of five; here and there a healthy rank is caught elsewhere, and one round sees only that."""
    rounds = [[10, 11], [10, 11, 25], [3], [10], [10, 11, 0]]
    won = vote(FIGURE_7, rounds)
    assert won is not None and (won.group.name, won.flags, won.rounds) == ("node 5", 4, 5)


def test_rounds_without_outliers_flag_nothing() -> None:
    assert vote(FIGURE_7, [[], [], []]) is None
    assert vote(FIGURE_7, [[0, 9, 18, 27, 30]]) is None


@given(layouts(), st.data())
def test_the_vote_is_a_count_of_what_rounds_flag(layout: Layout, data: st.DataObject) -> None:
    rounds = data.draw(st.lists(st.sets(st.integers(0, layout.world - 1), max_size=3), min_size=1, max_size=5))
    counts = Counter(group for outliers in rounds if (group := flagged(layout, outliers)))
    won = vote(layout, rounds)
    if won is None:
        assert not counts
    else:
        assert won.flags == counts[won.group] == max(counts.values())
        assert all(won.group.size <= group.size for group, flags in counts.items() if flags == won.flags)


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(BadLayout, match="fill"):
        Layout(tp=2, pp=3, dp=1, ranks_per_node=4)
    with pytest.raises(BadLayout, match="no rank 32"):
        smallest_cover(FIGURE_7, [32])
    with pytest.raises(BadLayout):
        Layout(tp=0)
    with pytest.raises(BadLayout, match="tp-dp-pp"):
        Layout(rank_order="dp-tp-pp")  # type: ignore[arg-type]


def test_of_named_groups_the_one_with_the_fewest_ranks_holds_them() -> None:
    groups = {"EXPERT 7": range(8, 16), "DP 1": (12, 14), "WORLD": range(16), "PP 0": (0, 4, 8, 12)}
    assert smallest_named(groups, {12, 14}, 16) == ("DP 1", (12, 14))
    assert smallest_named(groups, {9, 14}, 16) == ("EXPERT 7", tuple(range(8, 16)))
    assert smallest_named(groups, {0, 15}, 16) is None
    assert smallest_named(groups, (), 16) is None
