"""Renders deltas as an answer of Anthropic's Messages API: one object, or events that build it up block by block.

    message_start, per block: content_block_start, content_block_delta..., content_block_stop; message_delta,
    message_stop

A `ping` follows the start of the first block, as in Anthropic's streams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
import xxhash
from pydantic_core import from_json

from baton.core.errors import InvariantError
from coordinator.anthropic import errors
from coordinator.anthropic.blocks import signature
from coordinator.anthropic.schema import MessagesBody
from coordinator.openai.render import Head, json_line
from coordinator.openai.tools import written_arguments
from coordinator.submission import Delta, Usage
from coordinator.text.parser import Arguments, CallBegun, Event, Reasoning, Text

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and their field."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesRender:
    """`max_tokens` is what the request was granted: less than it requested if the context ends before.

    State: the complete blocks; the open block, its deltas and the beginning of their events; blank text, which becomes
    a block only with other text; the last delta."""

    continuous_usage = False
    has_large_opening = False
    end = b""  # the last event ends the stream
    headers: Mapping[str, str] = {}

    def __init__(self, head: Head, body: MessagesBody, max_tokens: int) -> None:
        self._head, self._body, self._max_tokens = head, body, max_tokens
        self._content: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._prefix = b""
        self._blank = ""
        self._last = Delta("")

    def needs_event(self, delta: Delta) -> bool:
        return bool(delta.text or delta.events)

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        (answer,) = answers
        self.last(answer, usage)
        return orjson.dumps(self._message(usage_object(usage)))

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        """Returns the message without content: its usage is that of the prompt, and of the tokens of this delta."""
        (prompt,) = self._head.prompts
        counted = usage_object(Usage(len(prompt), len(delta.token_ids), delta.cached_tokens))
        return _event("message_start", message=self._message(counted))

    def text(self, delta: Delta, usage: Usage) -> bytes:
        if delta.events is None:
            return self._take([Text(delta.text)] if delta.text else [])
        return self._take(delta.events)

    def last(self, delta: Delta, usage: Usage) -> bytes:
        events = self.text(delta, usage)
        if (blank := self._blank) and not self._content and self._open is None:
            events += self._begin({"type": "text", "text": ""}) + self._add(blank)
        self._last = delta
        return events + self._close()

    def closing(self, usage: Usage) -> bytes:
        ended = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        return _event("message_delta", delta=ended, usage=usage_object(usage)) + _event("message_stop")

    def failed(self, error: BaseException) -> bytes:
        """Returns the last event of a failed stream."""
        return b"event: error\ndata: " + json_line(errors.body_of(error, self._head.request_id)) + b"\n\n"

    def _take(self, parsed: Sequence[Event]) -> bytes:
        events = b""
        for each in parsed:
            match each:
                case Text(text):
                    events += self._text(text)
                case Reasoning(text):
                    events += self._need({"type": "thinking", "thinking": "", "signature": ""}) + self._add(text)
                case CallBegun(index, name):
                    call = {"type": "tool_use", "id": self._call_id(index), "name": name, "input": {}}
                    events += self._close() + self._begin(call)
                case Arguments(_, text):
                    events += self._add(text)
        return events

    def _text(self, text: str) -> bytes:
        """Adds text. Blank text between two blocks is dropped: Anthropic's API refuses it when it comes back."""
        if self._open is None or self._open["type"] != "text":
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return b""
        return self._need({"type": "text", "text": ""}) + self._add(text)

    def _need(self, block: dict[str, Any]) -> bytes:
        if self._open is not None and self._open["type"] == block["type"]:
            return b""
        return self._close() + self._begin(block)

    def _begin(self, block: dict[str, Any]) -> bytes:
        index = len(self._content)
        self._open, self._pieces, self._blank = block, [], ""
        kind, name = _DELTAS[block["type"]]
        delta = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._prefix = b"event: content_block_delta\ndata: " + delta % (index, kind.encode(), name.encode())
        started = _event("content_block_start", index=index, content_block=block)
        return started if index else started + _PING

    def _add(self, text: str) -> bytes:
        if self._open is None:
            raise InvariantError("text outside of a block")
        self._pieces.append(text)
        if self._open["type"] == "thinking" and not self._body.shows_thinking:
            return b""
        return self._prefix + json_line(text) + b"}}\n\n"

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        block, index, events = self._open, len(self._content), b""
        if block is None:
            return b""
        text = "".join(self._pieces)
        if block["type"] == "text":
            block = block | {"text": text}
        elif block["type"] == "tool_use":
            block = block | {"input": orjson.Fragment(written_arguments(input_of(text)))}
        else:
            shown, hidden = (text, "") if self._body.shows_thinking else ("", text)
            block = block | {"thinking": shown, "signature": signature(hidden)}
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events = _event("content_block_delta", index=index, delta=delta)
        self._content.append(block)
        self._open = None
        return events + _event("content_block_stop", index=index)

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": list(self._content),
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": usage,
        }

    def _stop_reason(self) -> str | None:
        if self._last.finish_reason is None:
            return None
        if self._last.finish_reason == "length":
            cut = self._max_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._content) else "end_turn"

    def _stop_sequence(self) -> str | None:
        reason = self._last.stop_reason
        return reason if isinstance(reason, str) else None

    def _call_id(self, index: int) -> str:
        return "toolu_" + xxhash.xxh3_64_hexdigest(f"{self._head.unique_id}/{index}".encode())


def input_of(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object: as much of it as there is, if the output ended before its end.
    Anything else that a model wrote is in the field `arguments`, for the client's own check of the input to report."""
    try:
        value = from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # it reads 1e400 as an infinity all the same
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def usage_object(usage: Usage) -> dict[str, int]:
    """Returns the usage. In Anthropic's API `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json_line({"type": kind, **fields}) + b"\n\n"


def model_object(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """`created` is in Unix seconds. Prompt and output share the context of `max_model_len` tokens."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len - 1,
        "max_tokens": max_model_len,
    }


def model_page(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of all models after, or before, the one that the query names."""
    ids = [model["id"] for model in models]
    after, before = query.get("after_id"), query.get("before_id")
    first = ids.index(after) + 1 if after in ids else 0
    last = ids.index(before) if before in ids else len(ids)
    data = models[first:last]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}
