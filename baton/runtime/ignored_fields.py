"""Fields of a body that Baton does not serve: which are accepted and named, and which are refused.

An unknown field is accepted, unless it looks like a mistake: a typo of a name that is known at its place, or a name
that is known at another place of the same body (docs/decisions/0022-unknown-fields-are-named.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from pydantic_core import PydanticCustomError
from rapidfuzz.distance import OSA

from baton.core.errors import InvalidRequest

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
MAX_UNKNOWN = 256
"""Different unknown fields of one body: each is compared with all known names."""
MAX_NAME_CHARS = 64
TWO_EDITS_CHARS = 6
"""Both names need so many characters for two edits to count as a typo: many shorter ones are two edits apart by chance,
such as `rid` and `n`, or `nvext` and `text`."""


class IgnoredFields:
    """What one body has besides the fields that are served. `strict`: unknown fields are refused, except in history,
    which other servers may have written. `places` maps the names that the body may have to where they belong.

    State: the names of ignored fields with their place, at most MAX_NAMED + 1; the different unknown fields, at most
    MAX_UNKNOWN."""

    def __init__(self, *, strict: bool = False, places: Mapping[str, str] | None = None) -> None:
        self.names: set[str] = set()
        self._strict, self._places = strict, places or {}
        self._unknown: set[tuple[str, str]] = set()

    def add(self, place: str, name: str) -> None:
        """Names an ignored field; `place` is the path of its object, empty for the body itself."""
        if len(self.names) <= MAX_NAMED:
            self.names.add(f"{place}.{name[:MAX_NAME_CHARS]}" if place else name[:MAX_NAME_CHARS])

    @classmethod
    def of(cls, context: IgnoredFields | None) -> IgnoredFields:
        """Returns the context of a validation, which is None for values that are not part of a body."""
        return cls() if context is None else context

    def accept(self, place: str, name: str, known: frozenset[str]) -> None:
        """Does the same as `add_unknown` outside of a model. Raises InvalidRequest."""
        try:
            self.add_unknown(place, name, known)
        except PydanticCustomError as error:
            raise InvalidRequest(
                f"unknown field '{name[:100]}'{error.message()}", code=error.type, param=name[:100]
            ) from None

    def add_unknown(
        self, place: str, name: str, known: frozenset[str], *, history: bool = False, hint: str = ""
    ) -> None:
        """Names an unknown field of an object whose fields are `known`. With a `hint`, what the client may mean, it is
        refused.

        Raises:
            PydanticCustomError: unknown_parameter, because it looks like a mistake, or unknown fields are refused.
        """
        if (place, name) in self._unknown:
            return
        path = f"{place}.{name}" if place else name
        if not hint and path not in OF_OTHER_SERVERS:
            hint = " or ".join(f"'{near}'" for near in typo_of(name[: MAX_NAME_CHARS + 1], known))
        if not hint and name not in COMMON:
            hint = self._places.get(name, "")
        if hint or (self._strict and not history):
            hint = f"; did you mean {hint}?" if hint else ""
            raise PydanticCustomError("unknown_parameter", hint, {"field": name})
        if len(self._unknown) >= MAX_UNKNOWN:
            reason = f": the body has more than {MAX_UNKNOWN} different unknown fields"
            raise PydanticCustomError("unknown_parameter", reason, {"field": name})
        self._unknown.add((place, name))
        self.add(place, name)


@lru_cache(maxsize=4096)
def typo_of(name: str, known: frozenset[str]) -> tuple[str, ...]:
    """Returns the nearest known names, at most three, if `name` is likely to be a typo of them.

    A typo is at most two insertions, deletions, substitutions or swaps of neighbours away (the restricted
    Damerau-Levenshtein distance, "optimal string alignment"), upper and lower case being equal; one if either name is
    shorter than TWO_EDITS_CHARS.
    """
    given, best, nearest = name.lower(), 2, list[str]()
    for other in sorted(known):
        limit = min(best, 2 if min(len(given), len(other)) >= TWO_EDITS_CHARS else 1)
        edits = OSA.distance(given, other.lower(), score_cutoff=limit)
        if edits > limit:
            continue
        if edits < best:
            best, nearest = edits, []
        nearest.append(other)
    return tuple(nearest[:3])


def as_header(names: Iterable[str]) -> str:
    """Returns the names of ignored fields as a header value: printable, at most MAX_NAMED and MAX_HEADER_CHARS."""
    shown, chars = list[str](), 0
    for name in sorted({re.sub(r"[^!-+\--~]", "?", name) for name in names}):
        chars += len(name) + 2
        if chars > MAX_HEADER_CHARS or len(shown) == MAX_NAMED:
            return ", ".join([*shown, "..."])
        shown.append(name)
    return ", ".join(shown)
