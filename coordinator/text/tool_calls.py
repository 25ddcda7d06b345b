"""Incremental parsing of tool calls and reasoning in the text of a model, however the text is split.

Each family of models writes calls in its own form, as specified in its chat template:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Qwen 2.5 and 3, Hermes
    llama3    {"name": "f", "parameters": {...}}; {...}                    Llama 3.1 and later
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], newer: [TOOL_CALLS]f[ARGS]{...}
    harmony   <|channel|>commentary to=functions.f<|message|>{...}<|call|>  gpt-oss

Reasoning is between <think> and </think>, in harmony in the analysis channel. An apparent call that ends before its
name is recognized, or turns out not to be one, is text; the calls after it are calls. A marker ends a call whose braces
are not closed.
"""

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


FORMATS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
}
"""The forms by name, with their markers; markers that are special tokens are kept in the text."""
THINK = ("<think>", "</think>")


def detect_format(template: str) -> str | None:
    """Returns the form of calls in a chat template, None if it has no tools or an unknown form."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # GLM and Qwen3-Coder do not write JSON after it
        return None if "<arg_key>" in template or "<function=" in template else "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3"
    return None


def make_parser(form: str | None, functions: frozenset[str], *, thinks: bool, thinking: bool = False) -> Parser | None:
    """Returns a parser of calls in this form, if there are functions to call, and of reasoning, if the model `thinks`;
    `thinking`: the prompt ends within its reasoning. None if there is nothing to parse."""
    parser: Parser | None = None
    match form if functions else None:
        case "hermes":
            parser = HermesParser()
        case "llama3":
            parser = LlamaParser(functions)
        case "mistral":
            parser = MistralParser()
    if form == "harmony":
        return HarmonyParser(calls=bool(functions)) if thinks or functions else None
    return ThinkParser(parser, thinking) if thinks else parser


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


_HALVES = re.compile("[\ud800-\udfff]")
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
        if (head := _HEAD.match(self.text)) is not None and (name := self._named(_json(head[1]))) is not None:
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
        call = _json(text.strip())
        if not isinstance(call, dict):
            return ""
        self.name = self._named(call.get("name"))
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            return "{}"
        return _whole(arguments) if isinstance(arguments, str) else json.dumps(arguments)

    def _named(self, name: Any) -> str | None:
        is_name = isinstance(name, str) and name and (not self._functions or name in self._functions)
        return _whole(name) if is_name else None


def _whole(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot represent but JSON can spell."""
    return _HALVES.sub("\ufffd", text)


def _json(text: str) -> Any:
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
    needs more text."""

    def __init__(self) -> None:
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
        self._events.append(CallBegun(self._index, name))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._index, text))

    def _go(self, state: Callable[[], bool]) -> bool:
        """Continues in `state`."""
        self._state = state
        return True

    def _up_to(self, *markers: str) -> tuple[str, str]:
        """Consumes the pending text up to the first of the markers; returns it and the marker. Without a marker,
        consumes the text up to a possible beginning of one, and returns an empty marker."""
        found = [(at, marker) for marker in markers if (at := self._pending.find(marker)) >= 0]
        if found:
            at, marker = min(found)
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


def _starts(text: str, separator: str) -> tuple[bool | None, str]:
    """Returns whether a text begins with a separator and an object, None if it is too short to tell, and the object."""
    more = text.lstrip()
    if more.startswith(separator):
        more = more[1:].lstrip()
        return (more[0] == "{" if more else None), more
    return (None if not more and separator != "\0" else False), more


class _ObjectParser(Parser):
    """Parses calls that are objects, with a separator between two of them. An object that is not a call is text, and
    parsing goes on after it. State: the current object, the text to emit before it if it is not a call, and the names
    that it may have."""

    separator = "\0"  # none

    def __init__(self) -> None:
        super().__init__()
        self._object = _Object()
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

    def _read(self) -> bool:
        found, begun = self._object, self._object.name is not None
        taken, arguments = found.feed(self._pending)
        self._pending = self._pending[taken:]
        if found.name is not None:
            if not begun:
                self._begin_call(found.name)
            self._emit_arguments(arguments)
        if found.state == "failed":
            self._emit_text(self._raw + found.text)
            self._state = self._after_text
        elif found.state == "done":
            self._state = self._behind
        return found.state != "reading"

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


class HermesParser(_ObjectParser):
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


class LlamaParser(_ObjectParser):
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


class MistralParser(_ObjectParser):
    separator = ","

    def __init__(self) -> None:
        super().__init__()
        self._state = self._outside
        self._braces = _Braces()

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
        self._begin_call(name)
        self._braces, self._state = _Braces(), self._arguments
        return True

    def _arguments(self) -> bool:
        taken = self._braces.feed(self._pending)
        self._emit_arguments(self._pending[:taken])
        self._pending = self._pending[taken:]
        if self._braces.state != "reading":
            self._state = self._outside
        return self._braces.state != "reading"


class HarmonyParser(Parser):
    """Parses consecutive messages: a head, which names the channel and perhaps a tool, and a body. State: the method
    that receives the current body."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._calls = calls
        self._give: Callable[[str], None] = self._emit_text
        self._state = self._begin

    @property
    def reasoning(self) -> bool:
        return self._state == self._body and self._give == self._emit_reasoning

    def _begin(self) -> bool:
        """Detects messages, or text that a grammar forced."""
        if not self._pending:
            return False
        heads = ("<|channel|>", "<|start|>")
        if any(head.startswith(self._pending[: len(head)]) for head in heads):
            if not self._pending.startswith(heads):
                return False
            return self._go(self._between)
        return self._go(self._as_text)

    def _between(self) -> bool:
        _, marker = self._up_to("<|channel|>", "<|start|>")
        return bool(marker) and self._go(self._head)

    def _head(self) -> bool:
        if "<|message|>" not in self._pending:
            return False
        head, _ = self._up_to("<|message|>")
        head = head.replace("<|channel|>", " ").replace("<|constrain|>", " ")
        to = next((word.removeprefix("to=") for word in head.split() if word.startswith("to=")), "")
        if to and self._calls:
            self._begin_call(to.removeprefix("functions."))
            self._give = self._emit_arguments
        else:
            self._give = self._emit_reasoning if "analysis" in head.split() else self._emit_text
        return self._go(self._body)

    def _body(self) -> bool:
        text, marker = self._up_to("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        self._give(text)
        return bool(marker) and self._go(self._head if marker == "<|start|>" else self._between)

    def finish(self) -> list[Event]:
        if self._state == self._body:
            self._give(self._pending)
            self._pending = ""
        return super().finish()


class ThinkParser(Parser):
    """Separates the reasoning, and passes the remaining text to another parser. State: content that may be the
    beginning of an end tag, and whether one was just dropped."""

    def __init__(self, behind: Parser | None, thinking: bool) -> None:
        super().__init__()
        self._parser = behind
        self._content, self._blank = "", False
        self._state = self._thinks if thinking else self._begin

    @property
    def reasoning(self) -> bool:
        return self._state == self._thinks

    def _begin(self) -> bool:
        text = self._pending.lstrip()
        if "<think>".startswith(text[:7]) and len(text) < 7:
            return False
        thinks = text.startswith("<think>")
        if thinks:
            self._pending = text.removeprefix("<think>")
        return self._go(self._thinks if thinks else self._outside)

    def _thinks(self) -> bool:
        text, marker = self._up_to("</think>")
        self._emit_reasoning(text)
        return bool(marker) and self._go(self._after_think)

    def _after_think(self) -> bool:
        """Skips the blank lines after the reasoning."""
        return self._skip() and self._go(self._outside)

    def _outside(self) -> bool:
        text, self._pending = self._pending, ""
        self._filter([Text(text)] if self._parser is None else self._parser.push(text))
        return False

    def _filter(self, events: list[Event]) -> None:
        """Passes events on, without end tags in the content and the blank lines after them: the reasoning began in the
        prompt, or the model left its beginning out."""
        for event in events:
            if not isinstance(event, Text):
                self._emit_text(self._content)
                self._content, self._blank = "", False
                self._events.append(event)
                continue
            self._content += event.text
            while True:
                self._content = self._content.lstrip() if self._blank else self._content
                self._blank = self._blank and not self._content
                before, tag, after = self._content.partition("</think>")
                if not tag:
                    break
                self._emit_text(before)
                self._content, self._blank = after, True
            keep = max(n for n in range(8) if n == 0 or self._content.endswith("</think>"[:n]))
            self._emit_text(self._content[: len(self._content) - keep])
            self._content = self._content[len(self._content) - keep :]

    def finish(self) -> list[Event]:
        if self._state == self._thinks:
            self._emit_reasoning(self._pending)
        else:
            self._filter([Text(self._pending)] if self._parser is None else self._parser.push(self._pending))
        self._pending = ""
        if self._parser is not None:
            self._filter(self._parser.finish())
        self._emit_text(self._content)
        self._content = ""
        return self._taken()
