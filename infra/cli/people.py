"""What people answer: approve, deny, override, ack; and which decisions wait for them."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from actuators.git import GitFailed
from events.clock import NS, text_of
from events.decision import IntentIssued
from events.envelope import Fact
from events.job import ApprovalGiven, OverrideGiven, PageAcknowledged
from events.ports import LEDGER, Expect, StaleWriter
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
    put,
    run,
    say,
    show_json,
    with_bus,
)
from infra.cli.operator import Reason, one_job, show_recorded, told
from infra.cli.status import bus_now_ns
from infra.jetstream import JetStreamLog
from infra.job_code import asked_code
from infra.pipeline import say as tell
from infra.runbook_files import UnknownRunbook, names
from infra.runbook_files import text_of as text_of_page
from infra.waiting import ago, described, short_ids
from infra.watch import Asked, Watch
from processors import revisions
from processors.fleet import Fleet, Job

Remedy = Literal["evict", "reattempt", "roll_back", "keep"]
Expires = Annotated[str, typer.Option("--expires", help="Good for so long: 90s, 30m, 2h, 1d [default: no end of its own]")]
#: Ten years: what lies beyond it has no time that an event can hold.
DURATION_S_MAX = 10 * 366 * 24 * 3600.0
#: What people say, of whatever job; and how often an answer is thought about again since somebody else spoke.
OPERATORS = "ledger.*.operator.*"
ANSWER_TRIES = 8
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h`, `1d`. Raises Refused."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < value <= DURATION_S_MAX:
        raise Refused(f"{text!r} is no time that an answer can be good for; write a number and s, m, h or d, as in 30m")
    return value


# --- what waits -----------------------------------------------------------------------------------------------------------------


def chosen(watch: Watch, prefix: str, latest: bool) -> Asked:
    """The waiting decision that is meant. Raises Refused with one sentence that says why it is none."""
    waits = watch.waiting()
    short = short_ids(list(watch.asked))
    listed = "; ".join(f"{short[a.made.decision]}: {described(a)}" for a in waits[-5:]) or "none"
    if bool(prefix) == latest:
        raise Refused(f"name one decision, by the beginning of its id or with --latest; waiting are: {listed}")
    if latest:
        if not waits:
            last = list(watch.asked.values())[-1:]
            raise Refused("no decision waits for a yes now" + (f"; {why_over(watch, last[0])}" if last else ""))
        return waits[-1]
    prefix = prefix.lower()
    found = [asked for asked in waits if asked.made.decision.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise Refused(f"{len(found)} decisions that wait begin with {prefix!r}; give more of the id: {listed}")
    over = [asked for asked in watch.asked.values() if asked.made.decision.startswith(prefix)]
    if len(over) == 1:
        raise Refused(f"{why_over(watch, over[0])}; waiting are: {listed}")
    raise Refused(f"no decision that was ever asked about begins with {prefix!r}; waiting are: {listed}")


def why_over(watch: Watch, asked: Asked) -> str:
    """Why a decision waits no more."""
    made, answer = asked.made, asked.answer
    name = f"decision {made.decision[:8]} ({made.rung.replace('_', ' ')} in job {made.job})"
    if answer is not None:
        word = "yes" if answer.granted else "no"
        when = ago(watch.now_ns, asked.answered_ns)
        if answer.granted and answer.expires_ns and watch.now_ns > answer.expires_ns:
            return f"{name} is over: the yes of {answer.author} ({when}) has expired"
        return f"{name} was answered already: {word} by {answer.author} {when}, {answer.reason!r}"
    story = watch.incidents.get(made.incident)
    if story is not None and story.closed is not None:
        closed = story.closed.outcome.replace("_", " ")
        return f"{name} is over: its incident was closed {ago(watch.now_ns, story.closed_ns)} ({closed})"
    later = [d for d in (story.decisions if story else []) if d.ordinal > made.ordinal]
    if later:
        return f"{name} is superseded: decision {later[-1].decision[:8]} ({later[-1].rung.replace('_', ' ')}) took its place"
    return f"{name} is withdrawn: what it was for is over"


# --- overrides ------------------------------------------------------------------------------------------------------------------


def override_of(
    fleet: Fleet, job: str, remedy: Remedy, node: str, revision: str, reason: str, expires_ns: int
) -> OverrideGiven:
    """Raises Refused for what the job could not do."""
    there = fleet.jobs[job]
    if remedy in ("evict", "keep"):
        if not node:
            raise Refused(f"name the machine that is to be {'evicted' if remedy == 'evict' else 'kept'} with --node")
        _known_machine(there, remedy, node)
    elif node:
        raise Refused(f"--node goes with evict and keep; {remedy} is of the whole job")
    if revision and remedy != "roll_back":
        raise Refused(f"--revision goes with roll_back; {remedy} takes the code as it is")
    if remedy != "keep" and there.wanted != "running":
        again = "; start it with `keepstep restart`" if there.wanted == "stopped" else ""
        raise Refused(f"job {job} is {there.wanted}; there is nothing to {remedy.replace('_', ' ')}{again}")
    target = revisions.target(there) if remedy == "roll_back" and not revision else None
    if isinstance(target, str):
        raise Refused(f"{target}; name the commit to go back to with --revision")
    return OverrideGiven(
        job=job, remedy=remedy, node=node, revision=revision, reason=reason, author=author(), expires_ns=expires_ns
    )


async def commit_of(job: Job, revision: str) -> str:
    """The commit that is meant, looked up as `update` does. Raises Refused."""
    try:
        code = await asked_code(job.declared, revision)
    except GitFailed as error:
        raise Refused(str(error)) from None
    say(code.said)
    return code.revision


def _known_machine(job: Job, remedy: Remedy, node: str) -> None:
    refused = job.plan is not None and ("evict_node", node) in job.plan.refused  # under a hold: it is not begun
    if node in job.evicted and not (refused and remedy == "keep"):
        raise Refused(f"{node} was evicted from job {job.name} already")
    machines = list(job.by_node) + ([place.node for place in job.standbys] if remedy == "keep" else [])
    if node not in machines:
        more = f" and {len(machines) - 12} more" if len(machines) > 12 else ""
        raise Refused(f"job {job.name} has no machine {node}; it has: {', '.join(machines[:12])}{more}")


# --- acknowledgement --------------------------------------------------------------------------------------------------------------


def page_of(watch: Watch, wanted: str, latest: bool, job: str) -> tuple[str, str, str]:
    """(job, incident, decision) of what is acknowledged: an incident by the beginning of its id or JOB/EPOCH, a decision that a page
    named, or what paged last. Raises Refused."""
    pages = [page for page in watch.pages if not job or page.job == job]
    if bool(wanted) == latest:
        raise Refused(f"name one incident or decision, or give --latest; paged was last: {_listed(pages)}")
    if not pages:
        raise Refused(f"nobody was paged yet{f' for job {job}' if job else ''}")
    if latest:
        last = pages[-1]
        _still_open(watch, last.incident)
        return last.job, last.incident, "" if last.incident else last.decision
    low = wanted.lower()
    epochs = {f"{story.job}/{story.epoch}": story.id for story in watch.incidents.values()}
    incidents = {p.incident for p in pages if p.incident and (p.incident.startswith(low) or epochs.get(wanted) == p.incident)}
    decisions = {p.decision: p for p in pages if p.decision.startswith(low)}
    if len(incidents) + len(decisions) != 1:
        what = "fits more than one page; give more of the id" if incidents or decisions else "is nothing that paged anybody"
        raise Refused(f"{wanted!r} {what}; paged was last: {_listed(pages)}")
    page = next(iter(decisions.values())) if decisions else next(p for p in pages if p.incident in incidents)
    _still_open(watch, page.incident)
    return page.job, page.incident, page.decision if decisions else ""


def _still_open(watch: Watch, incident: str) -> None:
    story = watch.incidents.get(incident)
    if story is not None and story.closed is not None:
        closed = story.closed.outcome.replace("_", " ")
        raise Refused(
            f"incident {story.id[:8]} was closed {ago(watch.now_ns, story.closed_ns)} ({closed}); no page of it is repeated"
        )


def _listed(pages: Sequence[IntentIssued]) -> str:
    return "; ".join(f"{(p.incident or p.decision)[:8]} of {p.job}: {p.text[:160]}" for p in pages[-5:]) or "nothing"


# --- commands -------------------------------------------------------------------------------------------------------------------


def speak(
    home: Path | None, url: str, key: str, as_json: bool, make: Callable[[BusClient], Awaitable[tuple[Fact, str]]]
) -> None:
    """Records a person's word, and says what was said."""

    event, text = run(with_bus(address(home, url, key), "operator", lambda nc: recorded(nc, make)))
    show_recorded(event, text, as_json)


async def recorded(nc: BusClient, make: Callable[[BusClient], Awaitable[tuple[Fact, str]]]) -> tuple[str, str]:
    """The event and what was said. If somebody else said something meanwhile, it is thought about again: of two who answer at once, the
    second is told so. Raises Refused."""
    log = JetStreamLog(nc, LEDGER)
    for _ in range(ANSWER_TRIES):
        last = await log.last_sequence(OPERATORS)
        fact, text = await make(nc)
        try:
            return await tell(log, fact, fact.job, Expect(OPERATORS, last)), text  # type: ignore[attr-defined]
        except StaleWriter:
            continue
    raise Refused(
        "others spoke at the same moment, again and again, and nothing of yours is recorded; look at `keepstep status`"
    )


async def until_ns(nc: BusClient, expires: str) -> int:
    """When an answer ends, by the broker's clock (this host's may be hours off); 0: it has no end of its own."""
    return await bus_now_ns(nc) + int(duration_s(expires) * NS) if expires else 0


def register(app: typer.Typer) -> None:
    def answer(
        granted: bool, decision: str, latest: bool, reason: str, expires: str, home: Path | None, url: str, key: str, json: bool
    ) -> None:
        async def make(nc: BusClient) -> tuple[Fact, str]:
            asked = chosen(await told(nc), decision, latest)
            fact = ApprovalGiven(
                decision=asked.made.decision, job=asked.made.job, granted=granted, reason=reason, author=author(),
                expires_ns=await until_ns(nc, expires),
            )  # fmt: skip
            return fact, clean(f"{'yes' if granted else 'no'} to {described(asked)}")

        if expires:
            duration_s(expires)
        speak(home, url, key, json, make)

    @app.command()
    def approve(
        reason: Reason, decision: Annotated[str, typer.Argument(help="The beginning of its id, as `keepstep status` lists it")] = "",
        latest: Annotated[bool, typer.Option("--latest", help="The one that was asked for last")] = False, expires: Expires = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Say yes to a decision that waits for it. With --expires, what was not begun by then is not done, and paged."""
        answer(True, decision, latest, reason, expires, home, url, key, json)

    @app.command()
    def deny(
        reason: Reason, decision: Annotated[str, typer.Argument(help="The beginning of its id, as `keepstep status` lists it")] = "",
        latest: Annotated[bool, typer.Option("--latest", help="The one that was asked for last")] = False, expires: Expires = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Say no to a decision that waits: nothing is done, and the incident is yours. With --expires, a no that the decider has not heard by
        then counts for nothing."""
        answer(False, decision, latest, reason, expires, home, url, key, json)

    @app.command()
    def override(
        job: Annotated[str, typer.Argument()],
        remedy: Annotated[Remedy, typer.Argument(help="evict or keep a --node; reattempt; roll_back (to --revision)")],
        reason: Reason,
        node: Annotated[str, typer.Option("--node", help="Of evict and keep: which machine")] = "",
        revision: Annotated[str, typer.Option("--revision", help="Of roll_back: to this one [default: the last stable one]")] = "",
        expires: Expires = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Choose in place of the ladder: evict, reattempt and roll_back are taken at once, keep bars every rule from evicting a machine
        until it expires."""

        async def make(nc: BusClient) -> tuple[Fact, str]:
            fleet = (await told(nc)).fleet
            expires_ns = await until_ns(nc, expires)
            name = one_job(fleet, job)
            fact = override_of(fleet, name, remedy, node, revision, reason, expires_ns)
            if revision:
                fact = fact.model_copy(update={"revision": await commit_of(fleet.jobs[name], revision)})
            until = f" until {text_of(expires_ns)[:19]}Z" if expires_ns else (", without end" if remedy == "keep" else "")
            what = " ".join(word for word in (remedy.replace("_", " "), node, revision and f"to {fact.revision[:12]}") if word)
            return fact, clean(f"override of job {fact.job}: {what}{until}")

        if expires:
            duration_s(expires)
        speak(home, url, key, json, make)

    @app.command()
    def runbook(
        name: Annotated[str, typer.Argument(help="As a page or `explain` names it")] = "", json: JsonOption = False
    ) -> None:
        """Print a runbook page: what a call means, what to look at, what to do. Without a name: which pages there are."""
        if not name:
            titles = {one: text_of_page(one).splitlines()[0].removeprefix("# ") for one in names()}
            show_json(titles) if json else put("\n".join(f"{one:<28} {title}" for one, title in titles.items()))
            return
        try:
            text = text_of_page(name)
        except UnknownRunbook as error:
            raise Refused(str(error)) from None
        show_json({"runbook": name.removesuffix(".md"), "text": text}) if json else sys.stdout.write(text)

    @app.command()
    def ack(
        reason: Reason,
        incident: Annotated[str, typer.Argument(help="Incident (the beginning of its id, or JOB/EPOCH) or decision that paged")] = "",
        latest: Annotated[bool, typer.Option("--latest", help="What paged last")] = False,
        job: Annotated[str, typer.Option("--job", help="With --latest: of this job")] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Say that you have a page: what was paged of it so far is not repeated."""

        async def make(nc: BusClient) -> tuple[Fact, str]:
            name, of, decision = page_of(await told(nc), incident, latest, job)
            fact = PageAcknowledged(job=name, incident=of, decision=decision, reason=reason, author=author())
            return fact, clean(f"acknowledged: {f'incident {of[:8]}' if of else f'decision {decision[:8]}'} of job {name}")

        speak(home, url, key, json, make)
