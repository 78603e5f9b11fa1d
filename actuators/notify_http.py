"""Pages over HTTP.

webhook        POST, JSON, signed as Standard Webhooks 1.0 has it (webhook-id, webhook-timestamp, webhook-signature)
alertmanager   POST /api/v2/alerts; what stands is told again and again, since an Alertmanager that restarts has forgotten it
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from actuators.notify import Message, Sent
from events.clock import NS, text_of

TRIES, TIMEOUT_S, BACKOFF_S, BACKOFF_S_MAX = 4, 5.0, 0.5, 10.0
#: An alert that nobody takes back ends by itself after this long: well beyond any outage of the control plane.
ALIVE_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Http:
    """How one address is posted to. `timeout_s` is of one try as a whole. `token`: a bearer's."""

    url: str
    token: str = ""
    timeout_s: float = TIMEOUT_S
    tries: int = TRIES
    ca_file: str = ""
    backoff_s: float = BACKOFF_S

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Sent:
        """Tries until it is taken (2xx), refused for good (any other but 408, 425, 429 and 5xx), or the tries are used up."""
        sent = Sent(False, "never tried")
        for number in range(1, self.tries + 1):
            sent, again_s = await self._once(body, headers)
            if again_s is None or number == self.tries:
                tries = f" ({number} tries)" if number > 1 else ""
                return replace(sent, detail=sent.detail + tries)
            await asyncio.sleep(min(BACKOFF_S_MAX, max(again_s, self.backoff_s * 2 ** (number - 1))))
        return sent

    async def _once(self, body: bytes, headers: Mapping[str, str]) -> tuple[Sent, float | None]:
        """What came of it, and how long to wait at least before it is tried again (None: it is not)."""
        more = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else True
            async with aiohttp.ClientSession(timeout=timeout, trust_env=True, raise_for_status=False) as session:
                sending = session.post(self.url, data=body, headers={**headers, **more}, allow_redirects=False, ssl=context)
                async with sending as answer:
                    status = answer.status
                    if 200 <= status < 300:
                        return Sent(True, f"taken ({status})"), None
                    if status in (408, 425, 429) or status >= 500:
                        return Sent(False, f"answered {status}"), _seconds(answer.headers.get("Retry-After", ""))
                    return Sent(False, f"refused with {status}"), None
        except TimeoutError:
            return Sent(False, f"no answer within {self.timeout_s:g} s"), 0.0
        except (aiohttp.InvalidURL, ValueError):
            return Sent(False, "its address is none that can be posted to"), None
        except aiohttp.ClientConnectorCertificateError:
            return Sent(False, "its certificate is not trusted"), None
        except aiohttp.ClientResponseError:
            return Sent(False, "answered with what is no HTTP, or beyond its limits"), 0.0
        except (aiohttp.ClientError, OSError) as error:  # what the error says may hold the address
            return Sent(False, f"not reached ({type(error).__name__})"), 0.0


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


@dataclass(frozen=True, slots=True)
class Webhook:
    """See the module. `secret`: the key of the signature, empty: unsigned; `whsec_…` is base64, as the standard has it."""

    name: str
    http: Http
    secret: str = ""
    tells_end: bool = True

    async def send(self, message: Message, now_ns: int) -> Sent:
        body = json.dumps(message.body(), ensure_ascii=False, sort_keys=True).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "keepstep", "webhook-id": message.id}
        stamp = str(now_ns // NS)
        headers["webhook-timestamp"] = stamp
        if self.secret:
            headers["webhook-signature"] = signature(self.secret, message.id, stamp, body)
        return await self.http.post(body, headers)


def signature(secret: str, id_: str, stamp: str, body: bytes) -> str:
    """`v1,` and the base64 of the HMAC-SHA256 of id, time and body. Raises ValueError for a `whsec_` that is no base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else secret.encode()
    digest = hmac.new(key, b".".join((id_.encode(), stamp.encode(), body)), hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


@dataclass(frozen=True, slots=True)
class Alertmanager:
    """See the module. `labels`: the site's own, on every alert. `http.url` is the server's root."""

    name: str
    http: Http
    labels: Mapping[str, str]

    #: It is told of the end with all that stands.
    tells_end = False

    async def send(self, message: Message, now_ns: int) -> Sent:
        return await self.tell((message,), now_ns)

    async def tell(self, messages: Sequence[Message], now_ns: int) -> Sent:
        """All of these as they are now: firing, or resolved since they are over."""
        if not messages:
            return Sent(True, "nothing to tell")
        alerts = [alert(message, self.labels, now_ns) for message in messages]
        http = replace(self.http, url=self.http.url.rstrip("/") + "/api/v2/alerts")
        return await http.post(json.dumps(alerts).encode(), {"Content-Type": "application/json", "User-Agent": "keepstep"})


def alert(message: Message, labels: Mapping[str, str], now_ns: int) -> dict[str, Any]:
    """One alert of Alertmanager's API v2. Its labels are the same however often it is told: they are what it is known by."""
    annotations = {
        "summary": message.text[:200], "description": message.text, "runbook": message.runbook, "runbook_url": message.runbook_url,
        "explain": f"keepstep explain {message.incident}" if message.incident else "",
        "acknowledged": f"by {message.acknowledged}" if message.acknowledged else "",
    }  # fmt: skip
    own = {
        "alertname": "KeepstepApprovalWanted" if message.asks else "KeepstepHandOver", "severity": "critical",
        "training_job": message.job, "incident": message.incident, "decision": message.decision, "rule": message.rule,
    }  # fmt: skip
    return {
        "labels": {name: value for name, value in {**labels, **own}.items() if value},
        "annotations": {name: value for name, value in annotations.items() if value},
        "startsAt": _milliseconds(message.issued_ns),
        "endsAt": _milliseconds(message.over_ns or max(now_ns, message.issued_ns) + ALIVE_S * NS),
    }


def _milliseconds(time_ns: int) -> str:
    """RFC 3339 as Alertmanager itself writes it."""
    return text_of(time_ns)[:23] + "Z"
