"""Writes the golden recordings from the stories: one line a record, {"sequence", "time", "subject", "data"}.

A change that makes them differ changes what the decider does with ledgers that exist: say so in its commit, and run this again. The ones
that must fail are made from a good one by changing one thing each, the thing that their name says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from events.ports import LEDGER, Record
from processors.decider import is_own
from processors.replay import replay
from tests.decider_bench import SCRIPTS, told

HERE = Path(__file__).parent
GOOD = ("rank_killed", "gpu_lost", "silent_node", "shared_cause", "hold", "approve", "observe", "start_fails")
BROKEN_OF = "gpu_lost"


def write(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for r in records:
            line = {"sequence": r.sequence, "time": r.time_ns, "subject": r.subject, "data": r.data.decode()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Record]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        v = json.loads(line)
        records.append(Record(LEDGER, v["sequence"], v["time"], v["subject"], v["data"].encode()))
    return records


def _at(records: list[Record], part: bytes) -> int:
    """The place of the first decision of that rung or verb, or of the first input with those bytes."""
    return next(i for i, r in enumerate(records) if part in r.data)


def _changed(part: bytes, old: bytes, new: bytes) -> Callable[[list[Record]], list[Record]]:
    def change(records: list[Record]) -> list[Record]:
        i = _at(records, part)
        data = records[i].data.replace(old, new, 1)
        assert data != records[i].data
        return [*records[:i], replace(records[i], data=data), *records[i + 1 :]]

    return change


def _missing(records: list[Record]) -> list[Record]:
    i = _at(records, b'"verb":"evict_node"')
    return [*records[:i], *records[i + 1 :]]


def _extra(records: list[Record]) -> list[Record]:
    i = _at(records, b'"verb":"evict_node"')
    other = records[i].data.replace(b'"node":"c"', b'"node":"d"')
    return [*records[: i + 1], replace(records[i], data=other), *records[i + 1 :]]


def _reordered(records: list[Record]) -> list[Record]:
    i = _at(records, b'"verb":"stop_attempt"')
    assert is_own(records[i + 1].subject)
    a, b = records[i], records[i + 1]
    swapped = (replace(a, subject=b.subject, data=b.data), replace(b, subject=a.subject, data=a.data))
    return [*records[:i], *swapped, *records[i + 2 :]]


def _input_lost(records: list[Record]) -> list[Record]:
    i = _at(records, b"keepstep.progress_noted")
    return [*records[:i], *records[i + 1 :]]


#: name -> how a good recording is spoilt.
BROKEN: dict[str, Callable[[list[Record]], list[Record]]] = {
    "changed_byte": _changed(b'"rung":"evict"', b"in its place s", b"in its place S"),
    "changed_rule": _changed(b'"rung":"evict"', b'"nodes":["c"]', b'"nodes":["a"]'),
    "changed_input": _changed(b'"symptom":"gpu_unavailable"', b'"node":"c"', b'"node":"d"'),
    "changed_input_without_effect": _changed(b"keepstep.progress_noted", b'"step":2', b'"step":3'),
    "missing_decision": _missing,
    "extra_decision": _extra,
    "reordered_decisions": _reordered,
    "missing_input": _input_lost,
}


def main() -> None:
    paths = {path.stem: path for path in SCRIPTS}
    for name in GOOD:
        write(HERE / f"{name}.jsonl", told(paths[name]).records)
    digests = {name: [(found := replay(read(HERE / f"{name}.jsonl"))).decisions, found.digest] for name in GOOD}
    (HERE / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    for name, spoil in BROKEN.items():
        write(HERE / f"must_fail_{name}.jsonl", spoil(told(paths[BROKEN_OF]).records))


if __name__ == "__main__":
    main()
