"""A model's chat template: compiled once, rendered within limits of time and size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from baton.core.errors import InvalidRequest, StartupError
from coordinator.text.sandbox import Sandbox

TIME_LIMIT_S = 0.2
MAX_EXTRA_CHARS = 1 << 18


class ChatTemplate:
    """`special_tokens` are the template's variables `bos_token`, `eos_token` and the like.

    Raises StartupError where `source` is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise StartupError(f"chat template, line {error.lineno}: {str(error.message)[:200]}") from None
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise StartupError(f"chat template: {type(error).__name__}: {str(error)[:200]}") from None

    def literals(self) -> str:
        """All text that the template itself can write, NUL between the pieces."""
        tree = self._sandbox.parse(self.source)
        texts = {node.data for node in tree.find_all(nodes.TemplateData)}
        texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return "\0".join(sorted(texts))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> str:
        """The prompt. Blocks its thread for about `time_limit_s` at most.

        Raises:
            InvalidRequest: the template refused the messages, failed, or went over a limit.
        """
        limits = self._sandbox.limits
        given = sum(len(message["content"]) for message in messages) + len(json.dumps(tools or []))
        given += sum(len(json.dumps(message["tool_calls"])) for message in messages if "tool_calls" in message)
        limits.start(time_limit_s, MAX_EXTRA_CHARS + 4 * given)
        known = (
            dict(variables or {})
            | self._special_tokens
            | {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        pieces: list[str] = []
        try:
            for piece in self._template.generate(known):
                limits.write(len(piece))
                pieces.append(piece)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused: {str(error)[:300]}", param="messages") from None
        except Exception as error:
            name = type(error).__name__
            raise InvalidRequest(f"the chat template failed: {name}: {error!s:.200}", param="messages") from None
        return "".join(pieces)
