"""The runbook pages as files (infra/deploy/runbooks): which there are, and what each says."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "deploy" / "runbooks"


class UnknownRunbook(ValueError):
    """No page of that name. The text lists those that there are."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.md"))


def text_of(name: str) -> str:
    """A page's text. Raises UnknownRunbook."""
    name = name.removesuffix(".md")
    if name not in names():
        raise UnknownRunbook(f"there is no runbook {name!r}; there are: {', '.join(names())}")
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")
