"""Keeps each producer running, and says so: when it starts, when it failed and is started again, when its rounds stop coming (it hangs
on something) and when they come again. None ends the agent, and none is silent without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from events.envelope import TEXT_MAX
from events.presence import AgentState
from producers.observe import Desk

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0
#: Running this long after a failure: it is back.
BACK_AFTER_S = 2.0
STEADY_AFTER_S = 60.0
#: Rounds missed in a row until a producer is stalled, and the least time.
STALL_ROUNDS, STALL_S_MIN = 3, 3.0
WATCH_S = 1.0


def sentence(error: BaseException) -> str:
    """An error as one line: an OSError's reason and file, else its text."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


class Pulse:
    """Of a producer that works in rounds, `interval_s` apart: it beats when one is complete. A producer that waits for what comes (a
    socket, the kernel's ring) has none: its waiting is no stall."""

    __slots__ = ("interval_s", "rounds")

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.rounds = 0

    def beat(self) -> None:
        self.rounds += 1


@dataclass(slots=True)
class _Watched:
    pulse: Pulse
    rounds: int
    moved_s: float
    stalled: bool = False


class Supervisor:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        #: Those that run now and have a pulse.
        self._watched: dict[str, _Watched] = {}

    async def keep(self, name: str, run: Callable[[], Awaitable[None]], pulse: Pulse | None = None) -> None:
        """Runs it for ever. Ends when cancelled."""
        pause_s, failures = PAUSE_S_MIN, 0
        loop = asyncio.get_running_loop()
        self._say(name, "started", "")
        while True:
            began_s = loop.time()
            back = loop.call_later(BACK_AFTER_S, self._say, name, "resumed", f"after {failures} failures") if failures else None
            if pulse is not None:
                self._watched[name] = _Watched(pulse, pulse.rounds, began_s)
            try:
                await run()
                why = "it ended by itself"
            except Exception as error:
                why = f"{type(error).__name__}: {sentence(error)}"
            finally:
                self._watched.pop(name, None)
                if back is not None:
                    back.cancel()
            if loop.time() - began_s > STEADY_AFTER_S:
                pause_s, failures = PAUSE_S_MIN, 0
            failures += 1
            self._say(name, "failed", f"{why}; it is started again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, pause_s * 2)

    async def watch(self) -> None:
        """Looks after the pulses. Ends when cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(WATCH_S)
            now_s = loop.time()
            still_s = max(0.0, now_s - before_s - 2 * WATCH_S)  # all of the agent stood still: no one producer's stall
            for name, watched in self._watched.items():
                watched.moved_s += still_s
                self._look(name, watched, now_s)

    def _look(self, name: str, watched: _Watched, now_s: float) -> None:
        pulse = watched.pulse
        quiet_s = now_s - watched.moved_s
        if pulse.rounds != watched.rounds:
            watched.rounds, watched.moved_s = pulse.rounds, now_s
            if watched.stalled:
                watched.stalled = False
                self._say(name, "resumed", f"its rounds come again, after {quiet_s:.1f} s without one")
        elif not watched.stalled and quiet_s > max(STALL_S_MIN, STALL_ROUNDS * pulse.interval_s):
            watched.stalled = True
            self._say(name, "stalled", f"no round was completed for {quiet_s:.1f} s; one takes {pulse.interval_s:g} s")

    def _say(self, name: str, state: Literal["started", "stalled", "failed", "resumed"], detail: str) -> None:
        self.desk.about_node("agent", AgentState(producer=name, state=state, detail=detail[:TEXT_MAX]))
