"""Stacks and flight recordings that lie in files, one a rank, as what processors.stacks aggregates; and the layout of their job."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from actuators import flight_recorder, py_spy
from actuators.flight_recorder import DUMP_BYTES_MAX, BadDump
from actuators.py_spy import BadStacks
from events.finding import ProcessStack
from events.rank_set import RANKS_MAX, expand
from processors.parallel_groups import BadLayout, Layout

_RANK = re.compile(r"rank[_-]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?<![0-9])(?<![_-]-)([0-9]{1,7})[^0-9A-Za-z]*\Z")
_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
_SUFFIXES = ("", ".json", ".gz", ".txt", ".pkl", ".pickle")
#: What the sizes of a job are called, by different hands.
_SIZES = {
    "tp": ("tp", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pp": ("pp", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "dp": ("dp", "data_parallel", "data_parallel_size"),
    "ranks_per_node": ("ranks_per_node", "gpus_per_node", "nproc_per_node", "ranks_per_machine", "gpus_per_machine"),
}


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that gave nothing: its rank (-1: its name does not say) counts as one without a stack."""

    file: str
    rank: int
    why: str


@dataclass(slots=True)
class Found:
    """`highest`: the highest rank that a file's name tells of, read or not."""

    processes: list[ProcessStack] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    highest: int = -1

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The process groups that recordings name, with their ranks."""
        told = {
            f"{group.description or 'group'} {group.group}": group.ranks
            for process in self.processes
            for group in process.groups
            if group.ranks
        }
        return {name: expand(ranks) for name, ranks in told.items()}


def read(path: Path) -> Found:
    """A folder with a file a rank (`rank_N.json` and the like: py-spy's JSON or text, a flight recorder's JSON or pickle; two files of one
    rank are joined), or one file that holds the recordings of all ranks under `dumps`. Any may be gzipped. Raises OSError, BadDump."""
    if not path.is_dir():
        return _of_one_file(path)
    found = Found()
    by_rank: dict[int, dict[str, list[ProcessStack]]] = {}
    for file in sorted(path.iterdir()):
        name = os.fsencode(file.name).decode("utf-8", "replace")
        rank = _rank_of(name)
        if name.startswith(".") or (rank < 0 and (file.is_dir() or file.suffix not in _SUFFIXES)):
            continue
        found.highest = max(found.highest, rank)
        if rank < 0:
            if not name.startswith(("topology", "layout", "README", "job")):
                why = "its name does not say whose rank it is; call it rank_N.json, or give it alone if it holds all ranks' `dumps`"
                found.unread.append(Unread(name, -1, why))
            continue
        try:
            if not file.is_file():  # a pipe would be waited for
                raise BadStacks("it is no file" if file.exists() else "it is a link to nothing")
            by_rank.setdefault(rank, {})[name] = _of_rank(_bytes(file), rank)
        except (BadDump, BadStacks) as error:
            found.unread.append(Unread(name, rank, str(error)))
        except OSError as error:
            found.unread.append(Unread(name, rank, f"it can't be read ({error.strerror or error})"))
    for rank, files in by_rank.items():
        _once(rank, files)
        found.processes.extend(_joined([process for own in files.values() for process in own]))
    for unread in found.unread:  # evidence, too: it is said why there is none of this rank
        if unread.rank >= 0 and unread.rank not in by_rank:
            found.processes.append(ProcessStack(rank=unread.rank, pid=0, error=f"{unread.file}: {unread.why}"[:1024]))
    return found


def _once(rank: int, files: Mapping[str, list[ProcessStack]]) -> None:
    """Of a rank there may be a recording and stacks, and stacks of several processes. The same twice, of two runs, say, would be one
    rank made of both. Raises BadDump."""
    seen: dict[int | str, str] = {}
    for name, own in files.items():
        plain = _ZEROS.sub(
            "", name.split(".", 1)[0]
        )  # rank_01.json is rank_1.json, but rank_1.txt may be the stack to its recording
        keys: set[int | str] = {"recording" if process.recorded else f"stack {plain}" for process in own}
        for key in keys | {process.pid for process in own if process.pid}:
            if key in seen:
                raise BadDump(f"{seen[key]} and {name} are both of rank {rank}: leave one of them")
            seen[key] = name


def write(folder: Path, processes: Iterable[ProcessStack]) -> None:
    """A file a rank, as `read` reads it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    by_rank: dict[int, list[Any]] = {}
    for process in processes:
        by_rank.setdefault(process.rank, []).append(process.model_dump(mode="json", exclude_defaults=True))
    for rank, own in by_rank.items():
        (folder / f"rank_{rank}.json").write_text(json.dumps({"processes": own}, indent=1), "utf-8")


def layout_of(path: Path) -> dict[str, Any]:
    """tp, pp, dp, ranks_per_node, rank_order of a YAML or JSON file, as far as it has them, under their common names; `nodes`, a
    list, counts machines. Raises OSError, BadLayout."""
    try:
        told = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadLayout(f"{path} is neither YAML nor JSON ({str(error).splitlines()[0]})") from None
    if isinstance(told, dict) and isinstance(told.get("job"), dict):
        told = told["job"]
    if not isinstance(told, dict):
        raise BadLayout(f"{path} is no table with tp, pp, dp and ranks_per_node")
    nested = [
        told,
        *(value for key, value in told.items() if key in ("parallelism", "layout", "topology") and isinstance(value, dict)),
    ]
    sizes: dict[str, Any] = {}
    for table in nested:
        for name, aliases in _SIZES.items():
            for alias in aliases:
                value = table.get(alias, table.get(alias.upper()))
                if value is not None:
                    sizes.setdefault(name, _size(path, alias, value))
        if isinstance(order := table.get("rank_order", table.get("order")), str):
            sizes.setdefault("rank_order", "-".join(word for word in order.split("-") if word in ("tp", "pp", "dp")))
        if isinstance(nodes := table.get("nodes", table.get("machines")), list) and nodes:
            sizes.setdefault("nodes", len(nodes))
    if not sizes:
        raise BadLayout(f"{path} says none of tp, pp, dp, ranks_per_node, rank_order")
    return sizes


def _size(path: Path, name: str, value: Any) -> int:
    """Raises BadLayout."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 9 else value
    if type(number) is not int or not 0 < number <= RANKS_MAX:
        raise BadLayout(f"{path}: {name} is {str(value)[:40]!r}, not a number from 1 to {RANKS_MAX}")
    return number


def layout(told: dict[str, Any], world: int) -> Layout:
    """What is missing follows from the rest: dp from the ranks there are, the ranks of a machine from `nodes`, else TP fills one (the
    field's rule, TP inside a machine). Raises BadLayout."""
    tp, pp = told.get("tp", 1), told.get("pp", 1)
    dp = told.get("dp")
    if dp is None:
        if world % (tp * pp):
            raise BadLayout(f"{world} ranks are not divided by tp {tp} times pp {pp}")
        dp = max(1, world // (tp * pp))
    ranks = tp * pp * dp
    per_node = told.get("ranks_per_node")
    if per_node is None:
        nodes = told.get("nodes")
        if nodes and ranks % nodes:
            raise BadLayout(f"{ranks} ranks do not fill {nodes} nodes alike")
        per_node = ranks // nodes if nodes else tp
    return Layout(tp, pp, dp, per_node, told.get("rank_order", "tp-pp-dp"))


def _rank_of(name: str) -> int:
    match = _RANK.search(name) or _LAST_NUMBER.search(name.split(".", 1)[0])
    rank = int(match[1]) if match else -1
    return rank if rank < RANKS_MAX else -1


def _bytes(file: Path) -> bytes:
    """Raises BadDump if it is larger than a dump can be, packed or not."""
    with file.open("rb") as opened:
        packed = opened.read(2) == b"\x1f\x8b"
        opened.seek(0)
        try:
            with gzip.GzipFile(fileobj=opened) if packed else opened as plain:
                raw: bytes = plain.read(DUMP_BYTES_MAX + 1)
        except (EOFError, gzip.BadGzipFile, gzip.zlib.error):  # type: ignore[attr-defined]
            raise BadDump("it is a damaged gzip file") from None
    if len(raw) > DUMP_BYTES_MAX:
        raise BadDump(f"it is larger than {DUMP_BYTES_MAX >> 20} MiB")
    return raw


def _of_rank(raw: bytes, rank: int) -> list[ProcessStack]:
    if not raw.strip():
        raise BadStacks("it is empty")
    head = raw.lstrip()[:1]
    if head == b"[" or raw.lstrip().startswith((b"Process ", b"Thread ")):
        found = py_spy.processes(raw, rank)
        if not any(process.threads for process in found):
            raise BadStacks("it holds no stack")
        return found
    value = flight_recorder.loads(raw)
    if isinstance(value, dict) and isinstance(value.get("processes"), list):
        try:
            return [ProcessStack.model_validate({**told, "rank": rank}) for told in value["processes"]]
        except (ValidationError, TypeError):
            raise BadStacks("it has processes that are not as `keepstep stacks capture` writes them") from None
    if isinstance(value, dict) and not flight_recorder.is_dump(value) and isinstance(value.get("threads"), list):
        value = value["threads"]
    if isinstance(value, dict) and "dumps" in value and not flight_recorder.is_dump(value):
        raise BadStacks("it holds the dumps of many ranks; give the file itself in place of the folder")
    if isinstance(value, list):  # behind a byte order mark, or in UTF-16
        return py_spy.from_threads(value, rank)
    return [ProcessStack(rank=rank, pid=0, **flight_recorder.recording(value).fields())]


def _joined(own: list[ProcessStack]) -> Iterator[ProcessStack]:
    """Of a rank with a recording and stacks, the recording goes to its main process."""
    recorded = next((process for process in own if process.recorded and not process.threads), None)
    stacks = [process for process in own if process is not recorded]
    if recorded is None or not stacks:
        yield from own
        return
    pids = {process.pid for process in stacks}
    main = min(stacks, key=lambda process: (process.parent_pid in pids and process.parent_pid != process.pid, process.pid))
    told = {name: getattr(recorded, name) for name in ("recorded", "groups", "pending", "collective", "collective_seq")}
    for process in stacks:
        yield process.model_copy(update=told) if process is main else process


def _of_one_file(path: Path) -> Found:
    try:
        whole = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise BadDump(f"{path} is not JSON ({str(error)[:100]}); give a folder with a file a rank") from None
    dumps = whole.get("dumps") if isinstance(whole, dict) else None
    pairs: Any = dumps.items() if isinstance(dumps, dict) else enumerate(dumps) if isinstance(dumps, list) else None
    if pairs is None:
        raise BadDump(f"{path} has no `dumps` by rank; give a folder with a file a rank")
    found = Found()
    for key, value in pairs:
        rank = _rank_of(str(key))
        found.highest = max(found.highest, rank)
        try:
            if isinstance(value, list):
                found.processes.extend(py_spy.from_threads(value, rank))
            else:
                found.processes.append(ProcessStack(rank=rank, pid=0, **flight_recorder.recording(value).fields()))
        except (BadDump, BadStacks) as error:
            found.unread.append(Unread(f"{path.name} at {key}", rank, str(error)))
    return found
