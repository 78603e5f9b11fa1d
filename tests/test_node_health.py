"""The node detector: silence by ticks, kernel lines by the catalogue, duplicates, gaps, bounds."""

from __future__ import annotations

from events.envelope import Fact
from events.hardware import EvidenceGap, KernelRecord
from events.incident import EvidenceMissing, Signal, SignalCleared
from events.presence import AgentState
from processors.detector import PartitionFold
from processors.node import node_detector
from processors.node_health import REPEATS_MAX
from processors.policy import Detectors
from tests.telemetry import XID_13, XID_45, XID_79, Story, catalogue, facts, ns, told

NODE = node_detector(catalogue())


def claims(story: Story) -> list[Fact]:
    return facts(told(NODE, story))


def alive(story: Story, from_s: int, to_s: int, *nodes: str) -> Story:
    """Ticks, and a beat of each node, each second."""
    for second in range(from_s, to_s):
        for node in nodes or ("n1",):
            story.beat(second, node)
        story.tick(second + 0.5)
    return story


def ticks(story: Story, from_s: int, to_s: int) -> Story:
    for second in range(from_s, to_s):
        story.tick(second + 0.5)
    return story


# --- silence ------------------------------------------------------------------------------------------------------------------


def test_a_node_that_is_heard_is_never_silent() -> None:
    assert claims(alive(Story(), 0, 60)) == []


def test_silence_is_claimed_once_and_cleared_once() -> None:
    story = ticks(alive(Story(), 0, 20), 20, 40)
    alive(story, 40, 45)
    out = told(NODE, story)
    silent, cleared = facts(out)
    assert isinstance(silent, Signal) and isinstance(cleared, SignalCleared)
    assert (silent.symptom, silent.node, silent.rule) == ("node_silent", "n1", "silence")
    # Last beat at 19 s, limit 3 s: the first tick beyond it is that of 22.5 s.
    assert silent.seen_ns == ns(22.5) and "nothing heard for 3.5 s" in silent.evidence
    assert out[0].event.causes == (NODE_BEAT_19 := f"e{2 * 19 + 1}",) and NODE_BEAT_19
    assert (out[0].event.job, out[0].event.attempt, out[0].subject) == ("gpt", 1, "ledger.gpt.detector.signal")
    assert cleared.node == "n1" and "heard again after 21.0 s" in cleared.evidence
    assert out[1].subject == "ledger.gpt.detector.signal_cleared"


def test_only_ticks_judge_silence() -> None:
    story = alive(Story(), 0, 20, "n1", "n2")
    for second in range(20, 60):
        story.beat(second, "n2")
    assert claims(story) == []


def test_a_gap_in_the_ticks_suspends_absence_and_is_noted() -> None:
    story = alive(Story(), 0, 20, "n1", "n2")
    # Everything stands still for five minutes; n2 needs eight seconds more.
    for second in range(320, 328):
        story.beat(second, "n1")
        story.tick(second + 0.5)
    alive(story, 328, 340, "n1", "n2")
    (noted,) = claims(story)
    assert isinstance(noted, EvidenceMissing) and noted.reason == "ticks" and "no tick for 301 s" in noted.detail


def test_a_node_that_stays_silent_after_the_gap_is_found() -> None:
    story = alive(Story(), 0, 20, "n1", "n2")
    alive(story, 320, 340, "n1")
    _, silent = claims(story)
    assert isinstance(silent, Signal) and silent.node == "n2" and silent.seen_ns == ns(330.5)


def test_a_spooled_observation_proves_life_for_its_own_time_only() -> None:
    story = ticks(alive(Story(), 0, 20), 20, 30)
    # A spool drains: seen at 21 s and 22 s, arriving at 30 s.
    story.beat(30.0, held_s=9)
    story.beat(30.1, held_s=8.1)
    ticks(story, 30, 35)
    assert [type(fact) for fact in claims(story)] == [Signal]
    story.beat(35.0)
    cleared = claims(story)[-1]
    assert isinstance(cleared, SignalCleared) and "after 16.0 s" in cleared.evidence


def test_silence_after_an_announced_stop_is_no_silence() -> None:
    story = alive(Story(), 0, 20)
    story.say(20, "n1", AgentState(state="stopping"))
    ticks(story, 20, 60)
    (missing,) = claims(story)
    assert isinstance(missing, EvidenceMissing)
    assert (missing.node, missing.producer, missing.reason) == ("n1", "agent", "stopped")
    # It starts again, and falls silent without a word.
    story.say(60, "n1", AgentState(state="started"), producer="agent-2")
    alive(story, 60, 70)
    ticks(story, 70, 80)
    assert [type(fact) for fact in claims(story)] == [EvidenceMissing, Signal]


def test_an_agent_that_just_started_has_time_until_its_first_beat() -> None:
    story = alive(Story(), 0, 20, "n2")
    story.say(20, "n1", AgentState(state="started"))
    alive(story, 20, 29, "n2")
    assert claims(story) == []
    alive(story, 29, 35, "n2")
    (silent,) = claims(story)
    assert isinstance(silent, Signal) and silent.node == "n1" and silent.seen_ns == ns(33.5)


def test_settings_in_the_stream_change_the_limit() -> None:
    story = Story()
    story.adopt(0, Detectors(silence_s=10))
    ticks(alive(story, 0, 20), 20, 28)
    assert claims(story) == []
    ticks(story, 28, 31)
    (silent,) = claims(story)
    assert isinstance(silent, Signal) and silent.seen_ns == ns(29.5)


def test_another_boot_is_noted() -> None:
    story = alive(Story(), 0, 5)
    story.beat(5, boot="boot-2")
    (noted,) = claims(story)
    assert isinstance(noted, EvidenceMissing) and noted.reason == "rebooted" and "boot-2" in noted.detail


# --- kernel lines -------------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_names_its_device() -> None:
    story = alive(Story(), 0, 3)
    record = story.kernel(3, "n1", "usb 1-1: new device", XID_79)
    (out,) = told(NODE, story)
    signal = out.event.data
    assert signal == Signal(
        symptom="gpu_unavailable",
        node="n1",
        device="0000:03:00.0",
        confidence="high",
        rule="xid-79",
        evidence=XID_79,
        seen_ns=ns(3),
    )
    assert out.event.causes == (f"e{record.sequence}",) and (out.event.job, out.event.attempt) == ("gpt", 1)


def test_the_same_loss_over_three_lines_without_a_code() -> None:
    story = Story()
    story.kernel(1, "n1", "NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: (PCI ID: 10de:26b5) installed in this system has")
    story.kernel(1.1, "n1", "NVRM: fallen off the bus and is not responding to commands.")
    (signal,) = claims(story)
    assert isinstance(signal, Signal) and (signal.symptom, signal.device) == ("gpu_unavailable", "0000:b3:00.0")


def test_history_and_hearsay_open_nothing() -> None:
    story = Story()
    story.kernel(1, "n1", KernelRecord(text=XID_79, history=True), KernelRecord(text=XID_79, facility=1, hearsay=True))
    assert claims(story) == []
    story.kernel(2, "n1", KernelRecord(text=XID_79, facility=1))  # a setting of the agent trusts it
    assert len(claims(story)) == 1


def test_a_late_line_tells_its_age() -> None:
    story = Story()
    story.kernel(500, "n1", XID_79, held_s=400)
    (signal,) = claims(story)
    assert isinstance(signal, Signal) and signal.seen_ns == ns(100)


def test_repeats_within_a_minute_are_one_signal_and_one_count() -> None:
    story = alive(Story(), 0, 1)
    for second in range(1, 40):
        story.kernel(second, "n1", XID_79, "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.")
        story.beat(second)
        story.tick(second + 0.5)
    alive(story, 40, 200)
    first, counted = claims(story)
    assert isinstance(first, Signal) and isinstance(counted, Signal)
    assert first.count == 1 and counted.count == 2 * 39 - 1
    assert counted.confidence == "high" and counted.device == "0000:03:00.0" and counted.seen_ns == ns(39)
    assert counted.evidence.startswith("77 more like it")


def test_another_attempt_hears_of_it_again() -> None:
    story = Story()
    story.kernel(1, "n1", XID_79, attempt=1)
    story.kernel(2, "n1", XID_79, attempt=2)
    assert [out.event.attempt for out in told(NODE, story)] == [1, 2]


def test_a_storm_of_echoes_is_a_few_signals_and_a_count() -> None:
    story = alive(Story(), 0, 1)
    for i in range(500):
        story.kernel(
            1 + i / 1000, "n1", XID_45.replace("0000:03", f"0000:{i % 8:02x}"), XID_13.replace("0000:03", f"0000:{i % 8:02x}")
        )
    alive(story, 2, 200)
    out = [fact for fact in claims(story) if isinstance(fact, Signal)]
    limit = Detectors().echoes_per_minute
    assert len(out) == limit + 1
    assert {signal.confidence for signal in out} == {"low", "sympathetic"}
    assert out[-1].rule == "echoes_counted" and out[-1].confidence == "sympathetic"
    assert sum(signal.count for signal in out) == 1000


def test_an_echo_does_not_hide_the_certain() -> None:
    story = Story()
    for i in range(50):
        story.kernel(1, "n1", XID_45.replace("0000:03", f"0000:{i:02x}"))
    story.kernel(2, "n1", XID_79)
    assert [s.rule for s in claims(story) if isinstance(s, Signal)][-1] == "xid-79"


def test_state_is_bounded_under_a_flood() -> None:
    fold = PartitionFold(NODE)
    story = Story()
    for i in range(300):
        story.kernel(1 + i / 1000, "n1", XID_79.replace("0000:03", f"{i:04x}:03"), "x" * 4000, producer=f"p{i}")
        story.say(
            1 + i / 1000, "n1", EvidenceGap(producer=f"p{i}", reason="overrun", missing=3), producer="g", number=1 + 3 * i
        )
    out = [claim for record in story.records for claim in fold.feed(record)[0]]
    signals = [o for o in out if isinstance(o.event.data, Signal)]
    assert len(signals) == REPEATS_MAX
    assert len(out) < 2 * REPEATS_MAX
    assert len(str(NODE.dump(fold.keys["n1"].state))) < 64_000


def test_long_evidence_is_cut_in_its_middle() -> None:
    story = Story()
    story.kernel(1, "n1", XID_79 + "ü" * 2000 + " the end")
    (signal,) = claims(story)
    assert isinstance(signal, Signal)
    assert len(signal.evidence.encode()) <= 1024
    assert signal.evidence.startswith("NVRM: Xid") and "…" in signal.evidence and signal.evidence.endswith("the end")


# --- numbers ------------------------------------------------------------------------------------------------------------------


def test_a_repeated_number_is_dropped_and_a_missing_one_reported_late() -> None:
    story = alive(Story(), 0, 5)
    story.kernel(5, "n1", XID_45, number=1)
    story.kernel(5, "n1", XID_79, number=2)
    story.kernel(5, "n1", XID_79.replace("03:00", "04:00"), number=2)  # the same number: told twice
    story.kernel(6, "n1", "quiet", number=9)
    alive(story, 6, 12)
    assert [s.device for s in claims(story) if isinstance(s, Signal)] == ["0000:03:00.0", "0000:03:00.0"]
    # Two of the missing come late and are taken; the rest is reported after the grace time.
    story.kernel(12, "n1", XID_79.replace("03:00", "05:00"), number=4)
    story.kernel(12, "n1", "quiet", number=3)
    alive(story, 12, 40)
    rest = claims(story)[2:]
    assert isinstance(rest[0], Signal) and rest[0].device == "0000:05:00.0"
    (gap,) = rest[1:2]
    assert isinstance(gap, EvidenceMissing)
    assert (gap.producer, gap.reason, gap.missing) == ("node/n1/kernel_log", "numbers", 4) and "5 to 8" in gap.detail
    assert len([fact for fact in rest if isinstance(fact, EvidenceMissing)]) == 1


def test_a_restarted_producer_counts_anew() -> None:
    story = alive(Story(), 0, 5)
    story.beat(5, number=900)
    story.say(6, "n1", AgentState(state="started"), producer="heartbeat", number=1)
    for second in range(7, 30):
        story.beat(second, number=second - 5)
        story.tick(second + 0.5)
    assert [fact for fact in claims(story) if not (isinstance(fact, EvidenceMissing) and fact.reason == "numbers")] == []


def test_gaps_that_producers_tell_of_are_passed_on_within_a_limit() -> None:
    story = alive(Story(), 0, 1)
    for i in range(30):
        story.say(1 + i / 100, "n1", EvidenceGap(producer="kernel_log", reason="overrun", missing=i), job="gpt", attempt=1)
    alive(story, 2, 100)
    notes = [fact for fact in claims(story) if isinstance(fact, EvidenceMissing)]
    assert len(notes) == 9 and notes[-1].reason == "notes" and notes[-1].missing == 22
