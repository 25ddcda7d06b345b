"""JSON schemas of requests, as they are given to llguidance: changed where it would apply them otherwise than meant.

- With `strict` an object admits only its properties, unless it says otherwise (`additionalProperties`), as at OpenAI,
  which requires that schemas say so. Parts that only restrict an object together with others (`allOf`, `if`, `not`,
  alternatives beside `properties`) stay open: closed, they would exclude each other's properties.
- llguidance's numbers are double precision. A bound beyond 2**53 is moved there if that is within the range; other
  integers of this size are refused.
- References are URIs: characters that a URI cannot have are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import orjson

from baton.core.errors import InvalidRequest
from coordinator.structured_output import json_text

Schema = dict[str, Any]

_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "$ref")
_ALTERNATIVES = ("anyOf", "oneOf")
_PARTS_OF_VALUES = (
    *("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"),
    *("$defs", "definitions"),
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ABOUT_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
LARGEST_INTEGER = 1 << 53
_URI = "!$&'()*+,;=:@/?#%~-._"


def prepared(schema: Schema, param: str, *, strict: bool) -> Schema:
    """Returns a changed copy.

    Raises:
        InvalidRequest: it is nested too deeply, or has an integer beyond 2**53 that cannot be moved.
    """
    copy: Schema = orjson.loads(json_text(schema, param))
    nodes = list(_nodes(copy))
    refers = [(node, whole) for node, _, whole in nodes if isinstance(node.get("$ref"), str)]
    together = {unquote(node["$ref"]) for node, whole in refers if not whole or _is_of_objects(node)}
    for node, pointer, whole in nodes:
        _set_numbers(node, param)
        if isinstance(node.get("$ref"), str):
            node["$ref"] = quote(node["$ref"], safe=_URI)
        composed = any(keyword in node for keyword in _IN_PLACE)
        if strict and whole and not composed and _is_of_objects(node) and pointer not in together:
            node.setdefault("additionalProperties", False)
    return copy


def _is_of_objects(node: Schema) -> bool:
    kinds = node.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in node
    return is_object and "unevaluatedProperties" not in node


def _nodes(schema: Schema) -> Iterator[tuple[Schema, str, bool]]:
    """Every schema within a schema, with its place as a reference, and whether it describes a value by itself."""
    stack: list[tuple[Any, str, bool]] = [(schema, "#", True)]
    while stack:
        node, pointer, whole = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node, pointer, whole
        beside = any(k in node for k in ("properties", "patternProperties", "allOf", "$ref", *_ABOUT_PROPERTIES))
        for keyword in (*_PARTS_OF_VALUES, *_IN_PLACE):
            part = node.get(keyword)
            by_itself = keyword in _PARTS_OF_VALUES or (keyword in _ALTERNATIVES and whole and not beside)
            place = f"{pointer}/{keyword}"
            if isinstance(part, list):
                stack += [(each, f"{place}/{index}", by_itself) for index, each in enumerate(part)]
            elif isinstance(part, dict) and keyword in _MAPS:
                stack += [(each, f"{place}/{_escaped(name)}", by_itself) for name, each in part.items()]
            else:
                stack.append((part, place, by_itself))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _set_numbers(node: Schema, param: str) -> None:
    for keyword, side in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        bound = node.get(keyword)
        if type(bound) is int and abs(bound) > LARGEST_INTEGER:
            if bound * side < 0:
                raise _not_exact(keyword, bound, param)
            node[keyword] = side * LARGEST_INTEGER
    for keyword in ("multipleOf", "const", "enum"):
        stack = [node.get(keyword)]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack += value.values()
            elif isinstance(value, list):
                stack += value
            elif type(value) is int and abs(value) > LARGEST_INTEGER:
                raise _not_exact(keyword, value, param)


def _not_exact(keyword: str, value: int, param: str) -> InvalidRequest:
    shown = value if abs(value) < 10**40 else f"of {value.bit_length()} bits"
    message = f"'{param}': {keyword} has the integer {shown}, beyond 2**53, which JSON numbers need not keep exact"
    return InvalidRequest(message, code="invalid_grammar", param=param)
