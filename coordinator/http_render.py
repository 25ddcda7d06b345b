"""Deltas to the bytes of OpenAI's responses: one JSON object, or the events of a stream.

A stream's event is put together from a prefix made once and the text, the only part that changes: a tenth of the cost
of building and dumping an object per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from coordinator.submission import Delta, Timeline, Usage

DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every part of one answer."""

    request_id: str
    model: str
    created: int
    fingerprint: str
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


class Render:
    """One answer of one choice. Subclasses name the object and put a choice together."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    before_text: bytes
    after_text: bytes

    def __init__(self, head: Head) -> None:
        self._head = head
        self._prefix = b"data: " + orjson.dumps(self._base(self.chunk_object))[:-1] + b',"choices":['
        self._open_usage = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def tells(self, delta: Delta) -> bool:
        """Whether a delta is worth an event: one without text is, when the client wants the ids."""
        return bool(delta.text) or (self._head.token_ids and bool(delta.token_ids))

    def whole(self, text: str, token_ids: Sequence[int], last: Delta) -> bytes:
        """The one object of an answer that is not streamed."""
        choice = self._whole_choice(text) | _end(last)
        if self._head.token_ids:
            choice["token_ids"] = list(token_ids)
        usage = usage_object(last.usage)
        return orjson.dumps(self._base(self.whole_object) | {"choices": [choice], "usage": usage})

    def opening(self, usage: Usage) -> bytes:
        """What goes out with the first token, before any text."""
        return b""

    def text(self, delta: Delta, usage: Usage) -> bytes:
        """An event with new text; `usage` counts so far."""
        choice = self.before_text + _json_text(delta.text) + self.after_text + self._ids(delta)
        return self._prefix + choice + b',"logprobs":null,"finish_reason":null}' + self._tail(usage)

    def last(self, delta: Delta, usage: Usage) -> bytes:
        """The event with the finish reason and what text is left, and the usage if asked for."""
        choice = self.before_text + _json_text(delta.text) + self.after_text + self._ids(delta)
        end = orjson.dumps({"logprobs": None, **_end(delta)})[1:]
        events = self._prefix + choice + b"," + end + self._tail(usage)
        if self._head.include_usage:
            events += self._prefix + b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"
        return events

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

    def _whole_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionRender(Render):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    before_text = b'{"index":0,"text":'
    after_text = b""

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None}


class ChatRender(Render):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b'{"index":0,"delta":{"content":'
    after_text = b"}"

    def opening(self, usage: Usage) -> bytes:
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._prefix + choice + self._tail(usage)

    def _whole_choice(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None}


def usage_object(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def server_timing(timeline: Timeline | None) -> dict[str, str]:
    """The stages a request went through, as a header that browsers' tools understand."""
    if timeline is None:
        return {}
    stages = ("queue", "prefill", "reserve", "transfer", "decode_queue", "decode")
    return {"server-timing": ", ".join(f"{s};dur={getattr(timeline, s + '_s') * 1000:.3f}" for s in stages)}


def _end(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _json_text(text: str) -> bytes:
    """A JSON string on one line for every notion of a line: some clients split at U+0085, U+2028 and U+2029."""
    dumped = orjson.dumps(text)
    if text.isascii():
        return dumped
    return dumped.decode().translate(_LINE_BREAKS).encode()
