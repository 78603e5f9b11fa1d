"""From a fact that a producer saw to an observation on its way: envelope, running number, subject, lane.

The number belongs to one source, and a source speaks on one subject's stream about one job (`node/<node>/<producer>/<start>`, with
a start of its own for each job), so that whoever reads that stream sees the numbers without holes. What belongs elsewhere: seeing
(the producers), getting it to the bus (outbox.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from events import subjects
from events.envelope import AnyEvent, Fact
from events.ids import derived_id, random_id
from events.registry import canonical, make
from producers.outbox import BULK, NEWS, Observation, Outbox

#: Sources with a running number at a time; the one used longest ago is forgotten (its next observation starts a new source).
SOURCES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall_ns` can be set by anyone and labels events; `boot_ns` (CLOCK_BOOTTIME) measures what passes. `entropy(n)`: n bytes."""

    wall_ns: Callable[[], int]
    boot_ns: Callable[[], int]
    entropy: Callable[[int], bytes]


@dataclass(slots=True)
class _Source:
    name: str
    number: int = 0


class Desk:
    """Where the producers of one node hand in what they saw. Never blocks, never waits.

    `job` and `attempt` are what the agent knows to run or to have run until just now ('' and 0: nothing); facts about the node carry
    them along.
    """

    def __init__(self, node: str, boot_id: str, clock: Clock, outbox: Outbox) -> None:
        self.node = node
        self.boot_id = boot_id
        self.clock = clock
        self.outbox = outbox
        self.job = ""
        self.attempt = 0
        self._sources: OrderedDict[tuple[str, str], _Source] = OrderedDict()

    def about_node(self, producer: str, fact: Fact, *, age_ns: int = 0, on_safe: Callable[[], None] | None = None) -> None:
        """Something seen about the node, `age_ns` ago. `on_safe` is called once it is on the bus or on disk."""
        seen = self._observation(producer, "", fact, self.job, self.attempt, age_ns)
        self.outbox.put(NEWS, seen, on_safe)

    def about_job(
        self,
        producer: str,
        job: str,
        attempt: int,
        fact: Fact,
        *,
        bulk: bool = False,
    ) -> None:
        """Something seen about a job's attempt. `bulk`: plenty, and each one of them dispensable (training progress)."""
        self.outbox.put(BULK if bulk else NEWS, self._observation(producer, job, fact, job, attempt, 0))

    def about_rank(self, producer: str, job: str, attempt: int, fact: Fact, identity: str) -> None:
        """Something that became of a rank; on disk when this returns. The same `identity` told again has the same id."""
        self.outbox.put_durable(self._observation(producer, job, fact, job, attempt, 0, identity=identity))

    def answer(self, producer: str, job: str, attempt: int, fact: Fact, causes: tuple[str, ...]) -> Observation:
        """An observation that its maker publishes by itself."""
        return self._observation(producer, job, fact, job, attempt, 0, causes=causes)

    def beat(self, producer: str, fact: Fact, job: str, attempt: int) -> None:
        """The latest of something that is said again and again: on the node's stream, and on that of the job whose ranks are here.
        What could not be sent is replaced by the next, not kept; its number is given when it is sent, so that leaves no hole."""
        wall_ns, boot_ns = self.clock.wall_ns(), self.clock.boot_ns()

        def build(stream_job: str) -> Observation:
            return self._envelope(producer, stream_job, fact, job, attempt, wall_ns, boot_ns)

        self.outbox.beat(producer, lambda: build(""))
        if job:
            self.outbox.beat(f"{producer} of a job", lambda: build(job))

    def _observation(
        self,
        producer: str,
        stream_job: str,
        fact: Fact,
        job: str,
        attempt: int,
        age_ns: int,
        *,
        identity: str = "",
        causes: tuple[str, ...] = (),
    ) -> Observation:
        wall_ns, boot_ns = max(0, self.clock.wall_ns() - age_ns), self.clock.boot_ns() - age_ns
        return self._envelope(producer, stream_job, fact, job, attempt, wall_ns, boot_ns, identity, causes)

    def _envelope(
        self,
        producer: str,
        stream_job: str,
        fact: Fact,
        job: str,
        attempt: int,
        wall_ns: int,
        boot_ns: int,
        identity: str = "",
        causes: tuple[str, ...] = (),
    ) -> Observation:
        source = self._source(producer, stream_job)
        source.number += 1
        kind = fact.kind()
        if identity:
            id_ = derived_id(f"node/{producer}", self.node, identity, kind, 0)
        else:
            id_ = random_id(wall_ns, self.clock.entropy(10))
        event: AnyEvent = make(
            fact,
            id=id_,
            source=source.name,
            subject=self.node,
            time=wall_ns,
            causes=causes,
            bootid=self.boot_id,
            number=source.number,
            job=job,
            attempt=attempt,
        )
        subject = (
            subjects.telemetry_job(self.node, stream_job, kind) if stream_job else subjects.telemetry_node(self.node, kind)
        )
        return Observation(subject, canonical(event), wall_ns, boot_ns)

    def _source(self, producer: str, stream_job: str) -> _Source:
        key = (producer, stream_job)
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = _Source(f"node/{self.node}/{producer}/{self.clock.entropy(5).hex()}")
            if len(self._sources) > SOURCES_MAX:
                self._sources.popitem(last=False)
        self._sources.move_to_end(key)
        return source
