"""The spool on disk and the outbox before it: bounded, crash-safe, in order, with everything lost counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.ports import HELD_HEADER, LogUnavailable
from producers.outbox import BULK, NEWS, Outbox, Refused
from producers.spool import Observation, Spool


def seen(i: int, size: int = 10) -> Observation:
    return Observation(f"telemetry.n.node.k{i}", b"%06d" % i + b"x" * size, 1000 + i, 2000 + i)


def drain(spool: Spool, batch: int = 7) -> list[Observation]:
    out: list[Observation] = []
    while waiting := spool.peek(batch):
        out += [w.observation for w in waiting]
        spool.advance(waiting)
    return out


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_in_order_and_whole(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "boot", bytes_max=1 << 20)
    everything = [seen(i) for i in range(500)]
    spool.append(everything[:250])
    spool.append(everything[250:])
    assert spool.pending == 500
    assert drain(spool) == everything
    assert spool.pending == spool.dropped == 0
    assert not list(tmp_path.glob("*.spool"))


def test_survives_its_process(tmp_path: Path) -> None:
    """Nothing is closed: what was appended is read by the next one, from where the last one was read to."""
    first = Spool(tmp_path, "boot-1", bytes_max=100_000)
    first.append([seen(i) for i in range(400)])
    first.advance(first.peek(50))
    second = Spool(tmp_path, "boot-2", bytes_max=100_000)
    assert second.pending == 350
    second.append([seen(400)])
    waiting = second.peek(3)
    assert waiting[0].observation == seen(50) and waiting[0].boot_id == "boot-1"
    assert drain(second) == [seen(i) for i in range(50, 401)]


def test_the_oldest_goes_and_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "boot", bytes_max=64 * 1024)
    for i in range(2000):
        spool.append([seen(i, 100)])
    assert sum(path.stat().st_size for path in tmp_path.glob("*.spool")) <= 64 * 1024
    assert spool.dropped > 0 and spool.pending + spool.dropped == 2000
    again = Spool(tmp_path, "boot", bytes_max=64 * 1024)
    assert (again.pending, again.dropped) == (spool.pending, spool.dropped)
    kept = drain(again)
    assert kept == [seen(i, 100) for i in range(2000 - len(kept), 2000)]
    again.reported(again.dropped)
    assert Spool(tmp_path, "boot", bytes_max=64 * 1024).dropped == 0


@given(cut=st.integers(0, 2000), junk=st.binary(max_size=50))
@settings(max_examples=60, deadline=None)
def test_a_torn_end_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes) -> None:
    folder = tmp_path_factory.mktemp("torn")
    spool = Spool(folder, "boot")
    spool.append([seen(i) for i in range(30)])
    path = next(folder.glob("*.spool"))
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)] + junk)
    again = Spool(folder, "boot")
    again.append([seen(99)])
    out = drain(again)
    assert out[-1] == seen(99)
    assert out[:-1] == [seen(i) for i in range(len(out) - 1)]


def test_a_damaged_middle_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "boot")
    spool.append([seen(i) for i in range(10)])
    path = next(tmp_path.glob("*.spool"))
    data = bytearray(path.read_bytes())
    data[data.index(b"000004")] ^= 0xFF
    path.write_bytes(bytes(data))
    assert drain(spool) == [seen(i) for i in range(4)]
    assert spool.dropped == 6 and spool.pending == 0


def test_a_full_disk_raises_and_what_was_written_stays_readable(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "boot")
    spool.append([seen(0)])
    assert spool._writer is not None
    real = spool._writer

    class Full:
        def write(self, data: bytes) -> int:
            return real.write(data[:5])  # what a disk that fills up does

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    spool._writer = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        spool.append([seen(1)])
    spool._writer = real
    spool.append([seen(2)])
    assert drain(spool) == [seen(0), seen(2)]


class FakeBus:
    """There is no bus that fails as told; the real one's outages are in test_agent.py."""

    def __init__(self) -> None:
        self.present = True
        self.fails = False
        self.refuses: set[str] = set()
        self.slow = 0.0
        self.got: list[tuple[str, bytes, dict[str, str]]] = []

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if self.slow:
            await asyncio.sleep(self.slow)
        if subject in self.refuses:
            raise Refused("too long")
        if self.fails or not self.present:
            raise LogUnavailable("away")
        self.got.append((subject, data, headers))


def outbox(folder: Path, bus: FakeBus, **more: object) -> Outbox:
    return Outbox(folder, "boot", bus, wall_ns=time.time_ns, boot_ns=time.monotonic_ns, **more)  # type: ignore[arg-type]


def now_seen(i: int) -> Observation:
    return Observation(f"telemetry.n.node.k{i}", b"%06d" % i, time.time_ns(), time.monotonic_ns())


async def test_straight_through_without_touching_the_disk(tmp_path: Path) -> None:
    bus = FakeBus()
    box = outbox(tmp_path, bus)
    box.start()
    safe: list[int] = []
    for i in range(20):
        box.put(NEWS, now_seen(i), lambda i=i: safe.append(i))  # type: ignore[misc]
    await until(lambda: len(bus.got) == 20)
    assert [data for _, data, _ in bus.got] == [b"%06d" % i for i in range(20)]
    assert safe == list(range(20)) and box.waiting == 0
    assert not list(tmp_path.rglob("*.spool"))
    await box.close()


async def test_away_then_back_in_order_with_the_time_it_waited(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.present = False
    box = outbox(tmp_path, bus)
    box.start()
    for i in range(100):
        box.put(NEWS, now_seen(i))
        box.put(BULK, now_seen(1000 + i))
    await until(lambda: box.waiting == 200)
    await asyncio.sleep(0.1)
    bus.present = True
    await until(lambda: len(bus.got) == 200)
    for lane in (range(100), range(1000, 1100)):
        assert [int(data) for _, data, _ in bus.got if int(data) in lane] == list(lane)
    assert all(int(headers[HELD_HEADER]) >= 100_000_000 for _, _, headers in bus.got)
    await until(lambda: box.waiting == 0)
    await box.close()


async def test_fails_in_the_middle_and_nothing_is_lost(tmp_path: Path) -> None:
    bus = FakeBus()
    box = outbox(tmp_path, bus)
    box.start()
    for i in range(300):
        bus.fails = i % 50 > 25
        box.put(NEWS, now_seen(i))
        box.put(BULK, now_seen(1000 + i))
        if i % 10 == 0:
            await asyncio.sleep(0.005)
    bus.fails = False
    await until(lambda: len({data for _, data, _ in bus.got}) == 600)
    news = [int(data) for _, data, _ in bus.got if int(data) < 1000]
    assert news == list(range(300)), "news comes strictly in order, each once"
    await box.close()


async def test_a_new_start_sends_what_the_last_one_could_not(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.present = False
    box = outbox(tmp_path, bus)
    box.start()
    for i in range(10):
        box.put(NEWS, now_seen(i))
    await box.close(grace_s=0.1)
    bus.present = True
    again = outbox(tmp_path, bus)
    assert again.waiting == 10
    again.start()
    await until(lambda: len(bus.got) == 10)
    await again.close()


async def test_held_across_a_boot_is_told_by_the_wall_clock(tmp_path: Path) -> None:
    spool = Spool(tmp_path / NEWS, "another boot", bytes_max=1 << 20)
    old = Observation("telemetry.n.node.k0", b"000000", time.time_ns() - 60_000_000_000, 2**60)
    spool.append([old])
    spool.close()
    bus = FakeBus()
    box = outbox(tmp_path, bus)
    box.start()
    await until(lambda: len(bus.got) == 1)
    assert 60e9 <= int(bus.got[0][2][HELD_HEADER]) < 90e9
    await box.close()


async def test_what_is_durable_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.present = False
    box = outbox(tmp_path, bus)
    box.put_durable(now_seen(1))
    reread = Spool(tmp_path / "ranks", "boot")
    assert [w.observation.data for w in reread.peek(5)] == [b"000001"]
    box.start()
    bus.present = True
    await until(lambda: len(bus.got) == 1)
    assert HELD_HEADER not in bus.got[0][2] or int(bus.got[0][2][HELD_HEADER]) < 1_000_000_000
    await box.close()


async def test_beyond_the_bound_is_counted_and_told_once_the_bus_is_back(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.present = False
    told: list[tuple[str, int]] = []
    box = outbox(tmp_path, bus, spool_bytes_max=256 * 1024, on_dropped=lambda lane, n: told.append((lane, n)), drain_per_s=1e6)
    box.start()
    for i in range(3000):
        box.put(NEWS, Observation("telemetry.n.node.k", b"%06d" % i + b"x" * 200, time.time_ns(), time.monotonic_ns()))
        if i % 100 == 0:
            await asyncio.sleep(0)
    await until(lambda: not box._lanes[NEWS].queue)
    assert not told
    bus.present = True
    await until(lambda: box.waiting == 0 and bool(told))
    assert len(told) == 1
    assert told[0] == (NEWS, 3000 - len(bus.got)) and told[0][1] > 0
    await box.close()


async def test_only_the_latest_beat_is_kept_and_numbers_have_no_hole(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.present = False
    box = outbox(tmp_path, bus)
    box.start()
    numbers = iter(range(1, 1000))

    def build(at: int) -> Observation:
        return Observation("telemetry.n.node.heartbeat", b"%d:%d" % (next(numbers), at), time.time_ns(), time.monotonic_ns())

    for i in range(50):
        box.beat("heartbeat", lambda i=i: build(i))  # type: ignore[misc]
        await asyncio.sleep(0)
    for i in range(500):
        box.put(NEWS, now_seen(i))
    await until(lambda: box.waiting == 500)
    bus.slow = 0.01  # a spool of 500 takes 5 s: the beat does not wait for it
    bus.present = True
    await until(lambda: any(b":" in data for _, data, _ in bus.got), within_s=1.0)
    assert [data for _, data, _ in bus.got if b":" in data] == [b"1:49"]
    assert len(bus.got) < 100
    await box.close(grace_s=0)


async def test_a_beat_whose_acknowledgement_is_lost_goes_again_before_the_next(tmp_path: Path) -> None:
    bus = FakeBus()
    bus.fails = True
    box = outbox(tmp_path, bus)
    box.start()
    built: list[bytes] = []

    def build(data: bytes) -> Observation:
        built.append(data)
        return Observation("s", data, time.time_ns(), time.monotonic_ns())

    box.beat("b", lambda: build(b"1"))
    await until(lambda: built == [b"1"])
    box.beat("b", lambda: build(b"2"))
    box.beat("b", lambda: build(b"3"))
    bus.fails = False
    await until(lambda: len(bus.got) == 2)
    assert [data for _, data, _ in bus.got] == [b"1", b"3"]
    await box.close()


async def test_what_the_bus_will_never_take_blocks_nothing(tmp_path: Path) -> None:
    bus = FakeBus()
    told: list[int] = []
    troubles: list[str] = []
    box = outbox(tmp_path, bus, on_dropped=lambda lane, n: told.append(n), on_trouble=troubles.append)
    bus.refuses.add("telemetry.n.node.k3")
    box.start()
    for i in range(6):
        box.put(NEWS, now_seen(i))
    await until(lambda: len(bus.got) == 5 and bool(told))
    assert told == [1] and "too long" in troubles[0]
    await box.close()


async def test_a_disk_that_refuses_keeps_in_memory(tmp_path: Path) -> None:
    """As root permissions refuse nothing; a folder that is gone does."""
    bus = FakeBus()
    bus.present = False
    troubles: list[str] = []
    box = outbox(tmp_path, bus, on_trouble=troubles.append)
    (tmp_path / NEWS).rmdir()
    box.start()
    for i in range(3):
        box.put(NEWS, now_seen(i))
    await until(lambda: bool(troubles))
    assert "can't spool" in troubles[0]
    bus.present = True
    await until(lambda: len(bus.got) == 3)
    await box.close()
