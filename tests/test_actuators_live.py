"""The actuators as a real process on a real bus, with real agents and ranks; killed and started again in the middle."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actuators.environment import host_mark
from actuators.processes import marked, send_exact
from events import subjects
from events.action import OutcomeRecorded, TryStarted
from events.clock import NS
from events.decision import IntentIssued, RankPlace
from events.envelope import Fact
from events.job import JobDeclared, Place
from events.ports import LEDGER
from events.registry import canonical, make, parse
from infra.clock import new_event_id, wall_ns
from infra.embedded import EmbeddedServer
from infra.home import Home
from infra.jetstream import BusClient, JetStreamLog, connect
from infra.streams import ensure_streams

JOB = "gpt"
SCRIPT = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["KEEPSTEP_ATTEMPT"] + "-" + os.environ["RANK"]), "a").write("x")
time.sleep(600)
"""


class Bus:
    def __init__(self, folder: Path, home: Home, server: EmbeddedServer, client: BusClient) -> None:
        self.folder, self.home, self.server = folder, home, server
        self.ledger = JetStreamLog(client, LEDGER)
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(SCRIPT)
        (folder / "out").mkdir()
        (folder / "kernel.log").touch()

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "said", "ab") as said:
            process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=said, stderr=said)
        self.processes.append(process)
        return process

    def agent(self, node: str) -> subprocess.Popen[bytes]:
        seed = self.server.node_options(node)["nkeys_seed"]
        return self.spawn(
            "infra.agent", "--node", node, "--state", str(self.home.node(node)), "--bus", self.server.url, "--seed-file", seed,
            "--kernel-log", str(self.folder / "kernel.log"),
        )  # fmt: skip

    def actuators(self) -> subprocess.Popen[bytes]:
        return self.spawn("infra.actuator_service", "--home", str(self.home.path), "--unreachable-s", "30")

    async def say(self, fact: Fact, role: str = "decider") -> None:
        event = make(fact, id=new_event_id(), source=role, subject=JOB, time=wall_ns(), job=JOB)
        await self.ledger.append(subjects.ledger(JOB, role, fact.kind()), canonical(event), message_id=event.id)

    async def facts(self, kind: type) -> list[Any]:
        events = [parse(record.data) async for record in self.ledger.read(subjects=("ledger.*.actuator.*",))]
        return [event.data for event in events if isinstance(event.data, kind)]

    async def until(self, kind: type, enough: Callable[[list[Any]], bool], within_s: float = 40.0) -> list[Any]:
        end = time.monotonic() + within_s
        while not enough(found := await self.facts(kind)):
            if time.monotonic() > end:
                raise AssertionError(f"{found}\n{(self.folder / 'said').read_text()[-4000:]}")
            await asyncio.sleep(0.02)
        return found


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    with EmbeddedServer(home.bus, nodes=["n0", "n1"]) as server:
        client = await connect(server.url, server.role_options("admin"))
        await ensure_streams(client)
        here = Bus(tmp_path, home, server, client)
        try:
            yield here
        finally:
            for process in here.processes:
                process.kill()
                process.wait()
            await client.close()
            left = [p for node in ("n0", "n1") for p, _ in marked(host_mark(home.node(node) / "ranks") + "/")]
            for process in left:
                send_exact(process, signal.SIGKILL)


def intent(verb: str, key: str, **more: Any) -> IntentIssued:
    return IntentIssued(
        key=key, decision=more.pop("decision", "d1"), incident="", job=JOB, epoch=0, verb=verb,
        expires_ns=wall_ns() + 600 * NS, trigger=1, ledger_digest="", **more,
    )  # fmt: skip


@pytest.mark.slow
async def test_killed_in_the_middle_of_a_start_it_is_started_once_and_has_one_outcome(bus: Bus) -> None:
    agents = [bus.agent("n0")]
    first = bus.actuators()
    command = ("/usr/bin/env", sys.executable, str(bus.folder / "train.py"), str(bus.folder / "out"))
    await bus.say(JobDeclared(job=JOB, nodes=(Place(node="n0"), Place(node="n1")), dp=2, command=command), "operator")
    places = (RankPlace(node="n0", first_rank=0, count=1), RankPlace(node="n1", first_rank=1, count=1))
    await bus.say(intent("start_attempt", "k1", attempt=1, places=places, world_size=2))
    # n1's agent is not there yet: the start hangs after n0's part of it
    out = bus.folder / "out"
    end = time.monotonic() + 40
    while not (out / "1-0").exists():
        assert time.monotonic() < end, (bus.folder / "said").read_text()[-4000:]
        await asyncio.sleep(0.02)
    assert await bus.facts(OutcomeRecorded) == []
    first.kill()
    first.wait()
    agents.append(bus.agent("n1"))
    bus.actuators()  # it waits for the killed one's lease to end
    (outcome,) = await bus.until(OutcomeRecorded, lambda found: bool(found))
    assert (outcome.key, outcome.result) == ("k1", "done"), outcome
    assert [t.ordinal for t in await bus.facts(TryStarted)] == [1, 2]
    end = time.monotonic() + 20
    while not (out / "1-1").exists():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    assert ((out / "1-0").read_text(), (out / "1-1").read_text()) == ("x", "x")  # each once
    # one agent is killed: the stop waits for it no longer than it must, and the one that is back finishes it
    agents[1].kill()
    agents[1].wait()
    bus.agent("n1")
    await bus.say(intent("stop_attempt", "k2", attempt=1, nodes=("n0", "n1"), decision="d2"))
    outcomes = await bus.until(OutcomeRecorded, lambda found: len(found) == 2)
    assert (outcomes[1].result, outcomes[1].nodes) == ("done", ()), outcomes[1]
    for node in ("n0", "n1"):
        assert marked(host_mark(bus.home.node(node) / "ranks") + "/") == []
