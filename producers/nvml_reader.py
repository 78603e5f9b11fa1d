"""What asks NVML, in a process of its own: `python -m producers.nvml_reader`. A driver that hangs then hangs this and nothing else.

No thought here: numbers as the library gives them; what they mean is nvml_values.py's. It runs by its file's path too, so it
imports nothing of ours, and loads little: the library, pynvml, the standard library's small parts.

A line on standard input asks (`ping 7` or `sample 8`), a line of JSON on standard output answers with its number:

    {"id": 7, "lost": [[index, code]]}                                         every GPU was touched
    {"id": 8, "lost": […], "driver": …, "nvml": …, "took_s": …, "gpus": [{…}]} everything
    {"hello": {"gpus": [[index, uuid, address]], "lost": [[index, code]]}}     once, after the start
    {"fatal": code, "error": "…"}                                              NVML can't be used; it ends
    {"xid": 79, "uuid": …, "address": …}                                       at any time

It ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_NOT_FOUND, NOT_SUPPORTED, FUNCTION_NOT_FOUND = 12, 3, 13
#: The GPU itself can't be reached any more: lost, not found on the bus; NOT_FOUND says so only of the GPU as a whole.
LOST, NOT_FOUND = (15, 28), 6
#: Not offered: uninitialised argument, not supported, no permission, function or library not there, no data, versions.
ABSENT = (2, 3, 4, 12, 13, 21, 22, 25, 26, 27)
XID_EVENT = 8
EVENT_WAIT_MS = 1000
LINKS_MAX = 36
PIDS_MAX, ERRORS_MAX = 64, 16

Call = Callable[[Any, Any], Any]

#: What one call gives, by the name it is told under.
CALLS: tuple[tuple[str, Call], ...] = (
    ("temperature", lambda n, h: _either(n, h, "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", 0)),
    ("serial", lambda n, h: n.nvmlDeviceGetSerial(h)),
    ("model", lambda n, h: n.nvmlDeviceGetName(h)),
    ("vbios", lambda n, h: n.nvmlDeviceGetVbiosVersion(h)),
    ("utilization", lambda n, h: _pair(n.nvmlDeviceGetUtilizationRates(h), "gpu", "memory")),
    ("memory", lambda n, h: _pair(n.nvmlDeviceGetMemoryInfo(h), "used", "total")),
    ("power_mw", lambda n, h: n.nvmlDeviceGetPowerUsage(h)),
    ("power_cap_mw", lambda n, h: n.nvmlDeviceGetPowerManagementLimit(h)),
    ("power_cap_default_mw", lambda n, h: n.nvmlDeviceGetPowerManagementDefaultLimit(h)),
    ("slowdown", lambda n, h: n.nvmlDeviceGetTemperatureThreshold(h, 1)),
    ("sm_clock", lambda n, h: n.nvmlDeviceGetClockInfo(h, 1)),
    ("sm_clock_max", lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, 1)),
    ("memory_clock", lambda n, h: n.nvmlDeviceGetClockInfo(h, 2)),
    ("application_sm_clock", lambda n, h: n.nvmlDeviceGetApplicationsClock(h, 1)),
    ("application_memory_clock", lambda n, h: n.nvmlDeviceGetApplicationsClock(h, 2)),
    (
        "clock_reasons",
        lambda n, h: _either(n, h, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    ("persistence", lambda n, h: n.nvmlDeviceGetPersistenceMode(h)),
    ("ecc", lambda n, h: list(n.nvmlDeviceGetEccMode(h))),
    ("mig", lambda n, h: n.nvmlDeviceGetMigMode(h)[0]),
    ("remapped", lambda n, h: list(n.nvmlDeviceGetRemappedRows(h))),
    ("pcie_width", lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h)),
    ("pcie_width_max", lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h)),
    ("pcie_generation", lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    ("pcie_generation_max", lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h)),
    ("pcie_replays", lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h)),
    ("processes", lambda n, h: _processes(n, h)),
)

#: Field values by NVML's numbers, asked for in one call.
FIELDS = {
    "ecc_corrected_volatile": 3,
    "ecc_uncorrected_volatile": 4,
    "ecc_corrected_aggregate": 5,
    "ecc_uncorrected_aggregate": 6,
    "retired_corrected": 29,
    "retired_uncorrected": 30,
    "retire_pending": 31,
    "memory_temperature": 82,
    "recovery_action": 230,
}
#: Of each link: bytes sent and received (KiB), and NVLink 5's counters of what could not be repaired.
LINK_FIELDS = {"sent_kib": 138, "received_kib": 139, "malformed": 206, "overruns": 207, "errors": 208, "failed_recoveries": 214}
#: NVML_NVLINK_ERROR_DL_*, for links before NVLink 5.
LINK_COUNTERS = {"replays": 0, "recoveries": 1, "crc_flit": 2, "crc_data": 3}
#: GPM metrics: percentages, then MiB a second.
METRICS = {
    "sm": 2,
    "occupancy": 3,
    "tensor": 5,
    "dram": 10,
    "pcie_sent": 20,
    "pcie_received": 21,
    "link_received": 60,
    "link_sent": 61,
}


def _pair(value: Any, *names: str) -> list[int]:
    return [int(getattr(value, name)) for name in names]


def _either(nvml: Any, handle: Any, name: str, other: str, *arguments: Any) -> int:
    """A call that drivers offer under one name or another."""
    try:
        return int(getattr(nvml, name)(handle, *arguments))
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:
            raise
        return int(getattr(nvml, other)(handle, *arguments))


def _processes(nvml: Any, handle: Any) -> list[int]:
    """Process ids. The call without a version refuses libraries that are older than pynvml."""
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:
            raise
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    return [process.pid for process in found[:PIDS_MAX]]


class Lost(Exception):
    """The GPU can't be reached any more."""

    def __init__(self, code: int) -> None:
        self.code = code


class Gpu:
    """One GPU by its handle, and what a rate needs of the sample before."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml = nvml
        self.index = index
        self.handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.uuid = self._text(nvml.nvmlDeviceGetUUID)
        self.address = self._address()
        self.lost = 0
        self._gpm = self._gpm_samples()
        self._gpm_filled = False
        self._links: list[int] | None = None

    def _text(self, call: Callable[[Any], Any]) -> str:
        try:
            return str(call(self.handle))
        except self.nvml.NVMLError as error:
            if error.value in LOST:
                raise
            return ""

    def _address(self) -> str:
        try:
            pci = self.nvml.nvmlDeviceGetPciInfo(self.handle)
        except self.nvml.NVMLError as error:
            if error.value in LOST:
                raise
            return ""
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"

    def ping(self) -> None:
        """Touches the GPU. Raises Lost."""
        try:
            CALLS[0][1](self.nvml, self.handle)
        except self.nvml.NVMLError as error:
            if error.value in LOST or error.value == NOT_FOUND:
                raise Lost(error.value) from None

    def sample(self) -> dict[str, Any]:
        """Raises Lost."""
        self.ping()
        errors: list[list[Any]] = []
        out: dict[str, Any] = {"index": self.index, "uuid": self.uuid, "address": self.address}
        for name, call in CALLS:
            out[name] = self._ask(errors, name, partial(call, self.nvml))
        out |= zip(FIELDS, self._fields(errors, [(field, 0) for field in FIELDS.values()]), strict=True)
        out["links"] = self._link_rows(errors)
        if self._gpm:
            out["gpm"] = self._ask(errors, "gpm", self._metrics)
        else:  # each looks for 20 ms, so it is asked only where nothing better is offered
            out["pcie_kib"] = [self._ask(errors, "pcie", self.nvml.nvmlDeviceGetPcieThroughput, way) for way in (0, 1)]
        out["errors"] = errors[:ERRORS_MAX]
        return {name: value for name, value in out.items() if value is not None}

    def _ask(self, errors: list[list[Any]], name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call on the GPU gives; None where it is not offered. Raises Lost."""
        try:
            return call(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            if error.value in LOST:
                raise Lost(error.value) from None
            if error.value not in ABSENT:
                errors.append([name, error.value])
        except Exception as error:  # of pynvml's own making: one call's, not the sample's
            errors.append([name, f"{type(error).__name__}: {error}"[:80]])
        return None

    def _fields(self, errors: list[list[Any]], ids: list[tuple[int, int]]) -> list[Any]:
        values = self._ask(errors, "fields", self.nvml.nvmlDeviceGetFieldValues, ids)
        if values is None:
            return [None] * len(ids)
        return [_number(value) if value.nvmlReturn == 0 else None for value in values]

    def _link_rows(self, errors: list[list[Any]]) -> list[dict[str, Any]]:
        state, counter = self.nvml.nvmlDeviceGetNvLinkState, self.nvml.nvmlDeviceGetNvLinkErrorCounter
        if self._links is None:
            self._links = [link for link in range(LINKS_MAX) if self._ask(errors, "links", state, link) is not None]
        rows = []
        for link in self._links:
            row: dict[str, Any] = {"link": link, "active": self._ask(errors, "links", state, link)}
            row |= {name: self._ask(errors, "links", counter, link, code) for name, code in LINK_COUNTERS.items()}
            rows.append(row)
        if rows:
            values = iter(self._fields(errors, [(field, row["link"]) for row in rows for field in LINK_FIELDS.values()]))
            for row in rows:
                row |= {name: next(values) for name in LINK_FIELDS}
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    # GPU performance monitoring: the mean between two samples of a chip's counters

    def _gpm_samples(self) -> list[Any]:
        try:
            if self.nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                return [self.nvml.nvmlGpmSampleAlloc(), self.nvml.nvmlGpmSampleAlloc()]
        except (self.nvml.NVMLError, AttributeError):
            pass
        return []

    def _metrics(self, handle: Any) -> dict[str, float] | None:
        self._gpm.reverse()
        before, now = self._gpm
        self.nvml.nvmlGpmSampleGet(handle, now)
        if not self._gpm_filled:
            self._gpm_filled = True
            return None
        ask = self.nvml.c_nvmlGpmMetricsGet_t()
        ask.version = self.nvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(METRICS)
        ask.sample1, ask.sample2 = before, now
        for i, metric in enumerate(METRICS.values()):
            ask.metrics[i].metricId = metric
        self.nvml.nvmlGpmMetricsGet(ask)
        return {name: ask.metrics[i].value for i, name in enumerate(METRICS) if ask.metrics[i].nvmlReturn == 0}


def _number(field: Any) -> Any:
    """The member of a field's union that its type names."""
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return getattr(field.value, members[field.valueType]) if 0 <= field.valueType < len(members) else None


class Reader:
    """NVML, initialised once. `say(value)` writes one line."""

    def __init__(self, nvml: Any, say: Callable[[Any], None]) -> None:
        self.nvml = nvml
        self.say = say
        self.gpus: list[Gpu] = []
        self.unreached: list[list[int]] = []

    def start(self) -> None:
        """Raises NVMLError."""
        self.nvml.nvmlInit()
        for index in range(self.nvml.nvmlDeviceGetCount()):
            _tell_place(index)
            try:
                self.gpus.append(Gpu(self.nvml, index))
            except self.nvml.NVMLError as error:
                self.unreached.append([index, error.value])
        _tell_place(-1)
        self.say({"hello": {"gpus": [[g.index, g.uuid, g.address] for g in self.gpus], "lost": self.unreached}})
        threading.Thread(target=self._events, name="events", daemon=True).start()

    def answer(self, line: str) -> None:
        what, _, number = line.partition(" ")
        out: dict[str, Any] = {"id": int(number)}
        began = time.monotonic()
        gpus = []
        for gpu in self.gpus:
            if gpu.lost:
                continue
            _tell_place(gpu.index)
            try:
                if what == "sample":
                    gpus.append(gpu.sample())
                else:
                    gpu.ping()
            except Lost as lost:
                gpu.lost = lost.code
        _tell_place(-1)
        out["lost"] = self.unreached + [[gpu.index, gpu.lost] for gpu in self.gpus if gpu.lost]
        if what == "sample":
            out |= {
                "gpus": gpus,
                "driver": self._system("nvmlSystemGetDriverVersion"),
                "nvml": self._system("nvmlSystemGetNVMLVersion"),
            }
            out["took_s"] = round(time.monotonic() - began, 6)
        self.say(out)

    def _system(self, name: str) -> str:
        try:
            return str(getattr(self.nvml, name)())
        except self.nvml.NVMLError:
            return ""

    def _events(self) -> None:
        """Xids as they happen; NVML hands each waiter of a set one event at a time."""
        nvml = self.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            registered = 0
            for gpu in self.gpus:
                try:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, XID_EVENT, events)
                    registered += 1
                except nvml.NVMLError:
                    continue  # this GPU offers none
            while registered:
                try:
                    event = nvml.nvmlEventSetWait(events, EVENT_WAIT_MS)
                except nvml.NVMLError as error:
                    if error.value == 10:  # time-out
                        continue
                    time.sleep(EVENT_WAIT_MS / 1000)  # a GPU of the set is lost: the others go on
                    continue
                if event.eventType & XID_EVENT:
                    self.say({"xid": int(event.eventData), **self._named(event.device)})
        except (nvml.NVMLError, AttributeError):
            return  # not offered

    def _named(self, device: Any) -> dict[str, str]:
        at = ctypes.cast(device, ctypes.c_void_p).value
        for gpu in self.gpus:
            if ctypes.cast(gpu.handle, ctypes.c_void_p).value == at:
                return {"uuid": gpu.uuid, "address": gpu.address}
        return {}


_LIBC = ctypes.CDLL(None)


def _tell_place(index: int) -> None:
    """The thread's name says which GPU is asked (-1: none), for whoever looks at it in /proc while it hangs."""
    _LIBC.prctl(15, f"nvml gpu {index}".encode() if index >= 0 else b"nvml", 0, 0, 0)


def _end_with_parent() -> None:
    """Killed when the agent is, even in the middle of a call."""
    parent = os.getppid()
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def main() -> int:
    _end_with_parent()
    lock = threading.Lock()
    answers = os.dup(1)
    os.dup2(2, 1)  # what the library prints is no answer

    def say(value: Any) -> None:
        raw = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with lock:
            while raw:
                raw = raw[os.write(answers, raw) :]

    try:
        ctypes.CDLL(LIBRARY)  # before pynvml, which costs the most by far
        import pynvml
    except OSError as error:
        say({"fatal": LIBRARY_NOT_FOUND, "error": str(error)[:400]})
        return 0
    except ImportError as error:
        say({"fatal": -1, "error": str(error)[:400]})
        return 0
    reader = Reader(pynvml, say)
    try:
        reader.start()
    except pynvml.NVMLError as error:
        say({"fatal": error.value, "error": str(error)[:400]})
        return 0
    for line in sys.stdin:
        reader.answer(line.strip())
    os._exit(0)  # without the library's own end, which could hang as well


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(0)
