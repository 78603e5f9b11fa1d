"""A small data-parallel job over gloo that hangs as told: `lock`, in evaluation, the data loader's worker of rank 1 in a lock; `none`, it
steps until someone stops it. Prints a line once it is at work. Run with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

LOCK = threading.Lock()


class Samples(Dataset[torch.Tensor]):
    def __init__(self, locked: bool) -> None:
        self.locked = locked

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.locked and index >= 8:
            LOCK.acquire()
            LOCK.acquire()
        return torch.ones(4)


def train_step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model(batch).mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    time.sleep(0.01)


def evaluate(model: torch.nn.Module, locked: bool) -> None:
    for batch in DataLoader(Samples(locked), batch_size=4, num_workers=1):
        total = model(batch).mean().detach()
        dist.all_reduce(total)
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    print("at work", flush=True)
    if sys.argv[1] == "lock":
        evaluate(model, locked=int(os.environ["RANK"]) == 1)
    while True:
        train_step(model, torch.ones(4, 4))


main()
