"""What auto would have done beside what people did: each verdict from a story in observe, golden recordings, and how far it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from events.job import OverrideGiven
from events.ports import LEDGER, Record
from infra.cli.app import app
from infra.recording import StreamWriter
from processors.shadow import SAME, Case, Shadow, shadow
from tests.golden.make import GOOD, HERE, read
from tests.stories import Story

JOB = "job gpt nodes a@r1 b@r2 c@r3 d@r4 standbys s@r5 t@r6"
LOST = "+5 signal gpu_unavailable c attempt=1 job=gpt confidence=high"
CRASH = "+5 signal rank_exit b rank=1 attempt=1 job=gpt rule=rank_killed"
WIDE = "policy observe budget.job.evictions_max=4 budget.job.share_max=1 budget.fleet.evictions_max=4 budget.fleet.share_max=1"


#: A ladder without examinations: what follows on a crash is a reattempt.
PLAIN = "policy observe decider.rungs=[reattempt]"


def story(*lines: str, policy: str = "policy observe", job: str = JOB) -> Story:
    told = Story()
    for line in (policy, job, "+5 progress gpt first attempt=1 step=2", *lines):
        told.tell(line)
    return told


def found(*lines: str, **more: Any) -> Shadow:
    return shadow(story(*lines, **more).records)


def only(of: Shadow) -> Case:
    (case,) = of.cases
    return case


def test_a_restart_is_what_a_reattempt_would_have_been_and_auto_would_have_been_earlier() -> None:
    result = found(CRASH, "+120 restart gpt", "+5 progress gpt first attempt=2 step=3", policy=PLAIN)
    case = only(result)
    assert (case.made.rung, case.verdict, [act.text for act in case.acts]) == (
        "reattempt",
        "agreed",
        ["restart as operator restart"],
    )
    (row,) = result.rows
    assert (row.rule, row.counts["agreed"], row.saved_s) == ("reattempt_crash", 1, (case.saved_s,))
    assert case.saved_s == pytest.approx(119, abs=0.5), "the decision came after the culprit window of a second"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (["+60 restart gpt"], "differed"),
        (["+60 stop gpt"], "differed"),
        (["+60 hold gpt"], "differed"),
        (["+60 hold"], "differed"),
        (["+60 standby gpt u@r7", "+3000 hold x"], "not_acted"),
        (["+60 stop gpt", "+5 job gpt nodes a@r1 b@r2 s@r5 d@r4 standbys t@r6"], "agreed"),
        (["+60 stop gpt", "+5 job gpt nodes a@r1 b@r2 c@r3 d@r4 standbys t@r6"], "differed"),
        (["+1801 restart gpt"], "not_acted"),
        (["+60 progress gpt attempt=1 step=9"], "not_acted"),
        (["+60 hold x"], "open_yet"),
    ],
)
def test_what_people_did_about_a_machine_that_would_have_been_evicted(lines: list[str], verdict: str) -> None:
    case = only(found(LOST, *lines))
    assert (case.made.rung, case.made.nodes, case.verdict) == ("evict", ("c",), verdict)


@pytest.mark.parametrize(
    ("remedy", "node", "verdict"),
    [("evict", "c", "agreed"), ("evict", "a", "differed"), ("keep", "c", "differed"), ("keep", "a", "open_yet"),
     ("reattempt", "", "differed"), ("roll_back", "", "differed")],
)  # fmt: skip
def test_an_override_is_the_same_or_another_choice(remedy: Any, node: str, verdict: str) -> None:
    told = story(LOST)
    told.until(told.now + 60_000_000_000)
    told.say(OverrideGiven(job="gpt", remedy=remedy, node=node, reason="r", author="ann"), "operator", "gpt")
    case = shadow(told.records).cases[0]
    assert (case.verdict, [act.author for act in case.acts]) == (verdict, ["ann"])
    assert case.saved_s == (60.0 if verdict == "agreed" else None)


def test_what_needed_nobody_is_told_as_such() -> None:
    went_on = found(LOST, "+60 progress gpt attempt=1 step=90", "+2000 progress gpt attempt=1 step=900")
    assert (only(went_on).verdict, only(went_on).went_on, went_on.rows[0].went_on) == ("not_acted", True, 1)
    for policy in ("policy observe", PLAIN):
        down = found(CRASH, "+2000 hold x", policy=policy)
        assert [(c.verdict, c.went_on) for c in down.cases] == [("not_acted", False)]


def test_what_an_examination_would_have_found_is_not_known() -> None:
    case = only(found(CRASH, "+120 restart gpt"))
    assert (case.made.rung, case.verdict, case.saved_s) == ("diagnose", "cannot_be_told", pytest.approx(119, abs=0.5))


def test_after_the_first_imagined_action_nothing_of_the_incident_is_counted() -> None:
    result = found(LOST, CRASH, "+5 signal gpu_unavailable d attempt=1 job=gpt confidence=high", "+3000 hold x", policy=WIDE)
    assert [c.made.nodes for c in result.cases] == [("c",)]
    assert result.beyond >= 2 and result.beyond_incidents == 1 and result.incidents == 1


def test_a_machine_that_would_be_out_is_not_evicted_twice() -> None:
    again = LOST.replace("attempt=1", "attempt=2")
    lines = (LOST, "+60 restart gpt", "+5 progress gpt first attempt=2 step=4", again, "+3000 hold x")
    result = found(*lines, policy=WIDE)
    assert [(c.made.nodes, c.verdict) for c in result.cases] == [(("c",), "differed")]
    assert result.incidents == 2 and result.beyond >= 1


@pytest.mark.parametrize(("policy", "barred"), [("policy observe", "budget"), (WIDE, "no_standby"), (None, "")])
def test_what_imagined_evictions_would_have_spent_bars_later_ones(policy: str | None, barred: str) -> None:
    other = "+5 signal gpu_unavailable d attempt=2 job=gpt confidence=high"
    job = JOB if policy is None or "job" not in policy else JOB.replace(" t@r6", "")
    lines = (LOST, "+60 restart gpt", "+5 progress gpt first attempt=2 step=4", other, "+3000 hold x")
    result = found(*lines, policy=policy or WIDE, job=job)
    second = [case for case in result.cases if "d" in case.made.nodes]
    assert [(c.barred, c.verdict == "barred") for c in second] == [(barred, bool(barred))]


def test_an_examination_of_what_is_out_takes_no_standby_and_hides_no_other() -> None:
    lines = ("+5 override gpt evict node=c", "+5 progress gpt first attempt=2 step=4", "+60 override gpt evict node=d", "+5 progress gpt first attempt=3 step=9", "+3000 hold x")  # fmt: skip
    result = found(*lines, policy=WIDE)
    assert [(c.made.rule, c.made.nodes, c.barred) for c in result.cases] == [
        ("examine_evicted", ("c",), ""), ("examine_evicted", ("d",), "")
    ]  # fmt: skip
    assert result.beyond == 0


def test_a_hold_would_have_barred_it() -> None:
    assert only(found("+1 hold gpt", LOST, "+3000 release gpt")).barred == "hold"


def test_answers_settle_what_was_asked() -> None:
    asks = "policy auto rules.evict_named=approve"
    yes = found(LOST, "+60 approve gpt decision-2", "+5 progress gpt first attempt=2 step=4", policy=asks)
    assert [(c.made.mode, c.verdict, c.saved_s) for c in yes.cases] == [("approve", "agreed", None)]
    assert only(found(LOST, "+60 approve gpt decision-2 no", policy=asks)).verdict == "differed"


def test_a_page_is_agreed_with_by_whoever_takes_it() -> None:
    crowd = [f"+0.1 signal gpu_unavailable {n} attempt=1 job=gpt confidence=high" for n in "abcd"]
    result = found(*crowd, "+60 restart gpt")
    assert {c.made.rung: c.verdict for c in result.cases}.get("hand_over") in ("agreed", None)
    assert set(SAME) == {"evict", "reattempt", "roll_back", "hand_over"}


@pytest.mark.parametrize("name", GOOD)
def test_golden_recordings(name: str) -> None:
    result = shadow(read(HERE / f"{name}.jsonl"))
    counts = {row.rule: {k: v for k, v in row.counts.items() if v} for row in result.rows}
    want: dict[str, dict[str, dict[str, int]]] = {
        "observe": {"evict_named": {"differed": 1}},
        "approve": {"evict_named": {"agreed": 1, "barred": 1}},
    }
    assert counts == want.get(name, {})
    assert (result.beyond, result.beyond_incidents) == ((1, 1) if name == "observe" else (0, 0))


def test_what_is_said_by_nobody_who_may_is_not_counted() -> None:
    told = story(CRASH, "+120 restart gpt")
    forged = [
        Record(r.stream, r.sequence, r.time_ns, r.subject.replace(".operator.restart", ".detector.restart"), r.data)
        if ".operator.restart" in r.subject
        else r
        for r in told.records
    ]
    assert shadow(forged).cases[0].acts == ()
    doubled = [r for r in told.records for _ in range(2)]
    assert shadow(doubled) == shadow(told.records)


def test_the_command_tells_rules_and_cases(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, LEDGER) as writer:
        for record in story(CRASH, "+120 restart gpt", "+5 progress gpt first attempt=2 step=3", policy=PLAIN).records:
            writer.write(record)
    shown = CliRunner().invoke(app, ["shadow", str(tmp_path), "--cases"])
    assert shown.exit_code == 0 and "reattempt_crash" in shown.output and "a: restart as operator restart" in shown.output
    told = json.loads(CliRunner().invoke(app, ["shadow", str(tmp_path), "--json"]).output)
    assert told["rules"][0]["agreed"] == 1 and told["cases"][0]["people"][0]["did"] == "restart as operator restart"
    short = json.loads(CliRunner().invoke(app, ["shadow", str(tmp_path), "--json", "--window", "60s"]).output)
    assert short["rules"][0] | {"rungs": 0} == {
        "rule": "reattempt_crash", "rungs": 0, "cases": 1, "agreed": 0, "differed": 0, "not_acted": 1, "cannot_be_told": 0,
        "open_yet": 0, "barred": 0, "went_on": 0, "saved_s": 0, "saved_s_median": None,
    }  # fmt: skip
