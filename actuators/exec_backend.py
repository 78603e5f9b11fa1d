"""Backend `exec`: the site's own script decides what evict, replace and notify mean on its cluster.

The script gets one argument, the verb, and one JSON object on standard input; its exit code is the outcome: 0 done, 75
(EX_TEMPFAIL) try again, anything else failed. What it prints becomes the outcome's detail, cut to size. It must be ready to be
called again for the same `key`. Called once with `describe`, it may print {"verbs":["evict_node", …]}: the verbs that it carries
out (by default evict_node, wake_standby and notify); the rest, and the processes on the nodes, are the agents' as with `local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from actuators.local import Local
from actuators.port import Done, Nodes, Work
from actuators.tail import redacted, secrets_in
from events.decision import Verb
from events.job import JobDeclared

DEFAULT_VERBS: frozenset[Verb] = frozenset(("evict_node", "wake_standby", "notify"))
VERBS: frozenset[str] = frozenset(("stop_attempt", "evict_node", "wake_standby", "start_attempt", "notify"))
OUTPUT_BYTES_MAX = 64 << 10
DETAIL_CHARACTERS_MAX = 1500
EX_TEMPFAIL = 75
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class BadScript(Exception):
    """A script that cannot be used: one sentence for whoever configured it."""


class Exec:
    """See the module. `limit_s`: time for one call of the script, after which its whole process group is killed."""

    def __init__(self, script: str, local: Local | None = None, *, limit_s: float = 60.0) -> None:
        path = Path(script)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise BadScript(f"{script} is not an executable file; give the path of the site's actuation script")
        self.script, self.limit_s = str(path.absolute()), limit_s
        self.local = local or Local()
        self._verbs: frozenset[str] | None = None

    async def verbs(self) -> frozenset[str]:
        """The verbs that the script carries out. A script that does not know `describe` has the default ones."""
        if self._verbs is None:
            code, stdout, _ = await self.run("describe", {"verb": "describe"}, min(10.0, self.limit_s))
            self._verbs = described(stdout) if code == 0 else DEFAULT_VERBS
        return self._verbs

    async def stop_attempt(self, work: Work, nodes: Nodes) -> Done:
        return await self._either(work, self.local.stop_attempt(work, nodes))

    async def start_attempt(self, work: Work, nodes: Nodes) -> Done:
        return await self._either(work, self.local.start_attempt(work, nodes))

    async def evict_node(self, work: Work, nodes: Nodes) -> Done:
        """The node's agent ends its processes first, if it can be heard; then the scheduler is told."""
        return await self._both(work, self.local.evict_node(work, nodes))

    async def wake_standby(self, work: Work, nodes: Nodes) -> Done:
        """The scheduler hands the node out first; then its agent must be heard."""
        if "wake_standby" not in await self.verbs():
            return await self.local.wake_standby(work, nodes)
        woken = await self._call(work)
        if woken.result != "done":
            return woken
        parked = await self.local.wake_standby(work, nodes)
        return Done(parked.result, _joined(woken.detail, parked.detail), parked.nodes, parked.again)

    async def notify(self, work: Work, nodes: Nodes) -> Done:
        return await self._either(work, self.local.notify(work, nodes))

    async def capture_stacks(self, work: Work, nodes: Nodes) -> Done:
        return await self.local.capture_stacks(work, nodes)

    async def diagnose(self, work: Work, nodes: Nodes) -> Done:
        return await self.local.diagnose(work, nodes)

    async def examine(self, work: Work, nodes: Nodes) -> Done:
        return await self.local.examine(work, nodes)

    async def group_test(self, work: Work, nodes: Nodes) -> Done:
        return await self.local.group_test(work, nodes)

    async def finished(self, declared: JobDeclared, key: str, standbys: tuple[str, ...], nodes: Nodes) -> None:
        await self.local.finished(declared, key, standbys, nodes)

    async def _either(self, work: Work, local: Any) -> Done:
        if work.intent.verb in await self.verbs():
            local.close()
            return await self._call(work)
        done: Done = await local
        return done

    async def _both(self, work: Work, local: Any) -> Done:
        first: Done = await local
        if first.result != "done" or work.intent.verb not in await self.verbs():
            return first
        second = await self._call(work)
        return Done(second.result, _joined(first.detail, second.detail), second.nodes or first.nodes, second.again)

    async def _call(self, work: Work) -> Done:
        intent, declared = work.intent, work.declared
        told = intent.model_dump(mode="json", exclude={"trigger", "ledger_digest", "expires_ns"})
        told["standbys"] = list(work.standbys)
        told["ranks_per_node"] = declared.ranks_per_node
        told["places_declared"] = [place.model_dump(mode="json") for place in declared.nodes]
        code, stdout, stderr = await self.run(intent.verb, told, self.limit_s)
        said = shown(stdout, stderr)
        node = (intent.node,) if intent.node else ()
        if code == 0:
            return Done("done", said)
        if code is None:
            return Done(
                "failed", _joined(f"the script did not end within {self.limit_s:g} s and was killed", said), node, again=True
            )
        if code == EX_TEMPFAIL:
            return Done("failed", _joined("the script asks to be tried again later", said), node, again=True)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Done("failed", _joined(f"the script failed with {how}", said), node)

    async def run(self, verb: str, told: dict[str, Any], limit_s: float) -> tuple[int | None, bytes, bytes]:
        """Exit code (negative: a signal; None: out of time), and the ends of what it printed."""
        try:
            process = await asyncio.create_subprocess_exec(
                self.script,
                verb,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return 126, b"", f"{self.script}: {error.strerror or error}".encode()
        assert process.stdin and process.stdout and process.stderr
        readers = [asyncio.create_task(_tail(stream)) for stream in (process.stdout, process.stderr)]
        code: int | None = None
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(OSError):  # it need not read what it is told
                    process.stdin.write(json.dumps(told, sort_keys=True).encode() + b"\n")
                    await process.stdin.drain()
                    process.stdin.close()
                code = await _exit_of(process)
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:  # not waited for yet, so that the number is still its own
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _exit_of(process)
            _, late = await asyncio.wait(readers, timeout=1.0)
            for reader in late:  # a pipe held open by something that left the group
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            process._transport.close()  # type: ignore[attr-defined]  # the pipe's other end may stay open for ever
        out, err = (b"" if r.cancelled() or r.exception() else r.result() for r in readers)
        return code, out, err


async def _exit_of(process: asyncio.subprocess.Process) -> int:
    """Its exit code as soon as it has one: `wait` waits for whoever else holds its pipes, too, and a script may leave something behind."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return process.returncode


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-OUTPUT_BYTES_MAX:]
    return kept


def described(stdout: bytes) -> frozenset[str]:
    """What a script's answer to `describe` comes to. Raises BadScript for verbs that there are not."""
    try:
        value = json.loads(stdout)
        verbs = frozenset(value["verbs"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return DEFAULT_VERBS
    if unknown := sorted(str(verb) for verb in verbs - VERBS):
        raise BadScript(
            f"the actuation script declares verbs that there are not: {', '.join(unknown)}; there are {', '.join(sorted(VERBS))}"
        )
    return verbs


def shown(stdout: bytes, stderr: bytes) -> str:
    """Fit for an event: text, bounded, the end kept, secrets of our own environment blanked."""
    text = "; ".join(part for raw in (stdout, stderr) if (part := " ".join(raw.decode("utf-8", "replace").split())))
    text = _UNSHOWN.sub("�", redacted(text, secrets_in(os.environ)))
    return text if len(text) <= DETAIL_CHARACTERS_MAX else "…" + text[-DETAIL_CHARACTERS_MAX:]


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
