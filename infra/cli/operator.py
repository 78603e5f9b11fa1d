"""What people say to a running pipeline: stop, hold, release, standby, policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from events.clock import NS
from events.envelope import Fact
from events.job import HoldPlaced, HoldReleased, Place, StandbyAdded, StopRequested
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
    put,
    run,
    say,
    show_json,
    with_bus,
)
from infra.cli.status import bus_now_ns
from infra.cli.topology import declared_topology
from infra.jetstream import JetStreamLog
from infra.pipeline import adopt, default_policy_text
from infra.pipeline import say as tell
from infra.watch import Watch
from processors import policy as policies
from processors.fleet import Fleet
from processors.state import usable_standbys

#: Ten years: what lies beyond it has no time that an event can hold.
HOLD_MINUTES_MAX = 10 * 366 * 24 * 60.0

Reason = Annotated[str, typer.Option("--reason", help="Why; it is recorded with your name")]


async def told(nc: BusClient) -> Watch:
    """All that the ledger tells."""
    watch = Watch()
    async for record in JetStreamLog(nc, LEDGER).read():
        watch.ledger(record)
    return watch


async def known(nc: BusClient) -> Fleet:
    """The fleet as the ledger has it."""
    return (await told(nc)).fleet


def one_job(fleet: Fleet, job: str) -> str:
    """The job that is meant: the one named, or the only one there is. Raises Refused."""
    if job:
        if job not in fleet.jobs:
            there = ", ".join(fleet.jobs) or "none"
            raise Refused(f"there is no job {job}; declared are: {there}")
        return job
    running = [name for name, value in fleet.jobs.items() if value.wanted == "running"] or list(fleet.jobs)
    if len(running) != 1:
        raise Refused(f"name the job: {', '.join(running) or 'none is declared; start one with `keepstep run`'}")
    return running[0]


def _speak(
    home: Path | None, url: str, key: str, as_json: bool, make_fact: Callable[[str], Fact], job: str, said: str, *,
    fleet_wide: bool = False, check: Callable[[Fleet, str], None] = lambda fleet, name: None, lasts_s: float = 0,
) -> None:  # fmt: skip
    """Records a person's word. `said`: what it is, with {of} for the job, or the fleet, that it turned out to be of. `lasts_s`: after
    which it ends by itself, by the broker's clock (this host's may be hours off)."""

    async def work(nc: BusClient) -> tuple[str, str]:
        fleet = await known(nc)
        name = "" if fleet_wide and not job else one_job(fleet, job)
        check(fleet, name)
        text = said.format(of=f"job {name}" if name else "the whole fleet")
        fact = make_fact(name)
        if lasts_s:
            fact = fact.model_copy(update={"expires_ns": await bus_now_ns(nc) + int(lasts_s * NS)})
        return await tell(JetStreamLog(nc, LEDGER), fact, name), text

    event, text = run(with_bus(address(home, url, key), "operator", work))
    show_recorded(event, text, as_json)


def show_recorded(event: str, text: str, as_json: bool) -> None:
    show_json({"event": event, "said": text}) if as_json else say(f"{text}; recorded as {event}")


def _plain(text: str) -> str:
    """Of a name that goes into a pattern."""
    return text.replace("{", "{{").replace("}", "}}")


def held(fleet: Fleet, name: str) -> None:
    """Raises Refused if there is no hold to release there; what stands elsewhere would stand on unseen."""
    if name not in fleet.holds:
        there = " and ".join(f"job {job}" if job else "the whole fleet" for job in fleet.holds)
        where = f"job {name}" if name else "the whole fleet"
        raise Refused(f"no hold stands on {where}" + (f"; one stands on {there}" if there else ""))


def free(place: Place, fleet: Fleet, name: str) -> None:
    """Raises Refused for a spare that is at work, or a spare already, or by its serial number a machine that was evicted: the decider would
    not count on it."""
    node = place.node
    if place.serial and place.serial in fleet.bad_serials:
        was = fleet.bad_serials[place.serial]
        raise Refused(
            f"the machine of serial number {place.serial} was evicted, as {was}; {node} is no standby while that stands"
        )
    for job in fleet.jobs.values():
        if job.wanted == "running" and node in job.by_node:
            if node in job.evicted:
                raise Refused(f"{node} was evicted from job {job.name}, and its place waits for another machine")
            raise Refused(f"{node} is at work in job {job.name} already")
        if job.name == name and node in {spare.node for spare in usable_standbys(fleet, job)}:
            raise Refused(f"{node} is a standby of job {job.name} already")


def register(app: typer.Typer) -> None:
    @app.command()
    def stop(
        reason: Reason, job: Annotated[str, typer.Argument()] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Stop a job by plan. It stays down until `keepstep restart`."""
        _speak(home, url, key, json, lambda name: StopRequested(job=name, reason=reason, author=author()), job, "stop of {of}")

    @app.command()
    def hold(
        reason: Reason, job: Annotated[str, typer.Argument(help="One job; without it the whole fleet")] = "",
        minutes: Annotated[float, typer.Option("--for", min=0, max=HOLD_MINUTES_MAX, help="Minutes until it ends by itself; 0: until released")] = 0,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Kill switch: from now on no action starts, for the fleet or for one job. Decisions are still made, and recorded as held."""
        ends = f", for {minutes:g} min" if minutes else ", until it is released"
        _speak(
            home, url, key, json, lambda name: HoldPlaced(job=name, reason=reason, author=author()), job,
            "hold on {of}" + ends, fleet_wide=True, lasts_s=minutes * 60,
        )  # fmt: skip

    @app.command()
    def release(
        reason: Reason, job: Annotated[str, typer.Argument(help="One job; without it the whole fleet")] = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Release a hold. What was held is decided again, by what is known now."""
        _speak(
            home, url, key, json, lambda name: HoldReleased(job=name, reason=reason, author=author()), job,
            "release of the hold on {of}", fleet_wide=True, check=held,
        )  # fmt: skip

    @app.command()
    def standby(
        node: str, job: Annotated[str, typer.Option("--job")] = "", rack: str = "", switch: str = "", serial: str = "",
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Add a spare machine to a job's standbys. One whose serial number was evicted before is not used."""
        where = run(with_bus(address(home, url, key), "operator", declared_topology))
        place = Place(node=node, rack=rack, switch=switch, serial=serial)
        place = where.fill(place) if where else place
        _speak(
            home, url, key, json, lambda name: StandbyAdded(job=name, place=place, author=author()), job,
            f"standby {_plain(node)} of {{of}}", check=partial(free, place),
        )  # fmt: skip

    policy_app = typer.Typer(help="Show, check or adopt the policy.", no_args_is_help=True)
    app.add_typer(policy_app, name="policy")

    @policy_app.command("show")
    def policy_show(
        default: Annotated[bool, typer.Option(help="The default policy, with its sources")] = False,
        home: HomeOption = None,
        url: UrlOption = "",
        key: KeyOption = "",
        json: JsonOption = False,
    ) -> None:
        """Print the policy in force."""

        def show(text: str) -> None:  # as it is: it may be adopted again
            show_json({"digest": policies.digest(text), "text": text}) if json else sys.stdout.write(text)

        if default:
            show(default_policy_text())
            return
        from events.job import PolicyAdopted
        from infra.pipeline import last_said

        async def work(nc: BusClient) -> str:
            found = await last_said(JetStreamLog(nc, LEDGER), PolicyAdopted)
            return found.text if found else default_policy_text()

        show(run(with_bus(address(home, url, key), "observer", work)))

    @policy_app.command("check")
    def policy_check(file: Path, json: JsonOption = False) -> None:
        """Say whether a policy file is valid, and its digest."""
        text = read_policy(file)
        policies.parse(text)
        show_json({"digest": policies.digest(text)}) if json else put(f"valid, digest {policies.digest(text)}")

    @policy_app.command("adopt")
    def policy_adopt(
        file: Path, home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False
    ) -> None:
        """Put a policy file into force. Decisions made before stand under the old one."""
        text = read_policy(file)

        async def work(nc: BusClient) -> bool:
            return await adopt(nc, text, author())

        new = run(with_bus(address(home, url, key), "operator", work))
        digest = policies.digest(text)
        show_json({"digest": digest, "new": new}) if json else say(
            f"policy {digest} is in force" + ("" if new else ", as it was")
        )


def read_policy(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"the policy {file} cannot be read: {error.strerror if isinstance(error, OSError) else 'it is not UTF-8'}"
        ) from None
