"""Keeps each producer running: one that raises is started again after a pause, and said so; none ends the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from events.envelope import TEXT_MAX
from events.presence import AgentState
from producers.observe import Desk

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0
#: Running this long after a failure: it is back.
BACK_AFTER_S = 2.0
STEADY_AFTER_S = 60.0


def sentence(error: BaseException) -> str:
    """An error as one line: an OSError's reason and file, else its text."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


class Supervisor:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    async def keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Runs it for ever. Ends when cancelled."""
        pause_s, failures = PAUSE_S_MIN, 0
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            back = loop.call_later(BACK_AFTER_S, self._say, name, "resumed", f"after {failures} failures") if failures else None
            try:
                await run()
                why = "it ended by itself"
            except Exception as error:
                why = f"{type(error).__name__}: {sentence(error)}"
            finally:
                if back is not None:
                    back.cancel()
            if loop.time() - began_s > STEADY_AFTER_S:
                pause_s, failures = PAUSE_S_MIN, 0
            failures += 1
            self._say(name, "failed", f"{why}; it is started again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, pause_s * 2)

    def _say(self, name: str, state: Literal["failed", "resumed"], detail: str) -> None:
        self.desk.about_node("agent", AgentState(producer=name, state=state, detail=detail[:TEXT_MAX]))
