"""The masks of a step's rows with a grammar, computed by other processes meanwhile.

    begin(draws) -> forward pass, while processes compute masks -> mask(draw) for each draw

Computing a mask takes microseconds, but any time for a hostile grammar (`MaskProcesses`). A row whose mask is not ready
`WAIT_S` after the forward pass samples nothing in this step and is computed again in the next one; the other rows are
not delayed.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotReady
from pathlib import Path

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Draw, GrammarFailure
from baton.engine.grammar_automaton import Bits, GrammarError, GrammarTooComplex, Masks, check_tokenizer
from baton.engine.mask_processes import AutomatonHandle, MaskJob, MaskProcesses

log = logging.getLogger("baton.grammars")

WAIT_S = 0.02
BUDGET_S = 2.0, 0.002  # CPU time for the masks of one sequence: a base, plus an amount per output token


class _Followed:
    """A sequence's automaton, and the masks requested last."""

    def __init__(self, params: weakref.ref[SamplingParams], automaton: AutomatonHandle) -> None:
        self.params = params
        self.automaton = automaton
        self.output: tuple[int, ...] = ()
        self.drafts: tuple[int, ...] = ()
        self.masks: Future[Masks] | None = None
        self.late = False  # whether a wait for the masks has timed out

    def answers(self, output: tuple[int, ...], drafts: tuple[int, ...]) -> bool:
        """Whether the requested masks include the one after these tokens."""
        return self.masks is not None and self.output == output and self.drafts[: len(drafts)] == drafts


class Grammars:
    """The automata of sequences, each kept as long as its sampling parameters exist, that is, as long as its sequence.

    `unsampled` maps the sequences without a mask to the error of their grammar, or to None if the mask was only late.
    Without processes every sequence with a grammar is in it, with `reason`."""

    def __init__(self, processes: MaskProcesses | None, reason: str = "", wait_s: float = WAIT_S) -> None:
        self._reason = reason
        self._wait_s = wait_s
        self.processes = processes
        self._followed: dict[SequenceId, _Followed] = {}
        self._all_late = False
        self.unsampled: dict[SequenceId, GrammarFailure | None] = {}

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> Grammars:
        """Uses the tokenizer of a model directory, or none if there is none."""
        try:
            check_tokenizer(directory)
        except GrammarError as error:
            log.warning("%s", error)
            return cls(None, str(error))
        return cls(MaskProcesses(directory, vocab_size))

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
        if self.processes is None:
            self.unsampled[key] = GrammarFailure(self._reason or "no tokenizer was loaded")
            return None
        followed = self._ask(draw)
        if followed.masks is None or not followed.answers(_output(draw), draw.drafts):
            self.unsampled[key] = None
            return None
        # A mask that was late is not waited for again, unless all rows of the step have such a mask.
        wait_s = 0.0 if followed.late and not self._all_late else max(0.0, deadline - time.monotonic())
        try:
            return followed.masks.result(wait_s)[len(draw.drafts)]
        except NotReady:
            followed.late, self.unsampled[key] = True, None
        except GrammarError as error:
            self.unsampled[key] = GrammarFailure(str(error), isinstance(error, GrammarTooComplex))
        return None

    def take_unsampled(self) -> dict[SequenceId, GrammarFailure | None]:
        """Returns `unsampled` and clears it."""
        taken, self.unsampled = self.unsampled, {}
        return taken

    def _ask(self, draw: Draw) -> _Followed:
        key, output = _key(draw), _output(draw)
        followed = self._followed.get(key)
        if followed is None or followed.params() is not draw.sampling:
            reference = weakref.ref(draw.sampling, lambda ref: self._forget(key, ref))
            tenant = "" if draw.history is None else draw.history.tenant
            automaton = AutomatonHandle(draw.sampling.grammar, tenant or draw.sampling.grammar)
            followed = self._followed[key] = _Followed(reference, automaton)
        busy = followed.masks is not None and not followed.masks.done()
        if self.processes is not None and not busy and not followed.answers(output, draw.drafts):
            followed.output, followed.drafts, followed.late = output, draw.drafts, False
            ends = () if draw.history is None else draw.history.end_token_ids
            base, each = BUDGET_S
            left_s = base + each * len(output) - followed.automaton.spent_s
            job = MaskJob(followed.automaton, output, draw.drafts, ends, left_s)
            followed.masks = job.future
            if left_s > 0:
                self.processes.submit(job)
            else:
                reason = "it is too complex: computing the allowed next tokens takes too long"
                job.future.set_exception(GrammarTooComplex(reason))
        return followed

    def _forget(self, key: SequenceId, ref: weakref.ref[SamplingParams]) -> None:
        followed = self._followed.get(key)
        if followed is not None and followed.params is ref:
            del self._followed[key]
            if followed.masks is not None:
                followed.masks.cancel()  # unless it has begun
            if self.processes is not None:
                self.processes.forget(followed.automaton)


def _key(draw: Draw) -> SequenceId:
    return draw.sequence_id or SequenceId("")


def _output(draw: Draw) -> tuple[int, ...]:
    return () if draw.history is None else draw.history.output
