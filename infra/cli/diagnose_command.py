"""`keepstep diagnose`: the machines' tests for a person, on this host or on the nodes of a job that is stopped."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from actuators.channel import CommandChannel
from actuators.local import Local
from actuators.node_tests import merged
from actuators.port import Done, Work
from events.decision import IntentIssued
from events.finding import CheckResult
from events.ports import TELEMETRY_JOB
from infra.actuator_service import answers_in, sender
from infra.bus import BusClient
from infra.cli.common import (
    FINE,
    FOUND,
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    clean,
    console,
    put,
    run,
    show_json,
    with_bus,
)  # fmt: skip
from infra.cli.operator import known, one_job
from infra.clock import new_event_id
from infra.home import host_name
from infra.hook_folder import hook_folder
from infra.jetstream import JetStreamLog
from infra.tasks import ended
from processors.diagnosis import LINKS, RATES, found, rate

_MARK = {True: ("passed", "green"), False: ("FAILED", "red"), None: ("could not run", "dim")}
ANSWER_S = 30.0


def register(app: typer.Typer) -> None:
    @app.command()
    def diagnose(
        job: Annotated[str, typer.Argument(help="A job that is stopped: test its nodes. Without it: this host")] = "",
        node: Annotated[list[str] | None, typer.Option("--node", help="Of the job's nodes, only these (again for more)")] = None,
        test: Annotated[list[str] | None, typer.Option("--test", help=f"Of {', '.join(RATES)}; again for more [default: all]")] = None,
        within: Annotated[float, typer.Option("--within", min=1, max=86400, help="Seconds that the tests may take")] = 120,
        repeat: Annotated[float, typer.Option("--repeat", min=0, max=86400, help="This host: over and over for so many seconds")] = 0,
        ranks: Annotated[int, typer.Option("--ranks", min=0, max=64, help="This host: ranks at once [default: one a GPU]")] = 0,
        python: Annotated[str, typer.Option("--python", help="This host: an interpreter that has torch")] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Test machines: products, memory, links, NVIDIA's own diagnostic, one reference step to the bit. Exits with 1 if a machine failed."""
        unknown = [name for name in test or () if name not in RATES]
        if unknown:
            raise Refused(f"there is no test {unknown[0]!r}; there are {', '.join(RATES)}")
        if node and not job:
            raise Refused("--node chooses among a job's nodes: name the job, too")
        tests = tuple(test or RATES)
        if job:
            where = address(home, url, key)
            done = run(with_bus(where, "actuator", lambda nc: of_job(nc, job, tuple(node or ()), tests, within)))
            if done.result != "done":
                raise Refused(f"{job}: {done.detail}")
            results, summary = done.tests, done.detail
        else:
            results, summary = of_host(tests, within, repeat, ranks, python), ""
        found_ = found(results)
        if json:
            shown = [result.model_dump(mode="json") for result in results]
            rates = {name: rate(name)._asdict() for name in dict.fromkeys(result.test for result in results)}
            show_json(
                {"results": shown, "named": dict(found_.named), "doubts": found_.doubts, "summary": summary, "rates": rates}
            )
        else:
            _show(results, summary, found_.named.values(), found_.doubts)
        raise typer.Exit(FOUND if any(result.passed is False for result in results) else FINE)


def of_host(tests: Sequence[str], within_s: float, repeat_s: float, ranks: int, python: str) -> tuple[CheckResult, ...]:
    """This host's results. Raises Refused where nothing could be run at all."""
    interpreter = python or _interpreter()
    words = [
        "-m",
        "keepstep.diagnose",
        "--tests",
        ",".join(tests),
        "--within-s",
        f"{within_s:g}",
        "--repeat-s",
        f"{repeat_s:g}",
        "--ranks",
        str(ranks),
    ]
    path = os.pathsep.join(filter(None, (str(hook_folder()), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        said = subprocess.run(
            [interpreter, *words], env=environment, stdout=subprocess.PIPE, text=True, timeout=within_s + ANSWER_S, check=False
        )
    except OSError as error:
        raise Refused(
            f"{interpreter} can't be run ({error.strerror}); name an interpreter that has torch with --python"
        ) from None
    except subprocess.TimeoutExpired:
        raise Refused(f"the tests did not end within {within_s:g} s, nor could they be ended") from None
    by_rank: dict[int, list[dict[str, object]]] = {}
    try:
        for line in said.stdout.splitlines():
            result = json.loads(line)
            by_rank.setdefault(result.pop("rank"), []).append(result)
    except (ValueError, KeyError):
        by_rank = {}
    results = merged(host_name(), [by_rank[rank] for rank in sorted(by_rank)])
    if not results:
        raise Refused(
            f"{interpreter} ran no test (it ended with {said.returncode}); name an interpreter that has torch with --python"
        )
    if all(result.passed is None for result in results):
        raise Refused(f"no test could run here: {'; '.join(dict.fromkeys(f'{r.test}: {r.detail}' for r in results))}")
    return results


def _interpreter() -> str:
    """Our own if it has torch; else what the host calls python."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python3") or shutil.which("python") or sys.executable


async def of_job(nc: BusClient, name: str, only: tuple[str, ...], tests: Sequence[str], within_s: float) -> Done:
    """The tests on the job's nodes, through their agents. Nothing is recorded in the ledger: a person asked, and reads the answer."""
    fleet = await known(nc)
    job = fleet.jobs[one_job(fleet, name)]
    nodes = tuple(place.node for place in job.places)
    if missing := [node for node in only if node not in nodes]:
        raise Refused(f"{missing[0]} is none of the nodes of {job.name}: {', '.join(nodes)}")
    intent = IntentIssued(
        key=new_event_id(), decision="", incident="", job=job.name, epoch=0, verb="diagnose", nodes=only or nodes, tests=tuple(tests),
        within_s=within_s, expires_ns=0, trigger=1, ledger_digest="",
    )  # fmt: skip
    channel = CommandChannel(sender(nc.publish))
    answers = answers_in(JetStreamLog(nc, TELEMETRY_JOB))

    async def hear() -> None:
        async for node, answer in answers:
            channel.answered(node, answer)

    hearing = asyncio.create_task(hear())
    try:
        return await Local().diagnose(Work(intent, job.declared), channel)
    finally:
        await ended(hearing)


def _show(results: Sequence[CheckResult], summary: str, named: Iterable[str], doubts: Iterable[str]) -> None:
    table = Table(box=None, pad_edge=False, title=None)
    for column in ("machine", "test", "result", "found", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for result in sorted(results, key=lambda r: (r.node, list(RATES).index(r.test) if r.test in RATES else -1, r.peers)):
        test = f"{result.test} {result.peers[0]}" if result.test in LINKS and result.peers else result.test
        again = f" ({result.rounds} rounds)" if result.rounds > 1 else ""
        kept = "" if result.restored else f"; NOT put back: {', '.join(result.changed)}"
        table.add_row(
            clean(result.node),
            clean(test),
            Text(*_MARK[result.passed]),
            clean(result.detail + again + kept),
            f"{result.duration_s:.2f}",
        )
    console.print(table)
    ran = dict.fromkeys(result.test for result in results if result.passed and result.test in RATES)
    shares = ", ".join(f"{name} {rate(name).recall:.0%}" for name in ran)
    note = f"passing is no proof; of bad machines these tests find: {shares} (--json says how that is known)"
    for line in (*((summary,) if summary else ()), *named, *doubts, *((note,) if ran else ())):
        put(clean(line))
