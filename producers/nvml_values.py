"""What the reader's numbers mean: a raw answer of nvml_reader.py as a fact. Pure; nothing here asks NVML, a clock or a file.

A raw answer came over a pipe from a process of ours that has a driver's library in it, so it is believed no further than its shape:
what is not a number where one belongs is left out, and every list has a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from events.envelope import NAME_MAX
from events.gpu import ERRORS_MAX, GPUS_MAX, LINKS_MAX, PROCESSES_MAX, Gpu, GpuClocks, GpuSample, LinkErrors, LostGpu

MIB, KIB = 1024 * 1024, 1024
#: From this utilisation on a GPU has work.
BUSY_PERCENT = 50.0

#: NVML's bits, lowest first.
_REASONS = (
    "idle", "application_clocks", "power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "power_brake", "display",
    "board_limit", "reliability",
)  # fmt: skip
_ACTIONS = (
    "none", "reset", "reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot",
)  # fmt: skip
#: NVML's return codes that tell something about a GPU or its driver.
_CODES = {
    1: "uninitialized", 4: "no permission", 6: "not found", 8: "external power is not connected", 9: "the driver is not loaded",
    10: "time-out", 11: "its interrupts don't arrive", 12: "the library was not found", 14: "its infoROM is corrupted",
    15: "the GPU is lost", 16: "the GPU needs a reset", 17: "the operating system refused", 18: "driver and library differ",
    19: "in use", 20: "not enough memory", 23: "not enough resources", 28: "no such GPU on the bus", 29: "invalid state",
    999: "unknown error",
}  # fmt: skip


def error_text(code: int) -> str:
    return _CODES.get(code, f"NVML error {code}")


def whole(value: Any) -> int | None:
    """A whole number of zero or more, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


def real(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def flag(value: Any) -> bool | None:
    number = whole(value)
    return None if number is None else number != 0


def text(value: Any, length_max: int) -> str:
    return "".join(c for c in value if c.isprintable())[:length_max] if isinstance(value, str) else ""


def rows(value: Any, most: int) -> Sequence[Any]:
    return value[:most] if isinstance(value, list) else ()


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _times(value: Any, factor: float) -> float | None:
    number = real(value)
    return None if number is None else round(number * factor, 3)


def _of(raw: Mapping[str, Any], name: str, place: int) -> Any:
    many = rows(raw.get(name), place + 1)
    return many[place] if len(many) > place else None


def clock_reasons(bits: Any) -> tuple[Any, ...] | None:
    number = whole(bits)
    if number is None:
        return None
    names = [name for i, name in enumerate(_REASONS) if number >> i & 1]
    return (*names, "other") if number >> len(_REASONS) else tuple(names)


def recovery_action(code: Any) -> Any:
    number = whole(code)
    if number is None:
        return None
    return _ACTIONS[number] if number < len(_ACTIONS) else "other"


def gpu(raw: Mapping[str, Any], before: Mapping[str, Any], passed_s: float) -> Gpu | None:
    """One GPU of an answer; `before`: of the answer before, `passed_s` ago. None for what names no GPU."""
    index = whole(raw.get("index"))
    if index is None:
        return None
    gpm = mapping(raw.get("gpm"))
    links = [mapping(row) for row in rows(raw.get("links"), LINKS_MAX)]
    sent, received = _link_rates(links, before, passed_s)
    processes = raw.get("processes")
    return Gpu(
        index=index,
        address=text(raw.get("address"), 64),
        uuid=text(raw.get("uuid"), 96),
        serial=text(raw.get("serial"), 64),
        model=text(raw.get("model"), 96),
        utilization_percent=real(_of(raw, "utilization", 0)),
        memory_utilization_percent=real(_of(raw, "utilization", 1)),
        sm_percent=_times(gpm.get("sm"), 1),
        occupancy_percent=_times(gpm.get("occupancy"), 1),
        tensor_percent=_times(gpm.get("tensor"), 1),
        dram_percent=_times(gpm.get("dram"), 1),
        pcie_sent_bytes_per_s=_first(_times(gpm.get("pcie_sent"), MIB), _times(_of(raw, "pcie_kib", 0), KIB)),
        pcie_received_bytes_per_s=_first(_times(gpm.get("pcie_received"), MIB), _times(_of(raw, "pcie_kib", 1), KIB)),
        nvlink_sent_bytes_per_s=_first(_times(gpm.get("link_sent"), MIB), sent),
        nvlink_received_bytes_per_s=_first(_times(gpm.get("link_received"), MIB), received),
        processes=tuple(pid for pid in map(whole, rows(processes, PROCESSES_MAX)) if pid is not None)
        if isinstance(processes, list)
        else None,
        memory_used_bytes=whole(_of(raw, "memory", 0)),
        memory_total_bytes=whole(_of(raw, "memory", 1)),
        power_w=_times(raw.get("power_mw"), 0.001),
        power_cap_w=_times(raw.get("power_cap_mw"), 0.001),
        power_cap_default_w=_times(raw.get("power_cap_default_mw"), 0.001),
        temperature_celsius=real(raw.get("temperature")),
        memory_temperature_celsius=real(raw.get("memory_temperature")),
        slowdown_celsius=real(raw.get("slowdown")),
        sm_clock_mhz=whole(raw.get("sm_clock")),
        sm_clock_max_mhz=whole(raw.get("sm_clock_max")),
        memory_clock_mhz=whole(raw.get("memory_clock")),
        application_sm_clock_mhz=whole(raw.get("application_sm_clock")),
        application_memory_clock_mhz=whole(raw.get("application_memory_clock")),
        clock_reasons=clock_reasons(raw.get("clock_reasons")),
        vbios=text(raw.get("vbios"), 64) or None,
        ecc=flag(_of(raw, "ecc", 0)),
        ecc_pending=flag(_of(raw, "ecc", 1)),
        persistence=flag(raw.get("persistence")),
        mig=flag(raw.get("mig")),
        ecc_corrected_volatile=whole(raw.get("ecc_corrected_volatile")),
        ecc_uncorrected_volatile=whole(raw.get("ecc_uncorrected_volatile")),
        ecc_corrected_aggregate=whole(raw.get("ecc_corrected_aggregate")),
        ecc_uncorrected_aggregate=whole(raw.get("ecc_uncorrected_aggregate")),
        remapped_corrected=whole(_of(raw, "remapped", 0)),
        remapped_uncorrected=whole(_of(raw, "remapped", 1)),
        remap_pending=flag(_of(raw, "remapped", 2)),
        remap_failed=flag(_of(raw, "remapped", 3)),
        retired_corrected=whole(raw.get("retired_corrected")),
        retired_uncorrected=whole(raw.get("retired_uncorrected")),
        retire_pending=flag(raw.get("retire_pending")),
        recovery_action=recovery_action(raw.get("recovery_action")) if not _needs_reset(raw) else "reset",
        errors=_errors(raw.get("errors")),
        links_active=_links(links, active=True),
        links_inactive=_links(links, active=False),
        link_errors=tuple(told for told in map(_link_errors, links) if told is not None),
        pcie_width=whole(raw.get("pcie_width")),
        pcie_width_max=whole(raw.get("pcie_width_max")),
        pcie_generation=whole(raw.get("pcie_generation")),
        pcie_generation_max=whole(raw.get("pcie_generation_max")),
        pcie_replays=whole(raw.get("pcie_replays")),
    )


def _needs_reset(raw: Mapping[str, Any]) -> bool:
    """Drivers that know no recovery actions say it in each call's return code."""
    return any(isinstance(row, list) and row[1:] == [16] for row in rows(raw.get("errors"), ERRORS_MAX))


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _links(links: Sequence[Mapping[str, Any]], *, active: bool) -> tuple[int, ...] | None:
    """None where the GPU has no links at all."""
    numbered = [(number, flag(link.get("active"))) for link in links if (number := whole(link.get("link"))) is not None]
    return tuple(number for number, up in numbered if up is active) if numbered else None


def _link_errors(link: Mapping[str, Any]) -> LinkErrors | None:
    def total(*names: str) -> int:
        return sum(whole(link.get(name)) or 0 for name in names)

    told = LinkErrors(
        link=whole(link.get("link")) or 0,
        replays=total("replays"),
        recoveries=total("recoveries"),
        crc=total("crc_flit", "crc_data"),
        fatal=total("malformed", "overruns", "errors", "failed_recoveries"),
    )
    return told if told.replays or told.recoveries or told.crc or told.fatal else None


def _link_rates(
    links: Sequence[Mapping[str, Any]], before: Mapping[str, Any], passed_s: float
) -> tuple[float | None, float | None]:
    """Bytes a second over all links, of counters that only grow (a driver that was loaded anew starts them again)."""
    earlier = {whole(link.get("link")): link for link in map(mapping, rows(before.get("links"), LINKS_MAX))}
    if passed_s <= 0 or not earlier:
        return None, None
    rates: list[float | None] = []
    for name in ("sent_kib", "received_kib"):
        grown = [
            now - then
            for link in links
            if (now := whole(link.get(name))) is not None
            and (then := whole(earlier.get(whole(link.get("link")), {}).get(name))) is not None
        ]
        rates.append(round(sum(grown) * KIB / passed_s, 3) if grown and min(grown) >= 0 else None)
    return rates[0], rates[1]


def _errors(value: Any) -> tuple[str, ...]:
    out = []
    for row in rows(value, ERRORS_MAX):
        if isinstance(row, list) and len(row) == 2:
            what = error_text(row[1]) if isinstance(row[1], int) else text(row[1], 100)
            out.append(f"{text(row[0], 60)}: {what}")
    return tuple(out)


def lost(raw: Mapping[str, Any], known: Mapping[int, tuple[str, str]]) -> tuple[LostGpu, ...]:
    """The GPUs that an answer says can't be reached; `known`: uuid and address by index, from when they could."""
    out = []
    for row in rows(raw.get("lost"), GPUS_MAX):
        if not isinstance(row, list) or len(row) != 2 or (index := whole(row[0])) is None:
            continue
        uuid, address = known.get(index, ("", ""))
        code = whole(row[1]) or 0
        out.append(LostGpu(index=index, uuid=uuid, address=address, code=code, error=error_text(code)[:NAME_MAX]))
    return tuple(out)


def lost_indices(raw: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(one.index for one in lost(raw, {}))


def sample(
    raw: Mapping[str, Any],
    before: Mapping[str, Any],
    passed_s: float,
    known: Mapping[int, tuple[str, str]],
    *,
    interval_s: float,
    up_s: float,
    on_bus: int,
) -> GpuSample:
    """An answer to `sample` as a fact; `before`: the one before it ({}: none), asked `passed_s` earlier."""
    earlier = {text(row.get("uuid"), 96): row for row in map(mapping, rows(before.get("gpus"), GPUS_MAX))}
    now = map(mapping, rows(raw.get("gpus"), GPUS_MAX))
    gpus = [gpu(row, earlier.get(text(row.get("uuid"), 96), {}), passed_s) for row in now]
    return GpuSample(
        interval_s=interval_s,
        took_s=max(0.0, real(raw.get("took_s")) or 0.0),
        up_s=round(up_s, 3),
        driver=text(raw.get("driver"), 80),
        nvml=text(raw.get("nvml"), 80),
        on_bus=on_bus,
        gpus=tuple(one for one in gpus if one is not None),
        lost=lost(raw, known),
    )


def clocks(fact: GpuSample) -> GpuClocks | None:
    """The clocks and heat of the GPUs that have work, for the job that runs here; None where none has, or their clocks are not told."""
    busy = [
        (one.sm_clock_mhz / one.sm_clock_max_mhz, one)
        for one in fact.gpus
        if one.sm_clock_mhz and one.sm_clock_max_mhz and one.sm_clock_max_mhz <= 1000 * one.sm_clock_mhz <= 2000 * one.sm_clock_max_mhz
        and (one.utilization_percent or 0) >= BUSY_PERCENT
    ]  # fmt: skip
    if not busy:
        return None
    share, slowest = min(busy, key=lambda pair: (pair[0], pair[1].index))
    heat = [
        one.temperature_celsius
        for _, one in busy
        if one.temperature_celsius is not None and abs(one.temperature_celsius) <= 1000
    ]
    return GpuClocks(
        gpus=len(busy),
        slowest=min(slowest.index, 1_000_000),
        slowest_share=round(share, 4),
        reasons=slowest.clock_reasons or (),
        temperature_celsius=max(heat, default=None),
    )


def hello(raw: Any) -> dict[int, tuple[str, str]]:
    """uuid and address by index, of a reader's first line."""
    out: dict[int, tuple[str, str]] = {}
    for row in rows(mapping(raw).get("gpus"), GPUS_MAX):
        if isinstance(row, list) and len(row) == 3 and (index := whole(row[0])) is not None:
            out[index] = text(row[1], 96), text(row[2], 64)
    return out
