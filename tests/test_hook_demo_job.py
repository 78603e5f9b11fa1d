"""The demo's training job, really training: two ranks over gloo."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from keepstep import checkpoint
from tests.hook_agent import ROOT, Agent, rank_environment
from tests.test_parked import Worker

#: Looked for, not imported: that takes two seconds of every collection.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="no torch")

SCRIPT = ROOT / "infra" / "demo_job" / "train.py"
SMALL = ("--layers", "1", "--width", "32", "--batch", "2", "--step-floor", "0", "--print-every", "1", "--tail", "0.2")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environments(folder: Path, attempt: int, restore: str, agent: str, ranks: int = 2) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        rank_environment(
            agent,
            RANK=str(rank),
            KEEPSTEP_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            KEEPSTEP_ATTEMPT=str(attempt),
            KEEPSTEP_STORE_PREFIX=f"demo/{attempt}",
            KEEPSTEP_CHECKPOINTS=str(folder),
            KEEPSTEP_RESTORE=restore,
        )
        for rank in range(ranks)
    ]


@contextmanager
def running(each: list[dict[str, str]], *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *SMALL, *options],
            env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for environment in each
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def losses(out: str) -> dict[int, str]:
    return {int(found[1]): found[2] for found in re.finditer(r"^step (\d+) (loss \S+ norm \S+)$", out, re.M)}


@pytest.mark.slow
def test_it_trains_dies_with_a_peer_and_repeats_its_steps_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    agent = Agent(tmp_path / "s")
    try:
        with running(environments(folder, 1, "", str(agent.path)), "--steps", "100000", "--checkpoint-every", "10") as ranks:
            assert ranks[0].stdout is not None
            seen = ""
            while "step 34 " not in seen:
                line = ranks[0].stdout.readline()
                assert line, ranks[0].communicate()[1]
                seen += line
            ranks[1].send_signal(signal.SIGKILL)
            rest = ranks[0].stdout.read()  # communicate() does not see what was read ahead
            _, err = ranks[0].communicate(timeout=60)
            assert ranks[0].returncode == 1 and "Traceback" in err and "RuntimeError" in err, (
                "the peer's death ends it by itself"
            )
        first = losses(seen + rest)
        assert float(first[30].split()[1]) < float(first[0].split()[1]), "it learns"
        agent.until(lambda: len(agent.of("hello")) == 2 and not agent._rests)
        assert {line["rank"] for line in agent.of("hello")} == {0, 1}
        restored = checkpoint.latest_whole(folder)
        assert restored is not None and (step := checkpoint.step_of(restored)) is not None and step % 10 == 9 and step >= 29

        # The second attempt, from parked workers: they are stepping in a moment, and each step again comes out the same.
        agent.lines.clear()
        workers = [Worker([sys.executable], {"OMP_NUM_THREADS": "1"}) for _ in range(2)]
        try:
            for worker in workers:
                assert worker.parked()["torch"] is True
            begun = time.monotonic()
            last = max(first)
            for worker, environment in zip(workers, environments(folder, 2, str(restored), str(agent.path)), strict=True):
                worker.go(str(SCRIPT), *SMALL, "--steps", str(last + 1), "--evaluate-every", "7", **environment)
            assert workers[0].process.stdout is not None
            line = workers[0].process.stdout.readline()
            first_step_s = time.monotonic() - begun
            line += workers[0].process.stdout.read()  # communicate() does not see what was read ahead of that line
            ends = [worker.end() for worker in workers]
        finally:
            for worker in workers:
                worker.__exit__()
        assert [end[0] for end in ends] == [0, 0], ends
        again = losses(line + ends[0][1])
        assert list(again) == list(range(step + 1, last + 1)) and again == {n: first[n] for n in again}
        assert first_step_s < 5.0, "nothing is imported again"
        agent.until(lambda: len(agent.of("hello")) == 2 and not agent._rests)
        progress = agent.of("progress")
        assert {line["restored_step"] for line in progress if line["samples"]} == {step}
        assert sorted(sample[0] for sample in agent.samples) == sorted([*range(step + 1, last + 1)] * 2)
    finally:
        agent.close()


@pytest.mark.slow
def test_it_ends_when_told_at_one_step_and_ranks_leave_one_by_one(tmp_path: Path) -> None:
    word = tmp_path / "enough"
    with running(environments(tmp_path / "c", 1, "", ""), "--steps", "100000", "--until-file", str(word)) as ranks:
        out = ranks[0].stdout
        assert out is not None
        while not out.readline().startswith("step 3 "):
            assert ranks[0].poll() is None, ranks[0].communicate()[1]
        word.touch()
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
        last = max(losses(out.read()))
    assert checkpoint.step_of(checkpoint.latest_whole(tmp_path / "c") or "") == last, "the last step is saved"
