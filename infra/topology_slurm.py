"""Slurm's topology.conf (tree and block plugins) and topology.yaml: the leaf switch and the block of each machine.

A block is a set of machines that NVLink joins (Slurm's topology guide), so it is taken as the NVLink domain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from infra.topology import BadTopology, Draft, load
from infra.topology_hostlist import expand

_PAIR = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|\S+)")


def parse(text: str, draft: Draft) -> None:
    """Raises BadTopology, BadHostlist."""
    if re.search(r"^\s*-\s*topology\s*:", text, re.MULTILINE):
        _yaml(load(text), draft)
        return
    for number, line in _lines(text):
        pairs = {name.lower(): value.strip('"') for name, value in _PAIR.findall(line)}
        if "switchname" in pairs:
            if "nodes" in pairs:
                _members(draft, "switch", pairs["switchname"], pairs["nodes"])
            elif "switches" not in pairs:
                draft.note(f"line {number}: switch {pairs['switchname'][:80]} has neither nodes nor switches below it")
        elif "blockname" in pairs:
            _members(draft, "nvlink_domain", pairs["blockname"], pairs.get("nodes", ""))
        elif "blocksizes" not in pairs:
            draft.note(f"line {number} is none of SwitchName, BlockName, BlockSizes: {line[:60]}")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Without comments, with lines that a backslash continues joined; the number is the first one's."""
    held, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        first = first or number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        whole, held = (held + line).strip(), ""
        if whole:
            yield first, whole
        first = 0
    if held.strip():
        yield first, held.strip()


def _members(draft: Draft, what: str, name: str, nodes: str) -> None:
    """A machine on several leaf switches (one for each rail) is noted once, and the first counts."""
    for node in expand(nodes):
        if draft.nodes.get(node, {}).get(what, name) != name:
            draft.note(f"{node} is on several leaf switches or blocks; {draft.nodes[node][what]} counts")
            continue
        draft.put(node, what, name)


def _yaml(value: Any, draft: Draft) -> None:
    if not isinstance(value, list):
        raise BadTopology("Slurm's topology.yaml is a list of topologies")
    for entry in value:
        if not isinstance(entry, dict):
            raise BadTopology("each of Slurm's topologies is a mapping")
        for plugin, below, name_of, what in (
            ("tree", "switches", "switch", "switch"),
            ("block", "blocks", "block", "nvlink_domain"),
        ):
            section = entry.get(plugin)
            listed = section.get(below) if isinstance(section, dict) else None
            for one in listed if isinstance(listed, list) else []:
                if isinstance(one, dict) and isinstance(one.get("nodes"), str) and name_of in one:
                    _members(draft, what, str(one[name_of]), one["nodes"])
