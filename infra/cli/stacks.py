"""keepstep stacks: who is out of line, from stacks in files; and the stacks of a job's processes on this host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from actuators.flight_recorder import BadDump
from actuators.stack_capture import TOGETHER_S
from actuators.stack_capture import capture as capture_processes
from events.finding import StackRound
from events.job import RankOrder
from events.rank_set import RANKS_MAX, compact
from infra.cli.common import FINE, FOUND, HomeOption, JsonOption, Refused, clean, put, run, say, show_json
from infra.home import Home
from infra.local_ranks import LocalJob, jobs_here
from infra.stack_files import Found, layout, layout_of, read, write
from processors.parallel_groups import BadLayout, Layout, smallest_cover, smallest_named
from processors.stacks import aggregate, groups_of

_UNREAD_SHOWN = 20

stacks = typer.Typer(
    help="Who is out of line among a job's ranks, by the stacks of their processes and their flight recordings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    app.add_typer(stacks, name="stacks")


@stacks.command("aggregate")
def aggregate_(
    where: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a file a rank, rank_N.json: a py-spy dump or a flight recorder's (JSON, pickle, gzip); or one file with all ranks' under `dumps`")],
    topology: Annotated[Path | None, typer.Option("--topology", help="YAML or JSON with tp, pp, dp, ranks_per_node and rank_order, instead of the options")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, max=RANKS_MAX, help="Tensor-parallel size")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, max=RANKS_MAX, help="Pipeline-parallel size")] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, max=RANKS_MAX, help="Data-parallel size [default: what the ranks leave]")] = None,
    ranks_per_node: Annotated[int | None, typer.Option("--ranks-per-node", min=1, max=RANKS_MAX, help="Ranks on a machine [default: tp]")] = None,
    rank_order: Annotated[RankOrder | None, typer.Option("--rank-order", help="What of a rank's place counts fastest; tp-dp-pp is Megatron-LM's [default: tp-pp-dp]")] = None,
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, max=RANKS_MAX, help="Ranks of the job [default: tp*pp*dp, or the highest rank there is]")] = None,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Group equal stacks, name the ranks that are out of line, and the smallest parallel group that covers them. Exits with 1 if there are any,
    or if nobody can be told from the others."""
    try:
        found = read(where)
        told: dict[str, Any] = layout_of(topology) if topology is not None else {}
        given = {"tp": tp, "pp": pp, "dp": dp, "ranks_per_node": ranks_per_node, "rank_order": rank_order}
        told |= {name: value for name, value in given.items() if value is not None}
        _show(found, told, world_size, json)
    except BadDump as error:
        raise Refused(str(error)) from None
    except BadLayout as error:
        raise Refused(f"{error}; see --tp, --pp, --dp, --ranks-per-node and --world-size") from None
    except FileNotFoundError as error:
        raise Refused(f"there is no {error.filename}") from None


@stacks.command()
def capture(
    job: Annotated[str, typer.Option("--job", help="Which job's processes [default: the only one here]")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Also leave a file a rank in this folder, for `keepstep stacks aggregate`")] = None,
    within_s: Annotated[float, typer.Option("--within-s", min=1, max=600, help="Time for all processes together")] = TOGETHER_S,
    json: JsonOption = False, home: HomeOption = None,
) -> None:  # fmt: skip
    """Take the stacks of a job's processes on this host, and name those that are out of line. Each process stands still for a moment.
    Looks for the ranks that the agents of this home started, else for those of torchrun and the like. Exits with 1 if there are any."""
    chosen = _chosen(jobs_here(Home.default(home)), job)
    processes = run(capture_processes(chosen.ranks, together_s=within_s))
    here = {target.rank for target in chosen.ranks}
    if out is not None:
        write(out, processes)
        say(f"{len(here)} ranks' stacks are in {out}")
    if all(process.error for process in processes):
        raise Refused(f"no stack could be read: {processes[0].error}")
    world = max(chosen.world_size, max(here) + 1)
    if len(here) < world:
        say(f"{len(here)} of the job's {world} ranks run here; the others are not looked at")
    result = aggregate(processes, world, among=here)
    found = Found(processes=processes, highest=world - 1)
    if json:
        show_json({"job": chosen.name, **result.model_dump(mode="json")})
    else:
        _print(found, result, _group(found, result, None))
    raise typer.Exit(FINE if _fine(result) else FOUND)


def _chosen(there: list[LocalJob], name: str) -> LocalJob:
    names = ", ".join(found.name for found in there)
    if not there:
        raise Refused(
            "no rank of a job runs on this host; ranks have RANK and WORLD_SIZE in their environment, or agents that started them (--home)"
        )
    if name and (found := next((found for found in there if found.name == name), None)):
        return found
    if name or len(there) > 1:
        raise Refused(f"name one of the jobs that run here with --job: {names}")
    return there[0]


def _show(found: Found, told: dict[str, Any], world_size: int | None, json: bool) -> None:
    world, placed = _world(found, told, world_size)
    started = time.perf_counter()
    result = aggregate(found.processes, world)
    took_ms = (time.perf_counter() - started) * 1e3
    group = _group(found, result, placed)
    if json:
        show_json(
            {
                **result.model_dump(mode="json"), **group, "aggregate_ms": round(took_ms, 3),
                "unread": [{"file": unread.file, "rank": unread.rank, "why": unread.why} for unread in found.unread],
            }
        )  # fmt: skip
    else:
        _print(found, result, group)
    raise typer.Exit(FINE if _fine(result) else FOUND)


def _fine(result: StackRound) -> bool:
    """Most ranks are at one place or a few, and none apart. Where too many are for that, nothing is known, which is not fine."""
    return not result.outliers and result.dominant > 0


def _world(found: Found, told: dict[str, Any], world_size: int | None) -> tuple[int, Layout | None]:
    """Raises Refused, BadLayout."""
    highest = max(found.highest, *(process.rank for process in found.processes), -1)
    if world_size is None and not {"dp", "nodes"} & set(told):  # a rank that left no file may be known by its peers' groups
        highest = max(highest, *(max(ranks) for ranks in found.groups.values()), -1)
    if highest < 0:
        why = f" ({found.unread[0].file}: {found.unread[0].why})" if found.unread else ""
        raise Refused(f"there is no file of a rank; each is called rank_N.json{why}")
    known = set(told) & {"tp", "pp", "dp", "ranks_per_node", "nodes"}
    placed = layout(told, world_size or highest + 1) if known else None
    world = world_size or (placed.world if placed else highest + 1)
    if world > RANKS_MAX:
        raise BadLayout(f"{world} ranks are more than {RANKS_MAX}")
    if placed is not None and placed.world != world:
        raise BadLayout(f"tp {placed.tp} times pp {placed.pp} times dp {placed.dp} make {placed.world} ranks, not {world}")
    if highest >= world:
        raise Refused(f"there is a file of rank {highest}, and the job has the ranks 0 to {world - 1}")
    return world, placed


def _group(found: Found, result: StackRound, placed: Layout | None) -> dict[str, Any]:
    """By the layout, or without one by the groups that the recordings name; with neither, nothing covers anything."""
    nothing: dict[str, Any] = {"group": None, "group_ranks": [], "group_machines": [], "group_size": 0, "whole_job": False}
    if not result.outliers:
        return nothing
    if placed is not None:
        cover = smallest_cover(placed, result.outliers)
        assert cover is not None
        return {
            "group": cover.name, "group_ranks": list(cover.ranks), "group_machines": list(cover.machines),
            "group_size": cover.size, "whole_job": cover.whole_job,
        }  # fmt: skip
    holding = smallest_named(found.groups, result.outliers, result.ranks)
    if holding is None:
        return nothing
    return nothing | {"group": holding[0], "group_ranks": list(holding[1])}


def _print(found: Found, result: StackRound, group: dict[str, Any]) -> None:
    put(f"{result.ranks} ranks, {result.groups_seen} different stacks, {result.dominant} ranks in the dominant ones")
    if result.outliers:
        put(f"outliers: ranks {compact(result.outliers)}" + (f" (silent: {compact(result.silent)})" if result.silent else ""))
    else:
        put("no outliers" if _fine(result) else "nobody can be told from the others")
    for line in result.stuck_at:
        put(f"  {clean(line)}")
    if not result.outliers:
        for where, count in groups_of(found.processes, found.highest + 1)[:_UNREAD_SHOWN]:
            put(f"  {count} ranks: {clean(where)}")
    if group["group"]:
        size = (
            f"{group['group_size']} machines: {compact(group['group_machines'])}" if group["group_size"] else "machines unknown"
        )
        whole = "; that is the whole job, which is never evicted" if group["whole_job"] else ""
        put(f"smallest group that covers them: {clean(group['group'])}, ranks {compact(group['group_ranks'])} ({size}){whole}")
    elif result.outliers:
        put("no parallel group is known that covers them: give --tp, --pp, --ranks-per-node")
    for unread in found.unread[:_UNREAD_SHOWN]:
        say(
            f"{unread.file}: {unread.why}" + (f"; rank {unread.rank} counts as one without a stack" if unread.rank >= 0 else "")
        )
    if len(found.unread) > _UNREAD_SHOWN:
        say(f"and {len(found.unread) - _UNREAD_SHOWN} more files gave nothing (--json has all)")
