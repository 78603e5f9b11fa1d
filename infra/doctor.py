"""What each probe can see on this host as this user: tried for real, each within a time; what its absence costs, and how to grant it.

`examine` gives one Check a probe. Nothing is changed, and nothing that is tried outlives the trial.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from producers.host_clock import discipline
from producers.host_probes import HostFiles, counter, memory_group, pressure

#: yes: it was tried and works; no: it is there and can't be used, or is missing where it should be; absent: there is nothing to see.
Answer = Literal["yes", "no", "absent"]

TRY_S, DRIVER_S = 5.0, 15.0
SPOOL_BYTES_MIN = 128 * 1024 * 1024
_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYSLOG": 34}
_NVIDIA, _MELLANOX = "0x10de", "0x15b3"

_ASK_NVML = """
import json, pynvml
pynvml.nvmlInit()
print(json.dumps([pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()]))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """`found`: what the trial gave. `serves`: what is seen by it; `costs`: what is lost without it, with the rungs of the ladder that
    then stand on less; `grant`: what to do. The last three are said where the answer is no."""

    name: str
    answer: Answer
    found: str
    serves: str
    rungs: tuple[str, ...] = ()
    costs: str = ""
    grant: str = ""


class Tried(NamedTuple):
    answer: Answer
    found: str
    #: Where another grant than the usual one is needed.
    grant: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """`root` of the file system, for what is read of it; `state`: the agent's state folder."""

    root: Path = Path("/")
    state: Path | None = None
    bus: str = ""
    bus_options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    name: str
    serves: str
    attempt: Callable[[Examined], Tried]
    rungs: tuple[str, ...]
    costs: str
    grant: str


def capabilities() -> frozenset[str]:
    """Of those that probes need, which this process has in effect."""
    text = HostFiles().text("proc/self/status")
    word = next((line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), "0")
    bits = int(word, 16)
    return frozenset(name for name, bit in _CAPABILITIES.items() if bits >> bit & 1)


def _said(error: OSError) -> str:
    return error.strerror or str(error)


# Trials


def _kernel_log(at: Examined) -> Tried:
    try:
        ring = os.open(at.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Tried("no", "there is no /dev/kmsg (a container without the device)", "pass /dev/kmsg into the container")
    except OSError as error:
        return Tried("no", f"/dev/kmsg can't be opened: {_said(error)}")
    try:
        os.read(ring, 16384)
    except BlockingIOError:
        return Tried("yes", "/dev/kmsg is open, and empty")
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            return Tried("no", f"/dev/kmsg can't be read: {_said(error)}")
    finally:
        os.close(ring)
    return Tried("yes", "/dev/kmsg is read")


def _pci(at: Examined, vendor: str, classes: tuple[str, ...]) -> int:
    """Devices of a vendor on the PCI bus, whether a driver holds them or not."""
    files, count = HostFiles(at.root), 0
    try:
        devices = os.listdir(at.root / "sys/bus/pci/devices")
    except OSError:
        return 0
    for device in devices[:4096]:
        base = f"sys/bus/pci/devices/{device}"
        if files.text(f"{base}/vendor", expected=False).strip() == vendor:
            count += files.text(f"{base}/class", expected=False).startswith(classes)
    return count


def _nvml(at: Examined) -> Tried:
    there = _pci(at, _NVIDIA, ("0x0300", "0x0302"))
    try:
        ended = subprocess.run([sys.executable, "-I", "-c", _ASK_NVML], capture_output=True, text=True, timeout=DRIVER_S)
        if ended.returncode == 0:
            driver, count = json.loads(ended.stdout)
            if count < there:
                return Tried(
                    "no",
                    f"driver {driver} tells of {count} GPUs, the PCI bus of {there}",
                    "see the kernel log: keepstep classify",
                )
            return Tried("yes", f"driver {driver}, {count} GPUs")
        said = (ended.stderr.strip().splitlines() or ["it ended without a word"])[-1].rpartition(": ")[2][:200]
    except subprocess.TimeoutExpired:
        return Tried("no", f"the driver does not answer within {DRIVER_S:g} s", "a driver that hangs needs a reset or a reboot")
    except (OSError, ValueError) as error:
        said = str(error)[:200]
    if there:
        return Tried("no", f"{there} NVIDIA GPUs on the PCI bus, and NVML says: {said}")
    return Tried("absent", f"no NVIDIA GPU on the PCI bus ({said})")


def _netlink(at: Examined) -> Tried:
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
            link.bind((0, 1))  # RTMGRP_LINK
            link.settimeout(TRY_S)
            link.sendto(struct.pack("IHHIIBxxx", 20, 18, 0x301, 1, 0, 0), (0, 0))  # RTM_GETLINK, all of them
            link.recv(65536)
    except OSError as error:
        return Tried("no", f"no link events: {_said(error)}", "allow AF_NETLINK (RestrictAddressFamilies=, seccomp)")
    return Tried("yes", "link events come")


def _rdma(at: Examined) -> Tried:
    folder = at.root / "sys/class/infiniband"
    try:
        ports = [path for device in sorted(os.listdir(folder)) for path in (folder / device / "ports").iterdir()]
    except OSError:
        ports = []
    cards = _pci(at, _MELLANOX, ("0x02",))
    if not ports:
        if cards:
            return Tried("no", f"{cards} Mellanox adapters on the PCI bus, and no RDMA device", "load mlx5_ib and ib_uverbs")
        return Tried("absent", "no RDMA device")
    blind = [str(port) for port in ports if not os.access(port / "state", os.R_OK)]
    if blind:
        return Tried("no", f"{len(blind)} of {len(ports)} ports can't be read ({blind[0]})", "mount /sys into the container")
    return Tried("yes", f"{len(ports)} RDMA ports")


def _psi(at: Examined) -> Tried:
    files = HostFiles(at.root)
    if pressure(files.text("proc/pressure/cpu")).some is not None:
        return Tried("yes", "/proc/pressure is read")
    return Tried("no", f"/proc/pressure: {files.blind.get('proc/pressure/cpu', 'it says nothing')}")


def _memory(at: Examined) -> Tried:
    files = HostFiles(at.root)
    if counter(files.text("proc/vmstat"), "oom_kill") is None:
        return Tried("no", "the kernel does not count processes killed for memory (before Linux 4.13)", "a newer kernel")
    group = memory_group(files.text("proc/self/cgroup"))
    own = group is not None and bool(files.text(group.events, expected=False))
    return Tried("yes", "the machine's count of processes killed for memory" + (", and the control group's" if own else ""))


def _pstore(at: Examined) -> Tried:
    found: list[str] = []
    for place in ("sys/fs/pstore", "var/lib/systemd/pstore", "var/crash"):
        try:
            os.listdir(at.root / place)
            found.append(f"/{place}")
        except FileNotFoundError:
            continue
        except OSError as error:
            return Tried("no", f"/{place}: {_said(error)}")
    if "/sys/fs/pstore" in found:
        return Tried("yes", f"looked into {', '.join(found)}")
    return Tried(
        "no", "no /sys/fs/pstore", "mount -t pstore pstore /sys/fs/pstore, and give it a backend (efi_pstore, erst, ramoops)"
    )


def _stacks(at: Examined) -> Tried:
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    scope = HostFiles(at.root).text("proc/sys/kernel/yama/ptrace_scope", expected=False).strip()
    may = _may_trace()
    held = "CAP_SYS_PTRACE" if "CAP_SYS_PTRACE" in capabilities() else f"ptrace_scope {scope or '0'}"
    if not may:
        return Tried("no", f"another process of this user may not be traced ({held})")
    if tool is None:
        return Tried(
            "no", f"tracing is allowed ({held}), and py-spy is not installed", "pip install py-spy into keepstep's environment"
        )
    return Tried("yes", f"py-spy, and tracing is allowed ({held})")


def _git(at: Examined) -> Tried:
    tool = shutil.which("git")
    if tool is None:
        return Tried("no", "git is not installed")
    try:
        ended = subprocess.run([tool, "version"], capture_output=True, text=True, timeout=TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Tried("no", f"{tool}: {error}")
    return Tried("yes" if ended.returncode == 0 else "no", (ended.stdout or ended.stderr).strip()[:200])


def _may_trace() -> bool:
    """Whether a process that is not below this one may be traced, as a rank is not below its agent: tried on one made for it."""
    code = "import os,sys,time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(20)"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        process.wait(TRY_S)
        pid = int(line)
    except (ValueError, subprocess.TimeoutExpired):
        process.kill()
        return False
    finally:
        process.stdout.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    try:
        return bool(libc.ptrace(0x4206, pid, None, None) == 0)  # PTRACE_SEIZE: it goes on
    finally:
        os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(pid, 0)  # as its tracer; else somebody else's
        except ChildProcessError:
            pass


def _clock(at: Examined) -> Tried:
    found = discipline()
    if found is None:
        return Tried("no", "adjtimex is not allowed", "allow the call (seccomp)")
    if not found.synchronised:
        return Tried("no", "nothing keeps the clock right")
    return Tried("yes", f"kept right to within {found.error_s:g} s, {found.offset_s:+.6f} s to go")


def _engine(at: Examined) -> Tried:
    sockets = (
        ("docker", "run/docker.sock"),
        ("podman", "run/podman/podman.sock"),
        ("containerd", "run/containerd/containerd.sock"),
    )
    there = [(name, at.root / path) for name, path in sockets if (at.root / path).exists()]
    if not there:
        return Tried("absent", "no container engine runs here")
    for name, path in there:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as engine:
                engine.settimeout(TRY_S)
                engine.connect(str(path))
            return Tried("yes", f"{name} answers")
        except OSError as error:
            said = f"{name}: {_said(error)}"
    return Tried("no", said)


def _slurm(at: Examined) -> Tried:
    tool = shutil.which("scontrol")
    if tool is None:
        return Tried("absent", "no scontrol here")
    try:
        ended = subprocess.run([tool, "ping"], capture_output=True, text=True, timeout=TRY_S)
    except subprocess.TimeoutExpired:
        return Tried("no", f"slurmctld does not answer within {TRY_S:g} s")
    except OSError as error:
        return Tried("no", _said(error))
    said = (ended.stdout or ended.stderr).strip().splitlines() or ["no word"]
    if "UP" in ended.stdout:
        return Tried("yes", said[0][:200])
    if not any(
        (at.root / path).exists() for path in ("etc/slurm/slurm.conf", "etc/slurm-llnl/slurm.conf")
    ) and not os.environ.get("SLURM_CONF"):
        return Tried("absent", "scontrol is installed, and this host is set up for no cluster")
    return Tried("no", said[0][:200])


def _kubernetes(at: Examined) -> Tried:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        return Tried("absent", "not in a Kubernetes pod")
    token = at.root / "var/run/secrets/kubernetes.io/serviceaccount/token"
    if not os.access(token, os.R_OK):
        return Tried(
            "no", "no service account's token in this pod", "automountServiceAccountToken: true, and a role that may get nodes"
        )
    return Tried("yes", f"the API at {host}, with a service account")


def _spool(at: Examined) -> Tried:
    folder = at.state or Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "keepstep"
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"keepstep")
            file.flush()
            os.fsync(file.fileno())
        space = os.statvfs(there)
    except OSError as error:
        return Tried("no", f"{folder} can't be written to: {_said(error)}")
    free = space.f_bavail * space.f_frsize
    if free < SPOOL_BYTES_MIN:
        return Tried("no", f"{folder} has {free >> 20} MiB free, a spool wants {SPOOL_BYTES_MIN >> 20}")
    return Tried("yes", f"{folder}, {free >> 30} GiB free")


def _bus(at: Examined) -> Tried:
    if not at.bus:
        return Tried("absent", "not asked for; give --bus")
    return asyncio.run(_reach(at.bus, at.bus_options or {}))


async def _reach(url: str, options: dict[str, Any]) -> Tried:
    from events.ports import LogError
    from infra.bus import connect

    try:
        client = await connect(url, options, name="keepstep doctor", wait_s=TRY_S)
    except (LogError, OSError, ValueError) as error:
        return Tried("no", str(error)[:300])
    try:
        took = await asyncio.wait_for(_round_trip(client), TRY_S)
        return Tried("yes", f"{url} answers in {took * 1000:.1f} ms")
    except (TimeoutError, LogError, OSError) as error:
        return Tried("no", f"{url} takes the connection and does not answer ({error})")
    finally:
        await client.close()


async def _round_trip(client: Any) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.flush()
    return loop.time() - began


PROBES: tuple[Probe, ...] = (
    Probe(
        "kernel log", "Xids, disk faults, panics and lockups, within 100 ms", _kernel_log, ("evict",),
        "no kernel lines: a GPU that fell off the bus or a disk that fails is known by its crash alone, and nothing names the machine",
        "AmbientCapabilities=CAP_SYSLOG in the agent's unit and read access to /dev/kmsg, or sysctl kernel.dmesg_restrict=0, or follow "
        "a file: --kernel-log /var/log/kern.log",
    ),
    Probe(
        "GPUs (NVML)", "GPUs lost, hot, with errors; a driver that hangs", _nvml, ("evict", "diagnose", "aggregate_stacks"),
        "GPU faults are known from the kernel log alone, and a hang without a line not at all",
        "install NVIDIA's driver with libnvidia-ml.so.1, and read access to /dev/nvidia* (in a container: --gpus all, or utility "
        "among NVIDIA_DRIVER_CAPABILITIES)",
    ),
    Probe(
        "network links", "links that go down, the moment they do", _netlink, ("evict",),
        "links are looked at once a second instead", "allow AF_NETLINK",
    ),
    Probe(
        "RDMA ports", "port states, widths and error counters", _rdma, ("evict", "diagnose"),
        "InfiniBand and RoCE errors are known from NCCL's time-outs alone", "load the RDMA drivers; mount /sys into the container",
    ),
    Probe(
        "pressure", "waiting for processors, memory and disks", _psi, ("reattempt",),
        "an overloaded host is judged by its load, which counts what does not wait too", "boot with psi=1 (a kernel with CONFIG_PSI)",
    ),
    Probe("memory", "processes killed for memory", _memory, ("reattempt",), "a rank that the kernel killed looks like any killed rank", "read access to /proc/vmstat"),
    Probe(
        "last boot", "why a machine rebooted", _pstore, ("evict",),
        "a panic leaves no trace but the silence before it", "run as root, or read access to /sys/fs/pstore and /var/lib/systemd/pstore",
    ),
    Probe(
        "stacks", "where each rank stands when a job hangs", _stacks, ("aggregate_stacks",),
        "a silent hang names nobody: the whole job is reattempted",
        "AmbientCapabilities=CAP_SYS_PTRACE in the agent's unit, or sysctl kernel.yama.ptrace_scope=0",
    ),
    Probe("git", "the commit that a job's code is, and those that it goes back to", _git, ("roll_back",), "a job that was declared with a commit does not start here", "install git, or declare jobs with --revision none"),
    Probe("clock", "whether times of two nodes can be compared", _clock, (), "which of two ranks failed first is guessed", "run chrony, ntpd or systemd-timesyncd"),
    Probe("spool", "what is seen while the bus is away", _spool, ("evict", "hand_over"), "what happens while the bus is away is lost", "a folder of the agent's own, with room: --state"),
    Probe("bus", "everything that is sent", _bus, ("evict", "diagnose", "reattempt", "roll_back", "group_test", "hand_over"), "nothing that this node sees is heard", "start NATS (keepstep up), open its port, give the node's key with --seed-file"),
    Probe("containers", "container errors, by the engine's own word", _engine, ("reattempt",), "container errors are known from logs alone", "add the agent's user to the engine's group"),
    Probe("Slurm", "where nodes stand; draining them", _slurm, ("evict",), "nodes can't be drained from here", "a slurm.conf and munge key of the cluster; the agent's user as operator"),
    Probe("Kubernetes", "where nodes stand; cordoning them", _kubernetes, ("evict",), "nodes can't be cordoned from here", "a service account that may get and patch nodes"),
)  # fmt: skip


def examine(at: Examined) -> Iterator[Check]:
    """One check a probe, in their order, all tried at the same time. A trial that raises or hangs is an answer, too."""
    pool = ThreadPoolExecutor(len(PROBES), thread_name_prefix="doctor")
    running = [(probe, pool.submit(probe.attempt, at)) for probe in PROBES]
    for probe, future in running:
        try:
            tried = future.result(DRIVER_S + TRY_S)
        except TimeoutError:
            tried = Tried("no", "the trial hangs")
        except Exception as error:
            tried = Tried("no", f"the trial failed: {type(error).__name__}: {error}"[:300])
        missing = tried.answer == "no"
        yield Check(
            probe.name,
            tried.answer,
            tried.found,
            probe.serves,
            probe.rungs if missing else (),
            probe.costs if missing else "",
            (tried.grant or probe.grant) if missing else "",
        )
    pool.shutdown(wait=False, cancel_futures=True)
