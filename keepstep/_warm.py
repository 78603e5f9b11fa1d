"""One step of a small data-parallel model in a process of its own: loads and initialises what the first real step would have to."""

from __future__ import annotations

import io
import os
import random
from typing import Any


def step() -> None:
    """On the CPU only. Raises whatever torch raises; the random numbers are as before."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    numbers, python_numbers = torch.get_rng_state(), random.getstate()
    try:
        _step(torch)
    finally:
        torch.set_rng_state(numbers)
        random.setstate(python_numbers)


def _step(torch: Any) -> None:
    from torch import nn

    dist = torch.distributed
    grouped = dist.is_available() and dist.is_gloo_available()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    model: Any = nn.Sequential(
        nn.Embedding(64, 32),
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, activation="gelu"),
        nn.LayerNorm(32),
        nn.Linear(32, 64, bias=False),
    )
    try:
        if grouped:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.HashStore()  # a TCPStore would listen on every interface of the machine
            dist.init_process_group("gloo", store=dist.PrefixStore("warm", store), rank=0, world_size=1)
            from torch.nn.parallel import DistributedDataParallel

            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
        q = torch.zeros(1, 2, 16, 16, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(tokens).view(-1, 64), tokens.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if grouped:
            shared = torch.zeros(2)
            dist.all_reduce(shared)
            dist.barrier()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    finally:
        if grouped and dist.is_initialized():
            dist.destroy_process_group()
        if interface is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
