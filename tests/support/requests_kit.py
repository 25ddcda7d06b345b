"""Valid bodies for each path, and bad requests derived from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "Hello"},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
}
GOOD_RAW = json.dumps(GOOD[COMPLETIONS]).encode()
DROP = object()  # as a field's value: leave the field out


@dataclass(frozen=True)
class Bad:
    """A bad request, and the expected response. Its body is either the bytes to send, or JSON fields that override
    those of a valid body for its path."""

    id: str
    body: bytes | dict[str, Any]
    param: str | None
    status: int = 400
    code: str | None = None
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"

    def raw(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        fields = GOOD[self.path] | self.body
        return json.dumps({k: v for k, v in fields.items() if v is not DROP}).encode()


def raw(prompt: str) -> bytes:
    """Returns a body that contains the prompt's JSON literally."""
    return b'{"model":"tiny","prompt":' + prompt.encode() + b"}"


def chat(messages: Any) -> dict[str, Any]:
    return {"messages": messages}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return chat([{"role": "user", "content": content, **more}])


def events(response: httpx.Response) -> list[Any]:
    """Returns the events of a stream that has ended."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]
