"""A lease in the bucket LEASES: one owner at a time, others wait. It is renewed each third of its time to live.

A lease does not fence: a holder that was frozen may wake after another took over. So `held` goes by a clock of this machine that
counts suspended time, from *before* the request that renewed it; it is over for its holder no later than for the server. What
takes effect is guarded by the logs' expectations all the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from events.ports import LogUnavailable
from events.subjects import token
from infra import clock
from infra.streams import LEASES, Limits, api
from infra.tasks import ended

TTL_S = Limits().lease_ttl_ns / 1e9
_WRONG_LAST = 10071


class LeaseLost(Exception):
    """The lease is over: another may hold it. Stop acting."""


class Lease:
    """`name` is what is leased, `owner` who asks (unique to a process). The bucket's time to live rules on the server; `ttl_s` is
    what this holder counts on, at most that.

        async with Lease(nc, "decider", owner) as lease:   # waits while another holds it
            lease.check()                                  # before each effect; raises LeaseLost
    """

    def __init__(
        self, nc: Client, name: str, owner: str, ttl_s: float = TTL_S, *, on_lost: Callable[[], None] | None = None
    ) -> None:
        self._nc, self._name, self._owner, self._ttl_s, self._on_lost = nc, name, owner, ttl_s, on_lost
        self._key = f"lease.{_key(name)}"
        self._value = json.dumps({"owner": owner}).encode()
        self._revision = 0
        self._until_ns = 0
        self._ttl_known = False
        self._renewing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def held(self) -> bool:
        """Whether this owner may still act, by this machine's clock."""
        return self._revision != 0 and clock.boot_ns() < self._until_ns

    @property
    def left_s(self) -> float:
        return max(0.0, (self._until_ns - clock.boot_ns()) / 1e9) if self._revision else 0.0

    def check(self) -> None:
        """Raises LeaseLost unless it is held."""
        if not self.held:
            raise LeaseLost(f"{self._owner} no longer holds the lease {self._name}")

    async def try_acquire(self) -> bool:
        """One try: True if it is ours now. Raises LogUnavailable."""
        if self.held:
            return True
        await self._know_ttl()
        asked_ns = clock.boot_ns()
        self._revision = 0
        found = await self._look()
        if found is not None and found[1] and found[1] != self._owner:
            return False
        # Ours from before (its answer was lost), or free: written only if nobody wrote meanwhile.
        revision = await self._write(self._value, found[0] if found is not None else 0)
        if revision is None:
            return False
        self._revision, self._until_ns = revision, asked_ns + int(self._ttl_s * 1e9)
        return True

    async def acquire(self, timeout_s: float | None = None) -> None:
        """Waits while another holds it, polling: watchers hear nothing of an expiry. Raises TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(LogUnavailable):
                    if await self.try_acquire():
                        return
                await asyncio.sleep(min(1.0, self._ttl_s / 6))

    async def renew(self) -> None:
        """Once. Raises LeaseLost if another took it or it is over, LogUnavailable if the bus did not answer (it may be tried again)."""
        self.check()
        asked_ns = clock.boot_ns()
        revision = await self._write(self._value, self._revision)
        if revision is None:
            found = await self._look()
            if found is None or found[1] != self._owner:
                self._over()
                raise LeaseLost(f"the lease {self._name} was taken by {found[1] if found else 'nobody'}")
            revision = found[0]  # our own renewal, whose answer was lost
        self._revision, self._until_ns = revision, asked_ns + int(self._ttl_s * 1e9)

    async def release(self) -> None:
        """Gives it up, so that another need not wait for it to expire."""
        await self._stop_renewing()
        revision, self._revision = self._revision, 0
        if revision:
            with suppress(LogUnavailable):
                await self._write(b"", revision)

    async def keep(self) -> None:
        """Renews each third of the time to live, until it is lost (raises LeaseLost) or cancelled."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.renew()
            except LogUnavailable:
                while True:  # the bus is away: quicker tries, as long as the lease lasts
                    self.check()
                    await asyncio.sleep(min(0.25, self._ttl_s / 10))
                    with suppress(LogUnavailable):
                        await self.renew()
                        break

    async def __aenter__(self) -> Lease:
        await self.acquire()
        self._renewing = asyncio.create_task(self._keep_and_tell(), name=f"lease {self._name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    async def _keep_and_tell(self) -> None:
        try:
            await self.keep()
        except LeaseLost:
            self._over()
            if self._on_lost is not None:
                self._on_lost()

    async def _stop_renewing(self) -> None:
        task, self._renewing = self._renewing, None
        if task is not None and task is not asyncio.current_task():
            await ended(task)

    def _over(self) -> None:
        self._revision = self._until_ns = 0

    async def _know_ttl(self) -> None:
        """A holder that counts on more than the bucket gives would act beside the next one."""
        if not self._ttl_known:
            answer = await api(self._nc, f"STREAM.INFO.KV_{LEASES}", None, self._patience_s)
            if "error" in answer:
                raise LogUnavailable(f"the bucket {LEASES} can't be looked up: {answer['error'].get('description')}")
            self._ttl_s = min(self._ttl_s, (int(answer["config"].get("max_age", 0)) or 1 << 62) / 1e9)
            self._ttl_known = True

    async def _look(self) -> tuple[int, str] | None:
        """(revision, owner) of what the bucket holds; an owner of "" was released; None: nothing."""
        try:
            message: RawStreamMsg = await self._nc.jetstream(timeout=self._patience_s).get_last_msg(
                f"KV_{LEASES}", f"$KV.{LEASES}.{self._key}"
            )
        except NotFoundError:
            return None
        except (NatsError, OSError) as error:
            raise LogUnavailable(f"the bus did not answer for the lease {self._name}: {error}") from error
        try:
            owner = json.loads(message.data or b"{}").get("owner", "")
        except (ValueError, AttributeError):
            owner = "?"
        return int(message.seq or 0), str(owner)

    async def _write(self, value: bytes, last: int) -> int | None:
        """The new revision, None if someone else wrote meanwhile."""
        headers = {"Nats-Expected-Last-Subject-Sequence": str(last)}
        try:
            ack = await self._nc.jetstream().publish(
                f"$KV.{LEASES}.{self._key}", value, timeout=self._patience_s, headers=headers
            )
        except APIError as error:
            if error.err_code == _WRONG_LAST:
                return None
            raise LogUnavailable(f"the lease {self._name} can't be written: {error.description}") from error
        except (NatsError, OSError) as error:
            raise LogUnavailable(f"the bus did not answer for the lease {self._name}: {error}") from error
        return ack.seq

    @property
    def _patience_s(self) -> float:
        return max(0.2, min(2.0, self._ttl_s / 3))


def _key(name: str) -> str:
    """A name as a bucket's key: those allow no `%`."""
    return token(name).replace("%", "=")
