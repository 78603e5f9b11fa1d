"""`reference_step`: one training step of a small dense model, with fixed weights on fixed input, under a fixed layout (TP=2 PP=2 DP=2
where the machine has eight ranks, else the largest that fits). Machines of one kind must come to the same bits: loss, logits,
gradients, updated weights.

After ByteRobust's bit-wise alignment test (SOSP 2025, arXiv 2509.16293). KEEPSTEP_TESTS gives it the job's own shapes, since corruption
can depend on them: `{"reference": {"hidden": 512, "heads": 8, "sequence": 128, "batch": 8, "vocabulary": 512, "layers": 2}}`.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

from keepstep._check_compute import digest_of

SIZES = {
    "cpu": {"hidden": 64, "heads": 4, "sequence": 16, "batch": 4, "vocabulary": 128, "layers": 2},
    "cuda": {"hidden": 1024, "heads": 16, "sequence": 512, "batch": 4, "vocabulary": 4096, "layers": 2},
}
STEP_SIZE = 0.05


def layout(ranks: int) -> tuple[int, int, int]:
    """(TP, PP, DP) for a machine with so many ranks; rank = (dp * PP + pp) * TP + tp. Ranks beyond it stand by."""
    return (2, 2, 2) if ranks >= 8 else (2, 2, 1) if ranks >= 4 else (2, 1, 1) if ranks >= 2 else (1, 1, 1)


def software(torch: Any, device: Any, ranks: int, sizes: dict[str, int]) -> str:
    """What must be equal for the bits to be: versions, the kind of device, the layout, the sizes."""
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        kind = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    else:
        kind = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    tp, pp, dp = layout(ranks)
    shape = "x".join(str(sizes[name]) for name in sorted(sizes))
    return f"torch {torch.__version__}, {kind}, tp {tp} pp {pp} dp {dp}, {shape}"[:250]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


class Groups:
    """This rank's place, and its collectives. One rank: none of them does anything."""

    def __init__(self, dist: Any, rank: int, ranks: int) -> None:
        self.tp_size, self.pp_size, self.dp_size = tp_size, pp_size, dp_size = layout(ranks)
        self.dist, self.tp, self.pp, self.dp = dist, rank % tp_size, rank // tp_size % pp_size, rank // (tp_size * pp_size)
        self.tp_group = self.dp_group = None
        for dp in range(dp_size):
            for pp in range(pp_size):
                members = [self.rank(dp, pp, tp) for tp in range(tp_size)]
                made = dist.new_group(members) if tp_size > 1 else None
                self.tp_group = made if (dp, pp) == (self.dp, self.pp) else self.tp_group
        for pp in range(pp_size):
            for tp in range(tp_size):
                made = dist.new_group([self.rank(dp, pp, tp) for dp in range(dp_size)]) if dp_size > 1 else None
                self.dp_group = made if (pp, tp) == (self.pp, self.tp) else self.dp_group

    def rank(self, dp: int, pp: int, tp: int) -> int:
        return (dp * self.pp_size + pp) * self.tp_size + tp

    def sum_tp(self, tensor: Any) -> Any:
        if self.tp_size > 1:
            self.dist.all_reduce(tensor, group=self.tp_group)
        return tensor

    def sum_dp(self, tensor: Any) -> Any:
        if self.dp_size > 1:
            self.dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def send(self, tensor: Any, to_stage: int) -> None:
        self.dist.send(tensor.contiguous(), self.rank(self.dp, to_stage, self.tp))

    def receive(self, like: Any, from_stage: int) -> Any:
        self.dist.recv(like, self.rank(self.dp, from_stage, self.tp))
        return like


def _parallel(torch: Any, groups: Groups) -> tuple[Any, Any]:
    """Where a tensor-parallel part begins (its gradients are summed) and ends (its outputs are)."""

    class Begin(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return groups.sum_tp(grad.clone())

    class End(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return groups.sum_tp(x.clone())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return Begin.apply, End.apply


def weights_of(torch: Any, device: Any, groups: Groups, sizes: dict[str, int]) -> dict[str, Any]:
    """This rank's weights: the whole model's drawn in one order, and its part of them kept."""
    hidden, vocabulary, numbers = sizes["hidden"], sizes["vocabulary"], torch.Generator().manual_seed(1)
    kept: dict[str, Any] = {}

    def draw(name: str, rows: int, columns: int, stage: int, split: int | None) -> None:
        whole = torch.randn((rows, columns), generator=numbers) / columns**0.5
        if stage == groups.pp:
            part = whole if split is None else whole.chunk(groups.tp_size, split)[groups.tp]
            kept[name] = part.contiguous().to(device).requires_grad_()

    draw("embedding", vocabulary, hidden, 0, None)
    for layer in range(sizes["layers"]):
        stage = layer * groups.pp_size // sizes["layers"]
        for name in ("query", "key", "value"):
            draw(f"{layer}.{name}", hidden, hidden, stage, 0)
        draw(f"{layer}.out", hidden, hidden, stage, 1)
        draw(f"{layer}.up", 4 * hidden, hidden, stage, 0)
        draw(f"{layer}.down", hidden, 4 * hidden, stage, 1)
    draw("head", vocabulary, hidden, groups.pp_size - 1, None)
    return kept


def step(torch: Any, device: Any, groups: Groups, sizes: dict[str, int]) -> tuple[str, bool]:
    """One step. The digest of all that came of it on this rank, and whether all of it is finite."""
    seen = list(outcome(torch, device, groups, sizes).values())
    return digest_of(*seen), all(bool(torch.isfinite(tensor).all()) for tensor in seen)


def outcome(torch: Any, device: Any, groups: Groups, sizes: dict[str, int]) -> dict[str, Any]:
    """All that comes of one step on this rank: activations, logits and loss, each gradient and updated weight."""
    functional = torch.nn.functional
    begin, end = _parallel(torch, groups)
    weights = weights_of(torch, device, groups, sizes)
    batch, sequence, hidden = sizes["batch"] // groups.dp_size, sizes["sequence"], sizes["hidden"]
    numbers = torch.Generator().manual_seed(2)
    tokens = torch.randint(sizes["vocabulary"], (sizes["batch"], sequence + 1), generator=numbers)
    tokens = tokens[groups.dp * batch : (groups.dp + 1) * batch].to(device)
    mask = torch.full((sequence, sequence), float("-inf"), device=device).triu(1)
    heads = sizes["heads"] // groups.tp_size

    def split(x: Any) -> Any:
        return x.view(batch, sequence, heads, -1).transpose(1, 2)

    def block(x: Any, layer: int) -> Any:
        inner = begin(functional.layer_norm(x, (hidden,)))
        query, key, value = (split(functional.linear(inner, weights[f"{layer}.{n}"])) for n in ("query", "key", "value"))
        scores = torch.softmax(query @ key.transpose(-1, -2) / (hidden / sizes["heads"]) ** 0.5 + mask, -1)
        mixed = (scores @ value).transpose(1, 2).reshape(batch, sequence, -1)
        x = x + end(functional.linear(mixed, weights[f"{layer}.out"]))
        inner = functional.gelu(functional.linear(begin(functional.layer_norm(x, (hidden,))), weights[f"{layer}.up"]))
        return x + end(functional.linear(inner, weights[f"{layer}.down"]))

    first, last = groups.pp == 0, groups.pp == groups.pp_size - 1
    if first:
        entered = x = functional.embedding(tokens[:, :-1], weights["embedding"])
    else:
        entered = x = groups.receive(torch.empty((batch, sequence, hidden), device=device), groups.pp - 1).requires_grad_()
    for layer in range(sizes["layers"]):
        if layer * groups.pp_size // sizes["layers"] == groups.pp:
            x = block(x, layer)
    seen = {"activations": x}
    if last:
        logits = functional.linear(functional.layer_norm(x, (hidden,)), weights["head"])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        seen.update(logits=logits, loss=loss)
        loss.backward()
    else:
        groups.send(x.detach(), groups.pp + 1)
        x.backward(groups.receive(torch.empty_like(x), groups.pp + 1))
    if not first:
        groups.send(entered.grad, groups.pp - 1)
    with torch.no_grad():
        for name in sorted(weights):
            grad = groups.sum_dp(weights[name].grad)
            weights[name] -= STEP_SIZE * grad / grad.norm().clamp(min=1e-6)
            seen.update({f"{name} gradient": grad, f"{name} weight": weights[name]})
    return seen


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """In place of a group: a machine with one rank."""
    yield None
