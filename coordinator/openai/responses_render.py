"""Renders deltas as the answer of `/v1/responses`: one object, or typed events that build it up item by item.

A call of a custom tool is a call of a function with one argument, whose text is passed on as it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json

from baton.core.errors import InvariantError
from baton.runtime import status
from coordinator.openai.render import Head, chat_logprobs, json_line
from coordinator.openai.responses import ENCRYPTED, ResponsesBody, shown_format
from coordinator.openai.responses_items import encoded
from coordinator.openai.responses_tools import INPUT, Called, shown_choice, shown_tools
from coordinator.submission import Delta, Usage
from coordinator.text.parser import Arguments, CallBegun, Event, Reasoning, Text

Keep = Callable[[dict[str, Any]], None]
UNREAD_SHARE = 64
"""Of what was passed on of a custom tool's input, a stream is at most one such part behind its tokens."""


class ResponsesRender:
    """`keep`, if given, receives the complete answer before the client does.

    State: the number of the next event, the complete items, the open item with its text, how much of the input of a
    custom tool was passed on, how many characters of its call were not read yet, the log-probabilities of text that is
    still to come and of the open item, and the finish reason."""

    continuous_usage = False
    has_large_opening = False
    end = b""  # the last event ends the stream
    headers: Mapping[str, str] = {}

    def __init__(self, head: Head, body: ResponsesBody, keep: Keep | None = None) -> None:
        self._head, self._body, self._keep = head, body, keep
        self._tool_set = body.tool_set()
        self._scores: list[Any] = []
        self._item_scores: list[Any] = []
        self._passed_on = self._unread = 0
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._finish: str | None = None

    def needs_event(self, delta: Delta) -> bool:
        return bool(delta.text or delta.events or delta.logprobs)

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        (answer,) = answers
        self.last(answer, usage)
        return orjson.dumps(self._ended(usage))

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, delta: Delta, usage: Usage) -> bytes:
        if delta.logprobs:
            self._scores += chat_logprobs(self._head.vocabulary, delta.logprobs)["content"]
        if delta.events is None:
            return self._take([Text(delta.text)] if delta.text else [])
        return self._take(delta.events)

    def last(self, delta: Delta, usage: Usage) -> bytes:
        chunks = self.text(delta, usage)
        self._finish = delta.finish_reason
        return chunks + self._close()

    def closing(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: BaseException) -> bytes:
        """Returns the last event of a failed stream."""
        shown = status.http_body(error)["error"]
        return self._event("error", code=shown["code"], message=shown["message"], param=shown["param"])

    def _take(self, events: Sequence[Event]) -> bytes:
        chunks = b""
        for event in events:
            match event:
                case Text(text):
                    chunks += self._need("message")
                    scores, self._scores = self._scores, []
                    self._item_scores += scores
                    chunks += self._add("response.output_text.delta", text, logprobs=scores)
                case Reasoning(text):
                    self._scores.clear()
                    chunks += self._need("reasoning") + self._add("response.reasoning_text.delta", text)
                case CallBegun(_, name):
                    self._scores.clear()
                    called = self._tool_set.shown.get(name, Called(name))
                    more = {"namespace": called.namespace} if called.namespace else {}
                    kind = "custom_tool_call" if called.custom else "function_call"
                    chunks += self._close() + self._begin(kind, name=called.name, **more)
                case Arguments(_, text):
                    self._scores.clear()
                    if self._open is not None and self._open["type"] == "custom_tool_call":
                        chunks += self._grow_input(text)
                    else:
                        chunks += self._add("response.function_call_arguments.delta", text)
        return chunks

    def _grow_input(self, text: str) -> bytes:
        """Adds to the arguments of a custom tool's call; the event has what its input has grown by."""
        self._pieces.append(text)
        self._unread += len(text)
        if self._unread * UNREAD_SHARE < self._passed_on:  # reading all of it at each token takes quadratic time
            return b""
        return self._pass_on()

    def _pass_on(self) -> bytes:
        known, self._unread = _input_of("".join(self._pieces), partial=True), 0
        grown, self._passed_on = known[self._passed_on :], max(len(known), self._passed_on)
        if not grown or self._open is None:
            return b""
        return self._event("response.custom_tool_call_input.delta", **self._place(self._open), delta=grown)

    def _need(self, kind: str) -> bytes:
        if self._open is not None and self._open["type"] == kind:
            return b""
        return self._close() + self._begin(kind)

    def _begin(self, kind: str, **more: Any) -> bytes:
        index = len(self._output)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._head.unique_id}_{index}", "type": kind}
        if kind in _CALLS:
            text = {"function_call": "arguments", "custom_tool_call": "input"}[kind]
            item |= {"call_id": f"call_{self._head.unique_id}_{index}", text: "", "status": "in_progress"} | more
        elif kind == "message":
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        else:
            item |= {"summary": [], "content": [], "status": "in_progress"}
        self._open, self._pieces, self._item_scores, self._passed_on, self._unread = item, [], [], 0, 0
        added = self._event("response.output_item.added", output_index=index, item=item)
        if kind in _CALLS:
            return added
        return added + self._event("response.content_part.added", **self._place(item), part=self._part(item, ""))

    def _add(self, kind: str, text: str, **more: Any) -> bytes:
        if self._open is None:
            raise InvariantError(f"{kind} outside of an item")
        self._pieces.append(text)
        return self._event(kind, **self._place(self._open), delta=text, **more)

    def _close(self) -> bytes:
        """Ends the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        text, place = "".join(self._pieces), self._place(item)
        complete = self._finish in (None, "stop")
        item = item | {"status": "completed" if complete else "incomplete"}
        if item["type"] == "function_call":
            item |= {"arguments": text}
            chunks = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == "custom_tool_call":
            item |= {"input": _input_of(text)}
            chunks = self._pass_on() + self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            part = self._part(item, text)
            item |= {"content": [part]}
            if item["type"] == "message":
                chunks = self._event("response.output_text.done", **place, text=text, logprobs=self._item_scores)
            else:
                chunks = self._event("response.reasoning_text.done", **place, text=text)
                if ENCRYPTED in (self._body.include or ()):
                    item |= {"encrypted_content": encoded(text)}
            chunks += self._event("response.content_part.done", **place, part=part)
        chunks += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return chunks

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        return place if item["type"] in _CALLS else place | {"content_index": 0}

    def _part(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._item_scores}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json_line({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _ended(self, usage: Usage) -> dict[str, Any]:
        """Returns the complete answer."""
        response = self._response(usage)
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """Returns the whole answer so far; `usage` is given only once it has ended."""
        head, body, cut = self._head, self._body, self._finish == "length"
        return {
            "id": f"resp_{head.unique_id}",
            "object": "response",
            "created_at": head.created,
            "status": "in_progress" if usage is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": head.model,
            "output": list(self._output),
            "parallel_tool_calls": self._tool_set.tools.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self._keep is not None,
            "temperature": body.temperature,
            "text": {"format": shown_format(body)},
            "tool_choice": shown_choice(body.tool_choice),
            "tools": shown_tools(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_object(usage),
            "metadata": body.metadata or {},
        }


_CALLS = ("function_call", "custom_tool_call")


def _input_of(arguments: str, *, partial: bool = False) -> str:
    """Returns the input in the arguments of a custom tool's call; the arguments themselves if they have none."""
    try:
        known = from_json(arguments, allow_partial="trailing-strings" if partial else False)
    except ValueError:
        known = None
    text = known.get(INPUT) if isinstance(known, dict) else None
    return text if isinstance(text, str) else "" if partial else arguments


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
