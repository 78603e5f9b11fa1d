"""What a worker asks the bus for at its start and at a change of partitions, asked again while the bus is away: a cluster whose stream has
just lost its leader answers nobody for some seconds, and that is no reason to end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from events.ports import LogUnavailable

log = logging.getLogger("keepstep.detector")

T = TypeVar("T")
_AGAIN_S = 0.25


async def patiently(ask: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """What it gives, once it gives something. Raises LogUnavailable after `patience_s`, and every other error at once."""
    give_up_s = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return await ask()
        except LogUnavailable as error:
            if time.monotonic() > give_up_s:
                raise
            if not told:
                log.warning("%s; it is asked again", error)
                told = True
        await asyncio.sleep(_AGAIN_S)
