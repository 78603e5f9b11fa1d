"""A node's agent: composes the producers, the outbox, the rank host and the bus into one process. `python -m infra.agent --help`.

The job does not depend on it: ranks live in sessions of their own, and an agent that is started again over the same folder finds
them, the exits it missed, and what it had not yet sent. Heavy modules stay out of here: an agent runs beside training.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from actuators.ranks import RankHost, RankNews
from actuators.tail import shown
from events.action import CommandAnswered, NodeCommand
from events.clock import NS
from events.envelope import TEXT_MAX
from events.hardware import EvidenceGap
from events.presence import AgentState
from events.training import RankExit, RankStarted
from infra import (
    clock,
    lean_nats,  # noqa: F401  before whatever imports nats
)
from infra.agent_bus import AgentBus, Commands
from infra.agent_settings import AgentSettings, BadSettings, arguments, check
from infra.tasks import ended
from producers import host_config, rank_exits
from producers.heartbeat import HeartbeatProducer
from producers.host import HostProducer, HostSettings
from producers.kernel_lines import short_host
from producers.kernel_log import KernelLogProducer, KernelLogSettings
from producers.nic import NicProducer, NicSettings
from producers.nvml import NvmlProducer
from producers.observe import Clock, Desk
from producers.outbox import Outbox
from producers.rank_devices_sysfs import RankDevicesTeller
from producers.rank_logs import RankLogs, RankLogSettings
from producers.supervise import Pulse, Supervisor, sentence
from producers.trainer import TrainerSettings, TrainerSocket

#: After the last rank ended, what is seen of the node still names its attempt for this long: the line that tells why comes late.
CONTEXT_KEPT_S = 300.0


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
        hosts = frozenset(short_host(name) for name in (settings.node, socket.gethostname(), "localhost"))
        kernel = KernelLogSettings(
            settings.trust_user_facility, settings.lines_per_s, settings.interesting, self._own_pids, hosts
        )
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
            await ended(*tasks[1:])
            await self.commands.close()
            if self.rank_devices is not None:
                await self.rank_devices.close()
            await self.host.close(leave_running=True)
            await self.outbox.close()
            await ended(tasks[0])

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
