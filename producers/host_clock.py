"""What the kernel's time discipline says of this host's clock: adjtimex(2), asked and not changed; any user may. No network."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_STA_UNSYNC, _STA_NANO, _TIME_ERROR = 0x0040, 0x2000, 5


class _Timex(ctypes.Structure):
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),  # more than any kernel writes here
    ]


class Discipline(NamedTuple):
    """`offset_s`: what is left to be corrected. `error_s`: the clock is right to within it, as its keeper says."""

    offset_s: float
    error_s: float
    synchronised: bool


def discipline() -> Discipline | None:
    """None where the system has no such call."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = _Timex()
        state = libc.adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else read(timex.offset, timex.maxerror, timex.status, state)


def read(offset: int, error_us: int, status: int, state: int) -> Discipline:
    """Of the call's fields."""
    unit = 1e-9 if status & _STA_NANO else 1e-6
    return Discipline(offset * unit, error_us * 1e-6, not status & _STA_UNSYNC and state != _TIME_ERROR)
