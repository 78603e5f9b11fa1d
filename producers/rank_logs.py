"""What the ranks here print, followed in the files that their shims keep: lines of note, tracebacks, a launcher's summary, as RankLog on
the job's stream. A rank that prints more than is read a second is sampled, the newest first, and that is said. The rank and its shim
know nothing of it. What a line is worth is rank_lines.py's, how a file is read rank_output.py's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from events.envelope import TEXT_MAX
from events.hardware import EvidenceGap
from events.rank_log import RankLine, RankLog
from producers.observe import Desk
from producers.rank_lines import LauncherSummary, Tracebacks, like, of_note
from producers.rank_output import Got, OutputFile, place_of
from producers.supervise import Pulse

PRODUCER = "rank_logs"
Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stderr", "stdout")
LINES_MAX, FACT_BYTES_MAX = 64, 24 * 1024
LINE_BYTES_TOLD = 1000
#: At a rank's end so much of each stream is read whatever was read before.
LAST_BYTES = 64 * 1024
#: A line like one that was told within this time is counted, not told.
REPEAT_S = 60.0
LIKES_MAX = 256
TOLD_APART_S = 1.0
SKIPPED_TOLD_S = 10.0
GAP_TOLD_S = 60.0
SAVE_S = 2.0
#: More than a node keeps folders of ended ranks.
DONE_MAX = 1024

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")


class Output(Protocol):
    """A rank's output: `folder` holds stdout.log and stderr.log. `secrets`: values that must not be shown."""

    @property
    def slot(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    @property
    def ended(self) -> bool: ...
    @property
    def secrets(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class RankLogSettings:
    """`interesting`: lines of a rank's that the catalogue knows. `show`: a line as it may stand in an event. Bytes are read up to so many
    a second a rank, and of all ranks together; four seconds' worth at once."""

    interesting: Callable[[str], bool] = lambda line: False
    show: Callable[[str, tuple[str, ...]], str] = lambda line, secrets: line
    poll_s: float = 0.25
    rank_bytes_per_s: int = 256 * 1024
    node_bytes_per_s: int = 1024 * 1024


class _Bucket:
    __slots__ = ("_at_s", "_left", "_per_s")

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s, self._left, self._at_s = per_s, per_s * 4.0, now_s

    def left(self, now_s: float) -> int:
        self._left = min(self._per_s * 4.0, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0, int(self._left))

    def take(self, count: int) -> None:
        self._left -= count


@dataclass(slots=True)
class _Like:
    told_s: float
    line: str
    stream: Stream
    unsaid: int = 0


@dataclass(slots=True)
class _Rank:
    output: Output
    files: dict[Stream, OutputFile]
    bucket: _Bucket
    tracebacks: dict[Stream, Tracebacks] = field(default_factory=lambda: {stream: Tracebacks() for stream in STREAMS})
    launcher: LauncherSummary = field(default_factory=LauncherSummary)
    likes: OrderedDict[str, _Like] = field(default_factory=OrderedDict)
    lines: list[RankLine] = field(default_factory=list)
    size: int = 0
    traceback: str = ""
    urgent: bool = False
    read: int = 0
    skipped: int = 0
    dropped: int = 0
    told_s: float = -1e9
    skipped_told_s: float = -1e9


class RankLogs:
    """`outputs()`: the output of ranks here, ended ones for as long as they are kept."""

    def __init__(
        self, desk: Desk, state_dir: Path, outputs: Callable[[], Sequence[Output]], settings: RankLogSettings | None = None
    ) -> None:
        self.desk = desk
        self.settings = settings or RankLogSettings()
        self.pulse = Pulse(max(1.0, self.settings.poll_s))
        self._outputs = outputs
        self._state_path = state_dir / "rank_logs.json"
        self._ranks: dict[str, _Rank] = {}
        #: Slots that were told to their end.
        self._done: dict[str, None] = {}
        self._bucket: _Bucket | None = None
        self._places: dict[str, Any] = {}
        self._began_ns = desk.clock.wall_ns()
        self._saved_s = 0.0
        self._saved: dict[str, Any] = {}
        self._gap_s = -1e9
        self._load()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self.pump()
                self.pulse.beat()
                await asyncio.sleep(self.settings.poll_s)
        finally:
            self._save()
            for rank in self._ranks.values():
                for file in rank.files.values():
                    file.close()
            self._ranks.clear()

    def pump(self) -> None:
        """Looks at all outputs now: also when a rank ended, so that its last words come before its end."""
        now_s = asyncio.get_running_loop().time()
        if self._bucket is None:
            self._bucket = _Bucket(self.settings.node_bytes_per_s, now_s)
        outputs = {output.slot: output for output in self._outputs()}
        for slot in [slot for slot in self._ranks if slot not in outputs]:
            self._let_go(slot)
        for slot, output in outputs.items():
            if slot in self._done:
                continue
            rank = self._ranks.get(slot)
            if rank is None:
                if output.ended and slot not in self._places and _modified_ns(output.folder) < self._began_ns:
                    self._finish(slot)  # it ended before anyone followed it
                    continue
                rank = self._ranks[slot] = self._begin(output, now_s)
            rank.output = output
            self._follow(rank, self._bucket, now_s)
            if output.ended:
                self._let_go(slot)
                self._finish(slot)
        if now_s - self._saved_s >= SAVE_S:
            self._saved_s = now_s
            self._save()

    def _begin(self, output: Output, now_s: float) -> _Rank:
        places = self._places.pop(output.slot, None)
        at = places if isinstance(places, list) and len(places) == len(STREAMS) else [0] * len(STREAMS)
        files = {
            stream: OutputFile(output.folder / f"{stream}.log", place_of(place))
            for stream, place in zip(STREAMS, at, strict=True)
        }
        return _Rank(output, files, _Bucket(self.settings.rank_bytes_per_s, now_s))

    def _finish(self, slot: str) -> None:
        self._done[slot] = None
        if len(self._done) > DONE_MAX:
            del self._done[next(iter(self._done))]

    def _let_go(self, slot: str) -> None:
        for file in self._ranks.pop(slot).files.values():
            file.close()

    def _follow(self, rank: _Rank, all_: _Bucket, now_s: float) -> None:
        ended = rank.output.ended
        for stream in STREAMS:
            file = rank.files[stream]
            budget = min(rank.bucket.left(now_s), all_.left(now_s))
            got = file.poll(max(budget, LAST_BYTES) if ended else budget)
            if ended and (rest := file.rest()):
                got.lines.append(rest)
            rank.bucket.take(got.bytes)
            all_.take(got.bytes)
            self._take(rank, stream, got, now_s)
            for whole in rank.tracebacks[stream].settle(all_=ended):
                self._traceback(rank, whole)
        if rank.skipped:
            self._say_sampled(rank, now_s)
        self._tell(rank, now_s, last=ended)

    def _take(self, rank: _Rank, stream: Stream, got: Got, now_s: float) -> None:
        rank.read += got.bytes
        rank.skipped += got.skipped
        tracebacks, launcher = rank.tracebacks[stream], rank.launcher
        if got.skipped:
            for whole in tracebacks.settle(all_=True):  # what comes now is no part of it
                self._traceback(rank, whole)
        interesting = self.settings.interesting
        for raw in got.lines:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            if "\r" in line:
                line = line.rpartition("\r")[2]  # a progress bar: what stands there now
            if "\x1b" in line:
                line = _ESCAPE.sub("", line)
            begins = "Traceback (most recent" in line or "Fatal Python" in line
            if (tracebacks.active or begins) and (text := tracebacks.feed(line)):
                self._traceback(rank, text)
            if launcher.active or "Failures:" in line or "Root Cause (first" in line:
                launcher.feed(line)
            if of_note(line) or interesting(line):
                self._note(rank, stream, line, now_s)

    def _traceback(self, rank: _Rank, text: str) -> None:
        rank.traceback, rank.urgent = text, True

    def _note(self, rank: _Rank, stream: Stream, line: str, now_s: float) -> None:
        key = like(line)
        known = rank.likes.get(key)
        if known is not None and now_s - known.told_s < REPEAT_S:
            known.unsaid, known.line = known.unsaid + 1, line
            return
        rank.likes[key] = _Like(now_s, line, stream)
        rank.likes.move_to_end(key)
        count = known.unsaid + 1 if known is not None else 1
        if len(rank.likes) > LIKES_MAX:
            _, oldest = rank.likes.popitem(last=False)
            rank.dropped += oldest.unsaid
        self._add(rank, line, stream, count)

    def _add(self, rank: _Rank, line: str, stream: Stream, count: int) -> None:
        text = _cut(self.settings.show(line, rank.output.secrets), LINE_BYTES_TOLD)
        size = len(text.encode("utf-8", "replace"))
        if len(rank.lines) >= LINES_MAX or rank.size + size > FACT_BYTES_MAX:
            rank.dropped += count
            return
        rank.size += size
        rank.lines.append(RankLine(text=text, stream=stream, count=count))

    def _tell(self, rank: _Rank, now_s: float, *, last: bool) -> None:
        if last or now_s - rank.told_s >= REPEAT_S:  # what was only counted, with the line as it came last
            for known in rank.likes.values():
                if known.unsaid and (last or now_s - known.told_s >= REPEAT_S):
                    self._add(rank, known.line, known.stream, known.unsaid)
                    known.unsaid, known.told_s = 0, now_s
        news = rank.lines or rank.traceback or rank.launcher.waiting
        told_of = rank.skipped and now_s - rank.skipped_told_s >= SKIPPED_TOLD_S
        if not ((news and (rank.urgent or last or now_s - rank.told_s >= TOLD_APART_S)) or told_of or (last and rank.skipped)):
            return
        output, show = rank.output, self.settings.show
        fact = RankLog(
            rank=max(0, output.rank),
            world_size=max(1, output.world_size),
            lines=tuple(rank.lines),
            traceback=_cut("\n".join(show(line, output.secrets) for line in rank.traceback.split("\n")), TEXT_MAX),
            launcher=rank.launcher.take(),
            read_bytes=rank.read,
            skipped_bytes=rank.skipped,
            dropped=rank.dropped,
            last=last,
        )
        if rank.skipped:
            rank.skipped_told_s = now_s
        rank.lines, rank.size, rank.traceback, rank.urgent = [], 0, "", False
        rank.read = rank.skipped = rank.dropped = 0
        rank.told_s = now_s
        self.desk.about_job(PRODUCER, output.job, output.attempt, fact)

    def _say_sampled(self, rank: _Rank, now_s: float) -> None:
        """Once a minute, on the node's stream: whoever reads these logs sees a part of them."""
        if now_s - self._gap_s < GAP_TOLD_S:
            return
        self._gap_s = now_s
        detail = (
            f"rank {rank.output.rank} prints more than is read ({self.settings.rank_bytes_per_s} bytes a second a rank, "
            f"{self.settings.node_bytes_per_s} a node): its log is sampled, {rank.skipped} bytes were passed over just now"
        )
        self.desk.about_node(PRODUCER, EvidenceGap(producer=PRODUCER, reason="thinned", detail=detail))

    # Where reading stood, for the next agent

    def _load(self) -> None:
        try:
            value = json.loads(self._state_path.read_text())
            self._places = dict(value["places"])
            self._done = {str(slot): None for slot in value["done"]}
        except (OSError, ValueError, KeyError, TypeError):
            self._places = {}

    def _save(self) -> None:
        value = {
            "places": {slot: [rank.files[stream].place for stream in STREAMS] for slot, rank in self._ranks.items()}
            | self._places,
            "done": list(self._done),
        }
        if value == self._saved:
            return
        self._saved = value
        temporary = self._state_path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(value))
            temporary.replace(self._state_path)
        except OSError:
            pass  # told again after a restart, rather than never


def _modified_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _cut(text: str, bytes_max: int) -> str:
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= bytes_max else raw[: bytes_max - 3].decode("utf-8", "ignore") + "…"
