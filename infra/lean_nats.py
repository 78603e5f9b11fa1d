"""nats-py without its WebSocket transport, for the agent: aiohttp alone takes a fifth of its start and a fifth of its memory.

nats-py does without aiohttp where there is none. It is hidden for the moment of that import only, so whoever wants it later in the
same process (Faust does) finds it.
"""

from __future__ import annotations

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules

if "nats" not in _modules and "aiohttp" not in _modules:
    _modules["aiohttp"] = None
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del _modules["aiohttp"]
