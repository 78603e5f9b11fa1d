"""A followed file is looked at when the kernel tells of a change, rarely otherwise, and by the clock where it can't be told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from producers import kernel_log
from producers.file_wake import FileWake
from producers.log_file import FileFollower
from tests.test_kernel_log import XID, Kept, following, until


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the file was looked at."""
    seen: list[float] = []
    poll = FileFollower.poll

    def counted(self: FileFollower, now_ns: int) -> list[object]:
        seen.append(time.monotonic())
        return poll(self, now_ns)  # type: ignore[return-value]

    monkeypatch.setattr(FileFollower, "poll", counted)
    return seen


def add(path: Path, text: str) -> float:
    with path.open("a") as file:
        file.write(text + "\n")
    return time.monotonic()


async def told(kept: Kept, text: str, within_s: float = 30.0) -> float:
    await until(lambda: any(record.text == text for record in kept.records()), within_s)
    return time.monotonic()


async def test_a_quiet_file_costs_a_look_a_second_and_a_line_is_told_at_once(tmp_path: Path, looks: list[float]) -> None:
    kept, path = Kept(), tmp_path / "log"
    path.touch()
    async with following(str(path), kept, tmp_path):
        await asyncio.sleep(0.5)
        before = len(looks)
        await asyncio.sleep(3)
        assert len(looks) - before <= 4
        took = []
        for i in range(5):
            await asyncio.sleep(0.2)
            at_s = add(path, f"{XID} {i}")
            took.append(await told(kept, f"{XID} {i}") - at_s)
        assert sorted(took)[2] < 0.05, took


async def test_a_file_that_comes_and_one_that_takes_its_place_are_told_of(tmp_path: Path, looks: list[float]) -> None:
    kept, path = Kept(), tmp_path / "log"
    async with following(str(path), kept, tmp_path):
        await asyncio.sleep(0.3)
        for i in range(4):
            await asyncio.sleep(0.2)
            at_s = add(path, f"{XID} {i} first")
            assert await told(kept, f"{XID} {i} first") - at_s < 0.5
            at_s = add(path, f"{XID} {i} second")
            assert await told(kept, f"{XID} {i} second") - at_s < 0.5
            path.rename(tmp_path / f"log.{i}")


async def test_where_the_kernel_does_not_tell_it_is_found_out_and_the_clock_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[float]
) -> None:
    """As on a network file system, whose other writers are not seen here. There is none to test on, so the kernel's word is
    left out."""
    monkeypatch.setattr(FileWake, "watch", lambda self: None)
    kept, path = Kept(), tmp_path / "log"
    path.touch()
    async with following(str(path), kept, tmp_path):
        await asyncio.sleep(0.2)
        at_s = add(path, f"{XID} 0")
        assert await told(kept, f"{XID} 0") - at_s < kernel_log.POLL_IDLE_S + 0.5
        before = len(looks)
        await asyncio.sleep(1)
        assert len(looks) - before > 10
        at_s = add(path, f"{XID} 1")
        assert await told(kept, f"{XID} 1") - at_s < 0.3


@pytest.mark.parametrize("how", [lambda path: path / "absent" / "log", lambda path: path])
async def test_no_watch_is_no_fault(how: Callable[[Path], Path], tmp_path: Path) -> None:
    wake = FileWake(how(tmp_path), lambda: None)
    wake.open()
    wake.watch()
    wake.missed()
    assert not wake.trusted
    wake.close()


async def test_a_flood_is_sent_twice_a_second_and_what_matters_at_once(tmp_path: Path) -> None:
    kept, path = Kept(), tmp_path / "log"
    path.touch()
    async with following(str(path), kept, tmp_path, lines_per_s=50):
        for i in range(200):
            add(path, f"chatter {i}")
            if i == 150:
                at_s = add(path, XID)
                assert await told(kept, XID) - at_s < 0.3
            await asyncio.sleep(0.01)
        await until(lambda: any(gap.reason == "thinned" for gap in kept.gaps()), 5)
        events = sum(1 for event in kept.events if event.data.kind() == "kernel_log")
        assert events <= 8, events
