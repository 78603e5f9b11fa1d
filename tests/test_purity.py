"""The core is pure: events/ and processors/ are told things and answer; they never ask. Checked twice, by import-linter's graph
and by reading the source, since a call can hide where no import shows it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    *("asyncio", "os", "time", "random", "uuid", "socket", "threading", "subprocess", "nats", "faust", "duckdb", "torch"),
    *("secrets", "multiprocessing", "locale", "signal", "select", "concurrent", "pathlib", "tempfile", "shutil"),
    *("http", "urllib", "ssl", "sqlite3", "importlib"),
}
FORBIDDEN_CALLS = frozenset({"now", "utcnow", "today"})
FORBIDDEN_NAMES = frozenset({"open", "input", "print", "eval", "exec", "__import__", "breakpoint", "id", "hash"})
PURE = sorted(path for room in ("events", "processors") for path in (ROOT / room).rglob("*.py"))


def impurities(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in FORBIDDEN:
                    yield f"line {node.lineno}: imports {name.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"line {node.lineno}: a relative import"
            if (node.module or "").split(".")[0] in FORBIDDEN:
                yield f"line {node.lineno}: imports from {node.module}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: asks for the time with .{node.func.attr}()"
            elif isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
                yield f"line {node.lineno}: calls {node.func.id}()"


@pytest.mark.parametrize("path", PURE, ids=[str(path.relative_to(ROOT)) for path in PURE])
def test_the_core_reads_no_clock_no_chance_no_world(path: Path) -> None:
    found = list(impurities(path.read_text(encoding="utf-8")))
    assert not found, f"{path.relative_to(ROOT)}: " + "; ".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from asyncio import sleep",
        "def f():\n    import random",
        "from . import ids",
        "from datetime import datetime as d\nx = d.now()",
        "x = open('/etc/passwd')",
        "x = hash('text')",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    assert list(impurities(source))


def test_a_pure_module_is_let_pass() -> None:
    assert not list(
        impurities("from calendar import timegm\nfrom datetime import UTC, datetime\nx = datetime.fromtimestamp(1, UTC)")
    )


def test_the_import_contracts_hold() -> None:
    """import-linter's contracts of pyproject.toml: which room may import which, and what the pure ones may not."""
    tool = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
