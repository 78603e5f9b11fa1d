"""Whom tests name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from events.decision import Verdict
from events.finding import CheckResult


def suspects(results: Iterable[CheckResult]) -> Mapping[str, str]:
    """Machines that failed a test of their own, with the reason."""
    return {r.node: f"{r.node} failed {r.test}: {r.detail}" for r in results if r.passed is False and not r.peers}


def verdict(results: tuple[CheckResult, ...]) -> tuple[Verdict, str]:
    """What the examination of an evicted machine comes to."""
    failed = suspects(results)
    if failed:
        return "confirmed", "; ".join(failed.values())
    ran = [r for r in results if r.passed]
    return "unproven", f"{len(ran)} tests passed, which does not prove it sound"
