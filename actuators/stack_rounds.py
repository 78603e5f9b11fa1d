"""The intent `capture_stacks`: every node of the attempt is asked for the stacks of its ranks, round after round, and each round is
aggregated. What aggregates is passed in: it is a processor's pure function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from actuators.port import Done, Nodes, Work
from actuators.stack_capture import TOGETHER_S
from events.action import CommandAnswered, NodeCommand
from events.finding import ProcessStack, StackRound

#: The processes of all ranks, how many ranks there are, and what is cut where (processors.stacks.aggregate).
Aggregate = Callable[[Sequence[ProcessStack], int, Mapping[str, float]], StackRound]
#: Beyond the deadline of the capture on the node, for the way there and back.
TRANSIT_S = 5.0
#: Once a node has answered, the others have until so long after the question: a dead one must not hold up the cure.
PATIENCE_S = 10.0
#: Commands by node, the time for an answer, and the patience; None for a node that did not answer.
AskAll = Callable[[Nodes, dict[str, NodeCommand], float, float], Awaitable[dict[str, CommandAnswered | None]]]


async def capture_rounds(work: Work, nodes: Nodes, aggregate: Aggregate | None, within_s: float, ask_all: AskAll) -> Done:
    """`rounds` and `every_s` as the intent has them; a round begins when its time has come and the one before is over. Ranks of a node
    that does not answer, or can't read any, are silent in that round.

    Python frames first: they take 10 ms a process, native ones ten times that, in which the process is suspended. Where they name nobody
    in a hang, native ones are taken too; a job that trains on is not suspended for them."""
    intent = work.intent
    places = {place.node: place for place in intent.places}
    if aggregate is None:
        return Done("failed", "these actuators were given nothing that aggregates stacks")
    if not places:
        return Done("failed", "the intent places no ranks")
    world = max(intent.world_size, *(place.first_rank + place.count for place in places.values()))
    limit_s = intent.within_s or within_s
    node_s = min(TOGETHER_S, max(1.0, limit_s - TRANSIT_S))
    loop = asyncio.get_running_loop()
    start = loop.time()
    rounds: list[StackRound] = []
    said: dict[str, str] = {}
    heard = set[str]()
    for number in range(intent.rounds if intent.rounds > 1 else 2):
        native = intent.rounds == 1 and number == 1
        if native and rounds[0].outliers:
            break
        await asyncio.sleep(max(0.0, start + number * intent.every_s - loop.time()))

        commands = {
            node: NodeCommand(
                key=f"{intent.key}/stacks/{number}/{node}", verb="stacks", job=intent.job, attempt=intent.attempt, epoch=intent.epoch,
                place=place, within_s=node_s, native=native,
            )
            for node, place in places.items()
        }  # fmt: skip
        answers = await ask_all(nodes, commands, node_s + TRANSIT_S, min(node_s, PATIENCE_S))
        heard |= {node for node, answer in answers.items() if answer is not None and answer.ok}
        said |= {node: answer.detail for node, answer in answers.items() if answer is not None and not answer.ok}
        processes = [stack for answer in answers.values() if answer is not None for stack in answer.stacks]
        rounds = [*([] if native else rounds), aggregate(processes, world, dict(intent.cut))]
    if not heard:
        detail = "; ".join(f"{node}: {detail}" for node, detail in said.items()) or "no agent answered"
        return Done("failed" if said else "unreachable", f"no stacks: {detail}"[:2000], tuple(places))
    silent = tuple(node for node in places if node not in heard)
    detail = f"{len(rounds)} round{'s' if len(rounds) > 1 else ''} of {len(heard)} nodes" + (
        f"; no stacks from {', '.join(silent)}" if silent else ""
    )
    return Done("done", detail[:2000], silent, stacks=tuple(rounds))
