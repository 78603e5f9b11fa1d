"""`python -m infra.export_schemas [--check] [--unreleased]`: the JSON Schemas of the event types and of the policy.

The files are the contract with logs already written, so a change that could make an old event unreadable is refused: it needs a
new version of the type and an upcaster. What only adds (an optional field, one more allowed value) is exported again in place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from events.registry import EVENT_CLASSES, UPCASTERS
from processors.policy import Policy

FOLDER = Path(__file__).resolve().parent.parent / "schemas"
NON_FINITE = ["NaN", "Infinity", "-Infinity"]
TIME_PATTERN = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z$"

Verdict = Literal["same", "additive", "breaking"]


class _OnTheWire(GenerateJsonSchema):
    """Numbers as they are written: what is not finite stands as a string."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        plain = super().float_schema(schema)
        if schema.get("allow_inf_nan") is False:
            return plain
        return {"anyOf": [plain, {"enum": NON_FINITE}]}


def event_schema(type_: str) -> dict[str, Any]:
    """The schema of one event type's canonical JSON."""
    schema: dict[str, Any] = EVENT_CLASSES[type_].model_json_schema(mode="serialization", schema_generator=_OnTheWire)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["$id"] = f"urn:keepstep:{type_}"
    schema["title"] = type_
    schema["properties"]["time"]["pattern"] = TIME_PATTERN
    return schema


def policy_schema() -> dict[str, Any]:
    schema: dict[str, Any] = Policy.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["$id"] = "urn:keepstep:policy"
    return schema


def exported() -> dict[str, dict[str, Any]]:
    """Every schema by its file's path below schemas/."""
    files = {f"events/{type_}.json": event_schema(type_) for type_ in sorted(EVENT_CLASSES)}
    files["policy.json"] = policy_schema()
    return files


def text_of(schema: Mapping[str, Any]) -> str:
    """The same schema gives the same bytes, wherever and whenever it is exported."""
    return json.dumps(schema, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


#: Words that explain and bind nothing; and bounds which a reader may widen without losing an old event. A default is no such
#: word: canonical bytes leave defaults out, so another default would read old events differently.
_EXPLAINS = frozenset({"title", "description", "examples"})
_UPPER = frozenset({"maxLength", "maximum", "maxItems"})
_LOWER = frozenset({"minLength", "minimum", "minItems"})


def compare(old: Any, new: Any, where: str = "") -> tuple[Verdict, str]:
    """Whether events that were valid under `old` are so under `new` ("additive") or may not be ("breaking"), and where."""
    if old == new:
        return "same", where
    if isinstance(old, dict) and isinstance(new, dict):
        return _compare_objects(old, new, where)
    key = where.rpartition("/")[2]
    if key in _EXPLAINS:
        return "additive", where
    if key in ("enum", "anyOf") and {json.dumps(v) for v in old} < {json.dumps(v) for v in new}:
        return "additive", where
    if key == "required" and set(new) < set(old):
        return "additive", where
    if isinstance(old, int | float) and isinstance(new, int | float):
        wider = new > old if key in _UPPER else new < old if key in _LOWER else False
        return ("additive" if wider else "breaking"), where
    return "breaking", where


def _compare_objects(old: dict[str, Any], new: dict[str, Any], where: str) -> tuple[Verdict, str]:
    worst: tuple[Verdict, str] = "same", where
    names = where.rpartition("/")[2] in ("properties", "$defs")
    for key in sorted(set(old) | set(new)):
        here = f"{where}/{key}"
        if key in old and key in new:
            found = compare(old[key], new[key], here)
        elif (names and key in new) or where.endswith("$defs"):
            found = (
                "additive",
                here,
            )  # a new field (if it is required, `required` says so); who points at a definition differs too
        elif not names and (key in _EXPLAINS or (key in new and key == "default")):
            found = "additive", here  # words; or a field that was always written need not be
        elif not names and key in old and key in _UPPER | _LOWER | {"required"}:
            found = "additive", here  # a bound that is gone
        else:
            found = "breaking", here
        if found[0] == "breaking":
            return found
        if found[0] == "additive":
            worst = found
    return worst


def differences(folder: Path = FOLDER) -> dict[str, tuple[Verdict, str]]:
    """Files that are not what the models say now, with what that means. A file of a type that is no longer there is kept as
    long as an upcaster reads it."""
    now = exported()
    found: dict[str, tuple[Verdict, str]] = {}
    for name, schema in now.items():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            found[name] = "additive", "a new type; export it"
            continue
        if text == text_of(schema):
            continue
        try:
            verdict, where = compare(json.loads(text), json.loads(text_of(schema)))
        except ValueError:
            verdict, where = "breaking", "the file is not JSON"
        found[name] = ("additive" if verdict == "same" else verdict), where
    for path in sorted((folder / "events").glob("*.json")):
        name = f"events/{path.name}"
        if name not in now and path.stem not in UPCASTERS:
            found[name] = "breaking", "no model and no upcaster reads this type any more"
    return found


def advice(name: str, verdict: Verdict, where: str) -> str:
    """One sentence for whoever changed a model."""
    if verdict == "additive":
        return f"schemas/{name}: changed, old events stay readable ({where}); run `python -m infra.export_schemas`"
    if name == "policy.json":
        return f"schemas/{name}: an old policy may no longer load ({where}); raise its version, then export with --unreleased"
    return (
        f"schemas/{name}: old events may no longer be readable ({where}); bump the version in the type's name and add an "
        "upcaster in events/registry.py (or, if no log holds this type yet, export with --unreleased)"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.export_schemas", description="Export JSON Schemas into schemas/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs from its model")
    parser.add_argument("--unreleased", action="store_true", help="also replace the schema of a type that no log holds yet")
    options = parser.parse_args(arguments)
    found = differences()
    refused = 0
    now = exported()
    for name, (verdict, where) in found.items():
        if options.check or (verdict == "breaking" and not options.unreleased):
            refused += 1
            print(advice(name, verdict, where), file=sys.stderr)
        elif name in now:
            (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_text(text_of(now[name]), encoding="utf-8")
            print(f"wrote schemas/{name}")
        else:
            (FOLDER / name).unlink()
            print(f"removed schemas/{name}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
