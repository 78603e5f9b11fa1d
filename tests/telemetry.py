"""Builders of telemetry records for tests of detectors: observations of nodes and ranks at stated broker times."""

from __future__ import annotations

from itertools import count
from typing import Any

from events import subjects
from events.clock import NS
from events.envelope import Fact
from events.hardware import KernelLog, KernelRecord
from events.ports import HELD_HEADER, Record
from events.presence import Heartbeat, RankProcess, SettingsAdopted, Tick
from events.registry import canonical, make
from events.training import RankExit, RankStarted, StepSample, TrainingProgress
from infra.catalogue_files import catalogue_text
from processors.catalogue import Catalogue, parse
from processors.detector import Detector, Outgoing, PartitionFold, read
from processors.policy import Detectors

T0 = 1_790_000_000 * NS
CATALOGUE_TEXT = catalogue_text()
XID_79 = "NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_45 = "NVRM: Xid (PCI:0000:03:00): 45, pid=77, name=python, channel 0x00000015"
XID_13 = (
    "NVRM: Xid (PCI:0000:03:00): 13, pid=77, name=python, Graphics SM Warp Exception on (GPC 1, TPC 0): Out Of Range Address"
)


def catalogue() -> Catalogue:
    return parse(CATALOGUE_TEXT, examples=False)


def ns(at_s: float) -> int:
    return T0 + round(at_s * 1000) * 1_000_000


class Story:
    """Records in the order they are told, with stream sequences. Times are seconds after T0, by the broker."""

    def __init__(self, stream: str = "node") -> None:
        self.stream, self.prefix = stream, subjects.NODE if stream == "node" else subjects.JOB
        self.records: list[Record] = []
        self._numbers: dict[str, count[int]] = {}
        self.settings: Detectors | None = None

    def _add(self, at_s: float, subject: str, data: bytes, held_s: float = 0) -> Record:
        headers = {HELD_HEADER: str(round(held_s * NS))} if held_s else {}
        record = Record(self.stream, len(self.records) + 1, ns(at_s), subject, data, headers)
        self.records.append(record)
        return record

    def say(
        self, at_s: float, node: str, fact: Fact, *, job: str = "", attempt: int = 0, held_s: float = 0, producer: str = "agent",
        number: int | None = None, boot: str = "boot-1", on_job: bool = False, id: str = "",
        ahead_s: float = 0,
    ) -> Record:  # fmt: skip
        """`ahead_s`: by how much the node's own clock is ahead of the broker's."""
        source = f"node/{node}/{producer}"
        if number is None:
            number = next(self._numbers.setdefault(source, count(1)))
        event = make(
            fact, id=id or f"e{len(self.records) + 1}", source=source, subject=node, time=ns(at_s - held_s + ahead_s), number=number, bootid=boot,
            job=job, attempt=attempt,
        )  # fmt: skip
        kind = fact.kind()
        subject = (
            f"tj.0.{subjects.token(node)}.{subjects.token(job)}.{kind}" if on_job else f"tn.0.{subjects.token(node)}.{kind}"
        )
        return self._add(at_s, subject, canonical(event), held_s)

    def tick(self, at_s: float) -> Record:
        subject = subjects.tick(self.prefix, 0)
        return self._add(at_s, subject, canonical(make(Tick(), id="tick", source="bus/clock", subject="clock", time=0)))

    def adopt(self, at_s: float, settings: Detectors) -> Record:
        fact = SettingsAdopted(settings=settings.model_dump_json(), policy_digest="d")
        event = make(fact, id=f"s{len(self.records)}", source="cli", subject="clock", time=0)
        return self._add(at_s, subjects.settings(self.prefix, 0), canonical(event))

    def beat(self, at_s: float, node: str = "n1", *, job: str = "gpt", attempt: int = 1, **more: Any) -> Record:
        return self.say(at_s, node, Heartbeat(), job=job, attempt=attempt, producer="heartbeat", **more)

    def kernel(
        self, at_s: float, node: str, *lines: str | KernelRecord, job: str = "gpt", attempt: int = 1, **more: Any
    ) -> Record:
        records = tuple(line if isinstance(line, KernelRecord) else KernelRecord(text=line) for line in lines)
        return self.say(at_s, node, KernelLog(records=records), job=job, attempt=attempt, **{"producer": "kernel_log", **more})

    # --- a job's -----------------------------------------------------------------------------------------------------------

    def started(self, at_s: float, rank: int, *, attempt: int = 1, world: int = 2, job: str = "gpt", **more: Any) -> Record:
        fact = RankStarted(rank=rank, local_rank=0, world_size=world, pid=100 + rank)
        return self.say(at_s, f"n{rank}", fact, job=job, attempt=attempt, on_job=True, **more)

    def progress(
        self, at_s: float, rank: int, progress: int, step: int = -1, *, phase: str = "step", attempt: int = 1, world: int = 2,
        job: str = "gpt", losses: tuple[float | None, ...] | None = None, took_s: float = 1.0, restored: int = -1, **more: Any,
    ) -> Record:  # fmt: skip
        """`losses`: of the steps that end with `step`."""
        losses = losses or ()
        samples = tuple(
            StepSample(step=step - len(losses) + 1 + i, ended_ns=0, step_time_s=took_s, loss=loss)
            for i, loss in enumerate(losses)
        )
        fact = TrainingProgress(
            rank=rank, world_size=world, phase=phase, progress=progress, step=step, samples=samples, restored_step=restored
        )  # fmt: skip
        return self.say(at_s, f"n{rank}", fact, job=job, attempt=attempt, on_job=True, producer=f"trainer-{rank}", **more)

    def exited(
        self, at_s: float, rank: int, *, code: int | None = None, signal: int | None = None, asked: bool = False, stderr: str = "",
        attempt: int = 1, world: int = 2, job: str = "gpt", ended_ns: int = 0, **more: Any,
    ) -> Record:  # fmt: skip
        fact = RankExit(
            rank=rank, world_size=world, code=code, signal=signal, asked=asked, stderr_tail=stderr, ended_ns=ended_ns
        )
        return self.say(at_s, f"n{rank}", fact, job=job, attempt=attempt, on_job=True, **more)

    def processes(self, at_s: float, rank: int, state: str, *, attempt: int = 1, job: str = "gpt", **more: Any) -> Record:
        fact = Heartbeat(ranks=(RankProcess(rank=rank, pid=100 + rank, state=state),))
        return self.say(at_s, f"n{rank}", fact, job=job, attempt=attempt, on_job=True, producer="heartbeat", **more)

    def seen(self) -> list[Any]:
        return [read(record) for record in self.records if not subjects.is_clocks(record.subject)]


def told(detector: Detector[Any], story: Story) -> list[Outgoing]:
    """What a detector claims of a whole story, none of it refused."""
    fold = PartitionFold(detector)
    out: list[Outgoing] = []
    for record in story.records:
        outgoing, refused = fold.feed(record)
        assert refused is None, refused
        out += outgoing
    return out


def facts(out: list[Outgoing]) -> list[Fact]:
    return [outgoing.event.data for outgoing in out]
