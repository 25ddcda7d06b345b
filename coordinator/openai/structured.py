"""`response_format` as in OpenAI's API, `structured_outputs` and the older `guided_*` as in vLLM: each of them
specifies what the output must match, and a request may have at most one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import MAX_GRAMMAR_CHARS, check_count
from coordinator.openai.json_schema import prepared
from coordinator.openai.validation import RequestObject, at_most
from coordinator.structured_output import Constraint, json_text

_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
MAX_ALTERNATIVES = 4_096
MAX_WHITESPACE_CHARS = 1_024
ANY_OBJECT = '{"type":"object"}'
_Schema = dict[str, Any]


def _object_or_text(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise PydanticCustomError("schema", "must be an object or a string")
    return value


SchemaOrText = Annotated[_Schema | str, PlainValidator(_object_or_text, json_schema_input_type=_Schema | str)]


Alternatives = Annotated[list[str], Field(fail_fast=True), at_most(MAX_ALTERNATIVES)]
Whitespace = Annotated[str, StringConstraints(max_length=MAX_WHITESPACE_CHARS)]


class JsonSchema(RequestObject):
    place = "response_format.json_schema"

    name: str
    schema_: _Schema = Field(default_factory=dict, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestObject):
    place = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: _Schema | None = Field(default=None, alias="schema")


class StructuredOutputs(RequestObject):
    place = "structured_outputs"

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Alternatives | None = None
    grammar: str | None = None
    whitespace_pattern: Whitespace | None = None
    disable_any_whitespace: bool | None = None


def constraint_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: dict[str, Any],
    whitespace_pattern: str | None,
) -> Constraint | None:
    """Returns the constraint of a request; `guided` are its fields with vLLM's older names that are not None.

    Raises:
        InvalidRequest: two constraints, an empty `structured_outputs`, or a whitespace pattern without `guided`.
    """
    accepted: list[Constraint] = []
    pattern = whitespace_of(structured)
    if response_format is not None and (requested := _of_response_format(response_format)) is not None:
        accepted.append(_with_whitespace(requested, pattern))
    if structured is not None:
        named = {name: value for name, value in structured if value is not None and name not in _WHITESPACE}
        asked = (_of_vllm(name.rstrip("_"), value, "structured_outputs.") for name, value in named.items())
        mine = [constraint for constraint in asked if constraint is not None]
        if not mine and pattern is None:
            message = "structured_outputs needs one of json, json_object, regex, choice and grammar"
            raise InvalidRequest(message, param="structured_outputs")
        accepted += [_with_whitespace(constraint, pattern) for constraint in mine]
    for name, value in guided.items():
        if (requested := _of_vllm(name.removeprefix("guided_"), value, "guided_")) is not None:
            accepted.append(_with_whitespace(requested, whitespace_pattern))
    if whitespace_pattern is not None and not guided:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    if len(accepted) > 1:
        message = f"{accepted[0].param} and {accepted[1].param} cannot be combined: the output can match only one"
        raise InvalidRequest(message, param=accepted[1].param)
    return accepted[0] if accepted else None


def whitespace_of(structured: StructuredOutputs | None) -> str | None:
    """Returns the pattern of the whitespace in any JSON that the output must match; None if it is not set."""
    if structured is None:
        return None
    return "" if structured.disable_any_whitespace else structured.whitespace_pattern


def _of_response_format(response_format: ResponseFormat) -> Constraint | None:
    if (response_format.type == "json_schema") != (response_format.json_schema is not None):
        goes = "is required with" if response_format.json_schema is None else "is allowed only with"
        message = f"response_format.json_schema {goes} 'type': 'json_schema'"
        raise InvalidRequest(message, param="response_format.json_schema")
    if response_format.json_schema is not None:
        schema, strict = response_format.json_schema.schema_, bool(response_format.json_schema.strict)
        return of_json(schema, "response_format.json_schema.schema", lenient=not strict, strict=strict)
    if response_format.schema_ is not None:
        if response_format.type != "json_object":
            message = "response_format.schema is allowed only with 'type': 'json_object'"
            raise InvalidRequest(message, param="response_format.schema")
        return of_json(response_format.schema_, "response_format.schema", lenient=True)
    return None if response_format.type == "text" else of_json(ANY_OBJECT, "response_format")


def _of_vllm(name: str, value: Any, prefix: str) -> Constraint | None:
    param = prefix + name
    if name == "json":
        return of_json(value, param)
    if name == "json_object":
        return of_json(ANY_OBJECT, param) if value else None
    if name == "choice":
        return _measured(Constraint("choice", json_text(value, param), param))
    return _measured(Constraint("regex" if name == "regex" else "lark", value, param))


def of_json(schema: _Schema | str, param: str, *, lenient: bool = False, strict: bool = False) -> Constraint:
    """Returns the constraint of a JSON schema; `strict` as in `prepared`."""
    if isinstance(schema, str):
        _check_length(param, schema)
        with contextlib.suppress(orjson.JSONDecodeError):
            schema = orjson.loads(schema)
        if not isinstance(schema, dict):
            raise InvalidRequest(f"'{param}': must be a JSON schema: an object", param=param)
    text = json_text(prepared(schema, param, strict=strict), param)
    return _measured(Constraint("json_schema", text, param, lenient=lenient))


def _measured(constraint: Constraint) -> Constraint:
    _check_length(constraint.param, constraint.value)
    if constraint.value in ("", "[]"):
        raise InvalidRequest(f"{constraint.param} is empty", param=constraint.param)
    return constraint


def _check_length(param: str, value: str) -> None:
    check_count(param, len(value), MAX_GRAMMAR_CHARS, "characters")


def _with_whitespace(constraint: Constraint, pattern: str | None) -> Constraint:
    if pattern is None:
        return constraint
    if constraint.kind != "json_schema":
        raise InvalidRequest(f"{constraint.param} does not support whitespace options", param=constraint.param)
    return replace(constraint, whitespace=pattern)
