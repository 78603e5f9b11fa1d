"""The hook's state in one training process: phase, progress, and the training thread's half of the ring.

`Hook.step` runs at the end of every step, so each line of it counts (tests/bench/bench_hook.py holds it to 50 microseconds).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping
from operator import index
from time import perf_counter
from types import TracebackType
from typing import Any, Optional

from keepstep import _device
from keepstep._ring import CAPACITY, Ring
from keepstep._sender import Sender

PHASES = ("startup", "step", "evaluation", "checkpoint", "undeclared")
#: What a script may say has changed; anything else counts as "other".
CHANGES = ("data", "rate", "context", "other")
#: The process that speaks for the rank. What it spawns inherits the rank's environment and must keep silent.
CLAIM = "KEEPSTEP_CLAIMED_PID"

#: A sample without its number.
_Values = tuple[int, float, float, Optional[float], Optional[float], Optional[int], Optional[float], bool, Optional[float], str]
#: A finished step; the copy of its values (None: it has them) is on its way.
_Pending = tuple[Optional[_device.Copy], _Values]
_ELSEWHERE = object()
_INT_END = 1 << 63
_INFINITE = float("inf")


class Hook:
    __slots__ = (
        "_apart_s", "_busy_s", "_changed", "_copies", "_depth", "_ended_s", "_entered_s", "_faulted", "_kinds", "_pending", "_sender", "attempt", "job",
        "last_step", "peak_flops", "phase", "pid", "progress", "rank", "restored_step", "ring", "world_size",
    )  # fmt: skip

    def __init__(self, environment: Mapping[str, str], sender: Any = None) -> None:
        """`sender`: in the place of one to the agent. Raises KeyError, ValueError where the environment isn't that of a rank under keepstep."""
        self.job = environment["KEEPSTEP_JOB"]
        self.attempt = int(environment["KEEPSTEP_ATTEMPT"])
        self.rank = int(environment["KEEPSTEP_RANK"])
        self.world_size = int(environment.get("WORLD_SIZE") or 1)
        self.pid = os.getpid()
        self.peak_flops = _positive(environment.get("KEEPSTEP_PEAK_FLOPS"))
        self.ring = Ring()
        self.phase = "startup"
        self.progress = 0
        self.last_step = -1
        self.restored_step = -1
        self._ended_s = perf_counter()
        self._apart_s = 0.0  # since the last step, in phases other than it
        self._busy_s: float | None = None  # of the present step, as far as it was marked
        self._changed = ""
        self._depth = 0
        self._pending: deque[_Pending] = deque()
        self._copies = _device.Copies()
        self._kinds: dict[type, int] = {}
        self._entered_s = 0.0
        self._faulted = False
        self._sender = sender if sender is not None else Sender(self, environment["KEEPSTEP_SOCKET"])
        self._sender.start()

    def hello(self) -> dict[str, Any]:
        return {
            "v": 1,
            "type": "hello",
            "job": self.job,
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "pid": self.pid,
            "restored_step": self.restored_step,
        }

    def step(
        self, step: int, loss: Any, grad_norm: Any, tokens: Any, flops: Any, skipped: Any = False, busy_s: Any = None
    ) -> None:
        now_s = perf_counter()
        step_time_s = now_s - self._ended_s - self._apart_s
        self._ended_s = now_s
        self._apart_s = 0.0
        marked_s, self._busy_s = self._busy_s, None
        changed, self._changed = self._changed, ""
        if type(step) is not int:
            step = index(step)
        if not 0 <= step < _INT_END:
            raise ValueError(f"a step is numbered from 0, not {step}")
        if step_time_s < 0.0:
            step_time_s = 0.0
        mfu = None
        if flops is not None and self.peak_flops and step_time_s > 0.0:
            mfu = flops / step_time_s / self.peak_flops
            if type(mfu) is not float or not 0.0 <= mfu < _INFINITE:
                mfu = None
        if tokens is not None and type(tokens) is not int:
            tokens = self._read(tokens)
            tokens = int(tokens) if tokens is not None else None
        if tokens is not None and not 0 <= tokens < _INT_END:
            tokens = None
        if skipped is not False:
            value = self._read(skipped)
            skipped = value is not _ELSEWHERE and bool(value)
        busy_s = marked_s if busy_s is None else self._read(busy_s)
        if busy_s is not None and (type(busy_s) is not float or not 0.0 <= busy_s < _INFINITE):
            busy_s = None
        elsewhere: list[Any] | None = None
        if loss is not None and type(loss) is not float:
            value = self._read(loss)
            if value is _ELSEWHERE:
                elsewhere, value = [loss, None], None
            loss = value
        if grad_norm is not None and type(grad_norm) is not float:
            value = self._read(grad_norm)
            if value is _ELSEWHERE:
                elsewhere, value = [elsewhere[0] if elsewhere else None, grad_norm], None
            grad_norm = value
        if elsewhere or self._pending:
            self._later(elsewhere, (step, now_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed))
        else:
            ring = self.ring
            number = ring.written
            ring.slots[number % CAPACITY] = (
                number, step, now_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed
            )  # fmt: skip
            ring.written = number + 1
        self.last_step = step
        if self.phase == "startup":
            self.phase = "step"
            self.progress += 1
        self.progress += 1

    def computed(self) -> None:
        self._busy_s = max(0.0, perf_counter() - self._ended_s - self._apart_s)

    def change(self, what: str) -> None:
        self._changed = what if what in CHANGES else "other"

    def _read(self, value: Any) -> Any:
        """A number that is at hand; _ELSEWHERE for a tensor on a device; None for what it can't read without waiting."""
        cls = type(value)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = _device.kind_of(cls)
        if kind == _device.TENSOR:
            return float(value.item()) if value.is_cpu else _ELSEWHERE
        return float(value) if kind == _device.NUMBER else None

    def _later(self, elsewhere: list[Any] | None, sample: _Values) -> None:
        """A step whose values are on their way, or that is behind such a one: order is kept."""
        self.settle()
        copy = self._copies.start(elsewhere) if elsewhere else None
        if copy is not None or self._pending:
            self._pending.append((copy, sample))
        else:
            self.ring.write(*sample)

    def settle(self) -> None:
        """Writes the steps whose values have arrived. Only ever on the training thread: to ask a device anything from another
        one would break the capture of a CUDA graph."""
        pending = self._pending
        while pending and ((copy := pending[0][0]) is None or copy.over()):
            step, ended_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed = pending.popleft()[1]
            copied_loss, copied_norm = copy.values() if copy is not None else (None, None)
            loss = loss if copied_loss is None else copied_loss
            grad_norm = grad_norm if copied_norm is None else copied_norm
            self.ring.write(step, ended_s, step_time_s, loss, grad_norm, tokens, mfu, skipped, busy_s, changed)
        while len(pending) >= _device.PENDING_MAX:
            self._give_up()

    def _give_up(self) -> None:
        self.ring.write(*self._pending.popleft()[1])

    def enter(self, name: str) -> str:
        """Begins a phase; returns the one to go back to."""
        before = self.phase
        if self._depth == 0:
            self._entered_s = perf_counter()
        self._depth += 1
        self.phase = name if name in PHASES else "undeclared"
        self.progress += 1
        if self._pending:
            self.settle()
        return before

    def leave(self, before: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._apart_s += perf_counter() - self._entered_s
        # A step that was marked within the phase ended the start-up.
        self.phase = "step" if before == "startup" and self.last_step >= 0 else before
        self.progress += 1

    def restored(self, step: int) -> None:
        """The run goes on from a checkpoint of `step` (-1: from nothing); the time until here is no step's."""
        self.restored_step = step
        self._ended_s = perf_counter()
        self._apart_s = 0.0
        self.progress += 1

    def fault(self, what: str, error: BaseException) -> None:
        """Trouble of the hook's own: told once, never raised."""
        if not self._faulted:
            self._faulted = True
            warn(f"{what} ({type(error).__name__}: {error}); the job goes on, and so does the hook")

    def flush(self) -> None:
        """At exit: the last step is sent too. Bounded (Sender.flush); a forked child, which may run this as well, sends nothing."""
        if os.getpid() != self.pid:
            return
        try:
            if self._pending:
                self.settle()
            while self._pending:
                self._give_up()
        except Exception as error:
            self.fault("could not read its last values", error)
        self._sender.flush()

    def abandon(self) -> None:
        self._sender.abandon()


class Phase:
    """`with keepstep.phase("evaluation"):`. Does nothing where there is no hook; what the block raises, it raises."""

    __slots__ = ("_before", "_hook", "_name")

    def __init__(self, hook: Hook | None, name: str) -> None:
        self._hook, self._name, self._before = hook, name, ""

    def __enter__(self) -> Phase:
        hook = self._hook
        if hook is not None:
            try:
                self._before = hook.enter(self._name)
            except Exception as error:
                hook.fault("could not begin a phase", error)
                self._hook = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook.leave(self._before)


def claimed(environment: Any) -> bool:
    """Whether this process may speak for the rank; it claims that by the first call, for good."""
    owner = environment.get(CLAIM)
    if owner is not None:
        return bool(owner == str(os.getpid()))
    environment[CLAIM] = str(os.getpid())
    return True


def _positive(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if 0.0 < value < float("inf") else 0.0


def warn(text: str) -> None:
    try:
        sys.stderr.write(f"keepstep: {text}\n")
    except Exception:  # a closed or full stderr is no reason either
        pass
