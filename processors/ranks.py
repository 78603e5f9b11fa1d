"""What is known of each rank of an attempt, in a list that is cheap to change one entry of at 100,000 ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

#: Ranks of one attempt; a number beyond it is no rank.
RANKS_MAX = 262_144
CHUNK = 256

#: How a rank ended.
RUNS, ENDED_WELL, FAILED, ASKED = 0, 1, 2, 3
#: States of a process that make no progress by themselves: stopped, traced, a zombie, dead, in uninterruptible sleep, gone.
STUCK = frozenset("TtZXxD-")


class Rank(NamedTuple):
    """`progress` -1 and `phase` '' until its hook was heard; `step`: the last it finished in this attempt, -1 for none.
    `moved_ns`: when its progress grew last; `hook_ns`: when its hook was heard last; `state`: a letter of STUCK, or '' (it runs,
    or nothing is known); `exit`: how it ended."""

    node: str = ""
    progress: int = -1
    step: int = -1
    phase: str = ""
    moved_ns: int = 0
    hook_ns: int = 0
    state: str = ""
    exit: int = RUNS


T = TypeVar("T")
#: Something by rank's number, in chunks, so that one change copies two short tuples. None: nothing heard.
ByRank = tuple[tuple[T | None, ...], ...]
Ranks = ByRank[Rank]

_EMPTY_CHUNK: tuple[None, ...] = (None,) * CHUNK


def get(ranks: ByRank[T], rank: int) -> T | None:
    chunk = rank // CHUNK
    return ranks[chunk][rank % CHUNK] if chunk < len(ranks) else None


def put(ranks: ByRank[T], rank: int, value: T) -> ByRank[T]:
    chunk, place = divmod(rank, CHUNK)
    if chunk >= len(ranks):
        ranks = ranks + (_EMPTY_CHUNK,) * (chunk + 1 - len(ranks))
    old = ranks[chunk]
    return (*ranks[:chunk], (*old[:place], value, *old[place + 1 :]), *ranks[chunk + 1 :])


def each(ranks: ByRank[T]) -> Iterator[tuple[int, T]]:
    """Those that were heard, in order."""
    for c, chunk in enumerate(ranks):
        for i, value in enumerate(chunk):
            if value is not None:
                yield c * CHUNK + i, value


def dump(ranks: Ranks) -> dict[str, Any]:
    """Plain JSON: names of nodes and phases once, then a row a rank."""
    nodes: dict[str, int] = {}
    phases: dict[str, int] = {}
    rows = [
        [n, nodes.setdefault(r.node, len(nodes)), r.progress, r.step, phases.setdefault(r.phase, len(phases)), r.moved_ns, r.hook_ns,
         r.state, r.exit]
        for n, r in each(ranks)
    ]  # fmt: skip
    return {"nodes": list(nodes), "phases": list(phases), "rows": rows}


def load(value: Any) -> Ranks:
    nodes, phases = value["nodes"], value["phases"]
    chunks: list[list[Rank | None]] = []
    for number, node, progress, step, phase, moved_ns, hook_ns, state, exit_ in value["rows"]:
        chunk, place = divmod(number, CHUNK)
        while len(chunks) <= chunk:
            chunks.append(list(_EMPTY_CHUNK))
        chunks[chunk][place] = Rank(nodes[node], progress, step, phases[phase], moved_ns, hook_ns, state, exit_)
    return tuple(tuple(chunk) for chunk in chunks)
