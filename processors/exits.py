"""How a rank ended, read: whether it is a failure, which rule says so, and whether it is only a peer's crash heard. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from events.incident import Confidence
from events.training import RankExit
from processors import code_faults
from processors.code_faults import Fault
from processors.detector import QUOTE_BYTES, quote

#: Linux on x86 and ARM; others by number.
SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
           11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 31: "SIGSYS"}  # fmt: skip
SIGABRT = 6

_EXCEPTION = re.compile(r"^(?:\[[^\]\n]{1,40}\]: ?)?[A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt|Exit)\b.*$", re.MULTILINE)
#: What ranks say whose peer is gone: gloo's and NCCL's transports, the store, a collective that was torn down.
_ECHO = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset)(?: by peer| by remote)?|[Bb]roken pipe|[Gg]loo|NCCL|ProcessGroup|TCPStore|recvValue failed"
    r"|DistBackendError|DistNetworkError|DistStoreError|[Ss]ocket [Tt]imeout|collective operation timeout"
)
LAST_LINES = 5


class Ending(NamedTuple):
    """What a failing exit is called: rank_killed, rank_traceback, rank_gone (it ended while nothing watched) or rank_exit. `fault`: the
    exception that it shows."""

    rule: str
    confidence: Confidence
    evidence: str
    fault: Fault | None = None


def reading(data: RankExit, node: str, words: str = "", *, whole: bool = True) -> Ending:
    """Of an exit that is a failure. `evidence` holds code or signal and the last lines of stderr, and what the rank's log said of note
    (`words`) if that is not among them. What it is taken for does not depend on `words`. Not `whole`: its exception is not read."""
    tail = data.stderr_tail.strip("\n")
    place = f"rank {data.rank} on {node[:200]}"
    if data.signal is not None:
        name = SIGNALS.get(data.signal, "a signal without a name here")
        rule, head = "rank_killed", f"{place} was killed by signal {data.signal} ({name})"
    elif data.code is None:
        rule, head = "rank_gone", f"{place} ended while nothing watched it"
    else:
        rule = "rank_traceback" if "Traceback (most recent call last)" in tail else "rank_exit"
        head = f"{place} ended with code {data.code}"
    if words and words not in tail:
        head = f"{head}; of note in its log: {words}"
    fault = code_faults.reading(tail, data.rank) if whole and tail else None
    confidence: Confidence = "sympathetic" if _is_echo(data, tail, fault) else "low"
    if tail:
        room = QUOTE_BYTES - len(head.encode("utf-8", "replace")) - 2
        head = f"{head}:\n{quote(tail, room)}"
    return Ending(rule, confidence, quote(head), fault)


def earliest(exits: Iterable[RankExit]) -> RankExit | None:
    """Of a crash's exits, the failure that ended first by its host's clock and was no peer's echo: the rank that the others died of. Of
    exits whose time is not known, none is earlier than one with a time; None: nothing but echoes."""
    failed = [one for one in exits if not one.asked and (one.code or one.signal is not None)]
    roots = [one for one in failed if reading(one, "").confidence != "sympathetic"]
    return min(roots, key=lambda one: (one.ended_ns == 0, one.ended_ns, one.rank), default=None)


def _is_echo(data: RankExit, tail: str, fault: Fault | None) -> bool:
    """Whether its last words are of a peer that is gone. What a signal ended had no say; an abort may be a watchdog's. An exception speaks
    for itself: at a process's end, libraries write of groups that were not taken down, whatever it died of."""
    if data.signal is not None and data.signal != SIGABRT:
        return False
    if fault is not None and data.signal is None:
        return not fault.by_code and _ECHO.search(f"{fault.raised.name}: {fault.raised.message}") is not None
    last = None
    for last in _EXCEPTION.finditer(tail):  # noqa: B007 - the last match is meant
        pass
    lines = tail[last.start() :].split("\n")[:LAST_LINES] if last else tail.split("\n")[-LAST_LINES:]
    return _ECHO.search("\n".join(lines)) is not None
