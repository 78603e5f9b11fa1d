"""keepstep topology: what a file says of where machines stand, and its declaration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from events.job import Place
from events.ports import LEDGER, Record
from events.subjects import FLEET, ledger
from events.topology import TopologyDeclared
from infra.bus import BusClient
from infra.cli.common import (
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    author,
    clean,
    console,
    run,
    say,
    show_json,
    with_bus,
)
from infra.jetstream import JetStreamLog
from infra.pipeline import say as tell
from infra.topology import BadTopology, Format, Topology, declarations, declared, read

TopologyOption = Annotated[
    Path | None,
    typer.Option(
        "--topology", help="Where machines stand: keepstep's file, Slurm's topology.conf, or `kubectl get nodes -o json`"
    ),
]
_FIELDS = ("rack", "switch", "nvlink_domain", "serial")
#: Rows that a table shows; --json has all.
_ROWS_MAX = 200


def topology_of(path: Path, form: Format | None = None, labels: list[str] | None = None, rack_from: str = "") -> Topology:
    """Raises Refused."""
    keys: dict[str, str] = {}
    for text in labels or ():
        what, _, key = text.partition("=")
        if what not in _FIELDS or not key:
            raise Refused(f"--label {text!r} is not FIELD=KEY with a field of {', '.join(_FIELDS)}")
        keys[what] = key
    try:
        return read(path, form, keys, rack_from)
    except BadTopology as error:
        raise Refused(str(error)) from None


async def declared_topology(nc: BusClient) -> Topology | None:
    """What LEDGER holds."""
    subject = ledger(FLEET, "operator", TopologyDeclared.kind())
    records: list[Record] = [record async for record in JetStreamLog(nc, LEDGER).read(subjects=(subject,))]
    return declared(records)


async def declare(nc: BusClient, topology: Topology) -> bool:
    """Into LEDGER, unless it says so already. Returns whether it was new."""
    there = await declared_topology(nc)
    if there is not None and there.digest == topology.digest:
        return False
    log = JetStreamLog(nc, LEDGER)
    for fact in declarations(topology, author()):
        await tell(log, fact, "")
    return True


def register(app: typer.Typer) -> None:
    @app.command()
    def topology(
        file: Annotated[Path, typer.Argument(help="keepstep's YAML or JSON, Slurm's topology.conf or topology.yaml, or what kubectl printed")],
        slurm: Annotated[bool, typer.Option("--slurm", help="It is Slurm's [default: seen from the file]")] = False,
        kubernetes: Annotated[bool, typer.Option("--kubernetes", help="It is what `kubectl get nodes -o json` prints")] = False,
        label: Annotated[list[str] | None, typer.Option("--label", help="Kubernetes label of a field, as switch=KEY; may be repeated")] = None,
        rack_from: Annotated[str, typer.Option("--rack-from", help="switch or nvlink_domain: stands for the rack where none is given")] = "",
        publish: Annotated[bool, typer.Option("--declare", help="Declare it on the bus: jobs and standbys that are declared later stand there")] = False,
        json: JsonOption = False, home: HomeOption = None, url: UrlOption = "", key: KeyOption = "",
    ) -> None:  # fmt: skip
        """Show where machines stand by a file, as it would be declared; --declare does it. Shared causes and budgets go by rack and switch."""
        if slurm and kubernetes:
            raise Refused("a file is either --slurm or --kubernetes")
        if rack_from not in ("", "switch", "nvlink_domain"):
            raise Refused(f"--rack-from {rack_from!r} is neither switch nor nvlink_domain")
        found = topology_of(file, "slurm" if slurm else "kubernetes" if kubernetes else None, label, rack_from)
        new = run(with_bus(address(home, url, key), "operator", lambda nc: declare(nc, found))) if publish else False
        if json:
            places = [place.model_dump(mode="json", exclude_defaults=True) for place in found.places.values()]
            show_json(
                {
                    "origin": found.origin,
                    "digest": found.digest,
                    "places": places,
                    "notes": found.notes,
                    "declared": publish,
                    "new": new,
                }
            )
            return
        _show(found)
        if publish:
            say("declared" if new else "it was declared already, just so")
        else:
            say("nothing is declared yet: --declare does it, and `keepstep run --topology` uses it for one job")


def _show(found: Topology) -> None:
    table = Table("node", *_FIELDS, box=None)
    for place in list(found.places.values())[:_ROWS_MAX]:
        table.add_row(*(Text(clean(text)) for text in (place.node, *(getattr(place, name) for name in _FIELDS))))
    console.print(table)
    if len(found.places) > _ROWS_MAX:
        console.print(f"… and {len(found.places) - _ROWS_MAX} more (--json has all)")
    console.print(f"{len(found.places)} machines: {', '.join(_counts(list(found.places.values())))}; digest {found.digest}")
    for note in found.notes:
        say(f"note: {note}")


def _counts(places: list[Place]) -> list[str]:
    said = []
    for name, many in (("rack", "racks"), ("switch", "switches"), ("nvlink_domain", "NVLink domains")):
        sizes = Counter(getattr(place, name) for place in places)
        without = sizes.pop("", 0)
        text = f"{len(sizes)} {many}"
        said.append(f"{text} ({without} machines without)" if without and sizes else text)
    return said
