"""Tools for a chat template that has none: a system message describes them, and calls and results are plain text.

The form is that of Hermes and Qwen, which many models have seen and `HermesParser` reads:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Results are a user's message, each between `<tool_response>` tags. A template that takes no system message gets the
description before the first user's message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.text.chat import ChatMessage

_DESCRIPTION = """You may call functions. These are their signatures, one JSON object a line:
<tools>
{signatures}
</tools>
To call a function, write its name and arguments as a JSON object between tags, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def as_plain_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[ChatMessage]:
    """Returns a conversation without calls and results of tools, with the description of `tools`, if there are any.
    `system`: the template takes system messages."""
    plain: list[ChatMessage] = []
    results = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if results:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(ChatMessage("user", text))
        elif message.tool_calls:
            texts = [message.content] if message.content else []
            texts += map(_call, message.tool_calls)
            plain.append(replace(message, content="\n".join(texts), tool_calls=()))
        else:
            plain.append(message)
        results = message.role == "tool"
    return _described(plain, tools, system) if tools else plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _described(messages: list[ChatMessage], tools: Sequence[Mapping[str, Any]], system: bool) -> list[ChatMessage]:
    signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.format(signatures=signatures)
    roles = ("system", "developer") if system else ("user",)
    at = next((i for i, message in enumerate(messages) if message.role in roles), None)
    if at is None or (system and at > 0):
        return [ChatMessage("system" if system else "user", text), *messages]
    texts = (messages[at].content, text) if system else (text, messages[at].content)
    messages[at] = replace(messages[at], content="\n\n".join(filter(None, texts)))
    return messages
