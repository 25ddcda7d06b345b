"""The body of `/v1/responses`, OpenAI's newer form of a chat: items in, items out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import MAX_LOGPROBS, check_range
from coordinator.openai import validation
from coordinator.openai.responses_items import Item, Items, conversation
from coordinator.openai.responses_tools import ResponseChoice, ResponseTools, ToolSet, shown_tools, tool_set
from coordinator.openai.schema import Biases, Metadata, Stop, TokenIds
from coordinator.openai.structured import ANY_OBJECT, of_json
from coordinator.openai.tools import Tools, limit_values
from coordinator.openai.validation import ModelBody, RequestObject, at_most
from coordinator.structured_output import json_text
from coordinator.text.chat import RESERVED_VARIABLES, ChatMessage, Rendering
from coordinator.translate import MAX_BAD_WORDS, Options

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INERT = (validation.INERT - {"store"}) | {
    *("client_metadata", "max_tool_calls", "reasoning", "stream_options", "truncation")
}
NEUTRAL: validation.Neutral = {"background": (False,), "conversation": (), "prompt": ()}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos", "cache_salt", "priority", "skip_special_tokens"),
    *("truncate_prompt_tokens",),
)
"""Fields that the options have under the same name."""


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


class ResponsesBody(ModelBody):
    inert = INERT
    neutral = NEUTRAL

    input: Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Annotated[ResponseTools, limit_values("tools")] | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], at_most(16)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: Annotated[dict[str, Any], limit_values("chat_template_kwargs")] | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        """Raises InvalidRequest for fields that are not served or cannot be combined."""
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest("'input' has no item that can be served", param="input")
        check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        self.options()
        self.tooling().check()
        self.rendering()
        json_text(shown_tools(self.tools or []), "tools")  # the answer repeats them
        return self

    @property
    def shows_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def options(self) -> Options:
        text_format = self.text.format if self.text is not None else None
        constraint = None
        if text_format is not None and text_format.type == "json_schema":
            if text_format.schema_ is None:
                raise InvalidRequest("'text.format.schema' is required", param="text.format.schema")
            strict = bool(text_format.strict)
            constraint = of_json(text_format.schema_, "text.format.schema", lenient=not strict, strict=strict)
        elif text_format is not None and text_format.type == "json_object":
            constraint = of_json(ANY_OBJECT, "text.format")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return Options(
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            logprobs=(self.top_logprobs or 0) if self.shows_logprobs else None,
            constraint=constraint,
            **given,
        )

    def chat(self, before: Sequence[Item] = ()) -> list[ChatMessage]:
        """Returns the conversation, after the items `before` it."""
        return conversation(self.instructions, [*before, *self.input])

    def rendering(self) -> Rendering:
        variables = self.chat_template_kwargs or {}
        if taken := sorted(variables.keys() & RESERVED_VARIABLES):
            raise InvalidRequest(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
        return Rendering(tools=self.tooling().template_values(), variables=variables)

    def tool_set(self) -> ToolSet:
        return tool_set(self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def tooling(self) -> Tools:
        return self.tool_set().tools


def shown_format(body: ResponsesBody) -> dict[str, Any]:
    text_format = body.text.format if body.text is not None else None
    if text_format is None:
        return {"type": "text"}
    shown: dict[str, Any] = {"type": text_format.type}
    if text_format.type == "json_schema":
        shown |= {"name": text_format.name or "", "schema": text_format.schema_, "strict": bool(text_format.strict)}
    return shown
