"""The messages of a conversation as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message, its content as one text. `role` is system, developer, user, assistant or tool; `tool_calls` are as
    chat templates expect them: with the arguments as an object, or as text if a model wrote something else. `reasoning`
    is what an assistant wrote before its content."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str = ""
