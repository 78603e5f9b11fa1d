"""`keepstep classify`: files of every format and in every state, what is shown of them, and labelled cases. The last tests hold the
catalogue against cases that others wrote, where they lie beside the checkout."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from infra.cli.app import app
from infra.cli.classify_cases import Scores, answer, read_cases, same_device, score
from infra.cli.classify_count import Tally
from infra.cli.classify_read import CHUNK_BYTES, Reading, text_of
from infra.cli.common import Refused
from producers.stamps import stamp_of
from tests.telemetry import XID_13, XID_45, XID_79, catalogue

CATALOGUE = catalogue()
SHARED = Path(__file__).resolve().parents[2] / "shared" / "cases" / "logs"
COMMAND = Path(sys.executable).parent / "keepstep"
NOISE = "usb 1-3: New USB device found, idVendor=0424"


def tally_of(path: Path, *, unknown: bool = False) -> Tally:
    tally = Tally(CATALOGUE)
    tally.read(Reading(CATALOGUE, str(path)), list_unknown=unknown)
    return tally


def written(tmp_path: Path, data: str | bytes, name: str = "log") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "COLUMNS": "180"}
    return subprocess.run(
        [COMMAND, "classify", *arguments], input=stdin, capture_output=True, timeout=60, check=False, env=environment
    )


def invoke(*arguments: str) -> Any:
    """The command's JSON, in this process."""
    result = CliRunner().invoke(app, ["classify", *arguments, "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


# --- the formats of kernel logs, and training logs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "first"),
    [
        (f"[ 1843.308145] {XID_79}", "1843.308145 s"),
        (f"[Tue Mar  3 12:00:01 2026] {XID_79}", "Tue Mar  3 12:00:01 2026"),
        (f"[Di Mär 3 12:00:01 2026] {XID_79}", "Di Mär 3 12:00:01 2026"),
        (f"2026-03-03T12:00:01,123456+00:00 {XID_79}", "2026-03-03T12:00:01,123456+00:00"),
        (f"kern  :warn  : 2026-03-03T12:00:01,123456+00:00 {XID_79}", "2026-03-03T12:00:01,123456+00:00"),
        (f"Mar  3 12:00:01 n1 kernel: [ 1843.308145] {XID_79}", "Mar  3 12:00:01"),
        (f"2026-03-03T12:00:01.5+0100 n1 kernel: {XID_79}", "2026-03-03T12:00:01.5+0100"),
        (f"<6> 1 2026-03-03T12:00:01.5+01:00 N1 kernel - - - [6581.37829] {XID_79}", "2026-03-03T12:00:01.5+01:00"),
        (f"4,3973,227986636,-;{XID_79}", "227.986636 s"),
        (f"<4>[    8.000001] {XID_79}", "8.000001 s"),
        (f"[  323.830017][ T3329] {XID_79}", "323.830017 s"),
        (f"[gpu-health] [WARN] GPU-1: XID: {XID_79}", ""),
    ],
)  # fmt: skip
def test_formats(tmp_path: Path, line: str, first: str) -> None:
    tally = tally_of(written(tmp_path, f"{NOISE}\n{line}\n{NOISE}\n"))
    (kind,) = tally.findings()
    assert (kind.finding.row.id, kind.finding.device, kind.count) == ("xid-79", "0000:03:00.0", 1)
    assert kind.first == first
    assert (tally.lines, tally.unknown_lines) == (3, 2)


def test_what_is_the_same_is_counted_with_its_first_and_last_time(tmp_path: Path) -> None:
    lines = [f"Mar  3 12:00:0{i} n1 kernel: {XID_79 if i % 2 else XID_13}" for i in range(8)]
    tally = tally_of(written(tmp_path, "\n".join(lines)))
    seen = [(k.finding.xid, k.count, k.first, k.last) for k in tally.findings()]
    assert seen == [(79, 4, "Mar  3 12:00:01", "Mar  3 12:00:07"), (13, 4, "Mar  3 12:00:00", "Mar  3 12:00:06")]


def test_a_device_is_named_by_a_line_before(tmp_path: Path) -> None:
    text = "[1.0] NVRM: The NVIDIA GPU 0000:b3:00.0\n NVRM: (PCI ID: 10de:26b5) installed in this system has\n NVRM: fallen off the bus and\n"
    (kind,) = tally_of(written(tmp_path, text)).findings()
    assert kind.finding.device == "0000:b3:00.0"
    far = text.split("\n")[0] + "\n" + f"{NOISE}\n" * 40 + " NVRM: fallen off the bus and is not responding to commands.\n"
    (kind,) = tally_of(written(tmp_path, far)).findings()
    assert kind.finding.device == ""


def test_an_echo_says_what_it_follows(tmp_path: Path) -> None:
    kinds = tally_of(written(tmp_path, f"{XID_79}\n{XID_45}\n{XID_45.replace('03:00', '04:00')}")).findings()
    explained = {(k.finding.xid, k.finding.device): k.explained_by for k in kinds}
    assert explained[79, "0000:03:00.0"] == ()
    assert explained[45, "0000:03:00.0"] == ("Xid 79",)
    assert explained[45, "0000:04:00.0"] == (), "another GPU's loss explains nothing here"


def test_a_loss_that_rises_is_found_across_lines(tmp_path: Path) -> None:
    step = " iteration {n}/ 90000 | lm loss: {loss:E} | number of nan iterations: 0 |\n"
    steady = "".join(step.format(n=5000 + i, loss=2.5) for i in range(20))
    assert tally_of(written(tmp_path, steady)).findings() == []
    (kind,) = tally_of(written(tmp_path, steady + step.format(n=5020, loss=7.1) + steady)).findings()
    assert (kind.finding.row.class_, kind.count) == ("nan_loss", 1)


# --- files in every state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, bz2.compress, lzma.compress, zstandard.ZstdCompressor().compress],
    ids=["gz", "bz2", "xz", "zst"],
)
def test_packed_files_are_read(tmp_path: Path, pack: Any) -> None:
    tally = tally_of(written(tmp_path, pack(f"{NOISE}\n{XID_79}\n".encode())))
    assert [k.finding.xid for k in tally.findings()] == [79] and tally.lines == 2 and not tally.problems


def test_a_packed_file_cut_short_gives_what_it_has(tmp_path: Path) -> None:
    text = "".join(f"[{i}.000001] {XID_79} {i * 7919}\n" for i in range(20_000))
    whole = gzip.compress(text.encode())
    tally = tally_of(written(tmp_path, whole[: len(whole) // 2], "x.gz"))
    (kind,) = tally.findings()
    assert 1000 < kind.count < 20_000
    assert tally.problems and "ends early" in tally.problems[0]


@pytest.mark.parametrize("where", [0, 5000, 900_000])
def test_a_line_of_a_megabyte(tmp_path: Path, where: int) -> None:
    line = b"x" * where + b" " + XID_79.encode() + b" " + b"y" * (1_000_000 - where)
    tally = tally_of(written(tmp_path, line + b"\n" + XID_13.encode() + b"\n"))
    assert [k.finding.xid for k in tally.findings()] == [79, 13]
    assert tally.lines == 2
    assert all(len(k.example) <= 240 for k in tally.kinds.values())


def test_a_line_without_an_end(tmp_path: Path) -> None:
    data = b"z" * (CHUNK_BYTES * 3) + XID_79.encode() + b"z" * (CHUNK_BYTES * 2)
    tally = tally_of(written(tmp_path, data))
    assert [k.finding.xid for k in tally.findings()] == [79]
    assert tally.lines == 1


@pytest.mark.parametrize("offset", range(-90, 60, 10))
def test_a_line_on_the_edge_of_a_chunk_is_whole(tmp_path: Path, offset: int) -> None:
    filler = (NOISE + "\n").encode()
    before = filler * (CHUNK_BYTES // len(filler) - 2)
    before += b"u" * (CHUNK_BYTES + offset - len(before) - 1) + b"\n"
    tally = tally_of(written(tmp_path, before + XID_79.encode() + b"\n" + filler))
    assert [(k.finding.xid, k.finding.device, k.count) for k in tally.findings()] == [(79, "0000:03:00.0", 1)]
    assert tally.lines == before.count(b"\n") + 2


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00\x80" * 100 + b"\n" + XID_79.encode(),
        b"\x1b[31m\x1b]0;owned\x07" + XID_79.encode() + b"\x1b[0m",
        "ünïcödé 漢字 \u202e ".encode() + XID_79.encode(),
        XID_79.encode() + b"\r\n\r\n",
        b"10%|#\r20%|##\r" + XID_79.encode() + b"\r30%|###",
        b"\x00" * 5000 + b"\n" + XID_79.encode(),
        XID_79.encode().replace(b"NVRM: ", b"NV\x1b[1mRM: ".replace(b"\x1b[1m", b"")),
    ],
)
def test_bytes_of_any_kind(tmp_path: Path, data: bytes) -> None:
    (kind,) = tally_of(written(tmp_path, data)).findings()
    assert kind.finding.xid == 79
    assert kind.example.isprintable()


def test_colours_within_a_message_do_not_hide_it() -> None:
    text = text_of(b"\x1b[1;31mRuntimeError\x1b[0m: \x1b[33mCUDA error:\x1b[0m device-side assert triggered")
    assert text == "RuntimeError: CUDA error: device-side assert triggered"


def test_nothing_of_a_log_reaches_a_terminal_raw(tmp_path: Path) -> None:
    evil = f"\x1b]0;owned\x07\x9b31m{XID_79} \x1b[2J\u202e[bold red]x[/]\nthe \x1b[5mfrobnicator\x1b[0m\x07 failed\n"
    path = written(tmp_path, evil)
    for arguments in (("--unknown", "--all"), ("--json", "--unknown")):
        result = run(str(path), *arguments)
        assert result.returncode == 1
        for byte in (b"\x1b", b"\x07", "\x9b".encode(), "\u202e".encode()):
            assert byte not in result.stdout + result.stderr
    assert b"[bold red]" not in run(str(path)).stderr


def test_kinds_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.cli.classify_count.KINDS_MAX", 10)
    monkeypatch.setattr("infra.cli.classify_count.UNKNOWN_KINDS_MAX", 10)
    lines = [XID_79.replace("0000:03", f"0000:{i:02x}") for i in range(30)]
    words = [f"the {a}{b} failed" for a in "abcdef" for b in "ghijkl"]
    tally = tally_of(written(tmp_path, "\n".join(lines + words)), unknown=True)
    assert (len(tally.kinds), tally.uncounted) == (10, 20)
    assert (len(tally.unknown), tally.unknown_beyond) == (10, 26)


# --- the command -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        (f"{NOISE}\n", 0),
        (XID_79, 1),
        (XID_45, 0),  # noted, nothing is asked for
        ("ata7: SATA link down (SStatus 0 SControl 300)", 0),
        ("KeyError: 'labels'", 1),
    ],
)
def test_exit_codes(text: str, code: int) -> None:
    result = CliRunner().invoke(app, ["classify", "-"], input=text)
    assert result.exit_code == code, result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one or more log files"),
        (("/tmp",), "is a folder"),
        (("--cases", "/nowhere/x"), "/nowhere/x can't be read"),
        (("--cases", "/dev/null", "log"), "--cases stands alone"),
        (("--catalogue", "/nowhere/x", "-"), "/nowhere/x can't be read"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["classify", *arguments])
    assert isinstance(result.exception, Refused) and says in str(result.exception)


def test_wrong_use_is_2() -> None:
    result = run("/nowhere/x")
    assert result.returncode == 2 and b"/nowhere/x can't be read" in result.stderr and b"Traceback" not in result.stderr


def test_the_table_says_what_to_do_and_why(tmp_path: Path) -> None:
    result = run(str(written(tmp_path, f"[1.000001] {XID_79}\n[2.000001] {XID_13}\n")))
    text = result.stdout.decode()
    for part in (
        "evict",
        "NVIDIA: RESTART_BM",
        "gpu_lost",
        "Xid 79",
        "0000:03:00",
        "hardware",
        "over PCIe",
        "diagnose",
        "user_code",
    ):
        assert part in text, text
    assert "Xid 13: NVIDIA says RESTART_APP, keepstep diagnose: user code and bad hardware look alike" in text
    assert "2 lines; 2 in 2 findings; 0 of which nothing is known" in text


def test_json(tmp_path: Path) -> None:
    path = written(
        tmp_path, f"[1.000001] {XID_79}\n[2.000001] {XID_13}\n{NOISE}\nthe frobnicator 7 failed\nthe frobnicator 8 failed\n"
    )
    found = invoke(str(path), "--unknown")
    assert (found["lines"], found["harmless"], found["unknown"]) == (5, 1, 2)
    first, second = found["findings"]
    assert first | {"example": "", "source": "", "why": ""} == {
        "class": "gpu_lost", "symptom": "gpu_unavailable", "code": "Xid 79", "xid": 79, "name": "GPU_HAS_FALLEN_OFF_THE_BUS",
        "device": "0000:03:00", "count": 1, "first": "1.000001 s", "last": "1.000001 s", "fault": ["hardware"], "first_action": "evict",
        "nvidia_action": "RESTART_BM", "differs": None, "why": "", "explained_by": [], "confidence": "high", "row": "xid-79",
        "source": "", "example": "",
    }  # fmt: skip
    assert second["first_action"] == "diagnose" and second["differs"]
    unknown = found["unknown_lines"]
    assert [(u["count"], u["alarming"]) for u in unknown] == [(2, True)]


def test_several_files_are_told_together(tmp_path: Path) -> None:
    found = invoke(str(written(tmp_path, XID_79, "a")), str(written(tmp_path, XID_79, "b")))
    assert [f["count"] for f in found["findings"]] == [2] and found["lines"] == 2


def test_another_catalogue(tmp_path: Path) -> None:
    row = {
        "id": "frob", "all": ["frobnicator"], "symptom": "disk_fault", "confidence": "low", "fault": ["hardware"], "first_action": "evict",
        "source": "ours", "examples": ["the frobnicator"],
    }  # fmt: skip
    mine = written(tmp_path, json.dumps({"version": 1, "rows": [row]}), "mine.yaml")
    found = invoke(str(written(tmp_path, f"the frobnicator failed\n{NOISE}\n")), "--catalogue", str(mine))
    assert [f["row"] for f in found["findings"]] == ["frob"]
    bad = run("-", "--catalogue", str(written(tmp_path, "version: 2\nrows: []", "bad.yaml")))
    assert bad.returncode == 2 and b"is not valid" in bad.stderr


def test_help() -> None:
    text = re.sub(rb"\s+", b" ", run("--help").stdout)
    for part in (b"--json", b"--unknown", b"--cases", b"--all", b"standard input"):
        assert part in text


# --- labelled cases --------------------------------------------------------------------------------------------------------------


def case(id: str, text: str, **expect: Any) -> dict[str, Any]:
    return {
        "id": id,
        "text": text,
        **({"expect": {"class_also_ok": [], "also_ok": [], "device": None, **expect}} if expect else {}),
    }


CASES = [
    case("right", XID_79, **{"class": "gpu_lost"}, device="0000:03:00", first_action="evict"),
    case("fair", XID_45, **{"class": "benign"}, class_also_ok=["cuda_error"], first_action="diagnose", also_ok=["record"]),
    case("wrong", XID_79, **{"class": "nic_down"}, device="eth0", first_action="diagnose"),
    case("harmless", XID_79, **{"class": "benign"}, first_action="record"),
    case("bare", XID_13),
]


def test_cases_are_answered_and_scored(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(map(json.dumps, CASES)) + "\n\n")
    result = run("--cases", str(path), "--json")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0] == {"id": "right", "class": "gpu_lost", "xid": 79, "device": "0000:03:00", "first_action": "evict"}
    assert [line["id"] for line in lines[:-1]] == ["right", "fair", "wrong", "harmless", "bare"]
    scores = lines[-1]["scores"]
    assert (scores["cases"], scores["class"], scores["device"], scores["first_action"]) == (4, 0.5, 0.5, 0.5)
    assert (scores["precision"], scores["recall"], scores["harmless_evicted"]) == (0.5, 0.5, 1)
    assert scores["by_class"]["gpu_lost"] == {"cases": 1, "answers": 3, "precision": 0.3333, "recall": 1.0}
    shown = run("--cases", str(path)).stdout.decode()
    assert "wrong: class, device, first_action: got gpu_lost" in shown and "1 harmless read as evict" in shown


def test_bad_cases_are_told_in_a_sentence_each(tmp_path: Path) -> None:
    path = written(tmp_path, 'x\n[1]\n{"id": 7}\n{"text": 3}\n{"text": "a", "expect": []}\n' + json.dumps(CASES[0]) + "\n")
    result = run("--cases", str(path), "--json")
    assert result.returncode == 2
    assert b"line 1 of" in result.stderr and b"is not JSON" in result.stderr and b"line 3 of" in result.stderr
    assert json.loads(result.stdout.splitlines()[0])["id"] == "right", "the rest is answered"


def test_a_case_without_an_id_is_known_by_its_line(tmp_path: Path) -> None:
    assert [c["id"] for c in read_cases(written(tmp_path, '\n{"text": "x"}\n'), pytest.fail)] == ["2"]


@pytest.mark.parametrize(
    ("text", "got", "want", "same"),
    [
        ("x", None, None, True),
        ("x", "sda", None, False),
        ("x", None, "sda", False),
        ("PCI:0000:9b:00", "0000:9b:00", "0000:9b:00.0", True),
        ("(0001:00)", "0001:00", "0000:01:00", True),
        ("mlx5_core 0000:9c:00.0 ens1: Link down", "ens1", "0000:9c:00.0", True),
        ("port 0000:9c:00.0: error received: 0000:9d:00.0", "0000:9c:00.0", "0000:9d:00.0", False),
    ],
)
def test_devices_are_compared_as_they_are_written(text: str, got: str | None, want: str | None, same: bool) -> None:
    assert same_device(text, got, want) is same


def test_what_no_row_knows_is_unknown_if_it_alarms() -> None:
    assert answer(CATALOGUE, "a", "the frobnicator has failed").plain() == {
        "id": "a", "class": "unknown", "xid": None, "device": None, "first_action": "record",
    }  # fmt: skip
    assert answer(CATALOGUE, "a", "the frobnicator is here").class_ == "benign"


def test_stamps_are_looked_for_at_the_start_alone() -> None:
    assert stamp_of("x" * 200 + "2026-03-03 12:00:00") == ""
    assert stamp_of("[0000:03:00.0] x") == ""


# --- cases that others wrote -----------------------------------------------------------------------------------------------------


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip("the shared cases are not here")
    return path


@pytest.mark.parametrize("name", ["kernel.jsonl", "training.jsonl"])
def test_labelled_cases_of_the_field(name: str) -> None:
    scores: Scores
    _, scores = score(CATALOGUE, read_cases(shared(name), pytest.fail))
    plain = scores.plain()
    assert min(plain["class"], plain["device"], plain["first_action"]) >= 0.95, scores.disagreements
    assert plain["harmless_evicted"] == 0


def plausible(kind: str, text: str) -> str:
    """A line that a masked one or a pattern of one stands for."""
    if kind == "sxid":
        return f"nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): {text}, Non-fatal, Link 03 notice"
    if kind == "regex":
        text = re.sub(r"\(([^()|]*)\|[^()]*\)", r"\1", text.replace(r"\(", "\x01").replace(r"\)", "\x02"))
        for pattern, example in (
            (r"\d+", "12"),
            (r"\d", "1"),
            (r"\w*", "a0"),
            (r"\s*", " "),
            (".*", "x"),
            ("[0-9a-f]+", "0f"),
            ("[0-7]", "2"),
        ):
            text = text.replace(pattern, example)
        text = text.replace("\\", "").replace("\x01", "(").replace("\x02", ")")
    return text.replace("HEX", "0x7f001000").replace("ADDR", "0000:1a:00.0").replace("PID", "811")


def test_lines_of_healthy_machines_evict_nobody() -> None:
    for raw in shared("imbue_dmesg_whitelist.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(raw)
        line = plausible(one["kind"], one["text"])
        got = answer(CATALOGUE, "", line)
        assert got.first_action != "evict", line
        found = CATALOGUE.classify(line)
        assert found is None or found.row.confidence != "high", line


def test_crashes_of_kernels_are_found() -> None:
    """Reports whose first lines tell of the crash, by the titles that their authors gave; a few begin with something else."""
    found = missed = false = 0
    for raw in shared("syzkaller_kernel_reports.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(raw)
        got = answer(CATALOGUE, "", "\n".join(one["head"]))
        fault = got.class_ in ("kernel_fault", "cpu_overload", "task_hung", "host_mem_error")
        if one["title"] is None:
            false += fault
        elif fault:
            found += 1
        else:
            missed += 1
    assert found / (found + missed) >= 0.94, (found, missed)
    assert false <= 1


def test_unreadable_input_is_refused() -> None:
    with pytest.raises(Refused):
        list(Reading(CATALOGUE, "/nowhere/x").found())
