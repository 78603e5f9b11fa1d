"""What is said while something runs: a job until it ends, and parts of ours that end unasked."""

from __future__ import annotations

from contextlib import aclosing

from events.action import OutcomeRecorded
from events.decision import DecisionMade
from events.ports import LEDGER
from infra.bus import BusClient
from infra.cli.common import FINE, FOUND, clean, put, say, show_json
from infra.jetstream import JetStreamLog
from infra.supervise import Child, last_line
from infra.watch import Watch


def told_restart(child: Child, code: int) -> None:
    """A part that ended unasked and is started again: the first time, and each time that it was twice as often."""
    times = child.restarts + 1
    if times & (times - 1) == 0:
        again = f", {times} times by now" if times > 1 else ""
        say(f"{child.name} ended ({code}{again}) and is started again: {last_line(child.log)}")


def shortened(text: str, most: int = 400) -> str:
    """A text's beginning and end: the last line of a traceback is the one that says why."""
    return text if len(text) <= most else f"{text[: most // 4]} … {text[-(most - most // 4) :]}"


async def follow_job(nc: BusClient, job: str, after: int, as_json: bool = False) -> int:
    """Says what happens to a job until it finishes or is stopped: 0 finished, 1 anything else."""
    watch = Watch()
    async with aclosing(JetStreamLog(nc, LEDGER).read(follow=True)) as records:  # type: ignore[type-var]
        async for record in records:
            event = watch.ledger(record)
            if event is None or record.sequence <= after or event.job != job:
                continue
            data = event.data
            kind = data.kind()
            if kind == "progress_noted":
                say(f"attempt {event.attempt}: step {data.step}" + (" (healthy)" if data.first else ""))
            elif kind == "signal":
                say(f"seen: {data.symptom} {data.node}: {shortened(clean(data.evidence))}")
            elif isinstance(data, DecisionMade):
                would = "would " if data.mode == "observe" else ""
                say(f"decided ({data.mode}): {would}{data.rung} {' '.join(data.nodes)}: {data.because}")
            elif isinstance(data, OutcomeRecorded) and data.result != "done":
                say(f"{data.verb}: {data.result}: {clean(data.detail)[:300]}")
            elif kind == "incident_closed":
                say(f"incident {data.incident} closed: {data.outcome} by {data.mechanism}")
            elif kind == "job_finished":
                found = {"job": job, "outcome": "finished", "step": data.step}
                show_json(found) if as_json else put(f"job {job} finished at step {data.step}")
                return FINE
            elif kind == "stop_requested":
                say(f"job {job} is stopped by {data.author}: {data.reason}")
                if as_json:
                    show_json({"job": job, "outcome": "stopped", "step": watch.fleet.jobs[job].last_step})
                return FOUND
    return FOUND
