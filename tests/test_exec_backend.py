"""The exec backend with real scripts, and the example for Slurm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from actuators.exec_backend import DEFAULT_VERBS, BadScript, Exec, described, shown
from actuators.local import Local
from actuators.port import Done, Work
from tests.test_actuators import Node, channel_to, declared, intent

SLURM = Path(__file__).parent.parent / "infra" / "deploy" / "slurm" / "keepstep-actuate"


def script(folder: Path, body: str) -> str:
    path = folder / "actuate"
    path.write_text(f"#!/bin/sh\n[ $1 = describe ] && exit 64\n{body}\n")
    path.chmod(0o755)
    return str(path)


async def called(folder: Path, body: str, verb: str = "notify", *, limit_s: float = 10.0, **more: Any) -> Done:
    backend = Exec(script(folder, body), Local(within_s=0.4, unreachable_s=0.1), limit_s=limit_s)
    nodes = {"n0": Node(), "n1": Node()}
    work = Work(intent(verb, **more), declared(), ("s0",))
    done: Done = await getattr(backend, verb)(work, channel_to(nodes))
    return done


async def test_the_script_is_told_all_in_json_and_zero_is_done(tmp_path: Path) -> None:
    done = await called(tmp_path, f"cat > {tmp_path}/told; echo $1 paged", text='a "quoted"\nline', node="n1")
    assert (done.result, done.detail, done.nodes) == ("done", "notify paged", ())
    told = json.loads((tmp_path / "told").read_text())
    assert (told["verb"], told["text"], told["node"], told["job"]) == ("notify", 'a "quoted"\nline', "n1", "gpt.a")
    assert told["key"] and told["incident"] == "i1" and told["standbys"] == ["s0"]
    await called(tmp_path, f"cat > {tmp_path}/told", "notify", node="n1", revision="ab" * 20, restore_below_step=12)
    told = json.loads((tmp_path / "told").read_text())
    assert (told["revision"], told["restore_below_step"]) == ("ab" * 20, 12)


@pytest.mark.parametrize(
    ("body", "again", "says"),
    [
        ("echo no such node >&2; exit 3", False, "exit code 3; no such node"),
        ("exit 75", True, "tried again"),
        ("kill -SEGV $$", False, "signal 11"),
        ("echo half; exec sleep 600", True, "did not end within"),
    ],
)
async def test_what_an_exit_comes_to(tmp_path: Path, body: str, again: bool, says: str) -> None:
    done = await called(tmp_path, body, node="n1", limit_s=0.5 if "sleep" in body else 10.0)
    assert (done.result, done.again, done.nodes) == ("failed", again, ("n1",))
    assert says in done.detail


async def test_a_script_out_of_time_is_killed_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    done = await called(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait", limit_s=0.5)
    assert done.result == "failed" and time.monotonic() - began < 8
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):
        try:
            if b") Z" in Path(f"/proc/{pid}/stat").read_bytes():
                break
        except OSError:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("its child lives on")


async def test_garbage_and_floods_are_bounded_and_made_fit_for_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PASSWORD", "hunter2222")
    body = "head -c 3000000 /dev/urandom; echo $SLURM_PASSWORD; printf 'the end\\000\\033[31m'"
    done = await called(tmp_path, body)
    assert done.result == "done"
    assert len(done.detail) <= 1501 and done.detail.startswith("…")
    assert "the end" in done.detail and "hunter2222" not in done.detail
    assert not any(ord(c) < 32 for c in done.detail)
    done.detail.encode()


async def test_a_script_that_reads_nothing_or_can_not_be_run_is_an_outcome(tmp_path: Path) -> None:
    assert (await called(tmp_path, "exec 0<&-; exit 0", text="x" * 4000)).result == "done"
    path = tmp_path / "other"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    done = await Exec(str(path)).notify(Work(intent("notify"), declared()), channel_to({}))
    assert (done.result, done.again) == ("failed", False)
    with pytest.raises(BadScript, match="not an executable"):
        Exec(str(tmp_path / "missing"))


async def test_processes_stay_the_agents_and_an_eviction_is_both(tmp_path: Path) -> None:
    nodes = {"n0": Node(), "n1": Node()}
    backend = Exec(script(tmp_path, "echo drained"), Local(within_s=0.4, unreachable_s=0.1))
    channel = channel_to(nodes)
    done = await backend.evict_node(Work(intent("evict_node", node="n1"), declared()), channel)
    assert done.result == "done" and done.detail.endswith("drained") and nodes["n1"].done == {"fence": 1}
    done = await backend.wake_standby(Work(intent("wake_standby", node="n0"), declared()), channel)
    assert done.result == "done" and nodes["n0"].done == {"park": 1}
    done = await backend.stop_attempt(Work(intent(nodes=("n0", "n1")), declared()), channel)
    assert done.detail == "stopped on 2 nodes" and nodes["n1"].done == {"fence": 1, "stop": 1}
    nodes["n1"].deaf = True  # the scheduler is told even of a node that is not heard
    done = await backend.evict_node(Work(intent("evict_node", node="n1", decision="d2"), declared()), channel)
    assert (done.result, done.nodes) == ("done", ("n1",)) and "drained" in done.detail


async def test_a_script_that_fails_to_free_a_spare_does_not_wake_it(tmp_path: Path) -> None:
    nodes = {"n0": Node()}
    backend = Exec(script(tmp_path, "exit 1"))
    done = await backend.wake_standby(Work(intent("wake_standby", node="n0"), declared()), channel_to(nodes))
    assert done.result == "failed" and not nodes["n0"].told


async def test_a_script_may_declare_what_it_carries_out(tmp_path: Path) -> None:
    path = tmp_path / "actuate"
    path.write_text('#!/bin/sh\n[ $1 = describe ] && echo \'{"verbs":["stop_attempt"]}\' || echo "$1 by script"\n')
    path.chmod(0o755)
    nodes = {"n0": Node(), "n1": Node()}
    backend = Exec(str(path), Local(within_s=0.4, unreachable_s=0.1))
    done = await backend.stop_attempt(Work(intent(nodes=("n0", "n1")), declared()), channel_to(nodes))
    assert done.detail == "stop_attempt by script" and not nodes["n0"].told
    done = await backend.evict_node(Work(intent("evict_node", node="n1"), declared()), channel_to(nodes))
    assert "by script" not in done.detail and nodes["n1"].done == {"fence": 1}


def test_what_describe_may_say() -> None:
    assert described(b'{"verbs":["notify"]}') == {"notify"}
    for garbage in (b"", b"{}", b"[]", b"\xff", b'{"verbs":3}'):
        assert described(garbage) == DEFAULT_VERBS
    with pytest.raises(BadScript, match="reboot"):
        described(b'{"verbs":["reboot"]}')
    assert shown(b"a\n b", b"") == "a b"


# The example for Slurm: over a scontrol that repeats what a real one (22.05.8) printed, and over a real one where there is one.

RECORD = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=1 CPUTot=1 CPULoad=13.91 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=(null) NodeAddr=127.0.0.1 NodeHostName=vm Port=17001 Version=22.05.8 OS=Linux 6.18.44 #1 SMP "
    "RealMemory=1 AllocMem=0 FreeMem=19091 Sockets=1 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A "
    "MCS_label=N/A Partitions=all  BootTime=2026-11-29T22:58:39 CfgTRES=cpu=1,mem=1M,billing=1 AllocTRES= CapWatts=n/a "
    "CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s {reason}"
)


def slurm(
    folder: Path, verb: str, told: dict[str, Any], *, state: str = "IDLE", reason: str = "", fail: str = ""
) -> tuple[int, str, list[str]]:
    """Exit code, what it printed, and the updates it asked for."""
    control = folder / "scontrol"
    record = RECORD.format(state=state, reason=f"Reason={reason} [root@2026-01-01T00:00:00]" if reason else "")
    show = f"echo '{fail}' >&2; exit 1" if fail else f"echo '{record}'"
    control.write_text(f'#!/bin/sh\ncase $1 in update) printf "%s|" "$@" >> {folder}/updates;; *) {show};; esac\n')
    control.chmod(0o755)
    (folder / "updates").write_text("")
    ran = subprocess.run(
        [str(SLURM), verb], input=json.dumps(told), env={**os.environ, "SCONTROL": str(control), "KEEPSTEP_NOTIFY": str(folder / "pager")},
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr, (folder / "updates").read_text().split("|")[:-1]


TOLD = {"verb": "evict_node", "node": "n1", "incident": "i-7", "job": "gpt", "key": "k"}
OURS = ["update", "NodeName=n1", "State=DRAIN", "Reason=keepstep: i-7 evicted from gpt"]


@pytest.mark.parametrize(
    ("verb", "state", "reason", "code", "updates"),
    [
        ("evict_node", "IDLE", "", 0, OURS),
        ("evict_node", "ALLOCATED", "", 0, OURS),
        ("evict_node", "IDLE+DRAIN", "bad fan", 0, []),
        ("evict_node", "IDLE+DRAIN", "keepstep: i-7 evicted from gpt", 0, []),
        ("evict_node", "DOWN*", "Not responding", 0, []),
        ("evict_node", "IDLE+DRAIN", "keepstep: standby of gpt", 0, OURS),
        ("wake_standby", "IDLE", "", 0, []),
        ("wake_standby", "IDLE+DRAIN", "keepstep: standby of gpt", 0, ["update", "NodeName=n1", "State=RESUME"]),
        ("wake_standby", "IDLE+DRAIN", "keepstep: i-3 evicted from gpt", 1, []),
        ("wake_standby", "IDLE+DRAIN", "bad fan", 1, []),
        ("wake_standby", "DOWN*", "keepstep: standby of gpt", 1, []),
        ("wake_standby", "IDLE+DRAIN+NOT_RESPONDING", "keepstep: standby of gpt", 75, []),
        ("reboot", "IDLE", "", 1, []),
    ],
)
def test_slurm_never_touches_what_is_somebody_elses(
    tmp_path: Path, verb: str, state: str, reason: str, code: int, updates: list[str]
) -> None:
    assert slurm(tmp_path, verb, TOLD, state=state, reason=reason)[::2] == (code, updates)


def test_slurm_that_does_not_answer_is_asked_again_and_an_unknown_node_is_not(tmp_path: Path) -> None:
    code, said, _ = slurm(tmp_path, "evict_node", TOLD, fail="slurm_load_node error: Unable to contact slurm controller")
    assert code == 75 and "Unable to contact" in said
    assert slurm(tmp_path, "evict_node", TOLD, fail="Node n1 not found")[0] == 1
    for bad in ("", "n1;reboot", "n1 State=DOWN", "$(id)"):
        assert slurm(tmp_path, "evict_node", TOLD | {"node": bad})[::2] == (1, [])


def test_slurms_page_goes_to_the_sites_pager_whole(tmp_path: Path) -> None:
    (tmp_path / "pager").write_text(f"#!/bin/sh\ncat > {tmp_path}/page\n")
    (tmp_path / "pager").chmod(0o755)
    told = {"verb": "notify", "text": 'quoted "x"\n$(id)'}
    assert slurm(tmp_path, "notify", told)[0] == 0
    assert json.loads((tmp_path / "page").read_text()) == told


def _real_slurm() -> bool:
    return shutil.which("scontrol") is not None and subprocess.run(["scontrol", "ping"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _real_slurm(), reason="no Slurm answers here")
def test_a_real_slurm_drains_for_us_and_keeps_what_is_somebody_elses() -> None:
    def control(*words: str) -> str:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout

    def act(verb: str) -> int:
        return subprocess.run([str(SLURM), verb], input=json.dumps(TOLD), capture_output=True, text=True, timeout=20).returncode

    try:
        assert act("evict_node") == 0 and act("evict_node") == 0
        assert "Reason=keepstep: i-7 evicted from gpt [" in control("--oneliner", "show", "node", "n1")
        assert act("wake_standby") == 1
        control("update", "NodeName=n1", "State=RESUME")
        control("update", "NodeName=n1", "State=DRAIN", "Reason=bad fan")
        assert act("evict_node") == 0 and act("wake_standby") in (1, 75)
        assert "Reason=bad fan [" in control("--oneliner", "show", "node", "n1")
    finally:
        control("update", "NodeName=n1", "State=RESUME")


async def test_the_slurm_script_describes_itself(tmp_path: Path) -> None:
    assert await Exec(str(SLURM)).verbs() == {"evict_node", "wake_standby", "notify"}
    assert SLURM.stat().st_mode & stat.S_IXUSR


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_the_slurm_script_is_clean() -> None:
    subprocess.run(["shellcheck", str(SLURM)], check=True)
