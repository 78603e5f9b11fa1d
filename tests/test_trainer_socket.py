"""The training hook's socket: real Unix sockets, real processes, and whatever a hostile one could send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.envelope import AnyEvent
from events.presence import AgentState, RankProcess
from events.registry import canonical, parse
from events.training import TrainingProgress
from producers import trainer
from producers.observe import Clock, Desk
from producers.outbox import Observation
from producers.trainer import BadSocketPath, TrainerSettings, TrainerSocket
from producers.trainer_lines import LINE_BYTES_MAX, BadLine, Hello, Progress
from producers.trainer_lines import parse as parse_hook

HELLO: dict[str, Any] = {
    "v": 1, "type": "hello", "job": "gpt", "attempt": 2, "rank": 1, "world_size": 4, "pid": 7, "restored_step": 40,
}  # fmt: skip


def progress(step: int, samples: list[list[Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "v": 1, "type": "progress", "phase": "step", "progress": step, "step": step, "restored_step": 40, "dropped": 0,
        "samples": [[step, 10**18 + step, 0.05, 2.5, 1.0, 4096, 0.4]] if samples is None else samples,
    } | more  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------------------------------


def test_a_line_becomes_facts() -> None:
    said = parse_hook(json.dumps(progress(7, [[7, 1, 0.1, "NaN", "Infinity", None, None]], dropped=3)).encode())
    assert isinstance(said, Progress)
    (fact,) = said.facts(1, 4)
    assert (fact.rank, fact.world_size, fact.step, fact.dropped) == (1, 4, 7, 3)
    assert fact.samples[0].loss is not None and math.isnan(fact.samples[0].loss)
    assert fact.samples[0].grad_norm == math.inf and fact.samples[0].tokens is None


def test_a_sample_may_tell_of_a_skip_own_work_and_a_change() -> None:
    rows = [[7, 1, 0.1, "NaN", None, None, None, 1, 0.05, "rate"], [8, 1, 0.1, 1.0, None, None, None]]
    said = parse_hook(json.dumps(progress(8, rows)).encode())
    assert isinstance(said, Progress)
    told, plain = said.facts(1, 4)[0].samples
    assert (told.skipped, told.busy_s, told.changed) == (True, 0.05, "rate")
    assert (plain.skipped, plain.busy_s, plain.changed) == (False, None, "")


@pytest.mark.parametrize(
    "more",
    [[1], [2, None, ""], [True, None, ""], [0, -1.0, ""], [0, "NaN", ""], [0, "soon", ""], [0, None, "weather"], [0, None, []]],
)
def test_a_sample_whose_more_is_nonsense_is_refused(more: list[Any]) -> None:
    with pytest.raises(BadLine, match="sample"):
        parse_hook(json.dumps(progress(7, [[7, 1, 0.1, 1.0, None, None, None, *more]])).encode())


def test_many_samples_are_several_facts_and_dropped_is_told_once() -> None:
    rows = [[i, i, 0.1, None, None, None, None] for i in range(600)]
    said = parse_hook(json.dumps(progress(599, rows, dropped=5)).encode())
    assert isinstance(said, Progress)
    facts = said.facts(0, 1)
    assert [len(fact.samples) for fact in facts] == [256, 256, 88]
    assert [fact.dropped for fact in facts] == [5, 0, 0]
    assert [s.step for fact in facts for s in fact.samples] == list(range(600))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"v":1}', b"{" * 50_000,
        json.dumps({**HELLO, "v": 2}).encode(),
        json.dumps({**HELLO, "v": True}).encode().replace(b"true", b"1.5"),
        json.dumps({**HELLO, "rank": 4}).encode(),
        json.dumps({**HELLO, "rank": -1}).encode(),
        json.dumps({**HELLO, "rank": True}).encode(),
        json.dumps({**HELLO, "world_size": 0}).encode(),
        json.dumps({**HELLO, "job": "x" * 401}).encode(),
        json.dumps({**HELLO, "job": None}).encode(),
        json.dumps({**HELLO, "attempt": 10**30}).encode(),
        json.dumps(progress(1, phase="resting")).encode(),
        json.dumps(progress(1, phase=["step"])).encode(),
        json.dumps(progress(-2)).encode(),
        json.dumps(progress(1, samples={})).encode(),
        json.dumps(progress(1, [[1, 2, 3]])).encode(),
        json.dumps(progress(1, [[1, 2, "NaN", None, None, None, None]])).encode(),
        json.dumps(progress(1, [[1, 2, -0.1, None, None, None, None]])).encode(),
        json.dumps(progress(1, [[1.5, 2, 0.1, None, None, None, None]])).encode(),
        json.dumps(progress(1, [[1, 2, 0.1, "nan", None, None, None]])).encode(),
        json.dumps(progress(1, [[1, 2, 0.1, float("nan"), None, None, None]])).encode(),
        json.dumps(progress(1, [[1, 2, 0.1, None, None, -1, None]])).encode(),
        b'{"v":1,"type":"progress","step":' + b"9" * 5000 + b"}",
        b" " * (LINE_BYTES_MAX + 1),
    ],
)  # fmt: skip
def test_nonsense_is_a_bad_line(line: bytes) -> None:
    with pytest.raises(BadLine) as error:
        parse_hook(line)
    assert len(str(error.value)) < 300


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.sampled_from(["NaN", "step", "hello"]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from([*HELLO, *progress(1)]), inner, max_size=8),
    max_leaves=10,
)


@given(
    base=st.sampled_from([HELLO, progress(3)]),
    change=st.dictionaries(st.sampled_from([*HELLO, *progress(1)]), _JSON, max_size=4),
)
@settings(max_examples=120, deadline=None)
def test_any_change_of_a_line_is_read_or_refused(base: dict[str, Any], change: dict[str, Any]) -> None:
    """What is read makes facts that survive the wire."""
    try:
        said = parse_hook(json.dumps({**base, **change}).encode())
    except BadLine:
        return
    if isinstance(said, Hello):
        assert 0 <= said.rank < said.world_size
        return
    for fact in said.facts(0, 1):
        seen = Kept.event(fact)
        assert canonical(parse(canonical(seen))) == canonical(seen)


# --- the socket ---------------------------------------------------------------------------------------------------------------


class Kept:
    """An outbox that keeps what is handed in."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.waiting = 0

    def put(self, lane: str, seen: Observation, on_safe: Callable[[], None] | None = None) -> None:
        self.events.append(parse(seen.data))

    @staticmethod
    def event(fact: TrainingProgress) -> AnyEvent:
        from events.registry import make

        return make(fact, id="x", source="s", subject="n", time=1)

    def progress(self) -> list[AnyEvent]:
        return [event for event in self.events if isinstance(event.data, TrainingProgress)]

    def said(self) -> str:
        return " ".join(event.data.detail for event in self.events if isinstance(event.data, AgentState))


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    kept: Kept,
    ranks: Callable[[], tuple[RankProcess, ...]] | None = None,
    current: Callable[[], tuple[str, int]] = lambda: ("gpt", 2),
    **more: Any,
) -> AsyncIterator[TrainerSocket]:
    clock = Clock(time.time_ns, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME), os.urandom)
    mine = RankProcess(rank=1, pid=os.getpid(), state="S")
    server = TrainerSocket(
        path, Desk("n1", "boot", clock, kept), ranks or (lambda: (mine,)), current, TrainerSettings(**more)  # type: ignore[arg-type]
    )  # fmt: skip
    task = asyncio.create_task(server.run())
    await until(path.exists)
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


class Hook:
    """The other side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, path: Path, hello: dict[str, Any] | None = HELLO) -> Hook:
        hook = cls(*await asyncio.open_unix_connection(str(path)))
        if hello is not None:
            hook.say(hello)
        return hook

    def say(self, value: Any) -> None:
        self.raw(json.dumps(value).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    async def dropped(self, within_s: float = 5.0) -> bool:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(within_s):
                return await self.reader.read(1) == b""
        return True


async def test_progress_reaches_the_jobs_stream(tmp_path: Path) -> None:
    kept = Kept()
    async with serving(tmp_path / "s", kept) as server:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        hook = await Hook.connect(tmp_path / "s")
        for step in range(41, 51):
            hook.say(progress(step))
        await until(lambda: len(kept.progress()) == 10)
        hook.writer.close()
        again = await Hook.connect(tmp_path / "s")
        again.say(progress(51))
        await until(lambda: len(kept.progress()) == 11)
        again.writer.close()
        assert not server.refused
    events = kept.progress()
    assert [e.data.step for e in events] == list(range(41, 52))
    assert {(e.job, e.attempt, e.subject, e.data.rank, e.data.world_size) for e in events} == {("gpt", 2, "n1", 1, 4)}
    assert [e.number for e in events] == list(range(1, 12)) and len({e.source for e in events}) == 1


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({**HELLO, "attempt": 1}, "not the one running here"),
        ({**HELLO, "job": "other"}, "not the one running here"),
        ({**HELLO, "rank": 0}, "rank that does not run here"),
        (progress(1), "progress before a hello"),
    ],
)
async def test_what_it_claims_must_be_what_the_agent_knows(
    tmp_path: Path, hello: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "KNOWN_S_MAX", 0.1)
    kept = Kept()
    async with serving(tmp_path / "s", kept) as server:
        hook = await Hook.connect(tmp_path / "s", hello)
        assert await hook.dropped()
        assert sum(server.refused.values()) == 1
    assert why in kept.said() and not kept.progress()


CHILD = """
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
s.sendall(sys.argv[2].encode() + b"\\n" + sys.argv[3].encode() + b"\\n")
sys.exit(0 if s.recv(1) == b"" else 1)
"""


@pytest.mark.parametrize("mine", [True, False])
async def test_only_a_ranks_own_processes_are_heard(tmp_path: Path, mine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process below the rank's is heard (a launcher in between); one that is no rank's is turned away, whatever it says."""
    monkeypatch.setattr(trainer, "KNOWN_S_MAX", 0.2)
    kept = Kept()
    other = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    try:
        rank = RankProcess(rank=1, pid=os.getpid() if mine else other.pid, state="S")
        async with serving(tmp_path / "s", kept, lambda: (rank,)) as server:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, str(tmp_path / "s"), json.dumps(HELLO), json.dumps(progress(41))
            )
            if mine:
                await until(lambda: len(kept.progress()) == 1)
                child.kill()
            else:
                await until(lambda: server.refused["a process that is not the rank's"] == 1)
            await child.wait()
    finally:
        other.kill()
        other.wait()
    assert len(kept.progress()) == int(mine)


@pytest.mark.parametrize("current", [("gpt", 2), ("", 0)])
async def test_any_process_may_speak_where_that_is_set(tmp_path: Path, current: tuple[str, int]) -> None:
    """Under another launcher no job of the agent's runs: then the job is what the process says it is."""
    kept = Kept()
    async with serving(tmp_path / "s", kept, lambda: (), lambda: current, any_process=True):
        hook = await Hook.connect(tmp_path / "s")
        hook.say(progress(41))
        await until(lambda: len(kept.progress()) == 1)
        hook.writer.close()
    assert {(e.job, e.attempt) for e in kept.progress()} == {("gpt", 2)}


async def test_a_process_that_is_known_a_moment_later_is_waited_for(tmp_path: Path) -> None:
    kept, known = Kept(), list[RankProcess]()
    async with serving(tmp_path / "s", kept, lambda: tuple(known)):
        hook = await Hook.connect(tmp_path / "s")
        hook.say(progress(41))
        await asyncio.sleep(0.15)
        assert not kept.progress()
        known.append(RankProcess(rank=1, pid=os.getpid(), state="S"))
        await until(lambda: len(kept.progress()) == 1)
        hook.writer.close()


@pytest.mark.parametrize(
    "attack",
    [
        b"x" * (LINE_BYTES_MAX * 3),
        b"\n\n\n",
        b'{"v":1,"type":"progress"}\n',
        os.urandom(5000) + b"\n",
        b"[" * 200_000 + b"\n",
        json.dumps({**HELLO, "rank": 0}).encode() + b"\n",
    ],
)
async def test_hostile_input_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path, attack: bytes) -> None:
    kept = Kept()
    async with serving(tmp_path / "s", kept) as server:
        good = await Hook.connect(tmp_path / "s")
        good.say(progress(41))
        bad = await Hook.connect(tmp_path / "s")
        with contextlib.suppress(ConnectionError):
            bad.raw(attack)
            assert await bad.dropped()
        good.say(progress(42))
        await until(lambda: [e.data.step for e in kept.progress()] == [41, 42])
        assert sum(server.refused.values()) == 1
        good.writer.close()
    assert "connections dropped: 1 x" in kept.said()


async def test_too_many_connections(tmp_path: Path) -> None:
    kept = Kept()
    async with serving(tmp_path / "s", kept, connections_max=6, connections_a_process_max=4) as server:
        hooks = [await Hook.connect(tmp_path / "s") for _ in range(50)]
        await until(lambda: sum(server.refused.values()) == 46)
        hooks[0].say(progress(41))
        await until(lambda: len(kept.progress()) == 1)
        for hook in hooks:
            hook.writer.close()
        await until(lambda: not server._by_pid)
        late = await Hook.connect(tmp_path / "s")
        late.say(progress(42))
        await until(lambda: len(kept.progress()) == 2)
        late.writer.close()
    reports = [e for e in kept.events if isinstance(e.data, AgentState)]
    assert len(reports) <= 2, "a flood of refusals is not a flood of reports"


async def test_a_flood_of_lines_makes_its_sender_wait(tmp_path: Path) -> None:
    kept = Kept()
    async with serving(tmp_path / "s", kept, lines_per_s=100.0):
        hook = await Hook.connect(tmp_path / "s")
        hook.raw((json.dumps(progress(41)).encode() + b"\n") * 2000)
        await asyncio.sleep(0.5)
        assert 100 <= len(kept.progress()) <= 400
        hook.writer.transport.abort()


async def test_silence_before_the_hello_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "HELLO_S_MAX", 0.1)
    async with serving(tmp_path / "s", Kept()) as server:
        hook = await Hook.connect(tmp_path / "s", None)
        assert await hook.dropped()
        assert server.refused["no hello in time"] == 1


async def test_what_a_killed_agent_left_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    kept = Kept()
    async with serving(tmp_path / "s", kept):
        await asyncio.sleep(0.05)
        hook = await Hook.connect(tmp_path / "s")
        hook.say(progress(41))
        await until(lambda: len(kept.progress()) == 1)
        hook.writer.close()


def test_paths_where_no_socket_can_be(tmp_path: Path) -> None:
    with pytest.raises(BadSocketPath, match=r"82 bytes.*give a shorter one"):
        trainer.check_path(Path("/" + "é" * 41))
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BadSocketPath, match="is no socket"):
        trainer.check_path(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


async def test_a_folder_deeper_than_a_sockets_address(tmp_path: Path) -> None:
    """The hook reaches it the same way."""
    from keepstep._sender import connect

    path, kept = tmp_path / ("deep" * 20) / ("deeper" * 10) / "trainer.sock", Kept()
    async with serving(path, kept):
        assert len(str(path)) > trainer.PATH_BYTES_MAX
        await asyncio.sleep(0.05)
        with connect(str(path)) as stream:
            stream.send(json.dumps(HELLO).encode() + b"\n" + json.dumps(progress(41)).encode() + b"\n")
            await until(lambda: len(kept.progress()) == 1)
