"""Sets of ranks as short text: `0-7,16,24-56:8` is 0 to 7, 16, and every eighth from 24 to 56. Pure.

Process groups of a large job have hundreds of members in even steps; written out they would not fit into a message."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z")
#: No job has more ranks; a text that claims more is refused.
RANKS_MAX = 1 << 20


def compact(ranks: Iterable[int]) -> str:
    """Ascending, each once."""
    left = sorted(set(ranks))
    parts, at = [], 0
    while at < len(left):
        end = at + 1
        if end < len(left):
            step = left[end] - left[at]
            while end + 1 < len(left) and left[end + 1] - left[end] == step:
                end += 1
            if end - at >= 2 or step == 1:
                parts.append(f"{left[at]}-{left[end]}" + (f":{step}" if step > 1 else ""))
                at = end + 1
                continue
        parts.append(str(left[at]))
        at += 1
    return ",".join(parts)


def expand(text: str) -> tuple[int, ...]:
    """Raises ValueError for what `compact` can't have written."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _PART.match(part)
        if match is None:
            raise ValueError(f"{part!r} is no run of ranks")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step < 1 or len(found) + (last - first) // max(step, 1) > RANKS_MAX:
            raise ValueError(f"{part!r} is no run of ranks")
        found.extend(range(first, last + 1, step))
    return tuple(found)
