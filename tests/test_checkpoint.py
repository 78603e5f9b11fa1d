"""Checkpoints that are whole or not there, whatever dies when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from keepstep import checkpoint
from tests.hook_agent import HOOK


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_whole_and_has_the_agreed_form(tmp_path: Path) -> None:
    def writes(file: BinaryIO) -> None:
        file.write(b"header")
        file.seek(0)  # as zip writers do
        file.write(b"HEADER")

    path = checkpoint.save(tmp_path / "new", 7, {"model.pt": b"abc", "more.bin": writes, "empty": b""})
    assert path == tmp_path / "new" / "step-00000007" and names(path) == ["empty", "manifest.json", "model.pt", "more.bin"]
    assert (path / "more.bin").read_bytes() == b"HEADER"
    assert json.loads((path / "manifest.json").read_bytes()) == {
        "step": 7,
        "files": {
            "model.pt": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
            "more.bin": {"bytes": 6, "sha256": checkpoint._sha256(path / "more.bin")},
            "empty": {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        },
    }
    assert checkpoint.latest_whole(tmp_path / "new") == path and checkpoint.is_whole(path)
    assert checkpoint.latest_whole(tmp_path / "nowhere") is None


def test_the_newest_whole_one_is_found_past_all_kinds_of_damage(tmp_path: Path) -> None:
    for step in range(1, 11):
        checkpoint.save(tmp_path, step, {"a": b"x" * 1000, "b": b"y"}, keep=99)
    (tmp_path / "step-00000010" / "a").write_bytes(b"x" * 999)
    (tmp_path / "step-00000009" / "a").write_bytes(b"x" * 999 + b"z")
    (tmp_path / "step-00000008" / "b").unlink()
    (tmp_path / "step-00000007" / "manifest.json").unlink()
    manifest = tmp_path / "step-00000006" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    (tmp_path / "step-00000005" / "manifest.json").write_bytes((tmp_path / "step-00000004" / "manifest.json").read_bytes())
    (tmp_path / "step-00000004" / "manifest.json").write_text("[" * 100_000)
    outside = {"step": 3, "files": {"../step-00000002/a": {"bytes": 1000, "sha256": "x"}}}
    (tmp_path / "step-00000003" / "manifest.json").write_text(json.dumps(outside))
    (tmp_path / "step-99999999").write_text("a file")
    (tmp_path / "step-x").mkdir()
    assert checkpoint.latest_whole(tmp_path) == tmp_path / "step-00000002"
    assert checkpoint.latest_whole(tmp_path, at_most=1) == tmp_path / "step-00000001"
    assert checkpoint.latest_whole(tmp_path, at_most=0) is None


def test_only_the_newest_are_kept_and_later_history_is_left_alone(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 900):
        checkpoint.save(tmp_path, step, {"a": b"1"}, keep=3)
    assert names(tmp_path) == ["step-00000030", "step-00000040", "step-00000900"]
    (tmp_path / "step-00000040" / "manifest.json").unlink()
    # An attempt that went back to step 30: what it writes is kept, although 900 is newer, and 40, torn, pushes no whole one out.
    for step in (41, 42):
        checkpoint.save(tmp_path, step, {"a": b"2"}, keep=2)
    assert [name for name in names(tmp_path) if checkpoint.is_whole(tmp_path / name)] == [
        "step-00000041", "step-00000042", "step-00000900",
    ]  # fmt: skip
    checkpoint.save(tmp_path, 900, {"a": b"3"}, keep=2)
    assert (tmp_path / "step-00000900" / "a").read_bytes() == b"3" and checkpoint.is_whole(tmp_path / "step-00000900")


def test_a_writer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"a": b"1"})

    def fails(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, 2, {"a": b"1", "b": fails})
    for wrong in ("manifest.json", "", ".hidden", "a/b", "..", "a\0"):
        with pytest.raises(ValueError, match="plain name"):
            checkpoint.save(tmp_path, 2, {wrong: b"1"})
    with pytest.raises(ValueError, match="step"):
        checkpoint.save(tmp_path, -1, {"a": b""})
    assert names(tmp_path) == ["step-00000001"]


def test_leftovers_of_killed_writers_are_swept_and_live_ones_are_not(tmp_path: Path) -> None:
    for name in (".tmp-1-step-00000005-77-ab", ".tmp-2-step-00000006-77-ab", ".tmp-2-step-00000007-77-ab", ".tmp-other"):
        (tmp_path / name).mkdir()
    an_hour_ago_s = time.time() - 2 * checkpoint.TEMPORARY_AGE_S
    os.utime(tmp_path / ".tmp-2-step-00000007-77-ab", (an_hour_ago_s, an_hour_ago_s))
    checkpoint.save(tmp_path, 8, {"a": b"1"}, attempt=2)
    assert names(tmp_path) == [".tmp-2-step-00000006-77-ab", ".tmp-other", "step-00000008"]


def test_a_writer_killed_at_any_moment_leaves_the_last_whole_one(tmp_path: Path) -> None:
    """A real writer, killed 25 times; each starts where the newest whole one says, and what it reported saved is never lost."""
    script = """
import sys
from keepstep import checkpoint
folder = sys.argv[1]
found = checkpoint.latest_whole(folder)
step = checkpoint.step_of(found) + 1 if found else 0
body = bytes(range(256)) * 2000
while True:
    checkpoint.save(folder, step, {"a": body, "b": lambda f: [f.write(body[:1000]) for _ in range(50)], "step": str(step).encode()}, keep=2)
    print(step, flush=True)
    step += 1
"""
    chance = random.Random(5)
    reported = -1
    for _ in range(25):
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", script, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(HOOK)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            reported = int(process.stdout.readline())
            time.sleep(chance.random() * 0.04)
        finally:
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate()
        reported = max([reported, *map(int, (line for line in rest.split("\n")[:-1] if line))])
        found = checkpoint.latest_whole(tmp_path)
        assert found is not None
        step = checkpoint.step_of(found)
        assert step in (reported, reported + 1), "what was reported saved is there, and nothing half is taken for whole"
        assert (found / "step").read_bytes() == str(step).encode()
        assert all(checkpoint.is_whole(path) for path in checkpoint.steps_in(tmp_path))
    assert reported >= 24


def test_objects_go_into_files_and_come_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import keepstep

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = keepstep.save(4, {"note.txt": b"hello"}, folder=tmp_path, model=model, optimizer=optimizer, extra={"lr": 0.5})
    assert path is not None and names(path) == ["extra.pt", "manifest.json", "model.pt", "note.txt", "optimizer.pt"]
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.3)
    seen: list[Path] = []
    assert keepstep.restore(other, other_optimizer, folder=tmp_path, extra=seen.append) == 5
    assert (
        torch.equal(other.weight, model.weight) and other_optimizer.param_groups[0]["lr"] == 0.1 and seen == [path / "extra.pt"]
    )
    with pytest.raises(RuntimeError, match="size mismatch"):  # beginning at step 0 instead would throw the run away
        keepstep.restore(torch.nn.Linear(4, 2), folder=tmp_path)


def test_what_keepstep_says_is_restored_even_if_it_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keepstep

    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": b"1"})
    monkeypatch.setenv("KEEPSTEP_CHECKPOINTS", str(tmp_path))
    assert keepstep.checkpoint_to_restore() == tmp_path / "step-00000002"
    monkeypatch.setenv("KEEPSTEP_RESTORE", str(tmp_path / "step-00000001"))
    assert keepstep.checkpoint_to_restore() == tmp_path / "step-00000001" and keepstep.restore() == 2
    monkeypatch.setenv("KEEPSTEP_RESTORE", "")
    assert keepstep.checkpoint_to_restore() is None and keepstep.restore() == 0
    monkeypatch.setenv("RANK", "1")
    assert keepstep.save(3, {"a": b"1"}) is None and names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_can_not_be_written_is_told_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import keepstep

    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").write_text("in the way")
    assert keepstep.save(3, {"a": b"1"}, folder=tmp_path / "file") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no checkpoint of step 3" in said
