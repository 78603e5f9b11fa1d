"""Leases on a real server: one holder at a time, the next after release or expiry, and a frozen holder that notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from events.ports import LogUnavailable
from infra.bus import BusClient, connect
from infra.embedded import EmbeddedServer
from infra.lease import Lease, LeaseLost
from infra.streams import Limits, api, ensure_streams

TTL_S = 0.8


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "bus") as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc, limits=Limits(lease_ttl_ns=int(TTL_S * 1e9)))
        await nc.close()
        yield server


@pytest.fixture
async def nc(server: EmbeddedServer) -> AsyncIterator[BusClient]:
    nc = await connect(server.url, server.role_options("decider"))
    yield nc
    await nc.close()


async def test_one_holds_and_the_next_gets_it_on_release(nc: BusClient) -> None:
    a, b = Lease(nc, "decider ž", "a"), Lease(nc, "decider ž", "b")
    assert await a.try_acquire() and a.held and await a.try_acquire()
    assert not await b.try_acquire() and not b.held
    with pytest.raises(LeaseLost, match="b no longer holds"):
        b.check()
    await a.release()
    assert not a.held
    assert await b.try_acquire() and not await a.try_acquire()
    assert await Lease(nc, "another", "a").try_acquire()


async def test_of_many_at_once_one_gets_it(nc: BusClient) -> None:
    leases = [Lease(nc, "x", f"o{i}") for i in range(8)]
    assert sum(await asyncio.gather(*(lease.try_acquire() for lease in leases))) == 1


async def test_renewed_it_outlives_its_ttl_and_one_waits_meanwhile(nc: BusClient) -> None:
    waiter = Lease(nc, "x", "b")
    async with Lease(nc, "x", "a") as lease:
        waiting = asyncio.create_task(waiter.acquire())
        for _ in range(16):
            await asyncio.sleep(TTL_S / 8)
            assert lease.held and not waiter.held
        assert lease.left_s <= TTL_S, "what it counts on is bounded by the bucket's time to live, whatever was asked for"
    await asyncio.wait_for(waiting, 30)
    assert waiter.held


async def test_not_renewed_it_expires_for_its_holder_no_later_than_for_others(nc: BusClient) -> None:
    a, b = Lease(nc, "x", "a"), Lease(nc, "x", "b")
    await a.acquire()
    async with asyncio.timeout(30):
        while not await b.try_acquire():
            await asyncio.sleep(0.02)
    assert not a.held
    with pytest.raises(LeaseLost):
        await a.renew()


async def test_a_holder_whose_bus_is_away_loses_it_and_is_told(server: EmbeddedServer, nc: BusClient) -> None:
    told = asyncio.Event()
    async with Lease(nc, "x", "a", on_lost=told.set) as lease:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.wait_for(told.wait(), 4)
            assert not lease.held
            with pytest.raises(LogUnavailable):
                await Lease(nc, "y", "a", 0.5).try_acquire()
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_a_short_outage_is_bridged(server: EmbeddedServer, nc: BusClient) -> None:
    async with Lease(nc, "x", "a") as lease:
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(TTL_S / 2.5)
        os.kill(server.pid, signal.SIGCONT)
        for _ in range(8):
            await asyncio.sleep(TTL_S / 8)
            assert lease.held


_HOLDER = """
import asyncio, json, sys
from infra.bus import connect
from infra.lease import Lease
async def main():
    nc = await connect(sys.argv[1], json.loads(sys.argv[2]))
    async with Lease(nc, "x", "frozen") as lease:
        while True:
            print(lease.held, flush=True)
            await asyncio.sleep(0.02)
asyncio.run(main())
"""


async def test_a_frozen_process_sees_that_its_lease_is_over_before_it_acts(server: EmbeddedServer, nc: BusClient) -> None:
    options = json.dumps(server.role_options("detector"))
    command = [sys.executable, "-c", _HOLDER, server.url, options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        assert (await asyncio.to_thread(os.read, pipe, 5)).startswith(b"True")
        os.kill(process.pid, signal.SIGSTOP)
        other = Lease(nc, "x", "other")
        await other.acquire(timeout_s=5)
        os.set_blocking(pipe, False)
        _drain(pipe)
        os.kill(process.pid, signal.SIGCONT)
        deadline_s, said = time.monotonic() + 5, b""
        while len(said.split()) < 5 and time.monotonic() < deadline_s:
            said += _drain(pipe)
            await asyncio.sleep(0.01)
        # The first line may have been judged before the freeze and written after it.
        assert said.split()[1:4] == [b"False"] * 3
        assert await other.try_acquire()
    finally:
        process.kill()
        process.wait()


def _drain(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return b""


async def test_buckets_of_few_keys_are_kept_in_small_blocks(server: EmbeddedServer, nc: BusClient) -> None:
    """The server holds the block that it writes in memory: one of 8 MB would fill for an hour."""
    for i in range(1000):
        await nc.jetstream().publish(f"$KV.KS_OFFSETS.x{i % 200}", bytes(300))
    info = await api(nc, "STREAM.INFO.KV_KS_OFFSETS")
    assert info["state"]["messages"] >= 200, "room for ten times the keys that there are"
    blocks = list((server.store / "jetstream").glob("*/streams/KV_KS_OFFSETS/msgs/*.blk"))
    assert blocks and max(block.stat().st_size for block in blocks) < 64 * 1024
