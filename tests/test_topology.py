"""Where machines stand, from three kinds of files to the places that a job is declared with; and which rank runs on which devices."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events import subjects
from events.envelope import AnyEvent
from events.job import JobDeclared, Place, StandbyAdded
from events.ports import LEDGER, Record
from events.presence import Heartbeat
from events.registry import canonical, make, parse
from events.topology import PLACES_MAX, RankDevices, TopologyDeclared
from events.training import RankStarted
from infra.clock import new_event_id, wall_ns
from infra.home import Home
from infra.jetstream import JetStreamLog
from infra.pipeline import say as tell
from infra.topology import BadTopology, Topology, declarations, declared, read
from infra.topology_hostlist import BadHostlist, expand
from producers.rank_devices import Device, LocalRank, assign
from producers.rank_devices_sysfs import RankDevicesTeller, gpus, links, visible_devices
from tests.nats_fixture import real_bus
from tests.nic_watch import desk

# --- hostlists ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]), ("a,b , c", ["a", "b", "c"]), ("n[1-3]", ["n1", "n2", "n3"]), ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3,5-6]x", ["n1x", "n3x", "n5x", "n6x"]), ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]), ("", []), ("n[7]", ["n7"]),
        ("a[1-2],b", ["a1", "a2", "b"]),
    ],
)  # fmt: skip
def test_hostlists(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n]", "n[3-1]", "n[a-b]", "n[]", "n[1-999999999]", "a[0-999]b[0-999]", "n[[1]]", "[1-2][", "n[-1]"]
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(BadHostlist):
        expand(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab01-9[],", max_size=40))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        assert all(name and "[" not in name for name in expand(text, 500))
    except BadHostlist as error:
        assert str(error)


# --- files --------------------------------------------------------------------------------------------------------------------

OWN = """
nodes:
  gpu-01: {rack: r1, switch: leaf-1, nvlink_domain: d1, serial: "J1"}
  "gpu-[02-03]": {rack: r1}
racks: {r2: "gpu-[04-05]"}
switches: {leaf-1: [gpu-02, "gpu-[03-04]"], leaf-2: gpu-05}
"""
TREE = """
# made by ibnetdiscover
SwitchName=leaf1 Nodes=tux[0-1]
switchname=leaf2 nodes=tux[2-3] LinkSpeed=100   # comment
SwitchName=spine \\
   Switches=leaf[1-2]
"""
BLOCKS = "BlockName=b1 Nodes=n[01-02]\nBlockName=b2 Nodes=n[03-04]\nBlockSizes=2,4\n"
YAML = """
---
- topology: tree
  cluster_default: true
  tree:
    switches:
      - {switch: root, children: "s[1-2]"}
      - {switch: s1, nodes: "n[1-2]"}
- topology: blocks
  block: {block_sizes: [2], blocks: [{block: b1, nodes: "n[1-2]"}, {block: b2, nodes: n3}]}
- {topology: flat, flat: true}
"""


def node(name: str, uuid: str = "", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "status": {"nodeInfo": {"systemUUID": uuid} if uuid else {}}}


KUBERNETES = json.dumps(
    {
        "apiVersion": "v1",
        "items": [
            node("a", "4C4C-AB", **{"network.topology.nvidia.com/leaf": "leaf7", "nvidia.com/gpu.clique": "x1y2.3"}),
            node("b", **{"topology.k8s.aws/network-node-layer-1": "nn-1", "topology.k8s.aws/network-node-layer-3": "nn-3"}),
            node("c", **{"cloud.google.com/gce-topology-subblock": "sub1", "my/leaf": "mine"}),
            node("d", **{"nvidia.com/gpu.clique": "00000000-0000-0000-0000-000000000000.0"}),
        ],
        "kind": "List",
    },
    indent=4,
)


def written(folder: Path, text: str, name: str = "topology") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def places(topology: Topology) -> list[tuple[str, str, str, str, str]]:
    return [(p.node, p.rack, p.switch, p.nvlink_domain, p.serial) for p in topology.places.values()]


def test_keepsteps_own_file(tmp_path: Path) -> None:
    expected = [
        ("gpu-01", "r1", "leaf-1", "d1", "J1"), ("gpu-02", "r1", "leaf-1", "", ""), ("gpu-03", "r1", "leaf-1", "", ""),
        ("gpu-04", "r2", "leaf-1", "", ""), ("gpu-05", "r2", "leaf-2", "", ""),
    ]  # fmt: skip
    found = read(written(tmp_path, OWN))
    assert places(found) == expected and found.origin == "keepstep topology"
    as_json = json.dumps({"nodes": [{"node": "gpu-01", "rack": 7}], "racks": {"r2": "gpu-02"}})
    assert places(read(written(tmp_path, as_json))) == [("gpu-01", "7", "", "", ""), ("gpu-02", "r2", "", "", "")]


def test_slurms_tree(tmp_path: Path) -> None:
    assert [(n, s) for n, _, s, _, _ in places(read(written(tmp_path, TREE)))] == [
        ("tux0", "leaf1"), ("tux1", "leaf1"), ("tux2", "leaf2"), ("tux3", "leaf2"),
    ]  # fmt: skip


def test_slurms_blocks_are_nvlink_domains_and_may_stand_for_racks(tmp_path: Path) -> None:
    found = read(written(tmp_path, BLOCKS), rack_from="nvlink_domain")
    assert [(n, r, d) for n, r, _, d, _ in places(found)] == [
        ("n01", "b1", "b1"), ("n02", "b1", "b1"), ("n03", "b2", "b2"), ("n04", "b2", "b2"),
    ]  # fmt: skip


def test_slurms_yaml(tmp_path: Path) -> None:
    assert [(n, s, d) for n, _, s, d, _ in places(read(written(tmp_path, YAML)))] == [
        ("n1", "s1", "b1"), ("n2", "s1", "b1"), ("n3", "", "b2"),
    ]  # fmt: skip


def test_a_machine_on_several_leafs_stands_on_the_first(tmp_path: Path) -> None:
    found = read(written(tmp_path, "SwitchName=rail1 Nodes=n1\nSwitchName=rail2 Nodes=n1\nNonsense here\n"))
    assert places(found) == [("n1", "", "rail1", "", "")]
    assert len(found.notes) == 2 and "several" in found.notes[0] and "line 3" in found.notes[1]


def test_kubernetes_labels(tmp_path: Path) -> None:
    found = read(written(tmp_path, KUBERNETES), labels={"switch": "my/leaf"})
    assert places(found) == [
        ("a", "", "leaf7", "x1y2.3", "4c4c-ab"), ("b", "", "nn-3", "", ""), ("c", "sub1", "mine", "", ""), ("d", "", "", "", ""),
    ]  # fmt: skip
    assert "1 of 4 nodes" in found.notes[0]
    assert (
        places(read(written(tmp_path, json.dumps(json.loads(KUBERNETES)["items"][0] | {"kind": "Node"})), "kubernetes"))[0][0]
        == "a"
    )


@pytest.mark.parametrize(
    ("text", "form", "why"),
    [
        ("", None, "mapping"), ("[]", None, "mapping"), ("nodes: [", None, "neither JSON nor YAML"), ("nodes: {}", None, "no machine"),
        ("nodes: {n1: {rak: r}}", None, "none of rack"), ("rooms: {}", None, "'rooms' is none of"), ("nodes: {n1: 7}", None, "mapping of"),
        ("nodes: {n1: {rack: a}}\nracks: {b: n1}", None, "a machine has one"), ("nodes: {'n[1-2]': {serial: x}}", None, "one machine's"),
        ("racks: {r: [[n1]]}", None, "no name"), ("racks: [r]", None, "mapping from"), ("nodes: [n1]", None, "with `node`"),
        ("nodes: {n1: {rack: true}}", None, "quotes"), ("racks: {r: 'n[1-'}", None, "brackets"), ("{}", "kubernetes", "kubectl"),
        ('{"items": [{}]}', "kubernetes", "no name"), ('{"items": 7}', None, "kubectl"), ("- topology: {", None, "neither"),
        (f"nodes: {{{'n' * 500}: {{}}}}", None, "400"), ("nodes: &a {n1: *a}", None, "none of"),
    ],
)  # fmt: skip
def test_files_that_say_nothing_of_use_are_refused_with_why(text: str, form: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadTopology, match=why):
        read(written(tmp_path, text), form)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "raw"):
        with pytest.raises(BadTopology, match=path.name):
            read(path)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["keepstep", "slurm", "kubernetes"]))
def test_any_text_is_a_topology_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, form: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "t"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        assert read(path, form).places
    except BadTopology as error:
        assert str(error)


# --- places -------------------------------------------------------------------------------------------------------------------


def test_places_are_filled_where_they_say_nothing_themselves() -> None:
    where = Topology(
        {"n1": Place(node="n1", rack="r1", switch="s1", serial="j"), "n2.example.org": Place(node="n2.example.org", rack="r2")}
    )
    assert where.fill(Place(node="n1", rack="mine")) == Place(node="n1", rack="mine", switch="s1", serial="j")
    assert where.fill(Place(node="n1.example.org")).rack == "r1" and where.fill(Place(node="n2")).rack == "r2"
    assert where.fill(Place(node="n3")) == Place(node="n3")


def test_what_a_place_does_not_say_is_not_in_its_bytes() -> None:
    """Ledgers written before there was an NVLink domain read and write the same."""
    event = make(StandbyAdded(job="j", place=Place(node="n", rack="r"), author="a"), id="1", source="s", subject="j", time=1)
    assert b"nvlink" not in canonical(event) and parse(canonical(event)) == event


def records(facts: list[TopologyDeclared]) -> list[Record]:
    events = [make(fact, id=f"e{i}", source="operator", subject="fleet", time=i) for i, fact in enumerate(facts)]
    return [
        Record(LEDGER, i + 1, i, "ledger.~fleet.operator.topology_declared", canonical(event)) for i, event in enumerate(events)
    ]


def test_large_topologies_come_in_parts_and_count_when_all_are_there() -> None:
    small = Topology({"a": Place(node="a", rack="old")})
    large = Topology({f"n{i}": Place(node=f"n{i}", rack=f"r{i // 8}") for i in range(2 * PLACES_MAX + 5)}, "keepstep f")
    parts = declarations(large, "me")
    assert [len(part.places) for part in parts] == [PLACES_MAX, PLACES_MAX, 5]
    assert all(len(part.model_dump_json()) < 900_000 for part in parts)
    before = declarations(small, "me")
    assert declared(records([*before, *parts[:2]])) == small
    whole = declared(records([*before, *parts]))
    assert whole is not None and whole.places == large.places and whole.digest == large.digest
    mixed = declared(records([*parts[:2], *before, parts[2]]))
    assert mixed == small
    wide = Topology({f"{'n' * 390}{i}": Place(node=f"{'n' * 390}{i}", rack="r" * 400) for i in range(2000)})
    assert all(len(part.model_dump_json()) < 900_000 for part in declarations(wide, "me"))


async def test_a_declared_topology_is_what_jobs_and_standbys_are_declared_with(tmp_path: Path) -> None:
    """The command line over a real bus, with two agents that are heard."""
    path = written(
        tmp_path, "nodes: {n1: {rack: r1, switch: s1}, n2: {rack: r2, nvlink_domain: d2}, n3: {rack: r3, serial: J3}}"
    )
    other = written(tmp_path, "switches: {s9: 'n[1-2]'}", "other")
    home = Home(tmp_path)

    async def keepstep(*words: str) -> str:
        environment = {**os.environ, "KEEPSTEP_HOME": str(home.path), "KEEPSTEP_AUTHOR": "tester"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "infra.cli", *words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        return out.decode()

    async with real_bus(tmp_path) as bus:

        async def said(kind: type[Any]) -> list[AnyEvent]:
            found = [parse(record.data) async for record in JetStreamLog(bus.admin, LEDGER).read()]
            return [event for event in found if isinstance(event.data, kind)]

        async def beat(name: str) -> None:
            event = make(
                Heartbeat(), id=new_event_id(), source=f"node/{name}/heartbeat", subject=name, time=wall_ns(), number=1
            )
            await bus.admin.jetstream().publish(subjects.telemetry_node(name, "heartbeat"), canonical(event))

        shown = json.loads(await keepstep("topology", str(path), "--json"))
        assert [place["node"] for place in shown["places"]] == ["n1", "n2", "n3"] and await said(TopologyDeclared) == []
        assert json.loads(await keepstep("topology", str(path), "--json", "--declare"))["new"]
        assert not json.loads(await keepstep("topology", str(path), "--json", "--declare"))["new"]
        (event,) = await said(TopologyDeclared)
        assert event.data.author == "tester" and len(event.data.places) == 3
        await beat("n1")
        await beat("n2")
        await keepstep("run", "--nodes", "2", "--job", "j1", "--detach", "--", "sleep", "1")
        (job,) = await said(JobDeclared)
        assert job.data.nodes == (Place(node="n1", rack="r1", switch="s1"), Place(node="n2", rack="r2", nvlink_domain="d2"))
        await keepstep("standby", "n3", "--job", "j1")
        (standby,) = await said(StandbyAdded)
        assert standby.data.place == Place(node="n3", rack="r3", serial="J3")
        await beat("n4")
        await tell(JetStreamLog(bus.admin, LEDGER), TopologyDeclared(places=(), digest="none"), "")
        await beat("n4")
        await keepstep("run", "--node", "n4@r4", "--job", "j2", "--detach", "--topology", str(other), "--", "sleep", "1")
        assert (await said(JobDeclared))[1].data.nodes == (Place(node="n4", rack="r4"),)
        assert len(await said(TopologyDeclared)) == 3


# --- which rank runs on which devices -----------------------------------------------------------------------------------------


def device(name: str, *path: str, numa: int = -1) -> Device:
    return Device(name, path, numa)


#: Two GPUs and a link below each of two PCI switches, as in an HGX machine.
GPUS = [device(f"g{i}", f"pci0000:{i // 2}0", f"0000:{i // 2}1:00.0", f"0000:{i}2:00.0") for i in range(4)]
LINKS = [device(f"mlx5_{i}/1", f"pci0000:{i}0", f"0000:{i}1:00.0", f"0000:{i}9:00.0") for i in range(2)]


def test_a_rank_is_on_the_gpu_of_its_number_and_the_link_next_to_it() -> None:
    found = assign([LocalRank(8 + i, i) for i in range(4)], GPUS, LINKS)
    assert [(r.rank, r.gpu, r.gpu_pci, r.link, r.basis) for r in found] == [
        (8, 0, "0000:02:00.0", "mlx5_0/1", "order"), (9, 1, "0000:12:00.0", "mlx5_0/1", "order"),
        (10, 2, "0000:22:00.0", "mlx5_1/1", "order"), (11, 3, "0000:32:00.0", "mlx5_1/1", "order"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [
        ("2,3", 1, 3),
        ("3", 1, 3),
        ("", 0, -1),
        ("GPU-8f2c", 0, -1),
        ("0,1", 5, -1),
        ("99", 0, -1),
        (" 1 , 0 ", 0, 1),
        ("-1", 0, -1),
    ],
)
def test_visible_devices_are_an_order_of_their_own(visible: str, local_rank: int, gpu: int) -> None:
    (found,) = assign([LocalRank(0, local_rank, visible)], GPUS, LINKS)
    assert (found.gpu, found.basis) == (gpu, "visible_devices")


def test_gpus_that_are_equally_near_to_several_links_take_turns() -> None:
    near = [device(f"mlx5_{i}/1", "pci0000:00", f"0000:0{i}:00.0") for i in range(2)]
    far = [device(f"g{i}", "pci0000:00", f"0000:1{i}:00.0") for i in range(4)]
    assert [r.link for r in assign([LocalRank(i, i) for i in range(4)], far, near)] == ["mlx5_0/1", "mlx5_1/1"] * 2
    apart = [device("a/1", "pci0000:80", "0000:81:00.0", numa=1), device("b/1", "pci0000:40", "0000:41:00.0", numa=0)]
    (found,) = assign([LocalRank(0, 0)], [device("g0", "pci0000:10", "0000:11:00.0", numa=0)], apart)
    assert found.link == "b/1", "on the same NUMA node"


def test_a_machine_without_gpus_has_its_only_link() -> None:
    assert (
        assign([LocalRank(0, 0)], [], LINKS[:1])[0].link == LINKS[0].name and assign([LocalRank(0, 0)], [], LINKS)[0].link == ""
    )


def sysfs(root: Path) -> Path:
    """Two NVIDIA GPUs, a display of another maker, and two RDMA ports of which one is down."""
    bus = root / "bus" / "pci" / "devices"
    bus.mkdir(parents=True)
    for address, vendor, kind in (
        ("0000:18:00.0", "0x10de", "0x030200"), ("0000:98:00.0", "0x10de", "0x030200"), ("0000:98:00.1", "0x10de", "0x040300"),
        ("0000:03:00.0", "0x1a03", "0x030000"), ("0000:19:00.0", "0x15b3", "0x020700"), ("0000:99:00.0", "0x15b3", "0x020700"),
    ):  # fmt: skip
        real = root / "devices" / f"pci0000:{address[5]}7" / f"0000:{address[5]}7:01.0" / address
        real.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", "0" if address < "0000:8" else "1")):
            (real / name).write_text(text + "\n")
        (bus / address).symlink_to(real)
    for adapter, address, state in (("mlx5_0", "0000:19:00.0", "4: ACTIVE"), ("mlx5_1", "0000:99:00.0", "1: DOWN")):
        port = root / "class" / "infiniband" / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (root / "class" / "infiniband" / adapter / "device").symlink_to(bus / address)
    return root


def test_devices_of_a_tree(tmp_path: Path) -> None:
    root = sysfs(tmp_path)
    assert [(g.address, g.numa) for g in gpus(root)] == [("0000:18:00.0", 0), ("0000:98:00.0", 1)]
    assert gpus(root)[0].path == ("pci0000:17", "0000:17:01.0", "0000:18:00.0")
    assert [link.name for link in links(root)] == ["mlx5_0/1"]
    assert gpus(tmp_path / "nothing") == links(tmp_path / "nothing") == []


async def test_an_attempts_ranks_are_told_of_together(tmp_path: Path) -> None:
    told: list[AnyEvent] = []
    environment = {"CUDA_VISIBLE_DEVICES": "1,0", "SECRET_TOKEN": "x", "PATH": os.environ["PATH"]}
    process = await asyncio.create_subprocess_exec("sleep", "60", env=environment)
    try:
        deadline = asyncio.get_running_loop().time() + 10
        while visible_devices(process.pid) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        teller = RankDevicesTeller(desk(lambda seen: told.append(parse(seen.data))), sys=sysfs(tmp_path))
        for rank in (1, 0):
            teller.started("gpt", 3, RankStarted(rank=rank, local_rank=rank, world_size=2, pid=process.pid))
        while not told and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        await teller.close()
    finally:
        process.kill()
        await process.wait()
    (event,) = told
    assert isinstance(event.data, RankDevices) and (event.job, event.attempt) == ("gpt", 3)
    assert [(r.rank, r.gpu, r.link) for r in event.data.ranks] == [(0, 1, "mlx5_0/1"), (1, 0, "mlx5_0/1")]
    assert b"SECRET" not in canonical(event)


async def test_a_machine_without_devices_says_nothing(tmp_path: Path) -> None:
    told: list[Any] = []
    teller = RankDevicesTeller(desk(told.append), sys=tmp_path)
    teller.started("gpt", 1, RankStarted(rank=0, local_rank=0, world_size=1, pid=os.getpid()))
    await asyncio.sleep(1.3)
    await teller.close()
    assert told == []
