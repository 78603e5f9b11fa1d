"""The group test, carried out: in each phase all groups at once replay the job's own command for some steps, each as a world of its own
with TP and PP kept and DP cut, from one checkpoint. Speaks to agents (actuators/replays.py is their side); judges by replay_verdicts.

Whatever becomes of it, it ends the replays that it began; and should it be gone itself, each has a deadline on its node.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actuators.port import Done, Nodes, Unanswered, Work
from actuators.replay_verdicts import GroupRun, verdicts
from events.action import CommandAnswered, NodeCommand
from events.decision import RankPlace
from events.envelope import TEXT_MAX
from events.finding import REPLAY_PHASES as PHASES
from events.finding import ReplayPhase

#: For both phases, where the intent states no time.
WITHIN_S = 1800.0
#: Once half of a phase's groups are through, the rest have this many times as long, and at least so much more: then they hang. A group
#: whose workers start cold (imports, a device's set-up) is not to be taken for one, beside groups whose workers were parked.
PATIENCE = 3.0
PATIENCE_S_MIN = 120.0
#: An agent tells what came of a replay this long after its deadline, at most.
ANSWER_S = 20.0
#: And so long, at most, that it ended replays: their processes are killed first.
ENDED_S = 10.0


@dataclass
class _Group:
    """One replay that goes on. `cut`: why its agents were told to end it."""

    phase: ReplayPhase
    number: int
    nodes: tuple[str, ...]
    cut: str = ""


class GroupTest:
    """One test. `what`: the command and its surroundings, as a start has them."""

    def __init__(self, work: Work, nodes: Nodes, what: dict[str, Any], *, unreachable_s: float = 3.0) -> None:
        self.intent, self.declared = work.intent, work.declared
        self._nodes, self._what, self._patience_s = nodes, what, max(unreachable_s, ENDED_S)
        self._deadline_s = (self.intent.within_s or WITHIN_S) / len(PHASES)
        self._per_node = self.declared.ranks_per_node
        # Each carrying out is new: what an earlier one left is ended, and its answers are none of this one's.
        self._nonce = secrets.token_hex(4)
        self._silent: set[str] = set()
        self._restore = ""
        self._from = "from the beginning"

    async def run(self) -> Done:
        """Both phases. Its result is `done` as soon as a group ran."""
        intent = self.intent
        if len(intent.groups) != len(PHASES) or not all(intent.groups) or not intent.steps:
            return Done("failed", "the intent names no groups of two phases, or no steps")
        everyone = list(dict.fromkeys(node for phase in intent.groups for group in phase for node in group))
        runs: list[GroupRun] = []
        try:
            await self._clear(everyone)
            refused = await self._find_restore([node for node in everyone if node not in self._silent])
            if refused is not None:
                return refused
            for phase, groups in zip(PHASES, intent.groups, strict=True):
                runs += await self._phase([_Group(phase, number, group) for number, group in enumerate(groups)])
        finally:
            await asyncio.shield(asyncio.create_task(self._clear(everyone)))
        results = verdicts(runs)
        failed = [f"{result.phase} {result.group}" for result in results if result.failed]
        unheard = [result for result in results if result.failed is None]
        if len(unheard) == len(results):
            return Done(
                "failed", f"no replay ran: {unheard[0].detail}"[:TEXT_MAX], tuple(sorted(self._silent)), replays=results
            )
        said = f"{len(results)} replays of {intent.steps} steps {self._from}: {len(failed)} failed"
        said += f" ({', '.join(failed)})" if failed else ""
        said += f", {len(unheard)} say nothing ({unheard[0].detail})" if unheard else ""
        return Done("done", said[:TEXT_MAX], tuple(sorted(self._silent)), replays=results)

    # Before and after

    async def _clear(self, nodes: Iterable[str]) -> None:
        """Ends what replays there are, and finds out who answers at all."""
        nonce = secrets.token_hex(4)
        asks = {node: self._ask(node, f"clear/{nonce}", self._patience_s, verb="replay") for node in nodes}
        for node, answer in zip(asks, await asyncio.gather(*asks.values()), strict=True):
            if answer is None:
                self._silent.add(node)

    async def _find_restore(self, nodes: list[str]) -> Done | None:
        """One checkpoint for all groups, by the word of one node: the same data from the same state. None: found, or there is none."""
        if not nodes:
            return Done("unreachable", "no agent answered", tuple(sorted(self._silent)))
        more = {**self._what, "restore_below_step": self.intent.restore_below_step}
        found = await self._ask(nodes[0], "restore", self._deadline_s, verb="prepare", **more)
        if found is None:
            return Done("unreachable", f"the agent of {nodes[0]} found no checkpoint in time", (nodes[0],))
        if not found.ok:
            return Done(
                "failed", f"{nodes[0]}: {found.detail}"[:TEXT_MAX], (nodes[0],), again=not found.detail.startswith("stale")
            )
        self._restore = found.restore
        self._from = f"from step {found.restore_step}" if found.restore else "from the beginning"
        return None

    # A phase

    async def _phase(self, groups: list[_Group]) -> list[GroupRun]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        tasks = {asyncio.create_task(self._replay(group)): group for group in groups}
        waiting, until_s, cut = set(tasks), begun_s + self._deadline_s + ANSWER_S, False
        try:
            while waiting:
                timeout_s = None if cut else max(0.0, until_s - loop.time())
                done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                through = sum(1 for task in tasks if task.done() and _came_through(task.result()))
                took_s = loop.time() - begun_s
                if not cut and done and 2 * through >= len(groups):
                    until_s = min(until_s, begun_s + max(PATIENCE * took_s, took_s + PATIENCE_S_MIN))
                if not done and not cut:
                    cut = True
                    late = [tasks[task] for task in waiting]
                    await asyncio.gather(*(self._cut(group, f"no end after {took_s:.0f} s") for group in late))
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self, group: _Group, why: str) -> None:
        group.cut = why
        await asyncio.gather(
            *(self._ask(node, f"cut/{secrets.token_hex(4)}", self._patience_s, verb="replay") for node in group.nodes)
        )

    async def _replay(self, group: _Group) -> GroupRun:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()

        def result(could_not: str = "", **more: Any) -> GroupRun:
            return GroupRun(
                group.phase, group.number, group.nodes, could_not=could_not, duration_s=loop.time() - begun_s, **more
            )

        silent = [node for node in group.nodes if node in self._silent]
        if silent:
            return result(f"no agent answered on {', '.join(silent)}")
        where = f"{group.phase}/{group.number}"
        met = await self._ask(
            group.nodes[0], f"{where}/meet", self._patience_s, verb="prepare", directory=self.declared.directory
        )
        if met is None or not met.ok:
            return result(f"{group.nodes[0]} has no port for it: {met.detail if met else 'no answer'}")
        asks = {
            asyncio.create_task(
                self._ask(node, f"{where}/run", self._deadline_s + ANSWER_S, **self._command(group, at, met))
            ): node
            for at, node in enumerate(group.nodes)
        }
        try:
            waiting = set(asks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if waiting and not group.cut and not all(_well(task.result()) for task in done):
                    await self._cut(group, "another rank of it had failed")  # they would wait for that one until their deadline
            answers = {node: task.result() for task, node in asks.items()}
        finally:
            for task in asks:
                task.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
        ranks = tuple(
            sorted((rank for answer in answers.values() if answer for rank in answer.replayed), key=lambda rank: rank.rank)
        )
        refused = [
            f"{node}: {answer.detail if answer else 'no answer'}"
            for node, answer in answers.items()
            if answer is None or not answer.ok
        ]
        if refused:
            return result("; ".join(refused)[:TEXT_MAX])
        if len(ranks) != len(group.nodes) * self._per_node:
            return result(f"{len(ranks)} ranks answered for {len(group.nodes) * self._per_node}")
        return result(ranks=ranks, hung=group.cut)

    def _command(self, group: _Group, at: int, met: CommandAnswered) -> dict[str, Any]:
        """The start of the `at`th node's ranks, in the group's own world."""
        return {
            **self._what,
            "verb": "replay",
            "place": RankPlace(node=group.nodes[at], first_rank=at * self._per_node, count=self._per_node),
            "world_size": len(group.nodes) * self._per_node,
            "ranks_per_node": self._per_node,
            "node_rank": at,
            "master_address": met.address,
            "master_port": met.port,
            "restore": self._restore,
            "revision": self.intent.revision,
            "steps": self.intent.steps,
            "within_s": self._deadline_s,
        }

    async def _ask(self, node: str, what: str, patience_s: float, **fields: Any) -> CommandAnswered | None:
        """None: it did not answer."""
        intent = self.intent
        said = {
            "key": f"{intent.key}/{self._nonce}/{what}/{node}",
            "job": intent.job,
            "attempt": intent.attempt,
            "epoch": intent.epoch,
        }
        try:
            return await self._nodes.ask(node, NodeCommand.model_validate(said | fields), patience_s)
        except Unanswered:
            return None


def _well(answer: CommandAnswered | None) -> bool:
    return answer is not None and answer.ok and all(rank.ended == "done" for rank in answer.replayed)


def _came_through(run: GroupRun) -> bool:
    return not run.could_not and not run.hung and all(rank.ended == "done" for rank in run.ranks)
