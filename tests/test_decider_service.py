"""The decider's live host: killed anywhere and taken over, everything delivered twice, two at once, answers lost. On the log in memory;
what needs a real bus is in tests/test_decider_process.py."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from events.decision import DeciderStarted, Diverged
from events.ports import LEDGER, Ack, Expect, LogUnavailable, StaleWriter
from events.registry import canonical, make, parse
from infra import decider_service
from infra.decider_service import LiveDecider, Said, Superseded
from infra.memory import MemoryBus, MemoryLog, MemoryTimers
from processors.decider import is_own, timer_event
from processors.replay import replay
from tests.decider_bench import SCRIPTS, Host, Killed, KillingLog, Timers, drive, inputs_of, plain, told
from tests.decider_laws import check

FEW = [path for path in SCRIPTS if path.stem in ("rank_killed", "gpu_lost", "shared_cause")]
stories = pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
few = pytest.mark.parametrize("path", FEW, ids=lambda p: p.stem)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decider_service, "APPEND_WAIT_S", 0)


def holds(bus: MemoryBus) -> None:
    records = bus.records(LEDGER)
    check(records, late=True)
    result = replay(records)
    assert result.identical and not result.pending, result.divergence


@stories
async def test_live_decides_as_told(path: Path) -> None:
    story = told(path)
    bus, host = await drive(inputs_of(story.records))
    assert plain(bus.records(LEDGER)) == plain(story.records)
    assert host.live is not None
    result = replay(bus.records(LEDGER))
    assert result.identical and result.decider.digest == host.live.decider.digest
    assert result.decider.fleet == host.live.decider.fleet


@pytest.mark.parametrize("when", ["before", "after"])
@stories
async def test_killed_at_every_boundary(path: Path, when: str) -> None:
    """Each term says one thing and is killed, before or after it is stored; before: the one that follows says it."""
    story = told(path)
    doomed = {"left": 0}

    def kill() -> None:
        doomed["left"] -= 1
        if doomed["left"] < 0:
            doomed["left"] = 0 if when == "after" else 1
            raise Killed

    class Log(KillingLog):
        pass

    setattr(Log, when, staticmethod(kill))
    bus, host = await drive(inputs_of(story.records), log=Log)
    assert host.terms > len(plain(story.records))
    assert plain(bus.records(LEDGER)) == plain(story.records)
    holds(bus)


@few
async def test_killed_once_at_each_boundary(path: Path) -> None:
    story = told(path)
    expected = plain(story.records)
    for boundary in range(len(expected)):
        count = {"n": 0}

        def kill(boundary: int = boundary, count: dict[str, int] = count) -> None:
            count["n"] += 1
            if count["n"] == boundary + 1:
                raise Killed

        class Log(KillingLog):
            after = staticmethod(kill)

        bus, host = await drive(inputs_of(story.records), log=Log)
        assert host.terms == 2
        assert plain(bus.records(LEDGER)) == expected
        holds(bus)


@stories
async def test_every_input_delivered_twice(path: Path) -> None:
    story = told(path)
    bus, _ = await drive(inputs_of(story.records), times=2)
    assert plain(bus.records(LEDGER)) == plain(story.records)
    holds(bus)


@few
async def test_down_while_all_happens(path: Path) -> None:
    """The decider comes up when everything was said already: it decides the same, late."""
    story = told(path)
    inputs = inputs_of(story.records)
    bus = MemoryBus(inputs[0].time_ns)
    for record in inputs:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
    host = Host(lambda: MemoryLog(bus), Timers())
    await host.caught_up(lambda: len(bus.records(LEDGER)))
    await host.stop()
    unsigned = [
        line.replace('"code_version": "1", ', "").replace('"code_version": "", ', "") for line in plain(bus.records(LEDGER))
    ]
    assert unsigned == [line.replace('"code_version": "1", ', "") for line in plain(story.records)]
    holds(bus)


class Lossy(MemoryLog):
    """Every append is stored, and its answer is lost once."""

    lost: ClassVar[set[str]] = set()

    async def append(self, subject: str, data: bytes, **more: Any) -> Ack:
        ack = await super().append(subject, data, **more)
        if more["message_id"] not in self.lost:
            self.lost.add(more["message_id"])
            raise LogUnavailable("no answer")
        return ack


class Forgetful(Lossy):
    """As above, and by the time it is tried again the log has forgotten the message's id."""

    async def append(self, subject: str, data: bytes, **more: Any) -> Ack:
        self.bus._stream(LEDGER).seen.clear()
        return await super().append(subject, data, **more)


@pytest.mark.parametrize("log", [Lossy, Forgetful])
@few
async def test_a_lost_acknowledgement_does_not_double(path: Path, log: type[Lossy]) -> None:
    log.lost = set()
    story = told(path)
    bus, host = await drive(inputs_of(story.records), log=log)
    assert host.terms == 1
    assert plain(bus.records(LEDGER)) == plain(story.records)
    holds(bus)


@few
async def test_of_two_deciders_the_stale_one_is_refused(path: Path) -> None:
    story = told(path)
    inputs = inputs_of(story.records)
    half = len(inputs) // 2
    bus = MemoryBus(inputs[0].time_ns)
    size = lambda: len(bus.records(LEDGER))  # noqa: E731
    old, new = Host(lambda: MemoryLog(bus), Timers()), Host(lambda: MemoryLog(bus), Timers())
    for record in inputs[:half]:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
        first = await old.caught_up(size)
    await new.caught_up(size)
    for record in inputs[half:]:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
        await new.caught_up(size)
    assert old.task is not None and isinstance(old.task.exception(), Superseded)
    with pytest.raises(Superseded):  # and whatever it still says is refused
        event = make(
            DeciderStarted(worker="x", code_version="", read_up_to=0, ledger_digest=""),
            id="x",
            source="decider",
            subject="",
            time=0,
        )
        await first._store([Said("ledger.gpt.decider.late", event, canonical(event))])
    await new.stop()
    assert plain(bus.records(LEDGER)) == plain(story.records)
    holds(bus)


async def test_a_lease_that_is_over_says_nothing_more() -> None:
    story = told(FEW[0])
    inputs = inputs_of(story.records)

    class Lease:
        held = True

    bus, lease = MemoryBus(inputs[0].time_ns), Lease()
    live = LiveDecider(MemoryLog(bus), Timers(), worker="w", code_version="1", lease=lease)
    task = asyncio.create_task(live.run())
    for i, record in enumerate(inputs):
        lease.held = i < 3
        bus.store(LEDGER, record.subject, record.data, {})
        while live.position < len(bus.records(LEDGER)) and not task.done():
            await asyncio.sleep(0)
        if task.done():
            break
    assert isinstance(task.exception(), Superseded)
    triggers = [parse(r.data).data.trigger for r in bus.records(LEDGER) if is_own(r.subject)]
    assert triggers and max(triggers) <= 5


async def test_timers_are_set_again_by_the_next() -> None:
    """Killed between writing that a timer is wanted and asking for it: the one that takes over asks, and it fires."""
    story = told(next(p for p in SCRIPTS if p.stem == "rank_killed"))
    inputs = [
        r
        for r in inputs_of(story.records)
        if ".timer." not in r.subject and "outcome" not in r.subject and "first" not in str(r.data)
    ]

    class Failing(MemoryTimers):
        async def set_timer(self, *args: Any) -> None:
            raise Killed

    bus = MemoryBus(inputs[0].time_ns)
    size = lambda: len(bus.records(LEDGER))  # noqa: E731
    host = Host(lambda: MemoryLog(bus), Failing(bus))
    for record in inputs:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
        with suppress(AssertionError):
            await host.caught_up(size, terms_max=host.terms + 3)
    wanted = [parse(r.data).data for r in bus.records(LEDGER) if r.subject.endswith(".timer_set")]
    assert len(wanted) == len({fact.timer for fact in wanted}) >= 2
    host.timers = timers = MemoryTimers(bus)
    host.task = None
    await host.caught_up(size, terms_max=host.terms + 1)
    timers.advance(2_000_000_000)
    await host.caught_up(size, terms_max=host.terms)
    fired = [r.data for r in bus.records(LEDGER) if r.subject.endswith(".timer_fired")]
    assert canonical(timer_event(next(f for f in wanted if f.purpose == "culprit_window"))) in fired
    kinds = [r.subject.rsplit(".", 1)[1] for r in bus.records(LEDGER)]
    assert kinds.count("decision_made") == 2  # declared; and the crash is answered though its timer was nearly lost
    await host.stop()
    holds(bus)


async def test_another_version_takes_over() -> None:
    """What is recorded stands, though the new rules would have said otherwise; that they would is told once, not at each takeover."""
    story = told(next(p for p in SCRIPTS if p.stem == "rank_killed"))
    bus = MemoryBus(story.records[0].time_ns)
    swapped = False
    for record in story.records:
        data = record.data
        if b'"rung":"reattempt"' in data and not swapped:
            data, swapped = data.replace(b"reattempt 1 of at most 2", b"an older rule"), True
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, data, {})
    assert swapped
    before = plain(bus.records(LEDGER))
    size = lambda: len(bus.records(LEDGER))  # noqa: E731
    for _ in range(2):
        host = Host(lambda: MemoryLog(bus), Timers())
        live = await host.caught_up(size)
        await host.stop()
        assert live.diverged > 0
        job = live.decider.fleet.jobs["gpt"]
        assert job.attempt == 2 and job.incident is None
    assert plain(bus.records(LEDGER)) == before
    said = [parse(r.data).data for r in bus.records(LEDGER) if r.subject.endswith(".diverged")]
    assert len(said) == 1 and isinstance(said[0], Diverged)
    assert said[0].trigger == replay(bus.records(LEDGER)).divergence.trigger  # type: ignore[union-attr]


async def test_a_step_that_an_older_version_left_out_is_taken_up() -> None:
    """A decision is recorded, its intents are not, and other things were decided since: the plan is carried on by whoever takes over."""
    story = told(next(p for p in SCRIPTS if p.stem == "gpu_lost"))
    made = next(i for i, r in enumerate(story.records) if b'"rung":"evict"' in r.data)
    bus = MemoryBus(story.records[0].time_ns)
    for record in story.records[: made + 1]:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
    late = next(r for r in story.records[made:] if ".detector.signal" in r.subject)
    judged = next(r for r in story.records[made:] if r.subject.endswith("evidence_judged"))
    stored = bus.store(LEDGER, late.subject, late.data, {})
    event = parse(judged.data)
    again = event.model_copy(update={"data": event.data.model_copy(update={"trigger": stored.sequence})})
    bus.store(LEDGER, judged.subject, canonical(again), {})
    host = Host(lambda: MemoryLog(bus), Timers())
    await host.caught_up(lambda: len(bus.records(LEDGER)))
    await host.stop()
    verbs = [parse(r.data).data.verb for r in bus.records(LEDGER) if r.subject.endswith("intent_issued")]
    assert verbs == ["start_attempt", "stop_attempt", "evict_node", "wake_standby"]


@few
async def test_the_wrong_and_the_broken_are_passed_over(path: Path) -> None:
    story = told(path)
    inputs = inputs_of(story.records)
    bus = MemoryBus(inputs[0].time_ns)
    size = lambda: len(bus.records(LEDGER))  # noqa: E731
    host = Host(lambda: MemoryLog(bus), Timers())
    for record in inputs:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
        for subject, data in (
            (record.subject, b"\xff\x00 no event"),
            ("ledger.gpt.detector.hold_placed", record.data),
            ("ledger.other.detector.signal", record.data),
            (record.subject, b'{"type":"keepstep.from_the_future.v9"}'),
        ):
            bus.store(LEDGER, subject, data, {})
        live = await host.caught_up(size)
    await host.stop()
    assert plain(bus.records(LEDGER)) == plain(story.records)
    assert live.decider.unread_count >= 3 * len(inputs)
    holds(bus)


async def test_an_unreadable_decision_is_passed_over() -> None:
    story = told(FEW[0])
    bus = MemoryBus(story.records[0].time_ns)
    for record in story.records:
        bus.now_ns = max(bus.now_ns, record.time_ns)
        bus.store(LEDGER, record.subject, record.data, {})
    bus.store(LEDGER, "ledger.gpt.decider.intent_issued", b"garbage", {})
    bus.store(LEDGER, "ledger.gpt.decider.signal", next(r for r in story.records if ".detector.signal" in r.subject).data, {})
    host = Host(lambda: MemoryLog(bus), Timers())
    await host.caught_up(lambda: len(bus.records(LEDGER)))
    await host.stop()


async def test_the_expectation_is_of_all_deciders_subjects() -> None:
    bus = MemoryBus()
    log = MemoryLog(bus)
    await log.append("ledger.gpt.decider.decision_made", b"1", expect=Expect(decider_service.OWN, 0))
    with pytest.raises(StaleWriter):
        await log.append("ledger.other.decider.decision_made", b"2", expect=Expect(decider_service.OWN, 0))
