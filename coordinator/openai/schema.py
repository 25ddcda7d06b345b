"""The public request bodies as models, and their conversion to plain values.

A body passes from bytes through `parse` (validation.py: JSON, fields that are unknown or not served, types and sizes)
to `Options` and a prompt or messages. translate.py checks the ranges of the sampling fields, for gRPC too.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS, check_range
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.openai.structured import (
    Alternatives,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    Whitespace,
    constraint_of,
    whitespace_of,
)
from coordinator.openai.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice, Tools, limit_values
from coordinator.openai.validation import (
    CHAT,
    COMPLETION,
    INERT,
    MESSAGE,
    NOT_OF_CHATS,
    NOT_OF_COMPLETIONS,
    ModelBody,
    RequestObject,
    at_most,
    counted,
)
from coordinator.text.chat import RESERVED_VARIABLES, ChatMessage, Rendering
from coordinator.translate import MAX_BAD_WORDS, MAX_CHOICES, MAX_MESSAGES, MAX_STOPS, Options

MAX_PARTS = 1_024
MAX_METADATA = 16


def _ids(value: list[int]) -> array[int]:
    """Returns token ids in the form that passes from the process that parses bodies: a million of them as a list would
    block the event loop for 30 ms, as an array for 1 ms."""
    try:
        return array("q", value)
    except OverflowError:
        raise PydanticCustomError("token_id", "a token id has more than 63 bits") from None


def prompts(value: Any, field: str, limit: int) -> list[str | Sequence[int]]:
    """Returns the prompts in a field, at most `limit`, from a text or token ids, or a list of these."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError(field, "must be a string, an array of token ids, or an array of these")
    kinds = set(map(type, value))
    if kinds <= {int}:
        return [_ids(value)]
    counted(limit, value)
    if kinds == {str}:
        return value
    if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return [_ids(ids) for ids in value]
    raise PydanticCustomError(field, "must be a string, an array of token ids, or an array of these, not mixed")


def _prompt(value: Any) -> list[str | Sequence[int]]:
    return prompts(value, "prompt", MAX_CHOICES)


def _content(value: Any, info: ValidationInfo[IgnoredFields | None]) -> str:
    """Returns a text, or the texts of its parts joined by line breaks. A part of type `refusal`, from an earlier
    answer, has its text in `refusal`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or an array of text parts")
    if len(value) > MAX_PARTS:
        raise PydanticCustomError("content", f"at most {MAX_PARTS} parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _PARTS:
            raise PydanticCustomError("content", "only text parts are supported")
        if not isinstance(kind, str) or not isinstance(text := part.get(kind), str):
            raise PydanticCustomError("content", "a part must be an object with 'type': 'text' and a string 'text'")
        for name in part.keys() - _PARTS[kind]:
            if part[name] is not None:
                IgnoredFields.of(info.context).add_unknown("messages.content", name, _PARTS[kind], history=True)
        texts.append(text)
    return "\n".join(texts)


_PARTS = {kind: frozenset({"type", kind}) for kind in ("text", "refusal")}
"""The fields of each type of part, whose text is in the field of the same name."""


def _one_or_many(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop", "must be a string or an array of strings")
    return [value] if isinstance(value, str) else counted(MAX_STOPS, value)


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise PydanticCustomError("metadata", "keys have at most 64 characters, values 512")
    return value


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
Label = Annotated[str, StringConstraints(max_length=512)]
_Name = Annotated[str, StringConstraints(pattern=r"^[^\s<|\\/>]{1,64}$")]  # as OpenAI has it


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object that maps token ids to numbers")
    biases: dict[int, float] = {}
    for key, bias in counted(MAX_BIASES, value).items():
        if not _TOKEN_ID.fullmatch(key):
            raise PydanticCustomError("logit_bias", "a key must be a token id in decimal digits")
        if type(bias) not in (int, float):
            raise PydanticCustomError("logit_bias", "a bias must be a number")
        biases[int(key)] = bias
    return biases


class TextPart(RequestObject):
    """Only for the description of `content`; `_content` checks it."""

    type: Literal["text"]
    text: str


Stop = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
_Prompts = Annotated[
    list[str | Sequence[int]],
    PlainValidator(_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
Biases = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])]
TokenIds = Annotated[list[int], Field(fail_fast=True), AfterValidator(_ids)]  # only the first wrong id is reported
Metadata = Annotated[dict[str, str], AfterValidator(_check_metadata), at_most(MAX_METADATA)]
_Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart])]


def _also(*names: str) -> Any:
    """Returns a field that is left out, or given under one of these names: its own, and those of other servers."""
    return Field(default=None, validation_alias=AliasChoices(*names))


class StreamOptions(RequestObject):
    place = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(ModelBody):
    """The fields that completions and chat share. The last block is inert."""

    inert = INERT

    max_tokens: int | None = _also("max_tokens", "max_new_tokens", "n_predict")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = _also("seed", "random_seed")
    stop: Stop | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = _also("repetition_penalty", "repeat_penalty")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = _also("min_tokens", "min_new_tokens")
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKENS)] | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_timeline: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = _also("guided_regex", "regex")
    guided_choice: Alternatives | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Whitespace | None = None

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Metadata | None = None

    def options(self) -> Options:
        """Returns the fields that `Options` has under the same name, and the fields that need translating."""
        given: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list | array)}
        return Options(
            **given,
            include_stop=bool(self.include_stop_str_in_output),
            constraint=constraint_of(
                self.response_format, self.structured_outputs, self._guided(), self.guided_whitespace_pattern
            ),
            json_whitespace=whitespace_of(self.structured_outputs),
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Raises InvalidRequest for fields that cannot be combined."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs 'stream': true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        return self

    def _guided(self) -> dict[str, Any]:
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_SHARED = [option.name for option in fields(Options) if option.name in GenerationBody.model_fields]


class CompletionBody(GenerationBody):
    neutral = COMPLETION
    elsewhere = NOT_OF_COMPLETIONS

    prompt: _Prompts
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of not in (None, 1 if self.n is None else self.n):
            raise InvalidRequest("best_of must equal n (best_of sampling is not supported)", param="best_of")
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise InvalidRequest("suffix cannot be combined with echo or truncate_prompt_tokens", param="suffix")
        return self

    @property
    def echo_only(self) -> bool:
        """Whether nothing is to be generated: evaluations use this to score a text."""
        return bool(self.echo) and self.max_tokens == 0

    def options(self) -> Options:
        """Returns the options; echoed tokens get log-probabilities like the output."""
        own: dict[str, Any] = {"logprobs": self.logprobs, "prompts": len(self.prompt), "suffix": self.suffix or None}
        if self.prompt_logprobs is None and self.echo:
            own |= {"prompt_logprobs": self.logprobs, "prompt_logprobs_param": "logprobs"}
        if self.echo_only:
            own["max_tokens"] = 1
        return replace(super().options(), each_choice_has_prompt=True, **own)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_Reasoning = Annotated[str | None, PlainValidator(_text_or_none, json_schema_input_type=str)]
"""Reasoning that comes back in the history, under either name. Objects of other servers under these names are not
text."""


class MessageBody(RequestObject):
    neutral = MESSAGE
    place = "messages"
    history = True

    role: str
    content: _Content
    name: _Name | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None
    reasoning: _Reasoning | None = None
    reasoning_content: _Reasoning | None = None

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Adds an empty `content` to an assistant's message that has none: it may have called tools only."""
        return {"content": ""} | given if given.get("role") == "assistant" else given

    def message(self) -> ChatMessage:
        calls = tuple(call.as_template_value() for call in self.tool_calls or ())
        reasoning = (self.reasoning or self.reasoning_content or "") if self.role == "assistant" else ""
        return ChatMessage(self.role, self.content, self.name, self.tool_call_id, calls, reasoning)


_Messages = Annotated[list[MessageBody], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
_Tools = Annotated[list[Tool], at_most(MAX_TOOLS), limit_values("tools")]
_Variables = Annotated[dict[str, Any], limit_values("chat_template_kwargs")]


class ChatBody(GenerationBody):
    neutral = CHAT
    elsewhere = NOT_OF_CHATS

    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: _Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: _Variables | None = None

    @model_validator(mode="after")
    def _tools_go_together(self) -> Self:
        check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs 'logprobs': true", param="top_logprobs")
        self.tooling().check()
        self.rendering()
        return self

    def options(self) -> Options:
        """Returns the options; `max_completion_tokens` takes precedence over `max_tokens`, its older name."""
        options = replace(super().options(), logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        if self.max_completion_tokens is None:
            return options
        name = "max_completion_tokens"
        return replace(options, max_tokens=self.max_completion_tokens, max_tokens_param=name)

    def chat(self) -> list[ChatMessage]:
        return [message.message() for message in self.messages]

    def rendering(self) -> Rendering:
        """Returns how to render the messages. Raises InvalidRequest for fields that cannot be combined."""
        return _rendering(self, self.tooling())

    def tooling(self) -> Tools:
        return Tools(
            tools=self.tools or [],
            choice="auto" if self.tool_choice is None else self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )


def _rendering(body: ChatBody | TokenizeBody, tools: Tools) -> Rendering:
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message cannot be combined"
        raise InvalidRequest(message, param="continue_final_message")
    variables = body.chat_template_kwargs or {}
    if taken := sorted(variables.keys() & RESERVED_VARIABLES):
        raise InvalidRequest(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
    return Rendering(
        tools=tools.template_values(),
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=variables,
    )


class TokenizeBody(ModelBody):
    """Either a text or a conversation, of which the other fields are those of a chat."""

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: _Variables | None = None
    tools: _Tools | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of 'prompt' and 'messages' is required", param="prompt")
        self.tooling().check()
        self.rendering()
        return self

    def chat(self) -> list[ChatMessage]:
        return [message.message() for message in self.messages or ()]

    def rendering(self) -> Rendering:
        """Raises InvalidRequest for fields that cannot be combined."""
        return _rendering(self, self.tooling())

    def tooling(self) -> Tools:
        return Tools(tools=self.tools or [])


class DetokenizeBody(ModelBody):
    tokens: TokenIds


class LoadAdapterBody(RequestObject):
    lora_name: str
    lora_path: Annotated[str, StringConstraints(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterBody(RequestObject):
    inert = frozenset(["lora_int_id"])

    lora_name: str


class BatchBody(RequestObject):
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
    ]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
