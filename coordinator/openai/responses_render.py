"""Renders deltas as the answer of `/v1/responses`: one object, or typed events that build it up item by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from baton.core.errors import InvariantError
from baton.rpc import status
from coordinator.openai.render import Head, json_line
from coordinator.openai.responses import ResponsesBody, shown_format, shown_tools
from coordinator.submission import Delta, Usage
from coordinator.text.tool_calls import Arguments, CallBegun, Event, Reasoning, Text


class ResponsesRender:
    """State: the number of the next event, the complete items, the open item with its text, and the finish reason."""

    continuous_usage = False
    has_large_opening = False
    end = b""  # the last event ends the stream
    headers: Mapping[str, str] = {}

    def __init__(self, head: Head, body: ResponsesBody) -> None:
        self._head, self._body = head, body
        self._parser = head.new_parser()
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._finish: str | None = None

    def needs_event(self, delta: Delta) -> bool:
        return bool(delta.text)

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        (answer,) = answers
        self.last(answer, usage)
        return orjson.dumps(self._response(usage))

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, delta: Delta, usage: Usage) -> bytes:
        if self._parser is None:
            return self._take([Text(delta.text)] if delta.text else [])
        return self._take(self._parser.push(delta.text))

    def last(self, delta: Delta, usage: Usage) -> bytes:
        found = self.text(delta, usage)
        if self._parser is not None:
            found += self._take(self._parser.finish())
        self._finish = delta.finish_reason
        return found + self._close()

    def closing(self, usage: Usage) -> bytes:
        response = self._response(usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: BaseException) -> bytes:
        """Returns the last event of a failed stream."""
        shown = status.http_body(error)["error"]
        return self._event("error", code=shown["code"], message=shown["message"], param=shown["param"])

    def _take(self, events: Sequence[Event]) -> bytes:
        found = b""
        for event in events:
            match event:
                case Text(text):
                    found += self._need("message") + self._add("response.output_text.delta", text, logprobs=[])
                case Reasoning(text):
                    found += self._need("reasoning") + self._add("response.reasoning_text.delta", text)
                case CallBegun(_, name):
                    found += self._close() + self._begin("function_call", name=name)
                case Arguments(_, text):
                    found += self._add("response.function_call_arguments.delta", text)
        return found

    def _need(self, kind: str) -> bytes:
        if self._open is not None and self._open["type"] == kind:
            return b""
        return self._close() + self._begin(kind)

    def _begin(self, kind: str, **more: Any) -> bytes:
        index = len(self._output)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._head.request_id}_{index}", "type": kind}
        if kind == "function_call":
            item |= {"call_id": f"call_{self._head.unique_id}_{index}", "arguments": "", "status": "in_progress"} | more
        elif kind == "message":
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        else:
            item |= {"summary": [], "content": [], "status": "in_progress"}
        self._open, self._pieces = item, []
        begun = self._event("response.output_item.added", output_index=index, item=item)
        if kind == "function_call":
            return begun
        return begun + self._event("response.content_part.added", **self._place(item), part=self._part(item, ""))

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
            found = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = self._part(item, text)
            item |= {"content": [part]}
            if item["type"] == "message":
                found = self._event("response.output_text.done", **place, text=text, logprobs=[])
            else:
                found = self._event("response.reasoning_text.done", **place, text=text)
            found += self._event("response.content_part.done", **place, part=part)
        found += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return found

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        return place if item["type"] == "function_call" else place | {"content_index": 0}

    def _part(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        if item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json_line({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """Returns the whole answer so far; `usage` is given only once it has ended."""
        head, body, tools = self._head, self._body, self._body.tooling()
        cut = self._finish == "length"
        choice = {"type": "function", "name": tools.named} if tools.named else tools.choice
        return {
            "id": f"resp_{head.request_id}",
            "object": "response",
            "created_at": head.created,
            "status": "in_progress" if usage is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": head.model,
            "output": list(self._output),
            "parallel_tool_calls": tools.parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": shown_format(body)},
            "tool_choice": choice,
            "tools": shown_tools(tools),
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_object(usage),
            "metadata": body.metadata or {},
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
