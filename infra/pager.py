"""Pages, live: what is sent to whom, what is repeated, what an Alertmanager is told of. What stands and what is due is folded in
actuators/pages.py from LEDGER, so that a restart of the actuators forgets nothing and sends nothing again that was sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from actuators.intents import Pending, Seen
from actuators.notify import Channel, Message, Sent
from actuators.pages import Page, Pages, due, ended, fold, standing, to_end
from actuators.port import Done, Work
from events.action import PageEnded, PageRepeated
from events.clock import NS
from events.decision import DecisionMade, IntentIssued
from events.envelope import TEXT_MAX
from infra.clock import wall_ns
from infra.notify_settings import NotifySettings

log = logging.getLogger("keepstep.actuators")

POLL_S = 1.0
#: How soon, in polls, an Alertmanager that did not take what it was told is told again.
AGAIN_POLLS = 5

RunbookOf = Callable[[IntentIssued, DecisionMade | None], str]
Append = Callable[[Pending, PageRepeated | PageEnded, int], Awaitable[None]]
#: The job's own backend: its script, or the log.
Backend = Callable[[Work], Coroutine[Any, Any, Done]]


@runtime_checkable
class Teller(Protocol):
    """A channel that is told of all that stands."""

    @property
    def name(self) -> str: ...
    async def tell(self, messages: Sequence[Message], now_ns: int) -> Sent: ...


class Pager:
    """`hear` each event of LEDGER, `page` an intent, and `run` beside it."""

    def __init__(
        self,
        channels: Sequence[Channel] = (),
        settings: NotifySettings | None = None,
        runbook_of: RunbookOf = lambda page, made: "",
        *,
        now_ns: Callable[[], int] = wall_ns,
        poll_s: float = POLL_S,
    ) -> None:
        self.channels, self.settings, self.runbook_of = channels, settings or NotifySettings(), runbook_of
        self.pages = Pages()
        self._now_ns, self._poll_s = now_ns, poll_s
        #: key -> the newest repeat that was sent and may not have been read back yet.
        self._repeated: dict[str, int] = {}
        #: key -> the newest repeat's sending, and the end's, once it has begun: the end is told last.
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()

    def hear(self, seen: Seen) -> None:
        self.pages = fold(self.pages, seen)

    async def page(self, work: Work, backend: Backend, number: int = 0) -> Done:
        """Sends an intent's page over each channel, and by the job's own backend. Done if one of them reached somebody."""
        known = self.pages.by_key.get(work.intent.key)
        if known is not None and known.over_ns and not known.sent_ns:
            return Done("refused_stale", f"over before it could be sent: {known.over}")
        message = self._message(known or Page(work.intent, "", 0, self._now_ns()), number)
        told = replace(work, intent=work.intent.model_copy(update={"text": message.text}))
        own = asyncio.create_task(backend(told))
        sent = await asyncio.gather(*(self._send(channel, message) for channel in self.channels))
        done = await own
        if not self.channels:
            return done
        said = "; ".join(f"{channel.name}: {one.detail}" for channel, one in zip(self.channels, sent, strict=True))
        if work.declared.backend != "local":
            said = f"{said}; {work.declared.backend}: {done.result} {done.detail}".rstrip()
        reached = any(one.ok for one in sent) or (work.declared.backend != "local" and done.result == "done")
        return Done("done" if reached else "failed", said)

    async def _send(self, channel: Channel, message: Message) -> Sent:
        sent = await _safely(channel.name, channel.send(message, self._now_ns()))
        if not sent.ok:
            log.warning("page %s over %s: %s", message.id, channel.name, sent.detail)
        return sent

    def _message(self, page: Page, number: int) -> Message:
        intent, made = page.intent, page.made
        runbook = self.runbook_of(intent, made)
        base = self.settings.runbooks.rstrip("/")
        text = intent.text
        if runbook:
            hint = f" Runbook: keepstep runbook {runbook}"
            text = text[: TEXT_MAX - len(hint)] + hint
        if number:
            again = f"(again, {number} of at most {self.settings.repeats_max}: nobody has acknowledged it) "
            text = (again + text)[:TEXT_MAX]
        return Message(
            key=intent.key, job=intent.job, text=text, issued_ns=page.issued_ns, incident=intent.incident, decision=intent.decision,
            rung=made.rung if made else "", rule=made.rule if made else "", asks=page.asks, number=number, runbook=runbook,
            runbook_url=f"{base}/{runbook}.md" if base and runbook else "", acknowledged=page.acknowledged, over_ns=page.over_ns,
        )  # fmt: skip

    async def run(self, work_of: Callable[[IntentIssued], Work | None], backend: Backend, append: Append) -> None:
        """Repeats what nobody acknowledged, and keeps Alertmanagers told, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for channel in self.channels:
                if isinstance(channel, Teller):
                    tasks.create_task(self._keep_told(channel))
            while True:
                await asyncio.sleep(self._poll_s)
                after_s, most = self.settings.repeat_after_s, self.settings.repeats_max
                for page in due(self.pages, self._now_ns(), after_s, most) if self.channels else ():
                    number, work = page.repeats + 1, work_of(page.intent)
                    if work is not None and self._repeated.get(page.intent.key, 0) < number:
                        self._repeated[page.intent.key] = number
                        self._sending[page.intent.key] = tasks.create_task(self._repeat(page, work, backend, number, append))
                for page in to_end(self.pages, self._now_ns()):
                    if page.intent.key not in self._ending and any(channel.tells_end for channel in self.channels):
                        self._ending.add(page.intent.key)
                        tasks.create_task(self._end(page, append))

    async def _repeat(self, page: Page, work: Work, backend: Backend, number: int, append: Append) -> None:
        done = await self.page(work, backend, number)
        intent = page.intent
        fact = PageRepeated(
            key=intent.key, incident=intent.incident, job=intent.job, number=number, result=done.result, detail=done.detail[:TEXT_MAX]
        )  # fmt: skip
        await append(Pending(intent, page.event_id, page.sequence, page.issued_ns), fact, number)

    async def _end(self, page: Page, append: Append) -> None:
        """Tells the channels that want it that a page is over."""
        intent, last = page.intent, self._sending.pop(page.intent.key, None)
        if last is not None:
            await asyncio.wait({last})
        message = self._message(page, page.repeats)
        message = replace(message, over=page.over, text=f"(over: {page.over}) {message.text}"[:TEXT_MAX])
        channels = [channel for channel in self.channels if channel.tells_end]
        sent = await asyncio.gather(*(self._send(channel, message) for channel in channels))
        fact = PageEnded(
            key=intent.key, incident=intent.incident, job=intent.job, why=page.over[:TEXT_MAX], result="done" if any(one.ok for one in sent) else "failed",
            detail="; ".join(f"{channel.name}: {one.detail}" for channel, one in zip(channels, sent, strict=True))[:TEXT_MAX],
        )  # fmt: skip
        await append(Pending(intent, page.event_id, page.sequence, page.issued_ns), fact, 0)

    async def _keep_told(self, channel: Teller) -> None:
        """Tells what stands and what has ended as soon as it changes, and every `refresh_s`."""
        told: tuple[Message, ...] = ()
        next_ns = 0
        while True:
            now_ns = self._now_ns()
            pages = (*(page for page in standing(self.pages) if page.sent_ns), *ended(self.pages, now_ns))
            messages = tuple(self._message(page, 0) for page in pages)
            ok = True
            if messages and (messages != told or now_ns >= next_ns):
                sent = await _safely(channel.name, channel.tell(messages, now_ns))
                ok, next_ns = sent.ok, now_ns + int(self.settings.refresh_s * NS)
                if not ok:
                    log.warning("%s was not told of %d pages: %s", channel.name, len(messages), sent.detail)
            told = messages if ok else ()
            await asyncio.sleep(self._poll_s if ok else AGAIN_POLLS * self._poll_s)


async def _safely(name: str, sending: Coroutine[Any, Any, Sent]) -> Sent:
    """A fault in one channel keeps neither the others nor the actuators from their work."""
    try:
        return await sending
    except Exception as error:
        log.exception("channel %s", name)
        return Sent(False, f"a fault of ours ({type(error).__name__})")
