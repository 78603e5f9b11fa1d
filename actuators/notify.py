"""What a page is when it is sent, and the ways to send one: here what they share, and a script; over HTTP in actuators/notify_http.py.

Each channel sends one message, tries again for a while if that may help, and says what came of it in a sentence without addresses or
secrets, since it stands in an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from actuators.exec_backend import Exec, shown
from events.clock import text_of


@dataclass(frozen=True, slots=True)
class Message:
    """One page as it is sent. `key` is the page's; `id` the sending's (the page's, and `-N` for the Nth repeat, `-over` for its end):
    whoever gets the same id again has it already. `asks`: it waits for a yes. `over_ns`: since when it is over (0: it stands), `over`:
    what ended it, of the message that tells so."""

    key: str
    job: str
    text: str
    issued_ns: int
    incident: str = ""
    decision: str = ""
    rung: str = ""
    rule: str = ""
    asks: bool = False
    number: int = 0
    runbook: str = ""
    runbook_url: str = ""
    acknowledged: str = ""
    over_ns: int = 0
    over: str = ""

    @property
    def id(self) -> str:
        if self.over:
            return f"{self.key}-over"
        return f"{self.key}-{self.number}" if self.number else self.key

    def body(self) -> dict[str, Any]:
        """What a webhook or a script is told."""
        named = self.incident or self.decision
        commands = {"explain": f"keepstep explain {self.incident}"} if self.incident else {}
        if self.asks and not self.over:
            commands |= {word: f"keepstep {word} {self.decision} --reason '…'" for word in ("approve", "deny")}
        if named and not self.over:
            commands["acknowledge"] = f"keepstep ack {named} --reason '…'"
        if self.runbook and not self.over:
            commands["runbook"] = f"keepstep runbook {self.runbook}"
        ended = {"over": self.over, "ended": text_of(self.over_ns)} if self.over else {}
        return {
            "type": "keepstep.page.v1", "status": "resolved" if self.over else "firing", "id": self.id, "key": self.key, "number": self.number, "job": self.job, "incident": self.incident,
            "decision": self.decision, "rung": self.rung, "rule": self.rule, "asks": self.asks, "text": self.text,
            "issued": text_of(self.issued_ns), "runbook": self.runbook, "runbook_url": self.runbook_url, "commands": commands,
            **ended,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of one sending."""

    ok: bool
    detail: str


class Channel(Protocol):
    """One way to reach people."""

    @property
    def name(self) -> str: ...
    @property
    def tells_end(self) -> bool:
        """Whether it is sent a message of its own when a page is over."""
        ...

    async def send(self, message: Message, now_ns: int) -> Sent: ...


@dataclass(frozen=True, slots=True)
class Script:
    """A script that pages, whatever the job's backend: `notify` as its argument, one JSON object on standard input, 0 is done."""

    name: str
    script: Exec
    tells_end: bool = True

    async def send(self, message: Message, now_ns: int) -> Sent:
        code, out, err = await self.script.run("notify", message.body(), self.script.limit_s)
        how = f"exit code {code}" if code is not None else f"did not end within {self.script.limit_s:g} s"
        said = shown(out, err)[-200:]
        return Sent(code == 0, f"{how}; {said}" if said else how)
