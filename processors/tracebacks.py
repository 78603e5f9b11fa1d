"""Python tracebacks read out of what a rank printed: their frames, exceptions and how they are linked, whatever was written around and
between them (launchers' prefixes, other ranks, colours, boxes of exception groups, a cut beginning). Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: More is not looked at, the end is kept: a rank's last words are what counts.
TEXT_CHARACTERS_MAX = 64_000
LINE_CHARACTERS_MAX = 2_000
FRAMES_MAX = 200
MESSAGE_LINES_MAX = 12

#: Colours, as they come and as they are shown in events.
_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033)\[[0-9;?]*[ -/]*[@-~]")
#: Who of several wrote a line: `[rank3]: `, `[default3]:`, `[1,3]<stderr>:`, srun's `3: `, Ray's `(worker pid=1, ip=…) `, torchrun's tee.
_WHO = re.compile(
    r"\s*\[(?:rank|default)?(\d{1,6})\]: ?"
    r"|\[\d{1,3},(\d{1,6})\]<std(?:err|out)>: ?"
    r"|\[rank ?(\d{1,6})\] "
    r"|(\d{1,6}): (?=\s|\[|Traceback|[A-Za-z_.]+(?:Error|Exception|Group)\b)"
    r"|(\([A-Za-z_]\w* pid=\d+(?:, ip=[\d.a-f:]+)?\)) ?"
)
_BOX = re.compile(r"\s*(?:[+|] ?)?\s*(?:\+-\+|\+)-{4,}.*$|(\s*)(?:\||\+(?= Exception Group))( ?)")
_HEADER = re.compile(r"(\s*)(.*?)(?:Exception Group |Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'(\s*)File "([^"\n]+)", line (\d{1,9})(?:, in (.+?))?\s*$')
#: The line that ends a traceback: a name, which has a capital somewhere or a module before it, and a message.
_EXCEPTION = re.compile(r"(\s*)((?:[A-Za-z_][\w<>]*\.)*[A-Za-z_]\w*)(?:: ?(.*))?$")
_NAMED = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|timeout|Failure|Group|StopIteration|StopAsyncIteration|Traceback)$"
)
_CAUSE = "The above exception was the direct cause of the following exception:"
_DUMP = "(most recent call first)"
_CONTEXT = "During handling of the above exception, another exception occurred:"
#: A traceback that ends nothing: a destructor's, a callback's that the interpreter swallowed.
_IGNORED = re.compile(
    r"Exception ignored in|Exception ignored on|Error in sys\.excepthook|Exception in thread |Task exception was never retrieved"
)
#: What no message goes on with: lines of loggers, C++ stacks, other programs.
_STRANGER = re.compile(
    r"\s*(?:\[?\d{4}[-/]\d\d[-/]\d\d|\[[WEIF]\d*[ :]|\[[A-Z]+\]|[\w.-]+:\d+:\d+ \[\d+\]|(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL)\b"
    r"|frame #\d+|srun: |slurmstepd|terminate called|Exception raised from|wandb: |E\d{4} |W\d{4} |I\d{4} )|.*\bNCCL (?:INFO|WARN)\b"
)


class Frame(NamedTuple):
    """`function` empty: a place in a file that does not parse."""

    file: str
    line: int
    function: str


class Raised(NamedTuple):
    """One exception with its frames, outermost first. `name` as printed, with its module where that was printed."""

    name: str
    message: str
    frames: tuple[Frame, ...]

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def line(self) -> str:
        first = self.message.partition("\n")[0]
        return f"{self.name}: {first}" if first else self.name


class Chain(NamedTuple):
    """Exceptions that hang together, in the order of their raising: the last is the one that went up. `rank`: whose it is, by the lines'
    own prefixes (-1: nobody's in particular). `ignored`: it ended nothing. `at`: where it stood in the text."""

    raised: tuple[Raised, ...]
    rank: int = -1
    ignored: bool = False
    at: int = 0


def chains(text: str) -> tuple[Chain, ...]:
    """All that a text holds, in its order of their ends."""
    text = _COLOUR.sub("", text[-TEXT_CHARACTERS_MAX:])
    writers: dict[str, list[tuple[int, str]]] = {}
    for at, line in enumerate(text.split("\n")):
        who, body = _who(line[:LINE_CHARACTERS_MAX].rstrip("\r"))
        writers.setdefault(who, []).append((at, body))
    found = [chain for who, lines in writers.items() for chain in _joined(_blocks(lines), int(who) if who.isdigit() else -1)]
    return tuple(sorted(found, key=lambda chain: chain.at))


def _who(line: str) -> tuple[str, str]:
    """Who wrote it ("" for nobody in particular), and what. A launcher may have put a prefix before the rank's own."""
    who = ""
    for _ in range(2):
        match = _WHO.match(line)
        if match is None:
            break
        who, line = next(group for group in match.groups() if group is not None), line[match.end() :]
    return who, line


class _Block(NamedTuple):
    """One exception as it stands in the text. `link`: how it hangs on the one before it: not at all (""), `after` (raised from it or while
    it was handled, or in the same group), `original` (it was raised first, and is printed inside of the other's message)."""

    raised: Raised
    link: str
    ignored: bool
    at: int


def _blocks(lines: list[tuple[int, str]]) -> list[_Block]:
    """Of one writer's lines."""
    reader = _Reader()
    in_boxes = any("Exception Group Traceback" in line for _, line in lines)
    for at, line in lines:
        box = _BOX.match(line) if in_boxes else None
        reader.boxed = box is not None
        if box is not None:
            line = line[box.end() :] if box[1] is not None else ""
        reader.feed(at, line)
    reader.close()
    return reader.blocks


class _Reader:
    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.boxed = False
        self._frames: list[Frame] = []
        self._indent = 0
        self._link, self._ignored, self._begun, self._dump = "", False, False, False
        #: Of an exception whose message may go on: its lines, and the blank ones since.
        self._message: list[str] | None = None
        self._blank = False

    def feed(self, at: int, line: str) -> None:
        bare = line.strip()
        if header := _HEADER.match(line):
            self._begin(bare, len(header[1]))
        elif _DUMP in line:  # where threads stood, innermost first: nothing was raised there
            self.close()
            self._frames, self._dump = [], True
        elif bare in (_CAUSE, _CONTEXT):
            self.close()
            self._link = "after" if self.blocks else ""
        elif _IGNORED.match(bare):
            self.close()
            self._ignored = True
        elif frame := _FRAME.match(line):
            self._frame(frame)
        elif self._message is not None:
            self._goes_on(line, bare)
        elif bare and (match := _EXCEPTION.match(line)) and self._is_exception(match):
            self.blocks.append(_Block(Raised(match[2], "", tuple(self._frames)), self._link, self._ignored, at))
            self._message, self._blank = [match[3] or ""], False
            self._frames, self._link, self._ignored, self._begun = [], "", False, False

    def close(self) -> None:
        """The message is over."""
        if self._message is not None:
            last = self.blocks[-1]
            raised = last.raised._replace(message="\n".join(self._message).rstrip())
            self.blocks[-1] = last._replace(raised=raised)
            self._message = None

    def _begin(self, bare: str, indent: int) -> None:
        self.close()
        if bare.startswith("Original "):
            self._link = "original" if self.blocks else ""
        elif self.boxed and self.blocks and not self._link and "Exception Group" not in bare:
            self._link = "after"
        self._frames, self._begun, self._dump, self._indent = [], True, False, indent

    def _frame(self, match: re.Match[str]) -> None:
        self.close()
        if self._dump:
            return
        if not self._frames:
            self._indent = max(0, len(match[1]) - 2)
        if len(self._frames) >= FRAMES_MAX:  # a recursion's: the last ones say where
            del self._frames[FRAMES_MAX // 2]
        self._frames.append(Frame(match[2], int(match[3]), match[4] or ""))

    def _is_exception(self, match: re.Match[str]) -> bool:
        indent, name = len(match[1]), match[2]
        if indent > self._indent:  # a frame's own line of code
            return False
        if _NAMED.search(name):
            return bool(self._frames) or self._begun or match[3] is not None
        # After frames, whatever looks like a class is one.
        return bool(self._frames) and (name.rpartition(".")[2][:1].isupper() or "." in name)

    def _goes_on(self, line: str, bare: str) -> None:
        assert self._message is not None
        if not bare:
            self._blank = True
        elif self._blank or _STRANGER.match(line) or len(self._message) >= MESSAGE_LINES_MAX:
            self.close()
        else:
            self._message.append(line[self._indent :] if not line[: self._indent].strip() else line)


def _joined(blocks: list[_Block], rank: int) -> list[Chain]:
    found: list[Chain] = []
    for block in blocks:
        if block.link and found:
            last = found[-1]
            place = len(last.raised) - (block.link == "original")
            raised = (*last.raised[:place], block.raised, *last.raised[place:])
            found[-1] = last._replace(raised=raised, at=block.at)
        else:
            found.append(Chain((block.raised,), rank, block.ignored, block.at))
    return found
