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

import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import History

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from baton.engine.processors import Draw

WAIT_S = 0.02
THREADS = 4
NO_TOKENIZER = "this worker's model directory has no tokenizer.json, which structured output needs"
Bits = NDArray[np.uint8]
Masks = list[Bits | None]


class GrammarError(Exception):
    """A grammar is not valid, or cannot go on: one line for the client."""


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer | None:
    """The tokenizer of a model directory, None without tokenizer.json. Takes 1 s for 150,000 tokens.

    Raises:
        StartupError: the file is damaged.
    """
    from llguidance import LLTokenizer  # here: a process that serves no model need not load it

    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size)
    except Exception as error:  # llguidance raises ValueError, and what its Rust code panics with
        raise StartupError(f"{path.name}: llguidance cannot use it: {str(error)[:200]}") from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300] or "the grammar is not valid"


class Automaton:
    """A grammar's state behind an output. State: the matcher, and the output that it has consumed."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """Raises GrammarError."""
        self._matcher = compile_grammar(tokenizer, grammar)
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

    def answers(self, output: tuple[int, ...], drafts: tuple[int, ...]) -> bool:
        """Whether the masks asked for have the one behind these tokens."""
        return self.masks is not None and self.output == output and self.drafts[: len(drafts)] == drafts


class Grammars:
    """The automata of sequences, each kept as long as its sampling parameters exist, that is as its sequence.

    `unsampled` are the sequences whose mask was not there: with what is wrong with their grammar, or with an empty
    text where it was only late."""

    def __init__(self, tokenizer: LLTokenizer | None, wait_s: float = WAIT_S) -> None:
        self._tokenizer = tokenizer
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._followed: dict[SequenceId, _Followed] = {}
        self.unsampled: dict[SequenceId, str] = {}

    def begin(self, draws: Iterable[Draw]) -> None:
        """Starts computing the masks of draws; those of one sequence follow each other, with ever more drafts."""
        last = {_key(draw): draw for draw in draws if draw.sampling.grammar}
        for draw in last.values():
            self._ask(draw)

    def deadline(self) -> float:
        """By when masks that are asked for now have to be there, in seconds of the monotonic clock."""
        return time.monotonic() + self._wait_s

    def mask(self, draw: Draw, deadline: float) -> Bits | None:
        """One bit for each token, lowest first: whether it may be drawn. None where it does not matter which is: behind
        a draft token that is wrong, and where the sequence is `unsampled`."""
        key = _key(draw)
        if key in self.unsampled:
            return None
        if self._tokenizer is None:
            self.unsampled[key] = NO_TOKENIZER
            return None
        followed = self._ask(draw)
        if followed.masks is None or not followed.answers(_output(draw), draw.drafts):
            self.unsampled[key] = ""
            return None
        try:
            return followed.masks.result(max(0.0, deadline - time.monotonic()))[len(draw.drafts)]
        except NotReady:
            self.unsampled[key] = ""
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
        if self._tokenizer is not None and not busy and not followed.answers(output, draw.drafts):
            ends = () if draw.history is None else draw.history.end_token_ids
            followed.output, followed.drafts = output, draw.drafts
            followed.masks = self._threads.submit(
                _compute, self._tokenizer, followed, draw.sampling.grammar, output, draw.drafts, ends
            )
        return followed

    def _forget(self, key: SequenceId, ref: weakref.ref[SamplingParams]) -> None:
        followed = self._followed.get(key)
        if followed is not None and followed.params is ref:
            del self._followed[key]


def _compute(
    tokenizer: LLTokenizer,
    followed: _Followed,
    grammar: str,
    output: tuple[int, ...],
    drafts: tuple[int, ...],
    ends: tuple[int, ...],
) -> Masks:
    if followed.automaton is None:
        followed.automaton = Automaton(tokenizer, grammar)
    return followed.automaton.masks(output, drafts, ends)


def _key(draw: Draw) -> SequenceId:
    return draw.sequence_id or SequenceId("")


def _output(draw: Draw) -> tuple[int, ...]:
    history: History | None = draw.history
    return () if history is None else history.output


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two outputs begin with alike."""
    if other[: len(one)] == one:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
