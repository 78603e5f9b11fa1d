"""What of a rank's stderr may stand in an event: its last lines, bounded, escape sequences shown as text, secrets blanked. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

LINES_MAX = 30
BYTES_MAX = 4000

#: Names of environment variables whose values are secrets; `TOKENIZERS_PARALLELISM` and its like are none.
SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW(?:OR)?D|CREDENTIAL|KEY(?!BOARD|MAP)", re.IGNORECASE)
#: Shorter values would blank half of any text ("1", "true").
SECRET_CHARACTERS_MIN = 6
_BLANK = "[redacted]"

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"((?:proxy-)?authorization\s*['\"]?\s*[:=]\s*['\"]?)[^\r\n'\"]+", re.IGNORECASE), rf"\1{_BLANK}"),
    (re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@"), rf"\1{_BLANK}@"),
    (
        re.compile(
            r"(\b[A-Za-z0-9_-]*(?:TOKEN(?!IZER)|SECRET|PASSW(?:OR)?D|CREDENTIALS?|(?:API|ACCESS|PRIVATE)[_-]?KEY)[A-Za-z0-9_-]*"
            r"['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]{4,}",
            re.IGNORECASE,
        ),
        rf"\1{_BLANK}",
    ),
)


def secrets_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not be shown, longest first, so that one that holds another is blanked whole."""
    values = {
        value for name, value in environment.items() if SECRET_NAME.search(name) and len(value.strip()) >= SECRET_CHARACTERS_MIN
    }
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def redacted(text: str, secrets: tuple[str, ...] = ()) -> str:
    for value in secrets:
        text = text.replace(value, _BLANK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in line)


def shown(raw: bytes, secrets: tuple[str, ...] = ()) -> str:
    """At most LINES_MAX lines and BYTES_MAX bytes of UTF-8, the newest kept."""
    text = redacted(raw.decode("utf-8", "replace"), secrets)
    lines = [_shown(line.rsplit("\r", 1)[-1]) for line in text.replace("\r\n", "\n").rstrip().split("\n")][-LINES_MAX:]
    data = "\n".join(lines).encode("utf-8", "replace")
    if len(data) <= BYTES_MAX:
        return data.decode("utf-8")
    return "…" + data[-BYTES_MAX + 3 :].decode("utf-8", "ignore")
