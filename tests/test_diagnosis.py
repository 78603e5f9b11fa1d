"""Whom tests name, against a plain model of faulty machines in a ring; what an examination comes to, against one of counted machines."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.finding import CheckResult
from processors.diagnosis import (
    PRIORS,
    RATES,
    found,
    prior_of,
    suspects,
    verdict,
    weighed,
)
from processors.policy import MachineTests


def link(a: str, b: str, passed: bool | None = True, speed: float | None = 50.0, software: str = "nccl") -> CheckResult:
    return CheckResult(
        test="all_gather", node=a, peers=(b,), passed=passed, detail="content", value=speed, unit="GB/s", software=software
    )


def own(node: str, test: str = "gpu_self_test", passed: bool | None = False) -> CheckResult:
    return CheckResult(test=test, node=node, passed=passed, detail="7 wrong")


def ring(size: int, bad: set[int], links: set[int] = frozenset(), *, silent: bool = False) -> list[CheckResult]:  # type: ignore[assignment]
    """What a ring of machines tells: a bad machine's links fail, and those in `links` (number: between it and the next)."""
    results = []
    for a in range(size if size > 2 else 1):
        b = (a + 1) % size
        fails = bool(bad & {a, b}) or a in links
        results += [link(f"m{a}", f"m{b}", not fails), link(f"m{b}", f"m{a}", not fails)]
    return results


def names(machines: set[int]) -> set[str]:
    return {f"m{m}" for m in machines}


@settings(deadline=None)
@given(st.integers(3, 12), st.data())
def test_one_bad_machine_in_a_ring_is_named_and_nobody_else(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    assert set(suspects(ring(size, {bad}))) == names({bad})


@settings(max_examples=300, deadline=None)
@given(st.integers(3, 9), st.data())
def test_whoever_is_named_is_bad_in_every_smallest_explanation(size: int, data: st.DataObject) -> None:
    """The plain model: of all sets of machines that would look the same, the smallest; named are those in each of them."""
    bad = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    results = ring(size, bad)
    seen = [(r.node, r.peers, r.passed) for r in results]
    alike = [
        set(chosen)
        for count in range(size + 1)
        for chosen in combinations(range(size), count)
        if [(r.node, r.peers, r.passed) for r in ring(size, set(chosen))] == seen
    ]
    smallest = min(map(len, alike))
    sure = set.intersection(*(one for one in alike if len(one) == smallest))
    told = found(results)
    assert set(told.named) == names(sure)
    assert not set(told.named) - names(bad) or smallest < len(bad)  # a lie only where fewer faults would explain it as well
    assert told.named or told.doubts or not bad  # what failed is told in any case


@settings(deadline=None)
@given(st.integers(4, 12), st.data())
def test_a_broken_link_between_two_good_machines_names_both_a_slow_one_neither(size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, size - 1))
    ends = names({at, (at + 1) % size})
    assert set(suspects(ring(size, set(), {at}))) == ends
    slow = [r.model_copy(update={"value": 10.0}) if {r.node, *r.peers} == ends else r for r in ring(size, set())]
    told = found(slow)
    assert not told.named and len(told.doubts) == 1 and "neither is named" in told.doubts[0]


def test_two_machines_that_cannot_talk_name_nobody_and_it_is_said() -> None:
    told = found(ring(2, {0}))
    assert not told.named and "no one machine explains it" in told.doubts[0]
    everyone = found(ring(6, set(range(6))))
    assert not everyone.named and everyone.doubts


def test_a_store_that_many_cannot_reach_names_its_host() -> None:
    star = [link(f"m{at}", "m0", False) for at in range(1, 4)]
    assert set(suspects(star)) == {"m0"}
    # One alone can't, and the host's other links are good: it is that one.
    assert set(suspects([link("m1", "m0", False), *ring(4, set())[4:]])) == {"m1"}
    # It says itself that it could not open the place (its port was taken): that is why, and the links were not tested.
    told = found([link("m0", "m0", None), *star])
    assert not told.named and told.doubts == ("the links were not tested: content",)
    assert set(suspects([link("m0", "m0", None), *star, own("m2")])) == {"m2"}


def test_a_slow_machine_is_named_by_both_its_links_but_not_over_gloo_by_a_busy_core() -> None:
    def at(speeds: list[float], software: str) -> set[str]:
        pairs = [(f"m{a}", f"m{(a + 1) % len(speeds)}") for a in range(len(speeds))]
        return set(suspects(link(a, b, True, speed, software) for (a, b), speed in zip(pairs, speeds, strict=True)))

    assert at([50, 50, 20, 20, 50, 50], "nccl") == {"m3"}
    assert at([50, 50, 30, 30, 50, 50], "nccl") == set()
    assert at([50, 20, 20], "nccl") == {"m2"}  # of three links one machine slows two
    assert at([0.8, 0.1, 0.09, 0.3, 0.5], "gloo") == set()
    assert at([0.8, 0.005, 0.005, 0.3, 0.5], "gloo") == {"m2"}
    assert at([50, 1], "nccl") == set()  # two links have no usual speed


def test_what_a_machine_failed_by_itself_explains_its_links() -> None:
    told = found([own("m2"), own("m2", "reference_step"), *ring(5, {2})])
    assert set(told.named) == {"m2"} and told.doubts == ()
    assert told.named["m2"] == "m2 failed gpu_self_test: 7 wrong; reference_step: 7 wrong"


@settings(deadline=None)
@given(st.permutations([*ring(6, {1}, {3}), own("m4")]))
def test_the_order_of_results_names_nobody_else(results: list[CheckResult]) -> None:
    assert set(suspects(results)) == {"m1", "m4"}
    assert list(suspects(results)) == list(suspects(results))


def test_what_could_not_run_names_nobody() -> None:
    assert found([own("m0", "dcgm", None), link("m0", "m1", None)]) == ({}, ())


# An examination


@pytest.mark.parametrize("rule", [*PRIORS, ""])
@pytest.mark.parametrize("tests", [("gpu_self_test",), ("gpu_self_test", "dcgm"), ("dcgm", "reference_step", "all_to_all")])
def test_of_counted_machines_those_exonerated_are_bad_no_more_often_than_the_limit(rule: str, tests: tuple[str, ...]) -> None:
    """A million machines, evicted by this rule. Of the bad ones a test misses its share, and each test misses those that a better one
    misses; of the sound ones each fails its share."""
    machines, prior = 1_000_000, prior_of(rule)
    bad = round(machines * prior)
    missed = bad - round(bad * max(RATES[test].recall for test in tests))
    sound = machines - bad
    judged, because = verdict([own("m", test, True) for test in tests], prior)
    share = missed / (missed + sound)
    assert (judged == "exonerated") == (share < MachineTests().exonerated_below)
    assert judged != "confirmed" and f"is {share:.0%}" in because
    for test in tests:
        caught, alarms = bad * RATES[test].recall, sound * RATES[test].false_alarm
        judged, _ = verdict([own("m", t, t != test) for t in tests], prior)
        assert (judged == "confirmed") == (caught / (caught + alarms) >= MachineTests().confirmed_from)


TESTS = st.sampled_from([*RATES, "unheard_of"])
OWN = st.builds(lambda test, passed: own("m", test, passed), TESTS, st.sampled_from([True, False, None]))
ORDER = ["exonerated", "unproven", "confirmed"]


@settings(deadline=None)
@given(st.lists(OWN, max_size=8), OWN, st.floats(0.01, 0.99))
def test_more_failures_never_exonerate_and_more_passes_never_confirm(
    results: list[CheckResult], more: CheckResult, prior: float
) -> None:
    before, after = ORDER.index(verdict(results, prior)[0]), ORDER.index(verdict([*results, more], prior)[0])
    if more.passed is False:
        assert after >= before or before == ORDER.index("confirmed")
        assert after != ORDER.index("exonerated")
    elif more.passed is None or any(result.passed is False for result in results):
        assert after == before
    else:
        assert after <= before
    assert verdict([*results, *results], prior)[0] == verdict(results, prior)[0]  # repeats prove nothing more


@settings(deadline=None)
@given(st.lists(OWN, max_size=6), st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_the_more_suspected_a_machine_was_the_less_it_takes(results: list[CheckResult], prior: float, more: float) -> None:
    assert ORDER.index(verdict(results, prior + more)[0]) >= ORDER.index(verdict(results, prior)[0])


def test_an_over_evicted_machine_comes_back_and_one_that_was_named_must_be_watched() -> None:
    passed = [own("m", test, True) for test in ("gpu_self_test", "dcgm", "reference_step")]
    assert verdict(passed, prior_of("evict_group"))[0] == verdict(passed, prior_of("evict_group", 8))[0] == "exonerated"
    assert verdict(passed, prior_of("evict_named"))[0] == verdict(passed, prior_of("evict_group", 1))[0] == "unproven"
    of = [prior_of("evict_group", machines) for machines in range(1, 17)]
    assert of == sorted(of, reverse=True), "the more went with it, the less it is suspected"
    assert prior_of("evict_group", 8) == pytest.approx(0.1875) and prior_of("evict_group", 2) == 0.75
    assert verdict([], 0.1) == ("unproven", "no test that says anything could run")
    assert verdict([own("m", "answers")], 0.1)[0] == "unproven"


def test_every_rate_is_a_share_with_its_source() -> None:
    assert all(0 < r.recall < 1 and 0 < r.false_alarm < 0.1 and r.source for r in RATES.values())
    assert RATES["dcgm"].recall == 0.70 and "ByteRobust" in RATES["dcgm"].source
    assert all(0 < prior < 1 and source for prior, source in PRIORS.values())


def test_a_machine_that_failed_what_sound_ones_fail_is_asked_again_and_each_round_weighs() -> None:
    def of(test: str, passed: bool | None, node: str = "a") -> CheckResult:
        return CheckResult(test=test, node=node, passed=passed, detail="slow")

    first = weighed([of("dcgm", False), of("gpu_self_test", True), of("gpu_self_test", False, "b"), of("dcgm", True, "b")])
    assert dict(first.shares) == {"a": 0.01, "b": 0.001} and first.tests == ("gpu_self_test", "dcgm")
    assert first.doubtful(4, 0.01, 3) == ("a",) and first.doubtful(1200, 0.01, 3) == ("a", "b")
    assert first.doubtful(1200, 0.01, 1) == ()
    second = weighed(
        [of("dcgm", False), of("gpu_self_test", True), of("gpu_self_test", True, "b"), of("dcgm", True, "b")], first
    )
    assert list(second.named) == ["a"] and second.shares["a"] == pytest.approx(1e-4)
    assert second.doubts == ("b failed gpu_self_test: slow; it passed when it was tested once more",)
    assert second.doubtful(1200, 0.01, 3) == ("a",) and second.doubtful(1200, 0.01, 2) == ()
    unasked = weighed([of("dcgm", None)], second)
    assert list(unasked.named) == ["a"] and unasked.doubtful(1200, 0.01, 9) == (), "what could not be told stands"


def test_who_is_borne_out_by_other_machines_is_not_asked_again() -> None:
    named = weighed(
        [CheckResult(test="reference_step", node="a", passed=False), CheckResult(test="dcgm", node="a", passed=False)]
    )
    assert named.doubtful(10_000, 0.01, 3) == ()


def test_a_machine_that_only_its_neighbours_tell_of_is_not_asked_again() -> None:
    """It answered nothing itself: there is no test of its own to repeat."""
    named = weighed([link("a", "b", False), link("c", "b", False), link("a", "c")])
    assert list(named.named) == ["b"] and named.tests == () and named.doubtful(10_000, 0.01, 3) == ()
