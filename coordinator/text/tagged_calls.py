"""Parsers of calls that have each argument between tags of its own, as text: qwen3_coder and glm45.

Which JSON value a text is depends on the type of its parameter: text is a string where strings are allowed and nothing
else fits, and where the schema does not say. Strings are emitted as they arrive, other values at their end. Python's
spelling (True, None, single quotes) is read too: templates write the history with it. In both forms an object between
the tags is a call as in hermes: grammars force calls in that form.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.text.object_calls import MAX_NAME_CHARS, HermesParser
from coordinator.text.parser import Event, json_value, without_surrogates

Functions = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each function, by its name."""
MAX_LITERAL_CHARS = 65_536
"""Of a value in Python's spelling: parsing one takes microseconds per character."""
_MAX_REFERENCES = 16
_TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object", str: "string",
}  # fmt: skip


def argument_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Returns the JSON types that a function's schema allows for an argument; empty if it does not say."""
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(described, schema, _MAX_REFERENCES))


def _types(described: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(described, Mapping) or not depth:
        return set()
    declared = described.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {each for each in declared if isinstance(each, str)}
    for values in (described.get("enum"), [described["const"]] if "const" in described else None):
        if isinstance(values, list):
            return {_TYPES[type(value)] for value in values if type(value) in _TYPES}
    reference = described.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth - 1)
    types: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        branches = described.get(key)
        for branch in branches if isinstance(branches, list) else ():
            types |= _types(branch, root, depth - 1)
    return types


def argument_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument that the model wrote as `text`."""
    stripped = text.strip()
    if types - {"string"}:
        value = json_value(stripped)
        valid = value is not None or stripped == "null"
        if valid and not isinstance(value, str) and _fits(value, types):
            return without_surrogates(stripped)
        literal = None if valid else _literal(stripped)
        if (literal is not None or stripped == "None") and not isinstance(literal, str) and _fits(literal, types):
            return json.dumps(literal, ensure_ascii=False)
        if valid and "string" not in types:
            return without_surrogates(stripped)  # of another type than the schema allows: the client's to judge
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _TYPES.get(type(value), "")
    return kind in types or (kind == "integer" and "number" in types)


def _literal(text: str) -> Any:
    """Returns a value in Python's spelling that JSON can represent; None if the text is none."""
    if len(text) > MAX_LITERAL_CHARS:
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value


class _TaggedParser(HermesParser):
    """State: the schema of the current call's function, whether it has an argument already, and the current
    argument's types and, unless it is a string, its text so far."""

    ends: tuple[str, ...]
    """What ends a value."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self._functions = functions
        self._schema: Mapping[str, Any] = {}
        self._has_arguments = False
        self._types: frozenset[str] = frozenset()
        self._text = ""

    @property
    def _as_text_at_end(self) -> tuple[Callable[[], bool], ...]:
        return self._outside, self._read

    def _outside(self) -> bool:
        text, marker = self._up_to("<tool_call>")
        self._emit_text(text)
        return bool(marker) and self._go(self._opened)

    def _opened(self) -> bool:
        """After the opening tag, whose whitespace is kept: it is text if no call follows."""
        text = self._pending.lstrip()
        if not text:
            return False
        if text[0] == "{":
            return self._open("<tool_call>", self._inside)
        return self._go(self._head)

    def _head(self) -> bool:
        """Reads the name of the function."""
        raise NotImplementedError

    def _arguments(self) -> bool:
        """Reads up to the next argument or the end of the call."""
        raise NotImplementedError

    def _value_ended(self, marker: str) -> bool:
        """Continues behind a value."""
        raise NotImplementedError

    def _no_call(self) -> bool:
        self._emit_text("<tool_call>")
        return self._go(self._outside)

    def _begin(self, name: str) -> bool:
        self._begin_call(name)
        self._schema, self._has_arguments = self._functions.get(name, {}), False
        return self._go(self._arguments)

    def _end(self, behind: Callable[[], bool]) -> bool:
        self._emit_arguments("}" if self._has_arguments else "{}")
        return self._go(behind)

    def _begin_value(self, key: str) -> bool:
        begin = ", " if self._has_arguments else "{"
        self._emit_arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        self._has_arguments, self._types, self._text = True, argument_types(self._schema, key), ""
        if self._types - {"string"}:
            return self._go(self._value)
        self._emit_arguments('"')
        return self._go(self._string)

    def _string(self) -> bool:
        text, marker = self._up_to(*self.ends)
        self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if marker:
            self._emit_arguments('"')
        return bool(marker) and self._value_ended(marker)

    def _value(self) -> bool:
        text, marker = self._up_to(*self.ends)
        self._text += text
        if marker:
            self._emit_arguments(argument_json(self._text, self._types))
        return bool(marker) and self._value_ended(marker)

    def finish(self) -> list[Event]:
        if self._state in (self._opened, self._head):
            self._emit_text("<tool_call>")
        elif self._state == self._string:
            self._emit_arguments(json.dumps(self._pending, ensure_ascii=False)[1:-1])
            self._pending = ""
        elif self._state not in self._as_text_at_end:
            self._pending = ""  # part of a tag, or of a value that is not complete
        return super().finish()


class QwenCoderParser(_TaggedParser):
    """`<tool_call>`, `<function=name>`, for each argument `<parameter=key>`, a line break, its value, a line break and
    `</parameter>`, then `</function>` and `</tool_call>`. These models sometimes leave out the first tag, or the end of
    a parameter."""

    @property
    def _as_text_at_end(self) -> tuple[Callable[[], bool], ...]:
        return *super()._as_text_at_end, self._bare

    ends = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>", "\n</tool_call>")

    def _outside(self) -> bool:
        text, marker = self._up_to("<tool_call>", "<function=")
        self._emit_text(text)
        if marker == "<function=":
            self._pending = marker + self._pending
            return self._go(self._bare)
        return bool(marker) and self._go(self._opened)

    def _bare(self) -> bool:
        """A function without the tag before it, if there is one of that name."""
        name = self._name()
        if name is None:
            return False
        if name in self._functions:
            self._pending = self._pending.partition(">")[2]
            return self._begin(name)
        self._emit_text("<function=")
        self._pending = self._pending.removeprefix("<function=")
        return self._go(self._outside)

    def _head(self) -> bool:
        text = self._pending.lstrip()
        if not text.startswith("<function=") and "<function=".startswith(text):
            return False
        name = self._name()
        if name is None:
            return False
        if not name:
            return self._no_call()
        self._pending = self._pending.partition(">")[2]
        return self._begin(name)

    def _name(self) -> str | None:
        """Returns the name in the tag that is next; None if it is not complete, empty if it is no tag."""
        if (match := _FUNCTION.match(self._pending)) is not None:
            return match[1]
        text = self._pending.lstrip()
        complete = ">" in text or "\n" in text or len(text) > len("<function=") + MAX_NAME_CHARS
        return "" if complete or not text.startswith("<function=") else None

    def _arguments(self) -> bool:
        _, marker = self._up_to("<parameter=", "</function>", "</tool_call>", "<tool_call>")
        match marker:
            case "<parameter=":
                return self._go(self._key)
            case "</function>":
                return self._end(self._closing)
            case "</tool_call>":
                return self._end(self._after_call)
            case "<tool_call>":
                return self._end(self._opened)
        return False

    def _key(self) -> bool:
        key, end, behind = self._pending.partition(">")
        if not end or not behind:
            return False
        self._pending = behind.removeprefix("\n")
        return self._begin_value(key)

    def _value_ended(self, marker: str) -> bool:
        if marker.endswith("<parameter="):
            return self._go(self._key)
        if marker.endswith("</parameter>"):
            return self._go(self._arguments)
        return self._end(self._closing if marker.endswith("</function>") else self._after_call)

    def _closing(self) -> bool:
        """After a function: its call's end tag, which may be missing."""
        if not self._skip():
            return False
        if self._pending.startswith("</tool_call>"):
            self._pending = self._pending.removeprefix("</tool_call>")
            return self._go(self._after_call)
        return not "</tool_call>".startswith(self._pending) and self._go(self._outside)


_FUNCTION = re.compile(rf"\s*<function=([^<>\s]{{1,{MAX_NAME_CHARS}}})>")


class GlmParser(_TaggedParser):
    """`<tool_call>` and the name, for each argument `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>`, then
    `</tool_call>`; with or without line breaks between the tags."""

    ends = ("</arg_value>",)

    def _head(self) -> bool:
        pending = self._pending.lstrip()
        name = _NAME.match(pending)[0]  # type: ignore[index]  # it matches any text
        behind = pending[len(name) :].lstrip()
        if not name or len(name) > MAX_NAME_CHARS:
            return self._no_call()
        tags = ("<arg_key>", "</tool_call>")
        if behind.startswith(tags):
            self._pending = behind
            return self._begin(name)
        return not any(tag.startswith(behind) for tag in tags) and self._no_call()

    def _arguments(self) -> bool:
        _, marker = self._up_to("<arg_key>", "</tool_call>", "<tool_call>")
        match marker:
            case "<arg_key>":
                return self._go(self._key)
            case "</tool_call>":
                return self._end(self._after_call)
            case "<tool_call>":
                return self._end(self._opened)
        return False

    def _key(self) -> bool:
        key, tag, behind = self._pending.partition("</arg_key>")
        begin = behind.partition("<arg_value>")
        if not tag or not begin[1]:
            return False
        self._pending = begin[2]
        return self._begin_value(key.strip())

    def _value_ended(self, marker: str) -> bool:
        return self._go(self._arguments)


_NAME = re.compile(rf"[^<>\s]{{0,{MAX_NAME_CHARS + 1}}}")
