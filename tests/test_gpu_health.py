"""The node detector's judgement of GPUs, from facts as they are on the bus: what is claimed, how surely, how often, and what never is."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from events.envelope import Fact
from events.gpu import Gpu, GpuSample, GpuWatch, GpuXid, LinkErrors, LostGpu
from events.hardware import KernelRecord
from events.incident import Signal, SignalCleared
from processors.detector import PartitionFold
from processors.gpu_health import GpuHealth
from processors.gpu_rules import RULES
from processors.node import NodeDetector, node_detector
from processors.policy import Detectors, GpuLimits
from tests.telemetry import Story, catalogue, facts, ns, told

CATALOGUE = catalogue()
NODE = NodeDetector((GpuHealth(CATALOGUE),))
XID_119 = "NVRM: Xid (PCI:0000:20:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response from GPU1 GSP!"
UP_S = 5000.0


def gpu(index: int = 0, **more: Any) -> Gpu:
    healthy: dict[str, Any] = {
        "links_active": (0, 1, 2, 3), "links_inactive": (), "ecc_uncorrected_volatile": 0, "ecc_uncorrected_aggregate": 5,
        "recovery_action": "none", "remap_pending": False, "remap_failed": False, "clock_reasons": (), "utilization_percent": 99,
        "pcie_width": 16, "pcie_width_max": 16,
    }  # fmt: skip
    address = f"0000:{0x10 + 0x10 * index:02x}:00.0"
    return Gpu(index=index, address=address, uuid=f"GPU-{index}", serial=f"165{index}", **(healthy | more))


def sample(
    *changed: Gpu, of: int = 4, without: tuple[int, ...] = (), up_s: float = UP_S, lost: tuple[LostGpu, ...] = ()
) -> GpuSample:
    """`of` GPUs, some of them changed, some not there."""
    by_index = {one.index: one for one in changed}
    gpus = tuple(by_index.get(i, gpu(i)) for i in range(of) if i not in without)
    return GpuSample(interval_s=10.0, up_s=up_s, driver="570", on_bus=of, gpus=gpus, lost=lost)


def missed(misses: int, state: str = "S", **more: Any) -> GpuWatch:
    return GpuWatch(state="missed", misses=misses, deadline_s=5, up_s=UP_S, process_state=state, **more)


def tell(story: Story, at_s: float, *said: Fact, **more: Any) -> Story:
    for fact in said:
        story.say(at_s, "n1", fact, producer="nvml", **{"job": "gpt", "attempt": 1, **more})
    return story


def every_10_s(*samples: Fact, start_s: float = 0, **more: Any) -> Story:
    story = Story()
    for i, one in enumerate(samples):
        tell(story, start_s + 10 * i, one, **more)
    return story


def claims(story: Story) -> list[Any]:
    return facts(told(NODE, story))


def brief(story: Story) -> list[tuple[str, ...]]:
    return [
        (fact.symptom, fact.confidence, fact.rule, fact.device) if isinstance(fact, Signal) else (fact.symptom, "cleared")
        for fact in claims(story)
    ]


# --- healthy GPUs, and what is no fault ---------------------------------------------------------------------------------------------


def test_healthy_gpus_are_silent_and_change_nothing() -> None:
    fold = PartitionFold(NODE)
    states = []
    for record in every_10_s(*[sample()] * 50).records:
        out, _ = fold.feed(record)
        assert out == []
        states.append(fold.keys["n1"].state)
    assert all(state is states[0] for state in states[1:]), "nothing new: nothing to store"


def test_no_driver_and_no_gpus_are_no_fault() -> None:
    quiet = [
        GpuWatch(state="no_driver", up_s=UP_S),
        GpuWatch(state="no_gpus", up_s=UP_S),
        sample(of=0),
        GpuWatch(state="refused", up_s=UP_S),
    ]
    assert claims(every_10_s(*quiet)) == []


def test_what_a_first_sample_shows_of_before_is_history_and_states_are_not() -> None:
    """Counters count from the first sample on; a state is so now, whoever sees it first."""
    old = gpu(
        1,
        ecc_uncorrected_volatile=9,
        links_active=(0, 1),
        links_inactive=(2, 3),
        link_errors=(LinkErrors(link=0, crc=10**6, recoveries=9),),
    )
    assert claims(every_10_s(*[sample(old)] * 5)) == []
    assert brief(every_10_s(sample(gpu(1, remap_failed=True)))) == [
        ("gpu_memory_error", "high", "gpu_row_remap_failed", "0000:20:00.0")
    ]


# --- gone -----------------------------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_claimed_at_once_and_cleared_when_it_is_back() -> None:
    gone = LostGpu(index=2, address="0000:30:00.0", uuid="GPU-2", code=15, error="the GPU is lost")
    story = every_10_s(sample(), sample(without=(2,), lost=(gone,)), sample(without=(2,), lost=(gone,)), sample(), sample())
    out = told(NODE, story)
    signal, cleared = facts(out)
    assert isinstance(signal, Signal) and isinstance(cleared, SignalCleared)
    assert (signal.symptom, signal.confidence, signal.device) == ("gpu_unavailable", "high", "0000:30:00.0")
    assert signal.evidence == (
        "GPU 2 (0000:30:00.0, serial number 1652) is gone. NVML can't reach it any more: the GPU is lost. 3 GPUs answer; "
        "the kernel's driver holds 4"
    )
    assert (out[0].event.job, out[0].event.attempt, out[0].event.causes) == ("gpt", 1, ("e2",))
    assert cleared.symptom == "gpu_unavailable" and out[1].event.causes == ("e4",)


def test_one_that_is_not_listed_is_gone_too_and_only_the_last_return_clears() -> None:
    story = every_10_s(sample(), sample(without=(1, 2)), sample(without=(1,)), sample(without=(1,)), sample())
    assert brief(story) == [
        ("gpu_unavailable", "high", "gpu_lost", "0000:20:00.0"),
        ("gpu_unavailable", "high", "gpu_lost", "0000:30:00.0"),
        ("gpu_unavailable", "cleared"),
    ]
    assert [c.seen_ns for c in claims(story)][-1] == claims(story)[0].seen_ns + 30_000_000_000


def test_all_gone_is_all_told() -> None:
    assert len(claims(every_10_s(sample(), sample(of=0)))) == 4


def test_a_gpu_that_was_never_seen_but_is_counted_is_missing() -> None:
    """An agent that starts after the loss: the fault is not invisible to it."""
    unnamed = LostGpu(index=3, code=999, error="unknown error")
    story = every_10_s(*[sample(of=3, lost=(unnamed,))] * 3, sample(of=4))
    assert brief(story) == [("gpu_unavailable", "high", "gpu_lost", "index 3"), ("gpu_unavailable", "cleared")]
    denied = LostGpu(index=3, code=4, error="no permission")
    assert claims(every_10_s(*[sample(of=3, lost=(denied,))] * 3)) == []


def test_a_lost_gpu_is_known_by_the_detector_alone() -> None:
    """Its agent was started anew and knows it by its index at most."""
    unnamed = LostGpu(index=2, code=15, error="the GPU is lost")
    story = every_10_s(sample(), sample(without=(2,), lost=(unnamed,)), sample(without=(2,)))
    assert brief(story) == [("gpu_unavailable", "high", "gpu_lost", "0000:30:00.0")]


def test_after_a_reboot_a_gpu_may_come_late_and_cards_may_be_changed() -> None:
    story = every_10_s(sample())
    for i, one in enumerate((sample(without=(2,), up_s=60), sample(without=(2,), up_s=70), sample(up_s=80))):
        tell(story, 100 + 10 * i, one, boot="boot-2")
    assert brief(story) == [("gpu_unavailable", "high", "gpu_lost", "0000:30:00.0"), ("gpu_unavailable", "cleared")]
    late = every_10_s(sample())
    for i, one in enumerate((sample(without=(2,), up_s=60), sample(up_s=70), sample(up_s=80))):
        tell(late, 100 + 10 * i, one, boot="boot-2")
    assert claims(late) == []
    swapped = every_10_s(sample())
    other = gpu(2).model_copy(update={"uuid": "GPU-new"})
    tell(swapped, 100, sample(other, up_s=60), boot="boot-2")
    tell(swapped, 110, sample(other, up_s=70), boot="boot-2")
    assert claims(swapped) == []


def test_what_lasts_is_told_again_later_and_to_a_new_attempt() -> None:
    gone = sample(without=(0,))
    story = every_10_s(sample(), *[gone] * 130)  # 1,300 s
    assert len(claims(story)) == 3, "every ten minutes"
    story = every_10_s(sample(), gone, gone)
    tell(story, 40, gone, attempt=2)
    tell(story, 50, gone, attempt=2)
    assert [o.event.attempt for o in told(NODE, story)] == [1, 2]


def test_what_was_told_from_a_spool_is_told_again_when_it_is_fresh() -> None:
    story = every_10_s(sample())
    tell(story, 400, sample(without=(0,)), held_s=380)
    tell(story, 401, sample(without=(0,)))
    tell(story, 411, sample(without=(0,)))
    assert len(claims(story)) == 2


# --- the driver -------------------------------------------------------------------------------------------------------------------------


def test_a_hang_needs_two_misses_and_more() -> None:
    assert claims(every_10_s(sample(), *[missed(i) for i in range(1, 20)])) == [], "slow alone is no hang"
    assert claims(every_10_s(sample(), missed(1, "D"))) == [], "one miss is none"
    story = every_10_s(
        sample(), missed(1, "D"), missed(2, "D", address="0000:20:00.0", waits_in="os_acquire_mutex"), missed(3, "D"), sample()
    )
    assert brief(story) == [("gpu_driver_hang", "high", "gpu_driver_hang", "0000:20:00.0"), ("gpu_driver_hang", "cleared")]
    assert "in uninterruptible sleep in os_acquire_mutex" in claims(story)[0].evidence
    assert brief(every_10_s(sample(), missed(1), missed(2, ranks_stuck=(3,)))) == [
        ("gpu_driver_hang", "high", "gpu_driver_hang", "")
    ]
    assert claims(every_10_s(sample(), missed(1, "D"), sample(), missed(1, "D"))) == [], "not on end"


def test_the_drivers_own_word_makes_it_a_hang_before_or_after() -> None:
    before = every_10_s(sample(), start_s=0)
    before.kernel(50, "n1", XID_119)
    tell(before, 60, missed(1), missed(2))
    after = tell(every_10_s(sample()), 50, missed(1), missed(2))
    after.kernel(55, "n1", XID_119)
    for story in (before, after):
        [signal] = claims(story)
        assert (signal.symptom, signal.confidence, signal.device) == ("gpu_driver_hang", "high", "0000:20:00.0")
        assert "Xid 119 of 0000:20:00.0" in signal.evidence
    long_ago = every_10_s(sample())
    long_ago.kernel(50, "n1", XID_119)
    assert claims(tell(long_ago, 400, missed(1), missed(2))) == []
    for record in (KernelRecord(text=XID_119, hearsay=True), KernelRecord(text=XID_119, history=True)):
        story = every_10_s(sample())
        story.kernel(50, "n1", record)
        assert claims(tell(story, 60, missed(1), missed(2))) == []
    by_nvml = tell(every_10_s(sample()), 50, GpuXid(xid=120, address="0000:30:00.0"), missed(1), missed(2))
    assert ("gpu_driver_hang", "high", "gpu_driver_hang", "0000:30:00.0") in brief(by_nvml)


LOADING = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15"


def test_a_driver_that_is_loaded_anew_is_no_hang_and_its_gpus_come_one_by_one() -> None:
    story = every_10_s(sample(), sample())
    story.kernel(25, "n1", "nvidia-modeset: Unloading", job="gpt", attempt=1)
    tell(story, 30, missed(1, "D"))
    tell(story, 40, missed(2, "D", ranks_stuck=(0, 1)))
    story.kernel(45, "n1", LOADING, job="gpt", attempt=1)
    tell(story, 50, sample(without=(1, 2, 3)))
    tell(story, 60, sample(without=(3,)))
    tell(story, 70, sample())
    assert claims(story) == []


def test_one_that_hangs_or_lacks_a_gpu_long_after_it_was_loaded_is_told() -> None:
    story = every_10_s(sample(), sample())
    story.kernel(25, "n1", LOADING, job="gpt", attempt=1)
    for second in range(30, 200, 10):
        tell(story, second, missed(second // 10, "D"))
    tell(story, 210, sample(without=(3,)))
    assert brief(story)[0][:3] == ("gpu_driver_hang", "high", "gpu_driver_hang")
    assert ("gpu_unavailable", "high", "gpu_lost", "0000:40:00.0") in brief(story)
    assert claims(story)[0].seen_ns == ns(150)


def test_the_drivers_own_word_of_a_hang_counts_while_it_is_loaded() -> None:
    story = every_10_s(sample(), sample())
    story.kernel(25, "n1", LOADING, job="gpt", attempt=1)
    story.kernel(30, "n1", XID_119, job="gpt", attempt=1)
    tell(story, 40, missed(2, "D"))
    assert [one[:2] for one in brief(story)] == [("gpu_driver_hang", "high")]


def test_a_driver_that_is_gone_within_a_boot_is_worth_a_word() -> None:
    gone = GpuWatch(state="no_driver", detail="its driver is not loaded", up_s=UP_S)
    assert brief(every_10_s(sample(), gone, sample())) == [
        ("gpu_unavailable", "low", "gpu_driver_gone", ""),
        ("gpu_unavailable", "cleared"),
    ]
    story = tell(every_10_s(sample()), 100, GpuWatch(state="no_driver", up_s=UP_S), boot="boot-2")
    assert claims(story) == [], "after a reboot it may be loaded later"


# --- memory, heat, links ------------------------------------------------------------------------------------------------------------------


def test_uncorrectable_errors_are_told_as_they_come_and_not_more_than_once_a_minute() -> None:
    def errors(volatile: int | None, aggregate: int | None) -> GpuSample:
        return sample(gpu(1, ecc_uncorrected_volatile=volatile, ecc_uncorrected_aggregate=aggregate))

    story = every_10_s(errors(0, 5), errors(2, 7), errors(3, 8), errors(3, 8), *[errors(9, 14)] * 6)
    one, two = claims(story)
    assert (one.symptom, one.confidence, one.rule, one.device) == (
        "gpu_memory_error",
        "high",
        "gpu_ecc_uncorrected",
        "0000:20:00.0",
    )
    assert "2 more uncorrectable memory errors; now 2 since the driver was loaded, 7 over its life" in one.evidence
    assert "7 more uncorrectable memory errors; now 9" in two.evidence, "what came within the minute is in the next"
    assert len(claims(every_10_s(errors(4, None), errors(0, None), errors(1, None)))) == 1, "the driver was loaded anew"
    assert claims(every_10_s(errors(4, None), errors(None, None), errors(4, 9), errors(4, 9))) == []
    # The volatile counter starts at zero with the boot: what it has then is new.
    rebooted = tell(every_10_s(errors(3, None)), 100, errors(4, None), boot="boot-2")
    assert "4 more uncorrectable memory errors" in claims(rebooted)[0].evidence


def test_rows_that_wait_or_cannot_be_remapped() -> None:
    pending, failed = sample(gpu(0, remap_pending=True, remapped_uncorrected=2)), sample(gpu(0, remap_failed=True))
    assert brief(every_10_s(sample(), pending, pending, pending)) == [
        ("gpu_memory_error", "low", "gpu_row_remap_pending", "0000:10:00.0")
    ]
    assert brief(every_10_s(sample(), failed, failed)) == [("gpu_memory_error", "high", "gpu_row_remap_failed", "0000:10:00.0")]
    assert claims(every_10_s(sample(), pending, sample(), pending, sample())) == [], "it flaps"
    retire = sample(gpu(0, remap_pending=None, remap_failed=None, retire_pending=True))
    assert "page retirement" in claims(every_10_s(retire, retire))[0].evidence


def test_samples_that_come_twice_or_far_apart_are_not_on_end() -> None:
    hot = sample(gpu(3, clock_reasons=("hw_thermal",)))
    twice = Story()
    for i in range(2):
        for _ in range(2):
            tell(twice, 10 * i, hot, id=f"hot-{i}", number=i + 1)
    assert claims(twice) == []
    apart = Story()
    for i in range(9):
        tell(apart, 600 * i, hot)
    assert claims(apart) == []
    # A sample that waited in a spool counts by when it was seen.
    late = every_10_s(hot, hot)
    tell(late, 12, hot, held_s=11)
    assert claims(late) == []
    tell(late, 20, hot)
    assert brief(late) == [("gpu_thermal", "low", "gpu_hw_thermal", "0000:40:00.0")]


def test_a_sample_that_others_overtook_changes_nothing() -> None:
    """Errors that were told of are not new because an older sample with fewer came after; and an old answer ends no hang."""
    story = every_10_s(*(sample(gpu(1, ecc_uncorrected_volatile=n, ecc_uncorrected_aggregate=5 + n)) for n in (0, 3, 5)))
    for at_s in (100.0, 200.0):
        older = sample(gpu(1, ecc_uncorrected_volatile=3, ecc_uncorrected_aggregate=8))
        tell(story, at_s, older, held_s=at_s - 10)
        tell(story, at_s + 1, sample(gpu(1, ecc_uncorrected_volatile=5, ecc_uncorrected_aggregate=10)))
    tell(story, 210, missed(1, "D"))
    tell(story, 215, sample(), held_s=100)
    tell(story, 220, missed(2, "D"))
    found = [one for one in brief(story) if one[-1] != "cleared"]
    assert [one[:3] for one in found] == [
        ("gpu_memory_error", "high", "gpu_ecc_uncorrected"),
        ("gpu_memory_error", "high", "gpu_ecc_uncorrected"),
        ("gpu_driver_hang", "high", "gpu_driver_hang"),
    ]
    ecc = [fact for fact in claims(story) if isinstance(fact, Signal) and fact.symptom == "gpu_memory_error"]
    assert "3 more" in ecc[0].evidence and "2 more" in ecc[1].evidence


def test_heat_that_lasts_and_ends() -> None:
    hot = sample(
        gpu(
            3,
            clock_reasons=("hw_slowdown", "hw_thermal"),
            temperature_celsius=92.0,
            slowdown_celsius=87.0,
            sm_clock_mhz=345,
            sm_clock_max_mhz=1980,
        )
    )
    assert claims(every_10_s(sample(), hot, hot, sample(), hot, hot, sample())) == []
    assert claims(every_10_s(*[sample(gpu(3, clock_reasons=("sw_thermal", "power_cap")))] * 9)) == [], (
        "those are the driver's everyday means"
    )
    story = every_10_s(sample(), hot, hot, hot, hot, sample(), sample(), hot, sample(), sample(), sample())
    assert brief(story) == [("gpu_thermal", "low", "gpu_hw_thermal", "0000:40:00.0"), ("gpu_thermal", "cleared")]
    assert "92 °C (slows down at 87 °C), 345 of 1980 MHz" in claims(story)[0].evidence


def test_links_that_go_down_after_they_were_up() -> None:
    down = sample(gpu(0, links_active=(0, 1, 3), links_inactive=(2,)))
    assert claims(every_10_s(*[down] * 5)) == [], "it was never up: so it is built, or it is bound elsewhere"
    story = every_10_s(sample(), down, down, down, sample(), sample())
    assert brief(story) == [("nvlink_error", "low", "gpu_link_inactive", "0000:10:00.0"), ("nvlink_error", "cleared")]
    assert "NVLink 2 was active and is not; 3 links are" in claims(story)[0].evidence
    rebooted = every_10_s(sample())
    for i in range(5):
        tell(rebooted, 100 + 10 * i, down, boot="boot-2")
    assert claims(rebooted) == [], "in this boot it was not up"
    coming_and_going = every_10_s(sample(), down, down, sample(), down, down, sample(), sample())
    assert brief(coming_and_going) == brief(story), "up for one sample is not over"
    flapping = every_10_s(sample(), *[down, sample()] * 5)
    assert claims(flapping) == []


def test_link_errors_that_grow() -> None:
    def links(crc: int = 0, recoveries: int = 0) -> GpuSample:
        return sample(gpu(0, link_errors=(LinkErrors(link=1, crc=crc, recoveries=recoveries),) if crc or recoveries else ()))

    rule = ("nvlink_error", "low", "gpu_link_errors", "0000:10:00.0")
    assert claims(every_10_s(links(), links(recoveries=1), links(recoveries=1), links(recoveries=1))) == [], (
        "once is no ailing link"
    )
    assert brief(every_10_s(links(), links(recoveries=1), links(recoveries=2))) == [rule]
    assert claims(every_10_s(*[links(crc=900 * i) for i in range(9)])) == [], "90 CRC errors a second are repaired"
    assert brief(every_10_s(*[links(crc=1000 * i) for i in range(3)])) == [rule]
    rebooted = tell(every_10_s(links(crc=10**5)), 100, links(crc=10**6), boot="boot-2")
    tell(rebooted, 110, links(crc=10**6 + 5000), boot="boot-2")
    assert claims(rebooted) == [], "counters of another boot are not compared"


def test_a_pcie_link_that_is_narrow_under_load() -> None:
    narrow, idle = (sample(gpu(2, pcie_width=8, utilization_percent=load)) for load in (95, 0))
    assert claims(every_10_s(*[idle] * 9)) == [], "to save power"
    assert brief(every_10_s(sample(), *[narrow] * 3)) == [("gpu_unavailable", "low", "gpu_pcie_narrow", "0000:30:00.0")]


def test_the_drivers_recovery_action() -> None:
    def asks(action: Any) -> Story:
        return every_10_s(sample(), *[sample(gpu(1, recovery_action=action))] * 3, sample(), sample())

    expected = {
        "none": [], "reset": [("gpu_unavailable", "high")], "reboot": [("gpu_driver_hang", "high")],
        "drain_p2p": [("gpu_unavailable", "low")], "drain_and_reset": [("gpu_unavailable", "low")],
        "recover_imex_domain": [("nvlink_error", "low")], "bus_reset": [("gpu_unavailable", "high")],
        "system_reboot": [("gpu_driver_hang", "high")], "other": [("gpu_unavailable", "low")],
    }  # fmt: skip
    for action, what in expected.items():
        found = [(fact.symptom, fact.confidence) for fact in claims(asks(action)) if isinstance(fact, Signal)]
        assert found == what, action
        assert [fact.symptom for fact in claims(asks(action)) if isinstance(fact, SignalCleared)] == [
            symptom for symptom, _ in what
        ]


def test_a_boots_first_minutes_raise_nothing_of_low_confidence() -> None:
    """NVSentinel's lesson: links train at every boot."""
    down, lost = gpu(0, links_active=(0,), links_inactive=(1, 2, 3)), sample(without=(1,), up_s=100)
    young = [sample(up_s=90), *[sample(down, gpu(3, remap_pending=True, clock_reasons=("hw_thermal",)), up_s=100)] * 9]
    assert claims(every_10_s(*young)) == []
    assert brief(every_10_s(sample(up_s=90), lost)) == [("gpu_unavailable", "high", "gpu_lost", "0000:20:00.0")]
    after = every_10_s(*young, *[sample(down, up_s=400)] * 2)
    assert brief(after) == [("nvlink_error", "low", "gpu_link_inactive", "0000:10:00.0")]


# --- Xids that NVML tells of -----------------------------------------------------------------------------------------------------------


def test_nvmls_word_of_an_xid_serves_where_the_kernel_log_is_not_read() -> None:
    story = tell(
        Story(),
        1,
        GpuXid(xid=79, address="0000:20:00.0"),
        GpuXid(xid=79, address="0000:20:00.0"),
        GpuXid(xid=45, address="0000:20:00.0"),
    )
    [signal] = claims(story)
    assert (signal.symptom, signal.confidence, signal.device) == ("gpu_unavailable", "high", "0000:20:00.0")
    unknown = claims(tell(Story(), 1, GpuXid(xid=31337, address="0000:20:00.0")))
    assert all(fact.confidence != "high" for fact in unknown), "a code that nobody knows names no machine"
    heard = Story()
    heard.kernel(1, "n1", "NVRM: Xid (PCI:0000:20:00): 79, pid=1, GPU has fallen off the bus.")
    tell(heard, 1.1, GpuXid(xid=79, address="0000:20:00.0"))
    assert claims(heard) == [], "the line told of it"
    assert len(facts(told(node_detector(CATALOGUE), heard))) == 1


# --- laws ---------------------------------------------------------------------------------------------------------------------------------

_GPUS = st.builds(
    gpu,
    st.integers(0, 3),
    links_active=st.sampled_from([None, (0, 1), (0,)]), links_inactive=st.sampled_from([None, (), (1,)]),
    ecc_uncorrected_volatile=st.none() | st.integers(0, 3), remap_pending=st.none() | st.booleans(),
    recovery_action=st.sampled_from([None, "none", "reset", "drain_and_reset"]),
    clock_reasons=st.sampled_from([None, (), ("hw_thermal",)]), pcie_width=st.sampled_from([None, 8, 16]),
    link_errors=st.sampled_from([(), (LinkErrors(link=0, crc=10**5),), (LinkErrors(link=0, recoveries=3),)]),
)  # fmt: skip
_SAMPLES = st.builds(
    lambda changed, without, up_s, lost: sample(*changed, without=without, up_s=up_s, lost=lost),
    st.lists(_GPUS, max_size=3), st.sampled_from([(), (0,), (1, 2)]), st.sampled_from([10.0, 5000.0]),
    st.sampled_from([(), (LostGpu(index=0, code=15),), (LostGpu(index=2, uuid="GPU-2", address="0000:30:00.0", code=28),)]),
)  # fmt: skip
_SAID = st.lists(
    st.tuples(
        _SAMPLES | st.builds(missed, st.integers(1, 4), st.sampled_from("SD")) | st.sampled_from(["no_driver", "watching", "refused"]).map(
            lambda state: GpuWatch(state=state, up_s=UP_S)  # type: ignore[arg-type]
        ) | st.builds(GpuXid, xid=st.sampled_from([79, 119, 45, 13])),
        st.sampled_from(["boot-1", "boot-2"]), st.integers(1, 2), st.floats(0.1, 200), st.sampled_from([0.0, 0.0, 100.0]),
    ),
    max_size=25,
)  # fmt: skip


@given(_SAID)
@settings(max_examples=150, deadline=None)
def test_a_state_survives_its_storing_and_nothing_is_cleared_that_was_not_told(said: Any) -> None:
    story, at_s = Story(), 200.0
    for fact, boot, attempt, after_s, held_s in said:
        at_s += after_s
        tell(story, at_s, fact, boot=boot, attempt=attempt, held_s=held_s)
    whole, stored = PartitionFold(NODE), PartitionFold(NODE)
    standing: set[str] = set()
    for record in story.records:
        out, refused = whole.feed(record)
        assert refused is None
        again, _ = stored.feed(record)
        assert [o.event for o in again] == [o.event for o in out]
        for keyed in stored.keys.values():  # as after a restart
            keyed.state = NODE.load("n1", json.loads(json.dumps(NODE.dump(keyed.state))))
        for fact in facts(out):
            if isinstance(fact, SignalCleared):
                assert fact.symptom in standing
                standing.discard(fact.symptom)
            else:
                standing.add(fact.symptom)
    if whole.keys:
        assert len(json.dumps(NODE.dump(whole.keys["n1"].state))) < 8000


def test_thresholds_are_the_policys() -> None:
    story = Story()
    story.adopt(0, Detectors(gpu=GpuLimits(thermal_samples=1, driver_misses=1, boot_grace_s=0)))
    tell(story, 1, sample(gpu(0, clock_reasons=("hw_thermal",)), up_s=1), missed(1, "D"))
    assert [fact.symptom for fact in claims(story)] == ["gpu_thermal", "gpu_driver_hang"]
    assert all(not rule.samples or hasattr(GpuLimits(), rule.samples) for rule in RULES)
