"""`keepstep grouptest`: plans as tables and JSON, answers and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app


def run(*words: str, text: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["grouptest", *words], input=text)
    return done.exit_code, str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output


def planned(folder: Path, *words: str) -> Path:
    code, out = run("plan", *words, "--json")
    assert code == 0, out
    (folder / "plan.json").write_text(out)
    return folder / "plan.json"


def located(folder: Path, results: Any) -> tuple[int, dict[str, Any]]:
    (folder / "results.json").write_text(json.dumps(results))
    code, out = run("locate", str(folder / "plan.json"), str(folder / "results.json"), "--json")
    return code, json.loads(out)


def test_machine_13_of_24_by_its_two_groups(tmp_path: Path) -> None:
    made = json.loads(planned(tmp_path, "--machines", "24", "--pp", "4", "--dp", "6").read_text())
    assert (made["m"], made["n"], made["rounds"], made["suspects_max"]) == (4, 6, 2, 1)
    assert made["groups"]["horizontal"][3] == [12, 13, 14, 15] and made["groups"]["vertical"][1] == [1, 7, 13, 19]
    code, found = located(tmp_path, {"horizontal": [3], "vertical": [1]})
    assert (code, found["outcome"], found["suspects"]) == (1, "located", [13])
    # the same, as an outcome's replays
    replays = [{"phase": phase, "group": g, "failed": (phase, g) in (("horizontal", 3), ("vertical", 1))} for phase in made["groups"] for g in range(6)]  # fmt: skip
    assert located(tmp_path, {"replays": replays})[1] == found
    assert located(tmp_path, {"horizontal": [], "vertical": []}) == (
        0, {"outcome": "nothing_failed", "suspects": [], "certain": [], "untested": [],
            "because": "each machine passed: the fault did not reproduce in so short a replay, or is gone"},
    )  # fmt: skip
    code, found = located(tmp_path, {"horizontal": [0], "vertical": [4]})
    assert (code, found["outcome"], found["suspects"]) == (1, "phases_disagree", [])
    code, found = located(tmp_path, {"horizontal": [3], "could_not_run": {"vertical": [1]}})
    assert (code, found["outcome"], found["suspects"]) == (1, "located_once", [13])
    # after the first round only: nothing is known of the second, so nobody is cleared by it
    code, found = located(tmp_path, {"horizontal": [3]})
    assert (code, found["outcome"], found["suspects"], found["certain"]) == (1, "one_of_several", [12, 13, 14, 15], [])


def test_an_outcome_of_the_same_machines_is_taken_and_one_of_others_is_not(tmp_path: Path) -> None:
    planned(tmp_path, "--machines", "gpu-[0-3]", "--pp", "1", "--dp", "4")
    replays = [
        {"phase": p, "group": g, "nodes": [f"gpu-{g}"], "failed": g == 2} for p in ("horizontal", "vertical") for g in range(4)
    ]
    assert located(tmp_path, {"replays": replays})[1]["suspects"] == ["gpu-2"]
    replays[6]["nodes"] = ["gpu-9"]
    (tmp_path / "results.json").write_text(json.dumps(replays))
    code, out = run("locate", str(tmp_path / "plan.json"), str(tmp_path / "results.json"))
    assert code != 0 and "vertical group 2 is of other machines than the plan's" in out


def test_machines_by_name_drawn_with_what_sits_out(tmp_path: Path) -> None:
    code, out = run("plan", "--machines", "gpu-[01-07]", "--pp", "1", "--dp", "7")
    assert code == 0
    assert "gpu-03/1" in out and "in no row: gpu-07/2" in out and "gpu-01/-" in out
    planned(tmp_path, "--machines", "gpu-[01-07]", "--pp", "1", "--dp", "7")
    assert located(tmp_path, {"horizontal": [], "vertical": [2]})[1]["suspects"] == ["gpu-07"]
    code, out = run("locate", str(tmp_path / "plan.json"), "-", text='{"horizontal": [0, 1], "vertical": [0, 1]}')
    assert code == 1 and "several_faulty: " in out and "certain: " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machines", "3", "--pp", "2", "--dp", "1"), "3 machines make no two groups"),
        (("--machines", "0", "--pp", "2", "--dp", "1"), "give 1 to"),
        (("--machines", "9999999999999", "--pp", "2", "--dp", "1"), "give 1 to"),
        (("--machines", "-5", "--pp", "1", "--dp", "1"), "give 1 to"),
        (("--machines", "1.5", "--pp", "1", "--dp", "1"), "give 1 to"),
        (("--machines", "", "--pp", "1", "--dp", "1"), "give 1 to"),
        (("--machines", "a[1-", "--pp", "2", "--dp", "1"), "brackets"),
        (("--machines", "a,b,a,c", "--pp", "1", "--dp", "4"), "named twice: a"),
        (("--machines", "24", "--pp", "4", "--dp", "6", "--k", "9"), "k goes to 3"),
    ],
)
def test_what_can_not_be_planned_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    code, out = run("plan", *words)
    assert code != 0 and said in out and "\n" not in out.strip(), out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "is no JSON"),
        ("[1]", "not {"),
        ("{}", "give {"),
        ('{"horizontal": 3}', "list of numbers"),
        ('{"horizontal": [true]}', "no group's number"),
        ('{"horizontal": [6]}', "there is no horizontal group 6, the plan has 0 to 5"),
        ('{"horizontal": [1], "else": 1}', "give {"),
        ('[{"phase": "horizontal", "group": 1, "failed": "yes"}]', "not {"),
        ('{"horizontal": [1], "could_not_run": [1]}', "could_not_run"),
        (
            '{"horizontal": [1], "could_not_run": {"horizontal": [0, 1]}}',
            "horizontal group 1 can't both have failed and not have run",
        ),
        (
            '[{"phase": "vertical", "group": 1, "failed": true}, {"phase": "vertical", "group": 1, "failed": false}]',
            "vertical group 1 is there twice",
        ),
    ],
)
def test_results_that_are_none_are_refused(tmp_path: Path, text: str, said: str) -> None:
    made = planned(tmp_path, "--machines", "24", "--pp", "4", "--dp", "6")
    code, out = run("locate", str(made), "-", text=text)
    assert code != 0 and said in out, out


@pytest.mark.parametrize("text", ["[]", '{"groups": {"horizontal": [[1]]}}', '{"groups": {"horizontal": [[{}]], "vertical": []}}', '{"groups": {"horizontal": [[1], [1]], "vertical": [[1]]}}', '{"groups": {"horizontal": [], "vertical": []}}', '{"groups": {"horizontal": [[]], "vertical": [[1]]}}'])  # fmt: skip
def test_plans_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan").write_text(text)
    code, out = run("locate", str(tmp_path / "plan"), "-", text='{"horizontal": []}')
    assert code != 0 and "the plan" in out, out


def test_exit_codes_of_the_process(tmp_path: Path) -> None:
    for words, code, said in (
        (["plan", "--machines", "24", "--pp", "4", "--dp", "6"], 0, ""),
        (["plan", "--machines", "2", "--pp", "4", "--dp", "6"], 2, "keepstep: TP 1 and PP 4"),
        (["locate", str(tmp_path / "none"), "-"], 2, "can't be read (No such file"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "infra.cli", "grouptest", *words], capture_output=True, text=True, input="", check=False
        )
        assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done
