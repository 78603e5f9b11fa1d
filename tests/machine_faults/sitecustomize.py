"""A faulty machine, for tests: on the path of a job's processes, it changes what torch computes and sends on the node that a file names.

FAULTS names the file: `flip NODE M K N` (one bit of each such product is flipped, in whatever it is used), `corrupt NODE` (a word of what
it sends in an all-gather), `slow NODE` (its exchanges take 300 ms more), `hang NODE`, `die NODE` (in the first product). It is read at
each call, so that one set of warm workers serves all faults.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time


def fault():
    try:
        with open(os.environ["FAULTS"]) as file:
            words = file.read().split()
    except OSError:
        return None, ()
    return (words[0], words[2:]) if len(words) > 1 and words[1] == os.environ.get("KEEPSTEP_NODE") else (None, ())


def break_torch(torch):
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm")}
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    library = torch.library.Library("aten", "IMPL")
    torch._faulty = library  # as long as it lives

    def product(name, left, right, *arguments, **more):
        out = kernels[name].call_boxed(keys, *arguments, **more)
        kind, words = fault()
        if kind == "hang":
            time.sleep(3600)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "flip" and [left.shape[0], left.shape[1], right.shape[1]] == list(map(int, words)):
            bits = {4: torch.int32, 8: torch.int64}[out.element_size()]
            out.view(bits)[-1, -1] ^= 1 << (8 * out.element_size() - 12)
        return out

    library.impl("mm", lambda a, b: product("mm", a, b, a, b), "CPU")
    library.impl("addmm", lambda bias, a, b, **more: product("addmm", a, b, bias, a, b, **more), "CPU")


def break_links(distributed):
    whole = distributed.all_gather

    def all_gather(got, sent, *arguments, **more):
        kind, _ = fault()
        if kind == "slow":
            time.sleep(0.3)
        if kind == "corrupt":
            sent = sent.clone()
            sent[len(sent) // 2] ^= 1 << 7
        return whole(got, sent, *arguments, **more)

    distributed.all_gather = all_gather


BREAK = {"torch": break_torch, "torch.distributed": break_links}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in BREAK:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                BREAK[name](module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAULTS"):
    sys.meta_path.insert(0, Finder())
