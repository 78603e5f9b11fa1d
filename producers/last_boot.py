"""What earlier boots left of their end: pstore's records (also where systemd moved them) and kdump's texts. A reader with a root, and
pure judgement of a text. Each record is told once ever; which were told is kept in the state folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from events.envelope import TEXT_MAX
from events.host import LastBoot

#: Folders below the root, the names in them that hold a kernel's last lines, and how deep.
PLACES = (
    ("sys/fs/pstore", re.compile(r"(?:dmesg|console)-")),
    ("var/lib/systemd/pstore", re.compile(r"dmesg")),
    ("var/crash", re.compile(r"(?:vmcore-)?dmesg")),
)
DEPTH_MAX, ENTRIES_MAX, RECORDS_MAX = 3, 512, 8
TAIL_BYTES = 64 * 1024
TOLD_MAX = 512
_FILE = "last_boots.json"

_PANIC = re.compile(
    r"Kernel panic - not syncing[^\n]*|\bOops: [^\n]*|BUG: [^\n]*|Unable to handle kernel [^\n]*|general protection fault[^\n]*"
    r"|watchdog: BUG: [^\n]*|NMI watchdog: [^\n]*LOCKUP[^\n]*|Machine check[^\n]*(?:fatal|Fatal)[^\n]*"
)


def read(text: str) -> tuple[bool, str]:
    """Whether a kernel's last lines tell of its end by a fault, and the part to be quoted: from the first telling line on."""
    found = _PANIC.search(text)
    if not found:
        return False, text[-1024:]
    begin = text.rfind("\n", 0, found.start()) + 1
    return True, text[begin : begin + 2048]


class LastBoots:
    def __init__(self, state_dir: Path, wall_ns: int, *, root: Path = Path("/")) -> None:
        self._told_path = state_dir / _FILE
        self._root = root
        self._wall_ns = wall_ns
        self._told = self._load()
        #: Why a place could not be looked into.
        self.blind: dict[str, str] = {}

    def news(self) -> list[LastBoot]:
        """Records that were not told yet, oldest first, a few at most. Never raises. To be followed by `told`."""
        found: list[tuple[float, str, Path]] = []
        for place, name in PLACES:
            for path in self._below(self._root / place, DEPTH_MAX):
                if name.match(path.name):
                    try:
                        status = path.stat()
                    except OSError:
                        continue
                    key = f"{path.relative_to(self._root)} {int(status.st_mtime)}"
                    if key not in self._told:
                        found.append((status.st_mtime, key, path))
        out: list[LastBoot] = []
        for modified_s, key, path in sorted(found)[-RECORDS_MAX:]:
            try:
                with open(path, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                    text = file.read(TAIL_BYTES).decode("utf-8", "replace")
            except OSError as error:
                self.blind[str(path)] = error.strerror or str(error)
                continue
            panic, quoted = read(text)
            self._told[key] = None
            age_s = self._wall_ns / 1e9 - modified_s
            shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in quoted)[: TEXT_MAX // 2]
            out.append(LastBoot(source=str(path)[:TEXT_MAX], panic=panic, text=shown, age_s=max(-1.0, age_s)))
        for _, key, _ in found:  # those that were too many are not told later either
            self._told[key] = None
        return out

    def told(self) -> None:
        """Remembers what `news` gave."""
        temporary = self._told_path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(list(self._told)[-TOLD_MAX:]))
            temporary.replace(self._told_path)
        except OSError:
            pass  # told again after the next start, rather than never

    def _load(self) -> dict[str, None]:
        try:
            value = json.loads(self._told_path.read_text())
            return dict.fromkeys(str(key) for key in value)
        except (OSError, ValueError, TypeError):
            return {}

    def _below(self, folder: Path, depth: int) -> Iterator[Path]:
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)[:ENTRIES_MAX]
                folders = [Path(e.path) for e in listed if e.is_dir(follow_symlinks=False)]
                files = [Path(e.path) for e in listed if e.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return
        except OSError as error:
            self.blind[str(folder)] = error.strerror or str(error)
            return
        yield from files
        if depth > 1:
            for path in folders:
                yield from self._below(path, depth - 1)
