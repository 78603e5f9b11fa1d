"""What lines of a rank's output mean to whoever follows it: which are of note whatever the catalogue says, tracebacks put together across
lines that others wrote in between, a launcher's summary of its failures. Told lines, answers what to keep; no I/O.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from events.envelope import TEXT_MAX
from events.rank_log import LauncherExit

LINE_CHARACTERS_MAX = 2000
TRACEBACK_LINES_MAX = 400
#: Lines of others between those of a traceback, at most.
STRANGERS_MAX = 40
OPEN_MAX = 16
LAUNCHER_EXITS_MAX = 32

#: `[rank0]: `, `[default0]:`, `[0]: ` and srun's `0: `: who of several wrote a line.
_PREFIX = re.compile(r"\[(?:rank|default)?\d{1,6}\]: ?|\[rank ?\d{1,6}\] | {0,5}\d{1,6}: ")
_BEGIN = re.compile(r"\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):|Fatal Python error: ")
_LINK = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_FRAME = re.compile(r"[ \t]+\S|(?:Current thread|Thread) 0x|Extension modules:|\s*$")
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Warning|Group|StopIteration)\w*(?:: |:?$)"
    r"|(?:[A-Za-z_]\w*\.)+[A-Z]\w*(?:: |:?$)"
)

#: What is of note in any job: each alternative begins with a literal, so that the search is quick.
_OF_NOTE = re.compile(
    r"NCCL WARN|NCCL ERROR|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError|NCCL operations have failed"
    r"|Watchdog caught|collective operation timeout|ProcessGroup(?:NCCL|Gloo)[^\n]*(?:imed out|imeout|abort|terminat)"
    r"|Timed out waiting \d+ms|Connection closed by peer|connectFullMesh failed|CUDA error|CUDA out of memory|OutOfMemoryError"
    r"|device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_|ChildFailedError|closing signal SIG|failed \(exitcode:"
    r"|Segmentation fault|Bus error|Floating point exception|core dumped|Fatal Python error|terminate called|double free or|free\(\): "
    r"|malloc\(\): |corrupted size|stack smashing|is killed by signal|exited unexpectedly|No space left on device|Read-only file system"
    r"|Stale file handle|Input/output error|Cannot allocate memory|Connection reset by peer|Broken pipe|Transport endpoint is not"
    r"|Traceback \(most recent call last\)|oom-kill|Out [Oo]f [Mm]emory"
)
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)(?:: |:?$)")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

_ENTRY = re.compile(r"\[\d{1,6}\]:\s*$")
_FIELD = re.compile(r"\s*(time|host|rank|exitcode)\s*: (.*)")
_PAIR = re.compile(r"(-?\d{1,9}) \((?:local_rank|pid): (\d{1,9})\)")


def split(line: str) -> tuple[str, str]:
    """Who of several wrote it ('' for nobody in particular), and what."""
    match = _PREFIX.match(line)
    return (match[0].strip(), line[match.end() :]) if match else ("", line)


def of_note(line: str) -> bool:
    """Whatever the catalogue says of it."""
    return _OF_NOTE.search(line) is not None or _ERROR_LINE.match(split(line)[1]) is not None


def like(line: str) -> str:
    """Equal for lines that differ in numbers and addresses only."""
    return _NUMBERS.sub("#", line[:400])


def middle_out(text: str, bytes_max: int) -> str:
    """What is too long loses its middle: a traceback's first lines say where, its last what."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return raw.decode()
    head, tail = raw[: bytes_max // 4], raw[len(raw) - (bytes_max - bytes_max // 4 - 16) :]
    return f"{head.decode('utf-8', 'ignore')}\n  […]\n{tail.decode('utf-8', 'ignore')}"


@dataclass(slots=True)
class _Open:
    lines: list[str] = field(default_factory=list)
    #: The first line of somebody else's after the last frame: the exception, if its name gives it away to nobody.
    stranger: str = ""
    strangers: int = 0
    ended: bool = False

    def add(self, line: str) -> None:
        self.lines.append(line[:LINE_CHARACTERS_MAX])
        if len(self.lines) > TRACEBACK_LINES_MAX:
            del self.lines[TRACEBACK_LINES_MAX // 4]
        self.stranger, self.strangers = "", 0

    def text(self) -> str:
        last = [self.stranger] if self.stranger and not self.ended else []
        return middle_out("\n".join([*self.lines, *last]).rstrip(), TEXT_MAX - 64)


class Tracebacks:
    """Of one stream. `feed` a line at a time; what it gives is a traceback that ended before that line. `settle`: nothing more is there
    for now, so those that have their exception are over; with `all_`, all are."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()

    @property
    def active(self) -> bool:
        return bool(self._open)

    def feed(self, line: str) -> str | None:
        who, body = split(line)
        known = self._open.get(who)
        if _BEGIN.match(body):
            done = None
            if known is None or (known.lines and not _LINK.match(_last_words(known))):
                done = self._close(who)
                known = self._open[who] = _Open()
                if len(self._open) > OPEN_MAX:
                    self._open.popitem(last=False)
            known.ended = False
            known.add(body)
            return done
        if known is None:
            return None
        if known.ended:
            if _LINK.match(body):
                known.add(body)
                return None
            if not body.strip():
                known.lines.append("")
                return None
            if known.strangers == 0 and body[:1] in " \t":  # an exception's message may have several lines
                known.lines.append(body[:LINE_CHARACTERS_MAX])
                return None if len(known.lines) < TRACEBACK_LINES_MAX else self._close(who)
            return self._close(who)
        if _LINK.match(_last_words(known)) and not body.strip():
            known.lines.append("")
        elif _EXCEPTION.match(body):
            known.add(body)
            known.ended = True
        elif _FRAME.match(body):
            known.add(body)
        else:
            known.stranger = known.stranger or body[:LINE_CHARACTERS_MAX]
            known.strangers += 1
            if known.strangers > STRANGERS_MAX:
                return self._close(who)
        return None

    def settle(self, *, all_: bool = False) -> list[str]:
        done = [who for who, known in self._open.items() if all_ or known.ended]
        return [text for who in done if (text := self._close(who))]

    def _close(self, who: str) -> str | None:
        known = self._open.pop(who, None)
        return known.text() if known and known.lines else None


def _last_words(known: _Open) -> str:
    return next((line for line in reversed(known.lines) if line.strip()), "")


class LauncherSummary:
    """torchrun's report of its failures: `feed` lines, `take` the processes it named since."""

    def __init__(self) -> None:
        self._fields: dict[str, str] | None = None
        self._root = self._listing = False
        self._exits: list[LauncherExit] = []

    @property
    def active(self) -> bool:
        return self._root or self._fields is not None or self._listing

    def feed(self, line: str) -> None:
        body = line if _ENTRY.match(line) else split(line)[1]
        if body.startswith("Root Cause (first observed failure)"):
            self._close()
            self._root, self._listing = True, True
        elif body.startswith("Failures:"):
            self._close()
            self._root, self._listing = False, True
        elif _ENTRY.match(body):
            self._close()
            self._fields = {}
        elif body.startswith(("-----", "=====")):
            self._close()
            if body[0] == "=":
                self._root = self._listing = False
        elif self._fields is not None and (match := _FIELD.match(body)):
            self._fields.setdefault(match[1], match[2].strip()[:200])

    @property
    def waiting(self) -> bool:
        """There is something to be taken."""
        return bool(self._exits)

    def take(self) -> tuple[LauncherExit, ...]:
        exits, self._exits = tuple(self._exits), []
        return exits

    def _close(self) -> None:
        fields, self._fields = self._fields, None
        code = _PAIR.match(fields.get("exitcode", "")) if fields else None
        if not fields or code is None or len(self._exits) >= LAUNCHER_EXITS_MAX:
            return
        rank = _PAIR.match(fields.get("rank", ""))
        self._exits.append(
            LauncherExit(
                rank=max(-1, int(rank[1])) if rank else -1,
                local_rank=int(rank[2]) if rank else -1,
                host=fields.get("host", ""),
                pid=int(code[2]),
                code=int(code[1]),
                time=fields.get("time", "")[:64],
                root_cause=self._root,
            )
        )
