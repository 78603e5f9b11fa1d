"""Many literals at once: one automaton (Aho-Corasick) over a line or over a whole chunk of a file. Pure.

ASCII case does not count: needles and what is searched are lowered. What the literals stand for is the catalogue's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ahocorasick_rs import BytesAhoCorasick, Implementation


class Literals:
    """`needles`: lowered literals (none with a line break), each with the rows it stands for."""

    def __init__(
        self,
        needles: Mapping[str, tuple[int, ...]],
        ordinary: Iterable[str] = (),
        stems: Iterable[str] = (),
        *,
        fast: bool = False,
    ) -> None:
        self.literals = tuple(needles)
        names = {name.lower().strip() for name in ordinary}
        self._ordinary = frozenset(i for i, literal in enumerate(self.literals) if literal.strip() in names)
        self._stems = BytesAhoCorasick([stem.lower().encode() for stem in stems] or [b"\x00"])
        self._rows = tuple(needles.values())
        self._xid = self.literals.index("xid") if "xid" in needles else -1
        # Contiguous: a tenth of a deterministic automaton's memory, which an agent need not have.
        kind = Implementation.DFA if fast else Implementation.ContiguousNFA
        self._automaton = BytesAhoCorasick([literal.encode() for literal in self.literals], implementation=kind)

    def any_in(self, line: str) -> bool:
        return bool(self._automaton.find_matches_as_indexes(line.lower().encode("utf-8", "surrogatepass")))

    def rows_in(self, low: str) -> tuple[list[int], bool]:
        """The rows of whose literals one stands in the lowered line, in order, and whether the word Xid does."""
        hits = {
            hit[0] for hit in self._automaton.find_matches_as_indexes(low.encode("utf-8", "surrogatepass"), overlapping=True)
        }
        rows = {row for hit in hits for row in self._rows[hit]}
        return sorted(rows), self._xid in hits

    def spans(self, chunk: bytes) -> Iterator[tuple[int, int, int]]:
        """Start and end of each line of the chunk that holds a literal, and where its first one stands. A line with none but ordinary
        ones needs a stem besides."""
        low = chunk.lower()
        weak = self._ordinary
        start = end = first = -1
        strong = True
        for hit, at, _ in self._automaton.find_matches_as_indexes(low, overlapping=True):
            if at < end:
                strong = strong or hit not in weak
                continue
            if end >= 0 and (strong or self._stems.find_matches_as_indexes(low[start:end])):
                yield start, end, first
            start = low.rfind(b"\n", 0, at) + 1
            end = low.find(b"\n", at)
            if end < 0:
                end = len(low)
            first, strong = at, hit not in weak
        if end >= 0 and (strong or self._stems.find_matches_as_indexes(low[start:end])):
            yield start, end, first
