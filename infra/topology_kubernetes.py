"""`kubectl get nodes -o json`: where nodes stand, by the labels that clouds and NVIDIA's tools give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.topology import BadTopology, Draft, load

#: Labels by field, the first that a node has counts. The switch is the one that machines hang on.
LABELS: Mapping[str, tuple[str, ...]] = {
    "rack": (
        "topology.kubernetes.io/rack",
        "cloud.google.com/gce-topology-subblock",
    ),
    "switch": (
        "network.topology.nvidia.com/leaf",  # Topograph; block before it was called leaf
        "network.topology.nvidia.com/block",
        "network.topology.kubernetes.io/block",
        "topology.k8s.aws/network-node-layer-4",  # EKS counts from the top; the lowest layer that is there
        "topology.k8s.aws/network-node-layer-3",
        "oci.oraclecloud.com/rdma.local_block_id",
    ),
    "nvlink_domain": (
        "nvidia.com/gpu.clique",  # GPU feature discovery
        "network.topology.nvidia.com/accelerator",
        "network.topology.kubernetes.io/accelerator",
        "topology.k8s.aws/ultraserver-id",
        "ds.coreweave.com/nvlink.domain",
    ),
    "serial": (),
}


def parse(text: str, draft: Draft, labels: Mapping[str, str]) -> None:
    """`labels`: a label by field that comes before the known ones. The serial number is the machine's system UUID. Raises
    BadTopology."""
    value = load(text)
    items = value.get("items", [value] if value.get("kind") == "Node" else None) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise BadTopology("it is not what `kubectl get nodes -o json` prints")
    unplaced = 0
    for item in items:
        metadata = _mapping(item, "metadata")
        name = metadata.get("name")
        if not isinstance(name, str) or not name:
            raise BadTopology("an item has no name; is it what `kubectl get nodes -o json` prints?")
        its = _mapping(metadata, "labels")
        draft.put(name, "", "")
        for what, known in LABELS.items():
            keys = ((labels[what],) if what in labels else ()) + known
            found = next((its[key] for key in keys if isinstance(its.get(key), str) and _says(its[key])), "")
            draft.put(name, what, found)
        uuid = _mapping(_mapping(item, "status"), "nodeInfo").get("systemUUID")
        if isinstance(uuid, str) and "serial" not in draft.nodes[name]:
            draft.put(name, "serial", uuid.lower())
        unplaced += not any(draft.nodes[name].get(what) for what in ("rack", "switch", "nvlink_domain"))
    if unplaced:
        draft.note(f"{unplaced} of {len(items)} nodes have no label that says where they stand (--label switch=KEY names one)")


def _says(value: str) -> bool:
    """A clique of zeroes is a machine that NVLink joins to no other."""
    return bool(value.strip("0-."))


def _mapping(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
