"""What py-spy prints of a process, as stacks of the facts' form: its JSON, and its text as people save it by hand. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from events.envelope import NAME_MAX
from events.finding import ProcessStack

#: A frame's name is cut there (templates of C++ run to thousands of characters), a stack keeps its innermost and outermost frames,
#: a process its main thread and so many others.
NAME_CHARS_MAX, FRAMES_MAX, THREADS_MAX = 160, 64, 16
READ_CHARS_MAX = 8_000
CUT = "… (frames left out)"
_TEMPLATE = re.compile(r"<[^<>]*>")
_TEXT_PROCESS = re.compile(r"Process ([0-9]{1,9}): ?(.*)")
_TEXT_THREAD = re.compile(r"Thread (?:0x)?([0-9A-Fa-f]+) \(([^)]*)\)(?:: \"(.*)\")?")
_LINE = re.compile(r"[0-9]{1,9}")
_TEXT_FRAME = re.compile(r"\s+(.*?) \(([^()]*)\)\s*\Z")


class BadStacks(ValueError):
    """Not what py-spy prints. One sentence."""


def processes(
    raw: bytes, rank: int, *, pid: int = 0, parent_pid: int = 0, state: str = "", command: str = ""
) -> list[ProcessStack]:
    """One ProcessStack for each process in a dump. What is given applies to the process `pid`, or to the only one. Raises BadStacks."""
    text = raw.decode("utf-8", "replace")
    if text.lstrip().startswith("["):
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadStacks(f"it is damaged JSON ({str(error)[:100]})") from None
        return from_threads(told, rank, pid=pid, parent_pid=parent_pid, state=state, command=command)
    if _TEXT_PROCESS.search(text[:10_000]):
        return from_threads(_of_text(text), rank, pid=pid, parent_pid=parent_pid, state=state, command=command)
    raise BadStacks("it is neither py-spy's JSON nor its text")


def from_threads(
    told: Any, rank: int, *, pid: int = 0, parent_pid: int = 0, state: str = "", command: str = ""
) -> list[ProcessStack]:
    """`told`: the list of threads that `py-spy dump --json` prints, those of children (`--subprocesses`) among them."""
    if not isinstance(told, list) or not all(
        isinstance(thread, dict) and isinstance(thread.get("frames"), list) for thread in told
    ):
        raise BadStacks("it is no list of threads with frames")
    by_pid: dict[int, list[dict[str, Any]]] = {}
    for thread in told:
        by_pid.setdefault(_int(thread.get("pid"), pid), []).append(thread)
    made = []
    for own, threads in by_pid.items():
        info = _info(threads)
        mine = own == pid or len(by_pid) == 1
        made.append(
            ProcessStack(
                rank=rank, pid=own, parent_pid=parent_pid if mine else _int(info.get("parent_pid"), 0), state=state if mine else "",
                command=(command if mine and command else str(info.get("command_line") or ""))[:NAME_MAX],
                threads=tuple(filter(None, map(_stack, sorted(threads, key=_main_first))))[:THREADS_MAX],
            )
        )  # fmt: skip
    return made


def _info(threads: list[dict[str, Any]]) -> dict[str, Any]:
    """py-spy's process_info holds the parent's in itself."""
    told = (thread.get("process_info") for thread in threads)
    info: dict[str, Any] = next((info for info in told if isinstance(info, dict)), {})
    parent = info.get("parent")
    return {**info, "parent_pid": parent.get("pid") if isinstance(parent, dict) else 0}


def _main_first(thread: dict[str, Any]) -> tuple[bool, str]:
    """The main thread, then the others by name, so that equal processes are equal."""
    main = thread.get("thread_name") == "MainThread" or (thread.get("os_thread_id") or -1) == thread.get("pid")
    outermost = thread["frames"][-1] if thread["frames"] else {}
    return not (main or (isinstance(outermost, dict) and outermost.get("name") == "<module>")), str(
        thread.get("thread_name") or ""
    )


def _stack(thread: dict[str, Any]) -> str:
    """py-spy gives the innermost frame first."""
    frames = [_frame(frame) for frame in reversed(thread["frames"]) if isinstance(frame, dict)]
    if len(frames) > FRAMES_MAX:
        frames = [*frames[: FRAMES_MAX // 4], CUT, *frames[-(FRAMES_MAX - FRAMES_MAX // 4) :]]
    joined = ";".join(frames)
    return joined if joined.isascii() else joined.encode("utf-8", "replace").decode()  # half a surrogate pair has no bytes


def _frame(frame: dict[str, Any]) -> str:
    name = str(frame.get("name") or "?")
    if len(name) > NAME_CHARS_MAX:  # C++; Python's own <module> and <lambda> are short
        name = name[:READ_CHARS_MAX]  # each pass takes the innermost templates away
        while (bare := _TEMPLATE.sub("", name)) != name:
            name = bare
        name = name[:NAME_CHARS_MAX]
    file = str(frame.get("short_filename") or frame.get("filename") or "")[-NAME_CHARS_MAX:]
    line = _int(frame.get("line"), 0)
    where = f" ({file}:{line})" if line else f" ({file})" if file else ""
    return (name + where).replace(";", ",")


def _int(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _of_text(text: str) -> list[dict[str, Any]]:
    threads: list[dict[str, Any]] = []
    pid, command = 0, ""
    for line in text.splitlines():
        if match := _TEXT_PROCESS.match(line):
            pid, command = int(match[1]), match[2]
        elif match := _TEXT_THREAD.match(line):
            name = match[3] or ""
            info = {"command_line": command}
            threads.append({"pid": pid, "thread_name": name, "frames": [], "process_info": info})
        elif threads and (match := _TEXT_FRAME.match(line)):
            file, _, number = match[2].rpartition(":")
            numbered = _LINE.fullmatch(number) is not None
            threads[-1]["frames"].append(
                {"name": match[1], "short_filename": file if numbered else match[2], "line": int(number) if numbered else 0}
            )
    if not threads:
        raise BadStacks("it names no thread")
    return threads
