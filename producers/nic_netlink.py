"""The kernel's word on its network links the moment it is said: a route netlink socket that the event loop reads. I/O only;
netlink_messages.py knows what the bytes say."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from producers.netlink_messages import Done, LinkNews, Problem, parse, request_dump

_RTMGRP_LINK = 1
_DATAGRAM_BYTES = 128 * 1024
_RECEIVE_BYTES = 1024 * 1024
_DATAGRAMS_A_TURN = 64
#: Dumps that links changed under are asked for again, so often.
_INTERRUPTED_MAX = 3


class LinkSocket:
    """`open()`, then callbacks from the event loop: `on_link` for each word about a link, `on_dump(begins)` around all links that
    were asked for, `on_overrun` where words were lost (ask for a dump then), `on_problem` for what could not be read.

    What comes from anyone but the kernel is not listened to.
    """

    def __init__(
        self,
        on_link: Callable[[LinkNews], None],
        on_dump: Callable[[bool], None],
        on_overrun: Callable[[], None],
        on_problem: Callable[[str], None],
        *,
        receive_bytes: int = _RECEIVE_BYTES,
    ) -> None:
        self._on_link, self._on_dump, self._on_overrun, self._on_problem = on_link, on_dump, on_overrun, on_problem
        self._receive_bytes = receive_bytes
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._dumping = False
        self._interrupted = 0

    def open(self) -> None:
        """Raises OSError where the system has no route netlink."""
        found = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
            found.bind((0, _RTMGRP_LINK))
        except OSError:
            found.close()
            raise
        self._socket = found
        asyncio.get_running_loop().add_reader(found.fileno(), self.pump)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._dumping = False

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def ask(self) -> None:
        """Asks for all links, unless that is under way."""
        if self._socket is None or self._dumping:
            return
        self._sequence += 1
        try:
            self._socket.sendto(request_dump(self._sequence), (0, 0))
        except OSError as error:
            self._on_problem(f"the kernel's links can't be asked for: {os.strerror(error.errno or 0)}")
            return
        self._dumping = True
        self._on_dump(True)

    def pump(self) -> None:
        """Reads what is there."""
        for _ in range(_DATAGRAMS_A_TURN):
            if self._socket is None:
                return
            try:
                raw, sender = self._socket.recvfrom(_DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    self._dumping = False  # its end may be among what was lost
                    self._on_overrun()
                    continue
                self._on_problem(f"the kernel's word on links can't be read: {os.strerror(error.errno or 0)}")
                with suppress(OSError):
                    self.close()
                return
            if sender[0] == 0:
                self._read(raw)

    def _read(self, raw: bytes) -> None:
        for said in parse(raw):
            if isinstance(said, LinkNews):
                self._on_link(said)
            elif isinstance(said, Done):
                if said.sequence == self._sequence and self._dumping:
                    self._dumping = False
                    if said.interrupted and self._interrupted < _INTERRUPTED_MAX:
                        self._interrupted += 1
                        self.ask()
                        continue
                    self._interrupted = 0
                    self._on_dump(False)
            elif isinstance(said, Problem):
                if said.errno == errno.EBUSY:
                    continue  # a dump is under way already
                if said.sequence == self._sequence:
                    self._dumping = False
                self._on_problem(said.detail + (f": {os.strerror(said.errno)}" if said.errno else ""))
