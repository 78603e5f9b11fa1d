"""What was found in logs, counted: by row, code and device, with the first and last time each was told. Plain values, no reading."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from infra.cli.classify_read import Found, Reading
from processors.catalogue import Catalogue, Finding
from processors.catalogue_series import Risen
from producers.stamps import stamp_of

#: Kinds beyond these are counted together: a log of a million devices must not fill the memory.
KINDS_MAX = 10_000
UNKNOWN_KINDS_MAX = 5_000
EXAMPLE_CHARACTERS = 240

_ACTIONS = ("evict", "diagnose", "rollback", "restart", "record")
_VARIABLE = re.compile(r"0x[0-9A-Fa-f]+|(?<![A-Za-z])[0-9A-Fa-f]{8,}(?![A-Za-z])|\d+")


@dataclass(slots=True)
class Kind:
    """One finding and how often it was met."""

    finding: Finding
    example: str
    first: str
    last: str
    count: int = 1
    explained_by: tuple[str, ...] = ()


@dataclass(slots=True)
class Unknown:
    example: str
    alarming: bool
    count: int = 1


@dataclass(slots=True)
class Tally:
    """All that `classify` says of some logs."""

    catalogue: Catalogue
    kinds: dict[tuple[str, str, str], Kind] = field(default_factory=dict)
    unknown: dict[str, Unknown] = field(default_factory=dict)
    lines: int = 0
    size_bytes: int = 0
    known: int = 0
    uncounted: int = 0
    unknown_beyond: int = 0
    problems: list[str] = field(default_factory=list)

    def read(self, reading: Reading, *, list_unknown: bool = False) -> None:
        """One file to its end. `list_unknown`: every line is asked about, and those that are not known are kept by kind."""
        risen = Risen()
        for found in reading.everything() if list_unknown else reading.found():
            finding = self.catalogue.judge(found.text, risen)
            if finding is not None and (list_unknown or not finding.row.quiet):
                self._add(finding, found)
            elif list_unknown:
                self._unknown(found.text)
        self.lines += reading.lines
        self.size_bytes += reading.size_bytes
        if reading.problem:
            self.problems.append(reading.problem)

    def _add(self, finding: Finding, found: Found) -> None:
        self.known += 1
        device = finding.device or found.context
        key = (finding.row.id, code_of(finding), device)
        kind = self.kinds.get(key)
        stamp = stamp_of(found.text)
        if kind is not None:
            kind.count += 1
            kind.last = stamp or kind.last
            kind.first = kind.first or stamp
        elif len(self.kinds) < KINDS_MAX:
            if device and not finding.device:
                finding = Finding(finding.row, finding.xid, device, device, finding.code)
            self.kinds[key] = Kind(finding, found.text[:EXAMPLE_CHARACTERS], stamp, stamp)
        else:
            self.uncounted += 1

    def _unknown(self, text: str) -> None:
        shape = _VARIABLE.sub("#", text)[:200]
        kind = self.unknown.get(shape)
        if kind is not None:
            kind.count += 1
        elif len(self.unknown) < UNKNOWN_KINDS_MAX:
            self.unknown[shape] = Unknown(text[:EXAMPLE_CHARACTERS], self.catalogue.alarming(text))
        else:
            self.unknown_beyond += 1

    # --- what is shown -----------------------------------------------------------------------------------------------------

    def findings(self) -> list[Kind]:
        """What is no mere look, the most urgent first; what another finding explains says so."""
        kinds = [kind for kind in self.kinds.values() if kind.finding.row.class_ != "benign"]
        for kind in kinds:
            kind.explained_by = self._explained(kind, kinds)
        order = {name: i for i, name in enumerate(self.catalogue.tables.classes)}
        return sorted(
            kinds,
            key=lambda k: (_ACTIONS.index(k.finding.row.first_action), order.get(k.finding.row.class_, 99), -k.count),
        )

    def harmless(self) -> list[Kind]:
        return sorted((k for k in self.kinds.values() if k.finding.row.class_ == "benign"), key=lambda k: -k.count)

    def unknowns(self) -> list[Unknown]:
        """Alarming ones first, then by count."""
        return sorted(self.unknown.values(), key=lambda u: (not u.alarming, -u.count))

    @property
    def asks(self) -> bool:
        """Whether something was found that asks for an action."""
        return any(k.finding.row.first_action != "record" and k.finding.row.class_ != "benign" for k in self.kinds.values())

    @property
    def unknown_lines(self) -> int:
        return max(0, self.lines - self.known)

    @staticmethod
    def _explained(kind: Kind, kinds: Iterable[Kind]) -> tuple[str, ...]:
        row, device = kind.finding.row, kind.finding.device
        wanted = {*row.superseded_by, *row.sympathetic_to}
        if not wanted:
            return ()
        named = {
            code_of(other.finding) or other.finding.row.id: None
            for other in kinds
            if other is not kind
            and (other.finding.row.id in wanted or other.finding.row.class_ in wanted)
            and (not device or not other.finding.device or device[:-2] == other.finding.device[:-2])
        }
        return tuple(named)[:5]


def code_of(finding: Finding) -> str:
    if finding.xid >= 0:
        return f"Xid {finding.xid}"
    return f"SXid {finding.code}" if finding.code and finding.row.id.startswith("sxid") else finding.code


def why_of(catalogue: Catalogue, kind: Kind) -> str:
    """The row's note; where it has none, what its class means and where the row is from."""
    row = kind.finding.row
    known = catalogue.tables.classes.get(row.class_)
    text = row.note or f"{known.meaning if known else row.symptom} ({row.source})"
    return f"{text} Follows {', '.join(kind.explained_by)}." if kind.explained_by else text


def plain(tally: Tally, kind: Kind) -> dict[str, Any]:
    row, finding = kind.finding.row, kind.finding
    return {
        "class": row.class_, "symptom": row.symptom, "code": code_of(finding), "xid": finding.xid if finding.xid >= 0 else None,
        "name": tally.catalogue.tables.names.get(finding.xid, ""), "device": finding.named or finding.device or None, "count": kind.count,
        "first": kind.first or None, "last": kind.last or None, "fault": list(row.fault), "first_action": row.first_action,
        "nvidia_action": row.nvidia_action or None, "differs": row.differs or None, "why": why_of(tally.catalogue, kind),
        "explained_by": list(kind.explained_by), "confidence": row.confidence, "row": row.id, "source": row.source, "example": kind.example,
    }  # fmt: skip
