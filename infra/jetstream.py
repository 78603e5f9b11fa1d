"""The log on JetStream: one stream appended to and read in order (events.ports.EventLog), and timers as scheduled messages.

Reading uses a consumer of its own with two batches of pull requests in flight, so that what waits in memory has a bound in
messages and bytes; it resumes by sequence after a lost connection or consumer, and notices a log that went back.
Times are the integer nanoseconds of the acknowledgement subject, never a datetime.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadHeaderError, BadSubjectError, MaxPayloadError
from nats.errors import Error as NatsError

from events.clock import text_of
from events.ports import Ack, Expect, LogError, LogUnavailable, Record, StaleWriter
from events.subjects import token
from infra import batch
from infra.bus import BusClient, connect, connect_to_store, connect_with_seed, decode_headers, encode_headers, header
from infra.publisher import Failed, Publisher
from infra.streams import api

__all__ = [
    "BusClient",
    "Failed",
    "JetStreamLog",
    "JetStreamTimers",
    "LogWentBack",
    "Publisher",
    "connect",
    "connect_to_store",
    "connect_with_seed",
]

BATCH = 500
BATCH_BYTES_MAX = 8 << 20
_HEARTBEAT_S, _EXPIRES_S, _SILENCE_S_MAX = 5, 30, 12.0
_RETRY_S, _RETRY_S_MAX = 0.1, 1.0
#: Unknown stream; expectation did not hold (single server; clustered, another write in flight).
_NO_STREAM = 10059
_STALE = (10071, 10164)
#: With replicas: an earlier try of the same message is not through yet.
_IN_PROCESS = 10158
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*\Z")


class LogWentBack(LogError):
    """The log ends before, or differs at, what was read from it: the broker lost or replaced history. Start again from state."""


class _Lost(Exception):
    """The consumer is gone; read on with a new one."""


class JetStreamLog:
    """One stream. `timeout_s` bounds each request; `patience_s` how long a reading without `follow` waits for a bus that is away."""

    def __init__(self, nc: Client, stream: str, *, timeout_s: float = 5.0, patience_s: float = 30.0) -> None:
        self._nc, self._stream, self._timeout_s, self._patience_s = nc, stream, timeout_s, patience_s

    @property
    def stream(self) -> str:
        return self._stream

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        expect: Expect | None = None,
    ) -> Ack:
        all_headers = {"Nats-Expected-Stream": self._stream, **(headers or {})}
        if message_id is not None:
            all_headers["Nats-Msg-Id"] = message_id
        if expect is not None:
            all_headers["Nats-Expected-Last-Subject-Sequence"] = str(expect.last_sequence)
            all_headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect.subjects
        try:
            return await _store(self._nc, self._stream, subject, data, all_headers, self._timeout_s)
        except StaleWriter:
            if expect is not None and message_id is not None and (own := await self._own(expect, message_id)):
                return Ack(own, duplicate=True)
            raise

    async def append_all(self, messages: Sequence[tuple[str, bytes, str]], *, expect: Expect | None = None) -> int:
        """Batch after batch, each whole or not at all; one by one where the server does not take batches."""
        last = 0
        for part in batch.batches([batch.Message(subject, data, {"Nats-Msg-Id": id_}) for subject, data, id_ in messages]):
            if len(part) > 1:
                try:
                    last = await self._append_batch(part, expect)
                    expect = Expect(expect.subjects, last) if expect else None
                    continue
                except batch.NotAtomic:
                    pass
            for one in part:
                ack = await self.append(one.subject, one.data, message_id=one.headers["Nats-Msg-Id"], expect=expect)
                last = ack.sequence
                expect = Expect(expect.subjects, max(last, expect.last_sequence)) if expect else None
        return last

    async def _append_batch(self, part: Sequence[batch.Message], expect: Expect | None) -> int:
        headers = {"Nats-Expected-Stream": self._stream, **part[0].headers}
        if expect is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect.last_sequence)
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect.subjects
        first = batch.Message(part[0].subject, part[0].data, headers)
        try:
            return await batch.store(self._nc, self._stream, [first, *part[1:]], self._timeout_s)
        except StaleWriter:
            if expect is not None and (last := await self._own_batch(part, expect)):
                return last
            raise

    async def _own_batch(self, part: Sequence[batch.Message], expect: Expect) -> int:
        """The last sequence of this very batch, if it is what came right after the expected one: its answer was lost."""
        last, left = 0, [one.data for one in part]
        async with aclosing(self.read(after=expect.last_sequence, subjects=(expect.subjects,))) as records:  # type: ignore[type-var]
            async for record in records:
                if not left or record.data != left.pop(0):
                    return 0
                last = record.sequence
        return 0 if left else last

    async def _own(self, expect: Expect, message_id: str) -> int:
        """The sequence of this very message, if it is what came right after the expected one: its answer was lost, and the
        append was tried again. The server looks at the expectation before it looks for a repeat."""
        body = {"seq": expect.last_sequence + 1, "next_by_subj": expect.subjects}
        answer = await api(self._nc, f"STREAM.MSG.GET.{self._stream}", body, self._timeout_s)
        message = answer.get("message") or {}
        stored = header(base64.b64decode(message.get("hdrs") or ""), b"Nats-Msg-Id")
        return int(message["seq"]) if stored == message_id else 0

    async def last_sequence(self, subjects: str = ">") -> int:
        if subjects == ">":
            return int((await self._info())["state"]["last_seq"])
        answer = await api(self._nc, f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subjects}, self._timeout_s)
        error = answer.get("error")
        if error is None:
            return int(answer["message"]["seq"])
        if error.get("err_code") == 10037:
            return 0
        raise _refusal(self._stream, error)

    async def read(self, *, after: int = 0, subjects: Sequence[str] = (), follow: bool = False) -> AsyncIterator[Record]:
        end = None if follow else await self._end(subjects)
        if end is not None and end <= after:
            return
        last: Record | None = None
        failed_s, pause_s = 0.0, _RETRY_S
        while True:
            position = after if last is None else last.sequence
            consumer = _Consumer(self._nc, self._stream, position, last, subjects, end, self._timeout_s)
            try:
                async with aclosing(consumer.records()) as records:
                    async for record in records:
                        failed_s, pause_s = 0.0, _RETRY_S
                        last = record
                        yield record
                return
            except (LogUnavailable, _Lost) as error:
                if self._nc.is_closed:
                    raise LogUnavailable("the connection to the bus is closed; connect again") from error
                if not follow and failed_s >= self._patience_s:
                    raise LogUnavailable(f"reading {self._stream} gave up after {failed_s:.0f} s: {error}") from error
                await asyncio.sleep(pause_s)
                failed_s += pause_s + (self._timeout_s if isinstance(error, LogUnavailable) and self._nc.is_connected else 0)
                pause_s = min(pause_s * 2, _RETRY_S_MAX)

    async def _end(self, subjects: Sequence[str]) -> int:
        """The last sequence of these subjects, as the stream's leader has it."""
        return max([await self.last_sequence(one) for one in subjects or (">",)])

    async def _info(self) -> dict[str, Any]:
        answer = await api(self._nc, f"STREAM.INFO.{self._stream}", None, self._timeout_s)
        if "error" in answer:
            raise _refusal(self._stream, answer["error"])
        return answer


class _Consumer:
    """One ephemeral consumer, from after `position`. With `last` it starts at that record and checks that it is still the same."""

    def __init__(
        self,
        nc: Client,
        stream: str,
        position: int,
        last: Record | None,
        subjects: Sequence[str],
        end: int | None,
        timeout_s: float,
    ) -> None:
        self._nc, self._stream, self._position, self._last, self._subjects = nc, stream, position, last, subjects
        self._end, self._timeout_s = end, timeout_s
        self._waiting: deque[tuple[str, str, bytes, bytes]] = deque()
        self._bytes = self._asked = 0
        self._wake = asyncio.Event()
        self._lost = ""
        self._reconnects = 0

    async def records(self) -> AsyncGenerator[Record, None]:
        nc, inbox = self._nc, self._nc.new_inbox()
        self._reconnects = nc.stats["reconnects"]
        hook = self._on_reconnect
        if isinstance(nc, BusClient):
            subscription = await _transient(nc.subscribe_raw(inbox, self._take))
            nc.on_reconnect.add(hook)
        else:
            subscription = await _transient(nc.subscribe(inbox, cb=self._take_slowly, pending_msgs_limit=4 * BATCH))
        name = ""
        try:
            name, pending = await self._create()
            if self._end is not None and not pending and await self._is_all():
                return
            next_ = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}"
            expected = 1
            await self._ask(next_, inbox)
            while True:
                while not self._waiting:
                    await self._wait(next_, inbox)
                subject, reply, data, headers = self._waiting.popleft()
                self._bytes -= len(data)
                if self._asked + len(self._waiting) <= BATCH and self._bytes < BATCH_BYTES_MAX:
                    await self._ask(next_, inbox)
                sequence, delivered, time_ns, pending = parse_ack(reply)
                if delivered != expected:
                    raise _Lost(f"delivery {delivered} came where {expected} was due")
                expected += 1
                if self._end is not None and sequence > self._end:
                    return
                if sequence > self._position:
                    yield Record(self._stream, sequence, time_ns, subject, data, decode_headers(headers))
                elif self._last is not None and (sequence, time_ns) != (self._last.sequence, self._last.time_ns):
                    raise LogWentBack(f"{self._stream} has another message at {sequence} than what was read there before")
                if self._end is not None and (sequence == self._end or (not pending and await self._is_all(sequence))):
                    return
        finally:
            if isinstance(nc, BusClient):
                nc.on_reconnect.discard(hook)
                await nc.unsubscribe_raw(subscription)
            else:
                await _quietly(subscription.unsubscribe())
            if name and nc.is_connected:
                await _quietly(nc.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}"))

    async def _create(self) -> tuple[str, int]:
        start = self._position if self._last is not None else self._position + 1
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence" if start > 1 else "all",
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 60_000_000_000,
        }
        if start > 1:
            config["opt_start_seq"] = start
        if self._subjects:
            config["filter_subjects"] = list(self._subjects)
        body = {"stream_name": self._stream, "config": config}
        answer = await api(self._nc, f"CONSUMER.CREATE.{self._stream}", body, self._timeout_s)
        if "error" in answer:
            raise _refusal(self._stream, answer["error"])
        if self._position and answer.get("num_pending", 0) == 0:
            await self._check_end()
        return str(answer["name"]), int(answer.get("num_pending", 0))

    async def _is_all(self, sequence: int = 0) -> bool:
        """Whether nothing up to the end comes after `sequence`, though the consumer has no more: its server, one of several, may lag
        behind the leader; or what was the end has been removed since."""
        for subject in self._subjects or (">",):
            body = {"last_by_subj": subject}
            answer = await api(self._nc, f"STREAM.MSG.GET.{self._stream}", body, self._timeout_s)
            if int((answer.get("message") or {}).get("seq", 0)) > max(sequence, self._position):
                return False
        return True

    async def _check_end(self) -> None:
        answer = await api(self._nc, f"STREAM.INFO.{self._stream}", None, self._timeout_s)
        end = answer.get("state", {}).get("last_seq")
        if end is not None and end < self._position:
            raise LogWentBack(f"{self._stream} ends at {end}, before {self._position}, which was read from it")

    async def _ask(self, next_: str, inbox: str) -> None:
        body = {
            "batch": BATCH,
            "max_bytes": BATCH_BYTES_MAX,
            "expires": _EXPIRES_S * 1_000_000_000,
            "idle_heartbeat": _HEARTBEAT_S * 1_000_000_000,
        }
        self._asked += BATCH
        await _transient(self._nc.publish(next_, json.dumps(body).encode(), reply=inbox))

    async def _wait(self, next_: str, inbox: str) -> None:
        if not self._lost and self._asked <= 0:
            await self._ask(next_, inbox)
        self._wake.clear()
        if self._lost:
            raise _Lost(self._lost)
        try:
            async with asyncio.timeout(
                _SILENCE_S_MAX
            ):  # not wait_for, which in Python 3.11 swallows a cancellation that races a wake
                await self._wake.wait()
        except TimeoutError:
            self._lost = self._lost or f"nothing was heard from the consumer for {_SILENCE_S_MAX:.0f} s"
        if self._nc.stats["reconnects"] != self._reconnects:
            self._lost = self._lost or "reconnected"

    def _take(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        if reply.startswith("$JS.ACK."):
            self._asked -= 1
            self._bytes += len(data)
            self._waiting.append((subject, reply, data, headers))
        else:
            self._status(headers)
        if not self._wake.is_set():
            self._wake.set()

    async def _take_slowly(self, message: Msg) -> None:
        self._take(message.subject, message.reply, message.data, encode_headers(message.headers))

    def _status(self, headers: bytes) -> None:
        status = headers[len(b"NATS/1.0 ") : headers.find(b"\r\n")].decode("utf-8", "replace")
        code, _, text = status.partition(" ")
        if code == "100":
            return
        if code == "408" or (code == "409" and text in ("Batch Completed", "Message Size Exceeds MaxBytes")):
            self._asked = max(0, self._asked - int(header(headers, b"Nats-Pending-Messages") or BATCH))
            return
        self._lost = status or "an unknown status"

    def _on_reconnect(self) -> None:
        self._lost = self._lost or "reconnected"
        self._wake.set()


class JetStreamTimers:
    """Timers as scheduled messages of TIMERS, whose target LEDGER sources (streams.py)."""

    def __init__(self, nc: Client, *, timeout_s: float = 5.0) -> None:
        self._nc, self._timeout_s = nc, timeout_s

    async def set_timer(self, timer_id: str, at_ns: int, job: str, kind: str, data: bytes) -> None:
        headers = {
            "Nats-Expected-Stream": "TIMERS",
            "Nats-Schedule": f"@at {text_of(at_ns)}",
            "Nats-Schedule-Target": f"fired.{token(job)}.{kind}",
        }
        await _store(self._nc, "TIMERS", f"timer.{token(timer_id)}", data, headers, self._timeout_s)


async def _store(nc: Client, stream: str, subject: str, data: bytes, headers: dict[str, str], timeout_s: float) -> Ack:
    if not _SUBJECT.match(subject):
        raise LogError(f"{subject!r} is not a subject that a message can have")
    if any(not (k.isascii() and v.isascii()) or "\n" in v or "\r" in v for k, v in headers.items()):
        raise LogError(f"a header of the message on {subject} is not plain ASCII; put other text into the data")
    try:
        reply = await nc.request(subject, data, timeout=timeout_s, headers=headers)
    except MaxPayloadError:
        raise LogError(f"a message of {len(data)} bytes on {subject} is too large; the bus takes {nc.max_payload}") from None
    except (BadSubjectError, BadHeaderError) as error:
        raise LogError(f"{subject!r} or one of its headers can't be sent: {error}") from None
    except (NatsError, OSError) as error:
        why = str(error).removeprefix("nats: ") or type(error).__name__
        raise LogUnavailable(f"{stream} did not take a message on {subject}: {why}") from error
    answer = json.loads(reply.data)
    if "error" in answer:
        raise _refusal(stream, answer["error"], subject)
    return Ack(int(answer["seq"]), bool(answer.get("duplicate")))


def _refusal(stream: str, error: Mapping[str, Any], subject: str = "") -> LogError:
    code, text = error.get("err_code"), error.get("description", "")
    where = f"{stream}, {subject}" if subject else stream
    if code in _STALE:
        return StaleWriter(f"{where}: {text}; someone else wrote meanwhile")
    if code == _NO_STREAM:
        return LogError(f"the bus has no stream {stream}; make the streams with `keepstep up`")
    if int(error.get("code", 0)) in (503, 408) or code == _IN_PROCESS:
        return LogUnavailable(f"{where}: {text} ({code})")
    return LogError(f"{where}: {text} ({code})")


def parse_ack(reply: str) -> tuple[int, int, int, int]:
    """(stream sequence, delivery, time in ns, pending) of `$JS.ACK.…`, with or without a domain's tokens."""
    parts = reply.split(".")
    at = 5 if len(parts) == 9 else 7
    return int(parts[at]), int(parts[at + 1]), int(parts[at + 2]), int(parts[at + 3])


async def _transient(call: Any) -> Any:
    try:
        return await call
    except (NatsError, OSError) as error:
        raise LogUnavailable(f"the bus is out of reach: {str(error).removeprefix('nats: ')}") from error


async def _quietly(call: Any) -> None:
    try:
        await call
    except (NatsError, OSError):
        pass
