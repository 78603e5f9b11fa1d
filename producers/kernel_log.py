"""The kernel log followed: /dev/kmsg by sequence number, or a file by place, from a saved cursor on.

I/O only: what a line says is kernel_lines.py's, what of a flood passes is thinning.py's. A line that was there before the agent
first started in this boot is history; one that user space wrote is hearsay unless a setting trusts it. An overrun ring, a file that
was cut, a source that can't be read and thinned lines are each an EvidenceGap. The cursor is saved once what was read is on the bus
or on disk, so a killed agent tells a line twice rather than never.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from events.clock import NS
from events.envelope import TEXT_MAX
from events.hardware import EvidenceGap, KernelRecord
from events.presence import AgentState
from producers.file_wake import FileWake
from producers.kernel_lines import Line, names_one_of, parse_kmsg, parse_line, printable, short_host
from producers.log_file import Cursor, FileFollower, Hole
from producers.observe import Desk
from producers.supervise import Pulse
from producers.thinning import Batch, Thinning

KMSG = "kmsg"
PRODUCER = "kernel_log"
#: From the first line of a batch to its sending; while lines that match nothing go on and on, from one batch to the next.
BATCH_S, BATCH_NEXT_S = 0.02, 0.5
#: Between two looks at a file: at least, and at most where the kernel tells of its changes.
POLL_S, POLL_IDLE_S = 0.05, 1.0
#: The cursor is saved this long after a batch is safe; while they go on and on, so often.
_SAVE_S, _SAVE_NEXT_S = 0.1, 1.0
_RECORD_BYTES_MAX = 16 * 1024
_RECORDS_A_TURN = 512
#: The ring's backlog at the first start is history until the ring is empty once, or this long.
_BACKLOG_S_MAX = 2.0

_DEFAULT_INTERESTING = re.compile(
    r"NVRM|Xid|panic|fallen off|Oops|BUG:|mlx5|nvme|EXT4-fs error|Out of memory|oom-kill|soft lockup|hard LOCKUP|"
    r"Machine check|Hardware Error|I/O error|XFS .*[Cc]orrupt|blocked for more than",
    re.IGNORECASE,
)


def default_interesting(text: str) -> bool:
    """What always passes where no catalogue was handed in."""
    return _DEFAULT_INTERESTING.search(text) is not None


@dataclass(frozen=True, slots=True)
class KernelLogSettings:
    """`trust_user_facility`: believe what user space wrote into the log (tests only)."""

    trust_user_facility: bool = False
    lines_per_s: int = 200
    interesting: Callable[[str], bool] = default_interesting
    #: Processes of keepstep's own here: what they cause is marked.
    own_pids: Callable[[], frozenset[int]] = frozenset
    #: Names of this machine. A line of syslog's that names another host is hearsay here: a file may collect the lines of many. None given:
    #: every line is taken for this machine's.
    hosts: frozenset[str] = frozenset()


class KernelLogProducer:
    """Follows one source: `kmsg`, or a file's path. `run` ends only by an error, for its supervisor to start it again."""

    def __init__(
        self, source: str, desk: Desk, state_dir: Path, settings: KernelLogSettings, *, device: str = "/dev/kmsg"
    ) -> None:
        self.source = source
        self.desk = desk
        self.settings = settings
        #: Of a file, which is looked at again and again. The kernel's ring is waited for, and that is no stall.
        self.pulse = Pulse(POLL_IDLE_S) if source != KMSG else None
        self._device = device
        digest = sha256(source.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._state_path = state_dir / f"kernel-{digest}.json"
        self._batch = Batch(origin=printable(os.fsencode(source)))
        self._thinning = Thinning(settings.lines_per_s)
        self._flush_handle: asyncio.TimerHandle | None = None
        self._save_handle: asyncio.TimerHandle | None = None
        self._safe_cursor: Any = None
        #: Batches handed in and not yet on the bus or on disk.
        self._unsafe = 0
        self._saved_boot_ns = 0
        self._thinned_at_ns = 0
        self._flushed_ns = self._stored_ns = 0
        # kmsg
        self._descriptor = -1
        self._last_sequence = -1
        self._first = False
        self._catching_up = False
        self._catch_up_until = 0.0
        self._failed: asyncio.Future[None] | None = None
        # file
        self._follower: FileFollower | None = None

    async def run(self) -> None:
        """Raises OSError if the source can't be read."""
        state = self._load_state()
        self._first = state.get("boot_id") != self.desk.boot_id
        self._saved_boot_ns = 0 if self._first else int(state.get("saved_boot_ns", 0))
        cursor = state.get("cursor")
        self._catching_up = True
        self._catch_up_until = time.monotonic() + _BACKLOG_S_MAX
        try:
            if self.source == KMSG:
                await self._run_kmsg(cursor)
            else:
                await self._run_file(Cursor.of(cursor))
        except OSError as error:
            detail = f"{self.source}: {error.strerror or error}"
            self.desk.about_node(PRODUCER, EvidenceGap(producer=PRODUCER, reason="unreadable", detail=detail[:TEXT_MAX]))
            raise
        finally:
            self._flush()
            self._save_now()

    def pump(self) -> None:
        """Reads what is there now: called when an attempt begins, so that what came before is told as before it."""
        try:
            if self._descriptor >= 0:
                self._read_kmsg()
            elif self._follower is not None and self._follower.present:
                self._read_file(self._follower)
        except OSError:
            return  # `run` meets it again and reports it
        self._flush()

    # /dev/kmsg

    async def _run_kmsg(self, cursor: Any) -> None:
        self._last_sequence = cursor if isinstance(cursor, int) and not self._first else -1
        self._descriptor = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        loop.add_reader(self._descriptor, self._readable)
        try:
            self._readable()
            await self._failed
        finally:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _readable(self) -> None:
        try:
            self._read_kmsg()
        except OSError as error:
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)

    def _read_kmsg(self) -> None:
        for _ in range(_RECORDS_A_TURN):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES_MAX)
            except BlockingIOError:
                self._caught_up()
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the ring ran over the place we read at; the next record's number says by how much
                if error.errno == errno.EINVAL:
                    self._gap("unreadable", 1, "a record of the kernel's ring is longer than its buffer")
                    continue
                raise
            if not record:
                raise OSError(errno.EIO, "the kernel's ring ended")
            line = parse_kmsg(record)
            if line is None:
                self._gap("unreadable", 1, f"not a record of the kernel's ring: {printable(record, 200)}")
                continue
            if line.sequence <= self._last_sequence:
                continue
            if self._last_sequence >= 0 and line.sequence > self._last_sequence + 1:
                missing = line.sequence - self._last_sequence - 1
                self._gap("overrun", missing, f"the kernel's ring overran {missing} records before they were read")
            self._last_sequence = line.sequence
            if self._catching_up and time.monotonic() > self._catch_up_until:
                self._caught_up()
            self._take(line, history=self._first and self._catching_up)

    def _caught_up(self) -> None:
        if self._catching_up:
            self._catching_up = False
            self._flush()
            if not self._unsafe:
                self._mark_safe(self._cursor())

    # A file

    async def _run_file(self, cursor: Cursor | None) -> None:
        self._follower = follower = FileFollower(Path(self.source), cursor, first=self._first)
        changed = asyncio.Event()
        wake = FileWake(Path(self.source), changed.set)
        wake.open()
        absent, asked = False, True
        try:
            while True:
                wake.watch()  # before the look, so that nothing comes in between
                changed.clear()
                asked = asked or follower.holds_part  # which is told after a while, whole or not
                if self._read_file(follower) and not asked:
                    wake.missed()
                if self.pulse is not None:
                    self.pulse.beat()
                if not follower.more:
                    self._caught_up()
                if not follower.present and not absent:
                    absent = True
                    self._say("stalled", f"{self.source} does not exist yet; it is followed from when it does")
                elif follower.present and absent:
                    absent = False
                    self._say("resumed", f"{self.source} is there now")
                asked = await self._until_asked(wake, changed, follower.more)
        finally:
            self._flush()
            self._follower = None
            wake.close()
            follower.close()

    @staticmethod
    async def _until_asked(wake: FileWake, changed: asyncio.Event, more: bool) -> bool:
        """Until the file is to be looked at again; whether something called for it, or the clock where nothing can."""
        if more or not wake.trusted:
            await asyncio.sleep(0 if more else POLL_S)
            return True
        clock = asyncio.get_running_loop().time
        looked_s = clock()
        try:
            async with asyncio.timeout(POLL_IDLE_S):
                await changed.wait()
        except TimeoutError:
            return False
        if (left_s := looked_s + POLL_S - clock()) > 0:
            await asyncio.sleep(left_s)
        return True

    def _read_file(self, follower: FileFollower) -> bool:
        """Whether there was anything."""
        found = follower.poll(self.desk.clock.boot_ns())
        for item in found:
            if isinstance(item, Hole):
                self._gap(item.reason, -1, item.detail)
            elif self.settings.interesting(item.raw.decode("utf-8", "replace")):
                line = parse_line(item.raw)
                if line is not None:
                    self._take(line, history=item.history)
            elif self._passes(False, item.history):  # of a flood, only what passes is worth being understood
                line = parse_line(item.raw)
                if line is not None:
                    self._keep(line, False, item.history)
        return bool(found)

    # Both

    def _take(self, line: Line, *, history: bool) -> None:
        interesting = self.settings.interesting(line.text)
        if self._passes(interesting, history):
            self._keep(line, interesting, history)

    def _passes(self, interesting: bool, history: bool) -> bool:
        if history and not interesting:
            return False  # what went on before we were there matters only where it may explain something
        passes = self._thinning.passes(interesting, self.desk.clock.boot_ns())
        if not passes and self._flush_handle is None:
            self._schedule_flush(BATCH_NEXT_S)
        return passes

    def _keep(self, line: Line, interesting: bool, history: bool) -> None:
        now_ns = self.desk.clock.boot_ns()
        record = KernelRecord(
            text=line.text,
            priority=line.priority,
            facility=line.facility,
            sequence=line.sequence,
            since_boot_us=line.since_boot_us,
            hearsay=self._from_elsewhere(line) or (line.facility != 0 and not self.settings.trust_user_facility),
            history=history,
            own=interesting and names_one_of(line.text, self.settings.own_pids()),
        )
        age_ns = self._age_ns(line, now_ns) if self._catching_up else 0
        if not self._batch.fits(record, age_ns):
            self._flush()
        self._batch.add(record, age_ns)
        if interesting or self._flush_handle is None:
            self._schedule_flush(0.0 if interesting else max(BATCH_S, BATCH_NEXT_S - (now_ns - self._flushed_ns) / NS))

    def _from_elsewhere(self, line: Line) -> bool:
        return bool(line.host and self.settings.hosts) and short_host(line.host) not in self.settings.hosts

    def _age_ns(self, line: Line, now_ns: int) -> int:
        """How long ago a line that was missed came. The kernel's stamps drift from other clocks, so this serves what is found on
        starting only, and never goes back beyond what was read before."""
        if not line.since_boot_us:
            return 0
        age_ns = max(0, time.monotonic_ns() - line.since_boot_us * 1000)
        return min(age_ns, now_ns - self._saved_boot_ns) if self._saved_boot_ns else age_ns

    def _schedule_flush(self, delay_s: float) -> None:
        if self._flush_handle is not None:
            if delay_s:
                return
            self._flush_handle.cancel()
        self._flush_handle = asyncio.get_running_loop().call_later(delay_s, self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._batch.records:
            log, age_ns = self._batch.take()
            cursor = self._cursor()
            self._flushed_ns = self.desk.clock.boot_ns()
            self._unsafe += 1
            self.desk.about_node(PRODUCER, log, age_ns=age_ns, on_safe=lambda: self._batch_safe(cursor))
        now_ns = self.desk.clock.boot_ns()
        if self._thinning.dropped:
            if now_ns - self._thinned_at_ns >= 1_000_000_000:
                self._thinned_at_ns = now_ns
                count = self._thinning.take_dropped()
                detail = f"{self.source}: {count} lines that match nothing of the catalogue, above {self.settings.lines_per_s} a second"
                self._gap("thinned", count, detail)
            else:
                self._schedule_flush(1.0)

    def _cursor(self) -> Any:
        if self.source == KMSG:
            return self._last_sequence
        cursor = self._follower.cursor if self._follower is not None else None
        return asdict(cursor) if cursor is not None else None

    def _gap(self, reason: Any, missing: int, detail: str) -> None:
        gap = EvidenceGap(producer=PRODUCER, reason=reason, missing=missing, detail=detail[:TEXT_MAX])
        self.desk.about_node(PRODUCER, gap)

    def _say(self, state: Any, detail: str) -> None:
        self.desk.about_node(PRODUCER, AgentState(producer=PRODUCER, state=state, detail=detail[:TEXT_MAX]))

    # The cursor on disk

    def _load_state(self) -> dict[str, Any]:
        try:
            value = json.loads(self._state_path.read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _batch_safe(self, cursor: Any) -> None:
        self._unsafe -= 1
        self._mark_safe(cursor)

    def _mark_safe(self, cursor: Any) -> None:
        self._safe_cursor = cursor
        if self._save_handle is None:
            since_s = (self.desk.clock.boot_ns() - self._stored_ns) / NS
            self._save_handle = asyncio.get_running_loop().call_later(max(_SAVE_S, _SAVE_NEXT_S - since_s), self._save_now)

    def _save_now(self) -> None:
        if self._save_handle is not None:
            self._save_handle.cancel()
            self._save_handle = None
        if self._safe_cursor is None or self._catching_up:
            return
        self._stored_ns = self.desk.clock.boot_ns()
        state = {"boot_id": self.desk.boot_id, "saved_boot_ns": self._stored_ns, "cursor": self._safe_cursor}
        temporary = self._state_path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(state))
            temporary.replace(self._state_path)
        except OSError:
            pass  # told again after a restart, rather than never
