"""Hexadecimal words that a driver prints in parentheses, `(0x00000009 0x00000004 …)`, against patterns of bits. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_WORDS = re.compile(r"\((0x[0-9A-Fa-f]{1,16}(?:[,\s]+0x[0-9A-Fa-f]{1,16})*)\)")


@lru_cache(maxsize=4096)
def _mask(bits: str) -> tuple[int, int]:
    """(bits that count, their values)."""
    if bits.startswith("0x"):
        return 0xFFFFFFFF, int(bits, 16)
    return int(bits.translate(str.maketrans("01-", "110")), 2), int(bits.replace("-", "0"), 2)


def words_fit(wanted: Mapping[int, tuple[str, ...]], line: str) -> bool:
    """Whether the line's first such group has, at each number wanted, a word that fits one of the patterns."""
    match = _WORDS.search(line)
    if match is None:
        return False
    words = [int(word, 16) for word in re.split(r"[,\s]+", match[1])]
    return all(
        number < len(words) and any(words[number] & count == value for count, value in map(_mask, patterns))
        for number, patterns in wanted.items()
    )
