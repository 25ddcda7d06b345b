"""Every field of the public requests that is not served, as data.

`null` always counts as not given, also for an unknown name. There are three kinds of fields besides the served ones:
- inert: they do not change the answer; accepted, and listed in the answer's `x-ignored-fields`;
- not served yet: accepted with a value that has the same effect as omitting the field, else refused by name, because
  the answer would not be what the client asked for;
- unknown: accepted and listed, unless they look like a mistake (unknown_fields.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

INERT = frozenset(
    {
        *("guided_decoding_backend", "length_penalty", "metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier"),
        *("service_tier", "store", "user", "verbosity"),
    }
)
"""Inert fields of a request. Some are also in the models, which limit their size."""
MAX_NAMED = 64
MAX_HEADER_CHARS = 2_000  # proxies limit the head of an answer to 4 or 8 KiB

OF_OTHER_SERVERS = frozenset({"models", "top_a", "messages.context"})
"""Fields of other servers that look like a typo of one here: OpenRouter's alternatives to `model`, its `top_a`, and the
`context` of Azure's messages, which is like `content`."""
COMMON = frozenset(
    {
        *(
            "arguments",
            "content",
            "description",
            "format",
            "function",
            "id",
            "index",
            "input",
            "logprobs",
            "metadata",
            "model",
        ),
        *("name", "output", "parameters", "priority", "prompt", "role", "schema", "status", "stream", "strict"),
        *("reasoning", "text", "tools", "type", "user"),
    }
)
"""Names with a meaning of their own in many objects: known at one place, they may be another server's at another."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "logits_processors": (),
    "lora_path": (),
    "lora_request": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {"add_special_tokens": (True,)}
CHAT: Neutral = _BOTH | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
NOT_OF_COMPLETIONS = {
    "max_completion_tokens": "'max_tokens'",
    "messages": "/v1/chat/completions",
    "tools": "/v1/chat/completions",
    "top_logprobs": "'logprobs'",
}
NOT_OF_CHATS = {"best_of": "'n'", "prompt": "'messages'"}
"""Fields of the other endpoint without which the answer would be another: the end of the question `did you mean`."""
MESSAGE: Neutral = {
    "function_call": (),
    "partial": (False,),  # in other APIs: continue this message
    "prefix": (False,),
}


def as_header(names: Iterable[str]) -> str:
    """Returns the names of ignored fields as a header value: printable, at most MAX_NAMED and MAX_HEADER_CHARS."""
    shown, chars = list[str](), 0
    for name in sorted({re.sub(r"[^!-+\--~]", "?", name) for name in names}):
        chars += len(name) + 2
        if chars > MAX_HEADER_CHARS or len(shown) == MAX_NAMED:
            return ", ".join([*shown, "..."])
        shown.append(name)
    return ", ".join(shown)
