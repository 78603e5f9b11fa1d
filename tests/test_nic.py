"""Network links: netlink's bytes, which links count, what counters mean, and the producer over trees of /sys that change."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import struct
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.envelope import AnyEvent
from events.hardware import EvidenceGap
from events.network import LinkChanged, LinkTraffic, NicBaseline, NicSample
from events.presence import AgentState
from events.registry import parse as parse_event
from infra.agent_settings import BadSettings, arguments
from processors.node import node_detector
from processors.policy import Detectors, Network
from producers.netlink_messages import Done, LinkNews, Problem, attributes, parse, request_dump
from producers.nic import NicProducer, NicSettings
from producers.nic_links import (
    Interface,
    Port,
    Survey,
    Tally,
    chosen,
    counted,
    interface_state,
    news_state,
    port_rate_mbps,
    port_state,
    rise,
)
from producers.nic_sysfs import SysfsLinks
from producers.reader_thread import Hung, ReaderThread
from tests.nic_watch import desk
from tests.telemetry import Story, catalogue, facts
from tests.telemetry import told as detector_says

H100 = Path(__file__).resolve().parent.parent.parent / "shared" / "cases" / "sysfs" / "sys-class-infiniband-h100.tar.gz"


# --- netlink's bytes --------------------------------------------------------------------------------------------------------


def attribute(kind: int, value: bytes) -> bytes:
    raw = struct.pack("=HH", 4 + len(value), kind) + value
    return raw + b"\0" * (-len(raw) % 4)


def message(kind: int, body: bytes, *, sequence: int = 0, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body + b"\0" * (-len(body) % 4)


def link_body(name: str = "eth0", *, flags: int = 0x11043, operstate: int = 6, family: int = 0, more: bytes = b"") -> bytes:
    head = struct.pack("=BxHiII", family, 1, 7, flags, 0xFFFFFFFF)
    return head + attribute(3, name.encode() + b"\0") + attribute(16, bytes([operstate])) + more


def test_a_link_message_says_what_the_kernel_says() -> None:
    more = attribute(33, b"\1") + attribute(48, struct.pack("=I", 5)) + attribute(18, attribute(1, b"veth\0"))
    (news,) = parse(message(16, link_body(more=more)))
    assert news == LinkNews(7, "eth0", True, True, "up", True, 5, "veth", False, False)


def test_several_messages_in_one_datagram_and_the_end_of_a_dump() -> None:
    raw = message(16, link_body("a")) + message(16, link_body("bcdef")) + message(3, b"\0\0\0\0", sequence=4, flags=0x10)
    first, second, done = parse(raw)
    assert isinstance(first, LinkNews) and isinstance(second, LinkNews) and (first.name, second.name) == ("a", "bcdef")
    assert done == Done(4, True)


@pytest.mark.parametrize(
    ("body", "kind", "state"),
    [
        (link_body(), 16, "up"),
        (link_body(flags=0x1003), 16, "down"),  # no carrier
        (link_body(flags=0x11002), 16, "down"),  # set down
        (link_body(operstate=2), 16, "down"),
        (link_body(operstate=5), 16, "down"),  # dormant
        (link_body(operstate=0), 16, "up"),  # a driver that keeps no state
        (link_body(operstate=99), 16, "up"),
        (link_body(more=attribute(33, b"\0")), 16, "down"),
        (link_body(), 17, "gone"),
        (link_body(more=attribute(45, b"\0\0\0\0")), 17, "moved"),
    ],
)
def test_states_of_interfaces(body: bytes, kind: int, state: str) -> None:
    (news,) = parse(message(kind, body))
    assert isinstance(news, LinkNews) and news_state(news) == state


def test_what_bridges_say_of_their_ports_is_not_of_the_link() -> None:
    assert list(parse(message(17, link_body(family=7)))) == []


def test_refusals_and_other_kinds() -> None:
    assert list(parse(message(2, struct.pack("=i", -16) + b"\0" * 16, sequence=9))) == [
        Problem(9, 16, "the kernel refused a request for its links")
    ]
    assert list(parse(message(2, struct.pack("=i", 0) + b"\0" * 16))) == []  # an acknowledgement
    assert list(parse(message(20, b"\0" * 8))) == []


@pytest.mark.parametrize(
    "raw",
    [b"\1", b"\0" * 16, message(16, b"\0"), message(16, link_body())[:-3], message(16, link_body(more=b"\2\0\1\0"))],
)
def test_malformed_bytes_are_a_problem(raw: bytes) -> None:
    (found,) = parse(raw)
    assert isinstance(found, Problem)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 150))
def test_any_bytes_are_read_without_raising(noise: bytes, at: int) -> None:
    good = message(16, link_body(more=attribute(18, attribute(1, b"veth\0"))))
    for raw in (noise, good[:at] + noise, good[:at] + noise + good[at + len(noise) :]):
        assert len(list(parse(raw))) <= len(raw) // 16 + 1
        attributes(raw)


def test_what_is_asked_for_is_well_formed() -> None:
    assert struct.unpack_from("=IHHI", request_dump(5)) == (32, 18, 0x301, 5)


# --- which links count --------------------------------------------------------------------------------------------------------


def interface(name: str, **more: Any) -> Interface:
    return Interface(name, 1, **{"physical": True, "state": "up", "pci": f"0000:{name}", **more})


def port(hca: str, number: int = 1, **more: Any) -> Port:
    return Port(hca, number, "up", layer="InfiniBand", **more)


PLAIN = Survey((interface("eno1"), interface("veth1", physical=False), interface("docker0", physical=False), interface("lo")))
FABRIC = Survey(
    (
        interface("eno1"), interface("ib0", pci="0000:9c"), interface("eth2", pci="0000:b0", master="bond0"),
        interface("eth3", pci="0000:b1", master="bond0"), interface("bond0", physical=False),
    ),
    (port("mlx5_0", pci="0000:9c"), port("mlx5_bond_0", pci="0000:b0")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("survey", "patterns", "links"),
    [
        (PLAIN, ["auto"], ["eno1"]),
        (PLAIN, ["veth*"], ["veth1"]),
        (PLAIN, ["auto", "veth*"], ["eno1", "veth1"]),
        (PLAIN, ["auto", "!eno1"], []),
        (PLAIN, ["!eno*"], []),
        (PLAIN, ["*", "!lo"], ["docker0", "eno1", "veth1"]),
        # with a fabric, the plain interface is management; a bond's legs are links of their own; ib0 is mlx5_0's
        (FABRIC, ["auto"], ["eth2", "eth3", "mlx5_0/1", "mlx5_bond_0/1"]),
        (FABRIC, ["auto", "!mlx5_bond_*"], ["mlx5_0/1"]),
        (FABRIC, ["mlx5_0"], ["mlx5_0/1"]),
        (FABRIC, ["eno1"], ["eno1"]),
        (FABRIC, ["auto", "eno1"], ["eno1", "eth2", "eth3", "mlx5_0/1", "mlx5_bond_0/1"]),
    ],
)
def test_what_counts(survey: Survey, patterns: list[str], links: list[str]) -> None:
    found, ignored = chosen(survey, patterns)
    assert sorted(found) == links
    everything = {p.name for p in survey.ports} | {i.name for i in survey.interfaces}
    assert set(ignored) == everything - set(links) and all(ignored.values())


def test_an_interface_belongs_to_the_port_in_its_place() -> None:
    both = (interface("ib0", pci="0000:9c", port=0), interface("ib1", pci="0000:9c", port=1))
    found, _ = chosen(Survey(both, (port("mlx4_0", 1, pci="0000:9c"), port("mlx4_0", 2, pci="0000:9c"))), ["auto"])
    assert {device: known.interface for device, known in found.items()} == {"mlx4_0/1": "ib0", "mlx4_0/2": "ib1"}


def test_a_fabric_that_disappears_does_not_make_management_the_jobs() -> None:
    left = Survey((interface("eno1"),))
    assert list(chosen(left, ["auto"])[0]) == ["eno1"] and not chosen(left, ["auto"], rdma=True)[0]


@pytest.mark.parametrize(
    ("state", "physical", "up"),
    [
        ("4: ACTIVE", "5: LinkUp", "up"), ("4: ACTIVE", "", "up"), ("1: DOWN", "2: Polling", "down"), ("2: INIT", "5: LinkUp", "down"),
        ("1: DOWN", "3: Disabled", "down"), ("4: ACTIVE", "6: LinkErrorRecovery", "down"), ("", "", "down"), ("nonsense", "?", "down"),
    ],
)  # fmt: skip
def test_states_of_ports(state: str, physical: str, up: str) -> None:
    assert port_state(state, physical)[0] == up


@pytest.mark.parametrize(
    ("text", "mbps"),
    [
        ("400 Gb/sec (4X NDR)", 400_000), ("2.5 Gb/sec (1X SDR)", 2500), ("100 Gb/sec (4X EDR)\n", 100_000), ("", -1), ("fast", -1),
        ("9" * 400 + " Gb/sec", -1),
    ],
)  # fmt: skip
def test_rates_of_ports(text: str, mbps: int) -> None:
    assert port_rate_mbps(text) == mbps


def test_interfaces_without_a_word_of_their_carrier() -> None:
    assert interface_state(True, None, "unknown") == "up" and interface_state(False, None, "down") == "down"


# --- counters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (3, 10, (7, False)),
        (10, 10, (0, False)),
        (10, 0, (0, True)),
        (10, 4, (4, True)),
        (-1, 9, (0, False)),
        (9, -1, (0, False)),
    ],
)
def test_counters_rise_or_begin_again(before: int, now: int, expected: tuple[int, bool]) -> None:
    assert rise(before, now) == expected


def test_words_are_bytes_by_four_and_resets_leave_traffic_unknown() -> None:
    before = {"port_xmit_data": 1000, "port_rcv_data": 500, "symbol_error": 3, "out_of_sequence": 1}
    found = counted(before, {"port_xmit_data": 4000, "port_rcv_data": 500, "symbol_error": 5, "out_of_sequence": 1}, True, 30)
    assert (found.sent_bytes_per_s, found.received_bytes_per_s, found.counted) == (400.0, 0.0, (("symbol_error", 2),))
    reset = counted(before, {"port_xmit_data": 40, "port_rcv_data": 900, "symbol_error": 1}, True, 30)
    assert reset.sent_bytes_per_s == -1 and reset.received_bytes_per_s > 0
    assert reset.counted == (("symbol_error", 1),) and reset.began_again
    assert counted({}, before, True, 0).sent_bytes_per_s == -1


def test_a_counter_that_is_full_is_told_once_it_is() -> None:
    found = counted({"excessive_buffer_overrun_errors": 14}, {"excessive_buffer_overrun_errors": 15}, True, 30)
    assert found.filled == ("excessive_buffer_overrun_errors",)
    assert counted({"excessive_buffer_overrun_errors": 15}, {"excessive_buffer_overrun_errors": 15}, True, 30).filled == ()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["both", "device_first", "seen_first", "seen_only", "device_only"])), max_size=6))
def test_each_time_a_link_goes_down_is_told_once(ways: list[tuple[str]]) -> None:
    """However the device's counter and its state follow one another, between settlings that are not mixed."""
    for (way,) in ways:
        tally = Tally()
        steps = {
            "both": [(1, True)], "device_first": [(1, False), (0, True)], "seen_first": [(0, True), (1, False)],
            "seen_only": [(0, True)], "device_only": [(1, False)],
        }[way]  # fmt: skip
        for risen, went_down in steps:
            tally = tally.next(risen, went_down)
        assert tally.told == 1


# --- reads that hang ----------------------------------------------------------------------------------------------------------


async def test_a_read_that_hangs_is_left_alone_until_it_comes_back(tmp_path: Path) -> None:
    pipe = tmp_path / "state"
    os.mkfifo(pipe)
    thread = ReaderThread("test")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(Hung):
        await thread.read(pipe.read_text, 0.2)
    assert loop.time() - began_s < 2 and thread.hangs
    with pytest.raises(Hung):
        await thread.read(lambda: "another", 5)
    pipe_end = os.open(pipe, os.O_WRONLY)
    os.write(pipe_end, b"x")
    os.close(pipe_end)
    await _until(lambda: not thread.hangs)
    assert await thread.read(lambda: "now", 5) == "now"
    with pytest.raises(ZeroDivisionError):
        await thread.read(lambda: 1 // 0, 5)
    thread.close()


async def _until(true: Callable[[], Any], within_s: float = 30) -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


# --- the producer over a tree -------------------------------------------------------------------------------------------------


class Tree:
    """A /sys of our own: two InfiniBand ports, with what is named in a test changed."""

    def __init__(self, root: Path, adapters: tuple[str, ...] = ("mlx5_0", "mlx5_1")) -> None:
        self.root = root
        for i, adapter in enumerate(adapters):
            self.write(adapter, state="4: ACTIVE", phys_state="5: LinkUp", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
            self.count(adapter, link_downed=0, symbol_error=0, port_rcv_errors=14, port_xmit_data=1000 * i, port_rcv_data=0)
            self.count(adapter, "hw_counters", rnr_nak_retry_err=0, local_ack_timeout_err=0)

    def port(self, adapter: str) -> Path:
        return self.root / "class" / "infiniband" / adapter / "ports" / "1"

    def write(self, adapter: str, **texts: str) -> None:
        for name, text in texts.items():
            path = self.port(adapter) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def count(self, adapter: str, folder: str = "counters", **values: int) -> None:
        for name, value in values.items():
            path = self.port(adapter) / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def down(self, adapter: str) -> None:
        self.write(adapter, state="1: DOWN", phys_state="2: Polling")

    def up(self, adapter: str) -> None:
        self.write(adapter, state="4: ACTIVE", phys_state="5: LinkUp")


class Told(list[AnyEvent]):
    def of(self, kind: type[Any]) -> list[Any]:
        return [event.data for event in self if isinstance(event.data, kind)]

    def changes(self, device: str = "") -> list[tuple[str, str, int]]:
        return [(c.device, c.state, c.downs) for c in self.of(LinkChanged) if not device or c.device == device]


@asynccontextmanager
async def running(tree: Path, state: Path, *, job: str = "", **more: Any) -> AsyncIterator[Told]:
    told = Told()
    settings = NicSettings(**{"poll_s": 0.02, "sample_s": 0.2, "root": tree, "netlink": False, **more})
    at = desk(lambda seen: told.append(parse_event(seen.data)))
    at.job, at.attempt = job, 3 if job else 0
    producer = NicProducer(at, state, settings)
    task = asyncio.create_task(producer.run())
    try:
        await _until(lambda: told.of(NicSample) or task.done())
        yield told
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_ports_that_are_up_are_the_baseline_and_their_states_are_followed(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys", ("mlx5_0", "mlx5_1", "mlx5_2"))
    tree.down("mlx5_2")  # never up: a port without a cable
    async with running(tree.root, tmp_path) as told:
        (baseline,) = told.of(NicBaseline)
        assert [link.device for link in baseline.links] == ["mlx5_0/1", "mlx5_1/1"]
        assert baseline.links[0].rate_mbps == 400_000 and baseline.links[0].layer == "InfiniBand"
        tree.down("mlx5_0")
        await _until(lambda: told.changes() == [("mlx5_0/1", "down", 1)])
        assert told.of(LinkChanged)[0].detail == "DOWN, Polling" and told.of(LinkChanged)[0].since_boot_s > 0
        tree.count("mlx5_0", link_downed=1)  # the adapter counts it a moment later: still one
        await asyncio.sleep(0.1)
        tree.up("mlx5_0")
        await _until(lambda: told.changes()[1:] == [("mlx5_0/1", "up", 0)])
        tree.up("mlx5_2")
        await _until(lambda: len(told.of(NicBaseline)) == 2)
        assert [link.device for link in told.of(NicBaseline)[1].links] == ["mlx5_0/1", "mlx5_1/1", "mlx5_2/1"]
        assert told.of(AgentState) == []


async def test_one_that_went_down_and_came_back_between_two_looks_is_told(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path) as told:
        tree.count("mlx5_1", link_downed=2)
        await _until(told.changes)
        assert told.changes() == [("mlx5_1/1", "up", 2)]


async def test_from_a_tree_that_flaps_to_a_claim_that_names_the_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path) as told:
        for i in range(2):
            tree.down("mlx5_0")
            await _until(lambda: len(told.changes()) == 2 * i + 1)  # noqa: B023
            tree.count("mlx5_0", link_downed=i + 1)
            tree.up("mlx5_0")
            await _until(lambda: len(told.changes()) == 2 * i + 2)  # noqa: B023
    story = Story()
    story.adopt(0, Detectors(network=Network(boot_grace_s=0)))
    for event in told:
        story.say(event.number, "n1", event.data, producer="nic")
    said = [(f.symptom, getattr(f, "confidence", "over")) for f in facts(detector_says(node_detector(catalogue()), story))]
    assert said == [("nic_down", "low"), ("nic_down", "over"), ("nic_down", "low"), ("nic_flap", "high"), ("nic_down", "over")]


async def test_an_adapter_that_disappears_is_gone_and_back_with_its_counters_at_nought(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    tree.count("mlx5_0", link_downed=7, symbol_error=9)
    async with running(tree.root, tmp_path) as told:
        kept = tmp_path / "kept"
        shutil.move(tree.root / "class" / "infiniband" / "mlx5_0", kept)
        await _until(told.changes)
        assert told.changes() == [("mlx5_0/1", "gone", 1)]
        (kept / "ports/1/counters/link_downed").write_text("0\n")
        (kept / "ports/1/counters/symbol_error").write_text("0\n")
        shutil.move(kept, tree.root / "class" / "infiniband" / "mlx5_0")
        await _until(lambda: told.changes()[1:])
        assert told.changes()[1:] == [("mlx5_0/1", "up", 0)]
        since = len(told.of(NicSample))
        await _until(lambda: len(told.of(NicSample)) > since + 1)
        assert all(count >= 0 for sample in told.of(NicSample) for link in sample.links for _, count in link.counted)


async def test_what_all_links_carried_is_told_to_the_job_that_runs_here(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path, job="gpt") as told:
        await _until(lambda: told.of(LinkTraffic))
        assert told.of(LinkTraffic)[0].links == 2 and told.of(LinkTraffic)[0].bytes_per_s == 0
        event = next(event for event in told if isinstance(event.data, LinkTraffic))
        assert (event.job, event.attempt) == ("gpt", 3)
        tree.count("mlx5_0", port_xmit_data=10_000, port_rcv_data=5000)
        await _until(lambda: any(fact.bytes_per_s for fact in told.of(LinkTraffic)))
        fact = next(fact for fact in told.of(LinkTraffic) if fact.bytes_per_s)
        assert fact.bytes_per_s * fact.period_s == pytest.approx(60_000, rel=0.05)
    async with running(tree.root, tmp_path) as told:
        await _until(lambda: len(told.of(NicSample)) > 2)
        assert told.of(LinkTraffic) == []


async def test_samples_count_and_measure(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path) as told:
        tree.count("mlx5_0", port_xmit_data=10_000, port_rcv_data=5000, symbol_error=12)
        tree.count("mlx5_0", "hw_counters", rnr_nak_retry_err=3)
        tree.write("mlx5_1", rate="100 Gb/sec (1X NDR)")
        await _until(lambda: any(link.counted for s in told.of(NicSample) for link in s.links))
        sample = next(s for s in told.of(NicSample) if any(link.counted for link in s.links))
        first, second = sample.links
        assert dict(first.counted) == {"symbol_error": 12, "rnr_nak_retry_err": 3}
        assert first.sent_bytes_per_s == pytest.approx(40_000 / sample.period_s, rel=0.05)
        assert first.received_bytes_per_s == pytest.approx(20_000 / sample.period_s, rel=0.05)
        assert (second.rate_mbps, second.rate_full_mbps, second.counted) == (100_000, 400_000, ())


async def test_a_link_that_went_down_while_no_agent_ran_is_news_to_the_next_of_the_same_boot(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path):
        pass
    tree.down("mlx5_1")
    async with running(tree.root, tmp_path) as told:
        await _until(told.changes)
        assert told.changes() == [("mlx5_1/1", "down", 1)]
    async with running(tree.root, tmp_path, patterns=("auto", "!mlx5_1")) as told:
        await asyncio.sleep(0.1)
        assert told.changes() == []
    told = Told()
    other_boot = NicProducer(
        desk(lambda seen: told.append(parse_event(seen.data)), boot_id="boot-2"), tmp_path,
        NicSettings(root=tree.root, netlink=False),
    )  # fmt: skip
    task = asyncio.create_task(other_boot.run())
    await _until(lambda: told.of(NicSample))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told.changes() == [] and [link.device for link in told.of(NicBaseline)[0].links] == ["mlx5_0/1"]


@pytest.mark.parametrize(
    "kept", ["", "[]", '{"boot_id": "boot-1", "links": [[1,2]]}', '{"boot_id": "boot-1", "links": 7}', "{"]
)
async def test_a_broken_state_file_is_no_state(kept: str, tmp_path: Path) -> None:
    (tmp_path / "nic.json").write_text(kept)
    async with running(Tree(tmp_path / "sys").root, tmp_path) as told:
        assert len(told.of(NicBaseline)[0].links) == 2


async def test_nonsense_in_the_tree_breaks_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    (tree.port("mlx5_0") / "counters" / "symbol_error").write_text("N/A\n")
    (tree.port("mlx5_0") / "counters" / "link_downed").write_bytes(b"\xff" * 100_000)
    (tree.port("mlx5_0") / "counters" / "port_rcv_errors").unlink()
    (tree.port("mlx5_0") / "counters" / "port_rcv_errors").mkdir()
    (tree.root / "class" / "infiniband" / "mlx5_9" / "ports" / "x").mkdir(parents=True)
    (tree.root / "class" / "infiniband" / "a file").write_text("")
    (tree.root / "class" / "net").mkdir(parents=True)
    (tree.root / "class" / "net" / "bonding_masters").write_text("bond0\n")
    tree.write("mlx5_1", state="\x1b[31m", rate="a\x00b")
    async with running(tree.root, tmp_path) as told:
        assert [link.device for link in told.of(NicBaseline)[0].links] == ["mlx5_0/1"]
        since = len(told.of(NicSample))
        await _until(lambda: len(told.of(NicSample)) > since + 1)


async def test_a_driver_that_hangs_is_told_and_so_is_its_end(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    async with running(tree.root, tmp_path, deadline_s=0.1) as told:
        state = tree.port("mlx5_0") / "state"
        state.unlink()
        os.mkfifo(state)
        await _until(lambda: [s.state for s in told.of(AgentState)] == ["stalled"])
        await asyncio.sleep(0.2)
        assert len(told.of(AgentState)) == 1, "told once"
        pipe = os.open(state, os.O_WRONLY)
        state.unlink()
        tree.up("mlx5_0")
        os.write(pipe, b"4: ACTIVE\n")
        os.close(pipe)
        await _until(lambda: [s.state for s in told.of(AgentState)][1:] == ["resumed"])
        tree.down("mlx5_1")
        await _until(lambda: ("mlx5_1/1", "down", 1) in told.changes())


async def test_a_link_is_not_gone_because_we_cannot_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(tmp_path / "sys")
    opened = os.open

    def no_descriptor_left(path: Any, *more: Any, **others: Any) -> int:
        if "infiniband" in str(path):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return opened(path, *more, **others)

    async with running(tree.root, tmp_path) as told:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor_left)
            await _until(lambda: told.of(EvidenceGap))
            await asyncio.sleep(0.3)
        assert told.changes() == [] and len(told.of(EvidenceGap)) == 1
        tree.down("mlx5_0")
        await _until(lambda: told.changes() == [("mlx5_0/1", "down", 1)])


async def test_a_full_counter_is_missing_evidence(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    tree.count("mlx5_0", local_link_integrity_errors=15, excessive_buffer_overrun_errors=3)
    async with running(tree.root, tmp_path) as told:
        tree.count("mlx5_0", excessive_buffer_overrun_errors=15)
        await _until(lambda: told.of(EvidenceGap))
        (gap,) = told.of(EvidenceGap)
        assert gap.detail.endswith("seen: mlx5_0/1 excessive_buffer_overrun_errors")


async def test_a_node_without_any_links_says_so(tmp_path: Path) -> None:
    async with running(tmp_path / "nothing", tmp_path) as told:
        assert told.of(NicBaseline)[0].links == () and told.of(NicSample)[0].links == ()


@pytest.mark.skipif(not H100.exists(), reason="the tree of an H100 host is not here")
async def test_an_h100_host(tmp_path: Path) -> None:
    with tarfile.open(H100) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "sys"
    (root / "class").mkdir(parents=True)
    shutil.move(next(p for p in tmp_path.iterdir() if p.name.startswith("sys-class-infiniband")), root / "class" / "infiniband")
    tree = Tree(root, ())
    survey = SysfsLinks(root).survey()
    assert len(survey.ports) == 9 and {p.rate_mbps for p in survey.ports} == {400_000, 200_000}
    async with running(root, tmp_path) as told:
        (baseline,) = told.of(NicBaseline)
        assert len(baseline.links) == 9
        tree.down("mlx5_3" if tree.port("mlx5_3").exists() else "mlx5_4")
        tree.count("mlx5_0", port_rcv_errors=14 + 500)
        tree.write("mlx5_7", rate="200 Gb/sec (2X NDR)")
        await _until(lambda: told.changes())
        assert told.changes() == [("mlx5_4/1", "down", 1)]
        await _until(lambda: any(link.counted for s in told.of(NicSample) for link in s.links))
        links = {link.device: link for s in told.of(NicSample) for link in s.links if link.counted or link.rate_mbps == 200_000}
        assert dict(links["mlx5_0/1"].counted) == {"port_rcv_errors": 500}
        assert links["mlx5_7/1"].rate_full_mbps == 400_000
        assert told.of(EvidenceGap) == [], "counters that were full before are no news"


# --- the agent's option -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "patterns"),
    [([], ("auto",)), (["off"], ()), (["mlx5_*", "!mlx5_bond_*", "mlx5_*"], ("mlx5_*", "!mlx5_bond_*")), (["auto", "eno1"], ("auto", "eno1"))],
)  # fmt: skip
def test_the_agents_option(given: list[str], patterns: tuple[str, ...], tmp_path: Path) -> None:
    words = [word for pattern in given for word in ("--nic", pattern)]
    assert arguments(["--state", str(tmp_path), "--bus", "nats://127.0.0.1:1", "--node", "n", *words]).nic == patterns


@pytest.mark.parametrize("given", [["off", "eno1"], [""], ["!"], ["x" * 201]])
def test_an_option_that_cannot_be_is_refused(given: list[str], tmp_path: Path) -> None:
    words = [word for pattern in given for word in ("--nic", pattern)]
    with pytest.raises(BadSettings, match="--nic"):
        arguments(["--state", str(tmp_path), "--bus", "nats://127.0.0.1:1", "--node", "n", *words])
