"""Any events in any order: the decider never raises, always settles, and keeps the laws of tests/decider_laws.py; and its ledger replays."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from events.clock import NS
from processors.replay import replay
from tests.decider_laws import check
from tests.stories import Story

NODES = {"gpt": ["a", "b", "c", "d"], "llm": ["e", "f", "g"]}
SPARES = {"gpt": ["s", "t", "u"], "llm": ["v"]}
ALL = [*NODES["gpt"], *SPARES["gpt"], *NODES["llm"], *SPARES["llm"], "zz"]
MODES = ["auto", "auto", "auto", "observe", "approve", "auto rules.evict_silent=approve", "auto rules.reattempt_crash=observe"]
LIMITS = [
    "",
    "budget.job.share_max=1 budget.fleet.share_max=1 budget.rack.share_max=1",
    "budget.job.evictions_max=1",
    "decider.no_standby=hold",
    "decider.reattempts_max=1 decider.recoveries_max=2",
    "shared_causes.nodes_min=2 shared_causes.share_min=0.5",
    "decider.recovery_deadline_s=20",
]

jobs = st.sampled_from(["gpt", "gpt", "llm"])
nodes = st.sampled_from(ALL)
attempts = st.sampled_from([0, 0, 0, -1, 1, -9])  # beside the current one; -9: not known
gaps = st.sampled_from([0, 0, 0.05, 0.3, 1.1, 5, 12, 61, 1000])


def lines() -> st.SearchStrategy[tuple[Any, ...]]:
    """One thing that happens: words, with the attempt worked out when it is told."""
    named = st.sampled_from(["gpu_unavailable", "os_kernel_panic", "disk_fault"])
    confidence = st.sampled_from(["high", "high", "low", "sympathetic"])
    results = st.sampled_from(
        ["done", "done", "done", "failed", "unreachable", "refused_stale", "refused_held", "refused_expired"]
    )
    return st.one_of(
        st.tuples(st.just("signal"), named, nodes, jobs, attempts, confidence),
        st.tuples(st.just("signal"), st.just("node_silent"), nodes, jobs, attempts, st.just("low")),
        st.tuples(st.just("signal"), st.just("rank_exit"), nodes, jobs, attempts, confidence),
        st.tuples(st.just("signal"), st.just("job_hang"), st.just(""), jobs, attempts, st.just("low")),
        st.tuples(st.just("signal"), st.just("cuda_error"), nodes, jobs, attempts, confidence),
        st.tuples(st.just("clear"), st.sampled_from(["node_silent", "job_hang"]), nodes, jobs, attempts),
        st.tuples(st.just("progress"), jobs, attempts, st.booleans()),
        st.tuples(st.just("finished"), jobs, attempts),
        st.tuples(st.just("operator"), st.sampled_from(["hold", "hold for", "release", "restart", "stop"]), jobs),
        st.tuples(st.just("fleet"), st.sampled_from(["hold", "hold for=3", "release"])),
        st.tuples(st.just("standby"), jobs, nodes),
        st.tuples(st.just("declare"), jobs),
        st.tuples(st.just("approve"), jobs, st.booleans()),
        st.tuples(st.just("policy"), st.sampled_from(MODES), st.sampled_from(LIMITS)),
        st.tuples(st.just("answer"), st.integers(0, 5), results, st.booleans()),
        st.tuples(st.just("actuators"), st.sampled_from(["silent", "answer"])),
        st.tuples(st.just("again"), st.integers(1, 6)),
        st.tuples(st.just("garbage")),
        st.tuples(st.just("takeover")),
    )


def place(node: str) -> str:
    return f"{node}@r{'abcdstuefgvzz'.index(node[0]) // 2}/w{'abcdstuefgvzz'.index(node[0]) // 4}#{node}"


def declared(job: str) -> str:
    return f"job {job} nodes {' '.join(map(place, NODES[job]))} standbys {' '.join(map(place, SPARES[job]))}"


class Fuzzed(Story):
    """A story told by `lines`."""

    def happens(self, what: tuple[Any, ...]) -> None:
        kind, *args = what
        getattr(self, f"do_{kind}")(*args)

    def attempt(self, job: str, off: int) -> int:
        known = self.decider.fleet.jobs.get(job)
        return 0 if off == -9 else max(0, (known.attempt if known else 0) + off)

    def do_signal(self, symptom: str, node: str, job: str, off: int, confidence: str) -> None:
        rank = "rank=0" if symptom == "rank_exit" else ""
        self.tell(f"signal {symptom} {node} job={job} attempt={self.attempt(job, off)} confidence={confidence} {rank}")

    def do_clear(self, symptom: str, node: str, job: str, off: int) -> None:
        self.tell(f"clear {symptom} {node} job={job} attempt={self.attempt(job, off)}")

    def do_progress(self, job: str, off: int, first: bool) -> None:
        self.tell(f"progress {job} {'first' if first else ''} attempt={self.attempt(job, off)} step={len(self.records)}")

    def do_finished(self, job: str, off: int) -> None:
        self.tell(f"finished {job} attempt={self.attempt(job, off)} step=9")

    def do_operator(self, what: str, job: str) -> None:
        verb, *more = what.split()
        self.tell(f"{verb} {job} {'for=4' if more else ''}")

    def do_fleet(self, what: str) -> None:
        self.tell(what)

    def do_standby(self, job: str, node: str) -> None:
        self.tell(f"standby {job} {place(node)}")

    def do_declare(self, job: str) -> None:
        self.tell(declared(job))

    def do_approve(self, job: str, granted: bool) -> None:
        known = self.decider.fleet.jobs.get(job)
        if known and known.plan and known.plan.stage == "awaiting":
            self.tell(f"approve {job} {self.names[known.plan.decision]} {'' if granted else 'no'}")

    def do_policy(self, mode: str, limits: str) -> None:
        self.tell(f"policy {mode} {limits}")

    def do_answer(self, index: int, result: str, named: bool) -> None:
        open_ = [i for i in self.intents.values() if i.key not in self.answered]
        if index < len(open_):
            intent = open_[-1 - index]
            nodes = (intent.node,) if intent.node else intent.nodes[:1]
            self.outcome(intent, result, nodes if named and result != "done" else ())

    def do_actuators(self, what: str) -> None:
        self.tell(f"actuators {what}")

    def do_again(self, back: int) -> None:
        """An input is delivered a second time."""
        inputs = [r for r in self.records if ".decider." not in r.subject]
        record = inputs[-min(back, len(inputs))]
        self.put(record.subject, record.data)

    def do_garbage(self) -> None:
        self.put("ledger.gpt.detector.signal", b'{"no":"event"}')
        self.put("ledger.gpt.detector.hold_placed", self.records[-1].data)

    def do_takeover(self) -> None:
        self.say_started()


def run(script: list[tuple[float, tuple[Any, ...]]], policy: str = "auto") -> Fuzzed:
    story = Fuzzed()
    story.tell(f"policy {policy}")
    story.tell(declared("gpt"))
    story.tell(declared("llm"))
    for job in ("gpt", "llm"):
        story.tell(f"+2 progress {job} first attempt=1 step=1")
    for gap, what in script:
        story.until(story.now + int(gap * NS))
        story.happens(what)
    return story


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=st.lists(st.tuples(gaps, lines()), max_size=40), policy=st.sampled_from(MODES))
def test_anything_may_happen(script: list[tuple[float, tuple[Any, ...]]], policy: str) -> None:
    story = run(script, policy)
    check(story.records)
    story.until(story.now + 4000 * NS)
    check(story.records).settled()
    result = replay(story.records)
    assert result.identical and not result.pending
