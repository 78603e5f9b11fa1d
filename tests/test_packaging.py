"""What is installed, and what can and can't be imported from where."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from infra.hook_folder import hook_folder

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("events", "producers", "processors", "actuators", "schemas", "infra")
COMMAND = Path(sys.executable).parent / "keepstep"


def python(*arguments: str, cwd: Path, path: str = "") -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | ({"PYTHONPATH": path} if path else {})
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("name", [*ROOMS, "keepstep", "tests"])
def test_each_name_resolves_to_this_checkout(name: str) -> None:
    """PyPI has an `events`, and carelessly built packages install a `tests`: none may stand in for ours."""
    file = importlib.import_module(name).__file__
    assert file is not None and Path(file).resolve().parent == ROOT / name


def test_pypis_events_is_not_installed_and_cannot_be() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("events")
    assert "events<0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#") and line != "events<0"]
    assert all(len(parts) == 2 for parts in found), "each line is an exact version"
    return {normal(name): version for name, version in found}


def test_everything_installed_is_pinned_at_its_version() -> None:
    pinned = pins()
    ours = {"keepstep", "keepstep-pipeline", "pip"}
    for distribution in metadata.distributions():
        name = normal(distribution.metadata["Name"])
        if name not in ours:
            assert name in pinned, f"{name} is installed but has no line in constraints.txt"
            assert distribution.version.split("+")[0] == pinned[name], name


def test_everything_asked_for_is_pinned_and_the_base_install_has_no_torch() -> None:
    pinned = pins()
    for requirement in metadata.requires("keepstep-pipeline") or []:
        name = normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        assert name in pinned, requirement
        if name in ("torch", "numpy"):
            assert re.search(r"extra == ['\"]train['\"]", requirement), "only the extra `train` has it"
    assert pinned["torch"] == "2.13.0"


def test_the_hooks_distribution_depends_on_nothing() -> None:
    assert metadata.requires("keepstep") in (None, [])


def test_the_control_plane_does_not_load_torch_to_start() -> None:
    loaded = (
        "import sys, events.registry, processors.policy, infra.census; print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert python("-c", loaded, cwd=ROOT) == "False"


def hostile(folder: Path) -> Path:
    """A training repository with folders of our names."""
    for name in (*ROOMS, "keepstep"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('the user folder was imported')", encoding="utf-8")
    (folder / "typer.py").write_text("raise SystemExit('the user folder was imported')", encoding="utf-8")
    return folder


@pytest.mark.skipif(not COMMAND.exists(), reason="the console script is put in place by `make venv`")
def test_the_command_starts_isolated_from_the_users_folders(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(hostile(tmp_path))}
    run = subprocess.run(
        [COMMAND, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "user folder" not in run.stdout + run.stderr
    assert run.returncode == 0, run.stderr


def test_the_command_script_is_what_pip_rewrites_and_needs_the_standard_library_only() -> None:
    lines = (ROOT / "infra" / "bin" / "keepstep").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!python"
    assert {line.split()[1] for line in lines if line.startswith(("import ", "from "))} == {"os", "sys"}
    assert '"-I"' in lines[-1]


def test_the_hook_folder_holds_only_the_hook(tmp_path: Path) -> None:
    folder = hook_folder()
    assert [entry.name for entry in folder.iterdir()] == ["keepstep"]
    shown = python("-c", "import keepstep; print(keepstep.__file__)", cwd=tmp_path, path=str(folder))
    assert Path(shown).parent == folder / "keepstep"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    subprocess.run([*command, ROOT, ROOT / "keepstep"], check=True, timeout=120)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_rooms_and_the_hook_in_its_folder(wheels: dict[str, Path]) -> None:
    held = names(wheels["keepstep_pipeline"])
    top = {name.split("/")[0] for name in held if ".dist-info" not in name and ".data/" not in name}
    assert top == set(ROOMS)
    assert {
        "infra/hook/keepstep/__init__.py",
        "schemas/policy.yaml",
        "schemas/census.sql",
        "schemas/events/keepstep.signal.v1.json",
    } <= held
    assert any(name.endswith(".data/scripts/keepstep") for name in held)
    assert not any(part in name for name in held for part in ("__pycache__", ".venv", "tests/"))


def test_the_hooks_wheel_is_one_package_without_a_dependency(wheels: dict[str, Path], tmp_path: Path) -> None:
    held = names(wheels["keepstep"])
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"keepstep"}
    assert {f"keepstep/{path.name}" for path in (ROOT / "keepstep").glob("*.py")} <= held
    with zipfile.ZipFile(wheels["keepstep"]) as archive:
        archive.extractall(tmp_path)
        assert not any(b"Requires-Dist" in archive.read(name) for name in held if name.endswith("METADATA"))
    shown = python("-S", "-c", "import keepstep; print(keepstep.__file__)", cwd=tmp_path, path=str(tmp_path))
    assert Path(shown).parent == tmp_path / "keepstep"


def test_installed_from_the_wheel_the_hook_folder_is_its_own(wheels: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels["keepstep_pipeline"]) as archive:
        archive.extractall(tmp_path)
    code = "from infra.hook_folder import hook_folder; print(hook_folder())"
    folder = Path(python("-c", code, cwd=tmp_path, path=str(tmp_path)))
    assert folder == tmp_path / "infra" / "hook" and [entry.name for entry in folder.iterdir()] == ["keepstep"]
