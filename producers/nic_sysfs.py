"""Reads /sys/class/net and /sys/class/infiniband. I/O only, and tolerant: what is absent, unreadable or no number is simply not known.
But what can't be read for a reason of our own (no descriptor left, no permission) raises: a link is not gone because we can't look.
Any read may hang with its driver, so all of this runs in a thread with a deadline (reader_thread.py). `root` stands for /sys."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from events.network import LINKS_MAX
from producers.nic_links import (
    INTERFACE_COUNTERS,
    INTERFACE_TRAFFIC,
    RDMA_COUNTERS,
    RDMA_HW_COUNTERS,
    RDMA_TRAFFIC,
    Interface,
    Known,
    Port,
    Survey,
    interface_state,
    port_rate_mbps,
    port_state,
)

_TEXT_BYTES = 256
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.ELOOP})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
#: More entries than this in a folder are not looked at; a node with so many interfaces has them for its containers.
_ENTRIES_MAX = 4096
_PORTS_MAX = 16


class SysfsLinks:
    """`survey` looks at everything, `looks` at the states of some RDMA ports and interfaces, `counters` at one link's. All raise
    OSError for reasons of our own."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self.net = root / "class" / "net"
        self.infiniband = root / "class" / "infiniband"

    def survey(self, wanted: Callable[[str], bool] = lambda name: False) -> Survey:
        """`wanted`: interfaces that are looked at although no device stands behind them."""
        interfaces = []
        for name in _entries(self.net):
            physical = os.path.exists(self.net / name / "device")
            if physical or wanted(name):
                found = self._interface(name, physical)
                if found is not None:
                    interfaces.append(found)
            else:
                interfaces.append(Interface(name, 0, False, "down"))
        return Survey(tuple(interfaces), tuple(self.ports(_entries(self.infiniband))))

    def ports(self, adapters: Iterable[str]) -> Iterable[Port]:
        for adapter in adapters:
            below = self.infiniband / adapter
            for text in _entries(below / "ports")[:_PORTS_MAX]:
                if text.isascii() and text.isdigit():
                    found = self._port(adapter, int(text), whole=True)
                    if found is not None:
                        yield found

    def looks(self, links: Iterable[Known]) -> dict[str, Interface | Port | None]:
        """By device; None: it is gone. Of a port only its state and how often it went down: to ask for more costs the adapter a
        command each."""
        found: dict[str, Interface | Port | None] = {}
        for link in links:
            if link.kind == "rdma":
                adapter, _, port = link.device.rpartition("/")
                found[link.device] = self._port(adapter, int(port), whole=False)
            else:
                found[link.device] = self._interface(link.device, True)
        return found

    def rate_mbps(self, link: Known) -> int:
        if link.kind == "rdma":
            adapter, _, port = link.device.rpartition("/")
            return port_rate_mbps(_text(self.infiniband / adapter / "ports" / port / "rate") or "")
        return _number(self.net / link.device / "speed")

    def counters(self, link: Known) -> dict[str, int]:
        """What can be read of them."""
        if link.kind == "net":
            folder = self.net / link.device / "statistics"
            names = [(folder / name, name) for name in (*INTERFACE_TRAFFIC, *INTERFACE_COUNTERS)]
        else:
            adapter, _, port = link.device.rpartition("/")
            below = self.infiniband / adapter / "ports" / port
            names = [(below / "counters" / name, name) for name in (*RDMA_TRAFFIC, *RDMA_COUNTERS)]
            names += [(below / "hw_counters" / name, name) for name in RDMA_HW_COUNTERS]
        values = ((name, _number(path)) for path, name in names)
        return {name: value for name, value in values if value >= 0}

    def _interface(self, name: str, physical: bool) -> Interface | None:
        folder = self.net / name
        flags = _text(folder / "flags")
        if flags is None:
            return None
        device = _device(folder)
        admin_up = _hexadecimal(flags) & 1 == 1
        carrier = _number(folder / "carrier")
        state = interface_state(admin_up, bool(carrier) if carrier >= 0 else None, _text(folder / "operstate") or "unknown")
        return Interface(
            name=name,
            ifindex=max(0, _number(folder / "ifindex")),
            physical=physical,
            state=state,
            rate_mbps=_number(folder / "speed") if state == "up" else -1,
            master=_link(folder / "master"),
            pci=os.path.basename(device),
            driver=_link(folder / "device" / "driver"),
            port=max(0, _number(folder / "dev_port")),
            carrier_downs=_number(folder / "carrier_down_count"),
            by_hand=not admin_up,
        )

    def _port(self, adapter: str, number: int, *, whole: bool) -> Port | None:
        folder = self.infiniband / adapter / "ports" / str(number)
        state = _text(folder / "state")
        if state is None:
            return None
        up, detail = port_state(state, _text(folder / "phys_state") or "")
        downs = _number(folder / "counters" / "link_downed")
        if not whole:
            return Port(adapter, number, up, detail, downs=downs)
        device = _device(self.infiniband / adapter)
        return Port(
            adapter, number, up, detail, _text(folder / "link_layer") or "", port_rate_mbps(_text(folder / "rate") or ""),
            os.path.basename(device), _link(self.infiniband / adapter / "device" / "driver"), downs,
        )  # fmt: skip


def _entries(folder: Path) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        if error.errno in _OUR_OWN:
            raise
        return []
    return [name for name in names[:_ENTRIES_MAX] if len(name) <= 64 and name.isprintable()][: 16 * LINKS_MAX]


def _text(path: Path) -> str | None:
    """A file's first line, printable and short; '' where its driver gives none, None where it is absent."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _OUR_OWN:
            raise
        return None if error.errno in _ABSENT else ""
    try:
        raw = os.read(descriptor, _TEXT_BYTES)
    except OSError as error:
        return None if error.errno in _ABSENT else ""
    finally:
        os.close(descriptor)
    text = raw.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    return "".join(c for c in text if c.isprintable())


def _number(path: Path) -> int:
    """Not negative; -1 where it is none, or none that this user may read."""
    try:
        text = _text(path)
    except OSError:
        return -1
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 20 else -1


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _link(path: Path) -> str:
    """The last part of what a symbolic link points to."""
    try:
        return os.path.basename(os.readlink(path))[:64]
    except OSError:
        return ""


def _device(folder: Path) -> str:
    try:
        return os.path.realpath(folder / "device", strict=True)
    except OSError:
        return ""
