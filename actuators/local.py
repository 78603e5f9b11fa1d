"""Backend `local`: everything through the nodes' own agents. The default; the agents' processes are this machine's or many hosts'."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from actuators import machine_tests
from actuators.group_test import GroupTest
from actuators.port import Done, Nodes, Unanswered, Work
from actuators.stack_rounds import Aggregate, capture_rounds
from events.action import CommandAnswered, NodeCommand
from events.decision import RankPlace
from events.job import JobDeclared

log = logging.getLogger("keepstep.actuators")

Answers = dict[str, CommandAnswered | None]


class Local:
    """`within_s`: for one action as a whole. `unreachable_s`: a node whose agent is silent holds the others up this long at most.
    `grace_s`: what agents give a rank that is stopped gracefully."""

    def __init__(
        self,
        *,
        within_s: float = 60.0,
        unreachable_s: float = 3.0,
        grace_s: float = 10.0,
        aggregate: Aggregate | None = None,
    ) -> None:
        self.within_s, self.unreachable_s, self.grace_s = within_s, unreachable_s, grace_s
        self.aggregate = aggregate
        self._parking: set[asyncio.Task[None]] = set()

    async def stop_attempt(self, work: Work, nodes: Nodes) -> Done:
        intent = work.intent
        targets = tuple(dict.fromkeys((*intent.nodes, *(place.node for place in intent.places)))) or tuple(
            place.node for place in work.declared.nodes
        )
        patience_s = self.unreachable_s + (self.grace_s if intent.graceful else 0)
        commands = {node: _command(work, "stop", node, graceful=intent.graceful) for node in targets}
        answers = await _ask_all(nodes, commands, self.within_s, patience_s)
        silent = tuple(node for node, answer in answers.items() if answer is None)
        refused = {node: answer.detail for node, answer in answers.items() if answer is not None and not answer.ok}
        if refused:
            again = not any(answer is not None and not answer.ok and _refusal(answer) for answer in answers.values())
            return Done("failed", f"not stopped: {_said(refused)}", (*refused, *silent), again=again)
        if len(silent) == len(targets):
            return Done("unreachable", "no agent answered; nothing is known of the ranks", silent)
        stopped = f"stopped on {len(targets) - len(silent)} nodes"
        return Done("done", f"{stopped}; no answer from {', '.join(silent)}"[:2000] if silent else stopped, silent)

    async def evict_node(self, work: Work, nodes: Nodes) -> Done:
        """The node's processes are ended and it takes no part of the job any more. A node that does not answer is evicted all the
        same: it gets no ranks."""
        node = work.intent.node
        try:
            answer = await nodes.ask(node, _command(work, "fence", node), self.unreachable_s)
        except Unanswered as error:
            return Done("done", f"evicted unheard: {error}", (node,))
        if not answer.ok:
            return Done("done", f"evicted; its agent said: {answer.detail}"[:2000], (node,))
        return Done("done", answer.detail)

    async def wake_standby(self, work: Work, nodes: Nodes) -> Done:
        """Its agent is there and has workers parked, or is parking them."""
        node = work.intent.node
        place = RankPlace(node=node, first_rank=0, count=work.declared.ranks_per_node)
        try:
            answer = await nodes.ask(node, _command(work, "park", node, place=place, **_code(work)), self.within_s / 4)
        except Unanswered as error:
            return Done("unreachable", str(error), (node,))
        return Done("done", answer.detail) if answer.ok else Done("failed", answer.detail, (node,))

    async def start_attempt(self, work: Work, nodes: Nodes) -> Done:
        intent = work.intent
        first = next((place.node for place in intent.places if place.first_rank == 0), None)
        if first is None:
            return Done("failed", "the intent places no rank 0")
        try:
            command = _command(work, "prepare", first, restore_below_step=intent.restore_below_step, **_what(work.declared))
            prepared = await nodes.ask(first, command, self.within_s / 2)
        except Unanswered as error:
            return Done("unreachable", str(error), (first,))
        if not prepared.ok:
            return Done("failed", f"{first}: {prepared.detail}"[:2000], (first,), again=not _refusal(prepared))
        if not prepared.restore and not intent.from_the_beginning:
            lost = f"no whole checkpoint lies below step {intent.restore_below_step}, and it is not started from the beginning"
            ways = "put one where the job's checkpoints lie and restart, or stop it and declare it with another folder for them"
            return Done("failed", f"{lost}; {ways} ({prepared.detail})"[:2000], (first,))
        commands = {
            place.node: _command(
                work,
                "start",
                place.node,
                place=place,
                world_size=intent.world_size,
                ranks_per_node=work.declared.ranks_per_node,
                node_rank=node_rank,
                master_address=prepared.address,
                master_port=prepared.port,
                restore=prepared.restore,
                **_code(work),
            )
            for node_rank, place in enumerate(intent.places)
        }
        answers = await _ask_all(nodes, commands, self.within_s / 2, self.within_s / 4)
        silent = tuple(node for node, answer in answers.items() if answer is None)
        refused = {node: answer for node, answer in answers.items() if answer is not None and not answer.ok}
        if refused:
            said = _said({node: answer.detail for node, answer in refused.items()})
            again = not any(map(_refusal, refused.values()))
            return Done("failed", f"not started: {said}", (*refused, *silent), again=again)
        if silent:
            return Done("unreachable", f"no agent answered on {', '.join(silent)}"[:2000], silent)
        used = {place.node for place in intent.places}
        self._in_background(self._park(work, nodes, [node for node in work.standbys if node not in used]))
        restore = f"from step {prepared.restore_step}" if prepared.restore else "from the beginning"
        if not prepared.restore and intent.restore_below_step >= 0:
            restore += f" (there is no whole checkpoint below step {intent.restore_below_step})"
        code = f", revision {intent.revision[:12]}" if intent.revision else ""
        detail = f"attempt {intent.attempt} started on {len(commands)} nodes, {restore}{code}"
        return Done("done", detail, restored_step=prepared.restore_step if prepared.restore else -1)

    async def notify(self, work: Work, nodes: Nodes) -> Done:
        log.warning("%s", work.intent.text)
        return Done("done", "written to the actuators' log; --notify says who else is told")

    async def capture_stacks(self, work: Work, nodes: Nodes) -> Done:
        return await capture_rounds(work, nodes, self.aggregate, self.within_s, _ask_all)

    async def diagnose(self, work: Work, nodes: Nodes) -> Done:
        return await machine_tests.diagnose(work, nodes, partial(_command, work), _what(work.declared), self.unreachable_s)

    async def examine(self, work: Work, nodes: Nodes) -> Done:
        return await machine_tests.examine(work, nodes, partial(_command, work), _what(work.declared))

    async def group_test(self, work: Work, nodes: Nodes) -> Done:
        """Two rounds of short replays in groups: see actuators.group_test."""
        return await GroupTest(work, nodes, _what(work.declared), unreachable_s=self.unreachable_s).run()

    async def finished(self, declared: JobDeclared, key: str, standbys: tuple[str, ...], nodes: Nodes) -> None:
        names = dict.fromkeys((*(place.node for place in declared.nodes), *standbys))
        commands = {
            node: NodeCommand(key=f"{key}/unpark/{node}", verb="park", job=declared.job, attempt=0, **_what(declared))
            for node in names
        }
        await _ask_all(nodes, commands, self.unreachable_s, self.unreachable_s)

    async def _park(self, work: Work, nodes: Nodes, standbys: Iterable[str]) -> None:
        """Spares get warm while the job runs; whether they did is seen when they are needed."""
        count = work.declared.ranks_per_node
        commands = {
            node: _command(work, "park", node, place=RankPlace(node=node, first_rank=0, count=count), **_code(work))
            for node in standbys
        }
        await _ask_all(nodes, commands, self.within_s / 2, self.within_s / 2)

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._parking.add(task)
        task.add_done_callback(self._parking.discard)


def _what(declared: JobDeclared) -> dict[str, Any]:
    return {
        "command": declared.command,
        "directory": declared.directory,
        "environment": declared.environment,
        "checkpoints": declared.checkpoints,
    }


def _code(work: Work) -> dict[str, Any]:
    """What is run, at the intent's revision."""
    return _what(work.declared) | {"revision": work.intent.revision}


def _command(work: Work, verb: str, node: str, **more: Any) -> NodeCommand:
    """Its key is the intent's own, so that however often it is carried out, and by whom, the node does it once."""
    intent = work.intent
    fields = {
        "key": f"{intent.key}/{verb}/{node}",
        "verb": verb,
        "job": intent.job,
        "attempt": intent.attempt,
        "epoch": intent.epoch,
    }
    return NodeCommand.model_validate(fields | more)


def _refusal(answer: CommandAnswered) -> bool:
    """Said for good: the node would say it again."""
    return answer.detail.startswith(("stale", "fenced", "revision"))


def _said(details: dict[str, str]) -> str:
    return "; ".join(f"{node}: {detail}" for node, detail in details.items())[:2000]


async def _ask_all(nodes: Nodes, commands: dict[str, NodeCommand], within_s: float, patience_s: float) -> Answers:
    """All at once. None for a node that did not answer within `within_s`, or `patience_s` once another has answered."""
    tasks = {node: asyncio.create_task(nodes.ask(node, command, within_s)) for node, command in commands.items()}
    loop = asyncio.get_running_loop()
    end, heard = loop.time() + patience_s, False
    try:
        waiting = set(tasks.values())
        while waiting and not (heard and loop.time() >= end):
            timeout_s = max(0.0, end - loop.time()) if heard else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None and not isinstance(error, Unanswered):
                    raise error
                if error is None and not heard:  # late as the first may be, the others get a moment more
                    heard, end = True, max(end, loop.time() + min(1.0, patience_s))
        return {node: task.result() if task.done() and task.exception() is None else None for node, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
