"""PyTorch's flight recorder: a rank's dump (JSON, or the pickle that NCCL's watchdog writes), read as the groups it is in and what it has
pending. The file is anybody's: bounded in size, and unpickled without a single class, by the opcodes alone that a dump needs. What is read
is looked at two levels deep and no further, since a pickle may hold a value in itself, or a list of ten lists of ten lists.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from events.envelope import NAME_MAX, TEXT_MAX
from events.finding import GroupState, PendingOperation
from events.rank_set import RANKS_MAX, compact

#: The recorder keeps a few thousand operations with their frames; a dump above this is not one.
DUMP_BYTES_MAX = 64 << 20
#: The same dump is a tenth as long as a pickle, since equal frames are in it once. Each byte may be a list of 56.
PICKLE_BYTES_MAX = 16 << 20
ENTRIES_MAX = 200_000
#: Of a rank's pending operations the first so many are kept: the front is what decides.
PENDING_MAX, GROUPS_MAX, PEERS_MAX = 64, 64, 64
_NUMBER = re.compile(r"\d{1,9}")
_TRANSFER = re.compile(r"(send|recv)\s*(\d{1,9})(->|<-)(\d{1,9})\Z")


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


class _Plain(pickle._Unpickler):
    """Numbers, text, lists, tuples and dictionaries. The unpickler that is written in Python, since only there an opcode can be left out;
    it takes as long as the same dump does as JSON. (Hashing a tuple of tuples of tuples takes for ever, and nobody can interrupt it.)"""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        raise BadDump(f"it is a pickle that wants {module[:80]}.{name[:80]}; a dump of the flight recorder holds no classes")

    def persistent_load(self, pid: Any) -> Any:
        raise BadDump("it is a pickle that refers to something outside it; a dump of the flight recorder does not")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for at in range(0, len(items), 2):
            self._put(items[at], items[at + 1])

    def _dictionary(self) -> None:
        items = self.pop_mark()
        self.append({})
        for at in range(0, len(items), 2):
            self._put(items[at], items[at + 1])

    def _put(self, key: Any, value: Any) -> None:
        into = self.stack[-1]
        if type(into) is not dict or type(key) not in (str, int):
            raise BadDump("it is a pickle of something else than tables by name")
        into[key] = value

    def _append(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def _appends(self) -> None:
        items = self.pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        if type(into := self.stack[-1]) is not list:
            raise BadDump("it is a pickle that adds to what is no list")
        return into

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
            pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.INT, pickle.LONG, pickle.LONG1, pickle.BINFLOAT, pickle.FLOAT,
            pickle.BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINUNICODE, pickle.UNICODE, pickle.SHORT_BINSTRING, pickle.BINSTRING,
            pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.LIST,
            pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
            pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.PERSID, pickle.BINPERSID,  # which say what they want, and are refused
        )
    } | {
        pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items, pickle.DICT[0]: _dictionary,
        pickle.APPEND[0]: _append, pickle.APPENDS[0]: _appends,
    }  # fmt: skip


def load(path: Path) -> Any:
    """A file as JSON, or else as a pickle without classes. Raises BadDump, OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe in its place is not waited for
        raw = file.read(DUMP_BYTES_MAX + 1)
    return loads(raw)


def loads(raw: bytes) -> Any:
    """Raises BadDump."""
    if len(raw) > DUMP_BYTES_MAX:
        raise BadDump(f"it is larger than {DUMP_BYTES_MAX >> 20} MiB")
    if not raw.strip():
        raise BadDump("it is empty")
    if raw[:1] == b"\x80":
        if len(raw) > PICKLE_BYTES_MAX:
            raise BadDump(f"it is a pickle larger than {PICKLE_BYTES_MAX >> 20} MiB")
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
    if len(entries) > ENTRIES_MAX:
        raise BadDump(f"it has more than {ENTRIES_MAX} entries")
    entries = [entry for entry in entries if isinstance(entry, dict)]
    configs = {_text(name): config for name, config in _table(dump.get("pg_config")).items() if isinstance(config, dict)}
    told = {name: _members(_listed(config.get("ranks"))) for name, config in configs.items()}
    members = {name: ranks for name, (ranks, _) in told.items()}
    kinds = {name: _text(config.get("desc")) for name, config in configs.items()}
    entered: dict[str, int] = {}
    transfers: set[str] = set()
    pending: list[PendingOperation] = []
    entries.sort(key=lambda entry: _int(entry.get("record_id"), 0))
    counted = _Counted(from_the_first=bool(entries) and _int(entries[0].get("record_id"), -1) == 0)
    for entry in entries:
        name, kind = _group_of(entry)
        kinds.setdefault(name, kind)
        op = (_text(entry.get("profiling_name")) or "unknown").split(":", 1)[-1]
        transfer = _TRANSFER.match(op)
        if transfer or entry.get("is_p2p") or _int(entry.get("p2p_seq_id"), 0) > 0:
            transfers.add(name)
        seq = _int(entry.get("collective_seq_id"), -1)  # a transfer has the number of the last collective before it
        entered[name] = max(entered.get(name, -1), seq)
        completed = entry.get("state") == "completed"
        peer = _peer(transfer, members.get(name, ()), name, kinds[name])
        if transfer and peer < 0:
            continue  # to a rank that can't be named: nothing follows from it
        if transfer:
            counted.transfer(peer, transfer[1] == "send", completed)
        elif completed:
            counted.collective(name, seq)
        if completed:
            continue
        made = PendingOperation(
            group=name[:NAME_MAX], op=(transfer[1] if transfer else op)[:64], peer=peer, started=entry.get("state") == "started",
            seq=_int(entry.get("p2p_seq_id"), -1) if transfer else seq,
        )  # fmt: skip
        pending.append(made)
    for name, seq in _status(dump, configs, entries).items():
        if name not in transfers:
            entered[name] = max(entered.get(name, -1), seq)
    names = sorted({*configs, *kinds}, key=lambda name: (name not in entered, name))[:GROUPS_MAX]
    groups = tuple(
        GroupState(
            group=name[:NAME_MAX], description=kinds.get(name, "")[:NAME_MAX], ranks=told[name][1] if name in told else "",
            entered=entered.get(name, -1), transfers=name in transfers, **counted.of(name),
        )
        for name in names
    )  # fmt: skip
    return Recording(groups, tuple(pending[:PENDING_MAX]))


class _Counted:
    """Transfers to and from each peer, counted from the last completed collective of each group. Two ranks' counts can be compared then:
    between the same two collectives both have the same transfers with each other, and those complete in order."""

    def __init__(self, from_the_first: bool) -> None:
        self._from_the_first = from_the_first
        self._enqueued: list[tuple[int, int]] = []
        self._done: Counter[tuple[int, int]] = Counter()
        #: Of each group the last completed collective, and how many transfers were enqueued before it.
        self._last: dict[str, tuple[int, int]] = {}

    def transfer(self, peer: int, sent: bool, completed: bool) -> None:
        self._enqueued.append((peer, int(sent)))
        self._done[peer, int(sent)] += completed

    def collective(self, name: str, seq: int) -> None:
        self._last[name] = (seq, len(self._enqueued))

    def of(self, name: str) -> dict[str, Any]:
        if name not in self._last and not self._from_the_first:
            return {}
        seq, at = self._last.get(name, (0, 0))  # collectives count from 1
        before = Counter(self._enqueued[:at])
        # Completed after it, less pending before it, is all completed less all that was enqueued before it.
        since = tuple((*key, count - before[key]) for key, count in sorted(self._done.items()) if count != before[key])
        return {"done": max(-1, seq), "since": since} if len(since) <= PEERS_MAX else {}  # a part of it would be taken for all


def _table(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """Of what is text, or a number in its place; "" of all else. What no encoding has (half a surrogate pair) is replaced."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return str(value) if type(value) is int and abs(value) < 1 << 63 else ""


def _int(value: Any, otherwise: int) -> int:
    try:
        return max(-(1 << 62), min(1 << 62, int(value)))
    except (TypeError, ValueError, OverflowError):
        return otherwise


def _group_of(entry: dict[str, Any]) -> tuple[str, str]:
    """Name and kind: [name, description]."""
    told = entry.get("process_group")
    if isinstance(told, list | tuple) and told:
        return _text(told[0]), _text(told[1]) if len(told) > 1 else ""
    return _text(entry.get("pg_id")), ""


def _listed(told: Any) -> str:
    """`"[0, 4, 8]"`, in the group's own order, or a list."""
    if isinstance(told, list | tuple):
        return ",".join(
            str(rank) for rank in told[:RANKS_MAX] if type(rank) is int or (isinstance(rank, str) and len(rank) < 10)
        )
    return told if isinstance(told, str) else ""


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
    status = {_text(key): value for key, value in _table(dump.get("pg_status")).items() if isinstance(value, dict)}
    names = list(configs)
    if len(status) != len(names) or not all(key.isdigit() for key in (*status, *names)):
        return {}
    pairs = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
    for entry in entries:
        own, name = _text(entry.get("pg_id")), _group_of(entry)[0]
        if own in pairs and pairs[own] != name:
            return {}
    return {name: _int(status[own].get("last_enqueued_collective"), -1) for own, name in pairs.items()}
