"""A sequence on a worker: the tokens of one choice, how many of them are computed, and all else that the worker keeps
about it. It is in the scheduler's `sequences`; queues, the hand-over and the drafts refer to the same object.

On a prefill worker:  WAITING -> PREFILLING -> PREFILLED -> FINISHED
On a decode worker:   RECEIVING -> READY -> RUNNING -> FINISHED; without blocks READY | RUNNING -> PREEMPTED -> RUNNING
                      WAITING -> RUNNING if it computes the prompt, too

PREFILLED lasts from the last computed chunk to the last acknowledgement: the KV stays pinned while it is sent.
Any state may change to FINISHED: clients disconnect, deadlines pass, peers fail.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field, replace
from operator import add

from baton.core.blocks import Holder, KeyChain
from baton.core.errors import InvariantError
from baton.core.events import NO_SPECULATION, NO_STAMPS, SpeculationCounters, StageStamps, TokenEvent
from baton.core.machine import MachineState, Table, handle, to
from baton.core.request import FinishReason, GenerateRequest, SequenceId, TokenLogprob, finish_reason
from baton.core.step import History, Row


class State(MachineState):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    RECEIVING = "receiving"
    READY = "ready"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# Events.


class Started:
    """A prefill worker has allocated its blocks: its first chunk is in the next step."""


class Prefilled:
    """All its tokens are computed, and its KV is pinned while it is sent."""


class KVReceived:
    """All its KV has arrived at a decode worker."""


class Admitted:
    """It joins the batch of running sequences."""


class Preempted:
    """Its blocks were given to another sequence."""


class Finished:
    """It ends on this worker, for whatever reason."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Two counters are stored, `output` and `num_computed`; the rest is derived."""

    request: GenerateRequest
    state: State
    arrived_at: float
    # Order of arrival at this worker.
    number: int = 0
    # The name of its present attempt, and the holder of its blocks, made once because every step reads them.
    id: SequenceId = field(init=False)
    holder: Holder = field(init=False)
    # Starts with the tokens of earlier attempts.
    output: list[int] = field(init=False)
    # Those of the tokens appended since, if the request asks for them.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Positions whose KV is in the blocks.
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    # Columns of the table, from the first on, that are behind the window (baton.core.window): the null block is in the
    # place of their blocks of groups with a window.
    num_dropped: int = 0
    # Dropped blocks that an outstanding step still has in its table.
    retired: tuple[int, ...] = ()
    # The newest outstanding step that computes a row of it.
    step_id: int | None = None
    # Why it ends once that step is complete.
    ending: str | None = None
    # Tokens that the prefill worker did not compute, as far as they are reported.
    cached_tokens: int = 0

    # The prefix cache (baton.core.prefix_cache). Keys of its full blocks, as far as they have been needed.
    block_keys: KeyChain | None = None
    # Whether it may use blocks of the cache; it stores its own in any case.
    reuses_prefix: bool = True
    # Positions that were in the cache when it last got blocks.
    prefix_tokens: int = 0
    # Columns, from the first on, that have been offered to the cache.
    num_offered: int = 0
    # Columns before this one may begin before what was received in groups with a window.
    first_whole: int = 0

    # The worker's end of its hand-over, known to the tier alone: `prefill.handover.HandOver` or
    # `decode.handover.IncomingHandOver`.
    hand_over: object = None

    # On a prefill worker. Whether its blocks are pinned for a hand-over.
    send_pinned: bool = False
    # The step after which the computed positions are complete on every rank.
    computed_step: int = 0
    # Its KV may be damaged and is kept out of the cache.
    kv_suspect: bool = False

    # On the worker that computes its prompt.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    # The sum of the rows' vectors so far, if it is pooled.
    pooled: array[float] | None = None
    started_at: float | None = None
    computed_at: float | None = None

    # On a decode worker. The output index from which tokens are still to be reported: the first event repeats the token
    # that prefill sampled.
    next_emit_index: int = field(init=False)
    received_at: float | None = None
    running_at: float | None = None
    # When the last token, or the KV, arrived.
    last_token_at: float = 0.0
    # It was aborted while KV is being written into its blocks.
    in_flight: bool = False
    # It has the boost of its priority (decode.anti_starvation).
    boosted: bool = False
    # The result of its outstanding row is to be discarded.
    discard_result: bool = False
    # Its end is reported, but an outstanding step still writes into its blocks.
    end_reported: bool = False
    speculation: SpeculationCounters = NO_SPECULATION
    # What the source of its draft tokens keeps of it: decode.speculation.drafts.NgramIndex or DraftKV.
    draft: object = None
    # Decayed numbers of its draft tokens that were accepted, and that were verified (decode.speculation.acceptance).
    accepted_weight: float = 0.0
    verified_weight: float = 0.0

    def __post_init__(self) -> None:
        self.id = self.request.sequence_id
        self.holder = Holder("sequence", self.id)
        self.output = list(self.request.output)
        self.next_emit_index = len(self.output)

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.state.value}, {self.num_computed} of {self.num_tokens} tokens computed>"

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def computes_prompt(self) -> bool:
        """Whether it has no token of this attempt yet: until then its rows report what is asked of the prompt."""
        return len(self.output) == len(self.request.output)

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
            "" if self.request.pooling == "last" and end < self.num_tokens else self.request.pooling,
            self.request.adapter,
        )

    def next_row(self, start: int, end: int) -> Row:
        """Returns the row of positions [start, end), which samples after the last known token, unless it is pooled."""
        sampled = int(end == self.num_tokens and not self.request.pooling)
        return self.row(start, end, num_sampled=sampled, score=self.computes_prompt)

    def row_behind(self, last: Row) -> Row:
        """Returns the row after the outstanding row `last`: the token that `last` samples, 0 until the engine sets it.

        Raises:
            InvariantError: the next sample depends on which token that is, or `last` does not sample exactly one.
        """
        if self.request.sampling.depends_on_history or last.num_sampled != 1:
            raise InvariantError(f"{self.id}: the row after position {last.end - 1} depends on its token")
        index = last.output_index + 1
        history, request = self._history(index), self.request
        return Row(
            self.id, last.end, (0,), self.block_ids, request.sampling, 1, index, history, adapter=request.adapter
        )

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

    def add_pooled(self, part: array[float]) -> None:
        """Adds the vector of one row."""
        self.pooled = part if self.pooled is None else array("d", map(add, self.pooled, part))

    def pooled_vector(self) -> bytes:
        """Returns the pooled vector as float32 in little-endian order.

        Raises:
            InvariantError: no row had a vector.
        """
        if self.pooled is None:
            raise InvariantError(f"{self.id} ends without its pooled vector")
        count = self.num_tokens if self.request.pooling == "mean" else 1
        return struct.pack(f"<{len(self.pooled)}f", *(value / count for value in self.pooled))

    def next_tokens_event(self) -> TokenEvent:
        """Returns the output that is still to be reported by a decode worker; it counts as reported then."""
        first_index, self.next_emit_index = self.next_emit_index, len(self.output)
        logprobs = self.logprobs[first_index - len(self.request.output) :] if self.logprobs else ()
        tokens = tuple(self.output[first_index:])
        of_prompt = tuple(self.prompt_logprobs) if first_index == len(self.request.output) else ()
        speculation = self.speculation if self.speculation.steps else None
        return TokenEvent(self.id, first_index, tokens, tuple(logprobs), of_prompt, self.cached_tokens, speculation)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Which sequences of a decode worker come first: the lowest ranks."""
        return self.request.priority, not self.boosted, self.number

    def prefill_stamps(self) -> StageStamps:
        if self.started_at is None:
            return NO_STAMPS
        prefill_s = 0.0 if self.computed_at is None else self.computed_at - self.started_at
        return StageStamps(queue_s=self.started_at - self.arrived_at, prefill_s=prefill_s)

    def decode_stamps(self, now: float | None) -> StageStamps:
        if self.received_at is None:  # a decode worker computed its prompt, too
            decode_s = 0.0 if now is None or self.computed_at is None else now - self.computed_at
            return replace(self.prefill_stamps(), decode_s=decode_s)
        transfer_s = self.received_at - self.arrived_at
        if self.running_at is None:
            return StageStamps(transfer_s=transfer_s)
        decode_s = 0.0 if now is None else now - self.running_at
        return StageStamps(transfer_s=transfer_s, decode_queue_s=self.running_at - self.received_at, decode_s=decode_s)

    def begin_attempt(self, attempt: int) -> None:
        self.request = replace(self.request, attempt=attempt)
        self.id = self.request.sequence_id
        self.holder = Holder("sequence", self.id)

    # States.

    def on(self, event: Event, now: float = 0.0) -> None:
        """Changes the state; `now` matters only to events whose time is kept. Raises InvariantError if TABLE does not
        list the event for the present state."""
        handle(TABLE, self, event, now)

    def _start(self, event: Started, now: float) -> list[None]:
        self.state, self.started_at = State.PREFILLING, now
        return []

    def _prefilled(self, event: Prefilled, now: float) -> list[None]:
        self.state = State.PREFILLED
        return []

    def _received(self, event: KVReceived, now: float) -> list[None]:
        self.state, self.received_at, self.last_token_at = State.READY, now, now
        return []

    def _admit(self, event: Admitted, now: float) -> list[None]:
        if self.state is State.WAITING:
            self.started_at, self.cached_tokens = now, self.prefix_tokens
        self.state = State.RUNNING
        if self.running_at is None:
            self.running_at = now
        return []

    def _preempt(self, event: Preempted, now: float) -> list[None]:
        self.state = State.PREEMPTED
        return []

    def _finish(self, event: Finished, now: float) -> list[None]:
        self.state = State.FINISHED
        return []


Event = Started | Prefilled | KVReceived | Admitted | Preempted | Finished
_FINISH = to(Sequence._finish, State.FINISHED)
_PREEMPT = to(Sequence._preempt, State.PREEMPTED)

TABLE: Table = {
    (State.WAITING, Started): to(Sequence._start, State.PREFILLING),
    (State.WAITING, Admitted): to(Sequence._admit, State.RUNNING),
    (State.WAITING, Finished): _FINISH,
    (State.PREFILLING, Prefilled): to(Sequence._prefilled, State.PREFILLED),
    (State.PREFILLING, Finished): _FINISH,
    (State.PREFILLED, Finished): _FINISH,
    (State.RECEIVING, KVReceived): to(Sequence._received, State.READY),
    (State.RECEIVING, Finished): _FINISH,
    (State.READY, Admitted): to(Sequence._admit, State.RUNNING),
    (State.READY, Preempted): _PREEMPT,
    (State.READY, Finished): _FINISH,
    (State.RUNNING, Preempted): _PREEMPT,
    (State.RUNNING, Finished): _FINISH,
    (State.PREEMPTED, Admitted): to(Sequence._admit, State.RUNNING),
    (State.PREEMPTED, Finished): _FINISH,
}
