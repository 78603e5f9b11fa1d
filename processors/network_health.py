"""What is wrong with a node's network links: down, flapping, slow, counting errors. A part of the detector "node". Pure.

One link that goes down is tolerated (low confidence); one that does so again within minutes names its machine (DESIGN section 7,
rung 1), and one that stays down is certain too. Many nodes' links of one switch at once are told as what they are, one by one: that they have one cause is the decider's
to see. Nothing needs ticks: the agent samples all links every half minute, and that is when what lasts is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from events.clock import NS, text_of
from events.envelope import Fact
from events.incident import Confidence, Signal, SignalCleared, Symptom
from events.network import LinkChanged, LinkSample, NicSample
from processors.detector import Claim, PartitionClock, Seen, quote
from processors.policy import Network

#: Links of a node that something is said about; it has tens.
VIEWS_MAX = 64
#: Times kept of a link's downs; what a policy may ask for.
DOWNS_MAX = 16
#: Counters are of 64 bits; a larger number is nonsense, and no float could hold it.
COUNT_MAX = 1 << 63
#: A link that flaps on is told down so often within the window, then only as one that flaps.
DOWN_TOLD_MAX = 4
HOUR_NS = 3600 * NS


class Limit(NamedTuple):
    """Counters of sysfs whose sum may not rise faster than a setting of the policy, over `per_s` (0: within a sample at all)."""

    rule: str
    counters: tuple[str, ...]
    setting: str
    per_s: int


LIMITS = (
    Limit("symbol_errors", ("symbol_error",), "symbol_errors_per_s", 1),
    Limit("symbol_errors_in_an_hour", ("symbol_error",), "symbol_errors_per_h", 3600),
    Limit("link_recoveries", ("link_error_recovery",), "link_recoveries_per_min", 60),
    Limit("receive_errors", ("port_rcv_errors", "rx_errors"), "receive_errors_per_s", 1),
    Limit("ack_timeouts", ("local_ack_timeout_err",), "ack_timeouts_per_s", 1),
    Limit("discards", ("port_xmit_discards",), "discards_per_s", 1),
    Limit("slow_restarts", ("roce_slow_restart",), "slow_restarts_per_s", 1),
    Limit(
        "integrity",
        ("excessive_buffer_overrun_errors", "local_link_integrity_errors", "rnr_nak_retry_err"),
        "integrity_errors_max",
        0,
    ),
)
SLOW = "below_its_rate"


class Over(NamedTuple):
    """A limit that a link is over, or was until just now."""

    rule: str
    told_ns: int
    last_ns: int


class LinkView(NamedTuple):
    """A link that there is something to say about. `down_ns`: since when it is down, 0: it is up. `told`: its nic_down stands.
    `symbols`: its symbol errors since `symbols_ns`, for the limit by the hour. `missed`: samples on end that showed it down, of which the
    policy's number makes it dead rather than flapping; not one that a person set down (`by_hand`)."""

    device: str
    down_ns: int = 0
    told: bool = False
    downs: tuple[int, ...] = ()
    flap_ns: int = 0
    over: tuple[Over, ...] = ()
    symbols_ns: int = 0
    symbols: int = 0
    missed: int = 0
    by_hand: bool = False
    #: When what is known of its state was seen.
    seen_ns: int = 0

    @property
    def idle(self) -> bool:
        return not (self.down_ns or self.told or self.downs or self.flap_ns or self.over or self.symbols)


NetworkState = tuple[LinkView, ...]
_ADAPTER: TypeAdapter[NetworkState] = TypeAdapter(NetworkState)


class NetworkHealth:
    """The `network` section of the settings."""

    name = "network"
    reads: frozenset[type[Fact]] | None = frozenset({LinkChanged, NicSample})

    def key_of(self, seen: Seen) -> str:
        return seen.node

    def empty(self, key: str) -> NetworkState:
        return ()

    def dump(self, state: NetworkState) -> Any:
        return _ADAPTER.dump_python(state, mode="json", exclude_defaults=True)

    def load(self, key: str, value: Any) -> NetworkState:
        return _ADAPTER.validate_python(value)

    def detect(self, state: NetworkState, clock: PartitionClock, seen: Seen) -> tuple[NetworkState, tuple[Claim, ...]]:
        rules = clock.settings.network
        data = seen.event.data
        if isinstance(data, LinkChanged):
            return _changed(state, rules, seen, data)
        if isinstance(data, NicSample):
            return _sampled(state, rules, seen, data)
        return state, ()


def _changed(state: NetworkState, rules: Network, seen: Seen, data: LinkChanged) -> tuple[NetworkState, tuple[Claim, ...]]:
    claims: list[Claim] = []
    view = _view(state, data.device)
    if seen.seen_ns < view.seen_ns:  # overtaken: how often it went down counts, how it stands is known better
        if data.downs and data.state != "moved" and data.since_boot_s >= rules.boot_grace_s:
            stands = "down" if view.down_ns else "up"
            view = _went(view, rules, seen, stands, data.downs, f"{_how(data)} (told late)", claims)
        after = _put(state, view, view)
        return after, tuple(claims)
    view = view._replace(seen_ns=seen.seen_ns)
    if data.state == "moved":
        after = _put(state, view, None)
        return after, _cleared(state, after, seen, f"{data.device} was moved to another network name space")
    if data.since_boot_s < rules.boot_grace_s:  # links go down at every boot; what lasts is seen in the samples after it
        view = view._replace(down_ns=0 if data.state == "up" else view.down_ns or seen.seen_ns)
    else:
        view = _went(view, rules, seen, data.state, data.downs, _how(data), claims)
    if data.state == "up":
        view = view._replace(told=False, missed=0, by_hand=False)
    elif data.by_hand:
        view = view._replace(by_hand=True)
    after = _put(state, view, view)
    return after, (*claims, *_cleared(state, after, seen, f"{data.device} is up again", claims))


def _how(data: LinkChanged) -> str:
    name = data.device if not data.interface else f"{data.device} ({data.interface})"
    if data.state == "up":
        return (
            f"{name} went down {data.downs} times and came back between two looks"
            if data.downs != 1
            else f"{name} went down and came back between two looks"
        )
    how = "disappeared" if data.state == "gone" else "was set down by hand" if data.by_hand else "went down"
    return f"{name} {how}{': ' if data.detail else ''}{data.detail}"


def _went(view: LinkView, rules: Network, seen: Seen, link_state: str, times: int, how: str, claims: list[Claim]) -> LinkView:
    """The link is up or down now, and went down `times` since it was last told of."""
    now_ns, window_ns = seen.seen_ns, int(rules.flap_window_s * NS)
    downs = tuple(at for at in view.downs if abs(now_ns - at) < window_ns)
    downs = tuple(sorted((*downs, *(now_ns,) * min(times, DOWNS_MAX))))[-DOWNS_MAX:]
    down = link_state != "up"
    if (times or (down and not view.told)) and (len(downs) <= DOWN_TOLD_MAX or not times):
        claims.append(_signal(seen, "nic_down", view.device, "low", "link_down", how, max(1, times)))
        view = view._replace(told=True)
    view = view._replace(downs=downs, down_ns=(view.down_ns or now_ns) if down else 0)
    flapped_before = view.flap_ns and abs(now_ns - view.flap_ns) < window_ns
    if times and len(downs) >= rules.flap_count and not flapped_before:
        text = (
            f"{view.device} went down {len(downs)} times within {rules.flap_window_s:g} s (limit {rules.flap_count}): "
            + ", ".join(text_of(at) for at in downs)
        )
        claims.append(_signal(seen, "nic_flap", view.device, "high", "link_flap", f"{text}; {how}", len(downs)))
        view = view._replace(flap_ns=now_ns)
    return view


def _sampled(state: NetworkState, rules: Network, seen: Seen, data: NicSample) -> tuple[NetworkState, tuple[Claim, ...]]:
    claims: list[Claim] = []
    known = {view.device: view for view in state}
    after: list[LinkView] = []
    for link in data.links:
        view = known.get(link.device)
        if view is not None and seen.seen_ns < view.seen_ns:  # overtaken
            after.append(view)
            continue
        if view is None:
            if link.state == "up" and not link.counted and link.rate_mbps >= link.rate_full_mbps:
                continue
            view = LinkView(link.device)
        view = _of_sample(view._replace(seen_ns=seen.seen_ns), rules, seen, data, link, claims)
        if not view.idle and len(after) < VIEWS_MAX:
            after.append(view)
    settled = tuple(after)
    if settled == state:
        settled = state
    return settled, (*claims, *_cleared(state, settled, seen, "a sample shows it up", claims))


def _of_sample(view: LinkView, rules: Network, seen: Seen, data: NicSample, link: LinkSample, claims: list[Claim]) -> LinkView:
    now_ns, window_ns = seen.seen_ns, int(rules.flap_window_s * NS)
    if link.state == "up":
        view = view._replace(down_ns=0, told=False, missed=0, by_hand=False)
    elif data.since_boot_s < rules.boot_grace_s:
        view = view._replace(down_ns=view.down_ns or now_ns)
    elif not view.told:
        missed = 0 if view.down_ns else 1  # its going down was not told: the agent was away, or it is from the boot's grace
        view = _went(view, rules, seen, link.state, missed, f"{link.device} is {link.state}", claims)
    if link.state != "up" and data.since_boot_s >= rules.boot_grace_s:
        view = _missed(view, rules, seen, link, claims)
    downs = tuple(at for at in view.downs if now_ns - at < window_ns)
    flap_ns = 0 if view.flap_ns and not downs and link.state == "up" else view.flap_ns
    view = view._replace(downs=downs, flap_ns=flap_ns)
    return _errors(view, rules, seen, data.period_s, link, claims)


def _missed(view: LinkView, rules: Network, seen: Seen, link: LinkSample, claims: list[Claim]) -> LinkView:
    """Down in one more sample: one that stays so is no flap. Of many machines of one switch it is the switch (the decider's to see)."""
    view = view._replace(missed=min(view.missed + 1, DOWNS_MAX))
    if view.missed == rules.down_samples and not view.by_hand:
        since = f" since {text_of(view.down_ns)}" if view.down_ns else ""
        text = f"{link.device} is {link.state} in {view.missed} samples on end{since}"
        claims.append(_signal(seen, "nic_down", view.device, "high", "link_stays_down", text, view.missed))
        view = view._replace(told=True)
    return view


def _errors(view: LinkView, rules: Network, seen: Seen, period_s: float, link: LinkSample, claims: list[Claim]) -> LinkView:
    """Counters and rate against the limits. A limit that is passed is told at once, and again after each `quiet_s` of it."""
    now_ns, quiet_ns = seen.seen_ns, int(rules.quiet_s * NS)
    rises = dict(link.counted)
    view = _hour(view, now_ns, rises.get("symbol_error", 0))
    found: dict[str, str] = {}
    for limit in LIMITS:
        count = max(0, min(sum(rises.get(name, 0) for name in limit.counters), COUNT_MAX))
        if limit.per_s == 3600:
            count = view.symbols
        if not count:
            continue
        most = getattr(rules, limit.setting)
        rate: float = count * limit.per_s / period_s if 0 < limit.per_s < 3600 and period_s else count
        if rate > most:
            unit = {0: "", 1: " a second", 60: " a minute", 3600: " within the hour"}[limit.per_s]
            names = " + ".join(name for name in limit.counters if name in rises) or limit.counters[0]
            found[limit.rule] = f"{link.device}: {names} rose by {rate:.6g}{unit}, limit {most:g}"
    runs, full = min(link.rate_mbps, COUNT_MAX), min(link.rate_full_mbps, COUNT_MAX)
    if 0 < runs < full * rules.rate_share_min:
        found[SLOW] = f"{link.device} runs at {runs / 1000:g} Gb/s of {full / 1000:g}"
    kept: list[Over] = []
    for known in view.over:
        if known.rule in found:
            if now_ns - known.told_ns >= quiet_ns:
                claims.append(_signal(seen, "ib_error", link.device, "low", known.rule, found[known.rule]))
                known = known._replace(told_ns=now_ns)
            kept.append(known._replace(last_ns=now_ns))
            del found[known.rule]
        elif now_ns - known.last_ns < quiet_ns:
            kept.append(known)
    for rule, text in found.items():
        claims.append(_signal(seen, "ib_error", link.device, "low", rule, text))
        kept.append(Over(rule, now_ns, now_ns))
    return view._replace(over=tuple(kept))


def _hour(view: LinkView, now_ns: int, symbols: int) -> LinkView:
    """Symbol errors of the running hour."""
    if view.symbols and now_ns - view.symbols_ns >= HOUR_NS:
        view = view._replace(symbols=0, symbols_ns=0)
    if not symbols:
        return view
    return view._replace(symbols=max(0, min(view.symbols + symbols, COUNT_MAX)), symbols_ns=view.symbols_ns or now_ns)


# --- claims -------------------------------------------------------------------------------------------------------------------


def _signal(seen: Seen, symptom: Symptom, device: str, confidence: Confidence, rule: str, text: str, count: int = 1) -> Claim:
    event = seen.event
    fact = Signal(
        symptom=symptom, node=seen.node, device=device, confidence=confidence, rule=rule, evidence=quote(text),
        seen_ns=seen.seen_ns, count=count,
    )  # fmt: skip
    return Claim(event.job, event.attempt, fact, (event.id,))


def _cleared(
    before: NetworkState, after: NetworkState, seen: Seen, why: str, claims: Sequence[Claim] = ()
) -> tuple[Claim, ...]:
    """A claim is of the node: it is over once no link of it stands under that claim any more. A blip is told and over at once."""
    said: list[Claim] = []
    told = {claim.fact.symptom for claim in claims if isinstance(claim.fact, Signal)}
    for symptom, was, stands in (
        ("nic_down", any(v.told for v in before) or "nic_down" in told, any(v.told for v in after)),
        ("nic_flap", any(v.flap_ns for v in before), any(v.flap_ns for v in after)),
        ("ib_error", any(v.over for v in before), any(v.over for v in after)),
    ):
        if was and not stands:
            text = f"{why}, and no other link of the node is down" if symptom == "nic_down" else "not seen again for a while"
            cleared = SignalCleared(symptom=symptom, node=seen.node, seen_ns=seen.seen_ns, evidence=quote(text))
            said.append(Claim(seen.event.job, seen.event.attempt, cleared, (seen.event.id,)))
    return tuple(said)


# --- the state ----------------------------------------------------------------------------------------------------------------


def _view(state: NetworkState, device: str) -> LinkView:
    return next((view for view in state if view.device == device), None) or LinkView(device)


def _put(state: NetworkState, old: LinkView, new: LinkView | None) -> NetworkState:
    """The state with a link's view in the old one's place, without it where there is nothing to say."""
    kept = new if new is not None and not new.idle else None
    for i, view in enumerate(state):
        if view.device == old.device:
            if kept == view:
                return state
            return (*state[:i], *((kept,) if kept else ()), *state[i + 1 :])
    return (*state, kept) if kept and len(state) < VIEWS_MAX else state
