"""A model whose next token is a hash of its prefix, computed through the paged KV: so every token can be checked.

The KV of a position is the hash of the tokens up to it, computed from the KV of the position before, one value for each
layer and head. A sequence continues correctly only if its blocks hold its own KV: a block that was freed too early,
shared with another tenant, or received incompletely leads to other tokens. A token depends on everything that sampling
may depend on: hash, seed, output index, the output before it (penalties), and the tokens that may not end it yet. With
a window, all positions in it are read.

Stands for baton/engine, and `pack` and `store` for baton/transfer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.edge_orders import Part
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SamplingParams, TokenLogprob, finish_reason
from baton.core.reshard import EdgePlan, local_heads
from baton.core.step import Row, StepOutcome, StepPlan

VOCABULARY = 40
VECTOR_VALUES = 1 << 12
EOS = 0
_PRIME = (1 << 31) - 1
Payload = list[list[int]]
"""For each token of a part the values of its layers and heads, in the order of the edge's slices."""


class SimEngine(Protocol):
    """What a simulated worker computes steps with."""

    def step(self, plan: StepPlan) -> StepOutcome:
        """Computes all rows of a plan."""
        ...

    def first_layers(self, plan: StepPlan, layers: int) -> None:
        """Computes the first `layers` layers of a plan whose step follows: their KV may be read from now on."""
        ...

    def pack(self, part: Part, plan: EdgePlan) -> Payload: ...

    def store(self, part: Part, plan: EdgePlan, payload: Payload) -> None: ...


def _mix(state: int, token: int) -> int:
    return (state * 48271 + token * 69621 + 11) % _PRIME


def root(request: GenerateRequest) -> int:
    """The hash before the first token. It differs between tenants and salts, whose KV is never shared."""
    state = 1
    for letter in f"{request.tenant}/{request.cache_salt}":
        state = _mix(state, ord(letter))
    return state


def sample(state: int, sampling: SamplingParams, index: int, output: Sequence[int] | None, ends: Sequence[int]) -> int:
    """Samples output `index` after a prefix with hash `state`. `output`: all output before it, if penalties need it."""
    drawn = state + sampling.seed * 7919 + index * 104729
    if output is not None:
        for token in output:
            drawn = _mix(drawn, token)
    token = drawn % _PRIME % VOCABULARY
    while index < sampling.min_tokens and token in ends:
        token = (token + 1) % VOCABULARY
    return token


def logprob(state: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -float((state + token * 31) % 997), 1)


def expected(request: GenerateRequest) -> tuple[list[int], list[TokenLogprob]]:
    """Returns the output of a request, and its log-probabilities, as one undisturbed computation has them."""
    if request.pooling:
        return [], []
    state, sampling = root(request), request.sampling
    for token in request.prompt:
        state = _mix(state, token)
    output: list[int] = []
    scores: list[TokenLogprob] = []
    while True:
        before = output if sampling.depends_on_history else None
        token = sample(state, sampling, len(output), before, request.end_token_ids)
        scores.append(logprob(state, token))
        output.append(token)
        if finish_reason(request, len(output), token) is not None:
            return output, scores
        state = _mix(state, token)


def expected_vector(request: GenerateRequest) -> bytes:
    """Returns the vector of a request with `pooling`."""
    state, values = root(request), []
    for token in request.prompt:
        state = _mix(state, token)
        values.append(state % VECTOR_VALUES)
    return struct.pack("<f", values[-1] if request.pooling == "last" else sum(values) / len(values))


def expected_prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob, ...]:
    state, scores = root(request), []
    for token, following in zip(request.prompt, request.prompt[1:], strict=False):
        state = _mix(state, token)
        scores.append(logprob(state, following))
    return tuple(scores)


class _Slots(dict[int, list[int]]):
    """The KV of every slot (block x position in it), one value per layer and head. Few slots of a pool are ever used,
    and lists for all would be a tenth of a run."""

    def __init__(self, count: int, width: int) -> None:
        self._count, self._width = count, width

    def __missing__(self, index: int) -> list[int]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        made = self[index] = [0] * self._width
        return made


class HashModel:
    """A model whose next token is a hash of its prefix, read through the paged KV. `request_of` returns the request of
    an id; `predecessors` has the hash before each hash that any model of the cluster computed, if layers have a window;
    the share `draft_accuracy` of draft tokens is right."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        request_of: Callable[[str], GenerateRequest],
        predecessors: dict[int, int],
        *,
        tensor_parallel: int = 1,
        draft_accuracy: float = 0.7,
    ) -> None:
        self.layout = layout
        self._heads = layout.layers[0].num_kv_heads
        self._width = self._heads * len(layout.layers)
        self._slots = _Slots(num_blocks * layout.block_size, self._width)
        self._request_of, self._predecessors = request_of, predecessors
        self._window = layout.layers[0].window
        self._tensor_parallel = tensor_parallel
        self._draft_accuracy = draft_accuracy
        self._sampled: tuple[tuple[int, ...], ...] = ()  # by the last step, for one that was planned ahead of them

    def step(self, plan: StepPlan) -> StepOutcome:
        draft_tokens = self._draft_tokens(plan)
        rows = plan.with_draft_tokens(draft_tokens).rows if draft_tokens else plan.rows
        if plan.token_sources:
            sources = zip(rows, plan.token_sources, strict=True)
            rows = tuple(r if s < 0 else _with_token(r, self._sampled[s][0]) for r, s in sources)
        sampled, scores, scored = [], [], []
        pooled = {index: self._pooled(row) for index, row in enumerate(rows) if row.pooling}
        for row in rows:
            tokens, logprobs, prompt = self._row(row, self._width)
            sampled.append(tokens)
            scores.append(logprobs)
            scored.append(prompt)
        self._sampled = tuple(sampled)
        return StepOutcome(
            plan.step_id,
            self._sampled,
            logprobs=tuple(scores) if any(scores) else (),
            scored=tuple(scored) if any(scored) else (),
            draft_tokens=draft_tokens,
            pooled=pooled,
        )

    def _pooled(self, row: Row) -> array[float]:
        """Returns the vector of a row, from the KV before it and its tokens."""
        state = self._before(row)
        total, last = 0, 0
        for token in row.tokens:
            state = _mix(state, token)
            last = state % VECTOR_VALUES
            total += last
        return array("d", [last if row.pooling == "last" else total])

    def _before(self, row: Row) -> int:
        """Returns the hash of the tokens before a row."""
        request = self._request_of(row.sequence_id.request_id)
        if row.start == 0:
            return root(request)
        state = written = self._read(row.block_ids, row.start - 1)
        oldest = max(row.start - self._window + 1, 0) if self._window else row.start - 1
        for position in range(row.start - 2, oldest - 1, -1):
            written = self._predecessors.get(written, 0)
            if self._read(row.block_ids, position) != written:
                return _mix(state, position)  # a wrong state
        return state

    def first_layers(self, plan: StepPlan, layers: int) -> None:
        for row in plan.rows:
            self._row(row, layers * self._heads)

    def _row(self, row: Row, width: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Computes one row, and writes the first `width` values of each of its slots."""
        size, slots, blocks = self.layout.block_size, self._slots, row.block_ids
        state = self._before(row)
        first_sample = row.end - row.num_sampled
        tokens, scores, scored = list[int](), list[TokenLogprob](), list[TokenLogprob]()
        sampling, history = row.sampling, row.history
        output = list(history.output) if history is not None and sampling.depends_on_history else None
        ends = history.end_token_ids if history is not None else ()
        for position, token in enumerate(row.tokens, row.start):
            before, state = state, _mix(state, token)
            if self._window:
                self._predecessors[state] = before
            slots[blocks[position // size] * size + position % size][:width] = [state] * width
            if position - row.start < len(row.scored):
                scored.append(logprob(state, row.scored[position - row.start]))
            if position >= first_sample:
                if output is not None and position > first_sample:
                    output.append(token)
                drawn = sample(state, sampling, row.output_index + position - first_sample, output, ends)
                tokens.append(drawn)
                if sampling.logprobs is not None:
                    scores.append(logprob(state, drawn))
        return tuple(tokens), tuple(scores), tuple(scored)

    def _read(self, blocks: tuple[int, ...], position: int) -> int:
        size = self.layout.block_size
        values = self._slots[blocks[position // size] * size + position % size]
        state = values[0]
        # Layers or heads of different sequences give a wrong state.
        return state if values.count(state) == len(values) else sum(values) % _PRIME

    def _draft_tokens(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Draft tokens as a draft model makes them: right with some probability, which the tokens decide."""
        made: dict[int, tuple[int, ...]] = {}
        for draft in plan.drafts:
            if not draft.num_draft_tokens:
                continue
            row = plan.rows[draft.row]
            state = self._before(row)
            for token in row.tokens:
                state = _mix(state, token)
            history = row.history
            output = list(history.output) if history is not None and row.sampling.depends_on_history else None
            ends = history.end_token_ids if history is not None else ()
            tokens: list[int] = []
            for index in range(row.output_index, row.output_index + draft.num_draft_tokens):
                token = sample(state, row.sampling, index, output, ends)
                if state % 1000 >= self._draft_accuracy * 1000:
                    token = (token + 1) % VOCABULARY
                tokens.append(token)
                state = _mix(state, token)
                if output is not None:
                    output.append(token)
            made[draft.row] = tuple(tokens)
        return tuple(made.get(index, ()) for index in range(len(plan.rows))) if made else ()

    # The bytes of a hand-over.

    def pack(self, part: Part, plan: EdgePlan) -> Payload:
        size, slots = self.layout.block_size, self._slots
        columns = self._columns(part, plan, plan.prefill_rank, source=True)
        payload = []
        for position in range(part.start_token, part.end_token):
            values = slots[part.block_ids[position // size] * size + position % size]
            payload.append([values[column] for column in columns])
        return payload

    def store(self, part: Part, plan: EdgePlan, payload: Payload) -> None:
        size, slots = self.layout.block_size, self._slots
        columns = self._columns(part, plan, plan.decode_rank, source=False)
        for position, values in zip(range(part.start_token, part.end_token), payload, strict=True):
            slot = slots[part.block_ids[position // size] * size + position % size]
            for column, value in zip(columns, values, strict=True):
                slot[column] = value

    def _columns(self, part: Part, plan: EdgePlan, rank: int, *, source: bool) -> list[int]:
        """Returns which values of a slot an edge carries: those of the part's layers and of its rank's heads."""
        mine = local_heads(self._heads, self._tensor_parallel, rank).start
        columns: list[int] = []
        for piece in plan.slices[part.first_layer : part.last_layer]:
            start = piece.layer * self._heads + mine + (piece.source_start if source else piece.destination_start)
            columns += range(start, start + piece.count)
        return columns


def _with_token(row: Row, token: int) -> Row:
    return Row(
        row.sequence_id,
        row.start,
        (token,),
        row.block_ids,
        row.sampling,
        row.num_sampled,
        row.output_index,
        row.history,
        row.scored,
    )
