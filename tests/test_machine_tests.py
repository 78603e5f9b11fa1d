"""Tests of machines: four real nodes with parked, warm workers, gloo between them, and a machine made faulty (tests/machine_faults)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from actuators.local import Local
from actuators.machine_tests import agreed, bounded, compared
from actuators.node_tests import merged
from actuators.port import Done, Unanswered, Work
from actuators.processes import marked
from actuators.ranks import RankHost, RankNews
from events.action import CommandAnswered, NodeCommand
from events.decision import IntentIssued
from events.finding import CheckResult
from events.job import JobDeclared, Place
from processors.diagnosis import suspects
from tests.hook_agent import HOOK

REAL = pytest.mark.asyncio(loop_scope="module")
FAULTS = Path(__file__).parent / "machine_faults"
NODES = ("n0", "n1", "n2", "n3")
TRAIN = "import os, sys, time\nopen(os.path.join(sys.argv[1], os.environ['RANK'] + '-' + str(os.getpid())), 'w').close()\ntime.sleep(600)\n"


class Cluster:
    """Nodes' rank hosts in this process; `deaf` ones answer nothing. Commands reach them directly."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults, self.number = folder, folder / "faults", 0
        self.out = folder / "out"
        self.out.mkdir()
        (folder / "train.py").write_text(TRAIN)
        self.deaf: set[str] = set()
        self.hosts = {node: self._host(node) for node in NODES}
        self.backend = Local(unreachable_s=1.0)
        environment = {
            "PYTHONPATH": str(FAULTS),
            "FAULTS": str(self.faults),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        environment["KEEPSTEP_TESTS"] = '{"matmul": [[48, 80, 72]], "limit_s": 1.5}'
        self.declared = JobDeclared(
            job="gpt 2", nodes=tuple(Place(node=node) for node in NODES), dp=4, directory=str(folder),
            command=(sys.executable, str(folder / "train.py"), str(self.out)), environment=tuple(environment.items()),
        )  # fmt: skip

    def _host(self, node: str) -> RankHost:
        def heard(news: RankNews) -> None: ...

        return RankHost(
            self.folder / node, node, hook_folder=HOOK, on_event=heard, socket_path=self.folder / "agent.sock", boot_id="b"
        )

    async def ask(self, node: str, command: NodeCommand, within_s: float) -> CommandAnswered:
        if node in self.deaf:
            await asyncio.sleep(within_s)
            raise Unanswered(f"the agent of {node} did not answer")
        try:
            async with asyncio.timeout(within_s):
                return await self.hosts[node].handle(command)
        except TimeoutError:
            raise Unanswered(f"the agent of {node} did not answer in {within_s} s") from None

    def work(self, verb: str, **more: Any) -> Work:
        self.number += 1
        fields: dict[str, Any] = {
            "key": f"k{self.number}", "decision": "d", "incident": "i", "job": "gpt 2", "epoch": 1, "verb": verb, "attempt": 1,
            "nodes": NODES, "expires_ns": 0, "trigger": 1, "ledger_digest": "", "within_s": 20.0,
        }  # fmt: skip
        reference = more.pop("reference", {})
        return Work(IntentIssued.model_validate(fields | more), self.declared, (), reference)

    def command(self, verb: str, node: str, **more: Any) -> NodeCommand:
        self.number += 1
        what = {
            "command": self.declared.command,
            "directory": self.declared.directory,
            "environment": self.declared.environment,
        }
        fields: dict[str, Any] = {"key": f"c{self.number}", "verb": verb, "job": "gpt 2", "attempt": 0, "epoch": 1}
        return NodeCommand.model_validate(fields | what | more)

    async def diagnose(self, **more: Any) -> Done:
        return await self.backend.diagnose(self.work("diagnose", **more), self)

    async def park(self, *names: str) -> None:
        for node in names or NODES:
            await self.backend.wake_standby(self.work("wake_standby", node=node), self)
        end = time.monotonic() + 100
        while any(self.hosts[node].parked() < 1 for node in names or NODES):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    def fault(self, text: str) -> None:
        self.faults.write_text(text)

    def workers(self) -> dict[str, int]:
        """The parked worker of each node, by pid."""
        slots = ((node, slot) for node, host in self.hosts.items() for slot in host._slots.all.values())
        return {node: slot.worker.pid for node, slot in slots if slot.live and slot.worker and slot.ready.is_set()}

    def marked(self, node: str) -> list[psutil.Process]:
        found = (psutil.Process(process.pid) for process, _ in marked(self.hosts[node]._slots.mark))
        return [process for process in found if process.is_running()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    here = Cluster(tmp_path_factory.mktemp("machines"))
    for host in here.hosts.values():
        await host.start()
    await here.park()
    yield here
    for host in here.hosts.values():
        await host.close(leave_running=False)
    assert [process for node in NODES for process in here.marked(node)] == []


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def healthy(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "cluster" in request.fixturenames:  # and not the pure ones
        here = request.getfixturevalue("cluster")
        here.fault("")
        here.deaf.clear()
        await here.park()


def failed(done: Done) -> set[tuple[str, str]]:
    return {(result.node, result.test) for result in done.tests if result.passed is False}


def named(done: Done) -> set[str]:
    return set(suspects(done.tests))


@REAL
async def test_healthy_machines_pass_all_in_about_a_second_and_their_workers_stay_parked(cluster: Cluster) -> None:
    before = cluster.workers()
    begun_s = time.monotonic()
    done = await cluster.diagnose()
    took_s = time.monotonic() - begun_s
    assert (done.result, failed(done), named(done)) == ("done", set(), set()), done
    assert {(r.node, r.test) for r in done.tests if r.passed} == {
        (node, test) for node in NODES for test in ("gpu_self_test", "all_gather", "reference_step")
    }
    cannot = {r.test: r.detail for r in done.tests if r.passed is None}
    assert set(cannot) == {"dcgm", "all_to_all"} and cannot["dcgm"] == "dcgmi is not installed"
    edges = {frozenset((r.node, *r.peers)) for r in done.tests if r.test == "all_gather"}
    assert edges == {frozenset((NODES[i], NODES[(i + 1) % 4])) for i in range(4)}
    assert len({r.digest for r in done.tests if r.test == "reference_step"}) == 1
    self_tests = [r for r in done.tests if r.test == "gpu_self_test"]
    assert all(r.restored and r.duration_s > 0 for r in done.tests) and "torch determinism: 0 -> 2" in self_tests[0].changed
    assert "3 shapes" in self_tests[0].detail  # the job's own shape among them
    assert cluster.workers() == before and len(before) == 4
    assert took_s < 5, took_s  # about 0.5 s; the machine may be busy
    print(f"quick diagnosis of 4 nodes: {took_s:.2f} s; {done.detail}")


@REAL
async def test_a_flipped_bit_only_under_the_jobs_shape_is_named(cluster: Cluster) -> None:
    cluster.fault("flip n2 48 80 72")
    done = await cluster.diagnose()
    assert failed(done) == {("n2", "gpu_self_test")} and named(done) == {"n2"}, done
    assert "48x80x72" in suspects(done.tests)["n2"]


@REAL
async def test_a_flipped_bit_in_a_shape_that_only_the_step_has_is_named_by_its_bits(cluster: Cluster) -> None:
    cluster.fault("flip n1 64 64 128")  # the head of the reference model
    done = await cluster.diagnose()
    assert failed(done) == {("n1", "reference_step")} and named(done) == {"n1"}, done
    assert "other bits than 3 of 4" in suspects(done.tests)["n1"]


@REAL
async def test_a_machine_that_sends_corrupted_content_is_the_common_end_of_two_bad_pairs(cluster: Cluster) -> None:
    cluster.fault("corrupt n3")
    done = await cluster.diagnose(tests=("all_gather",))
    assert failed(done) >= {("n2", "all_gather"), ("n0", "all_gather")} and named(done) == {"n3"}, done
    assert "1 of 262144 words from n3 arrived changed" in {r.detail for r in done.tests if r.node == "n0"}


@REAL
async def test_a_slow_link_stands_out_from_the_others(cluster: Cluster) -> None:
    cluster.fault("slow n1")
    done = await cluster.diagnose(tests=("all_gather",))
    assert named(done) == {"n1"}, done


@REAL
async def test_a_machine_that_hangs_in_a_test_is_killed_there_and_named(cluster: Cluster) -> None:
    before = cluster.workers()
    cluster.fault("hang n2")
    done = await cluster.diagnose(within_s=10.0)
    assert ("n2", "gpu_self_test") in failed(done) and named(done) == {"n2"}, done
    assert {r.node for r in done.tests if r.passed and r.test == "reference_step"} == {"n0", "n1", "n3"}
    # Who waited for it in vain says nothing against it, nor against itself.
    assert {(r.node, *r.peers) for r in done.tests if r.test == "all_gather" and r.passed is None} == {
        ("n1", "n2"),
        ("n3", "n2"),
    }
    assert cluster.workers() == before  # only the run was killed: the worker beside it is as warm as before


@REAL
async def test_a_machine_on_which_the_test_dies_is_named(cluster: Cluster) -> None:
    cluster.fault("die n0")  # the one that has the others' store
    done = await cluster.diagnose(within_s=6.0)
    assert ("n0", "gpu_self_test") in failed(done) and named(done) == {"n0"}, done
    assert "signal 9" in suspects(done.tests)["n0"]


@REAL
async def test_a_silent_agent_is_an_answer_and_the_others_go_on_without_it(cluster: Cluster) -> None:
    cluster.deaf = {"n0"}
    done = await cluster.diagnose()
    assert done.nodes == ("n0",) and failed(done) == {("n0", "answers")}, done
    edges = {frozenset((r.node, *r.peers)) for r in done.tests if r.test == "all_gather" and r.passed}
    assert edges == {frozenset(pair) for pair in (("n1", "n2"), ("n2", "n3"), ("n1", "n3"))}


@REAL
async def test_a_tester_that_is_stopped_itself_fails_its_machine_and_its_worker_is_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cluster.workers()
    monkeypatch.setattr("actuators.node_tests.ANSWER_S", 0.5)
    worker = before["n1"]
    tester = next(p for p in cluster.marked("n1") if p.pid != worker and p.cmdline() == psutil.Process(worker).cmdline())
    assert tester.ppid() != worker  # no child that the user's script would meet
    tester.send_signal(signal.SIGSTOP)
    done = await cluster.diagnose(tests=("gpu_self_test",), within_s=2.0)
    assert failed(done) == {("n1", "gpu_self_test")}, done
    await cluster.park()
    assert cluster.workers()["n1"] != worker


@REAL
async def test_the_reattempt_after_it_starts_from_the_same_warm_workers(cluster: Cluster) -> None:
    before = cluster.workers()
    await cluster.diagnose()
    places = tuple({"node": node, "first_rank": rank, "count": 1} for rank, node in enumerate(NODES))
    start = cluster.work("start_attempt", attempt=2, places=places, world_size=4)
    done = await cluster.backend.start_attempt(start, cluster)
    assert done.result == "done", done
    end = time.monotonic() + 20
    while len(os.listdir(cluster.out)) < 4:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert {name.split("-")[1] for name in os.listdir(cluster.out)} == set(map(str, before.values()))
    # With its ranks at work, the job's machines are not tested.
    refused = await cluster.diagnose(attempt=2)
    assert refused.result == "failed" and "1 ranks of 'gpt 2' run here" in refused.detail
    stopped = await cluster.backend.stop_attempt(cluster.work("stop_attempt", attempt=2), cluster)
    assert stopped.result == "done"


@REAL
async def test_a_start_without_a_stop_ends_tests_that_still_run_and_finds_warm_workers(cluster: Cluster) -> None:
    before = cluster.workers()
    commands = {
        node: cluster.command("diagnose", node, attempt=2, tests=("gpu_self_test",), within_s=90.0, repeat_s=60.0)
        for node in NODES
    }
    testing = [asyncio.create_task(cluster.hosts[node].handle(command)) for node, command in commands.items()]
    while not all(host._tests._runs for host in cluster.hosts.values()):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    assert await asyncio.gather(*(host._tests.end("gpt 2") for host in cluster.hosts.values())) == [1, 1, 1, 1]
    assert time.monotonic() - begun < 10
    answers = await asyncio.gather(*testing)
    assert all(not answer.ok and "ended for something else" in answer.detail for answer in answers), answers
    assert cluster.workers() == before
    assert not named(await cluster.diagnose(attempt=2))  # their testers test again


@REAL
async def test_no_test_begins_on_a_worker_that_gets_warm_after_the_start(cluster: Cluster) -> None:
    """The machine has no warm worker when it is to be tested; before there is one, the job starts."""
    host = cluster.hosts["n0"]
    await host.handle(cluster.command("park", "n0"))
    assert cluster.workers().keys() == {"n1", "n2", "n3"}
    testing = asyncio.create_task(
        host.handle(cluster.command("diagnose", "n0", attempt=4, tests=("gpu_self_test",), within_s=60.0))
    )
    while not host._tests._runs:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.3)
    place = {"node": "n0", "first_rank": 0, "count": 1}
    started = await host.handle(
        cluster.command("start", "n0", attempt=5, place=place, world_size=1, master_address="127.0.0.1", master_port=1)
    )
    assert started.ok, started
    answer = await testing
    assert not answer.ok and "ended" in answer.detail and answer.tests == ()
    assert (await host.handle(cluster.command("stop", "n0", attempt=5))).ok
    await cluster.park()


@REAL
async def test_a_fenced_machine_is_examined_for_longer_and_nothing_is_left_on_it(cluster: Cluster) -> None:
    reference = agreed((await cluster.diagnose(attempt=2)).tests)
    assert len(reference) == 1
    await cluster.backend.evict_node(cluster.work("evict_node", attempt=2, node="n3"), cluster)
    assert cluster.marked("n3") == []
    cluster.fault("flip n3 64 64 128")
    work = cluster.work("examine", attempt=2, node="n3", nodes=("n3",), within_s=12.0, reference=reference)
    done = await cluster.backend.examine(work, cluster)
    assert done.result == "done" and failed(done) == {("n3", "reference_step")}, done
    assert next(r for r in done.tests if r.test == "gpu_self_test").rounds > 1
    assert "other bits than the job's machines agreed on" in suspects(done.tests)["n3"]
    assert cluster.marked("n3") == []
    start = cluster.work("start_attempt", attempt=3, places=({"node": "n3", "first_rank": 0, "count": 1},), world_size=1)
    assert "fenced" in (await cluster.backend.start_attempt(start, cluster)).detail  # tested, not back
    await cluster.backend.wake_standby(cluster.work("wake_standby", epoch=2, node="n3"), cluster)


# Pure parts


def check(node: str, digest: str = "d", **more: Any) -> CheckResult:
    fields = {"test": "reference_step", "node": node, "passed": True, "digest": digest, "software": "torch 1"}
    return CheckResult.model_validate(fields | more)


@pytest.mark.parametrize(
    ("digests", "named", "unclear"),
    [
        ("aaaa", "", False),
        ("aaba", "2", False),
        ("abab", "", True),
        ("ab", "", True),
        ("abc", "", True),
        ("aaabc", "34", False),
        ("a", "", False),
    ],
)
def test_more_than_half_decide_whose_bits_are_wrong(digests: str, named: str, unclear: bool) -> None:
    results = compared([check(str(at), digest) for at, digest in enumerate(digests)])
    assert "".join(r.node for r in results if r.passed is False) == named
    assert all(r.passed is None for r in results) == unclear
    other = compared([check("x", "z", software="torch 2"), *(check(str(at), "a") for at in range(3))])
    assert all(r.passed for r in other) and "no other machine of its kind" in other[0].detail


def test_what_ranks_of_one_machine_found_is_one_result_a_test() -> None:
    good = {"test": "gpu_self_test", "passed": True, "detail": "fine", "duration_s": 1.0, "changed": ["a"], "restored": True}
    bad = {**good, "passed": False, "detail": "7 wrong", "duration_s": 2.0, "restored": False}
    alone = {"test": "dcgm", "passed": None, "detail": "not installed"}
    edge = {"test": "all_gather", "peers": ["m"], "passed": True, "detail": "", "value": 5.0, "unit": "GB/s"}
    step = {"test": "reference_step", "passed": True, "detail": "", "digest": "x", "software": "s"}
    results = merged("n", [[good, alone, edge, step], [bad, {**edge, "value": 3.0}, {**step, "digest": "y"}]])
    by = {result.test: result for result in results}
    assert (by["gpu_self_test"].passed, by["gpu_self_test"].detail) == (False, "local rank 1: 7 wrong")
    assert (by["gpu_self_test"].restored, by["gpu_self_test"].duration_s) == (False, 2.0)
    assert by["dcgm"].passed is None and (by["all_gather"].value, by["all_gather"].peers) == (3.0, ("m",))
    swapped = merged("n", [[{**step, "digest": "y"}], [step]])
    assert by["reference_step"].digest and by["reference_step"].digest != swapped[0].digest


def test_an_outcome_stays_one_message_and_keeps_what_failed() -> None:
    changed = tuple(f"torch switch {i}: True -> False" for i in range(8))
    results = [
        CheckResult(test=test, node=f"node-{n}", passed=n != 7, detail="x" * 80, changed=changed, peers=(f"node-{n + 1}",) if test == "all_gather" else ())
        for n in range(1500)
        for test in ("gpu_self_test", "all_gather", "all_gather", "reference_step")
    ]  # fmt: skip
    kept = bounded(results)
    assert sum(len(r.model_dump_json(exclude_defaults=True)) for r in kept) < 900_000
    assert [r for r in kept if r.passed is False] == [r for r in results if r.passed is False]
    assert suspects(kept).keys() == suspects(results).keys()
