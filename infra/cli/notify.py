"""keepstep notify: whether a file that says where pages go can be used, and a trial page over each of its channels."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from actuators.notify import Message, Sent
from infra.cli.common import FINE, FOUND, JsonOption, author, clean, put, run, show_json
from infra.clock import new_event_id, wall_ns
from infra.notify_settings import channels_of, load


def register(app: typer.Typer) -> None:
    @app.command()
    def notify(
        file: Annotated[Path, typer.Argument(help="The file, as `keepstep up --notify` takes it")],
        send: Annotated[bool, typer.Option("--send", help="Send a trial page over each channel")] = False,
        json: JsonOption = False,
    ) -> None:
        """Check where pages go. With --send, a trial page is sent over each channel; exits with 1 if one of them reached nobody."""
        channels = channels_of(load(file))
        now_ns = wall_ns()
        message = Message(
            key=new_event_id(), job="trial", issued_ns=now_ns, runbook="handed-over", over_ns=now_ns,
            text=f"a trial page, sent by {author()}: nothing is wrong",
        )  # fmt: skip

        async def work() -> list[Sent]:
            return await asyncio.gather(*(channel.send(message, now_ns) for channel in channels))

        said = run(work()) if send else [Sent(True, "not tried; --send sends a trial page")] * len(channels)
        found = [{"channel": c.name, "ok": s.ok, "detail": s.detail} for c, s in zip(channels, said, strict=True)]
        if json:
            show_json({"channels": found})
        else:
            for one in found:
                put(clean(f"{one['channel']}: {one['detail']}"))
            if not found:
                put("the file names no channel: pages are written to the actuators' log only")
        raise typer.Exit(FINE if all(s.ok for s in said) else FOUND)
