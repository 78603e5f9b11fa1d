"""Of a crash's exits: which rank failed first, and when the detector blames the code."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.incident import Signal
from events.rank_log import RankLog
from events.training import RankExit
from processors import blame
from processors.blame import LOGS_MAX, READ_MAX, Logged, Roots
from processors.exits import earliest, reading
from tests.telemetry import Story, ns
from tests.test_code_faults import TORCH, USER, traceback
from tests.test_job_health import PEER_GONE, begun, of, running

WORLD = 4
TYPE_ERROR = traceback("TypeError: step() takes 1 positional argument but 2 were given")
CLOSING = "[rank1]:[W1130 06:28:01.1 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed before we destruct ProcessGroupNCCL.\n"
WORDS = f"TypeError: step() takes 1 positional argument but 2 were given ({USER}:4 in step)"


def trained() -> Story:
    return running(begun(world=WORLD), 1, 5, world=WORLD)


def exited(story: Story, at_s: float, rank: int, ended_s: float | None = None, **more: Any) -> None:
    story.exited(at_s, rank, world=WORLD, ended_ns=ns(at_s if ended_s is None else ended_s), **more)


def blames(story: Story) -> list[Signal]:
    return [signal for signal in of(Signal, story) if signal.symptom == "user_code_error"]


def test_the_code_is_blamed_beside_the_exit_with_the_exception_and_the_frame() -> None:
    story = trained()
    exited(story, 5, 2, code=1, stderr=TYPE_ERROR + CLOSING)
    exited(story, 5.1, 0, code=1, stderr=PEER_GONE)
    blamed, exit_, echo = of(Signal, story)
    assert (blamed.symptom, blamed.rank, blamed.node, blamed.confidence, blamed.rule) == (
        "user_code_error",
        2,
        "n2",
        "high",
        "exception_by_code",
    )
    assert (blamed.evidence, blamed.step, blamed.seen_ns) == (WORDS, 4, ns(5))
    # What a library writes of groups at a process's end makes no echo of it.
    assert (exit_.symptom, exit_.rank, exit_.confidence) == ("rank_exit", 2, "low")
    assert (echo.rank, echo.confidence) == (0, "sympathetic")


def test_all_ranks_with_the_same_exception_are_one_blame_an_attempt() -> None:
    story = trained()
    for rank in range(WORLD):
        exited(story, 5 + rank / 10, rank, code=1, stderr=TYPE_ERROR)
    assert [signal.rank for signal in blames(story)] == [0]
    for rank in range(WORLD):
        story.started(6, rank, attempt=2, world=WORLD)
        exited(story, 7, rank, code=1, stderr=TYPE_ERROR, attempt=2)
    assert len(blames(story)) == 2


def test_echoes_may_come_first_and_the_rank_that_failed_first_counts_by_its_end() -> None:
    story = trained()
    exited(story, 5.0, 0, 4.9, code=1, stderr=PEER_GONE)
    exited(story, 5.1, 3, 4.8, code=1, stderr=PEER_GONE)
    exited(story, 5.4, 1, 4.5, code=1, stderr=TYPE_ERROR)
    assert [signal.rank for signal in blames(story)] == [1]


@pytest.mark.parametrize(
    "first",
    [
        {"signal": 9},
        {"signal": 11, "stderr": TYPE_ERROR},
        {"code": 1, "stderr": traceback("OSError: [Errno 5] Input/output error")},
        {"code": 1, "stderr": traceback("torch.OutOfMemoryError: CUDA out of memory.")},
        {"code": 1, "stderr": traceback("RuntimeError: CUDA error: an illegal memory access was encountered")},
        {"code": 3, "stderr": "no exception at all\n"},
    ],
)  # fmt: skip
def test_what_another_rank_raises_after_the_first_failure_is_not_the_codes(first: dict[str, Any]) -> None:
    story = trained()
    exited(story, 5.0, 0, **first)
    exited(story, 5.2, 1, code=1, stderr=TYPE_ERROR)
    assert blames(story) == []
    assert [one.symptom for one in of(Signal, story)] == ["rank_exit", "rank_exit"]


@pytest.mark.parametrize("ahead_s", [-3600.0, -2.0, 2.0, 3600.0])
@pytest.mark.parametrize("code_first", [False, True])
def test_a_nodes_clock_that_is_wrong_does_not_decide_who_failed_first(ahead_s: float, code_first: bool) -> None:
    """The rank that raises is on a node whose clock is off; another one was killed a fifth of a second before it, or after it."""
    story = trained()
    killed_s = 5.4 if code_first else 5.0
    if not code_first:
        exited(story, killed_s, 0, signal=9)
    exited(story, 5.2, 1, 5.2 + ahead_s, code=1, stderr=TYPE_ERROR, ahead_s=ahead_s)
    if code_first:
        exited(story, killed_s, 0, signal=9)
    exited(story, 5.5, 2, code=1, stderr=TYPE_ERROR)
    assert [one.rank for one in blames(story)] == ([1] if code_first else [])


@pytest.mark.parametrize("ended_ns", [1, ns(10**6), 10**40])
def test_an_end_in_another_time_altogether_is_when_it_was_told(ended_ns: int) -> None:
    story = trained()
    exited(story, 5.0, 0, signal=9)
    story.exited(5.2, 1, world=WORLD, ended_ns=ended_ns, code=1, stderr=TYPE_ERROR)
    exited(story, 5.4, 2, code=1, stderr=TYPE_ERROR)
    assert blames(story) == []


def test_an_exception_of_no_known_kind_is_said_with_low_confidence_and_a_surer_one_that_came_before_it_once_more() -> None:
    story = trained()
    exited(story, 5.0, 0, 4.9, code=1, stderr=traceback("RuntimeError: shards do not add up"))
    exited(story, 5.1, 1, 4.8, code=1, stderr=TYPE_ERROR)
    exited(story, 5.2, 2, 4.7, code=1, stderr=TYPE_ERROR)
    assert [(one.confidence, one.rule, one.rank) for one in blames(story)] == [
        ("low", "exception_unclear", 0),
        ("high", "exception_by_code", 1),
    ]


def test_ranks_that_end_while_the_attempt_is_stopped_blame_nobody() -> None:
    story = trained()
    exited(story, 5.0, 0, signal=9, asked=True)
    exited(story, 5.1, 1, code=1, stderr=TYPE_ERROR)
    assert blames(story) == []


def test_frames_that_an_exit_lost_are_found_in_the_ranks_log() -> None:
    deep = traceback("TypeError: bad", (USER, 4, "step"), *[(TORCH, n, "_call_impl") for n in range(20)])
    tail = "\n".join(deep.split("\n")[-30:])
    assert USER not in tail
    for log, expected in ((deep, [("high", f"TypeError: bad ({USER}:4 in step)")]), (TYPE_ERROR, []), ("", [])):
        story = trained()
        story.say(
            4.9, "n1", RankLog(rank=1, world_size=WORLD, traceback=log), job="gpt", attempt=1, on_job=True, producer="rank_logs"
        )
        exited(story, 5, 1, code=1, stderr=tail)
        assert [(one.confidence, one.evidence) for one in blames(story)] == expected


def test_what_is_remembered_is_bounded_and_survives_a_restart() -> None:
    roots = blame.NONE
    for rank in range(LOGS_MAX + 5):
        roots = blame.logged(roots, RankLog(rank=rank, world_size=99, traceback=TYPE_ERROR))
    roots = blame.logged(roots, RankLog(rank=20, world_size=99, traceback=traceback("KeyError: 'x'")))
    assert len(roots.logged) == LOGS_MAX and roots.logged[-1] == Logged(
        20, "KeyError: 'x'", f"KeyError: 'x' ({USER}:4 in step)", True
    )
    assert blame.load(blame.dump(roots)) == roots
    full = Roots(first_ns=9, oldest_ns=5, read=READ_MAX, said="low", logged=roots.logged)
    assert blame.load(blame.dump(full)) == full
    assert not blame.worth_reading(full, 5) and blame.worth_reading(full, 4)


def test_of_ten_thousand_echoes_the_root_is_still_found() -> None:
    roots, found = blame.NONE, None
    for number in range(2000):
        echo = RankExit(rank=number, world_size=10_000, code=1, stderr_tail=PEER_GONE, ended_ns=10_000 + number)
        if blame.worth_reading(roots, echo.ended_ns):
            roots, found = blame.blamed(roots, echo, reading(echo, "n"), echo.ended_ns)
            assert found is None
    root = RankExit(rank=9999, world_size=10_000, code=1, stderr_tail=TYPE_ERROR, ended_ns=9_000)
    assert roots.read == READ_MAX and blame.worth_reading(roots, root.ended_ns)
    _, found = blame.blamed(roots, root, reading(root, "n"), root.ended_ns)
    assert found is not None and found.confidence == "high"


ENDS = st.sampled_from([{"code": 1, "stderr_tail": TYPE_ERROR}, {"code": 1, "stderr_tail": PEER_GONE}, {"signal": 9}, {"code": 0}, {"signal": 15, "asked": True}])  # fmt: skip


@given(st.lists(st.tuples(ENDS, st.integers(1, 50)), min_size=1, max_size=12))
def test_told_in_the_order_of_their_ends_only_the_earliest_is_blamed(ends: list[tuple[dict[str, Any], int]]) -> None:
    exits = [RankExit(rank=rank, world_size=99, ended_ns=at, **more) for rank, (more, at) in enumerate(ends)]
    first = earliest(exits)
    assert first is None or all(
        first.ended_ns <= one.ended_ns for one in exits if one.code == 1 and one.stderr_tail == TYPE_ERROR
    )
    roots, said = blame.NONE, []
    for one in sorted(exits, key=lambda one: (one.ended_ns, one.rank)):
        if not one.asked and (one.code or one.signal):
            roots, found = blame.blamed(roots, one, reading(one, "n"), one.ended_ns)
            said += [one.rank] if found else []
    assert said[:1] == ([first.rank] if first is not None and first.stderr_tail == TYPE_ERROR else said[:1])
    assert len(said) <= 1 and (not said or (first is not None and exits[said[0]].ended_ns == first.ended_ns))


def test_an_end_whose_time_is_not_known_comes_after_those_with_one() -> None:
    late, unknown = (RankExit(rank=r, world_size=2, code=1, ended_ns=at) for r, at in ((0, 7), (1, 0)))
    assert earliest([unknown, late]) == late and earliest([unknown]) == unknown
    assert earliest([RankExit(rank=0, world_size=1, code=1, stderr_tail=PEER_GONE)]) is None and earliest([]) is None
