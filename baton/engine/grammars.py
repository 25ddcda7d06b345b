"""Grammars: which tokens may come next in an output that has to match one.

    begin(draws) -> forward pass, while threads compute masks -> mask(draw) for each draw

A grammar is llguidance's serialised form (https://github.com/guidance-ai/llguidance). Its automaton follows a sequence:
it consumes what the output has beyond what it knows and rolls back where the output differs, so a resumed sequence, or
one whose draft tokens were rejected, needs no more than its output.

Compiling a grammar and computing a mask take microseconds, and of a hostile grammar seconds: both run on threads, and
hold no lock of the interpreter. A row whose mask is not there `WAIT_S` after the forward pass samples nothing in this
step and is computed again in the next one; the other rows go on.
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
NICE = 10  # of these threads, beside the one that computes steps
BUDGET_S = 2.0, 0.002  # of processor time for the masks of one sequence: in all, and for each token more
COMPILED = 16  # grammars kept
MAX_LEXER_STATES = 10_000  # of 1 to 2 KB each, in every sequence
STACK_BYTES = 8 << 20  # of these threads; a grammar is tried out on half of it before a worker gets it
Bits = NDArray[np.uint8]
Masks = list[Bits | None]


class GrammarError(Exception):
    """A grammar is not valid, or cannot go on: one line for the client."""


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a model directory. Takes 1 s for 150,000 tokens.

    Raises:
        GrammarError: there is none, or none that llguidance can use.
    """
    from llguidance import LLTokenizer  # here: a process that serves no model need not load it

    path = directory / "tokenizer.json"
    if not path.exists():
        raise GrammarError("structured output needs a tokenizer.json, and the model directory has none")
    try:
        try:
            return LLTokenizer(str(path), n_vocab=vocab_size)
        except ValueError:  # it knows no end of sequence by name: any will do, since `masks` gets the ids that end
            special = [token["id"] for token in json.loads(path.read_bytes())["added_tokens"] if token["special"]]
            return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=special[0] if special else vocab_size - 1)
    except Exception as error:  # what its Rust code panics with, too
        raise GrammarError(f"structured output cannot be had with this tokenizer: {first_line(str(error))}") from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300] or "the grammar is not valid"


class Automaton:
    """A grammar's state behind an output. State: the matcher, and the output that it has consumed."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._eos = tuple(tokenizer.eos_tokens)
        self._consumed: tuple[int, ...] = ()

    def masks(self, output: tuple[int, ...], drafts: tuple[int, ...], ends: tuple[int, ...]) -> Masks:
        """The masks behind the output and each of its draft tokens, 1 + len(drafts) of them; None behind a draft token
        that the grammar does not allow. Where the grammar is satisfied, `ends` may come too.

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
        for token in self._eos:  # what the tokenizer's file takes for an end need not be one of this request
            bits[token >> 3] &= ~np.uint8(1 << (token & 7))
        if matcher.is_accepting():
            for token in ends:
                bits[token >> 3] |= np.uint8(1 << (token & 7))
        if not bits.any():
            raise GrammarError("the grammar allows no token here")
        return bits


class _Followed:
    """A sequence's automaton, once it is compiled, and the masks asked for last."""

    def __init__(self, params: weakref.ref[SamplingParams]) -> None:
        self.params = params
        self.automaton: Automaton | None = None
        self.output: tuple[int, ...] = ()
        self.drafts: tuple[int, ...] = ()
        self.masks: Future[Masks] | None = None
        self.late = False  # whether it was waited for once
        self.spent_s = 0.0  # of processor time

    def answers(self, output: tuple[int, ...], drafts: tuple[int, ...]) -> bool:
        """Whether the masks asked for have the one behind these tokens."""
        return self.masks is not None and self.output == output and self.drafts[: len(drafts)] == drafts


class Grammars:
    """The automata of sequences, each kept as long as its sampling parameters exist, that is as its sequence.

    `unsampled` are the sequences whose mask was not there: with what is wrong with their grammar, or with an empty
    text where it was only late. Without a tokenizer all are, for the reason given."""

    def __init__(self, tokenizer: LLTokenizer | None, reason: str = "", wait_s: float = WAIT_S) -> None:
        self._reason = reason
        self._wait_s = wait_s
        self._tokenizer: Any = tokenizer
        # Once for all sequences, unless two threads come to it at the same moment; never without a tokenizer.
        self._compiled = lru_cache(COMPILED)(partial(compile_grammar, tokenizer))  # type: ignore[arg-type]
        self._threads = None if tokenizer is None else _new_pool()
        self._followed: dict[SequenceId, _Followed] = {}
        self._all_late = False
        self.unsampled: dict[SequenceId, str] = {}

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> Grammars:
        """With the tokenizer of a model directory, or without one."""
        try:
            return cls(load_tokenizer(directory, vocab_size))
        except GrammarError as error:
            log.warning("%s", error)
            return cls(None, str(error))

    def begin(self, draws: Sequence[Draw]) -> None:
        """Starts computing the masks of the draws of a step; those of one sequence follow each other, with ever more
        drafts."""
        last = {_key(draw): draw for draw in draws if draw.sampling.grammar}
        late = [self._ask(draw).late for draw in last.values()]
        self._all_late = all(late) and all(draw.sampling.grammar for draw in draws)

    def deadline(self) -> float:
        """By when masks that are asked for now have to be there, in seconds of the monotonic clock."""
        return time.monotonic() + self._wait_s

    def mask(self, draw: Draw, deadline: float) -> Bits | None:
        """One bit for each token, lowest first: whether it may be drawn. None where it does not matter which is: behind
        a draft token that is wrong, and where the sequence is `unsampled`."""
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
        # What was late once is not waited for again while others have something to do.
        wait_s = 0.0 if followed.late and not self._all_late else max(0.0, deadline - time.monotonic())
        try:
            return followed.masks.result(wait_s)[len(draw.drafts)]
        except NotReady:
            followed.late, self.unsampled[key] = True, ""
        except GrammarError as error:
            self.unsampled[key] = str(error)
        return None

    def take_unsampled(self) -> dict[SequenceId, str]:
        """`unsampled`, which is empty afterwards."""
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
        """On a thread: the masks behind the output and drafts of `followed`, which stay as they are meanwhile."""
        began = time.thread_time()
        try:
            if followed.automaton is None:
                followed.automaton = Automaton(self._tokenizer, self._compiled(grammar).deep_copy())
            return followed.automaton.masks(followed.output, followed.drafts, ends)
        except GrammarError:
            followed.automaton = None  # an error stays in it; a draft model's output may be another one next time
            raise
        finally:
            followed.spent_s += time.thread_time() - began
            in_all, each = BUDGET_S
            if followed.spent_s > in_all + each * len(followed.output):
                raise GrammarError("it is too complex: what may come next takes too long to find out")

    def _forget(self, key: SequenceId, ref: weakref.ref[SamplingParams]) -> None:
        followed = self._followed.get(key)
        if followed is not None and followed.params is ref:
            del self._followed[key]
            if followed.masks is not None:
                followed.masks.cancel()  # unless it has begun


def _new_pool() -> ThreadPoolExecutor:
    """Its threads all have their stack already."""
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
    """How many tokens two outputs begin with alike."""
    if other[: len(one)] == one:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _yield_to_others() -> None:
    if sys.platform == "linux":  # elsewhere it is the whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
