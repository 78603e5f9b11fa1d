"""A node's agent: composes the producers, the outbox, the rank host and the bus into one process. `python -m infra.agent --help`.

The job does not depend on it: ranks live in sessions of their own, and an agent that is started again over the same folder finds
them, the exits it missed, and what it had not yet sent. Heavy modules stay out of here: an agent runs beside training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from actuators.ranks import RankHost, RankNews
from actuators.tail import shown
from events import subjects
from events.action import CommandAnswered, NodeCommand
from events.clock import NS
from events.envelope import NAME_MAX, TEXT_MAX
from events.hardware import EvidenceGap
from events.presence import AgentState
from events.training import RankExit, RankStarted
from infra import (
    clock,
    lean_nats,  # noqa: F401  before whatever imports nats
)
from infra.agent_bus import AgentBus, Commands
from infra.hook_folder import NoHook, hook_folder
from infra.keys import KeyProblem, connect_options, public_key_of
from infra.permissions import node_user
from producers import host_config, rank_exits
from producers.heartbeat import HeartbeatProducer
from producers.host import HostProducer, HostSettings
from producers.kernel_log import KMSG, KernelLogProducer, KernelLogSettings, default_interesting
from producers.nic import NicProducer, NicSettings
from producers.nic_links import AUTO, OFF
from producers.nvml import NvmlProducer
from producers.observe import Clock, Desk
from producers.outbox import Outbox
from producers.rank_devices_sysfs import RankDevicesTeller
from producers.rank_logs import RankLogs, RankLogSettings
from producers.supervise import Pulse, Supervisor, sentence
from producers.trainer import BadSocketPath, TrainerSettings, TrainerSocket, check_path

#: After the last rank ended, what is seen of the node still names its attempt for this long: the line that tells why comes late.
CONTEXT_KEPT_S = 300.0
SPOOL_BYTES_MIN = 1024 * 1024


class BadSettings(Exception):
    """The agent can't run like this. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`bus_options`: arguments of `nats.connect` (a key's `connect_options`). `kernel_logs`: `kmsg` or paths of files. `socket_path`:
    for the training hook; None: in the state folder. `interesting`: which kernel lines always pass (the catalogue's)."""

    node: str
    state_dir: Path
    bus_url: str
    bus_options: dict[str, Any] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    kernel_logs: tuple[str, ...] = (KMSG,)
    trust_user_facility: bool = False
    lines_per_s: int = 2000
    interesting: Callable[[str], bool] = default_interesting
    heartbeat_s: float = 1.0
    nvml: bool = True
    #: Which network links are watched (producers.nic_links.chosen); none: no link.
    nic: tuple[str, ...] = (AUTO,)
    #: Samples of the host itself, its set-up, and what ranks print.
    host: bool = True
    host_interval_s: float = 10.0
    spool_bytes_max: int = 64 * 1024 * 1024
    drain_per_s: float = 2000.0
    hook_folder: Path | None = None
    socket_path: Path | None = None
    any_process: bool = False
    address: str = "127.0.0.1"
    stop_grace_s: float = 10.0
    version: str = ""
    say: Callable[[str], None] = lambda sentence: None

    @property
    def trainer_socket(self) -> Path:
        return self.socket_path or self.state_dir / "trainer.sock"


def check(settings: AgentSettings) -> None:
    """Raises BadSettings."""
    if not settings.node or len(settings.node) > NAME_MAX:
        raise BadSettings(f"a node's name has 1 to {NAME_MAX} characters; give another --node")
    try:
        subjects.token(settings.node)
    except subjects.BadName as error:
        raise BadSettings(f"{error}; give another --node") from None
    if not 0.1 <= settings.heartbeat_s <= 60:
        raise BadSettings(f"a heartbeat every {settings.heartbeat_s:g} s is not between 0.1 and 60 s")
    if settings.spool_bytes_max < SPOOL_BYTES_MIN:
        raise BadSettings(f"a spool of {settings.spool_bytes_max} bytes is too small; give at least {SPOOL_BYTES_MIN}")
    if settings.lines_per_s < 1 or settings.drain_per_s < 1:
        raise BadSettings("a rate is at least 1 a second")
    if not 1 <= settings.host_interval_s <= 3600:
        raise BadSettings(f"a sample of the host every {settings.host_interval_s:g} s is not between 1 and 3600 s")
    if not settings.bus_url.startswith(("nats://", "tls://")):
        raise BadSettings(f"{settings.bus_url!r} is no address of a bus; give --bus nats://host:port")
    for source in settings.kernel_logs:
        if source != KMSG and Path(source).is_dir():
            raise BadSettings(f"{source} is a folder; give a file's path, kmsg or none as --kernel-log")
    try:
        check_path(settings.trainer_socket)
    except BadSocketPath as error:
        raise BadSettings(f"{error} (--socket)") from None


def lock_state(state_dir: Path, node: str) -> IO[str]:
    """The state folder, made if need be, and held until the file is closed. Raises BadSettings."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open(state_dir / "agent.lock", "a+", encoding="utf-8")  # noqa: SIM115  held for as long as the agent lives
    except OSError as error:
        raise BadSettings(f"the state folder {state_dir} can't be used ({sentence(error)}); give another --state") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        who = file.read(200).strip() or "another process"
        file.close()
        raise BadSettings(f"an agent already runs over {state_dir} ({who}); stop it or give another --state") from None
    file.seek(0)
    held_for = file.read(2000).partition(" of node ")[2].strip()
    if held_for and held_for != node:
        file.close()
        raise BadSettings(
            f"{state_dir} is the state of node {held_for!r}, not of {node!r}; give a folder of its own with --state"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} of node {node}\n")
    file.flush()
    return file


class Agent:
    """One node's agent over a state folder that it holds the lock of."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        state_dir = settings.state_dir
        boot_id = clock.boot_id()
        self.bus = AgentBus(settings.bus_url, settings.bus_options, settings.node, tls=settings.tls, say=settings.say)
        self.outbox = Outbox(
            state_dir / "spool",
            boot_id,
            self.bus,
            wall_ns=clock.wall_ns,
            boot_ns=clock.boot_ns,
            spool_bytes_max=settings.spool_bytes_max,
            drain_per_s=settings.drain_per_s,
            on_dropped=self._dropped,
            on_trouble=self._spool_trouble,
        )
        self.desk = Desk(settings.node, boot_id, Clock(clock.wall_ns, clock.boot_ns, clock.entropy), self.outbox)
        self.host = RankHost(
            state_dir / "ranks",
            settings.node,
            hook_folder=settings.hook_folder,
            on_event=self._rank_news,
            socket_path=settings.trainer_socket.absolute(),
            boot_id=boot_id,
            address=settings.address,
            grace_s=settings.stop_grace_s,
        )
        kernel = KernelLogSettings(settings.trust_user_facility, settings.lines_per_s, settings.interesting, self._own_pids)
        self.kernel_logs = [KernelLogProducer(source, self.desk, state_dir, kernel) for source in settings.kernel_logs]
        self.heartbeat = HeartbeatProducer(
            self.desk, self._current, self.host.processes, self.host.parked, interval_s=settings.heartbeat_s
        )
        self.trainer = TrainerSocket(
            settings.trainer_socket,
            self.desk,
            self.host.processes,
            self.host.current,
            TrainerSettings(any_process=settings.any_process),
        )
        self.nvml = NvmlProducer(self.desk, self.host.processes) if settings.nvml else None
        self.rank_devices = RankDevicesTeller(self.desk) if settings.nic else None
        self.nic = NicProducer(self.desk, state_dir, NicSettings(settings.nic)) if settings.nic else None
        self.watch: HostProducer | None = None
        self.rank_logs: RankLogs | None = None
        if settings.host:
            facts = (lambda: host_config.of_gpus(self.nvml.last if self.nvml else None),)
            self.watch = HostProducer(
                self.desk,
                state_dir,
                self.host.current,
                self.host.processes,
                HostSettings(interval_s=settings.host_interval_s),
                facts=facts,
            )
            logs = RankLogSettings(interesting=settings.interesting, show=lambda line, secrets: shown(line.encode(), secrets))
            self.rank_logs = RankLogs(self.desk, state_dir, self.host.outputs, logs)
        self.commands = Commands(self.desk, self._handle, self.bus.publish, say=settings.say)
        self.bus.on_command = self.commands.receive
        self._context_path = state_dir / "context.json"
        self._present_ns = clock.boot_ns()
        self._load_context()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Ranks go on after it."""
        self.outbox.start()
        self.desk.about_node("agent", AgentState(state="started", version=self.settings.version))
        supervisor = Supervisor(self.desk)
        tasks = [asyncio.create_task(self.bus.run(), name="bus")]
        try:
            await self.host.start()
            runs: list[tuple[str, Callable[[], Any], Pulse | None]] = [
                ("heartbeat", self.heartbeat.run, self.heartbeat.pulse),
                ("trainer", self.trainer.run, None),
            ]
            runs += [("kernel_log", producer.run, producer.pulse) for producer in self.kernel_logs]
            if self.nvml is not None:
                runs.append(("nvml", self.nvml.run, None))  # tells of its stalls itself, and of what it waits for
            if self.nic is not None:
                runs.append(("nic", self.nic.run, None))  # the same
            if self.watch is not None and self.rank_logs is not None:
                runs.append(("host", self.watch.run, self.watch.pulse))
                runs.append(("rank_logs", self.rank_logs.run, self.rank_logs.pulse))
            tasks += [asyncio.create_task(supervisor.keep(name, run, pulse), name=name) for name, run, pulse in runs]
            tasks.append(asyncio.create_task(supervisor.watch(), name="watch"))
            await _until(stop, tasks)
        finally:
            self.desk.about_node("agent", AgentState(state="stopping", version=self.settings.version))
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            await self.commands.close()
            if self.rank_devices is not None:
                await self.rank_devices.close()
            await self.host.close(leave_running=True)
            await self.outbox.close()
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)

    # What runs here

    def _current(self) -> tuple[str, int]:
        """The job and attempt whose ranks are here; keeps the desk's up to date."""
        job, attempt = self.host.current()
        now_ns = clock.boot_ns()
        if job:
            self._present_ns = now_ns
            self._set_context(job, attempt)
        elif self.desk.job and now_ns - self._present_ns > CONTEXT_KEPT_S * NS:
            self._set_context("", 0)
        return job, attempt

    async def _handle(self, command: NodeCommand) -> CommandAnswered:
        answer = await self.host.handle(command)
        if command.verb == "start" and answer.ok:
            self._set_folders(
                (
                    ("working", command.directory),
                    ("checkpoints", command.checkpoints and os.path.join(command.directory, command.checkpoints)),
                )
            )
        return answer

    def _own_pids(self) -> frozenset[int]:
        return frozenset((os.getpid(), *(self.nvml.pids if self.nvml else ()), *(self.watch.pids if self.watch else ())))

    def _rank_news(self, news: RankNews) -> None:
        if self.rank_logs is not None:
            self.rank_logs.pump()  # its last words come before its end
        if isinstance(news.fact, RankExit) and not news.fact.asked and self.watch is not None:
            self.watch.rank_ended(news.fact.rank)
        if isinstance(news.fact, RankStarted):
            for producer in self.kernel_logs:
                producer.pump()  # what the kernel said before belongs to before
            self._present_ns = clock.boot_ns()
            self._set_context(news.job, news.attempt)
            if self.rank_devices is not None:
                self.rank_devices.started(news.job, news.attempt, news.fact)
        rank_exits.tell(self.desk, news.job, news.attempt, news.fact, news.identity)

    def _set_context(self, job: str, attempt: int) -> None:
        if (job, attempt) == (self.desk.job, self.desk.attempt):
            return
        self.desk.job, self.desk.attempt = job, attempt
        if not job and self.watch is not None:
            self.watch.job_folders = ()
        self._save_context()

    def _set_folders(self, folders: tuple[tuple[str, str], ...]) -> None:
        """The folders of the job that was started last."""
        folders = tuple((use, path) for use, path in folders if path)
        if self.watch is not None and self.watch.job_folders != folders:
            self.watch.job_folders = folders
            self._save_context()

    def _save_context(self) -> None:
        folders = self.watch.job_folders if self.watch is not None else ()
        temporary = self._context_path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(
                json.dumps(
                    {"boot_id": self.desk.boot_id, "job": self.desk.job, "attempt": self.desk.attempt, "folders": folders}
                )
            )
            temporary.replace(self._context_path)

    def _load_context(self) -> None:
        try:
            value = json.loads(self._context_path.read_text())
            if value["boot_id"] == self.desk.boot_id:
                self.desk.job, self.desk.attempt = str(value["job"]), int(value["attempt"])
                if self.watch is not None:
                    self.watch.job_folders = tuple((str(use), str(path)) for use, path in value.get("folders", ()))
        except (OSError, ValueError, KeyError, TypeError):
            pass

    # What went wrong

    def _dropped(self, lane: str, count: int) -> None:
        detail = f"{count} observations ({lane}) did not fit the spool of {self.settings.spool_bytes_max} bytes"
        self.desk.about_node("agent", EvidenceGap(producer="outbox", reason="spool_full", missing=count, detail=detail))

    def _spool_trouble(self, text: str) -> None:
        self.settings.say(text)
        self.desk.about_node("agent", AgentState(producer="outbox", state="failed", detail=text[:TEXT_MAX]))


async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Waits for `stop`; a task that ends before it is a fault of ours and is raised."""
    waiting = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()
    finally:
        waiting.cancel()


async def run_agent(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Runs one node's agent until `stop` is set; its ranks go on. Raises BadSettings before anything was started."""
    check(settings)
    with lock_state(settings.state_dir, settings.node):
        await Agent(settings).run(stop)


# The process


def arguments(argv: list[str] | None = None) -> AgentSettings:
    """The settings of a command line. Raises BadSettings."""
    parser = _Parser(prog="keepstep agent", description="Watches this node and runs its ranks, as commanded over the bus.")
    parser.add_argument("--node", default=socket.gethostname(), help="this node's name (default: the host's)")
    parser.add_argument("--state", required=True, type=Path, help="a folder of its own, kept between starts")
    parser.add_argument("--bus", required=True, help="nats://host:port")
    parser.add_argument("--seed-file", type=Path, help="this node's key, as `keepstep keys` made it")
    parser.add_argument("--tls-ca", type=Path, help="the certificate authority of the bus")
    parser.add_argument(
        "--kernel-log", action="append", metavar="kmsg|FILE|none", help="what to follow (default kmsg); may be repeated"
    )
    parser.add_argument(
        "--trust-user-facility", action="store_true", help="believe kernel log lines that user space wrote (for tests)"
    )
    parser.add_argument("--lines-per-s", type=int, default=2000, help="uninteresting kernel lines let through (2000)")
    parser.add_argument("--catalogue", type=Path, help="the catalogue of kernel lines (default: the one that came along)")
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument(
        "--nic", action="append", metavar="auto|off|PATTERN|!PATTERN",
        help="network links to watch (default auto: RDMA ports, or where there are none, interfaces with a device); may be repeated",
    )  # fmt: skip
    parser.add_argument("--nvml", choices=("auto", "off"), default="auto", help="watch NVIDIA GPUs where there are any (auto)")
    parser.add_argument(
        "--host", choices=("auto", "off"), default="auto", help="sample the host, its set-up and what its ranks print (auto)"
    )
    parser.add_argument("--host-s", type=float, default=10.0, help="between samples of the host (10)")
    parser.add_argument("--spool-mib", type=float, default=64.0, help="on disk while the bus is away (64)")
    parser.add_argument("--hook-folder", type=Path, help="the folder that holds the training hook")
    parser.add_argument("--socket", type=Path, help="the training hook's socket (default: in the state folder)")
    parser.add_argument("--any-process", action="store_true", help="let any process of this user report progress")
    parser.add_argument("--address", default="127.0.0.1", help="where other nodes' ranks reach this one")
    parser.add_argument("--stop-grace-s", type=float, default=10.0, help="from a graceful stop to the kill (10)")
    given = parser.parse_args(argv)
    logs = tuple(dict.fromkeys(given.kernel_log or [KMSG]))
    if "none" in logs and len(logs) > 1:
        raise BadSettings("--kernel-log none stands alone")
    if not 0 < given.spool_mib < 1e7:
        raise BadSettings(f"--spool-mib {given.spool_mib:g} is no size of a spool")
    return AgentSettings(
        node=given.node,
        state_dir=given.state.absolute(),
        bus_url=given.bus,
        bus_options=_bus_options(given.node, given.seed_file),
        tls=_tls(given.tls_ca),
        kernel_logs=() if logs == ("none",) else tuple(log if log == KMSG else str(Path(log).absolute()) for log in logs),
        trust_user_facility=given.trust_user_facility,
        lines_per_s=given.lines_per_s,
        interesting=_catalogue(given.catalogue),
        heartbeat_s=given.heartbeat_s,
        nvml=given.nvml == "auto",
        nic=_nic(given.nic or [AUTO]),
        host=given.host == "auto",
        host_interval_s=given.host_s,
        spool_bytes_max=int(given.spool_mib * 1024 * 1024),
        hook_folder=given.hook_folder or _hook(),
        socket_path=given.socket.absolute() if given.socket else None,
        any_process=given.any_process,
        address=given.address,
        stop_grace_s=given.stop_grace_s,
        version=_version(),
        say=partial(_say, given.node),
    )


def _nic(patterns: list[str]) -> tuple[str, ...]:
    if OFF in patterns and len(patterns) > 1:
        raise BadSettings("--nic off stands alone")
    bad = next((p for p in patterns if not p.removeprefix("!") or len(p) > 200), None)
    if bad is not None:
        raise BadSettings(f"--nic {bad[:40]!r} is no pattern of link names; give a name, or a shell pattern such as 'mlx5_*'")
    return () if patterns == [OFF] else tuple(dict.fromkeys(patterns))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise BadSettings(f"{message}; see --help")


def _bus_options(node: str, seed_file: Path | None) -> dict[str, Any]:
    if seed_file is None:
        return {}
    try:
        public_key_of(seed_file)
    except FileNotFoundError:
        raise BadSettings(f"there is no key at {seed_file}; make one with `keepstep keys`") from None
    except KeyProblem as error:
        raise BadSettings(str(error)) from None
    return connect_options(node_user(node), seed_file)


def _tls(ca: Path | None) -> ssl.SSLContext | None:
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise BadSettings(f"{ca} can't be used as a certificate authority ({sentence(error)})") from None


def _catalogue(path: Path | None) -> Callable[[str], bool]:
    from infra.catalogue_files import SHIPPED, catalogue_text
    from processors import catalogue

    examples = path is not None  # the one that came along was tried before it did
    path = path or SHIPPED
    try:
        return catalogue.parse(catalogue_text(path), examples=examples).filter_alone()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"the catalogue {path} can't be read ({sentence(error)}); give another --catalogue") from None
    except catalogue.BadCatalogue as error:
        raise BadSettings(f"the catalogue {path} is not valid: {error}") from None


def _hook() -> Path | None:
    try:
        return hook_folder()
    except NoHook:
        return None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("keepstep-pipeline")
    except PackageNotFoundError:
        return ""


def _say(node: str, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"keepstep agent {node}: {text}", file=sys.stderr, flush=True)


async def _serve(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_agent(settings, stop)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after a stop that was asked for, 1 after a fault, 2 for settings that can't work."""
    try:
        asyncio.run(_serve(arguments(argv)))
    except BadSettings as error:
        print(f"keepstep agent: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"keepstep agent: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
