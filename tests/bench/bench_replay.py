"""`replay`: a ledger is folded again and each decision compared byte for byte. Ledger events a second on one core, beside validation
alone of the same bytes in the same run (what any reader that trusts nothing pays)."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator

from events.clock import NS
from events.incident import EvidenceMissing, ProgressNoted, Signal
from events.ports import Record
from events.registry import parse
from processors.replay import replay
from tests.bench.report import report
from tests.stories import Story

NAMES = ("replay",)

JOBS, NODES, RACK = 4, 1200, 32
ROUNDS = 7
BOUND = 25_000


def ledger(minutes: int = 480, seed: int = 1) -> list[Record]:
    """Four jobs of 1,200 machines for some hours: a note of progress each 10 s and job, a trickle of signals that open nothing, a
    burst of echoes now and then, and an incident of a job every few hours (two or three times as many as ByteRobust counts)."""
    rng = random.Random(seed)
    story = Story()
    story.tell(
        "policy auto budget.job.evictions_max=50 budget.fleet.evictions_max=200 budget.rack.evictions_max=50 budget.job.window_s=60"
    )
    for j in range(JOBS):
        nodes = " ".join(f"j{j}n{i:04d}@r{j}-{i // RACK}/w{j}-{i // (4 * RACK)}" for i in range(NODES))
        spares = " ".join(f"j{j}s{i:02d}@r{j}-s" for i in range(60))
        story.tell(f"job j{j} nodes {nodes} standbys {spares}")
        story.tell(f"+2 progress j{j} first attempt=1 step=1")
    for _ in range(minutes * 6):
        for event in _ten_seconds(rng, story):
            event()
    return story.records


def _ten_seconds(rng: random.Random, story: Story) -> Iterator[Callable[[], None]]:
    for j in range(JOBS):
        job = story.decider.fleet.jobs[f"j{j}"]
        story.until(story.now + 10 * NS // JOBS)
        note = ProgressNoted(step=len(story.records), first=job.confirmed != job.attempt, restored_step=0, seen_ns=story.now)
        yield lambda note=note, job=job: story.say(note, "detector", job.name, attempt=job.attempt)
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            node = job.places[rng.randrange(NODES)].node
            symptom = rng.choice(("nic_flap", "gpu_thermal", "nvlink_error", "gpu_memory_error", "unknown"))
            signal = Signal(
                symptom=symptom, node=node, device="gpu3", rule="xid_63", confidence="low", seen_ns=story.now, count=3,
                evidence="NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
            )  # fmt: skip
            yield lambda signal=signal, job=job: story.say(signal, "detector", job.name, attempt=job.attempt)
        if rng.random() < 0.05:
            missing = EvidenceMissing(node=job.places[0].node, producer="kmsg", reason="overrun", missing=17)
            yield lambda missing=missing, job=job: story.say(missing, "detector", job.name)
        if rng.random() < 1 / 1000:
            yield lambda job=job: _incident(rng, story, job.name)


def _incident(rng: random.Random, story: Story, name: str) -> None:
    job = story.decider.fleet.jobs[name]
    node = job.places[rng.randrange(NODES)].node
    if rng.random() < 0.3:
        story.tell(f"signal gpu_unavailable {node} attempt={job.attempt} job={name} confidence=high evidence=Xid-79")
    else:
        story.tell(f"signal rank_exit {node} rank=7 attempt={job.attempt} job={name} rule=rank_killed")
    for i in range(40):
        other = job.places[(i * 31) % NODES].node
        story.tell(f"+0.01 signal rank_exit {other} rank={i} attempt={job.attempt} job={name} confidence=sympathetic")
        story.tell(f"signal cuda_error {other} attempt={job.attempt} job={name} confidence=sympathetic evidence=Xid-45")
    story.until(story.now + 30 * NS)


def seconds_of(work: Callable[[], object]) -> float:
    gc.collect()
    gc.freeze()  # the records read are no garbage of the replay's
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    records = ledger()
    result = replay(records)
    assert result.identical and not result.pending, result.divergence
    ours = min(seconds_of(lambda: replay(records)) for _ in range(ROUNDS))
    peer = min(seconds_of(lambda: deque(map(parse, (record.data for record in records)), maxlen=0)) for _ in range(ROUNDS))
    report(
        "replay", len(records) / ours, "events/s/core", bound=BOUND, peer="parse and validate alone", peer_value=len(records) / peer,
        n=len(records), decisions=result.decisions, bytes=sum(len(r.data) for r in records),
    )  # fmt: skip


if __name__ == "__main__":
    main()
