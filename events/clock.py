"""Nanoseconds as text and back, exactly: RFC 3339 with nine digits. Never a float, never a datetime (DESIGN section 3)."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1)
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z\Z", re.ASCII)


#: Two digits, as a clock shows them.
_TWO = tuple(f"{n:02d}" for n in range(60))


@lru_cache(maxsize=4096)
def _minute_text(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).isoformat()[:17] if minute >= 0 else _refuse(minute)


def _refuse(value: object) -> str:
    raise ValueError(f"{value!r} is not a time of keepstep's: RFC 3339 in UTC with up to nine decimals, from 1970 on")


@lru_cache(maxsize=4096)
def _second_of(text: str) -> int:
    """Seconds since 1970: '1970-01-01T00:01:07' -> 67."""
    if (text[4], text[7], text[10], text[13], text[16]) != ("-", "-", "T", ":", ":"):  # fromisoformat reads other shapes too
        _refuse(text)
    since = datetime.fromisoformat(text) - _EPOCH
    if since.days < 0:
        _refuse(text)
    return since.days * 86_400 + since.seconds


def text_of(time_ns: int) -> str:
    """1_500_000_000 -> '1970-01-01T00:00:01.500000000Z'."""
    second, rest = divmod(time_ns, NS)
    minute, second = divmod(second, 60)
    try:
        return f"{_minute_text(minute)}{_TWO[second]}.{rest:09d}Z"
    except (OverflowError, OSError, ValueError):
        return _refuse(time_ns)


def ns_of(text: str) -> int:
    """The inverse of `text_of`. Raises ValueError."""
    if len(text) == 30 and text[19] == "." and text[29] == "Z" and text.isascii() and (digits := text[20:29]).isdecimal():
        return _second_of(text[:19]) * NS + int(digits)
    match = _RFC3339.match(text)
    if not match:
        _refuse(text)
        raise AssertionError
    return _second_of(match[1]) * NS + int((match[2] or "0").ljust(9, "0"))
