"""rules_cost: what the detectors cost with every rule on, at 1,200 nodes of eight GPUs that train one job: processor time for a second of that
fleet's telemetry, and events a second of one core. Two parts: the folds, and (`stored_ms`) the text of the states that changed within the
second, which a worker writes to its table once a second.

Beside it: the same messages read by a plain loop that keeps each source's last one and judges nothing; and NVSentinel's analyser, whose
developers state 57 events a second (its issue 1800; not run here)."""

from __future__ import annotations

import json
import os
import statistics
import time
from random import Random
from typing import Any

from events import subjects
from events.clock import NS
from events.envelope import Fact
from events.gpu import GpuClocks
from events.host import Configuration
from events.ports import Record
from events.presence import Heartbeat, RankProcess, Tick
from events.registry import canonical, make
from events.training import RankStarted, StepSample, TrainingProgress
from infra.catalogue_files import catalogue_text
from processors.catalogue import parse
from processors.detector import PartitionFold, read
from processors.job import job_detector
from processors.node import node_detector
from tests.bench.report import report
from tests.simulation import noise
from tests.simulation.world import BUSY_S, RANK, START_NS, Template

NAMES = ("rules_cost",)
NODES, RANKS_PER_NODE, PARTITIONS = 1_200, 8, 8
SECONDS = int(os.environ.get("KEEPSTEP_BENCH_RULES_SECONDS", "30"))
WARM_S = 10
STEP_S = 5
JOB = "pretrain"
#: Seconds of telemetry may take less processor time than they last: one core then keeps up with the fleet, with as much to spare.
BOUND_MS = 1000.0
NVSENTINEL_PER_S = 57


class Telemetry:
    """The fleet's messages, second by second, in the order of the two streams."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.nodes = [f"node-{i:04d}" for i in range(NODES)]
        self.sequences = {"tn": 0, "tj": 0}
        self.numbers: dict[tuple[str, str], int] = {}
        self.ids = 0
        self.samples = [noise.gpu_sample(self.chance) for _ in range(8)]
        self.links = [noise.nic_sample(self.chance) for _ in range(8)]
        self.hosts = [noise.host_sample(self.chance) for _ in range(8)]
        self.lines = [noise.kernel(self.chance.choice(noise.HARMLESS)) for _ in range(32)]
        self.traffic = noise.traffic(JOB, 2e10)
        self.clocks = Template(GpuClocks(gpus=8, slowest=3, slowest_share=0.93, temperature_celsius=64.0), "gpu", JOB)
        ranks = tuple(RankProcess(rank=rank, pid=4000 + rank, state="S") for rank in range(RANKS_PER_NODE))
        self.beat = Template(Heartbeat(ranks=ranks), "heartbeat")
        self.job_beat = Template(Heartbeat(ranks=ranks), "heartbeat", JOB)
        values = tuple((f"env.NCCL_{i:02d}", "1") for i in range(40))
        self.setup = Template(Configuration(groups=("env",), values=values), "configuration", JOB)

    def second(self, at: int) -> list[Record]:
        out: list[Record] = []
        chance = self.chance
        for stream, prefix in (("tn", subjects.NODE), ("tj", subjects.JOB)):
            for partition in range(PARTITIONS):
                out.append(self._record(stream, at, subjects.tick(prefix, partition), _TICK))
        for i, node in enumerate(self.nodes):
            self._say(out, at, self.beat, node)
            self._say(out, at, self.job_beat, node)
            if (at + i) % 10 == 0:
                self._say(out, at, chance.choice(self.samples), node)
                self._say(out, at, chance.choice(self.hosts), node)
            if (at + i) % 30 == 0:
                self._say(out, at, chance.choice(self.links), node)
                self._say(out, at, self.traffic, node)
                self._say(out, at, self.clocks, node)
            if (at + i) % 60 == 0:
                self._say(out, at, self.setup, node)
            if chance.random() < noise.AMBIENT_PER_NODE_S:
                self._say(out, at, chance.choice(self.lines), node)
        self._ranks(out, at)
        return out

    def _ranks(self, out: list[Record], at: int) -> None:
        """Each rank's hook is heard once a second, and each fifth time with a finished step."""
        world_size, step = NODES * RANKS_PER_NODE, at // STEP_S
        samples: tuple[StepSample, ...] = ()
        if at % STEP_S == 0:
            samples = (
                StepSample(
                    step=step, ended_ns=START_NS, step_time_s=STEP_S, loss=2.5 + self.chance.gauss(0, 0.02), grad_norm=0.2,
                    tokens=4096, mfu=0.41, busy_s=BUSY_S,
                ),
            )  # fmt: skip
        fact: Fact = TrainingProgress(
            rank=RANK, world_size=world_size, phase="step", progress=step + 2, step=step, samples=samples
        )
        told = Template(fact, "trainer", JOB)
        if at == 0:
            told = Template(RankStarted(rank=RANK, local_rank=0, world_size=world_size, pid=4000), "rank", JOB)
        for rank in range(world_size):
            self._say(out, at, told, self.nodes[rank // RANKS_PER_NODE], rank)

    def _say(self, out: list[Record], at: int, template: Template, node: str, rank: int = 0) -> None:
        key = (node, f"{template.producer}/{template.job}/{rank}")
        number = self.numbers[key] = self.numbers.get(key, 0) + 1
        self.ids += 1
        data = template.data(f"t{self.ids}", node, number, 1, rank, 3.0 + self.chance.gauss(0, 0.05))
        if template.job:
            out.append(self._record("tj", at, f"tj.0.{node}.{JOB}.{template.kind}", data))
        else:
            out.append(self._record("tn", at, f"tn.{hash_of(node)}.{node}.{template.kind}", data))

    def _record(self, stream: str, at: int, subject: str, data: bytes) -> Record:
        self.sequences[stream] += 1
        return Record(stream, self.sequences[stream], START_NS + at * NS + self.sequences[stream] % NS, subject, data)


_TICK = canonical(make(Tick(), id="tick", source="bus/clock", subject="clock", time=0))


def hash_of(node: str) -> int:
    return int(node[-4:]) % PARTITIONS


class Plain:
    """What any consumer must do: read a message, keep the last of each source."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, str], int] = {}

    def feed(self, record: Record) -> None:
        if not subjects.is_clocks(record.subject):
            seen = read(record)
            self.last[(seen.node, seen.event.source)] = seen.event.number


class Folds:
    """Every partition's fold, as the workers have them, under the default policy."""

    def __init__(self) -> None:
        node, job = node_detector(parse(catalogue_text(), examples=False)), job_detector()
        self.folds: dict[str, list[PartitionFold[Any]]] = {
            "tn": [PartitionFold(node) for _ in range(PARTITIONS)],
            "tj": [PartitionFold(job) for _ in range(PARTITIONS)],
        }
        self.claims = 0
        self.kinds: dict[str, int] = {}

    def feed(self, record: Record) -> None:
        partition = int(record.subject.split(".", 2)[1])
        out, refused = self.folds[record.stream][partition].feed(record)
        assert refused is None, refused
        for claim in out:
            self.claims += 1
            kind = getattr(claim.event.data, "symptom", claim.event.data.kind())
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def store(self) -> int:
        """The text of what changed, as a worker's table has it; bytes."""
        written = 0
        for folds in self.folds.values():
            for fold in folds:
                for key in fold.changed:
                    written += len(json.dumps(fold.detector.dump(fold.keys[key].state)))
                fold.changed.clear()
        return written


def main() -> None:
    telemetry = Telemetry(seed=1)
    folds, plain = Folds(), Plain()
    ours, stored, theirs, sizes, written = [], [], [], [], []
    for at in range(WARM_S + SECONDS):
        records = telemetry.second(at)
        begun = time.process_time()
        for record in records:
            folds.feed(record)
        folded = time.process_time()
        count = folds.store()
        after = time.process_time()
        for record in records:
            plain.feed(record)
        end = time.process_time()
        if at >= WARM_S:
            ours.append(folded - begun)
            stored.append(after - folded)
            theirs.append(end - after)
            sizes.append(len(records))
            written.append(count)
    events = sum(sizes)
    report(
        "rules_cost", 1000 * sum(ours) / SECONDS, "CPU-ms a second of telemetry", bound=BOUND_MS,
        peer="a plain loop that reads each message and keeps the last", peer_value=1000 * sum(theirs) / SECONDS, n=events,
        events_per_second_of_telemetry=round(events / SECONDS), events_per_cpu_second=round(events / sum(ours)),
        peer_events_per_cpu_second=round(events / sum(theirs)), nvsentinel_published_events_per_s=NVSENTINEL_PER_S,
        worst_second_ms=round(1000 * max(ours)), stored_ms=round(1000 * statistics.fmean(stored)),
        stored_bytes=round(statistics.fmean(written)), nodes=NODES, ranks=NODES * RANKS_PER_NODE, claims=folds.claims,
        claimed=dict(sorted(folds.kinds.items())),
    )  # fmt: skip


if __name__ == "__main__":
    main()
