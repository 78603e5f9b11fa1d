"""The intent capture_stacks: rounds over all nodes, those that do not answer, and the command on a node with real ranks."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actuators.local import Local
from actuators.port import Done, Unanswered, Work
from events.action import CommandAnswered, NodeCommand
from events.decision import IntentIssued, RankPlace
from events.finding import ProcessStack, StackRound
from events.job import JobDeclared, Place
from processors.policy import Stacks
from processors.stacks import aggregate
from tests.hang_cases import LOCKED, NORM
from tests.test_ranks import World, until


@pytest.fixture
async def world(tmp_path: Any) -> AsyncIterator[World]:
    here = World(tmp_path)
    yield here
    await here.hosts[-1].close(leave_running=False)


class FakeNodes:
    """Nodes of two ranks; `silent` ones never answer, `refusing` ones say why. Rank 5 is in a lock."""

    def __init__(self, silent: Sequence[str] = (), refusing: Sequence[str] = ()) -> None:
        self.silent, self.refusing = silent, refusing
        self.asked: list[tuple[float, NodeCommand]] = []

    async def ask(self, node: str, command: NodeCommand, within_s: float) -> CommandAnswered:
        self.asked.append((asyncio.get_running_loop().time(), command))
        if node in self.silent:
            await asyncio.sleep(within_s)
            raise Unanswered(f"the agent of {node} did not answer")
        if node in self.refusing:
            return CommandAnswered(key=command.key, verb=command.verb, ok=False, detail="stale attempt")
        assert command.place is not None
        ranks = range(command.place.first_rank, command.place.first_rank + command.place.count)
        stacks = [ProcessStack(rank=rank, pid=rank + 1, state="S", threads=(LOCKED if rank == 5 else NORM,)) for rank in ranks]
        return CommandAnswered(key=command.key, verb=command.verb, ok=True, stacks=tuple(stacks))


def work(nodes: int = 4, **more: Any) -> Work:
    names = [f"n{i}" for i in range(nodes)]
    intent = IntentIssued(
        trigger=1, ledger_digest="", key="k", decision="d", incident="i", job="gpt", epoch=1, verb="capture_stacks", attempt=2,
        places=tuple(RankPlace(node=name, first_rank=2 * i, count=2) for i, name in enumerate(names)), world_size=2 * nodes,
        expires_ns=10, **more,
    )  # fmt: skip
    declared = JobDeclared(job="gpt", nodes=tuple(Place(node=name) for name in names), ranks_per_node=2, command=("train",))
    return Work(intent, declared)


async def taken(nodes: FakeNodes, given: Work, **more: Any) -> Done:
    return await Local(aggregate=lambda found, world, cut: aggregate(found, world, Stacks(**cut)), **more).capture_stacks(
        given, nodes
    )


async def test_every_node_is_asked_and_the_round_names_the_culprit() -> None:
    nodes = FakeNodes()
    done = await taken(nodes, work())
    assert done.result == "done" and [round_.outliers for round_ in done.stacks] == [(5,)]
    assert {command.verb for _, command in nodes.asked} == {"stacks"} and len({command.key for _, command in nodes.asked}) == 4
    assert all(command.attempt == 2 and command.within_s > 0 for _, command in nodes.asked)


async def test_what_stands_apart_is_cut_where_the_intent_says() -> None:
    done = await taken(FakeNodes(), work(cut=(("outliers_share_max", 0.01),)))
    assert done.result == "done" and done.stacks[-1].outliers == ()


async def test_rounds_are_so_far_apart_and_each_is_asked_anew() -> None:
    nodes = FakeNodes()
    done = await taken(nodes, work(rounds=3, every_s=0.2))
    assert len(done.stacks) == 3 and len({command.key for _, command in nodes.asked}) == 12
    times = sorted(at for at, command in nodes.asked if command.key.endswith("/n0"))
    assert all(0.15 < later - earlier < 1.0 for earlier, later in itertools.pairwise(times))


async def test_a_node_that_does_not_answer_is_silent_and_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actuators.stack_rounds.PATIENCE_S", 0.3)
    start = time.monotonic()
    done = await taken(FakeNodes(silent=["n0"]), work())
    assert time.monotonic() - start < 5
    assert done.result == "done" and done.nodes == ("n0",) and "no stacks from n0" in done.detail
    assert done.stacks[0].silent == (0, 1) and done.stacks[0].outliers == (0, 1, 5)


async def test_nobody_answers_or_all_refuse() -> None:
    names = [f"n{i}" for i in range(4)]
    unheard = await taken(FakeNodes(silent=names), work(), within_s=1.0)
    assert (unheard.result, unheard.stacks) == ("unreachable", ()) and set(unheard.nodes) == set(names)
    refused = await taken(FakeNodes(refusing=names), work())
    assert refused.result == "failed" and "n0: stale attempt" in refused.detail


async def test_without_a_function_that_aggregates_nothing_is_asked() -> None:
    nodes = FakeNodes()
    assert (await Local().capture_stacks(work(), nodes)).result == "failed" and nodes.asked == []


async def test_a_node_reads_its_ranks_each_time_anew_and_refuses_an_older_attempt(world: World) -> None:
    host = await world.host()
    assert (await host.handle(world.command("start", count=2))).ok
    await until(lambda: world.seen(0) and world.seen(1))
    pids = {rank: (world.seen(rank) or {})["pid"] for rank in (0, 1)}
    first = await host.handle(world.command("stacks", key="look"))
    assert first.ok and first.detail.startswith("2 of 2 processes of 2 ranks read")
    assert {(stack.rank, stack.pid) for stack in first.stacks} == set(pids.items())
    assert all("<module> (train.py:" in stack.threads[0] for stack in first.stacks)
    os.kill(pids[1], signal.SIGSTOP)
    await until(lambda: "T" in [process.state for process in host.processes()])
    second = await host.handle(world.command("stacks", key="look"))
    round_: StackRound = aggregate(second.stacks, 2)
    assert round_.outliers == round_.silent == (1,)
    assert (await host.handle(world.command("start", 2))).ok
    stale = await host.handle(world.command("stacks", 1))
    assert not stale.ok and stale.detail.startswith("stale attempt")
    nothing = await host.handle(world.command("stacks", 3))
    assert not nothing.ok and nothing.detail == "no rank of attempt 3 ran here"
