"""The census over hand-made ledgers: counts, times, what is planned, what can't be read, and what a query may do."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from events.decision import DecisionMade
from events.incident import Explicit, Implicit, Manual
from events.job import RestartRequested, StopRequested
from events.ports import LEDGER, Record
from events.registry import parse
from infra.census import VIEWS, CensusError, load, plain, run_sql, summary, view
from tests.ledgers import Story, killed_rank, ns
from tests.test_stories import SCRIPTS, play


def rows(con: Any, sql: str) -> list[dict[str, Any]]:
    return run_sql(con, sql).as_dicts()


@pytest.fixture(scope="module")
def con() -> Any:
    return load(three_incidents().records)


def three_incidents() -> Story:
    """A killed rank, an evicted machine, and a hang that is still open; then a stop with a restart, and a restart."""
    story = Story()
    killed_rank(story, "i1", 10)
    story.signal("gpu_unavailable", 31, seen_s=30, node="n3", confidence="high", evidence="Xid 79")
    story.opened("i2", "gpu_unavailable", 31, first_s=30, epoch=2)
    decision = story.decided("i2", "evict", "evict_named", 32, nodes=("n3",), standbys=("s1",))
    story.acted("i2", decision, "evict_node", 32, node="n3")
    story.acted("i2", decision, "wake_standby", 32, node="s1")
    story.progress(30, 40, first=True, restored=24, attempt=3)
    story.closed(
        "i2", "gpu_unavailable", "evict", "recovered", 40, first_s=30, decided_ns=ns(32), back_ns=ns(40), nodes=("n3",),
        step_before=29, step_restored=24,
    )  # fmt: skip
    story.opened("i3", "job_hang", 61, first_s=60, epoch=3)
    return story


def planned(story: Story) -> Story:
    story.progress(50, 99)
    story.say("operator", StopRequested(job="gpt", reason="maintenance", author="ada"), 100)
    story.decided("", "planned", "planned", 100.5)
    story.say("operator", RestartRequested(job="gpt", reason="done", author="ada", symptom="code_update"), 160)
    story.decided("", "planned", "planned", 160.5)
    story.progress(51, 170, first=True, restored=49, attempt=4)
    story.say("operator", RestartRequested(job="gpt", reason="again", author="ada"), 200)
    story.say("operator", StopRequested(job="gpt", reason="enough", author="ada"), 300)
    return story


def test_an_incidents_row_has_its_times_and_steps() -> None:
    con = load(three_incidents().records)
    first, second, third = rows(con, "SELECT * FROM incidents")
    wanted = {
        "job": "gpt", "epoch": 1, "incident": "i1", "symptom": "rank_exit", "category": "explicit", "mechanism": "reattempt",
        "outcome": "recovered", "detect_s": 0.5, "decide_s": 1.0, "recover_s": 3.5, "back_s": 5.0, "steps_lost": 5,
        "first_evidence_ns": ns(10), "opened_ns": ns(10.5), "decided_ns": ns(11.5), "back_ns": ns(15), "nodes": [],
    }  # fmt: skip
    assert first | wanted == first
    assert second | {"mechanism": "evict", "back_s": 10.0, "nodes": ["n3"], "steps_lost": 5} == second
    assert third | {"outcome": "open", "category": "implicit", "mechanism": None, "back_s": None, "steps_lost": None} == third


def test_counts_shares_mechanisms_and_resolution_times() -> None:
    con = load(three_incidents().records)
    assert rows(
        con, "SELECT symptom, incidents, round(share, 3) AS share, category FROM census_by_symptom ORDER BY symptom"
    ) == [
        {"symptom": "gpu_unavailable", "incidents": 1, "share": 0.333, "category": "explicit"},
        {"symptom": "job_hang", "incidents": 1, "share": 0.333, "category": "implicit"},
        {"symptom": "rank_exit", "incidents": 1, "share": 0.333, "category": "explicit"},
    ]
    mechanisms = rows(con, "SELECT mechanism, symptom, incidents, steps_lost FROM mechanism_by_symptom ORDER BY symptom")
    assert [list(row.values()) for row in mechanisms] == [
        ["evict", "gpu_unavailable", 1, 5], ["none", "job_hang", 1, None], ["reattempt", "rank_exit", 1, 5],
    ]  # fmt: skip
    every = {row["time"]: row for row in rows(con, "SELECT * FROM resolution_times WHERE symptom = 'all'")}
    assert list(every) == ["detect", "decide", "recover", "back"]
    assert every["detect"] == {"symptom": "all", "time": "detect", "incidents": 3, "median_s": 1.0, "p99_s": 1.0, "max_s": 1.0}
    assert (every["back"]["incidents"], every["back"]["median_s"], every["back"]["max_s"]) == (2, 7.5, 10.0)
    assert every["back"]["p99_s"] == pytest.approx(9.95)
    hang = rows(con, "SELECT time FROM resolution_times WHERE symptom = 'job_hang'")
    assert hang == [{"time": "detect"}], "what is not over has no time"


def test_how_many_steps_a_restore_beyond_the_last_known_step_lost_is_not_known() -> None:
    story = Story()
    killed_rank(story)
    records = [
        replace(record, data=record.data.replace(b'"step_restored":15', b'"step_restored":24'))
        if record.subject.endswith(".incident_closed") else record
        for record in story.records
    ]  # fmt: skip
    assert rows(load(records), "SELECT outcome, steps_lost FROM incidents") == [{"outcome": "recovered", "steps_lost": None}]


def test_planned_restarts_are_manual_and_a_stop_with_its_restart_is_one() -> None:
    con = load(planned(Story()).records)
    found = rows(con, "SELECT symptom, category, mechanism, outcome, opened_ns, back_s, decide_s, steps_lost FROM incidents")
    assert [(row["symptom"], row["category"], row["mechanism"], row["outcome"]) for row in found] == [
        ("code_update", "manual", "planned", "recovered"),
        ("operator_restart", "manual", "planned", "open"),
        ("operator_restart", "manual", "planned", "stopped"),
    ]
    assert found[0] | {"back_s": 70.0, "decide_s": 0.5, "steps_lost": 1} == found[0], "lost from the stop on"
    assert rows(con, "SELECT category, incidents FROM census_by_category") == [{"category": "manual", "incidents": 3}]


def test_evictions_actions_and_decisions() -> None:
    story = three_incidents()
    decision = story.decided("i3", "evict", "evict_silent", 70, mode="observe", nodes=("n4",))
    story.acted("i3", decision, "evict_node", 71, node="n4", result="")
    con = load(story.records)
    assert [list(r.values()) for r in rows(con, "SELECT node, incident, result, tries FROM evictions ORDER BY node")] == [
        ["n3", "i2", "done", 1], ["n4", "i3", "pending", 1],
    ]  # fmt: skip
    assert rows(con, "SELECT took_s FROM actions WHERE verb = 'stop_attempt'") == [{"took_s": 0.5}]
    acts = rows(con, "SELECT rule, acts FROM decisions ORDER BY sequence")
    assert acts[-1] == {"rule": "evict_silent", "acts": False} and acts[0]["acts"] is True
    assert rows(con, "SELECT age_s, evidence FROM signals WHERE symptom = 'rank_exit'") == [
        {"age_s": 0.5, "evidence": "rank 1 died of signal 9"}
    ]


def test_order_repeats_and_broken_records_change_no_count() -> None:
    story = planned(three_incidents())
    wanted = [view(load(story.records), name).as_dicts() for name in VIEWS[:8]]
    broken = [
        Record(LEDGER, 9_001, 5, "ledger.gpt.detector.signal", b"not json"),
        Record(LEDGER, 9_002, 5, "ledger.gpt.detector.signal", story.records[0].data),
        Record(LEDGER, 9_003, 5, "ledger.%zz.detector.signal", story.records[0].data),
        Record(LEDGER, 9_004, 5, "something.else", story.records[0].data),
        Record(LEDGER, 9_005, 2**64, story.records[0].subject, story.records[0].data),
        Record(LEDGER, 2**70, 5, "nul\0 and \udc80", b"\xff\0"),
    ]
    again = [replace(record, sequence=record.sequence + 10_000) for record in story.records]
    mixed = [*story.records, *story.records[:7], *broken, *again]
    random.Random(7).shuffle(mixed)
    con = load(mixed)
    assert [view(con, name).as_dicts() for name in VIEWS[:8]] == wanted
    assert rows(con, "SELECT what, count(*) AS n FROM problems GROUP BY what ORDER BY what") == [
        {"what": "malformed", "n": 6}, {"what": "repeated", "n": 7},
    ]  # fmt: skip
    assert summary(con)["problems"] == [{"what": "malformed", "records": 6}, {"what": "repeated", "records": 7}]


def test_an_event_is_believed_from_its_own_role_only() -> None:
    story = Story()
    forged = DecisionMade(
        decision="d", incident="i", job="gpt", epoch=1, ordinal=1, rung="evict", rule="evict_named", mode="auto", because="no",
        policy_digest="", catalogue_digest="", code_version="", trigger=1, ledger_digest="",
    )  # fmt: skip
    story.say("detector", forged, 1)
    con = load(story.records)
    assert rows(con, "SELECT * FROM decisions") == []
    assert rows(con, "SELECT role, kind FROM events") == [{"role": "detector", "kind": "decision_made"}]


def test_an_empty_ledger_answers_every_view() -> None:
    con = load([])
    for name in VIEWS:
        answer = view(con, name)
        assert answer.columns
        if name not in ("symptoms", "beside_byterobust"):
            assert answer.rows == ()
    told = summary(con)
    assert told["events"] == 0 and told["resolution_times"] == []
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_every_symptom_has_one_category() -> None:
    con = load([])
    found = {(row["symptom"], row["category"]) for row in rows(con, "SELECT * FROM symptoms")}
    kinds = {"explicit": Explicit, "implicit": Implicit, "manual": Manual}
    assert found == {(symptom, category) for category, names in kinds.items() for symptom in names.__args__}


def test_wall_time_is_split_and_its_shares_sum_to_one() -> None:
    bins = [("gpt", "productive", 90.0), ("gpt", "recomputed", 6.0), ("gpt", "lost", 4.0), ("other", "productive", 1.0)]
    con = load([], [*bins, ("gpt", "lost", math.nan)])
    assert rows(con, "SELECT bin, share FROM wall_time WHERE job = 'gpt'") == [
        {"bin": "productive", "share": 0.9}, {"bin": "recomputed", "share": 0.06}, {"bin": "lost", "share": 0.04},
    ]  # fmt: skip
    assert rows(con, "SELECT * FROM ettr WHERE job = 'gpt'") == [
        {"job": "gpt", "wall_s": 100.0, "productive_s": 90.0, "ettr": 0.9}
    ]


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("", "one query"),
        ("SELECT 1; SELECT 2", "this holds 2"),
        ("DROP TABLE events", "only read"),
        ("INSERT INTO wall_bins VALUES ('a', 'b', 1)", "only read"),
        ("COPY events TO '/tmp/keepstep-never'", "only read"),
        ("ATTACH '/tmp/keepstep-never.db'", "only read"),
        ("SET enable_external_access = true", "only read"),
        ("INSTALL httpfs", "only read"),
        ("SELECT * FROM read_csv('/etc/passwd')", "file system operations are disabled"),
        ("SELECT * FROM read_text('/etc/passwd')", "disabled"),
        ("SELECT * FROM '/etc/passwd'", "there are: incidents"),
        ("SELECT * FROM glob('/*')", "disabled"),
        ("SELECT * FROM incident", "there are: incidents"),
        ("SELECT symptm FROM incidents", "symptm"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1 / 'x'", "x"),
        ("SELECT * FROM con", "there are: incidents"),
    ],
)
def test_a_query_that_may_not_or_can_not_is_refused_in_a_sentence(con: Any, sql: str, told: str) -> None:
    with pytest.raises(CensusError, match=told) as refusal:
        run_sql(con, sql)
    assert "\n" not in str(refusal.value)
    assert run_sql(con, "SELECT count(*) FROM incidents").rows == ((3,),), "and nothing changed"


def test_a_query_is_stopped_at_its_limits() -> None:
    con = load([])
    with pytest.raises(CensusError, match="stopped after"):
        run_sql(con, "SELECT count(*) FROM range(10000000) a, range(10000000) b", seconds_max=0.2)
    answer = run_sql(con, "SELECT * FROM range(50)", rows_max=10)
    assert len(answer.rows) == 10 and answer.cut
    assert not run_sql(con, "SELECT * FROM range(10)", rows_max=10).cut


def test_answers_are_json_whatever_is_in_them() -> None:
    sql = (
        "SELECT 'nan'::DOUBLE AS a, '-inf'::DOUBLE AS b, 1.5::DECIMAL(4, 2) AS c, INTERVAL 90 SECOND AS d, DATE '2026-01-01' AS e, "
        "[1, NULL] AS f, {'x': 'nan'::DOUBLE} AS g, '\\xFF'::BLOB AS h, NULL AS i, true AS j, "
        "'00000000-0000-0000-0000-000000000001'::UUID AS k, TIMESTAMP '2026-01-01 00:00:00' AS l, 170141183460469231731687303715884105727 AS m"
    )
    row = json.loads(run_sql(load([]), sql).as_json())[0]
    assert row == {
        "a": "NaN", "b": "-Infinity", "c": 1.5, "d": 90.0, "e": "2026-01-01", "f": [1, None], "g": {"x": "NaN"}, "h": "ff", "i": None,
        "j": True, "k": "00000000-0000-0000-0000-000000000001", "l": "2026-01-01T00:00:00", "m": 170141183460469231731687303715884105727,
    }  # fmt: skip
    assert plain({1: {2, 3}}) == {"1": str({2, 3})}


def test_a_view_that_is_not_there_is_named() -> None:
    with pytest.raises(CensusError, match="there is no view"):
        view(load([]), "incidents; DROP TABLE events")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_the_deciders_own_stories_are_counted(path: Path) -> None:
    _, story = play(path.read_text(encoding="utf-8"))
    events = [parse(record.data).data for record in story.records]
    opened = [e for e in events if e.kind() == "incident_opened"]
    closed = {e.incident: e for e in events if e.kind() == "incident_closed"}
    con = load(story.records)
    found = {row["incident"]: row for row in rows(con, "SELECT * FROM incidents WHERE category <> 'manual'")}
    assert set(found) == {e.incident for e in opened} and rows(con, "SELECT * FROM problems") == []
    for incident, row in found.items():
        close = closed.get(incident)
        assert row["outcome"] == (close.outcome if close else "open")
        if close and close.back_ns:
            assert row["back_s"] == (close.back_ns - close.first_evidence_ns) / 1e9
            assert row["detect_s"] + row["decide_s"] + row["recover_s"] == pytest.approx(row["back_s"])
    evicted = [e for e in events if e.kind() == "outcome_recorded" and e.verb == "evict_node" and e.result == "done"]
    assert len(rows(con, "SELECT * FROM evictions WHERE result = 'done'")) == len(evicted)


def test_names_with_blanks_and_quotes_come_through() -> None:
    story = Story('my job\'s "run" · ü.1')
    killed_rank(story)
    assert rows(load(story.records), "SELECT DISTINCT job FROM incidents") == [{"job": 'my job\'s "run" · ü.1'}]


def test_what_examining_evicted_machines_came_to_is_counted_by_rule() -> None:
    """A machine that tests named and that passes alone afterwards: one eviction, one verdict, and the rule it counts for."""
    path = next(path for path in SCRIPTS if path.stem == "ladder_tests_name")
    con = load(play(path.read_text(encoding="utf-8"))[1].records)
    rows = view(con, "machines").as_dicts()
    assert [(row["node"], row["rule"], row["verdict"], row["back"]) for row in rows] == [
        ("c", "evict_tested", "unproven", False)
    ]
    assert rows[0]["judged_ns"] > rows[0]["evicted_ns"] and rows[0]["because"]
    assert view(con, "evictions_by_rule").as_dicts() == [
        {"rule": "evict_tested", "verdict": "unproven", "machines": 1, "share": 1.0}
    ]


def test_false_positives_of_an_evicted_group_are_counted() -> None:
    """Of a pipeline of six one was bad, two passed and are standbys again, of three nothing could be told."""
    path = next(path for path in SCRIPTS if path.stem == "examined")
    con = load(play(path.read_text(encoding="utf-8"))[1].records)
    counted = {
        (row["rule"], row["verdict"]): (row["machines"], row["share"]) for row in view(con, "evictions_by_rule").as_dicts()
    }
    assert counted == {
        ("evict_group", "confirmed"): (1, pytest.approx(1 / 6)),
        ("evict_group", "exonerated"): (2, pytest.approx(2 / 6)),
        ("evict_group", "unproven"): (3, pytest.approx(3 / 6)),
        ("evict_named", "not judged"): (1, 1.0),
    }
    assert {row["node"] for row in view(con, "machines").as_dicts() if row["back"]} == {"h", "k"}
