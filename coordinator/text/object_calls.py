"""Parsers of calls whose arguments are a JSON object: hermes, llama3, mistral, deepseek_v3 and deepseek_v31."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from coordinator.text.parser import Event, Parser, json_value, without_surrogates

MAX_NAME_CHARS = 256
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class _Braces:
    """Finds the end of any JSON object. `cut`: its last brace is missing, and what can only follow an object ended it:
    outside of its strings `<` (a marker) or `;`, or an object in the place of a key."""

    def __init__(self) -> None:
        self.state = "reading"  # done, cut, failed
        self._depth = 0
        self._after_comma = False
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Consumes characters until the object ends or turns out not to be one; returns how many."""
        for count, c in enumerate(text):
            if self._depth == 0 and c != "{":
                if c.isspace():
                    continue
                self.state = "failed"
                return count
            if self._in_string:
                self._in_string = self._escaped or c != '"'
                self._escaped = c == "\\" and not self._escaped
            elif c == '"':
                self._in_string = True
            elif c in "<;" or (c == "{" and self._after_comma and self._depth == 1):
                self.state = "cut"
                return count
            else:
                self._depth += (c in "{[") - (c in "}]")
            self._after_comma = c == "," or (self._after_comma and c.isspace())
            if self._depth == 0:
                self.state = "done"
                return count + 1
        return len(text)


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class _Object:
    """Parses a JSON object that is a call: it has a "name" and "arguments" or "parameters". In this order, which all
    models are trained to write, it is recognized as a call before its arguments, which are emitted as they arrive;
    otherwise at its end. State: its name, its text until the name is known, and the ends of the object and its
    arguments."""

    def __init__(self, functions: frozenset[str] = frozenset()) -> None:
        self.name: str | None = None
        self.text = ""
        self._functions = functions
        self._whole, self._arguments = _Braces(), _Braces()

    @property
    def state(self) -> str:
        """`reading`; `done`, with a name; `failed`: it is not a call."""
        if self._whole.state not in ("done", "cut"):
            return self._whole.state
        return "failed" if self.name is None else "done"

    def feed(self, text: str) -> tuple[int, str]:
        """Returns the number of characters consumed, and the new part of the arguments."""
        taken = self._whole.feed(text)
        if self.name is not None:
            return taken, self._of_arguments(text[:taken])
        self.text += text[:taken]
        if (head := _HEAD.match(self.text)) is not None and (name := self._named(json_value(head[1]))) is not None:
            self.name = name
            return taken, self._of_arguments(self.text[head.end() :])
        if self._whole.state in ("done", "cut"):
            return taken, self._at_once(
                self.text if self._whole.state == "done" else self.text.rstrip(" \t\r\n,") + "}"
            )
        return taken, ""

    def _of_arguments(self, text: str) -> str:
        return text[: self._arguments.feed(text)] if self._arguments.state == "reading" else ""

    def _at_once(self, text: str) -> str:
        call = json_value(text.strip())
        if not isinstance(call, dict):
            return ""
        self.name = self._named(call.get("name"))
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            return "{}"
        return without_surrogates(arguments) if isinstance(arguments, str) else json.dumps(arguments)

    def _named(self, name: Any) -> str | None:
        is_name = isinstance(name, str) and name and (not self._functions or name in self._functions)
        return without_surrogates(name) if is_name else None


def _starts(text: str, separator: str) -> tuple[bool | None, str]:
    """Returns whether a text begins with a separator and an object, None if it is too short to tell, and the object."""
    more = text.lstrip()
    if more.startswith(separator):
        more = more[1:].lstrip()
        return (more[0] == "{" if more else None), more
    return (None if not more and separator != "\0" else False), more


class ObjectParser(Parser):
    """Parses calls that are objects, with a separator between two of them. An object that is not a call is text, and
    parsing goes on after it. State: the current object, the text to emit before it if it is not a call, and the names
    that it may have."""

    separator = "\0"  # none

    def __init__(self) -> None:
        super().__init__()
        self._object, self._braces = _Object(), _Braces()
        self._raw, self._names = "", frozenset[str]()
        self._behind: Callable[[], bool] = self._outside

    def _outside(self) -> bool:
        """The state outside of calls."""
        raise NotImplementedError

    def _open(self, raw: str, behind: Callable[[], bool], functions: frozenset[str] = frozenset()) -> bool:
        """Starts parsing an object; `raw` is the text to emit before it if it is not a call, `behind` the state after a
        call, `functions` the only names that it may have, if there are any."""
        self._object, self._raw, self._names = _Object(functions), raw, functions
        self._state, self._behind = self._read, behind
        return True

    def _open_arguments(self, name: str, behind: Callable[[], bool]) -> bool:
        """Starts parsing an object that is the arguments of a call of `name`."""
        self._begin_call(name)
        self._braces, self._state, self._behind = _Braces(), self._read_arguments, behind
        return True

    def _read_arguments(self) -> bool:
        taken = self._braces.feed(self._pending)
        self._emit_arguments(self._pending[:taken])
        self._pending = self._pending[taken:]
        if self._braces.state != "reading":
            self._state = self._behind
        return self._braces.state != "reading"

    def _read(self) -> bool:
        call, was_named = self._object, self._object.name is not None
        taken, arguments = call.feed(self._pending)
        self._pending = self._pending[taken:]
        if call.name is not None:
            if not was_named:
                self._begin_call(call.name)
            self._emit_arguments(arguments)
        if call.state == "failed":
            self._emit_text(self._raw + call.text)
            self._state = self._after_text
        elif call.state == "done":
            self._state = self._behind
        return call.state != "reading"

    def _after_text(self) -> bool:
        """Continues with an object behind a separator, or outside of calls."""
        separated, more = _starts(self._pending, self.separator)
        if separated is None:
            return False
        if not separated:
            return self._go(self._outside)
        raw, self._pending = self._pending[: -len(more)], more
        return self._open(raw, self._behind, self._names)

    def finish(self) -> list[Event]:
        if self._state == self._read and self._object.name is None:
            self._emit_text(self._raw + self._object.text)
        return super().finish()


class HermesParser(ObjectParser):
    def __init__(self) -> None:
        super().__init__()
        self._state = self._outside

    def _outside(self) -> bool:
        text, marker = self._up_to("<tool_call>")
        self._emit_text(text)
        return bool(marker) and self._open(marker, self._inside)

    def _inside(self) -> bool:
        _, marker = self._up_to("</tool_call>", "<tool_call>")
        if marker == "<tool_call>":
            return self._open(marker, self._inside)
        return bool(marker) and self._go(self._after_call)

    def _after_call(self) -> bool:
        """Skips whitespace before another call or the end."""
        return self._skip() and self._go(self._outside)

    def finish(self) -> list[Event]:
        if self._state == self._inside:
            self._pending = ""
        return super().finish()


class LlamaParser(ObjectParser):
    """A call follows <|python_tag|>, or is the whole text: then it must name one of the given functions, since any JSON
    with a name looks the same."""

    separator = ";"

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__()
        self._functions = functions
        self._state = self._begin

    def _begin(self) -> bool:
        text = self._pending.lstrip()
        if not text:
            return False
        if text[0] == "{":
            raw = self._pending[: len(self._pending) - len(text)]
            self._pending = text
            return self._open(raw, self._between, self._functions)
        return self._go(self._outside)

    def _outside(self) -> bool:
        text, marker = self._up_to("<|python_tag|>")
        self._emit_text(text)
        return bool(marker) and self._go(self._between)

    def _between(self) -> bool:
        if not self._skip(" \t\r\n;"):
            return False
        if self._pending[0] == "{":
            return self._open("", self._between)
        return self._go(self._outside)


class MistralParser(ObjectParser):
    separator = ","

    def __init__(self) -> None:
        super().__init__()
        self._state = self._outside

    def _outside(self) -> bool:
        text, marker = self._up_to("[TOOL_CALLS]")
        self._emit_text(text)
        return bool(marker) and self._go(self._inside)

    def _inside(self) -> bool:
        """Parses the start of an array of objects, or of a name and its arguments."""
        if not self._skip():
            return False
        if self._pending[0] == "[":
            self._pending = self._pending[1:]
            return self._go(self._between)
        return self._go(self._named)

    def _between(self) -> bool:
        if not self._skip(" \t\r\n,"):
            return False
        if self._pending[0] == "{":
            return self._open("", self._between)
        self._pending = self._pending.removeprefix("]")
        return self._go(self._outside)

    def _named(self) -> bool:
        at = self._pending.find("{")
        if at < 0:
            return False
        name, self._pending = self._pending[:at], self._pending[at:]
        name = name.split("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
        if not name:
            return self._go(self._as_text)
        return self._open_arguments(name, self._outside)


class DeepSeekParser(ObjectParser):
    """A call is its name, a separator and an object; in older versions the word `function`, the separator, the name and
    a block of JSON. Some templates write an object with both."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._outside

    def _outside(self) -> bool:
        text, marker = self._up_to(CALLS_BEGIN, CALL_BEGIN)
        self._emit_text(text)
        return bool(marker) and self._go(self._between if marker == CALLS_BEGIN else self._head)

    def _between(self) -> bool:
        if not self._skip():
            return False
        for marker, state in ((CALL_BEGIN, self._head), (CALLS_END, self._outside)):
            if self._pending.startswith(marker):
                self._pending = self._pending.removeprefix(marker)
                return self._go(state)
        unfinished = any(marker.startswith(self._pending) for marker in (CALL_BEGIN, CALLS_END))
        return not unfinished and self._go(self._outside)

    def _head(self) -> bool:
        if not self._skip():
            return False
        if self._pending[0] == "{":
            return self._open(CALL_BEGIN, self._inside)
        kind, marker, arguments = self._pending.partition(CALL_SEP)
        if not marker:
            return CALL_END in kind and self._drop(CALL_BEGIN)
        text = arguments.lstrip()
        if not text:
            return False
        if text[0] != "{":
            kind, line, text = text.partition("\n")
            at = text.find("{")
            if not line or at < 0:
                return CALL_END in kind + text and self._drop(CALL_BEGIN)
            text = text[at:]
        name = kind.strip()
        if not name or len(name) > MAX_NAME_CHARS or CALL_END in name:
            return self._drop(CALL_BEGIN)
        self._pending = text
        return self._open_arguments(name, self._inside)

    def _drop(self, raw: str) -> bool:
        """Continues outside of calls, with what looked like one as text."""
        self._emit_text(raw)
        return self._go(self._outside)

    def _inside(self) -> bool:
        """Skips what follows the arguments."""
        _, marker = self._up_to(CALL_END, CALL_BEGIN, CALLS_END)
        states = {CALL_END: self._between, CALL_BEGIN: self._head, CALLS_END: self._outside}
        return bool(marker) and self._go(states[marker])

    def finish(self) -> list[Event]:
        if self._state == self._head:
            self._emit_text(CALL_BEGIN)
        elif self._state in (self._between, self._inside):
            self._pending = ""
        return super().finish()
