"""Jinja's immutable sandbox, with a clock and a measuring rod.

The sandbox keeps a template from Python's insides. Here every loop turn, call and operator also looks at the clock,
and what makes long strings out of short ones (`*`, `+`, `~`, `%`, replace, join, padding) is measured before it runs.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_WIDTH = 1_000
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{4,})|\{[^{}]*:[^{}]*(\{|\d{4,})")
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
_REMOVED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")


class Limits(threading.local):
    """What the render that runs on this thread may still use. Time is this thread's own processor time: a busy machine
    does not make a good template fail."""

    deadline = float("inf")
    max_chars = 1 << 20
    written = 0

    def start(self, time_limit_s: float, max_chars: int) -> None:
        self.deadline = time.thread_time() + time_limit_s
        self.max_chars = max_chars
        self.written = 0

    def tick(self) -> None:
        if time.thread_time() > self.deadline:
            raise SecurityError("it takes too long")

    def write(self, chars: int) -> None:
        self.tick()
        self.written += chars
        self.fits(self.written)

    def fits(self, chars: int) -> None:
        if chars > self.max_chars:
            raise SecurityError("its text is too long")


class Sandbox(ImmutableSandboxedEnvironment):
    """What transformers gives a chat template, and limits. `limits.start(...)` before each render."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.limits = Limits()
        self.globals.pop("lipsum", None)
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form[:200])
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(tojson=_tojson, join=self._join, replace=self._replace, center=_center, format=_format)
        self.filters["indent"] = self._indent(self.filters["indent"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(_call_environment("turn", [], loop.lineno), lineno=loop.lineno))
        _Concatenations().visit(tree)
        return tree

    def turn(self) -> str:
        self.limits.tick()
        return ""

    def concatenate(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.limits.fits(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.limits.tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            __self._measure(owner, getattr(__obj, "__name__", ""), [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.limits.tick()
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.limits.fits(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide(left)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.limits.fits(len(value) * max(times, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            longer = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            self.limits.fits(longer // 64)
        return super().call_binop(context, operator, left, right)

    def _measure(self, owner: str, method: str, arguments: list[Any]) -> None:
        if method in ("format", "format_map"):
            _refuse_wide(owner)
        elif method in _PADDING:
            _refuse_width(*arguments)
        elif method == "replace" and len(arguments) > 1:
            self._replace(owner, *arguments[:2])
        elif method == "join" and arguments and isinstance(arguments[0], list | tuple):
            self.limits.fits(sum(len(str(item)) + len(owner) for item in arguments[0]))
        elif method == "translate":
            raise SecurityError("translate is not served")

    def _replace(self, text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        self.limits.fits(len(text) + text.count(old) * len(new))
        replaced: str = text.replace(old, new, count)
        return replaced

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = list(value if attribute is None else map(make_attrgetter(self, attribute), value))
        self.limits.fits(sum(len(str(item)) + len(str(d)) for item in items))
        return str(d).join(str(item) for item in items)

    def _indent(self, plain: Callable[..., Any]) -> Callable[..., str]:
        def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
            _refuse_width(width)
            wide = len(width) if isinstance(width, str) else width
            self.limits.fits(len(str(text)) + wide * (1 + str(text).count("\n")))
            return str(plain(str(text), width, first, blank))

        return indent


class _Concatenations(NodeTransformer):
    """`a ~ b` becomes a measured call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_environment("concatenate", node.nodes, node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training; here it is plain text."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call_environment(method: str, arguments: list[nodes.Expr], lineno: int | None) -> nodes.Call:
    """A call of our own method that no variable of the template can shadow."""
    name = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(name, arguments, [], None, None, lineno=lineno)


def _refuse_wide(form: str) -> None:
    if _WIDE.search(form):
        raise SecurityError("a format is too wide")


def _refuse_width(*widths: Any) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise SecurityError("a width is too large")


def _center(text: Any, width: int = 80) -> str:
    _refuse_width(width)
    return str(text).center(width)


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    _refuse_wide(str(form))
    return str(str(form) % (kwargs or args))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    _refuse_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
