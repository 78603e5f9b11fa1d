"""nkeys: one ed25519 key a node and role, its seed in a file of mode 0600, and the server's side of it as configuration text.

The seed never enters the server's configuration, an event or a log: the server holds the public key alone. Also here: the
rule that no server of ours listens beyond loopback without credentials and TLS.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import nkeys

from events.subjects import BadName, name
from infra.clock import entropy
from infra.permissions import ROLES, Identity, node, role, users_block


class KeyProblem(Exception):
    """A key file that is absent, unreadable or unsafe. One sentence that says what to do."""


class UnsafeListen(Exception):
    """A server that would listen to the network without credentials and TLS. One sentence."""


@dataclass(frozen=True, slots=True)
class Key:
    """An identity with its key. `seed_file` holds the secret."""

    identity: Identity
    public_key: str
    seed_file: Path

    def permissions(self) -> str:
        """The identity's part of a server's configuration, as text."""
        return users_block([(self.identity, self.public_key)])

    def connect_options(self) -> dict[str, Any]:
        """What `nats.connect` needs to be this identity."""
        return connect_options(self.identity.user, self.seed_file)


def connect_options(user: str, seed_file: Path) -> dict[str, Any]:
    from infra.permissions import inbox_prefix

    return {"nkeys_seed": str(seed_file), "inbox_prefix": inbox_prefix(user)}


def identity_of(*, node_name: str | None = None, role_name: str | None = None) -> Identity:
    """One of the two, by name."""
    if (node_name is None) == (role_name is None):
        raise ValueError("give a node or a role, one of the two")
    return node(node_name) if node_name is not None else role(role_name or "")


def seed_path(folder: Path, user: str) -> Path:
    """Where a user's seed lies. A name too long for a file gets a digest in its place."""
    stem = user if len(user) <= 200 else f"{user[:120]}-{sha256(user.encode()).hexdigest()[:32]}"
    return folder / f"{stem}.nk"


def ensure_key(folder: Path, identity: Identity) -> Key:
    """The identity's key in `folder`: read if its file is there, else made and written with mode 0600."""
    path = seed_path(folder, identity.user)
    try:
        return Key(identity, public_key_of(path), path)
    except FileNotFoundError:
        pass
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seed = nkeys.encode_seed(entropy(32), nkeys.PREFIX_BYTE_USER)
    try:
        write_secret(path, bytes(seed) + b"\n", exclusive=True)
    except FileExistsError:  # someone made it between our look and our write: theirs stands
        pass
    return Key(identity, public_key_of(path), path)


def keys_in(folder: Path) -> list[Key]:
    """The keys whose seeds lie in a folder, roles before nodes; files of other names are passed over. Raises KeyProblem."""
    found = []
    for path in sorted(folder.glob("*.nk"), key=lambda path: (path.stem not in ROLES, path.stem)):
        try:
            identity = role(path.stem) if path.stem in ROLES else node(name(path.stem.removeprefix("node-")))
        except BadName:
            continue
        if seed_path(folder, identity.user) == path:
            found.append(Key(identity, public_key_of(path), path))
    return found


def public_key_of(seed_file: Path) -> str:
    """The public key of a seed file. Raises FileNotFoundError, and KeyProblem if it is open to others or no seed."""
    try:
        with seed_file.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            seed = file.read(4096).strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise KeyProblem(f"the key file {seed_file} can't be read ({error.strerror}); run as the user it belongs to") from None
    if mode & 0o077:
        raise KeyProblem(f"the key file {seed_file} can be read by others (mode {mode:04o}); run: chmod 600 {seed_file}")
    try:
        return bytes(nkeys.from_seed(bytearray(seed)).public_key).decode("ascii")
    except Exception:
        raise KeyProblem(f"{seed_file} holds no nkey seed; delete it and make the key again") from None


def write_secret(path: Path, content: bytes, *, exclusive: bool = False) -> None:
    """A file of mode 0600 with this content, whole or not at all."""
    temporary = path.with_name(f".{path.name[:200]}.{entropy(6).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
            return
    finally:
        temporary.unlink(missing_ok=True)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_listen(host: str, has_credentials: bool, has_tls: bool) -> None:
    """Raises UnsafeListen for a host beyond loopback without both nkeys and TLS."""
    if is_loopback(host):
        return
    lacks = [what for what, there in (("credentials", has_credentials), ("TLS", has_tls)) if not there]
    if lacks:
        raise UnsafeListen(
            f"the bus would listen on {host} without {' and '.join(lacks)}: make keys with `keepstep keys`, give a certificate "
            "and key for TLS, or listen on 127.0.0.1"
        )


def server_configuration(keys: Sequence[Key], *, server: str = "n1", cluster: str = "keepstep") -> str:
    """A nats-server configuration for one of three servers, TLS file names to be filled in, with these identities."""
    users = users_block([(key.identity, key.public_key) for key in keys])
    return f"""# keepstep's bus: one of three nats-server 2.15 or later. Fill in what stands between < and >.
server_name: {server}
listen: "0.0.0.0:4222"
max_payload: 1MB
jetstream {{
  store_dir: "/var/lib/nats"
  # Without this, messages are acknowledged up to two minutes before they are on disk.
  sync_interval: always
}}
tls {{
  cert_file: "<this server's certificate>"
  key_file: "<this server's key>"
  ca_file: "<the authority's certificate>"
}}
cluster {{
  name: {cluster}
  listen: "0.0.0.0:6222"
  routes: ["nats-route://<host 1>:6222", "nats-route://<host 2>:6222", "nats-route://<host 3>:6222"]
  tls {{
    cert_file: "<this server's certificate>"
    key_file: "<this server's key>"
    ca_file: "<the authority's certificate>"
    verify: true
  }}
}}
{users}"""
