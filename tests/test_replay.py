"""Replay: golden recordings come out without a difference, the spoilt ones name the first event that differs and show both."""

from __future__ import annotations

import json
from dataclasses import replace as with_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.decision import EvidenceJudged
from events.ids import derived_id
from events.registry import canonical, parse
from processors import judge
from processors.decider import Decider, is_own
from processors.replay import replay
from tests.decider_bench import SCRIPTS, told
from tests.golden.make import BROKEN, GOOD, HERE, _at, read
from tests.stories import Story

#: What each replay of a golden recording must come to: so many decisions, and the digest of their stream.
DIGESTS = json.loads((HERE / "digests.json").read_text())

#: Of the spoilt ones: what is recorded there, what is derived instead, and what the sentence says.
FIRST = {
    "changed_byte": ("decision_made", "decision_made", "not what follows"),
    "changed_rule": ("decision_made", "decision_made", "not what follows"),
    "changed_input": ("evidence_judged", "evidence_judged", "not what follows"),
    "changed_input_without_effect": ("incident_opened", "incident_opened", "not what follows"),
    "missing_decision": ("intent_issued", "intent_issued", "not what follows"),
    "extra_decision": ("intent_issued", "intent_issued", "not what follows"),
    "reordered_decisions": ("intent_issued", "intent_issued", "not what follows"),
    "missing_input": ("incident_opened", "incident_opened", "not what follows"),
}


@pytest.mark.parametrize("name", GOOD)
def test_golden_recordings_replay_without_a_difference(name: str) -> None:
    result = replay(read(HERE / f"{name}.jsonl"))
    assert result.identical and not result.pending and not result.unread, result.divergence
    assert [result.decisions, result.digest] == DIGESTS[name]


def test_each_spoilt_recording_is_there() -> None:
    assert set(FIRST) == set(BROKEN)
    assert {path.stem for path in HERE.glob("*.jsonl")} == {*GOOD, *(f"must_fail_{name}" for name in BROKEN)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_spoilt_recording_names_the_first_that_differs(name: str) -> None:
    records = read(HERE / f"must_fail_{name}.jsonl")
    result = replay(records)
    found = result.divergence
    assert found is not None and not result.identical
    good = read(HERE / "gpu_lost.jsonl")
    recorded, derived, why = FIRST[name]
    assert recorded in found.recorded.split(" ", 1)[0] and derived in found.derived.split(" ", 1)[0] and why in found.why
    at = next(r for r in records if r.sequence == found.sequence and f"{r.subject} {r.data.decode()}" == found.recorded)
    assert found.derived != found.recorded and found.trigger <= at.sequence
    if name.startswith(("changed_byte", "changed_rule", "missing_decision", "extra", "reordered")):
        assert found.derived in {f"{r.subject} {r.data.decode()}" for r in good}


def test_a_decision_that_nothing_asked_for() -> None:
    records = read(HERE / "gpu_lost.jsonl")
    forged = with_(records[_at(records, b'"verb":"evict_node"')], sequence=len(records) + 1)
    other = with_(forged, data=forged.data.replace(b'"node":"c"', b'"node":"d"'))
    result = replay([*records, other])
    assert result.divergence is not None and result.divergence.sequence == len(records) + 1
    assert result.divergence.derived == "" and "nothing follows" in result.divergence.why
    assert replay([*records, forged]).identical  # a second copy of what stands there is none


def test_what_is_not_recorded_yet_is_pending() -> None:
    records = read(HERE / "gpu_lost.jsonl")
    last = max(i for i, r in enumerate(records) if not is_own(r.subject))
    result = replay(records[: last + 1])
    assert result.identical and result.pending == len(records) - last - 1 > 0


def test_time_is_part_of_what_is_compared() -> None:
    """An input that another moment was written to: the digest in the next decision shows it."""
    records = read(HERE / "gpu_lost.jsonl")
    i = _at(records, b"keepstep.progress_noted")
    records[i] = with_(records[i], time_ns=records[i].time_ns + 1)
    assert not replay(records).identical


def test_bytes_put_together_are_canonical() -> None:
    """What the decider writes without the envelope's class is what the class would write."""
    seen = 0
    for path in SCRIPTS:
        decider = Decider()
        for record in told(path).records:
            if is_own(record.subject):
                continue
            for out in decider.feed(record):
                event = parse(out.data)
                assert canonical(event) == out.data
                assert event == out.event and event.data == out.fact and event.id == out.id
                seen += 1
    assert seen > 200


@settings(max_examples=60, deadline=None)
@given(job=st.text(min_size=1, max_size=30), node=st.text(min_size=1, max_size=30), text=st.text(max_size=60))
def test_bytes_of_any_names_are_canonical(job: str, node: str, text: str) -> None:
    from events import subjects
    from events.clock import NS
    from events.incident import Signal
    from events.job import JobDeclared, Place

    story = Story()
    try:
        subjects.token(job)
    except subjects.BadName:
        return
    story.say(JobDeclared(job=job, nodes=(Place(node=node),), command=("x",)), "operator", job)
    story.now += NS
    fact = Signal(symptom="gpu_unavailable", node=node, confidence="high", evidence=text, seen_ns=story.now)
    story.say(fact, "detector", job, attempt=1)
    own = [r for r in story.records if is_own(r.subject)]
    assert len(own) >= 4
    for record in own:
        event = parse(record.data)
        assert canonical(event) == record.data
        assert record.subject == subjects.ledger(event.job, "decider", event.data.kind())
    assert replay(story.records).identical


def test_verdicts_are_what_their_class_would_make() -> None:
    for record in (r for path in SCRIPTS for r in told(path).records if r.subject.endswith(".evidence_judged")):
        fact = parse(record.data).data
        values = {name: getattr(fact, name) for name in EvidenceJudged.model_fields}
        assert judge._judged(**values) == fact and list(judge._judged(**values).__dict__) == list(fact.__dict__)


def test_ids_are_base32hex() -> None:
    from base64 import b32hexencode
    from hashlib import sha256

    for i in range(2000):
        text = "\x1f".join(("d", "ключ", f"t{i}", "kind", str(i)))
        plain = b32hexencode(sha256(text.encode()).digest()[:20]).decode().lower()[:26]
        assert derived_id("d", "ключ", f"t{i}", "kind", i) == plain
