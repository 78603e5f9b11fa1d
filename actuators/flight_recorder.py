"""PyTorch's flight recorder: a rank's dump (JSON, or the pickle that NCCL's watchdog writes), read as the groups it is in and what it has
pending. The file is anybody's: bounded in size, and unpickled without a single class.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from events.envelope import NAME_MAX, TEXT_MAX
from events.finding import GroupState, PendingOperation
from events.rank_set import RANKS_MAX, compact

#: The recorder keeps a few thousand operations with their frames; a dump above this is not one.
DUMP_BYTES_MAX = 64 << 20
#: Of a rank's pending operations the first so many are kept: the front is what decides.
PENDING_MAX, GROUPS_MAX = 64, 64
_NUMBER = re.compile(r"\d{1,9}")
_TRANSFER = re.compile(r"(send|recv)\s*(\d+)(->|<-)(\d+)\Z")


class BadDump(ValueError):
    """Not a dump of the flight recorder. One sentence."""


class Recording(NamedTuple):
    groups: tuple[GroupState, ...]
    pending: tuple[PendingOperation, ...]

    def fields(self) -> dict[str, Any]:
        """For events.finding.ProcessStack."""
        first = self.pending[0] if self.pending else None
        return {
            "recorded": True, "groups": self.groups, "pending": self.pending,
            "collective": first.op if first else "", "collective_seq": first.seq if first else -1,
        }  # fmt: skip


class _Plain(pickle.Unpickler):
    """Numbers, text, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str) -> Any:
        raise BadDump(f"it is a pickle that wants {module}.{name}; a dump of the flight recorder holds no classes")

    def persistent_load(self, pid: Any) -> Any:
        raise BadDump("it is a pickle that refers to something outside it; a dump of the flight recorder does not")


def load(path: Path) -> Any:
    """A file as JSON, or else as a pickle without classes. Raises BadDump, OSError."""
    with path.open("rb") as file:
        raw = file.read(DUMP_BYTES_MAX + 1)
    return loads(raw)


def loads(raw: bytes) -> Any:
    """Raises BadDump."""
    if len(raw) > DUMP_BYTES_MAX:
        raise BadDump(f"it is larger than {DUMP_BYTES_MAX >> 20} MiB")
    if not raw.strip():
        raise BadDump("it is empty")
    if raw[:1] == b"\x80":
        try:
            return _Plain(io.BytesIO(raw)).load()
        except BadDump:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise BadDump(f"it is a damaged pickle ({type(error).__name__})") from None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadDump(f"it is neither JSON nor a pickle ({str(error)[:100]})") from None


def is_dump(value: Any) -> bool:
    return isinstance(value, dict) and ("entries" in value or "pg_status" in value or "pg_config" in value)


def recording(dump: Any) -> Recording:
    """Raises BadDump. What a version of the recorder leaves out is unknown (`entered` -1, no members), never a guess."""
    if not is_dump(dump):
        raise BadDump("it has none of entries, pg_config and pg_status")
    entries = dump.get("entries") or []
    if not isinstance(entries, list):
        raise BadDump("it has entries that are no list")
    entries = [entry for entry in entries if isinstance(entry, dict)]
    configs = {str(name): config for name, config in _table(dump.get("pg_config")).items() if isinstance(config, dict)}
    told = {name: _members(_listed(config.get("ranks"))) for name, config in configs.items()}
    members = {name: ranks for name, (ranks, _) in told.items()}
    kinds = {name: str(config.get("desc") or "") for name, config in configs.items()}
    entered: dict[str, int] = {}
    transfers: set[str] = set()
    pending: list[tuple[int, PendingOperation]] = []
    for at, entry in enumerate(entries):
        name, kind = _group_of(entry)
        kinds.setdefault(name, kind)
        op = str(entry.get("profiling_name") or "unknown").split(":", 1)[-1]
        transfer = _TRANSFER.match(op)
        if transfer or entry.get("is_p2p") or _int(entry.get("p2p_seq_id"), 0) > 0:
            transfers.add(name)
        seq = _int(entry.get("collective_seq_id"), -1)  # a transfer has the number of the last collective before it
        entered[name] = max(entered.get(name, -1), seq)
        if entry.get("state") == "completed":
            continue
        peer = _peer(transfer, members.get(name, ()), name, kinds[name])
        if transfer and peer < 0:
            continue  # to a rank that can't be named: nothing follows from it
        made = PendingOperation(
            group=name[:NAME_MAX], op=(transfer[1] if transfer else op)[:64], peer=peer, started=entry.get("state") == "started",
            seq=_int(entry.get("p2p_seq_id"), -1) if transfer else seq,
        )  # fmt: skip
        pending.append((_int(entry.get("record_id"), at), made))
    pending.sort(key=lambda pair: pair[0])
    for name, seq in _status(dump, configs, entries).items():
        if name not in transfers:
            entered[name] = max(entered.get(name, -1), seq)
    names = sorted({*configs, *kinds}, key=lambda name: (name not in entered, name))[:GROUPS_MAX]
    groups = tuple(
        GroupState(
            group=name[:NAME_MAX], description=kinds.get(name, "")[:NAME_MAX], ranks=told[name][1] if name in told else "",
            entered=entered.get(name, -1), transfers=name in transfers,
        )
        for name in names
    )  # fmt: skip
    return Recording(groups, tuple(op for _, op in pending[:PENDING_MAX]))


def _table(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any, otherwise: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise


def _group_of(entry: dict[str, Any]) -> tuple[str, str]:
    """Name and kind: [name, description]."""
    told = entry.get("process_group")
    if isinstance(told, list | tuple) and told:
        return str(told[0]), str(told[1]) if len(told) > 1 else ""
    return str(entry.get("pg_id", "")), ""


def _listed(told: Any) -> str:
    """`"[0, 4, 8]"`, in the group's own order, or a list."""
    return told if isinstance(told, str) else ",".join(map(str, told)) if isinstance(told, list | tuple) else ""


@lru_cache(maxsize=1024)
def _members(listed: str) -> tuple[tuple[int, ...], str]:
    """In the group's own order, and as events.rank_set; the same for all of its members, so read once. () and "": not known."""
    ranks = tuple(map(int, _NUMBER.findall(listed)[:RANKS_MAX]))
    if not all(rank < RANKS_MAX for rank in ranks):
        return (), ""
    text = compact(ranks)
    return ranks, text if len(text) <= TEXT_MAX else ""


def _peer(transfer: re.Match[str] | None, members: tuple[int, ...], name: str, kind: str) -> int:
    """`send 0->3`, `recv 3<-0`: own place in the group, then the peer's. In the default group places are ranks."""
    if transfer is None:
        return -1
    place = int(transfer[4])
    if members:
        return members[place] if place < len(members) else -1
    return place if name == "0" or kind in ("default_pg", "undefined") else -1


def _status(dump: dict[str, Any], configs: Mapping[str, Any], entries: list[dict[str, Any]]) -> dict[str, int]:
    """The last number that each group has enqueued. pg_status is by the process's own running number of the group; pg_config by the
    group's name, which is a running number of the whole job. Both grow in the order in which groups are made, so they pair up; not
    where an entry, which has both, says otherwise."""
    status = {str(key): value for key, value in _table(dump.get("pg_status")).items() if isinstance(value, dict)}
    names = list(configs)
    if len(status) != len(names) or not all(key.isdigit() for key in (*status, *names)):
        return {}
    pairs = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
    for entry in entries:
        own, name = str(entry.get("pg_id", "")), _group_of(entry)[0]
        if own in pairs and pairs[own] != name:
            return {}
    return {name: _int(status[own].get("last_enqueued_collective"), -1) for own, name in pairs.items()}
