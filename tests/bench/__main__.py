"""`python -m tests.bench [--only NAME]`: finds the benchmarks and runs them one after another, each in this process."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import os
import pkgutil
import signal
import sys
import traceback
from types import ModuleType

import tests.bench


def modules() -> list[ModuleType]:
    names = sorted(found.name for found in pkgutil.iter_modules(tests.bench.__path__) if found.name.startswith("bench_"))
    return [importlib.import_module(f"tests.bench.{name}") for name in names]


def wanted(only: str, name: str) -> bool:
    """`replay` gives `replay`, `back_at_work` every `back_at_work_*`; a figure's name with its suffix gives the module's that has it."""
    return only == name or only.startswith(f"{name}_") or name.startswith(f"{only}_")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=tests.bench.__doc__)
    parser.add_argument("--only", metavar="NAME", default="", help="only the benchmark that gives this figure")
    parser.add_argument(
        "--cases", metavar="FILE", default="", help="labelled cases for classify_accuracy (or $KEEPSTEP_BENCH_CASES)"
    )
    parser.add_argument("--list", action="store_true", help="the names of all figures, and nothing is run")
    given = parser.parse_args(arguments)
    only: str = given.only
    if given.cases:
        os.environ["KEEPSTEP_BENCH_CASES"] = given.cases
    every = modules()
    if given.list:
        print("\n".join(name for module in every for name in module.NAMES))
        return 0
    chosen = [module for module in every if not only or any(wanted(only, name) for name in module.NAMES)]
    if not chosen:
        there_are = ", ".join(name for module in every for name in module.NAMES) or "none yet"
        print(f"no benchmark is called {only or 'anything'!r}; there are: {there_are}", file=sys.stderr)
        return 2
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then, too
    for module in chosen:
        try:
            result = module.main()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:
            failed += 1
            print(f"benchmark {', '.join(module.NAMES)} did not end:", file=sys.stderr)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
