"""Many messages into one stream as one: JetStream's atomic batches (nats-server ADR-50), all stored or none, with one sync of the disk.

A log that syncs each message stores as many a second as the disk can sync; a burst's decisions and signals come together, and are
stored together.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from events.ports import LogError, LogUnavailable, StaleWriter

#: The server takes a thousand messages in one batch; the bytes are held by it until the batch is whole.
MESSAGES_MAX, BYTES_MAX = 500, 4 << 20
_STALE = (10071, 10164)
_TRANSIENT = (408, 429, 503)
#: With replicas: an earlier try of one of these messages is not through yet.
_IN_PROCESS = 10158


class Message(NamedTuple):
    """What is to be stored. The expectation of a whole batch stands in its first message's headers."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = {}


class NotAtomic(LogError):
    """The server did not take these as a batch (the stream does not allow it, one is a repeat): store them one by one."""


def batches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """In order, each no larger than the server takes."""
    start, size = 0, 0
    for at, message in enumerate(messages):
        if at > start and (at - start == MESSAGES_MAX or size + len(message.data) > BYTES_MAX):
            yield messages[start:at]
            start, size = at, 0
        size += len(message.data)
    if start < len(messages):
        yield messages[start:]


async def store(nc: Client, stream: str, messages: Sequence[Message], timeout_s: float) -> int:
    """Stores all or none and returns the last one's sequence. Raises StaleWriter, NotAtomic, LogUnavailable (it may be stored)."""
    batch = secrets.token_hex(8)
    last = len(messages)
    try:
        for number, message in enumerate(messages, 1):
            headers = {**message.headers, "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number < last:
                await nc.publish(message.subject, message.data, headers=headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            reply = await nc.request(message.subject, message.data, timeout=timeout_s, headers=headers)
    except MaxPayloadError:
        raise NotAtomic(f"a message of {len(message.data)} bytes is too large; the bus takes {nc.max_payload}") from None
    except (NatsError, OSError) as error:
        why = str(error).removeprefix("nats: ") or type(error).__name__
        raise LogUnavailable(f"{stream} did not take {last} messages: {why}") from error
    answer: dict[str, Any] = json.loads(reply.data)
    problem = answer.get("error")
    if problem is None:
        if answer.get("count") != last:
            raise NotAtomic(f"{stream} took the last of {last} messages alone: it knows nothing of batches")
        return int(answer["seq"])
    text = f"{stream}, {last} messages: {problem.get('description')} ({problem.get('err_code')})"
    if problem.get("err_code") in _STALE:
        raise StaleWriter(f"{text}; someone else wrote meanwhile")
    if problem.get("code") in _TRANSIENT or problem.get("err_code") == _IN_PROCESS:
        raise LogUnavailable(text)
    raise NotAtomic(text)
