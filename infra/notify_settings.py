"""Where pages go, as a file says it (`--notify FILE`), and the channels made of it. Secrets are read here, from files or the environment;
the settings themselves hold none.

    repeat_after_s: 900                  # a page that nobody acknowledged is sent again after this long,
    repeats_max: 4                       # at most so often
    runbooks: https://wiki/keepstep      # links to runbook pages begin with this
    channels:
      - {kind: webhook, url_file: /etc/keepstep/pager.url, secret_file: /etc/keepstep/pager.secret}
      - {kind: alertmanager, url: "http://alertmanager:9093", labels: {cluster: a}}
      - {kind: script, script: /usr/local/bin/page, send_resolved: false}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actuators.exec_backend import BadScript, Exec
from actuators.notify import Channel, Script


class BadNotify(Exception):
    """A file that cannot be used: one sentence for whoever wrote it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Web(_Section):
    name: str = ""
    #: One of the three. A link that holds a token is a secret.
    url: str = ""
    url_file: str = ""
    url_env: str = ""
    #: A bearer token.
    token_file: str = ""
    token_env: str = ""
    ca_file: str = ""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    tries: Annotated[int, Field(ge=1, le=10)] = 4


class _Webhook(_Web):
    kind: Literal["webhook"]
    #: Of the signature.
    secret_file: str = ""
    secret_env: str = ""
    #: Whether it is told, by a message of status `resolved`, that a page is over (Alertmanager's own word for it).
    send_resolved: bool = True


class _Alertmanager(_Web):
    kind: Literal["alertmanager"]
    labels: dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")], str] = {}


class _Script(_Section):
    kind: Literal["script"]
    name: str = ""
    script: str
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    send_resolved: bool = True


class NotifySettings(_Section):
    """See the module."""

    repeat_after_s: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] = 900.0
    repeats_max: Annotated[int, Field(ge=0, le=100)] = 4
    #: How often an Alertmanager is told of what stands.
    refresh_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    runbooks: str = ""
    channels: tuple[Annotated[_Webhook | _Alertmanager | _Script, Field(discriminator="kind")], ...] = ()


def load(path: Path) -> NotifySettings:
    """Raises BadNotify."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not YAML in UTF-8"
        raise BadNotify(f"where pages go can't be read from {path}: {why}") from None
    try:
        return NotifySettings.model_validate(value if value is not None else {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise BadNotify(f"{path}: {where}: {first['msg']}") from None


def channels_of(settings: NotifySettings) -> list[Channel]:
    """The channels, each by a name of its own. Raises BadNotify."""
    made: list[Channel] = []
    for number, section in enumerate(settings.channels, 1):
        name = section.name or f"{section.kind}-{number}"
        if name in {channel.name for channel in made}:
            raise BadNotify(f"two channels are called {name}; give each a name of its own")
        made.append(_channel(name, section))
    return made


def _channel(name: str, section: _Webhook | _Alertmanager | _Script) -> Channel:
    if isinstance(section, _Script):
        try:
            return Script(name, Exec(section.script, limit_s=section.timeout_s), section.send_resolved)
        except BadScript as error:
            raise BadNotify(f"channel {name}: {error}") from None
    from actuators.notify_http import Alertmanager, Http, Webhook, signature  # its client takes a while to load

    given = [value for value in (section.url, section.url_file, section.url_env) if value]
    if len(given) != 1:
        raise BadNotify(f"channel {name} needs one of url, url_file and url_env")
    url = section.url or _secret(name, "url", section.url_file, section.url_env)
    if not url.startswith(("http://", "https://")):
        raise BadNotify(f"channel {name}: its url begins with neither http:// nor https://")
    if section.ca_file and not Path(section.ca_file).is_file():
        raise BadNotify(f"channel {name}: there is no ca_file {section.ca_file}")
    token = _secret(name, "token", section.token_file, section.token_env)
    http = Http(url, token, section.timeout_s, section.tries, section.ca_file)
    if isinstance(section, _Alertmanager):
        return Alertmanager(name, http, section.labels)
    secret = _secret(name, "secret", section.secret_file, section.secret_env)
    try:
        signature(secret, "", "", b"")
    except ValueError:
        raise BadNotify(f"channel {name}: its secret begins with whsec_ and goes on with what is no base64") from None
    return Webhook(name, http, secret, section.send_resolved)


def _secret(channel: str, what: str, file: str, variable: str) -> str:
    """From a file (without the line's end) or a variable; '' if neither is named. Never said."""
    if file and variable:
        raise BadNotify(f"channel {channel} has both {what}_file and {what}_env; keep one")
    if file:
        try:
            value = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise BadNotify(f"channel {channel}: its {what}_file {file} can't be read: {why}") from None
    elif variable:
        value = os.environ.get(variable, "").strip()
    else:
        return ""
    if not value:
        raise BadNotify(f"channel {channel}: its {what} is empty ({file or '$' + variable})")
    return value
