"""Small JSON files, replaced whole. Not forced to disk: what they tell of are processes, which no crash of the machine leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def save(path: Path, value: Any) -> None:
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(json.dumps(value).encode())
    os.replace(fresh, path)


def load(path: Path) -> Any:
    """None: it is not there, or not JSON (a machine that lost power while it was written)."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
