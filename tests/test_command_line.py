"""What the command line prints, of recordings and of text that comes from anywhere."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from events.ports import LEDGER, TELEMETRY_JOB, TELEMETRY_NODE, Record
from infra.cli import app as frame
from infra.cli import common, reading
from infra.cli.app import app
from infra.cli.common import Refused
from infra.cli.follow import told_restart
from infra.pipeline import default_policy_text
from infra.recording import LOSSES_SAID_MAX, StreamWriter, read_stream
from infra.supervise import Child
from processors.policy import BadPolicy, parse
from tests.golden.make import HERE
from tests.golden.make import read as golden


def recording(folder: Path, *, of_ledger: int = 1) -> Path:
    for stream, count in ((LEDGER, of_ledger), (TELEMETRY_NODE, 1), (TELEMETRY_JOB, 1)):
        with StreamWriter(folder, stream) as writer:
            for sequence in range(1, count + 1):
                writer.write(Record(stream, sequence, sequence, f"ledger.x.operator.k{sequence}", b"{}", {}))
    return folder


def refused_by(make: Callable[[], object]) -> Exception:
    try:
        make()
    except ValueError as error:
        return error
    raise AssertionError


def test_what_is_printed_is_data_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    text = "GPU 0000:ab:00.0 [/red] [bold] " + "x" * 500
    common.put(text)
    common.say(text)
    assert capsys.readouterr() == (text + "\n", text + "\n")


def test_a_query_may_answer_with_brackets_and_colons(tmp_path: Path) -> None:
    sql = """select '[/red] 0000:ab:00.0' as "[/y]" """
    done = CliRunner().invoke(app, ["census", str(recording(tmp_path)), "--sql", sql])
    assert done.exit_code == 0 and "[/red] 0000:ab:00.0" in done.output and "[/y]" in done.output


def test_the_policy_is_shown_as_it_is() -> None:
    assert CliRunner().invoke(app, ["policy", "show", "--default"]).output == default_policy_text()


def test_a_ledger_without_a_catalogue_is_replayed_and_its_signals_are_not_checked(tmp_path: Path) -> None:
    folder = recording(tmp_path)
    result = reading.replay_all(read_stream(folder, LEDGER), {TELEMETRY_NODE: read_stream(folder, TELEMETRY_NODE)})
    assert result["signals"] == {TELEMETRY_NODE: {"checked": False, "why": "the ledger holds no catalogue to judge them by"}}


def test_nothing_is_counted_of_what_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(b"no recording")
    for path in (recording(tmp_path / "empty", of_ledger=0), tmp_path / "cut"):
        done = CliRunner().invoke(app, ["census", str(path)])
        assert isinstance(done.exception, Refused) and "the ledger is empty" in str(done.exception)


def test_many_lost_lines_are_counted(tmp_path: Path) -> None:
    file = recording(tmp_path, of_ledger=500) / f"{LEDGER}.jsonl.zst"
    file.write_bytes(file.read_bytes() * 2)
    said: list[str] = []
    assert len(list(read_stream(tmp_path, LEDGER, said.append))) == 500
    assert len(said) == LOSSES_SAID_MAX + 1 and said[-1].endswith(f"{500 - LOSSES_SAID_MAX} more lines are left out")


@pytest.mark.parametrize("text", ["mode: observe\nmode: auto\n", "rules:\n  evict_named: approve\n  evict_named: auto\n"])
def test_a_policy_that_says_a_thing_twice_is_refused(text: str) -> None:
    with pytest.raises(BadPolicy, match=r"line [23].*stands twice"):
        parse(text)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "keepstep: /x: Permission denied; it can't go on like this"),
        (OSError(errno.ENOSPC, "No space left on device"), "keepstep: No space left on device; it can't go on like this"),
        (
            OSError("what"),
            "keepstep met a fault of its own: OSError('what'); the trace is in no file (No space left on device)",
        ),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(**_: object) -> None:
        raise error

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(frame, "app", refuses)
    monkeypatch.setattr(frame.tempfile, "mkstemp", full)
    with pytest.raises(SystemExit) as end:
        frame.main()
    assert end.value.code == 2 and capsys.readouterr().err == said + "\n"


def test_a_sentence_stays_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(**_: object) -> None:
        raise Refused("the policy is not YAML: bad\n  in line 1\x1b[31m\n")

    monkeypatch.setattr(frame, "app", refuses)
    with pytest.raises(SystemExit):
        frame.main()
    assert capsys.readouterr().err == "keepstep: the policy is not YAML: bad in line 1\\x1b[31m\n"


def test_nodes_have_names_of_their_own(tmp_path: Path) -> None:
    for names, said in ((["a", "a"], "named twice"), ([""], "needs a name")):
        options = [word for name in names for word in ("--node", name)]
        done = CliRunner().invoke(app, ["up", "--home", str(tmp_path), *options])
        assert isinstance(done.exception, Refused) and said in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_nothing_is_started_with_what_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text("mode: perhaps\n")
    for option, value, said in (
        ("--policy", tmp_path / "policy", "mode"),
        ("--exec", tmp_path, "is not an executable script"),
        ("--notify", tmp_path, "can't be read"),
    ):
        done = CliRunner().invoke(app, ["up", "--home", str(tmp_path / "home"), option, str(value)])
        assert done.exit_code == 1 and said in str(done.exception), done.exception
        assert done.output == "" and not (tmp_path / "home").exists()


@pytest.mark.parametrize("words", [["runbook"], ["runbook", "no-standby"], ["policy", "show", "--default"]])
def test_what_prints_a_result_prints_it_as_json_too(words: list[str]) -> None:
    plain, done = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--json"]))
    value = json.loads(done.output)
    assert value.get("text", "") in plain.output and (len(words) > 1 or value["no-standby"] == "No standby left")


def test_a_damaged_recording_is_identical_only_as_far_as_it_goes(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, LEDGER) as writer:
        for record in golden(HERE / "rank_killed.jsonl"):
            writer.write(record)
    done = CliRunner().invoke(app, ["replay", str(writer.path)])
    assert (done.exit_code, done.stdout.rstrip().rpartition(", ")[2]) == (0, "identical"), done.output
    with open(writer.path, "ab") as file:
        file.write(b"no frame of zstd's")
    done = CliRunner().invoke(app, ["replay", str(writer.path), "--json"])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["identical"], len(said["losses"])) == (1, True, 1)
    done = CliRunner().invoke(app, ["replay", str(writer.path)])
    assert done.stdout.rstrip().endswith("identical as far as it goes: the recording is damaged")


def test_a_part_that_ends_again_and_again_is_told_ever_more_rarely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = Child("actuators", [], tmp_path / "actuators.log")
    child.log.write_text("one\nthe actuators end: the bus at nats://a is out of reach\n")
    for restarts in range(9):
        child.restarts = restarts
        told_restart(child, 1)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "actuators ended (1) and is started again: the actuators end: the bus at nats://a is out of reach"
    assert [line.split(",")[1].split()[0] for line in said[1:]] == ["2", "4", "8"]
