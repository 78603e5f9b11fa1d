"""The census: records of a log into DuckDB, and answers out of it. The views are schemas/census.sql.

A census is read by people who write SQL of their own, so what they may do is bounded: one statement that reads, no files, no network,
no settings, a limit on time and rows.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib import resources
from typing import Any, get_args
from uuid import UUID

import duckdb

from events import incident, subjects
from events.ports import LEDGER, Record
from events.registry import Malformed, parse

QUERY_S_MAX = 60.0
ROWS_MAX = 100_000
#: What DuckDB may use; it has no folder to spill into.
MEMORY = "2GB"
_BATCH = 10_000
#: A mistake in the log is named so often by itself, then only counted.
_PROBLEMS_MAX = 10_000

#: Views and tables by name, with what they answer: `keepstep census --sql` names them where a query asks for another.
VIEWS = (
    "incidents", "census_by_symptom", "census_by_category", "mechanism_by_symptom", "evictions_by_rule", "machines", "resolution_times", "wall_time", "ettr",
    "decisions", "signals", "actions", "evictions", "beside_byterobust", "ledger", "events", "problems", "symptoms",
)  # fmt: skip


class CensusError(ValueError):
    """A query that can't be answered. The text is a sentence or two for its author."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of a query. `cut`: there were more than the limit."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    cut: bool = False

    def as_dicts(self) -> list[dict[str, Any]]:
        """Rows that JSON can hold: what is no finite number as text, as in events."""
        return [{name: plain(value) for name, value in zip(self.columns, row, strict=True)} for row in self.rows]

    def as_json(self) -> str:
        return json.dumps(self.as_dicts(), ensure_ascii=False, allow_nan=False)


@dataclass(slots=True)
class _Columns:
    """Rows that wait to be stored, column by column: DuckDB takes lists many times faster than rows."""

    stream: list[str] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)
    subject: list[str] = field(default_factory=list)
    role: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    type: list[str] = field(default_factory=list)
    id: list[str] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    event_time_ns: list[int] = field(default_factory=list)
    causes: list[list[str]] = field(default_factory=list)
    job: list[str] = field(default_factory=list)
    attempt: list[int] = field(default_factory=list)
    data: list[str] = field(default_factory=list)


_TYPES = ("VARCHAR", "BIGINT", "BIGINT", *("VARCHAR",) * 6, "BIGINT", "VARCHAR[]", "VARCHAR", "BIGINT", "VARCHAR")
_INSERT = f"INSERT INTO events SELECT {', '.join(f'unnest(${i}::{t}[])' for i, t in enumerate(_TYPES, 1))}"
_BIGINT_MAX = 2**63 - 1


def load(records: Iterable[Record], wall_bins: Iterable[tuple[str, str, float]] = ()) -> duckdb.DuckDBPyConnection:
    """An in-memory database with the tables and views of schemas/census.sql, filled from `records` (of any stream, in any order;
    one that comes twice is counted once) and `wall_bins` (job, bin, seconds: what each job's wall time was spent on). Records that
    are no events are in `problems`. The connection is locked: it reads no file and no setting can be changed.
    """
    con = duckdb.connect(":memory:", config={"memory_limit": MEMORY, "threads": 2, "temp_directory": ""})
    con.execute(resources.files("schemas").joinpath("census.sql").read_text(encoding="utf-8"))
    con.execute("SET TimeZone = 'UTC'")
    _store_symptoms(con)
    _store_records(con, records)
    bins = [(job, bin_, seconds) for job, bin_, seconds in wall_bins if math.isfinite(seconds)]
    if bins:
        con.executemany("INSERT INTO wall_bins VALUES (?, ?, ?)", bins)
    for setting in (
        "python_enable_replacements",
        "autoinstall_known_extensions",
        "autoload_known_extensions",
        "enable_external_access",
    ):
        con.execute(f"SET {setting} = false")
    con.execute("SET lock_configuration = true")
    return con


def _store_symptoms(con: duckdb.DuckDBPyConnection) -> None:
    kinds = (("explicit", incident.Explicit), ("implicit", incident.Implicit), ("manual", incident.Manual))
    con.executemany(
        "INSERT INTO symptoms VALUES (?, ?)", [(symptom, category) for category, names in kinds for symptom in get_args(names)]
    )


def _store_records(con: duckdb.DuckDBPyConnection, records: Iterable[Record]) -> None:
    waiting = _Columns()
    problems: list[tuple[str, int, str, str, str]] = []
    uncounted = 0
    seen: set[tuple[str, int]] = set()
    for record in records:
        place = (record.stream, record.sequence)
        what, reason = "", ""
        if place in seen:
            what, reason = "repeated", "the same sequence was there before"
        else:
            seen.add(place)
            try:
                _add(waiting, record)
            except (Malformed, subjects.BadName) as error:
                what, reason = "malformed", str(error)
        if what and len(problems) < _PROBLEMS_MAX:
            problems.append(
                (record.stream, min(record.sequence, _BIGINT_MAX), _text(record.subject)[:400], what, _text(reason))
            )
        elif what:
            uncounted += 1
        if len(waiting.sequence) >= _BATCH:
            _flush(con, waiting)
            waiting = _Columns()
    _flush(con, waiting)
    if uncounted:
        problems.append(("", 0, "", "more", f"{uncounted} more records that were malformed or repeated"))
    if problems:
        con.execute(
            "INSERT INTO problems SELECT unnest($1::VARCHAR[]), unnest($2::BIGINT[]), unnest($3::VARCHAR[]), "
            "unnest($4::VARCHAR[]), unnest($5::VARCHAR[])",
            [list(column) for column in zip(*problems, strict=True)],
        )


def _text(value: str) -> str:
    """Text that can be stored: a lone surrogate or a NUL byte (either may be in what was refused) is replaced."""
    return value.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def _add(waiting: _Columns, record: Record) -> None:
    """Raises Malformed, BadName; then nothing was added."""
    parts = record.subject.split(".")
    job, role = "", ""
    if parts[0] == "ledger" and len(parts) == 4:
        job, role = subjects.name(parts[1]), parts[2]
        job = "" if job == subjects.FLEET else job
    elif parts[0] == "tj" and len(parts) == 5:
        job = subjects.name(parts[3])
    elif not (parts[0] == "tn" and len(parts) == 4) and parts[0] != "clock":
        raise Malformed(f"{record.subject[:200]} is not a subject of keepstep's streams")
    event = parse(record.data)
    kind = event.data.kind()
    if parts[0] in ("ledger", "tn", "tj") and kind != parts[-1]:
        raise Malformed(f"a {kind} on the subject of {parts[-1][:80]!r}")
    if max(record.sequence, record.time_ns, event.time, event.attempt) > _BIGINT_MAX:
        raise Malformed("a sequence, time or attempt beyond 63 bits")
    data = event.data.__pydantic_serializer__.to_json(event.data).decode("utf-8")
    row = (
        *(record.stream, record.sequence, record.time_ns, record.subject, role, kind, event.type, event.id, event.source),
        *(event.time, list(event.causes), job, event.attempt, data),
    )
    for name, value in zip(_Columns.__dataclass_fields__, row, strict=True):
        getattr(waiting, name).append(value)


def _flush(con: duckdb.DuckDBPyConnection, waiting: _Columns) -> None:
    if waiting.sequence:
        con.execute(_INSERT, [getattr(waiting, name) for name in _Columns.__dataclass_fields__])


def run_sql(con: duckdb.DuckDBPyConnection, sql: str, *, seconds_max: float = QUERY_S_MAX, rows_max: int = ROWS_MAX) -> Answer:
    """The answer to one statement that reads. Raises CensusError."""
    try:
        statements = con.extract_statements(sql)
    except duckdb.Error as error:
        raise CensusError(_sentence(error)) from None
    if len(statements) != 1:
        raise CensusError(f"one query at a time, please; this holds {len(statements)}")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        kind = str(statements[0].type).rpartition(".")[2]
        raise CensusError(f"the census is only read: SELECT, DESCRIBE, SHOW or SUMMARIZE, not {kind}")
    stop = threading.Timer(seconds_max, con.interrupt)
    stop.daemon = True
    stop.start()
    try:
        result = con.execute(statements[0])
        rows = result.fetchmany(rows_max + 1)
        columns = tuple(column[0] for column in result.description or ())
    except duckdb.InterruptException:
        raise CensusError(f"the query was stopped after {seconds_max:g} s; ask for less") from None
    except duckdb.Error as error:
        raise CensusError(_sentence(error)) from None
    finally:
        stop.cancel()
        stop.join()  # a thread that still holds the connection when Python ends would abort the process
    return Answer(columns, tuple(rows[:rows_max]), cut=len(rows) > rows_max)


def _sentence(error: duckdb.Error) -> str:
    """DuckDB's message in one line, with where to look."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[0].removeprefix("Parser Error: ").removeprefix("Catalog Error: ").removeprefix("Binder Error: ")[:400]
    if isinstance(error, duckdb.CatalogException) and "Table" in told:
        return f"{told.rstrip('!.')}; there are: {', '.join(VIEWS)}"
    candidates = [line for line in lines[1:] if line.startswith("Candidate")]
    return "; ".join([told.rstrip("!"), *candidates])[:600]


def view(con: duckdb.DuckDBPyConnection, name: str) -> Answer:
    """A whole view."""
    if name not in VIEWS:
        raise CensusError(f"there is no view {name!r}; there are: {', '.join(VIEWS)}")
    return run_sql(con, f"SELECT * FROM {name}")


def summary(con: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """What `keepstep census --json` prints: the first views whole, and how much of the log could not be read."""
    names = (
        "census_by_category", "census_by_symptom", "mechanism_by_symptom", "evictions_by_rule", "resolution_times", "wall_time", "ettr",
    )  # fmt: skip
    answer: dict[str, Any] = {name: view(con, name).as_dicts() for name in names}
    counted = run_sql(
        con, f"SELECT count(*), count(DISTINCT job) FILTER (job <> ''), count(*) FILTER (stream = '{LEDGER}') FROM events"
    )
    events, jobs, ledger = counted.rows[0]
    problems = run_sql(con, "SELECT what, count(*) AS records FROM problems WHERE what <> 'more' GROUP BY what ORDER BY what")
    return {"events": events, "ledger_events": ledger, "jobs": jobs, "problems": problems.as_dicts(), **answer}


def plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Decimal):
        return plain(float(value))
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    return str(value)
