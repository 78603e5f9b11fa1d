"""keepstep spares: how many standbys a run needs."""

from __future__ import annotations

from typing import Annotated

import typer

from infra.cli.common import JsonOption, Refused, console, show_json
from processors.standby_count import DAILY_FAILURES, PERCENTILE, standbys_for


def register(app: typer.Typer) -> None:
    @app.command()
    def spares(
        machines: Annotated[int, typer.Argument(help="Machines of the job")],
        daily_failures: Annotated[float, typer.Option("--daily-failures", help="The share of machines that fails a day")] = DAILY_FAILURES,
        percentile: Annotated[float, typer.Option("--percentile", help="The share of days on which they are to be enough")] = PERCENTILE,
        json: JsonOption = False,
    ) -> None:  # fmt: skip
        """How many standbys are enough for the machines that fail at once, on all but one day in a hundred."""
        try:
            standbys = standbys_for(machines, daily_failures, percentile)
        except ValueError as error:
            raise Refused(str(error)) from None
        if json:
            show_json({"machines": machines, "daily_failures": daily_failures, "percentile": percentile, "standbys": standbys})
            return
        console.print(
            f"{standbys} standbys for {machines} machines, of which {daily_failures:.2%} fail a day: enough on {percentile:.0%} of days",
            markup=False,
        )
