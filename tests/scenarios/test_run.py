"""`keepstep run -- python script.py`, end to end, with a pipeline of its own, beside packages that have the names of ours."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.scenarios.harness import KEEPSTEP, PYTHON, Scenario

pytestmark = pytest.mark.slow

GOOD = """
import os, time
import events, infra, processors, keepstep
assert events.MINE and infra.MINE and processors.MINE, "the script got keepstep's packages instead of its own"
for step in range(40):
    time.sleep(0.05)
    keepstep.step(step, loss=1.0)
assert keepstep.active()
time.sleep(0.5 * int(os.environ["RANK"]))
open(f"done-{os.environ['RANK']}", "w").close()
"""
BAD = "import events\nassert events.MINE\nraise ValueError('a mistake in the script')\n"


def run_it(folder: Path, home: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    for name in ("events", "infra", "processors", "actuators", "producers"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("MINE = True\n")
    (folder / "train.py").write_text(script)
    words = [str(KEEPSTEP), "run", *options, "--home", str(home), "--", PYTHON, "train.py"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


def left(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


async def test_a_script_of_ones_own_runs_and_ends_and_nothing_is_left(tmp_path: Path) -> None:
    mine, home = tmp_path / "mine", tmp_path / "home"
    mine.mkdir()
    done = await asyncio.to_thread(run_it, mine, home, GOOD, "--nodes", "2", "--job", "own")
    assert done.returncode == 0, done.stderr
    assert "job own finished" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert sorted(p.name for p in mine.glob("done-*")) == ["done-0", "done-1"]
    assert not left(tmp_path)
    assert sys.modules["events"].__file__ != str(mine / "events" / "__init__.py")


async def test_a_failing_script_under_the_default_policy_is_observed(tmp_path: Path) -> None:
    """Nothing is done about it but said, and the command ends when its user ends it."""
    mine, home = tmp_path / "mine", tmp_path / "home"
    mine.mkdir()
    s = Scenario(tmp_path)
    running = asyncio.create_task(asyncio.to_thread(run_it, mine, home, BAD, "--nodes", "1"))
    try:
        await s.until(lambda: s.pipeline.address.runs or running.done(), "bus")
        await s.listen()
        await s.until(lambda: [d for d in s.of("decision_made") if d.data.rung != "planned"], "what it would do")
        would = next(d.data for d in s.of("decision_made") if d.data.rung != "planned")
        assert would.mode == "observe"
        assert [i.data.verb for i in s.of("intent_issued")] == ["start_attempt"], "an observer did something"
        await s.cli("stop", "--reason", "it is broken")
        done = await running
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("Traceback") == 1, "more than the script's own"
        assert "a mistake in the script" in done.stderr
    finally:
        await s.close()
    assert not left(tmp_path)
