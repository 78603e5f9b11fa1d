"""The decider as a process on a real bus: kill -9 at any moment and start again; a stale one is refused by the server; SIGTERM ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.clock import NS
from events.ports import LEDGER, Record
from events.registry import parse
from infra.bus import BusClient
from infra.decider_service import LiveDecider, Said, Superseded
from infra.embedded import EmbeddedServer
from infra.home import Address, Home
from infra.jetstream import JetStreamLog, JetStreamTimers
from infra.streams import Limits, ensure_streams
from processors.decider import is_own
from processors.replay import replay
from tests.decider_bench import SCRIPTS, inputs_of, told
from tests.decider_laws import check

STORY = next(path for path in SCRIPTS if path.stem == "gpu_lost")


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path / "home")
    home.path.mkdir(mode=0o700)
    with EmbeddedServer(home.bus):
        nc = await Address(home).connect("admin")
        await ensure_streams(nc, limits=Limits(lease_ttl_ns=2 * NS))
        await nc.close()
        yield home


async def say(nc: BusClient, record: Record) -> int:
    return (await JetStreamLog(nc, LEDGER).append(record.subject, record.data)).sequence


async def ledger(nc: BusClient) -> list[Record]:
    return [record async for record in JetStreamLog(nc, LEDGER).read()]


async def until(nc: BusClient, wanted: int, seconds: float = 30) -> list[Record]:
    """The ledger once so many decisions stand there."""
    async with asyncio.timeout(seconds):
        while True:
            records = await ledger(nc)
            if sum(is_own(r.subject) for r in records) >= wanted:
                return records
            await asyncio.sleep(0.05)


async def start(home: Home) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "infra.decider_service", "--home", str(home.path),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process, number: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    async with asyncio.timeout(20):
        await process.communicate()
    return process.returncode or 0


def verbs(records: list[Record]) -> list[str]:
    return [parse(r.data).data.verb for r in records if r.subject.endswith(".decider.intent_issued")]


async def killed_at(nc: BusClient, process: asyncio.subprocess.Process, decisions: int, seconds: float = 40) -> None:
    """Kills the decider the moment that its so manieth decision is seen, which is in the midst of what it answers to one input."""
    seen = 0
    async with asyncio.timeout(seconds), contextlib.aclosing(JetStreamLog(nc, LEDGER).read(follow=True)) as records:  # type: ignore[type-var]
        async for record in records:
            seen += is_own(record.subject)
            if seen >= decisions:
                break
    assert process.returncode is None
    await end(process, signal.SIGKILL)


async def test_killed_and_started_again(home: Home) -> None:
    """Killed while it writes, twice: nothing is lost, doubled or changed, and what it says is its own replay."""
    story = told(STORY)
    inputs = [r for r in inputs_of(story.records) if ".timer." not in r.subject]
    expected = sum(is_own(r.subject) for r in story.records)
    nc = await Address(home).connect("admin")
    process = await start(home)
    try:
        for part, decisions in ((inputs[:3], 2), (inputs[3:6], 7)):
            for record in part:
                await say(nc, record)
            await killed_at(nc, process, decisions)
            process = await start(home)
        for record in inputs[6:]:
            await say(nc, record)
        records = await until(nc, expected, 40)
        assert await end(process, signal.SIGTERM) == 0
    finally:
        if process.returncode is None:
            await end(process, signal.SIGKILL)
        await nc.close()
    check(records, late=True)
    result = replay(records)
    assert result.identical and not result.pending, result.divergence
    assert verbs(records) == verbs(story.records)
    assert sum(r.subject.endswith("decider_started") for r in records) == 3


async def test_the_server_refuses_a_stale_decider(home: Home) -> None:
    inputs = [r for r in inputs_of(told(STORY).records) if ".timer." not in r.subject]
    nc = await Address(home).connect("decider")
    admin = await Address(home).connect("admin")
    tasks: list[asyncio.Task[None]] = []
    try:

        async def take_over(worker: str) -> tuple[LiveDecider, asyncio.Task[None]]:
            live = LiveDecider(JetStreamLog(nc, LEDGER), JetStreamTimers(nc), worker=worker, code_version="1")
            tasks.append(asyncio.create_task(live.run()))
            await asyncio.wait_for(live.caught_up.wait(), 20)
            return live, tasks[-1]

        for record in inputs[:3]:
            await say(admin, record)
        old, old_task = await take_over("old")
        assert verbs(await ledger(admin)) == ["start_attempt"]
        new, _ = await take_over("new")
        for record in inputs[3:]:
            await say(admin, record)
        records = await until(admin, sum(is_own(r.subject) for r in told(STORY).records))
        with pytest.raises(Superseded):
            await asyncio.wait_for(old_task, 20)
        event = parse(next(r.data for r in records if is_own(r.subject)))
        with pytest.raises(Superseded):
            await old._store([Said("ledger.gpt.decider.decision_made", event, b"{}")])
        assert verbs(records) == verbs(told(STORY).records)
        assert replay(await ledger(admin)).identical
        assert new.decider.digest
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await nc.close()
        await admin.close()


async def test_a_timer_fires_through_the_broker(home: Home) -> None:
    """A crash is answered when its window has passed, by the broker's own timer, though the decider was down when it fired."""
    story = told(next(path for path in SCRIPTS if path.stem == "rank_killed"))
    crash = next(i for i, r in enumerate(inputs_of(story.records)) if b"rank_exit" in r.data)
    nc = await Address(home).connect("admin")
    process = await start(home)
    try:
        for record in inputs_of(story.records)[: crash + 1]:
            await say(nc, record)
        records = await until(nc, 6)
        await end(process, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not any(r.subject.endswith(".timer.timer_fired") for r in await ledger(nc)):
                await asyncio.sleep(0.05)
        process = await start(home)
        records = await until(nc, 9)
        assert await end(process, signal.SIGTERM) == 0
    finally:
        if process.returncode is None:
            await end(process, signal.SIGKILL)
        await nc.close()
    assert verbs(records)[-1] == "stop_attempt"
    assert replay(records).identical
