"""One incident told as a story, from a hand-made ledger."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from events.decision import IncidentClosed
from events.job import ApprovalGiven, HoldPlaced, HoldReleased
from events.ports import LEDGER, Record
from events.registry import parse
from infra import explain as explain_module
from infra.explain import UnknownIncident, _closed, explain, find, known, to_json
from tests.ledgers import Story, killed_rank, ns
from tests.test_stories import play


def told(story: Story, incident: str = "i1") -> list[str]:
    return [f"{line.offset_s:+.3f} {line.who}: {line.text}" for line in explain(story.records, incident)]


def test_a_killed_rank_is_told_from_first_evidence_to_close() -> None:
    story = Story()
    killed_rank(story)
    assert told(story) == [
        "+0.000 detector: signal rank_exit of n1 rank 1 (confidence low, rule exit): “rank 1 died of signal 9”; in the ledger 0.500 s "
        "later → attached",
        "+0.500 decider: incident i1 opened: rank_exit in attempt 1 of gpt (epoch 1)",
        "+0.500 decider: timer culprit window set for 2026-01-01T00:00:11.500000000Z",
        "+0.700 detector: signal gpu_unavailable of n2 (confidence sympathetic): “Xid 45” → sympathetic: what a crash leaves behind",
        "+1.500 timer: timer culprit window fired",
        "+1.500 decider: decision d8: reattempt by rule reattempt_crash, because reattempt_crash fired [policy p0]",
        "+1.500 decider: intent k9: stop attempt 0",
        "+1.500 actuator: try 1 of k9: stop attempt",
        "+2.000 actuator: outcome of k9: stop attempt done (stop_attempt done)",
        "+2.000 decider: intent k12: start attempt 2 with 4 ranks on no node",
        "+2.000 actuator: try 1 of k12: start attempt",
        "+2.500 actuator: outcome of k12: start attempt done (start_attempt done)",
        "+5.000 detector: healthy: step 17, restored at 15",
        "+5.000 decider: closed: recovered by reattempt (rank_exit); opened 0.000 s after the first evidence; decided 1.500 s after it; "
        "back at work 5.000 s after it; at step 20, restored at 15: 5 steps lost",
    ]


def test_a_restore_beyond_what_the_ledger_was_told_of_loses_an_unknown_number_of_steps() -> None:
    closed = IncidentClosed(
        incident="i", job="j", epoch=1, symptom="rank_exit", mechanism="reattempt", outcome="recovered", first_evidence_ns=1, opened_ns=1,
        back_ns=2, step_before=155, step_restored=159, trigger=1, ledger_digest="",
    )  # fmt: skip
    assert _closed(closed).endswith("restored at 159, beyond step 155, the last that the ledger was told of")
    assert _closed(closed.model_copy(update={"step_restored": 155})).endswith("at step 155, restored at 155: 0 steps lost")


SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_whatever_the_decider_said_of_an_incident_is_told(path: Path) -> None:
    """Over the decider's own stories: nothing that names the incident is left out, nothing of another is in."""
    _, story = play(path.read_text(encoding="utf-8"))
    events = {event.id: event for event in (parse(record.data) for record in story.records)}
    for incident in known(story.records):
        lines = explain(story.records, incident.incident)
        ids = [line.event_id for line in lines]
        mine = {e.id: e for e in events.values() if getattr(e.data, "incident", "") == incident.incident}
        untold = [e for id_, e in mine.items() if id_ not in ids]
        assert {e.data.kind() for e in untold} <= {"evidence_judged"}, "a verdict stands with its signal"
        assert {e.data.signal for e in untold} <= set(ids)
        others = [events[id_].data for id_ in ids if getattr(events[id_].data, "incident", "") not in ("", incident.incident)]
        assert not others
        assert len(set(ids)) == len(ids)
        assert (incident.outcome == "") == (not any(line.text.startswith("closed") for line in lines))


def test_each_line_names_its_event() -> None:
    story = Story()
    killed_rank(story)
    lines = explain(story.records, "i1")
    assert len({line.event_id for line in lines}) == len(lines)
    assert {line.event_id for line in lines} <= {f"e{n}" for n in range(1, len(story.records) + 1)}


def test_only_its_own_incident_is_told() -> None:
    story = Story()
    killed_rank(story, "i1", 10)
    alone = told(story)
    killed_rank(story, "i2", 30)
    other = Story("another job", prefix="o")
    killed_rank(other, "i9", 10)
    moved = [Record(r.stream, r.sequence + 1000, r.time_ns, r.subject, r.data) for r in other.records]
    records = [*story.records, *moved]
    random.Random(3).shuffle(records)
    assert [f"{line.offset_s:+.3f} {line.who}: {line.text}" for line in explain(records, "i1")] == alone
    assert [k.incident for k in known(records)] == ["i1", "i2", "i9"]


def test_vetoes_approvals_holds_and_what_was_not_believed() -> None:
    story = Story()
    signal = story.signal("gpu_unavailable", 1, node="n1", confidence="high", evidence="Xid 79\nfallen off the bus")
    story.opened("i1", "gpu_unavailable", 1, first_s=1, signal=signal)
    story.judged("i1", signal, "attached", 1, "gpu_unavailable", node="n1")
    stale = story.signal("job_hang", 2, seen_s=-100)
    story.judged("", stale, "stale", 2, "job_hang", because="102 s old")
    decision = story.decided("i1", "evict", "evict_named", 3, nodes=("n1",), standbys=("s1",), mode="approve")
    story.say("operator", ApprovalGiven(decision=decision, job="gpt", granted=True, reason="go", author="ada"), 4)
    story.say("operator", HoldPlaced(reason="wait", author="eve"), 5, job="")
    story.decided("i1", "evict", "evict_named", 6, nodes=("n1",), vetoed="hold")
    story.say("operator", HoldReleased(reason="on", author="eve"), 7, job="")
    story.decided("i1", "hand_over", "hand_over", 8, mode="observe")
    text = "\n".join(told(story))
    for part in (
        "“Xid 79 ⏎ fallen off the bus” → attached",
        "signal job_hang of the job (confidence low); in the ledger 102.0 s later → stale: 102 s old",
        "evict of n1, s1 in by rule evict_named (waits for a yes)",
        "operator ada: yes to decision",
        "operator eve: hold on the fleet: wait",
        "not acted on: hold",
        "operator eve: hold on the fleet released: on",
        "hand over by rule hand_over (observe: this is what it would have done)",
    ):
        assert part in text
    assert "closed" not in text


def test_an_incident_may_be_named_by_its_beginning_its_epoch_or_last() -> None:
    story = Story()
    killed_rank(story, "abc1", 10)
    killed_rank(story, "abd2", 30)
    incidents = known(story.records)
    assert find(incidents, "abc").incident == "abc1"
    assert find(incidents, "last").incident == "abd2"
    assert find(incidents[:1], "gpt/1").incident == "abc1"
    with pytest.raises(UnknownIncident, match=r"'ab' fits 2 incidents; there are: abc1 .*abd2"):
        find(incidents, "ab")
    with pytest.raises(
        UnknownIncident, match=r"no incident is called 'x'; there are: abc1 \(gpt/1, rank_exit, recovered\); abd2"
    ):
        explain(story.records, "x")
    with pytest.raises(UnknownIncident, match="there are"):
        explain(story.records, "")


def test_an_empty_ledger_has_no_incident() -> None:
    with pytest.raises(UnknownIncident, match="holds no incident"):
        explain([], "i1")


def test_what_cannot_be_read_is_passed_over() -> None:
    story = Story()
    killed_rank(story)
    wanted = told(story)
    story.records.append(Record(LEDGER, 100, 1, "ledger.gpt.detector.signal", b"{"))
    story.records.append(Record("TELEMETRY_JOB", 5, 1, "tj.1.n1.gpt.rank_exit", b"{}"))
    story.records.append(Record(LEDGER, 101, 1, "ledger.%zz.decider.incident_opened", story.records[3].data))
    assert told(story) == wanted


def test_the_json_shape_holds_the_whole_story() -> None:
    story = Story()
    killed_rank(story)
    incident = find(known(story.records), "i1")
    value = to_json(incident, explain(story.records, "i1"))
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value | {"incident": "i1", "outcome": "recovered", "job": "gpt", "first_evidence_ns": ns(10)} == value
    assert value["lines"][0]["time"] == "2026-01-01T00:00:10.000000000Z"


def test_a_story_without_end_is_cut_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    killed_rank(story)
    monkeypatch.setattr(explain_module, "LINES_MAX", 6)
    lines = explain(story.records, "i1")
    assert len(lines) == 6 and "9 lines are left out" in lines[3].text
    assert lines[-1].text.startswith("closed")
