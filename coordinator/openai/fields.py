"""Every field of the public requests that is not served, as data.

`null` always counts as not given, also for an unknown name. There are three kinds of fields besides the served ones:
- inert: they do not change the answer; accepted, and listed in the answer's `x-ignored-fields`;
- not served yet: accepted with a value that has the same effect as omitting the field, else refused by name;
- unknown: refused by name, with the nearest known one; in messages, calls and input items accepted and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

INERT = frozenset(
    {
        *("guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity"),
    }
)
"""Inert fields of a request. Some are also in the models, which limit their size."""
MAX_NAMED = 20  # in the header; a body may have half a million names

_BOTH: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {"add_special_tokens": (True,), "suffix": ()}
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
    "prediction": (),
    "web_search_options": (),
}
MESSAGE: Neutral = {
    "function_call": (),
    "partial": (False,),  # in other APIs: continue this message
    "prefix": (False,),
}


def as_header(names: Iterable[str]) -> str:
    """Returns the names of ignored fields as a header value: printable, and at most MAX_NAMED."""
    shown = sorted({re.sub(r"[^!-+\--~]", "?", name) for name in names})
    return ", ".join(shown[:MAX_NAMED] + (["..."] if len(shown) > MAX_NAMED else []))
