"""One contract for every log: in memory and on the embedded server, the same calls have the same answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from events.ports import (
    DEADLETTER,
    HELD_HEADER,
    LEDGER,
    TELEMETRY_JOB,
    TELEMETRY_NODE,
    Ack,
    EventLog,
    Expect,
    LogError,
    LogUnavailable,
    Record,
    StaleWriter,
    TimerService,
)
from events.subjects import ledger, name, partition, telemetry_job, telemetry_node, token
from infra import clock
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog, JetStreamTimers, connect
from infra.memory import MemoryBus
from infra.streams import ensure_streams

STRANGE = ("a.b c", "*", ">", "", "Žluťoučký kůň 🐎", "%", "~", "~fleet2")


@dataclass
class Bench:
    """One kind of bus. `wait(s)` lets broker time pass; `outage(s)` does so with the broker away."""

    log: Callable[[str], EventLog]
    timers: TimerService
    now_ns: Callable[[], int]
    wait: Callable[[float], Awaitable[None]]
    outage: Callable[[float], Awaitable[None]]


@pytest.fixture(params=["memory", "embedded"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    if request.param == "memory":
        bus = MemoryBus()

        async def wait(seconds: float) -> None:
            bus.advance(int(seconds * 1e9))

        yield Bench(bus.log, bus.timers(), lambda: bus.now_ns, wait, wait)
        return
    with EmbeddedServer(tmp_path / "bus") as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)

        async def outage(seconds: float) -> None:
            before = nc.stats["reconnects"]
            server.kill()
            await asyncio.sleep(seconds)
            server.start()
            await _until(lambda: nc.is_connected and nc.stats["reconnects"] > before)

        yield Bench(lambda stream: JetStreamLog(nc, stream), JetStreamTimers(nc), clock.wall_ns, asyncio.sleep, outage)
        await nc.close()


async def _until(done: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.01)


async def _all(log: EventLog, **how: object) -> list[Record]:
    return [record async for record in log.read(**how)]  # type: ignore[arg-type]


async def _first(log: EventLog, n: int = 1, **how: object) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(30), aclosing(log.read(follow=True, **how)) as records:  # type: ignore[arg-type, type-var]
        async for record in records:
            found.append(record)
            if len(found) == n:
                break
    return found


async def _eventually(log: EventLog, subjects: str) -> int:
    async with asyncio.timeout(30):
        while not (last := await log.last_sequence(subjects)):
            await asyncio.sleep(0.02)
    return last


async def test_appends_are_read_back_in_order_as_they_were(bench: Bench) -> None:
    log = bench.log(LEDGER)
    assert await _all(log) == []
    assert await log.last_sequence() == 0
    bodies = [b"", b"{}", b"\xff\x00\r\n binary", "žluť".encode(), b"x" * 100_000]
    before_ns = bench.now_ns()
    for i, body in enumerate(bodies):
        assert await log.append(ledger("j", "detector", f"k{i}"), body, headers={HELD_HEADER: str(i)}) == Ack(i + 1)
    records = await _all(log)
    assert [r.data for r in records] == bodies
    assert [r.sequence for r in records] == [1, 2, 3, 4, 5]
    assert [dict(r.headers) for r in records] == [{HELD_HEADER: str(i)} for i in range(5)]
    assert [r.subject for r in records] == [f"ledger.j.detector.k{i}" for i in range(5)]
    assert {r.stream for r in records} == {LEDGER}
    assert all(type(r.time_ns) is int for r in records)
    assert records == await _all(log), "times are the log's: reading again gives the same ones"
    times = [r.time_ns for r in records]
    assert times == sorted(set(times))
    assert before_ns <= times[0] and times[-1] <= bench.now_ns() + 1_000_000


async def test_reads_after_filters_and_ends(bench: Bench) -> None:
    log = bench.log(LEDGER)
    for i in range(12):
        await log.append(ledger(f"j{i % 3}", "detector" if i % 2 else "decider", "k"), str(i).encode())
    assert [r.sequence for r in await _all(log, after=9)] == [10, 11, 12]
    assert await _all(log, after=12) == []
    assert [r.sequence for r in await _all(log, subjects=["ledger.j1.*.*"])] == [2, 5, 8, 11]
    assert [r.sequence for r in await _all(log, subjects=["ledger.j1.*.*"], after=5)] == [8, 11]
    assert [r.sequence for r in await _all(log, subjects=["ledger.j1.>", "ledger.j2.decider.*"])] == [2, 3, 5, 8, 9, 11]
    assert await _all(log, subjects=["ledger.nobody.>"]) == []
    assert await log.last_sequence("ledger.j0.>") == 10
    assert await log.last_sequence("ledger.*.decider.*") == 11
    assert await log.last_sequence("ledger.nobody.>") == 0
    assert await log.last_sequence() == 12


async def test_a_reading_without_follow_ends_at_what_was_last_when_it_began(bench: Bench) -> None:
    log = bench.log(LEDGER)
    for i in range(3):
        await log.append(ledger("j", "detector", "k"), str(i).encode())
    seen = []
    async for record in log.read():
        seen.append(record.sequence)
        await log.append(ledger("j", "detector", "k"), b"more")
    assert seen == [1, 2, 3]


async def test_follow_goes_on_with_what_comes(bench: Bench) -> None:
    log = bench.log(LEDGER)
    await log.append(ledger("j", "detector", "k"), b"1")
    task = asyncio.create_task(_first(log, 3, subjects=["ledger.j.detector.*"]))
    await asyncio.sleep(0.05)
    for text in (b"2", b"3"):
        await log.append(ledger("j", "decider", "k"), b"not this")
        await log.append(ledger("j", "detector", "k"), text)
    assert [(r.sequence, r.data) for r in await task] == [(1, b"1"), (3, b"2"), (5, b"3")]


async def test_a_follower_survives_an_outage(bench: Bench) -> None:
    log = bench.log(LEDGER)
    await log.append(ledger("j", "detector", "k"), b"1")
    task = asyncio.create_task(_first(log, 2))
    await asyncio.sleep(0.1)
    await bench.outage(0.2)
    await log.append(ledger("j", "detector", "k"), b"2")
    assert [(r.sequence, r.data) for r in await task] == [(1, b"1"), (2, b"2")]


async def test_repeats_of_a_message_id_add_nothing(bench: Bench) -> None:
    log = bench.log(LEDGER)
    assert await log.append(ledger("j", "detector", "k"), b"1", message_id="a") == Ack(1)
    assert await log.append(ledger("j", "detector", "k"), b"1", message_id="a") == Ack(1, duplicate=True)
    assert await log.append(ledger("j", "detector", "k"), b"1", message_id="b") == Ack(2)
    assert await log.append(ledger("j", "detector", "k"), b"1") == Ack(3)
    assert len(await _all(log)) == 3


async def test_an_expectation_holds_or_the_append_is_refused_and_changes_nothing(bench: Bench) -> None:
    log = bench.log(LEDGER)
    mine = "ledger.*.decider.*"
    assert (await log.append(ledger("a", "decider", "k"), b"1", expect=Expect(mine, 0))).sequence == 1
    await log.append(ledger("a", "detector", "k"), b"not counted")
    assert (await log.append(ledger("b", "decider", "l"), b"2", expect=Expect(mine, 1))).sequence == 3
    for wrong in (0, 1, 2, 4):
        with pytest.raises(StaleWriter):
            await log.append(ledger("a", "decider", "k"), b"stale", expect=Expect(mine, wrong))
    exact = ledger("a", "decider", "k")
    with pytest.raises(StaleWriter):
        await log.append(exact, b"stale", expect=Expect(exact, 3))
    assert (await log.append(exact, b"3", expect=Expect(exact, 1))).sequence == 4
    assert [r.data for r in await _all(log)] == [b"1", b"not counted", b"2", b"3"]


async def test_a_repeat_with_an_expectation_is_a_repeat(bench: Bench) -> None:
    """An append whose answer was lost is tried again with the old expectation: that must not read as someone else's write."""
    log = bench.log(LEDGER)
    subject = ledger("a", "decider", "k")
    await log.append(subject, b"1", message_id="a", expect=Expect("ledger.*.decider.*", 0))
    assert await log.append(subject, b"1", message_id="a", expect=Expect("ledger.*.decider.*", 0)) == Ack(1, duplicate=True)


async def test_telemetry_is_stored_by_partition_and_name(bench: Bench) -> None:
    nodes, jobs = bench.log(TELEMETRY_NODE), bench.log(TELEMETRY_JOB)
    for strange in STRANGE:
        own = token(strange)
        await nodes.append(telemetry_node(strange, "heartbeat"), b"{}")
        await jobs.append(telemetry_job("n 1", strange, "progress"), b"{}")
        pattern = f"tn.{partition(own)}.{own}.heartbeat"
        assert await nodes.last_sequence(pattern) > 0
        assert await jobs.last_sequence(f"tj.{partition(own)}.n%201.{own}.progress") > 0
    found = await _all(nodes, subjects=["tn.*.*.*"])
    assert [name(r.subject.split(".")[2]) for r in found] == list(STRANGE)
    found = await _all(jobs, subjects=["tj.*.*.*.*"])
    assert [name(r.subject.split(".")[3]) for r in found] == list(STRANGE)


async def test_what_cannot_be_stored_is_refused_in_a_sentence(bench: Bench) -> None:
    log = bench.log(LEDGER)
    with pytest.raises(LogError, match=r"too large; the bus takes 1048576"):
        await log.append(ledger("j", "detector", "k"), b"x" * (1 << 21))
    with pytest.raises(LogError, match="plain ASCII"):
        await log.append(ledger("j", "detector", "k"), b"", headers={HELD_HEADER: "ž"})
    for subject in ("elsewhere.x", "ledger.too.short", "ledger.a b.detector.k", "ledger.*.detector.k"):
        with pytest.raises(LogError):
            await log.append(subject, b"")
    with pytest.raises(LogError):
        await bench.log(DEADLETTER).append(ledger("j", "detector", "k"), b"another stream's subject")
    assert await log.last_sequence() == 0


async def test_a_timer_appears_in_the_ledger_at_its_time(bench: Bench) -> None:
    log = bench.log(LEDGER)
    at_ns = bench.now_ns() + 300_000_000
    body = '{"finished":"událost"}'.encode()
    await bench.timers.set_timer("i 1/*.>", at_ns, "job ž.1", "timer_fired", body)
    assert await log.last_sequence() == 0
    await bench.wait(0.35)
    subject = ledger("job ž.1", "timer", "timer_fired")
    await _eventually(log, subject)
    (record,) = await _all(log)
    assert (record.subject, record.data, dict(record.headers)) == (
        subject,
        body,
        {k: v for k, v in record.headers.items() if 0},
    )
    assert at_ns <= record.time_ns < at_ns + 2_000_000_000


async def test_the_same_timer_again_replaces_the_first(bench: Bench) -> None:
    log = bench.log(LEDGER)
    now_ns = bench.now_ns()
    await bench.timers.set_timer("t", now_ns + 300_000_000, "j", "k", b"first")
    await bench.timers.set_timer("t", now_ns + 600_000_000, "j", "k", b"second")
    await bench.timers.set_timer("u", now_ns + 900_000_000, "j", "last", b"third")
    await bench.wait(0.95)
    await _eventually(log, ledger("j", "timer", "last"))
    assert [r.data for r in await _all(log)] == [b"second", b"third"]


async def test_a_timer_whose_time_is_over_fires_now(bench: Bench) -> None:
    await bench.timers.set_timer("t", bench.now_ns() - 5_000_000_000, "j", "k", b"late")
    await bench.wait(0.01)
    await _eventually(bench.log(LEDGER), ledger("j", "timer", "k"))


async def test_a_timer_fires_after_an_outage(bench: Bench) -> None:
    log = bench.log(LEDGER)
    await bench.timers.set_timer("t", bench.now_ns() + 300_000_000, "j", "k", b"body")
    await bench.outage(0.5)
    await _eventually(log, ledger("j", "timer", "k"))
    (record,) = await _all(log)
    assert record.data == b"body"


async def test_sequences_and_times_survive_an_outage(bench: Bench) -> None:
    log = bench.log(LEDGER)
    for i in range(5):
        await log.append(ledger("j", "detector", "k"), str(i).encode(), message_id=str(i))
    before = await _all(log)
    await bench.outage(0.0)
    assert await _all(log) == before
    assert (await log.append(ledger("j", "detector", "k"), b"4", message_id="4")).duplicate
    assert (await log.append(ledger("j", "detector", "k"), b"5")).sequence == 6


def test_the_port_says_what_the_tests_hold() -> None:
    assert re.search("duplicate", Ack.__doc__ or "")
    assert issubclass(LogUnavailable, LogError) and issubclass(StaleWriter, LogError)
