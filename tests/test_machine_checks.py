"""The tests of one machine, each with a machine that has the fault: the device's, the tools', the step's, and what they leave behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from events.finding import CheckResult
from infra.cli.app import app
from infra.cli.common import Refused
from keepstep import _check_compute as compute
from keepstep import _check_step, _check_tools, diagnose
from keepstep._surroundings import Surroundings, exact
from keepstep._tester import results_of
from processors.diagnosis import found as found_by
from tests.hook_agent import HOOK
from tests.small_disk import small_disk
from tests.test_parked import Worker

CPU = torch.device("cpu")
FAULTS = Path(__file__).parent / "machine_faults"


def tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def alone(*arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PYTHON"))}
    path = f"{FAULTS}:{HOOK}" if "FAULTS" in environment else str(HOOK)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "keepstep.diagnose", *arguments],
        env=clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=120, check=False, cwd="/",
    )  # fmt: skip
    return run.returncode, [json.loads(line) for line in run.stdout.splitlines()], run.stderr


# The device


def test_a_sound_device_passes_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((8, 8, 8), (1, 1, 1), (33, 127, 65), (5, 4097, 3)):
            assert compute.product_troubles(torch, CPU, dtype, shape, 3, 3) == []
    assert compute.memory_troubles(torch, CPU, 1 << 20) == [] and compute.chain_troubles(torch, CPU, 3) == []


@pytest.mark.parametrize("bit", [0, 12, 25, 31])
def test_any_flipped_bit_of_any_element_is_found(monkeypatch: pytest.MonkeyPatch, bit: int) -> None:
    whole = torch.mm

    def flipped(a: Any, b: Any) -> Any:
        out = whole(a, b)
        if out.dtype is torch.float32:
            out.view(torch.int32)[3, 5] ^= 1 << bit if bit < 31 else -(1 << 31)
        return out

    monkeypatch.setattr(torch, "mm", flipped)
    (said,) = compute.product_troubles(torch, CPU, torch.float32, (16, 24, 8), 0, 2)
    assert "1 of 128 elements are wrong" in said and "at [3, 5]" in said


def test_a_product_that_differs_from_itself_now_and_then_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = torch.mm, 0

    def now_and_then(a: Any, b: Any) -> Any:
        nonlocal calls
        calls += 1
        out = whole(a, b)
        if calls == 9:
            out.view(torch.int32)[0, 0] ^= 1
        return out

    monkeypatch.setattr(torch, "mm", now_and_then)
    (said,) = compute.product_troubles(torch, CPU, torch.float32, (16, 24, 8), 0, 9)
    assert said == "float32 product 16x24x8: 1 of 128 elements differ when it is computed again"


@pytest.mark.parametrize("method", ["fill_", "arange"])
def test_a_word_of_memory_that_does_not_keep_is_found(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    fill, arange = torch.Tensor.fill_, torch.arange

    def leaky(words: Any, value: Any) -> Any:
        fill(words, value)
        words[77] ^= 1 << 40
        return words

    def other(*arguments: Any, **more: Any) -> Any:
        made = arange(*arguments, **more)
        if "out" in more:
            made[9] = 8
        return made

    monkeypatch.setattr(torch.Tensor, "fill_", leaky) if method == "fill_" else monkeypatch.setattr(torch, "arange", other)
    (said,) = compute.memory_troubles(torch, CPU, 1 << 12)
    assert "the first at byte 616" in said if method == "fill_" else "1 words do not hold their own address" in said


# The reference step

STEPS = """
import os, sys, torch
from datetime import timedelta
import torch.distributed as dist
from keepstep import _check_step as check
folder, ranks = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
for rank in range(ranks):
    if os.fork() == 0:
        store = dist.FileStore(folder + "/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        groups = check.Groups(dist, rank, ranks)
        found = check.outcome(torch, torch.device("cpu"), groups, check.SIZES["cpu"])
        torch.save({**{k: v.detach() for k, v in found.items()}, "at": (groups.dp, groups.pp, groups.tp)}, f"{folder}/{rank}.pt")
        dist.barrier()
        os._exit(0)
for _ in range(ranks):
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_reference_step_is_the_same_step_under_every_layout(tmp_path: Path, ranks: int) -> None:
    """TP=2 PP=2 DP=2 computes what one rank does, rounding apart: split columns and rows, stages and halves of the batch put together."""
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", STEPS, tmp_path, str(ranks)], env=environment, check=True, timeout=120)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    tp, pp, dp = _check_step.layout(ranks)
    one = _check_step.outcome(torch, CPU, _check_step.Groups(None, 0, 1), _check_step.SIZES["cpu"])
    assert [part["at"] for part in parts] == [(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)]
    losses = [part["loss"] for part in parts if "loss" in part]
    torch.testing.assert_close(torch.stack(losses).mean(), one["loss"].detach(), rtol=1e-5, atol=1e-6)
    names = [name for name in one if name.endswith("gradient")]
    assert len(names) == 14
    for name in names:
        shares = [part[name] / dp for part in parts if name in part and part["at"][0] == 0]
        split = {"out": 1, "down": 1, "embedding": None, "head": None}.get(name.split(".")[-1].split()[0], 0)
        whole = shares[0] if split is None else torch.cat(shares, split)
        torch.testing.assert_close(whole, one[name], rtol=1e-3, atol=1e-6)
        assert all(
            torch.equal(a[name], b[name])
            for a in parts
            for b in parts
            if name in a and name in b and a["at"][1:] == b["at"][1:]
        )


def test_ranks_of_one_machine_test_it_together_and_twice_gives_the_same_bits() -> None:
    seen = []
    for _ in range(2):
        code, results, err = alone("--ranks", "4", "--tests", "gpu_self_test,all_to_all,reference_step")
        assert code == 0 and len(results) == 12 and all(r["passed"] for r in results), (results, err)
        seen.append([r["digest"] for r in results if r["test"] == "reference_step"])
    assert seen[0] == seen[1] and len(set(seen[0])) == 4
    assert {r["detail"] for r in results if r["test"] == "reference_step"} == {"layout tp 2 pp 2 dp 1"}
    assert all(r["value"] > 0 and r["unit"] == "GB/s" for r in results if r["test"] == "all_to_all")


# NVIDIA's and InfiniBand's tools, by stand-ins that print what theirs do

DCGM_3 = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {"category": "Deployment", "tests": [{"name": "Denylist", "results": [{"status": "Pass"}]}]},
            {
                "category": "Hardware",
                "tests": [{"name": "GPU Memory", "results": [{"gpu_ids": "0", "status": "Pass"}, {"gpu_ids": "3", "status": "Fail", "warnings": "a fault"}]}],
            },
        ]
    }
}  # fmt: skip
DCGM_4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Integration",
                "tests": [{"name": "PCIe", "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}], "test_summary": {"status": "Pass"}}],
            }
        ]
    }
}  # fmt: skip


def test_what_dcgm_reports_in_its_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check_tools.dcgm(10, False) == (None, "dcgmi is not installed")
    report = tmp_path / "report"
    tool(tmp_path, "dcgmi", f'echo "$@" > {tmp_path}/asked; cat {report}; exit 3', monkeypatch)
    report.write_text("Successfully ran diagnostic for group.\n" + json.dumps(DCGM_3))
    assert _check_tools.dcgm(10, False) == (False, "dcgmi diag -r 1: GPU Memory (GPU 3): a fault")
    assert (tmp_path / "asked").read_text() == "diag -r 1 -j\n"
    report.write_text(json.dumps(DCGM_4))
    assert _check_tools.dcgm(300, True) == (True, "dcgmi diag -r 2: 2 results, none failed")
    report.write_text("Error: unable to establish a connection")
    passed, said = _check_tools.dcgm(10, False)
    assert passed is None and "ended with 3 and no report: Error: unable" in said
    report.write_text(json.dumps({"DCGM Diagnostic": {"test_categories": []}}))
    assert _check_tools.dcgm(10, False)[0] is None  # nothing ran: that is no pass
    tool(tmp_path, "dcgmi", "exec sleep 60", monkeypatch)
    assert _check_tools.dcgm(1, False) == (None, "dcgmi diag -r 1 did not end within 1 s")


def test_the_rate_of_an_infiniband_link_and_a_server_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\\n 65536      1000             196.32             195.87             0.373598"
    tool(tmp_path, "ib_write_bw", f'test -e {tmp_path}/up || {{ touch {tmp_path}/up; echo "Couldn\'t connect" >&2; exit 1; }}; printf "{table}\\n"', monkeypatch)  # fmt: skip
    assert _check_tools.ib_write_bw("10.0.0.2", 18515, 2, 5) == (195.87, "")
    (tmp_path / "up").unlink()
    rate, said = _check_tools.ib_write_bw("", 18515, 2, 5)
    assert rate is None and said == "ib_write_bw ended with 1: Couldn't connect"


RING = """
import json, os, sys
import torch.distributed
from keepstep import _check_tools
from keepstep._tester import examined
nodes, where, tests = ["a", "b", "c"], ["127.0.0.1", _check_tools.free_port(), "p"], sys.argv[1].split(",")
for number, node in enumerate(nodes):
    if os.fork() == 0:
        _check_tools.has_infiniband = lambda: node != "c"
        answer = examined({"tests": tests, "within_s": 40, "nodes": nodes, "node_rank": number, "store": where})
        os.write(1, json.dumps([node, answer["results"]]).encode() + b"\\n")
        os._exit(0)
for _ in nodes:
    os.wait()
"""


@pytest.mark.parametrize("tests", ["all_gather", "all_gather,ib_write_bw"])
def test_where_infinibands_tool_is_installed_it_is_a_part_of_the_neighbours_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: str
) -> None:
    """Of three machines two have it: theirs is the only link that it measures, and nobody waits for the third."""
    table = " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\\n 65536 1000 96.32 95.5 0.37"
    tool(tmp_path, "ib_write_bw", f'echo "$@" >> {tmp_path}/asked; printf "{table}\\n"', monkeypatch)
    begun_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RING, tests], env=environment, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert set(found) == {"a", "b", "c"}, done.stderr
    own = {node: [r for r in found[node] if r["test"] == "ib_write_bw"] for node in "abc"}
    links = {(node, r["peers"][0]): (r["passed"], r.get("value")) for node in "ab" for r in own[node]}
    assert links == {("a", "b"): (True, 95.5), ("a", "c"): (None, None), ("b", "a"): (True, 95.5), ("b", "c"): (None, None)}
    assert all(r["passed"] for node in "abc" for r in found[node] if r["test"] == "all_gather")
    assert [r["passed"] for r in own["c"]] == ([None] if "ib" in tests else [])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and sum(line.endswith("127.0.0.1") for line in asked) == 1, asked  # a server and a client
    assert time.monotonic() - begun_s < 35, "somebody was waited for"


# What is changed is put back, and that is looked at

SMI = """case "$*" in
  *query*) cat {state};;
  *-i*) {put}; exit 0;;
  *) exit 0;;
esac"""


@pytest.mark.parametrize("obeys", [True, False])
def test_what_a_tool_leaves_changed_on_the_gpus_is_told_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    """The paper's incident: a diagnostic that left the clocks lowered."""
    state = tmp_path / "state"
    before = "0, Enabled, 1410, 1593, 700.00, Default\\n1, Enabled, 1410, 1593, 700.00, Default\\n"
    after = "0, Enabled, 1410, 1593, 700.00, Default\\n1, Disabled, 990, 1593, 350.00, Exclusive_Process\\n"
    state.write_text(before.replace("\\n", "\n"))
    put = (
        f"echo \"$*\" >> {tmp_path}/put; test $(wc -l < {tmp_path}/put) -lt 4 || printf '{before}' > {state}" if obeys else ":"
    )
    tool(tmp_path, "nvidia-smi", SMI.format(state=state, put=put), monkeypatch)
    tool(tmp_path, "dcgmi", f"printf '{after}' > {state}; echo '{json.dumps(DCGM_4)}'", monkeypatch)
    (result,) = diagnose.one(diagnose.Machine({"within_s": 30}), "dcgm")
    assert result["passed"] is True and result["restored"] is obeys
    assert result["changed"] == [
        "GPU 1 persistence_mode: Enabled -> Disabled",
        "GPU 1 clocks.applications.graphics: 1410 -> 990",
        "GPU 1 power.limit: 700.00 -> 350.00",
        "GPU 1 compute_mode: Default -> Exclusive_Process",
    ]
    assert (state.read_text() == before.replace("\\n", "\n")) is obeys
    if obeys:
        assert (tmp_path / "put").read_text() == "-i 1 -pm 1\n-i 1 -ac 1593,1410\n-i 1 -pl 700\n-i 1 -c 0\n"


def test_the_switches_of_torch_and_the_environment_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    with Surroundings() as around:
        exact(torch)
        os.environ["LEFT_BEHIND"] = "x"
        assert torch.get_deterministic_debug_mode() == 2
    assert around.restored and torch.get_deterministic_debug_mode() == 0 and torch.get_num_threads() == threads
    assert "LEFT_BEHIND" not in os.environ and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert "environment LEFT_BEHIND: (none) -> x" in around.changed and "torch determinism: 0 -> 2" in around.changed
    with Surroundings() as around:
        pass
    assert (around.changed, around.restored) == ([], True)


def test_what_loading_torch_brings_along_is_no_change_of_the_first_test() -> None:
    script = (
        "import json, sys; from keepstep import diagnose; assert 'torch' not in sys.modules; "
        "(result,) = diagnose.one(diagnose.Machine({'within_s': 60}), 'gpu_self_test'); print(json.dumps(result))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["passed"], result["restored"]) == (True, True), result["changed"]
    assert not any("could not be put back" in change for change in result["changed"])


# Runs


def test_what_can_not_run_says_so_and_nothing_else() -> None:
    code, results, _ = alone("--tests", "gpu_self_test,all_gather", KEEPSTEP_TESTS="[1")
    assert code == 0 and [r["passed"] for r in results] == [None, None] and "KEEPSTEP_TESTS is no JSON" in results[0]["detail"]
    code, results, _ = alone(KEEPSTEP_TESTS='{"matmul": [[7, 9, 11]]}')
    assert "3 shapes" in results[0]["detail"] and [r["test"] for r in results] == list(diagnose.TESTS)
    assert {r["test"] for r in results if r["passed"]} == {"gpu_self_test", "reference_step"}


def test_a_rate_below_what_it_should_be_fails() -> None:
    code, results, _ = alone("--ranks", "2", "--tests", "all_to_all", KEEPSTEP_TESTS='{"all_to_all_gb_per_s_min": 1e6}')
    assert code == 1 and "less than the 1e+06 it should have" in results[0]["detail"]


def test_repeated_it_keeps_the_first_failure_and_its_round(tmp_path: Path) -> None:
    code, results, _ = alone("--tests", "gpu_self_test,reference_step", "--repeat-s", "1.5", "--within-s", "60")
    assert code == 0 and all(r["rounds"] > 1 for r in results)
    begun = {"test": "t", "passed": True, "detail": "", "duration_s": 1.0, "changed": ["a"], "restored": True}
    bad = {**begun, "passed": False, "detail": "7 wrong", "changed": ["b"]}
    once = diagnose.merged(begun, bad, 2)
    assert (once["passed"], once["detail"], once["changed"], once["duration_s"]) == (False, "round 2: 7 wrong", ["a", "b"], 2.0)
    assert diagnose.merged(once, begun, 3)["detail"] == "round 2: 7 wrong"
    steps = [{**begun, "digest": digest} for digest in "xy"]
    assert diagnose.merged(steps[0], steps[0], 2)["passed"] and diagnose.merged(steps[0], steps[1], 2)["passed"] is False


LOCAL = """
import json, os, sys
import torch.distributed
from keepstep._tester import examined
store, repeat_s = sys.argv[1], float(sys.argv[2])
for rank in range(2):
    if os.fork() == 0:
        tests = ["gpu_self_test", "all_to_all", "reference_step"]
        answer = examined({"tests": tests, "within_s": 30, "repeat_s": repeat_s, "local_rank": rank, "local_size": 2, "local_store": store})
        os.write(1, json.dumps([answer["ended"], {r["test"]: [r["passed"], r["detail"]] for r in answer["results"]}]).encode() + b"\\n")
        os._exit(0)
for _ in range(2):
    os.wait()
"""


@pytest.mark.parametrize("repeat_s", ["0", "5"])
def test_a_full_disk_accuses_nobody(tmp_path: Path, repeat_s: str) -> None:
    """Ranks of a machine meet through a file: one that can't be written says nothing of the device, nor does a standard error on that
    disk."""
    with small_disk(tmp_path / "disk") as disk:
        (disk.folder / "run").mkdir()
        disk.fill()
        with (disk.folder / "filler").open("ab") as error:
            done = subprocess.run(
                [sys.executable, "-c", LOCAL, str(disk.folder / "run" / "store"), repeat_s], stdout=subprocess.PIPE, stderr=error, timeout=100,
                env={**os.environ, "PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1"}, check=False,
            )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2, done
    for ended, results in found:
        assert ended == "" and {test: passed for test, (passed, _) in results.items()} == {
            "gpu_self_test": True, "all_to_all": None, "reference_step": None,
        }  # fmt: skip
        assert "No space left on device" in results["all_to_all"][1]


@pytest.mark.parametrize(
    ("error", "passed"),
    [
        (OSError(28, "No space left on device"), None),
        (ImportError("libnccl.so.2: cannot open shared object file"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (torch.distributed.DistStoreError("wait timeout"), None),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("a product that is none"), False),
    ],
)
def test_what_raises_in_a_test_is_the_devices_fault_unless_it_is_the_surroundings(
    monkeypatch: pytest.MonkeyPatch, error: Exception, passed: bool | None
) -> None:
    def check(machine: diagnose.Machine) -> Any:
        raise error

    monkeypatch.setitem(diagnose.CHECKS, "gpu_self_test", check)
    (result,) = diagnose.one(diagnose.Machine({"within_s": 5}), "gpu_self_test")
    assert result["passed"] is passed and str(error)[-20:] in result["detail"]


def test_a_port_that_somebody_else_took_holds_nobody_up_and_accuses_nobody(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()  # and says nothing
        ring = RING.replace("_check_tools.free_port()", str(taken.getsockname()[1])).replace('"within_s": 40', '"within_s": 10')
        begun_s = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(HOOK), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", ring, "all_gather,reference_step"], env=environment, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    results = [CheckResult(node=node, **result) for node, told in map(json.loads, done.stdout.splitlines()) for result in told]
    assert len(results) == 6 and all(r.passed for r in results if r.test == "reference_step"), done.stderr
    assert [r.passed for r in results if r.node == "a" and r.test == "all_gather"] == [None]
    finding = found_by(results)
    assert not finding.named and "address already in use" in finding.doubts[0]
    assert time.monotonic() - begun_s < 25


@pytest.mark.parametrize(
    ("ended", "test", "passed"),
    [
        ("hung", "gpu_self_test", False),
        ("hung", "all_gather", None),
        ("signal 6", "all_gather", None),
        ("signal 9", "all_gather", False),
    ],
)
def test_whose_fault_a_test_is_that_did_not_come_back(ended: str, test: str, passed: bool | None) -> None:
    done = {"test": "dcgm", "passed": True, "detail": ""}
    text = b"\n".join(json.dumps(line).encode() for line in ({"results": [done]}, {"begun": test})) + b'\n{"resu'
    first, last = results_of(text, ended, 3.0)
    assert first == done and (last["test"], last["passed"]) == (test, passed)


# Beside a parked worker


def test_a_start_in_the_middle_of_a_test_ends_it_and_the_script_sees_nothing(tmp_path: Path) -> None:
    """The machine hangs in its product; the worker goes all the same, at once, and has neither children nor threads of it."""
    faults, script = tmp_path / "faults", tmp_path / "train.py"
    script.write_text(
        "import os, psutil, threading\nprint(psutil.Process().children(), threading.active_count(), 'BY' in os.environ)\n"
    )
    environment = {"PYTHONPATH": f"{FAULTS}:{HOOK}", "FAULTS": str(faults), "KEEPSTEP_NODE": "n9", "TESTED_BY": str(tmp_path)}
    with Worker([sys.executable, "-W", "ignore"], environment | {"OMP_NUM_THREADS": "1"}) as worker:
        assert worker.parked()["torch"] is True
        faults.write_text("hang n9")
        spec = {"id": "1", "tests": ["gpu_self_test"], "within_s": 60}
        worker.channel.sendall(json.dumps({"diagnose": spec}).encode() + b"\n")
        end = time.monotonic() + 20
        while len(alive(str(tmp_path))) < 3:  # worker, tester, and its run
            assert time.monotonic() < end
            time.sleep(0.01)
        worker.go(str(script))
        code, out, err = worker.end()
        assert (code, out) == (0, "[] 1 False\n"), err
    end = time.monotonic() + 5
    while alive(str(tmp_path)):
        assert time.monotonic() < end, alive(str(tmp_path))
        time.sleep(0.01)


def alive(mark: str) -> list[int]:
    """Processes with TESTED_BY in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"TESTED_BY={mark}\0".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def test_a_worker_with_threads_has_a_tester_started_anew(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{HOOK}", "KEEPSTEP_PARKED_IMPORTS": "threads", "OMP_NUM_THREADS": "1"}
    with Worker([sys.executable], environment) as worker:
        worker.parked()
        for number in ("1", "2"):
            spec = {"id": number, "tests": ["gpu_self_test"], "within_s": 60}
            worker.channel.sendall(json.dumps({"diagnose": spec}).encode() + b"\n")
            answer = json.loads(worker.lines.readline())["diagnosed"]
            assert answer["id"] == number and answer["ended"] == "" and answer["results"][0]["passed"] is True, answer


# The command line


def test_this_host_is_tested_for_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = CliRunner().invoke(app, ["diagnose", "--test", "gpu_self_test", "--test", "dcgm"])
    assert done.exit_code == 0 and "passed" in done.stdout and "dcgmi is not installed" in done.stdout, done.output
    assert "passing is no proof; of bad machines these tests find: gpu_self_test 50%" in done.stdout
    faults = tmp_path / "faults"
    faults.write_text("flip n1 64 64 64")
    for name, value in {
        "FAULTS": str(faults),
        "KEEPSTEP_NODE": "n1",
        "PYTHONPATH": str(FAULTS),
        "PYTHONWARNINGS": "ignore",
    }.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["diagnose", "--test", "gpu_self_test", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 1 and said["results"][0]["passed"] is False and len(said["named"]) == 1, done.output
    assert said["rates"]["gpu_self_test"]["recall"] == 0.5 and said["rates"]["gpu_self_test"]["source"].startswith("assumed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--test", "x"], "there is no test 'x'"),
        (["--node", "a"], "name the job, too"),
        (["--test", "dcgm"], "no test could run here: dcgm: dcgmi is not installed"),
        (["--python", "/nowhere"], "name an interpreter that has torch"),
        (["--python", "/bin/false"], "ran no test (it ended with 1)"),
    ],
)
def test_wrong_use_is_a_sentence(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["diagnose", *words])
    assert isinstance(done.exception, Refused) and said in str(done.exception)
