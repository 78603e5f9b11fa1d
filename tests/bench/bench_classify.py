"""classify_throughput: kernel log lines through `keepstep classify`, 1 in 100 of which the catalogue knows, beside `grep -E` with the
same literals in the same run. classify_accuracy: its answers on labelled cases, by class, each disagreement on standard error."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from infra.catalogue_files import catalogue_text
from infra.cli.classify_cases import read_cases, score
from infra.cli.classify_count import Tally
from infra.cli.classify_read import Reading
from processors.catalogue import Catalogue, parse
from tests.bench.report import report

NAMES = ("classify_throughput", "classify_accuracy")
BOUND = 150_000
LINES = int(os.environ.get("KEEPSTEP_BENCH_CLASSIFY_LINES", "1500000"))
KNOWN_SHARE = 0.01
#: Files of labelled cases, colon-separated; without it those beside the checkout, where there are any.
CASES = os.environ.get("KEEPSTEP_BENCH_CASES", "")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "cases" / "logs"

#: What kernels print all day on healthy machines.
NOISE = (
    "audit: type=1400 audit({n}.123:{m}): apparmor=\"ALLOWED\" operation=\"open\" profile=\"snap.x\" pid={m} comm=\"python3\"",
    "IPv6: ADDRCONF(NETDEV_CHANGE): veth{m}: link becomes ready",
    "cni0: port {m}(veth{n}) entered forwarding state",
    "device veth{m} entered promiscuous mode",
    "pci 0000:{b:02x}:00.0: BAR 4: assigned [mem 0x{n:08x}-0x{m:08x} 64bit pref]",
    "usb 1-{b}: New USB device found, idVendor=0424, idProduct=2660, bcdDevice= 8.01",
    "systemd[1]: Started Session {m} of user root.",
    "eth0: renamed from veth{m}",
    "sd {b}:0:0:0: [sda] {n} 512-byte logical blocks: (480 GB/447 GiB)",
    "nvme nvme{b}: 128/0/0 default/read/poll queues",
    "mlx5_core 0000:{b:02x}:00.0: E-Switch: Total vports 2, per vport: max uc(128) max mc(2048)",
    "docker0: port 1(veth{m}) entered blocking state",
    "kauditd_printk_skb: {b} callbacks suppressed",
    "workqueue: drm_fb_helper_damage_work took {m} us, consider switching to WQ_UNBOUND",
    "perf: interrupt took longer than usual ({m} > {n}), lowering the sample rate to {n}",
    "IN=eth0 OUT= MAC=aa:bb SRC=10.0.{b}.7 DST=10.0.{b}.9 LEN=60 TOS=0x00 PROTO=TCP SPT={m} DPT=443 WINDOW=64240 SYN",
)  # fmt: skip


def lines(catalogue: Catalogue, count: int) -> Iterator[str]:
    """A log of so many lines, the same each time."""
    chance = random.Random(7)
    known = [e.replace("\n", " ") for row in catalogue.rows if row.log == "kernel" and not row.quiet for e in row.examples]
    for i in range(count):
        if chance.random() < KNOWN_SHARE:
            text = chance.choice(known)
        else:
            m, n, b = chance.randrange(1 << 16), chance.randrange(1 << 31), chance.randrange(1 << 6)
            text = NOISE[i % len(NOISE)].format(m=m, n=n, b=b)
        yield f"Mar  3 12:{i // 60 % 60:02d}:{i % 60:02d} node-17 kernel: [{i / 7:12.6f}] {text}\n"


def main() -> None:
    catalogue = parse(catalogue_text(), examples=False)
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv[:-1] else ""
    if "accuracy" not in only:
        _throughput(catalogue)
    if "throughput" not in only:
        _accuracy(catalogue)


def _throughput(catalogue: Catalogue) -> None:
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        log = Path(folder) / "kern.log"
        with log.open("w", encoding="utf-8") as file:
            file.writelines(lines(catalogue, LINES))
        patterns = Path(folder) / "patterns"
        patterns.write_text("".join(_ere(literal) + "\n" for literal in catalogue.literals), encoding="utf-8")
        head = Path(folder) / "head.log"
        with log.open("rb") as whole:
            head.write_bytes(b"".join(whole.readline() for _ in range(LINES // 10)))
        Tally(catalogue).read(Reading(catalogue, str(head)))
        warm_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began_s, cpu_s = time.perf_counter(), time.process_time()
        tally = Tally(catalogue)
        tally.read(Reading(catalogue, str(log)))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - warm_kib
        grep_wall_s, grep_cpu_s, matched = _grep(patterns, log)
        report(
            "classify_throughput", tally.lines / cpu_s, "lines/s a core", bound=BOUND, peer="grep -E -i -c -f, the same literals",
            peer_value=LINES / grep_cpu_s, n=tally.lines, known=tally.known, kinds=len(tally.kinds), grep_matched=matched,
            literals=len(catalogue.literals), wall_lines_s=round(tally.lines / wall_s), grep_wall_lines_s=round(LINES / grep_wall_s),
            mib=round(tally.size_bytes / 2**20), memory_grown_mib=round(grown_kib / 1024, 1),
        )  # fmt: skip


def _grep(patterns: Path, log: Path) -> tuple[float, float, int]:
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "LC_ALL": "C"}
    run = subprocess.run(
        ["grep", "-E", "-i", "-c", "-f", patterns, log],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode > 1:
        raise RuntimeError(f"grep failed: {run.stderr[:300]}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, int(run.stdout or 0)


def _ere(literal: str) -> str:
    return re.sub(r"([\\.*^$+?()|{}\[\]])", r"\\\1", literal)


def _accuracy(catalogue: Catalogue) -> None:
    files = [Path(name) for name in CASES.split(":") if name] or [SHARED / "kernel.jsonl", SHARED / "training.jsonl"]
    files = [file for file in files if CASES or file.is_file()]
    if not files:
        print("classify_accuracy: no labelled cases here; name files in KEEPSTEP_BENCH_CASES", file=sys.stderr)
        return
    for file in files:
        bad: list[str] = []
        _, scores = score(catalogue, read_cases(file, bad.append))
        plain = scores.plain()
        for one in scores.disagreements:
            print(json.dumps(one, ensure_ascii=False), file=sys.stderr)
        report(
            "classify_accuracy", min(plain[k] or 0 for k in ("class", "device", "first_action")), "share right (the least of three)",
            bound=0.95, n=plain["cases"], file=file.name, bad_lines=len(bad), **{f"{k}_right": plain[k] for k in ("class", "device", "first_action")},
            precision=plain["precision"], recall=plain["recall"], harmless_evicted=plain["harmless_evicted"],
            disagreements=len(scores.disagreements), by_class=plain["by_class"],
        )  # fmt: skip
