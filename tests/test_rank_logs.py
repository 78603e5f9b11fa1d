"""What ranks print: lines, tracebacks, summaries; files that turn over; floods that are sampled; and what it adds to a rank's exit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from actuators.rank_shim import Ring
from actuators.tail import redacted
from events.hardware import EvidenceGap
from events.incident import Signal
from events.rank_log import LauncherExit, RankLine, RankLog
from processors.detector import PartitionFold
from processors.job import job_detector
from producers.rank_lines import LauncherSummary, Tracebacks, like, of_note, split
from producers.rank_logs import RankLogs, RankLogSettings
from producers.rank_output import OutputFile
from tests.telemetry import Story, facts, told
from tests.test_host_producer import Heard, desk_of, until

TRACE = """Traceback (most recent call last):
  File "/w/train.py", line 9, in <module>
    main()
  File "/w/train.py", line 5, in main
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
RuntimeError: CUDA error: an illegal memory access was encountered"""


# Lines


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:[E1201 10:00:00 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600017 milliseconds before timing out.",
        "n1:77:99 [0] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "[rank0]: ValueError: bad batch",
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ",
        "E1201 10:00:00.0 77 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) local_rank: 2 (pid: 99)",
        "OSError: [Errno 28] No space left on device: '/ckpt/step_9'",
        "Fatal Python error: Segmentation fault",
        "KeyboardInterrupt",
    ],
)  # fmt: skip
def test_lines_of_note(line: str) -> None:
    assert of_note(line)


@pytest.mark.parametrize(
    "line", ["step 10 loss 2.31", "INFO: loading shard 3", "", '  File "x.py", line 2', "error rate 0.01", "Epoch: 5"]
)
def test_lines_of_no_note(line: str) -> None:
    assert not of_note(line)


def test_who_wrote_a_line_and_what_is_alike() -> None:
    assert split("[rank12]: x") == ("[rank12]:", "x") and split("[default0]:  File") == ("[default0]:", " File")
    assert split("3: Traceback") == ("3:", "Traceback") and split("loss: 3") == ("", "loss: 3")
    assert like("step 10 at 0x7ffe") == like("step 99 at 0x1234")


# Tracebacks


def assembled(text: str) -> list[str]:
    tracebacks, found = Tracebacks(), []
    for line in text.split("\n"):
        if (done := tracebacks.feed(line)) is not None:
            found.append(done)
    return [*found, *tracebacks.settle(all_=True)]


def test_a_traceback_is_whole() -> None:
    assert assembled(f"step 1\n{TRACE}\nstep 2") == [TRACE]
    assert assembled(f"{TRACE}\n{TRACE}") == [TRACE, TRACE]


def test_a_traceback_with_others_lines_in_between() -> None:
    lines = TRACE.split("\n")
    mixed = [part for i, line in enumerate(lines) for part in (line, f"step {i} loss 1.0")][:-1]
    assert assembled("\n".join(mixed)) == [TRACE]


def test_tracebacks_of_two_ranks_in_one_stream() -> None:
    lines = TRACE.split("\n")
    mixed = "\n".join(f"[rank{r}]: {line}" for line in lines for r in (0, 1))
    assert assembled(mixed) == [TRACE, TRACE]


def test_a_chain_is_one_traceback() -> None:
    chain = f"{TRACE}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACE.replace('RuntimeError', 'ValueError')}"
    (found,) = assembled(f"{chain}\nbye")
    assert found == chain


def test_an_exception_by_any_name_and_one_that_never_comes() -> None:
    odd = TRACE.replace("RuntimeError: CUDA error: an illegal memory access was encountered", "Halt: no more")
    assert assembled(odd)[0].endswith("\nHalt: no more")
    cut = "\n".join(TRACE.split("\n")[:-1])
    assert assembled(cut) == [cut]


def test_a_fatal_error_of_the_interpreter() -> None:
    text = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "t.py", line 3 in <module>'
    assert assembled(text) == [text]


def test_a_traceback_without_end_is_bounded() -> None:
    deep = TRACE.replace("    main()\n", "    main()\n" + '  File "x.py", line 1, in f\n    f()\n' * 5000)
    (found,) = assembled(deep)
    assert len(found.encode()) <= 4096 and found.startswith("Traceback") and found.endswith("memory access was encountered")
    assert len(assembled("\n".join(f"[rank{i}]: Traceback (most recent call last):" for i in range(1000)))) <= 16


# torchrun

SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_10:00:03
  host      : n1
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 103)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:01
  host      : n1
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 102)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 102
============================================================"""


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "[default0]:"])
def test_torchruns_summary(prefix: str) -> None:
    summary = LauncherSummary()
    for line in SUMMARY.split("\n"):
        summary.feed(prefix + line)
    first, second = summary.take()
    assert first == LauncherExit(rank=3, local_rank=3, host="n1", pid=103, code=1, time="2026-01-01_10:00:03")
    assert (second.rank, second.code, second.root_cause) == (2, -9, True)
    assert summary.take() == () and not summary.active


# Files that turn over


def test_a_ring_read_at_leisure_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ring, file = Ring("stdout.log", 4096), OutputFile(tmp_path / "stdout.log")
    lines, skipped = [], 0
    for i in range(2000):
        ring.write(f"line {i}\n".encode())
        if i % 100 == 0 or i == 1999:
            got = file.poll(1 << 20)
            lines += got.lines
            skipped += got.skipped
    assert lines == [f"line {i}".encode() for i in range(2000)] and skipped == 0


def test_what_is_passed_over_is_counted_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ring, file = Ring("stdout.log", 64 * 1024), OutputFile(tmp_path / "stdout.log")
    wrote = read = skipped = 0
    lines: list[bytes] = []
    for i in range(40_000):
        data = f"line {i:07d}\n".encode()
        ring.write(data)
        wrote += len(data)
        if i % 7001 == 0 or i == 39_999:  # the file turned over more than once since
            got = file.poll(5000)
            read, skipped = read + got.bytes, skipped + got.skipped
            lines += got.lines
    assert read + skipped == wrote and 0 < read < wrote
    assert all(line.startswith(b"line ") and len(line) == 12 for line in lines) and lines[-1] == b"line 0039999"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 64 * 1024 + 100


def test_a_line_without_end_and_a_file_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    file = OutputFile(path)
    assert file.poll(1 << 20).lines == []
    path.write_bytes(b"x" * (1 << 20))
    got = file.poll(2 << 20)
    assert [len(line) for line in got.lines] == [16 * 1024]
    path.write_bytes(b"anew\n")
    file.poll(1 << 20)
    with open(path, "ab") as out:
        out.write(b"more\n")
    assert file.poll(1 << 20).lines[-1:] == [b"more"]
    os.unlink(path)
    os.symlink("/etc/passwd", path)
    assert OutputFile(path).poll(1 << 20).lines == []


# The producer


class Out(NamedTuple):
    slot: str
    folder: Path
    ended: bool = False
    rank: int = 0
    job: str = "gpt"
    attempt: int = 1
    world_size: int = 4
    secrets: tuple[str, ...] = ("hunter2hunter2",)


class Followed:
    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.heard, self.outputs = Heard(), list[Out]()
        self.folder = tmp_path / "slot"
        self.folder.mkdir(exist_ok=True)
        self.logs = RankLogs(desk_of(self.heard), tmp_path, lambda: self.outputs, RankLogSettings(show=redacted, **settings))

    def prints(self, text: str, stream: str = "stderr") -> None:
        with open(self.folder / f"{stream}.log", "a") as out:
            out.write(text)

    @property
    def told(self) -> list[RankLog]:
        return self.heard.of(RankLog)


async def test_what_is_of_note_is_told_with_its_rank_and_without_secrets(tmp_path: Path) -> None:
    it = Followed(tmp_path, interesting=lambda line: "flux" in line)
    it.outputs = [Out("a", it.folder, rank=2)]
    it.prints("step 1\nflux capacitor hunter2hunter2\n\x1b[31mNCCL WARN no\x1b[0m\n10%\r50%\rCUDA error: x\n", "stdout")
    it.prints(f"{TRACE}\n")
    it.logs.pump()
    (fact,) = it.told
    assert fact.rank == 2 and fact.world_size == 4 and fact.traceback == TRACE and not fact.last
    assert RankLine(text="flux capacitor [redacted]", stream="stdout") in fact.lines
    assert [line.text for line in fact.lines if line.stream == "stdout"][1:] == ["NCCL WARN no", "CUDA error: x"]
    ((subject, event),) = it.heard.events
    assert subject == "telemetry.n1.job.gpt.rank_log" and (event.job, event.attempt) == ("gpt", 1)
    it.logs.pump()
    assert len(it.told) == 1


async def test_the_end_of_a_rank_is_read_to_its_last_word(tmp_path: Path) -> None:
    it = Followed(tmp_path)
    it.outputs = [Out("a", it.folder)]
    it.logs.pump()
    it.prints("terminate called after throwing an instance of 'c10::Error'")  # no newline: it died
    it.prints("noise\n" * 100_000, "stdout")
    it.outputs = [Out("a", it.folder, ended=True)]
    it.logs.pump()
    it.logs.pump()
    (fact,) = it.told
    assert fact.last and fact.lines[0].text.startswith("terminate called")


async def test_lines_alike_are_counted(tmp_path: Path) -> None:
    it = Followed(tmp_path)
    it.outputs = [Out("a", it.folder)]
    for i in range(500):
        it.prints(f"NCCL WARN retry {i}\n")
    it.logs.pump()
    it.outputs = [Out("a", it.folder, ended=True)]
    it.logs.pump()
    assert [[(line.text, line.count) for line in fact.lines] for fact in it.told] == [
        [("NCCL WARN retry 0", 1)], [("NCCL WARN retry 499", 499)],
    ]  # fmt: skip


async def test_different_lines_are_bounded_and_counted(tmp_path: Path) -> None:
    it = Followed(tmp_path)
    it.outputs = [Out("a", it.folder)]
    for i in range(1000):
        it.prints(f"CUDA error: {'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]}{'uvwxyzabcd'[i // 100]} {'y' * 500}\n")
    it.logs.pump()
    (fact,) = it.told
    assert len(fact.lines) + fact.dropped == 1000 and len(fact.model_dump_json()) < 64 * 1024
    assert len(it.logs._ranks["a"].likes) <= 256


async def test_a_new_agent_goes_on_where_the_old_one_stood(tmp_path: Path) -> None:
    one = Followed(tmp_path)
    one.outputs = [Out("a", one.folder)]
    one.prints("CUDA error: one\n")
    one.logs.pump()
    one.logs._save()
    two = Followed(tmp_path)
    two.outputs = [Out("a", two.folder), Out("old", tmp_path / "gone", ended=True)]
    two.prints("CUDA error: two\n")
    two.logs.pump()
    assert [[line.text for line in fact.lines] for fact in two.told] == [["CUDA error: two"]]


#: A rank that prints as fast as it can, through a real shim's pipe.
FLOOD = "import os\nblock = (b'x' * 99 + b'\\n') * 2000\nwhile True:\n    os.write(1, block)\n"


async def test_a_rank_that_floods_is_sampled_and_said_to_be(tmp_path: Path) -> None:
    it = Followed(tmp_path, poll_s=0.1)
    spec = '{"parked": null, "environment": {}, "directory": "", "boot_id": "b", "log_bytes_max": 1000000, "secrets": []}'
    shim = Path(__file__).parent.parent / "actuators" / "rank_shim.py"
    subprocess.run([sys.executable, "-I", "-S", str(shim), str(it.folder)], input=spec.encode(), check=True, timeout=30)  # noqa: ASYNC221
    reader, writer = await asyncio.open_unix_connection(str(it.folder / "control.sock"))
    task = None
    try:
        await reader.readline()
        flood = (
            f'{{"do":"go","argv":["{sys.executable}","-c",{json.dumps(FLOOD)}],"environment":{{}},"directory":""}}\n'
        ).encode()
        writer.write(flood)
        it.outputs = [Out("a", it.folder)]
        task = asyncio.create_task(it.logs.run())
        await until(lambda: any(fact.skipped_bytes > 10_000_000 for fact in it.told) and it.heard.of(EvidenceGap), 30)
        fact = next(fact for fact in it.told if fact.skipped_bytes > 10_000_000)
        assert fact.read_bytes < 4_000_000
        (gap,) = it.heard.of(EvidenceGap)
        assert gap.reason == "thinned" and "rank 0" in gap.detail and "sampled" in gap.detail
        assert sum(path.stat().st_size for path in it.folder.glob("*.log*")) < 3_000_000  # on disk too
    finally:
        writer.write(b'{"do":"kill"}\n')
        await asyncio.wait_for(reader.read(), 20)
        writer.close()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# What it adds to a rank's exit


def test_an_exit_quotes_what_the_ranks_log_said() -> None:
    story = Story("job")
    for rank in (0, 1):
        story.started(1, rank)
    log = RankLog(
        rank=1, world_size=2, lines=(RankLine(text="n1:1:1 [0] NCCL WARN Call to ibv_modify_qp failed", stream="stdout"),)
    )
    story.say(5, "n1", log, job="gpt", attempt=1, on_job=True)
    story.exited(6, 1, code=1, stderr="exiting")
    story.exited(7, 0, code=1, stderr="exiting")
    first, second = [fact for fact in facts(told(job_detector(), story)) if isinstance(fact, Signal)]
    assert "ibv_modify_qp" in first.evidence and "ibv_modify_qp" not in second.evidence
    plain = Story("job")
    plain.records = [record for record in story.records if not record.subject.endswith("rank_log")]
    same = [fact for fact in facts(told(job_detector(), plain)) if isinstance(fact, Signal)]
    assert [(s.rule, s.confidence, s.rank) for s in same] == [(s.rule, s.confidence, s.rank) for s in (first, second)]


def test_the_jobs_state_with_words_survives_a_round_trip() -> None:
    story = Story("job")
    story.started(1, 0)
    for i in range(50):
        log = RankLog(rank=0, world_size=64, traceback=f"{TRACE}{i}") if i % 2 else RankLog(rank=i, world_size=64, last=True)
        story.say(2 + i, "n0", log, job="gpt", attempt=1, on_job=True)
    detector = job_detector()
    fold: PartitionFold[Any] = PartitionFold(detector)
    for record in story.records:
        assert fold.feed(record)[1] is None
    state = fold.keys["gpt"].state
    assert detector.load("gpt", detector.dump(state)) == state
