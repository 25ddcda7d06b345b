"""Structured output: compiles a constraint to a grammar, or refuses it, before the request is queued.

A hostile grammar can take seconds, gigabytes or the whole process (a deep chain of rules overflows the stack), so it is
compiled in a child process, one at a time: a grammar that kills the child, or does not finish, is refused, and the
child is restarted. Each client has at most one grammar compiling, and there are two children, so one client's grammars
do not delay another's. Verdicts are cached, so the same schema is compiled once. Workers then compile exactly the text
that passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from baton.core.errors import InvalidRequest, Unavailable
from baton.core.sampling_limits import MAX_GRAMMAR_CHARS
from baton.engine.grammar_automaton import STACK_BYTES, GrammarError, compile_grammar, first_line, load_tokenizer
from baton.runtime.process import ChildExecutor, ready, start_child
from coordinator.policy.grammar_queue import GrammarQueue

log = logging.getLogger("baton.grammars")

COMPILE_S = 5.0
START_S = 60.0
WAIT_S = 20.0
CHILDREN = 2
CHILD_BYTES = 4 << 30
KEPT_CHARS = 16 << 20
_TRIAL_TOKENS = 16
_TRIAL_S = 0.25  # of CPU time for one mask
WHITESPACE = r" |\n(?: {0,32}|\t{0,8})"
"""Between the parts of JSON: what compact or indented JSON needs. A model could go on with more until `max_tokens`."""

Verdict = str | InvalidRequest
"""A grammar in llguidance's serialised form, or the error that refuses it."""
Kind = Literal["json_schema", "regex", "choice", "lark", "llguidance"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`value` is a JSON schema as text, a regular expression, the choices as a JSON array, a Lark grammar, or a grammar
    in llguidance's serialised form. `param` names the client's field, for messages. For JSON, `lenient` ignores schema
    keywords that are not implemented instead of refusing them; `whitespace` is a regular expression for the text
    between its parts, empty for none."""

    kind: Kind
    value: str
    param: str
    lenient: bool = False
    whitespace: str = WHITESPACE

    def json_options(self) -> dict[str, Any]:
        """Returns the options of llguidance's JSON schema compiler."""
        options = {"lenient": self.lenient, "whitespace_flexible": bool(self.whitespace)}
        return options | ({"whitespace_pattern": self.whitespace} if self.whitespace else {})


class _Compiling(ChildExecutor):
    """A process that compiles one grammar at a time."""

    async def compile(self, constraint: Constraint) -> str:
        """Returns the grammar; empty if the child died. Raises GrammarError, and InvalidRequest for a timeout: on a
        busy machine any grammar may time out, so that verdict is not cached."""
        executor, loop = self.executor or await self._ready_executor(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_S):
                return await loop.run_in_executor(executor, compile_here, constraint)
        except BrokenProcessPool:
            self.close()
            log.warning("a process that compiles grammars died; it restarts with the next grammar")
            return ""
        except TimeoutError:
            self.close()
            raise _refused(constraint, f"compiling it takes more than {COMPILE_S:g} s") from None

    async def _ready_executor(self) -> Executor:
        executor = self.started()
        try:
            async with asyncio.timeout(START_S):
                await asyncio.get_running_loop().run_in_executor(executor, ready)
        except (BrokenProcessPool, TimeoutError):
            self.close()
            raise Unavailable("the process that compiles grammars did not start", retry_after_s=1) from None
        return executor


class GrammarCompiler:
    """State: the children (the second is started once two clients want grammars at the same time) and the idle ones;
    the queue of turns, the results that requests wait for, and the task of each grammar that is being compiled; cached
    verdicts, least recently used first."""

    def __init__(self, model_dir: Path, vocab_size: int, start: Callable[[], Executor] | None = None) -> None:
        start = start or (lambda: start_child(_begin, model_dir, vocab_size))
        self._children = [_Compiling(start) for _ in range(CHILDREN)]
        self._free = self._children[::-1]
        self._queue: GrammarQueue[Constraint] = GrammarQueue()
        self._answers: dict[Constraint, asyncio.Future[Verdict]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._verdicts: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._kept_chars = 0

    async def compile(self, constraint: Constraint, client: str = "") -> str:
        """Returns the grammar that workers apply, compiled in the turn of the client with this name (GrammarQueue). A
        grammar that no request waits for any more is not compiled.

        Raises:
            InvalidRequest: it is not valid, or too complex; the message says why.
            QuotaExceeded: too many grammars of this client wait to be compiled.
            Unavailable: grammars of other clients, or earlier ones of the same client, took too long.
        """
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            verdict = await self._answer(constraint, client)
        else:
            self._verdicts.move_to_end(constraint)
        if isinstance(verdict, InvalidRequest):
            raise InvalidRequest(verdict.message, code=verdict.code, param=verdict.param)
        return verdict

    def close(self) -> None:
        """Cancels the compilations and kills the children, even if they are busy."""
        for task in self._tasks:
            task.cancel()
        for child in self._children:
            child.close()

    async def _answer(self, constraint: Constraint, client: str) -> Verdict:
        self._queue.add(client, constraint)
        answer = self._answers.setdefault(constraint, asyncio.get_running_loop().create_future())
        self._begin_turns()
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise Unavailable(f"the grammar was not compiled within {WAIT_S:g} s", retry_after_s=1) from None
        finally:
            if not answer.done() and self._queue.leave(client, constraint):
                del self._answers[constraint]

    def _begin_turns(self) -> None:
        """Starts the next turns on idle children."""
        while self._free and (turn := self._queue.begin()) is not None:
            task = asyncio.create_task(self._take_turn(*turn, self._free.pop()), name="grammar")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take_turn(self, client: str, constraint: Constraint, child: _Compiling) -> None:
        began, answer = time.monotonic(), self._answers[constraint]
        try:
            answer.set_result(await self._decide(constraint, child))
        except Exception as error:
            answer.set_exception(error)
            answer.exception()  # marks it as retrieved: no request may be waiting any more
        del self._answers[constraint]
        self._queue.ended(client, time.monotonic() - began)
        self._free.append(child)
        self._begin_turns()

    async def _decide(self, constraint: Constraint, child: _Compiling) -> Verdict:
        try:
            # A child may have been killed while it was idle: only a grammar that kills two is at fault.
            verdict: Verdict = (
                await child.compile(constraint)
                or await child.compile(constraint)
                or _refused(constraint, "compiling it needs too much memory or stack")
            )
        except GrammarError as error:
            verdict = _refused(constraint, str(error))
        except InvalidRequest as late:
            return late
        self._keep(constraint, verdict)
        return verdict

    def _keep(self, constraint: Constraint, verdict: Verdict) -> None:
        self._verdicts[constraint] = verdict
        self._kept_chars += _size(constraint, verdict)
        while self._kept_chars > KEPT_CHARS and len(self._verdicts) > 1:
            self._kept_chars -= _size(*self._verdicts.popitem(last=False))


def _size(constraint: Constraint, verdict: Verdict) -> int:
    chars = len(constraint.value) + len(constraint.whitespace)
    return 200 + chars + len(verdict if isinstance(verdict, str) else verdict.message)


def _refused(constraint: Constraint, why: str) -> InvalidRequest:
    return InvalidRequest(f"{constraint.param}: {why}", code="invalid_grammar", param=constraint.param)


# In the child.

_tokenizer: Any = None
_no_tokenizer = ""


def _begin(model_dir: Path, vocab_size: int) -> None:
    global _tokenizer, _no_tokenizer
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES // 2)
    try:
        _tokenizer = load_tokenizer(model_dir, vocab_size)
    except GrammarError as error:
        _no_tokenizer = str(error)


def compile_here(constraint: Constraint) -> str:
    """Returns the grammar of a constraint after a trial on a thread with a small stack.

    Raises:
        GrammarError: it is not valid, or too complex.
    """
    if _tokenizer is None:
        raise GrammarError(_no_tokenizer)
    grammar = to_grammar(constraint)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"a grammar has at most {MAX_GRAMMAR_CHARS} characters, not {len(grammar)}")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _check_patterns(constraint)
            _try_out(grammar)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return grammar


def to_grammar(constraint: Constraint) -> str:
    """Returns llguidance's serialised form. Raises GrammarError for an invalid schema."""
    from llguidance import LLMatcher

    match constraint.kind:
        case "json_schema":
            overrides: Any = constraint.json_options()
            try:
                return LLMatcher.grammar_from_json_schema(constraint.value, overrides=overrides)
            except ValueError as error:
                raise GrammarError(first_line(str(error))) from None
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.value)
        case "choice":
            choices = " | ".join(lark_string(choice) for choice in orjson.loads(constraint.value))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")  # one lexeme, however many
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.value)
        case "llguidance":
            return constraint.value


def lark_string(text: str) -> str:
    """Returns a text as a Lark string literal."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


def json_text(value: Any, param: str) -> str:
    """Serializes a client's value as JSON. Raises InvalidRequest if it is nested too deeply, or has a huge number."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError as error:
        reason = "has an integer of more than 64 bits" if "64-bit" in str(error) else "is nested too deeply"
        raise InvalidRequest(f"'{param}' {reason}", param=param) from None
    if "null" in text and _has_infinity(value):  # as which orjson writes it
        raise InvalidRequest(f"'{param}' has a number beyond double precision, such as 1e400", param=param)
    return text


def _has_infinity(value: Any) -> bool:
    stack = [value]
    while stack:
        match stack.pop():
            case float() as number if math.isinf(number):
                return True
            case dict() as node:
                stack += node.values()
            case list() as entries:
                stack += entries
    return False


def _try_out(grammar: str) -> None:
    """Compiles a grammar and follows it for a few tokens: some grammars grow only while they are used."""
    matcher = compile_grammar(_tokenizer, grammar)
    chosen = random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        if time.thread_time() - began > _TRIAL_S:
            raise GrammarError("it is too complex: computing the allowed tokens takes too long")
        if not mask:
            raise GrammarError("no output can match it")
        if matcher.is_stopped():
            return
        matcher.consume_token(_one_of(mask, chosen))


def _check_patterns(constraint: Constraint) -> None:
    """Refuses objects whose only other names are those of patterns, of which none is left beside `properties`:
    llguidance would allow a comma after the last property, and then nothing. Only llguidance can tell: its compiler is
    used for an object of this kind, whose output is followed to that comma."""
    zero: dict[str, Any] = {"const": 0}
    for node in _closed_with_patterns(constraint):
        names, patterns = list(node["properties"]), node["patternProperties"]
        probe: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": names}
        probe |= {"properties": dict.fromkeys(names, zero), "patternProperties": dict.fromkeys(patterns, zero)}
        grammar = to_grammar(Constraint("json_schema", json_text(probe, ""), "", whitespace=""))
        try:
            matcher = compile_grammar(_tokenizer, grammar)
        except GrammarError:
            continue  # the schema itself has the same error
        prefix = orjson.dumps(dict.fromkeys(names, 0)).decode()[:-1] + ","
        if matcher.consume_tokens(_tokenizer.tokenize_str(prefix)) and not _allows_any(matcher):
            listed = ", ".join(patterns)
            raise GrammarError(f"patternProperties ({listed}) match only names in properties: leave them out")


def _allows_any(matcher: Any) -> bool:
    return any(matcher.compute_bitmask()) and not matcher.is_error()


def _closed_with_patterns(constraint: Constraint) -> Iterator[dict[str, Any]]:
    """The objects with no other names than those of `properties` and `patternProperties`, in a JSON schema or in those
    of a Lark grammar."""
    if "patternProperties" not in constraint.value or constraint.kind not in ("json_schema", "lark"):
        return
    texts = [constraint.value]
    if constraint.kind == "lark":
        texts = [line.partition("%json ")[2] for line in constraint.value.splitlines()]
    stack: list[Any] = []
    for text in texts:
        with contextlib.suppress(orjson.JSONDecodeError):
            stack.append(orjson.loads(text))
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            parts = [node.get(keyword) for keyword in ("properties", "patternProperties")]
            if node.get("additionalProperties") is False and all(isinstance(part, dict) and part for part in parts):
                yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _one_of(mask: int, chosen: random.Random) -> int:
    """Returns the index of one of the set bits."""
    bits = bin(mask)[:1:-1]
    start = bits.find("1", chosen.randrange(len(bits)))
    return start if start >= 0 else bits.find("1")
