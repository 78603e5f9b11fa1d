"""Which code a job runs, as git has it: the commit that a declaration names, and the one that a person asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from actuators.git import FULL, GitFailed, changed, checkout_of, holds, resolve, tracked
from events.job import JobDeclared

#: Of files that stand in the way, so many are named.
NAMED_MAX = 3


class Code(NamedTuple):
    """`revision`: a full commit, or empty where the folder runs as it lies. `said`: a sentence on that for the user."""

    revision: str
    said: str


async def declared_code(directory: str, command: Sequence[str]) -> Code:
    """The commit that a job of this directory runs, if what lies there is that commit. Anything else is no error: the job runs what
    lies there, and can't be rolled back."""
    try:
        checkout = await checkout_of(directory)
        revision = await resolve(directory, "HEAD")
        script = script_of(directory, command)
        if not await tracked(directory, script or "."):
            return Code("", _as_it_lies(f"{script or directory} is not under git"))
        different = await changed(directory)
    except GitFailed as error:
        return Code("", _as_it_lies(str(error)))
    if different:
        named = ", ".join(different[:NAMED_MAX]) + (", …" if len(different) > NAMED_MAX else "")
        some = f"{len(different)} file{'s' if len(different) > 1 else ''}"
        why = f"{some} of {checkout.toplevel} differ{'' if len(different) > 1 else 's'} from the commit ({named})"
        return Code("", _as_it_lies(why) + "; commit, and give it the commit with `keepstep update HEAD --reason …`")
    return Code(revision, f"code: commit {revision[:12]} of {checkout.toplevel}, which later edits there do not reach")


def _as_it_lies(why: str) -> str:
    return f"code: runs as it lies, and can't be rolled back: {why}"


async def asked_code(declared: JobDeclared, revision: str) -> Code:
    """The commit that a person means for a job that is declared. Raises GitFailed."""
    if not Path(declared.directory).is_dir():
        if FULL.match(revision):
            return Code(revision, f"{declared.directory or 'the job'} is not on this machine: the commit was not looked up")
        raise GitFailed(
            f"the job's folder {declared.directory!r} is not on this machine, so that {revision!r} can't be looked up; give the full commit"
        )
    return await code_at(declared.directory, declared.command, revision)


async def code_at(directory: str, command: Sequence[str], revision: str) -> Code:
    """The commit that `revision` means in the repository of a directory, if it has the job's script. Raises GitFailed."""
    commit = await resolve(directory, revision)
    script = script_of(directory, command)
    if not await holds(directory, commit, script):
        raise GitFailed(f"revision {commit[:12]} has no {script or 'such folder'} in {directory}")
    different = await changed(directory)
    without = f"; without the uncommitted changes of {len(different)} files there" if different else ""
    return Code(commit, f"code: commit {commit[:12]}{without}")


def script_of(directory: str, command: Sequence[str]) -> str:
    """The Python script of a command, from the job's directory; empty if it names none that lies below it."""
    word = next((word for word in command[1:] if word.endswith(".py")), "")
    path = Path(directory, word)
    inside = word and path.is_relative_to(directory) and ".." not in path.parts
    return str(path.relative_to(directory)) if inside else ""
