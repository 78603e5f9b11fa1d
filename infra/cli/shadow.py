"""keepstep shadow: what `auto` would have done over a period of `observe`, beside what people did."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from events.clock import text_of
from events.ports import LEDGER
from infra.cli.common import (
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    clean,
    console,
    put,
    show_json,
)
from infra.cli.people import duration_s
from infra.cli.reading import Recording, read_streams
from processors.shadow import Case, Shadow
from processors.shadow import shadow as compare

COLUMNS = (
    ("agreed", "agreed"), ("differed", "differed"), ("not acted on", "not_acted"), ("can't be told", "cannot_be_told"),
    ("open yet", "open_yet"), ("barred", "barred"),
)  # fmt: skip


def register(app: typer.Typer) -> None:
    @app.command()
    def shadow(
        recording: Recording = None,
        window: Annotated[str, typer.Option("--window", help="How long after a decision a person's act still counts as theirs on it")] = "30m",
        cases: Annotated[bool, typer.Option("--cases", help="Tell each case, with what people did")] = False,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """What `auto` would have done, rule by rule, beside what people did: whether a rule can be trusted to act by itself."""
        window_s = duration_s(window)
        ledger = list(read_streams(address(home, url, key), recording, (LEDGER,))[LEDGER])
        if not ledger:
            raise Refused("the ledger is empty: nothing was decided, so there is nothing to lay beside what people did")
        found = compare(ledger, window_s)
        if json:
            show_json(plain(found))
            return
        _show(found, cases)


def plain(found: Shadow) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "from": text_of(found.begin_ns), "to": text_of(found.end_ns), "window_s": found.window_s, "incidents": found.incidents,
        "beyond": found.beyond, "beyond_incidents": found.beyond_incidents, "acted": found.acted,
        "rules": [
            {
                "rule": row.rule, "rungs": list(row.rungs), "cases": row.cases, **row.counts, "went_on": row.went_on,
                "saved_s": round(sum(row.saved_s), 3), "saved_s_median": row.saved_s_median,
            }
            for row in found.rows
        ],
        "cases": [_case(case) for case in found.cases],
    }  # fmt: skip


def _case(case: Case) -> dict[str, Any]:
    made = case.made
    return {
        "decision": made.decision, "incident": made.incident, "job": made.job, "time": text_of(case.at_ns), "rule": made.rule,
        "rung": made.rung, "nodes": list(made.nodes), "mode": made.mode, "because": made.because, "verdict": case.verdict,
        "barred": case.barred, "went_on": case.went_on, "saved_s": case.saved_s,
        "people": [{"time": text_of(act.at_ns), "author": act.author, "did": act.text} for act in case.acts],
    }  # fmt: skip


def _show(found: Shadow, cases: bool) -> None:
    table = Table("rule", "would", "cases", *(title for title, _ in COLUMNS), "earlier by (median, sum)")
    for row in found.rows:
        saved = f"{row.saved_s_median:.1f} s, {sum(row.saved_s):.1f} s" if row.saved_s_median is not None else ""
        cells = []
        for _, verdict in COLUMNS:
            count = row.counts[verdict]  # type: ignore[index]
            went_on = f" ({row.went_on} went on)" if verdict == "not_acted" and row.went_on else ""
            cells.append(f"{count or ''}{went_on}")
        rungs = ", ".join(rung.replace("_", " ") for rung in row.rungs)
        table.add_row(clean(row.rule), rungs, str(row.cases), *cells, saved)
    console.print(table if found.rows else "no rule would have acted beyond what it did")
    if cases:
        for case in found.cases:
            _tell(case)
    put(
        f"{text_of(found.begin_ns)[:19]} to {text_of(found.end_ns)[:19]}, {found.incidents} incidents; an act counts up to {found.window_s:g} s after the decision"
    )
    if found.beyond:
        put(
            f"not counted: {found.beyond} decisions in {found.beyond_incidents} incidents after the first imagined action there; the log does not tell what would have happened then"
        )
    if found.acted:
        put(f"{found.acted} decisions acted by themselves and are not counted here")


def _tell(case: Case) -> None:
    made = case.made
    nodes = f" of {', '.join(made.nodes)}" if made.nodes else ""
    barred = f" by {case.barred.replace('_', ' ')}" if case.barred else ""
    put(
        clean(
            f"{text_of(case.at_ns)[:19]} {made.job}: {made.rung.replace('_', ' ')}{nodes} by {made.rule}: {case.verdict.replace('_', ' ')}{barred}"
            + ("; the job went on" if case.went_on else "")
        )
    )
    for act in case.acts:
        put(clean(f"    {text_of(act.at_ns)[:19]} {act.author}: {act.text}"))
