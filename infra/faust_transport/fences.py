"""Fences: what makes a lease bite. A lease only says who should write; a write takes effect only while its fence stands.

- A changelog's partition has a fence subject. Whoever takes the partition writes there, and every write of its own expects that
  sequence to be the last: from then on the one before is refused, whatever key it writes (infra/decisions/020).
- A committed offset is a key of a bucket; taking the partition rewrites it, and a commit expects the owner's last revision.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from faust.types import TP

from events.ports import Expect, LogError, StaleWriter
from infra.bus import BusClient
from infra.faust_transport import topics
from infra.jetstream import JetStreamLog
from infra.streams import api

_NO_MESSAGE = 10037


@dataclass(frozen=True, slots=True)
class Found:
    """The last message of a subject. `sequence` 0: there is none."""

    sequence: int
    data: bytes


async def last_of(nc: BusClient, stream: str, subject: str) -> Found:
    """Raises LogUnavailable, LogError."""
    answer = await api(nc, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    error = answer.get("error")
    if error is None:
        message = answer["message"]
        return Found(int(message["seq"]), base64.b64decode(message.get("data") or ""))
    if error.get("err_code") == _NO_MESSAGE:
        return Found(0, b"")
    raise LogError(f"{stream}: {error.get('description')} ({error.get('err_code')}); make the streams with `keepstep up`")


class Fences:
    """The fences that this worker holds, by topic and partition."""

    def __init__(self, nc: BusClient, owner: bytes, group: str, bucket: str) -> None:
        self._nc, self._owner, self._group, self._bucket = nc, owner, group, bucket
        self._changelogs: dict[TP, int] = {}
        self._offsets: dict[TP, tuple[int, int]] = {}
        #: Of a stream with replicas only one write that expects the same subject may be in flight.
        self._replicated: dict[str, bool] = {}

    async def take(self, tp: TP) -> None:
        """From here on, what another worker writes to this partition of the topic is refused."""
        if topics.is_source(tp.topic):
            await self._take_offset(tp)
            return
        stream, subject = topics.stream_of(tp.topic), topics.fence(tp.topic, tp.partition)
        if stream not in self._replicated:
            answer = await api(self._nc, f"STREAM.INFO.{stream}")
            if "error" in answer:
                raise LogError(f"the bus has no stream {stream}; make the streams with `keepstep up`")
            self._replicated[stream] = answer["config"].get("num_replicas", 1) > 1
        last = await last_of(self._nc, stream, subject)
        log = JetStreamLog(self._nc, stream)
        self._changelogs[tp] = (await log.append(subject, self._owner, expect=Expect(subject, last.sequence))).sequence

    def drop(self, tp: TP) -> None:
        self._changelogs.pop(tp, None)
        self._offsets.pop(tp, None)

    def headers(self, tp: TP) -> dict[str, str]:
        """What a write to a changelog's partition carries. Raises StaleWriter without a fence."""
        sequence = self._changelogs.get(tp)
        if sequence is None:
            raise StaleWriter(f"this worker does not hold partition {tp.partition} of {tp.topic}")
        return {
            "Nats-Expected-Last-Subject-Sequence": str(sequence),
            "Nats-Expected-Last-Subject-Sequence-Subject": topics.fence(tp.topic, tp.partition),
        }

    def in_flight_max(self, tp: TP) -> int:
        return 1 if self._replicated.get(topics.stream_of(tp.topic)) else 512

    # -- offsets ------------------------------------------------------------------------------------------------------

    def _key(self, tp: TP) -> str:
        return f"$KV.{self._bucket}.{self._group}.{tp.topic}.{tp.partition}"

    async def _take_offset(self, tp: TP) -> None:
        subject = self._key(tp)
        last = await last_of(self._nc, f"KV_{self._bucket}", subject)
        offset = _offset_in(last.data)
        self._offsets[tp] = (await self._write_offset(subject, offset, last.sequence), offset)

    async def _write_offset(self, subject: str, offset: int, expected: int) -> int:
        data = json.dumps({"offset": offset, "owner": self._owner.decode()}, separators=(",", ":")).encode()
        log = JetStreamLog(self._nc, f"KV_{self._bucket}")
        try:
            return (await log.append(subject, data, expect=Expect(subject, expected))).sequence
        except StaleWriter:
            found = await last_of(self._nc, f"KV_{self._bucket}", subject)
            if found.data == data:  # stored before; only its answer was lost
                return found.sequence
            raise

    def committed(self, tp: TP) -> int:
        """The next sequence to read, as committed: 1 if nothing was."""
        return max(1, self._offsets.get(tp, (0, 1))[1])

    async def commit(self, tp: TP, offset: int) -> None:
        """Raises StaleWriter if another worker took the partition, LogUnavailable."""
        held = self._offsets.get(tp)
        if held is None:
            raise StaleWriter(f"this worker does not hold partition {tp.partition} of {tp.topic}")
        revision = await self._write_offset(self._key(tp), offset, held[0])
        if tp in self._offsets:
            self._offsets[tp] = (revision, offset)


def _offset_in(data: bytes) -> int:
    try:
        return max(1, int(json.loads(data)["offset"]))
    except (ValueError, TypeError, KeyError):
        return 1
