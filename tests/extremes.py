"""Facts with the most extreme values that their own model lets through: not a number, infinite, vanishing, huge, below zero, left out."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from events.envelope import Fact

FLOATS = (0.0, -0.0, 1.0, 0.5, 5e-324, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), -1.0, 30.0)
INTS = (0, 1, 2, 3, 7, -1, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, -(10**400))
TEXTS = ("", "a", "n1", "0000:03:00.0", "\x00", "ü" * 40, "9" * 30, "Xid")

F = TypeVar("F", bound=Fact)


def extreme(kind: type[F], chance: Random, **given: Any) -> F:
    """A valid fact of a kind; `given` fields as they are. What a model refuses is drawn again, and in the end left out or plain."""
    values: dict[str, Any] = dict(given)
    for name, info in kind.model_fields.items():
        if name in values or (not info.is_required() and chance.random() < 0.3):
            continue
        check = _checked(kind, name)
        for _ in range(20):
            value = _drawn(typing.get_type_hints(kind, include_extras=False)[name], chance)
            if check(value):
                values[name] = value
                break
    return kind.model_validate(values)


@cache
def _checked(kind: type[BaseModel], name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        try:
            kind.__pydantic_validator__.validate_assignment(kind.model_construct(), name, value)
        except ValidationError as error:
            return "frozen" in str(error) or not any(one["loc"][:1] == (name,) for one in error.errors())
        return True

    return check


def _drawn(annotation: Any, chance: Random) -> Any:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _drawn(chance.choice(get_args(annotation)), chance)
    if origin is Literal:
        return chance.choice(get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return tuple(_drawn(inner[0], chance) for _ in range(chance.randrange(4)))
        return tuple(_drawn(one, chance) for one in inner)
    if annotation is type(None):
        return None
    if annotation is bool:
        return chance.random() < 0.5
    if annotation is int:
        return chance.choice(INTS)
    if annotation is float:
        return chance.choice(FLOATS)
    if annotation is str:
        return chance.choice(TEXTS)
    return extreme(annotation, chance)
