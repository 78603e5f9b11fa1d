"""How many standbys a run needs: enough for the machines that fail at once on all but one day in a hundred (ByteRobust section 7.2). Pure."""

from __future__ import annotations

from math import exp, lgamma, log, log1p

#: Machines that fail a day. The only rates that give ByteRobust's Table 5 (2, 2, 3 and 4 standbys at 128 to 1,024 machines) lie between
#: 0.001165 and 0.00125; its dense job of 1,200 machines had 128 evictions in some 90 days, 0.0012.
DAILY_FAILURES = 0.0012
PERCENTILE = 0.99
#: More than any job has; beyond it the sum takes long.
MACHINES_MAX = 10_000_000


def standbys_for(machines: int, daily_failures: float = DAILY_FAILURES, percentile: float = PERCENTILE) -> int:
    """The smallest k with P(K <= k) >= percentile, K ~ Binomial(machines, daily_failures). Raises ValueError for what is no such number."""
    if not 0 <= machines <= MACHINES_MAX or not 0 <= daily_failures <= 1 or not 0 < percentile < 1:
        raise ValueError(
            f"machines are 0 to {MACHINES_MAX}, the daily share of them that fails is 0 to 1, the percentile between 0 and 1"
        )
    if machines == 0 or daily_failures == 0:
        return 0
    if daily_failures == 1:
        return machines
    total = 0.0
    for failed in range(machines + 1):
        total += exp(
            lgamma(machines + 1) - lgamma(failed + 1) - lgamma(machines - failed + 1)
            + failed * log(daily_failures) + (machines - failed) * log1p(-daily_failures)
        )  # fmt: skip
        if total >= percentile:
            return failed
    return machines
