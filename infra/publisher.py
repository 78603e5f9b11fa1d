"""Telemetry's publisher: many messages in flight through JetStream, each acknowledgement awaited, a bound on what is in flight.

What was not acknowledged in time, or was in flight when the connection broke, comes back to the caller, who keeps it (the
agent's spool) and sends it again; what arrives twice is dropped by its running number.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from events.ports import LogError, LogUnavailable
from infra.bus import BusClient, encode_headers

IN_FLIGHT_MAX = 1000
FAILED_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Failed:
    """A message that is not known to be stored, with the reason. `again`: sending it again can help."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reason: str
    again: bool


@dataclass(slots=True)
class _Sent:
    subject: str
    data: bytes
    headers: Mapping[str, str]
    deadline_s: float
    done: Callable[[Failed | None], None] | None


class Publisher:
    """`publish` waits for a free place only. Failures go to the message's `done`, else they wait for `take_failed` or `drain`."""

    def __init__(self, nc: Client, *, in_flight_max: int = IN_FLIGHT_MAX, ack_s_max: float = 5.0) -> None:
        self._nc, self._in_flight_max, self._ack_s_max = nc, in_flight_max, ack_s_max
        self._sent: dict[str, _Sent] = {}
        self._failed: list[Failed] = []
        self._room = asyncio.Event()
        self._prefix, self._number = "", 0
        self._subscription: Subscription | None = None
        self._watch: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self.acknowledged = self.dropped = 0

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    async def publish(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        done: Callable[[Failed | None], None] | None = None,
    ) -> None:
        """Sends one message; returns before its acknowledgement. Raises LogUnavailable or LogError if it can't be sent at all."""
        if self._subscription is None:
            await self._open()
        while len(self._sent) >= self._in_flight_max:
            self._room.clear()
            await self._room.wait()
        self._number += 1
        key = str(self._number)
        self._sent[key] = _Sent(subject, data, headers or {}, time.monotonic() + self._ack_s_max, done)
        try:
            await self._nc.publish(subject, data, reply=self._prefix + key, headers=dict(headers) if headers else None)
        except MaxPayloadError:
            self._sent.pop(key, None)
            raise LogError(f"a message of {len(data)} bytes is too large; the bus takes {self._nc.max_payload}") from None
        except (NatsError, OSError) as error:
            self._sent.pop(key, None)
            raise LogUnavailable(f"the bus is out of reach: {str(error).removeprefix('nats: ')}") from error
        except BaseException:
            self._sent.pop(key, None)
            raise

    def take_failed(self) -> list[Failed]:
        failed, self._failed = self._failed, []
        return failed

    async def drain(self, timeout_s: float | None = None) -> list[Failed]:
        """Waits until nothing is in flight (each message has its own deadline), then hands over what failed."""
        deadline = time.monotonic() + (self._ack_s_max + 1 if timeout_s is None else timeout_s)
        while self._sent and (left := deadline - time.monotonic()) > 0:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), min(left, 0.25))
            except TimeoutError:
                pass
        for key in list(self._sent):
            self._fail(key, "not acknowledged in time")
        return self.take_failed()

    async def close(self) -> list[Failed]:
        """Drains and lets go of the connection, which stays open."""
        failed = await self.drain()
        if self._watch is not None:
            self._watch.cancel()
        if isinstance(self._nc, BusClient):
            self._nc.on_disconnect.discard(self._on_disconnect)
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            if isinstance(self._nc, BusClient):
                await self._nc.unsubscribe_raw(subscription)
            else:
                try:
                    await subscription.unsubscribe()
                except NatsError:
                    pass
        return failed

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        async with self._opening:
            if self._subscription is not None:
                return
            self._prefix = self._nc.new_inbox() + "."
            try:
                if isinstance(self._nc, BusClient):
                    subscription = await self._nc.subscribe_raw(self._prefix + "*", self._take)
                    self._nc.on_disconnect.add(self._on_disconnect)
                else:
                    subscription = await self._nc.subscribe(self._prefix + "*", cb=self._take_slowly)
            except (NatsError, OSError) as error:
                raise LogUnavailable(f"the bus is out of reach: {error}") from error
            self._watch = asyncio.ensure_future(self._watch_deadlines())
            self._subscription = subscription

    def _take(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        key = subject[len(self._prefix) :]
        if key not in self._sent:
            return
        if not data:
            self._fail(key, "no stream takes this subject, or JetStream is away" if headers else "an empty answer")
            return
        try:
            answer = json.loads(data)
            error = answer.get("error")
        except (ValueError, AttributeError):
            self._fail(key, "an answer that is not JetStream's")
            return
        if error:
            again = int(error.get("code", 0)) in (408, 429, 503)
            self._fail(key, f"{error.get('description')} ({error.get('err_code')})", again=again)
            return
        sent = self._sent.pop(key)
        self.acknowledged += 1
        self._room.set()
        if sent.done is not None:
            sent.done(None)

    async def _take_slowly(self, message: Msg) -> None:
        self._take(message.subject, message.reply, message.data, encode_headers(message.headers))

    def _fail(self, key: str, reason: str, *, again: bool = True) -> None:
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        self._room.set()
        failed = Failed(sent.subject, sent.data, sent.headers, reason, again)
        if sent.done is not None:
            sent.done(failed)
        elif len(self._failed) < FAILED_MAX:
            self._failed.append(failed)
        else:
            self.dropped += 1

    def _on_disconnect(self) -> None:
        for key in list(self._sent):
            self._fail(key, "the connection broke before the acknowledgement")

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            now_s = time.monotonic()
            for key, sent in list(self._sent.items()):  # in the order of their deadlines
                if sent.deadline_s > now_s:
                    break
                self._fail(key, f"not acknowledged within {self._ack_s_max:g} s")
