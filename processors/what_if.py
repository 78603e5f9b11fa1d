"""What another policy would have decided on the same inputs. The world's answers are those of the real run, so what is said after the
first difference is what the rules would say to them, not what the world would have done. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from events.decision import DecisionMade
from events.job import PolicyAdopted
from events.ports import Record
from events.registry import Malformed, canonical, parse
from processors.decider import Decider, is_own
from processors.policy import digest
from processors.policy import parse as parse_policy


def what_if(records: Iterable[Record], text: str) -> dict[str, Any]:
    """Decisions with `text` in place of every policy in the ledger, beside those that were recorded. Raises BadPolicy."""
    parse_policy(text)
    decider = Decider()
    recorded: Counter[str] = Counter()
    would: Counter[str] = Counter()
    for record in records:
        if is_own(record.subject):
            try:
                fact = parse(record.data).data
            except Malformed:
                continue
            if isinstance(fact, DecisionMade):
                recorded[_line(fact)] += 1
            continue
        for out in decider.feed(_with_policy(record, text)):
            if isinstance(out.event.data, DecisionMade):
                would[_line(out.event.data)] += 1
    same = recorded & would
    return {
        "recorded": recorded.total(),
        "what_if": would.total(),
        "same": same.total(),
        "only_recorded": sorted((recorded - same).elements()),
        "only_what_if": sorted((would - same).elements()),
    }


def _with_policy(record: Record, text: str) -> Record:
    if not record.subject.endswith(".policy_adopted"):
        return record
    try:
        event = parse(record.data)
    except Malformed:
        return record
    data = event.model_copy(update={"data": PolicyAdopted(text=text, digest=digest(text), author=event.data.author)})
    return Record(record.stream, record.sequence, record.time_ns, record.subject, canonical(data), record.headers)


def _line(fact: DecisionMade) -> str:
    nodes = f" {','.join(fact.nodes)}" if fact.nodes else ""
    veto = f" vetoed by {fact.vetoed}" if fact.vetoed else ""
    return f"job {fact.job} epoch {fact.epoch} attempt {fact.attempt}: {fact.rung}{nodes} by {fact.rule} ({fact.mode}{veto})"
