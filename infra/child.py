"""A child process that ends with its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
#: Loaded before any fork: a child between fork and exec must not load a library.
_LIBC = ctypes.CDLL(None, use_errno=True)


def ending_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGTERM when the thread that forked it ends, and does not start if that is over already."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)

    return ask
