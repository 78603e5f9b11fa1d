"""Slurm's hostlist expressions: `gpu-[01-16,20],login1`, `r[1-2]n[1-4]`. Pure and bounded."""

from __future__ import annotations

import re
from itertools import product

NODES_MAX = 200_000
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?\Z", re.ASCII)


class BadHostlist(ValueError):
    """Not a hostlist. One sentence."""


def expand(text: str, most: int = NODES_MAX) -> list[str]:
    """The names, in order. Raises BadHostlist."""
    names: list[str] = []
    for one in _split(text):
        names += _one(one, most - len(names))
    return names


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[begin:i])
            begin = i + 1
        if depth not in (0, 1):
            raise BadHostlist(f"the brackets of {text[:80]!r} don't match")
    if depth:
        raise BadHostlist(f"the brackets of {text[:80]!r} don't match")
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def _one(text: str, most: int) -> list[str]:
    pieces: list[list[str]] = []
    count, at = 1, 0
    for match in _PART.finditer(text):
        if match.start() != at:
            break
        at = match.end()
        pieces.append(_ranges(match[1], text, most) if match[1] is not None else [match[2]])
        count *= len(pieces[-1])
        if count > most:
            raise BadHostlist(f"{text[:80]!r} names more than {NODES_MAX} machines")
    if at != len(text) or not pieces:
        raise BadHostlist(f"{text[:80]!r} is no list of host names")
    return ["".join(parts) for parts in product(*pieces)]


def _ranges(text: str, whole: str, most: int) -> list[str]:
    found: list[str] = []
    for one in text.split(","):
        match = _RANGE.match(one.strip())
        if match is None:
            raise BadHostlist(f"{one[:40]!r} in {whole[:80]!r} is no number or range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadHostlist(f"the range {one[:40]!r} in {whole[:80]!r} goes backwards")
        if last - first >= most - len(found):
            raise BadHostlist(f"{whole[:80]!r} names more than {NODES_MAX} machines")
        width = len(match[1])
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found
