"""Trains a small model with tensor, pipeline and data parallelism (TP and PP from the environment, DP what the world leaves), over gloo: the
job of group tests whose replays must keep both. Ranks count as in processors.parallel_groups: TP fastest, then PP, then DP.

Each stage is one block: a product split by columns, one split by rows, their sum over the TP group. Every rank tells the mean loss."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep

TP, PP = int(os.environ["TP"]), int(os.environ["PP"])
WIDTH, BATCH, STEPS = 32, 8, 1000


class Begin(torch.autograd.Function):
    """Where a tensor-parallel part begins: gradients are summed over its group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        whole = grad.clone()
        dist.all_reduce(whole, group=TP_GROUP)
        return whole


class End(torch.autograd.Function):
    """Where it ends: outputs are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=TP_GROUP)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


keepstep.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dp_size = world // (TP * PP)
tp, pp, dp = rank % TP, rank // TP % PP, rank // (TP * PP)


def rank_at(d: int, p: int, t: int) -> int:
    return (d * PP + p) * TP + t


tp_groups = {(d, p): dist.new_group([rank_at(d, p, t) for t in range(TP)]) for d in range(dp_size) for p in range(PP)}
dp_groups = {(p, t): dist.new_group([rank_at(d, p, t) for d in range(dp_size)]) for p in range(PP) for t in range(TP)}
TP_GROUP, DP_GROUP = tp_groups[dp, pp], dp_groups[pp, tp]
seen = {"node": os.environ["KEEPSTEP_NODE"], "rank": rank, "world": world, "tp": tp, "pp": pp, "dp": dp, "dp_size": dp_size}
(Path(os.environ["OUT"]) / f"{os.environ['MASTER_PORT']}-{rank}.json").write_text(json.dumps(seen))

torch.manual_seed(1)
whole = [(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, 2 * WIDTH) / (2 * WIDTH) ** 0.5) for _ in range(PP)]
up, down = (torch.nn.Parameter(part.chunk(TP, dim)[tp].clone()) for dim, part in enumerate(whole[pp]))
model = torch.nn.ParameterList([up, down])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(keepstep.restore(model=model, optimizer=optimizer), STEPS):
    optimizer.zero_grad(set_to_none=True)
    numbers = torch.Generator().manual_seed(1000 * step + dp)
    data = torch.randn(BATCH, WIDTH, generator=numbers)
    entered = data
    if pp:
        entered = torch.empty(BATCH, WIDTH)
        dist.recv(entered, rank_at(dp, pp - 1, tp))
    entered.requires_grad_(pp > 0)
    hidden = torch.tanh(torch.nn.functional.linear(Begin.apply(entered), up))
    out = entered + End.apply(torch.nn.functional.linear(hidden, down))
    told = torch.zeros(1)
    if pp == PP - 1:
        loss = (out - data.roll(1, 1)).square().mean()
        told += loss.detach() / TP / dp_size
        loss.backward()
    else:
        dist.send(out.detach(), rank_at(dp, pp + 1, tp))
        back = torch.empty_like(out)
        dist.recv(back, rank_at(dp, pp + 1, tp))
        out.backward(back)
    if pp:
        assert entered.grad is not None
        dist.send(entered.grad, rank_at(dp, pp - 1, tp))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=DP_GROUP)
        parameter.grad /= dp_size
    optimizer.step()
    dist.all_reduce(told)
    keepstep.step(step, loss=float(told))
sys.exit("it was to be ended by the hook")
