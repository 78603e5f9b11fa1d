"""Pages: over real HTTP to servers that are slow, failing, down or hanging; what is repeated and what is not; a restart at every moment."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actuators.intents import Seen
from actuators.notify import Message, Script
from actuators.notify_http import Alertmanager, Http, Webhook
from actuators.pages import Pages, due, ended, fold, standing, to_end
from events.action import OutcomeRecorded, PageEnded, PageRepeated, TryStarted
from events.clock import NS, ns_of
from events.decision import DecisionMade, IntentIssued
from events.envelope import Fact
from events.incident import ProgressNoted
from events.job import ApprovalGiven, OverrideGiven, PageAcknowledged, RestartRequested, StopRequested
from events.ports import LEDGER
from infra.actuator_service import Actuators
from infra.cli.app import app
from infra.memory import START_NS
from infra.notify_settings import BadNotify, NotifySettings, channels_of, load
from infra.pager import Pager
from processors.runbooks import runbook_of_page
from tests.test_actuators import JOB, World, closed, declared, event_of, intent

SECRET = "s3cr3t-of-the-pager"
PAGE = Message(
    key="k1", job=JOB, text="nothing is left", issued_ns=START_NS, incident="i1", decision="d1", runbook="no-standby"
)


# --- a server as they are -------------------------------------------------------------------------------------------------------


class Server:
    """Answers each request with the next of `says`: a status, `hang` or `drop`; the last for good. What it was told is kept."""

    def __init__(self, *says: int | str, slow_s: float = 0.0, headers: str = "") -> None:
        self.says, self.slow_s, self.headers = list(says), slow_s, headers
        self.told: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.told.append((head[0], headers, body))
            say = self.says.pop(0) if len(self.says) > 1 else self.says[0]
            if say == "hang":
                await asyncio.sleep(60)
            if self.slow_s:
                await asyncio.sleep(self.slow_s)
            if say != "drop":
                writer.write(f"HTTP/1.1 {say} X\r\nContent-Length: 0\r\n{self.headers}Connection: close\r\n\r\n".encode())
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.told]

    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.told]


@asynccontextmanager
async def serving(*says: int | str, **more: Any) -> AsyncIterator[Server]:
    server = Server(*says, **more)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/hook/{SECRET}"
    try:
        yield server
    finally:
        listening.close()


def down() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/{SECRET}"


def http(url: str, **more: Any) -> Http:
    return Http(url, **{"timeout_s": 0.3, "tries": 3, "backoff_s": 0.01, **more})


@pytest.mark.parametrize(
    ("says", "ok", "requests", "detail"),
    [
        ((200,), True, 1, "taken (200)"),
        ((204,), True, 1, "taken (204)"),
        ((500, 503, 200), True, 3, "taken (200) (3 tries)"),
        ((500,), False, 3, "answered 500 (3 tries)"),
        ((429, 200), True, 2, "taken (200) (2 tries)"),
        ((404,), False, 1, "refused with 404"),
        ((302,), False, 1, "refused with 302"),
        (("hang", 200), True, 2, "taken (200) (2 tries)"),
        (("drop",), False, 3, "not reached (ServerDisconnectedError) (3 tries)"),
        (("hang",), False, 3, "no answer within 0.3 s (3 tries)"),
    ],
)
async def test_what_a_server_says_and_what_comes_of_it(says: Any, ok: bool, requests: int, detail: str) -> None:
    async with serving(*says) as server:
        began = time.monotonic()
        sent = await Webhook("w", http(server.url), SECRET).send(PAGE, START_NS)
        assert (sent.ok, sent.detail, len(server.told)) == (ok, detail, requests)
        assert time.monotonic() - began < 5
        assert set(server.ids) == {"k1"}, "each try is the same message"


@pytest.mark.parametrize(
    ("answer", "ok", "detail"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10485760\r\n\r\n" + bytes(10 << 20), True, "taken (200)"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (10 << 20), False, "answered with what is no HTTP, or beyond its limits"),
        (b"\x00\xff" * 1000, False, "answered with what is no HTTP, or beyond its limits"),
    ],
)
async def test_a_server_that_says_too_much_or_nonsense(answer: bytes, ok: bool, detail: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        with suppress(OSError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/{SECRET}"
        sent = await Webhook("w", http(url, tries=1, timeout_s=5.0)).send(PAGE, START_NS)
    assert (sent.ok, sent.detail) == (ok, detail)


@pytest.mark.parametrize(("then", "ends"), [("exit 0", "exit code 0"), ("sleep 30", "did not end within 1 s")])
def test_what_a_script_leaves_behind_with_its_pipes_holds_up_nobody(tmp_path: Path, then: str, ends: str) -> None:
    path, child = tmp_path / "page", tmp_path / "child"
    path.write_text(f"#!/bin/sh\nsetsid sh -c 'echo $$ > {child}; exec sleep 60' &\nsleep 0.3\n{then}\n")
    path.chmod(0o755)
    settings = settings_in(tmp_path, f"channels: [{{kind: script, script: {path}, timeout_s: 1}}]")
    command = [str(Path(sys.executable).with_name("keepstep")), "notify", str(settings), "--send"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    os.kill(int(child.read_text()), signal.SIGKILL)
    assert (done.returncode, done.stdout, done.stderr) == (int(then != "exit 0"), f"script-1: {ends}\n", "")
    assert time.monotonic() - began < 30


async def test_a_slow_server_is_waited_for_and_one_that_is_down_is_given_up() -> None:
    async with serving(200, slow_s=0.2) as server:
        assert (await Webhook("w", http(server.url, timeout_s=5.0)).send(PAGE, START_NS)).ok
    sent = await Webhook("w", http(down())).send(PAGE, START_NS)
    assert not sent.ok and sent.detail == "not reached (ClientConnectorError) (3 tries)"


async def test_a_server_that_says_when_to_come_back_is_heeded_within_reason() -> None:
    async with serving(503, 200, headers="Retry-After: 1\r\n") as server:
        began = time.monotonic()
        assert (await Webhook("w", http(server.url)).send(PAGE, START_NS)).ok
        assert time.monotonic() - began >= 0.95


async def test_the_signature_is_that_of_the_standard() -> None:
    async with serving(200) as server:
        key = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
        await Webhook("w", http(server.url, token="t0ken-t0ken"), f"whsec_{key}").send(PAGE, START_NS)
        ((line, headers, body),) = server.told
    assert line.startswith("POST /hook/") and headers["authorization"] == "Bearer t0ken-t0ken"
    assert headers["webhook-timestamp"] == str(START_NS // NS) and headers["content-type"] == "application/json"
    signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    want = base64.b64encode(hmac.new(b"0123456789abcdef0123456789abcdef", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{want}"
    told = json.loads(body)
    assert (told["key"], told["incident"], told["runbook"], told["text"]) == ("k1", "i1", "no-standby", "nothing is left")
    assert told["commands"]["acknowledge"] == "keepstep ack i1 --reason '…'"


async def test_alertmanager_gets_alerts_of_its_api_and_their_end() -> None:
    async with serving(200) as server:
        channel = Alertmanager("am", http(server.url.rsplit("/hook", 1)[0] + "/"), {"cluster": "a", "job": "keepstep"})
        assert (await channel.send(PAGE, START_NS + 5 * NS)).ok
        over = Message(
            **{**{f: getattr(PAGE, f) for f in PAGE.__slots__}, "over_ns": START_NS + 60 * NS, "acknowledged": "ann"}
        )
        assert (await channel.tell((over,), START_NS + 61 * NS)).ok
        assert {line for line, _, _ in server.told} == {"POST /api/v2/alerts HTTP/1.1"}
        (fired,), (resolved,) = server.bodies()
    assert fired["labels"] == resolved["labels"] == {
        "alertname": "KeepstepHandOver", "severity": "critical", "training_job": JOB, "incident": "i1", "decision": "d1",
        "cluster": "a", "job": "keepstep",
    }  # fmt: skip
    assert fired["annotations"]["runbook"] == "no-standby" and "acknowledged" not in fired["annotations"]
    assert resolved["annotations"]["acknowledged"] == "by ann"
    assert ns_of(fired["endsAt"]) > START_NS + 23 * 3600 * NS and ns_of(resolved["endsAt"]) == START_NS + 60 * NS
    assert fired["startsAt"] == resolved["startsAt"]


async def test_a_script_pages_too(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text(f"#!/bin/sh\ncat > {tmp_path}/told\n[ $1 = notify ] && echo paged\n")
    path.chmod(0o755)
    (channel,) = channels_of(NotifySettings.model_validate({"channels": [{"kind": "script", "script": str(path)}]}))
    assert isinstance(channel, Script)
    sent = await channel.send(PAGE, START_NS)
    assert (sent.ok, sent.detail) == (True, "exit code 0; paged")
    assert json.loads((tmp_path / "told").read_text())["key"] == "k1"


# --- settings -------------------------------------------------------------------------------------------------------------------


def settings_in(folder: Path, text: str) -> Path:
    (folder / "notify.yaml").write_text(text)
    return folder / "notify.yaml"


def test_secrets_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("https://hooks.example/T0K3N\n")
    (tmp_path / "secret").write_text(SECRET + "\n")
    monkeypatch.setenv("AM_TOKEN", "t0ken")
    text = f"""
repeat_after_s: 60
channels:
  - {{kind: webhook, name: ops, url_file: {tmp_path}/url, secret_file: {tmp_path}/secret}}
  - {{kind: alertmanager, url: "http://am:9093", token_env: AM_TOKEN, labels: {{cluster: a}}}}
"""
    settings = load(settings_in(tmp_path, text))
    hook, manager = channels_of(settings)
    assert isinstance(hook, Webhook) and isinstance(manager, Alertmanager)
    assert (hook.name, hook.http.url, hook.secret) == ("ops", "https://hooks.example/T0K3N", SECRET)
    assert (manager.name, manager.http.token, manager.labels) == ("alertmanager-2", "t0ken", {"cluster": "a"})
    assert settings.repeat_after_s == 60 and SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("channels: [{kind: pigeon}]", "channels.0: Input tag 'pigeon'"),
        ("channels: [{kind: webhook}]", "needs one of url, url_file and url_env"),
        ("channels: [{kind: webhook, url: 'http://a', url_env: B}]", "needs one of url"),
        ("channels: [{kind: webhook, url: 'ftp://a'}]", "neither http:// nor https://"),
        ("channels: [{kind: webhook, url_env: NO_SUCH_VARIABLE}]", "its url is empty ($NO_SUCH_VARIABLE)"),
        ("channels: [{kind: webhook, url: 'http://a', secret_file: /no/such/file}]", "can't be read: No such file"),
        ("channels: [{kind: webhook, url: 'http://a', secret_env: PATH, secret_file: x}]", "keep one"),
        ("channels: [{kind: webhook, url: 'http://a', ca_file: /no/such/ca}]", "there is no ca_file"),
        ("channels: [{kind: script, script: /no/such/script}]", "is not an executable file"),
        (
            "channels: [{kind: webhook, url: 'http://a', name: x}, {kind: alertmanager, url: 'http://a', name: x}]",
            "two channels",
        ),
        ("channels: [{kind: alertmanager, url: 'http://a', labels: {a-b: c}}]", "labels.a-b"),
        ("repeat_after_s: 0", "repeat_after_s"),
        ("pages: 1", "pages: Extra inputs"),
        (": : :", "it is not YAML"),
        ("[" * 100_000, "it is not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadNotify) as error:
        channels_of(load(settings_in(tmp_path, text)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_signature_that_can_be_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "whsec_!!!")
    with pytest.raises(BadNotify, match="no base64"):
        channels_of(load(settings_in(tmp_path, "channels: [{kind: webhook, url: 'http://a', secret_env: HOOK}]")))


# --- the fold -------------------------------------------------------------------------------------------------------------------


def decided(decision: str = "d1", **what: Any) -> DecisionMade:
    fields: dict[str, Any] = {
        "decision": decision, "incident": "i1", "job": JOB, "epoch": 1, "ordinal": 1, "rung": "hand_over", "rule": "hand_over",
        "mode": "auto", "because": "1 standbys are needed and 0 are left", "reason": "no_standby", "policy_digest": "", "catalogue_digest": "",
        "code_version": "", "trigger": 1, "ledger_digest": "",
    }  # fmt: skip
    return DecisionMade(**{**fields, **what})


def page(decision: str = "d1", **more: Any) -> IntentIssued:
    return intent("notify", decision=decision, key=f"page-{decision}", text="nothing is left", **more)


def sent(decision: str = "d1") -> OutcomeRecorded:
    return OutcomeRecorded(key=f"page-{decision}", job=JOB, verb="notify", result="done")


def ack(**what: str) -> PageAcknowledged:
    return PageAcknowledged(**{"job": JOB, "incident": "i1", "reason": "on it", "author": "ann", **what})


def told(*facts: Fact | tuple[float, Fact]) -> Pages:
    pages = Pages()
    at_s = 0.0
    for number, given in enumerate(facts, 1):
        at_s, fact = given if isinstance(given, tuple) else (at_s, given)
        pages = fold(pages, Seen(number, START_NS + int(at_s * NS), event_of(fact, number)))
    return pages


def due_at(pages: Pages, at_s: float) -> list[str]:
    return [one.intent.key for one in due(pages, START_NS + int(at_s * NS), 900, 3)]


def test_what_nobody_acknowledged_is_repeated_so_often_and_no_more() -> None:
    facts: list[Any] = [decided(), page(), sent()]
    pages = told(*facts)
    assert due_at(pages, 899) == [] and due_at(pages, 900) == ["page-d1"]
    for number in (1, 2, 3):
        facts.append((900.0 * number, PageRepeated(key="page-d1", job=JOB, number=number, result="done")))
        pages = told(*facts)
        assert due_at(pages, 900 * number + 899) == []
        assert due_at(pages, 900 * number + 900) == (["page-d1"] if number < 3 else [])


@pytest.mark.parametrize(
    ("facts", "stands", "repeats"),
    [
        ([ack()], True, False),
        ([ack(incident="", decision="d1")], True, False),
        ([ack(incident="i9")], True, True),
        ([ack(job="other")], True, True),
        ([ack(incident="")], True, True),
        ([closed(1)], False, False),
        ([closed(2)], True, True),
        ([ApprovalGiven(decision="d1", job=JOB, granted=True, reason="r", author="a")], True, True),
        ([RestartRequested(job=JOB, reason="r", author="a")], True, True),
        ([decided("d2", rung="evict")], True, True),
    ],
)
def test_a_page_of_an_incident_stands_until_it_is_closed(facts: list[Fact], stands: bool, repeats: bool) -> None:
    pages = told(decided(), page(), sent(), *facts)
    assert (bool(standing(pages)), bool(due_at(pages, 5000))) == (stands, repeats)
    assert bool(ended(pages, START_NS)) != stands


@pytest.mark.parametrize(
    ("fact", "stands"),
    [
        (ApprovalGiven(decision="d1", job=JOB, granted=False, reason="r", author="a"), False),
        (ApprovalGiven(decision="d7", job=JOB, granted=True, reason="r", author="a"), True),
        (decided("d2", rung="evict"), False),
        (decided("d2", rung="evict", mode="observe"), True),
        (decided("d2", rung="evict", vetoed="budget"), True),
        (closed(1), False),
    ],
)
def test_a_question_stands_until_it_is_answered_or_another_takes_its_place(fact: Fact, stands: bool) -> None:
    pages = told(decided(rung="evict", mode="approve"), page(), sent(), fact)
    assert bool(standing(pages)) == stands


@pytest.mark.parametrize(
    "fact", [RestartRequested(job=JOB, reason="r", author="a"), StopRequested(job=JOB, reason="r", author="a")]
)
def test_what_was_planned_is_over_with_the_next_word(fact: Fact) -> None:
    before = [decided(incident=""), page(incident="", epoch=0), sent()]
    assert standing(told(*before)) and not standing(told(*before, fact))
    acknowledged = told(*before, ack(incident=""))
    assert due_at(acknowledged, 5000) == [] and standing(acknowledged)


def test_a_new_page_of_an_acknowledged_incident_is_a_new_one() -> None:
    pages = told(decided(), page(), sent(), ack(), decided("d2"), page("d2"), sent("d2"))
    assert due_at(pages, 900) == ["page-d2"]


def test_what_was_never_sent_is_not_repeated_and_old_ends_are_forgotten() -> None:
    assert due_at(told(decided(), page()), 10_000) == []
    over = told(decided(), page(), sent(), closed(1))
    assert ended(over, START_NS + 899 * NS) and not ended(over, START_NS + 900 * NS)


@pytest.mark.parametrize(
    ("before", "fact", "over"),
    [
        ([decided(), page(), sent()], closed(1), "its incident was closed: recovered by reattempt"),
        ([decided(rung="evict", mode="approve"), page(), sent()], ApprovalGiven(decision="d1", job=JOB, granted=False, reason="r", author="ann"), "no by ann"),
        ([decided(rung="evict", mode="approve"), page(), sent()], decided("d2", rung="evict", nodes=("n1",)), "another decision took its place: evict n1"),
        ([decided(incident=""), page(incident="", epoch=0), sent()], RestartRequested(job=JOB, reason="r", author="bob"), "restart by bob"),
        ([decided(incident=""), page(incident="", epoch=0), sent()], StopRequested(job=JOB, reason="r", author="bob"), "stop by bob"),
        ([decided(incident=""), page(incident="", epoch=0), sent()], declared(author="bob"), "declared anew by bob"),
        ([decided(incident=""), page(incident="", epoch=0), sent()], OverrideGiven(job=JOB, remedy="reattempt", reason="r", author="bob"), "override by bob"),
        ([decided(incident=""), page(incident="", epoch=0), sent()], ProgressNoted(step=3, first=True, seen_ns=1), "attempt 0 made a healthy step"),
    ],
)  # fmt: skip
def test_the_end_of_a_page_is_told_once_with_what_ended_it(before: list[Fact], fact: Fact, over: str) -> None:
    assert to_end(told(*before), START_NS) == ()
    (one,) = to_end(told(*before, fact), START_NS)
    assert one.over == over
    told_so = PageEnded(key="page-d1", job=JOB, why=over, result="failed")
    assert to_end(told(*before, fact, told_so), START_NS) == ()
    assert to_end(told(*before, fact), START_NS + 900 * NS) == (), "what was over long ago is no news"


def test_a_page_that_was_never_sent_has_no_end_to_tell_and_is_known_as_over_for_good() -> None:
    pages = told(decided(), page(), closed(1), (5000, decided("d2", incident="i2")), page("d2", incident="i2"))
    assert to_end(pages, START_NS) == () and pages.by_key["page-d1"].over
    refused = OutcomeRecorded(key="page-d1", job=JOB, verb="notify", result="refused_stale")
    assert list(told(decided(), page(), closed(1), refused).by_key) == []


# --- the service ----------------------------------------------------------------------------------------------------------------


def pager(*channels: Any, repeat_after_s: float = 3600.0, **more: Any) -> Pager:
    settings = NotifySettings(repeat_after_s=repeat_after_s, repeats_max=2, refresh_s=3600, **more)
    began = time.monotonic_ns()
    return Pager(channels, settings, runbook_of_page, now_ns=lambda: START_NS + time.monotonic_ns() - began, poll_s=0.01)


def actuators(world: World, paging: Pager) -> Actuators:
    made = world.actuators()
    made.pager = paging
    return made


async def until(true: Callable[[], Any], made: Actuators, within_s: float = 30.0) -> None:
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(within_s):
            while not true() and not running.done():
                await asyncio.sleep(0.005)
        if running.done():
            running.result()
        await asyncio.sleep(0.05)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_all_channels_at_once_and_one_that_is_reached_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(200) as good, serving("hang") as hangs, serving(500) as bad, serving(200) as manager:
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        channels = (
            Webhook("good", http(good.url), SECRET), Webhook("hangs", http(hangs.url), SECRET), Webhook("bad", http(bad.url), SECRET),
            Webhook("down", http(down()), SECRET), Alertmanager("am", http(manager.url, token=SECRET), {}),
        )  # fmt: skip
        with caplog.at_level(logging.DEBUG):
            await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(*channels, runbooks="https://wiki/rb/")))
        (outcome,) = world.facts(OutcomeRecorded)
        assert outcome.result == "done"
        assert outcome.detail == (
            "good: taken (200); hangs: no answer within 0.3 s (3 tries); bad: answered 500 (3 tries); "
            "down: not reached (ClientConnectorError) (3 tries); am: taken (200)"
        )
        (told_,) = good.bodies()
        assert told_["runbook_url"] == "https://wiki/rb/no-standby.md" and told_["text"].endswith("keepstep runbook no-standby")
    written = b"".join(record.data for record in world.bus.records(LEDGER)).decode()
    assert SECRET not in written and SECRET not in caplog.text and "127.0.0.1" not in written


async def test_nobody_reached_is_a_failure_that_says_so() -> None:
    world = World()
    for fact in (declared(), decided(), page()):
        await world.say(fact)
    await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(Webhook("down", http(down())))))
    (outcome,) = world.facts(OutcomeRecorded)
    assert (outcome.result, outcome.detail) == ("failed", "down: not reached (ClientConnectorError) (3 tries)")


async def test_repeats_until_their_limit_and_none_once_acknowledged() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        hook = Webhook("w", http(server.url))
        await until(lambda: len(world.facts(PageRepeated)) == 2, actuators(world, pager(hook, repeat_after_s=0.05)))
        assert server.ids == ["page-d1", "page-d1-1", "page-d1-2"]
        assert [body["number"] for body in server.bodies()] == [0, 1, 2] and {b["key"] for b in server.bodies()} == {"page-d1"}
        assert len(world.facts(OutcomeRecorded)) == 1, "a repeat is no second outcome"

        await world.say(decided("d2"))
        await world.say(page("d2"))
        await world.say(ack())
        await until(lambda: len(world.facts(OutcomeRecorded)) == 2, actuators(world, pager(hook, repeat_after_s=0.05)))
        await asyncio.sleep(0.2)
        assert server.ids[3:] == ["page-d2"]


async def test_a_restart_sends_nothing_again_that_was_recorded() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        hook = Webhook("w", http(server.url))
        await until(lambda: world.facts(PageRepeated), actuators(world, pager(hook, repeat_after_s=0.3)))
        before = len(server.told)
        for _ in range(3):  # each a new life, with the ledger as all that is known
            await until(
                lambda: False or len(server.told) > before, actuators(world, pager(hook)), within_s=0.2
            ) if False else None
            running = asyncio.create_task(actuators(world, pager(hook)).run())
            await asyncio.sleep(0.1)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        assert len(server.told) == before
        await until(lambda: len(world.facts(PageRepeated)) == 2, actuators(world, pager(hook, repeat_after_s=0.05)))
        assert server.ids == ["page-d1", "page-d1-1", "page-d1-2"]


async def test_killed_between_sending_and_recording_the_same_message_comes_again() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        # A life that began, sent, and died before the outcome: what is left of it is the try, and the message at the server.
        await world.say(TryStarted(key="page-d1", job=JOB, verb="notify", ordinal=1))
        hook = Webhook("w", http(server.url))
        await hook.send(pager()._message(told(decided(), page()).by_key["page-d1"], 0), START_NS)
        await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(hook)))
        assert server.ids == ["page-d1", "page-d1"], "told by the same id, so that it can be known as the same"


async def test_alertmanager_is_told_again_and_of_the_end_also_after_a_restart() -> None:
    async with serving(500, 500, 500, 200) as server:
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        channel = Alertmanager("am", http(server.url, tries=1), {})
        # The first sending fails; it is kept telling until it is taken.
        await until(lambda: len(server.told) >= 4, actuators(world, pager(channel)))
        assert world.facts(OutcomeRecorded)[0].result == "failed"
        firing = server.bodies()[-1][0]
        await world.say(closed(1))
        world.bus.advance(NS)
        before = len(server.told)
        again = Pager((channel,), NotifySettings(), runbook_of_page, now_ns=lambda: START_NS + 2 * NS, poll_s=0.01)
        await until(lambda: len(server.told) > before, actuators(world, again))
        resolved = server.bodies()[-1][0]
        assert resolved["labels"] == firing["labels"]
        assert ns_of(resolved["endsAt"]) <= START_NS + 2 * NS < ns_of(firing["endsAt"])


async def test_webhooks_and_scripts_are_told_of_the_end_once_also_after_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "page"
    script.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told\n")
    script.chmod(0o755)
    async with serving(200) as hook, serving(200) as quiet:
        text = f"""channels:
          - {{kind: webhook, name: w, url: '{hook.url}'}}
          - {{kind: webhook, name: q, url: '{quiet.url}', send_resolved: false}}
          - {{kind: script, script: {script}}}"""
        channels = channels_of(load(settings_in(tmp_path, text)))
        world = World()
        for fact in (declared(), decided(), page()):
            await world.say(fact)
        await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(*channels)))
        assert world.facts(PageEnded) == []
        await world.say(closed(1))
        await until(lambda: world.facts(PageEnded), actuators(world, pager(*channels)))
        before = len(hook.told)
        with suppress(TimeoutError):
            await until(lambda: len(hook.told) > before, actuators(world, pager(*channels)), within_s=0.3)
    (end,) = world.facts(PageEnded)
    assert (end.key, end.result, end.why) == ("page-d1", "done", "its incident was closed: recovered by reattempt")
    assert end.detail == "w: taken (200); script-3: exit code 0"
    assert hook.ids == ["page-d1", "page-d1-over"] and quiet.ids == ["page-d1"]
    first, last = hook.bodies()
    assert (first["status"], last["status"], last["key"], first["key"]) == ("firing", "resolved", "page-d1", "page-d1")
    assert last["text"].startswith("(over: its incident was closed: recovered by reattempt) nothing is left")
    assert "acknowledge" in first["commands"] and list(last["commands"]) == ["explain"] and "over" not in first
    assert [json.loads(line)["status"] for line in (tmp_path / "told").read_text().splitlines()] == ["firing", "resolved"]


async def test_the_end_is_told_after_the_repeat_that_is_being_sent() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(), decided(), page(), sent()):
            await world.say(fact)
        paging = pager(Webhook("w", http(server.url)), repeat_after_s=0.05)
        page_once = paging.page

        async def slowly(work: Any, backend: Any, number: int = 0) -> Any:
            await world.say(closed(1))
            await asyncio.sleep(0.2)
            return await page_once(work, backend, number)

        paging.page = slowly  # type: ignore[method-assign]
        await until(lambda: world.facts(PageEnded), actuators(world, paging))
        assert server.ids == ["page-d1-1", "page-d1-over"]


async def test_a_page_that_stands_is_sent_however_late_and_one_that_is_over_is_not() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(), decided(), page(expires_ns=START_NS), decided("d2", incident="i2"), page("d2", incident="i2", expires_ns=START_NS)):  # fmt: skip
            await world.say(fact)
        await world.say(closed(1))
        world.bus.advance(3600 * NS)
        await until(lambda: len(world.facts(OutcomeRecorded)) == 2, actuators(world, pager(Webhook("w", http(server.url)))))
        assert {o.key: o.result for o in world.facts(OutcomeRecorded)} == {"page-d1": "refused_stale", "page-d2": "done"}
        assert server.ids == ["page-d2"] and world.facts(PageEnded) == []


async def test_without_channels_it_is_the_backends_and_nothing_is_repeated() -> None:
    world = World()
    for fact in (declared(), decided(), page()):
        await world.say(fact)
    await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(repeat_after_s=0.01)))
    await asyncio.sleep(0.1)
    assert [o.result for o in world.facts(OutcomeRecorded)] == ["done"] and world.facts(PageRepeated) == []


async def test_a_channel_is_used_though_the_jobs_backend_is_not_there() -> None:
    async with serving(200) as server:
        world = World()
        for fact in (declared(backend="exec"), decided(), page()):
            await world.say(fact)
        await until(lambda: world.facts(OutcomeRecorded), actuators(world, pager(Webhook("w", http(server.url)))))
        (outcome,) = world.facts(OutcomeRecorded)
        assert outcome.result == "done" and outcome.detail.startswith("w: taken (200); exec: failed the job names the backend")


async def test_a_trial_page_is_sent_over_each_channel(tmp_path: Path) -> None:
    async with serving(200) as good, serving(500) as bad:
        text = f"channels: [{{kind: webhook, url: '{good.url}'}}, {{kind: webhook, url: '{bad.url}', tries: 1}}]"
        path = str(settings_in(tmp_path, text))
        checked = await asyncio.to_thread(CliRunner().invoke, app, ["notify", path])
        assert checked.exit_code == 0 and not good.told
        done = await asyncio.to_thread(CliRunner().invoke, app, ["notify", path, "--send", "--json"])
        assert done.exit_code == 1
        assert json.loads(done.output)["channels"] == [
            {"channel": "webhook-1", "ok": True, "detail": "taken (200)"},
            {"channel": "webhook-2", "ok": False, "detail": "answered 500"},
        ]
        assert "a trial page" in good.bodies()[0]["text"]
