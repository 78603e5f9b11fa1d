"""Replays on a node over real processes: a script without torch stands for the job."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actuators.group_test import GroupTest
from actuators.local import Local
from actuators.replay_verdicts import verdicts
from actuators.replays import Trace, read_trace
from events.action import CommandAnswered, NodeCommand
from events.decision import RankPlace
from tests.replay_nodes import Cluster, declared, work

#: A step's loss is a function of rank, world and step; where BAD_NODE is, the node goes wrong in the way of BAD.
SCRIPT = """
import json, os, sys, time
import keepstep
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
bad = os.environ.get("BAD", "") if os.environ["KEEPSTEP_NODE"] == os.environ.get("BAD_NODE", "-") else ""
out = os.path.join(os.environ["OUT"], os.environ["KEEPSTEP_NODE"] + "-" + os.environ["MASTER_PORT"] + ".json")
with open(out + ".new", "w") as file:
    replay = keepstep.replay()
    json.dump({"env": dict(os.environ), "replay": replay and list(replay), "argv": sys.argv}, file)
os.rename(out + ".new", out)
restore = keepstep.checkpoint_to_restore()
start = int(restore.name[5:]) + 1 if restore else 0
for step in range(start, start + int(os.environ.get("STEPS", "1000"))):
    loss = (rank + 1) * world / (step + 1)
    time.sleep(float(os.environ.get("SLOW", "0")))
    if step == start + 1:
        if bad == "crash":
            raise RuntimeError("boom of " + str(rank))
        if bad == "hang":
            time.sleep(600)
        if bad == "nan":
            loss = float("nan")
        if bad == "wrong":
            loss *= 1 + 2**-50
    keepstep.step(step, loss=loss, grad_norm=0.5)
    keepstep.save(step, {"model.pt": b"x"})
    if bad == "full":
        keepstep._hook._trace = -1  # no more to be written to
    if bad == "blank":
        os._exit(0)
try:
    time.sleep(0.01)
finally:
    open(out + ".end", "w").close()
"""
NAMES = [f"n{i}" for i in range(4)]
GROUPS = ((("n0",), ("n1",), ("n2",), ("n3",)),) * 2


class Job:
    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        (folder / "out").mkdir()
        (folder / "train.py").write_text(SCRIPT)

    def declared(self, *, cold: bool = True, **environment: str) -> Any:
        before = ("/usr/bin/env",) if cold else ()
        return declared(
            self.folder, NAMES, *before, sys.executable, str(self.folder / "train.py"), "--deep",
            environment=(("OUT", str(self.folder / "out")), *environment.items()),
        )  # fmt: skip

    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "out").glob("*.json"))]

    def command(self, **more: Any) -> NodeCommand:
        job = self.declared(**more.pop("environment", {}))
        fields: dict[str, Any] = {
            "key": f"r{time.monotonic_ns()}", "verb": "replay", "job": "gpt", "attempt": 3, "epoch": 1,
            "place": RankPlace(node="n0", first_rank=0, count=1), "world_size": 1, "master_address": "127.0.0.1", "master_port": 4321,
            "command": job.command, "directory": job.directory, "environment": job.environment, "steps": 3, "within_s": 20.0,
        }  # fmt: skip
        return NodeCommand.model_validate(fields | more)

    def checkpoint(self, step: int) -> None:
        from keepstep import checkpoint

        checkpoint.save(self.folder / "job" / "checkpoints", step, {"model.pt": b"x"}, keep=9, attempt=1)


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    cluster = Cluster(tmp_path, NAMES)
    await cluster.start()
    yield Job(tmp_path, cluster)
    await cluster.close()
    assert cluster.processes() == []
    assert cluster.news == []  # nothing of it is the job's


async def test_a_replay_runs_some_steps_apart_from_the_job_and_is_ended_by_the_hook(job: Job) -> None:
    job.checkpoint(41)
    done = await Local().group_test(work(job.declared(), GROUPS), job.cluster)
    assert done.result == "done", done
    assert done.detail == "8 replays of 3 steps from step 41: 0 failed"
    assert [result.failed for result in done.replays] == [False] * 8
    assert done.replays[0].detail == "3 steps from 42, the same bit for bit in 8 of 8 replays"
    seen = job.seen()
    assert len(seen) == 8 and seen[0]["argv"][1:] == ["--deep"] and seen[0]["replay"] == [3, 0, 1]
    environment = seen[0]["env"]
    assert environment["KEEPSTEP_SOCKET"] == "" and environment["WORLD_SIZE"] == "1"
    assert len({one["env"]["KEEPSTEP_STORE_PREFIX"] for one in seen}) == 8
    assert [path.name for path in (job.folder / "job" / "checkpoints").iterdir()] == ["step-00000041"]
    assert list((job.folder / "out").glob("*.end")) == []  # the script's own ending was not run


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("crash", "rank 0 crashed after 1 steps (exit code 1: RuntimeError: boom of 0)"),
        ("hang", "rank 0 got no further than 1 steps"),
        ("nan", "no finite number at step 1"),
        ("wrong", "from step 1 on all ranks computed something else than in 6 of 8"),
        (
            "blank",
            "after 1 steps all ranks did not come to the same parameters, or ended otherwise, than in 6 of 8",
        ),  # it ended early, with 0
    ],
)
async def test_what_goes_wrong_on_a_node_is_seen(job: Job, bad: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actuators.group_test.PATIENCE_S_MIN", 2.0)
    begun_s = time.monotonic()
    done = await Local().group_test(work(job.declared(BAD=bad, BAD_NODE="n2"), GROUPS), job.cluster)
    assert [result.failed for result in done.replays] == [False, False, True, False] * 2, done
    assert said in done.replays[2].detail, done.replays[2]
    assert done.result == "done" and "2 failed (horizontal 2, vertical 2)" in done.detail
    assert time.monotonic() - begun_s < 30  # not the deadline of 60 s a phase


async def test_one_rank_of_two_that_fails_ends_the_other_at_once(job: Job) -> None:
    groups = ((("n0", "n1"), ("n2", "n3")), (("n0", "n2"), ("n1", "n3")))
    done = await Local().group_test(work(job.declared(BAD="crash", BAD_NODE="n3", SLOW="0.1"), groups, steps=40), job.cluster)
    assert [result.failed for result in done.replays] == [False, True, False, True]
    assert "rank 1 crashed" in done.replays[1].detail and "rank 1 crashed" in done.replays[3].detail
    took_s = [result.duration_s for result in done.replays]
    assert max(took_s[1], took_s[3]) + 1 < min(took_s[0], took_s[2]), took_s


async def test_a_checkpoint_below_a_step(job: Job) -> None:
    for step in (10, 20, 30):
        job.checkpoint(step)
    done = await Local().group_test(work(job.declared(), GROUPS, restore_below_step=30), job.cluster)
    told = [command.restore_below_step for _, command in job.cluster.asked if command.key.endswith("restore/n0")]
    assert told == [30]
    assert done.result == "done", done


async def test_nodes_that_do_not_answer_and_ranks_that_are_at_work(job: Job) -> None:
    job.cluster.dead = {"n1"}
    done = await Local().group_test(work(job.declared(), GROUPS), job.cluster)
    assert [result.failed for result in done.replays] == [False, None, False, False] * 2
    assert (done.result, done.nodes) == ("done", ("n1",)) and "2 say nothing (no agent answered on n1)" in done.detail
    # ranks of an attempt still run on one node
    start = job.command(verb="start", key="s", environment={"STEPS": "100000000"})
    assert (await job.cluster.hosts["n0"].handle(start)).ok
    done = await Local().group_test(work(job.declared(), GROUPS), job.cluster)
    assert done.replays[0].failed is None and "ranks of attempt 3 are still there" in done.replays[0].detail
    assert (await job.cluster.hosts["n0"].handle(job.command(verb="stop", key="t"))).ok
    job.cluster.news.clear()
    job.cluster.dead = set(NAMES)
    done = await Local().group_test(work(job.declared(), GROUPS), job.cluster)
    assert done.result == "unreachable"


async def test_a_replay_that_could_not_be_recorded_accuses_nobody(job: Job) -> None:
    done = await Local().group_test(work(job.declared(BAD="full", BAD_NODE="n1"), GROUPS), job.cluster)
    assert [result.failed for result in done.replays] == [False, None, False, False] * 2
    assert "the hook could not record rank 0" in done.replays[1].detail


async def test_called_back_it_leaves_nothing(job: Job) -> None:
    declared = job.declared(BAD="hang", BAD_NODE="n1")
    test = asyncio.create_task(Local().group_test(work(declared, GROUPS), job.cluster))
    while len(job.seen()) < 4:
        await asyncio.sleep(0.02)
    test.cancel()
    with pytest.raises(asyncio.CancelledError):
        await test
    assert job.cluster.processes() == []


@pytest.mark.parametrize("verb", ["stop", "fence", "start"])
async def test_what_is_commanded_of_the_job_ends_its_replays(job: Job, verb: str) -> None:
    host = job.cluster.hosts["n0"]
    running = asyncio.create_task(host.handle(job.command(environment={"BAD": "hang", "BAD_NODE": "n0"})))
    while not job.seen():
        await asyncio.sleep(0.02)
    answer = await host.handle(job.command(verb=verb, key="x", attempt=4, epoch=2, environment={"STEPS": "100000000"}))
    assert answer.ok, answer
    replayed = await running
    assert replayed.replayed[0].ended == "cut" and replayed.replayed[0].detail == "it was ended"
    if verb == "start":
        async with asyncio.timeout(10):  # in the middle of an exec a process shows no mark
            while len(job.cluster.processes()) != 1:
                await asyncio.sleep(0.02)
        await host.handle(job.command(verb="stop", key="y", attempt=4, epoch=2))
    job.cluster.news.clear()


async def test_an_agent_that_is_made_again_ends_the_replays_of_the_one_before(job: Job) -> None:
    host = job.cluster.hosts["n0"]
    running = asyncio.create_task(host.handle(job.command(environment={"BAD": "hang", "BAD_NODE": "n0"})))
    while not job.seen():
        await asyncio.sleep(0.02)
    # as a killed one: nobody ends its replays
    await host._slots.close()
    running.cancel()
    fresh = Cluster(job.folder, ["n0"])
    await fresh.start()
    assert fresh.processes() == [] and fresh.news == []
    answer = await fresh.hosts["n0"].handle(job.command())
    assert answer.ok and len(answer.replayed[0].trace) == 3
    await fresh.close()


async def test_commands_that_are_none_are_refused(job: Job) -> None:
    host = job.cluster.hosts["n0"]
    for more in ({"place": None}, {"within_s": 0.0}, {"steps": 1001}, {"world_size": 0}):
        answer: CommandAnswered = await host.handle(job.command(**more))
        assert not answer.ok and not answer.replayed, answer
    done = await GroupTest(work(job.declared(), ((), ())), job.cluster, {}).run()
    assert done.result == "failed" and verdicts([]) == ()


def test_a_trace_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    assert read_trace(path, 9) == Trace()
    lines = ['{"step": 5, "loss": "0x1.8p+1", "grad_norm": null}', '{"step": 6, "loss": "nan", "grad_norm": "0x1p0"}']
    path.write_text("\n".join([*lines, "{torn", '{"step": 8, "loss": null, "grad_norm": null}']))
    seen = read_trace(path, 9)
    assert (seen.first_step, len(seen.digests), seen.bad_step, seen.blank) == (5, 2, 6, False)
    assert read_trace(path, 1).digests == seen.digests[:1]
    path.write_text("\n".join([*lines, '{"parameters": "ab12"}']))
    assert read_trace(path, 2) == replace(seen, parameters="ab12")
    path.write_text(lines[1].replace("}", ', "skipped": true}'))
    assert read_trace(path, 9).bad_step == -1  # an overflow that the loss scaler took care of
    path.write_text("\n".join([lines[0].replace("1.8p+1", "1.8000000000001p+1"), lines[1]]))
    other = read_trace(path, 9).digests
    assert other[0] != seen.digests[0] and other[1] != seen.digests[1]  # a difference stays
    path.write_bytes(b'{"step": 99999999999999999999, "loss": null, "grad_norm": null}\n' + b"[1]\n" * 10)
    assert read_trace(path, 9) == Trace()
