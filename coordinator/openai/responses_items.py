"""The items of `/v1/responses`: what a conversation is made of, as a client sends it and as answers have it.

What other servers wrote is accepted: items that only OpenAI's own service can run are left out and named. A reasoning
item belongs to the assistant's message or call after it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.openai.responses_tools import INPUT, internal_name
from coordinator.openai.tools import Arguments, CalledName, template_call
from coordinator.openai.validation import RequestObject, counted, validate
from coordinator.text.chat import ChatMessage
from coordinator.translate import MAX_MESSAGES, ROLES

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_PART = frozenset({"type", "text", "refusal"})
_ENCODED = "baton1."


class _Item(RequestObject):
    """The client sends the items of an earlier answer back unchanged, with ids and states."""

    place = "input"
    history = True
    inert = frozenset({"caller", "async"})

    id: str | None = None
    status: str | None = None


class Message(_Item):
    type: Literal["message"] = "message"
    role: str
    content: str

    def message(self) -> ChatMessage:
        return ChatMessage(self.role, self.content)


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: Arguments
    namespace: str | None = None

    def message(self) -> ChatMessage:
        call = template_call(self.call_id, internal_name(self.name, self.namespace or ""), self.arguments)
        return ChatMessage("assistant", "", tool_calls=(call,))


class CustomToolCall(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: CalledName
    input: str
    namespace: str | None = None

    def message(self) -> ChatMessage:
        call = template_call(self.call_id, internal_name(self.name, self.namespace or ""), {INPUT: self.input})
        return ChatMessage("assistant", "", tool_calls=(call,))


class CallOutput(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str

    def message(self) -> ChatMessage:
        return ChatMessage("tool", self.output, tool_call_id=self.call_id)


class ReasoningItem(_Item):
    """The text is in `content`, in `summary`, or in what `encoded` wrote."""

    type: Literal["reasoning"]
    content: str | None = None
    summary: str | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return self.content or decoded(self.encrypted_content or "") or self.summary or ""

    def message(self) -> ChatMessage:
        return ChatMessage("assistant", "", reasoning=self.text)


Item = Message | FunctionCall | CustomToolCall | CallOutput | ReasoningItem
_ITEMS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "custom_tool_call": CustomToolCall,
    "function_call_output": CallOutput,
    "custom_tool_call_output": CallOutput,
    "reasoning": ReasoningItem,
}
_REFUSED = {
    "item_reference": "items are not stored: send the item itself, or `previous_response_id`",
}


def _text_of(parts: list[Any], param: str, ignored: IgnoredFields) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            message = f"'{param}[{number}]': only text is supported: {', '.join(_TEXT_PARTS)}, with a string 'text'"
            raise InvalidRequest(message, param=f"{param}[{number}]")
        for name in part.keys() - _PART:
            if part[name]:  # answers have empty `annotations` and `logprobs`
                ignored.add_unknown("input.content", name, _PART, history=True)
        texts.append(text)
    return "\n".join(texts)


def parsed_items(value: Any, ignored: IgnoredFields) -> list[Item]:
    """Returns the items of an input: a text, or a list. Raises InvalidRequest that names the item."""
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string or an array of items")
    items: list[Item] = []
    for number, given in enumerate(counted(MAX_MESSAGES, value)):
        param = f"input[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{param}': must be an object", param=param)
        kind = given.get("type") or "message"
        if not isinstance(kind, str) or kind in _REFUSED:
            message = _REFUSED.get(kind, "must be a string") if isinstance(kind, str) else "must be a string"
            raise InvalidRequest(f"'{param}.type': {message}", param=f"{param}.type")
        model = _ITEMS.get(kind)
        if model is None:
            ignored.add("input", kind)
            continue
        texts = {
            n: _text_of(given[n], f"{param}.{n}", ignored)
            for n in ("content", "output", "summary")
            if isinstance(given.get(n), list)
        }
        item = validate(model, {"type": kind} | given | texts, ignored, path=param)
        if isinstance(item, Message) and item.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise InvalidRequest(f"'{param}.role': must be one of {known}", param=f"{param}.role")
        items.append(item)
    return items


def _items(value: Any, info: ValidationInfo[IgnoredFields]) -> list[Item]:
    return parsed_items(value, IgnoredFields.of(info.context))


Items = Annotated[list[Item], PlainValidator(_items, json_schema_input_type=str | list[dict[str, Any]])]


def conversation(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Returns the conversation; merges reasoning, text and consecutive calls of the assistant into one message."""
    messages = [ChatMessage("system", instructions)] if instructions else []
    for item in items:
        message, last = item.message(), messages[-1] if messages else None
        if last is None or last.role != "assistant" or message.role != "assistant" or not _continues(last, message):
            messages.append(message)
            continue
        messages[-1] = replace(
            last,
            content=last.content or message.content,
            reasoning=last.reasoning or message.reasoning,
            tool_calls=last.tool_calls + message.tool_calls,
        )
    return messages


def _continues(last: ChatMessage, message: ChatMessage) -> bool:
    """Whether both are parts of one message: its reasoning, then its text, then its calls."""
    if message.reasoning:
        return False
    return bool(message.tool_calls) or not (last.content or last.tool_calls)


def stored_form(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns items as JSON from which `parsed_items` makes the same ones."""
    return [item.model_dump(exclude_none=True) for item in items]


def shown_items(items: Sequence[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Returns stored items in the form in which the API lists them."""
    shown = []
    for number, item in enumerate(items):
        entry = {"id": f"item_{response_id}_{number}", "status": "completed"} | dict(item)
        if item["type"] == "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": item["content"]}
            entry["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
        elif item["type"] == "reasoning":
            entry |= {"summary": [], "content": [{"type": "reasoning_text", "text": item.get("content", "")}]}
        shown.append(entry)
    return shown


def encoded(reasoning: str) -> str:
    """Returns reasoning for `encrypted_content`, so that a client that keeps only this field can send it back. It is
    not a secret: the answer has the text, too."""
    return _ENCODED + base64.b64encode(reasoning.encode()).decode()


def decoded(text: str) -> str:
    """Returns what `encoded` got; empty for what other servers encrypted."""
    if not text.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_ENCODED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
