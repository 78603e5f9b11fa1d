"""Intents, the backends' talk with nodes, and the service over the log in memory, killed at every point."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actuators.channel import CommandChannel
from actuators.intents import BEGUN_MAX, CarryOut, Refuse, Seen, State, due, fold, passed
from actuators.local import Local
from actuators.port import Backend, Done, Nodes, Unanswered, Work
from actuators.ranks import RankHost, RankNews
from events import subjects
from events.action import CommandAnswered, NodeCommand, OutcomeRecorded, TryStarted
from events.clock import NS
from events.decision import IncidentClosed, IntentIssued, MachineJudged, RankPlace
from events.envelope import AnyEvent, Fact
from events.incident import JobFinished
from events.job import HoldPlaced, HoldReleased, JobDeclared, Place, StandbyAdded
from events.ports import LEDGER, Ack, Expect, LogUnavailable
from events.registry import canonical, make, parse
from events.training import RankExit, RankStarted
from infra.actuator_service import ROLE_OF, Actuators, Superseded
from infra.memory import START_NS, MemoryBus, MemoryLog

JOB = "gpt.a"


def event_of(fact: Fact, number: int, job: str = JOB) -> AnyEvent:
    return make(fact, id=f"e{number}", source="test", subject=job, time=START_NS, job=job)


def declared(**more: Any) -> JobDeclared:
    fields: dict[str, Any] = {
        "job": JOB,
        "nodes": tuple(Place(node=f"n{i}") for i in range(2)),
        "standbys": (Place(node="s0"),),
        "dp": 2,
        "command": ("/usr/bin/env", "train"),
    }
    return JobDeclared(**(fields | more))


def intent(verb: str = "stop_attempt", *, decision: str = "d1", key: str = "", epoch: int = 1, **more: Any) -> IntentIssued:
    fields: dict[str, Any] = {
        "key": key or f"{decision}/{verb}/{more.get('node', '')}",
        "decision": decision,
        "incident": f"i{epoch}" if epoch else "",
        "job": JOB,
        "epoch": epoch,
        "verb": verb,
        "attempt": 1,
        "expires_ns": START_NS + 3600 * NS,
        "trigger": 1,
        "ledger_digest": "",
    }
    return IntentIssued(**(fields | more))


def closed(epoch: int) -> IncidentClosed:
    return IncidentClosed(
        incident=f"i{epoch}", job=JOB, epoch=epoch, symptom="rank_exit", mechanism="reattempt", outcome="recovered",
        first_evidence_ns=0, opened_ns=0, trigger=1, ledger_digest="",
    )  # fmt: skip


def after(*facts: Fact, state: State | None = None) -> State:
    state = state or State()
    for fact in facts:
        number = state.sequence + 1
        state = fold(state, Seen(number, START_NS + number, event_of(fact, number)))
    return state


def judged(state: State) -> dict[str, Any]:
    return {
        action.pending.intent.key: action.ordinal if isinstance(action, CarryOut) else action.result for action in due(state)
    }


# Intents: the pure rules


def test_an_intent_without_an_outcome_is_carried_out_and_counts_its_tries() -> None:
    stop = intent()
    state = after(declared(), stop)
    assert judged(state) == {stop.key: 1}
    state = after(TryStarted(key=stop.key, job=JOB, verb="stop_attempt", ordinal=1), state=state)
    assert judged(state) == {stop.key: 2}
    state = after(
        *(TryStarted(key=stop.key, job=JOB, verb="stop_attempt", ordinal=i) for i in range(2, BEGUN_MAX + 1)), state=state
    )
    assert judged(state) == {stop.key: "failed"}
    state = after(OutcomeRecorded(key=stop.key, job=JOB, verb="stop_attempt", result="done"), stop, state=state)
    assert judged(state) == {}


def test_only_the_newest_decisions_intents_are_current_but_a_page_always_is() -> None:
    state = after(declared(), intent(), intent("notify", text="x"), intent(decision="d2"))
    assert judged(state) == {"d1/stop_attempt/": "refused_stale", "d1/notify/": 1, "d2/stop_attempt/": 1}
    state = after(intent("notify", decision="d3", text="y"), state=state)
    assert judged(state)["d2/stop_attempt/"] == 1  # a page takes nothing back


def test_a_closed_incident_closes_its_own_epoch_only() -> None:
    state = after(declared(), intent(epoch=2), intent("evict_node", epoch=2, node="n1"), closed(1))
    assert set(judged(state).values()) == {1}
    state = after(closed(2), intent("notify", epoch=2), state=state)
    assert judged(state) == {"d1/stop_attempt/": "refused_stale", "d1/evict_node/n1": "refused_stale", "d1/notify/": 1}
    planned = after(intent(decision="d9", epoch=0), intent("start_attempt", decision="d9", epoch=2, incident=""), state=state)
    assert judged(planned)["d9/stop_attempt/"] == 1 and judged(planned)["d9/start_attempt/"] == 1


def test_what_a_hold_refused_is_begun_when_the_same_decision_issues_it_anew() -> None:
    first = intent()
    state = after(declared(), first, HoldPlaced(job=JOB, reason="r", author="a"))
    assert judged(state) == {first.key: "refused_held"}
    state = after(OutcomeRecorded(key=first.key, job=JOB, verb="stop_attempt", result="refused_held"), state=state)
    state = after(HoldReleased(job=JOB, reason="r", author="a"), first, intent(key="anew"), state=state)
    assert judged(state) == {"anew": 1}


@pytest.mark.parametrize(("verb", "ends"), [("evict_node", True), ("start_attempt", True), ("stop_attempt", False)])
def test_what_has_begun_is_brought_to_its_end_though_the_job_is_back(verb: str, ends: bool) -> None:
    """An agent that was killed has not answered yet, and the ranks of other nodes are healthy already."""
    one = intent(verb, node="n1" if verb == "evict_node" else "")
    begun = after(declared(), one, TryStarted(key=one.key, job=JOB, verb=one.verb, ordinal=1), closed(1))
    assert judged(begun) == {one.key: 2 if ends else "refused_stale"}
    assert judged(after(declared(), one, closed(1))) == {one.key: "refused_stale"}, "what has not begun is called back"
    superseded = after(intent("notify"), intent(decision="d2", epoch=2), state=begun)
    assert judged(superseded)[one.key] == "refused_stale", "a later decision took its place"


def test_time_is_the_newest_records_and_expiry_counts_from_it() -> None:
    state = after(declared(), intent(expires_ns=START_NS + 10 * NS))
    assert judged(passed(state, 99, START_NS + 10 * NS)) == {"d1/stop_attempt/": 1}
    assert judged(passed(state, 99, START_NS + 10 * NS + 1)) == {"d1/stop_attempt/": "refused_expired"}


@pytest.mark.parametrize("scope", ["", JOB])
def test_nothing_begins_under_a_hold_until_it_ends(scope: str) -> None:
    hold = HoldPlaced(job=scope, reason="r", author="a", expires_ns=START_NS + NS)
    state = after(declared(), intent(), intent("notify"), hold)
    assert judged(state) == {"d1/stop_attempt/": "refused_held", "d1/notify/": 1}
    assert judged(passed(state, 99, START_NS + NS))["d1/stop_attempt/"] == 1
    assert judged(after(HoldReleased(job=scope, reason="r", author="a"), state=state))["d1/stop_attempt/"] == 1
    other = after(HoldPlaced(job="other", reason="r", author="a"), intent(decision="d2"), state=after(declared()))
    assert judged(other) == {"d2/stop_attempt/": 1}


def test_spares_are_known_and_an_evicted_one_is_none_until_it_is_added_again() -> None:
    evict = intent("evict_node", node="s0")
    state = after(declared(), StandbyAdded(job=JOB, place=Place(node="s1"), author="a"), evict)
    state = after(OutcomeRecorded(key=evict.key, job=JOB, verb="evict_node", result="done"), state=state)
    assert (state.job(JOB).standbys, state.job(JOB).evicted) == (("s0", "s1"), ("s0",))
    state = after(StandbyAdded(job=JOB, place=Place(node="s0"), author="a"), state=state)
    assert (state.job(JOB).standbys, state.job(JOB).evicted) == (("s1", "s0"), ())


def test_a_machine_that_its_examination_brought_back_is_a_spare_again() -> None:
    evict = intent("evict_node", node="s0")
    out = OutcomeRecorded(key=evict.key, job=JOB, verb="evict_node", result="done")
    judged = {"job": JOB, "node": "s0", "verdict": "exonerated", "trigger": 1, "ledger_digest": ""}
    stays = after(declared(), evict, out, MachineJudged(**judged, back=False))
    assert stays.job(JOB).evicted == ("s0",)
    back = after(declared(), evict, out, MachineJudged(**judged, back=True))
    assert back.job(JOB).evicted == () and back.job(JOB).standbys[-1] == "s0"


FACTS = st.one_of(
    st.just(declared()),
    st.builds(lambda d, v, e: intent(v, decision=d, epoch=e, node="n1" if v == "evict_node" else ""),
              st.sampled_from(["d1", "d2", "d3"]), st.sampled_from(["stop_attempt", "evict_node", "start_attempt", "notify"]),
              st.integers(0, 3)),
    st.builds(lambda d, o: TryStarted(key=f"{d}/stop_attempt/", job=JOB, verb="stop_attempt", ordinal=o),
              st.sampled_from(["d1", "d2"]), st.integers(1, 7)),
    st.builds(lambda d, v: OutcomeRecorded(key=f"{d}/{v}/", job=JOB, verb=v, result="done"),
              st.sampled_from(["d1", "d2"]), st.sampled_from(["stop_attempt", "start_attempt", "notify"])),
    st.builds(closed, st.integers(1, 3)),
    st.builds(lambda j, e: HoldPlaced(job=j, reason="r", author="a", expires_ns=e), st.sampled_from(["", JOB, "x"]),
              st.sampled_from([0, START_NS + 5, START_NS + 10**6])),
    st.builds(lambda j: HoldReleased(job=j, reason="r", author="a"), st.sampled_from(["", JOB, "x"])),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(FACTS, max_size=25), st.integers(0, 25))
def test_laws_of_the_fold(facts: Sequence[Fact], at: int) -> None:
    state = after(*facts)
    # the same history gives the same state; a prefix and the rest equal the whole; repeats change nothing
    assert after(*facts[at:], state=after(*facts[:at])) == state
    repeated = state
    for number, fact in enumerate(facts, 1):
        repeated = fold(repeated, Seen(number, START_NS + number, event_of(fact, number)))
    assert repeated == state
    actions = due(state)
    keys = [action.pending.intent.key for action in actions]
    finished = {fact.key for fact in facts if isinstance(fact, OutcomeRecorded)}
    issued = {fact.key: fact for fact in facts if isinstance(fact, IntentIssued)}
    assert len(keys) == len(set(keys)) and not finished & set(keys)
    assert set(keys) == set(issued) - finished  # every intent comes to something
    acting = [a.pending.intent for a in actions if isinstance(a, CarryOut) and a.pending.intent.verb != "notify"]
    assert len({i.decision for i in acting}) <= 1  # one decision's only
    newest = [fact.decision for fact in facts if isinstance(fact, IntentIssued) and fact.verb != "notify"][-1:]
    assert not acting or [acting[0].decision] == newest
    # a later decision takes the place of all that is not done
    later = after(intent(decision="later"), state=replace(state, holds={}))
    assert all(
        isinstance(a, Refuse) or a.pending.intent.decision == "later" or a.pending.intent.verb == "notify" for a in due(later)
    )


# The talk with nodes


class Node:
    """What a node's agent does, without processes: the same key is done once, and all that it was told is kept."""

    def __init__(self, *, deaf: bool = False, says: dict[str, CommandAnswered] | None = None, lost: int = 0) -> None:
        self.deaf, self.says, self.lost = deaf, says or {}, lost
        self.done: Counter[str] = Counter()
        self.answers: dict[str, CommandAnswered] = {}
        self.told: list[NodeCommand] = []

    def hear(self, command: NodeCommand) -> CommandAnswered | None:
        self.told.append(command)
        if self.deaf:
            return None
        if self.lost:
            self.lost -= 1
            return None
        if command.key not in self.answers:
            self.done[command.verb] += 1
            answer = CommandAnswered(
                key=command.key, verb=command.verb, ok=True, port=4000, address="10.0.0.1", restore="/ck/7", restore_step=7
            )
            said = self.says.get(command.verb)
            self.answers[command.key] = said.model_copy(update={"key": command.key}) if said else answer
        return self.answers[command.key]


def no(detail: str) -> CommandAnswered:
    return CommandAnswered(key="", verb="", ok=False, detail=detail)


def channel_to(nodes: dict[str, Node]) -> CommandChannel:
    async def send(node: str, command: NodeCommand) -> None:
        if (answer := nodes[node].hear(command)) is not None:
            channel.answered(node, answer)

    channel = CommandChannel(send, 0.01)
    return channel


def start(second: str = "n1") -> IntentIssued:
    places = (RankPlace(node="n0", first_rank=0, count=1), RankPlace(node=second, first_rank=1, count=1))
    return intent("start_attempt", attempt=2, places=places, world_size=2, nodes=("n0", second))


def local() -> Local:
    return Local(within_s=0.6, unreachable_s=0.1, grace_s=0.05)


async def test_a_command_is_repeated_until_it_is_answered_and_only_its_own_node_is_believed() -> None:
    nodes = {"n0": Node(lost=3)}
    channel = channel_to(nodes)
    answer = await channel.ask("n0", NodeCommand(key="k", verb="stop", job=JOB, attempt=1), 2.0)
    assert answer.ok and len(nodes["n0"].told) == 4 and len({c.key for c in nodes["n0"].told}) == 1
    nodes["n0"].deaf = True
    asking = asyncio.create_task(channel.ask("n0", NodeCommand(key="k2", verb="stop", job=JOB, attempt=1), 0.1))
    await asyncio.sleep(0.02)
    channel.answered("n1", CommandAnswered(key="k2", verb="stop", ok=True))
    with pytest.raises(Unanswered):
        await asking


async def test_a_silent_node_does_not_hold_the_others_up() -> None:
    nodes = {"n0": Node(), "n1": Node(deaf=True)}
    began = asyncio.get_running_loop().time()
    done = await local().stop_attempt(Work(intent(nodes=("n0", "n1")), declared()), channel_to(nodes))
    assert (done.result, done.nodes) == ("done", ("n1",))
    assert asyncio.get_running_loop().time() - began < 0.5
    done = await local().stop_attempt(Work(intent(nodes=("n1",)), declared()), channel_to(nodes))
    assert (done.result, done.nodes) == ("unreachable", ("n1",))


async def test_a_node_that_fails_to_stop_is_a_failure_that_may_be_tried_again() -> None:
    nodes = {"n0": Node(), "n1": Node(says={"stop": no("pid 7 (D) does not die")})}
    done = await local().stop_attempt(Work(intent(nodes=("n0", "n1")), declared()), channel_to(nodes))
    assert (done.result, done.nodes, done.again) == ("failed", ("n1",), True)
    nodes = {"n0": Node(), "n1": Node(says={"stop": no("stale attempt: …")})}
    assert not (await local().stop_attempt(Work(intent(nodes=("n0", "n1")), declared()), channel_to(nodes))).again


async def test_a_start_prepares_rank_0s_node_starts_all_and_parks_the_spares() -> None:
    nodes = {name: Node() for name in ("n0", "n1", "s0")}
    backend = local()
    job = declared(environment=(("A", "b"),), directory="/d", checkpoints="/ck")
    done = await backend.start_attempt(Work(start(), job, ("s0", "n1")), channel_to(nodes))
    assert done.result == "done" and "from step 7" in done.detail
    for rank, name in enumerate(("n0", "n1")):
        command = nodes[name].told[-1]
        assert (command.verb, command.node_rank, command.world_size, command.attempt) == ("start", rank, 2, 2)
        assert (command.master_address, command.master_port, command.restore) == ("10.0.0.1", 4000, "/ck/7")
        assert (command.command, command.environment, command.directory) == (job.command, job.environment, "/d")
        assert command.place is not None and (command.place.node, command.place.first_rank) == (name, rank)
    assert nodes["n0"].done == {"prepare": 1, "start": 1} and nodes["n1"].done == {"start": 1}
    await asyncio.gather(*backend._parking)
    assert nodes["s0"].done == {"park": 1}


async def test_a_start_says_which_code_and_from_below_which_step_to_all_that_need_it() -> None:
    nodes = {name: Node() for name in ("n0", "n1", "s0")}
    backend, code = local(), "ab" * 20
    going_back = start().model_copy(update={"revision": code, "restore_below_step": 12})
    done = await backend.start_attempt(Work(going_back, declared(), ("s0",)), channel_to(nodes))
    assert (done.result, done.detail) == ("done", "attempt 2 started on 2 nodes, from step 7, revision abababababab")
    await asyncio.gather(*backend._parking)
    told = {(command.verb, name): command for name, node in nodes.items() for command in node.told}
    assert {key: command.revision for key, command in told.items()} == {
        ("prepare", "n0"): "", ("start", "n0"): code, ("start", "n1"): code, ("park", "s0"): code,
    }  # fmt: skip
    assert told["prepare", "n0"].restore_below_step == 12 and told["start", "n1"].restore == "/ck/7"
    woken = intent("wake_standby", node="s0", revision=code)
    assert (await backend.wake_standby(Work(woken, declared()), channel_to(nodes))).result == "done"
    assert nodes["s0"].told[-1].revision == code
    nothing = CommandAnswered(key="", verb="prepare", ok=True, port=1)
    nodes = {"n0": Node(says={"prepare": nothing}), "n1": Node()}
    done = await backend.start_attempt(Work(going_back, declared()), channel_to(nodes))
    assert "from the beginning (there is no whole checkpoint below step 12), revision abab" in done.detail
    nodes = {"n0": Node(says={"prepare": nothing}), "n1": Node()}
    weeks = going_back.model_copy(update={"restore_below_step": 90_000, "from_the_beginning": False})
    done = await backend.start_attempt(Work(weeks, declared()), channel_to(nodes))
    assert done.result == "failed" and "no whole checkpoint lies below step 90000" in done.detail
    assert nodes["n1"].told == []


@pytest.mark.parametrize(
    ("nodes", "result", "missed", "again"),
    [
        ({"n0": Node(deaf=True), "n1": Node()}, "unreachable", ("n0",), False),
        ({"n0": Node(), "n1": Node(deaf=True)}, "unreachable", ("n1",), False),
        ({"n0": Node(says={"prepare": no("disk")}), "n1": Node()}, "failed", ("n0",), True),
        ({"n0": Node(), "n1": Node(says={"start": no("fenced: …")})}, "failed", ("n1",), False),
        ({"n0": Node(), "n1": Node(says={"start": no("fork failed")})}, "failed", ("n1",), True),
        ({"n0": Node(), "n1": Node(says={"start": no("revision ab can't be run here: …")})}, "failed", ("n1",), False),
    ],
)
async def test_a_start_that_does_not_come_to_pass_names_the_nodes(nodes: Any, result: str, missed: Any, again: bool) -> None:
    done = await local().start_attempt(Work(start(), declared()), channel_to(nodes))
    assert (done.result, done.nodes, done.again) == (result, missed, again)


async def test_an_eviction_does_not_need_the_nodes_consent_but_a_spare_must_be_there() -> None:
    nodes = {"n0": Node(), "n1": Node(deaf=True)}
    backend, channel = local(), channel_to(nodes)
    assert (await backend.evict_node(Work(intent("evict_node", node="n0", epoch=4), declared()), channel)).nodes == ()
    assert (nodes["n0"].told[-1].verb, nodes["n0"].told[-1].epoch) == ("fence", 4)
    done = await backend.evict_node(Work(intent("evict_node", node="n1"), declared()), channel)
    assert (done.result, done.nodes) == ("done", ("n1",))
    assert (await backend.wake_standby(Work(intent("wake_standby", node="n0"), declared()), channel)).result == "done"
    assert (await backend.wake_standby(Work(intent("wake_standby", node="n1"), declared()), channel)).result == "unreachable"


# The service


class Killed(BaseException):
    """The process ends here."""


class MortalLog(MemoryLog):
    """Ends the service at its `at`th point: before or after an append."""

    def __init__(self, bus: MemoryBus, point: Callable[[], None]) -> None:
        super().__init__(bus, LEDGER)
        self.point = point

    async def append(self, subject: str, data: bytes, **more: Any) -> Ack:
        self.point()
        ack = await super().append(subject, data, **more)
        self.point()
        return ack


class World:
    """A ledger, nodes, and a decider reduced to what it does here: start once the stop, the eviction and the waking are done."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.ledger = MemoryLog(self.bus, LEDGER)
        self.nodes = {name: Node() for name in ("n0", "n1", "s0")}
        self.answers: asyncio.Queue[tuple[str, CommandAnswered]] = asyncio.Queue()
        self.number = 0

    async def say(self, fact: Fact, role: str = "") -> None:
        self.number += 1
        role = role or ROLE_OF[fact.kind()]
        await self.ledger.append(subjects.ledger(JOB, role, fact.kind()), canonical(event_of(fact, self.number)))

    def facts(self, kind: type) -> list[Any]:
        events = [parse(record.data) for record in self.bus.records(LEDGER)]
        return [event.data for event in events if isinstance(event.data, kind)]

    def actuators(
        self, backend: Backend | None = None, log: MemoryLog | None = None, point: Callable[[], None] = lambda: None
    ) -> Actuators:
        async def send(node: str, command: NodeCommand) -> None:
            point()
            if (answer := self.nodes[node].hear(command)) is not None:
                self.answers.put_nowait((node, answer))
            point()

        async def answers() -> AsyncIterator[tuple[str, CommandAnswered]]:
            while True:
                yield await self.answers.get()

        return Actuators(log or self.ledger, send, answers(), None, {"local": backend or local()}, pause_s=0.01, repeat_s=0.01)

    async def outcomes(self, count: int, actuators: Actuators, within_s: float = 30.0) -> list[OutcomeRecorded]:
        """Runs the actuators until there are so many outcomes."""
        running = asyncio.create_task(actuators.run())
        try:
            async with asyncio.timeout(within_s):
                while len(self.facts(OutcomeRecorded)) < count and not running.done():
                    await asyncio.sleep(0.002)
            if running.done():
                running.result()
            await asyncio.sleep(0.01)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Killed):
                await running
        return self.facts(OutcomeRecorded)


RECOVERY = (
    intent(nodes=("n0", "n1")),
    intent("evict_node", node="n1"),
    intent("wake_standby", node="s0"),
    start("s0"),
)


async def _recover(world: World, die_at: int) -> int:
    """The recovery with the actuators killed at their `die_at`th point and started again; how many points there were."""
    points = 0

    def point() -> None:
        nonlocal points
        points += 1
        if points == die_at:
            raise Killed

    for fact in (declared(), *RECOVERY[:3]):
        await world.say(fact)
    for wanted in (3, 4):
        if wanted == 4:
            await world.say(RECOVERY[3])
        for _ in range(3):
            try:
                await world.outcomes(wanted, world.actuators(log=MortalLog(world.bus, point), point=point))
                break
            except Killed:
                continue
    return points


async def test_killed_at_any_point_and_started_again_each_intent_has_one_outcome_and_is_done_once() -> None:
    points = await _recover(World(), 0)
    assert points > 16
    for die_at in range(1, points + 1):
        world = World()
        await _recover(world, die_at)
        outcomes = world.facts(OutcomeRecorded)
        assert sorted(o.key for o in outcomes) == sorted(i.key for i in RECOVERY), die_at
        assert {o.result for o in outcomes} == {"done"}, die_at
        assert world.nodes["n0"].done == {"stop": 1, "prepare": 1, "start": 1}, die_at
        assert world.nodes["n1"].done == {"stop": 1, "fence": 1}, die_at
        assert world.nodes["s0"].done == {"park": 1, "start": 1}, die_at
        order = [
            type(parse(r.data).data).__name__ + ":" + parse(r.data).data.key
            for r in world.bus.records(LEDGER)
            if ".actuator." in r.subject
        ]
        for one in RECOVERY:  # no outcome without a try before it, and no try after
            assert order.index(f"TryStarted:{one.key}") < order.index(f"OutcomeRecorded:{one.key}")
        ids = [parse(record.data).id for record in world.bus.records(LEDGER)]
        assert len(ids) == len(set(ids))


async def test_nothing_of_history_is_done_again_and_what_is_due_is_refused_with_its_reason() -> None:
    world = World()
    world.bus.advance(10 * NS)
    facts = (
        declared(), intent(key="old", nodes=("n0",)), OutcomeRecorded(key="old", job=JOB, verb="stop_attempt", result="done"),
        intent("evict_node", node="n0", key="stale"), intent("evict_node", decision="d2", node="n1", key="late", expires_ns=START_NS),
        HoldPlaced(job=JOB, reason="r", author="a"), intent("evict_node", decision="d2", node="n1", key="held"),
    )  # fmt: skip
    for fact in facts:
        await world.say(fact)
    outcomes = await world.outcomes(4, world.actuators())
    assert {o.key: o.result for o in outcomes} == {
        "old": "done", "stale": "refused_stale", "late": "refused_expired", "held": "refused_held"
    }  # fmt: skip
    assert world.facts(TryStarted) == []
    assert all(not node.told for node in world.nodes.values())


async def test_only_the_decider_issues_intents_whatever_an_envelope_says() -> None:
    world = World()
    await world.say(declared())
    await world.say(intent("evict_node", node="n0"), "detector")
    await world.say(intent("evict_node", node="n1", key="true"))
    outcomes = await world.outcomes(1, world.actuators())
    assert [o.key for o in outcomes] == ["true"] and not world.nodes["n0"].told


class Scripted(Local):
    """A backend whose evictions end as told, one word a try."""

    def __init__(self, *ends: Done | Exception) -> None:
        super().__init__(within_s=0.2, unreachable_s=0.05)
        self.ends = list(ends)
        self.begun = asyncio.Event()
        self.wait = asyncio.Event()

    async def evict_node(self, work: Work, nodes: Nodes) -> Done:
        self.begun.set()
        if not self.ends:
            await self.wait.wait()
            return Done("done")
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.mark.parametrize(
    ("ends", "result", "tries"),
    [
        ((Done("failed", "busy", again=True), Done("done")), "done", 2),
        ((Done("failed", "busy", again=True),) * 4, "failed", 3),
        ((Done("failed", "no"),), "failed", 1),
        ((RuntimeError("a fault of ours"),), "failed", 1),
    ],
)
async def test_a_failure_that_may_pass_is_tried_again_a_few_times(ends: Any, result: str, tries: int) -> None:
    world = World()
    await world.say(declared())
    await world.say(intent("evict_node", node="n0"))
    (outcome,) = await world.outcomes(1, world.actuators(Scripted(*ends)))
    assert outcome.result == result
    assert [t.ordinal for t in world.facts(TryStarted)] == list(range(1, tries + 1))
    if result == "failed":
        assert outcome.detail


async def test_a_later_decision_calls_back_what_is_being_carried_out() -> None:
    world, backend = World(), Scripted()
    await world.say(declared())
    await world.say(intent("evict_node", node="n0"))
    running = asyncio.create_task(world.outcomes(2, world.actuators(backend)))
    await asyncio.wait_for(backend.begun.wait(), 5)
    await world.say(intent(decision="d2", nodes=("n1",)))
    outcomes = await running
    assert {o.key: o.result for o in outcomes} == {"d1/evict_node/n0": "refused_stale", "d2/stop_attempt/": "done"}


async def test_other_actuators_that_write_end_these() -> None:
    world, backend = World(), Scripted()
    await world.say(declared())
    await world.say(intent("evict_node", node="n0"))
    actuators = world.actuators(backend)
    running = asyncio.create_task(actuators.run())
    await asyncio.wait_for(backend.begun.wait(), 5)
    # What another wrote is not read back by a stale one in time: as if its reading stood still.
    actuators.state = replace(actuators.state)
    stale_log = actuators.ledger

    class Blind(MemoryLog):
        async def append(self, subject: str, data: bytes, *, expect: Expect | None = None, **more: Any) -> Ack:
            if expect is not None:
                expect = Expect(expect.subjects, expect.last_sequence - 1)
            return await stale_log.append(subject, data, expect=expect, **more)

    actuators.ledger = Blind(world.bus, LEDGER)
    backend.wait.set()
    with pytest.raises(Superseded):
        await asyncio.wait_for(running, 30)
    assert world.facts(OutcomeRecorded) == []


async def test_a_lease_that_is_over_ends_it_before_anything_is_written() -> None:
    class Lost:
        held = False

    world = World()
    await world.say(declared())
    await world.say(intent("evict_node", node="n0"))
    actuators = world.actuators()
    actuators.lease = Lost()
    with pytest.raises(Superseded):
        await asyncio.wait_for(actuators.run(), 5)
    assert world.facts(TryStarted) == [] and not world.nodes["n0"].told


async def test_a_ledger_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.actuator_service.APPEND_WAIT_S", 0.001)
    world = World()

    class Flaky(MemoryLog):
        left = 5

        async def append(self, subject: str, data: bytes, **more: Any) -> Ack:
            if self.left:
                self.left -= 1
                if self.left % 2:  # stored, and its answer lost
                    await super().append(subject, data, **more)
                raise LogUnavailable("away")
            return await super().append(subject, data, **more)

    await world.say(declared())
    await world.say(intent("evict_node", node="n0"))
    outcomes = await world.outcomes(1, world.actuators(log=Flaky(world.bus, LEDGER)))
    assert [o.result for o in outcomes] == ["done"] and len(world.facts(TryStarted)) == 1


async def test_a_job_without_such_a_backend_or_declaration_fails_with_a_sentence() -> None:
    world = World()
    await world.say(intent())
    (outcome,) = await world.outcomes(1, world.actuators())
    assert outcome.result == "failed" and "not declared" in outcome.detail
    await world.say(declared(backend="exec"))
    await world.say(intent(decision="d2"))
    outcomes = await world.outcomes(2, world.actuators())
    assert outcomes[1].result == "failed" and "'exec'" in outcomes[1].detail


async def test_a_finished_job_lets_go_of_what_is_parked() -> None:
    world = World()
    await world.say(declared())
    running = asyncio.create_task(world.actuators().run())
    await asyncio.sleep(0.02)
    await world.say(JobFinished(seen_ns=1))
    for _ in range(500):
        if all(node.told for node in world.nodes.values()):
            break
        await asyncio.sleep(0.005)
    running.cancel()
    assert [(c.verb, c.place) for node in world.nodes.values() for c in node.told[:1]] == [("park", None)] * 3


SCRIPT = """
import os, sys, time
open(os.path.join(sys.argv[1], f"{os.environ['KEEPSTEP_ATTEMPT']}-{os.environ['RANK']}-{os.environ['MASTER_PORT']}"), "w").close()
time.sleep(600)
"""


async def test_a_whole_recovery_over_real_rank_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    news: dict[str, list[RankNews]] = {}
    hosts: dict[str, RankHost] = {}
    world = World()
    for name in ("n0", "n1", "s0"):
        news[name] = []
        hosts[name] = RankHost(
            tmp_path / name, name, hook_folder=None, on_event=news[name].append, socket_path=tmp_path / "s", boot_id="b"
        )
        await hosts[name].start()

    async def answer(node: str, command: NodeCommand) -> None:
        world.answers.put_nowait((node, await hosts[node].handle(command)))

    tasks: set[asyncio.Task[None]] = set()

    async def send(node: str, command: NodeCommand) -> None:
        tasks.add(asyncio.create_task(answer(node, command)))

    actuators = world.actuators(Local(within_s=20, unreachable_s=5))
    actuators.channel._send = send
    actuators.channel._repeat_s = 0.5
    running = asyncio.create_task(actuators.run())
    try:
        command = ("/usr/bin/env", sys.executable, str(tmp_path / "train.py"), str(tmp_path / "out"))
        await world.say(declared(command=command))
        places = (RankPlace(node="n0", first_rank=0, count=1), RankPlace(node="n1", first_rank=1, count=1))
        await world.say(intent("start_attempt", decision="d0", epoch=0, attempt=1, places=places, world_size=2))
        await _outcomes(world, 1)
        await _files(tmp_path / "out", 2)
        for fact in (intent(nodes=("n0", "n1")), intent("evict_node", node="n1"), intent("wake_standby", node="s0")):
            await world.say(fact)
        await _outcomes(world, 4)
        assert hosts["n0"].current() == hosts["n1"].current() == ("", 0)
        after_ = (RankPlace(node="n0", first_rank=0, count=1), RankPlace(node="s0", first_rank=1, count=1))
        await world.say(intent("start_attempt", attempt=2, places=after_, world_size=2))
        outcomes = await _outcomes(world, 5)
        assert [o.result for o in outcomes] == ["done"] * 5, outcomes
        assert hosts["n0"].current() == hosts["s0"].current() == (JOB, 2) and hosts["n1"].current() == ("", 0)
        ran = sorted(name.rsplit("-", 1)[0] for name in await _files(tmp_path / "out", 4))
        assert ran == ["1-0", "1-1", "2-0", "2-1"]
        assert len({path.name.rsplit("-", 1)[1] for path in (tmp_path / "out").iterdir()}) == 2  # a port an attempt
        told = {name: [type(n.fact) for n in heard] for name, heard in news.items()}
        assert told == {"n0": [RankStarted, RankExit, RankStarted], "n1": [RankStarted, RankExit], "s0": [RankStarted]}
        assert json.loads((tmp_path / "n1" / "jobs.json").read_text())[JOB]["fenced"] == 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.gather(*(host.close(leave_running=False) for host in hosts.values()))


async def _files(folder: Path, count: int) -> list[str]:
    for _ in range(2000):
        names = [path.name for path in folder.iterdir()]
        if len(names) == count:
            return names
        await asyncio.sleep(0.005)
    raise AssertionError(names)


async def _outcomes(world: World, count: int) -> list[OutcomeRecorded]:
    for _ in range(4000):
        if len(world.facts(OutcomeRecorded)) >= count:
            return world.facts(OutcomeRecorded)
        await asyncio.sleep(0.005)
    raise AssertionError(world.facts(OutcomeRecorded))
