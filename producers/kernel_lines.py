"""Lines of a kernel log, understood: raw /dev/kmsg records, dmesg's text, syslog (RFC 3164 and 5424) and journalctl's short form.

Pure: bytes in, a `Line` out. It never raises, its output is bounded, and no byte of a line can reach a terminal as a control
sequence. What belongs elsewhere: reading (kernel_log.py, log_file.py) and what a line means (the catalogue).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from events.envelope import TEXT_MAX

#: Ends a text that was longer than an event may carry.
CUT_MARK = "…[cut]"

#: syslog's facility of what a user-space program says; a line of a tag other than `kernel` is one's.
FACILITY_USER = 1


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `sequence` and `since_boot_us` are 0 and `host` empty where the format has none."""

    text: str
    priority: int = 6
    facility: int = 0
    sequence: int = 0
    since_boot_us: int = 0
    host: str = ""


#: What a bare line that matches none of this still may not hold: C0 but for the tab, DEL, C1, and the characters by which a
#: text can hide or turn around on a screen.
_UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(raw: bytes, length_max: int = TEXT_MAX) -> str:
    """Bytes as text that is safe to show: undecodable bytes and control characters as escapes (`\\x1b`), tabs as blanks, at most
    `length_max` characters with a mark at the end of what was cut."""
    cut = len(raw) > length_max * 4
    text = raw[: length_max * 4].decode("utf-8", "backslashreplace")
    text = _UNSAFE.sub(_escaped, text.replace("\t", " "))
    if cut or len(text) > length_max:
        text = text[: length_max - len(CUT_MARK)] + CUT_MARK
    return text


_KMSG = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20}),([^;,\n]{1,8})(?:,[^;\n]{0,200})?;")
#: `<N>` in front: the priority, facility * 8 + level.
_PRI = re.compile(rb"<(\d{1,5})>")
#: dmesg -x: `kern  :info  : `.
_DECODED = re.compile(rb"([a-z0-9]{3,8}) *:([a-z]{3,6}) *: ")
_FACILITIES = {b"kern": 0, b"user": 1, b"mail": 2, b"daemon": 3, b"auth": 4, b"syslog": 5, b"lpr": 6, b"news": 7, b"uucp": 8,
               b"cron": 9, b"authpriv": 10, b"ftp": 11} | {b"local%d" % n: 16 + n for n in range(8)}  # fmt: skip
_LEVELS = {b"emerg": 0, b"alert": 1, b"crit": 2, b"err": 3, b"warn": 4, b"notice": 5, b"info": 6, b"debug": 7}
#: dmesg: `[   12.345678] ` with an optional `[ T123]` or `[C0]`, or dmesg -d's `<  0.000001>`.
_DMESG = re.compile(rb"\[ {0,11}(\d{1,12})\.(\d{6})(?: *< *\d+\.\d+>)?\] ?(?:\[ *[TC]\d{1,10}\] ?)?")
#: dmesg -T, in whatever language, and dmesg -e: `[Tue Mar  3 12:00:00 2026] `, `[Mar 3 12:00] `, `[  +0.000012] `.
#: A PCI address (`[0000:03:00.0]`) is none: the time stands alone between a blank and a blank or the end.
_LOCALISED = re.compile(rb"\[(?: *\+\d+\.\d+|(?=[^\]]{0,50} \d\d:\d\d(?::\d\d)?[ \]])[^\[\]]{6,60})\] ?")
_DAY_TIME, _ZONE = rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d", rb"(?:Z|[+-]\d\d:?\d\d)?"
#: With a decimal point; dmesg's own ISO times have a comma, and what follows those is the text, never a host.
_ISO = _DAY_TIME + rb"(?:\.\d{1,9})?" + _ZONE
_ISO_TIME = re.compile(_DAY_TIME + rb"(?:[.,]\d{1,9})?" + _ZONE + rb" ")
#: RFC 3164 and journalctl's short forms: `Mar  3 12:00:00.123456 host tag[12]: `; with ISO times rsyslog's and short-iso.
_TAG = rb"(?P<tag>[^\s:\[\]]{1,64})(?:\[(?P<pid>\d{1,10})\])?: ?"
_SYSLOG = re.compile(
    rb"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?|" + _ISO + rb") (?P<host>[^\s:\[\]]{1,255}) " + _TAG
)
#: journalctl -o short-monotonic: `[  123.456789] host kernel: `.
_MONOTONIC = re.compile(
    rb"\[ *(\d{1,12})\.(\d{6})\] (?P<host>[^\s:\[\]]{1,255}) (?P<tag>kernel|[^\s:\[\]]{1,64}\[\d{1,10}\]): ?"
)
#: RFC 5424 after its `<N>`: version, time, host, application, process, message id, structured data.
_RFC5424 = re.compile(
    rb"1 (?:-|" + _ISO + rb") (?P<host>\S{1,255}) (?P<tag>\S{1,48}) \S{1,128} \S{1,32} "
    rb'(?:-|(?:\[(?:[^"\]\\]|"(?:[^"\\]|\\.){0,2000}"){0,200}\]){1,20})(?: \xef\xbb\xbf| |$)'
)


def short_host(name: str) -> str:
    """A host's name as it is compared: short and in lower case (`GPU-001.site.example` and `gpu-001` are one)."""
    return name.split(".", 1)[0].lower()


def parse_kmsg(record: bytes) -> Line | None:
    """One record as read from /dev/kmsg: `prefix;text`, then lines ` KEY=value` (its dictionary), which are left out. None if it
    is no such record."""
    head = _KMSG.match(record)
    if not head:
        return None
    code = int(head[1])
    text = record[head.end() :].split(b"\n", 1)[0]
    return Line(
        _unescaped(text),
        priority=code & 7,
        facility=code >> 3,
        sequence=min(int(head[2]), 2**63 - 1),
        since_boot_us=min(int(head[3]), 2**63 - 1),
    )


def _unescaped(text: bytes) -> str:
    """The kernel writes a byte that is not printable ASCII as `\\xNN`, and a backslash as `\\x5c`: back to bytes, then made
    printable, so that UTF-8 reads as itself and control characters stay escaped."""
    if b"\\x" in text:
        text = re.sub(rb"\\x([0-9a-fA-F]{2})", lambda m: bytes([int(m[1], 16)]), text)
    return printable(text)


def parse_line(raw: bytes) -> Line | None:
    """One line of a file (without its newline), whatever of the formats it has. None for an empty line and for a raw record's
    dictionary line (` KEY=value`). A line is taken for the kernel's (facility 0) unless its format says otherwise: by `<N>`, by
    dmesg's decoded facility or by a syslog tag that is not `kernel`."""
    raw = raw.rstrip(b"\r\n")
    if not raw.strip() or _DICTIONARY.match(raw):
        return None
    kmsg = parse_kmsg(raw)
    if kmsg is not None:
        return kmsg
    priority, facility, host, since_us = 6, 0, "", 0
    pri = _PRI.match(raw)
    if pri:
        priority, facility = int(pri[1]) & 7, int(pri[1]) >> 3
        raw = raw[pri.end() :]
    else:
        decoded = _DECODED.match(raw)
        if decoded and decoded[1] in _FACILITIES and decoded[2] in _LEVELS:
            priority, facility = _LEVELS[decoded[2]], _FACILITIES[decoded[1]]
            raw = raw[decoded.end() :]
    syslog = (_RFC5424.match(raw) if pri else None) or _MONOTONIC.match(raw) or _SYSLOG.match(raw)
    if syslog:
        host = printable(syslog["host"], 255)
        if syslog["tag"] != b"kernel" and facility == 0:
            facility = FACILITY_USER
        if syslog.re is _MONOTONIC:
            since_us = int(syslog[1]) * 1_000_000 + int(syslog[2])
        raw = raw[syslog.end() :]
    elif time := _ISO_TIME.match(raw):
        raw = raw[time.end() :]
    stamp = _DMESG.match(raw)
    if stamp:
        since_us = int(stamp[1]) * 1_000_000 + int(stamp[2])
        raw = raw[stamp.end() :]
    elif not syslog and (localised := _LOCALISED.match(raw)):
        raw = raw[localised.end() :]
    return Line(printable(raw), priority=priority, facility=facility, since_boot_us=since_us, host=host)


#: A raw record's dictionary line, as `cat /dev/kmsg` leaves it in a file.
_DICTIONARY = re.compile(rb" [A-Z][A-Z0-9_]{0,63}=")


_PROCESS = re.compile(r"\bpid[ =:]{1,3}'?(\d{1,10})\b|\b[Pp]rocess (\d{1,10}) \(|\[(\d{1,10})\]: segfault")


def names_one_of(text: str, pids: frozenset[int]) -> bool:
    """Whether a line names one of these processes (`pid=77`, `pid: 77`, `process 77 (python)`): what they are told of, they caused."""
    return any(int(next(filter(None, match.groups()))) in pids for match in _PROCESS.finditer(text, 0, 4096)) if pids else False
