"""DEADLETTER: what could not be read is kept with its reason, the first hundred a source and minute, and counted beyond that.

`refuse` never raises into the stream that it serves; what can't be published even here is counted in `lost`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from events.clock import text_of
from events.subjects import BadName, token

#: subject, data, headers. May raise: the letter is then counted as lost.
Publish = Callable[[str, bytes, Mapping[str, str]], Awaitable[object]]

KEPT_BYTES_MAX = 4096
KEPT_PER_MINUTE = 100
SOURCES_MAX = 4096
REASON_MAX = 500
_MINUTE_NS = 60_000_000_000


@dataclass(slots=True)
class _Tally:
    """What one source sent in one minute of broker time."""

    minute: int
    seen: int = 0
    kept: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class DeadLetters:
    """Publishes to `deadletter.<stream>.<source>`. One instance a process and stream; not for use from several loops."""

    def __init__(self, publish: Publish, *, per_minute: int = KEPT_PER_MINUTE) -> None:
        self._publish, self._per_minute = publish, per_minute
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._minute = 0
        self.refused = self.lost = 0

    async def refuse(
        self, stream: str, subject: str, sequence: int, time_ns: int, data: bytes, reason: str, source: str = ""
    ) -> None:
        """`time_ns` is the message's broker time, `source` what it is counted by (a node's name; default: the subject)."""
        self.refused += 1
        source = source or subject
        await self.advance(time_ns)
        key = (stream, source)
        if key not in self._tallies and len(self._tallies) >= SOURCES_MAX:
            key = (stream, "~others")
        minute = time_ns // _MINUTE_NS
        tally = self._tallies.get(key)
        if tally is None or tally.minute != minute:
            if tally is not None and tally.seen > tally.kept:
                await self._count(key, tally)
            tally = self._tallies[key] = _Tally(minute)
        tally.seen += 1
        reason = reason[:REASON_MAX]
        if tally.kept < self._per_minute:
            tally.kept += 1
            await self._send(key, _letter(stream, subject, sequence, time_ns, data, reason, key[1]))
            return
        name = reason if reason in tally.reasons or len(tally.reasons) < 8 else "~other reasons"
        tally.reasons[name] = tally.reasons.get(name, 0) + 1

    async def advance(self, time_ns: int) -> None:
        """Broker time went on: minutes that are over get their count. Call it with ticks, so that no count waits."""
        minute = time_ns // _MINUTE_NS
        if minute <= self._minute:
            return
        self._minute = minute
        over = [key for key, tally in self._tallies.items() if tally.minute < minute]
        for key in over:
            tally = self._tallies.pop(key)
            if tally.seen > tally.kept:
                await self._count(key, tally)

    def dump(self) -> list[list[object]]:
        """The tallies as plain JSON values, for who keeps them with a stream's state."""
        return [[*key, t.minute, t.seen, t.kept, dict(t.reasons)] for key, t in sorted(self._tallies.items())]

    def load(self, tallies: list[list[Any]]) -> None:
        """Goes on from what `dump` gave."""
        self._tallies = {(stream, source): _Tally(*rest) for stream, source, *rest in tallies}

    async def close(self) -> None:
        """Publishes the counts that are still open."""
        for key in list(self._tallies):
            tally = self._tallies.pop(key)
            if tally.seen > tally.kept:
                await self._count(key, tally)

    async def _count(self, key: tuple[str, str], tally: _Tally) -> None:
        body = {
            "count": tally.seen - tally.kept,
            "minute": text_of(tally.minute * _MINUTE_NS),
            "reasons": dict(sorted(tally.reasons.items())),
            "source": key[1],
            "stream": key[0],
        }
        await self._send(key, body)

    async def _send(self, key: tuple[str, str], body: Mapping[str, object]) -> None:
        try:
            data = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "replace")
            await self._publish(f"deadletter.{token(key[0])}.{_source_token(key[1])}", data, {})
        except Exception:
            self.lost += 1


def _letter(stream: str, subject: str, sequence: int, time_ns: int, data: bytes, reason: str, source: str) -> dict[str, object]:
    kept = bytes(data[:KEPT_BYTES_MAX])
    try:
        body: dict[str, object] = {"data": kept.decode("utf-8")}
    except UnicodeDecodeError:
        body = {"data_base64": base64.b64encode(kept).decode("ascii")}
    return {
        **body,
        "bytes": len(data),
        "reason": reason,
        "sequence": sequence,
        "source": source,
        "stream": stream,
        "subject": subject,
        "time": text_of(time_ns),
    }


def _source_token(source: str) -> str:
    try:
        return token(source)
    except BadName:
        return "~unnameable"
