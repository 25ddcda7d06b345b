"""The events of a parsed answer, and the base of its parsers: text in pieces in, events out, however it is split."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, which are JSON as the model wrote it."""

    index: int
    text: str


Event = Text | Reasoning | CallBegun | Arguments

_HALVES = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot represent but JSON can spell."""
    return _HALVES.sub("\ufffd", text)


def json_value(text: str) -> Any:
    """Returns the value, None if the text is not JSON or has a number that JSON cannot represent."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value


class Parser:
    """Parses the text of one choice piece by piece; this base class finds only text. State: text that is not parsed
    yet, events to return, the number of the last call, and `_state`, which parses one piece and returns False when it
    needs more text. With `one_call` all calls but the first are left out."""

    def __init__(self) -> None:
        self.one_call = False
        self._pending = ""
        self._events: list[Event] = []
        self._index = -1
        self._state: Callable[[], bool] = self._as_text

    @property
    def reasoning(self) -> bool:
        """Whether the text at this place is reasoning."""
        return False

    def push(self, text: str) -> list[Event]:
        self._pending += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """Returns the remaining events at the end of the text."""
        self._as_text()
        return self._taken()

    def _taken(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _as_text(self) -> bool:
        self._emit_text(self._pending)
        self._pending = ""
        return False

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _begin_call(self, name: str) -> None:
        self._index += 1
        if self._index == 0 or not self.one_call:
            self._events.append(CallBegun(self._index, name))

    def _emit_arguments(self, text: str) -> None:
        if text and (self._index == 0 or not self.one_call):
            self._events.append(Arguments(self._index, text))

    def _go(self, state: Callable[[], bool]) -> bool:
        """Continues in `state`."""
        self._state = state
        return True

    def _up_to(self, *markers: str) -> tuple[str, str]:
        """Consumes the pending text up to the first of the markers; returns it and the marker. Without a marker,
        consumes the text up to a possible beginning of one, and returns an empty marker."""
        positions = [(at, marker) for marker in markers if (at := self._pending.find(marker)) >= 0]
        if positions:
            at, marker = min(positions)
            text, self._pending = self._pending[:at], self._pending[at + len(marker) :]
            return text, marker
        keep = max((n for m in markers for n in range(1, len(m)) if self._pending.endswith(m[:n])), default=0)
        at = len(self._pending) - keep
        text, self._pending = self._pending[:at], self._pending[at:]
        return text, ""

    def _skip(self, characters: str = " \t\r\n") -> bool:
        """Drops leading `characters`; returns whether any text is left."""
        self._pending = self._pending.lstrip(characters)
        return bool(self._pending)
