"""The ring between the training thread, which writes a finished step into it, and the sending thread, which reads it.

One writer, one reader, no lock: the training thread must never wait. A full ring overwrites its oldest samples; the reader
counts what it missed.
"""

from __future__ import annotations

import struct
from typing import Optional

#: sequence, step, ended (ns), step time (s), loss, gradient norm, tokens, MFU, which of the last four are given, sequence.
#: The sequence is at both ends so that a record which is overwritten while it is read (an interpreter without a global lock)
#: is known for torn.
_RECORD = struct.Struct("=QqqdddqdBQ")
_LOSS, _GRAD_NORM, _TOKENS, _MFU = 1, 2, 4, 8

Sample = tuple[int, int, float, Optional[float], Optional[float], Optional[int], Optional[float]]


class Ring:
    """`written` counts the samples ever written; sample n lies in slot n modulo the capacity."""

    __slots__ = ("_buffer", "_capacity", "written")

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._buffer = bytearray(_RECORD.size * capacity)
        self.written = 0

    def write(
        self,
        step: int,
        ended_ns: int,
        step_time_s: float,
        loss: float | None,
        grad_norm: float | None,
        tokens: int | None,
        mfu: float | None,
    ) -> None:
        """The training thread's. Raises struct.error where a whole number does not fit 64 bits."""
        given = 0
        if loss is None:
            loss = 0.0
        else:
            given = _LOSS
        if grad_norm is None:
            grad_norm = 0.0
        else:
            given |= _GRAD_NORM
        if tokens is None:
            tokens = 0
        else:
            given |= _TOKENS
        if mfu is None:
            mfu = 0.0
        else:
            given |= _MFU
        number = self.written
        _RECORD.pack_into(
            self._buffer,
            (number % self._capacity) * _RECORD.size,
            number + 1,
            step,
            ended_ns,
            step_time_s,
            loss,
            grad_norm,
            tokens,
            mfu,
            given,
            number + 1,
        )
        self.written = number + 1

    def read(self, start: int, limit: int) -> tuple[list[Sample], int, int]:
        """The reader's: samples from number `start` on, at most `limit`; the number to go on from; how many were overwritten."""
        end = self.written
        first = max(start, end - self._capacity)
        dropped = first - start
        samples: list[Sample] = []
        number = first
        while number < end and len(samples) < limit:
            at = (number % self._capacity) * _RECORD.size
            head, step, ended_ns, step_time_s, loss, grad_norm, tokens, mfu, given, tail = _RECORD.unpack_from(self._buffer, at)
            number += 1
            if head != number or tail != number:
                dropped += 1
                continue
            samples.append(
                (
                    step,
                    ended_ns,
                    step_time_s,
                    loss if given & _LOSS else None,
                    grad_norm if given & _GRAD_NORM else None,
                    tokens if given & _TOKENS else None,
                    mfu if given & _MFU else None,
                )
            )
        return samples, number, dropped
