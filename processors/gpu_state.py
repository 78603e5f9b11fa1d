"""What is remembered of a node's GPUs from one sample to the next: small, frozen, bounded. Its use is gpu_health.py's."""

from __future__ import annotations

from typing import NamedTuple

from events.incident import Symptom

XIDS_MAX = 16


class Run(NamedTuple):
    """Something that holds. `samples`: how many on end it has (below 0: how many on end it has not, after it was told). `job`,
    `attempt`: whose it was told as; `late`: of a sample that had waited. `over`: its end is told as well. `last_id`, `last_ns`: of the sample that
    was counted last, and when it was seen."""

    rule: str
    symptom: Symptom
    samples: int = 0
    told_ns: int = 0
    job: str = ""
    attempt: int = 0
    late: bool = False
    over: bool = True
    last_id: str = ""
    last_ns: int = 0


class View(NamedTuple):
    """A GPU that was seen, by its uuid (else its address, else `index N`), last under index `at`. -1: not known yet. `links`: those
    that were active in this boot. `ecc_*`: uncorrectable errors up to which was told."""

    key: str
    at: int = -1
    address: str = ""
    serial: str = ""
    ecc_volatile: int = -1
    ecc_aggregate: int = -1
    ecc_told_ns: int = 0
    links: tuple[int, ...] = ()
    link_errors: int = -1
    link_crc: int = -1
    runs: tuple[Run, ...] = ()

    @property
    def device(self) -> str:
        return self.address or self.key


class Xid(NamedTuple):
    xid: int
    device: str
    seen_ns: int


class GpuState(NamedTuple):
    """`boot`: that of the last sample. `runs`: of the node as a whole. `misses`: questions on end that were not answered.
    `seen_ns`: when the last word that changed anything here was seen; what is older is of before. `loaded_ns`: when the kernel
    told last that the driver is loaded or unloaded."""

    node: str = ""
    boot: str = ""
    views: tuple[View, ...] = ()
    runs: tuple[Run, ...] = ()
    misses: int = 0
    xids: tuple[Xid, ...] = ()
    seen_ns: int = 0
    loaded_ns: int = 0
