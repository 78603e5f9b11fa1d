"""The pages that people were sent, as a fold of LEDGER: which stand, which were acknowledged, which are over, which are to be repeated.
Pure; infra/pager.py sends.

    fold(pages, seen) -> pages          due(pages, now_ns, after_s, most) -> (Page, …)          to_end(pages, now_ns) -> (Page, …)

A page is over when its incident is closed, its question is answered or superseded, or (what was planned) the next word is given or a new
attempt made a healthy step.
One that is over or acknowledged is not repeated; that it is over is told once. A new page of the same incident is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from actuators.intents import Seen
from events.action import OutcomeRecorded, PageEnded, PageRepeated
from events.clock import NS
from events.decision import DecisionMade, IncidentClosed, IntentIssued
from events.incident import JobFinished, ProgressNoted
from events.job import ApprovalGiven, JobDeclared, OverrideGiven, PageAcknowledged, RestartRequested, StopRequested

V = TypeVar("V")

#: Pages and decisions that are remembered, and how long one that is over still is, so that its end can be told again.
PAGES_MAX = 2_000
OVER_S_MAX = 900
WORDS = {RestartRequested: "restart", StopRequested: "stop", JobDeclared: "declared anew", OverrideGiven: "override"}


@dataclass(frozen=True, slots=True)
class Page:
    """A notification with what is known of it. `sent_ns`: when it was sent last (0: not yet), `repeats`: how often after the first
    time. `over_ns`: since when nothing is asked any more (0: it stands), `over`: what ended it. `ended`: that it is over was told.
    Broker times."""

    intent: IntentIssued
    event_id: str
    sequence: int
    issued_ns: int
    made: DecisionMade | None = None
    sent_ns: int = 0
    repeats: int = 0
    acknowledged: str = ""
    over_ns: int = 0
    over: str = ""
    ended: bool = False

    @property
    def asks(self) -> bool:
        """Whether it waits for a yes."""
        return self.made is not None and self.made.rung != "hand_over"


@dataclass(frozen=True, slots=True)
class Pages:
    """`by_key`: intent key -> page, in the order of issue. `calling`: decisions that call a person."""

    by_key: Mapping[str, Page] = field(default_factory=dict)
    calling: Mapping[str, DecisionMade] = field(default_factory=dict)
    sequence: int = 0


def fold(pages: Pages, seen: Seen) -> Pages:
    """The pages after one event. Records at or below the newest folded change nothing."""
    if seen.sequence <= pages.sequence:
        return pages
    pages = replace(pages, sequence=seen.sequence)
    fact = seen.event.data
    match fact:
        case DecisionMade():
            return _decided(pages, seen, fact)
        case IntentIssued() if fact.verb == "notify" and fact.key not in pages.by_key:
            page = Page(fact, seen.event.id, seen.sequence, seen.time_ns, pages.calling.get(fact.decision))
            return replace(pages, by_key=_newest({**_recent(pages.by_key, seen.time_ns), fact.key: page}))
        case OutcomeRecorded() if fact.verb == "notify" and fact.result in ("done", "failed"):
            return _each(pages, lambda p: p.intent.key == fact.key, sent_ns=seen.time_ns)
        case OutcomeRecorded() if fact.verb == "notify":  # over before it could be sent
            return replace(pages, by_key={key: page for key, page in pages.by_key.items() if key != fact.key})
        case PageRepeated():
            return _each(pages, lambda p: p.intent.key == fact.key, sent_ns=seen.time_ns, repeats=fact.number)
        case PageEnded():
            return _each(pages, lambda p: p.intent.key == fact.key, ended=True)
        case PageAcknowledged():
            return _each(pages, lambda p: _meant(p, fact), acknowledged=fact.author)
        case ApprovalGiven():
            answer = f"{'yes' if fact.granted else 'no'} by {fact.author}"
            return _over(pages, seen, answer, lambda p: p.asks and p.intent.decision == fact.decision)
        case IncidentClosed():
            how = f"its incident was closed: {fact.outcome.replace('_', ' ')}"
            if fact.mechanism not in ("", "none"):
                how += f" by {fact.mechanism.replace('_', ' ')}"
            return _over(pages, seen, how, lambda p: p.intent.incident == fact.incident)
        case RestartRequested() | StopRequested() | JobDeclared() | OverrideGiven():
            how = f"{WORDS[type(fact)]} by {fact.author}"
            return _over(pages, seen, how, lambda p: p.intent.job == fact.job and not p.intent.incident)
        case ProgressNoted() if fact.first:
            how = f"attempt {seen.event.attempt} made a healthy step"
            return _over(pages, seen, how, lambda p: p.intent.job == seen.event.job and not p.intent.incident)
        case JobFinished():
            return _over(pages, seen, "the job finished", lambda p: p.intent.job == seen.event.job and not p.intent.incident)
    return pages


def _decided(pages: Pages, seen: Seen, fact: DecisionMade) -> Pages:
    if fact.mode != "observe" and not fact.vetoed:  # a later choice takes the place of one that waits
        how = f"another decision took its place: {fact.rung.replace('_', ' ')} {' '.join(fact.nodes)}".rstrip()
        pages = _over(pages, seen, how, lambda p: p.asks and p.intent.job == fact.job and p.intent.decision != fact.decision)
    if fact.rung != "hand_over" and fact.mode != "approve":
        return pages
    return replace(pages, calling=_newest({**pages.calling, fact.decision: fact}))


def _meant(page: Page, ack: PageAcknowledged) -> bool:
    if page.intent.job != ack.job or page.acknowledged:
        return False
    return page.intent.decision == ack.decision if ack.decision else page.intent.incident == ack.incident


def _each(pages: Pages, of: Callable[[Page], bool], **changes: object) -> Pages:
    by_key = {key: replace(page, **changes) if of(page) else page for key, page in pages.by_key.items()}  # type: ignore[arg-type]
    return replace(pages, by_key=by_key)


def _over(pages: Pages, seen: Seen, how: str, of: Callable[[Page], bool]) -> Pages:
    return _each(pages, lambda page: not page.over_ns and of(page), over_ns=seen.time_ns, over=how)


def _recent(by_key: Mapping[str, Page], now_ns: int) -> dict[str, Page]:
    """Without those that were over long ago. One that was never sent stays: that it is over is why it won't be."""
    oldest_ns = now_ns - OVER_S_MAX * NS
    return {key: page for key, page in by_key.items() if not page.over_ns or not page.sent_ns or page.over_ns > oldest_ns}


def _newest(values: dict[str, V]) -> dict[str, V]:
    for key in list(values)[: max(0, len(values) - PAGES_MAX)]:
        del values[key]
    return values


def due(pages: Pages, now_ns: int, after_s: float, most: int) -> tuple[Page, ...]:
    """The pages that are to be repeated now: sent, standing, unacknowledged for so long, and repeated less often than `most`."""
    return tuple(
        page
        for page in standing(pages)
        if page.sent_ns and not page.acknowledged and page.repeats < most and now_ns >= page.sent_ns + int(after_s * NS)
    )


def standing(pages: Pages) -> tuple[Page, ...]:
    return tuple(page for page in pages.by_key.values() if not page.over_ns)


def ended(pages: Pages, now_ns: int) -> tuple[Page, ...]:
    """The pages that were over a short while ago."""
    return tuple(page for page in pages.by_key.values() if page.over_ns and page.over_ns > now_ns - OVER_S_MAX * NS)


def to_end(pages: Pages, now_ns: int) -> tuple[Page, ...]:
    """The pages of which it is to be told now that they are over: sent, and over since a short while."""
    return tuple(page for page in ended(pages, now_ns) if page.sent_ns and not page.ended)
