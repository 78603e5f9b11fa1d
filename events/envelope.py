"""The envelope of every event: CloudEvents 1.0 in its JSON form, with keepstep's extensions in lower case as the standard asks.

{"attempt":3,"bootid":"…","data":{…},"id":"…","job":"gpt","number":17,"source":"node/n1/heartbeat","specversion":"1.0",
 "subject":"n1","time":"2026-01-01T00:00:00.000000000Z","type":"keepstep.heartbeat.v1"}
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema

from events.clock import ns_of, text_of

#: Longest texts an event may carry. What is longer is cut by its maker, which says so.
NAME_MAX = 400
TEXT_MAX = 4096


def _in_key_order(schema: CoreSchema) -> CoreSchema:
    """The same schema with its fields sorted by name, so that what pydantic's serialiser writes is canonical as it comes."""
    inner: Any = schema
    while inner["type"] != "model-fields":
        inner = inner["schema"]
    inner["fields"] = dict(sorted(inner["fields"].items()))
    return schema


class Fact(BaseModel):
    """The data of an event. Frozen; unknown fields are refused, so that a typing error is not silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)
    #: `keepstep.<kind>.v<version>`, the event's type; the last part of its subject is `<kind>`.
    TYPE: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _in_key_order(handler(source))

    @classmethod
    def kind(cls) -> str:
        return cls.TYPE.split(".")[1]


D = TypeVar("D", bound=Fact)
T = TypeVar("T", bound=str)


def _ns(value: Any) -> int:
    if isinstance(value, str):
        return ns_of(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError("a time is RFC 3339 text, or whole nanoseconds since 1970")


def _split(value: Any) -> Any:
    return tuple(value.split(",")) if isinstance(value, str) and value else (() if value == "" else value)


TimeNs = Annotated[int, BeforeValidator(_ns), PlainSerializer(text_of, return_type=str)]
Causes = Annotated[tuple[str, ...], BeforeValidator(_split), PlainSerializer(",".join, return_type=str)]


class Event(BaseModel, Generic[T, D]):
    """One event. `time` is whole nanoseconds since 1970: when it was seen (observations, by the node's clock), or the broker
    time of its trigger (derived events). `causes`: ids of the events it stands on.

    Of an observation: `bootid` is the host's boot id, `number` the producer's own running number since it started
    (`source` names it, with its start), `job` and `attempt` what the agent knew to run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _in_key_order(handler(source))

    specversion: Literal["1.0"]
    id: str = Field(min_length=1, max_length=64)
    source: str = Field(min_length=1, max_length=NAME_MAX * 2)
    type: T
    subject: str = Field(max_length=NAME_MAX)
    time: TimeNs
    causes: Causes = ()
    bootid: str = Field(default="", max_length=64)
    number: int = Field(default=0, ge=0)
    job: str = Field(default="", max_length=NAME_MAX)
    attempt: int = Field(default=0, ge=0)
    data: D


AnyEvent = Event[str, Any]
