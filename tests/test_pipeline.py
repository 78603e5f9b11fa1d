"""The pipeline of one machine: what `up` keeps running."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infra import pipeline as made
from infra.embedded import find_connection
from infra.home import Home


async def test_a_bus_that_ends_unasked_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_control(*_: object, **more: Any) -> None: ...

    monkeypatch.setattr(made, "start_control", no_control)
    told: list[str] = []
    back = asyncio.Event()

    def on_bus(sentence: str) -> None:
        told.append(sentence)
        if "is back" in sentence:
            back.set()

    pipeline = made.Pipeline(Home(tmp_path), made.default_policy_text(), on_bus=on_bus)
    await pipeline.start()
    try:
        assert pipeline.server is not None
        pid, url = pipeline.server.pid, pipeline.server.url
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(back.wait(), 20)
        found = find_connection(pipeline.home.bus)
        assert found.pid != pid and found.url == url
        await (await pipeline.address.connect("observer")).close()
    finally:
        await pipeline.stop()
    assert told == ["the bus ended unasked (exit code -9); starting it again", f"the bus is back: {url}"]
