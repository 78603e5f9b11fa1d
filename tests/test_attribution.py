"""User code or infrastructure: the judgement's own cases, and its laws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.clock import NS
from processors.attribution import BESIDE, ECHOES, PRIOR, Beside, Judgement, Sighting, attributed
from processors.policy import Attribution

RULES = Attribution()
NOW = 1_790_000_000 * NS


def at(after_s: float = 0, **more: Any) -> Sighting:
    given = {"kind": "illegal_access", "job": "gpt", "node": "n1", "attempt": 1, **more}
    return Sighting(seen_ns=NOW + int(after_s * NS), **given)


def beside(symptom: str, after_s: float = 0, node: str = "n1") -> Beside:
    return Beside(symptom, node, NOW + int(after_s * NS))


def judged(what: Sighting, *history: Sighting, trouble: tuple[Beside, ...] = (), **more: Any) -> Judgement:
    return attributed(what, history, trouble, RULES, **more)


@pytest.mark.parametrize(
    ("kind", "infra", "fault"),
    [
        ("illegal_access", 0.34, "undecided"),
        ("xid-13", 0.34, "undecided"),
        ("xid-31", 0.34, "undecided"),
        ("xid-43", 0.34, "undecided"),
        ("hang", 0.81, "infra"),
        ("nan", 0.75, "undecided"),
    ],
)
def test_without_evidence_the_papers_shares_stand(kind: str, infra: float, fault: str) -> None:
    found = judged(at(kind=kind))
    assert (found.infra, found.fault) == (infra, fault) and found.because == f"{kind}: infrastructure in {infra:.0%} of cases"


@pytest.mark.parametrize("symptom", ["gpu_memory_error", "gpu_thermal"])
def test_trouble_of_the_gpu_beside_it_raises_infrastructure(symptom: str) -> None:
    for after_s in (-590, 0, 290):
        found = judged(at(kind="xid-31"), trouble=(beside(symptom, after_s),))
        assert found.fault == "infra" and found.node == "n1" and f"beside {symptom} on n1" in found.because
    for after_s in (-610, 310):
        assert judged(at(), trouble=(beside(symptom, after_s),)).fault == "undecided"
    assert judged(at(), trouble=(beside(symptom, node="n2"),)).fault == "undecided"
    assert judged(at(), trouble=(beside("cpu_overload"),)).infra == 0.34


def test_one_job_on_many_nodes_at_once_points_at_the_job() -> None:
    found = judged(at(), at(2, node="n2"), at(5, node="n7", kind="xid-13"))
    assert found.fault == "user" and "3 nodes of job gpt at once" in found.because
    assert judged(at(), at(2, node="n2")).fault == "undecided"
    assert judged(at(), at(200, node="n2"), at(-200, node="n3")).fault == "undecided"  # not at once


def test_machines_without_a_job_and_sightings_without_a_machine_count_for_no_spread() -> None:
    assert judged(at(job=""), *(at(i, node=f"n{i}", job="") for i in range(2, 9))).infra == 0.34
    assert judged(at(), at(1, node=""), at(2, node="n2")).infra == 0.34
    assert judged(at(kind="xid-45", node="", job="a"), at(-5, kind="nan", node="", job="b")).fault == "undecided"


def test_many_nodes_of_one_rack_do_not() -> None:
    some = [at(i, node=f"n{i}", rack="r1") for i in range(1, 5)]
    assert judged(at(rack="r1"), *some, racks=4).infra > 0.5
    assert judged(at(rack="r1"), *some, racks=1).fault == "user"  # the job stands in no other
    assert judged(at(rack="r1"), *some, at(1, node="n9", rack="r2"), racks=4).fault == "user"


def test_many_jobs_on_one_node_point_at_the_node() -> None:
    found = judged(at(), at(-7200, job="llama", attempt=9))
    assert found.fault == "infra" and found.node == "n1" and "2 jobs met it on n1" in found.because
    assert judged(at(), at(-90_000, job="llama")).fault == "undecided"  # yesterday
    assert judged(at(), at(-7200, job="llama", kind="hang")).fault == "undecided"  # another trouble


def test_repeats_stay_with_a_machine_or_go_with_the_job() -> None:
    stays = judged(at(attempt=3, device="0000:3b:00"), *(at(-600 * i, attempt=3 - i, device="0000:3b:00") for i in (1, 2)))
    assert stays.infra > 0.6 and "GPU 0000:3b:00 of n1 in 3 attempts" in stays.because
    goes = judged(at(attempt=3), at(-600, attempt=2, node="n4"), at(-1200, attempt=1, node="n8"))
    assert goes.fault == "user" and "another node in each of 3 attempts" in goes.because
    same = judged(at(attempt=2, step=700), at(-600, attempt=1, node="n4", step=700))
    assert same.infra < 0.05 and "at step 700 each time" in same.because


def test_what_no_machine_showed_neither_stays_with_one_nor_is_met_by_many_jobs_on_it() -> None:
    again = judged(at(kind="hang", node="", attempt=3), at(-600, kind="hang", node="", attempt=2))
    assert (again.infra, again.because) == (0.81, "hang: infrastructure in 81% of cases")
    assert judged(at(kind="hang", node=""), at(-60, kind="hang", node="", job="llama", attempt=9)).infra == 0.81
    assert judged(at(attempt=3), at(-600, attempt=2, node="")).infra == 0.34


def test_new_code_points_at_the_code() -> None:
    assert judged(at(), code_is_new=True).fault == "user"
    assert judged(at(kind="hang"), code_is_new=True).fault == "undecided"


def test_contrary_evidence_cancels_out() -> None:
    some = [at(i, node=f"n{i}") for i in range(2, 5)]
    assert judged(at(), *some, trouble=(beside("gpu_memory_error"),)).infra == 0.34


def test_an_echo_is_judged_by_what_came_before_it() -> None:
    storm = [at(2 + i / 10, node=f"n{i}", kind="xid-45") for i in range(77)]
    first = at(0, node="n3", kind="xid-31")
    found = judged(storm[9], *storm, first)
    assert found.fault == "undecided" and found.infra == 0.34 and "an echo of xid-31 on n3" in found.because
    named = attributed(storm[9], [*storm, first], [beside("gpu_memory_error", -5, "n3")], RULES)
    assert (named.fault, named.node) == ("infra", "n3")


def test_echoes_alone_say_nothing_however_many_they_are() -> None:
    storm = [at(i / 10, node=f"n{i}", kind="xid-45") for i in range(77)]
    found = judged(storm[0], *storm[1:])
    assert (found.fault, found.node, found.infra) == ("undecided", "", 0.5)


def test_what_is_not_ambiguous_is_not_judged() -> None:
    assert judged(at(kind="xid-79")).fault == "undecided"


SIGHTINGS = st.builds(
    Sighting,
    kind=st.sampled_from([*PRIOR, *sorted(ECHOES), "xid-79"]),
    job=st.sampled_from(["a", "b", ""]),
    node=st.sampled_from(["n1", "n2", "n3", "n4"]),
    seen_ns=st.integers(NOW - 10**14, NOW + 10**12),
    attempt=st.integers(0, 3),
    rack=st.sampled_from(["", "r1", "r2"]),
    step=st.integers(-1, 2),
)
TROUBLES = st.builds(
    Beside,
    symptom=st.sampled_from([*sorted(BESIDE), "cpu_overload"]),
    node=st.sampled_from(["n1", "n2"]),
    seen_ns=st.integers(NOW - 10**12, NOW + 10**12),
)


@given(SIGHTINGS, st.lists(SIGHTINGS, max_size=8), st.lists(TROUBLES, max_size=4), st.integers(0, 3), st.booleans())
def test_order_and_repeats_change_nothing_and_trouble_beside_never_exonerates(
    what: Sighting, history: list[Sighting], trouble: list[Beside], racks: int, new: bool
) -> None:
    more: dict[str, Any] = {"racks": racks, "code_is_new": new}
    found = attributed(what, history, trouble, RULES, **more)
    assert 0 < found.infra < 1
    assert attributed(what, history[::-1] + history, trouble[::-1] * 2, RULES, **more) == found
    assert found.infra >= attributed(what, history, [], RULES, **more).infra
    assert (found.node != "") == (found.fault == "infra")
