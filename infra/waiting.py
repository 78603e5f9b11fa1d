"""Which decisions wait for a person's yes, as text and as JSON: for `status`, `approve` and whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from events.clock import NS, text_of
from infra.watch import Asked, Watch
from processors.runbooks import runbook_of

_UNITS = {"d": (86400, "days"), "h": (3600, "h"), "m": (60, "min"), "s": (1, "s")}


def ago(now_ns: int, then_ns: int) -> str:
    """How long ago, in the largest unit of which there are two."""
    seconds = max(0, now_ns - then_ns) // NS
    size, word = next((unit for unit in _UNITS.values() if seconds >= 2 * unit[0]), _UNITS["s"])
    return f"{seconds // size} {word} ago"


def described(asked: Asked) -> str:
    """One waiting decision in a line."""
    made = asked.made
    nodes = f" of {', '.join(made.nodes)}" if made.nodes else ""
    standbys = f", {', '.join(made.standbys)} in" if made.standbys else ""
    return f"{made.rung.replace('_', ' ')}{nodes}{standbys} in job {made.job} ({made.because})"


def short_ids(decisions: Sequence[str]) -> dict[str, str]:
    """Of each the shortest beginning, of 8 letters at least, that is no other's."""
    lengths = range(8, max(map(len, decisions), default=8) + 1)
    return {
        d: next((d[:n] for n in lengths if not any(o != d and o.startswith(d[:n]) for o in decisions)), d) for d in decisions
    }


def waiting_json(watch: Watch) -> list[dict[str, Any]]:
    """What `status` says of each decision that waits for a yes."""
    short = short_ids(list(watch.asked))
    return [
        {
            "decision": asked.made.decision, "job": asked.made.job, "incident": asked.made.incident, "rung": asked.made.rung,
            "rule": asked.made.rule, "nodes": list(asked.made.nodes), "standbys": list(asked.made.standbys),
            "because": asked.made.because, "since": text_of(asked.at_ns), "runbook": runbook_of(asked.made),
            "approve": f"keepstep approve {short[asked.made.decision]} --reason '…'",
            "deny": f"keepstep deny {short[asked.made.decision]} --reason '…'",
        }
        for asked in watch.waiting()
    ]  # fmt: skip
