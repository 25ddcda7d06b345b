"""Tools in `/v1/responses`: functions, custom tools, and namespaces of both, as functions for the chat template.

A custom tool is a function with one text, `input`; a function of a namespace has the namespace before its name. Tools
that only OpenAI's own service can run (web search, MCP servers and the like) are left out of the prompt and named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.openai.tools import MAX_TOOLS, ChosenFunction, ChosenTool, Function, Name, Tool, Tools
from coordinator.openai.validation import RequestObject, counted, validate

MAX_NAME_CHARS = 64
INPUT = "input"
"""The only argument of the function that stands for a custom tool."""


class ResponseTool(RequestObject):
    place = "tools"
    inert = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(RequestObject):
    place = "tools.format"

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(RequestObject):
    place = "tools"
    inert = frozenset({"allowed_callers", "async", "defer_loading"})

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class Namespace(RequestObject):
    place = "tools"

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[ResponseTool | CustomTool], PlainValidator(lambda value, info: _tools(value, info, "tools.tools"))
    ]


ServedTool = ResponseTool | CustomTool | Namespace
_SERVED: dict[str, type[ServedTool]] = {"function": ResponseTool, "custom": CustomTool, "namespace": Namespace}


def _tools(value: Any, info: ValidationInfo[IgnoredFields], place: str = "tools") -> list[Any]:
    """Returns the tools that can be served; the others are named by their type."""
    if not isinstance(value, list):
        raise PydanticCustomError("tools", "must be an array")
    tools = []
    for number, given in enumerate(counted(MAX_TOOLS, value)):
        param = f"{place}[{number}]"
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"'{param}': must be an object with a 'type'", param=param)
        model = _SERVED.get(kind)
        if model is None or (model is Namespace and place != "tools"):
            IgnoredFields.of(info.context).add(place, kind)
        else:
            tools.append(validate(model, given, IgnoredFields.of(info.context), path=param))
    return tools


ResponseTools = Annotated[list[ServedTool], PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]])]


@dataclass(frozen=True, slots=True)
class Called:
    """How a call of a function is shown: the name that the client gave it, its namespace, and whether it is custom."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(frozen=True, slots=True)
class AllowedTools:
    mode: Literal["auto", "required"]
    names: frozenset[str]


def _choice(value: Any, info: ValidationInfo[IgnoredFields]) -> str | Called | AllowedTools:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    given = value if isinstance(value, dict) else {}
    kind, ignored = given.get("type"), IgnoredFields.of(info.context)
    if kind in ("function", "custom") and isinstance(given.get("name"), str) and _has_namespace(given):
        known = frozenset({"type", "name", "namespace"})
        for name in given.keys() - known:
            ignored.add_unknown("tool_choice", name, known)
        return Called(given["name"], given.get("namespace") or "", kind == "custom")
    if (
        kind == "allowed_tools"
        and given.get("mode", "auto") in ("auto", "required")
        and isinstance(given.get("tools"), list)
    ):
        names = []
        for tool in counted(MAX_TOOLS, given["tools"]):
            if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
                raise PydanticCustomError("tool_choice", "an entry of 'tools' must be an object with a 'type'")
            if not _has_namespace(tool):
                raise PydanticCustomError("tool_choice", "the 'namespace' of an entry of 'tools' must be a string")
            if tool["type"] in ("function", "custom") and isinstance(tool.get("name"), str):
                names.append(internal_name(tool["name"], tool.get("namespace") or ""))
            else:
                ignored.add("tool_choice.tools", tool["type"])
        return AllowedTools(given.get("mode", "auto"), frozenset(names))
    message = (
        "must be 'none', 'auto', 'required', an object with 'type': 'function' or 'custom' and a 'name', "
        "or one with 'type': 'allowed_tools', a 'mode' and 'tools'"
    )
    raise PydanticCustomError("tool_choice", message)


def _has_namespace(tool: dict[str, Any]) -> bool:
    """Returns whether its namespace is text, or absent."""
    return isinstance(tool.get("namespace"), str | None)


ResponseChoice = Annotated[
    str | Called | AllowedTools, PlainValidator(_choice, json_schema_input_type=str | dict[str, Any])
]


def internal_name(name: str, namespace: str = "") -> str:
    """Returns the name of the function for the model. Too long a name is cut, and ends in a hash of all of it."""
    joined = name if not namespace else f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    if len(joined) <= MAX_NAME_CHARS:
        return joined
    return f"{joined[: MAX_NAME_CHARS - 9]}_{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """`tools` as chats have them, and how each function's calls are shown."""

    tools: Tools
    shown: Mapping[str, Called] = field(default_factory=dict)


def tool_set(given: Sequence[ServedTool], choice: str | Called | AllowedTools | None, *, parallel: bool) -> ToolSet:
    """Returns the functions that the model sees. Raises InvalidRequest for a choice among other tools."""
    functions: list[Function] = []
    shown: dict[str, Called] = {}
    for tool, namespace in _flat(given):
        function = _function(tool, namespace)
        functions.append(function)
        shown[function.name] = Called(tool.name, namespace.name if namespace else "", isinstance(tool, CustomTool))
    chosen: str | ChosenTool = "auto"
    if isinstance(choice, AllowedTools):
        if missing := sorted(choice.names - shown.keys()):
            raise InvalidRequest(f"tool_choice allows {missing[0]}, which is not among the tools", param="tool_choice")
        functions, chosen = [f for f in functions if f.name in choice.names], choice.mode
    elif isinstance(choice, Called):
        name = internal_name(choice.name, choice.namespace)
        if name in shown and shown[name].custom is not choice.custom:
            kind = "custom" if choice.custom else "function"
            raise InvalidRequest(f"tool_choice: {choice.name[:100]} is not of type '{kind}'", param="tool_choice")
        chosen = ChosenTool(type="function", function=ChosenFunction(name=name))
    elif choice is not None:
        chosen = choice
    return ToolSet(Tools([Tool(type="function", function=f) for f in functions], chosen, parallel), shown)


def _flat(given: Sequence[ServedTool]) -> Iterator[tuple[ResponseTool | CustomTool, Namespace | None]]:
    for tool in given:
        if isinstance(tool, Namespace):
            yield from ((inner, tool) for inner in tool.tools)
        else:
            yield tool, None


def _function(tool: ResponseTool | CustomTool, namespace: Namespace | None) -> Function:
    name = internal_name(tool.name, namespace.name if namespace else "")
    make = partial(Function, name=name)
    if isinstance(tool, ResponseTool):
        return make(description=tool.description, parameters=tool.parameters, strict=tool.strict)
    text: dict[str, Any] = {"type": "string"}
    description, form = tool.description or "", tool.format
    if form is not None and form.type == "grammar":
        if not form.definition or form.syntax is None:
            raise InvalidRequest("a grammar needs 'syntax' and 'definition'", param="tools.format")
        if form.syntax == "regex":
            text["pattern"] = form.definition
        description += f"\n\nThe input must match this {form.syntax} grammar:\n{form.definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return make(description=description.strip() or None, parameters=parameters, strict=True)


def shown_tools(given: Sequence[ServedTool]) -> list[dict[str, Any]]:
    """Returns the tools in the form in which an answer repeats them."""
    shown: list[dict[str, Any]] = []
    for tool in given:
        match tool:
            case ResponseTool():
                shown.append(
                    {
                        "type": "function",
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                        "strict": bool(tool.strict),
                    }
                )
            case CustomTool():
                form = tool.format.model_dump(exclude_none=True) if tool.format else {"type": "text"}
                shown.append({"type": "custom", "name": tool.name, "description": tool.description, "format": form})
            case Namespace():
                inner = shown_tools(tool.tools)
                named = {"type": "namespace", "name": tool.name, "description": tool.description or ""}
                shown.append(named | {"tools": inner})
    return shown


def shown_choice(choice: str | Called | AllowedTools | None) -> str | dict[str, Any]:
    """Returns the choice in the form in which an answer repeats it."""
    match choice:
        case Called(name, namespace, custom):
            more = {"namespace": namespace} if namespace else {}
            return {"type": "custom" if custom else "function", "name": name, **more}
        case AllowedTools(mode, names):
            return {
                "type": "allowed_tools",
                "mode": mode,
                "tools": [{"type": "function", "name": n} for n in sorted(names)],
            }
        case _:
            return choice or "auto"
