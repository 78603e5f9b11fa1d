"""The training job of back_at_work: the demo's model, run as it is by keepstep and by NVRx's ft_launcher. Each rank's finished steps go
to a file with the monotonic clock, so that both sides are measured by the same thing. A script, run by a rank's interpreter."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "infra" / "demo_job"))
import train  # type: ignore[import-not-found]

BATCH, SEED, CHECKPOINT_EVERY = 4, 1, 20


def join() -> None:
    """The process group. Under ft_launcher, too, every attempt gets a prefix of its own: without one, restarted ranks meet the addresses of the dead (plain torchrun does not recover)."""
    if os.environ.get("KEEPSTEP_SOCKET"):
        keepstep.init_process_group("gloo")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=hosts, wait_for_workers=False)
    prefix = f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=world_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-floor", type=float, default=0.12)
    options = parser.parse_args()
    beat = None
    if not os.environ.get("KEEPSTEP_SOCKET"):
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient  # type: ignore[import-not-found]

        client = RankMonitorClient()
        client.init_workload_monitoring()
        beat = client.send_heartbeat
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    join()
    rank = dist.get_rank()
    log = (options.folder / f"steps.{rank}").open("a", buffering=1)
    log.write(f"start {attempt} {os.getpid()} {time.monotonic()}\n")
    torch.manual_seed(SEED)
    text = train.read_text()
    model = DistributedDataParallel(train.Gpt(3, 96, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    checkpoints = options.folder / "checkpoints"
    step = keepstep.restore(model=model, optimizer=optimizer, folder=checkpoints)
    while True:
        begun_s = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        loss = train.loss_of(model, *train.batch(text, BATCH, SEED, step, rank))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        time.sleep(max(0.0, begun_s + options.step_floor - time.monotonic()))
        keepstep.step(step, loss=mean / dist.get_world_size(), grad_norm=norm, tokens=BATCH * train.CONTEXT)
        if beat is not None:
            beat()
        log.write(f"step {attempt} {step} {time.monotonic()}\n")
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            keepstep.save(step - 1, model=model, optimizer=optimizer, folder=checkpoints)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
