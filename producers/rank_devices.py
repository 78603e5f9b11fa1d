"""Which of a node's GPUs and network links a rank runs on, from the order of its devices and where they sit on the PCI tree. Pure;
rank_devices_sysfs.py reads.

This is where a rank runs by convention (local rank i on the i-th GPU that it may see), not what it did: a script may choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from events.topology import RankDevice


class Device(NamedTuple):
    """`path`: its place on the tree, root complex first (`pci0000:17`, `0000:17:01.0`, `0000:18:00.0`); `numa` -1: not said."""

    name: str
    path: tuple[str, ...]
    numa: int = -1

    @property
    def address(self) -> str:
        return self.path[-1] if self.path else ""


class LocalRank(NamedTuple):
    """`visible`: the rank's CUDA_VISIBLE_DEVICES; None: not set, or not readable."""

    rank: int
    local_rank: int
    visible: str | None = None


def assign(ranks: Iterable[LocalRank], gpus: Sequence[Device], links: Sequence[Device]) -> tuple[RankDevice, ...]:
    """`gpus` in the order of their addresses, which is the driver's."""
    return tuple(_one(rank, gpus, links) for rank in sorted(ranks))


def _one(rank: LocalRank, gpus: Sequence[Device], links: Sequence[Device]) -> RankDevice:
    index, basis = _index(rank)
    if not 0 <= index < len(gpus):
        only = links[0].name if len(links) == 1 else ""
        return RankDevice(rank=rank.rank, local_rank=rank.local_rank, link=only, basis=basis)
    gpu = gpus[index]
    return RankDevice(
        rank=rank.rank, local_rank=rank.local_rank, gpu=index, gpu_pci=gpu.address[:64], link=nearest(gpu, index, gpus, links),
        basis=basis,
    )  # fmt: skip


def _index(rank: LocalRank) -> tuple[int, Literal["order", "visible_devices"]]:
    """A list of numbers is an order of its own; one of a single entry is the rank's whatever its number. UUIDs say nothing here."""
    if rank.visible is None:
        return rank.local_rank, "order"
    entries = [entry.strip() for entry in rank.visible.split(",")] if rank.visible.strip() else []
    at = 0 if len(entries) == 1 else rank.local_rank
    found = entries[at] if at < len(entries) else ""
    return (int(found) if found.isascii() and found.isdigit() and len(found) < 5 else -1), "visible_devices"


def nearest(gpu: Device, index: int, gpus: Sequence[Device], links: Sequence[Device]) -> str:
    """The link that shares most of the way to the root; among equals the GPUs that are equally near take turns."""
    if not links:
        return ""
    best = max(_closeness(gpu, link) for link in links)
    equal = [link for link in links if _closeness(gpu, link) == best]
    if len(equal) == 1:
        return equal[0].name
    same = [
        i for i, other in enumerate(gpus)
        if [_closeness(other, link) for link in links] == [_closeness(gpu, link) for link in links]
    ]  # fmt: skip
    return equal[same.index(index) % len(equal)].name


def _closeness(one: Device, other: Device) -> tuple[int, bool]:
    shared = 0
    for a, b in zip(one.path, other.path, strict=False):
        if a != b:
            break
        shared += 1
    return shared, one.numa >= 0 and one.numa == other.numa
