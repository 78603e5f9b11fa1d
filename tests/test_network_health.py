"""What the node's detector says of network links."""

from __future__ import annotations

from typing import Any

import pytest

from events.envelope import Fact
from events.incident import Signal, SignalCleared
from events.network import LinkChanged, LinkSample, NicSample
from processors.detector import PartitionFold
from processors.network_health import VIEWS_MAX, NetworkHealth
from processors.node import node_detector
from processors.policy import Detectors, Network
from tests.telemetry import Story, catalogue, facts, told

IB = "mlx5_0/1"


def change(state: Any, before: Any, device: str = IB, downs: int | None = None, **more: Any) -> LinkChanged:
    downs = (1 if before == "up" and state != "up" else 0) if downs is None else downs
    return LinkChanged(device=device, state=state, before=before, downs=downs, **{"since_boot_s": 9000, **more})


def sample(*links: LinkSample, period_s: float = 30.0, since_boot_s: int = 9000) -> NicSample:
    return NicSample(period_s=period_s, since_boot_s=since_boot_s, links=links)


def link(device: str = IB, state: Any = "up", counted: dict[str, int] | None = None, **more: Any) -> LinkSample:
    return LinkSample(device=device, state=state, counted=tuple(sorted((counted or {}).items())), **more)


def said(*story: tuple[float, Fact], settings: Detectors | None = None) -> list[Any]:
    """(symptom, confidence, device) of signals and (symptom, "over") of what is over, in order."""
    telling = Story()
    if settings is not None:
        telling.adopt(0, settings)
    for at_s, fact in story:
        telling.say(at_s, "n1", fact, job="gpt", attempt=3, producer="nic")
    out = facts(told(node_detector(catalogue()), telling))
    return [
        (f.symptom, f.confidence, f.device) if isinstance(f, Signal) else (f.symptom, "over") if isinstance(f, SignalCleared) else f
        for f in out
    ]  # fmt: skip


DOWN, FLAP, UP = ("nic_down", "low", IB), ("nic_flap", "high", IB), ("nic_down", "over")


def test_a_link_that_goes_down_is_tolerated_and_over_when_it_is_back() -> None:
    assert said((10, change("down", "up")), (14, change("up", "down"))) == [DOWN, UP]


def test_the_claim_names_job_attempt_device_and_why() -> None:
    telling = Story()
    telling.say(5, "n1", change("down", "up", interface="ib0", detail="INIT, LinkUp"), job="gpt", attempt=3, producer="nic")
    (out,) = told(node_detector(catalogue()), telling)
    signal = out.event.data
    assert (out.event.job, out.event.attempt, signal.node, signal.device) == ("gpt", 3, "n1", IB)
    assert signal.evidence == "mlx5_0/1 (ib0) went down: INIT, LinkUp" and signal.rule == "link_down"
    assert signal.seen_ns == telling.records[0].time_ns and out.event.causes == ("e1",)


def test_twice_within_five_minutes_names_the_machine_and_not_twice_in_six() -> None:
    again = [(10.0, change("down", "up")), (12.0, change("up", "down"))]
    assert said(*again, (309, change("down", "up"))) == [DOWN, UP, DOWN, FLAP]
    assert said(*again, (311, change("down", "up"))) == [DOWN, UP, DOWN]


def test_two_links_down_once_each_are_no_flap_and_are_over_only_together() -> None:
    story = [
        (10.0, change("down", "up")), (11.0, change("down", "up", "mlx5_1/1")), (20.0, change("up", "down")),
        (30.0, change("up", "down", "mlx5_1/1")),
    ]  # fmt: skip
    assert said(*story) == [DOWN, ("nic_down", "low", "mlx5_1/1"), UP]


def test_a_blip_between_two_looks_counts() -> None:
    assert said((10, change("up", "up", downs=1))) == [DOWN, UP]
    assert said((10, change("up", "up", downs=2))) == [DOWN, FLAP, UP]


def test_a_link_that_flaps_for_ever_is_told_of_now_and_then() -> None:
    story: list[tuple[float, Fact]] = []
    for second in range(0, 600, 2):
        story += [(10.0 + second, change("down", "up")), (11.0 + second, change("up", "down"))]
    out = said(*story)
    assert out.count(FLAP) == 2  # one a window
    assert out.count(DOWN) == out.count(UP) <= 8


def test_one_that_stays_down_after_it_flapped_is_told_by_the_next_sample() -> None:
    story: list[tuple[float, Fact]] = []
    for second in range(0, 20, 2):
        story += [(10.0 + second, change("down", "up")), (11.0 + second, change("up", "down"))]
    story.append((40.0, change("down", "up")))
    flapping = said(*story)
    assert said(*story, (60.0, sample(link(state="down"))))[len(flapping) :] == [DOWN]
    dead = ("nic_down", "high", IB)  # as certain as one that never flapped
    assert said(*story, (60.0, sample(link(state="down"))), (90.0, sample(link(state="down"))))[len(flapping) :] == [DOWN, dead]


def test_a_flap_is_over_after_a_quiet_window() -> None:
    story = [
        (10.0, change("down", "up")),
        (11.0, change("up", "down")),
        (12.0, change("down", "up")),
        (13.0, change("up", "down")),
    ]
    assert said(*story, (200, sample(link())))[-1] == UP
    assert said(*story, (313, sample(link())))[-1] == ("nic_flap", "over")


def test_links_of_a_boot_are_left_alone_until_its_grace_is_over() -> None:
    early = [(10.0, change("down", "up", since_boot_s=60)), (15.0, change("up", "down", since_boot_s=65)),
             (20.0, change("down", "up", since_boot_s=70))]  # fmt: skip
    assert said(*early) == []
    assert said(*early, (40, sample(link(state="down"), since_boot_s=290))) == []
    assert said(*early, (60, sample(link(state="down"), since_boot_s=310))) == [DOWN], "what lasts beyond it is a fault"
    assert said(*early, (60, sample(link(), since_boot_s=310))) == []


def test_a_link_that_disappears_is_down() -> None:
    out = said((10, change("gone", "up")), (20, sample(link(state="gone"))), (30, change("up", "gone")))
    assert out == [DOWN, UP]


def test_a_link_moved_to_another_name_space_is_not_down() -> None:
    assert said((10, change("moved", "up"))) == []
    assert said((10, change("down", "up")), (12, change("moved", "down"))) == [DOWN, UP]


def test_a_down_that_no_one_told_of_is_seen_in_the_sample_and_counts() -> None:
    assert said((30, sample(link(state="down")))) == [DOWN]
    assert said((30, sample(link(state="down"))), (60, sample(link()))) == [DOWN, UP]
    assert said((30, sample(link(state="down"))), (60, sample(link())), (90, sample(link(state="down"))))[-2:] == [DOWN, FLAP]


def test_a_link_that_is_watched_no_more_leaves_no_claim_behind() -> None:
    assert said((10, change("down", "up")), (30, sample())) == [DOWN, UP]


@pytest.mark.parametrize(
    ("counted", "over"),
    [
        ({"symbol_error": 301}, {"symbol_errors", "symbol_errors_in_an_hour"}),
        ({"symbol_error": 300}, {"symbol_errors_in_an_hour"}),
        ({"symbol_error": 120}, set()),
        ({"link_error_recovery": 3}, {"link_recoveries"}),
        ({"link_error_recovery": 2}, set()),
        ({"port_rcv_errors": 301}, {"receive_errors"}),
        ({"rx_errors": 301}, {"receive_errors"}),
        ({"port_rcv_errors": 300}, set()),
        ({"local_ack_timeout_err": 31}, {"ack_timeouts"}),
        ({"local_ack_timeout_err": 30}, set()),
        ({"port_xmit_discards": 3001}, {"discards"}),
        ({"roce_slow_restart": 301}, {"slow_restarts"}),
        ({"excessive_buffer_overrun_errors": 1}, {"integrity"}),
        ({"local_link_integrity_errors": 1}, {"integrity"}),
        ({"rnr_nak_retry_err": 1}, {"integrity"}),
        ({"out_of_sequence": 10**9, "port_xmit_wait": 10**9}, set()),
    ],
)  # fmt: skip
def test_counters_against_their_limits(counted: dict[str, int], over: set[str]) -> None:
    telling = Story()
    telling.say(30, "n1", sample(link(counted=counted)), producer="nic")
    out = facts(told(node_detector(catalogue()), telling))
    assert {f.rule for f in out if isinstance(f, Signal)} == over
    assert all(f.symptom == "ib_error" and f.confidence == "low" and f.device == IB for f in out if isinstance(f, Signal))


def test_few_errors_an_hour_add_up() -> None:
    quiet = [(30.0 * i, sample(link(counted={"symbol_error": 2}))) for i in range(1, 61)]
    assert said(*quiet) == []
    assert said(*quiet, (1830, sample(link(counted={"symbol_error": 2})))) == [("ib_error", "low", IB)]
    sparse = [(100.0 * i, sample(link(counted={"symbol_error": 2}))) for i in range(1, 100)]
    assert said(*sparse) == []


def test_errors_that_last_are_told_each_five_minutes_and_over_after_five_without() -> None:
    error = ("ib_error", "low", IB)
    lasting = [(30.0 * i, sample(link(counted={"rnr_nak_retry_err": 1}))) for i in range(1, 21)]
    assert said(*lasting) == [error, error]
    assert said(*lasting, (899, sample(link()))) == [error, error]
    assert said(*lasting, (901, sample(link()))) == [error, error, ("ib_error", "over")]


def test_fewer_lanes_are_a_fault_that_ends_with_its_repair() -> None:
    slow, whole = link(rate_mbps=100_000, rate_full_mbps=400_000), link(rate_mbps=400_000, rate_full_mbps=400_000)
    assert said((30, sample(whole)), (60, sample(slow)), (90, sample(slow))) == [("ib_error", "low", IB)]
    assert said((60, sample(slow)), (90, sample(whole)), (361, sample(whole)))[-1] == ("ib_error", "over")
    unknown = link(rate_mbps=-1, rate_full_mbps=400_000)
    assert said((30, sample(unknown)), (60, sample(link(rate_mbps=10_000, rate_full_mbps=-1)))) == []


def test_the_first_sample_has_no_rates_and_accuses_nobody() -> None:
    assert said((1, sample(link(), period_s=0))) == []


def test_thresholds_are_the_policys() -> None:
    lax = Detectors(network=Network(flap_count=3, boot_grace_s=0, receive_errors_per_s=1e9, rate_share_min=0.2))
    twice = [(10.0, change("down", "up", since_boot_s=1)), (12.0, change("up", "down")), (14.0, change("down", "up"))]
    assert said(*twice, settings=lax) == [DOWN, UP, DOWN]
    assert said(*twice, (15, change("up", "down")), (16, change("down", "up")), settings=lax)[-2:] == [DOWN, FLAP]
    bad = sample(link(counted={"port_rcv_errors": 10**9}, rate_mbps=100_000, rate_full_mbps=400_000))
    assert said((30, bad), settings=lax) == []


def test_a_healthy_node_keeps_no_state_and_a_sick_one_little() -> None:
    fold = PartitionFold(NetworkHealth())
    telling = Story()
    telling.say(30, "n1", sample(*(link(f"mlx5_{i}/1", rate_mbps=400, rate_full_mbps=400) for i in range(9))), producer="nic")
    many = [link(f"mlx5_{i}/1", "down", {"symbol_error": 9999}) for i in range(256)]
    telling.say(60, "n2", sample(*many), producer="nic")
    for i in range(500):
        telling.say(61 + i, "n2", change("down", "up", f"eth{i}"), producer="nic")
    for record in telling.records:
        fold.feed(record)
    assert fold.keys["n1"].state == ()
    assert len(fold.keys["n2"].state) <= VIEWS_MAX


def test_the_state_survives_being_stored_at_any_point() -> None:
    telling = Story()
    for at_s, fact in (
        (10.0, change("down", "up")), (11.0, change("up", "down")), (12.0, change("down", "up")),
        (30.0, sample(link(state="down", counted={"symbol_error": 130}), link("eth1", rate_mbps=1, rate_full_mbps=2))),
        (60.0, sample(link(), link("eth1", rate_mbps=2, rate_full_mbps=2))), (500.0, sample(link(), link("eth1"))),
    ):  # fmt: skip
        telling.say(at_s, "n1", fact, producer="nic")
    detector = NetworkHealth()
    whole = [out.event for out in told(detector, telling)]
    assert len(whole) >= 6
    for cut in range(len(telling.records)):
        first, second = PartitionFold(detector), PartitionFold(detector)
        out = [o for record in telling.records[:cut] for o in first.feed(record)[0]]
        for key, keyed in first.keys.items():
            keyed.state = detector.load(key, detector.dump(keyed.state))
        second.clock, second.keys = first.clock, first.keys
        out += [o for record in telling.records[cut:] for o in second.feed(record)[0]]
        assert [o.event for o in out] == whole


DEAD = ("nic_down", "high", IB)


def test_a_link_that_is_down_in_two_samples_on_end_is_dead() -> None:
    down = sample(link(state="down"))
    assert said((10, change("down", "up")), (20, down), (50, down), (80, down), (110, sample(link()))) == [DOWN, DEAD, UP]
    # One that comes back in between flaps at worst.
    assert said((10, change("down", "up")), (20, down), (30, change("up", "down")), (50, sample(link()))) == [DOWN, UP]
    # As a driver that is loaded anew under it, or an agent that was away.
    assert said((20, down), (50, down)) == [DOWN, DEAD]


def test_a_link_that_a_person_set_down_is_not_dead_and_neither_is_one_of_a_boot() -> None:
    down = sample(link(state="down"))
    assert said((10, change("down", "up", by_hand=True)), (20, down), (50, down), (80, down)) == [DOWN]
    young = sample(link(state="down"), since_boot_s=100)
    assert said((20, young), (50, young), (80, young)) == []


def twice(*story: tuple[float, float, Fact]) -> list[Any]:
    """(told at, held for, fact), each sent again a little later, as a publisher does whose acknowledgement was lost."""
    telling = Story()
    for number, (at_s, held_s, fact) in enumerate(story, 1):
        telling.say(at_s, "n1", fact, producer="nic", number=number, id=f"x{number}", held_s=held_s)
        telling.say(at_s + 6, "n1", fact, producer="nic", number=number, id=f"x{number}", held_s=held_s + 6)
    out = facts(told(node_detector(catalogue()), telling))
    return [(f.symptom, f.confidence) for f in out if isinstance(f, Signal)]


def test_one_that_is_sent_twice_is_no_flap() -> None:
    assert twice((100, 0, change("down", "up")), (120, 0, change("up", "down"))) == [("nic_down", "low")]
    assert twice((100, 0, sample(link(counted={"port_rcv_errors": 3000})))) == [("ib_error", "low")]


def test_what_waited_in_a_spool_counts_for_a_flap_and_changes_nothing_of_how_the_link_stands() -> None:
    """Down at 10 s and up at 20 s told at 105 s and 106 s, after a down at 100 s and the up at 104 s."""
    telling = Story()
    for at_s, held_s, fact in (
        (100.0, 0.0, change("down", "up")), (104.0, 0.0, change("up", "down")), (105.0, 95.0, change("down", "up")), (106.0, 86.0, change("up", "down")),
    ):  # fmt: skip
        telling.say(at_s, "n1", fact, job="gpt", attempt=3, producer="nic", held_s=held_s)
    detector = node_detector(catalogue())
    fold = PartitionFold(detector)
    out = [outgoing.event.data for record in telling.records for outgoing in fold.feed(record)[0]]
    assert [(f.symptom, f.confidence) for f in out if isinstance(f, Signal)] == [
        ("nic_down", "low"),
        ("nic_down", "low"),
        ("nic_flap", "high"),
    ]
    (view,) = fold.keys["n1"].state[1]
    assert not view.down_ns and len(view.downs) == 2
