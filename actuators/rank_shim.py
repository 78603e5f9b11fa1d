"""The shim of one rank slot: a process of its own that starts the worker, keeps its output, and says how it ended.

Run as `python -I -S rank_shim.py FOLDER`, with the slot's specification as JSON on standard input; it leaves the agent's process
tree at once, and outlives it. Standard library only, and nothing of keepstep's: it must start in milliseconds and go on while
everything else is upgraded. It answers on FOLDER/control.sock in JSON lines:

    {"do":"status"}                                  {"re":"status","phase":"parked","ready":true,"pid":1,"start_time":2}
    {"do":"park"}                                    {"re":"park","ok":true,"pid":1,"start_time":2}
    {"do":"go","environment":{},"argv":[],"directory":""}   {"re":"go","ok":true,"pid":1,"start_time":2,"warm":true}
    {"do":"diagnose","spec":{}}                      {"re":"diagnose","ok":true}, later {"event":"diagnosed",…the worker's answer…}
    {"do":"kill"}, {"do":"terminate","grace_s":10}   {"re":"kill","ok":true}
                                                     {"event":"ready"}, {"event":"exit",…what exit.json holds…}

Its end is the socket's end: by then nothing that the worker started is left, set-sid grandchildren included (it is their
subreaper), and exit.json is written. Specification: `parked` (argv of a parked worker, which gets `--control-fd N`; null: the
worker is the command of the `go` itself), `environment`, `directory`, `boot_id`, `log_bytes_max`, `secrets` (values that the kept
tail of stderr must not show), `quiet` (park at a low priority), `idle_s` (a parked slot without an agent ends after it).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

LINE_BYTES_MAX = 8 << 20
CLIENTS_MAX = 8
TAIL_BYTES = 16 << 10
PIPE_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36
#: The exit is told by then even if something of the worker's has not died yet (uninterruptible sleep).
TELL_AFTER_S = 0.05
#: A shim that no agent talks to before it has a worker ends itself.
UNTOLD_S = 30.0
#: A parked worker that is not warm by then has met a busy machine, where a low priority starves it.
QUIET_S, QUIET_NICE = 5.0, 10


def stat_field(pid: int, number: int) -> int:
    """A field of /proc/PID/stat, counted from 1; 0: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read(4096)
        return int(raw[raw.rfind(b")") + 2 :].split()[number - 3])
    except (OSError, ValueError, IndexError):
        return 0


def start_time(pid: int) -> int:
    return stat_field(pid, 22)


def children() -> list[int]:
    """Pids of this process's children, those it inherited included. They stay ours until we reap them: safe to signal."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and stat_field(int(name), 4) == me]


def may_renice() -> bool:
    """Whether a lowered priority can be taken back: tried in a child, since it may not be."""
    pid = os.fork()
    if pid == 0:
        try:
            before = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def autogroup(pid: int, nice: int) -> None:
    """Sessions are scheduled as groups where the kernel has autogroups: nice values then count within a session only."""
    for _ in range(5):
        try:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(nice))
            return
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return


class Ring:
    """A log of at most two files of `limit` bytes: NAME and NAME.1. A full disk costs lines, never the rank's time."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, max(4096, limit)
        self.fd = -1
        self.size = self.before = 0
        self.tail = b""
        self.open()

    def open(self) -> None:
        """NAME.base tells a reader how many bytes came before NAME, so that it knows what it missed."""
        self.before += self.size
        self.size = 0
        try:
            self.fd = os.open(self.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if self.before:
                base = os.open(
                    self.name.removesuffix(".log") + ".base", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
                )
                try:
                    os.write(base, b"%d" % self.before)
                finally:
                    os.close(base)
        except OSError:
            pass

    def write(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        try:
            if self.fd < 0 or self.size + len(data) > self.limit:
                if self.fd >= 0:
                    os.close(self.fd)
                    self.fd = -1
                    os.replace(self.name, self.name + ".1")
                self.open()
            self.size += os.write(self.fd, data)
        except OSError:
            pass


class Shim:
    def __init__(self, spec: dict[str, Any], listener: socket.socket) -> None:
        self.spec = spec
        self.listener = listener
        self.poll = select.poll()
        self.clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self.out: dict[int, Ring] = {}
        self.phase = "parked"
        self.ready = False
        self.pid = 0
        self.start_time = 0
        self.own_start_time = start_time(os.getpid())
        self.ended: dict[str, Any] | None = None
        self.ended_at = 0.0
        self.told = False
        self.kill_at: float | None = None
        self.killing = False
        self.control: socket.socket | None = None
        self.to_worker = bytearray()
        self.from_worker = b""
        self.niced = False
        self.quiet_until: float | None = None
        self.idle_since = time.monotonic()
        limit = int(spec.get("log_bytes_max", 8 << 20))
        self.stdout, self.stderr = Ring("stdout.log", limit), Ring("stderr.log", limit)
        self.wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for fd in (self.wake_r, listener.fileno()):
            self.poll.register(fd, select.POLLIN)

    # The worker

    def spawn(self, argv: list[str], environment: dict[str, str], directory: str, control: bool) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for (read, _), ring in zip(pipes, (self.stdout, self.stderr), strict=True):
            os.set_blocking(read, False)
            try:
                fcntl.fcntl(read, 1031, PIPE_BYTES)  # F_SETPIPE_SZ: a burst of output does not wait for this process
            except OSError:
                pass
            self.out[read] = ring
            self.poll.register(read, select.POLLIN)
        inner = None
        if control:
            self.control, inner = socket.socketpair()
            self.control.setblocking(False)
            argv = [*argv, "--control-fd", str(inner.fileno())]
            self.poll.register(self.control.fileno(), select.POLLIN)
        if control and self.spec.get("quiet"):
            self.quiet_until = time.monotonic() + QUIET_S
            self.niced = may_renice()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(argv, environment, directory, pipes, inner)
        for _, write in pipes:
            os.close(write)
        if inner is not None:
            inner.close()
        self.start_time = start_time(self.pid)
        self.save("worker.json", {"pid": self.pid, "start_time": self.start_time, "boot_id": self.spec.get("boot_id", "")})

    def _become(
        self,
        argv: list[str],
        environment: dict[str, str],
        directory: str,
        pipes: list[tuple[int, int]],
        inner: socket.socket | None,
    ) -> None:
        try:
            os.setsid()
            os.umask(USERS_UMASK)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(pipes[0][1], 1)
            os.dup2(pipes[1][1], 2)
            if inner is not None:
                os.set_inheritable(inner.fileno(), True)
            if self.quiet_until is not None:
                autogroup(os.getpid(), QUIET_NICE)
                if self.niced:
                    os.setpriority(os.PRIO_PROCESS, 0, QUIET_NICE)
            if directory:
                os.chdir(directory)
            os.execvpe(argv[0], argv, environment)
        except BaseException as error:
            text = f"keepstep could not start {argv[0] if argv else '(nothing)'!r} in {directory or os.getcwd()!r}: {error}\n"
            os.write(2, text.encode("utf-8", "replace"))
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)

    def go(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.ended is not None:
            return {"ok": False, "because": "its worker has ended"}
        if self.phase != "parked":
            return {"ok": True, "pid": self.pid, "start_time": self.start_time, "warm": self.ready, "again": True}
        argv = [str(word) for word in asked["argv"]]
        environment = {str(name): str(value) for name, value in asked["environment"].items()}
        directory = str(asked.get("directory", ""))
        if self.spec.get("parked"):
            self.park()
            self.hurry()
            line = {"go": {"env": environment, "argv": argv, "cwd": directory}}
            self.to_worker += json.dumps(line).encode() + b"\n"
            self.flush_control()
        else:
            self.spawn(argv, environment, directory, control=False)
        self.phase = "running"
        return {"ok": True, "pid": self.pid, "start_time": self.start_time, "warm": self.ready}

    def hurry(self) -> None:
        """Ends a parked worker's low priority, for all of its group."""
        if self.quiet_until is not None:
            self.quiet_until = None
            autogroup(self.pid, 0)
            try:
                os.setpriority(os.PRIO_PGRP, self.pid, os.getpriority(os.PRIO_PROCESS, 0))
            except OSError:
                pass

    def flush_control(self) -> None:
        if self.control is None:
            return
        try:
            while self.to_worker:
                del self.to_worker[: self.control.send(self.to_worker)]
        except BlockingIOError:
            pass
        except OSError:
            self.to_worker.clear()  # the worker is gone: its exit is on its way
        self.poll.modify(self.control.fileno(), select.POLLIN | (select.POLLOUT if self.to_worker else 0))

    def hear_worker(self) -> None:
        if self.control is None:
            return
        try:
            data = self.control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.poll.unregister(self.control.fileno())
            self.control.close()
            self.control = None
            return
        *lines, rest = (self.from_worker + data).split(b"\n")
        self.from_worker = rest[-LINE_BYTES_MAX:]
        for line in lines:
            if b'"diagnosed"' in line:
                self.tell({"event": "diagnosed", **json.loads(line)["diagnosed"]})
            elif b'"parked"' in line and not self.ready and self.phase == "parked":
                self.ready = True
                self.hurry()  # it waits now, at no cost; a start finds it as it should be
                self.tell({"event": "ready"})

    def diagnose(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Tests of the machine, by the tester beside a parked worker."""
        if not self.ready or self.phase != "parked" or self.ended is not None:
            return {"ok": False, "because": "its worker is not parked and warm"}
        self.to_worker += json.dumps({"diagnose": spec}).encode() + b"\n"
        self.flush_control()
        return {"ok": True}

    # Ends

    def signal_group(self, number: int) -> None:
        """The worker leads a group, and is not reaped yet: the group is its own. Once only: a second SIGTERM would meet a Python
        that is on its way out without its handlers."""
        if self.pid and self.ended is None:
            try:
                os.killpg(self.pid, number)
            except OSError:  # it has not come to lead its group yet
                try:
                    os.kill(self.pid, number)
                except OSError:
                    pass

    def end(self, grace_s: float) -> None:
        if self.pid == 0 and self.ended is None:  # a cold slot that was never told to go
            self.ended_with(None)
        elif grace_s > 0 and not self.killing:
            self.killing = True
            self.kill_at = time.monotonic() + grace_s
            self.signal_group(signal.SIGTERM)
            self.signal_group(signal.SIGCONT)
        elif grace_s <= 0:
            self.killing, self.kill_at = True, None
            self.signal_group(signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid and self.ended is None:
                self.ended_with(os.waitstatus_to_exitcode(status))

    def ended_with(self, code: int | None) -> None:
        self.ended_at = time.monotonic()
        self.ended = {
            "code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "pid": self.pid,
            "start_time": self.start_time,
            "ended_ns": time.time_ns(),
            "boot_id": self.spec.get("boot_id", ""),
            "phase": self.phase,
        }

    def sweep(self) -> bool:
        """After the worker's end: kills what is left of it. True once the exit is told and nothing is left."""
        left = children()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not self.told and (not left or time.monotonic() - self.ended_at > TELL_AFTER_S):
            self.drain()
            assert self.ended is not None
            tail = self.stderr.tail
            for secret in self.spec.get("secrets", ()):
                tail = tail.replace(str(secret).encode("utf-8", "surrogateescape"), b"[redacted]")
            self.ended["stderr_tail"] = tail.decode("utf-8", "replace")
            self.save("exit.json", self.ended)
            self.tell({"event": "exit", **self.ended})
            self.told = True
        return self.told and not left

    # The world

    def save(self, name: str, value: dict[str, Any]) -> None:
        """Atomically. A full disk must not end the shim: what it had to say, it still tells over the socket."""
        try:
            with open(name + ".new", "wb") as file:
                file.write(json.dumps(value).encode())
            os.replace(name + ".new", name)
        except OSError as error:
            print(f"{name} could not be written: {error}", file=sys.stderr, flush=True)

    def drain(self) -> None:
        for fd in list(self.out):
            while self.pump(fd):
                pass

    def pump(self, fd: int) -> bool:
        ring = self.out.get(fd)
        if ring is None:
            return False
        try:
            data = os.read(fd, 1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.poll.unregister(fd)
            os.close(fd)
            del self.out[fd]
            return False
        ring.write(data)
        return True

    def tell(self, value: dict[str, Any], only: int | None = None) -> None:
        line = json.dumps(value).encode() + b"\n"
        for fd in [only] if only is not None else list(self.clients):
            if fd in self.clients:
                try:
                    self.clients[fd][0].sendall(line)
                except OSError:
                    self.drop(fd)

    def drop(self, fd: int) -> None:
        client, _ = self.clients.pop(fd)
        self.poll.unregister(fd)
        client.close()
        self.idle_since = time.monotonic()

    def accept(self) -> None:
        client, _ = self.listener.accept()
        _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()) or len(self.clients) >= CLIENTS_MAX:
            client.close()
            return
        client.settimeout(1.0)  # an agent that is stopped must not hold the rank's shim
        self.clients[client.fileno()] = (client, bytearray())
        self.poll.register(client.fileno(), select.POLLIN)
        self.tell(self.status(), client.fileno())

    def status(self) -> dict[str, Any]:
        return {
            "re": "status",
            "phase": "ended" if self.ended else self.phase,
            "ready": self.ready,
            "pid": self.pid,
            "start_time": self.start_time,
            "shim": os.getpid(),
            "shim_start_time": self.own_start_time,
        }

    def hear(self, fd: int) -> None:
        client, buffer = self.clients[fd]
        try:
            data = client.recv(1 << 18)
        except OSError:
            data = b""
        if not data or len(buffer) + len(data) > LINE_BYTES_MAX:
            self.drop(fd)
            return
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            what = "?"
            try:
                asked = json.loads(line)
                what = str(asked["do"])
                self.tell(self.do(what, asked), fd)
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                self.tell({"re": what, "ok": False, "because": f"{type(error).__name__}: {error}"}, fd)
            if fd not in self.clients:
                return

    def do(self, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        if what == "status":
            return self.status()
        if what == "go":
            return {"re": what, **self.go(asked)}
        if what == "park":
            return {"re": what, **self.park()}
        if what == "diagnose":
            return {"re": what, **self.diagnose(asked["spec"])}
        if what in ("kill", "terminate"):
            self.end(float(asked.get("grace_s", 0)) if what == "terminate" else 0)
            return {"re": what, "ok": True}
        return {"re": what, "ok": False, "because": f"{what!r} is not park, go, diagnose, kill, terminate or status"}

    def park(self) -> dict[str, Any]:
        """Not before an agent asks: one that died while it made this slot must not leave a worker that nobody knows of."""
        if self.spec.get("parked") and self.pid == 0 and self.ended is None:
            self.spawn(self.spec["parked"], self.spec["environment"], str(self.spec.get("directory", "")), control=True)
        return {"ok": True, "pid": self.pid, "start_time": self.start_time}

    def run(self) -> None:
        while True:
            if self.ended is not None:
                timeout_ms = 2 if time.monotonic() - self.ended_at < 1 else 50
            elif self.kill_at is not None:
                timeout_ms = max(0, int((self.kill_at - time.monotonic()) * 1000) + 1)
            else:
                timeout_ms = 10_000 if self.quiet_until is None else 1000
            if self.quiet_until is not None and time.monotonic() > self.quiet_until:
                self.hurry()
            if self.ended is not None and not children():
                timeout_ms = 0
            for fd, event in self.poll.poll(timeout_ms):
                if fd == self.wake_r:
                    try:
                        os.read(fd, 4096)
                    except OSError:
                        pass
                elif fd == self.listener.fileno():
                    self.accept()
                elif fd in self.clients:
                    self.hear(fd)
                elif fd in self.out:
                    self.pump(fd)
                elif self.control is not None and fd == self.control.fileno():
                    if event & select.POLLOUT:
                        self.flush_control()
                    if event & ~select.POLLOUT:
                        self.hear_worker()
            self.reap()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_at = None
                self.signal_group(signal.SIGKILL)
            if self.ended is not None and self.sweep():
                return
            idle_s = float(self.spec.get("idle_s", 3600)) if self.pid else UNTOLD_S
            if self.phase == "parked" and not self.clients and time.monotonic() - self.idle_since > idle_s:
                self.end(0)


#: The mask that the agent was started with: ours is narrow for our own files, the rank's files are the user's matter.
USERS_UMASK = 0o022


def main() -> None:
    global USERS_UMASK
    USERS_UMASK = os.umask(0o077)
    os.chdir(sys.argv[1])
    spec = json.loads(sys.stdin.buffer.read())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("control.sock")  # relative: a folder's path may be longer than a socket's may
    listener.listen(CLIENTS_MAX)
    listener.setblocking(False)
    if os.fork():
        os._exit(0)  # the agent goes on: the socket is there
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    null, log = os.open("/dev/null", os.O_RDWR), os.open("shim.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, null), (2, log)):
        os.dup2(source, target)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shim = Shim(spec, listener)
    shim.save("shim.json", {"pid": os.getpid(), "start_time": shim.own_start_time, "boot_id": spec.get("boot_id", "")})
    shim.run()


if __name__ == "__main__":
    main()
