"""A code revision that raises in user code, given to a running job by `keepstep update`, is rolled back by git, from warm workers; a lazy
update goes with the next restart."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from events.ports import TELEMETRY_JOB
from events.registry import parse
from tests.scenarios.harness import JOB, KEEPSTEP, PYTHON, SCRIPT, Scenario, policy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")]

#: Before it has proved stable, and after workers are parked for the attempt that follows.
BAD = ("        step += 1\n", "        step += 1\n        if step - first == 60:\n            step + str(step)\n")


def git(folder: Path, *words: str) -> str:
    told = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgSign=false")
    return subprocess.run(["git", *told, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "a change")
    return git(folder, "rev-parse", "HEAD")


async def run(s: Scenario) -> str:
    """The job as a user declares it; what the command said."""
    words = [
        str(KEEPSTEP),
        "run",
        "--nodes",
        "2",
        "--job",
        JOB,
        "--checkpoints",
        "checkpoints",
        "--detach",
        "--home",
        str(s.home.path),
    ]
    words += ["--", PYTHON, "train.py", str(s.steps_folder), str(s.step_s)]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60, cwd=s.folder)
    assert done.returncode == 0, done.stderr
    await s.trains(1)
    return str(done.stderr)


async def starts(s: Scenario) -> list[tuple[int, bool]]:
    """The attempt of each rank's start, and whether it was warm."""
    records: list[Any] = [parse(record.data) for record in (await s.records())[TELEMETRY_JOB]]
    return sorted((event.attempt, event.data.warm) for event in records if event.data.kind() == "rank_started")


async def test_a_bad_revision_is_rolled_back_and_a_lazy_update_waits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    text = SCRIPT.read_text().replace("step = int(", "step = first = int(")
    good = commit(tmp_path, text)
    async with Scenario(tmp_path, nodes=2, policy=policy(decider={"stable_steps": 90})) as s:
        assert f"code: commit {good[:12]} of {tmp_path}" in await run(s)
        await s.until(lambda: s.job().stable == good, "stable revision")
        await s.until(lambda: all(beat.parked for _, beat in s.watch.nodes.values()), "workers parked on every node")
        bad = commit(tmp_path, text.replace(*BAD))
        before = s.at
        assert (await s.cli_json("update", "HEAD", "--reason", "faster"))["revision"] == bad
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism, closed.symptom) == ("recovered", "roll_back", "user_code_error")
        assert s.job().revision == good and s.job().attempt == 3
        blamed = [seen.data for seen in s.of("signal", after=before) if seen.data.symptom == "user_code_error"]
        assert len(blamed) == 1 and blamed[0].confidence == "high"
        assert blamed[0].evidence.startswith("TypeError: unsupported operand") and "(train.py:" in blamed[0].evidence
        outcomes = [seen.data.detail for seen in s.of("outcome_recorded", after=before) if seen.data.verb == "start_attempt"]
        assert [f"revision {revision[:12]}" in detail for revision, detail in zip((bad, good), outcomes, strict=True)] == [
            True,
            True,
        ]
        assert all(warm for attempt, warm in await starts(s) if attempt > 1)
        # The checkout still holds the bad one, as its owner left it.
        assert (
            git(tmp_path, "status", "--porcelain", "--untracked-files=no") == "" and git(tmp_path, "rev-parse", "HEAD") == bad
        )
        assert git(tmp_path, "worktree", "list").count("\n") == 0

        better = commit(tmp_path, text + "# better\n")
        await s.cli("update", "main", "--reason", "better", "--lazily")
        step = s.step(0)
        await s.until(lambda: s.step(0) > step + 10, "steps")
        assert (s.job().revision, s.job().attempt) == (good, 3)
        before = s.at
        s.kill_rank(1)
        await s.closed(before)
        await s.trains(4)
        assert s.job().revision == better
        await s.finish()
        await s.check()
