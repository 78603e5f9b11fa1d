"""Healthy fleets evict nobody and stop nothing; and the same simulation shows what is really wrong (or none of this would say anything)."""

from __future__ import annotations

from events.job import RestartRequested
from events.presence import Heartbeat
from events.training import RankExit
from tests.simulation import noise
from tests.simulation.fleet import DENSE, RACK, SPARSE, Fleet
from tests.simulation.world import Template
from tests.telemetry import XID_79


def test_hours_of_a_few_nodes_second_by_second() -> None:
    fleet = Fleet(DENSE._replace(days=1.2 / 24), seed=5)
    found = fleet.run()
    assert found["evictions"] == [] and found["unexplained"] == []
    assert found["happened"]["boot storms"] and found["happened"]["driver reloads"] and found["crashes"] >= 1
    assert found["rungs"].keys() <= {"planned", "diagnose", "reattempt"}
    assert all(job.attempt > 1 for job in fleet.jobs.values())
    assert fleet.world.signals["loss_spike/low/curve_spike"]


def test_a_boot_storm_of_300_nodes() -> None:
    fleet = Fleet(SPARSE._replace(days=0.06, storm_every_s=6000, jobs=(("large", 300, 60.0), ("small", 20, 30.0))), seed=3)
    found = fleet.run()
    assert found["happened"]["reboots"] == 300
    assert found["evictions"] == [] and found["unexplained"] == []
    assert fleet.jobs["large"].attempt == 2 and fleet.jobs["large"].runs


def test_300_nodes_that_lose_their_power_all_at_once() -> None:
    """Nobody stopped the job, no agent says that it goes, silence is judged by the second; each tells of its rank's end when it is up again,
    while most are silent still. That has one cause: a person is told, and no machine goes for it."""
    quiet = {"crash_every_s": 1e6, "storm_every_s": 1e6, "reload_every_s": 1e6}
    fleet = Fleet(SPARSE._replace(jobs=(("large", 300, 10.0),), first_step_s=10.0, **quiet), seed=7)
    world, job, beat = fleet.world, fleet.jobs["large"], Template(Heartbeat(), "heartbeat")
    world.every(1.0, lambda: world.tick("tn"))
    world.every(1.0, lambda: fleet._beat(beat))
    world.run(60)
    assert job.runs and job.step >= 3
    job._run = 0
    gone = RankExit(rank=0, world_size=300)

    def up(rank: int, node: str) -> None:
        fleet._booted(node, "boot-2")
        job._say(Template(gone.model_copy(update={"rank": rank}), f"rank-{rank}", job.name), node)

    for rank, node in enumerate(job.nodes):
        fleet.away.add(node)
        world.after(world.chance.uniform(100, 180), lambda rank=rank, node=node: up(rank, node))  # type: ignore[misc]
    world.run(75)
    assert world.actions["rung hand_over"] == 1 and job.attempt == 1
    world.run(330)
    assert world.evictions == [] and world.actions["rung hand_over"] == 1
    world.say(RestartRequested(job=job.name, reason="the power is back", author="operator"), "operator", job.name)
    world.run(370)
    assert world.evictions == [] and job.attempt == 2 and job.runs


def _running(seed: int) -> Fleet:
    fleet = Fleet(DENSE._replace(crash_every_s=1e6, storm_every_s=1e6, reload_every_s=1e6), seed=seed)
    fleet.world.run(400)
    assert all(job.runs and job.step > 10 for job in fleet.jobs.values())
    return fleet


def test_a_lost_gpu_is_evicted() -> None:
    fleet = _running(1)
    fleet.world.observe(noise.kernel(XID_79), "one-003")
    fleet.world.run(700)
    assert [node for _, node, _ in fleet.world.evictions] == ["one-003"]
    assert fleet.jobs["one"].attempt == 2 and fleet.jobs["one"].runs


def test_a_node_that_falls_silent_with_its_job_is_evicted() -> None:
    fleet = _running(2)
    job = fleet.jobs["one"]
    fleet.away.add("one-005")
    job._run = 0  # the others wait for it
    for rank, _ in enumerate(job.nodes):
        if rank != 5:
            fleet.world.after(5, lambda rank=rank: job._exit(rank, "RuntimeError: Connection closed by peer", code=1))  # type: ignore[misc]
    fleet.world.run(700)
    assert [node for _, node, _ in fleet.world.evictions] == ["one-005"]


def test_a_loss_that_stays_no_number_is_looked_into() -> None:
    fleet = _running(3)
    fleet.jobs["two"].broken = True
    fleet.world.run(440)
    assert fleet.world.signals["nan_value/high/not_a_number"] == 1
    assert fleet.world.actions["rung diagnose"] == 1


def test_a_job_that_stands_still_is_looked_into() -> None:
    fleet = _running(4)
    fleet.jobs["two"].stuck = True
    fleet.world.run(690)
    assert not fleet.world.signals["job_hang/low/no_progress"]
    fleet.world.run(760)  # half of the limit of a step, since the links of all nodes are idle
    assert fleet.world.signals["job_hang/low/no_progress"] == 1
    assert fleet.world.actions["rung aggregate_stacks"] == 1


def test_a_driver_that_is_loaded_anew_on_a_whole_rack_and_answers_nobody_meanwhile() -> None:
    """Whoever asks it waits uninterruptibly, twice on end; its job dies of it."""
    fleet = _running(6)
    job, world = fleet.jobs["one"], fleet.world
    told = [
        noise.kernel("nvidia-modeset: Unloading"),
        noise.watch("missed", up_s=9e5, misses=1, deadline_s=10.0, process_state="D", waits_in="nvidia_open"),
        noise.watch("missed", up_s=9e5, misses=2, deadline_s=10.0, process_state="D", waits_in="nvidia_open"),
        noise.kernel(noise.HARMLESS[1]),
        noise.watch("watching", up_s=9e5),
        noise.gpu_sample(world.chance),
    ]
    for node in job.nodes[:RACK]:
        for i, template in enumerate(told):
            world.after(8 * i, lambda template=template, node=node: world.observe(template, node))  # type: ignore[misc]
    world.after(20, job.crash)
    world.run(1500)
    assert world.evictions == [] and not world.signals["gpu_driver_hang/high/gpu_driver_hang"]
    assert job.attempt == 2 and job.runs
