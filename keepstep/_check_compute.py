"""`gpu_self_test`: does this device compute and keep what it should? Products against a reference in higher precision, patterns in
memory, the same computation several times. The CPU where there is no GPU."""

from __future__ import annotations

import ctypes
from hashlib import sha256
from typing import Any

#: Products m x k by k x n. Corruption may depend on the shape: KEEPSTEP_TESTS adds the job's own (`{"matmul": [[m, k, n]]}`).
SHAPES = {
    "cpu": ((64, 64, 64), (33, 127, 65)),
    "cuda": ((1024, 1024, 1024), (4096, 4096, 4096), (1000, 3000, 777)),
}
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16", "float32")}
MEMORY_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
#: A long examination looks at more: this share of what is free on a GPU, this much of the host's memory.
FREE_SHARE, HOST_BYTES = 0.6, 64 << 20
REPEATS, REPEATS_LONG = 3, 20
PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)


def self_test(torch: Any, device: Any, options: dict[str, Any], thorough: bool) -> tuple[list[str], str]:
    """What is wrong, one sentence each; and what was looked at."""
    kind = device.type
    shapes = [*(tuple(shape) for shape in options.get("matmul", ())), *SHAPES.get(kind, SHAPES["cpu"])]
    dtypes = options.get("dtypes") or DTYPES.get(kind, DTYPES["cpu"])
    repeats = REPEATS_LONG if thorough else REPEATS
    troubles: list[str] = []
    with torch.no_grad():
        for number, shape in enumerate(shapes):
            for dtype in dtypes:
                troubles += product_troubles(torch, device, getattr(torch, dtype), shape, number, repeats)
        size = int(options.get("memory_bytes") or _memory_bytes(torch, device, thorough))
        troubles += memory_troubles(torch, device, size)
        troubles += chain_troubles(torch, device, repeats)
    return troubles, f"{len(shapes)} shapes in {', '.join(dtypes)}, {size >> 20} MiB of memory"


def _memory_bytes(torch: Any, device: Any, thorough: bool) -> int:
    if not thorough:
        return MEMORY_BYTES.get(device.type, MEMORY_BYTES["cpu"])
    # Patterns are compared in blocks, so that little is needed beside what is tested.
    return int(torch.cuda.mem_get_info(device)[0] * FREE_SHARE) if device.type == "cuda" else HOST_BYTES


def product_troubles(torch: Any, device: Any, dtype: Any, shape: Any, seed: int, repeats: int) -> list[str]:
    m, k, n = shape
    numbers = torch.Generator().manual_seed(seed)
    name = f"{str(dtype).rpartition('.')[2]} product {m}x{k}x{n}"
    # Whole numbers: each product and each partial sum is exact in float32, in whatever order they are added. One right answer.
    most = 2 if k > 4096 or dtype is torch.float16 else 8
    a, b = (torch.randint(-most, most + 1, size, generator=numbers).to(device, dtype) for size in ((m, k), (k, n)))
    right = reference(torch, a, b).to(dtype)
    for how, got in (("mm", torch.mm(a, b)), ("addmm", torch.addmm(torch.zeros(n, dtype=dtype, device=device), a, b))):
        wrong = (got != right).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            found = f"{got[row, column].item():g} for {right[row, column].item():g} at [{row}, {column}]"
            return [f"{name} ({how}): {len(wrong)} of {m * n} elements are wrong, {found}"]
    # All bits of the mantissas at work: near the reference, and the same each time.
    a, b = (torch.randn(size, generator=numbers).to(device, dtype) for size in ((m, k), (k, n)))
    got = torch.mm(a, b)
    near = reference(torch, a, b)
    bound = near.abs() * torch.finfo(dtype).eps
    bound += k * 2.0**-24 * a.double().norm(dim=1)[:, None] * b.double().norm(dim=0)[None, :]
    far = ~((got.double() - near).abs() <= bound)  # a NaN is no number near anything
    if bool(far.any()):
        return [f"{name}: {int(far.sum())} of {m * n} elements are further from the reference than rounding goes"]
    for _ in range(repeats - 1):
        differ = int((torch.mm(a, b) != got).sum())
        if differ:
            return [f"{name}: {differ} of {m * n} elements differ when it is computed again"]
    return []


def reference(torch: Any, a: Any, b: Any) -> Any:
    """In float64 and in two halves, so in another shape, on other units, than what is tested."""
    half = a.shape[1] // 2
    a, b = a.double(), b.double()
    return torch.mm(a, b) if half == 0 else torch.mm(a[:, :half], b[:half]) + torch.mm(a[:, half:], b[half:])


def memory_troubles(torch: Any, device: Any, size: int) -> list[str]:
    """Each pattern is written through, then read; then each word holds its own address."""
    words = torch.empty(max(1, size // 8), dtype=torch.int64, device=device)
    block = 1 << 22
    for pattern in PATTERNS:
        words.fill_(pattern)
        for start in range(0, len(words), block):
            part = words[start : start + block]
            wrong = int((part != pattern).sum())
            if wrong:
                at = start + int((part != pattern).nonzero()[0])
                return [
                    f"memory: {wrong} words of pattern {pattern & (2**64 - 1):#x} read back changed, the first at byte {at * 8}"
                ]
    for start in range(0, len(words), block):
        torch.arange(start, min(start + block, len(words)), out=words[start : start + block])
    for start in range(0, len(words), block):
        part = words[start : start + block]
        wrong = int((part != torch.arange(start, start + len(part), device=device)).sum())
        if wrong:
            return [f"memory: {wrong} words do not hold their own address"]
    return []


def chain_troubles(torch: Any, device: Any, repeats: int) -> list[str]:
    """A computation in which an error grows, several times over."""
    numbers = torch.Generator().manual_seed(5)
    first, weights = (torch.randn((96, 96), generator=numbers).to(device) for _ in range(2))
    seen = set()
    for _ in range(repeats):
        x = first
        for _ in range(8):
            x = torch.tanh(x @ weights)
        seen.add(digest_of(x))
    return [f"a chain of eight products gave {len(seen)} different results in {repeats} runs"] if len(seen) > 1 else []


def digest_of(*tensors: Any) -> str:
    """Of the very bits."""
    digest = sha256()
    for tensor in tensors:
        held = tensor.detach().contiguous().cpu()
        digest.update(ctypes.string_at(held.data_ptr(), held.numel() * held.element_size()))
    return digest.hexdigest()
