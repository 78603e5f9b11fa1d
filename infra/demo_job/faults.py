"""What goes wrong in the demo's training job when it is told to: each fault is a file in a folder, named for whom it befalls.

    slow-NODE          this node's compute takes so many seconds longer, every step
    lock-RANK          an evaluation's data-loader worker waits for a lock on this file, which somebody else holds
    reset-RANK         once: the connection to a peer is reset (the file is taken away first)
    spike-RANK         once: a batch whose loss weights are thirty times too large
    index-STEP         every time: this step's batch begins beyond the end of the text

Real: the sleep, the lock, the exceptions. Made: their cause. (A node that computes wrong numbers is in faulty/.)
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

Pair = tuple[torch.Tensor, torch.Tensor]


class Faults:
    """The faults of one rank. `folder` None: there are none, and it costs a step nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank, self.node = folder, rank, os.environ.get("KEEPSTEP_NODE", "")

    def _is(self, name: str) -> bool:
        return self.folder is not None and (self.folder / name).exists()

    def _taken(self, name: str) -> bool:
        """Whether it is there; it is not any more afterwards, so that it befalls once."""
        if self.folder is None:
            return False
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def compute(self) -> None:
        """In the middle of a step's own work."""
        if self._is(f"slow-{self.node}") and self.folder is not None:
            time.sleep(float((self.folder / f"slow-{self.node}").read_text()))
        if self._taken(f"reset-{self.rank}"):
            raise ConnectionResetError(104, "Connection reset by peer")

    def beyond(self, step: int, length: int) -> int:
        """How far beyond its place a step's batch begins."""
        return length if self._is(f"index-{step}") else 0

    def weight(self) -> float:
        """What a step's loss is weighted with."""
        return 30.0 if self._taken(f"spike-{self.rank}") else 1.0

    def lock(self) -> str:
        return str(self.folder / f"lock-{self.rank}") if self.folder is not None else ""


class Batches(Dataset[Pair]):  # type: ignore[misc]
    """Batches of an evaluation, made in the data loader's own process."""

    def __init__(self, pairs: list[Pair], lock: str) -> None:
        self.pairs, self.lock = pairs, lock

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> Pair:
        if self.lock and os.path.exists(self.lock):
            with open(self.lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return self.pairs[number]


def loaded(pairs: list[Pair], lock: str) -> Iterator[Pair]:
    """The batches through a data-loader worker, as scripts do."""
    yield from DataLoader(Batches(pairs, lock), batch_size=None, num_workers=1)
