"""Starting things: up, agent, run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from actuators.git import GitFailed
from events.job import JobDeclared, Place, RankOrder
from events.ports import LEDGER
from events.subjects import token
from infra.bus import BusClient
from infra.cli.common import (
    FINE,
    FOUND,
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    author,
    run,
    say,
    show_json,
    with_bus,
)
from infra.cli.follow import follow_job, told_restart
from infra.cli.operator import known, read_policy
from infra.cli.status import last_heard
from infra.cli.topology import TopologyOption, declare, declared_topology, topology_of
from infra.home import Address, Home, host_name
from infra.jetstream import JetStreamLog
from infra.job_code import Code, code_at, declared_code
from infra.notify_settings import channels_of, load
from infra.pipeline import Node, Pipeline, default_policy_text, start_control
from infra.pipeline import say as tell
from infra.supervise import Supervisor
from processors import policy as policies

NodesOption = Annotated[
    int, typer.Option("--nodes", min=1, max=256, help="Nodes; more than one on this host are agents of their own")
]
KernelOption = Annotated[str, typer.Option("--kernel-log", help="kmsg, a file to follow, or none")]
NotifyOption = Annotated[
    Path | None, typer.Option("--notify", help="File that says where pages go: webhooks, Alertmanager, scripts")
]
#: How long `run` waits for the agents it needs.
AGENTS_WAIT_S = 30.0


def node_names(count: int, first: int = 0) -> list[str]:
    """This host's name, or with several agents on it `<host>-0` and so on."""
    host = host_name()
    return [host] if count == 1 and first == 0 else [f"{host}-{i}" for i in range(first, first + count)]


def until_signal(at_once: Callable[[], None] = lambda: None) -> asyncio.Event:
    """Set at the first SIGINT or SIGTERM; a second one ends the process at once, after `at_once`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        if stop.is_set():
            at_once()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked, number)
    return stop


async def watch_children(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Until stopped; raises ChildFailed when a child cannot run as it was started."""
    while not stop.is_set():
        supervisor.check()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1)


def register(app: typer.Typer) -> None:
    @app.command()
    def up(
        nodes: NodesOption = 1,
        node: Annotated[
            list[str] | None, typer.Option("--node", help="Names for this host's agents, instead of --nodes")
        ] = None,
        agents: Annotated[bool, typer.Option(help="Start this host's agents too")] = True,
        policy: Annotated[Path | None, typer.Option("--policy", help="Policy file [default: observe everything]")] = None,
        kernel_log: KernelOption = "kmsg",
        port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The bus's port on loopback; 0: any free one")] = 0,
        topology: TopologyOption = None,
        actuate: Annotated[str, typer.Option("--exec", help="The site's own script for evict, replace and notify")] = "",
        notify: NotifyOption = None,
        home: HomeOption = None,
    ) -> None:
        """Run the embedded bus, the processors, the actuators and this host's agent, until stopped. Ranks go on without it."""
        names = node or node_names(nodes)
        check_names(names)
        places = topology_of(topology) if topology else None
        pipeline = Pipeline(
            Home.default(home),
            policy_text(Home.default(home), policy),
            [Node(name, kernel_log if i == 0 else "none") for i, name in enumerate(names)] if agents else [],
            author(),
            port=port,
            actuate=actuate_script(actuate),
            notify=notify_file(notify),
            on_bus=say,
            on_restart=told_restart,
        )

        async def work() -> None:
            stop = until_signal()
            try:
                await pipeline.start()
                assert pipeline.server is not None
                if places is not None:
                    await with_bus(pipeline.address, "operator", lambda nc: declare(nc, places))
                say(
                    f"up: bus {pipeline.server.url}, agents {', '.join(names) if agents else 'none'}, state in {pipeline.home.path}; Ctrl-C stops it"
                )
                await watch_children(pipeline.supervisor, stop)
            finally:
                say("stopping; ranks that run go on")
                await pipeline.stop()

        run(work())

    @app.command()
    def control(
        url: Annotated[str, typer.Option("--url", envvar="KEEPSTEP_URL", help="The bus")],
        key: Annotated[str, typer.Option("--key", envvar="KEEPSTEP_KEY", help="Seed file; {user} stands for the role")] = "",
        actuate: Annotated[str, typer.Option("--exec", help="The site's own script for evict, replace and notify")] = "",
        notify: NotifyOption = None,
        home: HomeOption = None,
    ) -> None:
        """Run the control plane (detectors, decider, actuators) on a bus that runs elsewhere, until stopped. Several may: they share the
        detectors' partitions, and one decider and one actuator is active."""
        where, script, pages = address(home, url, key), actuate_script(actuate), notify_file(notify)

        async def work() -> None:
            stop = until_signal()
            supervisor = Supervisor(where.home.logs, told_restart)
            try:
                await start_control(supervisor, where, script, f"@{host_name()}-{os.getpid()}", pages)
                say(f"control: on {url}, logs in {where.home.logs}; Ctrl-C stops it")
                await watch_children(supervisor, stop)
            finally:
                await supervisor.stop_all()

        run(work())

    @app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
    def agent(context: typer.Context) -> None:
        """Run this host's agent alone, on a bus that runs elsewhere (`keepstep agent --help` lists its options)."""
        os.execv(sys.executable, [sys.executable, "-I", "-m", "infra.agent", *context.args])

    @app.command(context_settings={"ignore_unknown_options": False})
    def run_(
        command: Annotated[list[str], typer.Argument(help="-- python train.py …", metavar="-- COMMAND…")],
        nodes: NodesOption = 1,
        ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", min=1, max=64)] = 1,
        tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size")] = 1,
        pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size")] = 1,
        rank_order: Annotated[RankOrder, typer.Option("--rank-order", help="What of a rank's place counts fastest; tp-dp-pp is Megatron-LM's")] = "tp-pp-dp",
        standbys: Annotated[int, typer.Option("--standbys", min=0, help="Spare nodes")] = 0,
        node: Annotated[list[str] | None, typer.Option("--node", help="Which agents, in rank order: NAME or NAME@RACK/SWITCH#SERIAL [default: those that are heard]")] = None,
        spare: Annotated[list[str] | None, typer.Option("--spare", help="Which agents are standbys, in the same form")] = None,
        job: Annotated[str, typer.Option("--job", help="The job's name [default: the script's]")] = "",
        checkpoints: Annotated[Path | None, typer.Option("--checkpoints", help="Folder of the job's checkpoints, on storage that all nodes see")] = None,
        revision: Annotated[str, typer.Option("--revision", help="Commit to run; none: the folder as it lies [default: the checkout's, if it differs in nothing]")] = "",
        backend: Annotated[Literal["local", "exec"], typer.Option("--backend", help="Who evicts, replaces and pages: the agents, or the site's script (--exec)")] = "local",
        policy: Annotated[Path | None, typer.Option("--policy", help="Policy file, when the pipeline is started here")] = None,
        detach: Annotated[bool, typer.Option("--detach", help="Declare the job and return (the pipeline must be up)")] = False,
        topology: TopologyOption = None,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Run your own training script under the pipeline. If none is up on this home, one is started here, until the job ends."""
        declared = JobSpec(
            command,
            nodes,
            ranks_per_node,
            tp,
            pp,
            standbys,
            node,
            spare,
            job,
            checkpoints,
            revision,
            backend,
            topology,
            rank_order,
            json,
        )
        where = address(home, url, key)
        if where.runs:
            raise typer.Exit(run(declared.run_on(where, detach)))
        if detach:
            raise Refused("--detach needs a pipeline that stays: start one with `keepstep up`, or leave --detach out")
        raise typer.Exit(run(_with_own_pipeline(declared, where, policy)))

    app.registered_commands[-1].name = "run"


class JobSpec:
    """What `run` was asked for, and its declaration on a bus."""

    def __init__(
        self, command: list[str], nodes: int, ranks_per_node: int, tp: int, pp: int, standbys: int,
        node: list[str] | None, spare: list[str] | None, job: str, checkpoints: Path | None, revision: str, backend: str,
        topology: Path | None = None, rank_order: RankOrder = "tp-pp-dp", as_json: bool = False,
    ) -> None:  # fmt: skip
        self.as_json = as_json
        self.rank_order: RankOrder = rank_order
        self.topology = topology_of(topology) if topology else None
        self.places = [place(text) for text in node or ()]
        self.spares = [place(text) for text in spare or ()]
        check_names([p.node for p in (*self.places, *self.spares)])
        self.nodes, self.standbys = len(self.places) or nodes, len(self.spares) or standbys
        self.ranks_per_node, self.tp, self.pp, self.revision, self.backend = ranks_per_node, tp, pp, revision, backend
        world = self.nodes * ranks_per_node
        if world % (tp * pp):
            raise Refused(
                f"{self.nodes} nodes of {ranks_per_node} ranks make {world}, which tp {tp} times pp {pp} does not divide"
            )
        if not command:
            raise Refused("name the command to run, after --, as in: keepstep run -- python train.py")
        if shutil.which(command[0]) is None:
            raise Refused(f"there is no command {command[0]!r} to run; give its path")
        self.command = list(command)
        script = next((Path(word) for word in command[1:] if word.endswith(".py")), None)
        if script is not None and not script.exists():
            raise Refused(f"there is no script {script} here; give its path")
        self.job = job or (script.stem if script else Path(command[0]).name)
        self.checkpoints = (checkpoints or Path("checkpoints") / self.job).absolute()

    @property
    def wanted(self) -> int:
        return self.nodes + self.standbys

    async def run_on(self, where: Address, detach: bool) -> int:
        return await with_bus(where, "operator", lambda nc: self.declare_and_watch(nc, where, detach))

    async def declare_and_watch(self, nc: BusClient, where: Address, detach: bool) -> int:
        fleet = await known(nc)
        there = fleet.jobs.get(self.job)
        if there is not None and there.wanted == "running":
            raise Refused(
                f"a job {self.job} runs already; stop it with `keepstep stop --reason …`, or name this one with --job"
            )
        places, spares = await self._choose(nc, set(fleet.owners) - (set(node_of(there)) if there else set()))
        if self.topology is not None:
            await declare(nc, self.topology)
        known_places = self.topology or await declared_topology(nc)
        if known_places is not None:
            places, spares = [known_places.fill(p) for p in places], [known_places.fill(p) for p in spares]
            unknown = [p.node for p in (*places, *spares) if not (p.rack or p.switch)]
            if self.topology is not None and unknown:
                say(
                    f"{self.topology.origin} does not say where {', '.join(unknown[:8])} stand{'s' if len(unknown) == 1 else ''}"
                )
        code = await self._code()
        say(code.said)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        ledger = JetStreamLog(nc, LEDGER)
        start = await ledger.last_sequence()
        fact = JobDeclared(
            job=self.job, nodes=tuple(places), standbys=tuple(spares), ranks_per_node=self.ranks_per_node, tp=self.tp, pp=self.pp, rank_order=self.rank_order,
            dp=self.nodes * self.ranks_per_node // (self.tp * self.pp), command=tuple(self._absolute()), directory=str(Path.cwd()),
            environment=job_environment(), checkpoints=str(self.checkpoints), code_revision=code.revision, backend=self.backend, author=author(),
        )  # fmt: skip
        await tell(ledger, fact, self.job)
        say(
            f"job {self.job}: {self.nodes} nodes, {self.nodes * self.ranks_per_node} ranks; standbys: {', '.join(p.node for p in spares) or 'none'}"
        )
        if detach:
            if self.as_json:
                show_json(
                    {
                        "job": self.job,
                        "outcome": "declared",
                        "nodes": [p.node for p in places],
                        "standbys": [p.node for p in spares],
                    }
                )
            return FINE
        return await follow_job(nc, self.job, start, self.as_json)

    async def _code(self) -> Code:
        if self.revision == "none":
            return Code("", "code: runs as it lies, and can't be rolled back, as asked for")
        here = str(Path.cwd())
        if not self.revision:
            return await declared_code(here, self.command)
        try:
            return await code_at(here, self.command, self.revision)
        except GitFailed as error:
            raise Refused(str(error)) from None

    def _absolute(self) -> list[str]:
        return [shutil.which(self.command[0]) or self.command[0], *self.command[1:]]

    async def _choose(self, nc: BusClient, taken: set[str]) -> tuple[list[Place], list[Place]]:
        """The nodes: those named, else those heard that no other job has."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + AGENTS_WAIT_S
        while True:
            heard = sorted(node for node, age in (await last_heard(nc)).items() if age <= 5)
            named = [p.node for p in (*self.places, *self.spares)]
            free = [node for node in heard if node not in taken and node not in named]
            missing = [node for node in named if node not in heard]
            places = self.places or [Place(node=node) for node in free[: self.nodes]]
            rest = free[len(places) if not self.places else 0 :]
            spares = self.spares or [Place(node=node) for node in rest[: self.standbys]]
            if not missing and len(places) == self.nodes and len(spares) == self.standbys:
                return places, spares
            if loop.time() > deadline:
                if missing:
                    raise Refused(f"no agent is heard of {', '.join(missing)}; start it there with `keepstep agent`")
                raise Refused(
                    f"{self.wanted} agents are needed and {len(free)} are heard and free ({', '.join(free) or 'none'}); start more with `keepstep up --nodes {self.wanted}` or `keepstep agent` on each host"
                )
            await asyncio.sleep(0.3)


def check_names(names: Sequence[str]) -> None:
    """Raises Refused, BadName."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refused(f"the node {twice!r} is named twice; each agent has a name of its own")
    for name in names:
        if not name:
            raise Refused("a node needs a name: NAME, or NAME@RACK/SWITCH#SERIAL")
        token(name)


def node_of(job: object) -> list[str]:
    declared = getattr(job, "declared", None)
    return [p.node for p in (*declared.nodes, *declared.standbys)] if declared else []


def place(text: str) -> Place:
    """NAME[@RACK][/SWITCH][#SERIAL] as a place."""
    text, _, serial = text.partition("#")
    text, _, switch = text.partition("/")
    node, _, rack = text.partition("@")
    if not node:
        raise Refused("a node needs a name: NAME, or NAME@RACK/SWITCH#SERIAL")
    return Place(node=node, rack=rack, switch=switch, serial=serial)


def job_environment() -> tuple[tuple[str, str], ...]:
    """What of this shell's environment the job gets beside the agent's own: nothing secret enters an event."""
    names = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LANG")
    prefixes = ("NCCL_", "GLOO_", "TORCH_")
    chosen = {k: v for k, v in os.environ.items() if k in names or k.startswith(prefixes)}
    return tuple(
        sorted((k, v) for k, v in chosen.items() if not any(word in k for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")))
    )


def policy_text(home: Home, given: Path | None) -> str:
    """The policy file that was given, else the home's policy.yaml, else the default, which observes. Raises Refused, BadPolicy before
    anything is started with it."""
    kept = home.path / "policy.yaml"
    if given is None and not kept.exists():
        return default_policy_text()
    text = read_policy(given or kept)
    policies.parse(text)
    return text


def actuate_script(text: str) -> str:
    if text and not (os.path.isfile(text) and os.access(text, os.X_OK)):
        raise Refused(f"{text} is not an executable script; give one with --exec (see infra/deploy/slurm for an example)")
    return str(Path(text).absolute()) if text else ""


def notify_file(path: Path | None) -> str:
    """The file's absolute path, once it is known that it can be used. Raises BadNotify."""
    if path is None:
        return ""
    channels_of(load(path))
    return str(path.absolute())


async def _with_own_pipeline(spec: JobSpec, where: Address, policy: Path | None) -> int:
    names = [p.node for p in (*spec.places, *spec.spares)] or node_names(spec.wanted)
    pipeline = Pipeline(
        where.home,
        policy_text(where.home, policy),
        [Node(name, "kmsg" if i == 0 else "none") for i, name in enumerate(names)],
        author(),
        on_bus=say,
        on_restart=told_restart,
    )
    stop = until_signal()
    say(f"no pipeline is up on {where.home.path}: starting one for this job (mode {mode_of(pipeline.policy)})")
    try:
        await pipeline.start()
        job = asyncio.create_task(spec.run_on(where, False))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({job, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not job.done():
            job.cancel()
            say(
                f"stopping the pipeline; the job's ranks go on (end them with: keepstep up, then keepstep stop {spec.job} --reason …)"
            )
            return FOUND
        return job.result()
    finally:
        await pipeline.stop()


def mode_of(text: str) -> str:
    return policies.parse(text).mode
