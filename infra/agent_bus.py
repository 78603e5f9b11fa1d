"""The agent's side of the bus: a connection that comes back by itself, observations stored with their acknowledgements awaited,
and commands to this node carried out and answered.

The agent starts and works without it; that is the outbox's affair (producers/outbox.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats.errors import Error as NatsError

from events import subjects
from events.action import CommandAnswered, NodeCommand
from events.envelope import AnyEvent
from events.ports import LogError, LogUnavailable
from events.registry import Malformed, parse
from infra.bus import BusClient, connect
from infra.publisher import Failed, Publisher
from infra.tasks import ended
from producers.observe import Desk
from producers.outbox import Observation, Refused

_CONNECT_S_MAX = 5.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.25, 5.0
#: An acknowledgement later than this counts as none; the observation goes to disk and again.
ACK_S_MAX = 2.0
COMMANDS_AT_ONCE_MAX = 32
ANSWERS_KEPT = 256
_ANSWER_TRIES = 3


class AgentBus:
    """`present`, `publish`: what an Outbox needs. `run` connects, and again whenever the connection has ended for good."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        node: str,
        *,
        tls: ssl.SSLContext | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.url = url
        self.on_command: Callable[[str, bytes], None] = lambda subject, data: None
        self._options = dict(options)
        self._node = node
        self._tls = tls
        self._say = say
        self._client: BusClient | None = None
        self._publisher: Publisher | None = None

    @property
    def present(self) -> bool:
        return self._publisher is not None and self._client is not None and self._client.is_connected

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        publisher = self._publisher
        if publisher is None or not self.present:
            raise LogUnavailable("the bus is away")
        stored: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

        def done(failed: Failed | None) -> None:
            if not stored.done():
                stored.set_result(failed)

        try:
            await publisher.publish(subject, data, headers or None, done)
        except LogUnavailable:
            raise
        except LogError as error:
            raise Refused(str(error)) from None
        failed = await stored
        if failed is not None:
            raise LogUnavailable(failed.reason) if failed.again else Refused(failed.reason)

    async def run(self) -> None:
        """Until cancelled."""
        pause_s, said = _RETRY_S_MIN, ""
        while True:
            try:
                client = await connect(
                    self.url, self._options, name=f"keepstep agent {self._node}"[:200], tls=self._tls, wait_s=_CONNECT_S_MAX
                )
            except (LogUnavailable, NatsError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"{said}; what is seen meanwhile is kept on disk")
                await asyncio.sleep(pause_s)
                pause_s = min(_RETRY_S_MAX, pause_s * 2)
                continue
            pause_s, said = _RETRY_S_MIN, ""
            try:
                await self._serve(client)
            except (LogUnavailable, NatsError, OSError) as error:
                self._say(f"the bus connection ended: {error}")
            finally:
                self._client = self._publisher = None
                with contextlib.suppress(NatsError, OSError, TimeoutError):
                    await asyncio.wait_for(client.close(), 1.0)
            await asyncio.sleep(_RETRY_S_MIN)

    async def _serve(self, client: BusClient) -> None:
        closed = asyncio.Event()

        def lost() -> None:
            if client.is_closed:
                closed.set()
            else:
                self._say("the bus is away; what is seen meanwhile is kept on disk")

        client.on_disconnect.add(lost)
        client.on_reconnect.add(lambda: self._say("the bus is back"))
        await client.subscribe_raw(
            f"command.{subjects.token(self._node)}.>", lambda subject, reply, data, headers: self.on_command(subject, data)
        )
        publisher = Publisher(client, ack_s_max=ACK_S_MAX)
        self._client, self._publisher = client, publisher
        self._say(f"connected to the bus at {self.url}")
        try:
            while not closed.is_set() and not client.is_closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closed.wait(), 5.0)
        finally:
            self._publisher = None
            if not client.is_closed:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(publisher.close(), 0.5)


class Commands:
    """Commands to this node: parsed, carried out, answered. The same command again gets the same answer's same bytes again."""

    def __init__(
        self,
        desk: Desk,
        handle: Callable[[NodeCommand], Awaitable[CommandAnswered]],
        publish: Callable[[str, bytes, dict[str, str]], Awaitable[None]],
        *,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.refused = 0
        self._desk = desk
        self._handle = handle
        self._publish = publish
        self._say = say
        self._answers: OrderedDict[str, Observation] = OrderedDict()
        self._running: dict[str, asyncio.Task[None]] = {}

    def receive(self, subject: str, data: bytes) -> None:
        """One message of `command.<node>.<verb>`. Never raises."""
        try:
            event = parse(data)
        except Malformed as error:
            self._refuse(f"a command that can't be read was dropped: {error}")
            return
        command = event.data
        if not isinstance(command, NodeCommand) or subject.rpartition(".")[2] != command.verb:
            self._refuse(f"a message on {subject[:200]} that is no such command was dropped")
            return
        if command.key in self._running:
            return  # a repeat of what is being carried out: its answer comes
        if len(self._running) >= COMMANDS_AT_ONCE_MAX:
            self._refuse(f"a command to {command.verb} was put off: {COMMANDS_AT_ONCE_MAX} others are being carried out")
            return
        task = asyncio.create_task(self._carry_out(event, command), name=f"command {command.verb}")
        self._running[command.key] = task
        task.add_done_callback(lambda _: self._running.pop(command.key, None))

    async def close(self) -> None:
        await ended(*self._running.values())

    async def _carry_out(self, event: AnyEvent, command: NodeCommand) -> None:
        known = self._answers.get(command.key)
        if known is None:
            answer = await self._answer(command)
            known = self._desk.answer("commands", command.job, command.attempt, answer, (event.id,))
            if answer.ok:
                self._answers[command.key] = known
                if len(self._answers) > ANSWERS_KEPT:
                    self._answers.popitem(last=False)
        for _ in range(_ANSWER_TRIES):
            try:
                await self._publish(known.subject, known.data, {})
                return
            except LogUnavailable:
                await asyncio.sleep(0.1)
            except Refused as error:
                self._say(f"the answer to a command was refused by the bus: {error}")
                return
        # The command is repeated until its answer is seen, and the answer with it.

    async def _answer(self, command: NodeCommand) -> CommandAnswered:
        if command.place is not None and command.place.node != self._desk.node:
            detail = f"this is {self._desk.node}, the command is for {command.place.node}"
            return CommandAnswered(key=command.key, verb=command.verb, ok=False, detail=detail)
        try:
            return await self._handle(command)
        except Exception as error:  # a fault of ours must be an answer, or the actuator repeats for ever
            detail = f"{type(error).__name__}: {error}"[:1000]
            return CommandAnswered(key=command.key, verb=command.verb, ok=False, detail=detail)

    def _refuse(self, sentence: str) -> None:
        self.refused += 1
        if self.refused <= 100 or self.refused % 1000 == 0:
            self._say(f"{sentence} ({self.refused} so far)")
