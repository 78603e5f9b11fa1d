"""Code revisions of jobs on one node: a commit of the repository that a job's directory lies in, checked out beside it, to be run as if
it lay there. See infra/decisions/171-revisions-beside-the-checkout.md.

    revisions/<checkout>/repository/        ours, bare and without objects: it borrows the checkout's
    revisions/<checkout>/trees/<name>/      a detached worktree of one commit
    revisions/<checkout>/trees/<name>.json  written when the worktree is whole: its commit, and what was linked into it

The job's own repository is only read. What lies in its checkout and not in git (data, built extensions, checkpoints) is linked into
the worktree, so that a revision runs where the job's code was changed in place, as far as the job can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from actuators.files import load, save
from actuators.git import FULL, LIMIT_S, Checkout, GitFailed, checkout_of, git, unknown, untracked
from events.action import NodeCommand

#: Worktrees that nothing runs in and the job left nothing in: more are removed, those used last stay.
TREES_KEPT = 4
#: More lies around in a checkout than a job can need: it is told, not linked.
LINKS_MAX = 2000
_CACHES = ("__pycache__/", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/")
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d{1,15})\n")
_LFS_BYTES_MAX = 1024


class RevisionFailed(Exception):
    """A revision can't be run here: one sentence. `again`: it may go better if it is simply tried again."""

    def __init__(self, sentence: str, *, again: bool = False) -> None:
        super().__init__(sentence)
        self.again = again


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole worktree of `commit`. `links`: what was linked into it, from its root."""

    path: str
    commit: str
    links: frozenset[str]


class Revisions:
    """The revisions of one node. `in_use()`: directories that processes of jobs run in. `boot_id`: what another boot left may be half on
    disk, and is not run again."""

    def __init__(
        self,
        folder: Path,
        in_use: Callable[[], Collection[str]],
        *,
        boot_id: str = "",
        limit_s: float = LIMIT_S,
        kept: int = TREES_KEPT,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._in_use, self._boot_id, self._limit_s, self._kept = in_use, boot_id, limit_s, kept
        self._locks: dict[str, asyncio.Lock] = {}
        self._trees: dict[tuple[str, str, str], tuple[Checkout, Tree]] = {}
        self._pruning: asyncio.Task[None] | None = None

    async def at(self, command: NodeCommand) -> NodeCommand:
        """The command as it is to be run at its revision; itself where it names none. Raises RevisionFailed."""
        if not command.revision:
            return command
        try:
            checkout, tree = await self._tree(command)
        except GitFailed as error:
            raise RevisionFailed(_because(command.revision, str(error)), again=error.again) from None
        except OSError as error:
            said = f"{error.filename or self.folder}: {error.strerror or error}"
            raise RevisionFailed(_because(command.revision, said), again=True) from None
        return moved(command, checkout, tree.path)

    async def close(self) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
            await asyncio.gather(self._pruning, return_exceptions=True)

    # Making

    async def _tree(self, command: NodeCommand) -> tuple[Checkout, Tree]:
        directory, revision = command.directory, command.revision
        if not FULL.match(revision):
            raise GitFailed("that is no full commit")
        key = (command.job, directory, revision)
        known = self._trees.get(key)
        if known is not None and os.path.isdir(known[1].path):
            self._used(known[1])
            return known
        checkout = await checkout_of(directory)
        home = (
            self.folder / sha256(os.fsencode("\0".join((checkout.toplevel, checkout.common, self._boot_id)))).hexdigest()[:16]
        )
        async with self._lock(home):
            tree = next((tree for tree in _trees_in(home) if tree.commit == revision), None)
            if tree is None:
                tree = await self._make(home, checkout, revision)
            else:  # of an earlier job, or of an agent before this one
                tree = await self._linked(home, checkout, tree)
        inside = os.path.join(tree.path, checkout.prefix)
        if not os.path.isdir(inside):
            raise GitFailed(f"it has no folder {checkout.prefix.rstrip('/')}")
        if not _within(inside, tree.path):
            raise GitFailed(f"{directory} is not under git")
        self._used(tree)
        if len(self._trees) >= 64:
            self._trees.clear()
        self._trees[key] = checkout, tree
        self._prune_soon()
        return checkout, tree

    async def _make(self, home: Path, checkout: Checkout, revision: str) -> Tree:
        ours = await self._borrow(home, checkout)
        try:
            await git("cat-file", "-e", f"{revision}^{{commit}}", at=str(ours), alone=str(home), limit_s=self._limit_s)
        except GitFailed as error:
            raise error if error.again else GitFailed(unknown(checkout, revision)) from None
        path = home / "trees" / f"{revision[:12]}-{secrets.token_hex(4)}"
        try:
            arguments = ("worktree", "add", "--detach", "--force", str(path), revision)
            await git(*arguments, at=str(ours), alone=str(home), limit_s=self._limit_s)
            await self._fill(home, checkout, path)
            tree = Tree(str(path), revision, frozenset())
            return await self._linked(home, checkout, tree)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    async def _borrow(self, home: Path, checkout: Checkout) -> Path:
        """Our repository of a checkout: empty, with the checkout's objects for its own."""
        ours = home / "repository"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (ours / "HEAD").exists():
            form = () if checkout.object_format == "sha1" else (f"--object-format={checkout.object_format}",)
            arguments = ("init", "--quiet", "--bare", "--template=", *form, str(ours))
            await git(*arguments, at=str(home), alone=str(home), limit_s=self._limit_s)
        (ours / "objects" / "info").mkdir(exist_ok=True)
        (ours / "objects" / "info" / "alternates").write_bytes(os.fsencode(checkout.objects) + b"\n")
        with contextlib.suppress(OSError):  # where history ends, so that a job that asks for it is not told of damage
            shutil.copyfile(Path(checkout.common, "shallow"), ours / "shallow")
        return ours

    async def _fill(self, home: Path, checkout: Checkout, path: Path) -> None:
        """What a worktree of git's own lacks: submodules and files kept in LFS. Both from the checkout, or it is refused."""
        entries = await self._in_tree(home, path, "ls-files", "-z", "--stage")
        for entry in entries:
            about, _, name = entry.partition("\t")
            if about.startswith("160000 "):
                await self._submodule(checkout, path, name, about.split()[1])
        for name in await self._in_tree(home, path, "ls-files", "-z", ":(attr:filter=lfs)"):
            await asyncio.to_thread(_from_lfs, checkout, path / name, name)

    async def _in_tree(self, home: Path, path: Path, *arguments: str) -> list[str]:
        out = await git(*arguments, at=str(path), alone=str(home), limit_s=self._limit_s)
        return [os.fsdecode(entry) for entry in out.split(b"\0") if entry]

    async def _submodule(self, checkout: Checkout, path: Path, name: str, commit: str) -> None:
        there = os.path.join(checkout.toplevel, name)
        head = ""
        with contextlib.suppress(GitFailed):
            if (await checkout_of(there)).toplevel == os.path.realpath(there):
                head = (await git("rev-parse", "HEAD", at=there, limit_s=self._limit_s)).decode().strip()
        if head != commit:
            has = f"has {head[:12]}" if head else "has it not checked out"
            raise GitFailed(f"it wants the submodule {name} at {commit[:12]}, and the checkout {has}")
        with contextlib.suppress(OSError):
            (path / name).rmdir()
        (path / name).symlink_to(there)

    async def _linked(self, home: Path, checkout: Checkout, tree: Tree) -> Tree:
        """With links to what lies in the checkout and not in git; from then on the tree counts as whole."""
        names = [
            name
            for name in await untracked(checkout.toplevel)
            if not name.endswith(_CACHES) and not _within(str(self.folder), os.path.join(checkout.toplevel, name))
        ]
        links = set(tree.links)
        for name in names[:LINKS_MAX]:
            name = name.rstrip("/")
            if not name or name == ".git" or name in links:
                continue
            link = Path(tree.path, name)
            with contextlib.suppress(
                FileExistsError, NotADirectoryError, FileNotFoundError
            ):  # the revision has something of its own
                if _within(str(link.parent), tree.path) and not os.path.lexists(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(os.path.join(checkout.toplevel, name))
                    links.add(name)
        whole = Tree(tree.path, tree.commit, frozenset(links))
        save(Path(tree.path + ".json"), {"commit": tree.commit, "links": sorted(links)})
        return whole

    # Removing

    def _used(self, tree: Tree) -> None:
        with contextlib.suppress(OSError):
            os.utime(tree.path + ".json", ns=(time.time_ns(), time.time_ns()))

    def _prune_soon(self) -> None:
        if self._pruning is None or self._pruning.done():
            self._pruning = asyncio.create_task(self.prune(), name="prune revisions")

    async def prune(self) -> None:
        """Removes worktrees that are half made, and those not used for longest beyond the kept number; never one that something runs in,
        nor one in which a job left files of its own."""
        homes = _folders(self.folder)
        whole: list[tuple[int, Path, Tree]] = []
        for home in homes:
            async with self._lock(home):
                trees = _trees_in(home)
                kept = {tree.path for tree in trees}
                for path in _folders(home / "trees"):
                    if str(path) not in kept:
                        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                whole += [(_used_ns(tree), home, tree) for tree in trees]
        for _, home, tree in sorted(whole, key=lambda one: one[0], reverse=True)[self._kept :]:
            async with self._lock(home):
                with contextlib.suppress(GitFailed, OSError):
                    if not any(_within(place, tree.path) for place in self._in_use()) and not await self._left(home, tree):
                        await self._remove(home, tree)
        for home in homes:
            async with self._lock(home):
                if not _folders(home / "trees"):
                    await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)

    def _lock(self, home: Path) -> asyncio.Lock:
        return self._locks.setdefault(home.name, asyncio.Lock())

    async def _left(self, home: Path, tree: Tree) -> list[str]:
        """What a job left in a worktree."""
        found = await self._in_tree(home, Path(tree.path), "ls-files", "-z", "--others", "--directory", "--no-empty-directory")
        return [name for name in found if name.rstrip("/") not in tree.links and not name.endswith(_CACHES)]

    async def _remove(self, home: Path, tree: Tree) -> None:
        self._trees = {key: known for key, known in self._trees.items() if known[1].path != tree.path}
        os.unlink(tree.path + ".json")
        await asyncio.to_thread(shutil.rmtree, tree.path, ignore_errors=True)
        await git("worktree", "prune", at=str(home / "repository"), alone=str(home), limit_s=self._limit_s)


def moved(command: NodeCommand, checkout: Checkout, tree: str) -> NodeCommand:
    """The command with its directory, and the paths in its words and module path, in the worktree; its checkpoints stay where they are."""

    def there(path: str) -> str:
        """The counterpart in the worktree of a path in the checkout; the path itself where there is none, or only a link back."""
        head, name = os.path.split(os.path.normpath(os.path.join(command.directory, path)))
        real = os.path.join(os.path.realpath(head), name)
        if not _below(real, checkout.toplevel):
            return path
        counterpart = os.path.normpath(os.path.join(tree, os.path.relpath(real, checkout.toplevel)))
        return counterpart if os.path.exists(counterpart) and _within(counterpart, tree) else path

    def word(text: str) -> str:
        name, equals, value = text.partition("=")
        if equals and not os.path.isabs(text):
            return f"{name}={there(value)}" if os.path.isabs(value) else text
        return there(text) if os.path.isabs(text) else text

    environment = dict(command.environment)
    modules = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    if modules:  # also relative ones: a parked worker has taken them for folders of the checkout
        environment["PYTHONPATH"] = os.pathsep.join(there(part) if part else part for part in modules.split(os.pathsep))
    environment["KEEPSTEP_REVISION"] = command.revision
    return command.model_copy(
        update={
            "command": tuple(word(text) for text in command.command),
            "directory": os.path.join(tree, checkout.prefix).rstrip("/"),
            "environment": tuple(environment.items()),
            "checkpoints": os.path.join(command.directory, command.checkpoints) if command.checkpoints else "",
        }
    )


def _because(revision: str, said: str) -> str:
    return f"revision {revision[:12]} can't be run here: {said}"


def _trees_in(home: Path) -> list[Tree]:
    """The whole ones."""
    found = []
    for path in _folders(home / "trees"):
        value = load(Path(f"{path}.json"))
        if isinstance(value, dict) and isinstance(value.get("commit"), str) and (path / ".git").exists():
            found.append(Tree(str(path), value["commit"], frozenset(map(str, value.get("links", ())))))
    return found


def _folders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []


def _used_ns(tree: Tree) -> int:
    try:
        return os.stat(tree.path + ".json").st_mtime_ns
    except OSError:
        return 0


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _within(path: str, root: str) -> bool:
    """Links resolved."""
    return _below(os.path.realpath(path), os.path.realpath(root))


def _from_lfs(checkout: Checkout, file: Path, name: str) -> None:
    """Puts the content in the place of a pointer. Raises GitFailed, OSError."""
    with open(file, "rb") as opened:
        pointer = _LFS.match(opened.read(_LFS_BYTES_MAX + 1))
    if pointer is None:
        return
    oid = pointer[1].decode()
    kept = Path(checkout.common, "lfs", "objects", oid[:2], oid[2:4], oid)
    if not kept.is_file() or kept.stat().st_size != int(pointer[2]):
        raise GitFailed(
            f"its file {name} is kept in Git LFS, and the repository of {checkout.toplevel} lacks its content; fetch it there first"
        )
    mode = file.stat().st_mode
    fresh = file.with_name(file.name + ".lfs-new")
    shutil.copyfile(kept, fresh)
    os.chmod(fresh, mode)
    os.replace(fresh, file)
