"""The demo's job as a user has one: its script in a git repository of its own, so that its code can be changed and rolled back."""

from __future__ import annotations

import shutil
from pathlib import Path

from actuators.git import GitFailed, git, resolve
from infra.job_code import Code, declared_code

JOB = Path(__file__).resolve().parent / "demo_job"
SCRIPT = JOB / "train.py"
#: What the job consists of.
FILES = ("train.py", "faults.py")
_AUTHOR = ("-c", "user.name=keepstep demo", "-c", "user.email=demo@localhost", "-c", "commit.gpgSign=false")


async def make(folder: Path) -> Code:
    """Puts the demo's script, and what it imports of its own, into `folder`, under git where git is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(JOB / name, folder / name)
    try:
        if not (folder / ".git").exists():
            await git("init", "--quiet", "--template=", at=str(folder), alone=str(folder.parent))
        await commit(folder, "The demo's job")
    except GitFailed as error:
        return Code("", f"the demo's job can't be rolled back: {error}")
    return await declared_code(str(folder), ("python", SCRIPT.name))


async def commit(folder: Path, message: str) -> str:
    """Whatever lies in the folder as a commit, which is named. Raises GitFailed."""
    alone = str(folder.parent)
    await git("add", "--all", at=str(folder), alone=alone)
    await git(*_AUTHOR, "commit", "--quiet", "--allow-empty", "-m", message, at=str(folder), alone=alone)
    return await resolve(str(folder), "HEAD")
