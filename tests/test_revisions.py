"""Revisions of a job's code: real repositories, real worktrees, and ranks that run in them, cold and warm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actuators import git as git_
from actuators.git import GitFailed, changed, resolve
from actuators.ranks import RankHost, RankNews
from actuators.revisions import RevisionFailed, Revisions
from events.action import NodeCommand
from events.decision import RankPlace
from tests.test_ranks import until

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

SCRIPT = """
import json, os, sys, time
import model
import helper
with open(sys.argv[1] + ".new", "w") as file:
    json.dump({"version": model.VERSION, "helper": helper.__file__, "cwd": os.getcwd(), "argv": sys.argv, "script": __file__,
               "path": sys.path, "environment": dict(os.environ), "data": os.path.exists("data/shard.bin")}, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


class Repository:
    """A user's, with the job in a folder below its root, and two commits of which the second is bad."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.job = folder / "jobs" / "gpt"
        (self.job / "lib").mkdir(parents=True)
        (self.job / "train.py").write_text(SCRIPT)
        (self.job / "lib" / "helper.py").write_text("")
        (self.root / ".gitignore").write_text("data/\n*.so\n")
        self.git("init", "-q", "-b", "main", ".")
        self.good = self.commit(1)
        self.bad = self.commit(2)
        (self.job / "data").mkdir()
        (self.job / "data" / "shard.bin").write_bytes(b"tokens")

    def git(self, *words: str) -> str:
        told = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgSign=false", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *told, *words], cwd=self.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, version: int) -> str:
        (self.job / "model.py").write_text(f"VERSION = {version}\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", str(version))
        return self.git("rev-parse", "HEAD")

    def looks(self) -> dict[str, Any]:
        """All that must not change."""
        inside = self.root / ".git"
        files = {str(path.relative_to(inside)): path.read_bytes() for path in inside.rglob("*") if path.is_file()}
        seen = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if "__pycache__" not in str(path)}
        return {"git": files, "files": seen}


def shell(*words: str, cwd: Path | str | None = None) -> str:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "repo").mkdir()
    return Repository(tmp_path / "repo")


def start(repository: Repository, revision: str, **more: Any) -> NodeCommand:
    fields: dict[str, Any] = {
        "key": f"start/{revision}/{more.get('attempt', 1)}",
        "verb": "start",
        "job": "gpt",
        "attempt": 1,
        "place": RankPlace(node="n1", first_rank=0, count=1),
        "world_size": 1,
        "command": ("python", "train.py"),
        "directory": str(repository.job),
        "revision": revision,
    }
    return NodeCommand.model_validate(fields | more)


def revisions(tmp_path: Path, *in_use: str, **more: Any) -> Revisions:
    return Revisions(tmp_path / "state", lambda: in_use, **more)


async def refusal(tmp_path: Path, command: NodeCommand, **more: Any) -> str:
    with pytest.raises(RevisionFailed) as error:
        await revisions(tmp_path, **more).at(command)
    said = str(error.value)
    assert said.startswith("revision ") and "\n" not in said and "Traceback" not in said
    return said


# --- where a revision runs ----------------------------------------------------------------------------------------------------


async def test_a_revision_runs_beside_the_checkout_which_stays_as_it_is(tmp_path: Path, repository: Repository) -> None:
    (repository.job / "model.py").write_text("VERSION = 'being edited'\n")
    before = repository.looks()
    here = revisions(tmp_path)
    command = start(
        repository,
        repository.good,
        checkpoints="ck",
        command=("python", "train.py", "--config=jobs/x", str(repository.job / "model.py"), f"--out={repository.job}/out", f"--lib={repository.job}/lib"),
        environment=(("PYTHONPATH", f"lib:{repository.root}:/elsewhere"), ("COLOUR", "blue")),
    )  # fmt: skip
    told = await here.at(command)
    there = Path(told.directory)
    assert there.parts[-2:] == ("jobs", "gpt") and (there / "model.py").read_text() == "VERSION = 1\n"
    assert repository.looks() == before
    tree = there.parent.parent
    # A path into the checkout is one into the worktree, if the revision has it; the data, which git has not, is what lies there.
    assert told.command == (
        "python",
        "train.py",
        "--config=jobs/x",
        str(there / "model.py"),
        f"--out={repository.job}/out",
        f"--lib={there}/lib",
    )
    assert (there / "data" / "shard.bin").read_bytes() == b"tokens" and (there / "data").is_symlink()
    assert told.checkpoints == str(repository.job / "ck")
    assert dict(told.environment) == {
        "COLOUR": "blue",
        "PYTHONPATH": f"{there}/lib:{tree}:/elsewhere",
        "KEEPSTEP_REVISION": repository.good,
    }
    # For a job that asks what it is.
    said = shell("git", "log", "--format=%H", cwd=there).split()
    assert said == [repository.good]
    assert (await here.at(command)).directory == told.directory
    other = await here.at(start(repository, repository.bad))
    assert other.directory != told.directory and Path(other.directory, "model.py").read_text() == "VERSION = 2\n"
    assert repository.looks() == before
    assert (await here.at(start(repository, ""))).directory == str(repository.job)
    await here.close()


async def test_ranks_that_start_at_once_share_a_worktree(tmp_path: Path, repository: Repository) -> None:
    here = revisions(tmp_path)
    told = await asyncio.gather(*(here.at(start(repository, repository.good, job=f"job {i}")) for i in range(4)))
    assert len({one.directory for one in told}) == 1
    again = await revisions(tmp_path).at(start(repository, repository.good))  # another agent, later
    assert again.directory == told[0].directory
    await here.close()


async def test_what_came_into_the_checkout_later_is_there_for_the_next_job(tmp_path: Path, repository: Repository) -> None:
    here = revisions(tmp_path)
    there = Path((await here.at(start(repository, repository.good))).directory)
    (repository.job / "fast.so").write_bytes(b"elf")
    (repository.job / "lib" / "new.py").write_text("")
    await here.at(start(repository, repository.good, job="another"))
    assert (there / "fast.so").read_bytes() == b"elf" and (there / "lib" / "new.py").is_symlink()
    await here.close()


async def test_hooks_filters_and_the_callers_git_variables_do_nothing(
    tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        hook = repository.root / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
        hook.chmod(0o755)
    repository.git("config", "core.fsmonitor", str(repository.root / ".git" / "hooks" / "post-checkout"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.hooksPath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(repository.root / ".git" / "hooks"))
    here = revisions(tmp_path)
    told = await here.at(start(repository, repository.good))
    assert await changed(str(repository.job)) == ()
    assert Path(told.directory, "model.py").exists() and not ran.exists()
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "index").exists()
    await here.close()


async def test_a_repository_that_can_only_be_read_and_one_without_branches_do(tmp_path: Path, repository: Repository) -> None:
    """A commit that no branch holds any more: rewritten history, an amended commit."""
    repository.git("checkout", "-q", "--detach", repository.good)
    repository.git("branch", "-q", "-f", "main", repository.good)
    repository.git("reflog", "expire", "--expire=now", "--all")
    told = await revisions(tmp_path).at(start(repository, repository.bad))
    assert Path(told.directory, "model.py").read_text() == "VERSION = 2\n"


async def test_a_clone_without_its_history_and_one_of_other_hashes(tmp_path: Path, repository: Repository) -> None:
    url = f"file://{repository.root}"
    shell("git", "clone", "-q", "--depth", "1", url, str(tmp_path / "shallow"))
    shallow = tmp_path / "shallow" / "jobs" / "gpt"
    told = await revisions(tmp_path).at(start(repository, repository.bad, directory=str(shallow)))
    log = shell("git", "log", "--oneline", cwd=told.directory)
    assert len(log.splitlines()) == 1
    said = await refusal(tmp_path, start(repository, repository.good, directory=str(shallow)))
    assert "is a shallow clone" in said and "fetch it there first" in said
    with pytest.raises(GitFailed, match="is a shallow clone"):
        await resolve(str(shallow), repository.good)

    shell("git", "init", "-q", "--object-format=sha256", str(tmp_path / "long"))
    (tmp_path / "long" / "a.py").write_text("")
    words = ["-c", "user.name=t", "-c", "user.email=t@t"]
    shell("git", *words, "add", "-A", cwd=tmp_path / "long")
    shell("git", *words, "commit", "-qm", "1", cwd=tmp_path / "long")
    long = await resolve(str(tmp_path / "long"), "HEAD")
    assert len(long) == 64
    told = await revisions(tmp_path).at(start(repository, long, directory=str(tmp_path / "long")))
    assert Path(told.directory, "a.py").exists()


async def test_a_submodule_comes_from_the_checkout_if_it_is_the_one(tmp_path: Path, repository: Repository) -> None:
    (tmp_path / "sub").mkdir()
    sub = Repository(tmp_path / "sub")
    repository.git("submodule", "--quiet", "add", str(sub.root), "third_party/sub")
    with_sub = repository.commit(3)
    told = await revisions(tmp_path).at(start(repository, with_sub))
    tree = Path(told.directory).parent.parent
    assert (tree / "third_party" / "sub" / "jobs" / "gpt" / "model.py").read_text() == "VERSION = 2\n"
    shell("git", "checkout", "-q", sub.good, cwd=repository.root / "third_party" / "sub")
    said = await refusal(tmp_path / "b", start(repository, with_sub))
    assert f"wants the submodule third_party/sub at {sub.bad[:12]}, and the checkout has {sub.good[:12]}" in said
    shutil.rmtree(repository.root / "third_party" / "sub")
    assert "has it not checked out" in await refusal(tmp_path / "b", start(repository, with_sub))


async def test_files_in_lfs_come_from_what_the_repository_keeps(tmp_path: Path, repository: Repository) -> None:
    oid = "ab12" + "0" * 60
    (repository.root / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (repository.job / "vocab.bin").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 5\n")
    with_lfs = repository.commit(3)
    assert "vocab.bin is kept in Git LFS" in await refusal(tmp_path, start(repository, with_lfs))
    kept = repository.root / ".git" / "lfs" / "objects" / "ab" / "12" / oid
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"words")
    told = await revisions(tmp_path).at(start(repository, with_lfs))
    assert Path(told.directory, "vocab.bin").read_bytes() == b"words"


# --- where none can run -------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_run_is_one_sentence(
    tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = repository.good
    (tmp_path / "plain").mkdir()
    shell("git", "init", "-q", "--bare", str(tmp_path / "bare"))
    (repository.root / "fresh").mkdir()
    (repository.root / "newer").mkdir()
    (repository.root / "newer" / "a.py").write_text("")
    repository.commit(3)
    cases = [
        ({"revision": "f" * 40}, f"has no commit {'f' * 40}; fetch it there first"),
        ({"revision": "main"}, "is no full commit"),
        ({"directory": str(tmp_path / "plain")}, "lies in no git repository"),
        ({"directory": str(tmp_path / "none")}, "there is no folder"),
        ({"directory": ""}, "names no directory"),
        ({"directory": str(tmp_path / "bare")}, "without a checkout"),
        ({"directory": str(repository.root / "fresh")}, "is not under git"),
        ({"directory": str(repository.root / "newer"), "revision": repository.bad}, "has no folder newer"),
        ({"directory": str(repository.job / "data")}, "is not under git"),
    ]  # fmt: skip
    for more, words in cases:
        assert words in await refusal(tmp_path, start(repository, **{"revision": good, **more})), words
    said = await refusal(tmp_path / "late", start(repository, good), limit_s=0.0)
    assert "did not end within 0 s" in said
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))
    assert "git is not installed here" in await refusal(tmp_path / "other", start(repository, good))


@pytest.mark.skipif(os.getuid() != 0, reason="takes another owner")
async def test_a_repository_of_another_user(tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (repository.root, *repository.root.rglob("*")):
        os.lchown(path, 12345, 12345)
    said = await refusal(tmp_path, start(repository, repository.good))
    assert (
        f"belongs to another user, whom git does not trust here; if you do, run there: git config --system --add safe.directory {repository.root}"
        in said
    )
    (tmp_path / ".gitconfig").write_text(f"[safe]\n\tdirectory = {repository.root}\n")
    told = await revisions(tmp_path).at(start(repository, repository.good))
    assert Path(told.directory, "model.py").exists()


async def test_git_is_ended_with_all_it_started(tmp_path: Path, repository: Repository) -> None:
    here = str(repository.job)
    with pytest.raises(GitFailed) as error:
        await git_.git("-c", "alias.x=!sleep 61 & sleep 62", "x", at=here, limit_s=0.3)
    assert error.value.again
    seen = shell("ps", "-eo", "args").splitlines()
    assert "sleep 61" not in seen and "sleep 62" not in seen


# --- removed ------------------------------------------------------------------------------------------------------------------


async def test_old_worktrees_go_but_not_those_in_use_nor_with_a_jobs_files(tmp_path: Path, repository: Repository) -> None:
    commits = [repository.good, repository.bad, *(repository.commit(n) for n in range(3, 8))]
    used: list[str] = []
    here = Revisions(tmp_path / "state", lambda: used, kept=2)
    there = []
    for commit in commits:
        there.append(Path((await here.at(start(repository, commit))).directory))
        used = [str(there[0])]
        if commit == repository.bad:
            (there[1] / "metrics.csv").write_text("1,2,3")
        (there[-1] / "__pycache__").mkdir()
    assert here._pruning is not None
    await here._pruning
    half = there[0].parent.parent.with_name("half-made")
    half.mkdir()
    await here.prune()
    assert [path.exists() for path in there] == [True, True, False, False, False, True, True] and not half.exists()
    assert (repository.job / "data" / "shard.bin").exists()  # links go, not what they point to
    assert Path((await here.at(start(repository, commits[3]))).directory, "model.py").read_text() == "VERSION = 4\n"
    await here.close()


async def test_what_another_boot_left_is_not_run(tmp_path: Path, repository: Repository) -> None:
    first = revisions(tmp_path, boot_id="1")
    told = await first.at(start(repository, repository.good))
    await first.close()
    second = revisions(tmp_path, boot_id="2", kept=1)
    again = await second.at(start(repository, repository.good))
    assert again.directory != told.directory
    await second.prune()
    assert not Path(told.directory).exists() and Path(again.directory).exists()
    assert len(list((tmp_path / "state").iterdir())) == 1


# --- ranks --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[RankHost]:
    news: list[RankNews] = []
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "keepstep").symlink_to(Path(__file__).parent.parent / "keepstep")
    made = RankHost(
        tmp_path / "agent", "n1", hook_folder=hook, on_event=news.append, socket_path=tmp_path / "s", boot_id="boot-1"
    )
    await made.start()
    yield made
    await made.close(leave_running=False)


def python(tmp_path: Path, script: str = "train.py", *, plain: bool = False) -> tuple[str, ...]:
    """The interpreter below the virtual environment, which has no torch: a worker is warm at once. By another name it is started cold."""
    below = str(getattr(sys, "_base_executable", sys.executable))
    if plain:
        (tmp_path / "interpreter").symlink_to(below)
    return (str(tmp_path / "interpreter") if plain else below, script)


async def seen(path: Path) -> dict[str, Any]:
    await until(path.exists, 30)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("relative", [True, False])
async def test_a_cold_rank_runs_the_code_of_its_revision(
    tmp_path: Path, repository: Repository, host: RankHost, relative: bool
) -> None:
    script = "train.py" if relative else str(repository.job / "train.py")
    out = tmp_path / "out.json"
    command = start(
        repository,
        repository.good,
        command=(*python(tmp_path, script, plain=True), str(out)),
        environment=(("PYTHONPATH", "lib"),),
        checkpoints="ck",
    )
    answer = await host.handle(command)
    assert answer.ok and answer.detail == f"1 ranks started, 0 of them warm, revision {repository.good[:12]}"
    found = await seen(out)
    assert found["version"] == 1 and found["data"] and found["cwd"] == str(Path(found["helper"]).parent.parent)
    assert found["environment"]["KEEPSTEP_CHECKPOINTS"] == str(repository.job / "ck")
    assert found["environment"]["KEEPSTEP_REVISION"] == repository.good
    assert str(tmp_path / "agent") in found["cwd"] and found["cwd"].endswith("/jobs/gpt")
    assert host._directories() == [found["cwd"]]


async def test_a_rollback_starts_warm_and_runs_nothing_of_the_newer_code(
    tmp_path: Path, repository: Repository, host: RankHost
) -> None:
    (repository.job / "lib" / "only_newer.py").write_text("")
    newer = repository.commit(3)
    out = [tmp_path / f"out-{n}.json" for n in range(3)]
    place = RankPlace(node="n1", first_rank=0, count=1)
    words = {"command": (*python(tmp_path), str(tmp_path / "out.json")), "environment": (("PYTHONPATH", "lib"),)}
    assert (await host.handle(start(repository, newer, verb="park", key="p", place=place, **words))).ok
    for attempt, revision in enumerate((newer, repository.good, ""), 1):
        await until(lambda: host.parked() == 1, 60)
        answer = await host.handle(start(repository, revision, attempt=attempt, **words))
        assert answer.ok and "1 of them warm" in answer.detail, answer.detail
        found = await seen(tmp_path / "out.json")
        (tmp_path / "out.json").rename(out[attempt - 1])
        assert found["version"] == {newer: 3, repository.good: 1, "": 3}[revision]
        where = str(repository.job) if not revision else found["cwd"]
        assert found["cwd"] == where and found["helper"] == f"{where}/lib/helper.py" and found["path"][0] == where
        if revision:  # nothing of the checkout is looked into
            assert not [path for path in found["path"] if path.startswith(str(repository.root))]


async def test_workers_that_imported_the_jobs_code_ahead_are_of_no_use_to_another_revision(
    tmp_path: Path, repository: Repository, host: RankHost
) -> None:
    words = {
        "command": (*python(tmp_path), str(tmp_path / "out.json")),
        "environment": (("PYTHONPATH", "lib:."), ("KEEPSTEP_PARKED_IMPORTS", "model")),
    }
    assert (await host.handle(start(repository, "", verb="park", key="p", **words))).ok
    await until(lambda: host.parked() == 1, 60)
    answer = await host.handle(start(repository, repository.good, **words))
    assert answer.ok and "0 of them warm" in answer.detail
    assert (await seen(tmp_path / "out.json"))["version"] == 1


async def test_a_node_that_cannot_run_a_revision_says_why_for_good(repository: Repository, host: RankHost) -> None:
    answer = await host.handle(start(repository, "e" * 40))
    assert not answer.ok and answer.detail.startswith("revision eeeeeeeeeeee can't be run here: the repository of ")
    assert host.current() == ("", 0)
