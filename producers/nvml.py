"""A node's GPUs watched: asked by a process of their own, so that a driver that hangs is seen and waited for by nothing else.

Every `ping_s` each GPU is touched, every `interval_s` all is asked in one call. What is not answered within `deadline_s` is told as a
miss; the asking process is then killed and another started, more slowly each time, and one that can't be killed is left and counted.
Where there is no driver, that is said once and looked for rarely, and no process is kept. I/O and time only: what the numbers mean is
nvml_values.py's, whether they are bad is the detector's.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.clock import NS
from events.envelope import TEXT_MAX
from events.gpu import GpuSample, GpuWatch, GpuXid, WatchState
from events.presence import AgentState, RankProcess
from producers.nvml_child import Child, Standing
from producers.nvml_values import clocks, error_text, hello, lost_indices, mapping, rows, sample, text, whole
from producers.observe import Desk

PRODUCER = "nvml"
_NO_DRIVER = {
    9: "its driver is not loaded",
    12: "there is no libnvidia-ml.so.1",
    18: "driver and library are of different versions",
}
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: While so much waits on disk for the bus, only one sample in so many is kept: what is rare must not be lost to them.
_WAITING_MIN, _KEPT_ONE_IN = 512, 6
#: The job is told of clocks and heat this often, as of its links' traffic.
_CLOCKS_NS = 28 * NS
_LATE_S = 1.0


def reader_command() -> tuple[str, ...]:
    """By path, isolated: nothing of a user's folders or environment is imported into it."""
    return (sys.executable, "-I", str(Path(__file__).with_name("nvml_reader.py")))


@dataclass(frozen=True, slots=True)
class NvmlSettings:
    """`deadline_s` plus `ping_s` is the longest that a hang stays unseen. `cold_s`: what a process gets for its first answer (the
    driver initialises every GPU for it) before it is killed; it counts as missing meanwhile. `retry_s`: from one look for a driver
    to the next, doubled up to its maximum. `again_s`: while a GPU is lost, NVML is initialised anew so often, to see it come back."""

    interval_s: float = 10.0
    ping_s: float = 3.0
    deadline_s: float = 5.0
    cold_s: float = 60.0
    retry_s: float = 30.0
    retry_s_max: float = 600.0
    pause_s: float = 1.0
    pause_s_max: float = 60.0
    again_s: float = 30.0
    again_s_max: float = 300.0
    stuck_max: int = 3
    command: tuple[str, ...] = ()
    driver_folder: Path = Path("/sys/bus/pci/drivers/nvidia")


class _Gone(Exception):
    """The asking process is over; another is wanted. `why`: for the report, '' if that was intended."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class _Fatal(Exception):
    """NVML can't be used on this machine now."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.said = said


class NvmlProducer:
    """`processes()`: the ranks that run here, as in a heartbeat. `run` ends only when cancelled."""

    def __init__(
        self,
        desk: Desk,
        processes: Callable[[], tuple[RankProcess, ...]] = lambda: (),
        settings: NvmlSettings | None = None,
    ) -> None:
        self.desk = desk
        self.settings = settings or NvmlSettings()
        self._processes = processes
        self._child: Child | None = None
        #: Killed and still there: in a call that the kernel does not break off.
        self.stuck: list[Child] = []
        self._wake = asyncio.Event()
        self._over = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._hello: dict[str, Any] | None = None
        self._fatal: _Fatal | None = None
        self._asked = 0
        self._answered = False
        self._told: tuple[WatchState, str] | None = None
        self._misses = 0
        self._stalled = False
        # What was seen of the GPUs
        self._known: dict[int, tuple[str, str]] = {}
        self._expected: set[str] = set()
        self._before: dict[str, Any] = {}
        self._before_ns = 0
        self._clocks_ns = -_CLOCKS_NS
        self._skipped = 0
        #: Until NVML is initialised anew, to look for a GPU that is lost.
        self._again_s = self.settings.again_s
        #: The latest, for whoever compares how nodes are set up.
        self.last: GpuSample | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that ask for it."""
        return tuple(child.pid for child in (self._child, *self.stuck) if child is not None)

    async def run(self) -> None:
        settings = self.settings
        retry_s, pause_s = settings.retry_s, settings.pause_s
        try:
            while True:
                try:
                    await self._room()
                    await self._one_child()
                except _Fatal as fatal:
                    self._without(fatal)
                    await self._end_child()
                    await asyncio.sleep(retry_s)
                    retry_s = min(settings.retry_s_max, retry_s * 2)
                    continue
                except _Gone as gone:
                    await self._end_child()
                    if self._answered:
                        pause_s, retry_s = settings.pause_s, settings.retry_s
                    if not gone.why:  # started anew to look for a lost GPU
                        self._again_s = min(settings.again_s_max, self._again_s * 2)
                        continue
                    if not self._misses:
                        self._say("failed", f"{gone.why}; it is started again in {pause_s:g} s")
                    await asyncio.sleep(pause_s)
                    pause_s = min(settings.pause_s_max, pause_s * 2)
        finally:
            await self._end_child()

    # One asking process

    async def _one_child(self) -> None:
        """From its start until it is over (_Gone) or can't work (_Fatal)."""
        self._over, self._hello, self._fatal, self._answered = False, None, None, False
        self._answers.clear()
        self._before = {}
        command = self.settings.command or reader_command()
        try:
            self._child = child = Child(command, self._line, self._ended)
        except OSError as error:
            raise _Gone(f"the process that asks NVML can't be started: {error.strerror or error}") from None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self._within(lambda: self._hello is not None, child)
        known = hello(self._hello)
        # A GPU that can't be reached keeps the name that it had under its index, unless another has it now.
        now_there = {uuid for uuid, _ in known.values()}
        self._known = {i: name for i, name in self._known.items() if name[0] not in now_there} | known
        sample_s = ping_s = loop.time()
        lost: Any = None
        while True:
            full = loop.time() >= sample_s
            answer = await self._ask("sample" if full else "ping", child)
            if answer.get("lost") != (lost or []) and not full:
                full, answer = True, await self._ask("sample", child)
            lost = answer.get("lost")
            if full:
                self._take_sample(answer, changed=lost != self._before.get("lost"))
                sample_s = loop.time() + self.settings.interval_s
            self._well(len(rows(answer.get("gpus"), 64)) if full else -1)
            gone = lost_indices(answer)
            absent = self._expected - {uuid for index, (uuid, _) in known.items() if index not in gone}
            if not absent:
                self._again_s = self.settings.again_s
            elif loop.time() - began_s > self._again_s:
                raise _Gone
            if not self._before.get("gpus") and not lost:
                raise _Fatal(0, "")
            ping_s = max(loop.time() + min(0.05, self.settings.ping_s), ping_s + self.settings.ping_s)
            await asyncio.sleep(max(0.0, min(ping_s, sample_s) - loop.time()))

    async def _ask(self, what: str, child: Child) -> dict[str, Any]:
        self._asked += 1
        number = self._asked
        child.ask(f"{what} {number}")
        await self._within(lambda: number in self._answers, child)
        return self._answers.pop(number)

    async def _within(self, there: Callable[[], bool], child: Child) -> None:
        """Until `there()`; each deadline that passes is a miss. Raises _Gone, _Fatal."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        due_s = began_s + self.settings.deadline_s
        while not there():
            if self._fatal is not None:
                raise self._fatal
            if self._over:
                raise _Gone(f"the process that asks NVML ended by itself ({await _exit_text(child)})")
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, due_s - loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                if there():
                    break
                if loop.time() - due_s > _LATE_S:  # this process stood still itself: it has not looked for an answer
                    due_s = loop.time() + self.settings.deadline_s
                    continue
                self._missed(child.pid, child.standing())
                due_s += self.settings.deadline_s
                if self._answered or loop.time() - began_s >= self.settings.cold_s:
                    raise _Gone(f"no answer in {loop.time() - began_s:.1f} s") from None
        self._answered = True

    def _line(self, value: dict[str, Any]) -> None:
        if "hello" in value:
            self._hello = mapping(value["hello"])  # type: ignore[assignment]
        elif "fatal" in value:
            code = value["fatal"] if isinstance(value["fatal"], int) else 999
            self._fatal = _Fatal(code, text(value.get("error"), 400))
        elif "xid" in value:
            self._xid(value)
        elif (number := whole(value.get("id"))) is not None and number == self._asked:
            self._answers[number] = value
        self._wake.set()

    def _ended(self) -> None:
        self._over = True
        self._wake.set()

    async def _end_child(self) -> None:
        """Kills it and looks for a moment whether it goes; if not, it is left to itself."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for _ in range(10):
            if child.exit_code is not None:
                return
            await asyncio.sleep(0.05)
        self.stuck.append(child)

    async def _room(self) -> None:
        """Until there are few enough that can't be killed; the hang goes on meanwhile, and is said to."""
        pause_s = self.settings.deadline_s
        while True:
            self.stuck = [child for child in self.stuck if child.exit_code is None]
            if len(self.stuck) < self.settings.stuck_max:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(self.settings.pause_s_max, pause_s * 2)
            self._missed(self.stuck[-1].pid, self.stuck[-1].standing())

    # What is told

    def _take_sample(self, answer: dict[str, Any], *, changed: bool) -> None:
        now_ns = self.desk.clock.boot_ns()
        fact = sample(
            answer,
            self._before,
            (now_ns - self._before_ns) / NS,
            self._known,
            interval_s=self.settings.interval_s,
            up_s=now_ns / NS,
            on_bus=self._on_bus(),
        )
        self._before, self._before_ns, self.last = answer, now_ns, fact
        self._expected |= {one.uuid for one in fact.gpus if one.uuid}
        if self.desk.job and now_ns - self._clocks_ns >= _CLOCKS_NS and (told := clocks(fact)) is not None:
            self._clocks_ns = now_ns
            self.desk.about_job(PRODUCER, self.desk.job, self.desk.attempt, told)
        self._skipped += 1
        if changed or self.desk.outbox.waiting < _WAITING_MIN or self._skipped >= _KEPT_ONE_IN:
            self._skipped = 0
            self.desk.about_node(PRODUCER, fact)

    def _on_bus(self) -> int:
        try:
            return sum(1 for name in os.listdir(self.settings.driver_folder) if _ADDRESS.fullmatch(name))
        except OSError:
            return -1

    def _xid(self, value: dict[str, Any]) -> None:
        xid = whole(value["xid"])
        if xid is not None:
            address, uuid = text(value.get("address"), 64), text(value.get("uuid"), 96)
            self.desk.about_node(PRODUCER, GpuXid(xid=xid, address=address, uuid=uuid))

    def _well(self, gpus: int) -> None:
        """An answer came in time; `gpus`: how many it told of, -1 if it did not."""
        if self._stalled:
            self._stalled = False
            self._say("resumed", f"NVML answers again after {self._misses} misses")
        if self._misses or (gpus > 0 and (self._told is None or self._told[0] != "watching")):
            self._misses = 0
            self._watch("watching", f"NVML answers for {gpus} GPUs" if gpus >= 0 else "NVML answers again")

    def _without(self, fatal: _Fatal) -> None:
        self._misses, self._stalled = 0, False
        if fatal.code == 0:
            self._watch("no_gpus", "the NVIDIA driver knows of no GPU")
        elif fatal.code in _NO_DRIVER:
            self._watch("no_driver", _NO_DRIVER[fatal.code])
        elif fatal.code == -1:
            self._watch("refused", f"pynvml can't be imported: {fatal.said}")
        else:
            self._watch("refused", f"NVML can't be initialised: {error_text(fatal.code)}")

    def _watch(self, state: WatchState, detail: str) -> None:
        """Said where it is not what was said last."""
        if self._told != (state, detail):
            self._told = state, detail
            self.desk.about_node(PRODUCER, GpuWatch(state=state, detail=detail[:TEXT_MAX], up_s=self._up_s()))

    def _missed(self, pid: int, stands: Standing) -> None:
        self._misses += 1
        ranks = tuple(p.rank for p in self._processes() if p.state == "D")[:1024]
        stuck = sum(1 for child in self.stuck if child.exit_code is None)
        at = f" while asked about GPU {stands.gpu}" if stands.gpu >= 0 else ""
        where = f" in {stands.waits_in}" if stands.waits_in else ""
        detail = (
            f"no answer from NVML within {self.settings.deadline_s:g} s, {self._misses} on end; "
            f"the asking process is in state {stands.state}{where}{at}"
        )
        fact = GpuWatch(
            state="missed",
            detail=detail[:TEXT_MAX],
            up_s=self._up_s(),
            misses=self._misses,
            deadline_s=self.settings.deadline_s,
            answered_before=self._answered,
            index=stands.gpu,
            address=self._known.get(stands.gpu, ("", ""))[1],
            pid=pid,
            process_state=stands.state,
            waits_in=stands.waits_in,
            ranks_stuck=ranks,
            stuck=stuck,
        )
        self._told = "missed", ""
        self.desk.about_node(PRODUCER, fact)
        if not self._stalled:
            self._stalled = True
            self._say("stalled", detail)

    def _up_s(self) -> float:
        return round(self.desk.clock.boot_ns() / NS, 3)

    def _say(self, state: Any, detail: str) -> None:
        self.desk.about_node("agent", AgentState(producer=PRODUCER, state=state, detail=detail[:TEXT_MAX]))


async def _exit_text(child: Child) -> str:
    for _ in range(10):
        code = child.exit_code
        if code is not None:
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        await asyncio.sleep(0.02)
    return "it closed its output"
