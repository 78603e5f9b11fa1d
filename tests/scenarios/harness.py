"""A pipeline for one scenario: started in a folder of its own, broken at will, and held at its end against what must always be so:
the replay of both stages is identical, nothing was decided twice, exactly the expected machines were evicted, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from events.envelope import AnyEvent
from events.job import JobDeclared, Place
from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, LogError, Record
from events.registry import parse
from infra.bus import BusClient
from infra.cli.reading import replay_all
from infra.home import Home
from infra.jetstream import JetStreamLog
from infra.pipeline import Node, Pipeline
from infra.pipeline import say as tell
from infra.wall_time import wall_times
from infra.watch import Watch

JOB = "job"
SCRIPT = Path(__file__).with_name("train.py")
ROOT = Path(__file__).resolve().parents[2]
KEEPSTEP = Path(sys.executable).with_name("keepstep")
#: An interpreter without torch: what is parked is warm at once.
PYTHON = getattr(sys, "_base_executable", sys.executable)
#: Everything here takes a second or two on a quiet machine; this is for one that is not.
WAIT_S = 60.0
STREAMS = (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB)
XID_79 = "<3>NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


def policy(mode: str = "auto", **changes: Any) -> str:
    """Acts, with room for evictions and for crashes one upon another, and closes what was nothing soon; machines that are
    out are left alone. `changes`: sections, merged into these."""
    value: dict[str, Any] = {
        "mode": mode,
        "detectors": {"progress_note_s": 1.0, "healthy_steps": 2, "pace": {"decline_min": 0.6}},
        "decider": {"quiet_s": 3.0, "silence_window_s": 4.0, "relapse_s": 0.5, "reattempts_max": 5, "examine_s": 0},
        "budget": {scope: {"evictions_max": 8, "share_max": 1.0} for scope in ("job", "rack", "fleet")},
    }
    for name, section in changes.items():
        value[name] = {**value.get(name, {}), **section} if isinstance(section, dict) else section
    return str(yaml.safe_dump(value, sort_keys=False))


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of LEDGER as the harness heard it: when, by this process's monotonic clock."""

    sequence: int
    heard_s: float
    subject: str
    event: AnyEvent

    @property
    def kind(self) -> str:
        return self.event.data.kind()

    @property
    def data(self) -> Any:
        return self.event.data


@dataclass(slots=True)
class Scenario:
    """`async with Scenario(tmp_path, nodes=2) as s:`; on leaving, everything that was started is gone, whatever happened."""

    folder: Path
    nodes: int = 2
    standbys: int = 0
    policy: str = field(default_factory=policy)
    step_s: float = 0.05
    racks: Mapping[str, str] = field(default_factory=dict)
    #: A bus elsewhere (tests/cluster_fixture.py) in place of an embedded one.
    bus: Any = None
    watch: Watch = field(default_factory=Watch)
    ledger: list[Seen] = field(default_factory=list)
    pipeline: Pipeline = field(init=False)
    nc: BusClient | None = None
    _readers: list[asyncio.Task[None]] = field(default_factory=list)
    _others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [f"n{i}" for i in range(self.nodes)] + [f"s{i}" for i in range(self.standbys)]
        where = {"url": self.bus.url, "key": self.bus.keys, "replicas": self.bus.replicas} if self.bus else {}
        nodes = [Node(n, str(self.kernel(n))) for n in names]
        self.pipeline = Pipeline(Home(self.folder / "home"), self.policy, nodes, "test", **where)

    @property
    def home(self) -> Home:
        return self.pipeline.home

    @property
    def steps_folder(self) -> Path:
        return self.folder / "steps"

    def kernel(self, node: str) -> Path:
        return self.folder / f"kernel-{node}.log"

    async def __aenter__(self) -> Scenario:
        self.steps_folder.mkdir(parents=True)
        for node in self.pipeline.nodes:
            Path(node.kernel_log).touch()
        try:
            await self.pipeline.start()
            await self.listen()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self) -> None:
        """Follows the bus from its beginning."""
        self.watch, self.ledger = Watch(), []
        self.nc = await self.pipeline.address.connect("operator", wait_s=20)
        self._readers = [asyncio.create_task(self._read(stream)) for stream in STREAMS]

    async def deafen(self) -> None:
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers = []
        if self.nc is not None:
            await self.nc.close()
            self.nc = None

    async def _read(self, stream: str) -> None:
        after = 0
        while True:
            with contextlib.suppress(OSError, RuntimeError, LogError):  # a bus that is away, streams not made yet
                assert self.nc is not None
                async with aclosing(JetStreamLog(self.nc, stream).read(after=after, follow=True)) as records:  # type: ignore[type-var]
                    async for record in records:
                        after = record.sequence
                        self._take(stream, record)
            await asyncio.sleep(0.2)

    def _take(self, stream: str, record: Record) -> None:
        if stream != LEDGER:
            self.watch.telemetry(record)
            return
        event = self.watch.ledger(record)
        if event is not None:
            self.ledger.append(Seen(record.sequence, time.monotonic(), record.subject, event))

    async def close(self) -> None:
        """Ends what this scenario started, and only that: its processes carry its folder in their command line or environment."""
        await self.deafen()
        for other in self._others:
            if other.poll() is None:
                other.kill()
            other.wait()
        self.thaw()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.pipeline.stop(), 25)
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, left, 10)

    # -- waiting -------------------------------------------------------------------------------------------------------------

    async def until(self, true: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
        """What `true` gives once it gives something; AssertionError, with the ledger's last lines, if it never does."""
        deadline = time.monotonic() + seconds
        while not (value := true()):
            self.pipeline.supervisor.check()
            if time.monotonic() > deadline:
                raise AssertionError(f"within {seconds:g} s there was no {what}; the ledger ends with\n{self.story()}")
            await asyncio.sleep(0.02)
        return value

    def story(self, last: int = 40) -> str:
        told = [s for s in self.ledger if s.kind != "progress_noted" or s.data.first]
        return "\n".join(f"  {s.sequence} {s.kind} {s.data.model_dump_json()[:300]}" for s in told[-last:])

    def of(self, *kinds: str, after: int = 0) -> list[Seen]:
        return [seen for seen in self.ledger if seen.kind in kinds and seen.sequence > after]

    @property
    def at(self) -> int:
        """The last LEDGER sequence that was heard."""
        return self.ledger[-1].sequence if self.ledger else 0

    def job(self, name: str = JOB) -> Any:
        return self.watch.fleet.jobs[name]

    async def closed(self, after: int, what: str = "closed incident", seconds: float = WAIT_S) -> Any:
        """The incident that was opened after a sequence, once it is closed and no other is open."""

        def over() -> Any:
            found = self.of("incident_closed", after=after)
            return found[0] if found and not self.watch.open_incidents() else None

        return (await self.until(over, what, seconds)).data

    # -- the job -------------------------------------------------------------------------------------------------------------

    def place(self, node: str) -> Place:
        return Place(node=node, rack=self.racks.get(node, ""), serial=f"serial-{node}")

    async def declare(self, *extra: str, wait: bool = True) -> None:
        """The job over all nodes, its standbys beside; waits until it trains."""
        names = [node.name for node in self.pipeline.nodes]
        await self.until(lambda: set(names) <= set(self.watch.nodes), "heartbeat of every agent")
        fact = JobDeclared(
            job=JOB, nodes=tuple(self.place(n) for n in names[: self.nodes]), dp=self.nodes,
            standbys=tuple(self.place(n) for n in names[self.nodes :]), directory=str(self.folder),
            command=(PYTHON, str(SCRIPT), str(self.steps_folder), str(self.step_s), *extra),
            checkpoints=str(self.folder / "checkpoints"), author="test",
        )  # fmt: skip
        assert self.nc is not None
        await tell(JetStreamLog(self.nc, LEDGER), fact, JOB)
        if wait:
            await self.trains(1)

    async def trains(self, attempt: int) -> None:
        await self.until(
            lambda: JOB in self.watch.fleet.jobs and self.job().confirmed == self.job().attempt >= attempt,
            f"healthy step of attempt {attempt}",
        )

    async def say(self, fact: Any, job: str = JOB) -> None:
        assert self.nc is not None
        await tell(JetStreamLog(self.nc, LEDGER), fact, job)

    def lines(self, rank: int) -> list[tuple[str, int, int, int, int]]:
        """(start or step, attempt, step, pid, monotonic ns), as the rank itself wrote them."""
        path = self.steps_folder / f"rank-{rank}.steps"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            word, *numbers = line.split()
            found.append((word, *map(int, numbers)))
        return found  # type: ignore[return-value]

    def step(self, rank: int) -> int:
        return max((line[2] for line in self.lines(rank) if line[0] == "step"), default=-1)

    def pid(self, rank: int) -> int:
        return self.lines(rank)[-1][3]

    def node_of(self, rank: int) -> str:
        return str(self.job().places[rank].node)

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def lose_gpu(self, node: str) -> None:
        with self.kernel(node).open("a") as log:
            log.write(XID_79)

    def assert_unbroken(self, ranks: Iterable[int], longest_s: float = 2.0) -> None:
        """One attempt, one process, no step missing or twice, and no pause: nothing that happened cost a step."""
        for rank in ranks:
            lines = self.lines(rank)
            assert [line[0] for line in lines].count("start") == 1, f"rank {rank} was started again"
            steps = [line for line in lines if line[0] == "step"]
            assert [line[2] for line in steps] == list(range(len(steps)))
            assert len({line[3] for line in lines}) == 1
            pauses = [(b[4] - a[4]) / 1e9 for a, b in pairwise(steps)]
            assert max(pauses, default=0) < longest_s, f"rank {rank} paused for {max(pauses):.1f} s"

    async def finish(self) -> None:
        """Lets the ranks end by themselves, and waits until that is known."""
        (self.steps_folder / "finish").touch()
        await self.until(lambda: self.job().wanted == "finished", "end of the job")

    # -- processes -----------------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to this scenario's folder, but this one."""
        found, mark = [], str(self.folder)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if process.pid == os.getpid() or not words or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environment = process.environ()
                if any(mark in word for word in words) or environment.get("KEEPSTEP_SOCKET", "").startswith(mark):
                    found.append(process)
        return found

    def part(self, name: str) -> int:
        """The pid of a part of the pipeline: decider, actuators, detector-node, detector-job, agent-<node>, bus."""
        if name == "bus":
            assert self.pipeline.server is not None
            return self.pipeline.server.pid
        return self.pipeline.supervisor.children[name].pid

    def parts(self) -> list[str]:
        return list(self.pipeline.supervisor.children)

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            if pid := self.part(name):
                os.kill(pid, number)

    async def kill(self, name: str) -> None:
        """kill -9, and waits until it is started again."""
        child = self.pipeline.supervisor.children[name]
        before = child.restarts
        self.signal(signal.SIGKILL, name)
        await self.until(lambda: child.restarts > before and child.pid, f"restart of {name}")

    def thaw(self) -> None:
        names = [n for n, child in self.pipeline.supervisor.children.items() if child.pid]
        self.signal(signal.SIGCONT, *names)
        if self.pipeline.server is not None and self.pipeline.server.running:
            self.signal(signal.SIGCONT, "bus")

    def start_part(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """One more process of ours, by module and arguments, with its log in the scenario's folder. It ends with the scenario."""
        name = f"{arguments[0].rpartition('.')[2]}-{len(self._others)}"
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-I", "-m", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._others.append(started)
        return started

    async def cli(self, *arguments: str, code: int = 0, home: bool = True) -> str:
        """What the real command prints; its exit code must be `code`."""
        words = [str(KEEPSTEP), *arguments, *(("--home", str(self.home.path)) if home else ())]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60, cwd=self.folder)
        assert done.returncode == code, f"{arguments} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    async def cli_json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(await self.cli(*arguments, "--json", code=code))

    # -- the end -------------------------------------------------------------------------------------------------------------

    async def records(self) -> dict[str, list[Record]]:
        assert self.nc is not None
        found: dict[str, list[Record]] = {}
        for stream in STREAMS:
            found[stream] = [record async for record in JetStreamLog(self.nc, stream).read()]
        return found

    async def settled(self, seconds: float = WAIT_S) -> dict[str, Any]:
        """Both stages replayed, once nothing is on its way any more."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self.records()
            # What follows from the very last observations may still be on its way to the ledger: telemetry is cut before it.
            ledger = found[LEDGER]
            result = replay_all(ledger, {stream: found[stream] for stream in STREAMS[1:]})
            pending = result["pending"] + sum(stage.get("pending", 0) for stage in result["signals"].values())
            if not pending or not result["identical"] or time.monotonic() > deadline:
                return {**result, "pending": pending, "records": found}
            await asyncio.sleep(0.3)

    async def check(self, *, evicted: Iterable[str] = (), left: bool = True) -> dict[str, list[Record]]:
        """What must be so after any scenario. `left`: also stops everything, and looks that nothing is left of it."""
        result = await self.settled()
        for stream, stage in result["signals"].items():
            assert stage["checked"] and stage["identical"], f"{stream}: {stage}"
        assert result["identical"], result["divergence"]
        assert result["pending"] == 0
        records: dict[str, list[Record]] = result["records"]
        events = [(record.subject, parse(record.data)) for record in records[LEDGER]]
        own = Counter(event.id for subject, event in events if ".decider." in subject)
        assert [i for i, n in own.items() if n > 1] == [], "decided twice"
        outcomes = Counter(event.data.key for subject, event in events if event.data.kind() == "outcome_recorded")
        assert [key for key, n in outcomes.items() if n > 1] == [], "two outcomes of one intent"
        assert not [event for _, event in events if event.data.kind() == "diverged"]
        out = [
            event.data.node for _, event in events if event.data.kind() == "intent_issued" and event.data.verb == "evict_node"
        ]
        assert sorted(out) == sorted(evicted), f"evicted were {out}"
        for job, split in wall_times(records[LEDGER], records[TELEMETRY_JOB]).items():
            parts = split.productive_ns + split.recomputed_ns + split.overhead_ns + split.lost.total()
            assert parts == split.total_ns > 0, f"{job}: the bins sum to {parts}, not {split.total_ns}"
        if left:
            await self.deafen()
            await self.pipeline.stop()
            await self.until(lambda: not self.processes(), f"end of every process (left: {self.left_over()})", 15)
        return records

    def left_over(self) -> list[str]:
        return [" ".join(process.cmdline())[:200] for process in self.processes()]
