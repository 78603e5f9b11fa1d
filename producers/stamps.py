"""When a line was written, by its own word: the stamp as it stands there, for people to read. Pure; nothing is converted, since most
formats tell neither year nor zone. What belongs elsewhere: lines' other fields (kernel_lines.py)."""

from __future__ import annotations

import re

#: A stamp stands near the start; what follows later is the message's.
WITHIN = 160

_WALL = re.compile(
    r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:\b[^\W\d]{2,9}\.? )?\b[^\W\d]{3,5}\.? {1,2}\d{1,2} \d\d:\d\d:\d\d(?:\.\d{1,9})?(?: \d{4})?"
    r"|\b[A-Z][a-z]{2} \d\d \d{4} \d\d:\d\d:\d\d"
    r"|\b\d{1,2}/\d{1,2}/\d{2,4}[ ,]{1,2}\d\d:\d\d:\d\d"
    r"|\b[EWIF]\d{3,4} \d\d:\d\d:\d\d(?:\.\d{1,9})?"
)
_MONOTONIC = re.compile(r"\[ {0,11}(\d{1,12}\.\d{3,6})\]")


def stamp_of(text: str) -> str:
    """The line's wall-clock time as written, else its seconds since boot (`1843.308145 s`), else ''."""
    wall = _WALL.search(text, 0, WITHIN)
    if wall:
        return wall[0]
    since = _MONOTONIC.search(text, 0, WITHIN)
    return f"{since[1]} s" if since else ""
