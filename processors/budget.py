"""The budget of evictions by scope, folded from the ledger, so that a restart does not forget it. Recoveries are never blocked by it:
only evictions ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from events.clock import NS
from events.job import Place
from processors.policy import Budget
from processors.state import Eviction, Fleet, Job


@dataclass(frozen=True, slots=True)
class Over:
    """A budget that one more eviction would break."""

    scope: str
    name: str
    spent: int
    allowed: int
    window_s: float

    def __str__(self) -> str:
        where = f"{self.scope} {self.name}".strip()
        return f"the budget of {where} allows {self.allowed} evictions in {self.window_s:g} s and {self.spent} are spent"


def allowed(budget: Budget, machines: int) -> int:
    """How many machines of a scope may be evicted in the window: the lower of number and share, but 1 of any scope."""
    return min(budget.evictions_max, max(1, int(budget.share_max * machines)))


def over_budget(fleet: Fleet, job: Job, place: Place, also: tuple[Place, ...] = ()) -> Over | None:
    """What evicting `place` after the evictions `also` (of the same job, not yet in the log) would break, if anything."""
    rules = fleet.policy.budget
    new = tuple(Eviction(fleet.now_ns, job.name, p.node, p.rack) for p in also)
    evictions = (*fleet.evictions, *new)

    def over(scope: str, name: str, budget: Budget, machines: int, of_scope: Callable[[Eviction], bool]) -> Over | None:
        since = fleet.now_ns - int(budget.window_s * NS)
        recent = [e for e in evictions if e.at_ns > since and of_scope(e)]
        spent = sum(1 for e in recent if not e.group) + len({e.group for e in recent if e.group})  # a group counts as one
        limit = allowed(budget, machines)
        return Over(scope, name, spent, limit, budget.window_s) if spent >= limit else None

    found = over("job", job.name, rules.job, len(job.places), lambda e: e.job == job.name)
    if found is not None:
        return found
    found = over("fleet", "", rules.fleet, fleet.sizes.get(("fleet", ""), 0), lambda e: True)
    if found is not None or not place.rack:
        return found
    return over("rack", place.rack, rules.rack, fleet.sizes.get(("rack", place.rack), 0), lambda e: e.rack == place.rack)
