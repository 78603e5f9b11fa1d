"""One module builds it all: the embedded bus (or one elsewhere), the processors, the actuators and the agents of this host, as child
processes. `up`, `run` and `demo` are this with different settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from events import subjects
from events.envelope import Fact
from events.job import CatalogueAdopted, PolicyAdopted
from events.ports import LEDGER, Expect
from events.presence import SettingsAdopted
from events.registry import canonical, make, parse
from infra.bus import BusClient
from infra.bus_keeper import BusKeeper
from infra.catalogue_files import catalogue_text
from infra.clock import new_event_id, wall_ns
from infra.embedded import EmbeddedServer
from infra.home import Address, Home
from infra.jetstream import JetStreamLog
from infra.keys import identity_of
from infra.permissions import node_user
from infra.streams import check_server, ensure_streams
from infra.supervise import Child, Supervisor, module
from processors import policy as policies

CONTROL = ("detector-node", "detector-job", "decider", "actuators")


@dataclass(frozen=True, slots=True)
class Node:
    """An agent that this pipeline starts: its name and where it reads a kernel log (`kmsg`, a file, or `none`). Only one that reads
    this host's own has this host's GPUs."""

    name: str
    kernel_log: str = "kmsg"
    trust_user_facility: bool = False


@dataclass(slots=True)
class Pipeline:
    """`await start()`, then `stop()`. `policy`: the policy's text; adopted if it differs from the one in force. `url`: a bus elsewhere,
    which has the nodes' keys already, in place of an embedded one; `key`: its seed files, with `{user}`."""

    home: Home
    policy: str
    nodes: Sequence[Node] = ()
    author: str = "keepstep"
    port: int = 0
    backend: str = "local"
    actuate: str = ""
    notify: str = ""
    url: str = ""
    key: str = ""
    replicas: int = 1
    server: EmbeddedServer | None = None
    supervisor: Supervisor = field(init=False)
    on_restart: Callable[[Child, int], None] | None = None
    #: Told, a sentence each, that the bus ended unasked or gave up writing, and that it is back.
    on_bus: Callable[[str], None] | None = None
    _bus_keeper: BusKeeper | None = None

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.home.logs, self.on_restart)

    @property
    def address(self) -> Address:
        return Address(self.home, self.url, self.key)

    async def start(self) -> None:
        """Raises EmbeddedError, StreamProblem, BadPolicy, ChildFailed: each a sentence that says what to do."""
        policies.parse(self.policy)
        self.home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.url:
            options = {"port": self.port, "nodes": [node.name for node in self.nodes]}
            self._bus_keeper = BusKeeper(self.home.bus, options, self.on_bus or (lambda sentence: None))
            await self._bus_keeper.start()
            self.server = self._bus_keeper.server
        admin = await self.address.connect("admin")
        try:
            await check_server(admin)
            await ensure_streams(admin, self.replicas)
            await adopt(admin, self.policy, self.author)
        finally:
            await admin.close()
        await start_control(self.supervisor, self.address, self.actuate, notify=self.notify)
        for node in self.nodes:
            await self.start_agent(node)
        self.supervisor.check()

    async def start_agent(self, node: Node) -> None:
        if self.server is not None:
            await asyncio.to_thread(self.server.add_nodes, [node.name])
        more = ("--trust-user-facility",) if node.trust_user_facility else ()
        if self.server is not None:
            url, seed_file = self.server.url, self.server.key(identity_of(node_name=node.name)).seed_file
        else:
            url, seed_file = self.url, Path(self.key.replace("{user}", node_user(node.name)))
        arguments = module(
            "infra.agent", "--bus", url, "--seed-file", str(seed_file), "--node", node.name,
            "--state", str(self.home.node(node.name)),
            "--kernel-log", node.kernel_log, "--nvml", "auto" if node.kernel_log == "kmsg" else "off",
            "--nic", "auto" if node.kernel_log == "kmsg" else "off",
            # Several agents on one machine would all tell of the same one.
            "--host-s", "10" if node.kernel_log == "kmsg" else "60", *more,
        )  # fmt: skip
        await self.supervisor.start(f"agent-{subjects.token(node.name)}", arguments)

    async def stop(self) -> None:
        """Agents first (they say that they stop), the bus last. Ranks that run go on."""
        agents = [name for name in self.supervisor.children if name.startswith("agent-")]
        await asyncio.gather(*(self.supervisor.stop(name) for name in agents))
        await self.supervisor.stop_all()
        if self._bus_keeper is not None:
            await self._bus_keeper.stop()


async def start_control(
    supervisor: Supervisor, address: Address, actuate: str = "", worker: str = "", notify: str = ""
) -> None:
    """The control plane's four processes on a bus: two detectors, the decider, the actuators."""
    where = ("--url", address.url, "--key", address.key) if address.url else ("--home", str(address.home.path))
    for name in CONTROL:
        if name.startswith("detector-"):
            who = ("--detector", name.removeprefix("detector-"), "--worker", f"{name}{worker}")
            arguments = module("infra.detector_worker", *where, *who)
        elif name == "decider":
            arguments = module("infra.decider_service", *where)
        else:
            arguments = module(
                "infra.actuator_service",
                *where,
                *(("--exec", actuate) if actuate else ()),
                *(("--notify", notify) if notify else ()),
            )
        await supervisor.start(name, arguments)


async def adopt(nc: BusClient, text: str, author: str, catalogue: str = "") -> bool:
    """Adopts a policy (its text into LEDGER, the detectors' thresholds into the telemetry's own order) and the catalogue, where
    they differ from those in force. Returns whether the policy was new. Raises BadPolicy."""
    policy = policies.parse(text)
    digest = policies.digest(text)
    ledger = JetStreamLog(nc, LEDGER)
    in_force = await last_said(ledger, PolicyAdopted)
    new = in_force is None or in_force.digest != digest
    if new:
        settings = SettingsAdopted(settings=policies.detector_settings(policy), policy_digest=digest)
        for stream, partition in product((subjects.NODE, subjects.JOB), range(subjects.PARTITIONS)):
            event = make(settings, id=new_event_id(), source="operator", subject="policy", time=wall_ns())
            await nc.jetstream().publish(subjects.settings(stream, partition), canonical(event))
        # Last, so that whoever was stopped on the way is seen not to have adopted it, and does all of it again.
        await say(ledger, PolicyAdopted(text=text, digest=digest, author=author), "")
    text = catalogue or catalogue_text()
    known = await last_said(ledger, CatalogueAdopted)
    digest = policies.digest(text)
    if known is None or known.digest != digest:
        await say(ledger, CatalogueAdopted(text=text, digest=digest, author=author), "")
    return new


async def last_said(ledger: JetStreamLog, fact: type[Fact]) -> PolicyAdopted | CatalogueAdopted | None:
    where = subjects.ledger(subjects.FLEET, "operator", fact.kind())
    last = await ledger.last_sequence(where)
    found: PolicyAdopted | CatalogueAdopted | None = None
    async for record in ledger.read(after=max(0, last - 1), subjects=(where,)):
        found = parse(record.data).data
    return found


async def say(ledger: JetStreamLog, fact: Fact, job: str, expect: Expect | None = None) -> str:
    """An operator's word into LEDGER; returns the event's id. Raises LogUnavailable, StaleWriter."""
    event = make(fact, id=new_event_id(), source="operator", subject=job or "fleet", time=wall_ns(), job=job)
    subject = subjects.ledger(job or subjects.FLEET, "operator", fact.kind())
    await ledger.append(subject, canonical(event), message_id=event.id, expect=expect)
    return event.id


def default_policy_text() -> str:
    return (Path(__file__).resolve().parent.parent / "schemas" / "policy.yaml").read_text(encoding="utf-8")
