"""The host's producer and the ranks' logs in a real agent, on a real bus, with a real rank."""

from __future__ import annotations

import json
import sys
from typing import Any

from events.decision import RankPlace
from events.host import Configuration, HostSample
from events.ports import TELEMETRY_JOB, TELEMETRY_NODE
from events.rank_log import RankLog
from events.training import RankExit
from tests.test_agent import Node, node  # noqa: F401  the fixture

FAILS = """
import os, sys, time
print("step 1", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("n1:1:1 [0] NCCL WARN Call to ibv_modify_qp failed", flush=True)
raise RuntimeError("CUDA error: an illegal memory access was encountered, key " + os.environ["API_TOKEN"])
"""


async def test_a_ranks_words_its_set_up_and_its_folders(node: Node) -> None:  # noqa: F811
    node.start("--host-s", "1")
    (node.folder / "ckpt").mkdir()
    answer = await node.command(
        "start", "k-start", 1,
        place=RankPlace(node="node 1.a", first_rank=1, count=1), world_size=2, master_address="127.0.0.1", master_port=1,
        command=(sys.executable, "-S", "-c", FAILS, str(node.end)), directory=str(node.folder), checkpoints="ckpt",
        environment=(("NCCL_DEBUG", "WARN"), ("API_TOKEN", "hunter2hunter2")),
    )  # fmt: skip
    assert answer.ok, answer.detail
    (told, *_) = await node.until(TELEMETRY_JOB, Configuration, bool)
    values = dict(told.data.values)
    assert values["env.NCCL_DEBUG"] == "WARN" and "kernel.release" in values and (told.job, told.attempt) == ("gpt", 1)

    def with_checkpoints(found: list[Any]) -> bool:
        return any(folder.use == "checkpoints" for event in found for folder in event.data.folders)

    samples = await node.until(TELEMETRY_NODE, HostSample, with_checkpoints)
    uses = {folder.use: folder for folder in samples[-1].data.folders}
    assert uses["checkpoints"].path == str(node.folder / "ckpt") and uses["checkpoints"].total_bytes > 0
    assert uses["working"].path == str(node.folder)
    node.end.touch()
    (ended, *_) = await node.until(TELEMETRY_JOB, RankExit, bool)
    logs = await node.until(TELEMETRY_JOB, RankLog, lambda found: any(event.data.last for event in found))
    text = json.dumps([event.data.model_dump() for event in logs])
    assert "ibv_modify_qp" in text and "illegal memory access" in text
    assert any(event.data.traceback.startswith("Traceback (most recent call last)") for event in logs)
    assert "hunter2" not in text and "[redacted]" in text
    assert {event.data.rank for event in logs} == {1} and ended.data.code == 1
    # Its end was answered by a sample at once, not within the interval.
    samples = await node.until(TELEMETRY_NODE, HostSample, lambda found: any(event.data.ranks_ended for event in found), 5)
    assert await node.stop() == 0
    context = json.loads((node.state / "context.json").read_text())
    assert ["checkpoints", str(node.folder / "ckpt")] in context["folders"]
