"""Talk with node agents over a bus that may lose messages: a command is repeated until its answer is seen, or time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from actuators.port import Unanswered
from events.action import CommandAnswered, NodeCommand

REPEAT_S = 0.5


class CommandChannel:
    """`send(node, command)` may fail silently; `answered(node, answer)` is to be called with each answer that is read, and takes a
    node's word only for commands to that node."""

    def __init__(self, send: Callable[[str, NodeCommand], Awaitable[None]], repeat_s: float = REPEAT_S) -> None:
        self._send, self._repeat_s = send, repeat_s
        self._waiting: dict[tuple[str, str], asyncio.Future[CommandAnswered]] = {}

    def answered(self, node: str, answer: CommandAnswered) -> None:
        future = self._waiting.get((node, answer.key))
        if future is not None and not future.done():
            future.set_result(answer)

    async def ask(self, node: str, command: NodeCommand, within_s: float) -> CommandAnswered:
        """Raises Unanswered."""
        at = (node, command.key)
        future = self._waiting.get(at)
        first = future is None
        if future is None:
            future = self._waiting[at] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                while True:
                    await self._send(node, command)
                    done, _ = await asyncio.wait({future}, timeout=self._repeat_s)
                    if done:
                        return future.result()
        except TimeoutError:
            raise Unanswered(f"the agent of {node} did not answer {command.verb} within {within_s:g} s") from None
        finally:
            if first and self._waiting.get(at) is future:
                del self._waiting[at]
