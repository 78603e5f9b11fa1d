"""`keepstep doctor`: what this host lets keepstep see."""

from __future__ import annotations

import getpass
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from infra.cli.common import FINE, FOUND, JsonOption, Refused, clean, console, show_json
from infra.doctor import Check, Examined, capabilities, examine
from infra.home import host_name
from infra.keys import connect_options, public_key_of
from infra.permissions import node_user

_STYLE = {"yes": "green", "no": "red", "absent": "dim"}


def register(app: typer.Typer) -> None:
    @app.command()
    def doctor(
        state: Annotated[Path | None, typer.Option("--state", help="The agent's state folder, where its spool lies")] = None,
        bus: Annotated[str, typer.Option("--bus", help="Also try the bus: nats://host:port")] = "",
        seed_file: Annotated[Path | None, typer.Option("--seed-file", help="This node's key for it")] = None,
        node: Annotated[str, typer.Option("--node", help="This node's name [default: the host's]")] = "",
        json: JsonOption = False,
    ) -> None:
        """Try what each probe can see on this host as this user; say what its absence costs and how to grant it. Exits with 1 if something is missing."""
        if bus and not bus.startswith(("nats://", "tls://")):
            raise Refused(f"{bus!r} is no address of a bus; give --bus nats://host:port")
        options = None
        if seed_file is not None:
            try:
                public_key_of(seed_file)
            except OSError as error:
                raise Refused(f"the key {seed_file} can't be read ({error.strerror}); make one with `keepstep keys`") from None
            options = connect_options(node_user(node or host_name()), seed_file)
        checks = list(examine(Examined(state=state, bus=bus, bus_options=options)))
        missing = [check for check in checks if check.answer == "no"]
        if json:
            show_json(
                {
                    "node": node or host_name(), "uid": os.getuid(), "capabilities": sorted(capabilities()), "missing": len(missing),
                    "checks": [asdict(check) for check in checks],
                }
            )  # fmt: skip
        else:
            _show(checks, missing)
        raise typer.Exit(FOUND if missing else FINE)


def _show(checks: list[Check], missing: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, title=None)
    for column in ("probe", "seen", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.answer, _STYLE[check.answer]), clean(check.found))
    console.print(table)
    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = f"uid {os.getuid()}"
    if not missing:
        console.print(f"\nAll that there is to see here is seen, as {clean(who)}.", markup=False)
    for check in missing:
        rungs = (
            f" Rungs that stand on less: {', '.join(rung.replace('_', ' ') for rung in check.rungs)}." if check.rungs else ""
        )
        console.print(f"\n{check.name}: {check.serves}.", markup=False)
        console.print(f"  Without it: {check.costs}.{rungs}", markup=False)
        console.print(f"  To grant it: {check.grant}.", markup=False)
