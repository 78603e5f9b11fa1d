"""A recording: streams written to a folder, one JSON Lines file a stream, zstd, and read back as they were.

    LEDGER.jsonl.zst: {"seq":1,"t":1767225600000000000,"s":"ledger.gpt.operator.job_declared","h":{…},"e":{…}}

`e` is the data as it stands, where that is a JSON object (so that DuckDB and people read events without a second parse, and we
without a first); else `d` is the data as a JSON string where it is valid UTF-8; else `b` holds it in base64. `h` is left out
where there are no headers. Reading gives back the same bytes. Frames are
closed every few thousand lines, so that a file cut off in the middle loses its tail and nothing else, and says so.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import zstandard
from nats.aio.client import Client

from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, EventLog, LogError, Record
from events.subjects import matches
from infra.jetstream import JetStreamLog

SUFFIX = ".jsonl.zst"
RECORDED = (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB)
_FRAME_LINES, _FRAME_BYTES = 4096, 4 << 20
#: Compressed bytes taken at once: what they can swell to has to fit into memory.
_CHUNK_BYTES = 16 << 10
#: A line longer than this is no record of ours (data is at most 1 MiB; base64 and escapes make it longer).
LINE_BYTES_MAX = 16 << 20
#: Lines left out that are said one by one; the rest is counted.
LOSSES_SAID_MAX = 10
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,200}\Z")


class BadRecording(LogError):
    """A folder or file that is no recording. One sentence."""


_PLAIN = re.compile(r"[!#-\[\]-~]+\Z")
_EVENT_LINE = re.compile(
    rb'\{"seq":(\d{1,19}),"t":(\d{1,19}),"s":"([!#-\[\]-~]+)"(?:,"h":\{((?:"[!#-\[\]-~]+":"[ !#-\[\]-~]*",?)*)\})?,"e":(\{.*\})\}\Z'
)
_HEADER = re.compile(rb'"([^"]+)":"([^"]*)"')
_HEADER_TEXT = re.compile(r"[ !#-\[\]-~]*\Z")


def encode(record: Record) -> bytes:
    """One line, without its end."""
    plain = _PLAIN.match(record.subject) is not None
    head = f'{{"seq":{record.sequence},"t":{record.time_ns},"s":{encode_basestring(record.subject)}'
    if record.headers:
        head += ',"h":' + json.dumps(dict(record.headers), ensure_ascii=False, separators=(",", ":"))
        plain = plain and all(_PLAIN.match(k) and _HEADER_TEXT.match(v) for k, v in record.headers.items())
    if plain and _is_json_object(record.data):
        return b"".join((head.encode(), b',"e":', record.data, b"}"))
    try:
        return f'{head},"d":{encode_basestring(record.data.decode("utf-8"))}}}'.encode()
    except UnicodeDecodeError:
        return f'{head},"b":"{base64.b64encode(record.data).decode("ascii")}"}}'.encode()


def decode(stream: str, line: bytes) -> Record:
    """The record of one line. Raises ValueError."""
    match = _EVENT_LINE.match(line)
    if match:
        sequence, time_ns, subject, heads, data = match.groups()
        headers = {k.decode(): v.decode() for k, v in _HEADER.findall(heads)} if heads else _NONE
        return Record(stream, int(sequence), int(time_ns), subject.decode(), data, headers)
    value = json.loads(line)
    try:
        data = value["d"].encode("utf-8") if "d" in value else base64.b64decode(value["b"], validate=True)
        number, at_ns, name, headers = value["seq"], value["t"], value["s"], value.get("h", _NONE)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a line without its {error}") from None
    if type(number) is not int or type(at_ns) is not int or type(name) is not str or type(headers) is not dict:
        raise ValueError("a line whose fields are of other types")
    return Record(stream, number, at_ns, name, data, headers)


_NONE: dict[str, str] = {}


def _is_json_object(data: bytes) -> bool:
    """Whether data can stand in the line as it is: one JSON object on one line, in strict JSON."""
    if not data.startswith(b"{") or not data.endswith(b"}") or b"\n" in data or b"\r" in data:
        return False
    try:
        _STRICT.decode(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


class StreamWriter:
    """Writes one stream's file. It is whole after `close`, and readable up to its last frame at any time before."""

    def __init__(self, folder: Path, stream: str) -> None:
        if not _STREAM.match(stream):
            raise BadRecording(f"{stream!r} can't be the name of a recorded stream")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stream}{SUFFIX}"
        self._file: IO[bytes] = self.path.open("wb")
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._lines: list[bytes] = []
        self._bytes = 0
        self.written = self.last_sequence = 0

    def write(self, record: Record) -> None:
        if record.sequence <= self.last_sequence:
            raise LogError(f"record {record.sequence} after {self.last_sequence}: a recording is in sequence order")
        line = encode(record)
        self._lines.append(line)
        self._bytes += len(line) + 1
        self.last_sequence = record.sequence
        self.written += 1
        if len(self._lines) >= _FRAME_LINES or self._bytes >= _FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Closes the present frame: what was written so far can be read."""
        if self._lines:
            self._lines.append(b"")
            self._file.write(self._compressor.compress(b"\n".join(self._lines)))
            self._file.flush()
            self._lines, self._bytes = [], 0

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            if not self.written:
                self._file.write(self._compressor.compress(b""))
            self._file.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


#: Records written so far, over all streams.
Progress = Callable[[int], None]


async def record(
    nc: Client,
    folder: Path,
    streams: Sequence[str] = RECORDED,
    until_sequence: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Writes each stream of a bus up to its sequence in `until_sequence`, or to what is its last one now. Records a stream."""
    return await record_logs([JetStreamLog(nc, stream) for stream in streams], folder, until_sequence, progress)


async def record_logs(
    logs: Sequence[EventLog],
    folder: Path,
    until_sequence: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """The same for logs of any kind."""
    counts: dict[str, int] = {}
    total = 0
    for log in logs:
        until = (until_sequence or {}).get(log.stream)
        wanted = await log.last_sequence() if until is None else until
        with StreamWriter(Path(folder), log.stream) as writer:
            async for each in log.read():
                if each.sequence > wanted:
                    break
                writer.write(each)
                total += 1
                if progress is not None and total % 2000 == 0:
                    progress(total)
        counts[log.stream] = writer.written
    if progress is not None:
        progress(total)
    return counts


def read_stream(path: Path, stream: str, on_loss: Callable[[str], None] | None = None) -> Iterator[Record]:
    """One stream of a recording: `path` is its folder, or the file itself. Raises FileNotFoundError if it is not there; what is
    lost (a file cut off, a line that is none) is said to `on_loss` when the reading gets there."""
    file = Path(path) / f"{stream}{SUFFIX}" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(2, "no such file", str(file))
    return read_file(file, on_loss)


def read_file(path: Path, on_loss: Callable[[str], None] | None = None) -> Iterator[Record]:
    """The records of one file, in order. A truncated or damaged end is said to `on_loss`; what is before it is kept."""
    stream = path.name.removesuffix(SUFFIX)
    say = on_loss or _silent
    last = lost = 0

    def lose(sentence: str) -> None:
        nonlocal lost
        lost += 1
        if lost <= LOSSES_SAID_MAX:
            say(sentence)

    try:
        for number, line in enumerate(_lines(path, say), 1):
            try:
                found = decode(stream, line)
            except (ValueError, RecursionError) as error:
                lose(f"{path.name}: line {number} is no record ({str(error)[:120]}); it is left out")
                continue
            if found.sequence <= last:
                lose(f"{path.name}: line {number} has sequence {found.sequence} after {last}; it is left out")
                continue
            last = found.sequence
            yield found
    except OSError as error:
        raise BadRecording(f"the recording {path} can't be read: {error.strerror}") from None
    if lost > LOSSES_SAID_MAX:
        say(f"{path.name}: {lost - LOSSES_SAID_MAX} more lines are left out")


def _lines(path: Path, say: Callable[[str], None]) -> Iterator[bytes]:
    rest = b""
    for chunk in _chunks(path, say):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        yield from lines
        if len(rest) > LINE_BYTES_MAX:
            say(f"{path.name}: a line longer than {LINE_BYTES_MAX} bytes; what follows is left out")
            return
    if rest:
        say(f"{path.name}: the last line is cut off after {len(rest)} bytes; what is before it is kept")


def _chunks(path: Path, say: Callable[[str], None]) -> Iterator[bytes]:
    """Decompressed pieces, frame after frame; a damaged or unfinished last frame gives what it holds, and is said."""
    frame, fed = zstandard.ZstdDecompressor().decompressobj(), False
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            while data:
                try:
                    out = frame.decompress(data)
                except zstandard.ZstdError as error:
                    say(f"{path.name}: damaged ({str(error)[:120]}); what is before the damage is kept")
                    return
                fed, data = True, b""
                if frame.eof:
                    data, fed = frame.unused_data, False
                    frame = zstandard.ZstdDecompressor().decompressobj()
                if out:
                    yield out
    if fed:
        say(f"{path.name}: the end of the file is cut off; what is before it is kept")


class RecordedLog:
    """One stream of a recording: the reading half of events.ports.EventLog. Appending is refused."""

    def __init__(self, folder: Path, stream: str) -> None:
        self._path, self._stream = Path(folder) / f"{stream}{SUFFIX}", stream
        self.losses: list[str] = []
        if not self._path.is_file():
            there = ", ".join(recorded_streams(folder)) or "none"
            raise BadRecording(f"{folder} holds no recording of {stream} (streams there: {there})")

    @property
    def stream(self) -> str:
        return self._stream

    async def append(self, subject: str, data: bytes, **_: object) -> Any:
        raise LogError(f"{self._path} is a recording: it is read, not written")

    async def append_all(self, messages: Sequence[tuple[str, bytes, str]], **_: object) -> int:
        raise LogError(f"{self._path} is a recording: it is read, not written")

    def records(self, *, after: int = 0, subjects: Sequence[str] = ()) -> Iterator[Record]:
        """As `read`, without asyncio."""
        self.losses = []
        for found in read_file(self._path, self.losses.append):
            if found.sequence > after and (not subjects or any(matches(found.subject, s) for s in subjects)):
                yield found

    async def read(self, *, after: int = 0, subjects: Sequence[str] = (), follow: bool = False) -> AsyncIterator[Record]:
        """A recording has an end: `follow` makes no difference."""
        for found in self.records(after=after, subjects=subjects):
            yield found

    async def last_sequence(self, subjects: str = ">") -> int:
        return max((found.sequence for found in self.records(subjects=(subjects,))), default=0)


def recorded_streams(folder: Path) -> list[str]:
    """Names of the streams that a folder holds."""
    return sorted(path.name.removesuffix(SUFFIX) for path in Path(folder).glob(f"*{SUFFIX}"))


def _silent(sentence: str) -> None:
    """For who does not want to hear of losses."""


def open_text(path: Path) -> IO[str]:
    """A recorded file as text lines, for other readers (DuckDB, a person)."""
    return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True), "utf-8")
