"""diagnose and examine, over all machines: they are told to test themselves, by themselves and with their neighbours, and what should be
equal on all of them to the bit is compared."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actuators.port import Done, Nodes, Unanswered, Work
from events.action import CommandAnswered, NodeCommand
from events.decision import RankPlace
from events.finding import CheckResult

#: What is done where an intent names no tests.
TESTS = ("gpu_self_test", "dcgm", "all_to_all", "all_gather", "reference_step")
#: Those in which machines meet.
SHARED = ("all_gather", "ib_write_bw")
WITHIN_S = 60.0
#: An agent answers so much after its tests' time at the latest (actuators.node_tests).
ANSWER_S = 8.0
#: Once most machines have answered, the rest may take so long more, or three times what the most took: a hanging test's own limit.
LATE_S = 70.0
#: Of an examination's time, the part in which tests are repeated; the rest is for the workers to start and the last round to end.
REPEAT_SHARE = 0.6
#: An outcome is one message: beyond so many results, those that passed say less; beyond the second, they are counted only.
SHORT_BEYOND, COUNTED_BEYOND = 256, 4000

#: Machines of one comparison that each result names; of more, their number must do.
PEERS_MAX = 16

Make = Callable[..., NodeCommand]


async def diagnose(work: Work, nodes: Nodes, make: Make, what: Mapping[str, Any], unreachable_s: float) -> Done:
    """`make(verb, node, **fields)` gives a command of this intent; `what`: the job's command line and surroundings."""
    intent, count = work.intent, work.declared.ranks_per_node
    begun_s = time.monotonic()
    names = tuple(dict.fromkeys(intent.nodes)) or tuple(place.node for place in work.declared.nodes)
    tests, within_s = intent.tests or TESTS, intent.within_s or WITHIN_S
    meeting: dict[str, Any] = {}
    there = names
    if len(names) > 1 and set(tests) & set(SHARED):
        prepared = await _prepared(nodes, {node: make("prepare", node) for node in names}, unreachable_s)
        there = tuple(node for node in names if node in prepared)
        if not there:
            return Done("unreachable", "no agent answered; no machine was tested", names)
        first = prepared[there[0]]
        meeting = {"master_address": first.address, "master_port": first.port}
    left_s = max(1.0, within_s - (time.monotonic() - begun_s))
    commands = {
        node: make(
            "diagnose", node, place=RankPlace(node=node, first_rank=rank * count, count=count), node_rank=rank, nodes=there,
            tests=tests, within_s=left_s, **meeting, **what,
        )
        for rank, node in enumerate(there)
    }  # fmt: skip
    answers = await _answers(nodes, commands, left_s + ANSWER_S)
    results = [result for node in there for result in _results(node, answers[node], tests, time.monotonic() - begun_s)]
    results += [_silent(node, "its agent does not answer") for node in names if node not in there]
    results = compared(results)
    if not any(answer is not None and answer.ok for answer in answers.values()):
        said = "; ".join(sorted({result.detail for result in results}))[:1500]
        return Done(
            "unreachable" if not any(answers.values()) else "failed",
            f"no machine was tested: {said}",
            names,
            tests=tuple(results),
        )
    silent = tuple(result.node for result in results if result.test == "answers")
    return Done("done", summary(results, len(names), time.monotonic() - begun_s), silent, tests=bounded(results))


async def examine(work: Work, nodes: Nodes, make: Make, what: Mapping[str, Any]) -> Done:
    """One machine, which is out: its own tests, over and over, and the reference step against what the job's machines agreed on."""
    intent, count = work.intent, work.declared.ranks_per_node
    node = intent.node or next(iter(intent.nodes), "")
    tests, within_s = intent.tests or TESTS, intent.within_s or WITHIN_S
    begun_s = time.monotonic()
    command = make(
        "diagnose", node, place=RankPlace(node=node, first_rank=0, count=count), nodes=(node,), tests=tests, within_s=within_s,
        repeat_s=within_s * REPEAT_SHARE, **what,
    )  # fmt: skip
    answer = (await _answers(nodes, {node: command}, within_s + ANSWER_S))[node]
    if answer is None:
        return Done("unreachable", f"the agent of {node} does not answer", (node,), tests=(_silent(node, "no answer"),))
    if not answer.ok:
        return Done("failed", answer.detail, (node,))
    results = recalled(answer.tests, work.reference)
    return Done("done", summary(results, 1, time.monotonic() - begun_s), tests=bounded(results))


async def _prepared(nodes: Nodes, commands: Mapping[str, NodeCommand], within_s: float) -> dict[str, CommandAnswered]:
    """Those that answer, within a moment: a silent machine is found here, not by the others' waiting for it."""

    async def one(node: str, command: NodeCommand) -> CommandAnswered | None:
        try:
            answer = await nodes.ask(node, command, within_s)
        except Unanswered:
            return None
        return answer if answer.ok else None

    found = await asyncio.gather(*(one(node, command) for node, command in commands.items()))
    return {node: answer for node, answer in zip(commands, found, strict=True) if answer is not None}


async def _answers(nodes: Nodes, commands: Mapping[str, NodeCommand], within_s: float) -> dict[str, CommandAnswered | None]:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    tasks = {node: asyncio.create_task(nodes.ask(node, command, within_s)) for node, command in commands.items()}
    try:
        waiting, end_s = set(tasks.values()), begun_s + within_s + 1.0
        late = False
        while waiting and loop.time() < end_s:
            _, waiting = await asyncio.wait(waiting, timeout=end_s - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if not late and len(waiting) * 2 < len(tasks):
                late, took_s = True, loop.time() - begun_s
                end_s = min(end_s, begun_s + max(3 * took_s, took_s + LATE_S))
        for task in tasks.values():
            if task.done() and (error := task.exception()) is not None and not isinstance(error, Unanswered):
                raise error
        return {node: task.result() if task.done() and task.exception() is None else None for node, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _silent(node: str, why: str) -> CheckResult:
    return CheckResult(test="answers", node=node, passed=False, detail=why)


def _results(node: str, answer: CommandAnswered | None, tests: Sequence[str], took_s: float) -> tuple[CheckResult, ...]:
    if answer is None:
        return (_silent(node, f"no answer in {took_s:.1f} s"),)
    if not answer.ok:
        return tuple(CheckResult(test=test, node=node, passed=None, detail=answer.detail) for test in tests)
    return answer.tests


def compared(results: Sequence[CheckResult]) -> list[CheckResult]:
    """The results, with the digests of equal machines compared: more than half of them are right, whoever deviates has failed. Without
    such a majority nobody is named."""
    kinds: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        if result.passed and result.digest:
            kinds.setdefault((result.test, result.software), []).append(result)
    judged: dict[int, CheckResult] = {}
    for alike in kinds.values():
        (digest, count), *others = Counter(result.digest for result in alike).most_common()
        for result in alike:
            peers = tuple(other.node for other in alike if other is not result) if len(alike) <= PEERS_MAX else ()
            change: dict[str, Any]
            if len(alike) == 1:
                change = {"detail": f"{result.detail}; no other machine of its kind to compare with"}
            elif not others:
                change = {"peers": peers, "detail": f"{result.detail}; the same bits on {len(alike)} machines"}
            elif count * 2 <= len(alike):
                said = f"{len(others) + 1} different results on {len(alike)} machines, no majority: some of them are wrong, which is not known"
                change = {"peers": peers, "passed": None, "detail": said}
            elif result.digest != digest:
                change = {
                    "peers": peers,
                    "passed": False,
                    "detail": f"other bits than {count} of {len(alike)} machines of its kind",
                }
            else:
                change = {"peers": peers, "detail": f"{result.detail}; the same bits as {count} of {len(alike)} machines"}
            judged[id(result)] = result.model_copy(update=change)
    return [judged.get(id(result), result) for result in results]


def recalled(results: Sequence[CheckResult], reference: Mapping[str, str]) -> list[CheckResult]:
    """One machine's results, its digests compared with what machines of its kind agreed on before (software -> digest)."""
    judged = []
    for result in results:
        if result.passed and result.digest:
            known = reference.get(result.software)
            if known is None:
                result = result.model_copy(update={"detail": f"{result.detail}; no result of an equal machine is known"})
            elif known != result.digest:
                result = result.model_copy(update={"passed": False, "detail": "other bits than the job's machines agreed on"})
            else:
                result = result.model_copy(update={"detail": f"{result.detail}; the bits that the job's machines agreed on"})
        judged.append(result)
    return judged


def agreed(results: Sequence[CheckResult]) -> dict[str, str]:
    """What machines agreed on: software -> digest, where two or more came to the same and none is in doubt."""
    kinds: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for result in results:
        if result.test == "reference_step" and result.passed and result.digest:
            kinds.setdefault(result.software, set()).add(result.digest)
            counts[result.software] += 1
    return {software: min(digests) for software, digests in kinds.items() if len(digests) == 1 and counts[software] > 1}


def summary(results: Sequence[CheckResult], machines: int, took_s: float) -> str:
    failed = dict.fromkeys(f"{result.node} {result.test}" for result in results if result.passed is False)
    passed = sum(1 for result in results if result.passed)
    unable = sorted({result.test for result in results if result.passed is None})
    parts = [f"{machines} machines tested in {took_s:.2f} s: {passed} results passed"]
    parts += [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"could not run: {', '.join(unable)}"] if unable else []
    parts += [f"NOT put back: {', '.join(bad)}"] if (bad := sorted({r.node for r in results if not r.restored})) else []
    return "; ".join(parts)[:2000]


def bounded(results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    if len(results) <= SHORT_BEYOND:
        return tuple(results)
    dull = {"detail": "", "changed": (), "peers": ()}
    short = [
        result
        if result.passed is False or not result.restored
        else result.model_copy(update=dull if len(result.peers) > 1 else {"detail": "", "changed": ()})
        for result in results
    ]
    if len(short) <= COUNTED_BEYOND:
        return tuple(short)
    # What passed is needed of those only that a failure touches: whether their other links are good.
    touched = {name for result in short if result.passed is False for name in (result.node, *result.peers)}
    return tuple(r for r in short if r.passed is False or not r.restored or r.node in touched)[:COUNTED_BEYOND]
