"""Which runbook page is for what a person is called for. A table; the pages are in infra/deploy/runbooks. Pure.

Whoever adds a reason of hand-over to the decider adds it to `HandOverReason` (events/decision.py), gives it a line here and a page
there; tests/test_runbooks.py fails until all three are done.
"""

from __future__ import annotations

from collections.abc import Mapping

from events.decision import DecisionMade, HandOverReason, IntentIssued

#: reason -> page.
PAGES: Mapping[HandOverReason, str] = {
    "attempts_used_up": "attempts-used-up",
    "budget_spent": "budget-spent",
    "no_standby": "no-standby",
    "shared_cause": "shared-cause",
    "start_failed": "start-failed",
    "recovery_late": "recovery-late",
    "rollback_impossible": "rollback-impossible",
    "group_test_disagreed": "group-test-named-nobody",
    "stacks_name_whole_job": "stacks-name-the-whole-job",
    "diagnosis_failed": "diagnosis-failed",
    "same_exception": "same-exception",
    "no_longer_possible": "no-longer-possible",
    "planned_failed": "planned-action-failed",
    "slow_run": "slow-run",
    "left_stopped": "left-stopped",
}
#: A decision that waits for a yes, and a hand-over of which no more is known.
APPROVAL, GENERAL = "approval-wanted", "handed-over"


def reason_of(made: DecisionMade) -> HandOverReason | None:
    """Why this decision calls a person; None if it does not, or nothing more is known than that it does."""
    return made.reason or None if made.rung == "hand_over" else None


def runbook_of(made: DecisionMade) -> str:
    """The page for a decision; '' if it calls nobody."""
    if made.rung == "hand_over":
        reason = reason_of(made)
        return PAGES[reason] if reason else GENERAL
    if made.vetoed:
        return {"budget": PAGES["budget_spent"], "no_standby": PAGES["no_standby"]}.get(made.vetoed, "")
    return APPROVAL if made.mode == "approve" else ""


def runbook_of_page(page: IntentIssued, made: DecisionMade | None) -> str:
    """The page for a notification, whose decision is not known any more where `made` is None."""
    return (runbook_of(made) if made is not None else "") or GENERAL
