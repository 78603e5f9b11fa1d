"""What /proc says, read; and reads that hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from producers import host_probes as probes
from producers.slow_reads import STUCK_MAX, Hung, SlowReads, TooManyHang


def test_pressure_of_kernels_with_and_without_full() -> None:
    both = "some avg10=34.74 avg60=28.72 avg300=20.73 total=5893437882\nfull avg10=1.50 avg60=0.00 avg300=0.00 total=0\n"
    assert probes.pressure(both) == (34.74, 1.5)
    assert probes.pressure("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n") == (0.0, None)
    assert probes.pressure("") == (None, None)


def test_meminfo_and_counters() -> None:
    text = "MemTotal:       49367316 kB\nHugePages_Total:       0\nMemAvailable:   40000000 kB\nnonsense\nX: y kB\n"
    assert probes.meminfo(text) == {"MemTotal": 49367316 * 1024, "MemAvailable": 40000000 * 1024}
    assert probes.counter("pgfault 12\noom_kill 3\n", "oom_kill") == 3
    assert probes.counter("oom_kill_disable 0\noom_kill x\n", "oom_kill") is None


MOUNTINFO = r"""22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
30 22 259:3 / /data rw,relatime - ext4 /dev/nvme1n1 ro,errors=remount-ro
31 22 259:4 / /frozen ro,relatime - xfs /dev/nvme2n1 ro,attr2
32 22 259:5 / /newer rw,relatime - ext4 /dev/nvme3n1 rw,emergency_ro
33 22 0:50 / /with\040blank rw,relatime shared:9 master:2 - nfs4 server:/export rw,vers=4.2
34 30 0:51 / /data/deep rw - tmpfs tmpfs rw,size=1k
35 22 0:52 / /image ro - squashfs /dev/loop0 ro
broken line
"""


@pytest.mark.parametrize(
    ("path", "point", "local", "read_only"),
    [
        ("/home/x", "/", True, ""),
        ("/data", "/data", True, "error"),
        ("/database", "/", True, ""),
        ("/data/deep/er", "/data/deep", False, ""),
        ("/frozen/a", "/frozen", True, "mount"),
        ("/newer", "/newer", True, "error"),
        ("/with blank/y", "/with blank", False, ""),
        ("/image", "/image", False, "mount"),
    ],
)
def test_a_path_lies_on_a_mount(path: str, point: str, local: bool, read_only: str) -> None:
    mount = probes.mount_of(path, probes.mounts(MOUNTINFO))
    assert mount is not None
    assert (mount.point, mount.local, mount.read_only) == (point, local, read_only)


def test_this_machines_mounts_are_read() -> None:
    known = probes.mounts(Path("/proc/self/mountinfo").read_text())
    root = probes.mount_of(os.path.realpath(sys.executable), known)
    assert root is not None and root.filesystem


def test_process_state_with_any_name() -> None:
    raw = b"77 (a) (R) b) D 1 77 77 0 -1 4194304 1 2 3 4 100 23 0 0 20 0 5 0 4242 1 2 3"
    assert probes.process_state(raw) == ("D", 4242, 123)
    assert probes.process_state(b"77 (x) R") is None
    own = probes.process_state(Path("/proc/self/stat").read_bytes())
    assert own is not None and own.state == "R" and own.start_time > 0


def test_memory_groups_of_both_versions() -> None:
    assert probes.memory_group("0::/system.slice/x.service\n") == (
        "sys/fs/cgroup/system.slice/x.service/memory.max",
        "sys/fs/cgroup/system.slice/x.service/memory.current",
        "sys/fs/cgroup/system.slice/x.service/memory.events",
    )
    first = probes.memory_group("4:memory:/a/b\n0::/\n")
    assert first is not None and first.limit == "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"
    assert probes.memory_group("") is None
    assert (
        probes.bytes_of("max\n") == -1 and probes.bytes_of("9223372036854771712\n") == -1 and probes.bytes_of("4096\n") == 4096
    )


def test_what_cannot_be_read_is_known(tmp_path: Path) -> None:
    files = probes.HostFiles(tmp_path)
    assert files.text("proc/loadavg") == "" and list(files.blind) == ["proc/loadavg"]
    assert files.text("proc/pressure/cpu", expected=False) == "" and len(files.blind) == 1
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "loadavg").write_text("3.25 1 1 2/3 4\n")
    assert probes.load1(files.text("proc/loadavg")) == 3.25 and not files.blind


# Reads that hang


async def test_space_and_bytes_are_read(tmp_path: Path) -> None:
    reads = SlowReads()
    try:
        space = await reads.space(str(tmp_path), 5)
        direct = os.statvfs(tmp_path)
        assert space.total_bytes == direct.f_frsize * direct.f_blocks and 0 <= space.free_bytes <= space.total_bytes
        (tmp_path / "bytes").write_bytes(bytes(range(256)) * 10)
        assert await reads.read(str(tmp_path / "bytes"), 300, 5) == (bytes(range(256)) * 10)[:300]
        with pytest.raises(FileNotFoundError):
            await reads.space(str(tmp_path / "absent"), 5)
        assert reads.stuck == 0 and len(reads.pids) == 1
    finally:
        await reads.close()
    assert not reads.pids


#: A child that hangs where the path says so, as one does on a dead server: it can't be told to go on.
HANGING = """
import json, sys, time
for line in sys.stdin:
    if "dead" in line:
        time.sleep(1000)
    print(json.dumps({"is": [10, 5, 0, 0]}), flush=True)
"""
#: The kernel does not let go of a child that hangs: stood in for by one whose end is not waited for (SIGKILL does end it here).


async def test_a_hang_costs_its_deadline_and_one_child() -> None:
    reads = SlowReads(program=(sys.executable, "-I", "-S", "-c", HANGING))
    try:
        assert (await reads.space("/alive", 5)).total_bytes == 10
        began = time.monotonic()
        with pytest.raises(Hung):
            await reads.space("/dead", 0.2)
        assert time.monotonic() - began < 2
        assert (await reads.space("/alive", 5)).inodes_free is None  # by another child
    finally:
        await reads.close()


async def test_never_more_than_a_few_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda self: None)  # as SIGKILL does to what sleeps in the kernel
    reads = SlowReads(program=(sys.executable, "-I", "-S", "-c", HANGING))
    try:
        for _ in range(STUCK_MAX):
            with pytest.raises(Hung):
                await reads.space("/dead", 0.1)
        with pytest.raises(TooManyHang):
            await reads.space("/alive", 5)
        assert reads.stuck == STUCK_MAX
    finally:
        monkeypatch.undo()
        await reads.close()


async def test_a_child_that_dies_is_replaced() -> None:
    reads = SlowReads()
    try:
        await reads.space("/", 5)
        dead = reads.pids[0]
        os.kill(dead, 9)
        with contextlib.suppress(OSError):  # where its end is not noticed yet, one question is lost, and said to be
            await reads.space("/", 5)
        assert (await reads.space("/", 5)).total_bytes > 0
        assert dead not in reads.pids
    finally:
        await reads.close()
