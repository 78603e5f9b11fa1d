"""The demo's faults on a bus of three servers, the ledger's leader killed (-9) in the middle of each incident and started again, and on one
in a container that is restarted there: no decision is lost, doubled or changed, a machine is evicted once, and what was decided live is
what its replay decides."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from events.ports import LEDGER
from infra.bus import BusClient
from infra.demo import processes_of
from tests.cluster_fixture import Cluster, Container, clean_bus, leader
from tests.scenarios.harness import Scenario, policy

pytestmark = pytest.mark.slow

SHORT = {"startup": 40.0, "step": 4.0, "evaluation": 4.0, "checkpoint": 4.0, "undeclared": 40.0}
#: Until another leads, up to ten seconds, there are no ticks, and after that absence is not judged for `grace_s`: a hang beside a node's
#: silence is told that much later, which the default window has room for.
POLICY = policy(detectors={"phase_limit_s": SHORT}, decider={"silence_window_s": 60.0, "quiet_s": 10.0})


@pytest.fixture(params=["cluster", pytest.param("container", marks=pytest.mark.docker, id="docker")])
def server(request: pytest.FixtureRequest) -> Cluster | Container:
    found: Cluster | Container = request.getfixturevalue(request.param)
    return found


async def trouble(server: Cluster | Container, nc: BusClient) -> None:
    """The ledger goes without its leader, or the one server goes and comes back."""
    if isinstance(server, Cluster):
        server.kill(await leader(nc, LEDGER))
    else:
        await asyncio.to_thread(server.restart)


def rank_killed(s: Scenario) -> None:
    s.kill_rank(1)


def gpu_lost(s: Scenario) -> None:
    s.lose_gpu("n1")


def node_dead(s: Scenario) -> None:
    """All that a dead machine takes with it: its agent, its rank, its parked workers and their keepers."""
    s.pipeline.supervisor.children["agent-n1"].wanted = False
    for process in processes_of("n1", str(s.home.node("n1"))):
        try:
            process.kill()
        except psutil.Error:
            continue


def rank_stopped(s: Scenario) -> None:
    s.kill_rank(1, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "until", "rungs", "evicted"),
    [
        (rank_killed, "decision_made", ("diagnose", "reattempt"), ()),
        (gpu_lost, "decision_made", ("evict",), ("n1",)),
        (node_dead, "incident_opened", ("evict",), ("n1",)),
        (rank_stopped, "signal", ("aggregate_stacks", "evict"), ("n1",)),
    ],
)
async def test_the_bus_is_in_trouble_in_an_incident(
    fault: object, until: str, rungs: tuple[str, ...], evicted: tuple[str, ...], server: Cluster | Container, tmp_path: Path
) -> None:
    async with clean_bus(server, lease_ttl_s=6.0) as bus:
        async with Scenario(tmp_path, nodes=2, standbys=1, policy=POLICY, bus=server) as s:
            await s.declare()
            before = s.at
            fault(s)  # type: ignore[operator]
            await s.until(lambda: s.of(until, after=before), until)
            await trouble(server, bus.admin)
            if fault is node_dead:
                s.kill_rank(0, signal.SIGSTOP)  # as a collective would keep it waiting: ranks here know nothing of each other
            closed = await s.closed(before, seconds=90)
            if isinstance(server, Cluster):
                server.start_all()
            mechanism = "aggregate_stacks" if "aggregate_stacks" in rungs else rungs[-1]
            assert (closed.outcome, closed.mechanism, closed.nodes) == ("recovered", mechanism, evicted), s.story()
            assert s.job().attempt == 2
            decisions = [d for d in s.of("decision_made") if d.data.incident == closed.incident]
            assert tuple(d.data.rung for d in decisions) == rungs, s.story()
            assert [d.data.incident for d in s.of("incident_opened", after=before)] == [closed.incident]
            await s.finish()
            await s.check(evicted=evicted)
