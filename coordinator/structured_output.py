"""What an output has to match: compiled to a grammar, or refused, before a request joins the queue.

A hostile grammar can take seconds, gigabytes or the whole process (a deep chain of rules overflows the stack), so it
is compiled in a child process, one at a time: what kills the child, or does not end, is refused, and the child is
started anew. A client has one grammar at a time compiled, and there are two children, so that one client's grammars do
not delay another's. Verdicts are kept, so the same schema is compiled once. Workers then compile the very text that
passed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from baton.core.errors import InvalidRequest, InvariantError, Unavailable
from baton.core.sampling_limits import MAX_GRAMMAR_CHARS
from baton.engine.grammars import STACK_BYTES, GrammarError, compile_grammar, first_line, load_tokenizer
from coordinator.child import Child, ready, start_child
from coordinator.policy.grammar_queue import GrammarQueue

log = logging.getLogger("baton.grammars")

COMPILE_S = 5.0
START_S = 60.0
WAIT_S = 20.0
CHILDREN = 2
CHILD_BYTES = 4 << 30
KEPT_CHARS = 16 << 20
_TRIAL_TOKENS = 16
_TRIAL_S = 0.25  # of processor time for one mask
_WHITESPACE = "[ \\t\\r\\n]{1,32}"
"""Between the parts of JSON: any there is, but never without end."""

Verdict = str | InvalidRequest
"""A grammar in llguidance's serialised form, or why there is none."""
Kind = Literal["json_schema", "regex", "choice", "lark", "llguidance"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`value` is a JSON schema as text, a regular expression, the choices as a JSON array, a Lark grammar, or a grammar
    in llguidance's serialised form. `param` names the client's field, for messages. Of JSON: `lenient` ignores keywords
    of a schema that are not implemented instead of refusing them; `whitespace` is a regular expression of what may
    stand between its parts, empty for nothing."""

    kind: Kind
    value: str
    param: str
    lenient: bool = False
    whitespace: str = _WHITESPACE

    def json_options(self) -> dict[str, Any]:
        """As llguidance's compiler of JSON schemas takes them."""
        options = {"lenient": self.lenient, "whitespace_flexible": bool(self.whitespace)}
        return options | ({"whitespace_pattern": self.whitespace} if self.whitespace else {})


class _Compiling(Child):
    """A process that compiles one grammar at a time."""

    async def compile(self, constraint: Constraint) -> str:
        """Empty where the child has died. Raises GrammarError, and InvalidRequest for what takes too long: on a busy
        machine that may be anything, so it is not kept."""
        executor, loop = self.executor or await self._begun(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_S):
                return await loop.run_in_executor(executor, compile_here, constraint)
        except BrokenProcessPool:
            self.close()
            log.warning("a process that compiles grammars has died; it starts again with the next one")
            return ""
        except TimeoutError:
            self.close()
            raise _refused(constraint, f"compiling it takes over {COMPILE_S:g} s") from None

    async def _begun(self) -> Executor:
        executor = self.started()
        try:
            async with asyncio.timeout(START_S):
                await asyncio.get_running_loop().run_in_executor(executor, ready)
        except (BrokenProcessPool, TimeoutError):
            self.close()
            raise InvariantError("the process that compiles grammars did not start") from None
        return executor


class GrammarCompiler:
    """State: the children, of which the second is there once two clients wanted grammars at the same time, and those
    with nothing to do; whose turn it is, the answers that requests wait for, and the task of each grammar that is being
    compiled; verdicts, least recently used first."""

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
        """The grammar that workers apply, in the turn of the client with this name (GrammarQueue). What nobody waits
        for any more is not compiled.

        Raises:
            InvalidRequest: it is not valid, or too complex; says why.
            QuotaExceeded: too many grammars of this client wait to be compiled.
            Unavailable: others, or those before it of the same client, took too long.
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
        """Ends what is being compiled, and the children, whatever they do."""
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
            raise Unavailable(f"its grammar was not compiled within {WAIT_S:g} s", retry_after_s=1) from None
        finally:
            if not answer.done() and self._queue.leave(client, constraint):
                del self._answers[constraint]

    def _begin_turns(self) -> None:
        """Gives children that have nothing to do what is next."""
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
            answer.exception()  # nobody may be left to take it
        del self._answers[constraint]
        self._queue.ended(client, time.monotonic() - began)
        self._free.append(child)
        self._begin_turns()

    async def _decide(self, constraint: Constraint, child: _Compiling) -> Verdict:
        try:
            # A child may have been killed while it had nothing to do: who kills two is at fault.
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
    """The grammar of a constraint, tried out on a thread with a small stack.

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
    """llguidance's serialised form. Raises GrammarError for a schema that is none."""
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
    """A text as Lark writes it."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


def json_text(value: Any, param: str) -> str:
    """A value of a client as JSON. Raises InvalidRequest for one that is nested too deeply, or has a huge integer."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        what = "has an integer of more than 64 bits" if "64-bit" in str(error) else "is nested too deeply"
        raise InvalidRequest(f"'{param}' {what}", param=param) from None


def _try_out(grammar: str) -> None:
    """Compiles it, and follows it for a few tokens: some grammars only grow while they are used."""
    matcher = compile_grammar(_tokenizer, grammar)
    chosen = random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        if time.thread_time() - began > _TRIAL_S:
            raise GrammarError("it is too complex: what may come next takes too long to find out")
        if not mask:
            raise GrammarError("no output can match it")
        if matcher.is_stopped():
            return
        matcher.consume_token(_one_of(mask, chosen))


def _one_of(mask: int, chosen: random.Random) -> int:
    """One of the set bits."""
    bits = bin(mask)[:1:-1]
    start = bits.find("1", chosen.randrange(len(bits)))
    return start if start >= 0 else bits.find("1")
