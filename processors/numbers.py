"""A producer's running numbers: what came twice, what has not come. Pure, and bounded whatever comes.

Observations may arrive out of order (many in flight, or a spool that drains beside live ones), so a hole is no gap yet: it is
reported once it is old, and what fills it later is still taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SOURCES_MAX = 16
HOLES_MAX = 8


@dataclass(frozen=True, slots=True)
class Hole:
    """Numbers `first` to `last` have not come. `since_ns`: broker time when that was noticed; `noted`: it is reported."""

    first: int
    last: int
    since_ns: int
    noted: bool = False


class Numbers(NamedTuple):
    """One start of one producer: `source` names both. `last`: its highest number."""

    source: str
    last: int
    holes: tuple[Hole, ...] = ()


def advanced(all_: tuple[Numbers, ...], source: str, number: int, now_ns: int) -> tuple[Numbers, ...] | None:
    """The numbers after one observation; None if it came before. Number 0 (not numbered) is always new."""
    if all_:
        first = all_[0]
        if first.source == source:
            if number == first.last + 1:
                return (Numbers(source, number, first.holes), *all_[1:])
            after = _after(first, number, now_ns)
            return None if after is None else (after, *all_[1:])
    if number == 0:
        return all_
    for i, entry in enumerate(all_):
        if entry.source == source:
            after = _after(entry, number, now_ns)
            return None if after is None else (after, *all_[:i], *all_[i + 1 :])
    return (Numbers(source, number), *all_[: SOURCES_MAX - 1])


def restarted(all_: tuple[Numbers, ...], source: str, number: int) -> tuple[Numbers, ...]:
    """After a producer said that it starts: its numbers count from here, also under a source that was used before."""
    return (Numbers(source, number), *[entry for entry in all_ if entry.source != source][: SOURCES_MAX - 1])


def overdue(all_: tuple[Numbers, ...], before_ns: int) -> tuple[tuple[Numbers, ...], list[tuple[str, int, int]]]:
    """Holes noticed before a time and not reported yet, as (source, first, last); and the numbers with these marked."""
    missing: list[tuple[str, int, int]] = []
    out: list[Numbers] = []
    for entry in all_:
        holes: list[Hole] = []
        for hole in entry.holes:
            if not hole.noted and hole.since_ns <= before_ns:
                missing.append((entry.source, hole.first, hole.last))
                hole = Hole(hole.first, hole.last, hole.since_ns, True)
            holes.append(hole)
        out.append(Numbers(entry.source, entry.last, tuple(holes)) if holes else entry)
    return (tuple(out), missing) if missing else (all_, missing)


def _after(entry: Numbers, number: int, now_ns: int) -> Numbers | None:
    if number == 0:
        return entry
    if number > entry.last:
        if number == entry.last + 1:
            return Numbers(entry.source, number, entry.holes)
        return Numbers(entry.source, number, _bounded((*entry.holes, Hole(entry.last + 1, number - 1, now_ns))))
    for i, hole in enumerate(entry.holes):
        if hole.first <= number <= hole.last:
            parts = [
                Hole(first, last, hole.since_ns, hole.noted)
                for first, last in ((hole.first, number - 1), (number + 1, hole.last))
                if first <= last
            ]
            return Numbers(entry.source, entry.last, _bounded((*entry.holes[:i], *parts, *entry.holes[i + 1 :])))
    return None


def _bounded(holes: tuple[Hole, ...]) -> tuple[Hole, ...]:
    """Too many holes: the oldest two become one, with what came between them. Rather something twice than lost."""
    while len(holes) > HOLES_MAX:
        one, two = holes[0], holes[1]
        holes = (Hole(one.first, two.last, one.since_ns, one.noted and two.noted), *holes[2:])
    return holes
