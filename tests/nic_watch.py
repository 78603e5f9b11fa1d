"""`python -m tests.nic_watch STATE PATTERN…`: the NIC producer by itself, over a desk in memory; each observation becomes a line of JSON
with the moment it was handed in (CLOCK_MONOTONIC). Ends when standard input does, so that it never outlives its test."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from events.registry import parse
from producers.nic import NicProducer, NicSettings
from producers.observe import Clock, Desk
from producers.outbox import Observation


class Box:
    """An outbox that hands on what it gets."""

    waiting = 0

    def __init__(self, on_event: Callable[[Observation], None]) -> None:
        self._on_event = on_event

    def put(self, lane: str, seen: Observation, on_safe: Callable[[], None] | None = None) -> None:
        self._on_event(seen)
        if on_safe:
            on_safe()


def desk(on_event: Callable[[Observation], None], boot_id: str = "boot-1", boot_ns: Callable[[], int] | None = None) -> Desk:
    clock = Clock(time.time_ns, boot_ns or (lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)), os.urandom)
    return Desk("n1", boot_id, clock, Box(on_event))  # type: ignore[arg-type]


def _print(seen: Observation) -> None:
    event = parse(seen.data)
    line = {"at_s": time.monotonic(), "kind": event.data.kind(), "data": event.data.model_dump(mode="json")}
    print(json.dumps(line), flush=True)


async def main(state: str, *patterns: str) -> None:
    settings = NicSettings(patterns, sample_s=float(os.environ.get("SAMPLE_S", "30")))
    if "RECEIVE_BYTES" in os.environ:
        settings = NicSettings(patterns, sample_s=600, receive_bytes=int(os.environ["RECEIVE_BYTES"]))
    producer = NicProducer(desk(_print), Path(state), settings)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    stall = bytearray()

    def commanded() -> None:
        """A line with a number: the loop stands still for so many seconds, as under a load. The end: over."""
        got = os.read(0, 4096)
        if not got:
            over.set()
        stall.extend(got)
        while b"\n" in stall:
            line, _, rest = stall.partition(b"\n")
            stall[:] = rest
            time.sleep(float(line))

    loop.add_reader(0, commanded)
    running = asyncio.create_task(producer.run())
    ending = asyncio.create_task(over.wait())
    await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
