"""Which of a node's links count, in what state they are, and what their counters say. Pure: nic_sysfs.py and nic_netlink.py read.

A link is an RDMA port (`mlx5_0/1`) or a network interface (`eth0`). An interface that belongs to a watched RDMA port is that port's
and no second link, so that one cable pulled is one event.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from events.network import LINKS_MAX, LinkState
from producers.netlink_messages import LinkNews

AUTO, OFF = "auto", "off"
IGNORED_MAX = 64

#: How high counters of the port management agent count (InfiniBand specification 1.2.1, section 16.1.3.5): there they stay.
FULL_AT: Mapping[str, int] = {
    "symbol_error": 0xFFFF, "link_error_recovery": 0xFF, "link_downed": 0xFF, "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF, "port_rcv_switch_relay_errors": 0xFFFF, "port_xmit_discards": 0xFFFF,
    "port_xmit_constraint_errors": 0xFF, "port_rcv_constraint_errors": 0xFF, "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF, "VL15_dropped": 0xFFFF,
}  # fmt: skip
#: Counters of traffic count words of four bytes; those of an interface, bytes.
RDMA_TRAFFIC = ("port_xmit_data", "port_rcv_data")
WORD_BYTES = 4
INTERFACE_TRAFFIC = ("tx_bytes", "rx_bytes")
#: What else is read of a link: errors, and what tells of congestion.
RDMA_COUNTERS = (*FULL_AT, "port_xmit_wait")
RDMA_HW_COUNTERS = (
    "rnr_nak_retry_err", "local_ack_timeout_err", "roce_slow_restart", "roce_adp_retrans", "roce_adp_retrans_to",
    "out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "duplicate_request", "out_of_buffer", "req_cqe_error",
    "resp_cqe_error", "req_remote_access_errors", "resp_remote_access_errors", "req_remote_invalid_request",
    "resp_local_length_error", "rx_icrc_encapsulated", "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets",
)  # fmt: skip
INTERFACE_COUNTERS = (
    "rx_errors",
    "tx_errors",
    "rx_crc_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_missed_errors",
    "tx_carrier_errors",
)

_RATE = re.compile(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec(?:\s*\((\d{1,2})X\b)?", re.ASCII)
_STATE = re.compile(r"\s*\d{1,3}\s*:\s*(\S+)", re.ASCII)


class Interface(NamedTuple):
    """A network interface as sysfs shows it. `physical`: a device stands behind it. `port`: its place on a device with several."""

    name: str
    ifindex: int
    physical: bool
    state: LinkState
    rate_mbps: int = -1
    master: str = ""
    pci: str = ""
    driver: str = ""
    port: int = 0
    carrier_downs: int = -1
    by_hand: bool = False


class Port(NamedTuple):
    """An RDMA port. `rate_mbps` -1: not said. `downs`: its link_downed, -1 unknown."""

    hca: str
    port: int
    state: LinkState
    detail: str = ""
    layer: str = ""
    rate_mbps: int = -1
    pci: str = ""
    driver: str = ""
    downs: int = -1

    @property
    def name(self) -> str:
        return f"{self.hca}/{self.port}"


class Survey(NamedTuple):
    """Everything that is there."""

    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()


class Known(NamedTuple):
    """A link that counts: since when it was up does not matter, only that it was."""

    device: str
    kind: Literal["net", "rdma"]
    layer: str
    interface: str = ""
    ifindex: int = 0
    rate_mbps: int = -1
    pci: str = ""
    driver: str = ""


# --- states -----------------------------------------------------------------------------------------------------------------


def interface_state(admin_up: bool, carrier: bool | None, operstate: str) -> LinkState:
    """`unknown` is what drivers say that keep no operational state; there the carrier tells."""
    if not admin_up or carrier is False or operstate in ("down", "lowerlayerdown", "notpresent", "testing", "dormant"):
        return "down"
    return "up"


def news_state(news: LinkNews) -> LinkState:
    if news.deleted:
        return "moved" if news.moved else "gone"
    carrier = news.carrier if news.carrier is not None else news.lower_up
    return interface_state(news.admin_up, carrier, news.operstate)


def port_state(state: str, physical: str) -> tuple[LinkState, str]:
    """From the texts of an RDMA port's `state` and `phys_state` ("4: ACTIVE", "5: LinkUp"). A port that is not ACTIVE carries
    nothing: INIT and ARMED mean that its subnet manager has not answered."""
    logical, below = _word(state), _word(physical)
    text = f"{logical or 'no state'}, {below or 'no physical state'}"
    return ("up" if logical == "ACTIVE" and below in ("LinkUp", "") else "down"), text


def _word(text: str) -> str:
    match = _STATE.match(text)
    return match[1][:40] if match else ""


def port_rate_mbps(text: str) -> int:
    """ "400 Gb/sec (4X NDR)" -> 400000; -1 where it is no rate."""
    match = _RATE.match(text)
    return int(float(match[1]) * 1000) if match else -1


# --- which of them count ------------------------------------------------------------------------------------------------------


def matches(name: str, patterns: Sequence[str]) -> bool:
    """By shell patterns; an RDMA port also by its adapter's name alone."""
    return any(fnmatchcase(name, p) or ("/" in name and fnmatchcase(name.partition("/")[0], p)) for p in patterns)


def chosen(survey: Survey, patterns: Sequence[str], *, rdma: bool = False) -> tuple[dict[str, Known], dict[str, str]]:
    """The links that would count if they are up, and why the others don't. `patterns`: `auto`, shell patterns, and patterns after
    `!`, which leave out. auto: RDMA ports with what belongs to them; on a node without any, interfaces with a device behind. `rdma`: it had RDMA ports before,
    and that they are all gone does not make its management network the job's."""
    include = [p for p in patterns if p not in (AUTO, OFF) and not p.startswith("!")]
    exclude = [p[1:] for p in patterns if p.startswith("!")]
    auto = AUTO in patterns or not include
    links: dict[str, Known] = {}
    ignored: dict[str, str] = {}
    belongs: dict[str, str] = {}
    bonds: set[str] = set()
    for port in survey.ports:
        if matches(port.name, exclude):
            ignored[port.name] = "left out by pattern"
            continue
        if not (auto or matches(port.name, include)):
            ignored[port.name] = "no pattern names it"
            continue
        mine = _interface_of(port, survey.interfaces)
        if mine and mine.master:  # one leg of a bond: the port lives while any leg does, so each leg is a link of its own
            bonds.add(mine.master)
            mine = None
        if mine:
            belongs[mine.name] = port.name
        links[port.name] = Known(
            port.name, "rdma", port.layer, mine.name if mine else "", 0, port.rate_mbps, port.pci, port.driver
        )
    for found in survey.interfaces:
        why = _left_out(found, include, exclude, auto, rdma or bool(links), bonds, belongs)
        if why:
            ignored[found.name] = why
        else:
            links[found.name] = Known(
                found.name, "net", "Ethernet", "", found.ifindex, found.rate_mbps, found.pci, found.driver
            )
    return dict(list(links.items())[:LINKS_MAX]), ignored


def _left_out(
    found: Interface, include: list[str], exclude: list[str], auto: bool, rdma: bool, bonds: set[str], belongs: dict[str, str]
) -> str:
    if matches(found.name, exclude):
        return "left out by pattern"
    if matches(found.name, include):
        return ""
    if found.name in belongs:
        return f"it is {belongs[found.name]}'s"
    if not auto:
        return "no pattern names it"
    if found.name == "lo" or not found.physical:
        return "no device behind it"
    if rdma and not (found.master and found.master in bonds):
        return "the node has RDMA ports, and it belongs to none: management"
    return ""


def _interface_of(port: Port, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface on the same device; of several, the one in the port's place."""
    same = [i for i in interfaces if port.pci and i.pci == port.pci]
    placed = [i for i in same if i.port + 1 == port.port] if len(same) > 1 else same
    return next(iter(placed or same), None)


# --- how often it went down ---------------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """Downs since the link was last settled: as the device counted them, as they were seen, and as they were told. The device may
    count before or after its state is seen to change, and not at all when someone takes it down, so the truth is the greater of
    the two and never their sum."""

    device: int = 0
    seen: int = 0
    told: int = 0

    def next(self, risen: int, went_down: bool) -> Tally:
        device, seen = self.device + risen, self.seen + went_down
        return Tally(device, seen, max(device, seen, self.told))


def rise(before: int, now: int) -> tuple[int, bool]:
    """How much a counter rose, and whether it began again: one that fell (a driver's reload, a reset, the end of its bits) counts
    what it counted since. -1 is unknown."""
    if before < 0 or now < 0:
        return 0, False
    return (now - before, False) if now >= before else (now, True)


class Counted(NamedTuple):
    """A link's counters over a period. Rates are -1 where not known."""

    sent_bytes_per_s: float
    received_bytes_per_s: float
    counted: tuple[tuple[str, int], ...]
    began_again: bool
    #: Counters that reached the end of what they can hold within the period.
    filled: tuple[str, ...]


def counted(before: Mapping[str, int], now: Mapping[str, int], rdma: bool, period_s: float) -> Counted:
    sent, received = RDMA_TRAFFIC if rdma else INTERFACE_TRAFFIC
    unit = WORD_BYTES if rdma else 1
    rises: list[tuple[str, int]] = []
    filled: list[str] = []
    rates = {sent: -1.0, received: -1.0}
    began_again = False
    for name in sorted(now):
        if name not in before:
            continue
        full_at = FULL_AT.get(name, 0) if rdma else 0
        risen, again = rise(before[name], now[name])
        began_again = began_again or again
        if name in rates:
            if not again and period_s > 0 and not (rdma and now[name] == 0xFFFFFFFF):  # old adapters stop there
                rates[name] = risen * unit / period_s
        else:
            if risen:
                rises.append((name, risen))
            if full_at and now[name] >= full_at > before[name]:
                filled.append(name)
    return Counted(rates[sent], rates[received], tuple(rises[:64]), began_again, tuple(filled))


def full(counters: Mapping[str, int], rdma: bool) -> tuple[str, ...]:
    """The counters that stand at their end."""
    return tuple(sorted(name for name, value in counters.items() if rdma and name in FULL_AT and value >= FULL_AT[name]))
