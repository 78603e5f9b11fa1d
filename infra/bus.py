"""One connection to the bus: nats-py's client with sensible limits, its errors counted instead of printed, a fast path for reading.

It reconnects for ever, every quarter of a second, and buffers nothing meanwhile: what can't be sent now is its caller's to keep.
The fast path hands messages over as they come off the wire; nats-py's own parses every header in pure Python first, which
takes half of the time of a replay.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import AuthorizationError, StaleConnectionError
from nats.errors import Error as NatsError

from events.ports import LogUnavailable
from infra.embedded import find_connection
from infra.keys import connect_options

#: subject, reply, data, headers as they came (b"" for none). Runs in the connection's reading task: short, and never raises.
Take = Callable[[str, str, bytes, bytes], None]


class BusClient(Client):
    """nats-py's client; see the module. `problems` counts what went wrong, by kind; `last_problem` is the last one's text."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: Counter[str] = Counter()
        self.last_problem = ""
        #: Called after each reconnection and, with what was lost in between, after each loss of the connection.
        self.on_reconnect: set[Callable[[], None]] = set()
        self.on_disconnect: set[Callable[[], None]] = set()
        self._takers: dict[int, Take] = {}

    async def close(self, within_s: float = 2.0) -> None:
        """Closes within a time and without raising: nats-py's own cancels its tasks, and with a broken connection its caller."""
        closing = asyncio.ensure_future(super().close())
        await asyncio.wait({closing}, timeout=within_s)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled():
            closing.exception()

    async def subscribe_raw(self, subject: str, take: Take) -> Subscription:
        """A subscription whose messages go to `take`. Undo with `unsubscribe_raw`."""

        async def slow(message: Msg) -> None:  # only what slipped in before the taker stood
            take(message.subject, message.reply, message.data, encode_headers(message.headers))

        subscription = await self.subscribe(subject, cb=slow)
        self._takers[subscription._id] = take
        return subscription

    async def unsubscribe_raw(self, subscription: Subscription) -> None:
        self._takers.pop(subscription._id, None)
        try:
            await subscription.unsubscribe()
        except (NatsError, OSError):
            pass

    def fail_requests(self) -> None:
        """Requests in flight when the connection broke have no answer to wait for."""
        for future in list((self._resp_map or {}).values()):
            if not future.done():
                future.set_exception(StaleConnectionError())
                future.exception()  # whoever waits still gets it; of one that nobody waits for any more, nothing is to be said

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """nats-py speaks plainly to a server that asks for no TLS, whatever the URL says: `tls://` is meant."""
        await super()._process_info(info, initial_connection=initial_connection)
        current = self._current_server
        if initial_connection and current is not None and current.uri.scheme == "tls" and not info.get("tls_required"):
            raise NatsError("it speaks no TLS, which tls:// asks for")

    def not_permitted(self) -> str:
        """What the server said that this key may not do; '' if nothing."""
        return self.last_problem if "permissions violation" in self.last_problem.lower() else ""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self._takers.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        take(bytes(subject).decode(), bytes(reply).decode(), data, headers or b"")


async def connect(
    url: str | Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "keepstep",
    tls: ssl.SSLContext | None = None,
    wait_s: float = 10.0,
    reconnect_wait_s: float = 0.25,
) -> BusClient:
    """Connects within `wait_s` or raises LogUnavailable. `url`: one, or those of a cluster's servers; `options`: an identity's
    (`EmbeddedServer.role_options`, `Key`, …)."""
    servers = [part for part in url.split(",") if part] if isinstance(url, str) else list(url)
    where = ", ".join(re.sub(r"//[^/@]*@", "//", server) for server in servers)  # a password in it is nobody's to read
    client = BusClient()
    refused = asyncio.Event()

    async def problem(error: Exception) -> None:
        client.problems[type(error).__name__] += 1
        client.last_problem = str(error)[:300]
        if isinstance(error, AuthorizationError) or "authorization violation" in client.last_problem.lower():
            refused.set()

    async def lost() -> None:
        client.problems["disconnected"] += 1
        client.fail_requests()
        _call(client, client.on_disconnect)

    async def back() -> None:
        _call(client, client.on_reconnect)

    attempt = asyncio.ensure_future(
        client.connect(
            servers,
            name=name,
            error_cb=problem,
            disconnected_cb=lost,
            reconnected_cb=back,
            closed_cb=lost,
            max_reconnect_attempts=-1,
            reconnect_time_wait=reconnect_wait_s,  # type: ignore[arg-type]
            connect_timeout=5,
            ping_interval=10,
            max_outstanding_pings=3,
            pending_size=0,
            allow_reconnect=True,
            tls=tls,
            **dict(options or {}),
        )
    )
    denied = asyncio.ensure_future(refused.wait())
    try:
        await asyncio.wait({attempt, denied}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if attempt.done() and attempt.exception() is None:
            return client
        error = attempt.exception() if attempt.done() else None
    finally:
        denied.cancel()
        if not attempt.done():
            attempt.cancel()
    await client.close()
    if refused.is_set() or isinstance(error, AuthorizationError):
        raise LogUnavailable(f"the bus at {where} refused this key; use the one that the server was given (`keepstep keys`)")
    why = str(error or "") or client.last_problem or "no answer"
    raise LogUnavailable(f"the bus at {where} is out of reach ({why}); start it with `keepstep up`, or give its URL")


async def connect_to_store(store: Path, user: str, **more: Any) -> BusClient:
    """To the embedded server that runs over this folder, as one of its users. Raises EmbeddedError, LogUnavailable."""
    found = find_connection(store)
    return await connect(found.url, found.options(user), **more)


async def connect_with_seed(url: str, seed_file: Path, user: str | None = None, **more: Any) -> BusClient:
    """With a seed file as `keepstep keys` writes it; its name is the user's unless `user` says otherwise."""
    return await connect(url, connect_options(user or seed_file.stem, seed_file), **more)


def _call(client: BusClient, hooks: set[Callable[[], None]]) -> None:
    for hook in list(hooks):
        try:
            hook()
        except Exception as error:  # one reader's fault must not end the connection's task
            client.problems["hook"] += 1
            client.last_problem = f"{type(error).__name__}: {error}"[:300]


# -- headers on the wire ----------------------------------------------------------------------------------------------

_LINE = b"NATS/1.0"


def decode_headers(raw: bytes) -> dict[str, str]:
    """`NATS/1.0[ status]\\r\\nname: value\\r\\n…` to a dict; an inline status appears as `Status` and `Description`.

    The server's own headers (`Nats-…`) are left out: they speak of delivery, not of the message. Undecodable bytes are replaced.
    """
    if not raw:
        return {}
    first, _, rest = raw.partition(b"\r\n")
    found: dict[str, str] = {}
    if len(first) > len(_LINE):
        status = first[len(_LINE) :].decode("utf-8", "replace").strip()
        found["Status"], _, found["Description"] = status.partition(" ")
    if rest.startswith(b"\r\n") or not rest:
        return found
    for line in rest.split(b"\r\n"):
        if not line.startswith(b"Nats-"):
            name, colon, value = line.partition(b":")
            if colon:
                found[name.decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def header(raw: bytes, name: bytes) -> str:
    """One header's value, the server's own included; "" if it is not there."""
    start = raw.find(b"\r\n" + name + b":")
    if start < 0:
        return ""
    start += len(name) + 3
    return raw[start : raw.find(b"\r\n", start)].strip().decode("utf-8", "replace")


def encode_headers(headers: Mapping[str, str] | None) -> bytes:
    """The wire form of headers that nats-py has parsed."""
    if not headers:
        return b""
    status = " ".join(headers[k] for k in ("Status", "Description") if k in headers)
    lines = [f"NATS/1.0 {status}".rstrip()] + [f"{k}: {v}" for k, v in headers.items() if k not in ("Status", "Description")]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace")
