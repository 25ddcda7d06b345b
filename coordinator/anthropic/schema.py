"""The bodies of Anthropic's Messages API, and their conversion to the values of a chat: messages, tools, options.

A message is a list of blocks. What has no counterpart in a chat template is left out of the prompt and named among the
ignored fields: tools that Anthropic's servers run, their calls and results in the history, and encrypted reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, PlainValidator, StringConstraints, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from coordinator.anthropic.signatures import thinking_in
from coordinator.openai.fields import Neutral
from coordinator.openai.schema import MAX_PARTS
from coordinator.openai.structured import of_json
from coordinator.openai.tools import (
    MAX_TOOLS,
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
from coordinator.structured_output import Constraint
from coordinator.text.chat import Rendering
from coordinator.text.messages import ChatMessage
from coordinator.translate import MAX_MESSAGES, MAX_STOPS, Options

CLAUDE = "claude-"
"""Models of this prefix are served by the one model: clients such as Claude Code request several of them."""
BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a block of this text. It is for Anthropic's accounting and may differ in
each request, so that no prefix of the prompt would be cached."""
INERT = frozenset(
    {
        *("betas", "billing_policy", "cache_control", "container", "context_management", "diagnostics"),
        *("fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers", "metadata", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
NEUTRAL: Neutral = {"compaction": ()}
_MARKED = frozenset({"cache_control"})


class _Block(RequestObject):
    inert = _MARKED
    place = "messages.content"
    history = True


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class SystemBlock(TextBlock):
    place = "system"


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def text(self) -> str:
        """Returns the reasoning, also if the client did not want to see it."""
        return self.thinking or thinking_in(self.signature or "")


class CompactionBlock(_Block):
    """A summary, by another server, of the conversation before it; empty if it failed."""

    type: Literal["compaction"]
    content: str = ""

    @property
    def text(self) -> str:
        return self.content


class RedactedThinkingBlock(_Block):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: dict[str, Any] = Field(default_factory=dict)


class TextSource(RequestObject):
    place = "messages.content.source"

    type: Literal["text"]
    data: str
    media_type: str | None = None


class ContentSource(RequestObject):
    place = "messages.content.source"

    type: Literal["content"]
    content: list[TextBlock]


class DocumentBlock(_Block):
    type: Literal["document"]
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        source = self.source
        body = source.data if isinstance(source, TextSource) else _joined(source.content)
        return "\n".join(filter(None, (self.title, self.context, body)))


class SearchResultBlock(_Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, _joined(self.content)))


class ToolReferenceBlock(_Block):
    """Loads a tool whose definition has `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def text(self) -> str:
        text = _joined(self.content)
        return f"Error: {text}".rstrip() if self.is_error else text


class ReferencedTool(RequestObject):
    place = "messages.content.tool"

    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(_Block):
    """Adds or removes a tool from this place of the conversation on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ReferencedTool


_Passage = TextBlock | DocumentBlock | SearchResultBlock | CompactionBlock
Block = (
    _Passage
    | ToolReferenceBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolChangeBlock
)
_PASSAGES: dict[str, type[Block]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_RESULT: dict[str, type[Block]] = _PASSAGES | {"tool_reference": ToolReferenceBlock}
_BLOCKS: dict[str, dict[str, type[Block]]] = {
    "user": _PASSAGES | {"compaction": CompactionBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "compaction": CompactionBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock, "tool_addition": ToolChangeBlock, "tool_removal": ToolChangeBlock},
}


class Turn(RequestObject):
    """One message. A `system` message applies from its place on."""

    inert = frozenset({"cache_control", "output_config"})
    place = "messages"
    history = True

    role: Literal["user", "assistant", "system"]
    content: list[Block] = Field(default_factory=list)
    clear_at: Literal["next_user_message", "never"] | None = None


class _GivenTurn(RequestObject):
    """Only for the description of `messages`; `_turns` checks them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def _joined(blocks: list[Any]) -> str:
    return "\n".join(filter(None, (block.text for block in blocks)))


def _runs_at_anthropic(kind: str) -> bool:
    """Returns whether a block of the history is a call or a result of a tool that Anthropic's servers run."""
    return kind in ("server_tool_use", "mcp_tool_use") or (kind.endswith("_tool_result") and kind != "tool_result")


def _blocks(value: Any, known: Mapping[str, type[Block]], param: str, ignored: IgnoredFields) -> list[Block]:
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise InvalidRequest(f"'{param}': must be a string or an array of blocks", param=param)
    if len(value) > MAX_PARTS:
        raise InvalidRequest(f"'{param}': at most {MAX_PARTS} blocks, not {len(value)}", param=param)
    found = []
    for number, given in enumerate(value):
        place = f"{param}[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{place}': must be an object", param=place)
        kind = given.get("type")
        if not isinstance(kind, str):
            raise _unknown_block("", known, place)
        if kind not in known and _runs_at_anthropic(kind):
            ignored.add("messages.content", kind)
            continue
        if kind == "redacted_thinking":
            ignored.add("messages.content", kind)
        if (model := known.get(kind)) is None:
            raise _unknown_block(kind, known, place)
        found.append(validate(model, _with_blocks(given, place, ignored), ignored, path=place))
    return found


def _unknown_block(kind: str, known: Mapping[str, type[Block]], place: str) -> InvalidRequest:
    if kind in ("image", "document", "container_upload"):
        return InvalidRequest(f"'{place}': {kind} blocks are not supported here: text only", param=place)
    what = f"'{place}.type': must be one of {', '.join(known)}"
    return InvalidRequest(what, param=f"{place}.type")


def _with_blocks(given: dict[str, Any], place: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Returns a block whose own blocks are checked: the content of a result of a tool, or of the source of a
    document."""
    kind = given["type"]
    if kind == "tool_result" and given.get("content") is not None:
        return given | {"content": _blocks(given["content"], _RESULT, f"{place}.content", ignored)}
    source = given.get("source")
    if kind == "document" and isinstance(source, dict):
        form = source.get("type")
        if form not in ("text", "content"):
            what = f"'{place}.source': only documents of text are supported: 'type': 'text' or 'content'"
            raise InvalidRequest(what, param=f"{place}.source")
        if form == "content":
            blocks = _blocks(source.get("content"), {"text": TextBlock}, f"{place}.source.content", ignored)
            return given | {"source": ContentSource(type="content", content=blocks)}  # type: ignore[arg-type]
    return given


def _turns(value: Any, info: ValidationInfo[IgnoredFields]) -> list[Turn]:
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("messages", "must be a non-empty array of messages")
    found = []
    for number, given in enumerate(counted(MAX_MESSAGES, value)):
        place = f"messages[{number}]"
        if not isinstance(given, dict):
            raise InvalidRequest(f"'{place}': must be an object", param=place)
        role = given.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            what = f"'{place}.role': must be one of {', '.join(_BLOCKS)}; use 'system' for a system prompt"
            raise InvalidRequest(what, param=f"{place}.role")
        content = given.get("content")
        if content is None and role != "system":
            what = f"'{place}.content' is required"
            raise InvalidRequest(what, code="missing_required_parameter", param=f"{place}.content")
        blocks = [] if content is None else _blocks(content, _BLOCKS[role], f"{place}.content", info.context)
        found.append(validate(Turn, given | {"content": blocks}, info.context, path=place))
    return found


def _system(value: Any, info: ValidationInfo[IgnoredFields]) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("system", "must be a string or an array of text blocks")
    texts = []
    for number, given in enumerate(counted(MAX_PARTS, value)):
        text = validate(SystemBlock, given, info.context, path=f"system[{number}]").text
        if text.startswith(BILLING):
            info.context.add("system", BILLING.rstrip(":"))
        else:
            texts.append(text)
    return "\n".join(texts)


class CustomTool(RequestObject):
    """A tool that the client runs. One with `defer_loading` is in the prompt once a reference has loaded it."""

    inert = frozenset({"allowed_callers", "cache_control", "eager_input_streaming", "input_examples", "title"})
    place = "tools"

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None

    def as_function(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


def _tools(value: Any, info: ValidationInfo[IgnoredFields]) -> list[CustomTool]:
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "must be an array")
    found = []
    for number, given in enumerate(counted(MAX_TOOLS, value)):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            info.context.add("tools", kind)
            continue
        found.append(validate(CustomTool, given, info.context, path=f"tools[{number}]"))
    return found


class Choice(RequestObject):
    place = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestObject):
    """The budget has no effect: a model decides how long it thinks."""

    inert = frozenset({"budget_tokens"})
    place = "thinking"

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(RequestObject):
    place = "output_config.format"

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestObject):
    inert = frozenset({"effort", "task_budget"})
    place = "output_config"

    format: JsonFormat | None = None


def _no_thread(value: Any) -> None:
    """Refuses a conversation that the server is to hold. The code lets clients send the whole conversation instead."""
    what = "thread is not supported: nothing is stored; send the whole conversation"
    raise InvalidRequest(what, code="thread_unsupported_request", param="thread")


class CountTokensBody(ModelBody):
    """What makes up the prompt."""

    inert = INERT
    neutral = NEUTRAL
    stand_ins = (CLAUDE,)

    messages: Annotated[list[Turn], PlainValidator(_turns, json_schema_input_type=list[_GivenTurn])]
    system: Annotated[str, PlainValidator(_system, json_schema_input_type=str | list[SystemBlock])] = ""
    tools: Annotated[
        list[CustomTool], PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]]), limit_values("tools")
    ] = Field(default_factory=list)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    thread: Annotated[None, PlainValidator(_no_thread, json_schema_input_type=None)] = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        """Raises InvalidRequest for fields that cannot be combined."""
        if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            what = "'tool_choice.name' is required"
            raise InvalidRequest(what, code="missing_required_parameter", param="tool_choice.name")
        self.tooling().check()
        self.constraint()
        self.rendering()
        return self

    def constraint(self) -> Constraint | None:
        """Returns what the output must match; `output_format` is the older name of `output_config.format`."""
        if self.output_config is not None and self.output_config.format is not None:
            return of_json(self.output_config.format.schema_, "output_config.format.schema")
        return None if self.output_format is None else of_json(self.output_format.schema_, "output_format.schema")

    def chat(self) -> list[ChatMessage]:
        """Returns the conversation. Consecutive messages of a role are one; results of tools precede the user's text.
        A system message after the first turn is a reminder in the user's text, because many templates accept system
        messages only at the beginning."""
        system, turns = [self.system] if self.system.strip() else [], list(self.messages)
        while turns and turns[0].role == "system":
            system.append(_joined([block for block in turns.pop(0).content if isinstance(block, TextBlock)]))
        found = [ChatMessage("system", "\n".join(system))] if system else []
        last_user = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        for at, turn in enumerate(turns):
            if turn.clear_at == "next_user_message" and at < last_user:
                continue
            for message in _messages_of(turn):
                last = found[-1] if found else None
                if last is not None and last.role == message.role and message.role in ("user", "assistant"):
                    found[-1] = _merged(last, message)
                else:
                    found.append(message)
        return found

    def rendering(self) -> Rendering:
        """Returns how to render the messages: a last message of the assistant is continued.

        Raises:
            InvalidRequest: the last message calls a tool, so that its result is missing.
        """
        last, place = self.messages[-1], f"messages[{len(self.messages) - 1}]"
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise InvalidRequest(f"'{place}': a tool_use needs a tool_result in the next message", param=place)
        continues = bool(list(_messages_of(last))) and last.role == "assistant"
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        variables = {} if self.thinking is None else {"enable_thinking": thinks, "thinking": thinks}
        return Rendering(
            tools=self.tooling().template_values(),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            variables=variables,
        )

    def tooling(self) -> Tools:
        choice = self.tool_choice
        chosen: str | ChosenTool = "auto" if choice is None else "required" if choice.type == "any" else choice.type
        if choice is not None and choice.type == "tool":
            chosen = ChosenTool(type="function", function=ChosenFunction(name=choice.name or ""))
        return Tools(
            tools=[tool.as_function() for tool in self._loaded()],
            choice=chosen,
            parallel=not (choice is not None and choice.disable_parallel_tool_use),
        )

    def _loaded(self) -> list[CustomTool]:
        """Returns the tools at the end of the conversation: without the deferred ones that nothing has loaded."""
        loaded = {tool.name: not tool.defer_loading for tool in self.tools}
        for turn in self.messages:
            for block in turn.content:
                if isinstance(block, ToolChangeBlock):
                    loaded[block.tool.name] = block.type == "tool_addition"
                elif isinstance(block, ToolResultBlock):
                    loaded |= {each.tool_name: True for each in block.content if isinstance(each, ToolReferenceBlock)}
        return [tool for tool in self.tools if loaded[tool.name]]


class MessagesBody(CountTokensBody):
    """The body of a request for a message. `max_tokens` 0 computes the prompt, so that it is cached, and no more."""

    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: Annotated[list[str], at_most(MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def options(self) -> Options:
        """Returns the options. As in Anthropic's API, `max_tokens` may exceed what fits into the context."""
        return Options(
            max_tokens=max(self.max_tokens, 1),
            fit_max_tokens=True,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences or ()),
            stop_param="stop_sequences",
            constraint=self.constraint(),
        )

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


def _messages_of(turn: Turn) -> Iterator[ChatMessage]:
    blocks = turn.content
    text = _joined([block for block in blocks if isinstance(block, _Passage)])
    if turn.role == "assistant":
        calls = [template_call(_short_id(b.id), b.name, b.input) for b in blocks if isinstance(b, ToolUseBlock)]
        reasoning = _joined([block for block in blocks if isinstance(block, ThinkingBlock)])
        if text or calls:
            yield ChatMessage("assistant", text, tool_calls=tuple(calls), reasoning=reasoning)
        return
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield ChatMessage("tool", block.text, tool_call_id=_short_id(block.tool_use_id))
    if text and turn.role == "system":
        text = f"<system-reminder>\n{text}\n</system-reminder>"
    if text:
        yield ChatMessage("user", text)


def _merged(first: ChatMessage, then: ChatMessage) -> ChatMessage:
    content = "\n".join(filter(None, (first.content, then.content)))
    reasoning = "\n".join(filter(None, (first.reasoning, then.reasoning)))
    return replace(first, content=content, tool_calls=first.tool_calls + then.tool_calls, reasoning=reasoning)


def _short_id(name: str) -> str:
    """Returns nine letters and digits for the id of a call, whatever server made it: Mistral's templates accept no
    other id."""
    return xxhash.xxh3_64_hexdigest(name.encode())[:9]
