"""The command line's frame: the commands by name, and what happens to an error on its way to a person."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from typing import NoReturn

import typer
from nats.errors import Error as NatsError
from pydantic import ValidationError
from typer.exceptions import TyperException

from infra.cli import (
    classify,
    demo_command,
    diagnose_command,
    doctor_command,
    grouptest,
    notify,
    operate,
    operator,
    people,
    reading,
    restart,
    setup,
    shadow,
    spares,
    stacks,
    status,
    topology,
)
from infra.cli.common import FINE, SAID, WRONG_USE, clean, errors

app = typer.Typer(
    name="keepstep",
    help="Keeps a large training run moving: watches it, decides what to do about its failures, and does it; every decision can be replayed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for module in (
    demo_command,
    operate,
    restart,
    operator,
    people,
    reading,
    status,
    setup,
    topology,
    classify,
    diagnose_command,
    doctor_command,
    grouptest,
    stacks,
    notify,
    shadow,
    spares,
):
    module.register(app)


def main() -> None:
    """Runs the command line. Errors come out as one sentence: 0 fine, 1 found something, 2 wrong use or cannot be done."""
    try:
        sys.exit(app(prog_name="keepstep", standalone_mode=False) or FINE)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "keepstep"
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        errors.print(f"{where}: {clean(said)} (see {where} --help)")
        sys.exit(WRONG_USE)
    except SAID as error:
        errors.print(f"keepstep: {_one_line(str(error))}")
        sys.exit(WRONG_USE)
    except ValidationError as error:  # a word of the user's that no event can hold
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        errors.print(f"keepstep: {'.'.join(map(str, found['loc']))}: {clean(found['msg'])}")
        sys.exit(WRONG_USE)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("keepstep: stopped")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except NatsError as error:
        said = getattr(error, "description", None) or str(error).removeprefix("nats: ") or type(error).__name__
        errors.print(f"keepstep: the bus could not do it: {clean(said)[:300]}; see its server log, and the room on its disk")
        sys.exit(WRONG_USE)
    except OSError as error:
        if not error.strerror or not (error.filename or error.errno in NO_ROOM):
            _own_fault(error)
        place = f"{clean(str(error.filename))[:200]}: " if error.filename else ""
        errors.print(f"keepstep: {place}{error.strerror}; it can't go on like this")
        sys.exit(WRONG_USE)
    except Exception as error:
        _own_fault(error)


def _one_line(text: str) -> str:
    """A sentence stays one line: what it quotes (a library's words, a name) may have more."""
    return clean(" ".join(line.strip() for line in text.splitlines() if line.strip()))


#: Errors of the system that name no file: the disk or the quota is full, the file too large, too many are open.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)


def _own_fault(error: Exception) -> NoReturn:
    errors.print(f"keepstep met a fault of its own: {clean(repr(error))[:300]}; the trace is in {_trace()}")
    sys.exit(WRONG_USE)


def _trace() -> str:
    """Where the trace lies; with no room for it, that."""
    try:
        handle, name = tempfile.mkstemp(prefix="keepstep-fault-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"no file ({error.strerror})"
    return name
