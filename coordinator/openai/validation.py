"""Request bodies as strict models: values are not coerced, unknown fields are refused, and errors name the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from coordinator.openai.fields import MAX_NAMED, Neutral
from coordinator.openai.json_body import parse_object

MODEL_VALUES = 10
"""The cost of unpickling a model object, in values of about 0.2 us."""


class Strict(BaseModel):
    """The base of every body and of the objects in it. `null` counts as not given, for any field name. Fields that are
    not served: `inert` ones are accepted and listed in `ignored`; `neutral` ones are accepted only with the values that
    have no effect; unknown ones are refused, or, with `ignored_as`, the prefix for their names, accepted and listed."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    inert: ClassVar[Set[str]] = frozenset()
    neutral: ClassVar[Neutral] = {}
    ignored_as: ClassVar[str | None] = None
    _ignored: frozenset[str] = PrivateAttr(frozenset())

    @property
    def ignored(self) -> frozenset[str]:
        """Of a whole body: the names of given fields that have no effect, at most MAX_NAMED + 1."""
        return self._ignored

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Returns `given` with the values that follow from other fields."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, given: Any, info: ValidationInfo) -> Any:
        """Returns the served fields of an object; refuses or lists the others."""
        if not isinstance(given, dict):
            return given
        served = _names(cls)
        kept = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in served:
                kept[name] = value
            if name in cls.neutral:
                if not any(_same(value, accepted) for accepted in cls.neutral[name]):
                    what = f"is not supported yet{_accepted(cls.neutral[name])}"
                    raise PydanticCustomError("unsupported_parameter", what, {"field": name})
            elif name in cls.inert or (name not in served and cls.ignored_as is not None):
                if info.context is not None and len(info.context) <= MAX_NAMED:
                    info.context.add((cls.ignored_as or "") + name[:64])
            elif name not in served:
                near = difflib.get_close_matches(name[:64], sorted(served | cls.neutral.keys() | cls.inert), 1, 0.7)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise PydanticCustomError("unknown_parameter", hint, {"field": name})
        return cls.completed(kept)


class ModelBody(Strict):
    """The body of a request to the model. It need not name the model: only one is served."""

    model: str | None = None


@cache
def _names(model: type[Strict]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


_Body = TypeVar("_Body", bound=Strict)


def counted(most: int, value: Any) -> Any:
    """Returns `value` if it has at most `most` entries; runs before they are validated: a body may have a million."""
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_many", f"at most {most} entries, not {len(value)}")
    return value


def count_values(value: Any, most: int) -> int:
    """Counts the values within a JSON value or a body, including itself, and MODEL_VALUES more for each model object;
    stops counting after `most`."""
    left, count = [value], 0
    while left and count <= most:
        found = left.pop()
        count += 1
        if isinstance(found, BaseModel):
            count += MODEL_VALUES
            left.extend(found.__dict__.values())
        elif isinstance(found, Mapping):
            left.extend(found.values())
        elif isinstance(found, list | tuple):
            left.extend(found)
    return count + len(left)


def at_most(most: int) -> BeforeValidator:
    return BeforeValidator(partial(counted, most))


def parse(model: type[_Body], body: bytes) -> _Body:
    """Parses a body. Raises InvalidRequest that names the field at fault."""
    return validate(model, parse_object(body))


def validate(model: type[_Body], given: Mapping[str, Any], ignored: set[str] | None = None, *, path: str = "") -> _Body:
    """Validates an object, and adds the names of ignored fields to `ignored`. Raises InvalidRequest that names the
    field at fault, as part of `path`."""
    names = set() if ignored is None else ignored
    try:
        body = model.model_validate(given, context=names)
    except ValidationError as error:
        raise _refusal(error, path) from None
    body._ignored = frozenset(names)
    return body


_MUST_BE = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def _refusal(error: ValidationError, path: str) -> InvalidRequest:
    """Returns the error of the first fault, which repeats nothing of the input but the field's name."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, message = first["type"], first["msg"]
    param = path
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if param else part[:64]
    if field := first.get("ctx", {}).get("field"):
        param += f".{field[:100]}" if param else field[:100]
    if kind == "missing":
        return InvalidRequest(f"'{param}' is required", code="missing_required_parameter", param=param)
    if kind == "unknown_parameter":
        return InvalidRequest(f"unknown field '{param}'{message}", code=kind, param=param)
    if kind == "unsupported_parameter":
        return InvalidRequest(f"'{param}' {message}", code=kind, param=param)
    return InvalidRequest(f"'{param}': {_MUST_BE.get(kind) or message[:200]}", param=param)


def _same(value: Any, accepted: Any) -> bool:
    return type(value) is type(accepted) and bool(value == accepted)


def _accepted(values: tuple[Any, ...]) -> str:
    shown = [repr(v).lower() if isinstance(v, bool) else repr(v) for v in values if not isinstance(v, float)]
    return f" (only {' or '.join(shown)})" if shown else ""
