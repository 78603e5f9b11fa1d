"""The folders that a job uses, looked at: room, inodes, whether they can be written to, whether an answer comes at all.

What a folder lies on is read from the mount table, which never hangs; its room is asked for through slow_reads.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from events.clock import NS
from events.envelope import NAME_MAX, TEXT_MAX
from events.host import Folder
from producers.host_probes import Mount, mount_of
from producers.slow_reads import Hung, SlowReads, Space, TooManyHang

FOLDERS_MAX = 32
#: For one folder's answer. NFS's own first retransmission comes after 60 s (0.6 s over UDP); a working server answers in ms.
ANSWER_S_MAX = 3.0
#: A folder that hangs is asked about again this often: each time may cost a child.
HUNG_AGAIN_S = 60.0
USES: tuple[str, ...] = get_args(Folder.model_fields["use"].annotation)


@dataclass(slots=True)
class _Known:
    space: Space | None = None
    was_writable: bool | None = None
    hung_since_ns: int = 0
    asked_ns: int = 0
    error: str = ""


class Folders:
    """Remembers, for as long as it lives, which were writable and since when one hangs."""

    def __init__(self, reads: SlowReads) -> None:
        self._reads = reads
        self._known: dict[str, _Known] = {}

    async def look(self, wanted: Iterable[tuple[str, str]], mounts: list[Mount], now_ns: int) -> tuple[Folder, ...]:
        """`wanted`: pairs of use and absolute path; a path twice counts once. Never raises."""
        paths = {path: use for use, path in reversed(list(wanted)) if path.startswith("/") and "\0" not in path}
        paths = dict(list(reversed(paths.items()))[:FOLDERS_MAX])
        self._known = {path: self._known.get(path, _Known()) for path in paths}
        out: list[Folder] = []
        for path, use in paths.items():
            known = self._known[path]
            await self._ask(path, known, now_ns)
            out.append(_folder(path, use if use in USES else "other", known, mount_of(path, mounts), now_ns))
        return tuple(out)

    async def _ask(self, path: str, known: _Known, now_ns: int) -> None:
        if known.hung_since_ns and now_ns - known.asked_ns < HUNG_AGAIN_S * NS:
            return
        known.asked_ns = now_ns
        try:
            known.space = await self._reads.space(path, ANSWER_S_MAX)
            known.error, known.hung_since_ns = "", 0
        except Hung:
            known.hung_since_ns = known.hung_since_ns or now_ns
        except TooManyHang as error:
            known.error = known.error if known.hung_since_ns else str(error)[:NAME_MAX]
        except OSError as error:
            known.space, known.hung_since_ns = None, 0
            known.error = (error.strerror or str(error))[:NAME_MAX]


def _folder(path: str, use: str, known: _Known, mount: Mount | None, now_ns: int) -> Folder:
    read_only = mount.read_only if mount else ""
    if known.was_writable is None and mount is not None:
        known.was_writable = not read_only
    return Folder(
        path=path[:TEXT_MAX],
        use=use,
        mount=mount.point[:TEXT_MAX] if mount else "",
        filesystem=mount.filesystem[:NAME_MAX] if mount else "",
        local=mount.local if mount else False,
        total_bytes=known.space.total_bytes if known.space else -1,
        free_bytes=known.space.free_bytes if known.space else -1,
        inodes_free=round(known.space.inodes_free, 4) if known.space and known.space.inodes_free is not None else None,
        read_only=read_only,
        was_writable=bool(known.was_writable),
        # The answer was waited for before it was known to hang.
        hung_s=(now_ns - known.hung_since_ns) / NS + ANSWER_S_MAX if known.hung_since_ns else 0.0,
        error=known.error,
    )
