"""`keepstep classify`: what a log says, without a bus or any set-up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from infra.catalogue_files import catalogue_text
from infra.cli.classify_cases import read_cases, score
from infra.cli.classify_count import Kind, Tally, code_of, plain, why_of
from infra.cli.classify_read import Reading
from infra.cli.common import FINE, FOUND, WRONG_USE, JsonOption, Refused, clean, console, errors, say, show_json
from processors.catalogue import BadCatalogue, Catalogue, parse

#: Bad lines that are told one by one; the rest are counted.
BAD_TOLD_MAX = 5
#: Files below this are read before a bar could be seen.
PROGRESS_BYTES = 64 << 20
UNKNOWN_SHOWN_MAX = 40
_FRACTION = re.compile(r"(?<=:\d\d)(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?= \d{4}$|$)")


def register(app: typer.Typer) -> None:
    @app.command()
    def classify(
        files: Annotated[
            list[str] | None,
            typer.Argument(
                help="Logs: dmesg, journal, syslog, kmsg, training logs, also .gz, .bz2, .xz, .zst; - is standard input"
            ),
        ] = None,
        unknown: Annotated[
            bool, typer.Option("--unknown", help="List the lines that nothing is known of, counted (slower)")
        ] = False,
        everything: Annotated[bool, typer.Option("--all", help="Also show what looks alarming and is harmless")] = False,
        cases: Annotated[
            Path | None, typer.Option("--cases", help="Classify labelled cases instead: JSON lines of id, text and expect")
        ] = None,
        catalogue: Annotated[
            Path | None, typer.Option("--catalogue", help="Another catalogue: a file, or a folder of *.yaml")
        ] = None,
        json: JsonOption = False,
    ) -> None:
        """What a log says: by finding its class, code, device, count, times, whose fault it can be, the first action, and why. Exits
        with 1 if something asks for an action."""
        known = _catalogue(catalogue)
        if cases is not None:
            if files or unknown or everything:
                raise Refused("--cases stands alone; give either cases or log files")
            raise typer.Exit(_cases(known, cases, json))
        if not files:
            raise Refused("give one or more log files, or - for standard input")
        tally = Tally(known)
        for name in files:
            _read(tally, name, unknown)
        for problem in tally.problems:
            say(problem)
        if json:
            show_json(_plain(tally, files, unknown, everything))
        else:
            _show(tally, unknown, everything)
        raise typer.Exit(FOUND if tally.asks else FINE)


def _catalogue(path: Path | None) -> Catalogue:
    try:
        return parse(catalogue_text(path), examples=path is not None)
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"the catalogue {path} can't be read ({getattr(error, 'strerror', None) or error}); give another --catalogue"
        ) from None
    except BadCatalogue as error:
        raise Refused(f"the catalogue {path or 'that came along'} is not valid: {error}") from None


def _read(tally: Tally, name: str, unknown: bool) -> None:
    try:
        size = Path(name).stat().st_size if name != "-" else 0
    except OSError:
        size = 0
    if size < PROGRESS_BYTES or not errors.is_terminal:
        tally.read(Reading(tally.catalogue, name), list_unknown=unknown)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(clean(Path(name).name)[:40], total=size)
        tally.read(Reading(tally.catalogue, name, lambda count: bar.update(task, advance=count)), list_unknown=unknown)


# --- what is shown ------------------------------------------------------------------------------------------------------------


def _plain(tally: Tally, files: list[str], unknown: bool, everything: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "files": files,
        "lines": tally.lines,
        "bytes": tally.size_bytes,
        "unknown": tally.unknown_lines,
        "harmless": sum(kind.count for kind in tally.harmless()),
        "findings": [plain(tally, kind) for kind in tally.findings()],
        "problems": tally.problems,
        "catalogue": tally.catalogue.digest,
    }
    if everything:
        result["harmless_lines"] = [plain(tally, kind) for kind in tally.harmless()]
    if unknown:
        result["unknown_lines"] = [{"count": u.count, "alarming": u.alarming, "example": u.example} for u in tally.unknowns()]
        result["unknown_not_listed"] = tally.unknown_beyond
    return result


def _show(tally: Tally, unknown: bool, everything: bool) -> None:
    findings = tally.findings()
    if findings:
        console.print(_table(tally, findings))
        differing = {k.finding.row.id: k for k in findings if k.finding.row.differs}
        for kind in differing.values():
            row = kind.finding.row
            what = code_of(kind.finding) or row.id
            console.print(
                f"{what}: NVIDIA says {row.nvidia_action}, keepstep {row.first_action}: {clean(row.differs)}.", markup=False
            )
    harmless = tally.harmless()
    if everything and harmless:
        table = Table(title="harmless", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("lines", "what", "example"):
            table.add_column(column, overflow="fold")
        for kind in harmless:
            table.add_row(str(kind.count), _cell(why_of(tally.catalogue, kind)), _cell(kind.example))
        console.print(table)
    if unknown:
        _show_unknown(tally)
    count = sum(kind.count for kind in harmless)
    parts = [
        f"{tally.lines} lines",
        f"{sum(k.count for k in findings)} in {len(findings)} findings" if findings else "no finding",
    ]
    if count:
        parts.append(f"{count} that look alarming and are harmless" + ("" if everything else " (--all shows them)"))
    parts.append(f"{tally.unknown_lines} of which nothing is known" + ("" if unknown else " (--unknown lists them)"))
    console.print("; ".join(parts), markup=False)
    if tally.uncounted:
        console.print(f"{tally.uncounted} more lines of further kinds were not kept apart", markup=False)


def _table(tally: Tally, kinds: list[Kind]) -> Table:
    table = Table(expand=True)
    for column, width in (
        ("first action", 24),
        ("class", 20),
        ("code", 10),
        ("device", 16),
        ("lines", 7),
        ("first, last", 25),
        ("fault", 10),
    ):
        table.add_column(column, justify="right" if column == "lines" else "left", overflow="fold", max_width=width)
    table.add_column("why", overflow="fold", ratio=1)
    for kind in kinds:
        row, finding = kind.finding.row, kind.finding
        name = tally.catalogue.tables.names.get(finding.xid, "")
        action = row.first_action + (f"\nNVIDIA: {row.nvidia_action}" if row.nvidia_action else "")
        when = "\n".join(dict.fromkeys(filter(None, (_seconds(kind.first), _seconds(kind.last)))))
        why = (f"{name}: " if name else "") + why_of(tally.catalogue, kind)
        table.add_row(
            action, row.class_, _cell(code_of(finding)), _cell(finding.named or finding.device), str(kind.count), _cell(when),
            "\n".join(row.fault), _cell(why),
        )  # fmt: skip
    return table


def _show_unknown(tally: Tally) -> None:
    kinds = tally.unknowns()
    if not kinds:
        return
    table = Table(title="nothing is known of", title_justify="left")
    table.add_column("lines", justify="right")
    table.add_column("alarming")
    table.add_column("example", overflow="fold")
    for kind in kinds[:UNKNOWN_SHOWN_MAX]:
        table.add_row(str(kind.count), "yes" if kind.alarming else "", _cell(kind.example))
    console.print(table)
    more = len(kinds) - UNKNOWN_SHOWN_MAX
    if more > 0 or tally.unknown_beyond:
        console.print(
            f"and {max(0, more)} more kinds (--json lists them), {tally.unknown_beyond} lines beyond those", markup=False
        )


def _seconds(stamp: str) -> str:
    """A time to the second; --json has all of it."""
    return _FRACTION.sub("", stamp)


def _cell(text: str) -> Text:
    return Text(clean(text))


# --- cases --------------------------------------------------------------------------------------------------------------------


def _cases(catalogue: Catalogue, path: Path, json: bool) -> int:
    bad: list[str] = []
    try:
        answers, scores = score(catalogue, read_cases(path, bad.append))
    except OSError as error:
        raise Refused(
            f"{path} can't be read ({error.strerror or error}); give a file of cases, one JSON object a line"
        ) from None
    for sentence in bad[:BAD_TOLD_MAX]:
        say(sentence)
    if len(bad) > BAD_TOLD_MAX:
        say(f"and {len(bad) - BAD_TOLD_MAX} more lines that are no cases")
    if json:
        for one in answers:
            show_json(one.plain())
        show_json({"scores": scores.plain()})
    else:
        _show_scores(len(answers), scores.plain(), scores.disagreements)
    return WRONG_USE if bad else FINE


def _show_scores(count: int, scores: dict[str, Any], disagreements: list[dict[str, Any]]) -> None:
    for one in disagreements:
        got, want = one["got"], one["want"]
        console.print(
            clean(
                f"{one['id']}: {', '.join(one['wrong'])}: got {got['class']}, {got['device'] or 'no device'}, {got['first_action']} "
                f"(row {one['row'] or 'none'}); want {want['class']}, {want['device'] or 'no device'}, {want['first_action']}: {one['text']}"
            ).replace("\n", " "),
            markup=False,
        )
    table = Table()
    for column in ("class", "cases", "answers", "precision", "recall"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, by in scores["by_class"].items():
        table.add_row(_cell(name), str(by["cases"]), str(by["answers"]), _percent(by["precision"]), _percent(by["recall"]))
    console.print(table)
    console.print(
        f"{count} cases, {scores['cases']} labelled: class {_percent(scores['class'])}, device {_percent(scores['device'])}, first action "
        f"{_percent(scores['first_action'])}; precision {_percent(scores['precision'])}, recall {_percent(scores['recall'])}; "
        f"{scores['harmless_evicted']} harmless read as evict",
        markup=False,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
