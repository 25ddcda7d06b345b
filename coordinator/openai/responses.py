"""The body of `/v1/responses`, OpenAI's newer form of a chat: items in, items out. Nothing is stored: the client sends
the whole conversation, and `previous_response_id` is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from coordinator.openai import fields
from coordinator.openai.schema import Metadata
from coordinator.openai.structured import ANY_OBJECT, of_json
from coordinator.openai.tools import (
    MAX_TOOLS,
    Arguments,
    ChosenFunction,
    ChosenTool,
    Function,
    Name,
    Tool,
    Tools,
    limit_values,
    template_call,
)
from coordinator.openai.unknown_fields import IgnoredFields
from coordinator.openai.validation import ModelBody, RequestObject, at_most, counted, validate
from coordinator.structured_output import json_text
from coordinator.text.chat import ChatMessage, Rendering
from coordinator.translate import MAX_MESSAGES, ROLES, Options

NOT_YET = frozenset({"chat_template_kwargs", "seed", "stop", "stream_options", "top_k"})
"""Fields of chats that have no effect here."""
INERT = fields.INERT | NOT_YET | {"include", "max_tool_calls", "reasoning", "top_logprobs", "truncation"}
NEUTRAL: fields.Neutral = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_PART = frozenset({"type", "text"})


class _Item(RequestObject):
    """The client sends the items of an earlier answer back unchanged, with ids and states."""

    place = "input"
    history = True

    id: Any = None
    status: Any = None


class Message(_Item):
    type: Literal["message"] = "message"
    role: str
    content: str

    def message(self) -> ChatMessage:
        return ChatMessage(self.role, self.content)


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: Arguments

    def message(self) -> ChatMessage:
        call = template_call(self.call_id, self.name, self.arguments)
        return ChatMessage("assistant", "", tool_calls=(call,))


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str

    def message(self) -> ChatMessage:
        return ChatMessage("tool", self.output, tool_call_id=self.call_id)


Item = Message | FunctionCall | FunctionCallOutput
_ITEMS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
}


_CHOICE = frozenset({"type", "name"})


def _choice(value: Any, info: ValidationInfo[IgnoredFields]) -> str | ChosenTool:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        for name in value.keys() - _CHOICE:
            info.context.add_unknown("tool_choice", name, _CHOICE)
        return ChosenTool(type="function", function=ChosenFunction(name=value["name"]))
    what = "must be 'none', 'auto', 'required' or an object with 'type': 'function' and a 'name'"
    raise PydanticCustomError("tool_choice", what)


_Choice = Annotated[str | ChosenTool, PlainValidator(_choice, json_schema_input_type=str | dict[str, Any])]


class ResponseTool(RequestObject):
    place = "tools"

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(RequestObject):
    place = "text.format"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestObject):
    place = "text"

    format: TextFormat | None = None
    verbosity: str | None = None


def _text_of(parts: list[Any], param: str, ignored: IgnoredFields) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            what = f"'{param}[{number}]': only text is supported: {', '.join(_TEXT_PARTS)}, with a string 'text'"
            raise InvalidRequest(what, param=f"{param}[{number}]")
        for name in part.keys() - _PART:
            if part[name]:  # answers have empty `annotations` and `logprobs`
                ignored.add_unknown("input.content", name, _PART, history=True)
        texts.append(part["text"])
    return "\n".join(texts)


def _items(value: Any, info: ValidationInfo[IgnoredFields]) -> list[Item]:
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string or an array of items")
    found = []
    for number, given in enumerate(counted(MAX_MESSAGES, value)):
        param = f"input[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{param}': must be an object", param=param)
        kind = given.get("type") or "message"
        if kind == "reasoning":
            info.context.add("input", "reasoning")
            continue
        model = _ITEMS.get(kind) if isinstance(kind, str) else None
        if model is None:
            known = ", ".join(_ITEMS)
            raise InvalidRequest(f"'{param}.type': must be one of {known}", param=f"{param}.type")
        texts = {
            n: _text_of(given[n], f"{param}.{n}", info.context)
            for n in ("content", "output")
            if isinstance(given.get(n), list)
        }
        item = validate(model, {"type": kind} | given | texts, info.context, path=param)
        if isinstance(item, Message) and item.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise InvalidRequest(f"'{param}.role': must be one of {known}", param=f"{param}.role")
        found.append(item)
    return found


class ResponsesBody(ModelBody):
    inert = INERT
    neutral = NEUTRAL

    input: Annotated[list[Item], PlainValidator(_items, json_schema_input_type=str | list[dict[str, Any]])]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], at_most(MAX_TOOLS), limit_values("tools")] | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        """Raises InvalidRequest for fields that are not served or cannot be combined."""
        self.options()
        self.tooling().check()
        json_text([tool.parameters for tool in self.tools or ()], "tools")  # the answer repeats them
        return self

    def options(self) -> Options:
        wanted = self.text.format if self.text is not None else None
        constraint = None
        if wanted is not None and wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise InvalidRequest("'text.format.schema' is required", param="text.format.schema")
            constraint = of_json(wanted.schema_, "text.format.schema", lenient=not wanted.strict)
        elif wanted is not None and wanted.type == "json_object":
            constraint = of_json(ANY_OBJECT, "text.format")
        return Options(
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            temperature=self.temperature,
            top_p=self.top_p,
            constraint=constraint,
        )

    def chat(self) -> list[ChatMessage]:
        """Returns the conversation; merges consecutive calls into one assistant message, with the text before them."""
        found = [ChatMessage("system", self.instructions)] if self.instructions else []
        for item in self.input:
            message, last = item.message(), found[-1] if found else None
            if message.tool_calls and last is not None and last.role == "assistant":
                found[-1] = ChatMessage("assistant", last.content, tool_calls=last.tool_calls + message.tool_calls)
            else:
                found.append(message)
        return found

    def rendering(self) -> Rendering:
        return Rendering(tools=self.tooling().template_values())

    def tooling(self) -> Tools:
        given = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        tools = [Tool(type="function", function=Function(**function)) for function in given]
        choice = "auto" if self.tool_choice is None else self.tool_choice
        return Tools(tools=tools, choice=choice, parallel=self.parallel_tool_calls is not False)


def shown_tools(tools: Tools) -> list[dict[str, Any]]:
    """Returns the tools in the form in which an answer repeats them."""
    functions = [tool.function for tool in tools.tools]
    return [{"type": "function", **function.model_dump(), "strict": bool(function.strict)} for function in functions]


def shown_format(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return {"type": "text"}
    shown: dict[str, Any] = {"type": wanted.type}
    if wanted.type == "json_schema":
        shown |= {"name": wanted.name or "", "schema": wanted.schema_, "strict": bool(wanted.strict)}
    return shown
