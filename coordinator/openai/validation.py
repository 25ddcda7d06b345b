"""Request bodies as strict models: nothing is coerced, nothing unknown is taken, and what is refused is named."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest


class Strict(BaseModel):
    """The base of every body."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    _ignored: frozenset[str] = PrivateAttr(frozenset())

    @property
    def ignored(self) -> frozenset[str]:
        """Names of fields that were given and change nothing; those of messages begin with `messages.`."""
        return self._ignored


_Body = TypeVar("_Body", bound=Strict)


def counted(most: int, value: Any) -> Any:
    """The same value, counted before an entry is looked at: a body has room for a million."""
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_many", f"at most {most} entries, not {len(value)}")
    return value


def at_most(most: int) -> BeforeValidator:
    return BeforeValidator(partial(counted, most))


def validate(model: type[_Body], given: dict[str, Any], ignored: Iterable[str] = (), *, path: str = "") -> _Body:
    """The body, or InvalidRequest that names its field, as part of `path`."""
    try:
        body = model.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, path) from None
    body._ignored = frozenset(ignored)
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
    """The first thing at fault, without a word of the input."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = path
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if param else part[:64]
    if first["type"] == "missing":
        return InvalidRequest(f"'{param}' is required", code="missing_required_parameter", param=param)
    message = _MUST_BE.get(first["type"]) or first["msg"][:200]
    return InvalidRequest(f"'{param}': {message}", param=param)
