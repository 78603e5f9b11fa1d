"""Several events as one atomic batch: all or none, behind an expectation, and known again when the answer was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.ports import LEDGER, Expect, LogUnavailable, Record, StaleWriter
from infra import batch
from infra.decider_service import together
from infra.jetstream import JetStreamLog
from infra.memory import MemoryLog
from tests.nats_fixture import real_bus

OWN = "ledger.*.decider.*"


def some(first: int, count: int) -> list[tuple[str, bytes, str]]:
    return [(f"ledger.j.decider.k{i % 3}", b"%d" % i, f"id-{i}") for i in range(first, first + count)]


async def stored(log: JetStreamLog) -> list[bytes]:
    return [record.data async for record in log.read()]


async def test_a_batch_on_the_real_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_bus(tmp_path) as bus:
        log = JetStreamLog(bus.admin, LEDGER)
        assert await log.append_all(some(0, 1200), expect=Expect(OWN, 0)) == 1200
        assert await stored(log) == [b"%d" % i for i in range(1200)]

        with pytest.raises(StaleWriter):  # nothing of it is stored
            await log.append_all(some(2000, 5), expect=Expect(OWN, 7))
        assert await log.last_sequence() == 1200

        await log.append("ledger.j.detector.signal", b"between")
        assert await log.append_all(some(1200, 3), expect=Expect(OWN, 1200)) == 1204
        assert await log.append_all(some(1200, 3), expect=Expect(OWN, 1200)) == 1204, "its answer was lost"
        with pytest.raises(StaleWriter):
            await log.append_all(some(1201, 3), expect=Expect(OWN, 1200))

        one_by_one = 0
        append = log.append

        async def counted(*given: object, **more: object) -> object:
            nonlocal one_by_one
            one_by_one += 1
            return await append(*given, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(log, "append", counted)
        assert await log.append_all(some(1202, 3)) == 1206, "with a repeat in it, one by one"
        assert one_by_one == 3
        assert (await stored(log))[-2:] == [b"1203", b"1204"]
        with pytest.raises(batch.NotAtomic):
            await batch.store(bus.admin, LEDGER, [batch.Message("ledger.j.decider.k", b"x" * (2 << 20))], 5.0)


async def test_memory_does_the_same() -> None:
    log = MemoryLog()
    assert await log.append_all(some(0, 5), expect=Expect(OWN, 0)) == 5
    with pytest.raises(StaleWriter):
        await log.append_all(some(5, 2), expect=Expect(OWN, 1))


def test_batches_keep_order_and_bounds() -> None:
    messages = [batch.Message("s", b"x" * size) for size in [1] * 1201 + [batch.BYTES_MAX, 1, batch.BYTES_MAX - 1, 1]]
    parts = list(batch.batches(messages))
    assert [one for part in parts for one in part] == messages
    assert [len(part) for part in parts] == [500, 500, 201, 1, 2, 1]
    assert list(batch.batches([])) == []


async def test_together_takes_what_has_come_and_waits_for_nothing_more() -> None:
    more = asyncio.Event()

    async def records() -> AsyncIterator[Record]:
        for i in range(1, 8):
            yield Record(LEDGER, i, i, "s", b"")
        await more.wait()
        yield Record(LEDGER, 8, 8, "s", b"")
        raise LogUnavailable("gone")

    groups = []
    with pytest.raises(LogUnavailable):
        async for group in together(records(), 3):
            groups.append([record.sequence for record in group])
            if groups[-1][-1] == 7:
                more.set()
            await asyncio.sleep(0.01)
    assert [sequence for group in groups for sequence in group] == list(range(1, 9))
    assert all(len(group) <= 3 for group in groups) and len(groups[0]) <= 3
    assert any(len(group) == 3 for group in groups)
