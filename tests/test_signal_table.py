"""The table of decisions/178 says what the detectors say: every rule of it is in the code, every rule of the code in it, and its thresholds
are the policy's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from events.incident import Confidence, Symptom
from processors.gpu_rules import RULES
from processors.network_health import LIMITS
from processors.policy import Detectors

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "infra/decisions/178-signals-and-their-rules.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("| symptom", "|---"))
]
NAMES = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])}


def test_its_rules_are_in_the_code() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "processors").glob("*.py")))
    for name in NAMES - {"gpu_recovery_*"}:
        assert f'"{name}"' in source, name


def test_the_codes_rules_are_in_it() -> None:
    named = {rule.name for rule in RULES} | {limit.rule for limit in LIMITS}
    pattern = re.compile(
        r'rule="(\w+)"|Trouble\(\s*"\w+", "(\w+)"|_signal\(\s*seen, "\w+", [\w.]+, "\w+", "(\w+)"|(?:self\._signal|_claim)\([^)]*?"(?:high|low)", "(\w+)"'
    )
    for path in sorted((ROOT / "processors").glob("*_health.py")) + [
        ROOT / "processors" / f"{n}.py" for n in ("curves", "pace", "stalls")
    ]:
        for found in pattern.findall(path.read_text()):
            named.add(next(filter(None, found)))
    missing = {name for name in named if name not in NAMES and not name.startswith("gpu_recovery_")}
    assert len(named) >= 40 and missing == set()


def test_symptoms_confidences_and_thresholds_exist() -> None:
    symptoms = {name for group in get_args(Symptom) for name in get_args(group) or (group,)}
    for symptom, _, _, confidence, thresholds in ROWS:
        assert symptom.startswith("by the ") or set(symptom.split(", ")) <= symptoms, symptom
        assert confidence in (*get_args(Confidence), "by the row")
        for key in re.findall(r"`([^`]+)`", thresholds):
            at: object = Detectors()
            for part in key.split("."):
                at = getattr(at, part)
        assert "`" in thresholds or thresholds == "-"
