"""What of a flood is let through, and how lines are put together. Pure: told lines and times, answers what to send."""

from __future__ import annotations

from dataclasses import dataclass, field

from events.clock import NS
from events.hardware import KernelLog, KernelRecord

RECORDS_MAX = 64
#: A batch must fit the bus's message (1 MiB), however long its lines.
BATCH_BYTES_MAX = 256 * 1024
#: Lines of an age that differs by more than this are not told as one observation.
AGE_SPAN_NS_MAX = NS


@dataclass(slots=True)
class Thinning:
    """Up to `lines_per_s` uninteresting lines a second (a second's worth at once); the rest is counted. Interesting ones pass."""

    lines_per_s: int = 200
    dropped: int = 0
    _tokens: float = -1.0
    _at_ns: int = 0

    def passes(self, interesting: bool, now_ns: int) -> bool:
        if interesting:
            return True
        if self._tokens < 0:
            self._tokens = float(self.lines_per_s)
        else:
            passed_s = max(0, now_ns - self._at_ns) / NS
            self._tokens = min(float(self.lines_per_s), self._tokens + passed_s * self.lines_per_s)
        self._at_ns = now_ns
        if self._tokens < 1:
            self.dropped += 1
            return False
        self._tokens -= 1
        return True

    def take_dropped(self) -> int:
        count, self.dropped = self.dropped, 0
        return count


@dataclass(slots=True)
class Batch:
    """Lines on their way to one KernelLog event."""

    origin: str
    records: list[KernelRecord] = field(default_factory=list)
    size: int = 0
    age_ns: int = 0

    def fits(self, record: KernelRecord, age_ns: int) -> bool:
        if not self.records:
            return True
        return (
            len(self.records) < RECORDS_MAX
            and self.size + _size(record) <= BATCH_BYTES_MAX
            and abs(age_ns - self.age_ns) <= AGE_SPAN_NS_MAX
        )

    def add(self, record: KernelRecord, age_ns: int) -> None:
        if not self.records:
            self.age_ns = age_ns
        self.records.append(record)
        self.size += _size(record)

    def take(self) -> tuple[KernelLog, int]:
        """The event and its age; the batch is empty after it."""
        log, age_ns = KernelLog(records=tuple(self.records), origin=self.origin), self.age_ns
        self.records, self.size, self.age_ns = [], 0, 0
        return log, age_ns


def _size(record: KernelRecord) -> int:
    return len(record.text.encode("utf-8", "surrogatepass")) + 120
