"""Stacks of real processes: stopped, stuck, gone, unreadable; of a real job whose culprit is then found; and what goes over the bus."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actuators import flight_recorder, stack_capture
from actuators.processes import Process, stat
from actuators.stack_capture import NOT_ALLOWED, Target, capture, captured, fitted
from events.action import CommandAnswered
from events.finding import GroupState, ProcessStack
from processors.parallel_groups import Layout
from processors.stacks import aggregate
from tests.hang_simulation import dumps

SLEEPER = """
import time
def outer():
    inner()
def inner():
    print("here", flush=True)
    while True: time.sleep(0.2)
outer()
"""


def started(process: subprocess.Popen[str], rank: int) -> Target:
    seen = stat(process.pid)
    assert seen is not None
    return Target(rank, Process(process.pid, seen.start_time))


def python(code: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """In a session of its own, once it has said that it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {}), cwd=cwd,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    process = python(SLEEPER)
    yield process
    if process.poll() is None:
        ended(process)


def program(folder: Path, body: str) -> str:
    """Stands for py-spy."""
    file = folder / "py-spy"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


async def test_a_running_process_gives_its_frames_outermost_first(sleeper: subprocess.Popen[str]) -> None:
    (found,) = await capture([started(sleeper, 3)])
    assert found.error == "" and found.state in "SR"
    names = [frame.split(" (")[0] for frame in found.threads[0].split(";")]
    assert [name for name in names if name in ("<module>", "outer", "inner")] == ["<module>", "outer", "inner"]
    assert (found.rank, found.pid, found.parent_pid) == (3, sleeper.pid, os.getpid())


async def test_a_stopped_process_is_read_without_being_suspended_and_stays_stopped(sleeper: subprocess.Popen[str]) -> None:
    stopped(sleeper)
    (found,) = await capture([started(sleeper, 0)])
    assert found.state == "T" and "inner" in found.threads[0]
    seen = stat(sleeper.pid)
    assert seen is not None and seen.state == "T"


async def test_a_process_that_is_gone_is_told_as_gone(sleeper: subprocess.Popen[str]) -> None:
    target = started(sleeper, 0)
    ended(sleeper)
    (found,) = await capture([target])
    assert found.state == "-" and found.threads == ()


async def test_children_belong_to_their_rank() -> None:
    fork = "import multiprocessing as m; p = m.get_context('fork').Process(target=exec, args=(CODE, {})); p.start(); p.join()"
    process = python(f"CODE = {SLEEPER!r}; {fork}")
    try:
        main, child = await capture([started(process, 5)])
        assert (main.rank, child.rank, child.parent_pid) == (5, 5, main.pid)
        assert "inner" in child.threads[0] and "join" in main.threads[0]
    finally:
        ended(process)


async def test_a_reader_that_hangs_costs_its_deadline_and_the_process_runs_on(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    hangs = program(
        tmp_path, "kill -STOP $6 2>/dev/null || kill -STOP $5; exec sleep 60"
    )  # holds the process, as a tracer does
    start = time.monotonic()
    (found,) = await capture([started(sleeper, 0)], each_s=1.0, together_s=2.0, program=hangs)
    assert time.monotonic() - start < 2.5
    assert "gave no answer within" in found.error and found.threads == ()
    seen = stat(sleeper.pid)
    assert seen is not None and seen.state in "SR"


async def test_all_together_have_a_deadline_too(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    start = time.monotonic()
    slow = program(tmp_path, "exec sleep 60")
    found = await capture([started(sleeper, rank) for rank in range(24)], each_s=1.0, together_s=1.5, program=slow)
    assert time.monotonic() - start < 2.5
    assert len(found) == 24 and all(process.error for process in found)
    assert any("no time left" in process.error for process in found)


async def test_a_missing_right_is_said_with_what_grants_it(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    denied = program(tmp_path, "echo 'Error: Permission denied (os error 13)' >&2; exit 1")
    (found,) = await capture([started(sleeper, 0)], program=denied)
    assert found.unread and found.error == NOT_ALLOWED and "CAP_SYS_PTRACE" in found.error
    detail, _ = await captured([started(sleeper, 0)], 5.0)
    assert detail == "1 of 1 processes of 1 ranks read"


async def test_without_native_frames_is_the_next_way(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    told = json.dumps(
        [{"pid": sleeper.pid, "thread_name": "MainThread", "frames": [{"name": "f", "short_filename": "a.py", "line": 1}]}]
    )
    once = program(
        tmp_path, f"case \"$*\" in *--native*) echo 'Error: Failed to suspend process' >&2; exit 1;; esac; echo '{told}'"
    )
    (found,) = await capture([started(sleeper, 0)], program=once)
    assert (found.threads, found.error) == (("f (a.py:1)",), "")


async def test_processes_that_come_and_go_meanwhile_are_told_and_none_is_left_stopped(tmp_path: Path) -> None:
    """Ranks that fork without end, some killed while they are read; the reader itself is the real one."""
    forking = """
import subprocess, sys, time
print("here", flush=True)
while True:
    children = [subprocess.Popen(["sleep", "0.05"]) for _ in range(3)]
    [child.wait() for child in children]
"""
    ranks = [python(forking) for _ in range(6)]
    targets = [started(process, rank) for rank, process in enumerate(ranks)]

    async def kill() -> None:
        for process in ranks[:3]:
            await asyncio.sleep(0.15)
            process.kill()

    killing = asyncio.create_task(kill())
    try:
        found = await capture(targets, each_s=10, together_s=20)
        await killing
        mains = [process for process in found if process.parent_pid == os.getpid() or process.pid in {p.pid for p in ranks}]
        assert [process.rank for process in mains] == list(range(6)) and all(
            p.threads or p.error or p.state in "-ZX" for p in found
        )
        assert all(process.threads for process in mains[3:]), mains
        states = [(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]) for process in ranks[3:]]
        assert "T" not in states and "t" not in states
    finally:
        for process in ranks:
            ended(process)


# Flight recordings


async def test_a_dump_that_takes_too_long_costs_no_more_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread can't be ended: the stacks go without it. And a pipe in a dump's place is not waited for."""
    told = dict(dumps(Layout(2, 2, 2), {5: ("stopped", 9)}))
    ranks = [python(SLEEPER, {"TORCH_FR_DUMP_TEMP_FILE": "fr_"}, tmp_path) for _ in range(3)]
    read = flight_recorder.load

    def slow(path: Path) -> Any:
        time.sleep(6 if path.name == "fr_1" else 0)
        return read(path)

    monkeypatch.setattr(flight_recorder, "load", slow)
    monkeypatch.setattr(stack_capture.stat_module, "S_ISREG", lambda mode: True)  # it became one after it was looked at
    try:
        os.mkfifo(tmp_path / "fr_2")
        for rank in (0, 1):
            (tmp_path / f"fr_{rank}").write_text(json.dumps(told[rank]))
        begun_s = time.monotonic()
        found = await capture([started(process, rank) for rank, process in enumerate(ranks)], together_s=3)
        assert time.monotonic() - begun_s < 5
        assert [process.recorded for process in found] == [True, False, False] and all(process.threads for process in found)
    finally:
        for process in ranks:
            ended(process)


async def test_a_ranks_dump_is_read_where_its_environment_says(tmp_path: Path) -> None:
    told = dict(dumps(Layout(2, 2, 2), {5: ("stopped", 9)}))
    (tmp_path / "fr_1").write_bytes(pickle.dumps(told[1]))
    old = time.time() - 3600
    os.utime(tmp_path / "fr_1", (old, old))
    process = python(SLEEPER, {"TORCH_FR_DUMP_TEMP_FILE": "fr_"}, tmp_path)
    try:
        (found,) = await capture([started(process, 1)])
        assert not found.recorded  # an earlier attempt's
        (tmp_path / "fr_1").write_bytes(pickle.dumps(told[1]))
        (found,) = await capture([started(process, 1)])
        assert found.recorded and found.pending and found.threads and found.collective == found.pending[0].op
    finally:
        ended(process)


async def test_a_recorder_that_listens_on_a_pipe_is_asked_for_a_dump(tmp_path: Path) -> None:
    told = dict(dumps(Layout(2, 2, 2), {5: ("stopped", 9)}))
    pipe = tmp_path / "ask_1.pipe"
    os.mkfifo(pipe)
    listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    prefix = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "ask_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "fr_"),
    }
    process = python(SLEEPER, prefix, tmp_path)

    async def recorder() -> None:
        while True:
            try:
                if os.read(listening, 8):
                    (tmp_path / "fr_1").write_text(json.dumps(told[1]))
                    return
            except BlockingIOError:
                pass
            await asyncio.sleep(0.02)

    answering = asyncio.create_task(recorder())
    try:
        (found,) = await capture([started(process, 1)])
        await answering
        assert found.recorded and found.pending
    finally:
        ended(process)
        os.close(listening)


# The bus


def test_what_is_too_large_for_a_message_loses_what_tells_least() -> None:
    deep = ";".join(f"function_{i} (package/module_{i}.py:{i})" for i in range(60))
    ranks = [ProcessStack(rank=rank, pid=10 + rank, state="S", threads=(deep, deep, deep)) for rank in range(8)]
    loaders = [ProcessStack(rank=i % 8, pid=100 + i, parent_pid=10 + i % 8, threads=(deep, deep)) for i in range(128)]
    group = GroupState(group="0", ranks="0-7", entered=5)
    ranks[0] = ranks[0].model_copy(update={"recorded": True, "groups": (group,)})
    every = [*ranks, *loaders]
    for bytes_max, left_out in (
        (10 << 20, ""),
        (500_000, "threads beside"),
        (120_000, "the middle"),
        (40_000, "children's"),
        (9_000, "all stacks"),
    ):
        kept, said = fitted(every, bytes_max)
        assert len(kept) == len(every) and left_out in said
        assert sum(len(process.model_dump_json()) for process in kept) <= max(bytes_max, 32_000)
    whole, _ = fitted(every, stack_capture.ANSWER_BYTES_MAX)
    assert len(CommandAnswered(key="k", verb="stacks", ok=True, stacks=tuple(whole)).model_dump_json()) < 1 << 20
    kept, _ = fitted(every, 40_000)
    assert all(process.threads for process in kept[:8]) and kept[0].recorded
    assert kept[9].error == "its stack was left out for the message's size" and kept[9].unread


# A real job


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HungJob:
    def __init__(self, mode: str, world: int) -> None:
        port = str(free_port())
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("hung_job.py")), mode],
                stdout=subprocess.PIPE, text=True, start_new_session=True,
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            )
            for rank in range(world)
        ]  # fmt: skip

    def at_work(self) -> list[Target]:
        for rank in self.ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "at work\n"
        return [started(process, rank) for rank, process in enumerate(self.ranks)]

    def end(self) -> None:
        for rank in self.ranks:
            ended(rank)


@pytest.mark.slow
async def test_a_rank_stopped_in_a_real_job_is_found() -> None:
    pytest.importorskip("torch")
    job = HungJob("none", 4)
    try:
        targets = job.at_work()
        await asyncio.sleep(1)
        os.kill(targets[2].process.pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        found = await capture(targets, each_s=60, together_s=120)  # native symbols take a second each where nothing else runs
        told = aggregate(found, 4)
        assert told.outliers == told.silent == (2,), (told, found)
        assert told.stuck_at == ("rank 2: stopped (state T)",)
        waiting = [process for process in found if process.rank != 2]
        assert all("all_reduce" in process.threads[0] and not process.error for process in waiting)
        assert any("c10d::" in process.threads[0] for process in waiting)  # native frames are there
    finally:
        job.end()


@pytest.mark.slow
async def test_a_data_loader_in_a_lock_in_a_real_evaluation_is_found() -> None:
    pytest.importorskip("torch")
    job = HungJob("lock", 3)
    try:
        targets = job.at_work()
        end = time.monotonic() + 60
        while True:
            found = await capture(targets, each_s=60, together_s=120)
            told = aggregate(found, 3)
            locked = [process for process in found if process.rank == 1 and "__getitem__" in ";".join(process.threads)]
            waits = bool(told.stuck_at) and "_try_get_data" in told.stuck_at[0]
            if (told.outliers == (1,) and locked and waits) or time.monotonic() > end:
                break
            await asyncio.sleep(1)
        assert told.outliers == (1,) and told.silent == (), (told, found)
        assert "_try_get_data" in told.stuck_at[0] and "evaluate" in told.stuck_at[0]
        (worker,) = locked
        assert worker.parent_pid == targets[1].process.pid and "_worker_loop" in worker.threads[0]
    finally:
        job.end()
