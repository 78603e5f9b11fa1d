"""Each reason to call a person has a runbook page, each page is of some use, and what the decider hands over in the stories names one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from events.decision import DecisionMade, HandOverReason
from events.registry import parse
from infra.cli.app import app
from infra.runbook_files import FOLDER, names, text_of
from processors.decider import is_own
from processors.runbooks import APPROVAL, GENERAL, PAGES, reason_of, runbook_of
from tests.decider_bench import SCRIPTS, told

HEADINGS = ["What it means", "What keepstep tried", "What to look at", "What to do", "Give the job back"]
COMMANDS = set(get_command(app).commands)  # type: ignore[attr-defined]


def test_every_reason_has_a_page_and_every_page_is_of_some_reason() -> None:
    assert {"", *PAGES} == set(get_args(HandOverReason))
    assert sorted(names()) == sorted([*PAGES.values(), APPROVAL, GENERAL])


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.md")))
def test_a_page_answers_what_is_asked_at_night(name: str) -> None:
    text = text_of(name)
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert all(len(part.strip()) > 40 for part in re.split(r"^## .+$", text, flags=re.M)[1:])
    for other in re.findall(r"\b([a-z-]+)\.md\b", text):
        assert other in names(), f"{name} points at {other}, which there is not"


def test_pages_name_commands_that_there_are() -> None:
    named: dict[str, set[str]] = {}
    for name in names():
        for code in re.findall(r"```sh\n(.*?)```|`(keepstep [^`]+)`", text_of(name), re.S):
            for command in re.findall(r"^keepstep ([a-z]+)", "\n".join(code), re.M):
                named.setdefault(command, set()).add(name)
    assert {"explain", "restart", "override", "ack"} <= set(named)
    assert {c: n for c, n in named.items() if c not in COMMANDS} == {}


def handed_over() -> list[DecisionMade]:
    facts = [parse(r.data).data for path in SCRIPTS for r in told(path).records if is_own(r.subject)]
    return [fact for fact in facts if isinstance(fact, DecisionMade) and fact.rung == "hand_over"]


def test_what_is_handed_over_in_the_stories_has_a_page_of_its_own() -> None:
    found = handed_over()
    assert {made.because for made in found if reason_of(made) is None} == set()
    reasons = {reason_of(made) for made in found}
    assert {
        "attempts_used_up", "budget_spent", "no_standby", "shared_cause", "planned_failed", "no_longer_possible", "recovery_late",
        "group_test_disagreed", "same_exception", "slow_run",
    } <= reasons  # fmt: skip


def made(**what: object) -> DecisionMade:
    fields: dict[str, object] = {
        "decision": "d", "incident": "i", "job": "j", "epoch": 1, "ordinal": 1, "rung": "hand_over", "rule": "hand_over", "mode": "auto",
        "because": "x", "policy_digest": "", "catalogue_digest": "", "code_version": "", "trigger": 1, "ledger_digest": "",
    }  # fmt: skip
    return DecisionMade.model_validate(fields | what)


@pytest.mark.parametrize(
    ("what", "page"),
    [
        *(({"reason": reason}, page) for reason, page in PAGES.items()),
        ({"because": "nobody has thought of this"}, GENERAL),
        ({"rung": "evict", "mode": "approve"}, APPROVAL),
        ({"rung": "evict", "vetoed": "budget"}, "budget-spent"),
        ({"rung": "evict"}, ""),
    ],
)  # fmt: skip
def test_a_decision_names_its_page(what: dict[str, object], page: str) -> None:
    assert runbook_of(made(**what)) == page


def test_the_packaged_folder_is_the_one_that_is_read() -> None:
    assert Path("infra/deploy/runbooks").resolve() == FOLDER.resolve()
