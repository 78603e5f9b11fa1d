"""Which stream and subjects a Faust topic and partition stand for. Pure.

`telemetry_node` and `telemetry_job` read the telemetry streams, each partition with its ticks and settings in stream order. A
`changelog_<name>` is a stream of its own, one subject a partition and key of which only the last message is kept: that is log
compaction. Nothing else is a topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from events import subjects
from events.ports import TELEMETRY_JOB, TELEMETRY_NODE

_CHANGELOG = re.compile(r"changelog_([a-z0-9_]{1,60})\Z")
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=@/:+,~")
#: A subject holds 4 KB; a key of more encoded bytes than this is no name of ours.
KEY_LENGTH_MAX = 1600


class NoSuchTopic(ValueError):
    """A topic that stands for no stream. One sentence."""


@dataclass(frozen=True, slots=True)
class Source:
    """A telemetry stream as a topic."""

    stream: str
    prefix: str


SOURCES: Mapping[str, Source] = {
    "telemetry_node": Source(TELEMETRY_NODE, subjects.NODE),
    "telemetry_job": Source(TELEMETRY_JOB, subjects.JOB),
}


def is_source(topic: str) -> bool:
    return topic in SOURCES


def _changelog(topic: str) -> str:
    match = _CHANGELOG.match(topic)
    if match is None:
        raise NoSuchTopic(
            f"there is no stream for the topic {topic[:80]!r}; topics are {', '.join(SOURCES)} and changelog_<name>"
        )
    return match[1]


def stream_of(topic: str) -> str:
    source = SOURCES.get(topic)
    return source.stream if source else f"KS_CHANGELOG_{_changelog(topic).upper()}"


def subjects_of(topic: str, partition: int) -> str:
    """The pattern of all that a partition's reader hears."""
    source = SOURCES.get(topic)
    return f"{source.prefix}.{partition}.>" if source else f"ks.changelog.{_changelog(topic)}.{partition}.*"


def fence(topic: str, partition: int) -> str:
    """The subject whose last sequence every write to the changelog's partition expects. Not read as a key: it is a token apart."""
    return f"ks.changelog.{_changelog(topic)}.fence.{partition}"


def changelog_subject(topic: str, partition: int, key: bytes) -> str:
    return f"ks.changelog.{_changelog(topic)}.{partition}.{_key_token(key)}"


@lru_cache(maxsize=65536)
def _key_token(key: bytes) -> str:
    text = "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in key) or "%"
    if len(text) > KEY_LENGTH_MAX:
        raise ValueError(f"the key {key[:40]!r}… needs {len(text)} characters in a subject; at most {KEY_LENGTH_MAX}")
    return text


def key_of(subject: str) -> bytes:
    """The key behind a changelog's subject."""
    token = subject.rpartition(".")[2]
    if token == "%":
        return b""
    return re.sub(rb"%([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), token.encode("ascii"))
