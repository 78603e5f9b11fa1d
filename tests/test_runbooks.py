"""Each reason to call a person has a runbook page, each page is of some use, and what the decider hands over in the stories names one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from typer.exceptions import Exit, TyperException
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


def commands_in(text: str) -> list[tuple[str, bool]]:
    """Each `keepstep …` of a page, and whether it stands there to be copied (in a block), not in passing."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    found = [(line, True) for line in re.findall(r"(?:^|\| )(keepstep .*)$", blocks, re.M)]
    found += [(words.replace("\n", " "), False) for words in re.findall(r"`(keepstep [^`]+)`", text)]
    return [(re.split(r"\s+#\s", line)[0].replace("…", "x"), copied) for line, copied in found]


def refusal(line: str) -> str:
    """Why the command line would not take these words; '' if it does. Nothing is run."""
    command, words = get_command(app), shlex.split(line)[1:]
    context = command.make_context("keepstep", list(words))
    try:
        while hasattr(command, "commands"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
            context = command.make_context(name, list(rest), parent=context)
    except TyperException as error:
        return f"{type(error).__name__} {error}"
    except Exit:
        return ""
    return ""


@pytest.mark.parametrize("path", [Path("README.md"), *sorted(FOLDER.glob("*.md"))], ids=lambda path: path.stem)
def test_each_command_of_a_page_is_taken_as_it_stands_there(path: Path) -> None:
    found = commands_in(path.read_text(encoding="utf-8"))
    refused = {line: why for line, copied in found if (why := refusal(line))}
    assert found and len(found) > 3
    copied = {line for line, there in found if there}
    wrong = {
        line: why
        for line, why in refused.items()
        if line in copied or not (why.startswith("MissingParameter") or "|" in line or " N" in line)
    }
    assert wrong == {}


def test_a_command_that_there_is_not_is_refused() -> None:
    for line in (
        "keepstep nosuch",
        "keepstep hold --nosuch",
        "keepstep spares 3 4",
        "keepstep grouptest nosuch",
        "keepstep spares x",
    ):
        assert refusal(line), line


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
