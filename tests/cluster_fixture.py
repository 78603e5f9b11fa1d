"""Buses of other kinds than the embedded one, with its face, for tests: three servers with routes on loopback, of which one may be
killed at any time, and one server in a container. Every user has an nkey, as with the embedded one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from events.ports import LEDGER, LogUnavailable
from infra.bus import BusClient, connect
from infra.child import ending_with_parent
from infra.embedded import find_binary
from infra.faust_transport.patience import patiently
from infra.keys import Key, ensure_key
from infra.permissions import ROLES, Identity, node, role, users_block
from infra.streams import Limits, StreamProblem, api, configurations, ensure_streams
from tests.nats_fixture import Bus

START_S_MAX = 60.0
PORT_MIN = 10_000


def free_ports(n: int) -> list[int]:
    """Below those that the kernel gives to connections, if it leaves any: none of them takes one while its server is away."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = given if given > 2 * PORT_MIN else 60_000
    found: list[int] = []
    while len(found) < n:
        port = random.randrange(PORT_MIN, below)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class _Keyed:
    """A server whose users have keys in `store/keys`."""

    replicas = 1

    def __init__(self, store: Path) -> None:
        self.store = store
        self._nodes: dict[str, None] = {}

    def identities(self) -> list[Identity]:
        return [role(name) for name in ROLES] + [node(name) for name in self._nodes]

    def users(self) -> str:
        return users_block([(one, self.key(one).public_key) for one in self.identities()])

    @property
    def keys(self) -> str:
        return f"{self.store}/keys/{{user}}.nk"

    def key(self, identity: Identity) -> Key:
        return ensure_key(self.store / "keys", identity)

    def role_options(self, name: str) -> dict[str, Any]:
        return self.key(role(name)).connect_options()


class Cluster(_Keyed):
    """Three servers, n0 to n2. `start` and `kill` one, `leader` of a stream, `stop` all. `nodes`: names whose agents get a key."""

    replicas = 3

    def __init__(self, store: Path, nodes: Iterable[str] = ()) -> None:
        super().__init__(store)
        self._nodes = dict.fromkeys(nodes)
        self.ports = free_ports(6)
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self.ports[:3])
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        store.mkdir(parents=True, exist_ok=True)
        for i in range(3):
            self._configure(i)

    def _configure(self, i: int) -> None:
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in self.ports[3:])
        (self.store / f"{i}.conf").write_text(
            f'server_name: n{i}\nlisten: "127.0.0.1:{self.ports[i]}"\nlog_file: "{self.store}/{i}.log"\n'
            f"max_control_line: 8KB\nwrite_deadline: 10s\n"
            f'jetstream {{ store_dir: "{self.store}/data{i}", sync_interval: always }}\n'
            f'cluster {{ name: c, listen: "127.0.0.1:{self.ports[3 + i]}", routes: [{routes}] }}\n{self.users()}'
        )

    def __enter__(self) -> Cluster:
        self.start_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, i: int) -> None:
        if i in self.servers:
            return
        started = threading.Event()

        def keep() -> None:  # the death of the *thread* that forked it is what a child is told of
            with (self.store / f"{i}.err").open("ab") as err:
                self.servers[i] = process = subprocess.Popen(
                    [find_binary(), "-c", str(self.store / f"{i}.conf")], stdin=subprocess.DEVNULL, stdout=err, stderr=err,
                    start_new_session=True, preexec_fn=ending_with_parent(),
                )  # fmt: skip
            started.set()
            process.wait()

        threading.Thread(target=keep, daemon=True).start()
        assert started.wait(10), f"server n{i} was not started"

    def start_all(self) -> None:
        for i in range(3):
            self.start(i)

    def kill(self, i: int) -> None:
        """SIGKILL."""
        server = self.servers.pop(i, None)
        if server is not None:
            server.kill()
            server.wait()

    def signal(self, i: int, number: int) -> None:
        self.servers[i].send_signal(number)

    def server_of(self, nc: BusClient) -> int:
        """Which one a connection is to."""
        url = nc.connected_url
        assert url is not None
        return self.ports.index(url.port)

    def terminate(self, i: int) -> None:
        """As an upgrade does: what it leads is handed over first."""
        server = self.servers.pop(i, None)
        if server is not None:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def restart(self) -> None:
        """One after another, each waited for until it serves."""
        for i in range(3):
            self.terminate(i)
            self.start(i)
            self._await(i)

    def stop(self) -> None:
        for i in range(3):
            self.kill(i)

    def _await(self, i: int) -> None:
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.ports[i]), 1) as probe:
                    if probe.recv(4).startswith(b"INFO"):
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"server n{i} did not come up within {START_S_MAX:g} s: {self.store}/{i}.log"
            time.sleep(0.05)


async def leader(nc: BusClient, stream: str) -> int:
    """Which server leads a stream. Raises LogUnavailable if none does just now."""
    answer = await api(nc, f"STREAM.INFO.{stream}")
    name = str((answer.get("cluster") or {}).get("leader") or "")
    if not name:
        raise LogUnavailable(f"{stream} has no leader")
    return int(name.removeprefix("n"))


class Container(_Keyed):
    """One server in a container (testcontainers). `why_not()` says what is missing, "" if nothing is. `nodes`: names whose agents get a
    key."""

    IMAGE = os.environ.get("KEEPSTEP_TEST_NATS_IMAGE", "nats:2.15.1")

    def __init__(self, store: Path, nodes: Iterable[str] = ()) -> None:
        super().__init__(store)
        self._nodes = dict.fromkeys(nodes)
        from testcontainers.core.container import DockerContainer

        (self.port,) = free_ports(1)
        self.url = f"nats://127.0.0.1:{self.port}"
        store.mkdir(parents=True, exist_ok=True)
        (store / "conf").mkdir()
        (store / "conf" / "server.conf").write_text(
            f'server_name: contained\nlisten: "0.0.0.0:4222"\nmax_control_line: 8KB\nwrite_deadline: 10s\n'
            f'jetstream {{ store_dir: "/data", sync_interval: always }}\n{self.users()}'
        )
        self.container = (
            DockerContainer(self.IMAGE)
            .with_volume_mapping(str(store / "conf"), "/keepstep", "ro")
            .with_bind_ports(4222, self.port)
            .with_command("-c /keepstep/server.conf")
        )

    @classmethod
    def why_not(cls) -> str:
        try:
            import docker
            from docker.errors import DockerException, ImageNotFound
        except ImportError:
            return "testcontainers is not installed"
        try:
            client = docker.from_env(timeout=10)
            try:
                client.ping()
                client.images.get(cls.IMAGE)
            finally:
                client.close()
        except ImageNotFound:
            return f"the container engine has no image {cls.IMAGE} (another: KEEPSTEP_TEST_NATS_IMAGE)"
        except (DockerException, OSError) as error:
            return f"no container engine answers (DOCKER_HOST): {str(error)[:150]}"
        return ""

    def __enter__(self) -> Container:
        self.container.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.container.stop()
        shutil.rmtree(self.store / "conf", ignore_errors=True)

    def restart(self) -> None:
        self.container.get_wrapped_container().restart(timeout=10)


AWAY_S = 3.0


@asynccontextmanager
async def clean_bus(server: Cluster | Container, *, led: str = LEDGER, lease_ttl_s: float = 3.0) -> AsyncIterator[Bus]:
    """A server that runs, with streams made anew. Of a cluster: in trouble, the leader of the stream `led` is killed, and started
    again after a while."""
    limits = Limits(lease_ttl_ns=int(lease_ttl_s * 1e9))
    deadline = time.monotonic() + START_S_MAX
    admin = await connect(server.url, server.role_options("admin"), wait_s=START_S_MAX)
    again: set[asyncio.Task[None]] = set()

    async def trouble() -> None:
        assert isinstance(server, Cluster)
        server.kill(await patiently(partial(leader, admin, led), START_S_MAX))
        again.add(asyncio.create_task(start_again(server)))

    try:
        while True:
            try:
                for config in reversed(configurations(server.replicas)):
                    await api(admin, f"STREAM.DELETE.{config['name']}")
                await ensure_streams(admin, server.replicas, limits)
                break
            except (LogUnavailable, StreamProblem):  # no leader yet
                assert time.monotonic() < deadline, "the cluster did not come to its streams"
                await asyncio.sleep(0.3)
        yield Bus(server, admin, trouble) if server.replicas > 1 else Bus(server, admin)
    finally:
        await asyncio.gather(*again)
        await admin.close()


async def start_again(cluster: Cluster, after_s: float = AWAY_S) -> None:
    await asyncio.sleep(after_s)
    cluster.start_all()
