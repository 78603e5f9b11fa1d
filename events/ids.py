"""Ids. What a person or a device did gets a random, time-ordered id (randomness and time are handed in); what was derived from
an event gets a digest, so that deriving it again, anywhere, gives the same one."""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256

_ALPHABET = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789abcdefghijklmnopqrstuv")


def derived_id(deriver: str, key: str, trigger_id: str, kind: str, ordinal: int) -> str:
    """26 characters (130 bits) of a digest. Never of worker, partition or version (DESIGN section 3)."""
    text = "\x1f".join((deriver, key, trigger_id, kind, str(ordinal)))
    return b32encode(sha256(text.encode("utf-8", "surrogatepass")).digest()[:20]).decode().translate(_ALPHABET)[:26]


def random_id(time_ns: int, entropy: bytes) -> str:
    """48 bits of milliseconds, then 80 of `entropy` (10 bytes): sorts by time as text. The shape is ULID's."""
    if len(entropy) != 10:
        raise ValueError("entropy must be 10 bytes")
    value = ((time_ns // 1_000_000) & (2**48 - 1)).to_bytes(6, "big") + entropy
    return b32encode(b"\0" * 4 + value).decode().translate(_ALPHABET)[6:]
