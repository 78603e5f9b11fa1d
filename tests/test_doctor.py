"""What can be seen on this host: as this user, without privileges, and on trees of files; and an agent that has no privileges."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from events.hardware import EvidenceGap
from events.host import HostSample
from events.ports import TELEMETRY_NODE
from events.presence import AgentState, Heartbeat
from events.registry import parse
from infra import doctor
from infra.doctor import PROBES, Examined, Probe, Tried, examine
from infra.embedded import EmbeddedServer
from infra.jetstream import JetStreamLog, connect
from infra.streams import ensure_streams
from tests.test_host_producer import tree

ROOT = Path(__file__).parent.parent
NAMES = [probe.name for probe in PROBES]


def doctor_says(*arguments: str, drop: list[str] | None = None) -> tuple[int, Any]:
    ended = subprocess.run(
        [*(drop or []), sys.executable, "-m", "infra.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
    )
    if "--json" in arguments and ended.returncode in (0, 1):
        return ended.returncode, json.loads(ended.stdout)
    return ended.returncode, ended.stdout + ended.stderr


@lru_cache
def unprivileged() -> list[str]:
    """What is put before a command to run it without privileges: as nobody, or where nobody may not run this interpreter, as root
    without any capability."""
    if os.getuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    again = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import nats']).returncode)"
    if subprocess.run([*nobody, sys.executable, "-c", again], capture_output=True, timeout=60).returncode == 0:
        return nobody
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def kernel_log_is_kept_from_others() -> bool:
    return Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"


def test_on_this_host_as_this_user(tmp_path: Path) -> None:
    code, said = doctor_says("--json", "--state", str(tmp_path))
    checks = {check["name"]: check for check in said["checks"]}
    assert list(checks) == NAMES
    assert code == (1 if said["missing"] else 0)
    assert said["missing"] == sum(check["answer"] == "no" for check in checks.values())
    assert (
        checks["network links"]["answer"] == "yes"
        and checks["spool"]["answer"] == "yes"
        and checks["bus"]["answer"] == "absent"
    )
    for check in checks.values():
        assert check["found"] and check["serves"]
        assert bool(check["costs"]) == bool(check["grant"]) == (check["answer"] == "no")


def test_the_table_shows_words_not_markup() -> None:
    command = [sys.executable, "-I", "-m", "infra.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent)
    assert " yes " in done.stdout and "[/]" not in done.stdout, done.stdout + done.stderr


def test_without_privileges_it_says_what_is_lost_and_how_to_grant_it() -> None:
    if not kernel_log_is_kept_from_others():
        pytest.skip("this machine's kernel log is open to everyone")
    code, said = doctor_says("--json", drop=unprivileged())
    assert code == 1 and said["capabilities"] == []
    check = next(check for check in said["checks"] if check["name"] == "kernel log")
    assert check["answer"] == "no" and check["rungs"] == ["evict"]
    assert "CAP_SYSLOG" in check["grant"] and "--kernel-log" in check["grant"]
    code, text = doctor_says(drop=unprivileged())
    assert code == 1 and "To grant it:" in text and "Rungs that stand on less: evict" in text


def test_wrong_use() -> None:
    assert doctor_says("--bus", "http://x")[0] == 2
    assert doctor_says("--nonsense")[0] == 2
    code, text = doctor_says("--bus", "nats://127.0.0.1:1", "--seed-file", "/nowhere")
    assert code == 2 and "keepstep keys" in text


def test_a_bus_that_is_not_there() -> None:
    code, said = doctor_says("--json", "--bus", "nats://127.0.0.1:1")
    assert code == 1
    check = next(check for check in said["checks"] if check["name"] == "bus")
    assert check["answer"] == "no" and "roll_back" in check["rungs"]


def test_a_bus_that_answers(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "bus")
    server.start()
    try:
        server.add_nodes(["n1"])
        options = server.node_options("n1")
        _, said = doctor_says("--json", "--bus", server.url, "--seed-file", options["nkeys_seed"], "--node", "n1")
        check = next(check for check in said["checks"] if check["name"] == "bus")
        assert check["answer"] == "yes" and "ms" in check["found"]
    finally:
        server.stop()


# Trials on trees of files


def found(name: str, root: Path) -> Tried:
    return next(probe for probe in PROBES if probe.name == name).attempt(Examined(root=root, state=root))


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    assert found("kernel log", tmp_path).answer == "no"
    assert found("pressure", tmp_path).answer == "no"
    assert found("memory", tmp_path).answer == "no"
    assert found("last boot", tmp_path).answer == "no"
    assert found("RDMA ports", tmp_path).answer == "absent"
    assert found("containers", tmp_path).answer == "absent"


def test_hardware_that_no_driver_holds_is_missing_not_absent(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:02:00.0/vendor": "0x15b3\n", "sys/bus/pci/devices/0000:02:00.0/class": "0x020000\n",
        },
    )  # fmt: skip
    assert found("RDMA ports", tmp_path).answer == "no" and "mlx5_ib" in found("RDMA ports", tmp_path).grant
    gpus = found("GPUs (NVML)", tmp_path)
    assert gpus.answer == "no" and gpus.found.startswith("1 NVIDIA GPUs on the PCI bus")


def test_what_is_there_is_seen(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", "proc/vmstat": "oom_kill 0\n",
            "sys/fs/pstore/dmesg-efi-1": "", "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        },
    )  # fmt: skip
    for name in ("pressure", "memory", "last boot", "RDMA ports", "spool"):
        assert found(name, tmp_path).answer == "yes", name


def test_a_trial_that_raises_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(at: Examined) -> Tried:
        raise RuntimeError("no")

    def hangs(at: Examined) -> Tried:
        time.sleep(3)
        return Tried("yes", "late")

    monkeypatch.setattr(doctor, "DRIVER_S", 0.2)
    monkeypatch.setattr(doctor, "TRY_S", 0.2)
    probes = tuple(Probe(name, "x", attempt, (), "costs", "grant") for name, attempt in (("a", raises), ("b", hangs)))
    monkeypatch.setattr(doctor, "PROBES", probes)
    assert [(check.answer, check.found) for check in examine(Examined())] == [
        ("no", "the trial failed: RuntimeError: no"), ("no", "the trial hangs"),
    ]  # fmt: skip


# An agent without privileges


async def test_an_agent_without_privileges_runs_with_what_it_has(tmp_path: Path) -> None:
    if not kernel_log_is_kept_from_others():
        pytest.skip("this machine's kernel log is open to everyone")
    drop = unprivileged()
    server = EmbeddedServer(tmp_path / "bus")
    await asyncio.to_thread(server.start)
    client = process = None
    state = tmp_path / "state"
    state.mkdir()
    try:
        await asyncio.to_thread(server.add_nodes, ["n1"])
        client = await connect(server.url, server.role_options("admin"))
        await ensure_streams(client)
        seed = tmp_path / "n1.seed"
        shutil.copy(server.node_options("n1")["nkeys_seed"], seed)
        if "--reuid" in drop:
            for path in (state, seed):
                os.chown(path, 65534, 65534)
            for folder in (tmp_path, *tmp_path.parents[:2]):
                folder.chmod(0o755)
        with open(tmp_path / "said", "wb") as said:  # noqa: ASYNC230
            process = subprocess.Popen(  # noqa: ASYNC220
                [*drop, sys.executable, "-m", "infra.agent", "--node", "n1", "--state", str(state), "--bus", server.url,
                 "--seed-file", str(seed), "--host-s", "1"], stderr=said, cwd=ROOT,
            )  # fmt: skip
        log = JetStreamLog(client, TELEMETRY_NODE)

        async def facts() -> list[Any]:
            return [parse(record.data).data async for record in log.read(subjects=("tn.*.*.*",))]

        wanted = (Heartbeat, HostSample, EvidenceGap)
        end = time.monotonic() + 40
        seen: list[Any] = []
        while not all(any(isinstance(fact, kind) for fact in seen) for kind in wanted):
            seen = await facts()
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "said").read_text()
            await asyncio.sleep(0.2)
        (gap, *_) = [fact for fact in seen if isinstance(fact, EvidenceGap)]
        assert (gap.producer, gap.reason) == ("kernel_log", "unreadable") and "not permitted" in gap.detail
        failed = {fact.producer for fact in seen if isinstance(fact, AgentState) and fact.state == "failed"}
        assert failed == {"kernel_log"}  # and nothing else
        sample = next(fact for fact in seen if isinstance(fact, HostSample))
        assert sample.memory_total_bytes > 0 and any(folder.total_bytes > 0 for folder in sample.folders)
    finally:
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 15)
            process.kill()
            process.wait()
        if client is not None:
            await client.close()
        await asyncio.to_thread(server.stop)


def test_git_is_there_or_what_that_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho git version 2.39.5\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {}
    for present in (True, False):
        if not present:
            (tmp_path / "git").unlink()
        found[present] = next(check for check in examine(Examined()) if check.name == "git")
    assert (found[True].answer, found[True].found) == ("yes", "git version 2.39.5")
    assert (found[False].answer, found[False].rungs) == ("no", ("roll_back",)) and "--revision none" in found[False].grant
