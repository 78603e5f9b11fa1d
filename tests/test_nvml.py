"""NVML watched: from a stub of NVIDIA's library under the real pynvml, through the reader's process and the producer, to facts.

Lost GPUs, drivers that hang (the asking process really in state D), GPUs that move their counters, libraries of older drivers, none.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events import subjects
from events.envelope import AnyEvent
from events.gpu import Gpu, GpuClocks, GpuSample, GpuWatch, GpuXid
from events.incident import Signal, SignalCleared
from events.ports import Record
from events.presence import AgentState, RankProcess
from events.registry import canonical, make, parse
from processors.detector import PartitionFold
from processors.node import node_detector
from processors.policy import Detectors, GpuLimits
from producers import nvml_values
from producers.nvml import NvmlProducer, NvmlSettings, reader_command
from producers.nvml_child import Child, standing
from producers.observe import Clock, Desk
from tests.nvml_stub import LINKS, Stub, compiled
from tests.telemetry import catalogue

QUICK = NvmlSettings(
    interval_s=0.25,
    ping_s=0.08,
    deadline_s=0.8,
    cold_s=2.4,
    retry_s=0.2,
    retry_s_max=0.4,
    pause_s=0.05,
    pause_s_max=0.2,
    again_s=0.5,
)


class Heard:
    """In the place of an outbox: keeps what is put into it, as bytes and as events."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.at: list[float] = []
        self.waiting = 0

    def put(self, lane: int, seen: Any, on_safe: Callable[[], None] | None = None) -> None:
        assert len(seen.data) < 64 * 1024
        self.events.append(parse(seen.data))
        self.at.append(time.monotonic())

    def of(self, kind: type) -> list[Any]:
        return [event.data for event in self.events if isinstance(event.data, kind)]

    @property
    def samples(self) -> list[GpuSample]:
        return self.of(GpuSample)

    @property
    def watches(self) -> list[GpuWatch]:
        return self.of(GpuWatch)


async def until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come to pass in time"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    made = Stub(tmp_path, library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("NVML_STUB", str(made.path))
    yield made


@contextlib.asynccontextmanager
async def watching(
    how: NvmlSettings = QUICK, ranks: Callable[[], tuple[RankProcess, ...]] = lambda: ()
) -> AsyncIterator[tuple[Heard, NvmlProducer]]:
    heard = Heard()
    clock = Clock(time.time_ns, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME), os.urandom)
    producer = NvmlProducer(Desk("n1", "boot-1", clock, heard), ranks, how)  # type: ignore[arg-type]
    task = asyncio.create_task(producer.run())
    try:
        yield heard, producer
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for child in producer.stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            await until(lambda child=child: child.exit_code is not None)  # type: ignore[misc]
        await until(lambda: not readers())  # none outlives its producer


def readers() -> list[int]:
    """Reader processes that this process started."""
    found = []
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in map(int, children):
        with contextlib.suppress(OSError):
            if b"nvml_reader" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


# --- what is told of healthy GPUs -------------------------------------------------------------------------------------------------


async def test_a_sample_tells_all_that_the_library_has(stub: Stub) -> None:
    async with watching() as (heard, _):
        await until(lambda: len(heard.samples) >= 2)
    one = heard.samples[1]
    assert (one.driver, one.nvml, one.interval_s, len(one.gpus), one.lost) == ("570.86.15", "12.570.86.15", 0.25, 8, ())
    assert one.up_s > 0 and one.took_s > 0
    gpu = one.gpus[3]
    assert gpu == Gpu(
        index=3, address="0000:40:00.0", uuid="GPU-00000003-0000-0000-0000-000000000000", serial="1650000000003",
        model="NVIDIA H100 80GB HBM3", utilization_percent=98, memory_utilization_percent=40, sm_percent=81.5, occupancy_percent=30,
        tensor_percent=42.25, dram_percent=60, pcie_sent_bytes_per_s=100 * 2**20, pcie_received_bytes_per_s=50 * 2**20,
        nvlink_sent_bytes_per_s=1000 * 2**20, nvlink_received_bytes_per_s=2000 * 2**20, processes=(), memory_used_bytes=1 << 34,
        memory_total_bytes=80 << 30, power_w=350, power_cap_w=700, power_cap_default_w=700, temperature_celsius=45,
        memory_temperature_celsius=55, slowdown_celsius=87, sm_clock_mhz=1755, sm_clock_max_mhz=1980, memory_clock_mhz=2619,
        application_sm_clock_mhz=1980, application_memory_clock_mhz=2619, clock_reasons=(), vbios="96.00.89.00.01", ecc=True,
        ecc_pending=True, persistence=True, mig=False, ecc_corrected_volatile=0, ecc_uncorrected_volatile=0,
        ecc_corrected_aggregate=3, ecc_uncorrected_aggregate=0, remapped_corrected=0, remapped_uncorrected=0, remap_pending=False,
        remap_failed=False, recovery_action="none", links_active=tuple(range(LINKS)), links_inactive=(), pcie_width=16,
        pcie_width_max=16, pcie_generation=5, pcie_generation_max=5, pcie_replays=0,
    )  # fmt: skip
    assert one.gpus[0].processes == (4242,)
    assert [gpu.index for gpu in one.gpus] == list(range(8))
    [watch] = heard.watches
    assert watch.state == "watching" and watch.detail == "NVML answers for 8 GPUs"
    assert heard.samples[0].gpus[0].tensor_percent is None, "a mean needs two readings of the counters"


async def test_what_a_chip_does_not_offer_is_left_out_and_no_error(stub: Stub) -> None:
    stub.set("gpm", 0)
    stub.set("*.pcie_kib", 2048)
    for key in [
        key for key in stub.lines if key.startswith("*.link") or key in ("*.ecc", "*.mig", "*.remap_pending", "*.field.82")
    ]:
        stub.drop(key)
    for link in range(2):
        stub.set(f"*.link.{link}.active", 1)
        stub.set(f"*.link.{link}.field.138", 1000)
    async with watching() as (heard, _):
        await until(lambda: heard.samples)
        for link in range(2):
            stub.set(f"*.link.{link}.field.138", 5000)
        await until(lambda: (heard.samples[-1].gpus[1].nvlink_sent_bytes_per_s or 0) > 0)
        at, now = next((i, s) for i, s in enumerate(heard.samples) if s.gpus[1].nvlink_sent_bytes_per_s)
    gpu = now.gpus[1]
    assert (gpu.tensor_percent, gpu.sm_percent, gpu.ecc, gpu.mig, gpu.remap_pending, gpu.memory_temperature_celsius) == (
        None,
    ) * 6
    assert gpu.errors == () and at >= 1
    assert gpu.pcie_sent_bytes_per_s == 2048 * 1024, "asked for where nothing better is offered"
    assert (
        gpu.nvlink_sent_bytes_per_s == pytest.approx(2 * 4000 * 1024 / 0.27, rel=0.6)
        and gpu.nvlink_received_bytes_per_s is None
    )


async def test_the_library_of_an_older_driver(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path / "old", "-DOLD")))
    stub.set("*.clock_reasons", 0x4)
    async with watching() as (heard, _):
        await until(lambda: len(heard.samples) >= 2)
    gpu = heard.samples[-1].gpus[0]
    assert gpu.clock_reasons == ("power_cap",), "by the name it had then"
    assert (gpu.mig, gpu.remap_failed, gpu.processes, gpu.tensor_percent) == (None,) * 4
    assert gpu.temperature_celsius == 45 and gpu.ecc_uncorrected_volatile == 0 and gpu.errors == ()


async def test_counters_that_move_and_a_hot_gpu(stub: Stub) -> None:
    async with watching() as (heard, _):
        await until(lambda: heard.samples)
        for key, value in {
            "5.temperature": 91, "5.clock_reasons": 0x40 | 0x8 | 0x1000, "2.field.4": 2, "2.field.6": 7, "2.remapped_uncorrected": 1,
            "2.remap_pending": 1, "1.link.2.active": 0, "1.link.3.counter.1": 4, "1.link.3.counter.3": 9, "6.pcie_width": 8,
            "7.field.230": 4, "4.power_mw": "error:16",
        }.items():  # fmt: skip
            stub.set(key, value)
        await until(lambda: heard.samples[-1].gpus[4].errors)
    gpus = heard.samples[-1].gpus
    assert (gpus[5].temperature_celsius, gpus[5].clock_reasons) == (91, ("hw_slowdown", "hw_thermal", "other"))
    assert (gpus[2].ecc_uncorrected_volatile, gpus[2].ecc_uncorrected_aggregate) == (2, 7)
    assert (gpus[2].remapped_uncorrected, gpus[2].remap_pending, gpus[2].remap_failed) == (1, True, False)
    assert (gpus[1].links_active, gpus[1].links_inactive) == ((0, 1, 3), (2,))
    [errors] = gpus[1].link_errors
    assert (errors.link, errors.replays, errors.recoveries, errors.crc, errors.fatal) == (3, 0, 4, 9, 0)
    assert (gpus[6].pcie_width, gpus[6].pcie_width_max) == (8, 16)
    assert gpus[7].recovery_action == "drain_and_reset"
    assert gpus[4].errors == ("power_mw: the GPU needs a reset",) and gpus[4].recovery_action == "reset"


async def test_the_job_is_told_of_the_slowest_clock_and_the_hottest_gpu_that_have_work(stub: Stub) -> None:
    async with watching() as (heard, producer):
        await until(lambda: heard.samples)
        assert heard.of(GpuClocks) == []  # no job runs here
        for key, value in {"5.temperature": 91, "5.clock_reasons": 0x40, "5.sm_clock": 600, "5.utilization": 97}.items():
            stub.set(key, value)
        await until(lambda: heard.samples[-1].gpus[5].sm_clock_mhz == 600)
        producer.desk.job, producer.desk.attempt = "gpt", 3
        await until(lambda: heard.of(GpuClocks))
    told = heard.of(GpuClocks)[0]
    most = heard.samples[-1].gpus[5].sm_clock_max_mhz
    assert (told.slowest, told.slowest_share, told.reasons, told.temperature_celsius) == (
        5,
        round(600 / most, 4),
        ("hw_thermal",),
        91,
    )


async def test_an_xid_is_told_at_once(stub: Stub) -> None:
    async with watching(NvmlSettings(interval_s=30, ping_s=30)) as (heard, _):
        await until(lambda: heard.samples)
        began = time.monotonic()
        stub.set("event", "1 3 79")
        await until(lambda: heard.of(GpuXid))
        took_s = time.monotonic() - began
        stub.set("event", "2 5 45")
        await until(lambda: len(heard.of(GpuXid)) == 2)
    assert took_s < 1.0
    first, second = heard.of(GpuXid)
    assert first == GpuXid(xid=79, address="0000:40:00.0", uuid="GPU-00000003-0000-0000-0000-000000000000")
    assert (second.xid, second.address) == (45, "0000:60:00.0")


# --- a GPU that is gone -------------------------------------------------------------------------------------------------------------


async def test_a_lost_gpu_is_told_before_the_next_sample_and_so_is_its_return(stub: Stub) -> None:
    how = NvmlSettings(interval_s=30, ping_s=0.1, again_s=0.5, pause_s=0.05)
    async with watching(how) as (heard, _):
        await until(lambda: heard.samples)
        began = time.monotonic()
        stub.set("3.lost", 15)
        await until(lambda: heard.samples[-1].lost)
        assert time.monotonic() - began < 2.0
        [lost] = heard.samples[-1].lost
        assert (lost.index, lost.address, lost.code, lost.error) == (3, "0000:40:00.0", 15, "the GPU is lost")
        assert lost.uuid == "GPU-00000003-0000-0000-0000-000000000000" and len(heard.samples[-1].gpus) == 7
        # Looked at anew, NVML may not even tell its name.
        await until(lambda: len(heard.samples) >= 3)
        assert heard.samples[-1].lost[0].address == "0000:40:00.0"
        stub.drop("3.lost")
        await until(lambda: len(heard.samples[-1].gpus) == 8)
    assert not [fact for fact in heard.of(AgentState) if fact.state == "failed"]
    assert [watch.state for watch in heard.watches] == ["watching"]


async def test_a_gpu_that_nvml_does_not_list_any_more_comes_back(stub: Stub) -> None:
    async with watching() as (heard, _):
        await until(lambda: heard.samples)
        stub.set("gpus", 7)
        os.kill(readers()[0], signal.SIGKILL)  # what is counted is counted at the start
        await until(lambda: heard.samples and len(heard.samples[-1].gpus) == 7)
        stub.set("gpus", 8)
        await until(lambda: len(heard.samples[-1].gpus) == 8)
    failed = [fact for fact in heard.of(AgentState) if fact.state == "failed"]
    assert len(failed) == 1 and "ended by itself (signal 9)" in failed[0].detail


# --- a driver that hangs ------------------------------------------------------------------------------------------------------------


async def test_a_driver_that_hangs_is_told_and_the_agent_goes_on(stub: Stub) -> None:
    ranks = (RankProcess(rank=4, pid=9, state="D"), RankProcess(rank=5, pid=10, state="R"))
    async with watching(ranks=lambda: ranks) as (heard, producer):
        await until(lambda: heard.samples)
        first = readers()[0]
        began = time.monotonic()
        stub.set("5.hang_d", 60)
        await until(lambda: heard.watches[-1].state == "missed")
        took_s = time.monotonic() - began
        miss = heard.watches[-1]
        await until(lambda: heard.watches[-1].misses >= 2)
        again = heard.watches[-1]
        assert readers() and first not in readers(), "killed, and another in its place"
        stub.drop("5.hang_d")
        await until(lambda: heard.watches[-1].state == "watching")
        await until(lambda: heard.samples[-1].up_s > again.up_s)
        assert producer.stuck == []
    assert took_s < QUICK.ping_s + QUICK.deadline_s + 1.0
    assert (miss.misses, miss.pid, miss.process_state, miss.index, miss.address) == (1, first, "D", 5, "0000:60:00.0")
    assert miss.answered_before and not again.answered_before and again.process_state == "D"
    assert miss.ranks_stuck == (4,) and "is in state D" in miss.detail and "while asked about GPU 5" in miss.detail
    said = [(fact.producer, fact.state) for fact in heard.of(AgentState)]
    assert said == [("nvml", "stalled"), ("nvml", "resumed")], "evidence is missing once, and comes again once"


async def test_slow_is_not_stuck(stub: Stub) -> None:
    """A call that takes its time leaves the process in an ordinary sleep, and a first answer may take long: it is not killed for it."""
    stub.set("init_hang", 1.5)
    async with watching() as (heard, _):
        await until(lambda: heard.watches)
        pid = readers()[0]
        assert heard.watches[0].state == "missed" and heard.watches[0].process_state == "S"
        await until(lambda: heard.samples)
        assert readers() == [pid]
        stub.set("0.hang", 1.2)
        await until(lambda: heard.watches[-1].state == "missed")
        assert heard.watches[-1].process_state == "S" and heard.watches[-1].misses == 1


async def test_processes_that_cant_be_killed_are_left_and_counted(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no signal ends can't be made here without a faulty device, so the kill is left out; the rest is real."""
    monkeypatch.setattr(Child, "kill", lambda self: (self.dismiss(), self._stop_reading()))
    stub.set("0.hang_d", 60)
    how = NvmlSettings(deadline_s=0.4, cold_s=1.2, pause_s=0.05, pause_s_max=0.2, stuck_max=2)
    async with watching(how) as (heard, producer):
        await until(lambda: len(heard.watches) >= 8)
        assert len(producer.stuck) == len(readers()) == 2, "no more than so many"
        assert heard.watches[-1].stuck == 2 and heard.watches[-1].process_state == "D"
        assert [watch.misses for watch in heard.watches] == list(range(1, len(heard.watches) + 1))
        monkeypatch.undo()  # they can be killed again
        stub_environment(monkeypatch, stub)
        stub.drop("0.hang_d")
        for child in producer.stuck:
            os.kill(child.pid, signal.SIGKILL)
        await until(lambda: heard.samples)
        assert producer.stuck == []


def stub_environment(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub.library))
    monkeypatch.setenv("NVML_STUB", str(stub.path))


def test_what_proc_says_of_a_process() -> None:
    assert standing(2**22 + 1).state == "-"
    own = standing(os.getpid())
    assert own.state in "RSD" and own.gpu == -1


# --- no driver, and readers that go wrong -----------------------------------------------------------------------------------------


async def test_no_driver_is_stated_once_and_no_process_is_kept(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    async with watching() as (heard, _):
        await until(lambda: heard.watches)
        await asyncio.sleep(1.0)  # several more looks
        assert len(heard.events) == 1
        await until(lambda: not readers())  # between two looks there is none
        assert (heard.watches[0].state, heard.watches[0].detail) == ("no_driver", "there is no libnvidia-ml.so.1")
        stub.set("init", 9)
        stub_environment(monkeypatch, stub)
        await until(lambda: len(heard.watches) == 2)
        assert (heard.watches[1].state, heard.watches[1].detail) == ("no_driver", "its driver is not loaded")
        stub.set("init", 999)
        await until(lambda: len(heard.watches) == 3)
        assert (heard.watches[2].state, heard.watches[2].detail) == ("refused", "NVML can't be initialised: unknown error")
        stub.drop("init")
        stub.set("gpus", 0)
        await until(lambda: len(heard.watches) == 4)
        assert heard.watches[3].state == "no_gpus"
        stub.set("gpus", 8)
        await until(lambda: len(heard.watches) == 5)
        assert heard.watches[4].state == "watching"
    assert not heard.of(AgentState)


@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.exit(3)",
        "print('no JSON'); print('[1, 2]'); print('{'); import sys; sys.exit(3)",
        "print('x' * 3_000_000); import sys; sys.exit(3)",
        """print('{"hello": {"gpus": [[1], 2, {"a": 1}, [0, 5, 6]], "lost": "no"}}', flush=True)
import sys
for line in sys.stdin: print('{"id": %s, "gpus": [1, {"index": 0, "uuid": {}, "links": [4, {"link": []}]}], "lost": [[0], "x", [[], 1]]}' % line.split()[1], flush=True); sys.exit(3)""",
    ],
)
async def test_a_reader_that_writes_anything_harms_nothing(script: str) -> None:
    async with watching(NvmlSettings(ping_s=0.1, pause_s=0.05, pause_s_max=0.1, command=(sys.executable, "-c", script))) as (
        heard,
        _,
    ):
        await until(lambda: len([fact for fact in heard.of(AgentState) if fact.state == "failed"]) >= 2)
    assert "ended by itself (exit code 3)" in heard.of(AgentState)[0].detail


async def test_a_reader_that_cant_be_started_is_said_so() -> None:
    async with watching(NvmlSettings(pause_s=0.05, command=("/nonexistent/python",))) as (heard, _):
        await until(lambda: heard.of(AgentState))
    assert "can't be started: No such file or directory" in heard.of(AgentState)[0].detail


def test_a_reader_ends_with_its_agent(stub: Stub) -> None:
    """Even while the library holds it: the agent's end is its end."""
    stub.set("0.hang", 600)
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({list(reader_command())!r}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    end = time.monotonic() + 10
    while standing(pid).gpu != 0 and time.monotonic() < end:  # it is in the library's call
        time.sleep(0.02)
    assert standing(pid).gpu == 0
    agent.kill()
    agent.wait()
    agent.stdout.close()
    while standing(pid).state not in "-Z" and time.monotonic() < end:
        time.sleep(0.02)
    assert standing(pid).state in "-Z"


async def test_an_agent_that_stood_still_does_not_blame_the_driver(stub: Stub) -> None:
    async with watching() as (heard, _):
        await until(lambda: heard.samples)
        for _ in range(2):
            time.sleep(QUICK.deadline_s + 1.3)  # noqa: ASYNC251  the whole agent is held
            await asyncio.sleep(0.3)
        assert [watch.state for watch in heard.watches] == ["watching"]


async def test_samples_do_not_crowd_out_what_is_rare_while_the_bus_is_away(stub: Stub) -> None:
    how = NvmlSettings(interval_s=0.1, ping_s=0.05, again_s=60)
    async with watching(how) as (heard, _):
        await until(lambda: heard.samples)
        heard.waiting = 10_000
        before, began = len(heard.samples), time.monotonic()
        await asyncio.sleep(2.0)
        kept = len(heard.samples) - before
        assert kept <= (time.monotonic() - began) / how.interval_s / 6 + 1
        stub.set("0.lost", 15)
        await until(lambda: heard.samples[-1].lost)  # what is news is kept


# --- the numbers' meaning, and the whole way to a signal ----------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_RAW_GPU = st.dictionaries(
    st.sampled_from(
        ["index", "uuid", "address", "temperature", "utilization", "memory", "links", "gpm", "errors", "processes", "ecc", "remapped",
         "clock_reasons", "recovery_action", "power_mw", "pcie_kib", "serial", "ecc_uncorrected_volatile"]
    ),
    _JSON,
)  # fmt: skip
_RAW = st.fixed_dictionaries(
    {}, optional={"gpus": st.lists(_RAW_GPU | _JSON, max_size=4) | _JSON, "lost": _JSON, "took_s": _JSON, "driver": _JSON}
)


@given(_RAW, _RAW, st.floats(allow_nan=False, allow_infinity=False, min_value=-1, max_value=1e6))
@settings(max_examples=100, deadline=None)
def test_any_answer_is_a_sample_that_can_be_written(raw: dict[str, Any], before: dict[str, Any], passed_s: float) -> None:
    known = {0: ("u", "a")}
    fact = nvml_values.sample(raw, before, passed_s, known, interval_s=10.0, up_s=1.0, on_bus=8)
    event = make(fact, id="e1", source="node/n1/nvml/1", subject="n1", time=1)
    assert parse(canonical(event)) == event
    assert all(gpu.temperature_celsius is None or math.isfinite(gpu.temperature_celsius) for gpu in fact.gpus)


async def test_from_the_library_to_the_signals(stub: Stub) -> None:
    """The facts as they were published, folded by the node's detector."""
    async with watching() as (heard, _):
        await until(lambda: len(heard.samples) >= 2)
        stub.set("5.clock_reasons", 0x40)
        stub.set("2.field.4", 2)
        stub.set("3.lost", 15)
        await until(lambda: len([s for s in heard.samples if s.lost]) >= 4)
        stub.drop("3.lost", "5.clock_reasons")
        await until(lambda: len([s for s in heard.samples[-4:] if not s.lost and len(s.gpus) == 8]) == 4)
        stub.set("6.hang_d", 60)
        await until(lambda: heard.watches[-1].misses >= 2)
        stub.drop("6.hang_d")
        await until(lambda: heard.watches[-1].state == "watching")
    fold = PartitionFold(node_detector(catalogue()))
    fold.clock = fold.clock._replace(settings=Detectors(gpu=GpuLimits(boot_grace_s=0)))
    told: list[tuple[str, str, str, str]] = []
    for i, event in enumerate(heard.events):
        subject = f"tn.0.{subjects.token('n1')}.{event.data.kind()}"
        out, refused = fold.feed(Record("node", i + 1, event.time, subject, canonical(event), {}))
        assert refused is None
        for fact in (o.event.data for o in out):
            if isinstance(fact, Signal):
                told.append((fact.symptom, fact.confidence, fact.rule, fact.device))
            elif isinstance(fact, SignalCleared):
                told.append((fact.symptom, "cleared", "", ""))
    assert sorted(told) == sorted(
        [
            ("gpu_memory_error", "high", "gpu_ecc_uncorrected", "0000:30:00.0"),
            ("gpu_unavailable", "high", "gpu_lost", "0000:40:00.0"),
            ("gpu_thermal", "low", "gpu_hw_thermal", "0000:60:00.0"),
            ("gpu_thermal", "cleared", "", ""),
            ("gpu_unavailable", "cleared", "", ""),
            ("gpu_driver_hang", "high", "gpu_driver_hang", "0000:70:00.0"),
            ("gpu_driver_hang", "cleared", "", ""),
        ]
    )
