"""The rank processes of jobs on this host: those that its agents started, by their folders, and those of other launchers, by their environment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actuators.processes import Process, alive, pids, stat
from actuators.stack_capture import Target
from infra.home import Home

ENVIRON_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class LocalJob:
    """`ranks`: those that run here, of the newest attempt; `world_size` 0: not known."""

    name: str
    world_size: int
    ranks: tuple[Target, ...]


def jobs_here(home: Home) -> list[LocalJob]:
    """By name; of a home without jobs, those that torchrun and its like started (RANK and WORLD_SIZE in their environment)."""
    return _started_by_agents(home) or _started_by_others()


def _started_by_agents(home: Home) -> list[LocalJob]:
    found: dict[str, list[tuple[int, int, Target]]] = {}
    for file in home.path.glob("nodes/*/**/slots/*/slot.json"):
        record, worker = _load(file), _load(file.with_name("worker.json"))
        try:
            process = Process(int(worker["pid"]), int(worker["start_time"]))
            job, attempt, rank, world = record["job"], int(record["attempt"]), int(record["rank"]), int(record["world_size"])
        except (KeyError, TypeError, ValueError):
            continue
        if attempt > 0 and rank >= 0 and alive(process):
            found.setdefault(str(job), []).append((attempt, world, Target(rank, process)))
    return [_newest(job, ranks) for job, ranks in sorted(found.items())]


def _newest(job: str, ranks: list[tuple[int, int, Target]]) -> LocalJob:
    attempt = max(number for number, _, _ in ranks)
    current = [(world, target) for number, world, target in ranks if number == attempt]
    targets = sorted((target for _, target in current), key=lambda target: target.rank)
    return LocalJob(job, max(world for world, _ in current), tuple(targets))


def _load(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _started_by_others() -> list[LocalJob]:
    """The topmost process of each rank: its children inherit its environment."""
    ranked = {pid: told for pid in pids() if (told := _environment(pid)) is not None}
    found: dict[str, list[tuple[int, int, Target]]] = {}
    for pid, (job, rank, world) in ranked.items():
        seen = stat(pid)
        if (
            seen is not None
            and ranked.get(seen.parent) != (job, rank, world)
            and alive(process := Process(pid, seen.start_time))
        ):
            found.setdefault(job, []).append((0, world, Target(rank, process)))
    return [_newest(job, ranks) for job, ranks in sorted(found.items())]


def _environment(pid: int) -> tuple[str, int, int] | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            raw = file.read(ENVIRON_BYTES_MAX)
    except OSError:
        return None
    if b"WORLD_SIZE=" not in raw:
        return None
    told = {name: value for name, _, value in (entry.decode("utf-8", "replace").partition("=") for entry in raw.split(b"\0"))}
    try:
        rank, world = int(told["RANK"]), int(told["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    job = (
        told.get("TORCHELASTIC_RUN_ID")
        or told.get("SLURM_JOB_ID")
        or f"{told.get('MASTER_ADDR', '')}:{told.get('MASTER_PORT', '')}"
    )
    return job, rank, world
