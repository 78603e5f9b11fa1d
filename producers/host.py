"""The host itself: a sample every few seconds, how the node is set up on its job's stream, and once what earlier boots left.

I/O by way of host_probes.py, host_folders.py, host_config.py, last_boot.py and slow_reads.py; what is judged is processors/
host_health.py's and drift.py's. Nothing here waits for a disk or a server, and what cannot be read is said in the sample.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from events.clock import NS
from events.host import Configuration, HostSample, StuckRank
from events.presence import RankProcess
from producers import host_config, host_probes
from producers.host_clock import Discipline, discipline
from producers.host_folders import Folders
from producers.host_probes import HostFiles
from producers.last_boot import LastBoots
from producers.observe import Desk
from producers.slow_reads import Hung, SlowReads, TooManyHang
from producers.supervise import Pulse

PRODUCER, CONFIGURATION = "host", "configuration"
#: A rank that ended is answered by a sample at once, but not more often than this.
APART_S_MIN = 0.5
CONFIGURATION_S = 60.0
#: The configuration is told again though it is the same: for a detector that began late.
TOLD_AGAIN_S = 600.0
STUCK_MAX = 64
_ENVIRONMENT_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`folders`: pairs of use (events.host.Folder) and absolute path that are always looked at."""

    interval_s: float = 10.0
    folders: tuple[tuple[str, str], ...] = (("temporary", "/tmp"), ("shared_memory", "/dev/shm"))
    root: Path = Path("/")


@dataclass(slots=True)
class _Asleep:
    start_time: int
    moved: int
    since_ns: int


@dataclass(slots=True)
class _Counters:
    oom: int | None = None
    group_oom: int | None = None


@dataclass(slots=True)
class _Told:
    what: tuple[str, int, Configuration] | None = None
    at_ns: int = 0


class HostProducer:
    """`current`: job and attempt whose ranks are here; `processes`: these ranks. `facts`: what other producers know of the set-up, by
    name (`gpu.driver`). `pulse` beats once a round."""

    def __init__(
        self,
        desk: Desk,
        state_dir: Path,
        current: Callable[[], tuple[str, int]],
        processes: Callable[[], tuple[RankProcess, ...]],
        settings: HostSettings | None = None,
        *,
        facts: Iterable[Callable[[], Mapping[str, str]]] = (),
        clock: Callable[[], Discipline | None] = discipline,
        reads: SlowReads | None = None,
    ) -> None:
        self.desk = desk
        self.settings = settings or HostSettings()
        self.pulse = Pulse(self.settings.interval_s)
        #: Folders of the job that runs here, as pairs of use and path; whoever starts ranks sets it.
        self.job_folders: tuple[tuple[str, str], ...] = ()
        self._current, self._processes, self._clock = current, processes, clock
        self._facts = tuple(facts)
        self._files = HostFiles(self.settings.root)
        self._reads = reads or SlowReads()
        self._folders = Folders(self._reads)
        self._state_dir = state_dir.absolute()
        self._boots = LastBoots(state_dir, desk.clock.wall_ns(), root=self.settings.root)
        self._counters = _Counters()
        self._asleep: dict[int, _Asleep] = {}
        self._ended: list[int] = []
        self._wake = asyncio.Event()
        self._configuration_ns = 0
        self._told = _Told()
        self._environments: dict[tuple[int, int], dict[str, str] | None] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the children that read for it."""
        return self._reads.pids

    def rank_ended(self, rank: int) -> None:
        """A rank ended by itself: the counters of killed processes are looked at now rather than within the interval."""
        self._ended.append(rank)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            self._tell_last_boots()
            while True:
                began_ns = self.desk.clock.boot_ns()
                self.desk.about_node(PRODUCER, await self.sample())
                if began_ns - self._configuration_ns >= CONFIGURATION_S * NS or self._attempt_is_new():
                    await self._configure(began_ns)
                self.pulse.beat()
                await self._pause(began_ns)
        finally:
            await self._reads.close()

    async def _pause(self, began_ns: int) -> None:
        took_s = (self.desk.clock.boot_ns() - began_ns) / NS
        await asyncio.sleep(APART_S_MIN)
        try:
            async with asyncio.timeout(max(0.0, self.settings.interval_s - took_s - APART_S_MIN)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _tell_last_boots(self) -> None:
        news = self._boots.news()
        for fact in news:
            age_ns = int(max(0.0, fact.age_s) * NS)
            self.desk.about_node("last_boot", fact, age_ns=age_ns)
        if news:
            self._boots.told()

    # A sample

    async def sample(self) -> HostSample:
        files, now_ns = self._files, self.desk.clock.boot_ns()
        ended, self._ended = tuple(sorted(set(self._ended)))[:1024], []
        memory = host_probes.meminfo(files.text("proc/meminfo"))
        cpu, ram, io = (
            host_probes.pressure(files.text(f"proc/pressure/{name}", expected=False)) for name in ("cpu", "memory", "io")
        )
        blind = ["proc/pressure"] if cpu.some is None else []
        oom, group_oom, limit, used = self._memory_group()
        mounts = host_probes.mounts(files.text("proc/self/mountinfo"))
        wanted = (*self.job_folders, *self.settings.folders, ("state", str(self._state_dir)))
        folders = await self._folders.look(wanted, mounts, now_ns)
        clock = self._clock()
        if clock is None:
            blind.append("adjtimex")
        stuck = self._stuck(now_ns)
        return HostSample(
            interval_s=self.settings.interval_s,
            up_s=host_probes.up_s(files.text("proc/uptime")),
            cpus=os.cpu_count() or 1,
            load1=host_probes.load1(files.text("proc/loadavg")),
            cpu_pressure=cpu.some,
            memory_pressure=ram.some,
            memory_pressure_full=ram.full,
            io_pressure=io.some,
            io_pressure_full=io.full,
            memory_total_bytes=memory.get("MemTotal", -1),
            memory_available_bytes=memory.get("MemAvailable", -1),
            group_limit_bytes=limit,
            group_used_bytes=used,
            oom_kills=oom,
            group_oom_kills=group_oom,
            ranks_ended=ended,
            folders=folders,
            stuck=stuck,
            clock_offset_s=clock.offset_s if clock else None,
            clock_error_s=clock.error_s if clock else None,
            clock_synchronised=clock.synchronised if clock else None,
            blind=tuple(sorted([*blind, *files.blind, *self._boots.blind]))[:32],
        )

    def _memory_group(self) -> tuple[int, int, int, int]:
        """Kills on the machine and in the group since the last time; limit and use of the group."""
        files, counters = self._files, self._counters
        oom = host_probes.counter(files.text("proc/vmstat"), "oom_kill")
        group = host_probes.memory_group(files.text("proc/self/cgroup", expected=False))
        group_oom, limit, used = None, -1, -1
        if group:
            group_oom = host_probes.counter(files.text(group.events, expected=False), "oom_kill")
            limit = host_probes.bytes_of(files.text(group.limit, expected=False))
            used = host_probes.bytes_of(files.text(group.used, expected=False)) if limit >= 0 else -1
        more, group_more = _grown(counters.oom, oom), _grown(counters.group_oom, group_oom)
        self._counters = _Counters(oom, group_oom)
        return more, group_more, limit, used

    def _stuck(self, now_ns: int) -> tuple[StuckRank, ...]:
        """Ranks in uninterruptible sleep that have not run since they were first seen so. Their main threads: a rank has hundreds."""
        out: list[StuckRank] = []
        asleep: dict[int, _Asleep] = {}
        for process in self._processes():
            if process.state != "D" or process.pid <= 0:
                continue
            state = host_probes.process_state(self._files.raw(f"proc/{process.pid}/stat", expected=False))
            if state is None or state.state != "D":
                continue
            moved = state.ran + host_probes.switches(self._files.text(f"proc/{process.pid}/status", expected=False))
            known = self._asleep.get(process.pid)
            if known is None or (known.start_time, known.moved) != (state.start_time, moved):
                known = _Asleep(state.start_time, moved, now_ns)
            asleep[process.pid] = known
            if len(out) < STUCK_MAX:
                where = self._files.text(f"proc/{process.pid}/wchan", expected=False).strip()[:100]
                for_s = (now_ns - known.since_ns) / NS
                out.append(StuckRank(rank=process.rank, pid=process.pid, for_s=for_s, where="" if where == "0" else where))
        self._asleep = asleep
        return tuple(out)

    # The set-up

    def _attempt_is_new(self) -> bool:
        """Ranks of an attempt that the set-up was not told for are here."""
        job, attempt = self._current()
        return bool(job) and (self._told.what is None or self._told.what[:2] != (job, attempt))

    async def _configure(self, now_ns: int) -> None:
        self._configuration_ns = now_ns
        job, attempt = self._current()
        if not job:
            return
        fact = await self.configuration()
        what = (job, attempt, fact)
        if what == self._told.what and now_ns - self._told.at_ns < TOLD_AGAIN_S * NS:
            return
        self._told = _Told(what, now_ns)
        self.desk.about_job(CONFIGURATION, job, attempt, fact)

    async def configuration(self) -> Configuration:
        groups = ["kernel", "nic"]
        parts: list[Mapping[str, str]] = [host_config.of_host(self._files), host_config.of_nics(self._files)]
        for facts in self._facts:
            parts.append(facts())
        each = await self._rank_environments()
        if each:
            groups.append("env")
            parts.append(host_config.of_ranks(each))
        return host_config.configuration(parts, groups)

    async def _rank_environments(self) -> list[dict[str, str]]:
        """Read once a process. One that is not there any more, or may not be read, is left out."""
        known: dict[tuple[int, int], dict[str, str] | None] = {}
        for process in sorted(self._processes(), key=lambda process: process.rank):
            if process.pid <= 0 or process.state in "-ZX":
                continue
            state = host_probes.process_state(self._files.raw(f"proc/{process.pid}/stat", expected=False))
            if state is None:
                continue
            key = (process.pid, state.start_time)
            known[key] = self._environments[key] if key in self._environments else await self._environment(process.pid)
        self._environments = known
        return [one for one in known.values() if one is not None]

    async def _environment(self, pid: int) -> dict[str, str] | None:
        try:
            path = str(self.settings.root / f"proc/{pid}/environ")
            return host_config.environment(await self._reads.read(path, host_config.ENVIRONMENT_BYTES_MAX, _ENVIRONMENT_S_MAX))
        except (Hung, TooManyHang, OSError):
            return None


def _grown(before: int | None, now: int | None) -> int:
    return max(0, now - before) if before is not None and now is not None else 0
