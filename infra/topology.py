"""Where machines stand: read from keepstep's own file, from Slurm's or from Kubernetes, filled into the places that are declared, and
kept in LEDGER so that later jobs and standbys have it too.

keepstep's own file is YAML or JSON. Machines by name or hostlist, and groups of them:

    nodes:
      gpu-01: {rack: r1, switch: leaf-1, nvlink_domain: d1, serial: "J1234"}
      gpu-[02-16]: {rack: r1}
    racks: {r2: "gpu-[17-32]"}
    switches: {leaf-1: "gpu-[02-16]", leaf-2: "gpu-[17-32]"}
    nvlink_domains: {}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from events.envelope import NAME_MAX
from events.job import Place
from events.ports import Record
from events.registry import Malformed, canonical_json, parse
from events.topology import PLACES_MAX, TopologyDeclared
from infra.topology_hostlist import NODES_MAX, BadHostlist, expand

#: `kubectl get nodes -o json` of some thousand nodes.
FILE_BYTES_MAX = 512 * 1024 * 1024
_PART_BYTES_MAX = 500_000
_FIELDS = ("rack", "switch", "nvlink_domain", "serial")
_GROUPS = {"racks": "rack", "switches": "switch", "nvlink_domains": "nvlink_domain"}

Format = Literal["keepstep", "slurm", "kubernetes"]


class BadTopology(ValueError):
    """A file that does not say where machines stand. A sentence for who wrote it."""


@dataclass(slots=True)
class Draft:
    """A topology as it is read. `notes`: what was left out, and why."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, node: str, what: str, value: str) -> None:
        """Raises BadTopology if it stands elsewhere already."""
        known = self.nodes.setdefault(node, {})
        if len(self.nodes) > NODES_MAX:
            raise BadTopology(f"more than {NODES_MAX} machines are named")
        if value and known.setdefault(what, value) != value:
            raise BadTopology(f"{node} has {what} {known[what]!r} and {value!r}; a machine has one")

    def note(self, text: str) -> None:
        if len(self.notes) < 20:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Topology:
    """Places by node, in the file's order."""

    places: Mapping[str, Place]
    origin: str = ""
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        plain = [place.model_dump(mode="json") for place in self.places.values()]
        return sha256(canonical_json(plain)).hexdigest()[:16]

    def of(self, node: str) -> Place | None:
        """By name; a name with a domain is also known by its first part, and the other way round if that is one machine."""
        found = self.places.get(node) or self.places.get(node.partition(".")[0])
        if found is None and "." not in node:
            longer = [place for name, place in self.places.items() if name.partition(".")[0] == node]
            found = longer[0] if len(longer) == 1 else None
        return found

    def fill(self, place: Place) -> Place:
        """The place with what it does not say itself."""
        known = self.of(place.node)
        if known is None:
            return place
        return place.model_copy(update={name: getattr(place, name) or getattr(known, name) for name in _FIELDS})


def read(path: Path, form: Format | None = None, labels: Mapping[str, str] | None = None, rack_from: str = "") -> Topology:
    """From a file of any of the three kinds. Raises BadTopology. `labels`: Kubernetes labels by field, before the known ones.
    `rack_from`: switch or nvlink_domain, which stands for the rack where none is given."""
    from infra import topology_kubernetes, topology_slurm

    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadTopology(f"{path} has more than {FILE_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadTopology(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise BadTopology(f"{path} can't be read: {error.strerror}") from None
    form = form or sniff(text)
    draft = Draft()
    try:
        if form == "slurm":
            topology_slurm.parse(text, draft)
        elif form == "kubernetes":
            topology_kubernetes.parse(text, draft, labels or {})
        else:
            parse_own(text, draft)
    except BadHostlist as error:
        raise BadTopology(f"{path}: {error}") from None
    except BadTopology as error:
        raise BadTopology(f"{path}: {error}") from None
    if not draft.nodes:
        raise BadTopology(f"{path} names no machine")
    for known in draft.nodes.values():
        if rack_from and not known.get("rack") and known.get(rack_from):
            known["rack"] = known[rack_from]
    try:
        places = {node: Place(node=node, **known) for node, known in draft.nodes.items()}
    except ValidationError:
        raise BadTopology(f"{path}: a name is empty or has over {NAME_MAX} characters") from None
    return Topology(places, f"{form} {path.name}"[:NAME_MAX], tuple(draft.notes))


def sniff(text: str) -> Format:
    """Whose file it is, where nobody says."""
    for line in text.splitlines()[:2000]:
        word = line.strip().lower()
        if word.startswith(("switchname=", "blockname=", "- topology:")):
            return "slurm"
        if word.startswith(('"items":', "items:")) or (word.startswith("{") and '"items"' in word[:400]):
            return "kubernetes"
    return "keepstep"


def load(text: str) -> Any:
    """JSON, or else YAML. Raises BadTopology."""
    try:
        if text.lstrip()[:1] in ("{", "["):
            return json.loads(text)
    except (ValueError, RecursionError):
        pass  # YAML has flow mappings that are no JSON
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" at line {place.line + 1}" if place else ""
        raise BadTopology(f"it is neither JSON nor YAML{where}") from None


def parse_own(text: str, draft: Draft) -> None:
    value = load(text)
    if not isinstance(value, dict):
        raise BadTopology("it must be a mapping with nodes, racks, switches or nvlink_domains")
    unknown = sorted(str(name) for name in value if name not in (*_GROUPS, "nodes", "version"))
    if unknown:
        raise BadTopology(f"{unknown[0][:40]!r} is none of nodes, racks, switches, nvlink_domains")
    for names, known in _pairs(value.get("nodes") or {}):
        nodes = expand(names)
        for what in known:
            if what not in _FIELDS:
                raise BadTopology(f"{names[:80]}: {str(what)[:40]!r} is none of {', '.join(_FIELDS)}")
            if what == "serial" and len(nodes) != 1:
                raise BadTopology(f"{names[:80]}: a serial number is one machine's")
        for node in nodes:
            draft.put(node, "", "")
            for what, said in known.items():
                draft.put(node, str(what), _name(said, names))
    for group, what in _GROUPS.items():
        members = value.get(group) or {}
        if not isinstance(members, dict):
            raise BadTopology(f"{group} must be a mapping from a name to a list of machines")
        for name, names in members.items():
            for text_of_names in names if isinstance(names, list) else [names]:
                for node in expand(_name(text_of_names, str(name))):
                    draft.put(node, what, _name(name, group))


def _pairs(nodes: Any) -> Iterable[tuple[str, dict[Any, Any]]]:
    """`nodes` as a mapping by name, or as a list of mappings with `node`."""
    if isinstance(nodes, dict):
        items = list(nodes.items())
    elif isinstance(nodes, list):
        items = []
        for entry in nodes:
            if not isinstance(entry, dict) or "node" not in entry:
                raise BadTopology("each entry of the list of nodes must be a mapping with `node`")
            items.append((entry["node"], {name: said for name, said in entry.items() if name != "node"}))
    else:
        raise BadTopology("nodes must be a mapping by name, or a list")
    for names, known in items:
        if known is not None and not isinstance(known, dict):
            raise BadTopology(f"{str(names)[:80]}: what is said of it must be a mapping of {', '.join(_FIELDS)}")
        yield _name(names, "nodes"), known or {}


def _name(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadTopology(f"{where[:80]}: {str(value)[:40]!r} is no name; put it in quotes")
    return str(value).strip()


# --- in LEDGER ----------------------------------------------------------------------------------------------------------------


def declarations(topology: Topology, author: str) -> list[TopologyDeclared]:
    """As events, in parts that the bus takes."""
    parts: list[list[Place]] = [[]]
    size = 0
    for place in topology.places.values():
        more = len(place.model_dump_json(exclude_defaults=True)) + 1
        if parts[-1] and (size + more > _PART_BYTES_MAX or len(parts[-1]) >= PLACES_MAX):
            parts.append([])
            size = 0
        parts[-1].append(place)
        size += more
    digest = topology.digest
    return [
        TopologyDeclared(
            places=tuple(places), digest=digest, part=i, parts=len(parts), origin=topology.origin, author=author[:NAME_MAX]
        )
        for i, places in enumerate(parts)
    ]


def declared(records: Iterable[Record]) -> Topology | None:
    """The last topology of which all parts are there."""
    whole: Topology | None = None
    parts: dict[int, TopologyDeclared] = {}
    for record in records:
        try:
            data = parse(record.data).data
        except Malformed:
            continue
        if not isinstance(data, TopologyDeclared):
            continue
        if any(known.digest != data.digest or known.parts != data.parts for known in parts.values()):
            parts = {}
        parts[data.part] = data
        if all(i in parts for i in range(data.parts)):
            places = {place.node: place for i in range(data.parts) for place in parts[i].places}
            whole, parts = Topology(places, data.origin), {}
    return whole
