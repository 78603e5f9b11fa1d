"""Tasks that are to end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

_AGAIN_S = 0.5


async def ended(*tasks: asyncio.Future[Any]) -> Sequence[Any]:
    """Cancels tasks until they are over, and gives what each came to: a result or an exception. Once may not do:
    `asyncio.wait_for`, on which nats-py waits for answers, swallows in Python 3.11 a cancellation that races its own end, and the task
    would go on for ever."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    return await asyncio.gather(*tasks, return_exceptions=True)
