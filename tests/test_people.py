"""What people answer: which decision is meant, why one can't be answered any more, overrides, acknowledgements, how long a word holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from events.job import ApprovalGiven, HoldReleased, PageAcknowledged
from events.ports import LEDGER
from events.registry import parse
from infra.cli import operator
from infra.cli.app import app
from infra.cli.common import Refused
from infra.cli.operator import free, held, told
from infra.cli.people import chosen, duration_s, override_of, page_of, recorded
from infra.cli.status import calls_of, is_amiss, jobs_of
from infra.jetstream import JetStreamLog
from infra.permissions import role
from infra.pipeline import say as tell
from infra.waiting import ago, short_ids, waiting_json
from infra.watch import Watch
from tests.nats_fixture import real_bus
from tests.stories import Story, place

JOB = "job gpt nodes a@r1 b@r2 c@r3 d@r4 standbys s@r5 t@r6"


def played(*lines: str) -> tuple[Watch, Story]:
    story = Story()
    for line in ("policy auto rules.evict_named=approve", JOB, "+5 progress gpt first attempt=1 step=2", *lines):
        story.tell(line)
    watch = Watch()
    for record in story.records:
        watch.ledger(record)
    return watch, story


LOST = "+5 signal gpu_unavailable c attempt=1 job=gpt confidence=high"


def why(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as error:
        call()
    return str(error.value)


def test_a_waiting_decision_is_listed_with_the_commands_to_copy() -> None:
    watch, _ = played(LOST)
    (one,) = waiting_json(watch)
    assert (one["rung"], one["nodes"], one["standbys"], one["runbook"]) == ("evict", ["c"], ["s"], "approval-wanted")
    prefix = one["approve"].split()[2]
    assert one["decision"].startswith(prefix) and len(prefix) == 8
    assert one["deny"] == f"keepstep deny {prefix} --reason '…'"
    assert chosen(watch, prefix, False).made.decision == one["decision"]
    assert chosen(watch, prefix.upper(), False).made.decision == one["decision"]
    assert chosen(watch, "", True).made.decision == one["decision"]


def test_what_is_not_clear_is_refused_in_one_sentence() -> None:
    watch, _ = played(LOST)
    for prefix, latest in (("", False), ("x", True)):
        text = why(lambda p=prefix, last=latest: chosen(watch, p, last))  # type: ignore[misc]
        assert "name one decision" in text and "evict of c, s in in job gpt" in text
    assert "no decision that was ever asked about begins with 'nosuch'" in why(lambda: chosen(watch, "nosuch", False))
    quiet, _ = played()
    assert why(lambda: chosen(quiet, "", True)) == "no decision waits for a yes now"
    assert why(lambda: chosen(quiet, "abc", False)).endswith("waiting are: none")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["+5 approve gpt decision-2"], "was answered already: yes by a 60 s ago, 'r'"),
        (["+5 approve gpt decision-2 no"], "was answered already: no by a 60 s ago, 'r'"),
        (["+5 restart gpt"], "is over: its incident was closed"),
    ],
)
def test_a_decision_that_waits_no_more_says_what_ended_it(lines: list[str], said: str) -> None:
    watch, story = played(LOST, *lines, "+60 hold", "+0.01 release")
    decision = next(key for key, name in story.names.items() if name == "decision-2")
    text = why(lambda: chosen(watch, decision[:10], False))
    assert said in text and text.startswith(f"decision {decision[:8]} (evict in job gpt)") and text.count("\n") == 0


def test_the_latest_that_was_answered_says_by_whom() -> None:
    watch, _ = played(LOST, "+5 approve gpt decision-2", "+60 hold")
    text = why(lambda: chosen(watch, "", True))
    assert text.startswith("no decision waits for a yes now; decision ") and "was answered already: yes by a" in text


async def test_of_two_who_answer_at_once_the_second_is_told_so(tmp_path: Path) -> None:
    story = played(LOST)[1]
    async with real_bus(tmp_path) as bus:
        log = JetStreamLog(bus.admin, LEDGER)
        for record in story.records:
            await log.append(record.subject, record.data)
        asked: list[str] = []

        def answer(name: str, granted: bool, meanwhile: str = "") -> Any:
            async def make(nc: Any) -> tuple[Any, str]:
                made = chosen(await told(nc), "", True).made
                asked.append(name)
                if meanwhile and asked.count(name) == 1:
                    await recorded(bus.admin, answer(meanwhile, not granted))
                return ApprovalGiven(decision=made.decision, job=made.job, granted=granted, reason="r", author=name), ""

            return make

        with pytest.raises(Refused, match="was answered already: yes by ann"):
            await recorded(bus.admin, answer("bob", False, meanwhile="ann"))
        words = [parse(record.data).data async for record in log.read(subjects=("ledger.gpt.operator.approval_given",))]
    assert [(word.author, word.granted) for word in words] == [("ann", True)] and asked == ["bob", "ann"]


async def test_a_hold_ends_by_the_brokers_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def now_ns(nc: Any) -> int:
        return 5_000_000_000

    monkeypatch.setattr(operator, "bus_now_ns", now_ns)
    async with real_bus(tmp_path) as bus:
        for more, ends in (["--for", "1"], 65_000_000_000), ([], 0):
            words = ["hold", "--reason", "r", *more, "--json", "--url", bus.server.url, "--key", bus.key]
            done = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert (
                json.loads(done.output)["said"] == f"hold on the whole fleet, {'for 1 min' if more else 'until it is released'}"
            )
            records = [record async for record in JetStreamLog(bus.admin, LEDGER).read()]
            assert parse(records[-1].data).data.expires_ns == ends


async def test_who_is_always_interrupted_is_told_that_nothing_is_recorded(tmp_path: Path) -> None:
    async with real_bus(tmp_path) as bus:
        log = JetStreamLog(bus.admin, LEDGER)

        async def make(nc: Any) -> tuple[Any, str]:
            await tell(log, HoldReleased(job="x", reason="r", author="other"), "x")
            return HoldReleased(job="x", reason="r", author="me"), ""

        with pytest.raises(Refused, match="nothing of yours is recorded"):
            await recorded(bus.admin, make)
        assert {parse(record.data).data.author async for record in log.read()} == {"other"}


def test_superseded_by_a_second_machine() -> None:
    story = Story()
    for line in (
        "policy auto rules.evict_named=approve budget.job.evictions_max=4 budget.job.share_max=1 budget.fleet.evictions_max=4 budget.fleet.share_max=1",
        JOB, "+5 progress gpt first attempt=1 step=2", LOST, "+5 signal gpu_unavailable d attempt=1 job=gpt confidence=high",
        "+5 progress gpt attempt=1 step=3",
    ):  # fmt: skip
        story.tell(line)
    watch = Watch()
    for record in story.records:
        watch.ledger(record)
    first, second = (asked.made for asked in watch.asked.values())
    assert second.nodes[-1] == "d" and [a.made.decision for a in watch.waiting()] == [second.decision]
    assert f"is superseded: decision {second.decision[:8]} (evict) took its place" in why(
        lambda: chosen(watch, first.decision[:12], False)
    )
    assert chosen(watch, "", True).made.decision == second.decision


def test_a_yes_that_expired_is_told_as_such() -> None:
    _, story = played(LOST)
    decision = next(key for key, name in story.names.items() if name == "decision-2")
    fact = ApprovalGiven(decision=decision, job="gpt", granted=True, reason="r", author="ann", expires_ns=story.now + 10)
    story.say(fact, "operator", "gpt")
    story.tell("+60 hold x")
    again = Watch()
    for record in story.records:
        again.ledger(record)
    if again.waiting():  # a decider that asks again after the expiry
        assert chosen(again, decision, False).made.decision == decision
    else:
        assert "the yes of ann" in why(lambda: chosen(again, decision, False))


def test_short_ids_tell_all_apart() -> None:
    ids = ["abcdefgh1x", "abcdefgh2x", "zzzzzzzzzz", "abcdefgh"]
    assert short_ids(ids) == {
        "abcdefgh1x": "abcdefgh1", "abcdefgh2x": "abcdefgh2", "zzzzzzzzzz": "zzzzzzzz", "abcdefgh": "abcdefgh"
    }  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("1.5H", 5400)])
def test_how_long_a_word_holds(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-5m", "0m", "30 minutes", "1e9d", "99999999d", "nan"])
def test_no_time_is_refused(text: str) -> None:
    assert "as in 30m" in why(lambda: duration_s(text))


def test_how_long_ago_is_told_in_the_largest_unit() -> None:
    s = 1_000_000_000
    assert [ago(n * s, 0) for n in (5, 119, 120, 7200, 172800)] == [
        "5 s ago",
        "119 s ago",
        "2 min ago",
        "2 h ago",
        "2 days ago",
    ]


def test_an_override_is_of_what_the_job_has() -> None:
    watch, _ = played()
    fleet = watch.fleet
    fact = override_of(fleet, "gpt", "evict", "b", "", "smells burnt", 7)
    assert (fact.remedy, fact.node, fact.expires_ns, fact.reason) == ("evict", "b", 7, "smells burnt")
    assert override_of(fleet, "gpt", "keep", "s", "", "r", 0).node == "s"
    assert override_of(fleet, "gpt", "roll_back", "", "c0ffee", "r", 0).revision == "c0ffee"
    refused = {
        ("evict", "", ""): "name the machine that is to be evicted with --node",
        ("keep", "", ""): "name the machine that is to be kept with --node",
        ("evict", "s", ""): "job gpt has no machine s; it has: a, b, c, d",
        ("keep", "x", ""): "job gpt has no machine x; it has: a, b, c, d, s, t",
        ("reattempt", "a", ""): "--node goes with evict and keep; reattempt is of the whole job",
        ("roll_back", "", ""): "the job's code has no revision that is known; name the commit to go back to with --revision",
        ("reattempt", "", "x"): "--revision goes with roll_back; reattempt takes the code as it is",
    }
    for (remedy, node, revision), text in refused.items():
        assert why(lambda r=remedy, n=node, v=revision: override_of(fleet, "gpt", r, n, v, "r", 0)) == text  # type: ignore[misc]


@pytest.mark.parametrize(("line", "said"), [("+5 stop gpt", "is stopped; there is nothing to reattempt; start it with"), ("+5 finished gpt attempt=1 step=9", "is finished; there is nothing to reattempt")])  # fmt: skip
def test_a_job_that_does_not_run_has_nothing_to_be_overridden(line: str, said: str) -> None:
    watch, _ = played(line)
    assert said in why(lambda: override_of(watch.fleet, "gpt", "reattempt", "", "", "r", 0))
    assert override_of(watch.fleet, "gpt", "keep", "b", "", "r", 0).node == "b"


def test_a_hold_is_released_where_it_stands() -> None:
    none, _ = played()
    assert why(lambda: held(none.fleet, "")) == "no hold stands on the whole fleet"
    one, _ = played("+1 hold gpt")
    assert why(lambda: held(one.fleet, "")) == "no hold stands on the whole fleet; one stands on job gpt"
    held(one.fleet, "gpt")
    wide, _ = played("+1 hold")
    assert why(lambda: held(wide.fleet, "gpt")) == "no hold stands on job gpt; one stands on the whole fleet"
    held(wide.fleet, "")


def test_a_spare_is_no_machine_that_is_at_work_or_a_spare_already() -> None:
    def spare(text: str, *lines: str) -> None:
        free(place(text), played(*lines)[0].fleet, "gpt")

    assert why(lambda: spare("a")) == "a is at work in job gpt already"
    assert why(lambda: spare("s")) == "s is a standby of job gpt already"
    spare("z")
    spare("c", "policy auto", LOST, "+5 progress gpt first attempt=2 step=4")  # repaired
    spare("t", "+5 signal disk_fault t confidence=high")  # and well again
    spare("s", "job llm nodes e f g", "standby llm s")  # and back from another job


def test_a_machine_that_the_decider_would_not_count_on_is_no_spare() -> None:
    serial = "job llm nodes e#7 f g standbys u"
    lost = "+5 signal gpu_unavailable e attempt=1 job=llm confidence=high"
    fleet = played("policy auto", serial, "+5 progress llm first attempt=1 step=2", lost, "+5")[0].fleet
    said = "the machine of serial number 7 was evicted, as e; e2 is no standby while that stands"
    assert why(lambda: free(place("e2#7"), fleet, "gpt")) == said
    waits = played("policy auto", "actuators silent", LOST)[0].fleet
    said = "c was evicted from job gpt, and its place waits for another machine"
    assert why(lambda: free(place("c"), waits, "gpt")) == said


def test_an_eviction_that_has_begun_is_not_taken_back_and_one_that_a_hold_refused_is() -> None:
    lost = ("policy auto", "actuators silent", LOST)
    begun, _ = played(*lost)
    assert why(lambda: override_of(begun.fleet, "gpt", "keep", "c", "", "r", 0)) == "c was evicted from job gpt already"
    refused, _ = played(*lost, "hold gpt", "outcome gpt key-3 result=refused_held")
    assert override_of(refused.fleet, "gpt", "keep", "c", "", "r", 0).node == "c"


def test_what_waits_is_about_the_machines_that_are_not_kept() -> None:
    wide = "policy approve rules.diagnose=auto budget.job.share_max=1 budget.fleet.share_max=1"
    told = ("found tests a d", "+5 signal rank_exit a attempt=1 job=gpt rank=0 confidence=high", "+5 override gpt keep node=a")
    watch, _ = played(wide, *told)
    (diagnose,) = waiting_json(watch)
    assert diagnose["rung"] == "diagnose"  # no bolder than the reattempt after it
    watch, _ = played(wide + " rules.reattempt_crash=auto", *told)
    (one,) = waiting_json(watch)
    assert (one["rung"], one["nodes"], one["standbys"]) == ("evict", ["d"], ["t"])


def test_a_choice_that_can_not_be_carried_out_is_a_call_until_it_is_acknowledged_and_the_job_trains_on() -> None:
    watch, story = played("+5 override gpt evict node=z", "+5 progress gpt attempt=1 step=9")
    (call,) = calls_of(watch)
    assert (
        "z runs no rank of the job" in call["because"] and jobs_of(watch)[0]["state"] == "training" and is_amiss(watch, {}, [])
    )
    fact = PageAcknowledged(job="gpt", decision=call["decision"], reason="mistyped", author="ann")
    story.say(fact, "operator", "gpt")
    watch.ledger(story.records[-1])
    assert calls_of(watch) == [] and not is_amiss(watch, {}, [])


NEXT = ["+5 progress gpt first attempt=2 step=4", "+5 restart gpt", "+5 stop gpt", "+5 override gpt reattempt"]


@pytest.mark.parametrize("line", ["", *NEXT])
def test_what_was_asked_for_and_failed_is_told_by_status_until_the_next_word_or_step(line: str) -> None:
    watch, _ = played("+5 restart gpt", "+950 hold other", *([line] if line else []))
    (job,) = jobs_of(watch)
    if line:
        assert calls_of(watch) == [] and job["state"] != "handed over"
        return
    (call,) = calls_of(watch)
    assert (call["job"], call["runbook"]) == ("gpt", "planned-action-failed")
    assert "what was asked for did not come to pass: no healthy step" in call["because"]
    assert job["state"] == "handed over" and is_amiss(watch, {}, [])


def test_a_page_is_acknowledged_by_incident_decision_or_as_the_latest() -> None:
    watch, story = played(LOST)
    (page,) = watch.pages
    assert page_of(watch, page.incident[:6], False, "") == ("gpt", page.incident, "")
    assert page_of(watch, "gpt/1", False, "") == ("gpt", page.incident, "")
    assert page_of(watch, page.decision[:6], False, "") == ("gpt", page.incident, page.decision)
    assert page_of(watch, "", True, "gpt") == ("gpt", page.incident, "")
    assert "is nothing that paged anybody" in why(lambda: page_of(watch, "nosuch", False, ""))
    assert why(lambda: page_of(watch, "", True, "other")) == "nobody was paged yet for job other"
    assert "name one incident or decision" in why(lambda: page_of(watch, "", False, ""))
    story.tell("+5 restart gpt")
    closed = Watch()
    for record in story.records:
        closed.ledger(record)
    assert "no page of it is repeated" in why(lambda: page_of(closed, page.incident[:6], False, ""))


def test_only_the_operator_may_answer() -> None:
    for kind in ("approval_given", "override_given", "page_acknowledged"):
        subject = f"ledger.gpt.operator.{kind}"
        may = {
            name for name in ("detector", "decider", "actuator", "operator", "observer")
            if any(_matches(allowed, subject) for allowed in role(name).publish)
        }  # fmt: skip
        assert may == {"operator"}, kind


def _matches(pattern: str, subject: str) -> bool:
    want, have = pattern.split("."), subject.split(".")
    if want[-1] == ">":
        return len(have) >= len(want) and all(w in ("*", h) for w, h in zip(want[:-1], have, strict=False))
    return len(want) == len(have) and all(w in ("*", h) for w, h in zip(want, have, strict=True))
