"""Laws of both detectors over random histories: what holds whatever producers, brokers and workers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events import subjects
from events.hardware import EvidenceGap, KernelRecord
from events.ports import Record
from events.presence import AgentState, Heartbeat, RankProcess
from events.registry import canonical, parse
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from processors.detector import Detector, Keyed, PartitionFold, dump_clock, load_clock, read, run
from processors.job import job_detector
from processors.node import node_detector
from processors.policy import Detectors, PhaseLimits
from tests.simulation import noise
from tests.telemetry import XID_13, XID_45, XID_79, Story, catalogue

DETECTORS: dict[str, Detector[Any]] = {"node": node_detector(catalogue()), "job": job_detector()}
#: Odd names on purpose: they are keys, and stand in subjects.
NODES = ("n1", "rack 7.n*2", "ü>", "n3")
LINES = (XID_79, XID_45, XID_13, "", "Kernel panic - not syncing: x", "NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: fallen off the bus",
         "Out of memory: Killed process 1 (a)", "NVRM: Xid (PCI:0000:0a:00): 4242, x", "\x00\ud7ff\n", XID_79 + "é" * 3000)  # fmt: skip
STDERR = ("", "Traceback (most recent call last):\nValueError: x", "RuntimeError: gloo Connection closed by peer", "ü" * 4000)
PHASES = ("startup", "step", "evaluation", "checkpoint", "undeclared")


def history(kind: str, seed: int, length: int = 120) -> Story:
    """Anything that is valid: late, repeated, out of order, absurd; with ticks that sometimes stop."""
    chance = Random(seed)
    story = Story(kind)
    at_s = float(chance.randrange(100))
    for _ in range(length):
        at_s += chance.choice((0, 0, 0.1, 0.5, 1, 1, 2, 7, 40 if chance.random() < 0.1 else 0.2))
        what = chance.random()
        if what < 0.45:
            story.tick(at_s)
        elif what < 0.47:
            limits = PhaseLimits(startup=chance.randrange(2, 30), step=chance.randrange(2, 10), evaluation=9)
            story.adopt(
                at_s,
                Detectors(
                    silence_s=chance.randrange(1, 9),
                    phase_limit_s=limits,
                    healthy_steps=chance.randrange(1, 4),
                    exits_each_max=2,
                    progress_note_s=2,
                ),
            )
        elif kind == "node":
            _node(story, at_s, chance)
        else:
            _job(story, at_s, chance)
    return story


def _common(chance: Random) -> dict[str, Any]:
    more: dict[str, Any] = {"held_s": chance.choice((0, 0, 0, 1, 30)), "attempt": chance.choice((1, 1, 2, 3))}
    if chance.random() < 0.3:
        more["number"] = chance.choice((0, 1, 2, 3, 5, 50, 10**15))
    return more


def _node(story: Story, at_s: float, chance: Random) -> None:
    node, more = chance.choice(NODES), _common(chance)
    match chance.randrange(5):
        case 0 | 1:
            story.say(at_s, node, Heartbeat(), boot=chance.choice(("a", "b", "")), job=chance.choice(("gpt", "")), **more)
        case 2:
            lines = [
                KernelRecord(text=chance.choice(LINES), history=chance.random() < 0.1, hearsay=chance.random() < 0.1)
                for _ in range(chance.randrange(12))
            ]
            story.kernel(at_s, node, *lines, **more)
        case 3:
            state = chance.choice(("started", "stopping", "stalled", "skipped", "failed", "resumed"))
            story.say(
                at_s, node, AgentState(state=state, producer=chance.choice(("agent", "kernel_log")), detail="d" * 4096), **more
            )
        case _:
            story.say(at_s, node, EvidenceGap(producer="p" * 4000, reason="overrun", missing=chance.randrange(-1, 9)), **more)


def _job(story: Story, at_s: float, chance: Random) -> None:
    node, more = chance.choice(NODES), _common(chance)
    job = chance.choice(("gpt", "gpt", "a.b *>"))
    rank, world = chance.choice((0, 1, 2, 2, 300_000)), chance.choice((3, 3, 3, 1, 2, 10**9))
    common: dict[str, Any] = {"job": job, "on_job": True, **more}
    match chance.randrange(6):
        case 0:
            story.say(at_s, node, RankStarted(rank=rank, local_rank=0, world_size=world, pid=1), **common)
        case 1 | 2 | 3:
            step = chance.randrange(-1, 30)
            losses = (None, 1.0, float("nan"), float("inf"))
            samples = tuple(
                StepSample(
                    step=chance.randrange(30), ended_ns=chance.randrange(2**60), step_time_s=1, loss=chance.choice(losses)
                )
                for _ in range(chance.randrange(4))
            )
            fact = TrainingProgress(
                rank=rank,
                world_size=world,
                phase=chance.choice(PHASES),
                progress=chance.randrange(40),
                step=step,
                samples=samples,
            )
            story.say(at_s, node, fact, **common)
        case 4:
            ended: dict[str, Any] = chance.choice(({"code": 0}, {"code": 0}, {"code": 1}, {"signal": 9}, {"signal": 6}, {}))
            exit_ = RankExit(
                rank=rank, world_size=world, asked=chance.random() < 0.2, stderr_tail=chance.choice(STDERR), **ended
            )
            story.say(at_s, node, exit_, **common)
        case _:
            processes = tuple(RankProcess(rank=r, pid=9, state=chance.choice("RSDTZ-")) for r in (0, 1, 300_000))
            story.say(at_s, node, Heartbeat(ranks=processes), **common)


def told(fold: PartitionFold[Any], records: list[Record]) -> list[tuple[str, bytes]]:
    outs, refused = run(fold, records)
    assert refused == []
    return [(out.subject, canonical(out.event)) for out in outs]


def copied(fold: PartitionFold[Any]) -> PartitionFold[Any]:
    """What another worker makes of what this one stored."""
    stored = json.dumps([[key, keyed.sequence, fold.detector.dump(keyed.state)] for key, keyed in fold.keys.items()])
    other = PartitionFold(fold.detector)
    other.clock = load_clock(json.loads(json.dumps(dump_clock(fold.clock))))
    for key, sequence, value in json.loads(stored):
        other.keys[key] = Keyed(fold.detector.load(key, value), sequence)
    return other


def states(fold: PartitionFold[Any]) -> dict[str, Any]:
    return {key: (keyed.sequence, keyed.state) for key, keyed in fold.keys.items()}


KINDS = pytest.mark.parametrize("kind", ["node", "job"])
SEEDS = st.integers(0, 2**32)
LAW = settings(max_examples=12, deadline=None)


@KINDS
@LAW
@given(SEEDS, st.integers(0, 120))
def test_prefix_and_rest_equal_the_whole(kind: str, seed: int, cut: int) -> None:
    records = history(kind, seed).records
    whole = PartitionFold(DETECTORS[kind])
    expected = told(whole, records)
    first = PartitionFold(DETECTORS[kind])
    before = told(first, records[:cut])
    second = copied(first)
    assert before + told(second, records[cut:]) == expected
    assert states(second) == states(whole) and second.clock == whole.clock


@KINDS
@LAW
@given(SEEDS, st.integers(0, 119), st.integers(0, 119))
def test_repeats_change_nothing(kind: str, seed: int, cut: int, back: int) -> None:
    """Each record twice, and once from far back, as a worker that lost its place reads it."""
    records = history(kind, seed).records
    fold = PartitionFold(DETECTORS[kind])
    expected = told(PartitionFold(DETECTORS[kind]), records)
    again = [record for record in records[:cut] for _ in range(2)] + records[max(0, cut - back) : cut] + records[cut:]
    assert told(fold, again) == expected


@KINDS
@LAW
@given(SEEDS, st.integers(1, 119), st.integers(0, 40))
def test_keys_stored_ahead_of_the_clock_lose_and_repeat_nothing(kind: str, seed: int, cut: int, back: int) -> None:
    """A worker died after it had stored its keys and before its clock: the next goes on from the older clock."""
    records = history(kind, seed).records
    expected = told(PartitionFold(DETECTORS[kind]), records)
    early, late = PartitionFold(DETECTORS[kind]), PartitionFold(DETECTORS[kind])
    told(early, records[: max(0, cut - back)])
    before = told(late, records[:cut])
    resumed = copied(late)
    resumed.clock = copied(early).clock
    again = told(resumed, records[resumed.clock.sequence :])
    merged: dict[str, tuple[str, bytes]] = {}
    for item in before + again:
        merged.setdefault(json.loads(item[1])["id"], item)
    assert list(merged.values()) == expected


@KINDS
@LAW
@given(SEEDS)
def test_what_other_keys_do_changes_nothing(kind: str, seed: int) -> None:
    detector = DETECTORS[kind]
    records = history(kind, seed).records
    expected: dict[str, list[bytes]] = {}
    for out in run(PartitionFold(detector), records)[0]:
        expected.setdefault(out.event.subject, []).append(canonical(out.event))
    names = NODES if kind == "node" else ("gpt", "a.b *>")
    for name in names:
        own = [r for r in records if subjects.is_clocks(r.subject) or detector.key_of(read(r)) == name]
        alone = [canonical(out.event) for out in run(PartitionFold(detector), own)[0] if out.event.subject == name]
        assert alone == expected.get(name, [])


@KINDS
@LAW
@given(SEEDS)
def test_ids_are_unique_and_times_are_the_triggers(kind: str, seed: int) -> None:
    outs, _ = run(PartitionFold(DETECTORS[kind]), history(kind, seed).records)
    assert len({out.event.id for out in outs}) == len(outs)
    times = [out.event.time for out in outs]
    assert times == sorted(times)


@KINDS
@LAW
@given(SEEDS)
def test_states_stay_small(kind: str, seed: int) -> None:
    fold = PartitionFold(DETECTORS[kind])
    told(fold, history(kind, seed, 250).records)
    for keyed in fold.keys.values():
        assert len(json.dumps(fold.detector.dump(keyed.state))) < 64_000


def digest(kind: str, seeds: range) -> str:
    lines = [
        line
        for seed in seeds
        for pair in told(PartitionFold(DETECTORS[kind]), history(kind, seed).records)
        for line in (pair[1],)
    ]
    assert lines
    return sha256(b"\n".join(lines)).hexdigest()


@KINDS
def test_another_hash_seed_changes_nothing(kind: str) -> None:
    program = f"from tests.test_detector_laws import digest; print(digest({kind!r}, range(6)))"
    found = {digest(kind, range(6))}
    for seed in ("4242",):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "LC_ALL": "C"},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout.strip())
    assert len(found) == 1


@KINDS
def test_random_histories_claim_enough_for_these_laws_to_mean_something(kind: str) -> None:
    kinds: dict[str, int] = {}
    for seed in range(40):
        for out in run(PartitionFold(DETECTORS[kind]), history(kind, seed).records)[0]:
            what = str(getattr(out.event.data, "symptom", out.event.data.kind())) + "/" + out.event.data.kind()
            kinds[what] = kinds.get(what, 0) + 1
    wanted = {
        "node": {
            "node_silent/signal",
            "node_silent/signal_cleared",
            "gpu_unavailable/signal",
            "evidence_missing/evidence_missing",
        },
        "job": {"rank_exit/signal", "job_hang/signal", "job_hang/signal_cleared", "progress_noted/progress_noted"},
    }[kind]
    assert wanted <= set(kinds), kinds


def _seen(chance: Random) -> tuple[Any, str]:
    """What a node's producers may say of healthy and of sick parts: the fact and its producer."""
    made = chance.choice(
        (
            lambda: noise.kernel(chance.choice((*noise.HARMLESS, XID_79, XID_45, XID_13, noise.XID_31 % ("3b", 7)))),
            lambda: noise.gpu_sample(chance, hot=chance.choice((-1, 2, 2)), lost=chance.random() < 0.1, links_down=chance.random() < 0.1),
            lambda: noise.watch(chance.choice(("missed", "watching")), misses=chance.choice((1, 2)), process_state=chance.choice("SD"), up_s=9e5),
            lambda: noise.nic_sample(chance, state=chance.choice(("up", "up", "up", "down"))),
            lambda: noise.link("mlx5_0/1", chance.choice(("up", "down"))),
            lambda: noise.host_sample(
                chance, memory_pressure_full=chance.choice((0.0, 30.0)), cpu_pressure=chance.choice((10.0, 95.0)), oom_kills=chance.choice((0, 0, 1))
            ),
        )
    )()  # fmt: skip
    return parse(made.data("x", "n1", 1)).data, made.producer


@LAW
@given(SEEDS)
def test_what_a_producer_sends_twice_is_told_once(seed: int) -> None:
    """A publisher whose acknowledgement was lost sends again: the same event, a little later."""
    chance = Random(seed)
    once, twice = Story(), Story()
    numbers: Counter[str] = Counter()
    at_s = 100.0
    for i in range(100):
        at_s += chance.choice((0.5, 1, 5, 10, 30))
        fact, producer = _seen(chance)
        numbers[producer] += 1
        again = chance.random() < 0.5
        for story in (once, twice):
            story.tick(at_s - 0.2)
            for late_s in (0, 0.3) if again and story is twice else (0,):
                story.say(
                    at_s + late_s, "n1", fact, job="gpt", attempt=1, producer=producer, number=numbers[producer], id=f"x{i}", held_s=late_s
                )  # fmt: skip

    def said(story: Story) -> Counter[tuple[Any, ...]]:
        facts = [json.loads(raw)["data"] for _, raw in told(PartitionFold(DETECTORS["node"]), story.records)]
        return Counter((fact.get("symptom"), fact.get("confidence"), fact.get("rule"), fact.get("count", 1)) for fact in facts)

    assert said(once) == said(twice)
