"""The bus whose disk was full: it gives up writing, is started anew once there is room, and stores again."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from nats.errors import Error as NatsError

from events.ports import LogUnavailable
from infra import bus_keeper
from infra.bus import connect
from infra.bus_keeper import BusKeeper, WriteErrors, room_missing
from infra.lease import Lease
from tests.small_disk import SmallDisk, small_disk, small_streams

LINE = "[7] 2026/11/30 06:33:08.625446 "
GIVEN_UP = (
    "[ERR] Filestore [KV_LEASES] Critical write error: write /s/msgs/1.blk: no space left on device",
    "[ERR] JetStream failed to store a msg on stream '$G > CLOCK': write /s/1.blk: no space left on device",
    "[ERR] JetStream out of space, will be DISABLED",
)


@pytest.mark.parametrize("said", GIVEN_UP)
def test_a_log_that_tells_of_a_failed_write(said: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    errors = WriteErrors(log)
    assert errors.look() == ""
    log.write_text(f"{LINE}[INF] Server is ready\n{LINE}[WRN] Write error to a slow client\n")
    assert errors.look() == ""
    with log.open("a") as file:
        file.write(f"{LINE}{said}"[:60])
    assert errors.look() == "", "a line that is not whole yet"
    with log.open("a") as file:
        file.write(f"{LINE}{said}\n"[60:])
    assert errors.look() == said.removeprefix("[ERR] ")
    assert errors.look() == "", "told once"


def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    errors = WriteErrors(log)
    log.write_text(f"{LINE}[INF] Server is ready\n" * 9)
    assert errors.look() == ""
    os.replace(log, tmp_path / "server.log.1")
    log.write_text(f"{LINE}{GIVEN_UP[0]}\n")
    assert errors.look()
    log.write_text("")
    assert errors.look() == ""


async def _stores(keeper: BusKeeper) -> bool:
    nc = await connect(keeper.server.url, keeper.server.role_options("admin"))
    try:
        lease = Lease(nc, "decider", "me")
        await lease.try_acquire()
        return lease.held
    except LogUnavailable:
        return False
    finally:
        await nc.close()


async def _said(told: list[str], what: str, within_s: float = 60.0) -> str:
    end_s = time.monotonic() + within_s
    while not (found := [sentence for sentence in told if what in sentence]):
        assert time.monotonic() < end_s, (what, told)
        await asyncio.sleep(0.1)
    return found[0]


@pytest.mark.parametrize("by", ["its log", "its tick"])
async def test_a_bus_whose_disk_was_full_stores_again(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "its tick":  # the log had no room either
        monkeypatch.setattr(WriteErrors, "look", lambda self: "")
        monkeypatch.setattr(bus_keeper, "SILENT_LOOK_S", 0.5)
    told: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        keeper = BusKeeper(disk.folder / "bus", {"start_s_max": 30}, told.append)
        await keeper.start()
        try:
            await _is_given_up_and_comes_back(keeper, disk, told)
        finally:
            await keeper.stop()
    assert [sentence.split(" (")[0] for sentence in told] == [
        "the bus has given up writing",
        "the bus's disk has room again: it is started anew",
        f"the bus is back: {keeper.server.url}",
    ]


async def _is_given_up_and_comes_back(keeper: BusKeeper, disk: SmallDisk, told: list[str]) -> None:
    nc = await connect(keeper.server.url, keeper.server.role_options("admin"))
    await small_streams(nc)
    assert await _stores(keeper)
    pid = keeper.server.pid
    disk.fill()
    assert room_missing(disk.folder)
    for _ in range(5):  # into the last blocks that are its own already
        with suppress(NatsError):
            await nc.jetstream().publish("telemetry.n.node.heartbeat", bytes(100_000), timeout=0.3)
    assert "its disk lacks" in await _said(told, "given up writing")
    await asyncio.sleep(2 * bus_keeper.LOOK_S)
    assert keeper.server.pid == pid and not await _stores(keeper), "nothing is gained by a start without room"
    disk.empty()
    await _said(told, "is back")
    assert keeper.server.pid != pid
    assert await _stores(keeper)
    await nc.close()
