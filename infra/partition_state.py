"""One partition of a detector as a worker holds it: the fold, the dead letters' tallies, and both as what a table stores.

No I/O: records in, appends out, snapshots to write. The clock is stored last, under a key of its own, with the tallies. It says
up to where everything is folded, and so where reading starts again; a committed offset is only a hint beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from events import subjects
from events.ports import Record
from events.registry import canonical, canonical_json
from infra.deadletter import DeadLetters
from infra.faust_transport.appends import Append
from processors.detector import Detector, Keyed, Outgoing, PartitionFold, Refused, dump_clock, load_clock

_TABLE_KEY = re.compile(r"(\d+)([=@])(.*)", re.DOTALL)


class UnreadableState(ValueError):
    """A table's value that this code can't read. One sentence."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to write: the changed keys in any order, then the clock."""

    keys: list[tuple[bytes, bytes]]
    clock: tuple[bytes, bytes]


def clock_key(partition: int) -> bytes:
    return f"{partition}@clock".encode()


def state_key(partition: int, key: str) -> bytes:
    return f"{partition}={key}".encode("utf-8", "surrogatepass")


def split_key(table_key: bytes) -> tuple[int, str | None]:
    """(partition, key), the key None for the clock's. Keys of one table are told apart by their partition's number."""
    match = _TABLE_KEY.fullmatch(table_key.decode("utf-8", "surrogatepass"))
    if match is None:
        raise UnreadableState(
            f"the table holds the key {table_key[:80]!r}, which is not ours; remove the changelog to rebuild it"
        )
    return int(match[1]), match[3] if match[2] == "=" else None


class PartitionState:
    def __init__(self, detector: Detector[Any], partition: int, stream: str) -> None:
        self.partition, self.stream = partition, stream
        self.fold: PartitionFold[Any] = PartitionFold(detector)
        self._letters: list[Append] = []
        self._dead = DeadLetters(self._keep)
        self._stored_sequence = 0

    @property
    def sequence(self) -> int:
        """Everything up to here is folded."""
        return self.fold.clock.sequence

    @property
    def is_dirty(self) -> bool:
        return bool(self.fold.changed) or self.sequence != self._stored_sequence

    def restore(self, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """From the table's values of this partition. Raises UnreadableState."""
        fold = self.fold
        for table_key, raw in stored:
            _, key = split_key(table_key)
            try:
                value = json.loads(raw)
                if key is None:
                    fold.clock = load_clock(value["clock"])
                    self._dead.load(value["letters"])
                else:
                    fold.keys[key] = Keyed(fold.detector.load(key, value["state"]), int(value["sequence"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableState(
                    f"the state of {key or 'the clock'!r} in partition {self.partition} is not readable by this version "
                    f"({type(error).__name__}: {str(error)[:200]}); remove the changelog to rebuild it from telemetry"
                ) from error
        self._stored_sequence = self.sequence

    def clamp(self, last_sequence: int) -> bool:
        """The stream ends before what was folded: the broker lost its end. State stands, and what comes next is new."""
        if self.sequence <= last_sequence:
            return False
        self.fold.clock = self.fold.clock._replace(sequence=last_sequence)
        for key, keyed in self.fold.keys.items():
            if keyed.sequence > last_sequence:
                keyed.sequence = last_sequence
                self.fold.changed.add(key)
        return True

    async def feed(self, records: Iterable[Record]) -> list[Append]:
        """Folds records and returns what they give: events for LEDGER, letters for DEADLETTER."""
        out: list[Append] = []
        feed = self.fold.feed
        last: Record | None = None
        for record in records:
            derived, refused = feed(record)
            if derived:
                out.extend(_append(one) for one in derived)
            if refused is not None:
                await self._refuse(refused)
            last = record
        if last is not None:
            await self._dead.advance(last.time_ns)
        if self._letters:
            out.extend(self._letters)
            self._letters.clear()
        return out

    def snapshot(self) -> Snapshot:
        """What changed since the last one."""
        fold = self.fold
        changed, fold.changed = fold.changed, set()
        dump = fold.detector.dump
        keys = []
        for key in sorted(changed):
            keyed = fold.keys[key]
            keys.append(
                (state_key(self.partition, key), canonical_json({"sequence": keyed.sequence, "state": dump(keyed.state)}))
            )
        self._stored_sequence = self.sequence
        clock = canonical_json({"clock": dump_clock(fold.clock), "letters": self._dead.dump()})
        return Snapshot(keys, (clock_key(self.partition), clock))

    async def _refuse(self, refused: Refused) -> None:
        record = refused.record
        parts = record.subject.split(".")
        source = parts[2] if len(parts) > 3 and parts[0] in ("tn", "tj") else parts[0]
        try:
            source = subjects.name(source)
        except subjects.BadName:
            pass
        await self._dead.refuse(
            self.stream, record.subject, record.sequence, record.time_ns, record.data, refused.reason, source or record.subject
        )

    async def _keep(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        """The same letter again has the same id, so that reading again does not double it."""
        self._letters.append(Append(subject, data, {**headers, "Nats-Msg-Id": f"letter-{sha256(data).hexdigest()[:32]}"}))


def _append(out: Outgoing) -> Append:
    return Append(out.subject, canonical(out.event), {"Nats-Msg-Id": out.event.id})
