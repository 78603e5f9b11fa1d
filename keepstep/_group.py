"""The process group of one attempt. torch's own, but for where the ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def init(backend: str | None, options: dict[str, Any]) -> None:
    """Raises what torch raises."""
    import torch.distributed as dist

    prefix = os.environ.get("KEEPSTEP_STORE_PREFIX")
    if not prefix or options.get("store") is not None or options.get("init_method") is not None:
        dist.init_process_group(backend, **options)
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank = int(options.pop("rank", os.environ["RANK"]))
    world_size = int(options.pop("world_size", os.environ["WORLD_SIZE"]))
    if host in ("127.0.0.1", "localhost", "::1"):
        # All ranks are on this machine. gloo would look up the host's name for its address, which may be slow or lead elsewhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=options.get("timeout") or timedelta(minutes=5),
        wait_for_workers=False,
    )
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world_size, **options)
