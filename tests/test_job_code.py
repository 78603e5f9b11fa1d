"""Which commit a job is declared with or changed to; and the commands that say so, on a real bus."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actuators.git import GitFailed
from events.job import JobDeclared, OverrideGiven, Place, RestartRequested
from events.ports import LEDGER
from events.registry import parse
from infra import demo_code
from infra.jetstream import JetStreamLog
from infra.job_code import asked_code, code_at, declared_code, script_of
from infra.pipeline import say as tell
from processors.ettr import WallTime, told
from tests.nats_fixture import Bus, real_bus
from tests.test_revisions import Repository, repository

__all__ = ["repository"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
TRAIN = ("python", "train.py", "--data", "x.py")


async def test_a_checkout_as_it_was_committed_is_its_commit(repository: Repository) -> None:
    code = await declared_code(str(repository.job), TRAIN)
    assert (code.revision, code.said) == (
        repository.bad,
        f"code: commit {repository.bad[:12]} of {repository.root}, which later edits there do not reach",
    )
    absolute = ("python", str(repository.job / "train.py"))
    assert (await declared_code(str(repository.job), absolute)).revision == repository.bad
    (repository.job / "scratch.txt").write_text("not under git, and no code")
    assert (await declared_code(str(repository.job), TRAIN)).revision == repository.bad


async def test_anything_else_runs_as_it_lies_and_says_what_that_costs(tmp_path: Path, repository: Repository) -> None:
    for name in ("model.py", "train.py"):
        (repository.job / name).write_text("# edited\n")
    code = await declared_code(str(repository.job), TRAIN)
    assert code.revision == ""
    assert code.said == (
        f"code: runs as it lies, and can't be rolled back: 2 files of {repository.root} differ from the commit "
        "(jobs/gpt/model.py, jobs/gpt/train.py); commit, and give it the commit with `keepstep update HEAD --reason …`"
    )
    repository.git("add", "-A")  # staged is not committed
    assert "2 files" in (await declared_code(str(repository.job), TRAIN)).said
    repository.commit(3)
    (repository.job / "new.py").write_text("")
    assert "new.py is not under git" in (await declared_code(str(repository.job), ("python", "new.py"))).said
    (tmp_path / "plain").mkdir()
    assert "lies in no git repository" in (await declared_code(str(tmp_path / "plain"), TRAIN)).said
    subprocess.run(["git", "init", "-q", str(tmp_path / "plain")], check=True)  # noqa: ASYNC221
    assert (await declared_code(str(tmp_path / "plain"), TRAIN)).revision == ""


async def test_a_revision_is_looked_up_where_the_job_lies(tmp_path: Path, repository: Repository) -> None:
    repository.git("tag", "before", repository.good)
    job = JobDeclared(job="gpt", nodes=(Place(node="n"),), command=TRAIN, directory=str(repository.job))
    for word in ("before", repository.good, repository.good[:9], "main~1"):
        assert (await asked_code(job, word)).revision == repository.good
    (repository.job / "model.py").write_text("")
    assert (await asked_code(job, "main")).said.endswith("; without the uncommitted changes of 1 files there")
    for word in ("nosuch", "--help", "-", "e" * 40, ""):
        with pytest.raises(GitFailed, match="has no commit"):
            await asked_code(job, word)
    repository.git("rm", "-q", "-f", "jobs/gpt/train.py")
    gone = repository.commit(4)
    with pytest.raises(GitFailed, match=r"has no train\.py in"):
        await code_at(str(repository.job), TRAIN, gone)
    assert (await code_at(str(repository.root), ("python", "-m", "jobs"), gone)).revision == gone
    elsewhere = job.model_copy(update={"directory": str(tmp_path / "none")})
    assert (await asked_code(elsewhere, gone)).revision == gone
    with pytest.raises(GitFailed, match="give the full commit"):
        await asked_code(elsewhere, "main")


def test_the_script_of_a_command() -> None:
    assert script_of("/r", ("python", "-u", "a/train.py", "x.py")) == "a/train.py"
    assert script_of("/r", ("python", "/r/train.py")) == "train.py"
    for command in (("python", "-m", "x"), ("python", "/elsewhere/train.py"), ("python", "../train.py"), ("train",)):
        assert script_of("/r", command) == ""


def test_an_update_with_the_next_restart_does_not_make_the_present_a_planned_one() -> None:
    lazily = RestartRequested(job="j", reason="r", author="a", symptom="code_update", revision="ab", at_next_restart=True)
    running = WallTime(stage="running", attempt=3, start_ns=1, cursor_ns=1)
    assert told(running, 9, lazily) == running
    assert told(running, 9, lazily.model_copy(update={"at_next_restart": False})).planned_since == 3


async def test_the_demos_code_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await demo_code.make(tmp_path / "code")
    assert len(first.revision) == 40
    (tmp_path / "code" / "train.py").write_text("raise TypeError\n")
    assert await demo_code.commit(tmp_path / "code", "worse") not in ("", first.revision)
    monkeypatch.setenv("PATH", str(tmp_path))
    without = await demo_code.make(tmp_path / "other")
    assert without.revision == "" and "git is not installed here" in without.said
    assert (tmp_path / "other" / "train.py").exists()


async def cli(bus: Bus, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("keepstep")), *words, "--url", bus.server.url, "--key", bus.key,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_restart_and_update_name_the_commit(tmp_path: Path, repository: Repository) -> None:
    async with real_bus(tmp_path) as bus:
        log = JetStreamLog(bus.admin, LEDGER)
        job = JobDeclared(job="gpt", nodes=(Place(node="n"),), command=TRAIN, directory=str(repository.job))
        await tell(log, job, "gpt")
        code, out, err = await cli(bus, "update", "main~1", "--reason", "loss looks odd", "--json")
        assert code == 0, err
        assert json.loads(out)["revision"] == repository.good and f"code: commit {repository.good[:12]}" in err
        assert (await cli(bus, "update", "main", "gpt", "--reason", "faster", "--lazily"))[0] == 0
        assert (await cli(bus, "restart", "--reason", "back", "--revision", repository.good[:8]))[0] == 0
        assert (await cli(bus, "restart", "--reason", "again"))[0] == 0
        for words, sentence in (
            (("update", "nosuch", "--reason", "x"), "has no commit nosuch; fetch it there first"),
            (("restart", "--revision", "main", "--as", "data_update", "--reason", "x"), "counted as code_update"),
            (("update", "", "--reason", "x"), "name the commit"),
            (("update", "main"), "--reason"),
            (("update", "main", "other", "--reason", "x"), "there is no job other"),
            (
                ("override", "gpt", "roll_back", "--revision", "nosuch", "--reason", "x"),
                "has no commit nosuch; fetch it there first",
            ),
            (("override", "gpt", "roll_back", "--revision", "a\nb", "--reason", "x"), "keepstep: "),
            (
                ("override", "gpt", "roll_back", "--reason", "x"),
                "the job's code has no revision that is known; name the commit",
            ),
        ):
            code, out, err = await cli(bus, *words)
            assert code == 2 and sentence in err and "Traceback" not in err and not out
        assert (await cli(bus, "override", "gpt", "roll_back", "--revision", "main~1", "--reason", "x"))[0] == 0
        said = [parse(record.data).data async for record in log.read()]
        assert [fact.revision for fact in said if isinstance(fact, OverrideGiven)] == [repository.good]
        asked = [fact for fact in said if isinstance(fact, RestartRequested)]
        assert [(one.symptom, one.revision, one.at_next_restart) for one in asked] == [
            ("code_update", repository.good, False),
            ("code_update", repository.bad, True),
            ("code_update", repository.good, False),
            ("operator_restart", "", False),
        ]
