"""Every stream and bucket of the bus, with its configuration, in one place; made or verified, never deleted.

Raw `$JS.API` requests: nats-py's StreamConfig has no field for schedules, persistence mode or subject transforms of sources.

Scheduled messages live in streams of their own (CLOCK, TIMERS), which the others source from. A stream that allows schedules
also allows roll-ups: with the header `Nats-Rollup: all` one node could wipe a telemetry stream, and with a schedule's target
speak for another node (decisions/010).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from events.ports import DEADLETTER, LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, TIMERS, LogUnavailable
from events.presence import Tick
from events.registry import canonical, make
from events.subjects import JOB, NODE, PARTITIONS, settings, tick

CLOCK = "CLOCK"
LEASES = "LEASES"
#: Where Faust workers say up to where they have read; where a table's changes are kept, by detector.
OFFSETS = "KS_OFFSETS"
CHANGELOG_PREFIX = "KS_CHANGELOG_"
CHANGELOGS = ("NODE", "JOB")
VERSION_MIN = (2, 15)

_SECOND_NS = 1_000_000_000
_DAY_NS = 86_400 * _SECOND_NS
_GIB = 1 << 30
#: A stream of few messages, rewritten all the time, is kept in blocks of 32 KB where its size is limited to this, else of 8 MB; and the
#: server holds the block that it writes in memory (decisions/151). It is room for 400 keys of 300 bytes.
SMALL_BYTES = 120 << 10
#: Of each partition. A tick takes 290 bytes: all of them must fit well, since the oldest message to go would be a schedule.
TICKS_KEPT = 30
#: A partition's tick: its schedule and where it fires. Telemetry streams store it among the partition's own.
TICK_SCHEDULE = "tick.schedule"
TICK_SECOND = "tick.second"
#: One fixed event: a tick says nothing but its record's broker time.
TICK_BODY = canonical(make(Tick(), id="tick", source="bus/clock", subject="clock", time=0))


class StreamProblem(Exception):
    """A stream is not as keepstep needs it, or the server is too old. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept. LEDGER has no limit: it outlives its jobs."""

    telemetry_age_ns: int = 7 * _DAY_NS
    telemetry_bytes: int = 10 * _GIB
    deadletter_age_ns: int = 30 * _DAY_NS
    deadletter_bytes: int = _GIB
    changelog_bytes: int = _GIB
    lease_ttl_ns: int = 6 * _SECOND_NS


def _telemetry(name: str, source: str, stored: str, prefix: str, limits: Limits, replicas: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": name,
        "subjects": [source, settings(prefix, "*")],
        "subject_transform": {"src": source, "dest": stored},
        "sources": [
            {
                "name": CLOCK,
                "subject_transforms": [{"src": f"{TICK_SECOND}.*", "dest": tick(prefix, "{{wildcard(1)}}")}],
            }
        ],
        "max_age": limits.telemetry_age_ns,
        "max_bytes": limits.telemetry_bytes,
    }
    if replicas == 1:
        config["persist_mode"] = "async"
    return config


def configurations(replicas: int = 1, limits: Limits | None = None) -> list[dict[str, Any]]:
    """All streams in the order in which they are made: sources before those that source from them."""
    limits = limits or Limits()
    n = PARTITIONS
    own: list[dict[str, Any]] = [
        {
            "name": CLOCK,
            "subjects": ["tick.*.*"],
            "allow_msg_schedules": True,
            "max_msgs_per_subject": TICKS_KEPT,
            "max_bytes": SMALL_BYTES,
        },
        {"name": TIMERS, "subjects": ["timer.*", "fired.*.*"], "allow_msg_schedules": True, "max_age": 0},
        _telemetry(
            TELEMETRY_NODE,
            "telemetry.*.node.*",
            f"{NODE}.{{{{partition({n},1)}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}",
            NODE,
            limits,
            replicas,
        ),
        _telemetry(
            TELEMETRY_JOB,
            "telemetry.*.job.*.*",
            f"{JOB}.{{{{partition({n},2)}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}.{{{{wildcard(3)}}}}",
            JOB,
            limits,
            replicas,
        ),
        {
            "name": LEDGER,
            "subjects": ["ledger.*.*.*"],
            "deny_delete": True,
            "deny_purge": True,
            "allow_atomic": True,
            "sources": [
                {
                    "name": TIMERS,
                    "subject_transforms": [{"src": "fired.*.*", "dest": "ledger.{{wildcard(1)}}.timer.{{wildcard(2)}}"}],
                }
            ],
        },
        {
            "name": DEADLETTER,
            "subjects": ["deadletter.>"],
            "max_age": limits.deadletter_age_ns,
            "max_bytes": limits.deadletter_bytes,
        },
        bucket(LEASES, ttl_ns=limits.lease_ttl_ns, max_bytes=SMALL_BYTES),
        bucket(OFFSETS, max_bytes=SMALL_BYTES),
        *(changelog(which, limits.changelog_bytes, replicas) for which in CHANGELOGS),
    ]
    return [{**_COMMON, "num_replicas": replicas, **config} for config in own]


_COMMON: Mapping[str, Any] = {
    "retention": "limits",
    "storage": "file",
    "discard": "old",
    "duplicate_window": 120 * _SECOND_NS,
}


def bucket(name: str, *, ttl_ns: int = 0, history: int = 1, max_bytes: int = -1) -> dict[str, Any]:
    """A key-value bucket is a stream of this shape (NATS ADR-8)."""
    config: dict[str, Any] = {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "max_msgs_per_subject": history,
        "max_age": ttl_ns,
        "max_bytes": max_bytes,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
        "discard": "new",
    }
    if ttl_ns:
        config["duplicate_window"] = min(ttl_ns, 120 * _SECOND_NS)
    return config


def changelog(which: str, bytes_max: int = Limits().changelog_bytes, replicas: int = 1) -> dict[str, Any]:
    """A Faust table's changelog: the last message of each partition and key. When it is full it refuses, rather than forget a key."""
    config: dict[str, Any] = {
        "name": f"{CHANGELOG_PREFIX}{which}",
        "subjects": [f"ks.changelog.{which.lower()}.>"],
        "max_msgs_per_subject": 1,
        "max_bytes": bytes_max,
        "discard": "new",
    }
    if replicas == 1:
        config["persist_mode"] = "async"
    else:  # which takes one write at a time behind a fence, or a batch of them
        config["allow_atomic"] = True
    return config


async def ensure_streams(nc: Client, replicas: int = 1, limits: Limits | None = None) -> None:
    """Makes what is absent, verifies what is there, starts the tick. Raises StreamProblem, LogUnavailable."""
    await check_server(nc)
    for config in configurations(replicas, limits):
        await ensure(nc, config)
    await _start_ticks(nc)


async def ensure(nc: Client, config: Mapping[str, Any]) -> bool:
    """Makes one stream, or verifies the one that is there. True if it was made."""
    name = config["name"]
    answer = await api(nc, f"STREAM.INFO.{name}")
    if _code(answer) == _NO_STREAM:
        answer = await api(nc, f"STREAM.CREATE.{name}", config)
        if _code(answer) != _NAME_IN_USE:  # else someone else made it between the two
            _raise_for(answer, f"the stream {name} can't be made")
            _verify(config, answer["config"])
            return True
        answer = await api(nc, f"STREAM.INFO.{name}")
    _raise_for(answer, f"the stream {name} can't be looked up")
    _verify(config, answer["config"])
    return False


#: A difference in these changes what a message means, or loses history. Limits and replicas are the administrator's to change.
_MATTERS = (
    "retention", "storage", "subjects", "subject_transform", "sources", "deny_delete", "deny_purge", "allow_msg_schedules",
    "persist_mode", "mirror", "sealed", "max_msgs_per_subject", "republish",
)  # fmt: skip
_LEFT_OUT: Mapping[str, Any] = {"max_msgs_per_subject": -1, "persist_mode": "", "sources": []}


def _verify(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for field in _MATTERS:
        want, have = (_plain(value.get(field), field) for value in (wanted, found))
        if field == "persist_mode" and found.get("num_replicas", 1) > 1:
            continue
        if want != have:
            raise StreamProblem(
                f"the stream {wanted['name']} exists with another {field}: {json.dumps(have)} where keepstep needs "
                f"{json.dumps(want)}; keepstep never deletes a stream: move it away, or use another server"
            )
    if wanted["name"] == LEDGER and (
        found.get("max_age") or (found.get("max_bytes") or -1) > 0 or (found.get("max_msgs") or -1) > 0
    ):
        raise StreamProblem(
            "the stream LEDGER exists with a limit of age or size, which would lose history: take the limit off"
        )


def _plain(value: Any, field: str) -> Any:
    if field == "sources":
        return [{"name": s["name"], "subject_transforms": s.get("subject_transforms", [])} for s in value or []]
    if field == "persist_mode" and value == "default":
        return ""
    if field == "max_msgs_per_subject" and (value or -1) > 1:
        return "several"  # how many ticks are kept changes nothing
    return value if value else _LEFT_OUT.get(field, False)


async def _start_ticks(nc: Client) -> None:
    """A schedule a partition, fired into CLOCK each second; what is there is refused again, and so left alone."""
    for partition in range(PARTITIONS):
        schedule = f"{TICK_SCHEDULE}.{partition}"
        headers = {
            "Nats-Schedule": "@every 1s",
            "Nats-Schedule-Target": f"{TICK_SECOND}.{partition}",
            "Nats-Expected-Last-Subject-Sequence": "0",
        }
        try:
            reply = await nc.request(schedule, TICK_BODY, timeout=5, headers=headers)
        except NatsError as error:
            raise LogUnavailable(f"the bus did not take the schedule of the tick: {_why(error)}") from error
        answer = json.loads(reply.data)
        if _code(answer) != _STALE:
            _raise_for(answer, "the schedule of the tick was refused")


async def check_server(nc: Client) -> None:
    """Raises StreamProblem for a server older than 2.15 or one without JetStream."""
    version = nc.connected_server_version
    if (version.major, version.minor) < VERSION_MIN:
        raise StreamProblem(
            f"the server at {_where(nc)} is nats-server {version.major}.{version.minor}.{version.patch}; keepstep needs "
            f"{VERSION_MIN[0]}.{VERSION_MIN[1]} or later (scheduled messages): upgrade it"
        )
    answer = await api(nc, "INFO")
    _raise_for(answer, f"the server at {_where(nc)} has no JetStream for this user")


_NO_STREAM, _NAME_IN_USE, _STALE, _OFFLINE = 10059, 10058, 10071, 10118


async def api(nc: Client, call: str, body: Mapping[str, Any] | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """One `$JS.API` request; the answer as it came, errors included. Raises LogUnavailable if there is none, or none for now."""
    try:
        reply = await nc.request(f"$JS.API.{call}", json.dumps(body).encode() if body else b"", timeout=timeout_s)
    except (NatsError, OSError) as error:
        raise LogUnavailable(f"the bus did not answer $JS.API.{call}: {_why(error)}") from error
    value = json.loads(reply.data)
    if not isinstance(value, dict):
        return {}
    problem = value.get("error") or {}
    if problem.get("code") == 503 or problem.get("err_code") == _OFFLINE:
        raise LogUnavailable(f"the bus can't answer $JS.API.{call} now: {problem.get('description')} ({_code(value)})")
    return value


def _code(answer: Mapping[str, Any]) -> int:
    return int((answer.get("error") or {}).get("err_code", 0))


#: JetStream's code for "insufficient storage resources available".
_NO_ROOM = 10047


def _raise_for(answer: Mapping[str, Any], what: str) -> None:
    error = answer.get("error")
    if error:
        if int(error.get("code", 0)) == 503:
            raise LogUnavailable(f"{what}: {error.get('description')}")
        if int(error.get("err_code", 0)) == _NO_ROOM:
            raise StreamProblem(
                f"{what}: the bus's disk has too little room; each stream of observations may take {Limits().telemetry_bytes >> 30} GiB"
            )
        raise StreamProblem(f"{what}: {error.get('description', error)} ({error.get('err_code', '?')})")


def _why(error: BaseException) -> str:
    return str(error).removeprefix("nats: ") or type(error).__name__


def _where(nc: Client) -> str:
    url = nc.connected_url
    return f"{url.hostname}:{url.port}" if url is not None else "?"
