"""Laws of the decider: the same whatever the machine, the interleaving or the interruption; bounded whatever the actuators answer."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.clock import NS
from events.decision import DecisionMade, IncidentClosed, IntentIssued
from events.ports import Record
from events.registry import parse
from processors.decider import Decider, is_own
from processors.fleet import REFUSALS_MAX
from processors.replay import replay
from processors.state import REFUSED
from tests.decider_bench import SCRIPTS, plain, told
from tests.decider_laws import check
from tests.stories import Story

ROOT = Path(__file__).resolve().parent.parent
stories = pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)

FOUR = "job gpt nodes a@r1 b@r1 c@r2 d@r2 standbys s@r3 t@r3 u@r3"
PLENTY = "policy auto budget.job.evictions_max=9 budget.job.share_max=1 budget.rack.share_max=1 budget.fleet.share_max=1"


def begin(*more: str, policy: str = PLENTY) -> Story:
    story = Story()
    for line in (policy, FOUR, "+5 progress gpt first attempt=1 step=2", *more):
        story.tell(line)
    return story


def facts(story: Story, kind: type) -> list[DecisionMade]:
    return [fact for r in story.records if is_own(r.subject) and isinstance(fact := parse(r.data).data, kind)]


def evicted(story: Story) -> dict[str, str]:
    """machine -> the rule by which it went."""
    rules = {made.decision: made.rule for made in facts(story, DecisionMade)}
    return {
        i.node: rules[i.decision] for i in facts(story, IntentIssued) if i.verb == "evict_node"  # type: ignore[attr-defined]
    }  # fmt: skip


# --- the same everywhere ----------------------------------------------------------------------------------------------------------

PLAY = """
import sys, hashlib
{fake}
from tests.decider_bench import SCRIPTS, told
digest = hashlib.sha256()
for path in SCRIPTS:
    for record in told(path).records:
        digest.update(repr((record.sequence, record.time_ns, record.subject, record.data)).encode())
print(digest.hexdigest(), len(SCRIPTS))
"""
CLOCK = """
import time, datetime, random, os
time.time = lambda: 4e9; time.time_ns = lambda: 4 * 10**18; time.monotonic = lambda: 1e6
class Frozen(datetime.datetime):
    now = classmethod(lambda cls, tz=None: cls(1999, 1, 1, tzinfo=tz))
datetime.datetime = Frozen
random.seed(7); os.urandom = lambda n: b"7" * n
"""


def played(fake: str = "", **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", PLAY.format(fake=fake)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return run.stdout


def test_the_same_under_another_hash_seed_locale_zone_and_clock() -> None:
    expected = played(PYTHONHASHSEED="0")
    assert expected.split()[1] == str(len(SCRIPTS))
    assert played(PYTHONHASHSEED="4242", LC_ALL="tr_TR.UTF-8", LANG="tr_TR.UTF-8", TZ="Pacific/Chatham") == expected
    assert played(CLOCK, PYTHONHASHSEED="1", LC_ALL="C", TZ="UTC+12", PYTHONOPTIMIZE="1") == expected


# --- the same however it is cut or repeated ---------------------------------------------------------------------------------------


@stories
def test_prefix_and_rest_equal_the_whole(path: Path) -> None:
    """Folding up to anywhere, then going on with what is recorded standing, is folding at once."""
    records = told(path).records
    whole = replay(records).decider
    for cut in range(0, len(records), max(1, len(records) // 8)):
        decider = Decider()
        recorded: dict[int, list[object]] = {}
        for record in records[:cut]:
            if is_own(record.subject):
                event = parse(record.data)
                recorded.setdefault(event.data.trigger, []).append(event)
        for record in records:
            if not is_own(record.subject):
                later = any(trigger > record.sequence for trigger in recorded)
                decider.feed(record, recorded.get(record.sequence, []) if record.sequence <= cut else None, whole=later)  # type: ignore[arg-type]
        assert decider.fleet == whole.fleet and decider.digest == whole.digest


@stories
def test_repeats_change_nothing(path: Path) -> None:
    records = told(path).records
    decider, again = Decider(), []
    sequence = 0
    for record in records:
        if is_own(record.subject):
            continue
        for _ in range(2):
            sequence += 1
            twin = Record(record.stream, sequence, record.time_ns, record.subject, record.data)
            again.append(twin)
            for out in decider.feed(twin):
                sequence += 1
                again.append(Record(record.stream, sequence, record.time_ns, out.subject, out.data))
    assert plain(again) == plain(records)


# --- the same however partitions interleave ---------------------------------------------------------------------------------------

TROUBLES = {
    "a gpu is lost, its rank dies, peers echo": [
        "signal gpu_unavailable c attempt=1 job=gpt confidence=high",
        "signal rank_exit c rank=2 attempt=1 job=gpt rule=rank_killed",
        "signal rank_exit a rank=0 attempt=1 job=gpt confidence=sympathetic",
        "signal cuda_error b attempt=1 job=gpt confidence=sympathetic",
    ],
    "a node goes, its peers echo": [
        "signal node_silent d attempt=1 job=gpt",
        "signal rank_exit a rank=0 attempt=1 job=gpt confidence=sympathetic",
        "signal rank_exit b rank=1 attempt=1 job=gpt confidence=sympathetic",
        "signal cuda_error a attempt=1 job=gpt confidence=sympathetic",
    ],
    "two machines at once": [
        "signal gpu_unavailable a attempt=1 job=gpt confidence=high",
        "signal os_kernel_panic d attempt=1 job=gpt confidence=high",
        "signal node_silent d attempt=1 job=gpt",
        "signal rank_exit b rank=1 attempt=1 job=gpt confidence=sympathetic",
    ],
    "one is lost, another falls silent": [
        "signal gpu_unavailable b attempt=1 job=gpt confidence=high",
        "signal node_silent d attempt=1 job=gpt",
        "signal rank_exit a rank=0 attempt=1 job=gpt confidence=sympathetic",
        "signal job_hang attempt=1 job=gpt",
    ],
    "a rank dies and nothing else": [
        "signal rank_exit b rank=1 attempt=1 job=gpt rule=rank_killed",
        "signal rank_exit a rank=0 attempt=1 job=gpt confidence=sympathetic",
        "signal rank_exit c rank=2 attempt=1 job=gpt confidence=sympathetic",
        "signal cuda_error d attempt=1 job=gpt confidence=sympathetic",
    ],
    "a rack goes": [
        "signal gpu_unavailable a attempt=1 job=gpt confidence=high",
        "signal gpu_unavailable b attempt=1 job=gpt confidence=high",
        "signal rank_exit c rank=2 attempt=1 job=gpt confidence=sympathetic",
        "signal rank_exit d rank=3 attempt=1 job=gpt confidence=sympathetic",
    ],
}


@pytest.mark.parametrize("name", TROUBLES)
def test_partitions_interleave_in_any_way(name: str) -> None:
    """Signals of one moment in every order: the same machines go by the same rules, the job is back by the same rung."""
    outcomes = set()
    for order in itertools.permutations(TROUBLES[name]):
        story = begin()
        for line in order:
            story.tell(f"+0.02 {line}")
        story.tell("+20 progress gpt first attempt=2 step=4")
        story.tell("+1 progress gpt first attempt=3 step=6")
        check(story.records)
        job = story.decider.fleet.jobs["gpt"]
        closed = [(c.mechanism, c.outcome, c.nodes and tuple(sorted(c.nodes))) for c in facts(story, IncidentClosed)]  # type: ignore[attr-defined]
        outcomes.add((tuple(sorted(evicted(story).items())), job.incident is None, tuple(closed[-1:])))
    assert len(outcomes) == 1, outcomes


@settings(max_examples=40, deadline=None)
@given(order=st.permutations([*(("gpt", i) for i in range(3)), *(("llm", i) for i in range(3)), ("fleet", 0)]))
def test_jobs_do_not_disturb_each_other(order: list[tuple[str, int]]) -> None:
    """Two jobs' troubles in any interleaving that keeps each one's own order."""
    told_of = {
        "gpt": TROUBLES["a gpu is lost, its rank dies, peers echo"][:3],
        "llm": ["signal node_silent f attempt=1 job=llm", "signal rank_exit e rank=0 attempt=1 job=llm confidence=sympathetic", "clear node_silent zz job=llm"],
        "fleet": ["standby gpt w@r9"],
    }  # fmt: skip
    story = begin("job llm nodes e@r5 f@r6 standbys g@r7", "+5 progress llm first attempt=1 step=1")
    position = dict.fromkeys(told_of, 0)
    for stream, _ in order:
        story.tell(f"+0.01 {told_of[stream][position[stream]]}")
        position[stream] += 1
    story.tell("+20 progress gpt first attempt=2 step=4")
    story.tell("+1 progress llm first attempt=2 step=4")
    check(story.records)
    assert evicted(story) == {"c": "evict_named", "f": "evict_silent"}
    assert all(job.incident is None for job in story.decider.fleet.jobs.values())


# --- bounded, whatever comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["failed", "unreachable", "refused_stale", "refused_held", "refused_expired", "nothing"])
@pytest.mark.parametrize("verb", ["stop_attempt", "start_attempt", "wake_standby", "evict_node"])
@pytest.mark.parametrize(
    "trouble",
    [
        "signal rank_exit b rank=1 attempt=1 job=gpt rule=rank_killed",
        "signal gpu_unavailable c attempt=1 job=gpt confidence=high",
    ],
)
def test_the_ladder_ends_whatever_actuators_answer(trouble: str, verb: str, result: str) -> None:
    """One verb always comes out badly, or never: attempts are bounded, and in the end the job is up or a person knows."""
    story = begin("actuators silent")
    story.tell(f"+5 {trouble}")
    for _ in range(400):
        for intent in [i for i in story.intents.values() if i.key not in story.answered]:
            bad = intent.verb == verb and intent.attempt > 0
            if not bad or result != "nothing":
                story.outcome(intent, result if bad else "done")
        story.tell("+60")
        if not story.timers and all(key in story.answered for key in story.intents):
            break
    checker = check(story.records)
    checker.settled()
    job = story.decider.fleet.jobs["gpt"]
    attempts = [i for i in facts(story, IntentIssued) if i.verb in ("start_attempt", "stop_attempt")]  # type: ignore[attr-defined]
    assert len({(i.decision, i.verb) for i in attempts}) <= 9
    assert len(attempts) <= 9 * (1 + (REFUSALS_MAX if result in REFUSED else 0))
    handed = [made for made in facts(story, DecisionMade) if made.rung == "hand_over"]
    assert handed and job.incident is not None and job.incident.blocked == "handed_over"
    assert replay(story.records).identical


@pytest.mark.parametrize("rung", ["evict", "reattempt"])
def test_crashing_again_and_again_ends_with_a_person(rung: str) -> None:
    story = begin("policy auto decider.reattempts_max=3 decider.recoveries_max=4")
    for _ in range(12):
        attempt = story.decider.fleet.jobs["gpt"].attempt
        story.tell(f"+5 signal rank_exit b rank=1 attempt={attempt} job=gpt rule=rank_traceback")
        if rung == "evict" and attempt == 1:
            story.tell("+0.1 signal gpu_unavailable c attempt=1 job=gpt confidence=high")
    story.tell("+60")
    assert [made.rung for made in facts(story, DecisionMade)].count("reattempt") == 3
    assert facts(story, DecisionMade)[-1].rung == "hand_over"


# --- policy -----------------------------------------------------------------------------------------------------------------------


def test_a_policy_adopted_in_the_middle_of_an_incident() -> None:
    """Old decisions stand under the old one, and what they began is carried on; new ones name the new."""
    story = begin("actuators silent", "+5 signal gpu_unavailable c attempt=1 job=gpt confidence=high")
    old = story.decider.fleet.policy_digest
    story.tell("+0.1 policy observe decider.reattempts_max=1")
    new = story.decider.fleet.policy_digest
    assert old != new
    for intent in list(story.intents.values()):
        story.outcome(intent, "done")
    story.tell("+1 signal rank_exit a rank=0 attempt=2 job=gpt rule=rank_killed")
    story.tell("+20")
    made = facts(story, DecisionMade)
    assert [(m.rung, m.mode, m.policy_digest) for m in made] == [
        ("planned", "auto", old),
        ("evict", "auto", old),
        ("diagnose", "observe", new),
    ]
    assert [i.verb for i in facts(story, IntentIssued)].count("start_attempt") == 2  # type: ignore[attr-defined]
    check(story.records)
    assert replay(story.records).identical


def test_a_policy_that_is_no_policy_changes_nothing() -> None:
    story = begin()
    before = story.decider.fleet.policy_digest
    line = next(r for r in story.records if r.subject.endswith("policy_adopted"))
    story.put(line.subject, line.data.replace(b"mode: auto", b"mode: mayhem").replace(b'"id":"in-2"', b'"id":"in-2b"'))
    assert story.decider.fleet.policy_digest == before
    assert "mode" in story.decider.unread[-1][1]
    replay_of_it = replay(story.records)
    assert replay_of_it.identical and replay_of_it.unread[-1][0] == len(story.records)


def test_what_nobody_may_say_is_refused_and_counted() -> None:
    story = begin("+1")
    count = story.decider.unread_count
    again = next(r for r in story.records if r.subject.endswith("job_declared"))

    def said(before: bytes, after: bytes, subject: str = again.subject) -> str:
        story.put(subject, again.data.replace(b'"id":"in-3"', b'"id":"x%d"' % len(story.records)).replace(before, after))
        return story.decider.unread[-1][1]

    assert "declared already" in said(b"", b"")
    assert "belongs to job gpt" in said(b'"job":"gpt"', b'"job":"new"', "ledger.new.operator.job_declared")
    assert "not believed" in said(b'"job":"gpt"', b'"job":"new"')
    assert "not believed" in said(b"", b"", "ledger.gpt.detector.job_declared")
    long = ("漢" * 300).encode()
    assert "512" in said(b'"job":"gpt"', b'"job":"%s"' % long, "ledger.x.operator.job_declared")
    assert story.decider.unread_count >= count + 5
    assert set(story.decider.fleet.jobs) == {"gpt"}


def test_a_machine_named_twice_is_refused() -> None:
    story = Story()
    story.tell("job gpt nodes a b a standbys s")
    assert "node a twice" in story.decider.unread[-1][1]
    story.tell("job ~fleet nodes a b")
    assert "~fleet" in story.decider.unread[-1][1]
    assert not story.decider.fleet.jobs


def test_many_racks_make_one_page_that_fits() -> None:
    """Texts are bounded however many racks there are."""
    nodes = " ".join(f"n{i}@rack-with-a-long-name-{i // 3:04d}" for i in range(900))
    story = Story()
    for line in ("policy auto", f"job gpt nodes {nodes} standbys s@q", "+5 progress gpt first attempt=1 step=2"):
        story.tell(line)
    for i in range(900):
        story.tell(f"signal node_silent n{i} attempt=1 job=gpt")
    story.tell("+3")
    pages = [i for i in facts(story, IntentIssued) if i.verb == "notify"]  # type: ignore[attr-defined]
    assert len(pages) == 1 and not evicted(story)


def test_time_that_goes_back_changes_nothing() -> None:
    """Now is the greatest broker time seen."""
    story = begin("+5 signal rank_exit b rank=1 attempt=1 job=gpt rule=rank_killed")
    now = story.decider.fleet.now_ns
    story.now -= 3 * NS
    story.tell("signal cuda_error a attempt=1 job=gpt confidence=sympathetic")
    assert story.decider.fleet.now_ns == now
