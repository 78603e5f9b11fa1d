"""A parked worker that goes is the script run directly: everything that a script or its caller can see is compared with that."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actuators.environment import parked_form
from keepstep.parked import parked_command
from tests.hook_agent import HOOK, Agent, rank_environment

#: -S: no site-packages, so no torch, and a quick start.
PLAIN = [sys.executable, "-S"]


class Worker:
    def __init__(self, interpreter: list[str] | None = None, environment: dict[str, str] | None = None, cwd: str = "/") -> None:
        ours, theirs = socket.socketpair()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PYTHON"))}
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [*(interpreter or PLAIN), "-m", "keepstep.parked", "--control-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=clean | {"PYTHONPATH": str(HOOK)} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        theirs.close()
        ours.settimeout(120)
        self.channel = ours
        self.lines = ours.makefile("rb")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def parked(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.lines.readline())
        return message

    def go(self, *argv: str, cwd: str = "", **env: str | None) -> None:
        self.channel.sendall(json.dumps({"go": {"env": env, "argv": argv, "cwd": cwd}}).encode() + b"\n")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def directly(*argv: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PYTHON"))}
    run = subprocess.run(
        [*PLAIN, *argv],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(HOOK)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


def parked(*argv: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    with Worker() as worker:
        assert worker.parked()["torch"] is False
        worker.go(*argv, cwd=str(cwd), **env)
        return worker.end()


SEES = """
from __future__ import annotations
import atexit, os, pickle, sys, threading, random
import beside
def shown(x: undefined_annotation): return x
class Thing: pass
print(__name__, __file__, __doc__, __package__, __spec__, __cached__ if "__cached__" in globals() else "-")
print(sys.argv, sys.path, os.getcwd(), os.environ["COLOUR"], os.environ.get("GONE"))
print(sys.modules["__main__"].__dict__ is globals(), pickle.loads(pickle.dumps(Thing())).__class__ is Thing, beside.VALUE)
print(repr(sys.stdin.read()), threading.active_count(), __builtins__.__class__, random.Random(1).random(), sorted(globals()))
print("to stderr", file=sys.stderr)
atexit.register(lambda: print("at exit", Thing.__module__))
"""

ENDINGS = {
    "falls off the end": "",
    "exits with a code": "sys.exit(7)",
    "exits with a word": "sys.exit('that is why')",
    "raises": "def deep():\n    raise ValueError('a fault')\ndeep()",
    "raises from another": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('worse') from e",
    "does not parse": "x = = 1",
    "is interrupted": "import signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
    "is killed": "import signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)",
    "fails in a thread": "t = threading.Thread(target=lambda: 1/0); t.start(); t.join()",
    "spawns": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    p = m.get_context('spawn').Process(target=print, args=('child',)); p.start(); p.join(); print(p.exitcode)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_script_sees_and_ends_as_run_directly(tmp_path: Path, how: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "job" / "train.py").write_text('"""A docstring."""\n' + SEES + ENDINGS[how] + "\n")
    arguments = ("job/train.py", "--steps", "9", "-m", "")
    real, ours = (way(*arguments, cwd=tmp_path, COLOUR="rot") for way in (directly, parked))
    hide = re.compile(r"0x[0-9a-f]+|Thread-\d+")
    assert [hide.sub("-", str(part)) for part in ours] == [hide.sub("-", str(part)) for part in real]
    assert how == "does not parse" or "A docstring." in real[1]


def test_a_module_a_folder_and_a_zip_too(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    body = (
        "import sys, os; print(__name__, __spec__.name, sys.argv[1:], sys.path[0], os.path.basename(sys.argv[0])); sys.exit(3)"
    )
    (tmp_path / "pack" / "tool.py").write_text(body)
    (tmp_path / "pack" / "__main__.py").write_text("import sys; print(__name__, sys.argv, sys.path[0]); sys.exit(4)")
    for argv in (("-m", "pack.tool", "-x"), ("-m", "pack"), ("pack", "y")):
        assert parked(*argv, cwd=tmp_path) == directly(*argv, cwd=tmp_path)


def test_a_script_that_is_not_there_is_the_interpreters_own_error(tmp_path: Path) -> None:
    code, out, err = parked("none.py", cwd=tmp_path)
    real = directly("none.py", cwd=tmp_path)
    assert (code, out) == real[:2] == (2, "") and err == real[2]
    code, _, err = parked("-m", "no_such_module", cwd=tmp_path)
    assert code == directly("-m", "no_such_module", cwd=tmp_path)[0] == 1 and "no_such_module" in err


def test_go_changes_the_environment_and_the_module_path(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_now.py").write_text("VALUE = 1\n")
    (tmp_path / "t.py").write_text(
        "import os, only_now, keepstep; print(os.environ.get('A'), os.environ['B'], os.environ['C'])\n"
    )
    with Worker(environment={"A": "1", "B": "2"}) as worker:
        worker.parked()
        worker.go("t.py", cwd=str(tmp_path), A=None, B="3", C="4", PYTHONPATH=f"{HOOK}{os.pathsep}{tmp_path / 'lib'}")
        assert worker.end() == (0, "None 3 4\n", "")


def test_a_channel_that_closes_ends_it_with_zero() -> None:
    with Worker() as worker:
        worker.parked()
        worker.lines.close()
        worker.channel.close()
        assert worker.end() == (0, "", "")
    with Worker() as worker:  # at once, before it is parked
        worker.lines.close()
        worker.channel.close()
        assert worker.end()[0] == 0


@pytest.mark.parametrize(
    "line",
    [b"nonsense\n", b"[]\n", b'{"go": 1}\n', b'{"go": {"env": {"A": 1}, "argv": ["x"], "cwd": ""}}\n',
     b'{"go": {"env": {}, "argv": [], "cwd": ""}}\n', b'{"go": {"env": {}, "argv": ["-m"], "cwd": ""}}\n',
     b'{"go": {"env": {}, "argv": ["x"], "cwd": "/no/such/folder"}}\n'],
)  # fmt: skip
def test_what_is_no_go_is_refused_in_one_sentence(line: bytes) -> None:
    with Worker() as worker:
        worker.parked()
        worker.channel.sendall(line)
        code, out, err = worker.end()
    assert (code, out) == (2, "") and err.startswith("keepstep.parked: can't go: ") and err.count("\n") == 1


def test_it_says_what_it_needs() -> None:
    for arguments in ([], ["--control-fd", "x"], ["--control-fd", "987"], ["--control-fd", "2"]):
        run = subprocess.run(
            [*PLAIN, "-m", "keepstep.parked", *arguments],
            env={"PYTHONPATH": str(HOOK)}, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert (
            run.returncode == 2 and run.stderr.startswith("keepstep.parked: can't be parked: ") and run.stderr.count("\n") == 1
        )


def test_parked_it_is_no_rank_and_gone_it_is(tmp_path: Path) -> None:
    """Even where the rank's variables are in its environment all along, it says nothing before it goes."""
    agent = Agent(tmp_path / "s")
    (tmp_path / "t.py").write_text("import keepstep; keepstep.step(3, loss=1.0)\n")
    try:
        with Worker(environment=rank_environment(agent.path, KEEPSTEP_ATTEMPT="1")) as worker:
            worker.parked()
            agent.read(0.3)
            assert agent.connections == 0
            worker.go(str(tmp_path / "t.py"), KEEPSTEP_ATTEMPT="5")
            agent.until(lambda: bool(agent.samples))
            assert worker.end()[0] == 0
        assert [line["attempt"] for line in agent.of("hello")] == [5] and agent.samples[0][0] == 3
        assert agent.of("hello")[0]["pid"] == worker.process.pid
    finally:
        agent.close()


def test_which_commands_can_be_parked() -> None:
    for command, parts in {
        "python train.py --x 1": ("python", "train.py --x 1"),
        "/usr/bin/python3.11 -u -O t.py": ("/usr/bin/python3.11 -u -O", "t.py"),
        "python3 -X dev -W error -m a.b c": ("python3 -X dev -W error", "-m a.b c"),
        "python -c pass": None, "python": None, "python -m": None, "python -": None, "python -i t.py": None, "python -X": None,
        "python -uB t.py": ("python -uB", "t.py"), "python -E t.py": None, "python -I t.py": None, "torchrun t.py": None, "bash run.sh": None, "python-config t.py": None, "pythonw t.py": None, "": None,
    }.items():  # fmt: skip
        expected = None if parts is None else (parts[0].split(), parts[1].split())
        assert parked_command(command.split()) == expected, command
        launchers = None if expected is None else ([*expected[0], "-m", "keepstep.parked"], expected[1])
        assert parked_form(tuple(command.split())) == launchers, "the launcher's own copy of the rule"
    assert parked_command([sys.executable, "a b.py"]) == ([sys.executable], ["a b.py"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_with_torch_it_is_warm_idle_and_leaves_no_trace(tmp_path: Path) -> None:
    shows = """
import sys
warm = "torch" in sys.modules
import torch, torch.distributed as d
fresh = torch.Generator().manual_seed(torch.initial_seed())  # random numbers begin where they do in a process that drew none
print(warm, torch.get_num_threads(), torch.equal(torch.rand(9), torch.rand(9, generator=fresh)), d.is_initialized())
"""
    (tmp_path / "t.py").write_text(shows)
    environment = {"OMP_NUM_THREADS": "1"}
    with Worker([sys.executable], environment) as worker:
        told = worker.parked()
        assert told["parked"] is True and told["torch"] is True and told["pid"] == worker.process.pid and told["warm_s"] > 0
        process = psutil.Process(worker.process.pid)
        cost_s = []
        while not cost_s or (cost_s[-1] > 0.02 and len(cost_s) < 8):  # what the warm step left to do ends first
            before = process.cpu_times()
            time.sleep(1.0)
            after = process.cpu_times()
            cost_s.append(after.user + after.system - before.user - before.system)
        assert cost_s[-1] <= 0.02, f"it waits at no cost: {cost_s}"
        # DistributedDataParallel keeps its group's listener for good; it must not be one that other machines reach.
        assert {c.laddr.ip for c in process.net_connections("inet")} <= {"127.0.0.1"}
        worker.go(str(tmp_path / "t.py"), OMP_NUM_THREADS="2")
        code, out, err = worker.end()
    assert (code, out, err) == (0, "True 2 True False\n", "")


def test_a_parked_worker_can_be_stopped_by_signal() -> None:
    with Worker() as worker:
        worker.parked()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end()[0] == -signal.SIGTERM
