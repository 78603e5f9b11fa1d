"""What a host's samples are taken for: standing trouble, killed processes, a clock that is off, an earlier boot's end."""

from __future__ import annotations

from typing import Any

import pytest

from events.host import Folder, HostSample, LastBoot, StuckRank
from events.incident import EvidenceMissing, Signal, SignalCleared
from processors.detector import PartitionFold
from processors.host_health import GIB, HostHealth
from processors.node import NodeDetector
from processors.policy import Detectors, Host
from tests.telemetry import Story, facts, told

HOST = NodeDetector((HostHealth(),))
ROOM = {
    "total_bytes": 1000 * GIB,
    "free_bytes": 500 * GIB,
    "was_writable": True,
    "local": True,
    "filesystem": "ext4",
    "mount": "/data",
}


def sample(**more: Any) -> HostSample:
    base: dict[str, Any] = {"interval_s": 10, "up_s": 5000, "cpus": 8, "clock_synchronised": True, "clock_offset_s": 0.0}
    return HostSample(**{**base, **more})


def folder(path: str = "/data", **more: Any) -> Folder:
    return Folder(path=path, use="checkpoints", **{**ROOM, **more})


def claims(*samples: HostSample, every_s: float = 10, settings: Detectors | None = None) -> list[Any]:
    story = Story()
    if settings:
        story.adopt(0, settings)
    for i, one in enumerate(samples):
        story.say(1 + i * every_s, "n1", one, job="gpt", attempt=1, producer="host")
    return facts(told(HOST, story))


def names(found: list[Any]) -> list[tuple[str, ...]]:
    return [
        (fact.symptom, fact.rule, fact.confidence) if isinstance(fact, Signal)
        else ("over", fact.symptom) if isinstance(fact, SignalCleared) else ("missing", fact.reason)
        for fact in found
    ]  # fmt: skip


def test_a_healthy_host_says_nothing() -> None:
    assert claims(*[sample(folders=(folder(),), cpu_pressure=40.0, memory_pressure_full=1.0, load1=9.0)] * 5) == []


def test_room_that_runs_out_is_told_once_and_cleared_with_a_margin() -> None:
    full, less, free = (sample(folders=(folder(free_bytes=n * GIB),)) for n in (10, 25, 40))
    found = claims(free, full, full, less, full, free)
    assert names(found) == [("disk_space", "folder_full", "low"), ("over", "disk_space")]
    assert found[0].device == "/data" and "10.0 GiB of 1000.0 GiB free" in found[0].evidence


def test_small_file_systems_are_judged_by_share_alone() -> None:
    small = {"total_bytes": 64 << 20, "free_bytes": 60 << 20}
    assert claims(sample(folders=(folder("/dev/shm", **small),))) == []
    assert names(claims(sample(folders=(folder("/dev/shm", **{**small, "free_bytes": 1 << 20}),)))) == [
        ("disk_space", "folder_full", "low")
    ]
    assert names(claims(sample(folders=(folder(inodes_free=0.001),)))) == [("disk_space", "folder_inodes", "low")]
    assert claims(sample(folders=(folder(total_bytes=-1, free_bytes=-1, error="Permission denied"),))) == []


def test_one_folder_s_end_is_not_another_s() -> None:
    both = sample(folders=(folder("/a", free_bytes=0), folder("/b", free_bytes=0)))
    one = sample(folders=(folder("/a"), folder("/b", free_bytes=0)))
    none = sample(folders=(folder("/a"), folder("/b")))
    assert [type(fact).__name__ for fact in claims(both, one, none)] == ["Signal", "Signal", "SignalCleared"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"read_only": "error"}, [("fs_mount", "folder_failed", "high")]),
        ({"read_only": "error", "local": False}, [("fs_mount", "folder_failed", "low")]),
        ({"read_only": "error", "was_writable": False}, [("fs_mount", "folder_failed", "low")]),
        ({"read_only": "mount"}, [("fs_mount", "folder_read_only", "low")]),
        (
            {"read_only": "mount", "was_writable": False, "free_bytes": 0},
            [],
        ),  # a data set's image: full and read-only by design
        ({"hung_s": 5.0}, []),
        ({"hung_s": 25.0, "free_bytes": 0}, [("fs_mount", "folder_hung", "low")]),  # its room is of before
    ],
)
def test_mounts(more: dict[str, Any], expected: list[Any]) -> None:
    assert names(claims(sample(folders=(folder(**more),)))) == expected


def test_no_processor_to_be_had() -> None:
    busy = sample(cpu_pressure=95.0, load1=900.0)
    assert names(claims(busy, busy, sample(cpu_pressure=10.0), busy, busy)) == []
    found = claims(busy, busy, busy, busy, sample(cpu_pressure=10.0))
    assert names(found) == [("cpu_overload", "cpu_pressure", "low"), ("over", "cpu_overload")]
    assert names(claims(*[sample(load1=80.0)] * 3)) == [("cpu_overload", "cpu_pressure", "low")]  # a kernel without pressures


def test_the_first_minutes_of_a_boot_have_grace() -> None:
    start = {"up_s": 60.0, "cpu_pressure": 99.0, "memory_pressure_full": 90.0, "clock_synchronised": False}
    stuck = (StuckRank(rank=0, pid=5, for_s=500),)
    assert claims(*[sample(**start, stuck=stuck, folders=(folder(hung_s=100.0),))] * 4) == []
    assert names(claims(sample(**start, folders=(folder(read_only="error"),)))) == [("fs_mount", "folder_failed", "high")]


def test_memory_pressure_has_a_margin_too() -> None:
    hard, mild, none = (sample(memory_pressure_full=full) for full in (30.0, 12.0, 5.0))
    assert names(claims(mild, hard, mild, none)) == [("host_oom", "memory_pressure", "low"), ("over", "host_oom")]


@pytest.mark.parametrize(
    ("where", "symptom"),
    [
        ("rpc_wait_bit_killable", "fs_mount"), ("ll_file_read", "fs_mount"), ("nvidia_ioctl", "gpu_driver_hang"),
        ("io_schedule", "storage_error"), ("", "unknown"), ("do_exit", "unknown"),
    ],
)  # fmt: skip
def test_a_stuck_rank_speaks_of_what_it_sleeps_in(where: str, symptom: str) -> None:
    young = sample(stuck=(StuckRank(rank=3, pid=77, for_s=30, where=where),))
    old = sample(stuck=(StuckRank(rank=3, pid=77, for_s=70, where=where),))
    found = claims(young, old, old, sample())
    assert names(found) == [(symptom, "rank_stuck", "low"), ("over", symptom)]
    assert found[0].rank == 3


def test_killed_processes_count_with_a_ranks_end() -> None:
    ended = sample(ranks_ended=(4,))
    found = claims(sample(oom_kills=2), ended)  # the counter moved first
    assert names(found) == [("host_oom", "oom_kill", "low")] and (found[0].rank, found[0].count) == (4, 2)
    assert names(claims(sample(oom_kills=1, ranks_ended=(4,)))) == [("host_oom", "oom_kill", "low")]
    assert claims(sample(oom_kills=1), sample(), ended) == []  # somebody else's, and long ago
    assert claims(sample(oom_kills=3), sample(oom_kills=1)) == []
    assert names(claims(sample(group_oom_kills=1))) == [("host_oom", "oom_kill", "low")]
    assert names(claims(sample(oom_kills=1, memory_pressure_full=50.0)))[-1] == ("host_oom", "oom_kill", "low")


def test_many_kills_are_told_of_once_a_minute() -> None:
    found = claims(*[sample(group_oom_kills=2)] * 7)
    assert [fact.count for fact in found] == [2, 12]


def test_a_clock_that_is_off_is_missing_evidence_once() -> None:
    off, well = sample(clock_offset_s=-0.75), sample()
    found = claims(well, off, off, well, sample(clock_synchronised=False, clock_error_s=16.0))
    assert names(found) == [("missing", "clock")] * 2
    assert isinstance(found[0], EvidenceMissing) and "-0.750 s" in found[0].detail and "16 s" in found[1].detail
    assert claims(sample(clock_synchronised=None)) == []


def test_a_panic_of_an_earlier_boot_is_history() -> None:
    story = Story()
    panic = LastBoot(source="/sys/fs/pstore/dmesg-efi-1", panic=True, text="Kernel panic - not syncing: hung", age_s=3600)
    story.say(1, "n1", panic, producer="last_boot", held_s=3600)
    story.say(2, "n1", LastBoot(source="x", panic=False, text="calm"), producer="last_boot")
    (signal,) = facts(told(HOST, story))
    assert (signal.symptom, signal.confidence, signal.rule) == ("os_kernel_panic", "low", "last_boot_panic")
    assert "earlier boot" in signal.evidence and "1.0 h" in signal.evidence
    assert story.records[0].time_ns - signal.seen_ns == 3600 * 10**9  # too old to open anything


def test_what_is_told_twice_or_late_changes_nothing() -> None:
    story = Story()
    bad = sample(folders=(folder(free_bytes=0),), group_oom_kills=1)
    story.say(10, "n1", bad, producer="host", id="same")
    story.say(11, "n1", bad, producer="host", id="same")
    story.say(12, "n1", sample(folders=(folder(),)), producer="host", held_s=60)  # from a spool
    assert len(facts(told(HOST, story))) == 2


def test_its_state_survives_a_round_trip_and_stays_small() -> None:
    story = Story()
    for i in range(200):
        many = tuple(folder(f"/f{i}-{n}", free_bytes=0) for n in range(32))
        story.say(1 + i, "n1", sample(folders=many, oom_kills=1, cpu_pressure=99.0), producer="host")
    fold: PartitionFold[Any] = PartitionFold(HOST)
    for record in story.records:
        fold.feed(record)
    state = fold.keys["n1"].state
    assert HOST.load("n1", HOST.dump(state)) == state
    assert len(str(HOST.dump(state))) < 8000


def test_limits_come_from_the_policy() -> None:
    settings = Detectors(host=Host(disk_free_share_min=0.5))
    assert names(claims(sample(folders=(folder(free_bytes=499 * GIB),)), settings=settings)) == [
        ("disk_space", "folder_full", "low")
    ]
