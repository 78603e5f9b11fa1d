"""Replay: fold the ledger's inputs again, and hold what is derived against what was recorded, byte for byte, in order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from events.ports import Record
from processors.decider import Decider, Derived, is_own


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where history and derivation part. `recorded` or `derived` is empty where there is none."""

    sequence: int
    trigger: int
    recorded: str
    derived: str
    why: str


@dataclass(slots=True)
class Replayed:
    """What a replay came to. `digest`: of the recorded decision stream, subject and bytes in order. `pending`: derived from the
    last inputs and not recorded yet, as when the decider was stopped before it could append."""

    inputs: int = 0
    decisions: int = 0
    digest: str = ""
    divergence: Divergence | None = None
    pending: int = 0
    unread: list[tuple[int, str]] = field(default_factory=list)
    decider: Decider = field(default_factory=Decider)

    @property
    def identical(self) -> bool:
        return self.divergence is None


def replay(records: Iterable[Record]) -> Replayed:
    """Replays LEDGER records in sequence order; stops at the first divergence. The decider's events must come in the order of
    their inputs, each after its input; a second copy of one that was appended already (the same id) is no divergence."""
    result = Replayed()
    decider = result.decider
    running = sha256()
    owed: deque[tuple[int, Derived]] = deque()
    matched: deque[bytes] = deque(maxlen=4096)
    for record in records:
        if not is_own(record.subject):
            result.inputs += 1
            for out in decider.feed(record):
                owed.append((record.sequence, out))
            continue
        result.decisions += 1
        running.update(b"%b %b\n" % (record.subject.encode(), record.data))
        if not owed:
            if record.data in matched:
                continue
            result.divergence = _differ(record, None, "it was recorded, and nothing follows from the inputs before it")
            break
        trigger, out = owed[0]
        if out.data != record.data or out.subject != record.subject:
            if record.data in matched:
                continue
            result.divergence = _differ(record, (trigger, out), "what was recorded is not what follows from the inputs")
            break
        owed.popleft()
        matched.append(record.data)
    result.digest = running.hexdigest()[:32]
    result.pending = len(owed)
    result.unread = list(decider.unread)
    return result


def _differ(record: Record, derived: tuple[int, Derived] | None, why: str) -> Divergence:
    trigger, out = derived if derived else (0, None)
    text = f"{out.subject} {out.data.decode()}" if out else ""
    return Divergence(
        record.sequence, trigger, f"{record.subject} {record.data.decode('utf-8', 'backslashreplace')}", text, why
    )
