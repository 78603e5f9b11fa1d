"""Nodes of a group test on this machine: real rank hosts with real processes, and the way that an actuator speaks to them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actuators.environment import host_mark
from actuators.port import Unanswered, Work
from actuators.processes import Process, marked
from actuators.ranks import RankHost, RankNews
from events.action import CommandAnswered, NodeCommand
from events.decision import IntentIssued, RankPlace
from events.job import JobDeclared, Place
from tests.hook_agent import HOOK, ROOT

TRAIN = ROOT / "infra" / "demo_job" / "train.py"
FAULTY = ROOT / "infra" / "demo_job" / "faulty"
SMALL = (
    "--layers",
    "1",
    "--width",
    "32",
    "--batch",
    "2",
    "--step-floor",
    "0",
    "--print-every",
    "0",
    "--evaluate-every",
    "0",
    "--tail",
    "0",
)
#: Of the small model, the first product of its MLP.
FAULTY_SHAPE = "128x32"


class Cluster:
    """`Nodes` of an actuator: commands are handed to the hosts directly, repeated as over a bus. `dead`: agents that do not answer."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self.hosts: dict[str, RankHost] = {}
        self.news: list[tuple[str, RankNews]] = []
        self.dead: set[str] = set()
        self.asked: list[tuple[str, NodeCommand]] = []
        self.answers: list[CommandAnswered] = []

    async def start(self) -> None:
        for name in self.names:
            host = RankHost(
                self.folder / name, name, hook_folder=HOOK, on_event=self._hear(name), socket_path=self.folder / name / "agent.sock",
                boot_id="boot-1",
            )  # fmt: skip
            await host.start()
            self.hosts[name] = host

    def _hear(self, name: str) -> Callable[[RankNews], None]:
        return lambda news: self.news.append((name, news))

    async def close(self) -> None:
        await asyncio.gather(*(host.close(leave_running=False) for host in self.hosts.values()))

    async def ask(self, node: str, command: NodeCommand, within_s: float) -> CommandAnswered:
        self.asked.append((node, command))
        if node in self.dead:
            await asyncio.sleep(min(within_s, 0.2))
            raise Unanswered(f"the agent of {node} did not answer")
        try:
            async with asyncio.timeout(within_s):
                answer = await self.hosts[node].handle(command)
        except TimeoutError:
            raise Unanswered(f"the agent of {node} did not answer {command.verb} within {within_s:g} s") from None
        self.answers.append(answer)
        return answer

    def processes(self) -> list[Process]:
        """Of any node, whatever they are."""
        return [process for name in self.names for process, _ in marked(host_mark(self.folder / name) + "/")]

    async def park(self, declared: JobDeclared, names: list[str], within_s: float = 60.0) -> None:
        """Workers of the job on some nodes, warm."""
        hosts = {name: self.hosts[name] for name in names}
        for name, host in hosts.items():
            place = RankPlace(node=name, first_rank=0, count=declared.ranks_per_node)
            command = NodeCommand(
                key=f"park/{name}", verb="park", job=declared.job, attempt=0, place=place, command=declared.command,
                directory=declared.directory, environment=declared.environment, checkpoints=declared.checkpoints,
            )  # fmt: skip
            await host.handle(command)
        async with asyncio.timeout(within_s):
            while not all(host.parked() == declared.ranks_per_node for host in hosts.values()):
                await asyncio.sleep(0.02)


def declared(folder: Path, names: list[str], *command: str, **more: Any) -> JobDeclared:
    (folder / "job").mkdir(exist_ok=True)
    fields: dict[str, Any] = {
        "job": "gpt",
        "nodes": tuple(Place(node=name) for name in names),
        "dp": len(names),
        "command": command or (sys.executable, str(TRAIN), *SMALL),
        "directory": str(folder / "job"),
        "environment": (("OMP_NUM_THREADS", "1"),),
        "checkpoints": "checkpoints",
    }
    return JobDeclared.model_validate(fields | more)


def work(job: JobDeclared, groups: tuple[Any, Any], **more: Any) -> Work:
    fields: dict[str, Any] = {
        "key": "k1", "decision": "d1", "incident": "i1", "job": job.job, "epoch": 1, "verb": "group_test", "attempt": 3,
        "expires_ns": 1, "trigger": 1, "ledger_digest": "", "groups": groups, "steps": 3, "within_s": 120.0,
    }  # fmt: skip
    return Work(IntentIssued.model_validate(fields | more), job)
