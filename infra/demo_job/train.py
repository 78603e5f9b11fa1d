"""The demo's training job: a small GPT on the help text that ships with Python, data-parallel over gloo.

Runs as any user's script does; of ours it imports only `keepstep`. Steps are numbered from 0 and depend on nothing but the seed, the
world size and the checkpoint, so that steps done again after a restart come out equal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from faults import Faults, loaded  # type: ignore[import-not-found]  # beside this script: what is to go wrong in a demonstration
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import keepstep

VOCABULARY = 256  # bytes
CONTEXT = 64
#: Real text in every CPython: the help topics, and should a distribution have cut them out, some talkative modules.
TEXTS = ("pydoc_data.topics", "argparse", "typing", "logging", "doctest", "email.message", "decimal", "_pydecimal")
TEXT_BYTES_MIN = 200_000


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.last(self.blocks(x)))
        return logits


def read_text() -> torch.Tensor:
    """The text as bytes, at least TEXT_BYTES_MIN of them."""
    text = b""
    for name in TEXTS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            text += Path(spec.origin).read_bytes()
        if len(text) >= TEXT_BYTES_MIN:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    raise SystemExit("train.py: this Python ships neither its help text nor its sources; install its standard library whole")


def batch(text: torch.Tensor, size: int, seed: int, step: int, rank: int, beyond: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of one rank's step: a function of these numbers alone."""
    draw = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (size, 1), generator=draw) + beyond
    sequences = text[starts + torch.arange(CONTEXT + 1)].long()
    return sequences[:, :-1], sequences[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).view(-1, VOCABULARY), targets.reshape(-1))


class Part:
    """A model with fewer layers than the checkpoint that it takes its parameters from."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, model.parameters

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state, strict=False)


def rate(step: int, peak: float, warm_up: int) -> float:
    return peak * min(1.0, (step + 1) / warm_up)


def evaluate(model: nn.Module, held_out: torch.Tensor, options: argparse.Namespace, rank: int, faults: Faults) -> float:
    """Mean loss over all ranks on text that training never sees."""
    total = torch.zeros(1)
    numbers = range(options.evaluation_batches)
    pairs = [batch(held_out, options.batch, options.seed, number, rank) for number in numbers]
    with torch.no_grad():
        for pair in loaded(pairs, faults.lock()) if faults.folder else pairs:
            total += loss_of(model, *pair)
            keepstep.tick()
    dist.all_reduce(total)
    mean: float = total.item() / (options.evaluation_batches * dist.get_world_size())
    return mean


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT, data-parallel over gloo.")
    parser.add_argument("--steps", type=int, default=200, help="finish after this many")
    parser.add_argument("--until-file", type=Path, help="finish at the first step at which any rank sees this file")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS", help="0: never")
    parser.add_argument("--evaluation-batches", type=int, default=2)
    parser.add_argument("--step-floor", type=float, default=0.15, metavar="SECONDS", help="a faster step waits; an even pace")
    parser.add_argument(
        "--tail", type=float, default=0.3, metavar="SECONDS", help="rank n ends n times this after the last step"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=Path, metavar="FOLDER", help="what files in it name goes wrong (faults.py)")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS", help="rank 0 prints every so often; 0: never")
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options()
    keepstep.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    faults = Faults(options.faults, rank)
    text = read_text()
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    replay = keepstep.replay()
    layers = min(options.layers, replay.layers or options.layers) if replay else options.layers
    model = DistributedDataParallel(Gpt(layers, options.width, options.heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens_a_step = options.batch * CONTEXT
    if layers == options.layers:
        start = keepstep.restore(model=model, optimizer=optimizer)
    else:  # a replay of a part of the model: its optimizer starts anew
        start = keepstep.restore(model=Part(model))
    gc.freeze()  # what is imported by now stays: no collection looks at it again, the one at the end (over a second) included

    for step in range(start, options.steps):
        begun_s = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options.learning_rate, options.warm_up)
        optimizer.zero_grad(set_to_none=True)
        faults.compute()
        pair = batch(text, options.batch, options.seed, step, rank, faults.beyond(step, len(text)))
        loss = loss_of(model, *pair) * faults.weight()
        keepstep.computed()  # what follows waits for the other ranks
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # One message for two questions: the mean loss, and whether any rank has seen that it is time to finish.
        asked = options.until_file is not None and options.until_file.exists()
        shared = torch.tensor([float(loss.detach()), float(asked)])
        dist.all_reduce(shared)
        time.sleep(max(0.0, begun_s + options.step_floor - time.monotonic()))
        keepstep.step(
            step, loss=shared[0] / world_size, grad_norm=norm, tokens=tokens_a_step, flops=6 * parameters * tokens_a_step
        )
        finish = shared[1] > 0 or step + 1 == options.steps
        if rank == 0 and options.print_every and (step % options.print_every == 0 or finish):
            print(f"step {step} loss {float(shared[0]) / world_size:.6f} norm {float(norm):.6f}", flush=True)
        if options.evaluate_every and (step + 1) % options.evaluate_every == 0:
            with keepstep.phase("evaluation"):
                held_out_loss = evaluate(model, held_out, options, rank, faults)
            if rank == 0 and options.print_every:
                print(f"step {step} held-out loss {held_out_loss:.4f}", flush=True)
        if (step + 1) % options.checkpoint_every == 0 or finish:
            keepstep.save(step, model=model, optimizer=optimizer)
        if finish:
            break
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(options.tail * rank)


if __name__ == "__main__":
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    main()
