"""What a node's network links do: those that a job can use, when one goes down or comes back, and how they count."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

#: `gone`: the device itself went away. `moved`: into another network name space, on purpose; it is not watched any more.
LinkState = Literal["up", "down", "gone", "moved"]
LINKS_MAX = 256


class Link(Fact):
    """One link that is watched. `device`: an interface (`eth0`) or an RDMA port (`mlx5_0/1`), then `interface` is the one that
    belongs to it. `rate_mbps` is what it ran at when it was first seen up, -1 where it does not say."""

    device: str = Field(min_length=1, max_length=NAME_MAX)
    interface: str = Field(default="", max_length=NAME_MAX)
    layer: str = Field(default="", max_length=NAME_MAX)
    state: LinkState = "up"
    rate_mbps: int = Field(default=-1, ge=-1)
    pci: str = Field(default="", max_length=NAME_MAX)
    driver: str = Field(default="", max_length=NAME_MAX)
    #: Counters that stand at the most they can hold: what they count can't be seen any more.
    full: tuple[str, ...] = ()


class NicBaseline(Fact):
    """The links that count on this node from here on: up once, and such as a job uses. `ignored`: the others, and why, as many as
    fit; `ignored_count`: all of them."""

    TYPE: ClassVar[str] = "keepstep.nic_baseline.v1"
    links: tuple[Link, ...] = Field(default=(), max_length=LINKS_MAX)
    ignored: tuple[tuple[str, str], ...] = Field(default=(), max_length=64)
    ignored_count: int = Field(default=0, ge=0)


class LinkChanged(Fact):
    """A watched link went down, came back, or did both between two looks (`downs` counts how often it went down since the last
    word). `since_boot_s`: links go down at every boot, and a rule must know."""

    TYPE: ClassVar[str] = "keepstep.link_changed.v1"
    device: str = Field(min_length=1, max_length=NAME_MAX)
    interface: str = Field(default="", max_length=NAME_MAX)
    layer: str = Field(default="", max_length=NAME_MAX)
    state: LinkState
    before: LinkState
    downs: int = Field(default=0, ge=0)
    #: Someone took it down (`ip link set … down`), the cable did not.
    by_hand: bool = False
    since_boot_s: int = Field(default=0, ge=0)
    seen_by: Literal["netlink", "sysfs"] = "netlink"
    detail: str = Field(default="", max_length=TEXT_MAX)


class LinkSample(Fact):
    """A watched link over a sample's period. Traffic is -1 where it is not known (the first sample, or counters that began again).
    `counted`: error counters that rose, and by how much, by their names in sysfs; after a reset, what was counted since."""

    device: str = Field(min_length=1, max_length=NAME_MAX)
    layer: str = Field(default="", max_length=NAME_MAX)
    state: LinkState = "up"
    rate_mbps: int = Field(default=-1, ge=-1)
    #: The rate it had when it was first seen up; below it the link runs with fewer lanes or a lower speed.
    rate_full_mbps: int = Field(default=-1, ge=-1)
    sent_bytes_per_s: float = -1.0
    received_bytes_per_s: float = -1.0
    counted: tuple[tuple[str, int], ...] = Field(default=(), max_length=64)
    began_again: bool = False


class LinkTraffic(Fact):
    """What all watched links of a node carried together in a sample's period, told on its job's stream: a job that makes no progress
    and carries nothing hangs; one that carries something may be slow."""

    TYPE: ClassVar[str] = "keepstep.link_traffic.v1"
    period_s: float = Field(gt=0)
    bytes_per_s: float = Field(ge=0)
    links: int = Field(ge=1)


class NicSample(Fact):
    """All watched links, every half minute. `period_s` 0: the first one, which has no rates."""

    TYPE: ClassVar[str] = "keepstep.nic_sample.v1"
    period_s: float = Field(ge=0)
    since_boot_s: int = Field(default=0, ge=0)
    links: tuple[LinkSample, ...] = Field(default=(), max_length=LINKS_MAX)
