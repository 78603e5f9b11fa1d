"""Which rank failed first, and whether the code is to blame for it: what the job's detector remembers of an attempt's failing exits. Pure.

Exits of different nodes arrive in any order; each carries when it ended, by its host's clock, which may be wrong. What died of a peer's end is no root, and
only the root's exception is the job's: those that come after it may be anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from events.incident import Confidence
from events.rank_log import RankLog
from events.training import RankExit
from processors.code_faults import Fault, reading
from processors.exits import Ending

#: Exits that are read whole, whatever their time; later ones only if they ended before all others.
READ_MAX = 256
LOGS_MAX = 16


class Logged(NamedTuple):
    """The newest exception in a rank's log: judged there, where its frames are, since an exit holds the last lines alone."""

    rank: int
    line: str
    evidence: str
    by_code: bool


class Roots(NamedTuple):
    """`first_ns`: when the earliest failing exit ended that was no echo; `oldest_ns`: the same of all (0: none yet). `read`: how many were
    read whole. `said`: what was claimed of the code, if anything."""

    first_ns: int = 0
    oldest_ns: int = 0
    read: int = 0
    said: Confidence | None = None
    logged: tuple[Logged, ...] = ()


NONE = Roots()


def dump(roots: Roots) -> Any:
    return [*roots[:4], [list(one) for one in roots.logged]]


def load(value: Any) -> Roots:
    first_ns, oldest_ns, read, said, logs = value
    return Roots(first_ns, oldest_ns, read, said, tuple(Logged(*one) for one in logs))


def logged(roots: Roots, data: RankLog) -> Roots:
    """With what a rank's log says of its exception."""
    fault = reading(data.traceback, data.rank) if data.traceback else None
    if fault is None or fault.verdict == "surroundings" or fault.frame is None:
        return roots
    others = tuple(one for one in roots.logged if one.rank != data.rank)
    return roots._replace(
        logged=(*others[-LOGS_MAX + 1 :], Logged(data.rank, fault.raised.line, fault.evidence, fault.by_code))
    )


def ended_ns(data: RankExit, time_ns: int, seen_ns: int, began_ns: int, apart_ns: int) -> int:
    """When it ended, in broker time. Hosts' clocks say it finer than arrival does; but one that is further than `apart_ns` from the broker's
    (`time_ns` by the host's is `seen_ns` by the broker's) is set right, or its ranks would always, or never, have failed first. An end before the attempt began (`began_ns`) is not known."""
    if not data.ended_ns:
        return seen_ns
    if abs(time_ns - seen_ns) <= apart_ns:
        ended = min(data.ended_ns, max(time_ns, seen_ns))
    else:
        ended = seen_ns - max(0, time_ns - data.ended_ns)
    return ended if ended >= began_ns - apart_ns else seen_ns


def worth_reading(roots: Roots, ended: int) -> bool:
    """Whether an exit's last words may matter: of ten thousand, not each is read."""
    return roots.read < READ_MAX or ended < roots.oldest_ns


class Blame(NamedTuple):
    """What is to be claimed: an exception that the code causes (high), or one of nobody knows what (low)."""

    confidence: Confidence
    evidence: str


def blamed(roots: Roots, data: RankExit, ending: Ending, ended: int) -> tuple[Roots, Blame | None]:
    """A failing exit more. It is blamed on the code once an attempt, and once more if a surer one is found to have come first."""
    fault, echo = ending.fault, ending.confidence == "sympathetic"
    first = not echo and (not roots.first_ns or ended <= roots.first_ns)
    after = roots._replace(
        first_ns=ended if first else roots.first_ns,
        oldest_ns=min(roots.oldest_ns, ended) if roots.oldest_ns else ended,
        read=min(roots.read + 1, READ_MAX),
    )
    blame = _of(fault, roots, data) if first and data.signal is None else None
    if blame is None or roots.said == "high" or roots.said == blame.confidence:
        return after, None
    return after._replace(said=blame.confidence), blame


def _of(fault: Fault | None, roots: Roots, data: RankExit) -> Blame | None:
    if fault is None or fault.verdict == "surroundings":
        return None
    if fault.frame is None:
        known = next((one for one in roots.logged if one.rank == data.rank and one.line == fault.raised.line), None)
        return Blame("high" if known.by_code else "low", known.evidence) if known else None
    return Blame("high" if fault.by_code else "low", fault.evidence)
