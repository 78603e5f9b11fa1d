"""The transport's pure parts: shares, names in subjects, what a partition's state is stored as."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import subjects
from events.ports import Record
from events.presence import Heartbeat, Tick
from events.registry import canonical, make
from infra.detector_worker import main
from infra.faust_transport import topics
from infra.faust_transport.appends import Append
from infra.faust_transport.leases import Holder, share, this_process
from infra.faust_transport.settings import NatsSettings
from infra.partition_state import PartitionState, UnreadableState, clock_key, split_key, state_key
from tests.faust_workers import Counter

MINUTE_NS = 60_000_000_000


@given(st.sets(st.text(min_size=1, max_size=5), min_size=1, max_size=20), st.integers(1, 64))
def test_shares_are_fair_and_sum_up(members: set[str], partitions: int) -> None:
    shares = [share(member, members, partitions) for member in members]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1


def test_a_worker_counts_itself_before_others_hear_of_it() -> None:
    assert share("b", ["a"], 8) == 4


@given(st.binary(max_size=60))
def test_a_key_comes_back_from_its_subject(key: bytes) -> None:
    subject = topics.changelog_subject("changelog_node", 7, key)
    assert topics.key_of(subject) == key
    assert subjects.matches(subject, topics.subjects_of("changelog_node", 7))
    assert not subjects.matches(topics.fence("changelog_node", 7), topics.subjects_of("changelog_node", 7))
    assert len(subject.split(".")) == 5
    assert not set(subject) & set(" \t\r\n*>")


@given(st.integers(0, 99), st.text(max_size=30))
def test_a_tables_key_is_taken_apart_again(partition: int, key: str) -> None:
    assert split_key(state_key(partition, key)) == (partition, key)
    assert split_key(clock_key(partition)) == (partition, None)


@pytest.mark.parametrize("topic", ["telemetry", "changelog_", "changelog_A", "LEDGER", ""])
def test_other_topics_are_refused(topic: str) -> None:
    with pytest.raises(topics.NoSuchTopic, match="topics are"):
        topics.stream_of(topic)


def test_a_frame_must_fit_what_may_wait() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NatsSettings(group="g", worker="w", frame_records_max=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--detector", "node", "--worker", ""], "needs a name"),
        (["--detector", "node", "--worker", "w", "--frame-records-max", "0"], "at least 1"),
        (["--detector", "node", "--worker", "w", "--state-interval-s", "nan"], "choose 0.01"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_holder_knows_the_dead_from_the_living() -> None:
    me = this_process("w")
    assert Holder.decode(me.encode()) == me
    assert not me.is_gone()
    assert Holder("w", "x", me.boot, me.pid, me.started + 1).is_gone()
    assert not Holder("w", "x", "another boot", me.pid, 1).is_gone()
    assert Holder.decode(b"") is None
    assert Holder.decode(b"[1]") is None


def _record(sequence: int, node: str, time_ns: int, data: bytes | None = None) -> Record:
    event = make(Heartbeat(), id=f"{node}-{sequence}", source="s", subject=node, time=1)
    raw = canonical(event) if data is None else data
    return Record("TELEMETRY_NODE", sequence, time_ns, f"tn.1.{node}.heartbeat", raw)


def _tick(sequence: int, time_ns: int) -> Record:
    event = make(Tick(), id="tick", source="bus/clock", subject="clock", time=0)
    return Record("TELEMETRY_NODE", sequence, time_ns, subjects.tick(subjects.NODE, 0), canonical(event))


def _letters_last(append: Append) -> bool:
    return append.subject.startswith("deadletter")


def test_a_restored_state_goes_on_as_if_it_had_never_stopped() -> None:
    history = [_tick(i, i * 10**9) if i % 5 == 0 else _record(i, f"n{i % 3}", i * 10**9) for i in range(1, 60)]
    history[20] = _record(21, "n1", 21 * 10**9, b"garbage")
    whole = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    want = asyncio.run(whole.feed(history))
    for cut in range(0, 59, 7):
        first = PartitionState(Counter(), 1, "TELEMETRY_NODE")
        out = asyncio.run(first.feed(history[:cut]))
        taken = first.snapshot()
        second = PartitionState(Counter(), 1, "TELEMETRY_NODE")
        second.restore([*taken.keys, taken.clock] if cut else [])
        out += asyncio.run(second.feed(history[max(0, cut - 4) :]))  # some are read again
        assert sorted(out, key=_letters_last) == sorted(want, key=_letters_last)
        assert second.snapshot().clock == whole.snapshot().clock


def test_keys_that_are_ahead_of_the_clock_change_nothing() -> None:
    """A crash after the keys were written and before the clock was."""
    history = [_record(i, f"n{i % 3}", i) for i in range(1, 30)]
    live = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    want = asyncio.run(live.feed(history[:10]))
    old = live.snapshot()
    want += asyncio.run(live.feed(history[10:20]))
    new = live.snapshot()
    back = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    back.restore([*new.keys, old.clock])
    assert back.sequence == 10
    assert asyncio.run(back.feed(history[10:])) == asyncio.run(live.feed(history[20:]))
    assert {k: v.state for k, v in back.fold.keys.items()} == {k: v.state for k, v in live.fold.keys.items()}


def test_a_flood_is_counted_when_its_minute_is_over() -> None:
    state = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    flood = [_record(i, "n1", MINUTE_NS + i, b"{") for i in range(1, 251)]
    kept = asyncio.run(state.feed(flood))
    assert len(kept) == 100
    assert len({letter.headers["Nats-Msg-Id"] for letter in kept}) == 100
    (count,) = asyncio.run(state.feed([_tick(251, 2 * MINUTE_NS)]))
    assert json.loads(count.data)["count"] == 150
    assert count.subject == "deadletter.TELEMETRY_NODE.n1"


def test_history_that_the_broker_lost_is_not_skipped_when_it_comes_anew() -> None:
    state = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    asyncio.run(state.feed([_record(i, "n1", i) for i in range(1, 11)]))
    assert not state.clamp(10)
    assert state.clamp(4)
    (again,) = asyncio.run(state.feed([_record(5, "n1", 5)]))
    assert b'"missing":11' in again.data


def test_state_that_can_not_be_read_says_what_to_do() -> None:
    state = PartitionState(Counter(), 1, "TELEMETRY_NODE")
    with pytest.raises(UnreadableState, match="remove the changelog"):
        state.restore([(state_key(1, "n1"), b'{"sequence":1}')])
