"""Which groups failed, by what their ranks did."""

from __future__ import annotations

from typing import Any

from actuators.replay_verdicts import GroupRun, verdicts
from events.finding import REPLAY_PHASES, ReplayedRank, ReplayResult

RIGHT = (("a1", "a2", "a3"), ("b1", "b2", "b3"))
WRONG = (("a1", "x2", "x3"), ("b1", "b2", "y3"))


def ranks(traces: tuple[tuple[str, ...], ...] = RIGHT, **more: Any) -> tuple[ReplayedRank, ...]:
    return tuple(ReplayedRank(rank=rank, ended="done", first_step=7, trace=trace, **more) for rank, trace in enumerate(traces))


def judged(*each: Any) -> list[ReplayResult]:
    """Half of them in each phase. A GroupRun's other fields, or its ranks."""
    runs = []
    for at, what in enumerate(each):
        phase, number = REPLAY_PHASES[at * 2 // len(each)], at % ((len(each) + 1) // 2)
        fields = what if isinstance(what, dict) else {"ranks": what}
        runs.append(GroupRun(phase, number, (f"n{at}",), **fields))
    return list(verdicts(runs))


def failed(*each: Any) -> list[bool | None]:
    return [result.failed for result in judged(*each)]


def test_what_differs_from_most_has_failed_and_where_is_said() -> None:
    results = judged(ranks(), ranks(WRONG), ranks(), ranks(), ranks(), ranks(WRONG))
    assert [result.failed for result in results] == [False, True, False, False, False, True]
    assert results[1].detail == "from step 8 on rank 0 computed something else than in 4 of 6 replays of the same steps"
    assert results[0].detail == "3 steps from 7, the same bit for bit in 4 of 6 replays"


def test_no_majority_is_no_verdict() -> None:
    assert failed(ranks(), ranks(WRONG), ranks(), ranks(WRONG)) == [None] * 4
    every_other = [ranks(((f"{i}", "b", "c"), ("d", "e", "f"))) for i in range(6)]
    results = judged(*every_other)
    assert {result.failed for result in results} == {None} and "no two agree" in results[0].detail
    # of two groups a phase, the two right ones are the same, and the two wrong ones need not be
    assert failed(ranks(), ranks(WRONG), ranks((("z",) * 3,) * 2), ranks()) == [False, True, True, False]


def test_only_replays_of_one_shape_are_compared() -> None:
    other = ranks((("c1", "c2", "c3"),) * 3)
    assert failed(ranks(), other, ranks(), ranks(), other, ranks(WRONG)) == [False, False, False, False, False, True]
    assert failed(other, ranks()) == [False, False]  # each alone of its shape: it ran through, and that is all
    assert "no other replay of 3 ranks" in judged(other, ranks())[0].detail


def test_parameters_show_what_the_losses_do_not() -> None:
    right, wrong = ranks(parameters="ab"), (ranks(parameters="ab")[0], ranks(parameters="cd")[1])
    results = judged(right, wrong, right, right)
    assert [result.failed for result in results] == [False, True, False, False]
    assert results[1].detail.startswith("after 3 steps rank 1 did not come to the same parameters")


def test_a_shorter_run_differs() -> None:
    assert failed(ranks(), ranks(tuple(trace[:2] for trace in RIGHT)), ranks(), ranks()) == [False, True, False, False]


def test_crash_hang_and_nan_need_no_majority() -> None:
    crashed = (
        ranks()[0].model_copy(update={"ended": "cut"}),
        ReplayedRank(rank=1, ended="crashed", detail="exit code 1: boom"),
    )
    hung = (ReplayedRank(rank=0, ended="cut", trace=("a1",), detail="its time was up"), *ranks()[1:])
    results = judged(crashed, ranks(bad_step=8), {"ranks": hung, "hung": "no end after 60 s"}, ranks(), ranks(), ranks())
    assert [result.failed for result in results] == [True, True, True, False, False, False]
    assert results[0].detail == "rank 1 crashed before its first step (exit code 1: boom)"
    assert "no finite number at step 8" in results[1].detail
    assert results[2].detail == "rank 0 got no further than 1 steps (its time was up; no end after 60 s)"
    # where all fail alike, all have failed: it is not for this module to say that no machine can be to blame
    assert failed(ranks(bad_step=8), ranks(bad_step=8)) == [True, True]


def test_a_port_taken_by_somebody_else_is_no_fault_of_the_group() -> None:
    said = "exit code 1: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 40213, code: -98, name: EADDRINUSE"
    first = ReplayedRank(rank=0, ended="crashed", detail=said)
    late = ranks()[0].model_copy(update={"ended": "crashed", "detail": said})
    results = judged((first, ReplayedRank(rank=1, ended="cut")), (late, ranks()[1]), ranks(), ranks())
    assert [result.failed for result in results] == [None, True, False, False]
    assert results[0].detail.startswith("rank 0 found its port taken by somebody else: exit code 1")


def test_what_could_not_run_says_nothing_and_values_that_are_not_told_are_no_difference() -> None:
    results = judged({"could_not": "no agent answered on n0"}, ranks(blank=True), ranks(WRONG, blank=True), ranks(blank=True))
    assert [result.failed for result in results] == [None, False, False, False]
    assert "neither loss nor gradient norm" in results[1].detail and results[0].detail == "no agent answered on n0"
