"""What is wrong with a node's GPUs and their driver. A part of the detector "node". Pure.

It remembers each GPU that it has seen, so that one that is gone is missed, also by an agent that was started later. What may flap
must last for some samples; what lasts is told again after `repeat_s` and to each new attempt, since who runs there may be new; what
is over is told once nothing of its symptom is left. In the first minutes after a boot nothing of low confidence is raised.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from events.clock import NS
from events.envelope import NAME_MAX, Fact
from events.gpu import GPUS_MAX, Gpu, GpuSample, GpuWatch, GpuXid
from events.hardware import KernelLog
from events.incident import Confidence, Signal, SignalCleared, Symptom
from processors.catalogue import Catalogue, pci_address
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.gpu_rules import RULES, Grown, Rule
from processors.gpu_state import XIDS_MAX, GpuState, Run, View, Xid
from processors.policy import GpuLimits

#: Xids of a driver that waits for its GPU's firmware: 119 GSP_RPC_TIMEOUT, 120 GSP_ERROR (NVIDIA's workbook).
HANG_XIDS = frozenset({119, 120})
#: NVML's codes for a GPU that this user may not ask; it is there.
_NOT_ALLOWED = (4, 17)
_XID = re.compile(r"(?<![A-Za-z])Xid \((?P<device>[^)]{4,40})\): (?P<xid>\d{1,6})(?!\d)")


#: What the kernel says while NVIDIA's driver is loaded or unloaded.
_LOADS = re.compile(
    r"NVRM: loading NVIDIA|nvidia-uvm: (?:Loaded|Unloaded)|nvidia-modeset: (?:Loading|Unloading)"
    r"|nvidia-nvlink: (?:Nvlink Core is being initialized|Unregistered)"
)
#: Words that a line of interest holds; most lines hold none.
_WORDS = ("Xid", "NVRM", "nvidia-")


_ADAPTER: TypeAdapter[GpuState] = TypeAdapter(GpuState)


class GpuHealth:
    """`gpu` of the settings; the catalogue, for Xids that NVML tells of."""

    name = "gpu"
    reads: frozenset[type[Fact]] | None = frozenset({GpuSample, GpuWatch, GpuXid, KernelLog})

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> GpuState:
        return GpuState(key)

    def dump(self, state: GpuState) -> Any:
        return _ADAPTER.dump_python(state, mode="json", exclude_defaults=True)

    def load(self, key: str, value: Any) -> GpuState:
        return _ADAPTER.validate_python(value)

    def detect(self, state: GpuState, clock: PartitionClock, seen: Seen) -> tuple[GpuState, tuple[Claim, ...]]:
        data = seen.event.data
        if type(data) is KernelLog:
            if not any(word in record.text for record in data.records for word in _WORDS):
                return state, ()
            return _Fold(state, clock, seen).kernel(data)
        if type(data) is not GpuXid and seen.seen_ns < state.seen_ns:
            return state, ()  # overtaken: counters that fall back are no new driver, and an old answer is none now
        fold = _Fold(state, clock, seen)
        if type(data) is GpuSample:
            return fold.sample(data)
        if type(data) is GpuWatch:
            return fold.watch(data)
        return fold.xid(data, self.catalogue)


class _Fold:
    """One observation folded: lives for one call of `detect`."""

    def __init__(self, state: GpuState, clock: PartitionClock, seen: Seen) -> None:
        self.state = state
        self.limits: GpuLimits = clock.settings.gpu
        self.seen = seen
        self.claims: list[Claim] = []
        self.ended: set[Symptom] = set()

    def done(self, state: GpuState) -> tuple[GpuState, tuple[Claim, ...]]:
        standing = {run.symptom for runs in (state.runs, *(v.runs for v in state.views)) for run in runs if run.told_ns}
        for symptom in sorted(self.ended - standing):
            text = "no GPU of this node shows it any more"
            self._claim(SignalCleared(symptom=symptom, node=self.seen.node, seen_ns=self.seen.seen_ns, evidence=text))
        if state == self.state:
            return self.state, tuple(self.claims)
        if type(self.seen.event.data) in (GpuSample, GpuWatch):
            state = state._replace(seen_ns=self.seen.seen_ns)
        return state, tuple(self.claims)

    def _claim(self, fact: Fact) -> None:
        event = self.seen.event
        self.claims.append(Claim(event.job, event.attempt, fact, (event.id,)))

    def _signal(self, symptom: Symptom, confidence: Confidence, rule: str, device: str, text: str) -> None:
        self._claim(
            Signal(
                symptom=symptom, node=self.seen.node, device=device[:NAME_MAX], confidence=confidence, rule=rule, evidence=quote(text),
                seen_ns=self.seen.seen_ns,
            )
        )  # fmt: skip

    def _step(
        self, runs: tuple[Run, ...], rule: str, symptom: Symptom, confidence: Confidence, device: str, text: str, samples: int,
        over: bool = True,
    ) -> tuple[Run, ...]:  # fmt: skip
        """One rule on one sample: `text` says what is wrong, '' nothing."""
        run = next((r for r in runs if r.rule == rule), None)
        if run is None and not text:
            return runs
        others = tuple(r for r in runs if r.rule != rule)
        event, seen_ns = self.seen.event, self.seen.seen_ns
        if run is not None and (event.id == run.last_id or seen_ns < run.last_ns):
            return runs  # told twice, or overtaken by a later one
        if not text:
            assert run is not None
            if not run.told_ns:
                return others
            gone = min(0, run.samples) - 1
            if -gone < samples:
                return (*others, run._replace(samples=gone, last_id=event.id, last_ns=seen_ns))
            if run.over:
                self.ended.add(run.symptom)
            return others
        run = run or Run(rule, symptom, over=over)
        on_end = (
            run.told_ns
            or not isinstance(event.data, GpuSample)
            or seen_ns - run.last_ns <= self.limits.on_end_intervals * event.data.interval_s * NS
        )
        before = max(0, run.samples) if on_end else 0
        run = run._replace(samples=min(samples, before + 1), last_id=event.id, last_ns=seen_ns)
        now_ns = self.seen.time_ns
        late = now_ns - self.seen.seen_ns >= int(self.limits.late_s * NS)
        again = (
            now_ns - run.told_ns >= int(self.limits.repeat_s * NS)
            or (run.job, run.attempt) != (event.job, event.attempt)
            or (run.late and not late)
        )
        if run.samples >= samples and (not run.told_ns or again):
            self._signal(symptom, confidence, rule, device, text)
            run = run._replace(told_ns=now_ns, job=event.job, attempt=event.attempt, late=late)
        return (*others, run)

    # --- a sample -----------------------------------------------------------------------------------------------------------

    def sample(self, data: GpuSample) -> tuple[GpuState, tuple[Claim, ...]]:
        state = self.state
        boot = self.seen.event.bootid
        rebooted = boot != state.boot
        grace = data.up_s < self.limits.boot_grace_s
        runs = state.runs
        for run in state.runs:  # it answers: neither hung nor gone
            runs = self._step(runs, run.rule, run.symptom, "low", "", "", 1)
        there = {_key(gpu): gpu for gpu in data.gpus}
        views = []
        for view in self._expected(there, data, rebooted):
            gpu = there.pop(view.key, None)
            if gpu is None:
                views.append(self._missing(view, data, rebooted))
            else:
                views.append(self._present(view, gpu, grace, rebooted, data.interval_s))
        views += [self._present(View(key), gpu, grace, True, data.interval_s) for key, gpu in sorted(there.items())]
        views += self._never_seen(data, views)
        return self.done(
            GpuState(state.node, boot, tuple(views[:GPUS_MAX]), runs, 0, state.xids, state.seen_ns, state.loaded_ns)
        )

    def _expected(self, there: dict[str, Gpu], data: GpuSample, rebooted: bool) -> list[View]:
        """The GPUs that should be there. As many as before after a reboot, but others: cards were changed. One that was only known by
        its index has a name of its own once it is reached."""
        views = list(self.state.views)
        reached = {gpu.index for gpu in data.gpus}
        gone = [v for v in views if v.key not in there and v.key.startswith("index ") and v.at in reached]
        if rebooted and len(there) >= len(views) - len(gone):
            gone = [v for v in views if v.key not in there]
        self.ended |= {run.symptom for v in gone for run in v.runs if run.told_ns and run.over}
        return [v for v in views if v not in gone]

    def _missing(self, view: View, data: GpuSample, rebooted: bool) -> View:
        lost = next((one for one in data.lost if one.uuid == view.key or (view.address and one.address == view.address)), None)
        if lost is None:
            lost = next((one for one in data.lost if not one.uuid and (not view.address or one.index == view.at)), None)
        if lost is not None and lost.code in _NOT_ALLOWED:
            return view
        if self._loading():  # they come one by one
            return view
        why = f"NVML can't reach it any more: {lost.error}" if lost else "NVML does not list it any more"
        known = f", serial number {view.serial}" if view.serial else ""
        held = f"; the kernel's driver holds {data.on_bus}" if data.on_bus >= 0 else ""
        text = f"GPU {view.at} ({view.device}{known}) is gone. {why}. {len(data.gpus)} GPUs answer{held}"
        old = next((run for run in view.runs if run.rule == "gpu_lost"), None)
        # After a reboot one that is not listed may still come.
        waited = lost is None and (rebooted or (old is not None and not old.told_ns))
        runs = self._step(view.runs, "gpu_lost", "gpu_unavailable", "high", view.device, text, 2 if waited else 1)
        return view._replace(runs=runs)

    def _never_seen(self, data: GpuSample, views: list[View]) -> list[View]:
        """GPUs that NVML counts, that can't be reached and never were: the node is a GPU short all the same."""
        new: list[View] = []
        named = {view.at for view in views} | {view.key for view in views}
        for one in data.lost:
            view = View(one.uuid or one.address or f"index {one.index}", one.index, one.address)
            if not named.intersection(view[:2]) and len(views) + len(new) < GPUS_MAX:
                new.append(self._missing(view, data, False))
        return [view for view in new if view.runs]

    def _present(self, view: View, gpu: Gpu, grace: bool, rebooted: bool, interval_s: float) -> View:
        """`rebooted`: its counters begin anew."""
        links = () if rebooted else view.links
        active = frozenset(gpu.links_active or ())
        crc = min(sum(one.crc for one in gpu.link_errors), 1 << 63)  # a larger number is nonsense, and no float could hold it
        errors = sum(one.replays + one.recoveries + one.fatal for one in gpu.link_errors)
        compare = not rebooted and view.link_errors >= 0
        grown = Grown(
            tuple(link for link in links if link in (gpu.links_inactive or ())),
            max(0, errors - view.link_errors) if compare else 0,
            max(0, crc - view.link_crc) / interval_s if compare else 0.0,
        )
        runs = self._step(view.runs, "gpu_lost", "gpu_unavailable", "high", "", "", 1)
        name = f"GPU {gpu.index} ({gpu.address or view.key}, serial number {gpu.serial or 'unknown'})"
        for rule in RULES:
            runs = self._rule(runs, rule, gpu, grown, name, grace)
        view = View(
            view.key, gpu.index, gpu.address, gpu.serial, view.ecc_volatile, view.ecc_aggregate, view.ecc_told_ns,
            tuple(sorted(active.union(links))), errors, crc, runs,
        )  # fmt: skip
        return self._ecc(view, gpu, name, rebooted)

    def _rule(self, runs: tuple[Run, ...], rule: Rule, gpu: Gpu, grown: Grown, name: str, grace: bool) -> tuple[Run, ...]:
        wrong = rule.wrong(gpu, grown, self.limits)
        if wrong and grace and rule.confidence == "low":
            return runs
        samples: int = getattr(self.limits, rule.samples) if rule.samples else 1
        text = f"{name}: {wrong}" if wrong else ""
        return self._step(runs, rule.name, rule.symptom, rule.confidence, gpu.address, text, samples, rule.over)

    def _ecc(self, view: View, gpu: Gpu, name: str, rebooted: bool) -> View:
        """Uncorrectable errors since they were last told of. The volatile counter starts at zero when the driver is loaded, so what it
        shows after a reboot is new, unless this GPU was never seen before."""
        volatile = gpu.ecc_uncorrected_volatile
        aggregate = gpu.ecc_uncorrected_aggregate
        before = 0 if rebooted and view.ecc_volatile >= 0 else view.ecc_volatile
        if volatile is not None and volatile < before:
            before = 0  # the driver was loaded anew
        more = volatile - before if volatile is not None and before >= 0 else 0
        more_ever = aggregate - view.ecc_aggregate if aggregate is not None and view.ecc_aggregate >= 0 else 0
        if more <= 0 and more_ever <= 0:
            return view._replace(
                ecc_volatile=view.ecc_volatile if volatile is None else volatile,
                ecc_aggregate=view.ecc_aggregate if aggregate is None else aggregate,
            )
        if view.ecc_told_ns and self.seen.time_ns - view.ecc_told_ns < int(self.limits.ecc_repeat_s * NS):
            return view._replace(ecc_volatile=before) if before >= 0 else view
        text = (
            f"{name}: {max(more, more_ever)} more uncorrectable memory errors; now {_told(volatile)} since the driver was loaded, "
            f"{_told(aggregate)} over its life"
        )
        self._signal("gpu_memory_error", "high", "gpu_ecc_uncorrected", gpu.address, text)
        return view._replace(
            ecc_volatile=view.ecc_volatile if volatile is None else volatile,
            ecc_aggregate=view.ecc_aggregate if aggregate is None else aggregate,
            ecc_told_ns=self.seen.time_ns,
        )

    # --- the driver -----------------------------------------------------------------------------------------------------------

    def watch(self, data: GpuWatch) -> tuple[GpuState, tuple[Claim, ...]]:
        state = self.state
        if data.state == "missed":
            device = data.address or (state.xids[-1].device if self._hang_xid(state) else "")
            runs = self._hung(state, state.runs, data.misses, data, device)
            return self.done(state._replace(misses=data.misses, runs=runs))
        runs = state.runs
        if data.state == "watching":
            for run in state.runs:
                runs = self._step(runs, run.rule, run.symptom, "low", "", "", 1)
        elif data.state in ("no_driver", "refused"):
            settled = data.up_s >= self.limits.boot_grace_s  # before, it may still come
            if settled and state.views and self.seen.event.bootid == state.boot:
                text = f"the driver of {len(state.views)} GPUs that answered in this boot can't be asked now: {data.detail}"
                runs = self._step(runs, "gpu_driver_gone", "gpu_unavailable", "low", "", text, 1)
        return self.done(state._replace(misses=0, runs=runs))

    def _hung(self, state: GpuState, runs: tuple[Run, ...], misses: int, data: GpuWatch | None, device: str) -> tuple[Run, ...]:
        """A hang is claimed on two kinds of evidence together: answers that do not come, since initialisation, a change of MIG and a
        reset are slow as well, and a process in uninterruptible sleep or the driver's own word of it."""
        if misses < self.limits.driver_misses:
            return runs
        why = []
        loading = self._loading()  # whoever asks waits uninterruptibly for that
        if data is not None and data.process_state == "D" and not loading:
            why.append(f"the process that asks is in uninterruptible sleep{f' in {data.waits_in}' if data.waits_in else ''}")
        if data is not None and data.ranks_stuck and not loading:
            ranks = ", ".join(map(str, data.ranks_stuck[:8]))
            why.append(f"ranks in uninterruptible sleep: {ranks}{' …' if len(data.ranks_stuck) > 8 else ''}")
        xid = self._hang_xid(state)
        if xid is not None and xid.seen_ns >= state.loaded_ns:
            ago_s = max(0, self.seen.seen_ns - xid.seen_ns) / NS
            why.append(f"Xid {xid.xid} of {xid.device or 'a GPU'} {ago_s:.0f} s ago")
        if not why:
            return runs
        text = f"{misses} questions on end to the NVIDIA driver were not answered; " + "; ".join(why)
        return self._step(runs, "gpu_driver_hang", "gpu_driver_hang", "high", device, text, 1)

    def _loading(self) -> bool:
        """Whether the driver was loaded or unloaded just now."""
        loaded_ns = self.state.loaded_ns
        return bool(loaded_ns) and self.seen.seen_ns - loaded_ns < int(self.limits.load_grace_s * NS)

    def _hang_xid(self, state: GpuState) -> Xid | None:
        since_ns = self.seen.seen_ns - int(self.limits.hang_xid_window_s * NS)
        found = [xid for xid in state.xids if xid.xid in HANG_XIDS and xid.seen_ns >= since_ns]
        return found[-1] if found else None

    # --- Xids -----------------------------------------------------------------------------------------------------------------

    def kernel(self, data: KernelLog) -> tuple[GpuState, tuple[Claim, ...]]:
        state = self.state
        for record in data.records:
            if _LOADS.search(record.text) and not (record.history or record.hearsay):
                state = state._replace(loaded_ns=max(state.loaded_ns, self.seen.seen_ns))
            match = _XID.search(record.text) if "Xid" in record.text and not (record.history or record.hearsay) else None
            if match:
                device = pci_address(match["device"].split(" ")[0])
                state = self._noted(state, Xid(int(match["xid"]), device, self.seen.seen_ns))
        return self._perhaps_hung(state)

    def xid(self, data: GpuXid, catalogue: Catalogue) -> tuple[GpuState, tuple[Claim, ...]]:
        xid = Xid(data.xid, data.address or data.uuid, self.seen.seen_ns)
        heard = self._heard(self.state, xid)
        finding = None if heard else catalogue.classify(f"NVRM: Xid (PCI:{data.address}): {data.xid}, told by NVML")
        if finding and finding.row.confidence != "sympathetic":
            text = f"NVML tells of Xid {data.xid} on GPU {xid.device or 'unknown'}"
            self._signal(finding.row.symptom, finding.row.confidence, finding.row.id, xid.device, text)
        return self._perhaps_hung(self._noted(self.state, xid))

    def _perhaps_hung(self, state: GpuState) -> tuple[GpuState, tuple[Claim, ...]]:
        """The driver's word may come after the misses."""
        xid = self._hang_xid(state)
        if xid is not None and state.misses:
            state = state._replace(runs=self._hung(state, state.runs, state.misses, None, xid.device))
        return self.done(state)

    def _heard(self, state: GpuState, new: Xid) -> bool:
        since_ns = new.seen_ns - int(self.limits.xid_window_s * NS)
        return any(old.xid == new.xid and old.device == new.device and old.seen_ns >= since_ns for old in state.xids)

    def _noted(self, state: GpuState, new: Xid) -> GpuState:
        """Kept for the dedupe and the hang; a storm of the same changes nothing within the window. Those of a hang stay longest."""
        if self._heard(state, new):
            return state
        kept = [old for old in state.xids if (old.xid, old.device) != (new.xid, new.device)]
        if len(kept) >= XIDS_MAX:
            kept.remove(min(kept, key=lambda old: (old.xid in HANG_XIDS, old.seen_ns)))
        return state._replace(xids=(*kept, new))


def _key(gpu: Gpu) -> str:
    return gpu.uuid or gpu.address or f"index {gpu.index}"


def _told(value: int | None) -> str:
    return "unknown" if value is None else str(value)
