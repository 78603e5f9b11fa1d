"""The ports through which the pure rooms meet the world: a log that is appended to and read, and its errors.

Adapters live in infra/ (in memory, JetStream, a recorded file) and pass one contract test (tests/test_log_contract.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

#: Streams by name. Truth is in TELEMETRY_* and LEDGER; the others can be lost without a wrong decision.
TELEMETRY_NODE = "TELEMETRY_NODE"
TELEMETRY_JOB = "TELEMETRY_JOB"
LEDGER = "LEDGER"
DEADLETTER = "DEADLETTER"
TIMERS = "TIMERS"

#: Header: nanoseconds that an observation waited (spooled) between being seen and being published, by a clock that
#: no one can set. Broker time less this is when it was seen.
HELD_HEADER = "Keepstep-Held-Ns"


@dataclass(frozen=True, slots=True)
class Record:
    """One message of a stream as it was stored. `sequence` is the stream's, `time_ns` the broker's (integer ns)."""

    stream: str
    sequence: int
    time_ns: int
    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ack:
    """What an append came to. `duplicate`: the message id was seen before, nothing was added."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Expect:
    """A condition of an append: the last sequence of all subjects that match `subjects` is `last_sequence` (0: none)."""

    subjects: str
    last_sequence: int


class LogError(Exception):
    """A log could not do what was asked."""


class StaleWriter(LogError):
    """An expectation did not hold: someone else wrote. The caller must stop and read again."""


class LogUnavailable(LogError):
    """The log is out of reach; the same call may succeed later."""


class EventLog(Protocol):
    """One stream: appended to, read in sequence order."""

    @property
    def stream(self) -> str: ...

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        expect: Expect | None = None,
    ) -> Ack:
        """Durably store one message. Raises StaleWriter, LogUnavailable."""
        ...

    async def append_all(self, messages: Sequence[tuple[str, bytes, str]], *, expect: Expect | None = None) -> int:
        """Durably stores several (subject, data, message id) in order and returns the last one's sequence: all of them, or, where
        it raises as `append` does, it may be none or a beginning."""
        ...

    def read(self, *, after: int = 0, subjects: Sequence[str] = (), follow: bool = False) -> AsyncIterator[Record]:
        """Records with sequence > `after` whose subject matches one of `subjects` (NATS wildcards; none: all), in order.

        Without `follow` the reading ends at what was the last sequence when it began.
        """
        ...

    async def last_sequence(self, subjects: str = ">") -> int:
        """The last sequence among subjects that match, 0 if there is none."""
        ...


class TimerService(Protocol):
    """Delivers a finished event into LEDGER at a time, also after an outage."""

    async def set_timer(self, timer_id: str, at_ns: int, job: str, kind: str, data: bytes) -> None:
        """At broker time `at_ns`, `data` appears on `ledger.<job>.timer.<kind>`. The same id again replaces the first."""
        ...
