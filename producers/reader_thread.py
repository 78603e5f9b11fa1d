"""Reads that may hang, each with a deadline. A driver that hangs takes the thread that asked it along, so there is one thread for one
source, and while it hangs nobody else is sent after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(Exception):
    """A read did not come back in time, or an earlier one has not yet."""


class ReaderThread:
    """A daemon thread (one that hangs must not keep the process from ending), started at the first read. One read at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: asyncio.Future[Any] | None = None

    @property
    def hangs(self) -> bool:
        return self._pending is not None and not self._pending.done()

    async def read(self, work: Callable[[], T], limit_s: float) -> T:
        """What `work` returns or raises. Raises Hung."""
        if self.hangs:
            raise Hung(f"{self._name}: an earlier read has not come back")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._pending = future = loop.create_future()
        self._work.put((work, loop, future))
        done, _ = await asyncio.wait({future}, timeout=limit_s)
        if not done:
            future.add_done_callback(_heard)  # what it raises later is nobody's
            raise Hung(f"{self._name}: no answer within {limit_s:g} s")
        result: T = future.result()
        return result

    def close(self) -> None:
        """Lets the thread end once it is free."""
        if self._thread is not None:
            self._work.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, loop, future = item
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work()
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(_settle, future, result, failure)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    elif isinstance(failure, Exception):
        future.set_exception(failure)
    else:
        future.set_exception(RuntimeError(repr(failure)))


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
