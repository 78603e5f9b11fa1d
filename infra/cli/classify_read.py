"""Logs of any size, read for `keepstep classify`: chunks of bytes in, the lines out of which something may be known. Memory stays
flat whatever the file: a chunk, and the start of the line that it cuts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, cast

import zstandard

from infra.cli.common import Refused
from processors.catalogue import LINE_CHARACTERS_MAX, Catalogue
from producers.kernel_lines import parse_kmsg, printable

CHUNK_BYTES = 1 << 20
#: A longer line is looked at in pieces of this size; literals are shorter than the overlap.
LINE_BYTES_MAX = 1 << 20
OVERLAP_BYTES = 256
#: Of a long line, what stands before and after the first literal in it.
BEFORE_BYTES, AFTER_BYTES = 1024, 3072
#: One message over several lines names its device within this.
CONTEXT_BYTES = 600

_COLOURS = re.compile(rb"\x1b\[[0-9;:?]{0,32}[A-Za-z]")
_MAGIC: tuple[tuple[bytes, Callable[[IO[bytes]], IO[bytes]]], ...] = (
    (b"\x1f\x8b", lambda file: cast("IO[bytes]", gzip.GzipFile(fileobj=file))),
    (b"BZh", lambda file: cast("IO[bytes]", bz2.BZ2File(file))),
    (b"\xfd7zXZ\x00", lambda file: cast("IO[bytes]", lzma.LZMAFile(file))),  # noqa: SIM115
    (b"\x28\xb5\x2f\xfd", lambda file: cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))),
)  # fmt: skip


class Found(NamedTuple):
    """A line that may be known, safe to show, and the device that a line before it named."""

    text: str
    context: str = ""


@dataclass(slots=True)
class Reading:
    """One file's reading. `problem`: a sentence when it could not be read to its end."""

    catalogue: Catalogue
    name: str
    on_bytes: Callable[[int], None] = lambda count: None
    lines: int = 0
    size_bytes: int = 0
    problem: str = ""
    _device: str = ""
    _device_at: int = field(default=-CONTEXT_BYTES)

    def blocks(self) -> Iterator[bytes]:
        """Whole lines, some at a time; a line beyond the limit in pieces that overlap."""
        rest = b""
        long = False
        try:
            with closing(_opened(self.name)) as file:
                while chunk := file.read(CHUNK_BYTES):
                    self.on_bytes(len(chunk))
                    self.size_bytes += len(chunk)
                    if b"\r" in chunk:  # progress bars; of CR LF this leaves an empty line
                        chunk = chunk.replace(b"\r", b"\n")
                    cut = chunk.rfind(b"\n") + 1
                    if not cut:
                        rest += chunk
                        if len(rest) > LINE_BYTES_MAX:
                            yield rest
                            rest, long = rest[-OVERLAP_BYTES:], True
                        continue
                    block = rest + chunk[:cut]
                    rest = chunk[cut:]
                    self.lines += block.count(b"\n") - block.count(b"\n\n") - (block[:1] == b"\n")
                    long = False
                    yield block
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
            if isinstance(error, OSError) and not self.size_bytes:
                raise Refused(
                    f"{self.name} can't be read ({error.strerror or error}); give a log file, or - for standard input"
                ) from None
            self.problem = f"{self.name} ends early ({str(error)[:100] or type(error).__name__}); what was read before is shown"
        if rest and not (long and len(rest) <= OVERLAP_BYTES):
            self.lines += 1
            yield rest

    def found(self) -> Iterator[Found]:
        """The lines that may be known, in order."""
        before = 0
        for block in self.blocks():
            for start, end, at in self.catalogue.spans(block):
                yield self._one(block, start, end, at, before)
            before += len(block)

    def everything(self) -> Iterator[Found]:
        """Every line. Slow: each is decoded."""
        before = 0
        for block in self.blocks():
            start = 0
            while start < len(block):
                end = block.find(b"\n", start)
                end = len(block) if end < 0 else end
                if end > start and not block[start:end].isspace():
                    at = start
                    if end - start > LINE_CHARACTERS_MAX:
                        at = next((hit for _, _, hit in self.catalogue.spans(block[start:end])), 0) + start
                    yield self._one(block, start, end, at, before)
                start = end + 1
            before += len(block)

    def _one(self, block: bytes, start: int, end: int, at: int, before: int) -> Found:
        if end - start > LINE_CHARACTERS_MAX:
            start, end = max(start, at - BEFORE_BYTES), min(end, at + AFTER_BYTES)
        text = text_of(block[start:end])
        named = self.catalogue.device_named(text)
        if named:
            self._device, self._device_at = named, before + end
            return Found(text)
        return Found(text, self._device if before + start - self._device_at <= CONTEXT_BYTES else "")


def text_of(raw: bytes) -> str:
    """A line as text that is safe to show: colours gone, a raw kernel record without its head, all else that acts escaped."""
    if b"\x1b" in raw:
        raw = _COLOURS.sub(b"", raw)
    head = parse_kmsg(raw) if raw[:1].isdigit() and b";" in raw[:64] else None
    if head is not None:
        return f"[{head.since_boot_us / 1e6:.6f}] {head.text}" if head.since_boot_us else head.text
    return printable(raw, LINE_CHARACTERS_MAX)


def _opened(name: str) -> IO[bytes]:
    if name == "-":
        return _unpacked(sys.stdin.buffer)
    path = Path(name)
    if path.is_dir():
        raise Refused(f"{name} is a folder; give the log files in it")
    try:
        return _unpacked(path.open("rb"))
    except OSError as error:
        raise Refused(f"{name} can't be read ({error.strerror or error}); give a log file, or - for standard input") from None


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """gz, bz2, xz and zst are known by their first bytes."""
    head: bytes = file.peek(8)[:8] if hasattr(file, "peek") else b""
    for magic, unpack in _MAGIC:
        if head.startswith(magic):
            return unpack(file)
    return file
