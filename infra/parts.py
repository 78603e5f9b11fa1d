"""Whether the parts of the control plane are at work, told from what each must write again and again: the bus its tick, every part its
leases, the detectors how far they have read. All by the server's clock, so that a skewed one here changes nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from events.ports import LogUnavailable
from events.subjects import PARTITIONS
from infra.bus import BusClient
from infra.streams import CLOCK, LEASES, OFFSETS, api

#: part -> the prefix of its leases' keys, and how many there are. The detectors' go by partition.
HOLDS: Mapping[str, tuple[str, int]] = {
    "decider": ("lease.decider", 1),
    "detector-node": ("detector-node.lease.", PARTITIONS),
    "detector-job": ("detector-job.lease.", PARTITIONS),
    "actuators": ("lease.actuators", 1),
}
#: The bus ticks each second; a detector commits every few seconds how far it has read, since each partition ticks.
TICK_S_MAX, OFFSET_S_MAX = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """`held` of `of` leases, by whom. `problem`: what is wrong in a few words, "" if nothing is."""

    part: str
    held: int = 0
    of: int = 0
    by: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A bucket's key: its owner ("" if it was let go) and its age."""

    owner: str
    age_s: float


async def parts(nc: BusClient) -> list[Part]:
    """The bus and the parts of the control plane. Never raises for a bus that does not answer: that is what is wrong."""
    try:
        return await _parts(nc)
    except LogUnavailable as error:
        return [Part("bus", problem=f"it keeps nothing now ({error}): see its server log, and the room on its disk")]


def keeps(found: list[Part]) -> bool:
    """Whether the bus can be read at all."""
    return len(found) > 1


async def silence_of_bus(nc: BusClient) -> str:
    """What is wrong with a bus that has not stored its own tick for long, "" if it has. Raises LogUnavailable."""
    clock = await _info(nc, CLOCK)
    tick_s = _age_s(clock.get("ts"), clock.get("state", {}).get("last_ts"))
    return f"no tick for {tick_s:.0f} s: it stores nothing" if tick_s > TICK_S_MAX else ""


async def _parts(nc: BusClient) -> list[Part]:
    silence, leases, offsets = await asyncio.gather(silence_of_bus(nc), keys(nc, LEASES), keys(nc, OFFSETS))
    return [
        Part("bus", problem=silence),
        *(_part(name, prefix, of, leases, offsets) for name, (prefix, of) in HOLDS.items()),
    ]


def _part(name: str, prefix: str, of: int, leases: Mapping[str, Key], offsets: Mapping[str, Key]) -> Part:
    held = [key for subject, key in leases.items() if _fits(subject, prefix) and key.owner]
    by = tuple(sorted({key.owner for key in held}))
    problem = ""
    if not held:
        problem = "holds no lease: it does not run, or can't write"
    elif len(held) < of:
        problem = f"holds {len(held)} of {of} partitions: nobody reads the others"
    else:
        silent_s = min((key.age_s for subject, key in offsets.items() if subject.startswith(f"{name}.")), default=0.0)
        if silent_s > OFFSET_S_MAX:
            problem = f"has written nothing for {silent_s:.0f} s"
    return Part(name, len(held), of, by, problem)


def _fits(key: str, prefix: str) -> bool:
    return key.startswith(prefix) if prefix.endswith(".") else key == prefix


async def keys(nc: BusClient, bucket: str) -> dict[str, Key]:
    """A bucket's keys that are not over by its own time to live: a server that can't write may not remove them. Raises LogUnavailable."""
    stream, prefix = f"KV_{bucket}", f"$KV.{bucket}."
    info = await _info(nc, stream)
    ttl_s = info["config"].get("max_age", 0) / 1e9 if info else 0.0
    found: dict[str, Key] = {}
    for subject in info.get("state", {}).get("subjects") or {}:
        answer = await api(nc, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        message = answer.get("message")
        if message is None:  # over since it was listed
            continue
        age_s = _age_s(info["ts"], message["time"])
        if not ttl_s or age_s <= ttl_s:
            found[subject.removeprefix(prefix)] = Key(_owner(base64.b64decode(message.get("data") or "")), age_s)
    return found


async def _info(nc: BusClient, stream: str) -> dict[str, Any]:
    """Empty for a stream that is not there: a bus that nobody made ready holds no lease either."""
    answer = await api(nc, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return {} if "error" in answer else answer


def _age_s(now: str | None, then: str | None) -> float:
    if not now or not then:
        return 0.0
    return max(0.0, (_instant(now) - _instant(then)).total_seconds())


def _instant(text: str) -> datetime:
    """RFC 3339 with up to nine digits of a second, of which a datetime holds six."""
    whole, _, rest = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{rest[:6]:0<6}+00:00")


def _owner(data: bytes) -> str:
    try:
        value = json.loads(data or b"{}")
        return str(value.get("worker") or value.get("owner") or "")
    except (ValueError, AttributeError):
        return "?"
