"""What is so now: `status`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from events.clock import NS, text_of
from events.ports import LEDGER, TELEMETRY_NODE
from events.registry import Malformed, parse
from events.subjects import NODE, tick
from infra.bus import BusClient
from infra.cli.common import (
    FINE,
    FOUND,
    HomeOption,
    JsonOption,
    KeyOption,
    UrlOption,
    address,
    check_key,
    clean,
    console,
    put,
    run,
    show_json,
    with_bus,
)
from infra.clock import wall_ns
from infra.jetstream import JetStreamLog
from infra.parts import Part, keeps, parts
from infra.waiting import waiting_json
from infra.watch import Watch
from processors.runbooks import runbook_of

#: An agent beats once a second.
HEARD_S_MAX = 5


def register(app: typer.Typer) -> None:
    @app.command()
    def status(home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False) -> None:
        """Jobs, nodes, open incidents and the control plane's parts now. Exits with 1 if an incident is open, a person is called, an agent
        is not heard, or a part is not at work."""
        found = run(with_bus(address(home, url, key), "observer", look))
        _show_json(*found) if json else _show(*found)
        raise typer.Exit(FOUND if is_amiss(*found) else FINE)


async def look(nc: BusClient) -> tuple[Watch, dict[str, int], list[Part]]:
    """LEDGER's fold, node -> seconds since it was heard, and the parts. A bus that keeps nothing is not read."""
    watch, at_work = Watch(), await parts(nc)
    if not keeps(at_work):
        check_key(nc, "observer")
        return watch, {}, at_work
    async for item in JetStreamLog(nc, LEDGER).read():
        watch.ledger(item)
    return watch, await last_heard(nc), at_work


def is_amiss(watch: Watch, heard: dict[str, int], at_work: list[Part]) -> bool:
    return bool(watch.open_incidents() or watch.calls or lost(watch, heard) or any(part.problem for part in at_work))


def lost(watch: Watch, heard: dict[str, int]) -> list[str]:
    """Agents of a job's nodes that are not heard."""
    return [node for node, age in heard.items() if age > HEARD_S_MAX and node in watch.fleet.owners]


async def bus_now_ns(nc: BusClient) -> int:
    """The broker's time, as its tick told it last, within a second. Only a bus that never ticked has this host's."""
    telemetry = JetStreamLog(nc, TELEMETRY_NODE)
    ticks = tick(NODE, "*")
    last = await telemetry.last_sequence(ticks)
    found = [record.time_ns async for record in telemetry.read(after=max(0, last - 1), subjects=(ticks,))]
    return max(found, default=0) or wall_ns()


async def last_heard(nc: BusClient) -> dict[str, int]:
    """node -> seconds since its last heartbeat, by the broker's clock, which ticks each second: this host's may be hours off."""
    js = nc.jetstream()
    from nats.errors import TimeoutError as NatsTimeout
    from nats.js.api import ConsumerConfig, DeliverPolicy

    stored: dict[str, int] = {}
    # In memory: a bus whose disk is full can't make another, and that is when this is asked.
    config = ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT, mem_storage=True, num_replicas=1)
    subscription = await js.subscribe("tn.*.*.heartbeat", stream=TELEMETRY_NODE, ordered_consumer=False, config=config)
    try:
        while True:
            message = await subscription.next_msg(timeout=0.5)
            parts = message.reply.split(".")
            stored_ns = int(parts[-2] if len(parts) == 9 else parts[-3])
            try:
                stored[parse(message.data).subject] = stored_ns
            except Malformed:
                continue
            if message.metadata.num_pending == 0:
                break
    except NatsTimeout:
        pass
    await subscription.unsubscribe()
    now_ns = max((await bus_now_ns(nc), *stored.values()))
    return {node: max(0, now_ns - stored_ns) // NS for node, stored_ns in stored.items()}


def jobs_of(watch: Watch) -> list[dict[str, Any]]:
    return [
        {
            "job": job.name, "wanted": job.wanted, "attempt": job.attempt, "step": job.last_step, "nodes": [p.node for p in job.places],
            "standbys": [p.node for p in job.standbys], "evicted": list(job.evicted), "held": watch.fleet.held(job.name),
            "incident": job.incident.id if job.incident else None, "state": state_of(job, watch.calls.get(job.name, (None, 0))[1]),
            "awaiting": job.plan.decision if job.plan and job.plan.stage == "awaiting" else None,
        }
        for job in watch.fleet.jobs.values()
    ]  # fmt: skip


def incidents_of(watch: Watch) -> list[dict[str, Any]]:
    return [
        {
            "incident": s.id,
            "job": s.job,
            "symptom": s.symptom,
            "since": text_of(s.opened_ns),
            "decided": [d.because for d in s.decisions][-3:],
        }
        for s in watch.open_incidents()
    ]


def _show_json(watch: Watch, heard: dict[str, int], at_work: list[Part]) -> None:
    fleet = watch.fleet
    show_json(
        {
            "policy": fleet.policy_digest,
            "mode": fleet.policy.mode,
            "holds": list(fleet.holds),
            "jobs": jobs_of(watch),
            "incidents": incidents_of(watch),
            "calls": calls_of(watch),
            "waiting": waiting_json(watch),
            "heard_s": heard,
            "parts": [asdict(part) for part in at_work],
        }
    )


def _show(watch: Watch, heard: dict[str, int], at_work: list[Part]) -> None:
    if keeps(at_work):
        _show_fleet(watch, heard)
    for part in at_work:
        if part.problem:
            put(f"{part.part}: {clean(part.problem)}  NOT AT WORK")


def _show_fleet(watch: Watch, heard: dict[str, int]) -> None:
    fleet, jobs = watch.fleet, jobs_of(watch)
    put(f"policy {fleet.policy_digest}, mode {fleet.policy.mode}" + (", HOLD stands" if fleet.holds else ""))
    table = Table("job", "state", "attempt", "step", "nodes", "standbys", "evicted")
    for j in jobs:
        cells = (
            j["job"],
            j["state"],
            j["attempt"],
            j["step"],
            *(",".join(j[which]) for which in ("nodes", "standbys", "evicted")),
        )
        table.add_row(*(clean(str(x)) for x in cells))
    console.print(table if jobs else "no job is declared; start one with `keepstep run`")
    not_heard = lost(watch, heard)
    for node, age in sorted(heard.items()):
        put(f"agent {clean(node)}: heard {age} s ago" + ("  NOT HEARD" if node in not_heard else ""))
    for i in incidents_of(watch):
        put(
            f"open incident {i['incident']} of {clean(i['job'])}: {i['symptom']} since {i['since']}; {clean('; '.join(i['decided']))}"
        )
    for call in calls_of(watch):
        put(f"waits for you, job {clean(call['job'])}: {clean(call['because'])}; see: keepstep runbook {call['runbook']}")
    for w in waiting_json(watch):
        out = f" of {', '.join(w['nodes'])}" if w["nodes"] else ""
        put(f"waits for your yes, job {clean(w['job'])}: {w['rung'].replace('_', ' ')}{clean(out)}: {clean(w['because'])}")
        put(f"    {w['approve']}\n    {w['deny']}")


def calls_of(watch: Watch) -> list[dict[str, str]]:
    """What a person was called for outside of any incident, and nobody has seen to."""
    return [
        {"job": made.job, "decision": made.decision, "because": made.because, "runbook": runbook_of(made)}
        for made, _ in watch.calls.values()
    ]


def state_of(job: Any, called_ns: int = 0) -> str:
    """One word or two for where a job stands. `called_ns`: when a person was called for it outside of any incident."""
    if job.wanted != "running":
        return str(job.wanted)
    if job.incident is not None:
        stands = {"": "incident", "handed_over": "handed over", "no_standby": "waits for a standby"}
        return "waits for a standby" if job.incident.lacking else str(stands.get(job.incident.blocked, job.incident.blocked))
    if job.lacking:
        return "waits for a standby"
    if job.plan is not None:
        return "starting"
    return "handed over" if called_ns > job.last_progress_ns else "training"
