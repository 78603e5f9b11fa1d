"""Every story in tests/scripts is played, and what the decider answers must be what stands there. `pytest --rewrite` writes the new
answers: the diff of a change in behaviour is what an operator reviews."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from processors.replay import replay
from processors.state import IN_TROUBLE_ONLY, NAMING
from tests.stories import Story

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def play(text: str) -> tuple[str, Story]:
    story = Story()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    >"):
            continue
        lines.append(line)
        if line.strip() and not line.startswith("#"):
            lines.extend(f"    > {told}" for told in story.tell(line))
    return "\n".join(lines) + "\n", story


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    told, story = play(text)
    if request.config.getoption("--rewrite"):
        path.write_text(told)
        return
    assert told == text, "\n" + "\n".join(
        difflib.unified_diff(text.splitlines(), told.splitlines(), "as written", "as decided", lineterm="")
    )
    result = replay(story.records)
    assert result.identical and result.pending == 0, result.divergence


def test_there_are_stories() -> None:
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize(
    "symptom", sorted(NAMING - IN_TROUBLE_ONLY.keys())
)  # those under a job that goes on: ladder_ailing.txt, link_down.txt
@pytest.mark.parametrize("confidence", ["high", "low", "sympathetic"])
def test_what_names_a_machine_evicts_it_and_what_only_hints_at_it_does_not(symptom: str, confidence: str) -> None:
    story = Story()
    for line in ("policy auto", "job gpt nodes a b c d standbys s", "+5 progress gpt first attempt=1 step=2"):
        story.tell(line)
    told = "\n".join(story.tell(f"+1 signal {symptom} b job=gpt attempt=1 confidence={confidence}"))
    assert ("rung=evict" in told and "evict_node" in told) == (confidence == "high"), told
