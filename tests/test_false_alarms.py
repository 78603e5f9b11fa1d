"""Healthy fleets evict nobody and stop nothing; and the same simulation shows what is really wrong (or none of this would say anything)."""

from __future__ import annotations

from tests.simulation import noise
from tests.simulation.fleet import DENSE, RACK, SPARSE, Fleet
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
