"""The detector "node": everything that judges a single machine, put together of parts that know nothing of each other. Pure.

A part is a detector of its own that names the kinds of fact it reads. Its state is stored under its name; to add a part is to add
it to `node_detector`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from events.envelope import Fact
from processors.catalogue import Catalogue
from processors.detector import Claim, PartitionClock, Seen
from processors.gpu_health import GpuHealth
from processors.host_health import HostHealth
from processors.network_health import NetworkHealth
from processors.node_health import NodeHealth

State = tuple[Any, ...]


class Part(Protocol):
    """A detector of one aspect of a node (processors.detector.Detector, keyed by node). `reads`: the kinds of fact that it is shown;
    None for all. Ticks come only to parts that read them."""

    name: str
    reads: frozenset[type[Fact]] | None

    def empty(self, key: str) -> Any: ...
    def detect(self, state: Any, clock: PartitionClock, seen: Seen) -> tuple[Any, tuple[Claim, ...]]: ...
    def dump(self, state: Any) -> Any: ...
    def load(self, key: str, value: Any) -> Any: ...


@runtime_checkable
class Knows(Protocol):
    """A part that knows which observations came before."""

    def repeats(self, state: Any, seen: Seen) -> bool: ...


class NodeDetector:
    """All parts as one. The state is a tuple, a part's at its place; a part that has nothing to say yet has None. What came before by
    the word of a part that knows (`repeats`) is shown to that part alone: two words of one event are no two events."""

    name = "node"

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._everywhere = tuple(i for i, part in enumerate(parts) if part.reads is None)
        self._knows: int
        self._repeats: Callable[[Any, Seen], bool] | None
        self._knows, self._repeats = next(
            ((i, part.repeats) for i, part in enumerate(parts) if isinstance(part, Knows)), (-1, None)
        )
        kinds = {kind for part in parts if part.reads is not None for kind in part.reads}
        self._readers = {
            kind: tuple(i for i, part in enumerate(parts) if part.reads is None or kind in part.reads) for kind in kinds
        }

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> State:
        return tuple(part.empty(key) for part in self.parts)

    def detect(self, state: State, clock: PartitionClock, seen: Seen) -> tuple[State, tuple[Claim, ...]]:
        said: tuple[Claim, ...] = ()
        after = state
        readers = self._readers.get(type(seen.event.data), self._everywhere)
        knows = self._knows
        if self._repeats and len(readers) > 1 and seen.node and self._repeats(state[knows], seen):
            readers = (knows,)
        for i in readers:
            own, claims = self.parts[i].detect(after[i], clock, seen)
            if own is not after[i]:
                after = (*after[:i], own, *after[i + 1 :])
            if claims:
                said = (*said, *claims)
        return after, said

    def dump(self, state: State) -> Any:
        return {part.name: part.dump(own) for part, own in zip(self.parts, state, strict=True)}

    def load(self, key: str, value: Any) -> State:
        """A part that the stored state does not know yet begins empty."""
        return tuple(part.load(key, value[part.name]) if part.name in value else part.empty(key) for part in self.parts)


def node_detector(catalogue: Catalogue) -> NodeDetector:
    return NodeDetector((NodeHealth(catalogue), NetworkHealth(), HostHealth(), GpuHealth(catalogue)))
