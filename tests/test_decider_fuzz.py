"""Any events in any order: the decider never raises, always settles, and keeps the laws of tests/decider_laws.py; and its ledger replays."""

from __future__ import annotations

import random
from typing import Any

import pytest
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
    "decider.rungs=[reattempt] decider.reattempts_max=2",
    "decider.reattempts_max=2 decider.stable_steps=5 decider.unproven=watch budget.fleet.share_max=1",
    "decider.no_standby=hold",
    "decider.reattempts_max=1 decider.recoveries_max=2",
    "shared_causes.nodes_min=2 shared_causes.share_min=0.5",
    "decider.recovery_deadline_s=20",
]

FINDINGS = [
    "stacks 0",
    "stacks 1,2",
    "stacks 0,1,2,3",
    "stacks 1 2 1",
    "tests",
    "examined",
    "examined passed=yes",
    "replays 0 1",
    "replays 1 1",
]
CLEARS = ["node_silent", "job_hang", "mfu_decline", "nan_value", "gpu_thermal", "gpu_driver_hang"]

jobs = st.sampled_from(["gpt", "gpt", "llm"])
nodes = st.sampled_from(ALL)
attempts = st.sampled_from([0, 0, 0, -1, 1, -9])  # beside the current one; -9: not known
gaps = st.sampled_from([0, 0, 0.05, 0.3, 1.1, 5, 12, 61, 1000])


def lines() -> st.SearchStrategy[tuple[Any, ...]]:
    """One thing that happens: words, with the attempt worked out when it is told."""
    named = st.sampled_from(
        ["gpu_unavailable", "os_kernel_panic", "disk_fault", "gpu_driver_hang", "gpu_thermal", "nvlink_error"]
    )
    of_the_job = st.sampled_from(["nan_value", "loss_spike", "mfu_decline", "user_code_error"])
    confidence = st.sampled_from(["high", "high", "low", "sympathetic"])
    results = st.sampled_from(
        ["done", "done", "done", "failed", "unreachable", "refused_stale", "refused_held", "refused_expired"]
    )
    sure = st.tuples(st.just("signal"), named, st.sampled_from(NODES["gpt"]), st.just("gpt"), st.just(0), st.just("high"))
    return st.one_of(
        sure,
        sure,
        sure,
        st.tuples(st.just("signal"), named, nodes, jobs, attempts, confidence),
        st.tuples(st.just("signal"), st.just("node_silent"), nodes, jobs, attempts, st.just("low")),
        st.tuples(st.just("signal"), st.just("rank_exit"), nodes, jobs, attempts, confidence),
        st.tuples(st.just("signal"), st.just("job_hang"), st.just(""), jobs, attempts, st.just("low")),
        st.tuples(st.just("signal"), of_the_job, nodes, jobs, attempts, confidence),
        st.tuples(st.just("found"), st.sampled_from(FINDINGS), st.sampled_from(NODES["gpt"])),
        st.tuples(st.just("override"), jobs, st.sampled_from(["evict", "reattempt", "roll_back", "keep", "keep for=9"]), nodes),
        st.tuples(st.just("revision"), jobs, st.sampled_from(["r1", "r2", "r3"])),
        st.tuples(st.just("signal"), st.just("cuda_error"), nodes, jobs, attempts, confidence),
        st.tuples(st.just("clear"), st.sampled_from(CLEARS), nodes, jobs, attempts),
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
        if symptom in ("nan_value", "loss_spike"):
            rank = f"step={len(self.records)} bad_step={len(self.records) // 2} metric={('loss', 'grad_norm')[len(self.records) % 2]}"
        self.tell(f"signal {symptom} {node} job={job} attempt={self.attempt(job, off)} confidence={confidence} {rank}")

    def do_found(self, what: str, node: str) -> None:
        if what.startswith("replays") and not any(i.verb == "group_test" for i in self.intents.values()):
            return
        kind, *more = what.split()
        self.tell(f"found {kind} {node if kind in ('tests', 'examined') else ''} {' '.join(more)}")

    def do_override(self, job: str, remedy: str, node: str) -> None:
        remedy, *more = remedy.split()
        self.tell(f"override {job} {remedy} node={node} {' '.join(more)}")

    def do_revision(self, job: str, revision: str) -> None:
        self.tell(f"restart {job} symptom=code_update revision={revision}")

    def do_clear(self, symptom: str, node: str, job: str, off: int) -> None:
        metric = ("loss", "grad_norm", "")[len(self.records) % 3] if symptom == "nan_value" else ""
        self.tell(f"clear {symptom} {node} job={job} attempt={self.attempt(job, off)} metric={metric}")

    def do_progress(self, job: str, off: int, first: bool) -> None:
        step = len(self.records)
        restored = step // 2 if first else -1
        self.tell(f"progress {job} {'first' if first else ''} attempt={self.attempt(job, off)} step={step} restored={restored}")

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
        self.tell(f"{declared(job)} checkpoints=/{len(self.records) % 2}")

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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=st.lists(st.tuples(gaps, lines()), max_size=40), policy=st.sampled_from(MODES))
def test_anything_may_happen(script: list[tuple[float, tuple[Any, ...]]], policy: str) -> None:
    story = run(script, policy)
    check(story.records)
    story.until(story.now + 20_000 * NS)
    check(story.records).settled()
    result = replay(story.records)
    assert result.identical and not result.pending


def anything(rng: random.Random) -> tuple[Any, ...]:
    """One thing that happens, likely ones more often."""
    kinds = {
        "named": 10, "silent": 6, "exit": 8, "hang": 3, "cuda": 1, "clear": 4, "progress": 6, "finished": 0.7, "operator": 3, "fleet": 1,
        "metric": 3, "found": 4, "override": 1, "revision": 1, "standby": 2, "declare": 1, "approve": 6, "policy": 2, "answer": 10, "actuators": 1.5, "again": 2, "garbage": 0.5, "takeover": 0.5,
    }  # fmt: skip
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    job, node, off = rng.choice(["gpt", "gpt", "llm"]), rng.choice(ALL), rng.choice([0, 0, 0, 0, -1, 1, -9])
    confidence = rng.choice(["high", "high", "high", "low", "sympathetic"])
    results = [*["done"] * 5, "failed", "unreachable", "refused_stale", "refused_held", "refused_expired"]
    return {
        "named": lambda: (
            "signal",
            rng.choice(["gpu_unavailable", "os_kernel_panic", "disk_fault", "gpu_driver_hang", "gpu_thermal"]),
            node,
            job,
            off,
            confidence,
        ),
        "silent": lambda: ("signal", "node_silent", node, job, off, "low"),
        "exit": lambda: ("signal", "rank_exit", node, job, off, confidence),
        "hang": lambda: ("signal", "job_hang", "", job, off, "low"),
        "metric": lambda: (
            "signal",
            rng.choice(["nan_value", "loss_spike", "mfu_decline", "user_code_error"]),
            node,
            job,
            off,
            confidence,
        ),
        "found": lambda: ("found", rng.choice(FINDINGS), rng.choice(NODES["gpt"])),
        "override": lambda: ("override", job, rng.choice(["evict", "reattempt", "roll_back", "keep", "keep for=9"]), node),
        "revision": lambda: ("revision", job, rng.choice(["r1", "r2", "r3"])),
        "cuda": lambda: ("signal", "cuda_error", node, job, off, confidence),
        "clear": lambda: ("clear", rng.choice(["node_silent", *CLEARS]), node, job, off),
        "progress": lambda: ("progress", job, off, rng.random() < 0.5),
        "finished": lambda: ("finished", job, off),
        "operator": lambda: ("operator", rng.choice(["hold", "hold for", "release", "release", "restart", "stop"]), job),
        "fleet": lambda: ("fleet", rng.choice(["hold", "hold for=3", "release", "release"])),
        "standby": lambda: ("standby", job, node),
        "declare": lambda: ("declare", job),
        "approve": lambda: ("approve", job, rng.random() < 0.7),
        "policy": lambda: ("policy", rng.choice(MODES), rng.choice(LIMITS)),
        "answer": lambda: ("answer", rng.randrange(6), rng.choice(results), rng.random() < 0.5),
        "actuators": lambda: ("actuators", rng.choice(["silent", "answer"])),
        "again": lambda: ("again", rng.randrange(1, 7)),
    }.get(kind, lambda: (kind,))()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(60))
def test_long_stories_of_chance(seed: int) -> None:
    """Longer than what is shrunk above; the seed is the story."""
    rng = random.Random(seed)
    script = [
        (rng.choice([0, 0, 0.05, 0.3, 1.1, 5, 12, 61, 61 if rng.random() < 0.9 else 1000]), anything(rng)) for _ in range(80)
    ]
    story = run(script, f"{rng.choice(MODES)} {rng.choice(LIMITS)}")
    check(story.records)
    story.until(story.now + 20_000 * NS)
    check(story.records).settled()
    result = replay(story.records)
    assert result.identical and not result.pending
