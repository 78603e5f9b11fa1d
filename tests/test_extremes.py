"""No observation that its own model lets through ends a detector, nor leaves a state that can't be stored: what one node says must not blind
the partition that it is in."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from events.envelope import Fact
from events.gpu import GpuClocks, GpuSample, GpuWatch, GpuXid
from events.hardware import EvidenceGap, KernelLog
from events.host import Configuration, HostSample, LastBoot
from events.network import LinkChanged, LinkTraffic, NicSample
from events.presence import AgentState, Heartbeat
from events.rank_log import RankLog
from events.registry import canonical, canonical_json
from events.training import RankExit, RankStarted, TrainingProgress
from processors.detector import Detector, PartitionFold
from processors.job import job_detector
from processors.node import node_detector
from tests.extremes import extreme
from tests.telemetry import Story, catalogue

KINDS: dict[str, tuple[type[Fact], ...]] = {
    "node": (GpuSample, GpuWatch, GpuXid, KernelLog, EvidenceGap, HostSample, LastBoot, LinkChanged, NicSample, Heartbeat, AgentState),
    "job": (TrainingProgress, TrainingProgress, RankStarted, RankExit, RankLog, LinkTraffic, GpuClocks, Heartbeat, Configuration),
}  # fmt: skip
DETECTORS: dict[str, Detector[Any]] = {"node": node_detector(catalogue()), "job": job_detector()}


def story(kind: str, seed: int, length: int = 60) -> Story:
    chance = Random(seed)
    made = Story(kind)
    at_s = 0.0
    for _ in range(length):
        at_s += chance.choice((0, 0.5, 1, 3, 30))
        if chance.random() < 0.3:
            made.tick(at_s)
            continue
        what = chance.choice(KINDS[kind])
        given = (
            {"rank": chance.choice((0, 0, 1)), "world_size": 2} if kind == "job" and "world_size" in what.model_fields else {}
        )
        made.say(
            at_s, f"n{chance.randrange(2)}", extreme(what, chance, **given), job="gpt", attempt=chance.choice((1, 1, 1, 2)),
            on_job=kind == "job", number=chance.choice((None, None, 0, 1)), held_s=chance.choice((0, 0, 20, 10**9)),
        )  # fmt: skip
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_end_no_detector_and_can_be_stored(kind: str) -> None:
    detector = DETECTORS[kind]
    said = 0
    for seed in range(40):
        fold = PartitionFold(detector)
        for record in story(kind, seed).records:
            out, refused = fold.feed(record)
            assert refused is None, (seed, refused)
            said += len([canonical(outgoing.event) for outgoing in out])
            stored = {key: canonical_json(detector.dump(keyed.state)) for key, keyed in fold.keys.items()}
        for key, keyed in fold.keys.items():
            assert detector.load(key, json.loads(stored[key])) == keyed.state, (seed, key)
    assert said > 200


def test_a_value_of_a_group_that_nobody_has_is_no_drift() -> None:
    made = Story("job")
    for node in range(4):
        values = (("gpu.driver", "570"), ("kernel.release", str(node)))
        made.say(1, f"n{node}", Configuration(groups=("gpu",), values=values), job="gpt", attempt=1, on_job=True)
    for second in range(2, 200):
        made.tick(second)
    fold = PartitionFold(DETECTORS["job"])
    assert [one for record in made.records for one in fold.feed(record)[0]] == []
