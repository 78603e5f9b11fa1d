"""The catalogue: what a kernel's line means, as data. Text in, model out; a line in, a finding out. Pure.

The rows are in schemas/catalogue.yaml, whose head explains its form; adding one needs no code. A row with `xid` is tried on
lines that the driver's one form of Xid line matches, the others where their literals stand; the first row that fits is the
finding. `interesting` passes whatever any row could match, and every Xid, known or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from events.incident import Confidence, Symptom

Fault = Literal["hardware", "driver", "user_code"]
FirstAction = Literal["evict", "diagnose", "restart", "roll_back", "record"]

#: Longer texts are no catalogue (CatalogueAdopted holds as much), longer lines are judged by their first part.
TEXT_CHARACTERS_MAX = 500_000
LINE_CHARACTERS_MAX = 4096
LINES_MAX = 64

#: The driver's line: `NVRM: Xid (PCI:0000:9b:00): 79, …`, `Xid (0000:af:00): …`, `(0001:00)` of 2006, `(PCI:0000:01:00 GPU-I:05)`
#: for a MIG instance. Not SXid, which is the switch's.
_XID = re.compile(r"(?<![A-Za-z])Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]{4,20})(?: GPU-I:\d{1,4})?\): (?P<xid>\d{1,6})(?!\d)")
_PCI = re.compile(
    r"(?:(?P<domain>[0-9A-Fa-f]{4,8}):)?(?P<bus>[0-9A-Fa-f]{2}):(?P<device>[0-9A-Fa-f]{2})(?:\.(?P<function>[0-7]))?"
)
_PCI_OLD = re.compile(r"(?P<bus>[0-9A-Fa-f]{4}):(?P<device>[0-9A-Fa-f]{2})")

_RANK: Mapping[str, int] = {"high": 0, "low": 1, "sympathetic": 2}

Literals = Annotated[tuple[Annotated[str, Field(min_length=3, max_length=200)], ...], Field(max_length=8)]
Pattern = Annotated[str, Field(min_length=1, max_length=500)]


class Row(BaseModel):
    """One kind of line. Of `xid`, `all` and `regex` at least one is given, and all that are given must hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{1,63}$")
    #: Xid codes, or "any" for those that no earlier row took.
    xid: tuple[Annotated[int, Field(ge=0, le=999_999)], ...] | Literal["any"] = ()
    #: Literals that must all be there, and ones of which none may be.
    all: Literals = ()
    none: Literals = ()
    #: Searched in the line; a group named `device` gives the device.
    regex: Pattern = ""
    symptom: Symptom
    confidence: Confidence
    fault: tuple[Fault, ...] = Field(min_length=1)
    first_action: FirstAction
    source: str = Field(min_length=1, max_length=400)
    note: str = Field(default="", max_length=1000)
    #: Lines that this row must be the finding of: checked whenever a catalogue is read.
    examples: tuple[Annotated[str, Field(max_length=LINE_CHARACTERS_MAX)], ...] = Field(min_length=1, max_length=20)


class _Text(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    #: A line that names the device of lines which follow it (one message over several lines); group `device`.
    context: Pattern = ""
    rows: tuple[Row, ...] = Field(min_length=1, max_length=5000)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a line is. `device` as `0000:03:00.0` where it is a PCI address, '' where the line names none; `xid` -1 for none."""

    row: Row
    xid: int = -1
    device: str = ""


class BadCatalogue(ValueError):
    """A catalogue that cannot be adopted. The text is a sentence or two for its author."""


def digest(text: str) -> str:
    """What decisions name: SHA-256 of the text, 16 hex digits."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def pci_address(text: str) -> str:
    """`0000:03:00.0` of any way to write it (`PCI:0000:03:00`, `00000000:03:00.0`, `03:00`, the old `0003:00`); other text as it
    is, in at most 64 characters."""
    plain = text.strip().removeprefix("PCI:")
    match = _PCI.fullmatch(plain)
    if match:
        domain = int(match["domain"] or "0", 16)
        return f"{domain:04x}:{match['bus']}:{match['device']}.{match['function'] or 0}".lower()
    old = _PCI_OLD.fullmatch(plain)
    if old:
        return f"{int(old['bus'], 16) >> 8:04x}:{int(old['bus'], 16) & 255:02x}:{old['device']}.0".lower()
    return plain[:64]


class Catalogue:
    """A validated catalogue, ready to classify. Immutable."""

    def __init__(self, text: str, rows: tuple[Row, ...], context: str = "") -> None:
        self.text = text
        self.digest = digest(text)
        self.rows = rows
        self._context = _compiled("context", context) if context else None
        self._regex = {row.id: _compiled(row.id, row.regex) for row in rows if row.regex}
        self._by_xid: dict[int, tuple[Row, ...]] = {}
        self._any_xid = tuple(row for row in rows if row.xid == "any")
        for row in rows:
            for xid in row.xid if row.xid != "any" else ():
                self._by_xid[xid] = (*self._by_xid.get(xid, ()), row)
        self._plain = tuple(row for row in rows if not row.xid)
        needles = sorted({max(row.all, key=len) for row in self._plain})
        if context:
            needles.append(_literal_of(context))
        self._prefilter = re.compile("|".join(map(re.escape, ["Xid", *needles])))

    def interesting(self, line: str) -> bool:
        """Whether any row could match, or a line that follows could need this one. Quick; never false for what `classify` finds."""
        return self._prefilter.search(line, 0, LINE_CHARACTERS_MAX) is not None

    def device_named(self, line: str) -> str:
        """The device that this line names for the lines after it, '' for none."""
        match = self._context.search(line, 0, LINE_CHARACTERS_MAX) if self._context else None
        return pci_address(match["device"] or "") if match else ""

    def classify(self, line: str) -> Finding | None:
        """What the line is; None: nothing this catalogue knows. Of a text of several lines, the surest, then the first."""
        line = line[:LINE_CHARACTERS_MAX]
        if not self.interesting(line):
            return None
        if "\n" not in line:
            return self._one(line)
        found: Finding | None = None
        device = ""
        for part in line.split("\n", LINES_MAX)[:LINES_MAX]:
            one = self._one(part)
            device = device or self.device_named(part)
            if one and not one.device and device:
                one = Finding(one.row, one.xid, device)
            if one and (found is None or _RANK[one.row.confidence] < _RANK[found.row.confidence]):
                found = one
        return found

    def _one(self, line: str) -> Finding | None:
        xid_line = _XID.search(line)
        if xid_line:
            xid, device = int(xid_line["xid"]), pci_address(xid_line["device"])
            for row in (*self._by_xid.get(xid, ()), *self._any_xid):
                if self._holds(row, line):
                    return Finding(row, xid, device)
            return None
        for row in self._plain:
            if self._holds(row, line):
                return Finding(row, -1, self._device(row, line))
        return None

    def _holds(self, row: Row, line: str) -> bool:
        if not all(part in line for part in row.all) or any(part in line for part in row.none):
            return False
        regex = self._regex.get(row.id)
        return regex is None or regex.search(line) is not None

    def _device(self, row: Row, line: str) -> str:
        regex = self._regex.get(row.id)
        match = regex.search(line) if regex and "device" in regex.groupindex else None
        return pci_address(match["device"] or "") if match else ""


def _compiled(where: str, pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadCatalogue(f"{where}: the regular expression does not compile: {error}") from None
    if compiled.search(""):
        raise BadCatalogue(f"{where}: the regular expression matches the empty line, so it would match every line")
    if where == "context" and "device" not in compiled.groupindex:
        raise BadCatalogue("context: the regular expression needs a group named device")
    return compiled


def _literal_of(pattern: str) -> str:
    """The longest run of letters, blanks and colons in a pattern before any alternative: what its lines must hold."""
    plain = re.split(r"[^A-Za-z: ]", pattern.split("(", 1)[0])
    literal = max(plain, key=len)
    if len(literal) < 3:
        raise BadCatalogue("context: the regular expression must begin with at least three plain letters, for the quick filter")
    return literal


def parse(text: str) -> Catalogue:
    """A catalogue from its YAML (or JSON). Raises BadCatalogue."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadCatalogue(f"the catalogue has {len(text)} characters; at most {TEXT_CHARACTERS_MAX} can be adopted")
    try:
        raw: Any = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" at line {place.line + 1}, column {place.column + 1}" if place else ""
        raise BadCatalogue(f"the catalogue is not YAML{where}: {getattr(error, 'problem', None) or str(error)[:200]}") from None
    if not isinstance(raw, dict):
        raise BadCatalogue(f"the catalogue must be a mapping with version and rows, not {type(raw).__name__}")
    try:
        model = _Text.model_validate(raw)
    except ValidationError as error:
        said: dict[str, str] = {}
        for one in error.errors(include_url=False, include_context=False):
            message = one["msg"] if len(one["msg"]) <= 160 else one["msg"][:160] + "…"
            said.setdefault(_place(raw, one["loc"]), message)
        if len(said) > 1 and raw.get("rows"):
            said.pop("rows", None)  # only says that the rows above failed
        lines = [f"{place}: {message}" for place, message in said.items()]
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise BadCatalogue("the catalogue is not valid: " + "; ".join(lines[:5]) + more) from None
    _check(model.rows)
    catalogue = Catalogue(text, model.rows, model.context)
    for row in model.rows:
        for example in row.examples:
            found = catalogue.classify(example)
            if found is None or found.row.id != row.id:
                what = f"is taken by row {found.row.id}" if found else "matches no row"
                raise BadCatalogue(f"row {row.id}: its example {example[:120]!r} {what}; mend the pattern or the order of rows")
    return catalogue


def _check(rows: tuple[Row, ...]) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise BadCatalogue(f"two rows have the id {row.id}; give each its own")
        seen.add(row.id)
        if not row.xid and not row.all:
            raise BadCatalogue(f"row {row.id} needs xid, or literals in all (the quick filter looks for the longest of them)")


def _place(raw: dict[str, Any], location: tuple[int | str, ...]) -> str:
    """`row xid-79, symptom` rather than `rows.3.symptom.literal[…]`."""
    location = tuple(part for part in location if "[" not in str(part))
    if len(location) >= 2 and location[0] == "rows" and isinstance(location[1], int):
        row = raw["rows"][location[1]]
        name = row.get("id") if isinstance(row, dict) else None
        rest = ".".join(map(str, location[2:]))
        return f"row {name or location[1] + 1}" + (f", {rest}" if rest else "")
    return ".".join(map(str, location)) or "catalogue"
