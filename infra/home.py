"""Where keepstep keeps what it keeps, and how a command finds the bus: one folder, one address."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events import subjects
from infra.bus import BusClient, connect, connect_to_store
from infra.embedded import EmbeddedError, find_connection
from infra.keys import connect_options


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one installation: `bus` (the embedded server's store), `nodes/<name>` (each agent's), `logs`."""

    path: Path

    @classmethod
    def default(cls, given: Path | None = None) -> Home:
        """As given, else $KEEPSTEP_HOME, else $XDG_STATE_HOME/keepstep, else ~/.local/state/keepstep."""
        if given is not None:
            return cls(given.absolute())
        if os.environ.get("KEEPSTEP_HOME"):
            return cls(Path(os.environ["KEEPSTEP_HOME"]).absolute())
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return cls(Path(state).absolute() / "keepstep")

    @property
    def bus(self) -> Path:
        return self.path / "bus"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def node(self, name: str) -> Path:
        return self.path / "nodes" / subjects.token(name).replace("%", "=")


@dataclass(frozen=True, slots=True)
class Address:
    """The bus: the embedded server of a home, or a URL with a seed file. `key` may hold `{user}`."""

    home: Home
    url: str = ""
    key: str = ""

    async def connect(self, user: str, *, wait_s: float = 10.0) -> BusClient:
        """As one user (a role, or `node-…`). Raises LogUnavailable, EmbeddedError with what to do."""
        if not self.url:
            return await connect_to_store(self.home.bus, user, name=f"keepstep-{user}", wait_s=wait_s)
        return await connect(self.url, self.options(user), name=f"keepstep-{user}", wait_s=wait_s)

    def options(self, user: str) -> dict[str, Any]:
        if not self.url:
            return find_connection(self.home.bus).options(user)
        if not self.key:
            return {}
        path = Path(self.key.replace("{user}", user))
        if not path.exists():
            raise EmbeddedError(f"there is no key at {path}; make it with `keepstep keys`, or name another with --key")
        return connect_options(user, path)

    @property
    def runs(self) -> bool:
        """Whether an embedded server of this home is up (a URL is taken to be)."""
        if self.url:
            return True
        try:
            find_connection(self.home.bus)
        except EmbeddedError:
            return False
        return True


def host_name() -> str:
    return socket.gethostname() or "localhost"
