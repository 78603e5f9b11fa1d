"""A real server with keepstep's streams for a test: on a free loopback port, its store in a temporary folder, gone at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.bus import BusClient, connect
from infra.embedded import EmbeddedServer
from infra.streams import Limits, ensure_streams


@dataclass(frozen=True, slots=True)
class Bus:
    """`admin`: a connection that may do everything. `connect(role)`: one more, as that role."""

    server: EmbeddedServer
    admin: BusClient

    async def connect(self, role: str) -> BusClient:
        return await connect(self.server.url, self.options(role))

    def options(self, role: str) -> dict[str, Any]:
        return self.server.role_options(role)


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
