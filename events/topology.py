"""Where machines stand, and on which devices of theirs a rank runs. What is declared of machines is in LEDGER under the operator's
role; what an agent finds of its own ranks is an observation."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, Fact
from events.job import Place

#: Places in one event: the bus takes a megabyte.
PLACES_MAX = 2000


class TopologyDeclared(Fact):
    """Where machines stand, from here on, for the jobs and standbys that are declared after it. Large ones come in `parts`, each with
    the same `digest` (of all places) and its own `part`, counted from 0; a topology counts when all its parts are there."""

    TYPE: ClassVar[str] = "keepstep.topology_declared.v1"
    places: tuple[Place, ...] = Field(max_length=PLACES_MAX)
    digest: str = Field(min_length=1, max_length=64)
    part: int = Field(default=0, ge=0)
    parts: int = Field(default=1, ge=1)
    #: Where it came from: keepstep, slurm or kubernetes, and the file.
    origin: str = Field(default="", max_length=NAME_MAX)
    author: str = Field(default="", max_length=NAME_MAX)


class RankDevice(Fact):
    """A rank's GPU and the network link next to it, by PCI address. `gpu` -1: not known. `basis`: how the GPU was found: by the
    order of the machine's devices, or by the order that CUDA_VISIBLE_DEVICES names them in."""

    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    gpu: int = Field(default=-1, ge=-1)
    gpu_pci: str = Field(default="", max_length=64)
    link: str = Field(default="", max_length=NAME_MAX)
    basis: Literal["order", "visible_devices"] = "order"


class RankDevices(Fact):
    """Which rank of the envelope's attempt runs on which devices of this node, as far as its agent can tell."""

    TYPE: ClassVar[str] = "keepstep.rank_devices.v1"
    ranks: tuple[RankDevice, ...] = Field(max_length=1024)
