"""Every field of the public requests that is not served, as data, and what a client is told about it.

Three kinds of fields besides the served ones:
- inert: they change nothing about the answer and are accepted, within size limits (the models in openai_schema.py);
- not served yet: accepted at a value that means "as if it were not given", refused by name at any other;
- unknown: refused by name, with the nearest known name. Whatever could reach the fabric is unknown, null or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from typing import Any

from baton.core.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]

_BOTH: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {
    "add_special_tokens": (True,),
    "suffix": (),
}
CHAT: Neutral = _BOTH | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_calls": ([],),
}
NOTHING: Neutral = {}


def sift(given: Mapping[str, Any], served: Set[str], neutral: Neutral, *, path: str = "") -> dict[str, Any]:
    """The served fields of `given`. null always counts as not given.

    Raises:
        InvalidRequest: a field that is unknown, or not served and not neutral.
    """
    kept = {}
    for name, value in given.items():
        if name in served:
            kept[name] = value
        elif name in neutral:
            if value is not None and not any(_same(value, accepted) for accepted in neutral[name]):
                raise InvalidRequest(
                    f"'{path}{name}' is not supported yet{_accepted(neutral[name])}",
                    code="unsupported_parameter",
                    param=path + name,
                )
        else:
            raise _unknown(name, path, sorted(served | neutral.keys()))
    return kept


def _same(value: Any, accepted: Any) -> bool:
    return type(value) is type(accepted) and bool(value == accepted)


def _accepted(values: tuple[Any, ...]) -> str:
    shown = [repr(v).lower() if isinstance(v, bool) else repr(v) for v in values if not isinstance(v, float)]
    return f" (only {' or '.join(shown)})" if shown else ""


def _unknown(name: str, path: str, known: list[str]) -> InvalidRequest:
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return InvalidRequest(
        f"unknown field '{path}{name[:100]}'{hint}", code="unknown_parameter", param=path + name[:100]
    )
