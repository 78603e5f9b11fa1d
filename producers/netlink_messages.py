"""rtnetlink's messages about links: bytes in, what they say out. Pure; nic_netlink.py holds the socket.

Only what the kernel says of a link itself (family unspecified) is read: bridges send messages of family AF_BRIDGE about their
ports, and a port that leaves its bridge looks there like a device that was deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct, error
from typing import NamedTuple

NLMSG_ERROR, NLMSG_DONE = 2, 3
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
NLM_F_REQUEST, NLM_F_DUMP, NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
IFF_UP, IFF_LOWER_UP = 0x1, 0x10000
_IFNAME, _OPERSTATE, _LINKINFO, _CARRIER, _NEW_NETNSID, _CARRIER_DOWNS = 3, 16, 18, 33, 45, 48
_INFO_KIND = 1

_HEADER = Struct("=IHHII")  # length, type, flags, sequence, port
_IFINFO = Struct("=BxHiII")  # family, device type, index, flags, change
_ATTRIBUTE = Struct("=HH")
_U32 = Struct("=I")
_I32 = Struct("=i")

#: A link's operational states by number (RFC 2863, as the kernel counts them).
OPERSTATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
#: More attributes than any link has; a loop over nonsense ends.
_ATTRIBUTES_MAX = 256


class LinkNews(NamedTuple):
    """What the kernel says of one interface. `carrier` None: not said. `carrier_downs`: how often the carrier was lost since the
    device was made, -1 where the kernel doesn't count. `moved`: deleted here, and alive in another network name space."""

    ifindex: int
    name: str
    admin_up: bool
    lower_up: bool
    operstate: str
    carrier: bool | None
    carrier_downs: int
    kind: str
    deleted: bool
    moved: bool


class Done(NamedTuple):
    """The end of a dump. `interrupted`: links changed meanwhile, ask again."""

    sequence: int
    interrupted: bool


class Problem(NamedTuple):
    """The kernel refused a request, or what came is no netlink. `errno` 0: the latter."""

    sequence: int
    errno: int
    detail: str


def request_dump(sequence: int) -> bytes:
    """Asks for all links."""
    body = _IFINFO.pack(0, 0, 0, 0, 0)
    return _HEADER.pack(_HEADER.size + len(body), RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, sequence, 0) + body


def parse(raw: bytes) -> Iterator[LinkNews | Done | Problem]:
    """What one datagram says. Anything malformed ends the reading of it with a Problem; kinds not asked for are skipped."""
    at, interrupted = 0, False
    while at + _HEADER.size <= len(raw):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(raw, at)
        if length < _HEADER.size or at + length > len(raw):
            yield Problem(0, 0, f"a netlink message of {length} bytes where {len(raw) - at} are left")
            return
        body = raw[at + _HEADER.size : at + length]
        interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
        if kind == NLMSG_DONE:
            yield Done(sequence, interrupted)
        elif kind == NLMSG_ERROR:
            number = -_I32.unpack_from(body)[0] if len(body) >= 4 else 0
            if number:
                yield Problem(sequence, number, "the kernel refused a request for its links")
        elif kind in (RTM_NEWLINK, RTM_DELLINK):
            news = _link(body, kind == RTM_DELLINK)
            if isinstance(news, str):
                yield Problem(0, 0, news)
                return
            if news is not None:
                yield news
        at += (length + 3) & ~3
    if at < len(raw):
        yield Problem(0, 0, f"{len(raw) - at} bytes that are no netlink message")


def _link(body: bytes, deleted: bool) -> LinkNews | str | None:
    if len(body) < _IFINFO.size:
        return "a link message without its header"
    family, _, index, flags, _ = _IFINFO.unpack_from(body)
    if family != 0:
        return None
    found = attributes(body[_IFINFO.size :])
    if found is None:
        return f"the attributes of link {index} do not add up"
    try:
        operstate = found[_OPERSTATE][0] if found.get(_OPERSTATE) else 0
        carrier = found.get(_CARRIER)
        kind = attributes(found[_LINKINFO]) if _LINKINFO in found else None
        return LinkNews(
            ifindex=index,
            name=_text(found.get(_IFNAME, b"")),
            admin_up=bool(flags & IFF_UP),
            lower_up=bool(flags & IFF_LOWER_UP),
            operstate=OPERSTATES[operstate] if operstate < len(OPERSTATES) else "unknown",
            carrier=bool(carrier[0]) if carrier else None,
            carrier_downs=_U32.unpack(found[_CARRIER_DOWNS])[0] if _CARRIER_DOWNS in found else -1,
            kind=_text((kind or {}).get(_INFO_KIND, b"")),
            deleted=deleted,
            moved=deleted and _NEW_NETNSID in found,
        )
    except (error, IndexError):
        return f"the attributes of link {index} have odd lengths"


def attributes(raw: bytes) -> dict[int, bytes] | None:
    """Attributes by number (the last of each). None: their lengths do not add up."""
    found: dict[int, bytes] = {}
    at = 0
    for _ in range(_ATTRIBUTES_MAX):
        if at + _ATTRIBUTE.size > len(raw):
            break
        length, kind = _ATTRIBUTE.unpack_from(raw, at)
        if length < _ATTRIBUTE.size or at + length > len(raw):
            return None
        found[kind & 0x3FFF] = raw[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
