"""The disk of the bus's store is full for a while: `status` says which parts are not at work, and everything goes on once there is room."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from infra import pipeline as pipelines
from tests.scenarios.harness import Scenario
from tests.small_disk import SmallDisk, small_disk, small_streams

pytestmark = pytest.mark.slow


async def status_is(s: Scenario, code: int, within_s: float) -> Any:
    """What `status` says as soon as it exits with that code."""
    end_s = time.monotonic() + within_s
    while True:
        try:
            return await s.cli_json("status", code=code)
        except AssertionError:
            if time.monotonic() > end_s:
                raise
        await asyncio.sleep(0.5)


async def test_a_full_disk_is_said_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ensure_streams", small_streams)
    with small_disk(tmp_path / "disk") as disk:
        await _is_said_and_survived(disk, tmp_path)


async def _is_said_and_survived(disk: SmallDisk, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "bus").symlink_to(disk.folder)
    told: list[str] = []
    s = Scenario(tmp_path, nodes=2, standbys=1)
    s.pipeline.on_bus = told.append
    async with s:
        await s.declare()
        await status_is(s, 0, 30)
        step = s.step(0)
        disk.fill()
        amiss = await status_is(s, 1, 60)
        assert any(part["problem"] for part in amiss["parts"]), amiss
        await asyncio.sleep(8)
        assert s.step(0) > step, "the job does not depend on keepstep"
        disk.empty()
        fine = await status_is(s, 0, 60)
        assert {part["part"]: part["problem"] for part in fine["parts"]} == dict.fromkeys((*pipelines.CONTROL, "bus"), ""), fine
        assert all(any(what in sentence for sentence in told) for what in ("given up writing", "is back")), told
        before = s.at
        s.lose_gpu("n1")
        await s.until(lambda: s.of("decision_made", after=before), "decision after all")
        await s.finish()
        await s.check(evicted=["n1"])
