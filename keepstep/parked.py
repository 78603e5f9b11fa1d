"""A parked worker: a process of the user's own interpreter that has done what takes long (imported torch, run one step of a small
data-parallel model) and waits, at no cost, to become the user's script.

    python -m keepstep.parked --control-fd N

N is a connected stream socket with one JSON object a line:
    worker -> {"parked": true, "pid": 1, "torch": true, "warm_s": 5.2}
    worker <- {"diagnose": {...}}          any number of times: tests of the machine, run beside it (keepstep._tester)
    worker <- {"go": {"env": {"RANK": "0", ...}, "argv": ["train.py", "--steps", "9"], "cwd": "/home/me"}}
`argv` may begin with "-m", "module"; a null in `env` takes that variable out. From "go" on the process is that of the script run
directly: its arguments, module path, random numbers, traceback and exit code. A channel that closes without "go" ends it with 0.
KEEPSTEP_PARKED_IMPORTS (names, by comma) are imported while it is parked, too.

The device is left alone: which one is this rank's is only said by "go".
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import socket
import sys
import time
import types
from typing import Any

from keepstep import _tester

#: A command line and an environment fit into far less; more is not from us.
LINE_BYTES_MAX = 8 << 20
#: The interpreter's options that stand for themselves, and those that take a word. With others (-E, -I, -c ...) a worker would not
#: find this module, or is no script: started cold. The launcher, which can't import the hook, has the same rule.
_FLAGS = "uBOdqvb"
_FLAGS_WITH_VALUE = ("-W", "-X")


def parked_command(command: list[str]) -> tuple[list[str], list[str]] | None:
    """The interpreter with its flags, and what follows it (script or -m module, with arguments), of a command that runs a Python
    script; None for any other command, which can't be parked. `[*interpreter, "-m", "keepstep.parked", ...]` parks it."""
    if not command or not _is_python(command[0]):
        return None
    at = 1
    while at < len(command):
        word = command[at]
        if word in _FLAGS_WITH_VALUE:
            at += 2
        elif len(word) > 1 and word[0] == "-" and not word[1:].strip(_FLAGS):
            at += 1
        elif word == "-m":
            return (command[:at], command[at:]) if at + 1 < len(command) else None
        elif word.startswith("-") or not word:
            return None
        else:
            return command[:at], command[at:]
    return None


def _is_python(word: str) -> bool:
    name = word.rsplit("/", 1)[-1]
    return name.startswith("python") and all(part.isdigit() for part in name[len("python") :].split(".") if part)


def load() -> bool:
    """Imports what the script will, but for the script. Whether torch is there."""
    for name in filter(None, os.environ.get("KEEPSTEP_PARKED_IMPORTS", "").split(",")):
        try:
            importlib.import_module(name.strip())
        except Exception as error:  # the script will meet it again, and say so itself
            _say(f"could not import {name.strip()} ahead ({type(error).__name__}: {error})")
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        importlib.import_module("torch")
        importlib.import_module("torch.distributed")
    except Exception as error:
        _say(f"could not import torch ahead ({type(error).__name__}: {error})")
    return "torch" in sys.modules


def warm() -> None:
    """Does once what a training script's first step does anyway, and puts the random numbers back."""
    try:
        from keepstep import _warm

        _warm.step()
    except Exception as error:
        _say(f"could not run a step ahead ({type(error).__name__}: {error}); the start will be slower")


def await_go(channel: socket.socket, tester: socket.socket) -> dict[str, Any] | None:
    """Waits for "go" and hands on what is for the tester; None when the channel closes first. Raises ValueError for anything else."""
    text = b""
    while True:
        line, end, rest = text.partition(b"\n")
        if not end:
            block = channel.recv(1 << 16)
            if not block:
                return None
            text += block
            if len(text) > LINE_BYTES_MAX:
                raise ValueError("the line is too long")
            continue
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("diagnose"), dict):
            tester.sendall(line + b"\n")
            text = rest
            continue
        return _go_of(message)


def _go_of(message: Any) -> dict[str, Any]:
    go = message.get("go") if isinstance(message, dict) else None
    if not isinstance(go, dict):
        raise ValueError('it is not {"go": {...}}')
    env, argv, cwd = go.get("env"), go.get("argv"), go.get("cwd")
    if not isinstance(env, dict) or not all(isinstance(v, str) or v is None for v in env.values()):
        raise ValueError("env is not an object of strings")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise ValueError("argv is not a list of words")
    if argv[0] == "-m" and len(argv) < 2:
        raise ValueError("argv names no module after -m")
    if not isinstance(cwd, str):
        raise ValueError("cwd is not a path")
    return go


def take_over(env: dict[str, str | None], cwd: str) -> None:
    """The process's surroundings as "go" says."""
    before = os.environ.get("PYTHONPATH", "")
    old = {os.path.abspath(part) for part in before.split(os.pathsep) if part}  # relative ones: to where it was parked
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if cwd:
        os.chdir(cwd)
    threads = env.get("OMP_NUM_THREADS")
    if threads and threads.isdigit() and int(threads) > 0 and "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.get_num_threads() != int(threads):
            torch.set_num_threads(int(threads))
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
    after = os.environ.get("PYTHONPATH", "")
    if after != before and not sys.flags.ignore_environment:
        new = [os.path.abspath(part) for part in after.split(os.pathsep) if part]
        sys.path[:] = new + [part for part in sys.path if part not in old and part not in new]


def become(argv: list[str], safe_path: bool) -> None:
    """Runs the script, or the module after -m, as the interpreter itself would have."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.excepthook = _without_our_frames
    if argv[0] == "-m":
        sys.argv = argv[1:]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        _activate()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    script = argv[0]
    sys.argv = argv
    if os.path.isdir(script) or (not script.endswith(".py") and _is_zip(script)):
        _activate()
        sys.path.insert(0, os.path.abspath(script))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as the interpreter itself does
        return
    path = os.path.abspath(script)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:  # the interpreter's own words
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.__dict__.update(__file__=path, __cached__=None, __spec__=None, __package__=None, __loader__=_loader(path))
    _activate()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _loader(path: str) -> Any:
    from importlib.machinery import SourceFileLoader

    return SourceFileLoader("__main__", path)


def _is_zip(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _activate() -> None:
    import keepstep

    keepstep._activate()


def _without_our_frames(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    """A traceback begins where the script does."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = None  # the script itself does not parse
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep.parked: {text}\n")
    sys.stderr.flush()


def _channel(arguments: list[str]) -> socket.socket:
    if len(arguments) != 2 or arguments[0] != "--control-fd" or not arguments[1].isdigit():
        raise ValueError("give --control-fd and the number of an inherited socket")
    channel = socket.socket(fileno=int(arguments[1]))
    channel.set_inheritable(False)
    channel.setblocking(True)
    return channel


def main(arguments: list[str]) -> None:
    try:
        channel = _channel(arguments)
    except (ValueError, OSError) as error:
        _say(f"can't be parked: {error}")
        raise SystemExit(2) from None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    safe_path = bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)
    if not safe_path:
        del sys.path[0]  # the folder that -m put there: the script brings its own
    begun_s = time.monotonic()
    has_torch = load()
    tester = _tester.start(channel)  # before the first step, which starts threads
    if has_torch:
        warm()
    gc.collect()
    gc.freeze()  # what is imported now stays: no collection needs to look at it again
    parked = {"parked": True, "pid": os.getpid(), "torch": has_torch, "warm_s": round(time.monotonic() - begun_s, 3)}
    try:
        channel.sendall(json.dumps(parked).encode() + b"\n")
        go = await_go(channel, tester)
    except OSError:
        go = None
    except ValueError as error:
        _say(f"can't go: {error}")
        raise SystemExit(2) from None
    channel.close()
    tester.close()  # and so it ends
    if go is None:
        raise SystemExit(0)
    try:
        take_over(go["env"], go["cwd"])
    except OSError as error:
        _say(f"can't go: {error}")
        raise SystemExit(2) from None
    become(go["argv"], safe_path)


if __name__ == "__main__":
    # Imported anew under its own name: __main__ is about to be the script's.
    from keepstep import parked

    parked.main(sys.argv[1:])
