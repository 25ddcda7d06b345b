"""A model's chat template, rendered by Jinja's sandbox in a child process.

The sandbox denies a template access to Python internals, and the kernel limits its resources: the child has CHILD_BYTES
of memory and a timer of its own CPU time, so a busy machine does not make a good template fail. A template that hangs
in a single operation, where no signal is handled, is killed with the child, and the next rendering starts another.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import InvalidRequest, StartupError, Unavailable
from baton.runtime.process import ChildExecutor, ready, start_child

TIME_LIMIT_S = 0.2
KILL_S = 5.0
START_S = 60.0
CHILD_BYTES = 512 << 20
MAX_EXTRA_CHARS = 1 << 18


class Renderer(ChildExecutor):
    """State: the child, once it is needed, and a future that is done when it has started. Renderings run one at a time,
    for KILL_S each at most."""

    def __init__(self) -> None:
        super().__init__(lambda: start_child(_begin, nice=0))  # every chat request waits for it
        self._started: Future[None] = Future()
        self._lock = threading.Lock()

    def start(self) -> Executor:
        """Returns the child. A new one takes some tenths of a second to start; this call does not wait for it."""
        is_new, child = self.executor is None, self.started()
        if is_new:
            self._started = child.submit(ready)
        return child

    def render(self, source: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Returns the text. Raises as ChatTemplate.render."""
        with self._lock:
            # A child may have died while it was idle: then a new one renders.
            text, refusal = (
                self._call(_render, source, variables, max_chars)
                or self._call(_render, source, variables, max_chars)
                or ("", "the chat template failed: it needs too much memory or stack")
            )
        if refusal:
            raise InvalidRequest(refusal, param="messages")
        return text

    def check(self, source: str) -> str:
        """Returns the compile error of a template, empty if it compiles."""
        with self._lock:
            error: str | None = self._call(_compile_error, source)
        return "compiling it crashes the process" if error is None else error

    def _call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the child's result; None if the child died of the work, or before. Raises as ChatTemplate.render."""
        try:
            child = self.start()
            try:
                self._started.result(START_S)
            except TimeoutError:
                self.close()
                message = "the process that renders chat templates did not start"
                raise Unavailable(message, retry_after_s=1) from None
            return child.submit(work, *arguments).result(KILL_S)
        except TimeoutError:
            self.close()
            raise InvalidRequest("the chat template failed: it timed out", param="messages") from None
        except BrokenProcessPool:
            self.close()
            return None


class ChatTemplate:
    """`special_tokens` are the template's variables `bos_token`, `eos_token` and the like.

    Raises StartupError if `source` cannot be parsed. `check` compiles it in the child: compiling evaluates constants.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, renderer: Renderer | None = None
    ) -> None:
        self.source = source
        self.renderer = renderer or Renderer()
        self._special_tokens = dict(special_tokens or {})
        sandbox = _sandbox()
        try:
            self._tree = sandbox.parse(source)
        except TemplateSyntaxError as error:
            raise StartupError(f"chat template, line {error.lineno}: {str(error.message)[:200]}") from None
        except RecursionError:
            raise StartupError("chat template: it is nested too deeply") from None
        for kind, known in ((nodes.Filter, sandbox.filters), (nodes.Test, sandbox.tests)):
            for used in self._tree.find_all(kind):
                if used.name not in known:
                    raise StartupError(f"chat template, line {used.lineno}: unknown filter or test {used.name[:100]!r}")

    def check(self) -> None:
        """Raises StartupError if the template does not compile. Blocks while the child starts."""
        if error := self.renderer.check(self.source):
            raise StartupError(f"chat template, {error}")

    def literals(self) -> str:
        """Returns all text that the template itself can write, with NUL between the pieces."""
        texts = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        texts |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return "\0".join(sorted(texts))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt. Besides waiting for the child, blocks for up to TIME_LIMIT_S normally, KILL_S at most.

        Raises:
            InvalidRequest: the template refused the messages, failed, or exceeded a limit.
            Unavailable: the child did not start.
        """
        given = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        known = dict(variables or {}) | self._special_tokens | given
        return self.renderer.render(self.source, known, MAX_EXTRA_CHARS + 4 * _json_chars([messages, tools]))


def _json_chars(value: Any) -> int:
    """Counts the characters of a value as JSON, without those that escapes add. Serializing it would take one call,
    during which no other thread runs."""
    left, chars = [value], 0
    while left:
        item = left.pop()
        chars += 2  # between two values: ", " or ": "
        if isinstance(item, str):
            chars += 2 + len(item)
        elif isinstance(item, Mapping):
            left.extend(item.keys())
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
        else:
            chars += len(str(item))
    return chars


# In the child.


def _begin() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _out_of_time)
    gc.disable()  # collections would take most of the time of a large conversation; rendering leaves no cycles


def _compile_error(source: str) -> str:
    signal.setitimer(signal.ITIMER_PROF, KILL_S / 2)
    try:
        _compiled(source)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {str(error.message)[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def _render(source: str, variables: Mapping[str, Any], max_chars: int) -> tuple[str, str]:
    """Returns the text, and why it is refused, if it is."""
    try:
        template = _compiled(source)
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        try:
            text = template.render(variables)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > max_chars:
            raise SecurityError("the output is too long")
    except TemplateError as error:
        return "", f"the chat template refused: {str(error)[:300]}"
    except Exception as error:
        return "", f"the chat template failed: {type(error).__name__}: {error!s:.200}"
    return text, ""


def _out_of_time(*_: object) -> NoReturn:
    raise SecurityError("it takes too long")


@lru_cache
def _compiled(source: str) -> Template:
    return _sandbox().from_string(source)


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Returns a sandbox with what transformers provides to a chat template."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text, for training; here it is plain text."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
