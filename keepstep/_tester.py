"""A parked worker's tester: a process beside it, forked when torch was imported and nothing else was done, that runs tests of the
machine when it is told to. Each run is a fork of its own, with a deadline.

    tester <- {"diagnose": {"id": "7", "tests": ["gpu_self_test"], "within_s": 20, ...}}     (keepstep.diagnose describes it)
    tester -> {"diagnosed": {"id": "7", "results": [...], "ended": "", "elapsed_s": 0.2}}    on the worker's own channel

Not the worker itself: a test may hang or kill its process, makes a context on a GPU that the worker must not touch before it knows
which is its own, and leaves process groups behind. Forked twice, so that it is no child that the user's script would see; it ends
when the worker goes or ends, since the socket between them closes then.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
#: What a run may write: results are small, and a runaway must not fill the memory.
OUTPUT_BYTES_MAX = 4 << 20
#: A run that another request took the place of, one of no tests at all, say.
CALLED_BACK = "called back"
#: A killed process that is not dead by then sleeps uninterruptibly, in a driver.
DIE_S = 2.0


def start(channel: socket.socket) -> socket.socket:
    """Forks the tester of this process; what it is told is sent into the socket that is returned."""
    ours, theirs = socket.socketpair()
    cold = _threads() > 1  # a fork has only one of them, and their locks as they are: such a tester is started anew
    pid = os.fork()
    if pid == 0:
        try:
            if os.fork() == 0:
                ours.close()
                _begin(theirs, channel, cold)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    theirs.close()
    return ours


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 2  # not known, so not relied on


def _begin(requests: socket.socket, answers: socket.socket, cold: bool) -> None:
    if cold:
        for stream in (requests, answers):
            stream.set_inheritable(True)
        numbers = [str(requests.fileno()), str(answers.fileno())]
        os.execv(sys.executable, [sys.executable, "-m", "keepstep._tester", *numbers])
    serve(requests, answers)


def serve(requests: socket.socket, answers: socket.socket) -> None:
    """Until the worker is gone."""
    rest = b""
    while True:
        block = requests.recv(1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        for left, line in zip(range(len(lines) - 1, -1, -1), lines, strict=True):
            spec = json.loads(line)["diagnose"]
            answer: dict[str, Any] | None = {"id": spec.get("id", ""), "results": [], "ended": "", "elapsed_s": 0.0}
            if spec["tests"] and not left:  # else there is nothing to do, or another has taken its place already
                answer = examined(spec, requests)
            if answer is None:
                return
            answers.sendall(json.dumps({"diagnosed": answer}).encode() + b"\n")


def examined(spec: dict[str, Any], requests: socket.socket | None = None) -> dict[str, Any] | None:
    """Runs the tests in a process of their own; None when the worker went meanwhile. What hung or died is a failed test."""
    read, write = os.pipe()
    begun_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.close(read)
            from keepstep import diagnose

            diagnose.run(spec, write)
            code = 0
            sys.stderr.flush()
        except BaseException as error:
            if code:
                sys.stderr.write(f"keepstep: the tests ended early ({type(error).__name__}: {error})\n")
                sys.stderr.flush()
        finally:  # whatever is raised on the way, a standard error on a full disk included: nothing of the parent's goes on here
            os._exit(code)
    os.close(write)
    try:
        os.setpgid(pid, pid)
    except OSError:  # it has done so itself
        pass
    text, why = _listen(read, begun_s + float(spec["within_s"]), requests)
    os.close(read)
    ended = _end(pid, why == "")
    if why == "gone":
        return None
    elapsed_s = round(time.monotonic() - begun_s, 4)
    return {
        "id": spec.get("id", ""),
        "results": results_of(text, why or ended, elapsed_s),
        "ended": why or ended,
        "elapsed_s": elapsed_s,
    }


def _listen(read: int, end_s: float, requests: socket.socket | None) -> tuple[bytes, str]:
    """What the run wrote, and why it is cut off: '' (it came to its end), 'hung', 'gone', or since something else is asked for."""
    text = b""
    test_end_s = end_s
    watched: list[Any] = [read] if requests is None else [read, requests]
    while True:
        left_s = min(end_s, test_end_s) - time.monotonic()
        if left_s <= 0 or len(text) > OUTPUT_BYTES_MAX:
            return text, "hung"
        ready = select.select(watched, [], [], left_s)[0]
        if requests in ready and requests is not None:
            if not requests.recv(1, socket.MSG_PEEK):
                return text, "gone"
            return text, CALLED_BACK
        if read in ready:
            block = os.read(read, 1 << 16)
            if not block:
                return text, ""
            text += block
            test_end_s = time.monotonic() + _limit_s(text)


def _limit_s(text: bytes) -> float:
    """What the test that was begun last may take by itself."""
    lines = text.rsplit(b"\n", 2)
    try:
        return float(json.loads(lines[-2]).get("limit_s", float("inf"))) if len(lines) > 1 else float("inf")
    except ValueError:
        return float("inf")


def _end(pid: int, own: bool) -> str:
    """How the run ended: '', 'signal 11', 'exit 1', or that it can't be killed. `own`: it closed its pipe, a moment is given."""
    end_s = time.monotonic() + (0.5 if own else 0.0)
    killed = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            try:
                os.killpg(pid, signal.SIGKILL)  # what it left behind
            except OSError:
                pass
            code = -(status & 0x7F) if status & 0x7F else status >> 8
            return "" if code == 0 or (killed and own) else f"signal {-code}" if code < 0 else f"exit {code}"
        if time.monotonic() >= end_s:
            if killed:
                return "uninterruptible"
            killed, end_s = True, time.monotonic() + DIE_S
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.001)


#: Tests that others take part in: whose fault a hang is, the others' results tell.
SHARED = ("all_gather", "ib_write_bw")


def results_of(text: bytes, ended: str, elapsed_s: float) -> list[dict[str, Any]]:
    """The results that a run wrote, the last of each test (and peer); and one for the test that it did not come back from."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    begun = ""
    for line in text.split(b"\n"):
        try:
            said = json.loads(line)
        except ValueError:  # cut off in the middle
            continue
        if "begun" in said:
            begun = said["begun"]
        else:
            begun = ""
            for result in said["results"]:
                found[result["test"], tuple(result.get("peers", ()))] = result
    if begun or ended not in ("", "hung", CALLED_BACK):
        hung = f"did not come to an end in {elapsed_s:.1f} s and was killed"
        how = {"hung": hung, CALLED_BACK: "was ended for something else"}.get(ended, f"its process ended: {ended}")
        # NCCL ends a process by SIGABRT when its peer is silent: not this machine's fault.
        elsewhere = ended == CALLED_BACK or (begun in SHARED and ended in ("hung", "signal 6"))
        test = begun or "gpu_self_test"
        found[test, ("",)] = {"test": test, "passed": None if elsewhere else False, "detail": how, "duration_s": elapsed_s}
    return list(found.values())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
