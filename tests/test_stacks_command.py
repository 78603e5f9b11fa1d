"""`keepstep stacks aggregate`: files of ranks, whole and damaged, and what is printed of them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from infra.cli.common import Refused
from processors.parallel_groups import Layout
from tests.hang_cases import NORM, figure_7
from tests.hang_simulation import dumps

RECORDED = Path(__file__).parents[2] / "shared" / "cases" / "flight-recorder"


def py_spy_json(stack: str, pid: int = 100) -> list[dict[str, Any]]:
    """As `py-spy dump --json` prints a process with one thread."""
    frames = []
    for frame in reversed(stack.split(";")):
        name, _, where = frame.rstrip(")").partition(" (")
        file, _, line = where.rpartition(":")
        frames.append(
            {
                "name": name,
                "filename": f"/opt/{file}",
                "module": None,
                "short_filename": file,
                "line": int(line),
                "locals": None,
            }
        )
    thread = {"pid": pid, "thread_id": 140_000_000_000 + pid, "thread_name": "MainThread", "os_thread_id": pid, "active": False}
    return [{**thread, "owns_gil": False, "frames": frames, "process_info": None}]


def written(folder: Path, stacks: dict[int, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, stack in stacks.items():
        (folder / f"rank_{rank}.json").write_text(json.dumps(py_spy_json(stack, 100 + rank)))
    return folder


def aggregated(*arguments: object, code: int = 1) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["stacks", "aggregate", *map(str, arguments), "--json"])
    assert done.exit_code == code, (done.output, done.exception)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_the_papers_example_from_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "round", {rank: figure_7(rank) for rank in range(32)})
    found = aggregated(folder, "--tp", 2, "--pp", 4, "--dp", 4, "--ranks-per-node", 2)
    assert found["outliers"] == list(range(24, 32)) and found["groups_seen"] == 4
    assert found["group"].startswith("pp ") and found["group_machines"] == [12, 13, 14, 15]
    assert (found["group_size"], found["whole_job"], found["unread"]) == (4, False, [])


@pytest.mark.parametrize(
    "text",
    [
        "tp: 2\npp: 4\ndp: 4\nranks_per_node: 2\n",
        '{"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel": 4, "gpus_per_node": 2}',
        '{"job": {"tp": 2, "pp": 4, "dp": 4, "ranks_per_node": 2, "rank_order": "tp-cp-pp-dp"}}',
        '{"parallelism": {"tp": 2, "pp": 4}, "nodes": ["a","b","c","d","e","f","g","h","i","j","k","l","m","n","o","p"]}',
    ],
)
def test_the_layout_may_come_from_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    folder = written(tmp_path / "round", {rank: figure_7(rank) for rank in range(32)})
    assert aggregated(folder, "--topology", tmp_path / "job.yaml")["group_machines"] == [12, 13, 14, 15]


def test_healthy_ranks_are_said_to_be(tmp_path: Path) -> None:
    assert aggregated(written(tmp_path / "r", dict.fromkeys(range(4), NORM)), code=0)["outliers"] == []
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(tmp_path / "r")])
    assert done.exit_code == 0 and "no outliers" in done.output and "4 ranks: all_reduce < " in done.output


def test_a_bad_file_is_one_sentence_and_a_rank_without_a_stack(tmp_path: Path) -> None:
    folder = written(tmp_path / "r", dict.fromkeys(range(9), NORM))
    (folder / "rank_4.json").write_text('[{"pid": 1, "frames"')
    (folder / "rank_6.json").write_text("")
    (folder / "notes.json").write_text("{}")
    found = aggregated(folder, "--world-size", 10)
    assert found["outliers"] == found["silent"] == [4, 6, 9]
    assert [(u["file"], u["rank"]) for u in found["unread"]] == [("notes.json", -1), ("rank_4.json", 4), ("rank_6.json", 6)]
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(folder)])
    assert "rank_6.json: it is empty; rank 6 counts as one without a stack" in done.output


def test_what_is_no_file_of_a_rank_is_said_and_is_evidence(tmp_path: Path) -> None:
    written(tmp_path, dict.fromkeys(range(16), NORM))
    for rank in range(3, 8):
        (tmp_path / f"rank_{rank}.json").unlink()
    (tmp_path / "rank_3.json").mkdir()
    (tmp_path / "rank_4.json").symlink_to("gone")
    (tmp_path / "rank_5.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "rank_6.json")
    (tmp_path / "rank_-7.json").write_text("[]")
    (tmp_path / "rank_٩.json").write_text("[]")
    found = aggregated(tmp_path)
    assert found["outliers"] == found["silent"] == [3, 4, 5, 6, 7]
    unread = {entry["file"]: (entry["rank"], entry["why"]) for entry in found["unread"]}
    assert {name: rank for name, (rank, _) in unread.items()} == {
        "rank_3.json": 3, "rank_4.json": 4, "rank_5.json": 5, "rank_6.json": 6, "rank_-7.json": -1, "rank_٩.json": -1,
    }  # fmt: skip
    assert "it is no file" in unread["rank_6.json"][1] and "a link to nothing" in unread["rank_4.json"][1]
    assert "rank 4: no stack: rank_4.json: it is a link to nothing" in found["stuck_at"]


def test_names_of_any_bytes_and_half_characters_come_out_as_text(tmp_path: Path) -> None:
    written(tmp_path, dict.fromkeys(range(4), NORM))
    (tmp_path / os.fsdecode(b"rank_1\xff.json")).write_text("")
    (tmp_path / "rank_2.json").write_text('[{"thread_name": "MainThread", "frames": [{"name": "\\ud800x"}]}]')
    told = {"entries": [{"profiling_name": "nccl:\ud800", "process_group": ["\ud800", "\ud800"], "collective_seq_id": 1}]}
    (tmp_path / "nccl_trace_rank_3").write_text(json.dumps(told))
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(tmp_path), "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    found = json.loads(done.stdout_bytes.decode("utf-8"))
    assert found["outliers"] == [2] and found["stuck_at"] == ["rank 2: ?x"]
    assert [entry["file"] for entry in found["unread"]] == ["rank_1\ufffd.json"]


@pytest.mark.parametrize("second", ["rank_01.json", "rank_1.json.gz", "rank_1 (copy).json", "old_rank_1.json"])
def test_the_same_of_a_rank_twice_is_refused(tmp_path: Path, second: str) -> None:
    """Of two runs, say: the rank would be made of both."""
    written(tmp_path, dict.fromkeys(range(4), NORM))
    raw = (tmp_path / "rank_1.json").read_bytes()
    (tmp_path / second).write_bytes(gzip.compress(raw) if second.endswith("gz") else raw)
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(tmp_path)])
    assert "are both of rank 1: leave one of them" in str(done.exception)


def test_a_file_of_all_ranks_among_files_of_one_is_said_to_be(tmp_path: Path) -> None:
    whole = json.dumps({"dumps": {str(rank): told for rank, told in dumps(Layout(2, 2, 2), {5: ("stopped", 9)})}})
    (tmp_path / "case_1st.json").write_text(whole)
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(tmp_path)])
    assert isinstance(done.exception, Refused) and "give it alone if it holds all ranks' `dumps`" in str(done.exception)
    assert aggregated(tmp_path / "case_1st.json")["outliers"] == [5]
    written(tmp_path, dict.fromkeys(range(4), NORM))
    (tmp_path / "rank_3.json").write_text(whole)
    assert any("give the file itself" in entry["why"] for entry in aggregated(tmp_path)["unread"])


def test_where_nobody_can_be_told_from_the_others_that_is_not_fine(tmp_path: Path) -> None:
    written(tmp_path, dict.fromkeys((0, 1, 2), NORM))
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(tmp_path), "--world-size", "8"])
    assert done.exit_code == 1 and "nobody can be told from the others" in done.output and "too many" in done.output


def test_recordings_of_any_form_are_read(tmp_path: Path) -> None:
    forms = [
        lambda told: json.dumps(told).encode(),
        pickle.dumps,
        lambda told: gzip.compress(json.dumps(told).encode()),
    ]
    for rank, told in dumps(Layout(2, 2, 2), {5: ("stopped", 9)}):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(forms[rank % 3](told))
    assert aggregated(tmp_path)["outliers"] == [5]


def test_a_dead_rank_without_a_file_is_known_by_its_peers_groups(tmp_path: Path) -> None:
    for rank, told in dumps(Layout(2, 2, 2), {7: ("killed", 9)}):
        (tmp_path / f"_dump_{rank}").write_text(json.dumps(told))
    found = aggregated(tmp_path)
    assert (found["outliers"], found["silent"], found["ranks"]) == ([7], [7], 8)


def test_a_stack_and_a_recording_of_a_rank_are_one_rank(tmp_path: Path) -> None:
    for rank, told in dumps(Layout(2, 2, 2), {5: ("stopped", 9)}):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(told))
    written(tmp_path, dict.fromkeys(range(8), NORM))
    found = aggregated(tmp_path)
    assert found["outliers"] == [5] and found["groups_seen"] == 1 and "never entered" in found["stuck_at"][0]


@pytest.mark.parametrize("name", ["lock_gil_1st", "gpu_error_1st"])
def test_the_recorded_cases_are_read_as_they_are(name: str) -> None:
    file = RECORDED / f"{name}.json.gz"
    if not file.exists():
        pytest.skip("the recorded cases are not here")
    found = aggregated(file)
    assert found["outliers"] == json.loads(gzip.decompress(file.read_bytes()))["faulty_ranks"]
    assert set(found["outliers"]) <= set(found["group_ranks"]) and len(found["group_ranks"]) < 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", "3"], "4 ranks are not divided by tp 3"),
        (["--tp", "2", "--dp", "4"], "make 8 ranks, not 4"),
        (["--world-size", "2"], "there is a file of rank 3"),
        (["--ranks-per-node", "3"], "do not fill machines of 3"),
        (["--topology", "nowhere.yaml"], "there is no nowhere.yaml"),
        (["--tp", "1000000", "--pp", "1000000", "--dp", "9"], "ranks are more than 1048576"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path, options: list[str], said: str) -> None:
    folder = written(tmp_path / "r", dict.fromkeys(range(4), NORM))
    if "--dp" in options and "--pp" not in options:
        options += ["--world-size", "4"]
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(folder), *options])
    assert isinstance(done.exception, Refused) and said in str(done.exception) and "\n" not in str(done.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "is no table"),
        ("tp: 0", "tp is '0', not a number from 1 to"),
        ("tensor_parallel_size: -2", "tensor_parallel_size is '-2', not a number"),
        ("tp: true", "not a number"),
        ("tp: 2.5", "not a number"),
        ("pp: 99999999999999999999", "not a number"),
        ("tp: 3\ndp: 1", "there is a file of rank 3"),
        ("tp: 2\nnodes: [a, b, c]", "4 ranks do not fill 3 nodes alike"),
        ("rank_order: dp-tp-pp\ntp: 2", "neither tp-pp-dp nor tp-dp-pp"),
        ("nodes: {gpu-1: {rack: a}}", "says none of tp, pp, dp"),
        ("!!python/object/apply:os.system [a]", "neither YAML nor JSON"),
        ("[" * 20_000, "neither YAML nor JSON"),
        ("\xff", "neither YAML nor JSON"),
    ],
)
def test_a_topology_that_is_none_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    folder = written(tmp_path / "r", dict.fromkeys(range(4), NORM))
    (tmp_path / "job.yaml").write_bytes(text.encode("latin-1"))
    done = CliRunner().invoke(app, ["stacks", "aggregate", str(folder), "--topology", str(tmp_path / "job.yaml")])
    assert isinstance(done.exception, Refused) and said in str(done.exception), done.exception
    assert "\n" not in str(done.exception)


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "rank_N.json"), (tmp_path / "none", "there is no")):
        done = CliRunner().invoke(app, ["stacks", "aggregate", str(path)])
        assert isinstance(done.exception, Refused) and said in str(done.exception)


RANK = """
import os, time
def train():
    other() if os.environ["RANK"] == "3" else usual()
def usual():
    print("here", flush=True)
    while True: time.sleep(0.2)
def other():
    print("here", flush=True)
    while True: time.sleep(0.2)
train()
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[str]:
    """Four ranks of another launcher's; rank 3 is elsewhere than the others."""
    job = f"capture-{os.getpid()}-{tmp_path.name}"
    own = {"WORLD_SIZE": "5", "TORCHELASTIC_RUN_ID": job}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, env=os.environ | own | {"RANK": str(rank)}
        )
        for rank in range(4)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
        yield job
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_a_running_jobs_stacks_are_taken_shown_and_kept(launched: str, tmp_path: Path) -> None:
    options = ["stacks", "capture", "--job", launched, "--home", str(tmp_path / "home"), "--out", str(tmp_path / "kept")]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "4 of the job's 5 ranks run here" in done.output and "outliers: ranks 3\n" in done.output
    assert "rank 3: other (<string>) < train (<string>:" in done.output
    assert aggregated(tmp_path / "kept")["outliers"] == [3]


def test_a_job_that_does_not_run_here_is_refused(launched: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stacks", "capture", "--job", "other", "--home", str(tmp_path)])
    assert isinstance(done.exception, Refused) and launched in str(done.exception)
