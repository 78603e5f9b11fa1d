"""The catalogue: what a line of a log means, as data. Text in, model out; a line in, a finding out. Pure.

The rows are in schemas/catalogue/, whose first file explains their form; adding one needs no code. A row with `xid` is tried on
lines that the driver's one form of Xid line matches, the others where their literals stand; the first row that fits is the
finding. Three questions, each asked of an automaton of literals first (infra/decisions/100-literals-first.md): `interesting` and
`classify` for a node's kernel lines (claims only), `spans` for whole chunks of a file, `judge` for one text, of which everything is
asked, also whether it only looks alarming.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from processors.catalogue_literals import Literals
from processors.catalogue_rows import LINE_CHARACTERS_MAX, TEXT_CHARACTERS_MAX, BadCatalogue, Row, Tables, compiled, read
from processors.catalogue_series import Risen
from processors.catalogue_words import words_fit

__all__ = ["LINE_CHARACTERS_MAX", "TEXT_CHARACTERS_MAX", "BadCatalogue", "Catalogue", "Finding", "Row", "digest", "parse", "pci_address"]  # fmt: skip

#: A text of more lines is judged by its first ones, a longer one by its first characters.
LINES_MAX = 400
#: A literal shorter than this is taken for a name, such as a driver's, that says little.
NAME_CHARACTERS = 10
TEXT_JUDGED_MAX = 64 * 1024

#: The driver's line: `NVRM: Xid (PCI:0000:9b:00): 79, …`, `Xid (0000:af:00): …`, `(0001:00)` of 2006, `(PCI:0000:01:00 GPU-I:05)`
#: for a MIG instance. Not SXid, which is the switch's.
_XID = re.compile(r"(?<![A-Za-z])Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]{4,20})(?: GPU-I:\d{1,4})?\): (?P<xid>\d{1,6})(?!\d)")
#: Other programs that name one: `Xid=79`, `XID 79`, `Xid error: 79`, `XID errors found: 48`.
_XID_TOLD = re.compile(
    r"(?:GPU|NVRM|NVIDIA|DCGM|device|critical|health).{0,120}?\bX(?:id|ID)(?: ?(?:errors?|codes?|events?|errors? found))?\s{0,2}[:=#]?\s{0,2}(?P<xid>\d{1,3})\b(?![.:]\d)"
    r"|\bX(?:id|ID)(?: ?(?:errors?|codes?|events?))?\s{0,2}[:=#]?\s{0,2}(?P<xid2>\d{1,3})\b(?![.:]\d).{0,160}?(?:GPU|NVRM|NVIDIA|nvlink|device)"
    r"|\bX(?:id|ID)\b[^\d\n]{0,40}\b[Cc]ode\s?[=:]\s?(?P<xid3>\d{1,3})\b(?![.:]\d)",
)
_PCI = re.compile(
    r"(?:(?P<domain>[0-9A-Fa-f]{4,8}):)?(?P<bus>[0-9A-Fa-f]{2}):(?P<device>[0-9A-Fa-f]{2})(?:\.(?P<function>[0-7]))?"
)
_PCI_OLD = re.compile(r"(?P<bus>[0-9A-Fa-f]{4}):(?P<device>[0-9A-Fa-f]{2})")

_RANK = {"high": 0, "low": 0, "sympathetic": 1}
_CONFIDENCE = {"high": 0, "low": 1, "sympathetic": 2}
_ACTIONS = {"evict": 0, "diagnose": 1, "rollback": 2, "restart": 3, "record": 4}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a line is. `device` as `0000:03:00.0` where it is a PCI address, '' where the line names none, `named` as the line has
    it; `xid` -1 for none; `code`: another number that the line tells (an SXid, a signal, an errno)."""

    row: Row
    xid: int = -1
    device: str = ""
    named: str = ""
    code: str = ""


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
    """A validated catalogue, ready to classify. Immutable but for what it works out once, when first asked."""

    def __init__(self, text: str, tables: Tables) -> None:
        self.text = text
        self.digest = digest(text)
        self.tables = tables
        self.rows = tuple(tables.rows)
        self._order = {name: i for i, name in enumerate(tables.classes)}
        self._context = compiled("context", tables.context) if tables.context else None
        if self._context and "device" not in self._context.groupindex:
            raise BadCatalogue("context: the regular expression needs a group named device")
        self._context_start = _literal_of(tables.context) if tables.context else ""
        self._context_literal = [self._context_start.lower()] if tables.context else []
        self._by_xid: dict[int, tuple[Row, ...]] = {}
        self._any_xid = tuple(row for row in self.rows if row.xid == "any")
        for row in self.rows:
            for xid in row.xid if row.xid != "any" else ():
                self._by_xid[xid] = (*self._by_xid.get(xid, ()), row)
        self._plain = tuple(row for row in self.rows if not row.xid)
        self._regex: dict[str, re.Pattern[str]] = {}
        self._low = {row.id: tuple(tuple(map(str.lower, part)) for part in (row.all, row.any, row.none)) for row in self.rows}

    # --- the literals ------------------------------------------------------------------------------------------------------

    @cached_property
    def _claimed(self) -> Literals:
        return Literals(self._needles(row for row in self._plain if row.claims))

    @cached_property
    def _scanned(self) -> Literals:
        rows = (row for row in self._plain if not row.quiet and row.class_ != "benign")
        return Literals(self._needles(rows), self.tables.ordinary, self.tables.stems)

    @cached_property
    def _all(self) -> Literals:
        return Literals(self._needles(self._plain), fast=True)

    def _needles(self, rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
        """Each literal that a row cannot be without, and the rows (by number among those without Xid) that it stands for."""
        place = {row.id: i for i, row in enumerate(self._plain)}
        needles: dict[str, tuple[int, ...]] = {"xid": (), **dict.fromkeys(self._context_literal, ())}
        for row in rows:
            every, one_of, _ = self._low[row.id]
            for literal in _rarest(every, one_of):
                needles[literal] = (*needles.get(literal, ()), place[row.id])
        return needles

    @property
    def literals(self) -> tuple[str, ...]:
        """What `spans` looks for: one of these stands in every line of which anything is known."""
        return self._scanned.literals

    # --- a node's kernel lines ---------------------------------------------------------------------------------------------

    def interesting(self, line: str) -> bool:
        """Whether a row that claims could match, or a line that follows could need this one. Quick; never false for what
        `classify` finds."""
        return self._claimed.any_in(line[:LINE_CHARACTERS_MAX])

    def filter_alone(self) -> Callable[[str], bool]:
        """`interesting` without the catalogue behind it: an agent need not hold what only a detector judges by."""
        literals = self._claimed
        return lambda line: literals.any_in(line[:LINE_CHARACTERS_MAX])

    def device_named(self, line: str) -> str:
        """The device that this line names for the lines after it, '' for none."""
        return pci_address(self._named(line))

    def _named(self, line: str) -> str:
        if self._context is None or self._context_start not in line:
            return ""
        match = self._context.search(line, 0, LINE_CHARACTERS_MAX)
        return (match["device"] or "") if match else ""

    def classify(self, line: str) -> Finding | None:
        """What a kernel's line claims about its node; None: nothing. Of a text of several lines, the surest, then the first."""
        line = line[:LINE_CHARACTERS_MAX]
        if not self.interesting(line):
            return None
        if "\n" not in line:
            return self._claim(line)
        found: Finding | None = None
        named = ""
        for part in line.split("\n", LINES_MAX)[:LINES_MAX]:
            one = self._claim(part)
            named = named or self._named(part)
            if one and not one.device and named:
                one = Finding(one.row, one.xid, pci_address(named), named, one.code)
            if one and (found is None or _CONFIDENCE[one.row.confidence] < _CONFIDENCE[found.row.confidence]):
                found = one
        return found

    def _claim(self, line: str) -> Finding | None:
        for one in self._fitting(line, None):
            if one.row.log == "kernel":
                return one if one.row.claims else None
        return None

    # --- whole files -------------------------------------------------------------------------------------------------------

    def spans(self, chunk: bytes) -> Iterator[tuple[int, int, int]]:
        """Where lines of a chunk begin and end that may be known, and where the first literal in each stands. Quick: what is
        no such line is never looked at by itself."""
        return self._scanned.spans(chunk)

    # --- one text, everything asked ----------------------------------------------------------------------------------------

    def judge(self, text: str, risen: Risen | None = None) -> Finding | None:
        """What a text of one or several lines is, whatever it comes from: the surest finding, by weight, class and action, then
        the first. None: no row fits. `risen` remembers the numbers of earlier texts of the same log."""
        text = text[:TEXT_JUDGED_MAX]
        risen = risen if risen is not None else Risen()
        best: Finding | None = None
        best_key: tuple[int, ...] = ()
        devices: dict[str, Finding] = {}
        named, since = "", 0
        parts = text.split("\n", LINES_MAX)[:LINES_MAX]
        for i, part in enumerate(parts):
            context = self._named(part)
            if context:
                named, since = context, i
            one = next(self._fitting(part[:LINE_CHARACTERS_MAX], risen), None)
            if one is None:
                continue
            if not one.device and named and i - since <= 3:
                one = Finding(one.row, one.xid, pci_address(named), named, one.code)
            if one.device:
                devices.setdefault(one.row.class_, one)
            key = self._sureness(one.row)
            if best is None or key < best_key:
                best, best_key = one, key
        if len(parts) > 1 and (best is None or best.row.class_ == "benign"):  # a message that was wrapped
            joined = next(self._fitting(" ".join(part.strip() for part in parts)[:LINE_CHARACTERS_MAX], None), None)
            if joined is not None and (best is None or self._sureness(joined.row) < best_key):
                best = joined
        if best is not None and not best.device and best.row.class_ in devices:  # another line about the same names it
            other = devices[best.row.class_]
            best = Finding(best.row, best.xid, other.device, other.named, best.code)
        return best

    def _sureness(self, row: Row) -> tuple[int, ...]:
        return (
            row.class_ == "benign",
            _RANK[row.confidence],
            -row.weight,
            self._order.get(row.class_, 99),
            _ACTIONS[row.first_action],
        )

    def alarming(self, text: str) -> bool:
        """Whether a text that no row fits has a word that speaks of trouble."""
        return self._alarming is not None and self._alarming.search(text) is not None

    @cached_property
    def _alarming(self) -> re.Pattern[str] | None:
        return compiled("alarming", self.tables.alarming) if self.tables.alarming else None

    # --- rows --------------------------------------------------------------------------------------------------------------

    def _fitting(self, line: str, risen: Risen | None) -> Iterator[Finding]:
        """The findings that fit one line, in the order of the rows."""
        low = line.lower()
        places, xid_like = self._all.rows_in(low)
        if xid_like:
            match = _XID.search(line)
            told = None if match else _XID_TOLD.search(line)
            if match:
                named = match["device"]
                yield from self._of_xid(int(match["xid"]), named, line, low)
                return
            if told:
                number = told["xid"] or told["xid2"] or told["xid3"]
                yield from self._of_xid(int(number), self._pci_told(line), line, low)
        for place in places:
            row = self._plain[place]
            if self._holds(row, line, low, risen):
                yield self._finding(row, line)

    def _pci_told(self, line: str) -> str:
        """The one PCI address of a line of another program than the driver."""
        pattern = self._device_pattern("pci") if "pci" in self.tables.devices else None
        match = pattern.search(line) if pattern else None
        return (match["device"] or "") if match else ""

    def _of_xid(self, xid: int, named: str, line: str, low: str) -> Iterator[Finding]:
        for row in (*self._by_xid.get(xid, ()), *self._any_xid):
            if self._holds(row, line, low, None):
                yield Finding(row, xid, pci_address(named), named)

    def _holds(self, row: Row, line: str, low: str, risen: Risen | None) -> bool:
        every, one_of, none = self._low[row.id]
        for part in every:
            if part not in low:
                return False
        for part in none:
            if part in low:
                return False
        if one_of and not any(part in low for part in one_of):
            return False
        if row.case and not (all(part in line for part in row.all) and (not row.any or any(part in line for part in row.any))):
            return False
        if row.regex and self._pattern(row).search(line) is None:
            return False
        if row.words and not words_fit(row.words, line):
            return False
        return row.series is None or (risen is not None and risen.holds(row, line))

    def _pattern(self, row: Row) -> re.Pattern[str]:
        found = self._regex.get(row.id)
        if found is None:
            found = self._regex[row.id] = compiled(row.id, row.regex)
        return found

    def _finding(self, row: Row, line: str) -> Finding:
        named = code = ""
        if row.regex:
            match = self._pattern(row).search(line)
            groups = match.groupdict() if match else {}
            named, code = groups.get("device") or "", groups.get("code") or ""
        for name in row.device if not named else ():
            match = self._device_pattern(name).search(line)
            if match:
                named = match["device"] or ""
                break
        return Finding(row, -1, pci_address(named), named[:64], code[:32])

    def _device_pattern(self, name: str) -> re.Pattern[str]:
        found = self._regex.get(f"devices {name}")
        if found is None:
            found = self._regex[f"devices {name}"] = compiled(f"devices, {name}", self.tables.devices[name])
        return found


def _rarest(every: tuple[str, ...], one_of: tuple[str, ...]) -> tuple[str, ...]:
    """The literals by which a row is found: the longest that its lines must have, or those of which they have one, where that is but a
    short name."""
    longest = max(every, key=len, default="")
    return (longest,) if longest and (not one_of or len(longest) >= NAME_CHARACTERS or min(map(len, one_of)) <= 4) else one_of


def _literal_of(pattern: str) -> str:
    """The longest run of letters, blanks and colons in a pattern before any alternative: what its lines must hold."""
    plain = re.split(r"[^A-Za-z: ]", pattern.split("(", 1)[0])
    literal = max(plain, key=len)
    if len(literal) < 3:
        raise BadCatalogue("context: the regular expression must begin with at least three plain letters, for the quick filter")
    return literal


def parse(text: str, *, examples: bool = True) -> Catalogue:
    """A catalogue from its YAML (or JSON). Raises BadCatalogue. `examples`: whether each row's examples are tried; a text that was
    adopted, or came along and was tried before, need not be tried by each process again."""
    catalogue = Catalogue(text, read(text))
    if examples:
        _try(catalogue)
    return catalogue


def _try(catalogue: Catalogue) -> None:
    for name, pattern in catalogue.tables.devices.items():
        if "device" not in compiled(f"devices, {name}", pattern).groupindex:
            raise BadCatalogue(f"devices, {name}: the regular expression needs a group named device")
    for row in catalogue.rows:
        if row.regex:
            compiled(row.id, row.regex)
        for example in row.examples:
            found = catalogue.judge(example)
            if found is None or found.row.id != row.id:
                what = f"is taken by row {found.row.id}" if found else "matches no row"
                raise BadCatalogue(f"row {row.id}: its example {example[:120]!r} {what}; mend the pattern or the order of rows")
