"""What machines with nothing wrong say all day, as templates: single samples at the edge of what is normal, kernel lines that mean
nothing or that a program's own crash leaves behind, links that flap once.

Rates are NVSentinel's of a fleet of 1,173 nodes: 0.025 to 0.030 events a node and second beside heartbeats.
"""

from __future__ import annotations

from random import Random
from typing import Any

from events.gpu import Gpu, GpuSample, GpuWatch
from events.hardware import EvidenceGap, KernelLog, KernelRecord
from events.host import Folder, HostSample
from events.network import LinkChanged, LinkSample, LinkTraffic, NicSample
from events.presence import AgentState
from tests.simulation.world import Template

AMBIENT_PER_NODE_S = 0.0275
GPUS = 8
LINKS = tuple(f"mlx5_{i}/1" for i in range(8))
DAY_S = 86_400.0

#: Lines of healthy kernels: what drivers say when they load, when processes end, when links train, when errors were corrected.
HARMLESS = (
    "nvidia-nvlink: Nvlink Core is being initialized, major device number 234",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
    "nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  570.86.15",
    "nvidia 0000:3b:00.0: enabling device (0140 -> 0142)",
    "nvidia-uvm: Loaded the UVM driver, major device number 510.",
    "mlx5_core 0000:9c:00.0: firmware version: 28.39.1002",
    "mlx5_core 0000:9c:00.0: 252.048 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x8 link)",
    "mlx5_core 0000:9c:00.0 ens3: Link up",
    "IPv6: ADDRCONF(NETDEV_CHANGE): ens3: link becomes ready",
    "pcieport 0000:37:01.0: AER: Corrected error received: 0000:3b:00.0",
    "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1b5b2 offset:0x0 grain:32)",
    "mce: [Hardware Error]: Machine check events logged",
    "perf: interrupt took too long (2503 > 2500), lowering kernel.perf_event_max_sample_rate to 79750",
    "python[81231]: segfault at 0 ip 00007f2c3a1b2c3d sp 00007ffd9c0b1a28 error 4 in libc.so.6[7f2c3a000000+195000]",
    "TCP: request_sock_TCP: Possible SYN flooding on port 29500. Sending cookies.",
    "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.",
    "nfs: server storage-3 not responding, still trying",
    "nfs: server storage-3 OK",
    "workqueue: blk_mq_run_work_fn hogged CPU for >10000us 4 times, consider switching to WQ_UNBOUND",
    "systemd-journald[812]: Data hash table of /run/log/journal/x/system.journal has a fill level at 75.0",
    "docker0: port 1(veth3a) entered blocking state",
    "audit: type=1400 audit(1712.1:4): apparmor=\"STATUS\" operation=\"profile_load\"",
    "clocksource: timekeeping watchdog on CPU12: Marking clocksource 'tsc' as unstable because the skew is too large:",
    "Memory cgroup out of memory: Killed process 4411 (jupyter-lab) total-vm:81234kB, anon-rss:7123kB, file-rss:0kB",
)  # fmt: skip
XID_13 = "NVRM: Xid (PCI:0000:%s:00): 13, pid=%d, name=python3, Graphics SM Warp Exception on (GPC 1, TPC 0, SM 1): Out Of Range Address"
XID_31 = "NVRM: Xid (PCI:0000:%s:00): 31, pid=%d, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_0 faulted @ 0x7f9e_4a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
XID_43 = "NVRM: Xid (PCI:0000:%s:00): 43, pid=%d, name=python3, Ch 00000010"
XID_45 = "NVRM: Xid (PCI:0000:%s:00): 45, pid=%d, name=python3, Ch 0000001%d"
BUSES = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")


def kernel(*lines: str) -> Template:
    return Template(KernelLog(records=tuple(KernelRecord(text=line) for line in lines)), "kernel_log")


def gpu_sample(chance: Random, *, up_s: float = 9e5, links_down: bool = False, hot: int = -1, lost: bool = False) -> Template:
    """A sample of eight GPUs under load: power caps, corrected errors, sync boost; `hot`: one that the hardware slows down just now."""
    gpus = tuple(
        Gpu(
            index=i, address=f"0000:{BUSES[i]}:00.0", uuid=f"GPU-@node@-{i}", serial=f"16@node@{i}", model="H100",
            utilization_percent=chance.choice((0.0, 97.0, 100.0)), tensor_percent=chance.uniform(20, 60), power_w=chance.uniform(90, 700),
            temperature_celsius=chance.uniform(40, 86), slowdown_celsius=92.0, sm_clock_mhz=chance.choice((345, 1410, 1755, 1980)),
            sm_clock_max_mhz=1980, clock_reasons=("hw_thermal",) if i == hot else chance.choice(((), ("power_cap",), ("idle",), ("sw_thermal",))),
            ecc_corrected_volatile=chance.randrange(400), ecc_uncorrected_volatile=0, ecc_uncorrected_aggregate=0,
            remapped_corrected=chance.choice((0, 0, 1)), remap_pending=False, remap_failed=False, recovery_action="none",
            links_active=() if links_down else tuple(range(18)), links_inactive=tuple(range(18)) if links_down else (),
            pcie_width=chance.choice((16, 16, 16, 8)) if up_s < 300 else 16, pcie_width_max=16, pcie_replays=chance.randrange(5),
        )
        for i in range(GPUS - lost)
    )  # fmt: skip
    return Template(GpuSample(interval_s=10, up_s=up_s, driver="570.86.15", on_bus=GPUS, gpus=gpus), "gpu")


def watch(state: Any, **more: Any) -> Template:
    return Template(GpuWatch(state=state, **more), "gpu")


def nic_sample(chance: Random, *, up_s: int = 900_000, state: Any = "up") -> Template:
    """Counters that rise below their limits."""
    links = tuple(
        LinkSample(
            device=device, layer="InfiniBand", state=state, rate_mbps=400_000 if state == "up" else -1, rate_full_mbps=400_000,
            sent_bytes_per_s=chance.uniform(0, 4e10), received_bytes_per_s=chance.uniform(0, 4e10),
            counted=chance.choice(((), (), (), (("symbol_error", 1),), (("link_error_recovery", 1),), (("port_rcv_errors", 3),))),
        )
        for device in LINKS
    )  # fmt: skip
    return Template(NicSample(period_s=30, since_boot_s=up_s, links=links), "nic")


def traffic(job: str, bytes_per_s: float) -> Template:
    return Template(LinkTraffic(period_s=30, bytes_per_s=bytes_per_s, links=8), "nic", job)


def link(device: str, state: Any, *, up_s: int = 900_000) -> Template:
    before: Any = "up" if state != "up" else "down"
    fact = LinkChanged(device=device, state=state, before=before, downs=int(state != "up"), since_boot_s=up_s)
    return Template(fact, "nic")


def host_sample(chance: Random, *, up_s: float = 9e5, **more: Any) -> Template:
    """Pressures of a machine at work: data loaders wait for processors now and then, the page cache is full, one sample may peak."""
    values: dict[str, Any] = {
        "load1": chance.uniform(20, 180), "cpu_pressure": chance.choice((1.0, 20.0, 45.0, 60.0, 93.0 if chance.random() < 0.1 else 30.0)),
        "memory_pressure_full": chance.choice((0.0, 0.0, 2.0, 9.0)), "oom_kills": int(chance.random() < 0.01), "clock_offset_s": chance.gauss(0, 0.002),
    } | more  # fmt: skip
    folders = (
        Folder(path="/ckpt", use="checkpoints", filesystem="lustre", total_bytes=10**15, free_bytes=int(10**15 * chance.uniform(0.04, 0.6)), was_writable=True, inodes_free=0.4),
        Folder(path="/tmp", use="temporary", filesystem="ext4", local=True, total_bytes=10**12, free_bytes=int(10**12 * chance.uniform(0.05, 0.9)), was_writable=True,
               hung_s=chance.choice((0.0, 0.0, 0.0, 6.0))),
    )  # fmt: skip
    fact = HostSample(
        interval_s=10, up_s=up_s, cpus=192, memory_total_bytes=2 * 10**12, memory_available_bytes=int(2e11), folders=folders,
        clock_error_s=0.01, clock_synchronised=True, **values,
    )  # fmt: skip
    return Template(fact, "host")


def ambient(chance: Random) -> list[Template]:
    """A few hundred different ones, in the shares in which they come: draw one at random for each event."""
    made: list[Template] = []
    for _ in range(60):
        some = [chance.choice(HARMLESS) for _ in range(chance.choice((1, 1, 2, 5)))]
        made += [kernel(*some)] * 4
    made += [gpu_sample(chance) for _ in range(10)]
    made += [nic_sample(chance) for _ in range(50)] + [host_sample(chance) for _ in range(60)]
    # Other people's programs, on the same machines.
    made += [kernel(xid % (chance.choice(BUSES), 4000 + chance.randrange(999))) for xid in (XID_13, XID_31, XID_43)]
    made.append(kernel(*(XID_45 % (bus, 4321, i) for i, bus in enumerate(BUSES[:3]))))
    made.append(Template(EvidenceGap(producer="kernel_log", reason="overrun", missing=12), "kernel_log"))
    made.append(Template(AgentState(producer="nvml", state="skipped", detail="took 1.2 s"), "agent"))
    return made
