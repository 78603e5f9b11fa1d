"""Whose word a job's curve is: the lowest rank that gives values, and another one where that fell silent. Pure.

Ranks tell of the same steps, a little apart and in any order. One is followed, so that a curve is one rank's and a step counts once.
"""

from __future__ import annotations

from typing import NamedTuple


class Voice(NamedTuple):
    """`rank`: who is followed, -1 for nobody yet; `step`: the last step of the curve; `heard_ns`: when the rank was heard last."""

    rank: int = -1
    step: int = -1
    heard_ns: int = 0


def told(voice: Voice, rank: int, step: int, seen_ns: int, silence_ns: int) -> tuple[Voice, bool]:
    """The voice after a rank told of a step, and whether that is the next one of the curve. A rank is followed in place of a lower one
    that was not heard for `silence_ns` while the job got two steps ahead of it; the lower one's return ends that."""
    if 0 <= voice.rank < rank and (step < voice.step + 2 or seen_ns - voice.heard_ns <= silence_ns):
        return voice, False
    if step > voice.step:
        return Voice(rank, step, max(voice.heard_ns, seen_ns)), True
    if seen_ns < voice.heard_ns:  # what waited is of before
        return voice, False
    return Voice(rank, voice.step, seen_ns), False
