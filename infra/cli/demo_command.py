"""`keepstep demo`: the live view and the table at its end."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE
from infra.cli.common import FINE, FOUND, JsonOption, clean, console, errors, put, run, say, show_json
from infra.cli.operate import until_signal
from infra.cli.reading import read_streams, replay_all, show_replay
from infra.demo import JOB, Demo, DemoFailed, Score
from infra.demo_full import FullDemo
from infra.home import Address, Home
from infra.wall_time import bins
from processors.ettr import split

SPARKS = "▁▂▃▄▅▆▇█"


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        out: Annotated[Path | None, typer.Option("--out", help="Where the demo keeps its state and leaves its recording [default: a new folder in the temporary one]")] = None,
        real_kmsg: Annotated[bool, typer.Option("--real-kmsg", help="Write the GPU's loss into this machine's own kernel ring (root)")] = False,
        full: Annotated[bool, typer.Option("--full", help="The whole ladder: hangs, a slow node, bad revisions, wrong numbers (3 to 8 minutes; needs git)")] = False,
        json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Break a real training job, one fault after another, and watch it come back. Exits with 1 if any fault was not handled as the policy says."""
        home = Home((out or Path(tempfile.mkdtemp(prefix="keepstep-demo-"))).absolute())
        raise typer.Exit(run(play(FullDemo(home, real_kmsg) if full else Demo(home, real_kmsg), json)))


async def play(demo: Demo, as_json: bool) -> int:
    home = demo.home
    stop = until_signal(demo.end_ranks)
    live = (
        Live(console=errors, refresh_per_second=4, get_renderable=lambda: view(demo))
        if errors.is_terminal and not as_json
        else None
    )
    if live is None:
        _narrate(demo)
    problem = ""
    try:
        if live is not None:
            live.start()
        work = asyncio.create_task(demo.run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            problem = "it was stopped"
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        else:
            stopped.cancel()
            try:
                work.result()
            except DemoFailed as error:
                problem = str(error)
    finally:
        await asyncio.shield(demo.close())
        if live is not None:
            live.stop()
    replayed: dict[str, Any] = {}
    if (demo.recording / f"{LEDGER}.jsonl.zst").exists():
        say("replaying the recording")
        found = await asyncio.to_thread(read_streams, Address(home), demo.recording, (LEDGER, TELEMETRY_NODE, TELEMETRY_JOB))
        ledger = found.pop(LEDGER)
        replayed = await asyncio.to_thread(replay_all, ledger, found)
    return finish(demo, replayed, problem, as_json)


def finish(demo: Demo, replayed: dict[str, Any], problem: str, as_json: bool) -> int:
    missed = [f"{score.fault}: {score.missed}" for score in demo.scores if score.missed]
    if problem:
        missed.append(problem)
    if not replayed and not problem:
        missed.append("nothing was recorded, so that nothing could be replayed")
    if replayed and not replayed["identical"]:
        missed.append("the replay is not identical")
    unseen = [f"{stream} ({stage['why']})" for stream, stage in replayed.get("signals", {}).items() if not stage["checked"]]
    if unseen:
        missed.append(f"not all was replayed: {', '.join(unseen)}")
    if as_json:
        show_json(
            {
                "scores": [asdict(score) for score in demo.scores],
                "wall_time_s": wall_time(demo),
                "replay": replayed,
                "recording": str(demo.recording),
                "missed": missed,
            }
        )
    else:
        console.print(score_table(demo.scores))
        bins = wall_time(demo)
        total = sum(bins.values()) or 1.0
        put("wall time: " + ", ".join(f"{name} {value:.1f} s ({100 * value / total:.1f}%)" for name, value in bins.items()))
        if replayed:
            show_replay(replayed)
        put(f"recording: {demo.recording}  (keepstep explain INCIDENT {demo.recording}; keepstep census {demo.recording})")
        for line in missed:
            put(f"NOT AS IT SHOULD BE: {clean(line)}")
    return FOUND if missed else FINE


def wall_time(demo: Demo) -> dict[str, float]:
    """Seconds of the job's wall time by bin; they sum to the whole."""
    wall = demo.watch.walls.get(JOB)
    return bins(split(wall)) if wall is not None else {}


def score_table(scores: list[Score]) -> Table:
    table = Table("fault", "detected after", "decided", "mechanism", "back at work after", "steps lost", "")
    for s in scores:
        state = Text("…") if not s.done else (Text(f"✗ {s.missed}", "bold red") if s.missed else Text("✓", "green"))
        decided = f"{s.decided} ({s.decided_s:.2f} s)" if s.decided_s is not None else s.decided
        table.add_row(
            s.fault,
            _s(s.detected_s),
            decided,
            s.mechanism,
            _s(s.back_s),
            "" if s.steps_lost is None else str(s.steps_lost),
            state,
        )
    return table


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def view(demo: Demo) -> Group:
    """The live view: the job, its loss, each fault so far, and the incident that is open."""
    job = demo.watch.fleet.jobs.get(JOB)
    training = demo.watch.jobs.get(JOB)
    head = Table.grid(padding=(0, 3))
    if training is not None and job is not None:
        wall = demo.watch.walls.get(JOB)
        ettr = split(wall, demo.watch.now_ns).ettr if wall is not None else None
        head.add_row(
            f"attempt {training.attempt}", f"step {training.step}", training.phase,
            f"loss {training.loss:.3f}" if training.loss is not None else "", spark(training.losses[-40:]),
            f"ETTR {100 * ettr:.1f}%" if ettr is not None else "", "nodes " + " ".join(p.node for p in job.places),
        )  # fmt: skip
    parts: list[Any] = [Panel(head, title=f"keepstep demo: {demo.phase}"), score_table(demo.scores)]
    for story in demo.watch.open_incidents():
        lines = [f"{story.symptom} on attempt {story.attempt}, {story.evidence} pieces of evidence"]
        lines += [f"decided: {d.rung} {' '.join(d.nodes)}: {d.because}" for d in story.decisions]
        parts.append(Panel(Text(clean("\n".join(lines))), title=f"incident {story.id[:8]} (epoch {story.epoch})"))
    return Group(*parts)


def spark(values: list[float]) -> str:
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    return "".join(SPARKS[int((v - low) / (high - low or 1) * (len(SPARKS) - 1))] for v in finite)


def _narrate(demo: Demo) -> None:
    """Without a terminal: a line when something changes."""
    said: dict[str, Any] = {"phase": "", "done": 0, "incidents": set()}

    def changed() -> None:
        if demo.phase != said["phase"]:
            said["phase"] = demo.phase
            say(f"[step {demo.step()}] {demo.phase}")
        for story in demo.watch.incidents.values():
            if story.decisions and (story.id, len(story.decisions)) not in said["incidents"]:
                said["incidents"].add((story.id, len(story.decisions)))
                last = story.decisions[-1]
                say(f"  incident {story.id[:8]}: {story.symptom}: {last.rung} {' '.join(last.nodes)} — {last.because}")
            if story.closed and (story.id, "closed") not in said["incidents"]:
                said["incidents"].add((story.id, "closed"))
                say(f"  incident {story.id[:8]}: {story.closed.outcome} by {story.closed.mechanism}")

    demo.on_change = changed
