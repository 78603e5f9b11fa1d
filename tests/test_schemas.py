"""The exported schemas hold the models: a change that could make old events unreadable needs a new version."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from events.registry import BY_TYPE
from infra import export_schemas
from infra.export_schemas import advice, compare, differences, event_schema, exported, text_of
from processors.policy import Policy, parse

SCHEMAS = Path(__file__).resolve().parent.parent / "schemas"


def test_every_model_has_its_exported_schema() -> None:
    found = differences()
    assert not found, "\n" + "\n".join(advice(name, *what) for name, what in found.items())


def test_one_file_for_each_type() -> None:
    assert {f"events/{type_}.json" for type_ in BY_TYPE} | {"policy.json"} == set(exported())


def test_exporting_twice_gives_the_same_bytes() -> None:
    assert {name: text_of(schema) for name, schema in exported().items()} == {n: text_of(s) for n, s in exported().items()}


def changed(**changes: Any) -> dict[str, Any]:
    """The schema of a training step's fact with one field changed, or removed (None)."""
    schema = copy.deepcopy(event_schema("keepstep.training_progress.v1"))
    fields = schema["$defs"]["TrainingProgress"]["properties"]
    for name, value in changes.items():
        if value is None:
            del fields[name]
        else:
            fields[name] = {**fields.get(name, {}), **value}
    return schema


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "same"),
        ({"note": {"type": "string", "default": ""}}, "additive"),
        ({"phase": {"enum": ["startup", "step", "evaluation", "checkpoint", "undeclared", "warm_up"]}}, "additive"),
        ({"samples": {"maxItems": 512}}, "additive"),
        ({"rank": {"description": "other words"}}, "additive"),
        ({"phase": {"enum": ["startup", "step"]}}, "breaking"),
        ({"samples": {"maxItems": 8}}, "breaking"),
        ({"rank": {"type": "string"}}, "breaking"),
        ({"rank": {"minimum": 1}}, "breaking"),
        ({"restored_step": {"default": 0}}, "breaking"),
        ({"dropped": None}, "breaking"),
    ],
)
def test_what_a_change_means_for_old_events(change: dict[str, Any], verdict: str) -> None:
    assert compare(event_schema("keepstep.training_progress.v1"), changed(**change))[0] == verdict


def test_a_new_required_field_is_breaking_and_one_no_longer_required_is_not() -> None:
    old = event_schema("keepstep.training_progress.v1")
    new = changed(note={"type": "string"})
    new["$defs"]["TrainingProgress"]["required"] = sorted([*new["$defs"]["TrainingProgress"]["required"], "note"])
    assert compare(old, new)[0] == "breaking"
    assert compare(new, old)[0] == "breaking"
    looser = copy.deepcopy(old)
    looser["$defs"]["TrainingProgress"]["required"].remove("rank")
    assert compare(old, looser)[0] == "additive"


def test_a_drifted_file_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for name, schema in exported().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text_of(schema), encoding="utf-8")
    assert differences(tmp_path) == {}
    path = tmp_path / "events" / "keepstep.signal.v1.json"
    signal = json.loads(path.read_text(encoding="utf-8"))
    signal["$defs"]["Signal"]["properties"]["was_there"] = {"type": "integer"}
    path.write_text(text_of(signal), encoding="utf-8")
    (tmp_path / "events" / "keepstep.forgotten.v1.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(export_schemas, "FOLDER", tmp_path)
    monkeypatch.setattr(export_schemas, "differences", lambda: differences(tmp_path))
    assert export_schemas.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "keepstep.signal.v1" in told and "bump the version" in told and "keepstep.forgotten.v1" in told
    assert export_schemas.main([]) == 1 and "was_there" in path.read_text(encoding="utf-8"), "breaking: not overwritten"
    assert export_schemas.main(["--unreleased"]) == 0 and differences(tmp_path) == {}


def test_the_default_policy_file_is_the_models_defaults_and_names_each() -> None:
    text = (SCHEMAS / "policy.yaml").read_text(encoding="utf-8")
    assert parse(text) == Policy()

    def keys(value: Any, at: str = "") -> set[str]:
        return {at} | {k for name, v in value.items() for k in keys(v, f"{at}.{name}")} if isinstance(value, dict) else {at}

    assert keys(yaml.safe_load(text)) == keys(Policy().model_dump(mode="json"))


def test_every_threshold_of_the_default_policy_says_where_it_comes_from() -> None:
    lines = (SCHEMAS / "policy.yaml").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\s*\w+: *[\d.]+\s*(#|$)", line) and "version:" not in line:
            before = lines[number - 1].strip() if number else ""
            assert "#" in line or before.startswith("#"), f"line {number + 1} has no source: {line}"
