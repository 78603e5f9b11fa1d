"""Which of a slow job's nodes has GPUs that run below their peers' clocks, and how hot they are. A part of the detector "job". Pure.

Heat shows in MFU before it shows anywhere else: a job that got slower and one node whose GPUs are throttled confirm each other
(ByteRobust, section 2.1). By itself a low clock is nothing: power caps and kernels move it all day.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

from events.clock import NS
from events.gpu import GpuClocks
from processors.policy import Pace

#: Nodes are kept in so many parts, so that one change copies little at ten thousand nodes.
PARTS = 64
PART_MAX = 1024
NAMED_MAX = 8


class Clock(NamedTuple):
    """A node's slowest GPU under load: its clock as a share of the most it can, and why; and the heat of the hottest."""

    node: str
    seen_ns: int
    share: float
    gpu: int = -1
    celsius: float | None = None
    reasons: tuple[str, ...] = ()


Clocks = tuple[tuple[Clock, ...], ...]


def heard(clocks: Clocks, node: str, seen_ns: int, data: GpuClocks) -> Clocks:
    """With what a node told; what is older than its last word changes nothing."""
    clocks = clocks or ((),) * PARTS
    place = _place(node)
    part = clocks[place]
    new = Clock(node, seen_ns, data.slowest_share, data.slowest, data.temperature_celsius, data.reasons)
    for i, old in enumerate(part):
        if old.node == node:
            part = part if seen_ns < old.seen_ns else (*part[:i], new, *part[i + 1 :])
            break
    else:
        part = (*part, new)[-PART_MAX:]
    return (*clocks[:place], part, *clocks[place + 1 :])


def slower(clocks: Clocks, now_ns: int, rules: Pace) -> tuple[list[Clock], str]:
    """The nodes whose clocks are below the middle of all that told lately, the slowest first, and words for how they stand; nothing and
    '' where too few told."""
    fresh = [one for part in clocks for one in part if now_ns - one.seen_ns <= int(rules.clock_s * NS)]
    if len(fresh) < rules.peers_min:
        return [], ""
    middle = median(one.share for one in fresh)
    low = sorted((one for one in fresh if one.share <= middle * (1 - rules.clock_min)), key=lambda one: (one.share, one.node))
    if not low:
        hottest = max((one.celsius for one in fresh if one.celsius is not None), default=None)
        heat = f", the hottest GPU at {hottest:g} °C" if hottest is not None else ""
        return [], f"no node's clocks stand out (the middle is {middle:.0%} of what they can{heat})"
    more = f", and {len(low) - NAMED_MAX} more" if len(low) > NAMED_MAX else ""
    return low, f"below their peers' clocks ({middle:.0%}): {'; '.join(map(_words, low[:NAMED_MAX]))}{more}"


def _words(one: Clock) -> str:
    heat = f" at {one.celsius:g} °C" if one.celsius is not None else ""
    why = f", {', '.join(one.reasons)}" if one.reasons else ""
    return f"GPU {one.gpu} of {one.node[:60]} at {one.share:.0%}{heat}{why}"


def _place(node: str) -> int:
    return crc32(node.encode("utf-8", "replace")) % PARTS


def dump(clocks: Clocks) -> Any:
    return [[*one[:5], list(one.reasons)] for part in clocks for one in part]


def load(value: Sequence[Any]) -> Clocks:
    parts: list[list[Clock]] = [[] for _ in range(PARTS)]
    for node, seen_ns, share, gpu, celsius, reasons in value:
        parts[_place(node)].append(Clock(node, seen_ns, share, gpu, celsius, tuple(reasons)))
    return tuple(map(tuple, parts))
