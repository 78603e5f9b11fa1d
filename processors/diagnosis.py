"""Whom tests of machines name, and what an examination of one machine comes to. Pure.

A test of a machine by itself names it. A test between two names a pair, and a ring of pairs is read as a whole: a bad machine fails
with all of its neighbours, so whoever has one good link is not the bad end, unless both have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod
from statistics import median
from typing import NamedTuple

from events.decision import Verdict
from events.finding import CheckResult
from processors.policy import TESTS, MachineTests

#: Tests between two machines; `peers` is the other.
LINKS = ("all_gather", "ib_write_bw")
#: Tests of a machine by itself, which can be run on it once more without the others.
ALONE = ("gpu_self_test", "dcgm", "all_to_all")
#: So many machines that fail with each other and nobody else are one cause's, not each one's own.
TANGLE_MAX = 10


class Rate(NamedTuple):
    """Of machines that are bad, the share that the test finds; of machines that are sound, the share that it fails all the same."""

    recall: float
    false_alarm: float
    source: str


#: Where nothing is published the figure is ours, and low: whoever passes must not look more innocent than is known.
RATES: Mapping[str, Rate] = {
    "dcgm": Rate(0.70, 0.01, "ByteRobust (SOSP 2025, arXiv 2509.16293): NVIDIA's EUD found about 70% of the machines later confirmed as corrupting; false alarms: assumed"),
    "gpu_self_test": Rate(0.50, 0.001, "assumed: no figure is published; comparisons are exact, what is left is a test that runs out of time"),
    "reference_step": Rate(0.50, 0.001, "assumed: ByteRobust gives none for its MiniGPT suite, which is there because 70% is not enough; compared to the bit among equal machines"),
    "all_to_all": Rate(0.30, 0.01, "assumed: it finds links within a machine only"),
    "all_gather": Rate(0.30, 0.01, "assumed: it finds links between machines only"),
    "ib_write_bw": Rate(0.30, 0.02, "assumed: as all_gather, and rates vary with other traffic"),
}  # fmt: skip
UNKNOWN_TEST = Rate(0.0, 0.05, "a test that this table does not know: its passing proves nothing")

#: How often a machine that was evicted by a rule is bad indeed, before it is examined.
PRIORS: Mapping[str, tuple[float, str]] = {
    "evict_group": (0.19, "ByteRobust: of a pipeline's 8 machines evicted together 1 or 2 were bad"),
    "evict_named": (
        0.85,
        "Revisiting Reliability (arXiv 2410.21680): lemon nodes, found by their record, were so in more than 85%",
    ),
    "evict_ailing": (0.85, "as evict_named"),
    "evict_tested": (0.90, "assumed: it has failed a test already"),
    "evict_replayed": (0.85, "assumed: both phases of a group test met in it"),
    "evict_silent": (0.50, "assumed: machine, network or its agent"),
}
PRIOR = (0.50, "assumed: nothing is known of why it was evicted")


class Finding(NamedTuple):
    """Machines that are named, each with the reason; and what failed and names nobody, a sentence each."""

    named: Mapping[str, str]
    doubts: tuple[str, ...] = ()


class Weighed(NamedTuple):
    """Machines that tests name, each with the reason, and with the share of sound machines that would have failed all that it failed; 0
    where other machines bear it out (links, bits that are compared). `tests`: what they failed by themselves; `rounds`: tests so far."""

    named: Mapping[str, str]
    shares: Mapping[str, float]
    tests: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    rounds: int = 1

    def doubtful(self, of: int, false_alarms_max: float, rounds_max: int) -> tuple[str, ...]:
        """Those to be tested once more: of so many sound machines, more than that would be expected to fail what each of them failed."""
        if self.rounds >= rounds_max:
            return ()
        return tuple(node for node, share in self.shares.items() if share * of > false_alarms_max)


def weighed(results: Iterable[CheckResult], before: Weighed | None = None, rules: MachineTests = TESTS) -> Weighed:
    """`before`: what the results of the same machines' last tests came to. Who passes now is named no more; who could not be tested stays
    named."""
    results = tuple(results)
    told: defaultdict[str, list[CheckResult]] = defaultdict(list)
    for result in results:
        if result.passed is not None:
            told[result.node].append(result)
    if before is None:
        all_found = found(results, rules)
        failed = {node: sorted({one.test for one in told[node] if not one.passed}) for node in all_found.named}
        shares = {
            node: prod(rate(test).false_alarm for test in tests) if tests and {*tests} <= {*ALONE} else 0.0
            for node, tests in failed.items()
        }
        tests = tuple(test for test in ALONE if any(test in own for own in failed.values()))
        return Weighed(all_found.named, shares, tests, all_found.doubts)
    named, shares, doubts = dict(before.named), dict(before.shares), list(before.doubts)
    for node, share in before.shares.items():
        own = [one for one in told[node] if one.test in before.tests]
        if not own or not share:
            shares[node] = 0.0  # it is as certain as it gets
        elif again := [one for one in own if not one.passed]:
            shares[node] = share * prod(rate(one.test).false_alarm for one in again)
            named[node] += f", {before.rounds + 1} times"
        else:
            doubts.append(f"{named.pop(node)}; it passed when it was tested once more")
            del shares[node]
    return Weighed(named, shares, before.tests, tuple(doubts), before.rounds + 1)


def suspects(results: Iterable[CheckResult]) -> Mapping[str, str]:
    """Machines that the tests name, with the reason."""
    return found(results).named


def found(results: Iterable[CheckResult], rules: MachineTests = TESTS) -> Finding:
    results = tuple(results)
    named: dict[str, str] = {}
    for result in results:
        if result.passed is False and result.test not in LINKS:
            reason = f"{result.node} failed {result.test}: {result.detail}"
            named[result.node] = f"{named[result.node]}; {result.test}: {result.detail}" if result.node in named else reason
    links = _links(results, named)
    broken, doubts = _of_links(links, "fails", single=True)
    named.update(broken)
    whole = {pair: link for pair, link in links.items() if not link.failed and not set(pair) & set(broken)}
    slow, slow_doubts = _of_links(_by_speed(whole, rules), "is slow", single=False)
    named.update(slow)
    unclear = tuple(
        f"{result.test} on {result.node}: {result.detail}"
        for result in results
        if result.passed is None and result.digest and result.node not in named
    )
    unmet = tuple(f"the links were not tested: {result.detail}" for result in results if _no_place(result))
    return Finding(named, (*unmet, *doubts, *slow_doubts, *unclear[:3]))


class _Link(NamedTuple):
    failed: bool
    detail: str
    speed: float | None
    kind: str


_Pair = tuple[str, str]


def _links(results: Sequence[CheckResult], named: Mapping[str, str]) -> dict[_Pair, _Link]:
    """Each pair that was tested, as both ends saw it. A link to a machine that is named already is explained; so is one to the machine
    on which all meet, if it says itself that it could not open the place."""
    links: dict[_Pair, _Link] = {}
    explained = {*named, *(result.node for result in results if _no_place(result))}
    for result in results:
        ends = {result.node, *result.peers}
        if result.test not in LINKS or result.passed is None or len(ends) != 2 or ends & explained:
            continue
        first, second = sorted(ends)
        link = _Link(not result.passed, result.detail, result.value, f"{result.test} {result.unit} {result.software}")
        before = links.get((first, second))
        if before is not None and before.failed != link.failed:
            link = before if before.failed else link
        elif before is not None:
            speeds = [speed for speed in (before.speed, link.speed) if speed is not None]
            link = link._replace(speed=min(speeds, default=None), detail=before.detail)
        links[first, second] = link
    return links


def _no_place(result: CheckResult) -> bool:
    """The host of the machines' meeting names itself as the peer, and has no verdict: its port was taken, say."""
    return result.test == "all_gather" and result.passed is None and result.peers == (result.node,)


def _by_speed(links: Mapping[_Pair, _Link], rules: MachineTests) -> dict[_Pair, _Link]:
    """The links with a speed; those far slower than others of their kind as failed."""
    kinds: dict[str, list[float]] = {}
    for link in links.values():
        if link.speed is not None:
            kinds.setdefault(link.kind, []).append(link.speed)
    judged = {}
    for pair, link in links.items():
        speeds = kinds.get(link.kind, [])
        if link.speed is not None and len(speeds) >= rules.links_min:
            usual = median(sorted(speeds)[2 * len(speeds) // 3 :])
            share = rules.slow_share_gloo if "gloo" in link.kind else rules.slow_share
            detail = f"{link.speed:.3g} where {usual:.3g} is usual"
            judged[pair] = link._replace(failed=link.speed < share * usual, detail=detail)
    return judged


def _of_links(links: Mapping[_Pair, _Link], what: str, *, single: bool) -> tuple[dict[str, str], list[str]]:
    """Whom the links that failed name. A single one between machines whose other links are good: `single`, both ends (one of them,
    or what is between them: the pair can't work together, and two machines cost less than a job that stands); else neither."""
    failed = [pair for pair, link in links.items() if link.failed]
    good = {end for pair, link in links.items() if not link.failed for end in pair}
    candidates = {end for pair in failed for end in pair} - good
    covers = {end for pair in failed for end in pair if end in candidates and _other(pair, end) not in candidates}
    open_ = [pair for pair in failed if candidates.issuperset(pair) and not covers.intersection(pair)]
    doubts = []
    for tangle in _tangles(open_):
        sure = _in_every_smallest_cover(tangle)
        covers |= sure
        if not sure:
            names = ", ".join(sorted({end for pair in tangle for end in pair}))
            doubts.append(
                f"the link between each two of {names} {what}, and none of them has a good one: no one machine explains it"
            )
    named = {}
    for end in sorted(covers):
        own = [pair for pair in failed if end in pair]
        others = ", ".join(_other(pair, end) for pair in own)
        named[end] = f"the link of {end} to {others} {what}, it has no good one: {links[own[0]].detail}"
    for pair in failed:
        if not candidates.intersection(pair):
            first, second = pair
            said = f"the link between {first} and {second} {what}, both have good ones to others: {links[pair].detail}"
            if single:
                named.setdefault(first, said)
                named.setdefault(second, said)
            else:
                doubts.append(f"{said}; neither is named for it")
    return named, doubts


def _other(pair: _Pair, end: str) -> str:
    return pair[1] if pair[0] == end else pair[0]


def _tangles(pairs: Sequence[_Pair]) -> list[list[_Pair]]:
    """Pairs that hang together."""
    left, tangles = list(pairs), []
    while left:
        tangle, ends = [left.pop(0)], set[str]()
        grown = True
        while grown:
            ends = {end for pair in tangle for end in pair}
            more = [pair for pair in left if ends.intersection(pair)]
            left = [pair for pair in left if pair not in more]
            tangle += more
            grown = bool(more)
        tangles.append(tangle)
    return tangles


def _in_every_smallest_cover(pairs: Sequence[_Pair]) -> set[str]:
    """The machines that no smallest explanation does without: sets of machines of which each pair holds one."""
    ends = sorted({end for pair in pairs for end in pair})
    if len(ends) > TANGLE_MAX:
        return set()
    for size in range(1, len(ends)):
        covers = [set(chosen) for chosen in combinations(ends, size) if all(set(chosen).intersection(pair) for pair in pairs)]
        if covers:
            return set.intersection(*covers)
    return set()


def prior_of(rule: str, machines: int = 0) -> float:
    """How likely a machine is bad that was evicted by this rule, as one group of so many machines (0: not known). One that stood apart
    alone is as good as named."""
    if rule == "evict_group" and machines > 0:
        return min(0.9, 1.5 / machines)
    return PRIORS.get(rule, PRIOR)[0]


def verdict(results: Iterable[CheckResult], prior: float = PRIOR[0], rules: MachineTests = TESTS) -> tuple[Verdict, str]:
    """What the examination of an evicted machine comes to, and why in a sentence. Passing is not innocence: the chance that a bad machine
    passes is reckoned with, by its best test only (what one misses, another is likely to miss too), however often it was repeated."""
    results = tuple(result for result in results if result.test != "answers")
    failed = [result for result in results if result.passed is False]
    passed = sorted({result.test for result in results if result.passed})
    if failed:
        worst = max(failed, key=lambda result: _ratio(result.test))
        odds = prior * rate(worst.test).recall if worst.test in RATES else prior
        bad = odds / (odds + (1 - prior) * rate(worst.test).false_alarm)
        said = "; ".join(dict.fromkeys(f"failed {result.test}: {result.detail}" for result in failed))
        if bad >= rules.confirmed_from:
            return "confirmed", said
        return "unproven", f"{said}; of machines that do, {100 - round(100 * bad)} in 100 are sound"
    recall = max((rate(test).recall for test in passed), default=0.0)
    bad = prior * (1 - recall) / (prior * (1 - recall) + (1 - prior))
    if recall == 0.0:
        return (
            "unproven",
            "no test that says anything could run" if not passed else f"passed {', '.join(passed)}, which says nothing",
        )
    said = f"passed {', '.join(passed)}, as {round(100 * (1 - recall))} of 100 bad machines do; that it is bad was {prior:.0%} likely, and is {bad:.0%}"
    return ("exonerated" if bad < rules.exonerated_below else "unproven"), said


def rate(test: str) -> Rate:
    return RATES.get(test, UNKNOWN_TEST)


def _ratio(test: str) -> float:
    return rate(test).recall / rate(test).false_alarm
