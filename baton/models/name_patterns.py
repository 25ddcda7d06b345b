"""Regular expressions over the names of modules, matched within a bounded number of steps.

Python's `re` tries one way to match after the other: `(\\w+\\.?)+x` takes it exponential time on a name that does not
match, without releasing the interpreter. Here all ways advance together: a part of an expression maps the set of
positions in the name at which it may begin to the set of those at which it may end. Whether a whole name matches does
not depend on which of several ways is tried first, so lazy and greedy repetition are the same. Single characters, sets
of them and anchors are left to `re`, and so are expressions without repetition, group or alternative.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Set
from dataclasses import dataclass

MAX_LENGTH = 4096
MAX_DEPTH = 50
"""Groups within each other."""
MAX_STEPS = 2_000_000
"""Positions at which parts of the expressions of one adapter's config are tried, altogether."""

_OPERATORS = re.compile(r"[*+?{(|]")
_CHARACTER = re.compile(r"\\[^0-9A-Za-z]|\\[dDsSwWbBAZ]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]", re.DOTALL)
_REPETITION = re.compile(r"(?:([*+?])|\{(\d+)\}|\{(\d*),(\d*)\})(\+?)\??")
_GROUP = re.compile(r"\((?:\?(?:[:=!]|P<\w+>))?(?!\?)")


class PatternError(Exception):
    """An expression cannot be matched here. The message begins with its key in the config."""


class Steps:
    """The steps that matching has taken, of `limit`."""

    def __init__(self, limit: int = MAX_STEPS) -> None:
        self.taken, self.limit = 0, limit


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Repetition:
    part: _Part
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Ahead:
    part: _Part
    matches: bool


_Part = re.Pattern[str] | _Sequence | _Choice | _Repetition | _Ahead


class NamePattern:
    """The expression `text` of `key`; expressions that share `steps` share their limit.

    Raises PatternError if it is no regular expression, is too long, or has parts whose result depends on more than what
    follows a position (references to groups, conditions, look-behind) or that change the meaning of others (flags).
    """

    def __init__(self, key: str, text: str, steps: Steps) -> None:
        self._name, self._steps = f"{key}: {text!r:.60}", steps
        if len(text) > MAX_LENGTH:
            raise PatternError(f"{self._name} has more than {MAX_LENGTH:,} characters")
        try:
            plain = re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"{self._name} is no regular expression: {str(error)[:60]}") from None
        try:
            self._pattern: _Part = _Parser(text).alternatives() if _OPERATORS.search(text) else plain
        except _Unsupported as error:
            raise PatternError(f"{self._name} has {error}") from None

    def matches(self, name: str) -> bool:
        """Whether it matches the whole name. Raises PatternError if the steps do not suffice."""
        return self._matches(name, {0})

    def matches_beginning(self, name: str) -> bool:
        """Whether it matches the beginning of a name. Raises PatternError if the steps do not suffice."""
        return bool(self._ends(self._pattern, name, {0}))

    def matches_end(self, name: str) -> bool:
        """Whether it matches the whole name, or all of it after one of its dots. Raises PatternError if the steps do
        not suffice."""
        return self._matches(name, {0, *(dot.end() for dot in re.finditer(r"\.", name))})

    def _matches(self, name: str, starts: Set[int]) -> bool:
        pattern = self._pattern
        if isinstance(pattern, re.Pattern):
            self._take(1)
            return any(pattern.fullmatch(name, start) for start in starts)
        return len(name) in self._ends(pattern, name, starts)

    def _ends(self, part: _Part, name: str, starts: Set[int]) -> Set[int]:
        self._take(len(starts) + 1)
        if isinstance(part, re.Pattern):
            return {match.end() for start in starts if (match := part.match(name, start))}
        if isinstance(part, _Choice):
            return set().union(*(self._ends(each, name, starts) for each in part.parts))
        if isinstance(part, _Ahead):
            return {start for start in starts if bool(self._ends(part.part, name, {start})) is part.matches}
        if isinstance(part, _Repetition):
            return self._repeated(part, name, starts)
        for each in part.parts:
            starts = self._ends(each, name, starts)
            if not starts:
                break
        return starts

    def _repeated(self, repetition: _Repetition, name: str, starts: Set[int]) -> Set[int]:
        # A turn that ends where it began may be left out or added, so beyond one turn for each character and one more
        # the number of turns makes no difference.
        low = min(repetition.low, len(name) + 1)
        reached, latest = set(starts if low == 0 else ()), starts
        for turn in itertools.count(1) if repetition.high is None else range(1, repetition.high + 1):
            latest = self._ends(repetition.part, name, latest)
            if turn >= low:
                latest = latest - reached
                reached |= latest
            if not latest:
                break
        return reached

    def _take(self, steps: int) -> None:
        self._steps.taken += steps
        if self._steps.taken > (limit := self._steps.limit):
            raise PatternError(f"{self._name} is too costly: it and those before it take more than {limit:,} steps")


class _Unsupported(Exception):
    pass


class _Parser:
    """Parses an expression that `re` accepts."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            parts.append(self._sequence())
        return _Choice(tuple(parts)) if len(parts) > 1 else parts[0]

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while self._text[self._at : self._at + 1] not in ("", "|", ")"):
            parts.append(self._repetition(self._one()))
        return _Sequence(tuple(parts))

    def _one(self) -> _Part:
        if self._text[self._at] != "(":
            return re.compile(self._take(_CHARACTER))
        opened = self._take(_GROUP)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unsupported(f"more than {MAX_DEPTH} groups within each other")
        part = self.alternatives()
        self._depth -= 1
        self._at += 1  # the closing bracket: `re` has checked that there is one
        return _Ahead(part, opened == "(?=") if opened in ("(?=", "(?!") else part

    def _repetition(self, part: _Part) -> _Part:
        given = _REPETITION.match(self._text, self._at)
        if given is None:
            return part
        sign, exactly, low, high, possessive = given.groups()
        if possessive:
            raise self._unsupported(given.group())
        self._at = given.end()
        if sign:
            return _Repetition(part, int(sign == "+"), 1 if sign == "?" else None)
        if exactly:
            return _Repetition(part, int(exactly), int(exactly))
        return _Repetition(part, int(low or 0), int(high) if high else None)

    def _take(self, token: re.Pattern[str]) -> str:
        given = token.match(self._text, self._at)
        if given is None:
            raise self._unsupported(self._text[self._at : self._at + 3])
        self._at = given.end()
        return given.group()

    def _unsupported(self, part: str) -> _Unsupported:
        return _Unsupported(f"{part!r} at {self._at}, which is not supported here")
