"""Watches the node's network links: what the kernel says of interfaces the moment it says it, the states of RDMA ports each second,
and every half minute what all of them carried and counted.

Only links that were up once and that a job uses count (nic_links.chosen). They are kept beside the agent's state for as long as the
machine is up, so that a link that went down while no agent ran is still missed by the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from events.clock import NS
from events.envelope import NAME_MAX, TEXT_MAX
from events.hardware import EvidenceGap
from events.network import LINKS_MAX, Link, LinkChanged, LinkSample, LinkState, LinkTraffic, NicBaseline, NicSample
from events.presence import AgentState
from producers.netlink_messages import LinkNews
from producers.nic_links import (
    AUTO,
    IGNORED_MAX,
    Interface,
    Known,
    Port,
    Survey,
    Tally,
    chosen,
    counted,
    full,
    matches,
    news_state,
    rise,
)
from producers.nic_netlink import LinkSocket
from producers.nic_sysfs import SysfsLinks
from producers.observe import Desk
from producers.reader_thread import Hung, ReaderThread
from producers.supervise import Pulse, sentence

T = TypeVar("T")
PRODUCER = "nic"
#: A link that is up and still for so long is settled: what its device counts from here on is news.
SETTLED_NS = 10 * NS
GAP_NS_MIN = 5 * NS
#: After news of a link that is not known: everything is looked at, so often at most.
SURVEY_S_MIN = 1.0


@dataclass(frozen=True, slots=True)
class NicSettings:
    """`patterns`: auto, shell patterns of names, and `!` patterns that leave out. `root` stands for /sys."""

    patterns: tuple[str, ...] = (AUTO,)
    poll_s: float = 1.0
    sample_s: float = 30.0
    deadline_s: float = 5.0
    root: Path = Path("/sys")
    netlink: bool = True
    receive_bytes: int = 1024 * 1024


@dataclass(slots=True)
class _Watched:
    known: Known
    state: LinkState
    downs: int = -1
    tally: Tally = field(default_factory=Tally)
    changed_ns: int = 0
    rate_mbps: int = -1
    counters: Mapping[str, int] = field(default_factory=dict)
    counted_ns: int = 0


class NicProducer:
    """`run` goes on until cancelled."""

    def __init__(self, desk: Desk, state_dir: Path, settings: NicSettings, *, sysfs: SysfsLinks | None = None) -> None:
        self.desk = desk
        self.settings = settings
        self.pulse = Pulse(settings.sample_s)
        self.links: dict[str, _Watched] = {}
        self._sysfs = sysfs or SysfsLinks(settings.root)
        self._thread = ReaderThread(PRODUCER)
        self._stalled = False
        self._state_path = state_dir / "nic.json"
        self._include = [p for p in settings.patterns if not p.startswith("!") and p != AUTO]
        self._ignored: dict[str, str] = {}
        self._by_index: dict[int, str] = {}
        self._interfaces: dict[str, str] = {}  # of RDMA ports: interface -> port
        self._gap_ns: dict[str, int] = {}
        self._poke = asyncio.Event()
        self._survey_wanted = False
        self._unseen: set[str] = set()
        self._netlink = LinkSocket(
            self._on_link, self._on_dump, self._on_overrun, self._on_problem, receive_bytes=settings.receive_bytes
        )
        self._netlink_missing = False
        self._baseline_said: NicBaseline | None = None

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        self._open_netlink()
        try:
            self._load()
            await self._survey()
            self._netlink.ask()
            await self._sample()
            surveyed_s = sampled_s = clock()
            while True:
                await self._wait(sampled_s + self.settings.sample_s - clock())
                now_s = clock()
                self.pulse.beat()
                if self._polls:
                    await self._look()
                if self._survey_wanted and now_s - surveyed_s >= min(SURVEY_S_MIN, self.settings.poll_s):
                    surveyed_s = now_s
                    await self._survey()
                if now_s - sampled_s >= self.settings.sample_s:
                    surveyed_s = sampled_s = now_s
                    self._open_netlink()
                    self._netlink.ask()  # what was missed, for whatever reason, is found here at the latest
                    await self._survey()
                    await self._sample()
        finally:
            self._netlink.close()
            self._thread.close()

    @property
    def _polls(self) -> bool:
        return not self._netlink.is_open or any(w.known.kind == "rdma" for w in self.links.values())

    async def _wait(self, until_sample_s: float) -> None:
        wait_s = self.settings.poll_s if self._polls or self._survey_wanted else until_sample_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, min(wait_s, until_sample_s))):
                await self._poke.wait()
        self._poke.clear()

    # What is there

    async def _survey(self) -> None:
        """Looks at everything; links that count and are up join those that are watched."""
        wanted = self._include
        survey = await self._read(lambda: self._sysfs.survey(lambda name: matches(name, wanted)))
        if survey is None:
            return
        self._survey_wanted = False
        rdma = any(w.known.kind == "rdma" for w in self.links.values())
        links, self._ignored = chosen(survey, self.settings.patterns, rdma=rdma)
        for device in [device for device in self.links if device in self._ignored]:
            del self.links[device]
        states = _states(survey)
        for device, known in links.items():
            found = states[device]
            watched = self.links.get(device)
            if watched is not None:
                watched.known = known._replace(rate_mbps=max(known.rate_mbps, watched.known.rate_mbps))
            elif found.state == "up" and len(self.links) < LINKS_MAX:
                downs = found.downs if isinstance(found, Port) else found.carrier_downs
                self.links[device] = _Watched(known, "up", downs, rate_mbps=known.rate_mbps)
        self._index()
        for device, watched in list(self.links.items()):
            if watched.known.kind == "rdma" or not self._netlink.is_open:
                self._seen(device, states.get(device))
        self._say_baseline()

    def _index(self) -> None:
        self._by_index = {w.known.ifindex: device for device, w in self.links.items() if w.known.ifindex}
        self._interfaces = {w.known.interface: device for device, w in self.links.items() if w.known.interface}

    def _say_baseline(self) -> None:
        links = tuple(
            Link(
                device=device, interface=w.known.interface, layer=w.known.layer[:NAME_MAX], state=w.state, pci=w.known.pci[:NAME_MAX],
                rate_mbps=w.known.rate_mbps, driver=w.known.driver, full=full(w.counters, w.known.kind == "rdma"),
            )
            for device, w in self.links.items()
        )  # fmt: skip
        baseline = NicBaseline(
            links=links, ignored=tuple(self._ignored.items())[:IGNORED_MAX], ignored_count=len(self._ignored)
        )
        said = self._baseline_said
        if said is None or {link.device for link in said.links} != set(self.links):
            self._baseline_said = baseline
            self.desk.about_node(PRODUCER, baseline)
            self._save()

    async def _look(self) -> None:
        """The states of what netlink does not tell of."""
        links = [w.known for w in self.links.values() if w.known.kind == "rdma" or not self._netlink.is_open]
        found = await self._read(lambda: self._sysfs.looks(links))
        for device, one in (found or {}).items():
            if device in self.links:
                self._seen(device, one)

    def _seen(self, device: str, found: Interface | Port | None) -> None:
        if found is None:
            self._told(device, "gone", -1, "its entry in sysfs is gone", seen_by="sysfs")
        elif isinstance(found, Port):
            self._told(device, found.state, found.downs, found.detail, by_hand="Disabled" in found.detail, seen_by="sysfs")
        else:
            self._told(device, found.state, found.carrier_downs, "", by_hand=found.by_hand, seen_by="sysfs")

    # What changes

    def _told(
        self, device: str, state: LinkState, downs: int, detail: str, *, by_hand: bool = False, seen_by: Literal["netlink", "sysfs"]
    ) -> None:  # fmt: skip
        """A watched link's state as it was just seen. `downs`: how often the device counts that it went down, -1 unknown."""
        watched = self.links[device]
        now_ns = self.desk.clock.boot_ns()
        if watched.state == "up" and now_ns - watched.changed_ns > SETTLED_NS:
            watched.tally = Tally()
        risen, again = rise(watched.downs, downs)
        before, told = watched.state, watched.tally.told
        watched.tally = watched.tally.next(0 if again else risen, before == "up" and state in ("down", "gone"))
        watched.downs = downs if downs >= 0 or state == "gone" else watched.downs
        watched.state = state
        new_downs = watched.tally.told - told
        if state == before and not new_downs:
            return
        watched.changed_ns = now_ns
        fact = LinkChanged(
            device=device, interface=watched.known.interface, layer=watched.known.layer, state=state, before=before,
            downs=new_downs, by_hand=by_hand and state == "down", since_boot_s=now_ns // NS, seen_by=seen_by,
            detail=detail[:TEXT_MAX],
        )  # fmt: skip
        self.desk.about_node(PRODUCER, fact)
        if state == "moved":
            del self.links[device]
            self._index()
            self._say_baseline()

    # The kernel's word

    def _open_netlink(self) -> None:
        if not self.settings.netlink or self._netlink.is_open:
            return
        try:
            self._netlink.open()
        except OSError as error:
            if not self._netlink_missing:
                self._netlink_missing = True
                text = f"no word of the kernel on links ({error.strerror}): they are looked at every {self.settings.poll_s:g} s"
                self._say("skipped", text)

    def _on_link(self, news: LinkNews) -> None:
        device = self._by_index.get(news.ifindex, news.name)
        if device in self.links and device != news.name and news.name and not news.deleted:
            device = self._renamed(device, news.name)
        watched = self.links.get(device)
        if watched is None or watched.known.kind == "rdma":
            self._of_another(news)
            return
        if news.deleted and watched.known.ifindex not in (0, news.ifindex):
            return  # an older device of that name
        self._unseen.discard(device)
        if not news.deleted and watched.known.ifindex != news.ifindex:  # its driver was loaded again
            watched.known = watched.known._replace(ifindex=news.ifindex)
            watched.downs = -1
            self._index()
        detail = f"operstate {news.operstate}" + ("" if news.admin_up else ", set down")
        self._told(device, news_state(news), news.carrier_downs, detail, by_hand=not news.admin_up, seen_by="netlink")

    def _of_another(self, news: LinkNews) -> None:
        """Of an interface that is not watched: it may belong to an RDMA port, or be one that now joins."""
        if news.name in self._interfaces:
            self._poke.set()
            return
        new = not news.deleted and news.name not in self._ignored and news_state(news) == "up"
        if new and (not news.kind or matches(news.name, self._include)):
            self._survey_wanted = True
            self._poke.set()

    def _renamed(self, old: str, new: str) -> str:
        watched = self.links.pop(old)
        watched.known = watched.known._replace(device=new)
        self.links[new] = watched
        self._unseen.discard(old)
        self._index()
        self._say_baseline()
        return new

    def _on_dump(self, begins: bool) -> None:
        if begins:
            self._unseen = {device for device, w in self.links.items() if w.known.kind == "net"}
            return
        gone, self._unseen = self._unseen, set()
        for device in sorted(gone & set(self.links)):
            self._told(device, "gone", -1, "the kernel has no such link", seen_by="netlink")

    def _on_overrun(self) -> None:
        self._gap("overrun", "the kernel had more to say of its links than was read in time; all of them are asked for again")
        self._netlink.ask()

    def _on_problem(self, text: str) -> None:
        self._gap("unreadable", text)

    # Counters

    async def _sample(self) -> None:
        links = [w.known for w in self.links.values()]
        found = await self._read(lambda: {k.device: (self._sysfs.counters(k), self._sysfs.rate_mbps(k)) for k in links})
        if found is None:
            return
        now_ns = self.desk.clock.boot_ns()
        samples: list[LinkSample] = []
        filled: list[str] = []
        period_s = 0.0
        for device, (counters, rate_mbps) in found.items():
            watched = self.links.get(device)
            if watched is None:
                continue
            rdma = watched.known.kind == "rdma"
            took_s = (now_ns - watched.counted_ns) / NS if watched.counted_ns else 0.0
            period_s = max(period_s, took_s)
            rises = counted(watched.counters, counters, rdma, took_s)
            watched.rate_mbps = rate_mbps if watched.state == "up" else -1
            if watched.rate_mbps > watched.known.rate_mbps:
                watched.known = watched.known._replace(rate_mbps=rate_mbps)
            samples.append(
                LinkSample(
                    device=device, layer=watched.known.layer, state=watched.state, rate_mbps=watched.rate_mbps,
                    rate_full_mbps=watched.known.rate_mbps, sent_bytes_per_s=rises.sent_bytes_per_s,
                    received_bytes_per_s=rises.received_bytes_per_s, counted=rises.counted, began_again=rises.began_again,
                )
            )  # fmt: skip
            filled += [f"{device} {name}" for name in rises.filled]
            if counters:
                watched.counters, watched.counted_ns = counters, now_ns
        if filled:
            self._gap("overrun", f"counters reached the most they can hold; more can't be seen: {', '.join(filled)}")
        self.desk.about_node(PRODUCER, NicSample(period_s=round(period_s, 3), since_boot_s=now_ns // NS, links=tuple(samples)))
        self._say_traffic(period_s, samples)

    def _say_traffic(self, period_s: float, samples: list[LinkSample]) -> None:
        """To the job that runs here: what all links carried, once each of them is known to have counted for the whole period."""
        rates = [rate for one in samples for rate in (one.sent_bytes_per_s, one.received_bytes_per_s)]
        if self.desk.job and rates and period_s > 0 and min(rates) >= 0:
            fact = LinkTraffic(period_s=round(period_s, 3), bytes_per_s=round(sum(rates), 1), links=len(samples))
            self.desk.about_job(PRODUCER, self.desk.job, self.desk.attempt, fact)

    # Reading, saying, keeping

    async def _read(self, work: Callable[[], T]) -> T | None:
        """What the reader gives; None while a driver hangs, which is said once."""
        try:
            result = await self._thread.read(work, self.settings.deadline_s)
        except Hung:
            if not self._stalled:
                self._stalled = True
                self._say(
                    "stalled",
                    f"reading the links' state hangs for over {self.settings.deadline_s:g} s: a driver does not answer",
                )
            return None
        except OSError as error:
            self._gap("unreadable", f"the links' state can't be read: {sentence(error)}")
            return None
        if self._stalled:
            self._stalled = False
            self._say("resumed", "the links' state can be read again")
        return result

    def _say(self, state: Literal["stalled", "resumed", "skipped"], detail: str) -> None:
        self.desk.about_node(PRODUCER, AgentState(producer=PRODUCER, state=state, detail=detail[:TEXT_MAX]))

    def _gap(self, reason: Literal["overrun", "unreadable"], detail: str) -> None:
        """Once in a while for each reason: a second one within moments says nothing new."""
        now_ns = self.desk.clock.boot_ns()
        if now_ns - self._gap_ns.get(reason, -GAP_NS_MIN) < GAP_NS_MIN:
            return
        self._gap_ns[reason] = now_ns
        self.desk.about_node(PRODUCER, EvidenceGap(producer=PRODUCER, reason=reason, detail=detail[:TEXT_MAX]))

    def _load(self) -> None:
        """Links that an earlier agent of this boot saw up: watched as if they were, so that their absence is news."""
        try:
            value: Any = json.loads(self._state_path.read_text())
            if value["boot_id"] != self.desk.boot_id:
                return
            for device, kind, layer, interface, rate_mbps in value["links"][:LINKS_MAX]:
                if kind in ("net", "rdma") and (kind == "net" or device.rpartition("/")[2].isdigit()):
                    known = Known(str(device)[:NAME_MAX], kind, str(layer), str(interface), 0, int(rate_mbps))
                    self.links[known.device] = _Watched(known, "up")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return

    def _save(self) -> None:
        known = [w.known for w in self.links.values()]
        links = [(k.device, k.kind, k.layer, k.interface, k.rate_mbps) for k in known]
        temporary = self._state_path.with_suffix(".tmp")
        with suppress(OSError):  # then links that go down while no agent runs are not missed
            temporary.write_text(json.dumps({"boot_id": self.desk.boot_id, "links": links}))
            temporary.replace(self._state_path)


def _states(survey: Survey) -> dict[str, Interface | Port]:
    states: dict[str, Interface | Port] = {port.name: port for port in survey.ports}
    for interface in survey.interfaces:
        states.setdefault(interface.name, interface)
    return states
