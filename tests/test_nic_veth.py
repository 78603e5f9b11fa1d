"""The NIC producer on real links: veth pairs in a network name space of its own, which goes with the process that it was made for."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import nic_on_the_bus

ROOT = Path(__file__).resolve().parent.parent
#: The name space gets a /sys of its own, as a container's.
_BEGIN = "mount -t sysfs sysfs /sys && ip link set lo up && {links} exec {python} -m tests.nic_watch {state} {patterns}"
_PAIR = "ip link add {name} type veth peer name {name}p && ip link set {name} up && ip link set {name}p up && "


def _why_not() -> str:
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network name spaces need root"
    probe = "mount -t sysfs sysfs /sys && ip link add ks0 type veth peer name ks0p"
    tried = subprocess.run(["unshare", "-n", "-m", "sh", "-c", probe], capture_output=True, text=True, timeout=20, check=False)
    return f"no network name space can be made here: {tried.stderr.strip()[:200]}" if tried.returncode else ""


WHY_NOT = _why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


class Watch:
    """A producer in a name space of its own with veth pairs, and what it tells."""

    def __init__(self, state: Path, pairs: tuple[str, ...], patterns: tuple[str, ...], **environment: str) -> None:
        links = "".join(_PAIR.format(name=name) for name in pairs)
        script = _BEGIN.format(links=links, python=sys.executable, state=state, patterns=" ".join(f"'{p}'" for p in patterns))
        self.process = subprocess.Popen(
            ["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", script], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.told: list[dict[str, Any]] = []
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def ip(self, *arguments: str) -> float:
        """Runs `ip` in there; returns the moment before."""
        at_s = time.monotonic()
        command = ["nsenter", "-t", str(self.process.pid), "-n", "ip", *arguments]
        subprocess.run(command, check=True, timeout=20, capture_output=True)
        return at_s

    def until(
        self, kind: str, fits: Callable[[dict[str, Any]], bool] = lambda data: True, within_s: float = 20
    ) -> dict[str, Any]:
        """The next observation of a kind that fits."""
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                one: dict[str, Any] = json.loads(self._lines.get(timeout=left))
            except queue.Empty:
                break
            self.told.append(one)
            if one["kind"] == kind and fits(one["data"]):
                return one
        raise AssertionError(f"no such {kind} within {within_s} s; told: {self.told}")

    def rest(self, for_s: float) -> list[dict[str, Any]]:
        """What comes within a time."""
        time.sleep(for_s)
        more = []
        while not self._lines.empty():
            more.append(json.loads(self._lines.get()))
        self.told += more
        return more

    def stand_still(self, for_s: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{for_s}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def begin(*pairs: str, patterns: tuple[str, ...], **environment: str) -> Watch:
        found = Watch(tmp_path, pairs, patterns, **environment)
        made.append(found)
        found.until("nic_sample")
        return found

    yield begin
    for one in made:
        one.close()


def _down(device: str) -> Callable[[dict[str, Any]], bool]:
    return lambda data: data["device"] == device and data["state"] == "down"


def _up(device: str) -> Callable[[dict[str, Any]], bool]:
    return lambda data: data["device"] == device and data["state"] == "up"


def test_a_link_taken_down_is_told_at_once_and_its_return_too(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", "ks1", patterns=("ks0", "ks1"))
    took = []
    for _ in range(5):
        at_s = w.ip("link", "set", "ks0p", "down")  # the other end: a cable that is pulled
        down = w.until("link_changed", _down("ks0"))
        took.append(down["at_s"] - at_s)
        assert down["data"]["downs"] == 1 and not down["data"]["by_hand"] and down["data"]["seen_by"] == "netlink"
        w.ip("link", "set", "ks0p", "up")
        w.until("link_changed", _up("ks0"))
        time.sleep(0.3)
    print(f"link down to observation: {', '.join(f'{s * 1000:.1f}' for s in sorted(took))} ms")
    assert sorted(took)[len(took) // 2] < 1.0
    assert {one["data"]["device"] for one in w.told if one["kind"] == "link_changed"} == {"ks0"}


def test_one_taken_down_by_hand_is_told_as_that_and_counts_once(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks*", "!ks0p"))
    w.ip("link", "set", "ks0", "down")
    assert w.until("link_changed", _down("ks0"))["data"]["by_hand"]
    w.rest(1.0)
    w.ip("link", "set", "ks0", "up")
    w.until("link_changed", _up("ks0"))
    w.rest(1.0)
    changes = [one["data"] for one in w.told if one["kind"] == "link_changed"]
    assert sum(data["downs"] for data in changes) == 1, changes


def test_veths_do_not_count_unless_a_pattern_names_them(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("auto",))
    baseline = next(one["data"] for one in w.told if one["kind"] == "nic_baseline")
    assert baseline["links"] == [] and {"ks0", "ks0p", "lo"} <= {name for name, _ in baseline["ignored"]}
    w.ip("link", "set", "ks0", "down")
    assert [one for one in w.rest(1.5) if one["kind"] == "link_changed"] == []


def test_a_link_that_was_never_up_is_not_missed_and_one_that_comes_up_joins(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks0", "late"))
    w.ip("link", "add", "late", "type", "veth", "peer", "name", "latep")
    assert [one for one in w.rest(0.5) if one["kind"] == "link_changed"] == []
    w.ip("link", "set", "latep", "up")
    w.ip("link", "set", "late", "up")
    w.until("nic_baseline", lambda data: {"ks0", "late"} == {link["device"] for link in data["links"]})
    w.ip("link", "set", "latep", "down")
    w.until("link_changed", _down("late"))


def test_a_link_that_is_deleted_is_gone_and_back_when_it_is_made_again(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks0",))
    w.ip("link", "del", "ks0")
    gone = w.until("link_changed", lambda data: data["state"] == "gone")
    assert gone["data"]["device"] == "ks0" and sum(o["data"]["downs"] for o in w.told if o["kind"] == "link_changed") == 1
    w.ip("link", "add", "ks0", "type", "veth", "peer", "name", "ks0p")
    w.ip("link", "set", "ks0p", "up")
    w.ip("link", "set", "ks0", "up")
    w.until("link_changed", _up("ks0"))
    w.ip("link", "set", "ks0p", "down")
    w.until("link_changed", _down("ks0"))


def test_a_link_given_to_another_name_space_is_moved_and_not_missed(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks0",))
    other = subprocess.Popen(["unshare", "-n", "sleep", "60"])
    try:
        deadline = time.monotonic() + 10
        mine, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{other.pid}/ns/net")
        while mine.readlink() == theirs.readlink() and time.monotonic() < deadline:
            time.sleep(0.02)
        w.ip("link", "set", "ks0", "netns", str(other.pid))
        w.until("link_changed", lambda data: data["device"] == "ks0" and data["state"] == "moved")
        assert [one for one in w.rest(0.5) if one["kind"] == "link_changed"] == []
    finally:
        other.kill()
        other.wait()


def test_a_renamed_link_is_followed(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks*", "!*p"))
    w.ip("link", "set", "ks0", "name", "ks7")  # the kernel lets links be renamed while they are up
    w.until("nic_baseline", lambda data: [link["device"] for link in data["links"]] == ["ks7"])
    w.ip("link", "set", "ks0p", "down")
    w.until("link_changed", _down("ks7"))


def test_a_bridges_port_that_leaves_it_is_not_gone(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks0",))
    try:
        w.ip("link", "add", "br0", "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("this kernel makes no bridges")
    w.ip("link", "set", "ks0", "master", "br0")
    w.ip("link", "set", "br0", "up")
    w.ip("link", "set", "ks0", "nomaster")
    assert [one for one in w.rest(1.0) if one["kind"] == "link_changed"] == []


def test_what_overruns_the_socket_is_told_and_read_again(watch: Callable[..., Watch]) -> None:
    """The loop stands still while the kernel says more than the socket holds; the last word among it is the one that counts."""
    w = watch("ks0", "ks1", patterns=("ks0", "ks1"), RECEIVE_BYTES="2048")
    w.stand_still(4)
    time.sleep(0.3)
    for _ in range(12):
        w.ip("link", "set", "ks1p", "down")
        w.ip("link", "set", "ks1p", "up")
    w.ip("link", "set", "ks0p", "down")
    gap = w.until("evidence_gap")
    assert gap["data"]["reason"] == "overrun" and gap["data"]["producer"] == "nic"
    w.until("link_changed", _down("ks0"), within_s=10)


def test_what_went_down_while_no_agent_ran_is_missed_by_the_next(watch: Callable[..., Watch], tmp_path: Path) -> None:
    first = watch("ks0", "ks1", patterns=("ks0", "ks1"))
    first.close()
    assert json.loads((tmp_path / "nic.json").read_text())["boot_id"] == "boot-1"
    second = watch("ks1", patterns=("ks0", "ks1"))  # another name space, as if ks0's driver had gone meanwhile
    second.rest(1.0)
    gone = [one["data"]["device"] for one in second.told if one["kind"] == "link_changed" and one["data"]["state"] == "gone"]
    assert gone == ["ks0"]


def test_samples_carry_traffic_and_states(watch: Callable[..., Watch]) -> None:
    w = watch("ks0", patterns=("ks0",), SAMPLE_S="1")
    w.ip("address", "add", "10.9.0.1/24", "dev", "ks0")
    link = w.until("nic_sample", lambda data: data["period_s"] > 0.5 and data["links"][0]["sent_bytes_per_s"] >= 0)["data"][
        "links"
    ][0]
    assert link["device"] == "ks0" and link["state"] == "up" and link["received_bytes_per_s"] >= 0


def test_from_the_cable_to_the_bus(tmp_path: Path) -> None:
    took = nic_on_the_bus.run(tmp_path, 3)
    print(f"link down to the stream: {took} ms")
    assert len(took) == 3 and sorted(took)[1] < 1000
