"""Leases: which worker reads which partition. Keys of a bucket whose entries the broker forgets after a time (the bucket's own).

Each worker keeps a membership key and one key a partition that it holds, renews them each third of that time, and polls (a watch
hears nothing of expiry). Everyone's fair share follows from the members alone, so nobody has to be asked. A lease does not fence:
see fences.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from events.ports import Expect, LogError, LogUnavailable, StaleWriter
from events.subjects import BadName, name, token
from infra import clock
from infra.bus import BusClient
from infra.faust_transport.fences import last_of
from infra.jetstream import JetStreamLog
from infra.streams import api

#: A lease is taken to end this much before the broker forgets it.
_SURE = 0.9
_POLL_S_MAX = 1.0


def share(worker: str, members: Iterable[str], partitions: int) -> int:
    """How many partitions a worker should hold: the shares of all members sum up to all partitions."""
    ranked = sorted({worker, *members})
    base, rest = divmod(partitions, len(ranked))
    return base + (1 if ranked.index(worker) < rest else 0)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote a key: a worker, and the process that it was."""

    worker: str
    incarnation: str
    boot: str = ""
    pid: int = 0
    started: int = 0

    def encode(self) -> bytes:
        value = {
            "boot": self.boot,
            "incarnation": self.incarnation,
            "pid": self.pid,
            "started": self.started,
            "worker": self.worker,
        }
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """None for a key that was let go, or is not ours to read."""
        try:
            return cls(**json.loads(data)) if data else None
        except (ValueError, TypeError):
            return None

    def is_gone(self) -> bool:
        """Known to have ended: of this boot of this machine, and no such process any more."""
        return bool(self.boot) and self.boot == clock.boot_id() and clock.process_start_ticks(self.pid) != self.started


def this_process(worker: str) -> Holder:
    pid = os.getpid()
    return Holder(worker, clock.new_event_id(), clock.boot_id(), pid, clock.process_start_ticks(pid) or 0)


@dataclass(slots=True)
class _Held:
    sequence: int
    until_ns: int
    taking: int


class Leases:
    """One worker's. `open`, then `renew` each `renew_s` and `poll` each `poll_s`; `close` lets everything go."""

    def __init__(self, nc: BusClient, *, bucket: str, group: str, me: Holder, partitions: int) -> None:
        self._nc, self._stream, self._prefix = nc, f"KV_{bucket}", f"$KV.{bucket}.{group}"
        self._me, self._partitions = me, partitions
        self._log = JetStreamLog(nc, self._stream, timeout_s=2.0)
        self._held: dict[int, _Held] = {}
        self._ttl_ns = 0
        self._takings = 0
        self._busy = asyncio.Lock()
        self._closed = False
        self.members: tuple[str, ...] = ()

    @property
    def ttl_s(self) -> float:
        return self._ttl_ns / 1e9

    @property
    def renew_s(self) -> float:
        return self.ttl_s / 3

    @property
    def poll_s(self) -> float:
        return min(_POLL_S_MAX, self.ttl_s / 6)

    @property
    def held(self) -> frozenset[int]:
        """The partitions whose lease is not over by this machine's own clock."""
        now_ns = clock.boot_ns()
        return frozenset(p for p, held in self._held.items() if now_ns < held.until_ns)

    @property
    def takings(self) -> dict[int, int]:
        """The partitions held, and a number for when each was taken: another one means that it was lost in between."""
        held = self.held
        return {p: one.taking for p, one in self._held.items() if p in held}

    def lose(self, partition: int) -> None:
        """Someone else was seen to write there."""
        self._held.pop(partition, None)

    async def open(self) -> None:
        """Joins the members. Raises LogError if there is no such bucket."""
        answer = await api(self._nc, f"STREAM.INFO.{self._stream}")
        self._ttl_ns = int(answer.get("config", {}).get("max_age", 0))
        if not self._ttl_ns:
            raise LogError(
                f"the bus has no bucket {self._stream} whose keys end by themselves; make the streams with `keepstep up`"
            )
        await self._join()

    async def renew(self) -> bool:
        """Prolongs membership and leases; False if some could not be, so that it is tried again soon. A lease that someone else took
        is dropped; a bus that is away leaves all to run out."""
        async with self._busy:
            if self._closed:
                return True
            results = await asyncio.gather(self._join(), *(self._renew(p) for p in list(self._held)), return_exceptions=True)
        for partition in set(self._held) - self.held:
            del self._held[partition]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, LogUnavailable):
                raise result
        return not any(isinstance(result, BaseException) for result in results)

    async def poll(self) -> frozenset[int]:
        """Takes free partitions up to the fair share. Returns the ones held beyond it, to be given up with `release`."""
        listed = await self._listed()
        self.members = await self._members(listed)
        wanted = share(self._me.worker, self.members, self._partitions)
        held = self.held
        if len(held) > wanted:
            return frozenset(sorted(held)[wanted:])
        for partition in sorted(set(range(self._partitions)) - held):
            if len(held) >= wanted or self._closed:
                break
            if await self._take(partition, f"{self._prefix}.lease.{partition}" in listed):
                held = self.held
        return frozenset()

    async def release(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            held = self._held.pop(partition, None)
            if held is not None:
                await self._let_go(f"{self._prefix}.lease.{partition}", held.sequence)

    async def close(self) -> None:
        """So that others need not wait for the leases to run out."""
        async with self._busy:
            self._closed = True
        await self.release(list(self._held))
        subject = self._member_key()
        try:
            found = await last_of(self._nc, self._stream, subject)
            if found.data == self._me.encode():
                await self._let_go(subject, found.sequence)
        except LogError:
            pass

    # -- inside -------------------------------------------------------------------------------------------------------

    def _member_key(self) -> str:
        return f"{self._prefix}.member.{token(self._me.worker)}"

    async def _join(self) -> None:
        await self._log.append(self._member_key(), self._me.encode())

    async def _let_go(self, subject: str, sequence: int) -> None:
        try:
            await self._log.append(subject, b"", expect=Expect(subject, sequence))
        except LogError:
            pass  # it runs out by itself

    async def _renew(self, partition: int) -> None:
        held, subject, began_ns = self._held[partition], f"{self._prefix}.lease.{partition}", clock.boot_ns()
        try:
            sequence = (await self._log.append(subject, self._me.encode(), expect=Expect(subject, held.sequence))).sequence
        except StaleWriter:
            found = await last_of(self._nc, self._stream, subject)
            if found.data != self._me.encode():
                if self._held.get(partition) is held:
                    del self._held[partition]
                return
            sequence = found.sequence
        if self._held.get(partition) is held:
            held.sequence, held.until_ns = sequence, began_ns + int(self._ttl_ns * _SURE)

    async def _take(self, partition: int, is_listed: bool) -> bool:
        subject, sequence = f"{self._prefix}.lease.{partition}", 0
        if is_listed:
            found = await last_of(self._nc, self._stream, subject)
            holder = Holder.decode(found.data)
            mine = holder is not None and holder.worker == self._me.worker
            if holder is not None and not (mine and (holder == self._me or holder.is_gone())):
                return False
            sequence = found.sequence
        began_ns = clock.boot_ns()
        try:
            ack = await self._log.append(subject, self._me.encode(), expect=Expect(subject, sequence))
        except StaleWriter:
            return False
        self._takings += 1
        self._held[partition] = _Held(ack.sequence, began_ns + int(self._ttl_ns * _SURE), self._takings)
        return True

    async def _listed(self) -> set[str]:
        answer = await api(self._nc, f"STREAM.INFO.{self._stream}", {"subjects_filter": f"{self._prefix}.>"}, 2.0)
        if "error" in answer:
            raise LogError(f"{self._stream}: {answer['error'].get('description')}")
        return set(answer["state"].get("subjects") or {})

    async def _members(self, listed: set[str]) -> tuple[str, ...]:
        prefix = f"{self._prefix}.member."
        members = []
        for subject in sorted(s for s in listed if s.startswith(prefix)):
            if Holder.decode((await last_of(self._nc, self._stream, subject)).data) is not None:
                try:
                    members.append(name(subject[len(prefix) :]))
                except BadName:
                    continue
        return tuple(members)
