"""Every field of the public requests that is not served, as data, and what the error says of it.

`null` always counts as not given, whatever the name. Three kinds of fields besides the served ones:
- inert: they change nothing about the answer; accepted, and named in the answer's `x-ignored-fields`;
- not served yet: accepted at a value that means "as if it were not given", refused by name at any other;
- unknown: refused by name, with the nearest known name; in a message accepted and named.
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
"""Of a request. Some are in the models too, which bound their size."""
MAX_NAMED = 20  # in the header; a body has room for half a million

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
    "partial": (False,),  # elsewhere: go on with this message
    "prefix": (False,),
}


def as_header(names: Iterable[str]) -> str:
    """The names of ignored fields as the value of a header: printable, and MAX_NAMED at most."""
    shown = sorted({re.sub(r"[^!-+\--~]", "?", name) for name in names})
    return ", ".join(shown[:MAX_NAMED] + (["..."] if len(shown) > MAX_NAMED else []))
