"""keepstep grouptest: groups of machines for two rounds of short replays, and the machine that the failing groups share."""

from __future__ import annotations

import json as json_format
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from events.finding import REPLAY_PHASES as PHASES
from events.finding import ReplayPhase, ReplayResult
from events.job import RankOrder
from infra.cli.common import FINE, FOUND, JsonOption, Refused, clean, console, put, show_json
from infra.topology_hostlist import BadHostlist, expand
from processors.group_test import Groups, Located, NoPlan, Plan, locate, plan

#: Rows of the picture; --json has all.
_ROWS_MAX = 64
_COLUMNS_MAX = 24
_MACHINES_MAX = 200_000
_FILE_BYTES_MAX = 64 << 20
#: What is no count and was hardly meant as a machine's name.
_NUMBER = re.compile(r"[-+0-9.,_ ]*")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Find a faulty machine by replaying the job in groups, twice.", no_args_is_help=True)
    app.add_typer(group, name="grouptest")

    @group.command("plan")
    def plan_(
        machines: Annotated[str, typer.Option("--machines", help="How many; or their names in the order of their ranks, as gpu-[001-024] or a,b,c")],
        pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages of the job")],
        dp: Annotated[int, typer.Option("--dp", min=1, help="Its data-parallel copies")],
        tp: Annotated[int, typer.Option("--tp", min=1, help="Its tensor-parallel ranks")] = 1,
        ranks_per_node: Annotated[int | None, typer.Option("--ranks-per-node", min=1, help="[default: TP fills a machine]")] = None,
        rank_order: Annotated[RankOrder, typer.Option("--rank-order", help="What of a rank's place counts fastest; tp-dp-pp is Megatron-LM's")] = "tp-pp-dp",
        k: Annotated[int | None, typer.Option("--k", min=1, help="Pipelines to a group [default: chosen]")] = None,
        json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Plan both rounds: groups of neighbours, then groups with a stride; TP and PP kept."""
        made = plan(_machines(machines), pp=pp, dp=dp, tp=tp, ranks_per_node=ranks_per_node, k=k, rank_order=rank_order)
        if isinstance(made, NoPlan):
            raise Refused(made.because)
        if json:
            show_json(_as_json(made, numbered=machines.isdecimal()))
        else:
            _draw(made)

    @group.command("locate")
    def locate_(
        plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="What `plan --json` printed, or - for standard input")],
        results: Annotated[str, typer.Argument(help='{"horizontal": [3], "vertical": [1]}: the failing groups of each phase that was run; or the replays of an outcome')],
        json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Say which machine the failing groups point at. Exits with 1 unless every machine passed."""
        if plan_file == results == "-":
            raise Refused("only one of PLAN and RESULTS can be read from standard input")
        groups, numbered = _groups(plan_file)
        found = locate(groups, _results(results, groups))
        if json:
            value = {name: getattr(found, name) for name in Located.__dataclass_fields__}
            for name in ("suspects", "certain", "untested"):
                value[name] = _names(value[name], numbered)
            show_json(value)
        else:
            put(clean(f"{found.outcome}: {found.because}"))
            for name in ("suspects", "certain", "untested"):
                if machines := getattr(found, name):
                    put(clean(f"{name}: {', '.join(machines)}"))
        raise typer.Exit(FINE if found.outcome == "nothing_failed" else FOUND)


def _machines(text: str) -> int | list[str]:
    if text.isdecimal():
        if len(text) > 9 or not 0 < int(text) <= _MACHINES_MAX:
            raise Refused(f"--machines {text[:20]}: give 1 to {_MACHINES_MAX}")
        return int(text)
    if _NUMBER.fullmatch(text):
        raise Refused(f"--machines {text[:20]}: give 1 to {_MACHINES_MAX}")
    try:
        names = expand(text, _MACHINES_MAX)
    except BadHostlist as error:
        raise Refused(f"--machines: {error}") from None
    return names


# --- files ---------------------------------------------------------------------------------------------------------------------


def _read(name: str, what: str) -> Any:
    try:
        if name == "-":
            text = sys.stdin.read(_FILE_BYTES_MAX + 1)
        else:
            with Path(name).open(encoding="utf-8") as file:
                text = file.read(_FILE_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{what} {name} can't be read ({getattr(error, 'strerror', None) or 'it is no text'})") from None
    if len(text) > _FILE_BYTES_MAX:
        raise Refused(f"{what} {name} is over {_FILE_BYTES_MAX >> 20} MiB")
    try:
        return json_format.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"{what} {name} is no JSON") from None


def _groups(name: str) -> tuple[Groups, bool]:
    """The plan's groups, and whether its machines are numbers."""
    value = _read(name, "the plan")
    phases = value.get("groups") if isinstance(value, dict) else None
    if not isinstance(phases, dict) or not all(isinstance(phases.get(phase), list) for phase in PHASES):
        raise Refused(f"the plan {name} has no groups of both phases; make one with `keepstep grouptest plan --json`")
    numbered = True
    read = []
    for phase in PHASES:
        if not phases[phase] or not all(phases[phase]):
            raise Refused(f"the plan {name}: there is no {phase} group, or nobody in one")
        for group in phases[phase]:
            if not isinstance(group, list) or not all(type(machine) in (int, str) for machine in group):
                raise Refused(f"the plan {name}: a {phase} group is no list of machines")
            numbered = numbered and all(type(machine) is int for machine in group)
        read.append(tuple(tuple(map(str, group)) for group in phases[phase]))
        names = [machine for group in read[-1] for machine in group]
        if len(set(names)) != len(names):
            raise Refused(f"the plan {name}: a machine is twice in its {phase} groups")
    return Groups(*read), numbered


def _results(name: str, groups: Groups) -> list[ReplayResult]:
    value = _read(name, "the results")
    told: dict[tuple[ReplayPhase, int], bool | None] = {}
    members: dict[tuple[ReplayPhase, int], Any] = {}
    if isinstance(value, dict) and "replays" in value:
        value = value["replays"]
    if isinstance(value, list):
        for entry in value:
            if (
                not isinstance(entry, dict)
                or entry.get("phase") not in PHASES
                or entry.get("failed") not in (True, False, None)
            ):
                raise Refused(
                    f'the results {name}: not {{"phase": …, "group": …, "failed": true, false or null}}: {str(entry)[:80]}'
                )
            key = (entry["phase"], _number(entry.get("group"), name))
            if key in told:
                raise Refused(f"the results {name}: {key[0]} group {key[1]} is there twice")
            told[key] = entry.get("failed")
            if "nodes" in entry:
                members[key] = entry["nodes"]
    elif isinstance(value, dict) and any(phase in value for phase in PHASES) and not set(value) - {*PHASES, "could_not_run"}:
        unheard = value.get("could_not_run", {})
        if not isinstance(unheard, dict) or set(unheard) - set(PHASES):
            raise Refused(f'the results {name}: "could_not_run" is no {{"horizontal": […], "vertical": […]}}')
        for phase in PHASES:
            failed, silent = _numbers(value.get(phase, []), name), _numbers(unheard.get(phase, []), name)
            if both := set(failed) & set(silent):
                raise Refused(f"the results {name}: {phase} group {min(both)} can't both have failed and not have run")
            if phase in value or phase in unheard:  # a phase that is not spoken of has not been run yet
                told.update({(phase, number): False for number in range(len(getattr(groups, phase)))})
            told.update({(phase, number): True for number in failed})
            told.update({(phase, number): None for number in silent})
    else:
        raise Refused(f'the results {name}: give {{"horizontal": [3], "vertical": [1]}}, the failing groups of each phase')
    for phase, number in told:
        if number >= (there := len(getattr(groups, phase))):
            raise Refused(f"the results {name}: there is no {phase} group {number}, the plan has 0 to {there - 1}")
    for (phase, number), nodes in members.items():
        if not isinstance(nodes, list) or set(map(str, nodes)) != set(getattr(groups, phase)[number]):
            raise Refused(f"the results {name}: {phase} group {number} is of other machines than the plan's")
    return [
        ReplayResult(phase=phase, group=number, nodes=getattr(groups, phase)[number], failed=failed)
        for (phase, number), failed in told.items()
    ]


def _numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise Refused(f"the results {name}: groups are given as a list of numbers")
    return [_number(entry, name) for entry in value]


def _number(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise Refused(f"the results {name}: {str(value)[:40]!r} is no group's number; they count from 0")
    return value


# --- showing -------------------------------------------------------------------------------------------------------------------


def _names(machines: tuple[str, ...], numbered: bool) -> list[Any]:
    return [int(machine) for machine in machines] if numbered else list(machines)


def _as_json(made: Plan, numbered: bool) -> dict[str, Any]:
    phases = {phase: [_names(group, numbered) for group in getattr(made.groups, phase)] for phase in PHASES}
    return {
        "machines": len(made.machines), "tp": made.tp, "pp": made.pp, "dp": made.dp, "ranks_per_node": made.ranks_per_node,
        "k": made.k, "m": made.m, "n": made.n, "rounds": len(PHASES), "suspects_max": made.suspects_max,
        "replay": {"ranks": made.ranks_a_group, "tp": made.tp, "pp": made.pp, "dp": made.dp_a_group},
        "groups": phases,
        "left_out": {phase: _names(made.left_out(phase), numbered) for phase in PHASES},
        "notes": list(made.notes),
    }  # fmt: skip


def _draw(made: Plan) -> None:
    """A row is a horizontal group; beside each machine the letter or number of its vertical one."""
    put(
        f"{len(made.machines)} machines in 2 rounds of {made.n} groups of {made.m}: TP {made.tp}, PP {made.pp}, DP {made.dp_a_group} in each "
        f"replay; two failing groups share {'one machine' if made.suspects_max == 1 else f'up to {made.suspects_max}'} at most"
    )
    vertical = {machine: number for number, group in enumerate(made.groups.vertical) for machine in group}
    shown = min(made.m, _COLUMNS_MAX)
    table = Table("horizontal", *("" for _ in range(shown + (shown < made.m))), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for number, group in enumerate(made.groups.horizontal[:_ROWS_MAX]):
        cells = [_cell(machine, vertical) for machine in group[:shown]]
        table.add_row(str(number), *cells, *([f"… {made.m - shown} more"] if shown < made.m else []))
    console.print(table)
    if made.n > _ROWS_MAX:
        put(f"… and {made.n - _ROWS_MAX} more rows (--json has all)")
    if out := made.left_out("horizontal"):
        listed = " ".join(_cell(machine, vertical).plain for machine in out[:_COLUMNS_MAX])
        put(clean(f"in no row: {listed}{f' and {len(out) - _COLUMNS_MAX} more' if len(out) > _COLUMNS_MAX else ''}"))
    put("machine/v: vertical group of the machine; -: it sits out of that round")
    for note in made.notes:
        put(clean(f"note: {note}"))


def _cell(machine: str, vertical: dict[str, int]) -> Text:
    number = vertical.get(machine)
    colour = f"color({1 + number % 14})" if number is not None else "dim"
    return Text.assemble(clean(machine), (f"/{'-' if number is None else number}", colour))
