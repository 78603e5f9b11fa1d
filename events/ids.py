"""Ids. What a person or a device did gets a random, time-ordered id (randomness and time are handed in); what was derived from
an event gets a digest, so that deriving it again, anywhere, gives the same one."""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256
from struct import Struct

_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_ALPHABET = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _DIGITS)
#: The first 136 bits of a digest.
_WORDS = Struct(">QQB15x").unpack
#: Two characters for each ten bits. What base64.b32hexencode gives, in a fifth of its time: this is in the inner loop of replay.
_PAIRS = tuple(a + b for a in _DIGITS for b in _DIGITS)


def derived_id(deriver: str, key: str, trigger_id: str, kind: str, ordinal: int) -> str:
    """26 characters (130 bits) of a digest. Never of worker, partition or version (DESIGN section 3)."""
    text = f"{deriver}\x1f{key}\x1f{trigger_id}\x1f{kind}\x1f{ordinal}"
    high, low, rest = _WORDS(sha256(text.encode("utf-8", "surrogatepass")).digest())
    middle, pairs = (high & 15) << 6 | low >> 58, _PAIRS
    return (
        f"{pairs[high >> 54]}{pairs[high >> 44 & 1023]}{pairs[high >> 34 & 1023]}{pairs[high >> 24 & 1023]}"
        f"{pairs[high >> 14 & 1023]}{pairs[high >> 4 & 1023]}{pairs[middle]}{pairs[low >> 48 & 1023]}"
        f"{pairs[low >> 38 & 1023]}{pairs[low >> 28 & 1023]}{pairs[low >> 18 & 1023]}{pairs[low >> 8 & 1023]}"
        f"{pairs[(low & 255) << 2 | rest >> 6]}"
    )


def random_id(time_ns: int, entropy: bytes) -> str:
    """48 bits of milliseconds, then 80 of `entropy` (10 bytes): sorts by time as text. The shape is ULID's."""
    if len(entropy) != 10:
        raise ValueError("entropy must be 10 bytes")
    value = ((time_ns // 1_000_000) & (2**48 - 1)).to_bytes(6, "big") + entropy
    return b32encode(b"\0" * 4 + value).decode().translate(_ALPHABET)[6:]
