"""The catalogue's form: what its YAML documents may hold, as frozen models. Pure; what rows mean for a line is in catalogue.py.

A catalogue is one text of one or more YAML documents, in order. Each may carry tables (`classes`, `buckets`, `names`, `devices`,
`ordinary`, `stems`, `alarming`, `context`), `defaults` for its own rows, and rows. The first document's head in schemas/catalogue/ explains each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from events.incident import Confidence, Symptom

Fault = Literal["hardware", "driver", "user_code"]
FirstAction = Literal["evict", "diagnose", "restart", "rollback", "record"]

#: Longer texts are no catalogue (CatalogueAdopted holds as much), longer lines are judged by their first part.
TEXT_CHARACTERS_MAX = 500_000
LINE_CHARACTERS_MAX = 4096

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{1,63}$")]
Literals = Annotated[tuple[Annotated[str, Field(min_length=3, max_length=200)], ...], Field(max_length=16)]
Alternatives = Annotated[tuple[Annotated[str, Field(min_length=3, max_length=200)], ...], Field(max_length=128)]
Pattern = Annotated[str, Field(min_length=1, max_length=2000)]
Words = Annotated[tuple[Annotated[str, Field(min_length=3, max_length=60)], ...], Field(max_length=400)]
#: 32 bits, the highest first; `-` for one that does not count. Or a hexadecimal number, all of whose bits count.
Bits = Annotated[str, Field(pattern=r"^(?:[01-]{32}|0x[0-9A-Fa-f]{1,8})$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Series(_Frozen):
    """A number that line after line tells (group `value` of `regex`): it holds when the number is `rises` times what it was at
    most in the lines before, or is above `above`."""

    regex: Pattern
    rises: float = Field(default=0, ge=0, allow_inf_nan=False)
    above: float = Field(default=0, ge=0, allow_inf_nan=False)


class Row(_Frozen):
    """One kind of line. Of `xid`, `all` and `any` at least one is given, and all that are given must hold."""

    id: Name
    #: Where such a line comes from: a `kernel` log may claim something about its node, a `training` log never does.
    log: Literal["kernel", "training"] = "kernel"
    #: Xid codes, or "any" for those that no earlier row took.
    xid: tuple[Annotated[int, Field(ge=0, le=999_999)], ...] | Literal["any"] = ()
    #: Literals that must all be there, ones of which one must, and ones of which none may. Case does not count, unless `case`.
    all: Literals = ()
    any: Alternatives = ()
    none: Alternatives = ()
    case: bool = False
    #: Searched in the line, whatever the case; a group named `device` gives the device, `code` the code.
    regex: Pattern = ""
    #: Conditions on the hexadecimal words in parentheses: the word's number, and bits of which one set must fit.
    words: dict[Annotated[int, Field(ge=0, le=31)], tuple[Bits, ...]] = Field(default_factory=dict)
    #: Names of `devices`, tried in turn where `regex` gives no device.
    device: tuple[Name, ...] = ()
    series: Series | None = None
    #: Asked only where every line is asked about: its literals are too common to look at each line that has one.
    quiet: bool = False
    #: Of a text of several lines, the finding with the highest is the answer (then by class and action).
    weight: int = Field(default=0, ge=-9, le=9)
    class_: str = Field(default="", alias="class", max_length=64)
    symptom: Symptom
    confidence: Confidence = "low"
    fault: tuple[Fault, ...] = ()
    first_action: FirstAction
    nvidia_action: str = Field(default="", max_length=64)
    #: Why `first_action` is not what NVIDIA's bucket says.
    differs: str = Field(default="", max_length=400)
    #: Rows or classes that leave lines like this behind, and ones that say the same for sure.
    sympathetic_to: tuple[Name, ...] = ()
    superseded_by: tuple[Name, ...] = ()
    source: str = Field(min_length=1, max_length=400)
    note: str = Field(default="", max_length=1000)
    #: Lines that this row must be the finding of.
    examples: tuple[Annotated[str, Field(max_length=LINE_CHARACTERS_MAX)], ...] = Field(min_length=1, max_length=20)

    @property
    def claims(self) -> bool:
        """Whether a node's detector makes a signal of it: a kernel's line that asks for something, or any Xid."""
        return self.log == "kernel" and self.class_ != "benign" and (self.first_action != "record" or bool(self.xid))


class Class(_Frozen):
    name: Name = Field(alias="class")
    symptom: Symptom
    meaning: str = Field(default="", max_length=200)


class Bucket(_Frozen):
    """NVIDIA's resolution bucket, and the first action that answers to it."""

    name: str = Field(alias="bucket", max_length=64)
    first_action: FirstAction


class _Document(_Frozen):
    version: Literal[1, 2]
    about: str = Field(default="", max_length=4000)
    context: Pattern | None = None
    classes: tuple[Class, ...] = Field(default=(), max_length=100)
    buckets: tuple[Bucket, ...] = Field(default=(), max_length=100)
    names: dict[int, Annotated[str, Field(max_length=80)]] = Field(default_factory=dict)
    devices: dict[Name, Pattern] = Field(default_factory=dict)
    alarming: Pattern | None = None
    ordinary: Words = ()
    stems: Words = ()
    rows: tuple[Row, ...] = Field(default=(), max_length=5000)

    @model_validator(mode="before")
    @classmethod
    def _version_1(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("version") == 1 and not raw.get("rows"):
            raise ValueError("rows: a catalogue needs rows")
        return raw


@dataclass(slots=True)
class Tables:
    """All documents of a text, put together."""

    context: str = ""
    alarming: str = ""
    ordinary: tuple[str, ...] = ()
    stems: tuple[str, ...] = ()
    classes: dict[str, Class] = field(default_factory=dict)
    buckets: dict[str, FirstAction] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


class BadCatalogue(ValueError):
    """A catalogue that cannot be adopted. The text is a sentence or two for its author."""


def read(text: str) -> Tables:
    """The tables of a text. Raises BadCatalogue; whether rows are found by their examples is not looked at here."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise BadCatalogue(f"the catalogue has {len(text)} characters; at most {TEXT_CHARACTERS_MAX} can be adopted")
    try:
        documents: list[Any] = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" at line {place.line + 1}, column {place.column + 1}" if place else ""
        raise BadCatalogue(f"the catalogue is not YAML{where}: {getattr(error, 'problem', None) or str(error)[:200]}") from None
    tables = Tables()
    if not documents:
        raise BadCatalogue("the catalogue must be a mapping with version and rows, not empty")
    for raw in documents:
        _add(tables, raw)
    if not tables.rows:
        raise BadCatalogue("the catalogue is not valid: rows: there are none")
    _check(tables)
    return tables


def _add(tables: Tables, raw: Any) -> None:
    if not isinstance(raw, dict):
        raise BadCatalogue(f"the catalogue must be a mapping with version and rows, not {type(raw).__name__}")
    defaults = raw.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise BadCatalogue("the catalogue is not valid: defaults: must be a mapping of fields of rows")
    raw = {key: value for key, value in raw.items() if key != "defaults"}
    symptoms: dict[Any, Any] = {name: c.symptom for name, c in tables.classes.items()}
    classes = raw.get("classes")
    for one in classes if isinstance(classes, list) else ():
        if isinstance(one, dict) and isinstance(one.get("class"), str):
            symptoms.setdefault(one["class"], one.get("symptom"))
    if isinstance(raw.get("rows"), list):
        raw["rows"] = [_filled(row, defaults, symptoms) if isinstance(row, dict) else row for row in raw["rows"]]
    try:
        document = _Document.model_validate(raw)
    except ValidationError as error:
        raise BadCatalogue(_sentence(raw, error)) from None
    for one in document.classes:
        if one.name in tables.classes:
            raise BadCatalogue(f"two classes have the name {one.name}")
        tables.classes[one.name] = one
    tables.context = document.context or tables.context
    tables.alarming = document.alarming or tables.alarming
    tables.ordinary += document.ordinary
    tables.stems += document.stems
    tables.buckets |= {bucket.name: bucket.first_action for bucket in document.buckets}
    tables.names |= document.names
    tables.devices |= document.devices
    tables.rows += document.rows


def _filled(row: dict[str, Any], defaults: dict[str, Any], symptoms: dict[Any, Any]) -> dict[str, Any]:
    row = {**defaults, **row}
    if row.get("first_action") == "roll_back":  # as version 1 spelt it
        row["first_action"] = "rollback"
    if "symptom" not in row and row.get("class") in symptoms:
        row["symptom"] = symptoms[row["class"]]
    if not symptoms and not row.get("fault"):  # version 1 asked for it; benign rows have none
        row["fault"] = row.get("fault") or ["?"]
    return row


def _check(tables: Tables) -> None:
    seen: set[str] = set()
    for row in tables.rows:
        if row.id in seen:
            raise BadCatalogue(f"two rows have the id {row.id}; give each its own")
        seen.add(row.id)
        if not (row.xid or row.all or row.any):
            raise BadCatalogue(f"row {row.id} needs xid, or literals in all or any (the quick filter looks for them)")
        for name in row.device:
            if name not in tables.devices:
                raise BadCatalogue(f"row {row.id}: there is no pattern {name!r} in devices")
        if tables.classes:
            if row.class_ not in tables.classes:
                raise BadCatalogue(f"row {row.id}: there is no class {row.class_!r} in classes")
            if not row.fault and row.class_ != "benign":
                raise BadCatalogue(f"row {row.id}: says not whose fault it can be")
        if row.nvidia_action and tables.buckets:
            answer = tables.buckets.get(row.nvidia_action)
            if answer is None:
                raise BadCatalogue(f"row {row.id}: {row.nvidia_action!r} is no bucket of buckets")
            if answer != row.first_action and not row.differs:
                raise BadCatalogue(
                    f"row {row.id}: NVIDIA's {row.nvidia_action} means {answer}, the row says {row.first_action}; say why in differs"
                )
    for row in tables.rows:
        for name in (*row.sympathetic_to, *row.superseded_by):
            if name not in seen and name not in tables.classes:
                raise BadCatalogue(f"row {row.id}: {name!r} is neither a row nor a class")


def compiled(where: str, pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadCatalogue(f"{where}: the regular expression does not compile: {error}") from None
    if found.search(""):
        raise BadCatalogue(f"{where}: the regular expression matches the empty line, so it would match every line")
    return found


def _sentence(raw: dict[str, Any], error: ValidationError) -> str:
    said: dict[str, str] = {}
    for one in error.errors(include_url=False, include_context=False):
        message = one["msg"] if len(one["msg"]) <= 160 else one["msg"][:160] + "…"
        said.setdefault(_place(raw, one["loc"]), message)
    if len(said) > 1 and raw.get("rows"):
        said.pop("rows", None)  # only says that the rows above failed
    lines = [f"{place}: {message}" for place, message in said.items()]
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return "the catalogue is not valid: " + "; ".join(lines[:5]) + more


def _place(raw: dict[str, Any], location: tuple[int | str, ...]) -> str:
    """`row xid-79, symptom` rather than `rows.3.symptom.literal[…]`."""
    location = tuple(part for part in location if "[" not in str(part))
    if len(location) >= 2 and location[0] == "rows" and isinstance(location[1], int):
        row = raw["rows"][location[1]]
        name = row.get("id") if isinstance(row, dict) else None
        rest = ".".join(map(str, location[2:]))
        return f"row {name or location[1] + 1}" + (f", {rest}" if rest else "")
    return ".".join(map(str, location)) or "catalogue"
