"""The bodies of Anthropic's Messages API, and their conversion to the values of a chat: messages, tools, options.

A message is a list of blocks. What has no counterpart in a chat template is left out of the prompt and named among the
ignored fields: tools that Anthropic's servers run, their calls and results in the history, and encrypted reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.anthropic.blocks import (
    GivenTurn,
    InputMessage,
    Passage,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
    parsed_system,
    parsed_turns,
)
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
from coordinator.openai.validation import ModelBody, Neutral, RequestObject, at_most, counted, validate
from coordinator.structured_output import Constraint
from coordinator.text.chat import ChatMessage, Rendering
from coordinator.translate import MAX_STOPS, Options

CLAUDE = "claude-"
"""Models of this prefix are served by the one model: clients such as Claude Code request several of them."""
INERT = frozenset(
    {
        *("betas", "billing_policy", "cache_control", "container", "context_management", "diagnostics"),
        *("fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers", "metadata", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    }
)
NEUTRAL: Neutral = {"compaction": ()}


class ClientTool(RequestObject):
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


def _tools(value: Any, info: ValidationInfo[IgnoredFields]) -> list[ClientTool]:
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "must be an array")
    tools = []
    for number, given in enumerate(counted(MAX_TOOLS, value)):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            info.context.add("tools", kind)
            continue
        tools.append(validate(ClientTool, given, info.context, path=f"tools[{number}]"))
    return tools


class ToolChoice(RequestObject):
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
    message = "thread is not supported: nothing is stored; send the whole conversation"
    raise InvalidRequest(message, code="thread_unsupported_request", param="thread")


class CountTokensBody(ModelBody):
    """What makes up the prompt."""

    inert = INERT
    neutral = NEUTRAL
    stand_ins = (CLAUDE,)

    messages: Annotated[list[InputMessage], PlainValidator(parsed_turns, json_schema_input_type=list[GivenTurn])]
    system: Annotated[str, PlainValidator(parsed_system, json_schema_input_type=str | list[SystemBlock])] = ""
    tools: Annotated[
        list[ClientTool], PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]]), limit_values("tools")
    ] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    thread: Annotated[None, PlainValidator(_no_thread, json_schema_input_type=None)] = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        """Raises InvalidRequest for fields that cannot be combined."""
        if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            message = "'tool_choice.name' is required"
            raise InvalidRequest(message, code="missing_required_parameter", param="tool_choice.name")
        self.tooling().check()
        self.constraint()
        self.rendering()
        return self

    def constraint(self) -> Constraint | None:
        """Returns what the output must match; `output_format` is the older name of `output_config.format`."""
        if self.output_config is not None and self.output_config.format is not None:
            return of_json(self.output_config.format.schema_, "output_config.format.schema", strict=True)
        return (
            None
            if self.output_format is None
            else of_json(self.output_format.schema_, "output_format.schema", strict=True)
        )

    def chat(self) -> list[ChatMessage]:
        """Returns the conversation. Consecutive messages of a role are one; results of tools precede the user's text.
        A system message after the first turn is a reminder in the user's text, because many templates accept system
        messages only at the beginning."""
        system, turns = [self.system] if self.system.strip() else [], list(self.messages)
        while turns and turns[0].role == "system":
            system.append(joined([block for block in turns.pop(0).content if isinstance(block, TextBlock)]))
        chat_messages = [ChatMessage("system", "\n".join(system))] if system else []
        last_user = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        for at, turn in enumerate(turns):
            if turn.clear_at == "next_user_message" and at < last_user:
                continue
            for message in _messages_of(turn):
                last = chat_messages[-1] if chat_messages else None
                if last is not None and last.role == message.role and message.role in ("user", "assistant"):
                    chat_messages[-1] = _merged(last, message)
                else:
                    chat_messages.append(message)
        return chat_messages

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

    def _loaded(self) -> list[ClientTool]:
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


def _messages_of(turn: InputMessage) -> Iterator[ChatMessage]:
    blocks = turn.content
    text = joined([block for block in blocks if isinstance(block, Passage)])
    if turn.role == "assistant":
        calls = [template_call(b.id, b.name, b.input) for b in blocks if isinstance(b, ToolUseBlock)]
        reasoning = joined([block for block in blocks if isinstance(block, ThinkingBlock)])
        if text or calls:
            yield ChatMessage("assistant", text, tool_calls=tuple(calls), reasoning=reasoning)
        return
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield ChatMessage("tool", block.text, tool_call_id=block.tool_use_id)
    if text and turn.role == "system":
        text = f"<system-reminder>\n{text}\n</system-reminder>"
    if text:
        yield ChatMessage("user", text)


def _merged(first: ChatMessage, then: ChatMessage) -> ChatMessage:
    content = "\n".join(filter(None, (first.content, then.content)))
    reasoning = "\n".join(filter(None, (first.reasoning, then.reasoning)))
    return replace(first, content=content, tool_calls=first.tool_calls + then.tool_calls, reasoning=reasoning)
