"""The heartbeat: once a second by the clock nobody can set, with what the node's ranks are doing.

A beat that is late is sent late, the ones missed are not made up for, and a stand-still or a clock that was set is told as what it
is: evidence that was not taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from events.clock import NS
from events.envelope import TEXT_MAX
from events.hardware import EvidenceGap
from events.presence import AgentState, Heartbeat, RankProcess
from producers.observe import Desk
from producers.supervise import Pulse

PRODUCER = "heartbeat"
#: Beats this late are told of: the process or its machine stood still.
STILL_S_MIN = 2.5
#: The wall clock moving this much against the boot clock within a beat was set by someone.
CLOCK_SET_NS_MIN = 500_000_000
#: So many ranks' states fit a beat.
RANKS_MAX = 1024


class HeartbeatProducer:
    """Asked at each beat: `current()`, the job and attempt whose ranks are here (it may bring the desk's up to date), `processes()`
    and `parked()`."""

    def __init__(
        self,
        desk: Desk,
        current: Callable[[], tuple[str, int]],
        processes: Callable[[], tuple[RankProcess, ...]],
        parked: Callable[[], int],
        *,
        interval_s: float = 1.0,
    ) -> None:
        self.desk = desk
        self.interval_s = interval_s
        self.pulse = Pulse(interval_s)
        self._current = current
        self._processes = processes
        self._parked = parked
        self._offset_ns: int | None = None

    async def run(self) -> None:
        interval_ns = int(self.interval_s * NS)
        due_ns = self.desk.clock.boot_ns()
        while True:
            now_ns = self.desk.clock.boot_ns()
            late_ns = now_ns - due_ns
            if late_ns > STILL_S_MIN * NS:
                self._stood_still(late_ns)
            self._check_clock()
            self._beat()
            self.pulse.beat()
            due_ns += interval_ns * max(1, late_ns // interval_ns + 1)
            await asyncio.sleep(max(0.0, (due_ns - self.desk.clock.boot_ns()) / NS))

    def _beat(self) -> None:
        job, attempt = self._current()
        beat = Heartbeat(
            ranks=self._processes()[:RANKS_MAX],
            parked=self._parked(),
            spooled=self.desk.outbox.waiting,
            interval_s=self.interval_s,
        )
        self.desk.beat(PRODUCER, beat, job, attempt)

    def _stood_still(self, late_ns: int) -> None:
        missed = int(late_ns / NS / self.interval_s)
        detail = f"the agent stood still for {late_ns / NS:.1f} s: {missed} heartbeats were not sent"
        self.desk.about_node("agent", AgentState(producer=PRODUCER, state="skipped", detail=detail))

    def _check_clock(self) -> None:
        """A wall clock that was set makes the times before and after it differ from what passed."""
        clock = self.desk.clock
        offset_ns = clock.wall_ns() - clock.boot_ns()
        before_ns, self._offset_ns = self._offset_ns, offset_ns
        if before_ns is not None and abs(offset_ns - before_ns) > CLOCK_SET_NS_MIN:
            detail = (
                f"the wall clock was set by {(offset_ns - before_ns) / NS:+.3f} s; event times before and after differ by that"
            )
            self.desk.about_node("agent", EvidenceGap(producer="agent", reason="clock", detail=detail[:TEXT_MAX]))
