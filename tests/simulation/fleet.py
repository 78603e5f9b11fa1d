"""Healthy days of a fleet: three jobs, machines that make the noise that machines make, reboots of hundreds of nodes at once, drivers that are
loaded anew on whole racks, crashes of the jobs' own code. Whoever is evicted in them is evicted wrongly."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from events.decision import IntentIssued
from events.job import Place, RestartRequested, StopRequested
from events.presence import AgentState, Heartbeat
from tests.simulation import noise
from tests.simulation.jobs import Job
from tests.simulation.world import Template, World

RACK = 16
FLAPS_PER_NODE_DAY = 0.2
HOT_PER_NODE_DAY = 0.5
#: What a crash brings is over after this long.
CRASH_S = 60.0


class Shape(NamedTuple):
    """`jobs`: name, nodes, seconds a step. `dense`: agents beat and ticks come once a second, so that absence is judged as it is live."""

    days: float
    jobs: tuple[tuple[str, int, float], ...]
    standbys: int = 4
    dense: bool = False
    crash_every_s: float = 6 * 3600.0
    storm_every_s: float = 12 * 3600.0
    reload_every_s: float = 8 * 3600.0
    first_step_s: float = 600.0


#: Five hundred nodes, for days; and some hours of a few, second by second.
SPARSE = Shape(days=1.0, jobs=(("large", 300, 105.0), ("middle", 120, 60.0), ("small", 64, 30.0)))
DENSE = Shape(
    days=3 / 24, jobs=(("one", 16, 4.0), ("two", 8, 1.0)), dense=True, crash_every_s=3000, storm_every_s=2700, reload_every_s=5000,
    first_step_s=120.0,
)  # fmt: skip


class Fleet:
    def __init__(self, shape: Shape, seed: int, policy: str = "mode: auto\n") -> None:
        self.shape, self.world = shape, World(seed, policy)
        world = self.world
        world.on_start, world.on_stop = self._start, self._stop
        self.jobs: dict[str, Job] = {}
        self.happened: Counter[str] = Counter()
        self.away: set[str] = set()
        self._flapped: dict[str, None] = {}
        self._ambient = noise.ambient(world.chance)
        self.nodes: list[str] = []
        for name, size, step_s in shape.jobs:
            nodes = [f"{name}-{i:03d}" for i in range(size)]
            spares = [f"{name}-spare-{i}" for i in range(shape.standbys)]
            self.nodes += [*nodes, *spares]
            self.jobs[name] = Job(
                world, name, nodes, step_s, first_step_s=shape.first_step_s, declares=name != "small", flags_skips=name != "middle",
                beats=shape.dense,
            )  # fmt: skip
            world.declare(name, [_place(node, i) for i, node in enumerate(nodes)], [_place(node, 900) for node in spares])
        self.names = list(self.jobs)
        self._begin()

    def _begin(self) -> None:
        shape, world = self.shape, self.world
        world.every(1.0, lambda: world.tick("tj"))
        world.every(1.0 if shape.dense else 60.0, lambda: world.tick("tn"))
        if shape.dense:
            beat = Template(Heartbeat(), "heartbeat")
            world.every(1.0, lambda: self._beat(beat))
        self._noise()
        rates = (
            (len(self.nodes) * FLAPS_PER_NODE_DAY / noise.DAY_S, self._flap),
            (len(self.nodes) * HOT_PER_NODE_DAY / noise.DAY_S, self._hot),
        )
        for rate, call in rates:
            self._poisson(rate, call)
        for i, name in enumerate(self.names):
            world.every(shape.crash_every_s, self._crasher(name), shape.crash_every_s * (i + 1) / (len(self.names) + 1))
        world.every(shape.storm_every_s, self._boot_storm, shape.storm_every_s / 3)
        world.every(shape.reload_every_s, self._reload, shape.reload_every_s / 2)

    def run(self) -> dict[str, Any]:
        self.world.run(self.shape.days * noise.DAY_S)
        return self.result()

    def result(self) -> dict[str, Any]:
        world = self.world
        crashes = sum(job.crashes for job in self.jobs.values())
        return {
            "evictions": world.evictions,
            "node_days": round(len(self.nodes) * world.now_s / noise.DAY_S, 2),
            "events": world.observed,
            "crashes": crashes,
            "unexplained": [one for one in world.opened if not self._explained(*one)],
            "happened": dict(sorted(self.happened.items())),
            **world.summary(),
        }

    def _explained(self, at_s: float, job: str, symptom: str) -> bool:
        """Whether an incident is of something that went wrong with the job just before: its code, or its driver."""
        return any(0 <= at_s - crash_s <= CRASH_S for crash_s in self.jobs[job].crashed_s)

    # --- jobs ---------------------------------------------------------------------------------------------------------------

    def _start(self, intent: IntentIssued) -> None:
        self.jobs[intent.job].start(intent)

    def _stop(self, intent: IntentIssued) -> None:
        self.jobs[intent.job].stop(intent)

    def _crasher(self, name: str) -> Any:
        return lambda: self.jobs[name].crash()

    # --- machines -----------------------------------------------------------------------------------------------------------

    def _poisson(self, rate_per_s: float, call: Any) -> None:
        def again() -> None:
            call()
            self._poisson(rate_per_s, call)

        self.world.after(self.world.chance.expovariate(rate_per_s), again)

    def _noise(self) -> None:
        """One machine says something, a few times a second over all."""
        world, chance, nodes, some = self.world, self.world.chance, self.nodes, self._ambient
        mean_s = 1 / (len(nodes) * noise.AMBIENT_PER_NODE_S)

        def again() -> None:
            node = chance.choice(nodes)
            if node not in self.away:
                held_s = chance.uniform(30, 600) if chance.random() < 0.001 else 0.0
                world.observe(chance.choice(some), node, 0, held_s, 2 if chance.random() < 0.01 else 1)
            world.after(chance.expovariate(1) * mean_s, again)

        again()

    def _beat(self, beat: Template) -> None:
        """Nearly all beats come: one in a thousand is lost, one in two hundred comes twice."""
        world, chance = self.world, self.world.chance
        for node in self.nodes:
            if node not in self.away and chance.random() > 0.001:
                world.observe(beat, node, 0, 0.0, 2 if chance.random() < 0.005 else 1)

    def _flap(self) -> None:
        """One link goes down and comes back. Another of the same machine within minutes would be no single flap."""
        world, chance = self.world, self.world.chance
        node, device = chance.choice(self.nodes), chance.choice(noise.LINKS)
        if f"{node} {device}" in self._flapped:
            return
        self._flapped[f"{node} {device}"] = None
        world.after(600, lambda: self._flapped.pop(f"{node} {device}"))
        self.happened["link flaps"] += 1
        world.observe(noise.link(device, "down"), node)
        world.after(chance.uniform(0.2, 20), lambda: world.observe(noise.link(device, "up"), node))

    def _hot(self) -> None:
        """A GPU that is too hot for two samples."""
        world = self.world
        node = world.chance.choice(self.nodes)
        self.happened["short heat"] += 1
        sample = noise.gpu_sample(world.chance, hot=3)
        for at_s in (0.0, 10.0):
            world.after(at_s, lambda: world.observe(sample, node))
        world.after(20.0, lambda: world.observe(noise.gpu_sample(world.chance), node))

    def _boot_storm(self) -> None:
        """Every machine of the largest job is rebooted by plan, all at once, and the job runs again after it."""
        world, job = self.world, self.jobs[self.names[0]]
        if not job.runs or job.step < 5:
            return
        self.happened["boot storms"] += 1
        world.say(StopRequested(job=job.name, reason="maintenance", author="operator"), "operator", job.name)
        nodes = list(job.nodes)
        world.after(20, lambda: self._reboot(nodes))
        world.after(900, lambda: self._again(job))

    def _again(self, job: Job) -> None:
        fact = RestartRequested(job=job.name, reason="maintenance is over", author="operator")
        self.world.say(fact, "operator", job.name)

    def _reboot(self, nodes: list[str]) -> None:
        world, chance = self.world, self.world.chance
        boot = f"boot-{world.now_ns}"
        for node in nodes:
            up_s = chance.uniform(150, 240)
            self.happened["reboots"] += 1
            world.observe(Template(AgentState(producer="agent", state="stopping"), "agent"), node)
            self.away.add(node)
            world.after(up_s, lambda node=node: self._booted(node, boot))  # type: ignore[misc]

    def _booted(self, node: str, boot: str) -> None:
        """What every boot brings: drivers that load, NVLinks and ports that train, mounts that come late, a clock that is not set."""
        world, chance = self.world, self.world.chance
        self.away.discard(node)
        said = [
            Template(AgentState(producer="agent", state="started"), "agent", boot=boot),
            noise.kernel(*noise.HARMLESS[:9]),
            noise.watch("no_driver", up_s=30.0, detail="the driver is not loaded"),
            *(noise.link(device, "down", up_s=40) for device in noise.LINKS),
            noise.nic_sample(chance, up_s=45, state="down"),
            noise.host_sample(chance, up_s=50.0, cpu_pressure=98.0, clock_offset_s=3.0),
            noise.gpu_sample(chance, up_s=60.0, links_down=True),
            noise.gpu_sample(chance, up_s=70.0, links_down=True),
            *(noise.link(device, "up", up_s=80) for device in noise.LINKS),
            noise.nic_sample(chance, up_s=90),
            noise.gpu_sample(chance, up_s=100.0),
        ]
        for i, template in enumerate(said):
            world.after(0.5 + 4 * i, lambda template=template: world.observe(template, node))  # type: ignore[misc]

    def _reload(self) -> None:
        """The GPU driver of a whole rack is loaded anew under a running job, whose ranks there die of it."""
        world, chance = self.world, self.world.chance
        job = self.jobs[self.names[self.happened["driver reloads"] % len(self.names)]]
        if not job.runs or job.step < 5:
            return
        self.happened["driver reloads"] += 1
        rack = job.nodes[:RACK]
        for node in rack:
            after_s = chance.uniform(0, 8)
            said = [
                noise.kernel(*noise.HARMLESS[1:5], noise.XID_45 % ("3b", 4242, 1)),
                noise.watch("missed", up_s=9e5, misses=1, deadline_s=10.0),
                noise.watch("no_driver", up_s=9e5, detail="the module is not loaded"),
                noise.watch("watching", up_s=9e5),
                noise.gpu_sample(chance),
            ]
            for i, template in enumerate(said):
                world.after(after_s + 8 * i, lambda template=template, node=node: world.observe(template, node))  # type: ignore[misc]
        job.crash()
        job.crashes -= 1


def _place(node: str, i: int) -> Place:
    return Place(node=node, rack=f"{node.split('-')[0]}-{i // RACK}", switch=f"leaf-{node.split('-')[0]}-{i // (2 * RACK)}")
