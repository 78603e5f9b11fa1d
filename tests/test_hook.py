"""The hook in real processes, against a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from events.training import StepSample, TrainingProgress
from keepstep import _device
from keepstep._hook import Hook
from tests.hook_agent import HOOK, Agent, rank_environment, start


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "s")
    yield made
    made.close()


def run(script: str, environment: dict[str, str], agent: Agent | None = None) -> tuple[int, str, str]:
    process = start(script, environment)
    try:
        if agent is not None:
            agent.until(lambda: process.poll() is not None)
            agent.read(0.1)
            agent.read(0.1)
        out, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, out, err


def test_steps_and_phases_arrive_the_last_one_too(agent: Agent) -> None:
    script = """
import time, keepstep
assert keepstep.active()
time.sleep(0.15)
for step in range(5, 9):
    time.sleep(0.02)
    keepstep.step(step, loss=1.5 + step, grad_norm=float("inf") if step == 7 else 0.25, tokens=64, flops=1e9)
with keepstep.phase("evaluation"):
    time.sleep(0.3)
    keepstep.tick()
with keepstep.phase("coffee"):
    time.sleep(0.15)
time.sleep(0.02)
keepstep.step(9, loss=float("nan"))
"""
    code, _, err = run(script, rank_environment(agent.path, KEEPSTEP_PEAK_FLOPS="1e12"), agent)
    assert (code, err) == (0, "")
    assert agent.lines[0] | {"pid": 0} == {
        "v": 1, "type": "hello", "job": "job é", "attempt": 2, "rank": 0, "world_size": 1, "pid": 0, "restored_step": -1,
    }  # fmt: skip
    samples = agent.samples
    assert [sample[0] for sample in samples] == [5, 6, 7, 8, 9]
    assert [sample[3] for sample in samples] == [6.5, 7.5, 8.5, 9.5, "NaN"]
    assert [sample[4] for sample in samples] == [0.25, 0.25, "Infinity", 0.25, None]
    assert [sample[5] for sample in samples] == [64, 64, 64, 64, None]
    assert all(0.02 <= sample[2] < 0.2 for sample in samples[1:]), "a step's time is without evaluation's"
    assert samples[1][6] == pytest.approx(1e9 / samples[1][2] / 1e12) and samples[4][6] is None
    assert all(abs(sample[1] - time.time_ns()) < 60e9 for sample in samples)
    lines = agent.of("progress")
    phases = [line["phase"] for line in lines]
    assert [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase] == [
        "startup", "step", "evaluation", "undeclared", "step",
    ]  # fmt: skip
    # Four changes within the two blocks, one tick, start-up's end, five steps.
    assert [line["progress"] for line in lines] == sorted(line["progress"] for line in lines)
    assert lines[-1]["progress"] == 4 + 1 + 1 + 5 and lines[-1]["step"] == 9
    for line in lines:  # what the agent makes of it is an event that validates
        fields = ("step", "ended_ns", "step_time_s", "loss", "grad_norm", "tokens", "mfu")
        fact = {k: line[k] for k in ("phase", "progress", "step", "restored_step", "dropped")}
        made = TrainingProgress.model_validate(
            {**fact, "rank": 0, "world_size": 1, "samples": [dict(zip(fields, s, strict=True)) for s in line["samples"]]}
        )
        assert all(isinstance(sample, StepSample) for sample in made.samples)


def test_a_line_comes_every_second_without_progress(agent: Agent) -> None:
    process = start("import keepstep, time; time.sleep(30)", rank_environment(agent.path))
    try:
        agent.until(lambda: len(agent.of("progress")) >= 3)
        begun = time.monotonic()
        agent.until(lambda: len(agent.of("progress")) >= 5)
        assert 1.0 < time.monotonic() - begun < 6.0
        assert {(line["phase"], line["progress"], line["step"]) for line in agent.of("progress")} == {("startup", 0, -1)}
    finally:
        process.kill()
        process.communicate()


def test_without_keepstep_it_does_nothing(tmp_path: Path) -> None:
    environment = {k: v for k, v in rank_environment("").items() if not k.startswith("KEEPSTEP_")}
    script = """
import threading, os, keepstep
assert not keepstep.active()
keepstep.step(0, loss=1.0); keepstep.tick(); keepstep.set_peak(1e12)
with keepstep.phase("evaluation"): pass
assert keepstep.restore() == 0 and keepstep.checkpoint_to_restore() is None
assert keepstep.save(3, {"a": b"x"}) is None  # no folder: told, not raised
assert threading.active_count() == 1 and "torch" not in __import__("sys").modules
"""
    code, _, err = run(script, environment)
    assert code == 0, err
    assert err.count("\n") == 1 and "KEEPSTEP_CHECKPOINTS" in err


@pytest.mark.parametrize(
    "broken", [{"KEEPSTEP_RANK": "x"}, {"KEEPSTEP_ATTEMPT": ""}, {"KEEPSTEP_JOB": None}, {"KEEPSTEP_SOCKET": "/nowhere/s"}]
)
def test_a_broken_environment_costs_the_job_nothing(broken: dict[str, str | None]) -> None:
    environment = {k: v for k, v in (rank_environment("/x") | broken).items() if v is not None}
    code, out, err = run("import keepstep; keepstep.step(0, loss=1.0); print('done')", environment)
    assert (code, out) == (0, "done\n")
    assert err == "" or (err.count("\n") == 1 and "no telemetry" in err)


def test_what_it_can_not_read_is_told_once_and_never_raised(agent: Agent) -> None:
    script = """
import keepstep
class Odd:
    @property
    def is_cpu(self): raise RuntimeError("no")
keepstep.step("x"); keepstep.step(-4); keepstep.step(None); keepstep.step(2**70)
keepstep.step(0, loss=Odd()); keepstep.step(1, tokens=2**90); keepstep.step(2, flops="many", loss=1)
keepstep.step(3, loss=object(), grad_norm="0.5", tokens=-1, flops=float("nan"))
with keepstep.phase(None): pass
keepstep.step(4, loss=4)
"""
    code, _, err = run(script, rank_environment(agent.path), agent)
    assert code == 0 and err.count("\n") == 1 and "the job goes on" in err
    assert [(s[0], s[3]) for s in agent.samples if s[3] is not None] == [(2, 1.0), (4, 4.0)]


def test_an_agent_that_dies_and_comes_back_hears_the_rest(agent: Agent) -> None:
    script = """
import keepstep, time
for step in range(400):
    time.sleep(0.02)
    keepstep.step(step, loss=0.0)
"""
    process = start(script, rank_environment(agent.path))
    try:
        agent.until(lambda: len(agent.samples) >= 10)
        agent.close()
        seen = agent.samples[-1][0]
        time.sleep(0.5)
        agent.open()
        agent.until(lambda: bool(agent.samples) and agent.samples[-1][0] >= seen + 60)
        assert len(agent.of("hello")) == 2
        steps = [sample[0] for sample in agent.samples]
        # What the dead agent had not read is gone; all that came after waited for it.
        assert steps == sorted(set(steps))
        back = next(step for step in steps if step > seen)
        assert steps[steps.index(back) :] == list(range(back, steps[-1] + 1)) and back - seen <= 15
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_agent_blocks_no_step_and_what_is_lost_is_counted(agent: Agent) -> None:
    """It accepts the connection and reads nothing: the socket fills up, then the ring."""
    script = """
import keepstep, time
worst = 0.0
for step in range(12000):
    begun = time.perf_counter()
    keepstep.step(step, loss=0.5, grad_norm=0.5, tokens=1)
    worst = max(worst, time.perf_counter() - begun)
    if step % 100 == 0: time.sleep(0.02)
print(worst, flush=True)
time.sleep(30)
"""
    process = start(script, rank_environment(agent.path))
    try:
        assert process.stdout is not None
        worst_s = float(process.stdout.readline())
        assert worst_s < 1.0, "a step waited for the agent"
        agent.until(lambda: bool(agent.samples) and agent.samples[-1][0] == 11999)
        dropped = sum(line["dropped"] for line in agent.of("progress"))
        assert dropped > 0 and len(agent.samples) + dropped == 12000
        assert all(len(line["samples"]) <= 256 for line in agent.of("progress"))
    finally:
        process.kill()
        process.communicate()


def test_exit_is_not_held_up_by_an_agent_that_is_away(tmp_path: Path) -> None:
    script = """
import keepstep, time
keepstep.step(0)
begun = time.perf_counter()
keepstep._hook.flush()
print(time.perf_counter() - begun)
"""
    _, out, _ = run(script, rank_environment(tmp_path / "none"))
    assert float(out) < 0.2
    full = Agent(tmp_path / "full")  # never read
    try:
        _, out, _ = run("import keepstep\nfor i in range(9000): keepstep.step(i)\n" + script, rank_environment(full.path))
        assert float(out) < 0.25
    finally:
        full.close()


@pytest.mark.parametrize("how", ["fork", "spawn", "subprocess"])
def test_children_keep_silent(agent: Agent, tmp_path: Path, how: str) -> None:
    """Data loaders' workers inherit the rank's environment, and its socket."""
    script = f"""
import multiprocessing, os, subprocess, sys, time
import keepstep
def work():
    keepstep.step(99, loss=1.0)
    assert not keepstep.active()
    with keepstep.phase("evaluation"): pass
    time.sleep(0.3)
if __name__ == "__main__":
    time.sleep(0.2)
    keepstep.step(0)
    if {how!r} == "subprocess":
        code = subprocess.run([sys.executable, "-c", "import keepstep; keepstep.step(99); assert not keepstep.active()"]).returncode
    else:
        child = multiprocessing.get_context({how!r}).Process(target=work)
        child.start(); child.join(); code = child.exitcode
    assert code == 0, code
    keepstep.step(1)
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    # A spawned child imports its main module from a file: the script must be one.
    process = subprocess.Popen([sys.executable, str(path)], env=rank_environment(agent.path), stderr=subprocess.PIPE, text=True)
    try:
        agent.until(lambda: process.poll() is not None)
        agent.read(0.1)
        assert process.returncode == 0, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
    assert agent.connections == 1 and len({line["pid"] for line in agent.of("hello")}) == 1
    assert [sample[0] for sample in agent.samples] == [0, 1]


def test_a_forked_worker_does_not_hold_the_ranks_connection(agent: Agent) -> None:
    script = """
import keepstep, os, time
time.sleep(0.3)
if os.fork() == 0:
    time.sleep(20); os._exit(0)
print("ready", flush=True); time.sleep(20)
"""
    process = start(script, rank_environment(agent.path), start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        agent.until(lambda: len(agent._rests) == 1)
        os.kill(process.pid, signal.SIGKILL)
        agent.until(lambda: not agent._rests)  # the connection ended with the rank, though the worker lives
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_long_socket_path_works(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    agent = Agent(folder / "agent.sock")
    try:
        code, _, err = run("import keepstep; keepstep.step(0)", rank_environment(agent.path), agent)
        assert (code, err) == (0, "") and [sample[0] for sample in agent.samples] == [0]
    finally:
        agent.close()


def test_tensors_and_arrays_are_numbers(agent: Agent) -> None:
    pytest.importorskip("torch")
    script = """
import keepstep, torch, numpy
weight = torch.ones(1, requires_grad=True)
keepstep.step(0, loss=(weight * 3).sum(), grad_norm=torch.tensor([0.5], dtype=torch.bfloat16), tokens=torch.tensor(7))
keepstep.step(1, loss=numpy.float32(2.5), grad_norm=numpy.array(1.5), tokens=numpy.int64(9))
keepstep.step(2, loss=torch.tensor([1.0, 2.0]))  # not one number: told, not raised
keepstep.step(3, loss=torch.empty(1, device="meta"))
peak = keepstep.measure_peak("cpu", seconds=0.01)
assert peak > 1e8, peak
keepstep.step(4, loss=1.0, flops=peak)
"""
    code, _, err = run(script, rank_environment(agent.path), agent)
    assert code == 0 and err.count("\n") == 1
    values = {sample[0]: sample[3:6] for sample in agent.samples}
    assert values[0] == [3.0, 0.5, 7] and values[1] == [2.5, 1.5, 9] and values[3] == [None, None, None]
    assert agent.samples[-1][6] > 0


def test_skipped_steps_own_work_and_changes_are_told_only_where_there_are_any(agent: Agent) -> None:
    script = """
import keepstep, time
keepstep.step(0, loss=1.0)
keepstep.changed("data")
keepstep.changed("nobody knows")
time.sleep(0.05)
keepstep.computed()
time.sleep(0.05)
keepstep.step(1, loss=1.0)
keepstep.step(2, loss=float("inf"), skipped=True)
keepstep.changed("context")
keepstep.step(3, loss=1.0, busy_s=0.25, skipped=0)
keepstep.step(5, loss=1.0, busy_s=-1.0)
with keepstep.phase("evaluation"):
    time.sleep(0.05)
keepstep.computed()
keepstep.step(6)
"""
    code, _, err = run(script, rank_environment(agent.path), agent)
    assert (code, err) == (0, "")
    more = {sample[0]: sample[7:] for sample in agent.samples}
    assert more[0] == [] and more[2] == [1, None, ""] and more[3] == [0, 0.25, "context"] and more[5] == []
    skipped, busy_s, changed = more[1]
    assert (skipped, changed) == (0, "other") and 0.05 <= busy_s < agent.samples[1][2] - 0.04
    assert more[6][1] < 0.04  # what another phase took is no own work of the step


class Scripted:
    """A copy from a device that is over when the test says so."""

    def __init__(self, *numbers: float | None) -> None:
        self.arrived, self._numbers = False, list(numbers)

    def over(self) -> bool:
        return self.arrived

    def values(self) -> list[float | None]:
        return self._numbers


def test_values_on_a_device_are_read_late_in_order_and_given_up_in_the_end(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is scripted (`Copies.start` answers in its stead): what is tested is the waiting."""
    torch = pytest.importorskip("torch")
    hook = Hook(rank_environment(agent.path))
    elsewhere = torch.empty(1, device="meta")  # no tensor of the CPU's
    copies = [Scripted(float(number), None) for number in range(40)]
    waiting = iter(copies)
    monkeypatch.setattr(hook._copies, "start", lambda values: next(waiting))
    hook.step(0, elsewhere, 0.5, 3, None)
    assert hook.ring.written == 0 and hook.last_step == 0 and hook.progress == 2
    hook.step(1, 7.0, None, None, None)  # has its values, and waits behind the one that hasn't
    assert hook.ring.written == 0
    copies[0].arrived = True
    hook.step(2, elsewhere, None, None, None)
    assert [sample[4] for sample in hook.ring.read(0, 9)[0]] == [0.0, 7.0]
    for step in range(3, 3 + _device.PENDING_MAX):
        hook.step(step, elsewhere, None, None, None)
    samples = hook.ring.read(2, 9)[0]
    assert [(sample[1], sample[4]) for sample in samples] == [(2, None)], "the oldest is given up, the rest may wait"
    copies[2].arrived = True
    hook.flush()
    agent.until(lambda: len(agent.samples) == 3 + _device.PENDING_MAX)
    assert [sample[0] for sample in agent.samples] == list(range(3 + _device.PENDING_MAX))
    assert [sample[3] for sample in agent.samples][3] == 2.0


@pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('torch') or not __import__('torch').cuda.is_available()", reason="no GPU"
)
def test_a_step_does_not_wait_for_the_gpu(agent: Agent) -> None:
    script = """
import keepstep, torch, time
a = torch.randn(8192, 8192, device="cuda"); loss = (a @ a).sum(); norm = loss.double(); keepstep.step(0, loss=loss, grad_norm=norm)
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
for step in range(1, 30):
    for _ in range(3): b = a @ a
    keepstep.step(step, loss=b[0, 0], grad_norm=b[0, 1].to(torch.bfloat16))
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
"""
    code, _, err = run(script, rank_environment(agent.path), agent)
    assert (code, err) == (0, "") and len(agent.samples) == 30
    assert sum(sample[3] is not None for sample in agent.samples) > 5


def test_importing_it_is_cheap_and_brings_in_nothing() -> None:
    script = (
        "import sys; before=set(sys.modules); sys.path.insert(0, sys.argv[1]); import keepstep;"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules)-before if n.split('.')[0] not in sys.stdlib_module_names}))"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", script, str(HOOK)], capture_output=True, text=True, timeout=20, check=True
    )
    assert shown.stdout.split() == ["keepstep"]
