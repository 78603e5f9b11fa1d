"""burst: 1,000 nodes of one job fail in the same second (Xid 79 each, four racks). From the last evidence to the last decision, by
broker time; the shared causes must be named, the evictions within the budget, and one page sent."""

from __future__ import annotations

import asyncio

import yaml

from events.clock import NS
from events.decision import DecisionMade, EvidenceJudged, IntentIssued, SharedCause
from events.hardware import KernelLog, KernelRecord
from events.incident import Signal
from events.job import Place
from events.ports import TELEMETRY_NODE
from events.presence import Heartbeat
from infra.jetstream import JetStreamLog
from infra.publisher import Publisher
from processors import policy as policies
from tests.bench.live import JOB, Executor, Source, control_plane, quiet_machine, stage
from tests.bench.report import report

NAMES = ("burst",)
NODES, RACKS, SWITCHES, STANDBYS = 1000, 4, 16, 16
BOUND_S = 2.0
#: NVSentinel's own published figure for 1,000 nodes (its scale tests): to the last node cordoned. Not run here.
PEER, PEER_S = "NVSentinel, published: to the last cordon of 1,000", 16.45
POLICY = yaml.safe_dump({"mode": "auto"})
SETTLED_S, LIMIT_S = 5.0, 60.0


async def main() -> None:
    with quiet_machine() as load:
        async with control_plane(POLICY) as plane:
            ledger = plane.ledger
            nodes = [Place(node=f"n{i:04d}", rack=f"rack-{i * RACKS // NODES}", switch=f"leaf-{i * SWITCHES // NODES:02d}") for i in range(NODES)]  # fmt: skip
            executor = Executor(ledger.log)
            ledger.on_event.append(executor.hear)
            source = Source(Publisher(plane.admin))
            await plane.declare(nodes, [Place(node=f"s{i:02d}", rack="spares") for i in range(STANDBYS)])
            await plane.until(lambda: executor.attempt == 1, 30, "the first attempt")
            for place in nodes:
                await source.observe(place.node, "heartbeat", Heartbeat(), job=JOB, attempt=1)
            await source.settle()
            await asyncio.sleep(1)

            stage(f"{NODES} nodes fail within a second")
            cpu_s = plane.cpu_s()
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            for at in range(NODES):
                place = nodes[at * 389 % NODES]  # all racks at once
                if at % 20 == 0:
                    await asyncio.sleep(max(0.0, begun_s + at / NODES - loop.time()))
                text = f"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. ({place.node})"
                log = KernelLog(records=(KernelRecord(text=text, priority=3, sequence=at + 1),))
                await source.observe(place.node, "kernel_log", log, job=JOB, attempt=1)
            await source.settle()
            took_s = loop.time() - begun_s

            def last_ns() -> int:
                return max((r.time_ns for r, e in ledger.records if isinstance(e.data, DecisionMade | SharedCause | IntentIssued)), default=0)  # fmt: skip

            stage(f"published within {took_s:.2f} s; waiting for the decisions")
            evidence_ns = [
                r.time_ns async for r in JetStreamLog(plane.admin, TELEMETRY_NODE).read(subjects=("tn.*.*.kernel_log",))
            ]
            await plane.until(
                lambda: len(ledger.of(EvidenceJudged)) >= NODES and bool(executor.notified),
                LIMIT_S,
                f"{NODES} verdicts and the page",
            )
            while (seen := last_ns()) and await asyncio.sleep(SETTLED_S, True):
                if last_ns() == seen:
                    break

            decisions = [e.data for _, e in ledger.of(DecisionMade) if e.data.incident]
            evicted = {node for d in decisions if d.rung == "evict" and not d.vetoed for node in d.nodes}
            shared = {(e.data.scope, e.data.name) for _, e in ledger.of(SharedCause)}
            budget = policies.parse(POLICY).budget.job.evictions_max
            racks = sum(1 for scope, _ in shared if scope == "rack")
            first_ns = min(evidence_ns)
            cpu_s = {name: round(now - cpu_s.get(name, 0.0), 2) for name, now in plane.cpu_s().items()}

            def since(ns: int) -> float:
                return round((ns - first_ns) / NS, 3)

            times = {
                "last_evidence_s": since(max(evidence_ns)),
                "last_signal_s": since(max(r.time_ns for r, _ in ledger.of(Signal))),
                "last_verdict_s": since(max(r.time_ns for r, _ in ledger.of(EvidenceJudged))),
                "last_decision_s": since(seen),
            }
            wrong = [
                text
                for text, is_so in (
                    (f"{len(evidence_ns)} of {NODES} lines were stored", len(evidence_ns) != NODES),
                    (f"{racks} of {RACKS} racks were named", racks != RACKS),
                    (f"{len(evicted)} evictions, {budget} allowed", len(evicted) > budget),
                    (f"{len(executor.notified)} pages", len(executor.notified) != 1),
                )
                if is_so
            ]
            if wrong:
                said = " | ".join(f"{d.rung} {' '.join(d.nodes)}: {d.because}" for d in decisions)
                raise RuntimeError(f"{'; '.join(wrong)}; {times}; cpu {cpu_s}; decided: {said[:2000]}")
    report(
        "burst", (seen - max(evidence_ns)) / NS, "s", bound=BOUND_S, peer=PEER, peer_value=PEER_S, n=NODES,
        since_first=times, cpu_s=cpu_s, evictions=len(evicted), shared_racks=racks, shared_switches=sum(1 for s, _ in shared if s == "switch"), **load,
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
