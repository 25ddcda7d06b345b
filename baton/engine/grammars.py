"""Grammars: which tokens may come next in an output that must match a grammar.

    begin(draws) -> forward pass, while threads compute masks -> mask(draw) for each draw

A grammar is in llguidance's serialised form (https://github.com/guidance-ai/llguidance). Its automaton tracks the
output of a sequence: it consumes new tokens, after rolling back to where the output differs from the consumed tokens,
so a resumed sequence, or one whose draft tokens were rejected, needs only its output.

Compiling a grammar and computing a mask take microseconds, but seconds for a hostile grammar: both run on threads,
without holding the GIL. A row whose mask is not ready `WAIT_S` after the forward pass samples nothing in this step and
is computed again in the next one; the other rows are not delayed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from baton.core.request import SamplingParams, SequenceId

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from baton.engine.processors import Draw

log = logging.getLogger("baton.grammars")

WAIT_S = 0.02
THREADS = 2
NICE = 10  # of these threads, so that the compute thread has priority
BUDGET_S = 2.0, 0.002  # CPU time for the masks of one sequence: a base, plus an amount per output token
COMPILED = 16  # compiled grammars cached
MAX_LEXER_STATES = 10_000  # of 1 to 2 KB each, per sequence
STACK_BYTES = 8 << 20  # of these threads; the coordinator first tests a grammar with half of it
Bits = NDArray[np.uint8]
Masks = list[Bits | None]


class GrammarError(Exception):
    """A grammar is invalid, or its output cannot be continued: one line for the client."""


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer:
    """Loads the tokenizer of a model directory. Takes 1 s for 150,000 tokens.

    Raises:
        GrammarError: there is none, or llguidance cannot use it.
    """
    from llguidance import LLTokenizer  # imported here: a process that serves no model need not load it

    path = directory / "tokenizer.json"
    if not path.exists():
        raise GrammarError("structured output needs a tokenizer.json, and the model directory has none")
    try:
        try:
            return LLTokenizer(str(path), n_vocab=vocab_size)
        except ValueError:  # no known EOS token by name: any will do, since `masks` receives the end ids
            special = [token["id"] for token in json.loads(path.read_bytes())["added_tokens"] if token["special"]]
            return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=special[0] if special else vocab_size - 1)
    except Exception as error:  # includes panics of its Rust code
        raise GrammarError(
            f"structured output is not supported with this tokenizer: {first_line(str(error))}"
        ) from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300] or "the grammar is not valid"


class Automaton:
    """The state of a grammar after an output. State: the matcher, and the output that it has consumed."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._eos = tuple(tokenizer.eos_tokens)
        self._consumed: tuple[int, ...] = ()

    def masks(self, output: tuple[int, ...], drafts: tuple[int, ...], ends: tuple[int, ...]) -> Masks:
        """Returns the 1 + len(drafts) masks after the output and after each draft token; None from the first disallowed
        draft token on. Where the tokens so far satisfy the grammar, `ends` are allowed too.

        Raises:
            GrammarError: the grammar does not allow the output, or exceeds a limit.
        """
        matcher, common = self._matcher, _common(self._consumed, output)
        if common < len(self._consumed):
            matcher.rollback(len(self._consumed) - common)
        self._consumed = output
        if common < len(output) and not matcher.consume_tokens(list(output[common:])):
            raise GrammarError(first_line(matcher.get_error()))
        found: Masks = [self._mask(ends)]
        for token in drafts:
            if matcher.try_consume_tokens([token]) != 1:
                break
            found.append(self._mask(ends))
        if len(found) > 1:
            matcher.rollback(len(found) - 1)
        return found + [None] * (1 + len(drafts) - len(found))

    def _mask(self, ends: tuple[int, ...]) -> Bits:
        matcher = self._matcher
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).copy()
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        for token in self._eos:  # the tokenizer's own EOS tokens need not end this request
            bits[token >> 3] &= ~np.uint8(1 << (token & 7))
        if matcher.is_accepting():
            for token in ends:
                bits[token >> 3] |= np.uint8(1 << (token & 7))
        if not bits.any():
            raise GrammarError("the grammar allows no next token")
        return bits


class _Followed:
    """A sequence's automaton, once it is compiled, and the masks requested last."""

    def __init__(self, params: weakref.ref[SamplingParams]) -> None:
        self.params = params
        self.automaton: Automaton | None = None
        self.output: tuple[int, ...] = ()
        self.drafts: tuple[int, ...] = ()
        self.masks: Future[Masks] | None = None
        self.late = False  # whether a wait for the masks has timed out
        self.spent_s = 0.0  # of CPU time

    def answers(self, output: tuple[int, ...], drafts: tuple[int, ...]) -> bool:
        """Whether the requested masks include the one after these tokens."""
        return self.masks is not None and self.output == output and self.drafts[: len(drafts)] == drafts


class Grammars:
    """The automata of sequences, each kept as long as its sampling parameters exist, that is, as long as its sequence.

    `unsampled` maps the sequences without a mask to the error of their grammar, or to an empty text if the mask was
    only late. Without a tokenizer every sequence with a grammar is in it, with `reason`."""

    def __init__(self, tokenizer: LLTokenizer | None, reason: str = "", wait_s: float = WAIT_S) -> None:
        self._reason = reason
        self._wait_s = wait_s
        self._tokenizer: Any = tokenizer
        # Compiled once for all sequences, unless two threads do it concurrently; never called without a tokenizer.
        self._compiled = lru_cache(COMPILED)(partial(compile_grammar, tokenizer))  # type: ignore[arg-type]
        self._threads = None if tokenizer is None else _new_pool()
        self._followed: dict[SequenceId, _Followed] = {}
        self._all_late = False
        self.unsampled: dict[SequenceId, str] = {}

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> Grammars:
        """Uses the tokenizer of a model directory, or none if it cannot be loaded."""
        try:
            return cls(load_tokenizer(directory, vocab_size))
        except GrammarError as error:
            log.warning("%s", error)
            return cls(None, str(error))

    def begin(self, draws: Sequence[Draw]) -> None:
        """Starts computing the masks for the draws of a step; the draws of one sequence are adjacent, with rising
        numbers of drafts."""
        last = {_key(draw): draw for draw in draws if draw.sampling.grammar}
        late = [self._ask(draw).late for draw in last.values()]
        self._all_late = all(late) and all(draw.sampling.grammar for draw in draws)

    def deadline(self) -> float:
        """The deadline for masks requested now, in seconds of the monotonic clock."""
        return time.monotonic() + self._wait_s

    def mask(self, draw: Draw, deadline: float) -> Bits | None:
        """Returns one bit per token, lowest first: whether it may be drawn. None if the draw does not count: after a
        draft token that the grammar does not allow, or if the sequence is `unsampled`."""
        key = _key(draw)
        if key in self.unsampled:
            return None
        if self._threads is None:
            self.unsampled[key] = self._reason or "no tokenizer was loaded"
            return None
        followed = self._ask(draw)
        if followed.masks is None or not followed.answers(_output(draw), draw.drafts):
            self.unsampled[key] = ""
            return None
        # A mask that was late is not waited for again, unless all rows of the step have such a mask.
        wait_s = 0.0 if followed.late and not self._all_late else max(0.0, deadline - time.monotonic())
        try:
            return followed.masks.result(wait_s)[len(draw.drafts)]
        except NotReady:
            followed.late, self.unsampled[key] = True, ""
        except GrammarError as error:
            self.unsampled[key] = str(error)
        return None

    def take_unsampled(self) -> dict[SequenceId, str]:
        """Returns `unsampled` and clears it."""
        taken, self.unsampled = self.unsampled, {}
        return taken

    def _ask(self, draw: Draw) -> _Followed:
        key, output = _key(draw), _output(draw)
        followed = self._followed.get(key)
        if followed is None or followed.params() is not draw.sampling:
            gone = weakref.ref(draw.sampling, lambda ref: self._forget(key, ref))
            followed = self._followed[key] = _Followed(gone)
        busy = followed.masks is not None and not followed.masks.done()
        if self._threads is None:
            return followed
        if not busy and not followed.answers(output, draw.drafts):
            ends = () if draw.history is None else draw.history.end_token_ids
            followed.output, followed.drafts, followed.late = output, draw.drafts, False
            followed.masks = self._threads.submit(self._compute, followed, draw.sampling.grammar, ends)
        return followed

    def _compute(self, followed: _Followed, grammar: str, ends: tuple[int, ...]) -> Masks:
        """Computes, on a thread, the masks for the output and drafts of `followed`, which do not change meanwhile."""
        began = time.thread_time()
        try:
            if followed.automaton is None:
                followed.automaton = Automaton(self._tokenizer, self._compiled(grammar).deep_copy())
            return followed.automaton.masks(followed.output, followed.drafts, ends)
        except GrammarError:
            followed.automaton = None  # its error is permanent; a draft model's next output may differ
            raise
        finally:
            followed.spent_s += time.thread_time() - began
            in_all, each = BUDGET_S
            if followed.spent_s > in_all + each * len(followed.output):
                raise GrammarError("it is too complex: computing the allowed next tokens takes too long")

    def _forget(self, key: SequenceId, ref: weakref.ref[SamplingParams]) -> None:
        followed = self._followed.get(key)
        if followed is not None and followed.params is ref:
            del self._followed[key]
            if followed.masks is not None:
                followed.masks.cancel()  # unless it has begun


def _new_pool() -> ThreadPoolExecutor:
    """Returns a pool whose threads have all started, so that each has a stack of STACK_BYTES."""
    begun = threading.Barrier(THREADS)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar", initializer=_yield_to_others)
    usual = threading.stack_size(STACK_BYTES)
    try:
        for waiting in [pool.submit(begun.wait, 60.0) for _ in range(THREADS)]:
            waiting.result()
    finally:
        threading.stack_size(usual)
    return pool


def _key(draw: Draw) -> SequenceId:
    return draw.sequence_id or SequenceId("")


def _output(draw: Draw) -> tuple[int, ...]:
    return () if draw.history is None else draw.history.output


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix of two outputs."""
    if other[: len(one)] == one:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _yield_to_others() -> None:
    if sys.platform == "linux":  # elsewhere the priority is per process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
