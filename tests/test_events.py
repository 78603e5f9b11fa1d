"""Events on the wire: canonical bytes, refusals, ids, upcasting, and the clock's text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from events import clock, registry
from events.decision import DecisionMade, IncidentClosed
from events.envelope import AnyEvent, Fact
from events.hardware import KernelLog, KernelRecord
from events.ids import derived_id, random_id
from events.incident import Signal
from events.job import JobDeclared, Place
from events.presence import Heartbeat, RankProcess
from events.registry import BY_TYPE, Malformed, canonical, make, parse
from events.training import RankExit, StepSample, TrainingProgress


def examples(most: int) -> settings:
    """So many examples, however slow the machine is just now."""
    return settings(max_examples=most, deadline=None, suppress_health_check=[HealthCheck.too_slow])


TEXT = st.text(max_size=40)
NAME = st.text(min_size=1, max_size=40)
NS_TIME = st.integers(min_value=0, max_value=4_000_000_000 * clock.NS)
COUNT = st.integers(min_value=0, max_value=2**53)
NUMBER = st.none() | st.floats()

FACTS: st.SearchStrategy[Fact] = st.one_of(
    st.builds(
        TrainingProgress,
        rank=COUNT,
        world_size=st.integers(1, 100_000),
        phase=st.sampled_from(["startup", "step", "evaluation", "checkpoint", "undeclared"]),
        progress=COUNT,
        step=st.integers(-1, 2**40),
        samples=st.lists(
            st.builds(
                StepSample,
                step=COUNT,
                ended_ns=COUNT,
                step_time_s=st.floats(min_value=0, allow_nan=False),
                loss=NUMBER,
                grad_norm=NUMBER,
                mfu=NUMBER,
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(
        Heartbeat,
        ranks=st.lists(st.builds(RankProcess, rank=COUNT, pid=COUNT, state=st.sampled_from("RSDTZ-")), max_size=3).map(tuple),
        parked=COUNT,
    ),
    st.builds(
        KernelLog,
        records=st.lists(st.builds(KernelRecord, text=TEXT, facility=COUNT, hearsay=st.booleans()), max_size=3).map(tuple),
        origin=TEXT,
    ),
    st.builds(RankExit, rank=COUNT, world_size=st.just(4), code=st.none() | st.integers(-200, 255), stderr_tail=TEXT),
    st.builds(
        Signal,
        symptom=st.sampled_from(["rank_exit", "gpu_unavailable", "job_hang"]),
        node=TEXT,
        confidence=st.sampled_from(["high", "low", "sympathetic"]),
        evidence=TEXT,
        seen_ns=COUNT,
    ),
    st.builds(
        JobDeclared,
        job=NAME,
        nodes=st.lists(st.builds(Place, node=NAME, rack=TEXT), min_size=1, max_size=3).map(tuple),
        command=st.lists(TEXT, min_size=1, max_size=3).map(tuple),
        environment=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
    ),
)
EVENTS: st.SearchStrategy[AnyEvent] = st.builds(
    lambda fact, **envelope: make(fact, **envelope),
    FACTS,
    id=st.text(min_size=1, max_size=26),
    source=NAME,
    subject=TEXT,
    time=NS_TIME,
    job=TEXT,
    attempt=COUNT,
    number=COUNT,
    causes=st.lists(st.text("0123456789abcdefghijklmnopqrstuv", min_size=1, max_size=26), max_size=3).map(tuple),
)


def progress(loss: float | None) -> AnyEvent:
    sample = StepSample(step=7, ended_ns=1, step_time_s=0.5, loss=loss, grad_norm=math.inf, mfu=-math.inf)
    fact = TrainingProgress(rank=0, world_size=4, phase="step", progress=9, step=7, samples=(sample,))
    return make(fact, id="a", source="node/n1/trainer", subject="n1", time=1_500_000_000, job="gpt", attempt=2)


@examples(150)
@given(EVENTS)
def test_bytes_and_back_are_the_identity(event: AnyEvent) -> None:
    raw = canonical(event)
    again = parse(raw)
    assert canonical(again) == raw
    assert type(again) is type(event)
    if b'"NaN"' not in raw:
        assert again == event


@examples(80)
@given(EVENTS)
def test_canonical_bytes_are_sorted_utf8_without_blanks(event: AnyEvent) -> None:
    raw = canonical(event)
    value = json.loads(raw, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    def keys_sorted(part: Any) -> bool:
        if isinstance(part, dict):
            return list(part) == sorted(part) and all(map(keys_sorted, part.values()))
        return all(map(keys_sorted, part)) if isinstance(part, list) else True

    assert keys_sorted(value)
    spaced = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    packed = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    assert len(raw) <= len(spaced) and raw.count(b" ") == packed.count(b" "), "blanks stand only inside texts"


#: Pinned: another byte here means that every digest in every log changes.
NAN_LOSS = (
    b'{"attempt":2,"data":{"phase":"step","progress":9,"rank":0,"samples":[{"ended_ns":1,"grad_norm":"Infinity","loss":"NaN",'
    b'"mfu":"-Infinity","step":7,"step_time_s":0.5}],"step":7,"world_size":4},"id":"a","job":"gpt","source":"node/n1/trainer",'
    b'"specversion":"1.0","subject":"n1","time":"1970-01-01T00:00:01.500000000Z","type":"keepstep.training_progress.v1"}'
)


def test_a_nan_loss_survives_and_its_bytes_are_pinned() -> None:
    assert canonical(progress(math.nan)) == NAN_LOSS
    sample = parse(NAN_LOSS).data.samples[0]
    assert math.isnan(sample.loss) and sample.grad_norm == math.inf and sample.mfu == -math.inf
    assert parse(canonical(progress(None))).data.samples[0].loss is None, "no loss is not a NaN loss"


def test_equal_events_have_equal_bytes_in_whatever_order_their_keys_came() -> None:
    backwards = json.dumps(dict(reversed(json.loads(NAN_LOSS).items())), indent=2).encode()
    assert canonical(parse(backwards)) == NAN_LOSS


def test_every_event_has_what_cloudevents_requires() -> None:
    value = json.loads(canonical(progress(1.0)))
    assert {"id", "source", "specversion", "type"} <= set(value) and value["specversion"] == "1.0"
    assert all(name.isascii() and name.isalnum() and name == name.lower() for name in value), "attribute names of the standard"
    for missing in ("id", "source", "specversion", "type", "subject", "time", "data"):
        less = {k: v for k, v in value.items() if k != missing}
        with pytest.raises(Malformed):
            parse(json.dumps(less).encode())


@pytest.mark.parametrize("type_", sorted(BY_TYPE))
def test_every_type_is_named_for_its_kind_and_refuses_unknown_fields(type_: str) -> None:
    assert type_ == f"keepstep.{BY_TYPE[type_].kind()}.v{type_.rpartition('.v')[2]}"
    raw = json.dumps(
        {"specversion": "1.0", "id": "a", "source": "s", "type": type_, "subject": "", "time": "1970-01-01T00:00:00Z",
         "data": {"no_such_field": 1}}
    ).encode()  # fmt: skip
    with pytest.raises(Malformed, match=r"no_such_field|more|required"):
        parse(raw)


def with_(**changes: Any) -> bytes:
    return json.dumps({**json.loads(NAN_LOSS), **changes}).encode()


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"not json",
    "not UTF-8": b'{"id":"\xff\xfe"}',
    "a list": b"[]",
    "a number": b"17",
    "null": b"null",
    "cut": NAN_LOSS[:100],
    "two": NAN_LOSS + NAN_LOSS,
    "NUL bytes": b"\0" * 1000,
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep inside": NAN_LOSS[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a huge number": with_(attempt=1).replace(b'"attempt": 1', b'"attempt": 1' + b"0" * 5000),
    "a megabyte of id": with_(id="x" * 1_000_000),
    "no type": json.dumps({k: v for k, v in json.loads(NAN_LOSS).items() if k != "type"}).encode(),
    "another's type": with_(type="com.example.other.v1"),
    "a type that is a list": with_(type=["keepstep.tick.v1"]),
    "a future version": with_(type="keepstep.training_progress.v9"),
    "data is a text": with_(data="x"),
    "a negative attempt": with_(attempt=-1),
    "a bad time": with_(time="yesterday"),
    "a time before 1970": with_(time="1969-12-31T23:59:59Z"),
    "month 13": with_(time="2026-13-01T00:00:00Z"),
    "Arabic digits": with_(time="٢٠٢٦-01-01T00:00:00Z"),
    "a time that is NaN": NAN_LOSS.replace(b'"1970-01-01T00:00:01.500000000Z"', b"NaN"),
    "another spec": with_(specversion="0.3"),
    "an unknown attribute": with_(extra=1),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_event_is_refused_in_one_sentence(raw: bytes) -> None:
    with pytest.raises(Malformed) as refusal:
        parse(raw)
    told = str(refusal.value)
    assert 0 < len(told) < 700 and "\n" not in told.strip() and "Traceback" not in told


@examples(200)
@given(st.binary(max_size=200))
@example(NAN_LOSS)
def test_any_bytes_are_an_event_or_malformed(raw: bytes) -> None:
    try:
        parse(raw)
    except Malformed:
        pass


@examples(200)
@given(st.integers(0, len(NAN_LOSS) - 1), st.binary(max_size=3))
def test_an_event_with_damage_anywhere_is_an_event_or_malformed(at: int, damage: bytes) -> None:
    try:
        parse(NAN_LOSS[:at] + damage + NAN_LOSS[at + len(damage) :])
    except Malformed:
        pass


def test_events_are_frozen() -> None:
    event = progress(1.0)
    with pytest.raises(ValueError, match="frozen"):
        event.id = "b"
    with pytest.raises(ValueError, match="frozen"):
        event.data.step = 8


def test_derived_ids_are_pinned() -> None:
    assert derived_id("decider", "gpt", "t1", "decision_made", 0) == "0756t9umgcneemhi11qlq2upgo"
    assert derived_id("Ω", "", "", "", -1) == derived_id("Ω", "", "", "", -1)


@examples(100)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT, TEXT, st.integers(0, 9)), min_size=2, max_size=8, unique=True))
def test_different_derivations_have_different_ids(parts: list[tuple[str, str, str, str, int]]) -> None:
    plain = [p for p in parts if not any("\x1f" in text for text in p[:4])]
    ids = {derived_id(*p) for p in plain}
    assert len(ids) == len(set(plain))
    assert all(len(id_) == 26 and id_.isascii() and id_.isalnum() for id_ in ids)


@examples(100)
@given(st.lists(st.integers(0, 2**47), min_size=2, max_size=20), st.binary(min_size=10, max_size=10))
def test_random_ids_sort_by_their_milliseconds(times_ms: list[int], entropy: bytes) -> None:
    ids = {ms: random_id(ms * 1_000_000 + 999_999, entropy) for ms in times_ms}
    assert [ids[ms] for ms in sorted(ids)] == sorted(ids.values())
    assert all(len(id_) == 26 for id_ in ids.values())


def test_random_ids_need_ten_bytes() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        random_id(1, b"short")


@examples(300)
@given(st.integers(0, 253402300799 * clock.NS + 999_999_999))
@example(0)
@example(253402300799 * clock.NS + 999_999_999)
@example(951_782_400 * clock.NS)
def test_clock_text_round_trip_for_any_nanosecond(time_ns: int) -> None:
    text = clock.text_of(time_ns)
    assert clock.ns_of(text) == time_ns
    assert len(text) == 30


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [("1970-01-01T00:00:00Z", 0), ("1970-01-01T00:00:01.5Z", 1_500_000_000), ("1970-01-01T00:00:00.000000001Z", 1)],
)
def test_clock_reads_fewer_decimals(text: str, time_ns: int) -> None:
    assert clock.ns_of(text) == time_ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1970-01-01",
        "1970-01-01T00:00:00",
        "1970-01-01T00:00:00+00:00",
        "1970-01-01T00:00:00.1234567890Z",
        "1970-02-30T00:00:00Z",
    ],
)
def test_clock_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError):
        clock.ns_of(text)


def test_clock_refuses_what_no_calendar_has() -> None:
    for time_ns in (-1, 2**70):
        with pytest.raises(ValueError):
            clock.text_of(time_ns)


@pytest.fixture
def upcasters() -> Iterator[dict[str, Any]]:
    """The registry's table of upcasters, as it was afterwards."""
    before = dict(registry.UPCASTERS)
    yield registry.UPCASTERS
    registry.UPCASTERS.clear()
    registry.UPCASTERS.update(before)


def test_an_old_version_reads_as_the_current_one(upcasters: dict[str, Any]) -> None:
    old = json.loads(NAN_LOSS)
    old["type"] = "keepstep.training_progress.v0"
    old["data"]["global_rank"] = old["data"].pop("rank")
    raw = json.dumps(old).encode()
    with pytest.raises(Malformed):
        parse(raw)

    def rank_renamed(data: dict[str, Any]) -> dict[str, Any]:
        return {("rank" if name == "global_rank" else name): value for name, value in data.items()}

    upcasters["keepstep.training_progress.v0"] = ("keepstep.training_progress.v1", rank_renamed)
    assert canonical(parse(raw)) == NAN_LOSS
    upcasters["keepstep.training_progress.v-1"] = ("keepstep.training_progress.v0", dict)
    old["type"] = "keepstep.training_progress.v-1"
    assert canonical(parse(json.dumps(old).encode())) == NAN_LOSS, "step by step to the current version"


def test_an_old_version_that_does_not_upcast_is_malformed(upcasters: dict[str, Any]) -> None:
    def broken(data: dict[str, Any]) -> dict[str, Any]:
        return {"rank": data["there is no such field"]}

    upcasters["keepstep.signal.v0"] = ("keepstep.signal.v1", broken)
    with pytest.raises(Malformed):
        parse(with_(type="keepstep.signal.v0"))
    upcasters["keepstep.signal.v0"] = ("keepstep.signal.v1", dict)
    with pytest.raises(Malformed, match="does not upcast"):
        parse(with_(type="keepstep.signal.v0"))
    upcasters["keepstep.signal.v0"] = ("keepstep.signal.v0", dict)
    with pytest.raises(Malformed):
        parse(with_(type="keepstep.signal.v0"))


def test_the_upcasters_are_as_they_were() -> None:
    assert not any(type_.endswith((".v0", ".v-1")) for type_ in registry.UPCASTERS)


def test_the_deciders_times_are_whole_numbers() -> None:
    """Nothing of these kinds may be a float: bytes of floats differ between machines' printers, and times lose nanoseconds."""
    for fact in (DecisionMade, IncidentClosed, Signal):
        for name, field in fact.model_fields.items():
            assert field.annotation is not float, f"{fact.__name__}.{name}"
