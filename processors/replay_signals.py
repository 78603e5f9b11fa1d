"""Replay's first stage: fold the telemetry again and hold the claims that follow against those that stand in the ledger, by key and
in order, byte for byte. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from events.ports import Record
from events.registry import Malformed, canonical, parse
from events.subjects import is_clocks
from processors.detector import Detector, PartitionFold


@dataclass(frozen=True, slots=True)
class ClaimDivergence:
    """The first claim of a key that differs. `recorded` or `derived` is empty where there is none."""

    detector: str
    key: str
    recorded: str
    derived: str


@dataclass(slots=True)
class ClaimsReplayed:
    """`pending`: claims that follow from the last observations and did not reach the ledger before it ends."""

    observations: int = 0
    claims: int = 0
    refused: int = 0
    pending: int = 0
    divergence: ClaimDivergence | None = None
    derived: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return self.divergence is None


def replay_signals(detector: Detector[Any], telemetry: Iterable[Record], ledger: Iterable[Record]) -> ClaimsReplayed:
    """Holds one detector's claims against the ledger's. The telemetry must be whole from the stream's first record."""
    result = ClaimsReplayed()
    folds: dict[str, PartitionFold[Any]] = {}
    for record in telemetry:
        partition = record.subject.partition(".")[2].partition(".")[0]
        fold = folds.get(partition) or folds.setdefault(partition, PartitionFold(detector))
        result.observations += not is_clocks(record.subject)
        out, bad = fold.feed(record)
        result.refused += bad is not None
        for one in out:
            result.derived.setdefault((detector.name, one.event.subject), []).append(canonical(one.event))
    recorded = _recorded(detector.name, ledger)
    for key in sorted({*recorded, *result.derived}):
        have, want = recorded.get(key, []), result.derived.get(key, [])
        result.claims += len(have)
        for i, data in enumerate(have):
            derived = want[i] if i < len(want) else b""
            if data != derived and result.divergence is None:
                result.divergence = ClaimDivergence(key[0], key[1], data.decode("utf-8", "replace"), derived.decode())
        result.pending += max(0, len(want) - len(have))
    return result


def _recorded(name: str, ledger: Iterable[Record]) -> dict[tuple[str, str], list[bytes]]:
    """The detector's claims as they stand, by key; a claim that was appended twice (the same id) counts once."""
    source, seen = f"detector/{name}", set[str]()
    found: dict[tuple[str, str], list[bytes]] = {}
    for record in ledger:
        parts = record.subject.split(".")
        if len(parts) != 4 or parts[2] != "detector" or parts[3] == "detector_started":
            continue
        try:
            event = parse(record.data)
        except Malformed:
            continue
        if event.source == source and event.id not in seen:
            seen.add(event.id)
            found.setdefault((name, event.subject), []).append(record.data)
    return found
