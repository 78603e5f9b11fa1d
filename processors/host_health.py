"""What is wrong with a host, by its own samples: room, mounts, memory, processors, stuck ranks, its clock; and what its last boot left.
A part of the detector "node". Pure.

Standing trouble is claimed once when it begins and cleared when it is over; killed processes are claimed as they come. All of it is
of low confidence but for a local file system that took itself out of service: that names its machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from events.clock import NS
from events.envelope import NAME_MAX, Fact
from events.host import Folder, HostSample, LastBoot, StuckRank
from events.incident import Confidence, EvidenceMissing, Signal, SignalCleared, Symptom
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.policy import Host

GIB = 1 << 30
#: What is counted here is below it; a larger number is nonsense, and no float could hold it.
COUNT_MAX = 1 << 63
STANDING_MAX = 32
#: Killed processes are told of this often at most; the next telling counts them all.
KILLS_APART_NS = 60 * NS

#: The kernel function that a rank sleeps in -> what that speaks of. First match.
SLEEPS: tuple[tuple[re.Pattern[str], Symptom], ...] = (
    (re.compile(r"nfs|rpc_|ll_|cl_|ptlrpc|ldlm|ceph|gpfs|cxi|fuse|cifs|beegfs", re.IGNORECASE), "fs_mount"),
    (re.compile(r"\bnv|nvidia|uvm_|os_acquire|rm_ioctl", re.IGNORECASE), "gpu_driver_hang"),
    (re.compile(r"\bib_|mlx5|rdma|ucma", re.IGNORECASE), "ib_error"),
    (
        re.compile(r"io_schedule|blk_|bio_|jbd2|xfs_|ext4_|btrfs_|folio_wait|wait_on_page|rq_qos", re.IGNORECASE),
        "storage_error",
    ),
)


class Trouble(NamedTuple):
    """Something that holds now. `device`: a path, or ''; with `rule` it names the trouble."""

    symptom: Symptom
    rule: str
    device: str
    evidence: str
    confidence: Confidence = "low"
    rank: int = -1


class Standing(NamedTuple):
    """A trouble that was claimed and is not over."""

    symptom: Symptom
    rule: str
    device: str
    since_ns: int


class HostState(NamedTuple):
    """`busy`: samples in a row above the processors' limit. `kills`: processes killed and not told of yet."""

    node: str = ""
    last_id: str = ""
    seen_ns: int = 0
    standing: tuple[Standing, ...] = ()
    busy: int = 0
    kills: int = 0
    kills_told_ns: int = 0
    clock_noted: bool = False


class HostHealth:
    """`host` of the settings."""

    name = "host"
    reads: frozenset[type[Fact]] | None = frozenset((HostSample, LastBoot))

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> HostState:
        return HostState(key)

    def dump(self, state: HostState) -> Any:
        value = {name: own for name, own, none in zip(state._fields, state, HostState(), strict=True) if own != none}
        if state.standing:
            value["standing"] = [list(one) for one in state.standing]
        return value

    def load(self, key: str, value: Any) -> HostState:
        standing = tuple(Standing(*one) for one in value.get("standing", ()))
        return HostState(**{**value, "standing": standing})

    def detect(self, state: HostState, clock: PartitionClock, seen: Seen) -> tuple[HostState, tuple[Claim, ...]]:
        data = seen.event.data
        if isinstance(data, LastBoot):
            return state, _last_boot(seen, data)
        if seen.event.id == state.last_id or seen.seen_ns < state.seen_ns:
            return state, ()  # told twice, or overtaken by a later one
        limits = clock.settings.host
        busy = state.busy + 1 if _busy(data, limits) else 0
        state = state._replace(last_id=seen.event.id, seen_ns=seen.seen_ns, busy=min(busy, limits.cpu_samples))
        claims: list[Claim] = []
        state = _stand(state, seen, data, limits, claims)
        state = _kills(state, seen, data, limits, claims)
        return _clock(state, seen, data, limits, claims), tuple(claims)


# --- standing trouble ---------------------------------------------------------------------------------------------------------


def _stand(state: HostState, seen: Seen, data: HostSample, limits: Host, claims: list[Claim]) -> HostState:
    job, attempt, causes = seen.event.job, seen.event.attempt, (seen.event.id,)
    known = {(one.rule, one.device): one for one in state.standing}
    found = {(one.rule, one.device): one for one in troubles(state, data, limits, known.__contains__)}
    kept = [one for key, one in known.items() if key in found]
    over = [one for key, one in known.items() if key not in found]
    for key, one in found.items():
        if key not in known and len(kept) < STANDING_MAX:
            kept.append(Standing(one.symptom, one.rule, one.device, seen.seen_ns))
            signal = Signal(
                symptom=one.symptom,
                node=state.node,
                rank=one.rank,
                device=one.device[:NAME_MAX],
                confidence=one.confidence,
                rule=one.rule,
                evidence=quote(one.evidence),
                seen_ns=seen.seen_ns,
            )
            claims.append(Claim(job, attempt, signal, causes))
    still = {one.symptom for one in kept}
    for past in over:
        if past.symptom not in still:
            still.add(past.symptom)  # one clear a symptom
            text = f"{past.rule} {past.device} is over after {(seen.seen_ns - past.since_ns) / NS:.0f} s".replace("  ", " ")
            cleared = SignalCleared(symptom=past.symptom, node=state.node, seen_ns=seen.seen_ns, evidence=quote(text))
            claims.append(Claim(job, attempt, cleared, causes))
    return state._replace(standing=tuple(kept)) if over or len(kept) != len(state.standing) else state


Holds = Callable[[tuple[str, str]], bool]


def troubles(state: HostState, data: HostSample, limits: Host, holds: Holds) -> Iterator[Trouble]:
    """What holds now. `holds((rule, device))`: it is claimed already, so the milder limit of its end counts."""
    young = data.up_s < limits.boot_grace_s
    for folder in data.folders:
        yield from _folder(folder, limits, young, holds)
    if young:
        return
    for rank in data.stuck:
        if rank.for_s >= limits.stuck_rank_s:
            yield _stuck(rank)
    if state.busy >= limits.cpu_samples:
        what = f"load {data.load1:g}" if data.cpu_pressure is None else f"tasks waited {data.cpu_pressure:g}% of 10 s"
        text = f"no processor to be had on {data.cpus} CPUs: {what}, in {state.busy} samples in a row"
        yield Trouble("cpu_overload", "cpu_pressure", "", text)
    full = data.memory_pressure_full
    if full is not None and full >= limits.memory_pressure_full_max * (
        limits.memory_clear_share if holds(("memory_pressure", "")) else 1
    ):
        left = f", {_size(data.memory_available_bytes)} available" if data.memory_available_bytes >= 0 else ""
        yield Trouble("host_oom", "memory_pressure", "", f"all tasks waited for memory {full:g}% of 10 s{left}")


def _folder(folder: Folder, limits: Host, young: bool, holds: Holds) -> Iterator[Trouble]:
    place = f"{folder.path} ({folder.use}; {folder.filesystem or 'unknown file system'} on {folder.mount or '?'})"
    if folder.hung_s:
        if folder.hung_s >= limits.folder_hung_s and not young:
            text = f"{place} answers nothing for {folder.hung_s:.0f} s: whoever reads there hangs"
            yield Trouble("fs_mount", "folder_hung", folder.path, text)
        return  # the rest is of before
    if folder.read_only == "error":
        sure = folder.local and folder.was_writable
        text = f"{place} took itself out of service: it is read-only though it is mounted to be written to"
        text += "" if folder.was_writable else ", and was so when it was first looked at"
        yield Trouble("fs_mount", "folder_failed", folder.path, text, "high" if sure else "low")
    elif folder.read_only and folder.was_writable:
        yield Trouble("fs_mount", "folder_read_only", folder.path, f"{place} was writable and is mounted read-only now")
    total = min(folder.total_bytes, COUNT_MAX)
    if folder.read_only or total <= 0:
        return
    factor = limits.clear_factor if holds(("folder_full", folder.path)) else 1.0
    least = limits.disk_free_gib_min * GIB
    short = folder.free_bytes < limits.disk_free_share_min * factor * total
    short = short or (total >= limits.disk_size_factor * least and folder.free_bytes < least * factor)
    if short:
        text = f"{place} has {_size(folder.free_bytes)} of {_size(folder.total_bytes)} free"
        yield Trouble("disk_space", "folder_full", folder.path, text)
    factor = limits.clear_factor if holds(("folder_inodes", folder.path)) else 1.0
    if folder.inodes_free is not None and folder.inodes_free < limits.inodes_free_share_min * factor:
        yield Trouble("disk_space", "folder_inodes", folder.path, f"{place} has {folder.inodes_free:.2%} of its inodes free")


def _stuck(rank: StuckRank) -> Trouble:
    symptom: Symptom = next((symptom for pattern, symptom in SLEEPS if pattern.search(rank.where)), "unknown")
    where = f" in {rank.where}" if rank.where else ", where this agent may not see"
    text = f"rank {rank.rank} (pid {rank.pid}) has been in uninterruptible sleep for {rank.for_s:.0f} s{where}"
    return Trouble(symptom, "rank_stuck", f"pid {rank.pid}", text, rank=rank.rank)


def _busy(data: HostSample, limits: Host) -> bool:
    if data.up_s < limits.boot_grace_s:
        return False
    if data.cpu_pressure is not None:
        return data.cpu_pressure >= limits.cpu_pressure_max
    return data.load1 is not None and data.load1 >= limits.load_per_cpu_max * min(data.cpus, COUNT_MAX)


# --- what happens, and what is not known --------------------------------------------------------------------------------------


def _kills(state: HostState, seen: Seen, data: HostSample, limits: Host, claims: list[Claim]) -> HostState:
    """Processes killed for memory. On a shared machine most are none of the job's: only together with a rank's end, with the agent's
    own control group, or with pressure they are a claim."""
    kills = state.kills + max(data.oom_kills, data.group_oom_kills)
    if not kills:
        return state
    full = data.memory_pressure_full
    pressed = full is not None and full >= limits.memory_pressure_full_max
    if not (data.ranks_ended or data.group_oom_kills or pressed):
        # A rank's end may be in the next sample; older ones are let go.
        return state._replace(kills=max(data.oom_kills, data.group_oom_kills))
    if state.kills_told_ns and seen.seen_ns - state.kills_told_ns < KILLS_APART_NS and not data.ranks_ended:
        return state._replace(kills=kills)
    ranks = ", ".join(map(str, data.ranks_ended[:8]))
    text = f"the kernel killed {kills} processes for memory" if kills > 1 else "the kernel killed a process for memory"
    text += f" ({data.group_oom_kills} in the agent's control group)" if data.group_oom_kills else ""
    text += f", and ranks ended: {ranks}" if ranks else ""
    if data.memory_available_bytes >= 0:
        text += f"; {_size(data.memory_available_bytes)} of {_size(data.memory_total_bytes)} available after it"
    signal = Signal(
        symptom="host_oom",
        node=state.node,
        rank=max(-1, data.ranks_ended[0]) if len(data.ranks_ended) == 1 else -1,
        confidence="low",
        rule="oom_kill",
        evidence=quote(text),
        seen_ns=seen.seen_ns,
        count=kills,
    )
    claims.append(Claim(seen.event.job, seen.event.attempt, signal, (seen.event.id,)))
    return state._replace(kills=0, kills_told_ns=seen.seen_ns)


def _clock(state: HostState, seen: Seen, data: HostSample, limits: Host, claims: list[Claim]) -> HostState:
    """A clock that is off is no trouble of the job's; but times of this node then say little."""
    if data.clock_synchronised is None or data.up_s < limits.boot_grace_s:
        return state
    off = data.clock_offset_s is not None and abs(data.clock_offset_s) > limits.clock_offset_s_max
    wrong = off or not data.clock_synchronised
    if wrong and not state.clock_noted:
        error = f", right to within {data.clock_error_s:g} s" if data.clock_error_s is not None else ""
        text = f"the clock is off by {data.clock_offset_s:+.3f} s" if off else f"nothing keeps the clock right{error}"
        missing = EvidenceMissing(node=state.node, producer="host", reason="clock", detail=text)
        claims.append(Claim(seen.event.job, seen.event.attempt, missing, (seen.event.id,)))
    return state if wrong == state.clock_noted else state._replace(clock_noted=wrong)


def _last_boot(seen: Seen, data: LastBoot) -> tuple[Claim, ...]:
    """A panic before this boot explains a reboot. It is history: the machine runs again, so nothing is certain of it now."""
    if not data.panic:
        return ()
    when = f"{data.age_s / 3600:.1f} h before it was read" if data.age_s >= 0 else "at an unknown time"
    signal = Signal(
        symptom="os_kernel_panic",
        node=seen.node,
        confidence="low",
        rule="last_boot_panic",
        evidence=quote(f"history, of an earlier boot, {when} ({data.source[:200]}): {data.text}"),
        seen_ns=seen.seen_ns,
    )
    return (Claim(seen.event.job, seen.event.attempt, signal, (seen.event.id,)),)


def _size(count: float) -> str:
    count = max(-COUNT_MAX, min(count, COUNT_MAX))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError
