"""Renders deltas as the bytes of OpenAI's responses: one JSON object, or the events of a stream.

A stream event is concatenated from a prefix built once and the text, the only part that changes: a tenth of the cost of
building and serializing an object per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import xxhash

from baton.core.request import TokenLogprob
from baton.runtime import status
from coordinator.policy.timeline import Timeline
from coordinator.submission import Delta, Usage, is_large
from coordinator.text.parser import Arguments, CallBegun, Event, Reasoning, Text
from coordinator.text.stream import Decoder, Vocabulary

DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = {c.encode(): f"\\u{ord(c):04x}".encode() for c in ("\x85", "\u2028", "\u2029")}


@dataclass(frozen=True, slots=True)
class Head:
    """The values common to all parts of one answer. `request_id` may be the client's, `unique_id` is unique.
    `logprobs`, `prompt_logprobs`, `token_ids` and `timeline`: the client requests them. `prompts` has the ids of each
    prompt, each with `n` choices, in order; `echos` their texts if the client wants them before the output.
    `named_tool`: the client chose the tool. `shown_ids` are the special tokens that are in the text."""

    request_id: str
    unique_id: str
    model: str
    created: int
    fingerprint: str
    vocabulary: Vocabulary
    prompts: tuple[tuple[int, ...], ...] = ((),)
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    timeline: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    echos: tuple[str, ...] | None = None
    named_tool: bool = False
    shown_ids: frozenset[int] = frozenset()


class Render:
    """Renders one answer. Subclasses name the object and format a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    before_text: bytes  # after the index
    after_text: bytes
    scores_in_choice: bool
    end = DONE
    headers: Mapping[str, str] = {}
    """Of an answer that is not streamed."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.continuous_usage = head.continuous_usage
        """Whether every event shows the usage so far; otherwise the `usage` passed with an event is ignored."""
        self._prefix = b"data: " + json_line(self._base(self.chunk_object))[:-1] + b',"choices":['
        self._open_usage = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def needs_event(self, delta: Delta) -> bool:
        """Returns whether a delta needs an event; without text only if the client requested token ids or logprobs."""
        return bool(delta.text or delta.events) or (
            (self._head.token_ids or self._head.logprobs) and bool(delta.token_ids)
        )

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        """Returns the object of an answer that is not streamed. `answers` has one merged delta per choice; the first
        choice of each prompt has the prompt's log-probabilities."""
        choices = [self._end(answer) | self._whole_choice(answer) for answer in answers]
        value = self._base(self.whole_object) | {"choices": choices, "usage": usage_object(usage)}
        if self._head.token_ids:
            for choice, answer in zip(choices, answers, strict=True):
                choice["token_ids"] = list(answer.token_ids)
        if self._head.prompt_logprobs:
            firsts = answers[:: self._head.n]  # only the first choice of each prompt has them
            scores = [prompt_logprobs(self._head.vocabulary, first.prompt_logprobs or ()) for first in firsts]
            for index, place in enumerate(choices if self.scores_in_choice else [value]):
                place["prompt_logprobs"] = scores[index // self._head.n]
        # One by one: a call of orjson holds the GIL, which blocks the event loop, for 0.3 s per 60 MB.
        value["choices"] = [orjson.Fragment(orjson.dumps(choice)) for choice in choices]
        return orjson.dumps(value)

    has_large_opening = False
    """Whether the opening of each choice is known to be large."""

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        """Returns the event that precedes any text of a choice; it is sent with the first delta."""
        return b""

    def text(self, delta: Delta, usage: Usage) -> bytes:
        """Returns an event with new text; `usage` is the usage so far."""
        choice = self._before(delta) + _json_text(delta.text) + self.after_text + self._ids(delta)
        scores = self._scores(delta)
        return self._prefix + choice + b',"logprobs":' + scores + b',"finish_reason":null}' + self._tail(usage)

    def last(self, delta: Delta, usage: Usage) -> bytes:
        """Returns the event with a choice's finish reason and its remaining text."""
        choice = self._before(delta) + _json_text(delta.text) + self.after_text + self._ids(delta)
        end = b',"logprobs":' + self._scores(delta) + b"," + json_line(self._end(delta))[1:]
        return self._prefix + choice + end + self._tail(usage)

    def closing(self, usage: Usage) -> bytes:
        """Returns the event after the last choice: the usage, if requested."""
        if not self._head.include_usage:
            return b""
        return self._prefix + b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"

    def failed(self, error: BaseException) -> bytes:
        """Returns the last event of a failed stream, and its end marker."""
        return b"data: " + json_line(status.http_body(error)) + b"\n\n" + self.end

    def _end(self, delta: Delta) -> dict[str, Any]:
        end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if delta.timeline is None or not self._head.timeline:
            return end
        return end | {"timeline": delta.timeline.as_json()}

    def _before(self, delta: Delta) -> bytes:
        return b'{"index":%d,' % delta.choice + self.before_text

    def _scores(self, delta: Delta) -> bytes:
        return json_line(self._logprobs(delta)) if self._head.logprobs else b"null"

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _ids(self, delta: Delta) -> bytes:
        return b',"token_ids":' + orjson.dumps(delta.token_ids) if self._head.token_ids else b""

    def _tail(self, usage: Usage) -> bytes:
        if self._head.continuous_usage:
            return b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"
        return self._open_usage

    def _base(self, name: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": self.id_prefix + head.request_id,
            "object": name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def _whole_choice(self, answer: Delta) -> dict[str, Any]:
        raise NotImplementedError


class CompletionRender(Render):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    before_text = b'"text":'
    after_text = b""
    scores_in_choice = True

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._scored: dict[int, CompletionLogprobs] = {}
        self._prompts: dict[int, tuple[dict[str, Any], int]] = {}  # scores of each, and the offset of the text after it

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        """Returns the echo."""
        if self._head.echos is None:
            return b""
        scores = json_line(self._echoed(delta)) if self._head.logprobs else b"null"
        echo = self._head.echos[delta.choice // self._head.n]
        choice = self._before(delta) + _json_text(echo) + b',"logprobs":' + scores + b',"finish_reason":null}'
        return self._prefix + choice + self._tail(usage)

    def _echoed(self, delta: Delta) -> dict[str, Any]:
        scores, number = self._scores_of(delta), delta.choice // self._head.n
        if number not in self._prompts:  # only the first choice's delta has them; the same for all choices
            opening = scores.of_prompt(delta.prompt_logprobs or ())
            self._prompts[number] = opening, len((self._head.echos or ())[number])
            self.has_large_opening = self.has_large_opening or is_large([delta])
        opening, scores.offset = self._prompts[number]
        return opening

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return self._scores_of(delta).of_output(delta.logprobs)

    def _scores_of(self, delta: Delta) -> CompletionLogprobs:
        if delta.choice not in self._scored:
            prompt = self._head.prompts[delta.choice // self._head.n]
            scores = CompletionLogprobs(self._head.vocabulary, prompt, self._head.shown_ids)
            self._scored[delta.choice] = scores
        return self._scored[delta.choice]

    def _whole_choice(self, answer: Delta) -> dict[str, Any]:
        echo, scores = "", None
        if self._head.echos is not None:
            echo = self._head.echos[answer.choice // self._head.n]
        if self._head.logprobs:
            before = None if self._head.echos is None else self._echoed(answer)
            scores = self._logprobs(answer) if before is None else joined(before, self._logprobs(answer))
        return {"index": answer.choice, "text": echo + answer.text, "logprobs": scores}


class ChatRender(Render):
    """State: the choices that have called a tool."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b'"delta":{"content":'
    after_text = b"}"
    scores_in_choice = False

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._called: set[int] = set()

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        choice = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._prefix + b'{"index":%d,' % delta.choice + choice + self._tail(usage)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._head.vocabulary, delta.logprobs)

    def _whole_choice(self, answer: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        scores = self._logprobs(answer) if self._head.logprobs else None
        choice = {"index": answer.choice, "message": message, "logprobs": scores}
        if answer.events is None:
            return choice
        message |= self._message_of(answer.events, answer.choice)
        return choice | {"finish_reason": self._finish(answer, calls="tool_calls" in message)}

    # Parsed: content, reasoning and calls.

    def text(self, delta: Delta, usage: Usage) -> bytes:
        return super().text(delta, usage) if delta.events is None else self._parsed(delta, delta.events, usage)

    def last(self, delta: Delta, usage: Usage) -> bytes:
        if delta.events is None:
            return super().last(delta, usage)
        parsed = self._parsed(delta, delta.events, usage)
        end = self._end(delta) | {"finish_reason": self._finish(delta, calls=delta.choice in self._called)}
        choice = b'{"index":%d,"delta":{},"logprobs":null,' % delta.choice + json_line(end)[1:]
        return parsed + self._prefix + choice + self._tail(usage)

    def _parsed(self, delta: Delta, events: Sequence[Event], usage: Usage) -> bytes:
        """Returns the stream events for one delta; the first of them carries its token ids and log-probabilities."""
        parts = [self._part(event, delta.choice) for event in events]
        if not parts and delta.token_ids and (self._head.token_ids or self._head.logprobs):
            parts = [{}]
        chunks = b""
        for number, part in enumerate(parts):
            ids, scores = (self._ids(delta), self._scores(delta)) if number == 0 else (b"", b"null")
            choice = b'{"index":%d,"delta":' % delta.choice + json_line(part) + ids + b',"logprobs":' + scores
            chunks += self._prefix + choice + b',"finish_reason":null}' + self._tail(usage)
        return chunks

    def _part(self, event: Event, choice: int) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallBegun(index, name):
                self._called.add(choice)
                function = {"name": name, "arguments": ""}
                called = {"index": index, "id": self._call_id(choice, index), "type": "function", "function": function}
                return {"tool_calls": [called]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _message_of(self, events: Sequence[Event], choice: int) -> dict[str, Any]:
        text = "".join(event.text for event in events if isinstance(event, Text))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [
            {
                "id": self._call_id(choice, call.index),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": "".join(e.text for e in events if isinstance(e, Arguments) and e.index == call.index),
                },
            }
            for call in events
            if isinstance(call, CallBegun)
        ]
        message: dict[str, Any] = {"content": text if text.strip() or not calls else None}
        message |= {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})

    def _finish(self, delta: Delta, *, calls: bool) -> str | None:
        """As in OpenAI's API: a call of the tool that the client chose by name ends with `stop`."""
        if calls and delta.finish_reason == "stop" and not self._head.named_tool:
            return "tool_calls"
        return delta.finish_reason

    def _call_id(self, choice: int, index: int) -> str:
        """Returns nine letters and digits: Mistral's templates accept no other id."""
        return xxhash.xxh3_64_hexdigest(f"{self._head.unique_id}/{choice}/{index}".encode())[:9]


def usage_object(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens else {}
    drafted: dict[str, Any] = {}
    if (s := usage.speculation) is not None:
        wrong = s.drafted_tokens - s.accepted_tokens
        details |= {"accepted_prediction_tokens": s.accepted_tokens, "rejected_prediction_tokens": wrong}
        drafted = {"speculation": asdict(s)}
    return (
        ({"completion_tokens_details": details} if details else {})
        | drafted
        | {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
    )


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = vocabulary.spelling(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = []
    for entry in entries:
        top = [spelled(*pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append({**spelled(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """State: `offset`, where the text of the next token begins, and the decoder of the output. Tokens that are not part
    of the text have no width; of those that are a character together, all but the last have none."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int] = (), shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._vocabulary, self._prompt = vocabulary, prompt
        self._decoder = vocabulary.decoder(prompt, vocabulary.spellings(shown_ids))
        self.offset = 0

    def of_output(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._object([(entry.token_id, entry) for entry in entries], self._decoder)

    def of_prompt(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The first token of a prompt follows nothing and has no probability."""
        tokens = [(self._prompt[0], None), *((entry.token_id, entry) for entry in entries)]
        return self._object(tokens, self._vocabulary.decoder())

    def _object(self, tokens: Sequence[tuple[int, TokenLogprob | None]], decoder: Decoder) -> dict[str, Any]:
        spell = self._vocabulary.spelling
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in tokens:
            text = spell(token_id)[0]
            columns["tokens"].append(text)
            columns["text_offset"].append(self.offset)
            self.offset += len(decoder.push(token_id))
            if entry is None:
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                continue
            top = {spell(i)[0]: value for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)}
            columns["token_logprobs"].append(entry.logprob)
            columns["top_logprobs"].append(top | {text: entry.logprob})
        return columns


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Concatenates two log-probability objects of a completion."""
    return {name: first[name] + then[name] for name in first}


def prompt_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> list[Any]:
    """Returns one object per prompt token, keyed by token id, and null for the first."""

    def one(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.spelling(token_id)[0]}

    objects: list[Any] = [None]
    for entry in entries:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        options = {str(i): one(i, value, rank) for rank, (i, value) in enumerate(top, 1)}
        objects.append(options | {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)})
    return objects


def server_timing(timeline: Timeline | None) -> dict[str, str]:
    """Returns the duration of each stage of a request, as a header that browser tools display."""
    if timeline is None:
        return {}
    stages = ("queue", "prefill", "reserve", "transfer", "decode_queue", "decode")
    return {"server-timing": ", ".join(f"{s};dur={getattr(timeline, s + '_s') * 1000:.3f}" for s in stages)}


def _json_text(text: str) -> bytes:
    return orjson.dumps(text) if text.isascii() else json_line(text)


def json_line(value: Any) -> bytes:
    """Serializes on one line by any definition of a line: some clients split at U+0085, U+2028 and U+2029."""
    data = orjson.dumps(value)
    for character, escaped in _LINE_BREAKS.items():
        data = data.replace(character, escaped)  # they occur only in strings
    return data
