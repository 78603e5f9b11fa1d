"""What an agent is started with: its settings, what they may be, and its command line. `python -m infra.agent --help`."""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from events import subjects
from events.envelope import NAME_MAX
from infra import lean_nats  # noqa: F401  before whatever imports nats
from infra.hook_folder import NoHook, hook_folder
from infra.keys import KeyProblem, connect_options, public_key_of
from infra.permissions import node_user
from producers.kernel_log import KMSG, default_interesting
from producers.nic_links import AUTO, OFF
from producers.supervise import sentence
from producers.trainer import BadSocketPath, check_path

SPOOL_BYTES_MIN = 1024 * 1024


class BadSettings(Exception):
    """The agent can't run like this. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`bus_options`: arguments of `nats.connect` (a key's `connect_options`). `kernel_logs`: `kmsg` or paths of files. `socket_path`:
    for the training hook; None: in the state folder. `interesting`: which kernel lines always pass (the catalogue's)."""

    node: str
    state_dir: Path
    bus_url: str
    bus_options: dict[str, Any] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    kernel_logs: tuple[str, ...] = (KMSG,)
    trust_user_facility: bool = False
    lines_per_s: int = 200
    interesting: Callable[[str], bool] = default_interesting
    heartbeat_s: float = 1.0
    nvml: bool = True
    #: Which network links are watched (producers.nic_links.chosen); none: no link.
    nic: tuple[str, ...] = (AUTO,)
    #: Samples of the host itself, its set-up, and what ranks print.
    host: bool = True
    host_interval_s: float = 10.0
    spool_bytes_max: int = 64 * 1024 * 1024
    drain_per_s: float = 2000.0
    hook_folder: Path | None = None
    socket_path: Path | None = None
    any_process: bool = False
    address: str = "127.0.0.1"
    stop_grace_s: float = 10.0
    version: str = ""
    say: Callable[[str], None] = lambda sentence: None

    @property
    def trainer_socket(self) -> Path:
        return self.socket_path or self.state_dir / "trainer.sock"


def check(settings: AgentSettings) -> None:
    """Raises BadSettings."""
    if not settings.node or len(settings.node) > NAME_MAX:
        raise BadSettings(f"a node's name has 1 to {NAME_MAX} characters; give another --node")
    try:
        subjects.token(settings.node)
    except subjects.BadName as error:
        raise BadSettings(f"{error}; give another --node") from None
    if not 0.1 <= settings.heartbeat_s <= 60:
        raise BadSettings(f"a heartbeat every {settings.heartbeat_s:g} s is not between 0.1 and 60 s")
    if settings.spool_bytes_max < SPOOL_BYTES_MIN:
        raise BadSettings(f"a spool of {settings.spool_bytes_max} bytes is too small; give at least {SPOOL_BYTES_MIN}")
    if settings.lines_per_s < 1 or settings.drain_per_s < 1:
        raise BadSettings("a rate is at least 1 a second")
    if not 1 <= settings.host_interval_s <= 3600:
        raise BadSettings(f"a sample of the host every {settings.host_interval_s:g} s is not between 1 and 3600 s")
    if not settings.bus_url.startswith(("nats://", "tls://")):
        raise BadSettings(f"{settings.bus_url!r} is no address of a bus; give --bus nats://host:port")
    for source in settings.kernel_logs:
        if source != KMSG and Path(source).is_dir():
            raise BadSettings(f"{source} is a folder; give a file's path, kmsg or none as --kernel-log")
    try:
        check_path(settings.trainer_socket)
    except BadSocketPath as error:
        raise BadSettings(f"{error} (--socket)") from None


def arguments(argv: list[str] | None = None) -> AgentSettings:
    """The settings of a command line. Raises BadSettings."""
    parser = _Parser(prog="keepstep agent", description="Watches this node and runs its ranks, as commanded over the bus.")
    parser.add_argument("--node", default=socket.gethostname(), help="this node's name (default: the host's)")
    parser.add_argument("--state", required=True, type=Path, help="a folder of its own, kept between starts")
    parser.add_argument("--bus", required=True, help="nats://host:port")
    parser.add_argument("--seed-file", type=Path, help="this node's key, as `keepstep keys` made it")
    parser.add_argument("--tls-ca", type=Path, help="the certificate authority of the bus")
    parser.add_argument(
        "--kernel-log", action="append", metavar="kmsg|FILE|none", help="what to follow (default kmsg); may be repeated"
    )
    parser.add_argument(
        "--trust-user-facility", action="store_true", help="believe kernel log lines that user space wrote (for tests)"
    )
    parser.add_argument("--lines-per-s", type=int, default=200, help="uninteresting kernel lines let through (200)")
    parser.add_argument("--catalogue", type=Path, help="the catalogue of kernel lines (default: the one that came along)")
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument(
        "--nic", action="append", metavar="auto|off|PATTERN|!PATTERN",
        help="network links to watch (default auto: RDMA ports, or where there are none, interfaces with a device); may be repeated",
    )  # fmt: skip
    parser.add_argument("--nvml", choices=("auto", "off"), default="auto", help="watch NVIDIA GPUs where there are any (auto)")
    parser.add_argument(
        "--host", choices=("auto", "off"), default="auto", help="sample the host, its set-up and what its ranks print (auto)"
    )
    parser.add_argument("--host-s", type=float, default=10.0, help="between samples of the host (10)")
    parser.add_argument("--spool-mib", type=float, default=64.0, help="on disk while the bus is away (64)")
    parser.add_argument("--hook-folder", type=Path, help="the folder that holds the training hook")
    parser.add_argument("--socket", type=Path, help="the training hook's socket (default: in the state folder)")
    parser.add_argument("--any-process", action="store_true", help="let any process of this user report progress")
    parser.add_argument("--address", default="127.0.0.1", help="where other nodes' ranks reach this one")
    parser.add_argument("--stop-grace-s", type=float, default=10.0, help="from a graceful stop to the kill (10)")
    given = parser.parse_args(argv)
    logs = tuple(dict.fromkeys(given.kernel_log or [KMSG]))
    if "none" in logs and len(logs) > 1:
        raise BadSettings("--kernel-log none stands alone")
    if not 0 < given.spool_mib < 1e7:
        raise BadSettings(f"--spool-mib {given.spool_mib:g} is no size of a spool")
    return AgentSettings(
        node=given.node,
        state_dir=given.state.absolute(),
        bus_url=given.bus,
        bus_options=_bus_options(given.node, given.seed_file),
        tls=_tls(given.tls_ca),
        kernel_logs=() if logs == ("none",) else tuple(log if log == KMSG else str(Path(log).absolute()) for log in logs),
        trust_user_facility=given.trust_user_facility,
        lines_per_s=given.lines_per_s,
        interesting=_catalogue(given.catalogue),
        heartbeat_s=given.heartbeat_s,
        nvml=given.nvml == "auto",
        nic=_nic(given.nic or [AUTO]),
        host=given.host == "auto",
        host_interval_s=given.host_s,
        spool_bytes_max=int(given.spool_mib * 1024 * 1024),
        hook_folder=given.hook_folder or _hook(),
        socket_path=given.socket.absolute() if given.socket else None,
        any_process=given.any_process,
        address=given.address,
        stop_grace_s=given.stop_grace_s,
        version=_version(),
        say=partial(_say, given.node),
    )


def _nic(patterns: list[str]) -> tuple[str, ...]:
    if OFF in patterns and len(patterns) > 1:
        raise BadSettings("--nic off stands alone")
    bad = next((p for p in patterns if not p.removeprefix("!") or len(p) > 200), None)
    if bad is not None:
        raise BadSettings(f"--nic {bad[:40]!r} is no pattern of link names; give a name, or a shell pattern such as 'mlx5_*'")
    return () if patterns == [OFF] else tuple(dict.fromkeys(patterns))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise BadSettings(f"{message}; see --help")


def _bus_options(node: str, seed_file: Path | None) -> dict[str, Any]:
    if seed_file is None:
        return {}
    try:
        public_key_of(seed_file)
    except FileNotFoundError:
        raise BadSettings(f"there is no key at {seed_file}; make one with `keepstep keys`") from None
    except KeyProblem as error:
        raise BadSettings(str(error)) from None
    return connect_options(node_user(node), seed_file)


def _tls(ca: Path | None) -> ssl.SSLContext | None:
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise BadSettings(f"{ca} can't be used as a certificate authority ({sentence(error)})") from None


def _catalogue(path: Path | None) -> Callable[[str], bool]:
    from infra.catalogue_files import SHIPPED, catalogue_text
    from processors import catalogue

    examples = path is not None  # the one that came along was tried before it did
    path = path or SHIPPED
    try:
        return catalogue.parse(catalogue_text(path), examples=examples).filter_alone()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"the catalogue {path} can't be read ({sentence(error)}); give another --catalogue") from None
    except catalogue.BadCatalogue as error:
        raise BadSettings(f"the catalogue {path} is not valid: {error}") from None


def _hook() -> Path | None:
    try:
        return hook_folder()
    except NoHook:
        return None


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("keepstep-pipeline")
    except PackageNotFoundError:
        return ""


def _say(node: str, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"keepstep agent {node}: {text}", file=sys.stderr, flush=True)
