"""Tests of a machine, for a job that is stopped: each rank of it runs them at once, on its own device, and with its neighbours.

    python -m keepstep.diagnose [--tests NAME,NAME] [--within-s S] [--repeat-s S] [--ranks N]     this machine, one JSON object a line

    gpu_self_test    products against a reference in higher precision, patterns in memory, the same computation several times
    dcgm             NVIDIA's own diagnostic, where it is installed
    all_to_all       between the ranks of this machine: content and rate
    all_gather       with the neighbours in the ring of machines: content and rate
    ib_write_bw      the InfiniBand link to the neighbours, where the tools are installed; after all_gather, if that is asked for
    reference_step   one step of a small model, digested, to be compared bit for bit across machines

A run is described by a dict: `tests`, `within_s`, and where they apply `local_rank`, `local_size` and `local_store` (a path), `nodes`
(names, in the ring's order), `node_rank` and `store` ([host, port, prefix]), `repeat_s` (over and over for so long; within_s must leave
room for one round more).
A result: test, passed (None: could not run, says nothing), detail, peers, value, unit, duration_s, changed, restored, digest, software.
KEEPSTEP_TESTS, a JSON object in the job's environment, gives the shapes of its own (`matmul`, `reference`; also `dtypes`,
`memory_bytes`, `exchange_bytes`, `all_to_all_gb_per_s_min`, `all_gather_gb_per_s_min`, `ib_write_bw_gbit_per_s_min`).
On a GPU through NCCL, on a CPU through gloo; the way is the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from keepstep import _check_links as links
from keepstep import _check_step as reference
from keepstep import _check_tools as tools
from keepstep._check_compute import self_test
from keepstep._surroundings import Surroundings, exact

TESTS = ("gpu_self_test", "dcgm", "all_to_all", "all_gather", "ib_write_bw", "reference_step")
#: One rank of a machine runs these.
BY_ONE_RANK = ("dcgm", "ib_write_bw")
#: Once a run, though the others are repeated: long by itself, or in step with other machines.
NOT_REPEATED = ("dcgm", "all_gather", "ib_write_bw")
#: These take a second: one that takes so long hangs, however much time there is. KEEPSTEP_TESTS may give its own `limit_s`.
LIMITED, LIMIT_S = ("gpu_self_test", "all_to_all", "reference_step"), 60.0

#: One pair's ib_write_bw: how long it writes, and the most that is waited for the other end.
IB_RUN_S, IB_S_MAX = 2, 30.0


class Machine:
    """What a run knows of its place, and its torch."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.tests = tuple(spec.get("tests") or TESTS)
        begun_s = time.monotonic()
        self.end_s = begun_s + float(spec["within_s"]) * 0.97
        self.repeat_end_s = begun_s + float(spec.get("repeat_s", 0))
        self.thorough = bool(spec.get("repeat_s"))
        self.rank, self.size = int(spec.get("local_rank", 0)), int(spec.get("local_size", 1))
        self.local_store = str(spec.get("local_store", ""))
        self.nodes = [str(node) for node in spec.get("nodes") or ("",)]
        self.node_rank, self.store = int(spec.get("node_rank", 0)), spec.get("store")
        self.options = _options()
        self.ring: links.Ring | None = None
        self.round = 0
        self._torch: Any = None

    @property
    def torch(self) -> Any:
        """Raises NoTorch."""
        if self._torch is None:
            if importlib.util.find_spec("torch") is None:
                raise CanNotRun(f"there is no torch in {sys.executable}")
            import torch
            import torch.distributed

            self._torch = torch
        return self._torch

    @property
    def device(self) -> Any:
        torch = self.torch
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def store_here(self, name: str, size: int) -> Any:
        return links.local_store(self.torch, f"{self.local_store}-{name}", size, self.left_s() / 2)

    def goes_on(self, took_s: float) -> bool:
        """Whether another round is begun; the first rank decides for all of the machine's."""
        wanted = self.round == 1 or time.monotonic() + took_s / 2 < self.repeat_end_s
        own = self.thorough and wanted and self.left_s() > 2 * took_s
        if self.size == 1 or not self.thorough:
            return own
        try:
            store = self.store_here("rounds", self.size)
            if self.rank == 0:
                store.set(str(self.round), "on" if own else "over")
            return bool(store.get(str(self.round)) == b"on")
        except Exception:  # the first one is gone, or the disk is full: what was found so far is told
            return False

    def amount(self, table: dict[str, Any]) -> Any:
        return table.get(self.device.type, table["cpu"])

    def met(self) -> links.Ring:
        """The ring of machines. Raises Unmet, CanNotRun."""
        if len(self.nodes) < 2 or not self.store:
            raise CanNotRun("one machine has no neighbour")
        if self.ring is None:
            host, port, prefix = self.store
            where = (str(host), int(port), str(prefix))
            self.ring = links.Ring(self.torch, self.nodes, self.node_rank, self.rank, where, self.left_s())
            if self.rank == 0:  # so that none waits for one that can't
                self.ring.tell("infiniband", "yes" if tools.has_infiniband() else "no")
        return self.ring

    def wanted(self) -> Iterator[str]:
        """The tests of a round, in order. ib_write_bw belongs to all_gather where it is installed, on this machine; asked when its turn
        comes."""
        for test in self.tests:
            yield test
            more = test == "all_gather" and "ib_write_bw" not in self.tests
            if more and self.rank == 0 and self.ring is not None and tools.has_infiniband():
                yield "ib_write_bw"


class CanNotRun(Exception):
    """A test that says nothing here: why."""


def _options() -> dict[str, Any]:
    """Raises ValueError: a sentence."""
    text = os.environ.get("KEEPSTEP_TESTS", "")
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"KEEPSTEP_TESTS is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("KEEPSTEP_TESTS is no JSON object")
    return value


def gpu_self_test(machine: Machine) -> Iterator[dict[str, Any]]:
    torch = machine.torch
    exact(torch)
    troubles, seen = self_test(torch, machine.device, machine.options, machine.thorough)
    yield {"passed": not troubles, "detail": "; ".join(troubles[:5]) or seen}


def dcgm(machine: Machine) -> Iterator[dict[str, Any]]:
    passed, detail = tools.dcgm(machine.left_s() * 0.9, machine.thorough)
    yield {"passed": passed, "detail": detail}


def all_to_all(machine: Machine) -> Iterator[dict[str, Any]]:
    if machine.size < 2:
        raise CanNotRun("one rank has no other on this machine")
    torch, device = machine.torch, machine.device
    store = machine.store_here(f"all_to_all-{machine.round}", machine.size)
    rounds = links.ROUNDS_LONG if machine.thorough else links.ROUNDS
    n_bytes = int(machine.options.get("exchange_bytes") or machine.amount(links.EXCHANGE_BYTES))
    with links.group(torch, device, store, "all_to_all", machine.rank, machine.size, machine.left_s() / 2, True) as dist:
        troubles, speed = links.all_to_all(torch, device, dist, machine.rank, machine.size, rounds, n_bytes)
    least = float(machine.options.get("all_to_all_gb_per_s_min", 0))
    if speed < least:
        troubles.append(f"{speed:.3g} GB/s, less than the {least:g} it should have")
    yield {"passed": not troubles, "detail": "; ".join(troubles) or f"whole, {speed:.3g} GB/s", "value": speed, "unit": "GB/s"}


def all_gather(machine: Machine) -> Iterator[dict[str, Any]]:
    try:
        ring = machine.met()
    except links.Unmet as error:
        first = machine.nodes[0]
        yield {"passed": None if machine.node_rank == 0 else False, "detail": str(error), "peers": (first,)}
        return
    rounds = links.ROUNDS_LONG if machine.thorough else links.ROUNDS
    n_bytes = int(machine.options.get("exchange_bytes") or machine.amount(links.EXCHANGE_BYTES))
    least = float(machine.options.get("all_gather_gb_per_s_min", 0))
    for peer, passed, detail, speed, seconds in links.all_gather(machine.torch, machine.device, ring, rounds, n_bytes):
        if passed and speed is not None and speed < least:
            passed, detail = False, f"{speed:.3g} GB/s, less than the {least:g} it should have"
        yield {
            "passed": passed, "detail": detail, "peers": (peer,), "value": speed, "unit": "GB/s", "duration_s": seconds,
            "software": "nccl" if machine.device.type == "cuda" else "gloo",
        }  # fmt: skip


def ib_write_bw(machine: Machine) -> Iterator[dict[str, Any]]:
    """A pair's first machine is the server. Each has said whether it can, so that none waits for one that can't."""
    if not tools.has_infiniband():
        raise CanNotRun("ib_write_bw or an InfiniBand device is not there")
    try:
        ring = machine.met()
    except links.Unmet as error:
        raise CanNotRun(str(error)) from None
    port = tools.free_port()
    ring.tell("ib", f"{ring.own_address()} {port}")
    least = float(machine.options.get("ib_write_bw_gbit_per_s_min", 0))
    for number, at in ring.edges():
        peer = machine.nodes[at]
        within_s = min(IB_S_MAX, machine.left_s() / 2)
        told = ring.told("ib", at, within_s) if at in ring.here and ring.told("infiniband", at, 1.0) == "yes" else ""
        host, _, peers_port = told.partition(" ")
        if not peers_port:
            yield {"passed": None, "detail": f"{peer} has no ib_write_bw or did not come", "peers": (peer,)}
            continue
        server = number == machine.node_rank
        rate, said = tools.ib_write_bw("" if server else host, port if server else int(peers_port), IB_RUN_S, within_s)
        passed = None if rate is None else rate >= least
        detail = said or f"{rate:g} Gb/s" + ("" if passed else f", less than the {least:g} it should have")
        yield {"passed": passed, "detail": detail, "peers": (peer,), "value": rate, "unit": "Gb/s"}


def reference_step(machine: Machine) -> Iterator[dict[str, Any]]:
    torch, device = machine.torch, machine.device
    exact(torch)
    sizes = {**machine.amount(reference.SIZES), **machine.options.get("reference", {})}
    tp, pp, dp = reference.layout(machine.size)
    taking_part = tp * pp * dp
    if machine.rank >= taking_part:
        return
    if taking_part == 1:
        ground: Any = reference.alone()
    else:
        store = machine.store_here(f"reference-{machine.round}", taking_part)
        ground = links.group(torch, device, store, "reference", machine.rank, taking_part, machine.left_s() / 2, True)
    with ground as dist:
        groups = reference.Groups(dist, machine.rank, taking_part)
        runs = [reference.step(torch, device, groups, sizes) for _ in range(2)]
    digests, finite = {digest for digest, _ in runs}, all(finite for _, finite in runs)
    troubles = ["twice the same step, twice other bits"] if len(digests) > 1 else []
    troubles += [] if finite else ["the step of finite numbers gave NaN or infinity"]
    yield {
        "passed": not troubles,
        "detail": "; ".join(troubles) or f"layout tp {tp} pp {pp} dp {dp}",
        "digest": runs[0][0][:32] if not troubles else "",
        "software": reference.software(torch, device, machine.size, sizes),
    }


CHECKS = {
    "gpu_self_test": gpu_self_test,
    "dcgm": dcgm,
    "all_to_all": all_to_all,
    "all_gather": all_gather,
    "ib_write_bw": ib_write_bw,
    "reference_step": reference_step,
}


def one(machine: Machine, test: str) -> list[dict[str, Any]]:
    """The results of one test (one a peer), with what it took and changed. What it raises is a result too."""
    begun_s = time.monotonic()
    if test in CHECKS and test not in ("dcgm", "ib_write_bw"):  # what loading torch brings along is no change of the test's
        with contextlib.suppress(Exception):
            importlib.import_module("torch")
    with Surroundings(devices=test == "dcgm" and bool(shutil.which("dcgmi"))) as around:
        try:
            check = CHECKS.get(test)
            if check is None:
                raise CanNotRun(f"there is no test {test!r}; there are {', '.join(TESTS)}")
            found = list(check(machine))
        except CanNotRun as error:
            found = [{"passed": None, "detail": str(error)}]
        except Exception as error:  # a device that errs raises
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500]
            found = [{"passed": None if _of_surroundings(error) else False, "detail": said}]
    seconds = round(time.monotonic() - begun_s, 4)
    for result in found:
        result["test"] = test
        result["duration_s"] = round(result.get("duration_s") or seconds, 4)
        result["changed"], result["restored"] = around.changed, around.restored
    return found


#: What a full disk, a full memory, software that is not whole, or a store in which the ranks of a machine do not meet raises: nothing
#: that the device under test computed. (The rank that the others waited for in vain has a result of its own.)
SURROUNDINGS = {"OSError", "ImportError", "MemoryError", "OutOfMemoryError", "DistStoreError"}


def _of_surroundings(error: Exception) -> bool:
    return bool(SURROUNDINGS & {kind.__name__ for kind in type(error).__mro__}) or "can't allocate memory" in str(error)


def merged(earlier: dict[str, Any], later: dict[str, Any], number: int) -> dict[str, Any]:
    """Of the same test, repeated: what failed once has failed, in the round that is told."""
    kept = later
    if earlier["passed"] is False:
        kept = earlier
    elif earlier.get("digest") != later.get("digest") and later["passed"]:
        kept = {**later, "passed": False, "digest": "", "detail": f"round {number}: the same step, other bits than before"}
    elif later["passed"] is False:
        kept = {**later, "detail": f"round {number}: {later['detail']}"}
    return {
        **kept,
        "rounds": number,
        "duration_s": round(earlier["duration_s"] + later["duration_s"], 4),
        "changed": sorted({*earlier["changed"], *later["changed"]}),
        "restored": earlier["restored"] and later["restored"],
    }


def run(spec: dict[str, Any], out: int) -> None:
    """Runs the tests in order and writes {"begun": test} and {"results": [...]} into the descriptor `out`, a line each."""

    def tell(value: dict[str, Any]) -> None:
        os.write(out, json.dumps(value).encode() + b"\n")

    try:
        machine = Machine(spec)
    except ValueError as error:
        tests = spec.get("tests") or TESTS
        tell({"results": [{"test": test, "passed": None, "detail": str(error), "duration_s": 0} for test in tests]})
        return
    limit_s = float(machine.options.get("limit_s", LIMIT_S))
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    while True:
        begun_s = time.monotonic()
        machine.round += 1
        for test in machine.wanted():
            if (test in BY_ONE_RANK and machine.rank) or (test in NOT_REPEATED and machine.round > 1):
                continue
            tell({"begun": test, **({"limit_s": limit_s} if test in LIMITED else {})})
            results = []
            for result in one(machine, test):
                key = (test, *result.get("peers", ()))
                kept[key] = merged(kept[key], result, machine.round) if key in kept else result
                results.append(kept[key])
            tell({"results": results})
        if not machine.goes_on(time.monotonic() - begun_s):
            break
    if machine.ring is not None:
        machine.ring.leave()


def here(tests: list[str], within_s: float, ranks: int, repeat_s: float = 0) -> Iterator[dict[str, Any]]:
    """The results of each local rank of this machine, with `rank`. Forks: to be called before anything else was done with torch."""
    from keepstep._tester import examined

    if importlib.util.find_spec("torch") is not None:
        import torch.distributed  # noqa: F401  # once, for all forks
    with tempfile.TemporaryDirectory() as folder:
        shared = {"tests": tests, "within_s": within_s, "repeat_s": repeat_s, "local_size": ranks}
        pipes = []
        for rank in range(ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                answer = examined({**shared, "local_rank": rank, "local_store": os.path.join(folder, "store")})
                with os.fdopen(write, "w") as file:
                    json.dump(answer, file)
                os._exit(0)
            os.close(write)
            pipes.append((read, pid))
        for rank, (read, pid) in enumerate(pipes):
            with os.fdopen(read) as file:
                answer = json.load(file)
            os.waitpid(pid, 0)
            for result in answer["results"]:
                yield {"rank": rank, **result}


def main(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m keepstep.diagnose", description="Tests of this machine.")
    parser.add_argument("--tests", default="", help=f"by comma, of {', '.join(TESTS)}")
    parser.add_argument("--within-s", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=0, help="ranks of this machine (0: one a GPU)")
    parser.add_argument("--repeat-s", type=float, default=0.0, help="over and over for so long")
    options = parser.parse_args(arguments)
    tests = [name for name in options.tests.split(",") if name]
    unknown = [name for name in tests if name not in TESTS]
    if unknown or options.within_s <= 0 or options.ranks < 0:
        parser.error(f"there is no test {unknown[0]!r}" if unknown else "give a time and ranks above 0")
    failed = False
    for result in here(tests, options.within_s, options.ranks or _devices(), options.repeat_s):
        failed = failed or result["passed"] is False
        sys.stdout.write(json.dumps(result) + "\n")
    return 1 if failed else 0


def _devices() -> int:
    """GPUs here, by their files: asking the driver would spoil the forks that run the tests."""
    try:
        return max(1, sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()))
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
