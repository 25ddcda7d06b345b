"""Strict parsing of a request body into a JSON object.

A byte order mark in front is skipped. Refused: bytes that are not UTF-8, invalid JSON, trailing data, a top level that
is no object, deep nesting, NaN and infinities, a duplicate key (a proxy in front might use the other value), NUL and
lone surrogates.
"""

from __future__ import annotations

import gc
import json
import re
from typing import Any, NoReturn

from baton.core.errors import InvalidRequest

# The position of a value: the position of its container, and its key or index there.
_Place = tuple[Any, "str | int"]
_SUSPECT = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")


class NotJson(InvalidRequest):
    code = "invalid_json"


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a body. Raises InvalidRequest, with `param` if a field is at fault."""
    if not body:
        raise NotJson("the body is empty")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotJson(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        raise NotJson(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise NotJson("the body is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise NotJson("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise NotJson("the body must be a JSON object")
    if "\0" in text or _SUSPECT.search(text):
        check_strings(value)
    return value


def _loads(text: str) -> Any:
    """Parses without garbage collection: JSON has no cycles, and scanning a million lists repeatedly would block all
    other threads. Of two threads here, only the one that disabled it enables it again, so it ends up enabled."""
    collecting = gc.isenabled()
    if collecting:
        gc.disable()
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    finally:
        if collecting:
            gc.enable()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"duplicate key {twice[:100]!r}", param=twice[:100])
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not a JSON number")


def check_strings(value: Any, place: _Place | None = None) -> None:
    """Raises InvalidRequest for NUL and lone surrogates in a JSON value, keys included."""
    if isinstance(value, str):
        wrong = "NUL" if "\0" in value else ""
        try:
            value.encode()
        except UnicodeEncodeError:
            wrong = "a lone surrogate"
        if wrong:
            path = _path(place)
            raise InvalidRequest(f"{path or 'a key'} contains {wrong}", param=path or None)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, str | list | dict):
                check_strings(item, (place, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            check_strings(key, None)
            check_strings(item, (place, key))


def _path(place: _Place | None) -> str:
    """Returns a position as `a.b[2]`. Built only for the position in the error, because keys and lists may be huge."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(f"[{name}]" if isinstance(name, int) else f".{name[:100]}")
    return "".join(reversed(names)).removeprefix(".")
