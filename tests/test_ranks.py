"""The rank host over real processes: a small script for a training run, real shims, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from actuators.environment import Plan, base, host_mark, mark_prefix, parked_form, ranked
from actuators.processes import Process, alive, marked, open_exact, parse_stat, send_exact, stat, state_of
from actuators.ranks import RankHost, RankNews
from actuators.tail import secrets_in, shown
from events.action import NodeCommand
from events.decision import RankPlace
from events.training import RankExit, RankStarted

PARKED = Path(__file__).parent.parent / "keepstep" / "parked.py"

#: What a rank does is said by its first argument; it writes its environment to <out>/<rank>.json first.
SCRIPT = """
import json, os, signal, subprocess, sys, time
what, out = sys.argv[1], sys.argv[2]
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "polite":
    def bye(*_):
        print("bye", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, bye)
path = os.path.join(out, f"{os.environ['RANK']}-{os.environ['KEEPSTEP_ATTEMPT']}.json")
with open(path + ".new", "w") as file:
    json.dump({"environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "pid": os.getpid()}, file)
os.rename(path + ".new", path)
if what == "children":
    code = "import os, sys, time; os.fork() or os.setsid(); os.fork(); open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(600)"
    for more in ({"start_new_session": True}, {"env": {}}):
        subprocess.Popen([sys.executable, "-c", code, os.path.join(out, "forked-")], **more)
if what == "exit":
    print("\\x1b[31mlast words\\x1b[0m", os.environ.get("MY_API_TOKEN"), "https://me:hunter22@host/x", file=sys.stderr)
    sys.exit(int(sys.argv[3]))
if what == "loud":
    line = "x" * 999
    for _ in range(20000):
        print(line)
    print("done", file=sys.stderr)
    sys.exit(3)
time.sleep(600)
"""


class World:
    """A node with its folder, its script and the news it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.out = folder / "out"
        self.out.mkdir()
        self.news: list[RankNews] = []
        self.heard_at: list[float] = []
        self.hosts: list[RankHost] = []
        self.marks = mark_prefix(host_mark(folder / "state"), "n.1", "gpt 2")

    def marked(self) -> list[Process]:
        return [process for process, _ in marked(self.marks)]

    def _hear(self, news: RankNews) -> None:
        self.news.append(news)
        self.heard_at.append(time.monotonic())

    async def host(self, **more: Any) -> RankHost:
        host = RankHost(
            self.folder / "state",
            "n.1",
            hook_folder=more.pop("hook_folder", None),
            on_event=self._hear,
            socket_path=self.folder / "agent.sock",
            boot_id="boot-1",
            **more,
        )
        await host.start()
        self.hosts.append(host)
        return host

    def command(
        self, verb: str, attempt: int = 1, *, key: str = "", what: str = "sleep", count: int = 1, **more: Any
    ) -> NodeCommand:
        fields: dict[str, Any] = {
            "key": key or f"{verb}/{attempt}/{time.monotonic_ns()}",
            "verb": verb,
            "job": "gpt 2",
            "attempt": attempt,
            "epoch": 1,
            "place": RankPlace(node="n.1", first_rank=0, count=count),
            "world_size": count,
            "master_address": "127.0.0.1",
            "master_port": 4321,
            # no Python command by its name, so that nothing is parked unless a test means it
            "command": (
                "/usr/bin/env",
                sys.executable,
                str(self.script),
                what,
                str(self.out),
                *map(str, more.pop("words", ())),
            ),
            "directory": str(self.folder),
        }
        return NodeCommand.model_validate(fields | more)

    def told(self, kind: type) -> list[Any]:
        return [news.fact for news in self.news if isinstance(news.fact, kind)]

    def seen(self, rank: int, attempt: int = 1) -> dict[str, Any] | None:
        path = self.out / f"{rank}-{attempt}.json"
        return json.loads(path.read_text()) if path.exists() else None


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> Any:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if value := condition():
            return value
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass in time")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    here = World(tmp_path)
    yield here
    for host in here.hosts[:-1]:
        await host.close()
    if here.hosts:
        await here.hosts[-1].close(leave_running=False)
    assert here.marked() == []


@asynccontextmanager
async def restarted(world: World, host: RankHost, **more: Any) -> AsyncIterator[RankHost]:
    await host.close()
    fresh = await world.host(**more)
    yield fresh


async def test_a_rank_gets_the_environment_that_launcher_and_hook_agreed_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_CREDS", "secret")
    monkeypatch.setenv("LOCAL_RANK", "77")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    host = await world.host(hook_folder=Path("/hook"))
    answer = await host.handle(
        world.command("start", 3, count=2, world_size=8, node_rank=2, checkpoints="/ck", restore="/ck/step-00000007",
                      environment=(("COLOUR", "blue"),), place=RankPlace(node="n.1", first_rank=4, count=2))
    )  # fmt: skip
    assert answer.ok, answer.detail
    for rank in (4, 5):
        seen = await until(lambda rank=rank: world.seen(rank, 3))
        env = seen["environment"]
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank - 4), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321", "TORCHELASTIC_RUN_ID": "gpt 2", "TORCHELASTIC_RESTART_COUNT": "2",
            "KEEPSTEP_JOB": "gpt 2", "KEEPSTEP_ATTEMPT": "3", "KEEPSTEP_NODE": "n.1", "KEEPSTEP_RANK": str(rank),
            "KEEPSTEP_SOCKET": str(world.folder / "agent.sock"), "KEEPSTEP_STORE_PREFIX": "gpt 2/3", "KEEPSTEP_CHECKPOINTS": "/ck",
            "KEEPSTEP_RESTORE": "/ck/step-00000007", "PYTHONPATH": "/hook:/theirs", "COLOUR": "blue",
        }  # fmt: skip
        assert expected.items() <= env.items()
        assert "NATS_CREDS" not in env
        assert seen["cwd"] == str(world.folder)
    assert host.current() == ("gpt 2", 3)
    assert [(p.rank, p.state) for p in host.processes()] == [(4, "S"), (5, "S")]
    started = world.told(RankStarted)
    assert sorted((s.rank, s.local_rank, s.world_size, s.warm) for s in started) == [(4, 0, 8, False), (5, 1, 8, False)]
    assert {s.pid for s in started} == {p.pid for p in host.processes()}


async def test_a_death_is_told_at_once_with_signal_and_the_rest_is_killed(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start", what="children"))
    await until(lambda: len(list(world.out.glob("forked-*"))) == 8)
    (rank,) = host.processes()
    below = len(world.marked())
    assert below >= 5  # the rank, and set-sid children with their own
    at = time.monotonic()
    os.kill(rank.pid, signal.SIGKILL)
    await until(lambda: world.told(RankExit))
    (exit_,) = world.told(RankExit)
    assert (exit_.signal, exit_.code, exit_.asked, exit_.rank) == (9, None, False, 0)
    assert abs(exit_.ended_ns - time.time_ns()) < 60e9
    assert world.heard_at[-1] - at < 1.0  # about 10 ms on an idle machine
    await until(lambda: not world.marked())
    # one of the children had no environment and so no mark: only the subreaper could find it
    assert _pids_with(str(world.out)) == []
    assert host.current() == ("", 0)


def _pids_with(text: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if text in Path(f"/proc/{name}/cmdline").read_text():
                    found.append(int(name))
            except OSError:
                pass
    return found


@pytest.mark.parametrize(("code", "words"), [(0, "0"), (3, "3")])
async def test_an_exit_code_and_last_words_without_secrets_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "tok-abcdef123")
    host = await world.host()
    await host.handle(world.command("start", what="exit", words=(words,)))
    await until(lambda: world.told(RankExit))
    (exit_,) = world.told(RankExit)
    assert (exit_.code, exit_.signal) == (code, None)
    assert exit_.stderr_tail == "\\x1b[31mlast words\\x1b[0m [redacted] https://[redacted]@host/x"
    assert not [p for p in (world.folder / "state").rglob("*.json") if b"tok-abcdef123" in p.read_bytes()]


async def test_a_command_that_is_not_there_says_so(world: World) -> None:
    host = await world.host()
    answer = await host.handle(world.command("start", command=("no-such-thing", "x")))
    assert answer.ok
    await until(lambda: world.told(RankExit))
    (exit_,) = world.told(RankExit)
    assert exit_.code == 127
    assert "could not start 'no-such-thing'" in exit_.stderr_tail


async def test_output_is_kept_in_two_bounded_files(world: World) -> None:
    host = await world.host(log_bytes_max=100_000)
    await host.handle(world.command("start", what="loud"))
    await until(lambda: world.told(RankExit), 30)
    assert world.told(RankExit)[0].code == 3
    logs = {p.name: p.stat().st_size for p in (world.folder / "state" / "slots").rglob("stdout.log*")}
    assert set(logs) == {"stdout.log", "stdout.log.1"}
    assert max(logs.values()) <= 300_000  # one read may go beyond


async def test_stop_is_quick_asked_for_and_leaves_nothing(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start", what="children", count=2))
    await until(lambda: len(list(world.out.glob("forked-*"))) == 16)
    pids = [p.pid for p in host.processes()]
    os.kill(pids[0], signal.SIGSTOP)
    await until(lambda: "T" in [p.state for p in host.processes()])
    at = time.monotonic()
    answer = await host.handle(world.command("stop"))
    assert answer.ok, answer.detail
    assert time.monotonic() - at < 2.0  # about 30 ms on an idle machine
    assert "2 ranks stopped" in answer.detail
    exits = world.told(RankExit)
    assert [(e.signal, e.asked) for e in exits] == [(9, True), (9, True)]
    assert world.marked() == []
    assert _pids_with(str(world.out)) == []


async def test_a_graceful_stop_lets_a_rank_say_good_bye_and_kills_one_that_stays(world: World) -> None:
    host = await world.host(grace_s=0.5)
    await host.handle(world.command("start", 1, what="polite"))
    await until(lambda: world.seen(0, 1))
    assert (await host.handle(world.command("stop", 1, graceful=True))).ok
    await host.handle(world.command("start", 2, what="stubborn"))
    await until(lambda: world.seen(0, 2))
    at = time.monotonic()
    assert (await host.handle(world.command("stop", 2, graceful=True))).ok
    assert time.monotonic() - at >= 0.4
    assert [(e.code, e.signal, e.asked) for e in world.told(RankExit)] == [(0, None, True), (None, 9, True)]


async def test_a_repeated_key_gets_the_same_answer_also_after_a_restart(world: World) -> None:
    host = await world.host()
    start = world.command("start", key="k1")
    first, second = await asyncio.gather(host.handle(start), host.handle(start))
    assert first == second and first.ok
    async with restarted(world, host) as fresh:
        assert await fresh.handle(start) == first
        assert await fresh.handle(world.command("start", key="another key, same attempt")) is not None
        assert len(world.told(RankStarted)) == 1
        assert len(world.marked()) == 1
        prepare = world.command("prepare", key="k2")
        assert await fresh.handle(prepare) == await fresh.handle(prepare)


async def test_an_older_attempt_is_refused_and_a_newer_start_ends_it(world: World) -> None:
    host = await world.host()
    assert (await host.handle(world.command("start", 2))).ok
    for verb in ("start", "stop", "prepare", "fence"):
        answer = await host.handle(world.command(verb, 1))
        assert not answer.ok and answer.detail.startswith("stale attempt"), verb
    assert (await host.handle(world.command("start", 3))).ok
    assert [(e.asked, e.signal) for e in world.told(RankExit)] == [(True, 9)]
    assert host.current() == ("gpt 2", 3)
    assert (await host.handle(world.command("stop", 3))).ok
    answer = await host.handle(world.command("start", 3))
    assert not answer.ok and "was stopped" in answer.detail


async def test_a_fence_ends_all_and_refuses_until_a_later_epoch(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start", 1))
    answer = await host.handle(world.command("fence", 1, epoch=4))
    assert answer.ok, answer.detail
    assert world.marked() == []
    async with restarted(world, host) as fresh:
        for verb in ("start", "park", "prepare"):
            answer = await fresh.handle(world.command(verb, 2, epoch=4))
            assert not answer.ok and answer.detail.startswith("fenced"), verb
        assert (await fresh.handle(world.command("start", 2, epoch=5))).ok
        assert not (await fresh.handle(world.command("fence", 2, epoch=4))).ok


async def test_an_agent_that_comes_back_finds_its_ranks_and_the_exit_it_missed_once(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start", count=2))
    await until(lambda: world.seen(0) and world.seen(1))
    pids = {p.rank: p.pid for p in host.processes()}
    await host.close()
    os.kill(pids[1], signal.SIGTERM)
    await until(lambda: (now := stat(pids[1])) is None or now.state == "Z")
    await until(lambda: len(list((world.folder / "state" / "slots").glob("*/exit.json"))) == 1)
    assert world.told(RankExit) == []
    fresh = await world.host()
    (exit_,) = world.told(RankExit)
    assert (exit_.rank, exit_.signal, exit_.asked) == (1, 15, False)
    assert [(p.rank, p.pid, p.state) for p in fresh.processes()] == [(0, pids[0], "S"), (1, pids[1], "-")]
    async with restarted(world, fresh) as third:
        assert len(world.told(RankExit)) == 1
        assert len(world.told(RankStarted)) == 2
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: len(world.told(RankExit)) == 2)
        assert third.current() == ("", 0)


async def test_a_killed_shim_does_not_leave_its_rank_unmanaged(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start", what="children"))
    await until(lambda: len(list(world.out.glob("forked-*"))) == 8)
    (slot,) = host._slots.all.values()
    assert slot.shim is not None
    send_exact(slot.shim, signal.SIGKILL)
    await until(lambda: world.told(RankExit))
    (exit_,) = world.told(RankExit)
    assert (exit_.code, exit_.signal, exit_.asked) == (None, None, False)
    assert world.marked() == []


async def test_a_shim_killed_while_the_agent_was_away_is_fenced_when_it_is_back(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start"))
    (slot,) = host._slots.all.values()
    assert slot.shim and slot.worker
    shim, worker = slot.shim, slot.worker
    await host.close()
    send_exact(shim, signal.SIGKILL)
    await until(lambda: not alive(shim))
    assert alive(worker)
    await world.host()
    assert not alive(worker)
    assert [(e.code, e.signal) for e in world.told(RankExit)] == [(None, None)]


async def test_a_stopped_shim_is_no_protection(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start"))
    (slot,) = host._slots.all.values()
    assert slot.shim
    send_exact(slot.shim, signal.SIGSTOP)
    answer = await host.handle(world.command("stop"))
    assert answer.ok, answer.detail
    assert world.marked() == []
    assert [e.asked for e in world.told(RankExit)] == [True]


async def test_another_boot_leaves_nothing_to_kill(world: World) -> None:
    host = await world.host()
    await host.handle(world.command("start"))
    await host.close()
    (folder,) = (world.folder / "state" / "slots").iterdir()
    for name in ("slot", "worker", "shim"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "boot-0"}))
    fresh = await world.host()
    assert [(e.code, e.signal) for e in world.told(RankExit)] == [(None, None)]
    assert fresh.current() == ("", 0)
    assert len(world.marked()) == 1  # the numbers of another boot were not taken for it
    assert (await fresh.handle(world.command("stop"))).ok  # but its mark is


async def test_a_pid_that_is_another_process_now_is_not_signalled() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    seen = stat(child.pid)
    assert seen is not None
    real, other = Process(child.pid, seen.start_time), Process(child.pid, seen.start_time - 1)
    assert not send_exact(other, signal.SIGKILL)
    assert open_exact(other) is None and state_of(other) == "-" and not alive(other)
    assert child.returncode is None and alive(real)
    assert send_exact(real, signal.SIGKILL)
    await child.wait()
    assert not send_exact(real, signal.SIGKILL)


async def test_prepare_gives_a_free_port_and_the_newest_whole_checkpoint(world: World) -> None:
    folder = world.folder / "ck"

    def checkpoint(step: int, content: bytes = b"weights", *, digest: str = "", stated: int | None = None) -> Path:
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "model.pt").write_bytes(content)
        manifest = {"bytes": len(content), "sha256": digest or sha256(content).hexdigest()}
        (path / "manifest.json").write_text(
            json.dumps({"step": step if stated is None else stated, "files": {"model.pt": manifest}})
        )
        return path

    host = await world.host()
    assert (await host.handle(world.command("prepare", checkpoints=str(folder)))).restore == ""
    whole = checkpoint(10)
    checkpoint(5)
    checkpoint(20, digest="0" * 64)
    (checkpoint(30) / "model.pt").write_bytes(b"weigh")
    (checkpoint(40) / "manifest.json").unlink()
    checkpoint(50, stated=49)
    (folder / "step-00000060.tmp").mkdir()
    (checkpoint(70) / "manifest.json").write_text('{"step":70,"files":{"../../train.py":{"bytes":1,"sha256":"x"}}}')
    answers = [await host.handle(world.command("prepare", checkpoints="ck")) for _ in range(2)]
    for answer in answers:
        assert answer.ok
        assert (Path(answer.restore), answer.restore_step, answer.address) == (whole, 10, "127.0.0.1")
        assert "SHA-256 differs" in answer.detail and "no manifest" in answer.detail
    assert answers[0].port != answers[1].port and min(a.port for a in answers) > 0
    below = {
        step: await host.handle(world.command("prepare", checkpoints="ck", restore_below_step=step)) for step in (5, 6, 10, 11)
    }
    assert {step: answer.restore_step for step, answer in below.items()} == {5: -1, 6: 5, 10: 5, 11: 10}
    assert (
        below[5].ok and below[5].restore == "" and "no whole checkpoint below step 5; 7 of step 5 or later" in below[5].detail
    )
    assert "SHA-256" not in below[10].detail  # what is not wanted is not looked at


PARKED_MODULE = """
import json, os, runpy, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
if os.environ.get("BREAK"):
    sys.exit("cannot warm up")
time.sleep(float(os.environ.get("WARM_S", "0")))
channel.sendall(b'{"parked": true}\\n')
line = channel.makefile("rb").readline()
if not line:
    sys.exit(0)
go = json.loads(line)["go"]
os.environ.update(go["env"])
os.chdir(go["cwd"])
sys.argv = go["argv"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def small_hook(world: World) -> Path:
    """The parked worker's protocol without its weight."""
    (world.folder / "hook" / "keepstep").mkdir(parents=True)
    (world.folder / "hook" / "keepstep" / "__init__.py").touch()
    (world.folder / "hook" / "keepstep" / "parked.py").write_text(PARKED_MODULE)
    return world.folder / "hook"


def python_command(world: World, what: str = "sleep") -> tuple[str, ...]:
    return (sys.executable, "-u", str(world.script), what, str(world.out))


async def test_parked_workers_start_in_milliseconds_and_are_parked_again(world: World) -> None:
    host = await world.host(hook_folder=small_hook(world))
    command = python_command(world)
    answer = await host.handle(world.command("park", 0, count=2, command=command))
    assert answer.ok
    await until(lambda: host.parked() == 2, 60)
    assert host.current() == ("", 0) and world.news == []
    at = time.monotonic()
    answer = await host.handle(world.command("start", 1, count=2, command=command))
    took = time.monotonic() - at
    assert answer.ok and "2 of them warm" in answer.detail
    assert took < 1.0  # 5 ms on an idle machine
    assert [s.warm for s in world.told(RankStarted)] == [True, True]
    seen = await until(lambda: world.seen(1))
    assert seen["environment"]["RANK"] == "1" and seen["argv"][1:] == ["sleep", str(world.out)]
    assert seen["pid"] in [p.pid for p in host.processes()]
    assert [os.getpriority(os.PRIO_PROCESS, p.pid) for p in host.processes()] == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
    await until(lambda: host.parked() == 2, 60)  # refilled
    async with restarted(world, host, hook_folder=world.folder / "hook") as fresh:
        assert fresh.parked() == 2
        assert (await fresh.handle(world.command("stop", 1))).ok
        assert fresh.parked() == 2  # what is parked is not of the attempt
        assert (await fresh.handle(world.command("start", 2, count=2, command=command))).ok
        assert [s.warm for s in world.told(RankStarted)[2:]] == [True, True]
        assert [os.getpriority(os.PRIO_PROCESS, p.pid) for p in fresh.processes()] == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
        assert (await fresh.handle(world.command("fence", 2))).ok
        assert fresh.parked() == 0
    assert len(world.told(RankExit)) == 4


async def test_a_worker_warms_up_at_a_low_priority_and_gets_its_own_back(world: World) -> None:
    host = await world.host(hook_folder=small_hook(world))
    command, slow = python_command(world), (("WARM_S", "1"),)
    await host.handle(world.command("park", 0, command=command, environment=slow))
    slot = await until(lambda: next((slot for slot in host._slots.idle("gpt 2") if slot.worker), None))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0:
        await until(lambda: os.getpriority(os.PRIO_PROCESS, slot.worker.pid) == 10)
    await until(lambda: host.parked() == 1, 60)
    assert os.getpriority(os.PRIO_PROCESS, slot.worker.pid) == own


async def test_a_parked_worker_that_fails_is_tried_a_few_times_and_the_start_is_cold(world: World) -> None:
    host = await world.host(hook_folder=small_hook(world))
    command, broken = python_command(world), (("BREAK", "1"),)
    await host.handle(world.command("park", 0, count=1, command=command, environment=broken))
    await until(lambda: host._park_failures.get("gpt 2") == 3, 60)
    assert world.news == []
    answer = await host.handle(world.command("start", 1, command=command, environment=broken))
    assert answer.ok and "0 of them warm" in answer.detail
    await until(lambda: world.seen(0))
    assert [s.warm for s in world.told(RankStarted)] == [False]


async def test_what_is_parked_for_another_command_is_not_used(world: World) -> None:
    host = await world.host(hook_folder=small_hook(world))
    await host.handle(world.command("park", 0, command=python_command(world, "other")))
    await until(lambda: host.parked() == 1, 60)
    answer = await host.handle(world.command("start", 1, command=python_command(world)))
    assert answer.ok and "0 of them warm" in answer.detail
    await until(
        lambda: (
            [s.record.plan for s in host._slots.idle("gpt 2")] == [Plan(python_command(world), str(world.folder), ()).digest]
        )
    )


async def test_a_finished_job_keeps_nothing_parked(world: World) -> None:
    host = await world.host(hook_folder=small_hook(world))
    command = (sys.executable, str(world.script), "exit", str(world.out), "0")
    await host.handle(world.command("park", 0, command=command))
    await until(lambda: host.parked() == 1, 60)
    await host.handle(world.command("start", 1, command=command))
    await until(lambda: world.told(RankExit))
    await until(lambda: not world.marked())
    assert host.parked() == 0


async def test_what_is_let_go_while_it_is_being_parked_does_not_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await world.host(hook_folder=small_hook(world))
    made, making, release = host._slots.make, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **more: Any) -> Any:
        making.set()
        await release.wait()
        return await made(*arguments, **more)

    monkeypatch.setattr(host._slots, "make", slow)
    command = python_command(world)
    assert (await host.handle(world.command("park", 0, command=command))).ok
    await asyncio.wait_for(making.wait(), 30)
    assert (await host.handle(world.command("park", 0, key="let go", command=command).model_copy(update={"place": None}))).ok
    release.set()
    await host._refills["gpt 2"]
    await until(lambda: not world.marked())
    assert host._slots.idle("gpt 2") == []


async def test_the_hooks_own_parked_worker_becomes_the_script(world: World) -> None:
    host = await world.host(hook_folder=PARKED.parent.parent)
    command = python_command(world)
    light = (("PYTHONSAFEPATH", "1"),)
    await host.handle(world.command("park", 0, command=command, environment=light))
    await until(lambda: host.parked() == 1, 150)
    answer = await host.handle(world.command("start", 1, command=command, environment=light))
    assert answer.ok and "1 of them warm" in answer.detail, answer.detail
    seen = await until(lambda: world.seen(0))
    assert seen["argv"] == [str(world.script), "sleep", str(world.out)]
    assert seen["environment"]["KEEPSTEP_STORE_PREFIX"] == "gpt 2/1"


# The pure parts


def test_a_stat_line_with_parentheses_in_its_name_is_read() -> None:
    line = b"77 (a) b (c)) T 5 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 9 9"
    assert (parse_stat(line).state, parse_stat(line).parent, parse_stat(line).start_time) == ("T", 5, 123456)
    with pytest.raises(ValueError):
        parse_stat(b"77")


@pytest.mark.parametrize(
    ("command", "form"),
    [
        (("python", "t.py", "-x"), (["python", "-m", "keepstep.parked"], ["t.py", "-x"])),
        (("/v/bin/python3.11", "-u", "-X", "dev", "t.py"), (["/v/bin/python3.11", "-u", "-X", "dev", "-m", "keepstep.parked"], ["t.py"])),
        (("python3", "-m", "pkg.train", "-u"), (["python3", "-m", "keepstep.parked"], ["-m", "pkg.train", "-u"])),
        (("python", "-c", "pass"), None),
        (("python", "-I", "t.py"), None),
        (("python", "-m"), None),
        (("python",), None),
        (("bash", "run.sh"), None),
        (("pythonic", "t.py"), None),
    ],
)  # fmt: skip
def test_which_commands_can_be_parked(command: tuple[str, ...], form: object) -> None:
    assert parked_form(command) == form


def test_the_mark_comes_first_and_keeps_jobs_nodes_and_installations_apart() -> None:
    mark = mark_prefix(host_mark(Path("/var/lib/x")), "a/b", "") + "s"
    own = base(
        {"A": "1", "KEEPSTEP_MARK": "x"}, Plan(("c",), "", ()), node="a/b", job="", mark=mark, hook_folder="", socket_path="/s"
    )
    assert next(iter(own.items())) == ("KEEPSTEP_MARK", mark)
    assert mark.endswith("/a%2Fb/%/s")
    assert not mark_prefix("h", "a", "b").startswith(mark_prefix("h", "a", ""))
    assert host_mark(Path("/a")) != host_mark(Path("/b"))
    with pytest.raises(ValueError):
        ranked(own, NodeCommand(key="k", verb="start", job="j", attempt=1), 0)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Authorization: Bearer abc.def", "Authorization: [redacted]"),
        ("{'authorization': 'Basic eHg='}", "{'authorization': '[redacted]'}"),
        ("git clone https://u:p4ss@host/x.git", "git clone https://[redacted]@host/x.git"),
        ("HF_TOKEN=hf_abcdefg next", "HF_TOKEN=[redacted] next"),
        ('"api_key": "sk-123456"', '"api_key": "[redacted]"'),
        ("TOKENIZERS_PARALLELISM=false is kept", "TOKENIZERS_PARALLELISM=false is kept"),
        ("KeyError: 'weight'", "KeyError: 'weight'"),
        ("10%\r20%\r100%", "100%"),
        ("a\x1b]0;title\x07b", "a\\x1b]0;title\\x07b"),
        ("my s3cr3tvalue here", "my [redacted] here"),
    ],
)
def test_a_tail_shows_no_secret(raw: str, text: str) -> None:
    assert shown(raw.encode(), secrets_in({"DB_PASSWORD": "s3cr3tvalue", "KEYBOARD": "german-layout", "A_KEY": "no"})) == text


def test_a_tail_is_bounded_in_lines_and_bytes() -> None:
    assert shown(b"\n".join(b"%d" % i for i in range(100))).split("\n") == [str(i) for i in range(70, 100)]
    assert len(shown("ü".encode() * 9000).encode()) <= 4000
    shown(b"\xff\xfe broken")
