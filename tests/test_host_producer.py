"""The host's producer on this machine and on trees of files; and that producers say how they fare."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from events.envelope import AnyEvent
from events.host import Configuration, HostSample, LastBoot
from events.presence import AgentState, RankProcess
from events.registry import parse
from producers import host_config
from producers.host import HostProducer, HostSettings
from producers.host_clock import read as read_clock
from producers.host_folders import Folders
from producers.host_probes import HostFiles, mounts
from producers.last_boot import LastBoots
from producers.last_boot import read as read_last
from producers.observe import Clock, Desk
from producers.slow_reads import SlowReads
from producers.supervise import Pulse, Supervisor


class Heard:
    """In the place of an outbox: keeps what is put into it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, AnyEvent]] = []
        self.waiting = 0

    def put(self, lane: int, seen: Any, on_safe: Callable[[], None] | None = None) -> None:
        self.events.append((seen.subject, parse(seen.data)))

    def of(self, kind: type) -> list[Any]:
        return [event.data for _, event in self.events if isinstance(event.data, kind)]


def desk_of(heard: Heard) -> Desk:
    clock = Clock(time.time_ns, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME), os.urandom)
    return Desk("n1", "boot-1", clock, heard)  # type: ignore[arg-type]


def nothing_runs() -> tuple[str, int]:
    return "", 0


async def until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come to pass in time"
        await asyncio.sleep(0.02)


async def test_a_sample_of_this_machine(tmp_path: Path) -> None:
    heard = Heard()
    producer = HostProducer(desk_of(heard), tmp_path, nothing_runs, lambda: ())
    task = asyncio.create_task(producer.run())
    try:
        await until(lambda: heard.of(HostSample))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    sample = heard.of(HostSample)[0]
    assert sample.cpus >= 1 and sample.up_s > 0 and sample.load1 is not None
    assert sample.memory_total_bytes > sample.memory_available_bytes > 0
    assert {folder.use for folder in sample.folders} == {"temporary", "shared_memory", "state"}
    state = next(folder for folder in sample.folders if folder.use == "state")
    assert state.total_bytes > 0 and state.mount and not state.read_only and state.was_writable and not state.error
    assert sample.clock_synchronised is not None
    assert not producer.pids and producer.pulse.rounds == 1


def tree(root: Path, files: dict[str, str]) -> HostFiles:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostFiles(root)


HOST = {
    "proc/pressure/cpu": "some avg10=91.00 avg60=1 avg300=1 total=1\nfull avg10=0.00 avg60=0 avg300=0 total=0\n",
    "proc/pressure/memory": "some avg10=12.00 avg60=1 avg300=1 total=1\nfull avg10=9.50 avg60=0 avg300=0 total=0\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 10 kB\n",
    "proc/vmstat": "oom_kill 4\n",
    "proc/loadavg": "7.00 1 1 2/3 4\n",
    "proc/uptime": "120.5 3.2\n",
    "proc/self/cgroup": "0::/x\n",
    "sys/fs/cgroup/x/memory.max": "2048\n",
    "sys/fs/cgroup/x/memory.current": "1024\n",
    "sys/fs/cgroup/x/memory.events": "low 0\noom 1\noom_kill 1\n",
    "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n",
}


async def test_counters_are_told_as_what_came_since(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    tree(root, HOST)
    producer = HostProducer(desk_of(Heard()), state, nothing_runs, lambda: (), HostSettings(root=root))
    try:
        first = await producer.sample()
        assert (first.oom_kills, first.group_oom_kills) == (0, 0)  # what was before the agent is not news
        assert (first.cpu_pressure, first.memory_pressure_full, first.up_s, first.load1) == (91.0, 9.5, 120.5, 7.0)
        assert (first.group_limit_bytes, first.group_used_bytes, first.memory_available_bytes) == (2048, 1024, 10 * 1024)
        assert first.io_pressure is None
        tree(root, {"proc/vmstat": "oom_kill 6\n", "sys/fs/cgroup/x/memory.events": "oom_kill 2\n"})
        producer.rank_ended(3)
        second = await producer.sample()
        assert (second.oom_kills, second.group_oom_kills, second.ranks_ended) == (2, 1, (3,))
        (root / "proc/vmstat").unlink()
        third = await producer.sample()
        assert third.oom_kills == 0 and third.ranks_ended == () and "proc/vmstat" in third.blind
    finally:
        await producer._reads.close()


async def test_a_rank_that_ends_is_answered_at_once(tmp_path: Path) -> None:
    heard = Heard()
    producer = HostProducer(desk_of(heard), tmp_path, nothing_runs, lambda: (), HostSettings(interval_s=60))
    task = asyncio.create_task(producer.run())
    try:
        await until(lambda: heard.of(HostSample))
        producer.rank_ended(1)
        await until(lambda: len(heard.of(HostSample)) == 2, 5)
        assert heard.of(HostSample)[1].ranks_ended == (1,)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_sleeping_process_is_stuck_only_while_it_does_not_run(tmp_path: Path) -> None:
    stat = "9 (python) {} 1 9 9 0 -1 4 1 2 3 4 {} 0 0 0 20 0 5 0 4242 1 2 3"
    clock = {"ns": 0}
    desk = desk_of(Heard())
    desk.clock = Clock(time.time_ns, lambda: clock["ns"], os.urandom)
    rank = RankProcess(rank=5, pid=9, state="D")
    producer = HostProducer(desk, tmp_path, nothing_runs, lambda: (rank,), HostSettings(root=tmp_path))
    status = "Name:\tpython\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t1\n"
    tree(tmp_path, {"proc/9/stat": stat.format("D", 100), "proc/9/status": status, "proc/9/wchan": "rpc_wait_bit_killable"})
    assert producer._stuck(0)[0].for_s == 0
    (found,) = producer._stuck(40_000_000_000)
    assert (found.rank, found.for_s, found.where) == (5, 40.0, "rpc_wait_bit_killable")
    tree(tmp_path, {"proc/9/stat": stat.format("D", 101)})  # it ran in between
    assert producer._stuck(50_000_000_000)[0].for_s == 0
    tree(tmp_path, {"proc/9/stat": stat.format("S", 101)})
    assert producer._stuck(60_000_000_000) == ()


#: A parent that waits for its vfork'ed child to exec or end sleeps uninterruptibly: a real D state without a broken disk.
VFORK = "#include <unistd.h>\nint main(void){ if (vfork() == 0) { sleep(60); _exit(0); } return 0; }\n"


async def test_a_process_really_in_uninterruptible_sleep(tmp_path: Path) -> None:
    source, program = tmp_path / "v.c", tmp_path / "v"
    source.write_text(VFORK)
    subprocess.run(["cc", "-o", str(program), str(source)], check=True, timeout=60)  # noqa: ASYNC221
    process = subprocess.Popen([str(program)], start_new_session=True)  # noqa: ASYNC220
    try:
        rank = RankProcess(rank=0, pid=process.pid, state="D")
        producer = HostProducer(desk_of(Heard()), tmp_path, nothing_runs, lambda: (rank,))
        await until(lambda: producer._stuck(1))
        (found,) = producer._stuck(31_000_000_000)
        assert found.pid == process.pid and found.for_s > 30
    finally:
        os.killpg(process.pid, 9)
        process.wait()


# Folders


async def test_folders_are_looked_at_by_mount_and_by_room(tmp_path: Path) -> None:
    reads = SlowReads()
    folders = Folders(reads)
    there, absent = str(tmp_path), str(tmp_path / "absent")
    table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    wanted = [("checkpoints", there), ("temporary", there), ("working", absent), ("other", "relative")]
    try:
        one, two = await folders.look(wanted, mounts(table), 0)
        assert (one.path, one.use, one.local, one.read_only, one.was_writable) == (there, "checkpoints", True, "", True)
        assert one.total_bytes > 0 and 0 <= one.free_bytes <= one.total_bytes and not one.error
        assert two.error == "No such file or directory" and two.total_bytes == -1
        failed = table.replace("/dev/sda1 rw", "/dev/sda1 ro,errors=remount-ro")
        one, _ = await folders.look(wanted, mounts(failed), 1)
        assert (one.read_only, one.was_writable) == ("error", True)
        (fresh,) = await Folders(reads).look([("state", there)], mounts(failed), 1)
        assert (fresh.read_only, fresh.was_writable) == ("error", False)  # nobody here saw it writable
    finally:
        await reads.close()


HANGS = """
import json, os, sys, time
for line in sys.stdin:
    if "dead" in line and not os.path.exists(sys.argv[1]):
        time.sleep(1000)
    print(json.dumps({"is": [10, 5, 10, 1]}), flush=True)
"""


async def test_a_folder_that_hangs_is_said_and_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.host_folders.ANSWER_S_MAX", 1.5)
    back = tmp_path / "back"
    reads = SlowReads(program=(sys.executable, "-I", "-S", "-c", HANGS, str(back)))
    folders = Folders(reads)
    wanted = [("checkpoints", "/dead"), ("temporary", "/alive")]
    second = 1_000_000_000
    try:
        dead, alive = await folders.look(wanted, [], second)
        assert dead.hung_s > 0 and alive.hung_s == 0 and alive.free_bytes == 5 and alive.inodes_free == 0.1
        began = time.monotonic()
        dead, _ = await folders.look(wanted, [], 31 * second)  # not asked again so soon
        assert dead.hung_s > 30 and time.monotonic() - began < 1.0
        back.touch()
        dead, _ = await folders.look(wanted, [], 62 * second)
        assert dead.hung_s == 0 and dead.free_bytes == 5
    finally:
        await reads.close()


# The clock


def test_the_kernels_words_about_its_clock() -> None:
    assert read_clock(-1500, 3000, 0x0001, 0) == (-0.0015, 0.003, True)
    assert read_clock(2_000_000, 16_000_000, 0x2000 | 0x0040, 5) == (0.002, 16.0, False)


# Earlier boots

PANIC = "<6>[ 100.0] eth0: link up\n<0>[ 4242.1] Kernel panic - not syncing: Fatal exception in interrupt\n<0>[ 4242.2] Kernel Offset: x\n"


def test_a_panic_is_told_once_ever(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    tree(
        root,
        {"sys/fs/pstore/dmesg-efi-1": PANIC, "sys/fs/pstore/pmsg-1": "user words", "var/crash/2026/vmcore-dmesg.txt": "calm\n"},
    )
    os.utime(root / "sys/fs/pstore/dmesg-efi-1", (1000, 1000))
    boots = LastBoots(state, 1600 * 10**9, root=root)
    calm, panic = sorted(boots.news(), key=lambda fact: fact.panic)
    assert panic.panic and panic.text.startswith("<0>[ 4242.1] Kernel panic") and panic.age_s == 600
    assert not calm.panic and calm.source.endswith("vmcore-dmesg.txt")
    boots.told()
    assert LastBoots(state, 1700 * 10**9, root=root).news() == []
    os.utime(root / "sys/fs/pstore/dmesg-efi-1", (1650, 1650))  # another end under the same name
    assert len(LastBoots(state, 1700 * 10**9, root=root).news()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[1.0] Kernel panic - not syncing: VFS: Unable to mount root fs",
        "[1.0] Oops: 0002 [#1] SMP",
        "[1.0] BUG: unable to handle page fault for address: 0000",
        "[1.0] watchdog: BUG: soft lockup - CPU#3 stuck for 22s!",
    ],
)
def test_ends_by_a_fault(line: str) -> None:
    assert read_last(f"[0.5] before\n{line}\n[1.1] after\n") == (True, f"{line}\n[1.1] after\n")
    assert read_last("[0.5] reboot: Restarting system\n")[0] is False


async def test_last_boots_are_an_event_of_their_time(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    tree(root, {**HOST, "sys/fs/pstore/dmesg-efi-1": PANIC})
    then = time.time() - 3600
    os.utime(root / "sys/fs/pstore/dmesg-efi-1", (then, then))
    heard = Heard()
    producer = HostProducer(desk_of(heard), state, nothing_runs, lambda: (), HostSettings(root=root))
    task = asyncio.create_task(producer.run())
    try:
        await until(lambda: heard.of(LastBoot))
        (event,) = [event for _, event in heard.events if isinstance(event.data, LastBoot)]
        assert abs(event.time / 1e9 - then) < 5 and event.data.panic
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# The set-up


def test_of_an_environment_only_what_may_be_shown() -> None:
    raw = (
        b"NCCL_DEBUG=WARN\0NCCL_SOCKET_IFNAME=eth0\0HOME=/root\0AWS_SECRET_ACCESS_KEY=x\0NCCL_AUTH_TOKEN=hush\0FI_PROVIDER=efa\0"
        b"CUDA_VISIBLE_DEVICES=GPU-5a3b21e0-0000-1111,GPU-5a3b21e0-0000-2222\0TORCH_HOME_DIR=/a\0broken\0"
        b"UCX_TLS=http://user:pass@host/x\0OMP_NUM_THREADS=\xff\x1b[31m\0" + b"NCCL_LONG=" + b"y" * 500 + b"\0"
    )
    found = host_config.environment(raw)
    assert set(found) == {
        "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "FI_PROVIDER", "CUDA_VISIBLE_DEVICES", "UCX_TLS", "OMP_NUM_THREADS", "NCCL_LONG",
    }  # fmt: skip
    assert found["CUDA_VISIBLE_DEVICES"] == "2 by id" and found["UCX_TLS"] == "http://[redacted]@host/x"
    assert "\x1b" not in found["OMP_NUM_THREADS"]
    assert len(found["NCCL_LONG"]) < 140 and found["NCCL_LONG"] != host_config.shown("y" * 499)


def test_ranks_that_differ_stand_side_by_side() -> None:
    assert host_config.of_ranks([{"A": "1", "B": "x"}, {"A": "2", "B": "x"}, {"B": "x"}]) == {
        "env.A": "1 | 2 | (not set)",
        "env.B": "x",
    }


def test_the_hosts_own_part(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "6.8.0-41\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/module/nvidia/version": "550.54.15\n",
            "proc/cmdline": "root=/dev/sda1 password=x intel_iommu=on iommu=pt quiet\n",
            **{f"sys/class/infiniband/mlx5_{i}/fw_ver": f"28.39.{1002 if i < 7 else 900}\n" for i in range(8)},
        },
    )
    assert host_config.of_host(files) == {
        "kernel.release": "6.8.0-41",
        "kernel.huge_pages": "madvise",
        "kernel.nvidia": "550.54.15",
        "kernel.boot": "intel_iommu=on iommu=pt",
    }
    assert host_config.of_nics(files) == {"nic.firmware": "7 x 28.39.1002, 1 x 28.39.900"}


async def test_the_set_up_goes_to_the_jobs_stream_with_the_ranks_environment(tmp_path: Path) -> None:
    heard = Heard()
    rank = subprocess.Popen(["sleep", "60"], env={"NCCL_DEBUG": "INFO", "API_TOKEN": "hush"})  # noqa: ASYNC220
    try:
        await until(lambda: b"sleep" in Path(f"/proc/{rank.pid}/cmdline").read_bytes())
        processes = (RankProcess(rank=0, pid=rank.pid, state="S"),)
        producer = HostProducer(
            desk_of(heard), tmp_path, lambda: ("gpt", 2), lambda: processes, facts=[lambda: {"gpu.driver": "550.54.15"}]
        )
        task = asyncio.create_task(producer.run())
        try:
            await until(lambda: heard.of(Configuration))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        ((subject, event),) = [(s, e) for s, e in heard.events if isinstance(e.data, Configuration)]
        values = dict(event.data.values)
        assert subject == "telemetry.n1.job.gpt.configuration" and (event.job, event.attempt) == ("gpt", 2)
        assert values["env.NCCL_DEBUG"] == "INFO" and values["gpu.driver"] == "550.54.15" and values["kernel.release"]
        assert set(event.data.groups) == {"env", "gpu", "kernel", "nic"}
        assert "hush" not in json.dumps(values)
    finally:
        rank.kill()
        rank.wait()


# How producers fare


async def test_a_producer_whose_rounds_stop_is_stalled_and_then_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.supervise.WATCH_S", 0.02)
    monkeypatch.setattr("producers.supervise.STALL_S_MIN", 0.2)
    heard, pulse, hangs = Heard(), Pulse(0.05), asyncio.Event()
    supervisor = Supervisor(desk_of(heard))

    async def run() -> None:
        while True:
            pulse.beat()
            if hangs.is_set():
                await asyncio.sleep(0.6)
                hangs.clear()
            await asyncio.sleep(0.02)

    async def waits() -> None:
        await asyncio.Event().wait()  # for what comes: no stall

    tasks = [
        asyncio.create_task(work)
        for work in (supervisor.keep("slow", run, pulse), supervisor.keep("quiet", waits), supervisor.watch())
    ]
    try:
        await asyncio.sleep(0.4)
        assert [(s.producer, s.state) for s in heard.of(AgentState)] == [("slow", "started"), ("quiet", "started")]
        hangs.set()
        await until(lambda: heard.of(AgentState)[-1].state == "stalled", 5)
        await until(lambda: heard.of(AgentState)[-1].state == "resumed", 5)
        assert [s.producer for s in heard.of(AgentState)][2:] == ["slow", "slow"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_agent_that_stands_still_is_no_producers_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.supervise.WATCH_S", 0.02)
    monkeypatch.setattr("producers.supervise.STALL_S_MIN", 0.2)
    heard, pulse = Heard(), Pulse(0.05)
    supervisor = Supervisor(desk_of(heard))

    async def run() -> None:
        while True:
            pulse.beat()
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(work) for work in (supervisor.keep("host", run, pulse), supervisor.watch())]
    try:
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # noqa: ASYNC251  the whole agent is held
        await asyncio.sleep(0.1)
        assert [s.state for s in heard.of(AgentState)] == ["started"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
