"""The catalogue's text, from its files: what is adopted, digested and parsed is always one text."""

from __future__ import annotations

from pathlib import Path

#: Beside the exported schemas, also in an installed package.
SHIPPED = Path(__file__).resolve().parent.parent / "schemas" / "catalogue"


def catalogue_text(path: Path | None = None) -> str:
    """The text of a file, or of a folder's *.yaml one after another by name, each a YAML document of its own (what comes first
    is tried first). Raises OSError, UnicodeDecodeError."""
    path = path or SHIPPED
    if not path.is_dir():
        return path.read_text(encoding="utf-8")
    files = sorted(path.glob("*.yaml"), key=lambda file: file.name)
    if not files:
        raise FileNotFoundError(2, "no *.yaml in this folder", str(path))
    return (
        "\n".join(f"--- # {file.name}\n{file.read_text(encoding='utf-8').removeprefix('---').strip()}" for file in files) + "\n"
    )
