"""Where a training process finds the hook: a folder that holds only the package `keepstep`, for its PYTHONPATH.

A training repository may have folders called `events` or `infra`; ours must never come before them, nor in their place. So the
job's path gets this folder and nothing else of ours.
"""

from __future__ import annotations

from pathlib import Path


class NoHook(RuntimeError):
    """The hook is not where the installation should have put it."""


def hook_folder() -> Path:
    """The folder. Installed from a wheel it is a plain one in `infra`; in a checkout its one entry is a link to keepstep/."""
    folder = Path(__file__).resolve().parent / "hook"
    if not (folder / "keepstep" / "__init__.py").is_file():
        raise NoHook(f"{folder} does not hold the training hook `keepstep`; install keepstep again (make venv, in a checkout)")
    return folder
