"""Restarts and changes of code that a person plans: restart, update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from actuators.git import GitFailed
from events.job import RestartRequested
from events.ports import LEDGER
from infra.bus import BusClient
from infra.cli.common import (
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    author,
    run,
    say,
    show_json,
    with_bus,
)
from infra.cli.operator import Reason, known, one_job
from infra.jetstream import JetStreamLog
from infra.job_code import asked_code
from infra.pipeline import say as tell

Symptom = Literal["code_update", "data_update", "operator_restart"]


async def ask(nc: BusClient, job: str, reason: str, symptom: Symptom, revision: str, lazily: bool) -> dict[str, str]:
    """Raises Refused."""
    fleet = await known(nc)
    name = one_job(fleet, job)
    commit = ""
    if revision:
        try:
            commit, said = await asked_code(fleet.jobs[name].declared, revision)
        except GitFailed as error:
            raise Refused(str(error)) from None
        say(said)
    fact = RestartRequested(job=name, reason=reason, author=author(), symptom=symptom, revision=commit, at_next_restart=lazily)
    what = "update" if symptom == "code_update" else symptom.replace("_", " ")
    text = f"{what} of job {name}" + (f" to {commit[:12]}" if commit else "") + (", with its next restart" if lazily else "")
    return {"event": await tell(JetStreamLog(nc, LEDGER), fact, name), "revision": commit, "said": text}


def register(app: typer.Typer) -> None:
    def request(
        job: str,
        reason: str,
        symptom: Symptom,
        revision: str,
        lazily: bool,
        home: Path | None,
        url: str,
        key: str,
        as_json: bool,
    ) -> None:
        done = run(with_bus(address(home, url, key), "operator", lambda nc: ask(nc, job, reason, symptom, revision, lazily)))
        show_json(done) if as_json else say(f"{done['said']}; recorded as {done['event']}")

    @app.command()
    def restart(
        reason: Reason, job: Annotated[str, typer.Argument()] = "",
        symptom: Annotated[Symptom | None, typer.Option("--as", help="What the census counts it as [default: operator_restart; with --revision code_update]")] = None,
        revision: Annotated[str, typer.Option("--revision", help="Commit, tag or branch of the job's repository to run from here on")] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Restart a job by plan, from its last whole checkpoint. It is counted as manual, not as an incident; it ends one that is open."""
        if revision and symptom not in (None, "code_update"):
            raise Refused(f"a restart with another revision is counted as code_update, not {symptom}; leave --as out")
        counted = symptom or ("code_update" if revision else "operator_restart")
        request(job, reason, counted, revision, False, home, url, key, json)

    @app.command()
    def update(
        revision: Annotated[str, typer.Argument(help="Commit, tag or branch of the job's repository")],
        reason: Reason, job: Annotated[str, typer.Argument()] = "",
        lazily: Annotated[bool, typer.Option("--lazily", help="With the next restart of whatever reason, or when the policy's update_window_s (a day) ends, instead of now")] = False,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Change a job's code in place: restarted at once (or --lazily) at another commit, on the same machines, from warm workers."""
        if not revision:
            raise Refused("name the commit, tag or branch to run, as in: keepstep update HEAD --reason …")
        request(job, reason, "code_update", revision, lazily, home, url, key, json)
