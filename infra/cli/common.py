"""What all commands share: the home and the bus, printing as a table or as JSON, and errors as one sentence."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from nats.errors import Error as NatsError
from rich.console import Console

from events.ports import LogError, Record
from events.registry import Malformed
from events.subjects import BadName
from infra.bus import BusClient
from infra.embedded import EmbeddedError
from infra.home import Address, Home
from infra.keys import KeyProblem, UnsafeListen
from infra.notify_settings import BadNotify
from infra.streams import StreamProblem
from infra.supervise import ChildFailed
from processors.policy import BadPolicy

FINE, FOUND, WRONG_USE = 0, 1, 2

#: A file or pipe has no width to fit into: tables stay whole there. What is printed is data: no markup, and no emoji (`0000:ab:00.0`).
console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 180)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

T = TypeVar("T")

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Where keepstep keeps its state [default: $KEEPSTEP_HOME or ~/.local/state/keepstep]"),
]
UrlOption = Annotated[
    str, typer.Option("--url", envvar="KEEPSTEP_URL", help="The bus, when it is not the embedded one of this home")
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--key", envvar="KEEPSTEP_KEY", help="Seed file for --url, as `keepstep keys` writes it; {user} stands for the role"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


class Refused(Exception):
    """A command that cannot be carried out as given. One sentence that says what to do."""


#: Errors whose text is meant for the user.
SAID = (
    Refused, EmbeddedError, StreamProblem, BadPolicy, ChildFailed, LogError, KeyProblem, UnsafeListen, BadName, Malformed,
    BadNotify,
)  # fmt: skip


def address(home: Path | None, url: str = "", key: str = "") -> Address:
    return Address(Home.default(home), url, key)


def author() -> str:
    try:
        return os.environ.get("KEEPSTEP_AUTHOR") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def show_json(value: Any) -> None:
    """One JSON value on standard output, as it is: no wrapping, no markup."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def put(text: str) -> None:
    """A line of the result for people. It stays one line, whatever its length: a reader at a pipe counts on it."""
    console.print(text, soft_wrap=True)


def say(text: str) -> None:
    """A line for people, on standard error, so that standard output stays the result's."""
    errors.print(clean(text))


def clean(text: str) -> str:
    """Text that may come from anywhere, without what a terminal would act on."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def with_bus(where: Address, user: str, work: Callable[[BusClient], Coroutine[Any, Any, T]]) -> T:
    """Raises Refused if the key that was given is not this user's, which the server tells as one refusal after another."""
    nc = await where.connect(user)
    try:
        return await work(nc)
    except (LogError, NatsError):
        check_key(nc, user)
        raise
    finally:
        await nc.close()


def check_key(nc: BusClient, user: str) -> None:
    """Raises Refused if the server said that this key may not do what the user's may."""
    if said := nc.not_permitted():
        raise Refused(f"this key is not the {user}'s ({said}); name that with --key") from None


def records_of(path: Path, stream: str, on_loss: Callable[[str], None]) -> Iterable[Record]:
    """A recorded stream: the file itself, or a folder that holds it. Raises Refused if there is none."""
    from infra.recording import read_stream

    try:
        return read_stream(path, stream, on_loss)
    except OSError as error:
        raise Refused(
            f"{path} holds no recording of {stream} ({error.strerror or error}); give the folder that `keepstep demo` or `keepstep record` left"
        ) from None
