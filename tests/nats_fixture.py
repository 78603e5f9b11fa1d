"""A real server with keepstep's streams for a test: on a free loopback port, its store in a temporary folder, gone at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infra.bus import BusClient, connect
from infra.embedded import EmbeddedServer
from infra.streams import Limits, ensure_streams


class Server(Protocol):
    """What a test needs of a bus: an EmbeddedServer, or another kind (tests/cluster_fixture.py). Keys lie in `store/keys`."""

    store: Path

    @property
    def url(self) -> str: ...
    def role_options(self, name: str) -> dict[str, Any]: ...
    def restart(self) -> None: ...


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Bus:
    """`admin`: a connection that may do everything. `connect(role)`: one more, as that role. `trouble`: what befalls this kind of bus
    in the middle of a load."""

    server: Server
    admin: BusClient
    trouble: Callable[[], Awaitable[None]] = _nothing

    async def connect(self, role: str) -> BusClient:
        return await connect(self.server.url, self.options(role), wait_s=30)

    def options(self, role: str) -> dict[str, Any]:
        return self.server.role_options(role)

    @property
    def is_troubled(self) -> bool:
        return self.trouble is not _nothing

    @property
    def key(self) -> str:
        """Where seeds lie, as a command line has it."""
        return f"{self.server.store}/keys/{{user}}.nk"


@asynccontextmanager
async def real_bus(folder: Path, *, lease_ttl_s: float = 3.0) -> AsyncIterator[Bus]:
    server = EmbeddedServer(folder / "bus", start_s_max=30)
    server.start()
    try:
        admin = await connect(server.url, server.role_options("admin"), wait_s=30)
        try:
            await ensure_streams(admin, limits=Limits(lease_ttl_ns=int(lease_ttl_s * 1e9)))
            yield Bus(server, admin)
        finally:
            await admin.close()
    finally:
        server.stop()
