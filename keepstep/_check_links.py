"""`all_to_all` inside a machine and `all_gather` between neighbours: does what is sent arrive, whole, and how fast?

Machines stand in a ring, each rank talks with the same rank of the next machine (on GPU machines: over its own network card), and
each pair is a process group of its own, so that a silent machine holds up its two neighbours only.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

#: Bytes that a rank gives in one exchange, and how many exchanges are timed; the best counts, the others met other work.
EXCHANGE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
ROUNDS, ROUNDS_LONG = 5, 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Of the time that is left, what machines wait for one another before the first exchange, and the most; the most for one exchange.
MEET_SHARE, MEET_S_MAX, EXCHANGE_S_MAX = 0.4, 30.0, 60.0


class Unmet(Exception):
    """The machines' common store could not be reached."""


@contextmanager
def group(
    torch: Any, device: Any, store: Any, name: str, rank: int, size: int, within_s: float, loopback: bool
) -> Iterator[Any]:
    """torch.distributed with a default group of these ranks, gone afterwards."""
    dist = torch.distributed
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up the host's name, which may lead elsewhere
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a silent peer is an error to catch, not the end of the process
    limit = timedelta(seconds=max(0.5, within_s))
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=limit)
    try:
        yield dist
    except BaseException:
        if backend == "nccl":  # destroying a group whose peer is silent would wait for it
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def local_store(torch: Any, path: str, size: int, within_s: float) -> Any:
    """Of the ranks of this machine: a file, so that nothing listens."""
    store = torch.distributed.FileStore(path, size)
    store.set_timeout(timedelta(seconds=max(0.5, within_s)))
    return store


def pattern(torch: Any, device: Any, words: int, seed: int) -> Any:
    """What the rank `seed` sends: every word another, all bits in use."""
    mixed = torch.arange(words, dtype=torch.int64, device=device) * 2654435761 + seed * 40503 * 2246822519
    return (mixed ^ (mixed >> 15)).to(torch.int32)


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_to_all(torch: Any, device: Any, dist: Any, rank: int, size: int, rounds: int, n_bytes: int) -> tuple[list[str], float]:
    """What was wrong, and the best rate in GB/s at which a rank received."""
    words = max(1, n_bytes // 4 // size)
    troubles: list[str] = []
    best_s = float("inf")
    for number in range(rounds):
        salt = 1000 * (number % 3)
        sent = torch.cat([pattern(torch, device, words, salt + 64 * rank + to) for to in range(size)])
        right = torch.cat([pattern(torch, device, words, salt + 64 * by + rank) for by in range(size)])
        got = torch.empty_like(sent)
        dist.barrier()
        _wait(torch, device)
        begun_s = time.perf_counter()
        dist.all_to_all_single(got, sent)
        _wait(torch, device)
        best_s = min(best_s, time.perf_counter() - begun_s)
        wrong = (got != right).nonzero().reshape(-1)
        if len(wrong):
            by = sorted({int(at) // words for at in wrong.tolist()[:10_000]})
            troubles.append(f"{len(wrong)} of {len(got)} words from local ranks {by} arrived changed at local rank {rank}")
            break
    return troubles, words * 4 * (size - 1) / best_s / 1e9


def exchange(torch: Any, device: Any, dist: Any, rank: int, peer: str, rounds: int, n_bytes: int) -> tuple[list[str], float]:
    """An all-gather of two. What was wrong, and the best rate in GB/s."""
    words = max(1, n_bytes // 4)
    best_s = float("inf")
    for number in range(rounds):
        sent, right = (pattern(torch, device, words, 7 * number + who) for who in (rank, 1 - rank))
        got = [torch.empty_like(sent), torch.empty_like(sent)]
        dist.barrier()
        _wait(torch, device)
        begun_s = time.perf_counter()
        dist.all_gather(got, sent)
        _wait(torch, device)
        best_s = min(best_s, time.perf_counter() - begun_s)
        wrong = int((got[1 - rank] != right).sum())
        if wrong:
            return [f"{wrong} of {words} words from {peer} arrived changed"], words * 4 / best_s / 1e9
        if bool((got[rank] != sent).any()):
            return ["what this machine sent came back to itself changed"], words * 4 / best_s / 1e9
    return [], words * 4 / best_s / 1e9


class Ring:
    """The machines' meeting: a store on the first of them, and who came. `node_rank` in `nodes`; `rank`: this process's local rank."""

    def __init__(
        self, torch: Any, nodes: list[str], node_rank: int, rank: int, where: tuple[str, int, str], within_s: float
    ) -> None:
        self.torch, self.nodes, self.node_rank, self.rank = torch, nodes, node_rank, rank
        self.host, port, prefix = where
        self.loopback = self.host in LOOPBACK
        dist = torch.distributed
        self.hosts_it = node_rank == 0 and rank == 0
        limit = timedelta(seconds=max(0.5, min(MEET_S_MAX, within_s * MEET_SHARE)))

        def reach() -> Any:
            return dist.TCPStore(self.host, port, is_master=self.hosts_it, wait_for_workers=False, timeout=limit)

        try:
            store = _within(reach, limit.total_seconds() + 1)
        except Exception as error:
            raise Unmet(f"the store of {nodes[0]} at {self.host}:{port} could not be reached: {_line(error)}") from None
        self.store = dist.PrefixStore(prefix, store)
        self._end_s = time.monotonic() + within_s
        self.store.add("came", 1)
        self.store.set(self._here(node_rank), "here")
        try:
            self.store.wait([self._here(at) for at in range(len(nodes))], limit)
        except Exception:  # some did not come: who, is asked below
            pass
        self.here = {at for at in range(len(nodes)) if self.store.check([self._here(at)])}
        self.met_s = time.monotonic()
        self.colours = 3 if len(nodes) % 2 and len(nodes) > 2 else min(2, len(nodes) - 1)
        self.share_s = max(0.5, min(EXCHANGE_S_MAX, (self._end_s - self.met_s) * 0.9 / self.colours))

    def _here(self, at: int) -> str:
        return f"here/{self.rank}/{at}"

    def edges(self) -> list[tuple[int, int]]:
        """This machine's pairs (number, peer), in the order in which all machines take theirs: no one waits in a circle."""
        n = len(self.nodes)
        numbers = range(n) if n > 2 else range(1)
        mine = [(number, (number, (number + 1) % n)) for number in numbers if self.node_rank in (number, (number + 1) % n)]
        return [(number, b if a == self.node_rank else a) for number, (a, b) in sorted(mine, key=lambda e: self.colour(e[0]))]

    def colour(self, number: int) -> int:
        return 2 if len(self.nodes) % 2 and len(self.nodes) > 2 and number == len(self.nodes) - 1 else number % 2

    def left_s(self, number: int) -> float:
        """Until when an exchange of this pair may take: one that is held up does not take the next one's time."""
        return self.met_s + (self.colour(number) + 1) * self.share_s - time.monotonic()

    def lost(self, at: int) -> None:
        """A machine that others wait for in vain: nobody waits for its leaving."""
        if self.store.add(f"lost/{self.rank}/{at}", 1) == 1:
            self.store.add("lost", 1)

    def tell(self, key: str, text: str) -> None:
        self.store.set(f"{key}/{self.rank}/{self.node_rank}", text)

    def told(self, key: str, at: int, within_s: float) -> str:
        """What that machine told; '' if it did not in this time."""
        name = f"{key}/{self.rank}/{at}"
        try:
            self.store.wait([name], timedelta(seconds=max(0.1, within_s)))
            return str(self.store.get(name).decode())
        except Exception:  # torch's store errors have several types, by release
            return ""

    def own_address(self) -> str:
        """The address of this machine on the way to the others."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((self.host, 9))
            return str(probe.getsockname()[0])

    def leave(self) -> None:
        """The store's host goes last, or when time is up."""
        try:
            self.store.add("left", 1)
            while self.hosts_it and time.monotonic() < self._end_s:
                if self.store.add("left", 0) + self.store.add("lost", 0) >= self.store.add("came", 0):
                    return
                time.sleep(0.002)
        except Exception:  # it is gone, and with it what it was for
            return


def _within(call: Callable[[], Any], limit_s: float) -> Any:
    """What it returns, or raises. Another service that took the port and says nothing holds torch up for ever, whatever its timeout: then
    the thread is left behind, and ends with the process."""
    done: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if done:
        return done[0]
    raise failed[0] if failed else TimeoutError(f"no answer in {limit_s:.0f} s")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def all_gather(
    torch: Any, device: Any, ring: Ring, rounds: int, n_bytes: int
) -> Iterator[tuple[str, bool | None, str, float | None, float]]:
    """Each pair of this machine's: peer, passed, detail, GB/s, seconds. A peer that did not come says nothing of the link to it."""
    for number, at in ring.edges():
        peer, begun_s = ring.nodes[at], time.monotonic()
        if at not in ring.here:
            yield peer, None, f"{peer} did not come to it", None, 0.0
            continue
        rank = 0 if number == ring.node_rank else 1
        speed: float | None = None
        try:
            name = f"pair/{number}/{ring.rank}"
            with group(torch, device, ring.store, name, rank, 2, ring.left_s(number), ring.loopback) as dist:
                troubles, speed = exchange(torch, device, dist, rank, peer, rounds, n_bytes)
        except Exception as error:
            troubles = [f"no exchange with {peer}: {_line(error)}"]
            ring.lost(at)
        seconds = time.monotonic() - begun_s
        yield peer, not troubles, "; ".join(troubles) or f"whole, {speed:.3g} GB/s", speed, seconds
