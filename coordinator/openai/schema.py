"""The public request bodies as strict models, and the plain values they stand for.

A body is bytes until here: parse_object -> sift (unknown, not served) -> types and sizes (pydantic, nothing coerced)
-> `Options`, a prompt or messages. Ranges of the sampling fields are checked by translate.py, for gRPC too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import MAX_BIASES, MAX_STOP_TOKENS
from coordinator.openai import fields
from coordinator.openai.json_body import parse_object
from coordinator.openai.structured import JsonSchema, ResponseFormat, SchemaOrText, StructuredOutputs, constraint_of
from coordinator.openai.tools import MAX_TOOLS, CalledFunction, Tool, ToolCall, ToolChoice, Tools
from coordinator.openai.validation import Strict, at_most, counted, validate
from coordinator.text.chat import RESERVED_VARIABLES, ChatMessage, Rendering
from coordinator.translate import MAX_BAD_WORDS, MAX_CHOICES, MAX_MESSAGES, MAX_STOPS, Options

MAX_PARTS = 1_024
MAX_METADATA = 16


def _prompt(value: Any) -> list[str | list[int]]:
    """The prompts: a text or token ids, or a list of these."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a string, an array of token ids, or an array of these")
    kinds = set(map(type, value))
    if kinds <= {int}:
        return [value]
    counted(MAX_CHOICES, value)
    if kinds == {str}:
        return value
    if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return value
    raise PydanticCustomError("prompt", "must be a string, an array of token ids, or an array of these, nothing mixed")


def _content(value: Any) -> str:
    """A text, or the texts of its parts, one line break between two."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or an array of text parts")
    if len(value) > MAX_PARTS:
        raise PydanticCustomError("content", f"at most {MAX_PARTS} parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError("content", "only text parts are supported")
        if kind != "text" or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("content", "a part must be an object with 'type': 'text' and a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _one_or_many(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop", "must be a string or an array of strings")
    return [value] if isinstance(value, str) else counted(MAX_STOPS, value)


def check_metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise PydanticCustomError("metadata", "keys have at most 64 characters, values 512")
    return value


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_Label = Annotated[str, StringConstraints(max_length=512)]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    found: dict[int, float] = {}
    for key, bias in counted(MAX_BIASES, value).items():
        if not _TOKEN_ID.fullmatch(key):
            raise PydanticCustomError("logit_bias", "a key must be a token id in decimal digits")
        if type(bias) not in (int, float):
            raise PydanticCustomError("logit_bias", "a bias must be a number")
        found[int(key)] = bias
    return found


class TextPart(Strict):
    """Only for the description of `content`; `_content` checks it."""

    type: Literal["text"]
    text: str


_Stop = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
_Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
_Biases = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])]
_Ids = Annotated[list[int], Field(fail_fast=True)]  # of a million wrong ones the first is enough
_Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart])]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Strict):
    """What completions and chat share. The last block is inert."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: _Biases | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKENS)] | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: _Ids | None = None
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
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata), at_most(MAX_METADATA)] | None = None

    def options(self) -> Options:
        return Options(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            n=self.n,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            constraint=constraint_of(
                self.response_format, self.structured_outputs, self._guided(), self.guided_whitespace_pattern
            ),
        )

    def _guided(self) -> dict[str, Any]:
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionBody(GenerationBody):
    prompt: _Prompts
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def echo_only(self) -> bool:
        """Whether nothing is to be generated: evaluations score a text like that."""
        return bool(self.echo) and self.max_tokens == 0

    def options(self) -> Options:
        """As for chat; echoed tokens are scored like the output."""
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = self.logprobs
        options = replace(super().options(), logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)
        if self.echo_only:
            options = replace(options, max_tokens=1)
        return replace(options, each_choice_has_prompt=True, prompts=len(self.prompt))


class MessageBody(Strict):
    role: str
    content: _Content
    name: _Name | None = None
    tool_call_id: _Name | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None


_Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES)]


def _chat(messages: list[MessageBody]) -> list[ChatMessage]:
    return [
        ChatMessage(
            m.role,
            m.content,
            m.name,
            m.tool_call_id,
            tuple(
                call.as_template_value(f"messages[{number}].tool_calls[{place}]")
                for place, call in enumerate(m.tool_calls or ())
            ),
        )
        for number, m in enumerate(messages)
    ]


class ChatBody(GenerationBody):
    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self) -> Options:
        """As for completions; `max_completion_tokens` goes before its older name."""
        options = replace(super().options(), logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        if self.max_completion_tokens is None:
            return options
        name = "max_completion_tokens"
        return replace(options, max_tokens=self.max_completion_tokens, max_tokens_param=name)

    def chat(self) -> list[ChatMessage]:
        return _chat(self.messages)

    def rendering(self) -> Rendering:
        """Raises InvalidRequest for what cannot go together."""
        goes_on = bool(self.continue_final_message)
        if goes_on and self.add_generation_prompt:
            what = "add_generation_prompt and continue_final_message exclude each other"
            raise InvalidRequest(what, param="continue_final_message")
        variables = self.chat_template_kwargs or {}
        if taken := sorted(variables.keys() & RESERVED_VARIABLES):
            raise InvalidRequest(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
        return Rendering(
            tools=self.tooling().template_values(),
            add_generation_prompt=not goes_on and self.add_generation_prompt is not False,
            continue_final_message=goes_on,
            variables=variables,
        )

    def tooling(self) -> Tools:
        return Tools(
            tools=self.tools or [],
            choice="auto" if self.tool_choice is None else self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )


class TokenizeBody(Strict):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def chat(self) -> list[ChatMessage]:
        return _chat(self.messages or [])


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: _Ids


def parse_completion(body: bytes) -> CompletionBody:
    """Raises InvalidRequest that names the field, as the other parse functions do."""
    return _generation(CompletionBody, parse_object(body), fields.COMPLETION)


def parse_chat(body: bytes) -> ChatBody:
    return _generation(ChatBody, parse_object(body), fields.CHAT)


def parse_tokenize(body: bytes) -> TokenizeBody:
    ignored: set[str] = set()
    given = fields.sift(parse_object(body), TokenizeBody.model_fields.keys(), fields.NOTHING)
    parsed = validate(TokenizeBody, _sift_messages(given, ignored), ignored)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
    return parsed


def parse_detokenize(body: bytes) -> DetokenizeBody:
    given = fields.sift(parse_object(body), DetokenizeBody.model_fields.keys(), fields.NOTHING)
    return validate(DetokenizeBody, given)


_Gen = TypeVar("_Gen", bound=GenerationBody)


_PARTS: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}


def _generation(model: type[_Gen], raw: Mapping[str, Any], neutral: fields.Neutral) -> _Gen:
    ignored: set[str] = set()
    served = model.model_fields.keys()
    given = _sift_messages(fields.sift(raw, served, neutral, inert=fields.INERT, ignored=ignored), ignored)
    for name, part in _PARTS.items():
        if isinstance(value := given.get(name), dict):
            given[name] = _sift_part(value, part, f"{name}.")
    parsed = validate(model, given, ignored)
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options needs 'stream': true", param="stream_options")
    if parsed.prompt_logprobs is not None and parsed.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if isinstance(parsed, CompletionBody) and parsed.best_of not in (None, 1 if parsed.n is None else parsed.n):
        raise InvalidRequest("best_of must be n: no choice is thrown away", param="best_of")
    if isinstance(parsed, ChatBody):
        if parsed.top_logprobs and not parsed.logprobs:
            raise InvalidRequest("top_logprobs needs 'logprobs': true", param="top_logprobs")
        parsed.tooling().check()
        parsed.rendering()
    return parsed


def _sift_part(value: dict[str, Any], part: type[BaseModel], path: str) -> dict[str, Any]:
    names = {field.alias or name for name, field in part.model_fields.items()}
    kept = fields.sift(value, names, fields.NOTHING, path=path)
    kept = {name: inner for name, inner in kept.items() if inner is not None}
    if part is ResponseFormat and isinstance(inner := kept.get("json_schema"), dict):
        kept["json_schema"] = _sift_part(inner, JsonSchema, f"{path}json_schema.")
    return kept


def _sift_messages(given: dict[str, Any], ignored: set[str]) -> dict[str, Any]:
    messages = given.get("messages")
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        found: set[str] = set()
        given["messages"] = [_sift_message(m, i, found) if isinstance(m, dict) else m for i, m in enumerate(messages)]
        ignored.update(f"messages.{name}" for name in found)
    return given


def _sift_call(call: dict[str, Any], path: str, ignored: set[str]) -> dict[str, Any]:
    """What streams add to calls (`index`) comes back with them."""
    extra: set[str] = set()
    kept = fields.sift(call, ToolCall.model_fields.keys(), fields.NOTHING, path=path, any_name=True, ignored=extra)
    if isinstance(function := kept.get("function"), dict):
        known = CalledFunction.model_fields.keys()
        kept["function"] = fields.sift(function, known, fields.NOTHING, path=path, any_name=True, ignored=extra)
    ignored.update(f"tool_calls.{name}" for name in extra)
    return {name: value for name, value in kept.items() if value is not None}


def _sift_message(message: dict[str, Any], index: int, ignored: set[str]) -> dict[str, Any]:
    kept = fields.sift(
        message,
        MessageBody.model_fields.keys(),
        fields.MESSAGE,
        path=f"messages[{index}].",
        any_name=True,
        ignored=ignored,
    )
    if isinstance(calls := kept.get("tool_calls"), list) and len(calls) <= MAX_TOOLS:
        kept["tool_calls"] = [
            _sift_call(call, f"messages[{index}].tool_calls[{place}].", ignored) if isinstance(call, dict) else call
            for place, call in enumerate(calls)
        ]
    if kept.get("role") == "assistant" and kept.get("content") is None:
        kept["content"] = ""  # as it is where an assistant called tools
    return kept
