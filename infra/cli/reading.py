"""What can be read, of a running bus or of a recording: tail, replay, explain, census, record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from events.clock import text_of
from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, Record
from events.registry import Malformed, parse
from infra.bus import BusClient
from infra.cli.common import (
    FOUND,
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    clean,
    console,
    errors,
    put,
    records_of,
    run,
    say,
    show_json,
    with_bus,
)  # fmt: skip
from infra.home import Address
from infra.jetstream import JetStreamLog

Recording = Annotated[Path | None, typer.Argument(help="A recording (folder or file); without it the running bus is read")]


def progress(what: str) -> Progress:
    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


async def _all(nc: BusClient, stream: str) -> list[Record]:
    log = JetStreamLog(nc, stream)
    total = await log.last_sequence()
    found: list[Record] = []
    with progress(f"reading {stream}") as bar:
        task = bar.add_task("", total=total)
        async for record in log.read():
            found.append(record)
            if not len(found) % 1000:
                bar.update(task, completed=record.sequence)
    return found


def read_streams(
    where: Address, recording: Path | None, streams: Sequence[str], on_loss: Callable[[str], None] = say
) -> dict[str, Iterable[Record]]:
    """The named streams whole, from a recording or from the bus. `on_loss`: a sentence for each place where a recording is damaged."""
    if recording is not None:
        if recording.is_file():
            return {stream: records_of(recording, stream, on_loss) if stream == LEDGER else [] for stream in streams}
        return {stream: records_of(recording, stream, on_loss) for stream in streams}

    async def work(nc: BusClient) -> dict[str, Iterable[Record]]:
        return {stream: await _all(nc, stream) for stream in streams}

    return run(with_bus(where, "observer", work))


def replay_all(ledger: Iterable[Record], telemetry: dict[str, Iterable[Record]]) -> dict[str, Any]:
    """Both stages of replay as one plain result; `identical` says whether nothing differs."""
    from processors.replay import replay as replay_ledger
    from processors.replay_signals import replay_signals

    records = list(ledger)
    with progress("replaying LEDGER") as bar:
        decided = replay_ledger(bar.track(records))
    result: dict[str, Any] = {
        "records": len(records), "inputs": decided.inputs, "decisions": decided.decisions, "digest": decided.digest, "identical": decided.identical,
        "pending": decided.pending, "unread": decided.unread[:20], "divergence": _plain(decided.divergence), "signals": {},
    }  # fmt: skip
    for stream, found in telemetry.items():
        observed = list(found)
        if not observed:
            result["signals"][stream] = {"checked": False, "why": "not in this recording"}
            continue
        if observed[0].sequence != 1:
            result["signals"][stream] = {"checked": False, "why": f"kept only from sequence {observed[0].sequence} on"}
            continue
        detector = detector_for(stream, records)
        if detector is None:
            result["signals"][stream] = {"checked": False, "why": "the ledger holds no catalogue to judge them by"}
            continue
        claims = replay_signals(detector, observed, records)
        result["signals"][stream] = {
            "checked": True, "observations": claims.observations, "claims": claims.claims, "pending": claims.pending,
            "identical": claims.identical, "divergence": _plain(claims.divergence),
        }  # fmt: skip
        result["identical"] = result["identical"] and claims.identical
    return result


def detector_for(stream: str, ledger: Iterable[Record]) -> Any:
    """The detector of a stream, with the catalogue that the ledger says was in force; None if it says none that can be read."""
    from processors.catalogue import BadCatalogue
    from processors.catalogue import parse as parse_catalogue
    from processors.job import job_detector
    from processors.node import node_detector

    if stream == TELEMETRY_JOB:
        return job_detector()
    text = ""
    for record in ledger:
        if record.subject.endswith(".catalogue_adopted"):
            with contextlib.suppress(Malformed):
                text = parse(record.data).data.text
    try:
        return node_detector(parse_catalogue(text, examples=False))
    except BadCatalogue:
        return None


def _plain(value: Any) -> Any:
    from dataclasses import asdict

    return None if value is None else asdict(value)


def show_replay(result: dict[str, Any]) -> None:
    """The replay's result for people; the last line is the one that counts."""
    found = result["divergence"]
    if found:
        put(f"LEDGER sequence {found['sequence']}: {found['why']}")
        put(f"  recorded: {clean(found['recorded'])[:2000]}")
        put(f"  derived:  {clean(found['derived'])[:2000] or '(nothing)'}")
    for stream, stage in result["signals"].items():
        if not stage["checked"]:
            put(f"signals of {stream}: not checked ({stage['why']})")
        elif stage["divergence"]:
            gap = stage["divergence"]
            put(f"signals of {stream}: the first of {gap['key']} that differs")
            put(f"  recorded: {clean(gap['recorded'])[:2000]}\n  derived:  {clean(gap['derived'])[:2000] or '(nothing)'}")
        else:
            put(f"signals of {stream}: {stage['claims']} of {stage['observations']} observations, identical")
    if result["unread"]:
        put(f"{len(result['unread'])} records could not be read and were passed over, as the decider did")
    verdict = "identical" if result["identical"] else "NOT identical"
    if result.get("losses"):
        verdict += " as far as it goes: the recording is damaged"
    put(f"replay: {result['decisions']} decisions, digest {result['digest']}, {verdict}")


def register(app: typer.Typer) -> None:
    @app.command()
    def replay(
        recording: Recording = None, policy: Annotated[Path | None, typer.Option("--policy", help="What if this policy had been in force instead")] = None,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Decide everything again from the log and compare byte for byte. Exits with 1 on a difference, and shows the first; and where the
        recording is damaged, since what it lost was not compared."""
        losses: list[str] = []

        def lost(sentence: str) -> None:
            losses.append(sentence)
            say(sentence)

        found = read_streams(address(home, url, key), recording, (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB), lost)
        ledger = list(found.pop(LEDGER))
        if not ledger:
            raise Refused("the ledger is empty: nothing was decided, so there is nothing to replay")
        if policy is not None:
            _what_if(ledger, policy, json)
            return
        result = {**replay_all(ledger, found), "losses": losses}
        show_json(result) if json else show_replay(result)
        raise typer.Exit(0 if result["identical"] and not losses else FOUND)

    @app.command()
    def explain(
        incident: str, recording: Recording = None,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Tell one incident from first evidence to its end: what was seen, how it was judged, what was decided by which rule, and done."""
        from infra import explain as telling

        ledger = list(read_streams(address(home, url, key), recording, (LEDGER,))[LEDGER])
        try:
            found = telling.find(telling.known(ledger), incident)
            story = telling.explain(ledger, found.incident)
        except telling.UnknownIncident as error:
            raise Refused(str(error)) from None
        if json:
            show_json(telling.to_json(found, story))
            return
        for line in story:
            put(f"{text_of(line.time_ns)[11:23]} {line.offset_s:+9.2f} s  {clean(line.who):<10} {clean(line.text)}")

    @app.command()
    def census(
        recording: Recording = None, sql: Annotated[str, typer.Option("--sql", help="A query of your own over the census's views")] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Count incidents by symptom and mechanism, their times, and where each job's wall time went."""
        from infra import census as counting
        from infra.wall_time import wall_bins

        found = read_streams(address(home, url, key), recording, (LEDGER, TELEMETRY_JOB))
        try:
            ledger = list(found[LEDGER])
            if not ledger:
                raise Refused("the ledger is empty: nothing was decided, so there is nothing to count")
            con = counting.load(ledger, wall_bins(ledger, found[TELEMETRY_JOB]))
            if sql:
                answer = counting.run_sql(con, sql)
                show_json(answer.as_dicts()) if json else show_answer("", answer)
                return
            if json:
                show_json(counting.summary(con))
                return
            for title, name in CENSUS:
                show_answer(title, counting.view(con, name))
        except counting.CensusError as error:
            raise Refused(str(error)) from None

    @app.command()
    def record(
        folder: Path, home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False
    ) -> None:
        """Record the bus into a folder: one file a stream, enough by itself for `replay`, `explain` and `census`."""
        from infra.recording import record as record_streams

        async def work(nc: BusClient) -> dict[str, int]:
            with progress("recording") as bar:
                task = bar.add_task("", total=None)
                return await record_streams(
                    nc, folder, (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB), progress=lambda n: bar.update(task, completed=n)
                )

        counts = run(with_bus(address(home, url, key), "observer", work))
        show_json(counts) if json else say(
            "; ".join(f"{stream}: {n} records" for stream, n in counts.items()) + f" in {folder}"
        )

    @app.command()
    def tail(
        all_: Annotated[bool, typer.Option("--all", "-a", help="Observations too, not only the ledger")] = False,
        follow: Annotated[bool, typer.Option(help="Go on as events come")] = True,
        last: Annotated[int, typer.Option("-n", min=0, help="Begin with this many of the last")] = 20,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Follow the ledger (and with --all the observations), a line an event, until interrupted."""

        async def work(nc: BusClient) -> None:
            streams = (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB) if all_ else (LEDGER,)
            async for item in _merged(nc, streams, last, follow):
                _show_record(item, json)

        run(with_bus(address(home, url, key), "observer", work))


CENSUS = (
    ("incidents by symptom", "census_by_symptom"),
    ("mechanism by symptom", "mechanism_by_symptom"),
    ("evicted machines by rule, and what examining them came to", "evictions_by_rule"),
    ("seconds to detect, decide and be back at work", "resolution_times"),
    ("wall time by job", "wall_time"),
)


def show_answer(title: str, answer: Any) -> None:
    table = Table(title=title or None, title_justify="left")
    for column in answer.columns:
        table.add_column(clean(str(column)))
    for row in answer.rows:
        table.add_row(
            *(clean(f"{value:.3f}" if isinstance(value, float) else ("" if value is None else str(value))) for value in row)
        )
    console.print(table if answer.rows else f"{title or 'result'}: none")


async def _merged(nc: BusClient, streams: Sequence[str], last: int, follow: bool) -> AsyncIterator[Record]:
    queue: asyncio.Queue[Record | None] = asyncio.Queue(maxsize=10_000)

    async def pump(stream: str) -> None:
        log = JetStreamLog(nc, stream)
        end = await log.last_sequence()
        async with aclosing(log.read(after=max(0, end - last), follow=follow)) as records:  # type: ignore[type-var]
            async for item in records:
                await queue.put(item)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        ended = 0
        while ended < len(streams):
            item = await queue.get()
            ended += item is None
            if item is not None:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _show_record(item: Record, as_json: bool) -> None:
    try:
        event = parse(item.data)
    except Malformed as error:
        if as_json:
            show_json({"stream": item.stream, "sequence": item.sequence, "subject": item.subject, "malformed": str(error)})
        else:
            put(f"{text_of(item.time_ns)} {clean(item.subject)} malformed: {clean(str(error))}")
        return
    if as_json:
        show_json(
            {
                "stream": item.stream,
                "sequence": item.sequence,
                "time": text_of(item.time_ns),
                "subject": item.subject,
                "event": event.model_dump(mode="json", exclude_defaults=True),
            }
        )
        return
    facts = event.data.model_dump(mode="json", exclude_defaults=True)
    for noise in ("trigger", "ledger_digest", "policy_digest", "catalogue_digest", "code_version"):
        facts.pop(noise, None)
    text = " ".join(f"{name}={value}" for name, value in facts.items()).replace("\n", "\\n")
    put(f"{text_of(item.time_ns)[11:23]} {clean(event.job or event.subject)} {event.data.kind()} {clean(text)[:400]}")


def _what_if(ledger: list[Record], policy: Path, as_json: bool) -> None:
    from infra.cli.operator import read_policy
    from processors.what_if import what_if

    result = what_if(ledger, read_policy(policy))
    if as_json:
        show_json(result)
        return
    for line in result["only_recorded"]:
        put(f"- {clean(line)}")
    for line in result["only_what_if"]:
        put(f"+ {clean(line)}")
    put(
        f"what if: {result['recorded']} decisions were made, {result['what_if']} would have been, {result['same']} are the same"
    )
