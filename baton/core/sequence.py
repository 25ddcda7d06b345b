"""A sequence on a worker: one request's tokens, how many of them are computed, and the legal state transitions.

On a prefill worker:  WAITING -> PREFILLING -> PREFILLED -> FINISHED
On a decode worker:   RECEIVING -> READY -> RUNNING -> FINISHED; without blocks READY | RUNNING -> PREEMPTED -> RUNNING

PREFILLED lasts from the last computed chunk to the last acknowledgement: the KV stays pinned while it is sent.
Any state may change to FINISHED: clients disconnect, deadlines pass, peers fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.core.errors import InvariantError
from baton.core.events import SpeculationCounters, TokenEvent
from baton.core.request import FinishReason, GenerateRequest, SequenceId, TokenLogprob, finish_reason
from baton.core.step import History, Row


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    RECEIVING = "receiving"
    READY = "ready"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.PREFILLED, State.FINISHED}),
    State.PREFILLED: frozenset({State.FINISHED}),
    State.RECEIVING: frozenset({State.READY, State.FINISHED}),
    State.READY: frozenset({State.RUNNING, State.PREEMPTED, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Two counters are stored, `output` and `num_computed`; the rest is derived.

    `output` starts with the tokens of earlier attempts; `logprobs` holds those of the tokens appended since, if the
    request asks for them. `num_computed` counts positions whose KV is in the blocks. `cached_tokens` is how many tokens
    the prefill worker did not compute, if reported. `step_id` is the outstanding step that computes a row of the
    sequence, or None. `ending` is the reason why the sequence ends once that step is complete, or None.
    """

    request: GenerateRequest
    state: State
    arrived_at: float
    id: SequenceId = field(init=False)  # the request's, made once because every step reads it
    output: list[int] = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    step_id: int | None = None
    ending: str | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.sequence_id
        self.output = list(self.request.output)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the token ids at positions [start, end) of prompt + output."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        if start >= len(prompt):
            return tuple(self.output[start - len(prompt) : end - len(prompt)])
        return prompt[start:] + tuple(self.output[: end - len(prompt)])

    def row(self, start: int, end: int, *, num_sampled: int, drafts: tuple[int, ...] = (), score: bool = False) -> Row:
        """Returns the row that computes positions [start, end) and then `drafts`, draft tokens for the next positions,
        and samples at the last `num_sampled` positions: at end - 1 and at each draft, or nowhere. With `score` it also
        reports the prompt log-probabilities that the request asks for."""
        return Row(
            self.id,
            start,
            self.tokens(start, end) + drafts,
            self.block_ids,
            self.request.sampling,
            num_sampled,
            len(self.output),
            self._history(len(self.output)) if num_sampled else None,
            self._scored(start, end) if score else (),
        )

    def row_behind(self, last: Row) -> Row:
        """Returns the row after the outstanding row `last`: the token that `last` samples, 0 until the engine sets it.

        Raises:
            InvariantError: the next sample depends on which token that is, or `last` does not sample exactly one.
        """
        if self.request.sampling.depends_on_history or last.num_sampled != 1:
            raise InvariantError(f"{self.id}: the row after position {last.end - 1} depends on its token")
        index = last.output_index + 1
        history = self._history(index)
        return Row(self.id, last.end, (0,), self.block_ids, self.request.sampling, 1, index, history)

    def _history(self, index: int) -> History | None:
        """Returns what sampling output `index` depends on, or None."""
        params = self.request.sampling
        short = index < params.min_tokens
        if params.depends_on_history:
            output = tuple(self.output)
        elif short:
            output = ()
        else:
            return None
        ends = self.request.end_token_ids if short or params.grammar else ()
        return History(self.request.prompt, output, ends, self.request.tenant)

    def _scored(self, start: int, end: int) -> tuple[int, ...]:
        if self.request.sampling.prompt_logprobs is None:
            return ()
        return self.request.prompt[start + 1 : end + 1]

    def append(self, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Appends a sampled token and returns why the sequence ends with it, or None."""
        self.output.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        return finish_reason(self.request, len(self.output), token)

    def token_event(self, first_index: int, speculation: SpeculationCounters | None = None) -> TokenEvent:
        """Returns the output from `first_index` on, as an event."""
        logprobs = self.logprobs[first_index - len(self.request.output) :] if self.logprobs else ()
        tokens = tuple(self.output[first_index:])
        return TokenEvent(self.id, first_index, tokens, tuple(logprobs), (), self.cached_tokens, speculation)

    def move(self, state: State) -> None:
        """Changes to `state`.

        Raises:
            InvariantError: LEGAL_MOVES does not allow it.
        """
        if state not in LEGAL_MOVES[self.state]:
            raise InvariantError(f"sequence {self.id} cannot go from {self.state.value} to {state.value}")
        self.state = state
