"""Git as keepstep uses it: reads checkouts of users', and writes in repositories of its own only. Nothing is fetched, no hook and no
program that a repository names is run, the caller's GIT_* variables are not obeyed, and each call has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

FULL = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")
LIMIT_S = 60.0
OUTPUT_BYTES_MAX = 64 << 20
#: Of what git says, so much is passed on.
SAID_CHARACTERS_MAX = 300

#: Nothing is asked on a terminal, written by the way, or brought in from elsewhere.
_SET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "LC_ALL": "C",
}
#: A repository's own settings may name programs to be run by a mere look.
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")


class GitFailed(Exception):
    """One sentence. `again`: it may go better if it is simply tried again."""

    def __init__(self, sentence: str, *, again: bool = False) -> None:
        super().__init__(sentence)
        self.again = again


@dataclass(frozen=True, slots=True)
class Checkout:
    """The checkout that a directory lies in: `toplevel` its root, `prefix` the directory's path in it ("" or "a/b/"), `common` the
    repository's folder, `objects` where its objects lie."""

    toplevel: str
    prefix: str
    common: str
    objects: str
    object_format: str
    shallow: bool


async def git(*arguments: str, at: str, alone: str = "", limit_s: float = LIMIT_S) -> bytes:
    """What git printed. `at`: the directory it is run in. `alone`: a folder in place of the home, so that nobody's configuration is read
    (without it the users' and the system's own is: it may say whose repositories are trusted). Raises GitFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _SET
    if alone:
        environment |= {"HOME": alone, "XDG_CONFIG_HOME": alone, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            *_QUIET,
            *arguments,
            cwd=at,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=1 << 20,
        )
    except FileNotFoundError:
        missing = not Path(at).is_dir()
        raise GitFailed(f"there is no folder {at} here" if missing else "git is not installed here") from None
    except NotADirectoryError:
        raise GitFailed(f"{at} is no folder") from None
    except OSError as error:
        raise GitFailed(f"git can't be run in {at} ({error.strerror or error})") from None
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    except TimeoutError:
        raise GitFailed(f"git {arguments[0]} did not end within {limit_s:g} s", again=True) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        raise GitFailed(
            sentence_of(err.decode("utf-8", "replace"), at) or f"git {arguments[0]} ended with {process.returncode}"
        )
    if len(out) > OUTPUT_BYTES_MAX:
        raise GitFailed(f"git {arguments[0]} printed more than {OUTPUT_BYTES_MAX >> 20} MiB")
    return out


#: What git says, and what that means to whoever runs a job.
_SENTENCES = (
    (
        re.compile(r"detected dubious ownership in repository at '(.+)'"),
        "the repository {0} belongs to another user, whom git does not trust here; if you do, run there: "
        "git config --system --add safe.directory {0}",
    ),
    (re.compile(r"not a git repository"), "{at} lies in no git repository"),
    (re.compile(r"must be run in a work tree"), "{at} lies in a git repository without a checkout"),
    (re.compile(r"No space left on device"), "there is no room left on the disk for it"),
)


def sentence_of(said: str, at: str) -> str:
    """Git's error in one sentence."""
    for pattern, sentence in _SENTENCES:
        if match := pattern.search(said):
            return sentence.format(*match.groups(), at=at)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "")
    return last.removeprefix("fatal: ").removeprefix("error: ")[:SAID_CHARACTERS_MAX]


async def checkout_of(directory: str) -> Checkout:
    """Raises GitFailed."""
    if not directory:
        raise GitFailed("the job names no directory")
    # The format comes last: a git before 2.25 does not know the option, and prints it.
    asked = ("--show-toplevel", "--git-common-dir", "--git-path", "objects", "--is-shallow-repository", "--show-prefix")
    out = await git("rev-parse", *asked, "--show-object-format", at=directory)
    toplevel, common, objects, shallow, prefix, form = os.fsdecode(out).split("\n")[:6]
    return Checkout(
        toplevel=toplevel,
        prefix=prefix,
        common=os.path.realpath(os.path.join(directory, common)),
        objects=os.path.realpath(os.path.join(directory, objects)),
        object_format=form if form in ("sha1", "sha256") else "sha1",
        shallow=shallow == "true",
    )


async def resolve(directory: str, revision: str) -> str:
    """The full commit that a revision (a branch, a tag, a part of a hash) means in the repository of `directory`. Raises GitFailed."""
    checkout = await checkout_of(directory)
    try:
        if revision.startswith("-"):
            raise GitFailed("")
        out = await git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", at=directory)
    except GitFailed as error:
        if error.again:
            raise
        raise GitFailed(unknown(checkout, revision)) from None
    return out.decode().strip()


def unknown(checkout: Checkout, revision: str) -> str:
    shallow = ", which is a shallow clone" if checkout.shallow else ""
    return f"the repository of {checkout.toplevel}{shallow} has no commit {revision[:80]}; fetch it there first"


async def changed(directory: str) -> tuple[str, ...]:
    """Files under git of the whole checkout that differ from its commit, from the root of the checkout. Raises GitFailed."""
    out = await git("status", "--porcelain=v1", "-z", "--untracked-files=no", "--no-renames", at=directory)
    return tuple(os.fsdecode(entry[3:]) for entry in out.split(b"\0") if entry)


async def untracked(toplevel: str) -> tuple[str, ...]:
    """What lies in a checkout and not in git, ignored or not, whole folders as one with a slash at the end. Raises GitFailed."""
    out = await git("ls-files", "-z", "--others", "--directory", at=toplevel)
    return tuple(os.fsdecode(entry) for entry in out.split(b"\0") if entry)


async def tracked(directory: str, *paths: str) -> tuple[str, ...]:
    """Of `paths` (relative to `directory`), the files that git knows, folders with all in them. Raises GitFailed."""
    out = await git("ls-files", "-z", "--", *paths, at=directory)
    return tuple(os.fsdecode(entry) for entry in out.split(b"\0") if entry)


async def holds(directory: str, commit: str, path: str) -> bool:
    """Whether a commit has a file, by its path from `directory`. Raises GitFailed."""
    try:
        await git("cat-file", "-e", f"{commit}:./{path}", at=directory)
    except GitFailed as error:
        if error.again:
            raise
        return False
    return True
