"""The agent as a real process, on a real bus, with real ranks: what it publishes, and that nothing hangs on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from events import subjects
from events.action import CommandAnswered, NodeCommand
from events.decision import RankPlace
from events.envelope import AnyEvent
from events.hardware import KernelLog
from events.ports import HELD_HEADER, TELEMETRY_JOB, TELEMETRY_NODE
from events.presence import AgentState, Heartbeat
from events.registry import canonical, make, parse
from events.training import RankExit, RankStarted, TrainingProgress
from infra.embedded import EmbeddedServer
from infra.jetstream import BusClient, JetStreamLog, connect
from infra.streams import ensure_streams

NODE, JOB = "node 1.a", "gpt"

#: A rank: reports steps as the hook does, with the library that a user's script would use.
SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
import json, os, socket
sock = None
def connect():
    s = socket.socket(socket.AF_UNIX); s.connect(os.environ["KEEPSTEP_SOCKET"])
    s.sendall(json.dumps({"v": 1, "type": "hello", "job": os.environ["KEEPSTEP_JOB"],
        "attempt": int(os.environ["KEEPSTEP_ATTEMPT"]), "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(), "restored_step": -1}).encode() + b"\\n")
    return s
step = 0
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
    step += 1
    try:
        sock = sock or connect()
        sock.sendall(json.dumps({"v": 1, "type": "progress", "phase": "step", "progress": step, "step": step,
            "restored_step": -1, "dropped": 0, "samples": [[step, time.time_ns(), 0.05, 1.0, None, None, None]]}).encode() + b"\\n")
    except OSError:
        sock = None
print("the end was asked for", file=sys.stderr)
sys.exit(7)
"""


class Node:
    """One agent process over a bus, and what the streams hold of it."""

    def __init__(self, folder: Path, server: EmbeddedServer, client: BusClient) -> None:
        self.folder, self.server, self.client = folder, server, client
        self.log = folder / "kernel.log"
        self.log.touch()
        self.state = folder / "state"
        self.end = folder / "end"
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.process: subprocess.Popen[bytes] | None = None
        self.said = folder / "agent.err"

    def start(self, *more: str) -> None:
        options = self.server.node_options(NODE)
        with open(self.said, "ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "infra.agent", "--node", NODE, "--state", str(self.state), "--bus", self.server.url,
                 "--seed-file", options["nkeys_seed"], "--kernel-log", str(self.log), *more],
                stderr=said,
            )  # fmt: skip

    def kernel_says(self, line: str) -> None:
        with open(self.log, "a") as log:
            log.write(f"{line}\n")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 15)

    async def records(self, stream: str) -> list[tuple[AnyEvent, dict[str, str], int]]:
        found = []
        async for record in JetStreamLog(self.client, stream).read(subjects=("tn.*.*.*", "tj.*.*.*.*")):
            event = parse(record.data)
            assert event.subject == NODE and record.subject.split(".")[2] == subjects.token(NODE)
            found.append((event, dict(record.headers), record.time_ns))
        return found

    async def facts(self, stream: str, kind: type) -> list[AnyEvent]:
        return [event for event, _, _ in await self.records(stream) if isinstance(event.data, kind)]

    async def until(
        self, stream: str, kind: type, enough: Callable[[list[AnyEvent]], bool], within_s: float = 20.0
    ) -> list[AnyEvent]:
        end = time.monotonic() + within_s
        while True:
            found = await self.facts(stream, kind)
            if enough(found):
                return found
            if time.monotonic() > end:
                raise AssertionError(f"not seen in {within_s} s: {kind.__name__}, have {len(found)}; {self.said.read_text()}")
            await asyncio.sleep(0.05)

    async def command(self, verb: str, key: str, attempt: int = 1, **more: Any) -> CommandAnswered:
        """Repeated until it is answered, as an actuator does."""
        fact = NodeCommand(key=key, verb=verb, job=JOB, attempt=attempt, **more)  # type: ignore[arg-type]
        event = make(fact, id=key, source="actuator", subject=NODE, time=time.time_ns())
        end = time.monotonic() + 20
        while time.monotonic() < end:
            await self.client.publish(subjects.command(NODE, verb), canonical(event))
            for _ in range(10):
                for answer in await self.facts(TELEMETRY_JOB, CommandAnswered):
                    if answer.data.key == key:
                        assert isinstance(answer.data, CommandAnswered)
                        return answer.data
                await asyncio.sleep(0.05)
        raise AssertionError(f"{verb} was not answered; {self.said.read_text()}")

    async def start_rank(self, key: str = "k-start", attempt: int = 1) -> CommandAnswered:
        return await self.command(
            "start",
            key,
            attempt,
            place=RankPlace(node=NODE, first_rank=1, count=1),
            world_size=2,
            master_address="127.0.0.1",
            master_port=1,
            command=(sys.executable, "-S", "-c", SCRIPT, str(self.end), str(self.folder)),
            directory=str(self.folder),
        )


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    with EmbeddedServer(tmp_path / "bus", nodes=[NODE]) as server:
        client = await connect(server.url, server.role_options("admin"))
        await ensure_streams(client)
        one = Node(tmp_path, server, client)
        try:
            yield one
        finally:
            one.end.touch()  # ranks that a failed test left end by themselves
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)
            if one.process is not None and one.process.poll() is None:
                one.kill()
            await client.close()
            await asyncio.sleep(0.1)


def numbered_without_hole(events: list[AnyEvent], killed_ns: int = 0) -> None:
    """`killed_ns`: what a bus that was killed then had acknowledged in the half second before may be gone, since observations are
    persisted asynchronously (decision 012)."""
    by_source: dict[str, dict[int, int]] = {}
    for event in events:
        by_source.setdefault(event.source, {})[event.number] = event.time
    for source, told in by_source.items():
        for missing in set(range(1, max(told) + 1)) - told.keys():
            before = max((number for number in told if number < missing), default=0)
            assert before and 0 <= killed_ns - told[before] < 500_000_000, f"{source}: {missing}"


async def test_what_it_says_of_its_node(node: Node) -> None:
    node.log.write_text("NVRM: Xid (PCI:0000:3b:00): 13, of the past\nusb 1-1: of the past\n")
    node.start()
    beats = await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 3)
    node.kernel_says("[    1.000000] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    lines = await node.until(TELEMETRY_NODE, KernelLog, lambda found: len(found) >= 2)
    assert [[(r.text[:30], r.history) for r in event.data.records] for event in lines] == [
        [("NVRM: Xid (PCI:0000:3b:00): 13", True)],
        [("NVRM: Xid (PCI:0000:3b:00): 79", False)],
    ]
    assert {event.bootid for event in beats} == {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
    gaps = [later.time - earlier.time for earlier, later in pairwise(beats)]
    assert all(0.5e9 < gap < 2e9 for gap in gaps)
    assert node.process is not None
    os.kill(node.process.pid, signal.SIGSTOP)
    await asyncio.sleep(3.5)
    os.kill(node.process.pid, signal.SIGCONT)
    await node.until(TELEMETRY_NODE, AgentState, lambda found: any(e.data.state == "skipped" for e in found))
    assert await node.stop() == 0
    told = await node.facts(TELEMETRY_NODE, AgentState)
    states = [(e.data.producer, e.data.state) for e in told]
    started = {producer for producer, state in states if state == "started"}
    assert started >= {"agent", "heartbeat", "host", "kernel_log", "nic", "nvml", "rank_logs", "trainer"}
    # One stand-still is told of once, and is no stall of each producer's.
    assert [pair for pair in states if pair[1] != "started"] == [("heartbeat", "skipped"), ("agent", "stopping")]
    assert "heartbeats were not sent" in next(e.data.detail for e in told if e.data.state == "skipped")
    numbered_without_hole([event for event, _, _ in await node.records(TELEMETRY_NODE)])


async def test_ranks_live_on_through_kills_and_are_found_again(node: Node) -> None:
    """Killed with a rank at work, twice; its exit while no agent runs is told by the next one, once."""
    node.start()
    await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 1)
    answer = await node.start_rank()
    assert answer.ok, answer.detail
    (started,) = await node.until(TELEMETRY_JOB, RankStarted, lambda found: len(found) >= 1)
    assert (started.job, started.attempt, started.data.rank, started.data.world_size) == (JOB, 1, 1, 2)
    pid = started.data.pid
    await node.until(TELEMETRY_JOB, TrainingProgress, lambda found: len(found) >= 3)
    beats = await node.until(TELEMETRY_JOB, Heartbeat, lambda found: len(found) >= 1)
    assert [(r.rank, r.pid, r.state in "RSD") for r in beats[-1].data.ranks] == [(1, pid, True)]
    assert (beats[-1].job, beats[-1].attempt) == (JOB, 1)

    node.kill()
    seen = len(await node.facts(TELEMETRY_JOB, TrainingProgress))
    os.kill(pid, 0)
    node.start()
    after = await node.until(TELEMETRY_JOB, TrainingProgress, lambda found: len(found) > seen + 3)
    steps = [event.data.step for event in after]
    assert steps == sorted(steps) and steps[-1] > steps[seen - 1]
    again = await node.start_rank()  # the same key: answered, not done again
    assert again.ok and again.key == answer.key
    assert len(await node.facts(TELEMETRY_JOB, RankStarted)) == 1

    node.kill()
    node.end.touch()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        await asyncio.sleep(0.05)
    node.start()
    (exit_,) = await node.until(TELEMETRY_JOB, RankExit, lambda found: len(found) >= 1)
    assert (exit_.data.code, exit_.data.signal, exit_.data.asked, exit_.attempt) == (7, None, False, 1)
    assert "the end was asked for" in exit_.data.stderr_tail
    node.kernel_says("NVRM: Xid (PCI:0000:3b:00): 31, the line that tells why comes late")
    (late,) = await node.until(TELEMETRY_NODE, KernelLog, lambda found: len(found) >= 1)
    assert (late.job, late.attempt) == (JOB, 1), "what is seen after the last exit still names its attempt"
    await asyncio.sleep(1.1)
    assert len(await node.facts(TELEMETRY_JOB, RankExit)) == 1
    assert await node.stop() == 0


async def test_a_bus_that_stands_still_and_one_that_is_gone(node: Node) -> None:
    """Stopped (SIGSTOP) and continued, then killed and started again: everything arrives, in order, with the time it waited."""
    node.start()
    await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 1)
    answer = await node.start_rank()
    assert answer.ok, answer.detail
    await node.until(TELEMETRY_JOB, TrainingProgress, lambda found: len(found) >= 1)

    os.kill(node.server.pid, signal.SIGSTOP)
    for i in range(5):
        node.kernel_says(f"nvme stopped {i}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.5)
    os.kill(node.server.pid, signal.SIGCONT)
    await node.until(TELEMETRY_NODE, KernelLog, lambda found: "nvme stopped 4" in lines(found))

    await asyncio.sleep(1.0)  # observations are acknowledged a moment before they are written (persist mode async)
    await node.client.close()
    killed_ns = time.time_ns()
    await asyncio.to_thread(node.server.kill)
    for i in range(5):
        node.kernel_says(f"nvme gone {i}")
        await asyncio.sleep(0.1)
    node.end.touch()  # the rank's exit, too, is seen while the bus is away
    await asyncio.sleep(1.0)
    await asyncio.to_thread(node.server.start)
    node.client = await connect(node.server.url, node.server.role_options("admin"))
    await node.until(TELEMETRY_NODE, KernelLog, lambda found: "nvme gone 4" in lines(found))
    (exit_,) = await node.until(TELEMETRY_JOB, RankExit, lambda found: len(found) >= 1)
    assert exit_.data.code == 7

    everything = await node.records(TELEMETRY_NODE)
    held = [int(headers.get(HELD_HEADER, 0)) for event, headers, _ in everything if "nvme gone 0" in lines([event])]
    assert max(held) > 1_000_000_000
    for event, headers, stored_ns in everything:
        if isinstance(event.data, KernelLog) and HELD_HEADER in headers:  # else: what waited in the stopped server's socket
            assert abs(stored_ns - int(headers.get(HELD_HEADER, 0)) - event.time) < 1_500_000_000
    unique = list({event.id: event for event, _, _ in everything}.values())
    texts = [text for text in lines(unique) if text.startswith("nvme ")]
    assert texts == [f"nvme {what} {i}" for what in ("stopped", "gone") for i in range(5)]
    numbered_without_hole(unique)
    numbered_without_hole([event for event, _, _ in await node.records(TELEMETRY_JOB)], killed_ns)
    heartbeats = [event for event in unique if isinstance(event.data, Heartbeat)]
    assert any(event.data.spooled for event in heartbeats)
    assert await node.stop() == 0


def lines(events: list[AnyEvent]) -> list[str]:
    return [record.text for event in events if isinstance(event.data, KernelLog) for record in event.data.records]


async def test_it_starts_without_a_bus_and_keeps_what_it_sees(node: Node) -> None:
    await node.client.close()
    await asyncio.to_thread(node.server.stop)
    node.start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while "out of reach" not in node.said.read_text():
                await asyncio.sleep(0.05)
    assert "kept on disk" in node.said.read_text()
    node.kernel_says("nvme before any bus")
    await asyncio.sleep(0.5)
    node.kill()
    await asyncio.to_thread(node.server.start)
    node.client = await connect(node.server.url, node.server.role_options("admin"))
    node.start()
    (event,) = await node.until(TELEMETRY_NODE, KernelLog, lambda found: len(found) >= 1)
    assert lines([event]) == ["nvme before any bus"]
    states = await node.facts(TELEMETRY_NODE, AgentState)
    states = [e for e in states if e.data.producer == "agent"]
    assert [e.data.state for e in states] == ["started", "started"], "the one that was killed is heard of, too"
    assert states[0].source != states[1].source
    assert await node.stop() == 0
    assert "Traceback" not in node.said.read_text()


async def test_commands_that_are_none_of_its_own_change_nothing(node: Node) -> None:
    node.start()
    await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 1)
    for data in (b"", b"{", b"\xff" * 1000, canonical(make(Heartbeat(), id="x", source="s", subject=NODE, time=1))):
        await node.client.publish(subjects.command(NODE, "stop"), data)
    fact = NodeCommand(key="k", verb="start", job=JOB, attempt=1)
    await node.client.publish(subjects.command(NODE, "stop"), canonical(make(fact, id="y", source="s", subject=NODE, time=1)))
    answer = await node.command("start", "k-2", place=RankPlace(node="another", first_rank=0, count=1), world_size=1)
    assert not answer.ok and "for another" in answer.detail
    assert not await node.facts(TELEMETRY_JOB, RankStarted)
    assert await node.stop() == 0
    said = node.said.read_text()
    assert said.count("dropped") == 5 and "Traceback" not in said


async def test_one_agent_a_state_folder(node: Node) -> None:
    node.start()
    await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 1)
    assert node.process is not None
    second = await run_agent_once("--node", NODE, "--state", str(node.state), "--bus", node.server.url)
    assert second == (2, f"keepstep agent: an agent already runs over {node.state} (process {node.process.pid} of node {NODE}); "
                         "stop it or give another --state\n")  # fmt: skip
    assert await node.stop() == 0
    other = await run_agent_once("--node", "another", "--state", str(node.state), "--bus", node.server.url)
    assert other[0] == 2 and "is the state of node" in other[1]


async def run_agent_once(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.agent", *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(20):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, said.decode()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--state"),
        (("--bus", "http://x"), "no address of a bus"),
        (("--bus", "nats://127.0.0.1:1", "--node", ""), "a node's name"),
        (("--bus", "nats://127.0.0.1:1", "--node", "x" * 401), "a node's name"),
        (("--bus", "nats://127.0.0.1:1", "--heartbeat-s", "0"), "heartbeat"),
        (("--bus", "nats://127.0.0.1:1", "--heartbeat-s", "nan"), "heartbeat"),
        (("--bus", "nats://127.0.0.1:1", "--spool-mib", "0.1"), "too small"),
        (("--bus", "nats://127.0.0.1:1", "--spool-mib", "x"), "invalid float"),
        (("--bus", "nats://127.0.0.1:1", "--kernel-log", "none", "--kernel-log", "kmsg"), "stands alone"),
        (("--bus", "nats://127.0.0.1:1", "--kernel-log", "/"), "is a folder"),
        (("--bus", "nats://127.0.0.1:1", "--seed-file", "/nowhere/x.nk"), "no key at"),
        (("--bus", "nats://127.0.0.1:1", "--tls-ca", "/nowhere/ca"), "certificate authority"),
        (("--bus", "nats://127.0.0.1:1", "--catalogue", "/nowhere/c"), "can't be read"),
        (("--bus", "nats://127.0.0.1:1", "--socket", "/" + "x" * 200), "give a shorter one"),
        (("--bus", "nats://127.0.0.1:1", "--bogus"), "--bogus"),
    ],
)
def test_wrong_settings_get_one_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from infra.agent import main

    state = ("--state", str(tmp_path / "state")) if arguments else ()
    assert main([*arguments, *state]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and "Traceback" not in said


async def test_it_weighs_little(node: Node) -> None:
    """Beside training: no heavy module, little memory, and next to nothing at rest."""
    node.start()
    await node.until(TELEMETRY_NODE, Heartbeat, lambda found: len(found) >= 2)
    assert node.process is not None

    def spent_s() -> float:
        assert node.process is not None
        fields = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s = spent_s()
    await asyncio.sleep(4.0)
    assert spent_s() - before_s < 0.2, "more than 5 % of a core at rest"
    resident_kib = int(Path(f"/proc/{node.process.pid}/status").read_text().split("VmRSS:")[1].split()[0])
    assert resident_kib < 150 * 1024
    assert await node.stop() == 0
    code = "import json, sys; import infra.agent; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)  # noqa: ASYNC221
    assert not {"faust", "duckdb", "torch", "numpy", "rich", "typer", "aiohttp"} & set(loaded)


async def test_a_producer_that_fails_is_started_again_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers import supervise
    from producers.supervise import Supervisor

    monkeypatch.setattr(supervise, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(supervise, "BACK_AFTER_S", 0.02)
    said: list[AgentState] = []

    class Desk:
        def about_node(self, producer: str, fact: AgentState) -> None:
            said.append(fact)

    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs <= 2:
            raise OSError(5, "Input/output error", "/dev/kmsg")
        await asyncio.Event().wait()

    task = asyncio.create_task(Supervisor(Desk()).keep("kernel_log", run))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while len(said) < 4:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert {fact.producer for fact in said} == {"kernel_log"}
    assert [fact.state for fact in said] == ["started", "failed", "failed", "resumed"]
    assert said[1].detail == "OSError: Input/output error (/dev/kmsg); it is started again in 0.01 s"
