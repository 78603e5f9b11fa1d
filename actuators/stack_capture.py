"""The stacks of a node's training processes and of their children, through py-spy, and the flight recordings that they left.

Each process has a deadline, and so have all of them together: what is not read by then is told as not read, since a hang is no time
to wait. A process that does not run (state T) or sleeps where no signal reaches it (D) is read without suspending it, which tells its
Python frames only; py-spy can't suspend it, and would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat as stat_module
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actuators import flight_recorder, py_spy
from actuators.flight_recorder import BadDump
from actuators.processes import Process, descendants, send_exact, stat, state_of
from actuators.py_spy import BadStacks
from events.envelope import NAME_MAX
from events.finding import ProcessStack

EACH_S, TOGETHER_S = 10.0, 25.0
OUTPUT_BYTES_MAX = 16 << 20
#: The bus takes messages of 1 MiB; the envelope and the other fields need little of the rest.
ANSWER_BYTES_MAX = 768 << 10
#: Of one rank so many children are read; a data loader with more has them all at the same place.
CHILDREN_MAX = 64
#: A rank whose recorder listens on a pipe is asked for a dump, and has this long to write it.
DUMP_S = 2.0
NOT_ALLOWED = "py-spy may not read this process; run the agent as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope to 0 for its own user's"
NO_PY_SPY = "there is no py-spy in the agent's environment; install it there (pip install py-spy)"
NOT_STARTED = "py-spy can't be started"
#: How the interpreter is told to read: with native frames, without, and without suspending the process.
_WAYS = (("--native",), (), ("--nonblocking",))
_NOT_SUSPENDED = "TtD"
_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@dataclass(frozen=True, slots=True)
class Target:
    """A rank's own process."""

    rank: int
    process: Process


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


async def capture(
    targets: Sequence[Target],
    *,
    each_s: float = EACH_S,
    together_s: float = TOGETHER_S,
    program: str | None = None,
    native: bool = True,
) -> list[ProcessStack]:
    """One for each process that is there, ranks before their children. Never raises for one that can't be read: it says why."""
    program = program or find_py_spy()
    end = asyncio.get_running_loop().time() + together_s
    recordings: dict[int, dict[str, Any]] = {}
    # Beside the stacks: a large dump takes its time, and a thread can't be ended. What is read by then counts.
    recording = asyncio.create_task(asyncio.to_thread(_recordings, targets, recordings, end))
    trees = await asyncio.to_thread(_trees, targets)
    turns = asyncio.Semaphore(max(2, min(8, os.cpu_count() or 2)))

    async def one(target: Target, process: Process) -> ProcessStack:
        async with turns:
            return await _read(program, target, process, each_s, end, native)

    children = [(target, child) for target in targets for child in trees[target.rank]]
    read = await asyncio.gather(
        *(one(target, target.process) for target in targets), *(one(target, child) for target, child in children)
    )
    await asyncio.wait([recording], timeout=max(0.0, end - asyncio.get_running_loop().time()))
    if recording.done():
        recording.result()
    recordings = dict(recordings)
    return [
        process.model_copy(update=recordings.get(process.rank, {})) if at < len(targets) else process
        for at, process in enumerate(read)
    ]


def _trees(targets: Sequence[Target]) -> dict[int, list[Process]]:
    return {target.rank: descendants([target.process])[:CHILDREN_MAX] for target in targets}


async def _read(program: str | None, target: Target, process: Process, each_s: float, end: float, native: bool) -> ProcessStack:
    loop = asyncio.get_running_loop()
    seen = stat(process.pid)
    state = state_of(process)
    about: dict[str, Any] = {"parent_pid": seen.parent if seen else 0, "state": state, "command": _command(process.pid)}
    error, unread = NO_PY_SPY if program is None else "", program is None
    deadline = min(end, loop.time() + each_s)
    ways = _WAYS[2:] if state in _NOT_SUSPENDED else _WAYS if native else _WAYS[1:]
    for way in ways if program is not None and state not in "-ZX" else ():
        left_s = deadline - loop.time()
        if left_s <= 0:
            error, unread = error or "there was no time left to read it", not error
            break
        # Half of what is left, so that a way which hangs leaves time for the next.
        code, out, said = await _run([program, "dump", "--json", *way, "--pid", str(process.pid)], left_s / (2 if way != ways[-1] else 1))  # type: ignore[list-item]  # fmt: skip
        _let_go(process, state)
        if code == 0:
            try:
                found = py_spy.processes(out, target.rank, pid=process.pid, **about)
                return next(made for made in found if made.pid == process.pid)
            except (BadStacks, StopIteration) as bad:
                error = f"py-spy's answer was not read: {bad}"
        elif "ermission" in said or "EPERM" in said:
            error, unread = NOT_ALLOWED, True
            break
        else:
            error, unread = said, said.startswith(NOT_STARTED)
    return ProcessStack(rank=target.rank, pid=process.pid, error=error[:1024], unread=unread, **about)


async def _run(command: list[str], within_s: float) -> tuple[int, bytes, str]:
    """Exit code, output, and what it said in one line. It is killed when its time is over."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return 1, b"", f"{NOT_STARTED} ({error.strerror})"
    assert child.stdout is not None and child.stderr is not None
    try:
        async with asyncio.timeout(within_s):
            out, said, code = await asyncio.gather(
                _bounded(child.stdout, OUTPUT_BYTES_MAX), _bounded(child.stderr, 64 << 10), child.wait()
            )
        return code, out, _one_line(said.decode("utf-8", "replace"))
    except TimeoutError:
        return 1, b"", f"py-spy gave no answer within {within_s:.1f} s"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _bounded(stream: asyncio.StreamReader, limit: int) -> bytes:
    """To its end; what is beyond the limit is read and dropped."""
    kept = bytearray()
    while piece := await stream.read(1 << 16):
        kept += piece[: max(0, limit - len(kept))]
    return bytes(kept)


def _one_line(said: str) -> str:
    """py-spy's error and its cause, without its own backtrace."""
    lines = [line.strip() for line in said.split("Stack backtrace:")[0].splitlines() if line.strip()]
    return ": ".join(line for line in lines if line != "Caused by:")[:500] or "py-spy said nothing"


def _let_go(process: Process, before: str) -> None:
    """A py-spy that was killed while it held the process may leave it stopped; that must not be our doing."""
    if before not in "Tt" and state_of(process) == "T":
        send_exact(process, signal.SIGCONT)


def _command(pid: int) -> str:
    """Program and script; the other arguments may hold secrets."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:65536].decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    return " ".join(filter(None, (os.path.basename(words[0]), os.path.basename(script))))[:NAME_MAX]


async def captured(targets: Sequence[Target], within_s: float, native: bool = True) -> tuple[str, dict[str, Any]]:
    """For an answer to the command `stacks`: a sentence, and the stacks, within what the bus takes of one message. `within_s` 0: the
    usual deadline."""
    together_s = min(TOGETHER_S, within_s) if within_s else TOGETHER_S
    kept, left_out = fitted(
        await capture(targets, each_s=min(EACH_S, together_s), together_s=together_s, native=native), ANSWER_BYTES_MAX
    )
    unread = [process for process in kept if process.error]
    said = [f"{len(kept) - len(unread)} of {len(kept)} processes of {len(targets)} ranks read"]
    said += [f"{why} ({count})" for why, count in Counter(process.error for process in unread).most_common(3)]
    return "; ".join([*said, left_out] if left_out else said), {"stacks": tuple(kept)}


# Flight recordings


def _recordings(targets: Iterable[Target], found: dict[int, dict[str, Any]], until_s: float) -> None:
    """Into `found`: of each rank the newest dump that its present process can have written. `until_s`: on the monotonic clock."""
    asked_ns = time.time_ns()
    waiting = {target.rank for target in targets if _ask(target)}
    end_s = min(until_s, time.monotonic() + DUMP_S)
    looked_ns: dict[int, int] = {}
    while True:
        for target in targets:
            file, written_ns = _newest(target)
            if file is None or written_ns <= looked_ns.get(target.rank, 0) or time.monotonic() > until_s:
                continue
            try:
                found[target.rank] = flight_recorder.recording(flight_recorder.load(file)).fields()
            except (BadDump, OSError):
                continue  # still being written, or no dump
            looked_ns[target.rank] = written_ns
            if written_ns >= asked_ns:
                waiting.discard(target.rank)
        if not waiting or time.monotonic() >= end_s:
            return
        time.sleep(0.1)


def _settings(target: Target) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{target.process.pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in raw.split(b"\0"))
    return {name: value for name, _, value in pairs if name.startswith("TORCH_") or name in ("HOME", "XDG_CACHE_HOME")}


def _seen_by(target: Target, path: str) -> Path:
    """A path as the process sees it, in its container."""
    base = f"/proc/{target.process.pid}/{'root' if path.startswith('/') else 'cwd'}"
    return Path(base) / path.lstrip("/")


def _ask(target: Target) -> bool:
    """A recorder that was given TORCH_NCCL_DEBUG_INFO_PIPE_FILE dumps when its pipe is written to."""
    prefix = _settings(target).get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not prefix:
        return False
    try:
        pipe = os.open(_seen_by(target, f"{prefix}{target.rank}.pipe"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat_module.S_ISFIFO(os.fstat(pipe).st_mode) and os.write(pipe, b"1\n") > 0
    except OSError:
        return False
    finally:
        os.close(pipe)


def _newest(target: Target) -> tuple[Path | None, int]:
    """Not one from before the process: that is an earlier attempt's."""
    settings = _settings(target)
    cache = settings.get("XDG_CACHE_HOME") or f"{settings.get('HOME', '/root')}/.cache"
    told = [settings[name] for name in _RECORDER_FILES if settings.get(name)]
    born_ns = _born_ns(target.process)
    newest: tuple[Path | None, int] = (None, 0)
    for prefix in told or ["/tmp/nccl_trace_rank_", f"{cache}/torch/comm_lib_trace_rank_"]:
        file = _seen_by(target, f"{prefix}{target.rank}")
        try:
            about = file.stat()
        except OSError:
            continue
        if stat_module.S_ISREG(about.st_mode) and about.st_mtime_ns >= max(born_ns, newest[1]):
            newest = (file, about.st_mtime_ns)
    return newest


def _born_ns(process: Process) -> int:
    """When the process started, to the clock's tick; late for one that is gone, so that nothing is taken for its own."""
    try:
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time_ns()
    return time.time_ns() - int((up_s - process.start_time / os.sysconf("SC_CLK_TCK")) * 1e9) - 10**7


# What goes over the bus


def fitted(processes: Sequence[ProcessStack], bytes_max: int) -> tuple[list[ProcessStack], str]:
    """The same within a message's size, by leaving out what tells least, as `_LESS` has it; and a sentence if anything was left out."""
    kept, said = list(processes), ""
    pids = {process.pid for process in processes}
    for what, of_children_only, less in _LESS:
        if sum(len(process.model_dump_json()) + 1 for process in kept) <= bytes_max:
            break
        kept = [process if of_children_only and process.parent_pid not in pids else less(process) for process in kept]
        said = f"left out for the message's size: {what}"
    return kept, said


def _shortened(process: ProcessStack) -> ProcessStack:
    short = []
    for thread in process.threads:
        frames = thread.split(";")
        short.append(";".join([*frames[:4], py_spy.CUT, *frames[-12:]] if len(frames) > 16 else frames)[:2000])
    return process.model_copy(update={"threads": tuple(short)})


def _emptied(process: ProcessStack) -> ProcessStack:
    if not process.threads and not process.recorded:
        return process
    why = "its stack was left out for the message's size"
    return process.model_copy(
        update={"threads": (), "groups": (), "pending": (), "recorded": False, "error": why, "unread": True}
    )


#: In this order: what it is called, whether ranks' own processes are spared, and what becomes of one.
_LESS: tuple[tuple[str, bool, Callable[[ProcessStack], ProcessStack]], ...] = (
    ("threads beside the main one", False, lambda process: process.model_copy(update={"threads": process.threads[:1]})),
    ("operations behind the first eight", False, lambda process: process.model_copy(update={"pending": process.pending[:8]})),
    ("the middle of long stacks", False, _shortened),
    ("children's stacks", True, _emptied),
    ("all stacks", False, _emptied),
)
