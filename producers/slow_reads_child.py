"""The child of slow_reads.py: answers a line of JSON with a line of JSON, one read each. Run by itself, `python -I -S` and nothing but
what that has loaded already; it ends when its parent's end of the pipe does."""

from __future__ import annotations

import json
import os
import sys


def _answer(request: dict[str, str]) -> object:
    if "space" in request:
        found = os.statvfs(request["space"])
        return [found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail, found.f_files, found.f_favail]
    descriptor = os.open(request["read"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts, room = [], int(request["most"])
        while room > 0 and (data := os.read(descriptor, room)):
            parts.append(data)
            room -= len(data)
        return b"".join(parts).decode("latin-1")
    finally:
        os.close(descriptor)


def main() -> None:
    for line in sys.stdin.buffer:
        try:
            said: dict[str, object] = {"is": _answer(json.loads(line))}
        except OSError as error:
            said = {"error": error.errno or 0, "text": error.strerror or str(error)}
        except (ValueError, KeyError, TypeError) as error:
            said = {"error": 0, "text": str(error)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
