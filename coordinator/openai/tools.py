"""Tools of a chat request: the functions that the model may call or must call, and the grammar of forced calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import check_count
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.openai.json_schema import prepared
from coordinator.openai.validation import RequestObject, count_values
from coordinator.structured_output import WHITESPACE, Constraint, json_text, lark_string
from coordinator.text.chat import MAX_DEPTH
from coordinator.text.object_calls import CALL_BEGIN, CALL_END, CALL_SEP, CALLS_BEGIN, CALLS_END

MAX_TOOLS = 128
MAX_VALUES = 20_000  # of tools, and of additional template variables
MAX_CALLS = 16
"""In one answer, if calls are forced."""
NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # OpenAI's API has 64, Anthropic's 128
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, StringConstraints(pattern=NAME)]


class Function(RequestObject):
    place = "tools.function"

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestObject):
    place = "tools"

    type: Literal["function"]
    function: Function


class ChosenFunction(RequestObject):
    place = "tool_choice.function"

    name: Name


class ChosenTool(RequestObject):
    place = "tool_choice"

    type: Literal["function"]
    function: ChosenFunction


def _choice(value: Any, info: ValidationInfo[IgnoredFields | None]) -> str | ChosenTool:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    with contextlib.suppress(ValidationError):
        return ChosenTool.model_validate(value, context=info.context)
    message = "must be 'none', 'auto', 'required' or an object with 'type': 'function' and a 'function' with its 'name'"
    raise PydanticCustomError("tool_choice", message)


ToolChoice = Annotated[
    str | ChosenTool, PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool)
]


def limit_values(param: str) -> BeforeValidator:
    """Returns a validator of the number of values for a chat template: more would block the event loop on their way."""

    def check(given: Any) -> Any:
        check_count(param, count_values(given, MAX_VALUES), MAX_VALUES, "values")
        return given

    return BeforeValidator(check)


def _arguments(value: Any) -> dict[str, Any] | str:
    """Returns the arguments as an object if that is what they are: a model may have written anything, or have been cut
    off, and its own output is never refused. Some clients send the object itself."""
    if isinstance(value, dict):
        value = written_arguments(value)
    if not isinstance(value, str):
        raise PydanticCustomError("arguments", "must be a JSON object, or one as a string")
    with contextlib.suppress(ValueError, RecursionError):
        parsed = orjson.loads(value or "{}")
        if _LONG_NUMBER.search(value):  # orjson reads an integer over 64 bits as a float
            parsed = json.loads(value)
        if isinstance(parsed, dict) and r"\u0000" not in value and _is_shallow(parsed):
            return parsed
    return value


def written_arguments(arguments: dict[str, Any] | str) -> str:
    """Returns arguments as a client sends them: with `json`, as orjson writes no integer over 64 bits."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _is_shallow(value: Any) -> bool:
    """Returns whether a value may be given to a template as it is: `ChatEncoder` limits how deeply it is nested."""
    level = [value]
    for _ in range(MAX_DEPTH - _DEPTH_OF_ARGUMENTS):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return True
    return False


_DEPTH_OF_ARGUMENTS = 5  # in the calls of a message


_LONG_NUMBER = re.compile(r"[0-9]{19}")
Arguments = Annotated[
    dict[str, Any] | str,
    PlainValidator(_arguments, json_schema_input_type=str | dict[str, Any]),
    PlainSerializer(written_arguments),
]
"""The arguments of a call in the history, parsed with the body: a million values would block the event loop."""


CalledName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""The name of a call in the history: whatever the model wrote, which parsers limit to this length."""


class CalledFunction(RequestObject):
    place = "messages.tool_calls.function"
    history = True

    name: CalledName
    arguments: Arguments


class ToolCall(RequestObject):
    """A call in the history. Its arguments are a JSON object as text. Clients send back what streams add to calls
    (`index`)."""

    place = "messages.tool_calls"
    history = True

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_value(self) -> dict[str, Any]:
        return template_call(self.id, self.function.name, self.function.arguments)


def template_call(name: str, function: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a call as chat templates expect it: the arguments as an object, or as text if they are something else."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Tools:
    """The fields of a request about tools, checked as a whole. `forced`: the model must call one of these functions."""

    tools: Sequence[Tool] = ()
    choice: str | ChosenTool = "auto"
    parallel: bool = True

    def check(self) -> None:
        """Raises InvalidRequest for a `tool_choice` that these tools do not have, or a duplicate name."""
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("two tools have the same name", param="tools")
        if not names and self.choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if self.named and self.named not in names:
            raise InvalidRequest(f"tool_choice names {self.named}, which is not among the tools", param="tool_choice")

    @property
    def named(self) -> str:
        return self.choice.function.name if isinstance(self.choice, ChosenTool) else ""

    @property
    def forced(self) -> list[Function]:
        functions = [tool.function for tool in self.tools]
        if self.named:
            return [function for function in functions if function.name == self.named]
        return functions if self.choice == "required" else []

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called: the schema of each one's arguments, by its name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools if self.may_be_called}

    def template_values(self) -> list[dict[str, Any]]:
        """Returns the tools for the chat template, empty if none may be called."""
        if not self.may_be_called:
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def may_be_called(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    def constraint(
        self, form: str, token_ids: Mapping[str, int], output: Constraint | None, whitespace: str | None = None
    ) -> Constraint | None:
        """Returns what the output must match: forced calls, else `output` or calls. `token_ids` are the form's markers
        that are added tokens; `whitespace` is the pattern of the whitespace in arguments.

        Raises:
            InvalidRequest: `output` cannot be combined with calls.
        """
        if not self.may_be_called or (output is None and not self.forced):
            return output
        if self.forced:
            output = None
        if output is not None and output.kind != "json_schema":
            raise InvalidRequest(f"{output.param} cannot be combined with tool calls", param=output.param)
        functions = self.forced or [tool.function for tool in self.tools]
        one = bool(self.named) or not self.parallel
        lines = calls_grammar(form, functions, token_ids, 1 if one else MAX_CALLS, whitespace)
        if output is None:
            return Constraint("lark", "\n".join(lines), "tools")
        schema = _schema(orjson.loads(output.value), output)
        return Constraint(
            "lark", "\n".join(["start: calls | content", *lines[1:], f"content: %json {schema}"]), "tools"
        )


def calls_grammar(
    form: str,
    functions: Sequence[Function],
    token_ids: Mapping[str, int],
    max_calls: int,
    whitespace: str | None = None,
) -> list[str]:
    """Returns the lines of a Lark grammar of 1 to `max_calls` calls, beginning with the start rule."""

    def marker(text: str) -> str:
        return f"<[{token_ids[text]}]>" if text in token_ids else lark_string(text)

    hermes = "", f'{marker("<tool_call>")} "\\n"', '"\\n"', f'"\\n" {marker("</tool_call>")}', ""
    begin, before, between, after, end = {
        "hermes": hermes,
        "qwen3_coder": hermes,  # these parsers read objects, too, for which a grammar can follow any schema
        "glm45": hermes,
        "llama3": ("", "", '"; "', "", ""),
        "mistral": (f'{marker("[TOOL_CALLS]")} "["', "", '", "', "", '"]"'),
        "harmony": ("", "", "", "", ""),
        "deepseek_v3": (marker(CALLS_BEGIN), marker(CALL_BEGIN), '"\\n"', marker(CALL_END), marker(CALLS_END)),
        "deepseek_v31": (marker(CALLS_BEGIN), marker(CALL_BEGIN), "", marker(CALL_END), marker(CALLS_END)),
    }[form]
    more = f"({between} call){{0,{max_calls - 1}}}" if max_calls > 1 and form != "harmony" else ""
    lines = ["start: calls", f"calls: {begin} call {more} {end}"]
    lines.append(f"call: {before} ({' | '.join(f'call_{i}' for i in range(len(functions)))}) {after}")
    for number, function in enumerate(functions):
        strict = bool(function.strict)
        how = Constraint("json_schema", "", "", not strict, WHITESPACE if whitespace is None else whitespace)
        schema = _schema(prepared(_object_schema(function), "tools", strict=strict), how)
        name, tail = lark_string(function.name), ""
        match form:
            case "harmony":
                head = f"{marker('<|channel|>')} {lark_string(f'commentary to=functions.{function.name} ')}"
                head += f' {marker("<|constrain|>")} "json" {marker("<|message|>")}'
            case "deepseek_v3":
                head, tail = f'"function" {marker(CALL_SEP)} {name} "\\n```json\\n"', '"\\n```"'
            case "deepseek_v31":
                head = f"{name} {marker(CALL_SEP)}"
            case _:
                key = "parameters" if form == "llama3" else "arguments"
                head, tail = lark_string('{"name": "' + function.name + f'", "{key}": '), '"}"'
        lines.append(f"call_{number}: {head} arguments_{number} {tail}")
        lines.append(f"arguments_{number}: %json {schema}")
    return lines


def _object_schema(function: Function) -> dict[str, Any]:
    """Returns the schema of a function's arguments, which are an object.

    Raises:
        InvalidRequest: the schema allows none.
    """
    schema = function.parameters or _NO_ARGUMENTS
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidRequest(
            f"the parameters of {function.name} must have 'type': 'object', not {str(kinds)[:50]}", param="tools"
        )
    return schema | {"type": "object"}


def _schema(schema: dict[str, Any], how: Constraint) -> str:
    return json_text(schema | {"x-guidance": how.json_options()}, "tools")
