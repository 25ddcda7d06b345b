"""Every field of the public requests that is not served, as data, and what a client is told about it.

`null` always counts as not given, whatever the name. Three kinds of fields besides the served ones:
- inert: they change nothing about the answer; accepted, and named in the answer's `x-ignored-fields`;
- not served yet: accepted at a value that means "as if it were not given", refused by name at any other;
- unknown: refused by name, with the nearest known name; in a message accepted and named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from baton.core.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]

INERT = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Of a request. Some are in the models too, which bound their size."""
MAX_NAMED = 20  # in the header; a body has room for half a million

_BOTH: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {
    "add_special_tokens": (True,),
    "suffix": (),
}
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
NOTHING: Neutral = {}


def sift(
    given: Mapping[str, Any],
    served: Set[str],
    neutral: Neutral,
    *,
    path: str = "",
    inert: Set[str] = frozenset(),
    any_name: bool = False,
    ignored: set[str] | None = None,
) -> dict[str, Any]:
    """The served fields of `given`. Those of `inert`, and with `any_name` unknown ones, are put into `ignored`.

    Raises:
        InvalidRequest: a field that is unknown, or not served and not neutral.
    """
    kept = {}
    for name, value in given.items():
        if name in served:
            kept[name] = value
        if value is None:
            continue
        if name in inert or (any_name and name not in served and name not in neutral):
            if ignored is not None and len(ignored) <= MAX_NAMED:
                ignored.add(name[:64])
        elif name in neutral:
            if not any(_same(value, accepted) for accepted in neutral[name]):
                raise InvalidRequest(
                    f"'{path}{name}' is not supported yet{_accepted(neutral[name])}",
                    code="unsupported_parameter",
                    param=path + name,
                )
        elif name not in served:
            raise _unknown(name, path, sorted(served | neutral.keys() | inert))
    return kept


def as_header(names: Iterable[str]) -> str:
    """The names of ignored fields as the value of a header: printable, and MAX_NAMED at most."""
    shown = sorted({re.sub(r"[^!-+\--~]", "?", name) for name in names})
    return ", ".join(shown[:MAX_NAMED] + (["..."] if len(shown) > MAX_NAMED else []))


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
