"""Labelled cases, classified and scored: one JSON object a line with `id`, `text` and, where there is a label, `expect`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processors.catalogue import Catalogue, pci_address

#: A file of cases is read whole lines at a time; a longer one is no case.
CASE_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What the catalogue says of one case. `device` as the text spells it; `row`: of the catalogue, '' where none fits."""

    id: str
    class_: str
    xid: int | None
    device: str | None
    first_action: str
    row: str

    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "class": self.class_, "xid": self.xid, "device": self.device, "first_action": self.first_action}


def answer(catalogue: Catalogue, id: str, text: str) -> Answer:
    """One answer for a text of any number of lines. Where no row fits: unknown if a word in it speaks of trouble, else an ordinary
    line, benign."""
    finding = catalogue.judge(text)
    if finding is None:
        return Answer(id, "unknown" if catalogue.alarming(text) else "benign", None, None, "record", "")
    row = finding.row
    device = (finding.named or finding.device) or None
    return Answer(id, row.class_, finding.xid if finding.xid >= 0 else None, device, row.first_action, row.id)


def read_cases(path: Path, bad: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The cases of a file; what is none is told to `bad` in a sentence. Raises OSError."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(CASE_BYTES_MAX):
            number += 1
            if not raw.strip():
                continue
            try:
                case = json.loads(raw.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                bad(f"line {number} of {path} is not JSON; a case is one JSON object a line with id and text")
                continue
            if not isinstance(case, dict) or not isinstance(case.get("text"), str):
                bad(f"line {number} of {path} is no case: it needs the field text (and id, and expect where it is labelled)")
                continue
            if case.get("expect") is not None and not isinstance(case["expect"], dict):
                bad(f"line {number} of {path}: expect must be an object with class, device and first_action")
                continue
            yield {**case, "id": str(case.get("id", number))}


@dataclass(slots=True)
class Scores:
    """Answers against labels, by the rules of such cases: a class is right if it is the label or in class_also_ok, an action if it
    is the label or in also_ok; a device counts unless the label is benign."""

    labelled: int = 0
    class_right: int = 0
    device_asked: int = 0
    device_right: int = 0
    action_right: int = 0
    harmless_evicted: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    disagreements: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: dict[str, Any], got: Answer) -> None:
        want = case.get("expect")
        if not want or not isinstance(want.get("class"), str):
            return
        label = want["class"]
        self.labelled += 1
        self.labels[label] += 1
        self.answers[got.class_] += 1
        class_right = got.class_ in (label, *_names(want.get("class_also_ok")))
        if class_right:
            self.class_right += 1
            self.found[label] += 1
            self.held[got.class_] += 1
        device_right = True
        if label != "benign":
            self.device_asked += 1
            device_right = same_device(case["text"], got.device, want.get("device"))
            self.device_right += device_right
        actions = (want.get("first_action"), *_names(want.get("also_ok")))
        action_right = got.first_action in actions
        self.action_right += action_right
        self.harmless_evicted += label == "benign" and got.first_action == "evict" and "evict" not in actions
        if not (class_right and device_right and action_right):
            wrong = [
                name
                for name, right in (("class", class_right), ("device", device_right), ("first_action", action_right))
                if not right
            ]
            self.disagreements.append(
                {"id": got.id, "wrong": wrong, "got": got.plain(), "row": got.row, "want": {k: want.get(k) for k in ("class", "class_also_ok", "device", "first_action", "also_ok")}, "text": case["text"][:200]}
            )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        faults = self.labelled - self.labels["benign"]
        claimed = self.labelled - self.answers["benign"] - self.answers["unknown"]
        classes = sorted(set(self.labels) | set(self.answers))
        return {
            "cases": self.labelled,
            "class": _share(self.class_right, self.labelled),
            "device": _share(self.device_right, self.device_asked),
            "first_action": _share(self.action_right, self.labelled),
            "precision": _share(sum(n for name, n in self.held.items() if name not in ("benign", "unknown")), claimed),
            "recall": _share(sum(n for name, n in self.found.items() if name != "benign"), faults),
            "harmless_evicted": self.harmless_evicted,
            "by_class": {
                name: {
                    "cases": self.labels[name], "answers": self.answers[name],
                    "precision": _share(self.held[name], self.answers[name]), "recall": _share(self.found[name], self.labels[name]),
                }
                for name in classes
            },
        }  # fmt: skip


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def same_device(text: str, got: str | None, want: Any) -> bool:
    """The same device, however a PCI address is written; or another name that the text gives it right beside."""
    want = want if isinstance(want, str) and want else None
    if got is None or want is None:
        return got is want
    if pci_address(got) == pci_address(want):
        return True
    beside = rf"[\s:]{{1,3}}(?:{re.escape(want)})"
    return bool(re.search(re.escape(got) + beside, text) or re.search(rf"{re.escape(want)}[\s:]{{1,3}}{re.escape(got)}", text))


def score(catalogue: Catalogue, cases: Iterable[dict[str, Any]]) -> tuple[list[Answer], Scores]:
    scores, answers = Scores(), []
    for case in cases:
        got = answer(catalogue, case["id"], case["text"])
        answers.append(got)
        scores.add(case, got)
    return answers, scores
