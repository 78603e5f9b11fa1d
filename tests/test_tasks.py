"""A task that is to end ends, though a cancellation be swallowed."""

from __future__ import annotations

import asyncio
import contextlib

from infra.tasks import ended


async def test_a_swallowed_cancellation_is_said_again() -> None:
    swallowed = 0

    async def stubborn() -> str:
        nonlocal swallowed
        while swallowed < 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            swallowed += 1
        await asyncio.sleep(3600)
        return "never"

    async def quick() -> str:
        return "done"

    task, other = asyncio.create_task(stubborn()), asyncio.create_task(quick())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        first, second = await ended(task, other)
    assert swallowed == 2 and isinstance(first, asyncio.CancelledError) and second == "done"
    assert await ended() == []
