"""What an output has to match: compiled to a grammar, or refused, before a request is admitted.

A hostile grammar can take seconds, gigabytes or the whole process (a deep chain of rules overflows the stack), so it
is compiled in a child process, one at a time: what kills the child, or does not end, is refused, and the child is
started anew. Verdicts are kept, so the same schema is compiled once. Workers then compile the very text that passed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from baton.core.errors import InvalidRequest, InvariantError, Unavailable
from baton.core.sampling_limits import MAX_GRAMMAR_CHARS
from baton.engine.grammars import GrammarError, compile_grammar, first_line, load_tokenizer
from baton.process import die_with_parent

COMPILE_S = 5.0
START_S = 60.0
WAIT_S = 20.0
MAX_WAITING = 64
CHILD_BYTES = 4 << 30
STACK_BYTES = 4 << 20  # half of what a worker's threads have
KEPT_CHARS = 16 << 20
_TRIAL_TOKENS = 16
_TRIAL_S = 0.25  # of processor time for one mask
_WHITESPACE = "[ \\t\\r\\n]{1,32}"
"""Between the parts of JSON: any there is, but never without end."""

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


class GrammarCompiler:
    """State: the child, once a grammar has come; verdicts, least recently used first; and who waits for the child."""

    def __init__(self, model_dir: Path, vocab_size: int, start: Callable[[], Executor] | None = None) -> None:
        self._start = start or (lambda: _child(model_dir, vocab_size))
        self._executor: Executor | None = None
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0
        self._verdicts: OrderedDict[Constraint, str | InvalidRequest] = OrderedDict()
        self._kept_chars = 0

    async def compile(self, constraint: Constraint) -> str:
        """The grammar that workers apply.

        Raises:
            InvalidRequest: it is not valid, or too complex; says why.
            Unavailable: too many others wait to be compiled.
        """
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            verdict = await self._ask(constraint)
            self._keep(constraint, verdict)
        else:
            self._verdicts.move_to_end(constraint)
        if isinstance(verdict, InvalidRequest):
            raise InvalidRequest(verdict.message, code=verdict.code, param=constraint.param)
        return verdict

    def close(self) -> None:
        """Kills the child, whatever it does."""
        executor, self._executor = self._executor, None
        if executor is not None:
            processes = list((getattr(executor, "_processes", None) or {}).values())
            executor.shutdown(wait=False)
            for process in processes:
                process.kill()

    async def _ask(self, constraint: Constraint) -> str | InvalidRequest:
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many grammars wait to be compiled", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise Unavailable("other grammars take long to compile", retry_after_s=1) from None
        finally:
            self._waiting -= 1
        try:
            return await self._compile(constraint)
        finally:
            self._one_at_a_time.release()

    async def _compile(self, constraint: Constraint) -> str | InvalidRequest:
        loop = asyncio.get_running_loop()
        if self._executor is None:
            self._executor = self._start()
            try:
                async with asyncio.timeout(START_S):
                    await loop.run_in_executor(self._executor, _ready)
            except (BrokenProcessPool, TimeoutError):
                self.close()
                raise InvariantError("the process that compiles grammars did not start") from None
        try:
            async with asyncio.timeout(COMPILE_S):
                return await loop.run_in_executor(self._executor, compile_here, constraint)
        except BrokenProcessPool:
            self.close()
            return _refused(constraint, "compiling it needs too much memory or stack")
        except TimeoutError:
            self.close()
            return _refused(constraint, f"compiling it takes over {COMPILE_S:g} s")
        except asyncio.CancelledError:
            self.close()  # the client left: what it asked for must not hold up others
            raise
        except GrammarError as error:
            return _refused(constraint, str(error))

    def _keep(self, constraint: Constraint, verdict: str | InvalidRequest) -> None:
        self._verdicts[constraint] = verdict
        self._kept_chars += _size(constraint, verdict)
        while self._kept_chars > KEPT_CHARS and len(self._verdicts) > 1:
            self._kept_chars -= _size(*self._verdicts.popitem(last=False))


def _size(constraint: Constraint, verdict: str | InvalidRequest) -> int:
    return 200 + len(constraint.value) + len(verdict if isinstance(verdict, str) else verdict.message)


def _refused(constraint: Constraint, why: str) -> InvalidRequest:
    return InvalidRequest(f"{constraint.param}: {why}", code="invalid_grammar", param=constraint.param)


# In the child.

_tokenizer: Any = None


def _child(model_dir: Path, vocab_size: int) -> Executor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_begin, initargs=(os.getpid(), model_dir, vocab_size))


def _begin(coordinator: int, model_dir: Path, vocab_size: int) -> None:
    global _tokenizer
    die_with_parent(coordinator)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    _tokenizer = load_tokenizer(model_dir, vocab_size)


def _ready() -> None:
    """Answers when the child has begun."""


def compile_here(constraint: Constraint) -> str:
    """The grammar of a constraint, tried out on a thread with a small stack.

    Raises:
        GrammarError: it is not valid, or too complex.
    """
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
            overrides: Any = {"lenient": constraint.lenient, "whitespace_flexible": bool(constraint.whitespace)}
            if constraint.whitespace:
                overrides["whitespace_pattern"] = constraint.whitespace
            try:
                return LLMatcher.grammar_from_json_schema(constraint.value, overrides=overrides)
            except ValueError as error:
                raise GrammarError(first_line(str(error))) from None
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.value)
        case "choice":
            choices = " | ".join(_lark_string(choice) for choice in orjson.loads(constraint.value))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")  # one lexeme, however many
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.value)
        case "llguidance":
            return constraint.value


def _lark_string(text: str) -> str:
    return orjson.dumps(text).decode()


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
