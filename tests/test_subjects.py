"""Names and tokens: whatever a node or a job is called comes back, and partitions are the server's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from events.ports import TELEMETRY_JOB, TELEMETRY_NODE
from events.subjects import (
    FLEET,
    PARTITIONS,
    TOKEN_LENGTH_MAX,
    BadName,
    ledger,
    matches,
    name,
    partition,
    telemetry_job,
    telemetry_node,
    token,
)
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog, Publisher, connect
from infra.memory import stored_subject
from infra.streams import ensure_streams

_NAMES = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(alphabet=".*> %~_-\t\r\n\x00aZ9ž", max_size=20),
    st.sampled_from(["", "%", "%%", "%20", " ", ".", "..", "*", ">", "~", FLEET, "a.b", "n 1", "$JS", "_INBOX", "🐎" * 30]),
)
_TOKENS = st.text(alphabet="abcXYZ019_-%~.*> ž", max_size=12)


@given(_NAMES)
def test_a_name_becomes_one_token_and_comes_back(original: str) -> None:
    own = token(original)
    assert name(own) == original
    assert own.isascii() and own and not set(own) & set(". *>\t\r\n")
    assert token(name(own)) == own


@given(_NAMES, _NAMES)
def test_different_names_have_different_tokens(a: str, b: str) -> None:
    assert (token(a) == token(b)) == (a == b)


@given(_TOKENS)
def test_a_token_is_read_only_if_it_is_the_one_that_is_written(text: str) -> None:
    try:
        found = name(text)
    except BadName:
        return
    assert token(found) == text


def test_no_job_can_pass_for_the_fleet() -> None:
    assert token(FLEET) == FLEET and name(FLEET) == FLEET
    assert token("~fleet ") != FLEET and token("~") == "%7E"
    with pytest.raises(BadName):
        name("%7Efleet")


@pytest.mark.parametrize("bad", ["a" * (TOKEN_LENGTH_MAX + 1), "ž" * 100, "\ud800"])
def test_names_that_no_subject_can_hold_are_refused_in_a_sentence(bad: str) -> None:
    with pytest.raises(BadName) as error:
        token(bad)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@given(_NAMES, _NAMES)
def test_subjects_have_the_shapes_that_streams_store(node: str, job: str) -> None:
    assert matches(telemetry_node(node, "k"), "telemetry.*.node.*")
    assert matches(telemetry_job(node, job, "k"), "telemetry.*.job.*.*")
    assert matches(ledger(job, "decider", "k"), "ledger.*.*.*")


def _matches_slowly(have: list[str], want: list[str]) -> bool:
    if not want:
        return not have
    if want == [">"]:
        return bool(have)
    return bool(have) and want[0] in ("*", have[0]) and _matches_slowly(have[1:], want[1:])


_PARTS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4)


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4), _PARTS, st.booleans())
def test_matching_equals_the_plain_definition(have: list[str], want: list[str], rest: bool) -> None:
    want = [*want, ">"] if rest else want
    assert matches(".".join(have), ".".join(want)) == _matches_slowly(have, want)


@given(_NAMES)
def test_a_partition_is_in_range_and_the_names_alone(original: str) -> None:
    own = token(original)
    assume(own)
    assert 0 <= partition(own) < PARTITIONS == 8
    assert partition(own) == partition(own, PARTITIONS)


async def test_partitions_and_stored_subjects_are_the_servers(tmp_path: Path) -> None:
    names = ["", "%", "*", ">", "a.b c", "Žluťoučký kůň", "🐎", "~", *(f"node-{i}" for i in range(300))]
    with EmbeddedServer(tmp_path / "bus") as server:
        nc = await connect(server.url, server.role_options("admin"))
        await ensure_streams(nc)
        publisher = Publisher(nc)
        sent = {TELEMETRY_NODE: [], TELEMETRY_JOB: []}  # type: dict[str, list[str]]
        for each in names:
            for stream, subject in (
                (TELEMETRY_NODE, telemetry_node(each, "k")),
                (TELEMETRY_JOB, telemetry_job("n.1", each, "k")),
            ):
                await publisher.publish(subject, b"{}")
                sent[stream].append(stored_subject(stream, subject))
        assert await publisher.close() == []
        for stream, pattern in ((TELEMETRY_NODE, "tn.*.*.*"), (TELEMETRY_JOB, "tj.*.*.*.*")):
            stored = [r.subject async for r in JetStreamLog(nc, stream).read(subjects=[pattern])]
            assert stored == sent[stream]
            assert {int(s.split(".")[1]) for s in stored} == set(range(PARTITIONS))
        await nc.close()
