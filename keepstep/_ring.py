"""The ring between the training thread, which writes a finished step into it, and the sending thread, which reads it.

One writer, one reader, no lock: the training thread must never wait. A sample is one tuple and a slot one reference to it, so
that a reader sees a sample whole or not at all, whatever the interpreter. A full ring overwrites its oldest samples; the reader
counts what it missed.
"""

from __future__ import annotations

from typing import Optional

#: Its number (from 0), step, when it ended (s of perf_counter), step time (s), loss, gradient norm, tokens, MFU, whether its update
#: was skipped, the part of the step time in its own compute (s), and what changed with it ('' for nothing).
Sample = tuple[
    int, int, float, float, Optional[float], Optional[float], Optional[int], Optional[float], bool, Optional[float], str
]
CAPACITY = 4096
_NONE: Sample = (-1, 0, 0.0, 0.0, None, None, None, None, False, None, "")


class Ring:
    """`written` counts the samples ever written; sample n lies in slot n modulo the capacity."""

    __slots__ = ("slots", "written")

    def __init__(self) -> None:
        self.slots = [_NONE] * CAPACITY
        self.written = 0

    def write(
        self,
        step: int,
        ended_s: float,
        step_time_s: float,
        loss: float | None,
        grad_norm: float | None,
        tokens: int | None,
        mfu: float | None,
        skipped: bool,
        busy_s: float | None,
        changed: str,
    ) -> None:
        """The training thread's."""
        number = self.written
        self.slots[number % CAPACITY] = (
            number, step, ended_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed
        )  # fmt: skip
        self.written = number + 1

    def read(self, start: int, limit: int) -> tuple[list[Sample], int, int]:
        """The reader's: samples from number `start` on, at most `limit`; the number to go on from; how many were overwritten."""
        end = self.written
        number = max(start, end - CAPACITY)
        dropped = number - start
        samples: list[Sample] = []
        while number < end and len(samples) < limit:
            sample = self.slots[number % CAPACITY]
            if sample[0] == number:
                samples.append(sample)
            else:  # overwritten since `end` was read
                dropped += 1
            number += 1
        return samples, number, dropped
