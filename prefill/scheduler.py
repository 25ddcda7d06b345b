"""Which prompt tokens a prefill worker computes next: pure, values in and values out.

Prompts are computed in chunks under the step's token budget, by priority and in the turns of `long_rows`: a prompt of
many steps gives way to another tenant's after each of them, and keeps its blocks. All rows of a step are done at its
end, so a prompt joins others only where that pays (`step_fit`). A step is full while the prompts here are more than one
holds, and if it is planned ahead. A full step has `step_tokens`, or while several tenants send prompts only as many as
its fixed time requires: whoever arrives waits until it is done.

At its first chunk a prompt is given all its blocks: the cached blocks of its prefix, which are not computed again, and
free blocks for the rest. If too few are free it waits, and no other prompt starts before it. The first token is sampled
with the last chunk, so the last token is always computed, in a block that is not shared.

From its start a request with a hand-over also holds a send pin on its blocks, which the worker drops when the
hand-over has ended (all of it acknowledged, or given up). So the KV outlives the computation for as long as it may
still be read. After that its full blocks stay cached until they are evicted.

A request with `pooling` samples nothing: its rows report vectors, whose sum is its result. The mean of all tokens needs
the hidden states of all of them, so it uses no cached prefix.

A request that is to be computed alone has each of its chunks in a step without others.

With `plan_ahead` a step may be planned while the one before it computes, so that a GPU has it at once: all tokens of a
prompt are known. A sequence then continues where its outstanding row ends, and keeps its blocks until its last row is
done. A step that neither continues a prompt nor is full is not planned ahead: what arrives meanwhile would miss it.

In layers with a window, a prompt is given the blocks for its window and the steps under way. It gives back those that
fall behind the window after each step and is given as many for the next tokens, before any other prompt starts. Blocks
that nobody else uses when it starts are its share: while it computes on blocks that it shares beyond them, it needs
none, so of prompts that all wait for a block one can always continue. What it will need in layers without a window
stays free for it. Only what is sent is pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.blocks import BlockTable, Holder, HolderKind
from baton.core.codes import ErrorCode
from baton.core.errors import DuplicateRequest, InvalidRequest, InvariantError, Unavailable
from baton.core.events import PromptCost, SequenceEnded, StageStamps, TokenEvent, grammar_failed
from baton.core.kv_layout import KVLayout
from baton.core.long_rows import TokenBudget, Turns
from baton.core.prefix_cache import KeptBlocks, PrefixCache
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.sequence import Finished, Prefilled, Sequence, Started, State
from baton.core.step import Row, StepOutcome, StepPlan, check_outcome
from baton.core.step_fit import StepFit
from baton.core.window import STEPS_AHEAD, Window

_DECAY = 0.9
FIXED_SHARE = 0.1
"""Of the time of a full step's tokens, while several tenants send prompts: its fixed time."""
LEAST_TOKENS = 128
"""Of a full step: shorter ones cut more prompts into chunks, and hand-overs of chunks are no part of its fixed time."""
ACTIVE_S = 10.0
"""A tenant sends prompts for so long after its last one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """KV of positions [0, computed) of a sequence is complete; the first `cached` of them came from the prefix cache.
    `first_token`, the output `output_index`, is set with the last position, together with the log-probabilities that
    the request asks for; or `pooled` is, its vector (`TokenEvent.pooled`)."""

    sequence_id: SequenceId
    computed: int
    first_token: int | None = None
    output_index: int = 0
    cached: int = 0
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: bytes = b""

    def event(self, stamps: StageStamps | None) -> TokenEvent | None:
        """Returns what the coordinator receives of it, if anything."""
        if self.pooled:
            return TokenEvent(self.sequence_id, 0, (), cached_tokens=self.cached, pooled=self.pooled)
        if self.first_token is None:
            return None
        logprobs = () if self.first_logprob is None else (self.first_logprob,)
        first = self.output_index, (self.first_token,), logprobs, self.prompt_logprobs, self.cached
        return TokenEvent(self.sequence_id, *first, stamps=stamps)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a step changed. A sequence in `ended` is finished on this worker; one with a first token that is not in
    `ended` is kept until its hand-over has ended. Aborted sequences are in neither: the caller aborted them."""

    progress: tuple[Progress, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()


class PrefillScheduler:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        step_tokens: int,
        *,
        model_digest: str = "",
        prefix_cache: bool = True,
        plan_ahead: bool = False,
        blocks: BlockTable | None = None,
        kept: KeptBlocks | None = None,
        give_back: bool = True,
    ) -> None:
        """`blocks`: another table of `num_blocks` blocks, for simulations; `kept`: those of the worker's previous
        role; `give_back` false: blocks behind the window are kept, as a reference for tests."""
        self.layout = layout
        blocks = blocks or BlockTable(num_blocks)
        self.window = Window.of(layout, give_back=give_back)
        named = layout.block_size, model_digest
        self.cache = kept.cache if kept else PrefixCache(blocks, *named, enabled=prefix_cache, window=self.window)
        self.blocks = self.cache.blocks
        self.step_tokens = step_tokens
        # All sequences: waiting, running, and prefilled ones.
        self.sequences: dict[SequenceId, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.plan_ahead = plan_ahead
        self._columns_at_once = self.window.columns_at_once(self._tokens_under_way)
        self._max_columns = self._columns_at_once if self.window.size else None  # of a prompt that starts
        # Steps that were planned while another was outstanding.
        self.steps_ahead = 0
        # Outstanding plans, the sequence of each row, and when it was planned, the oldest first: one, or with
        # `plan_ahead` up to two.
        self._outstanding: deque[tuple[StepPlan, list[Sequence], float]] = deque()
        self._next_step = kept.next_step if kept else 1
        self._done_step = self._next_step - 1
        self._submitted = 0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.tokens_generated = 0
        # Seconds and tokens of the last steps: an older step weighs _DECAY times the next one.
        self._recent_s = self._recent_tokens = 0.0
        self._fit, self._done_at = StepFit(), 0.0  # when the last step was done
        self._turns = Turns()
        self._arrived_at: dict[str, float] = {}  # when the last prompt of each active tenant arrived

    def __repr__(self) -> str:
        prefilled = len(self.sequences) - len(self._waiting) - len(self._running)
        return (
            f"<PrefillScheduler {len(self._running)} running, {len(self._waiting)} waiting, {prefilled} prefilled"
            f" | {self.blocks!r} | step {self._next_step - 1}>"
        )

    @property
    def kept(self) -> KeptBlocks:
        return KeptBlocks(self.cache, self._next_step)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def backlog_tokens(self) -> int:
        """Uncomputed tokens of all accepted requests."""
        return sum(s.num_uncomputed for s in (*self._waiting, *self._running))

    @property
    def prompt_cost(self) -> PromptCost | None:
        return PromptCost(self._recent_s / self._recent_tokens, self.step_tokens) if self._recent_s else None

    def submit(self, request: GenerateRequest, now: float, *, hand_over: bool) -> Sequence:
        """Accepts a request. With `hand_over` its blocks stay pinned until `release_send`.

        Raises:
            DuplicateRequest: this attempt is already on this worker.
            InvalidRequest: the request has no token to compute.
            Unavailable: the prompt needs more blocks than the whole pool has.
        """
        if request.sequence_id in self.sequences:
            raise DuplicateRequest(f"sequence {request.sequence_id} is already on this worker")
        if not request.num_prefill_tokens:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        needed = self.window.max_blocks(request.num_prefill_tokens, self._tokens_under_way)
        if needed > self.blocks.num_blocks:
            raise Unavailable(
                f"a prompt of {request.num_prefill_tokens} tokens needs {needed} KV blocks;"
                f" this prefill worker has {self.blocks.num_blocks}",
                code=ErrorCode.PROMPT_EXCEEDS_POOL,
            )
        self._submitted += 1
        sequence = Sequence(request, State.WAITING, now, self._submitted, send_pinned=hand_over)
        self._turns.arrives(sequence, (*self._waiting, *self._running))
        self._arrived_at[request.tenant] = now
        sequence.reuses_prefix = not request.reads_all_positions
        self.sequences[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence

    def begin_step(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to compute, or nothing before an outstanding step is
        done."""
        full_step = self._full_step(now)
        starts = {
            s: row.end for plan, sequences, _ in self._outstanding for row, s in zip(plan.rows, sequences, strict=True)
        }
        if self.window.size:
            for sequence in self._running:
                self._extend(sequence)
        candidates = [
            sequence
            for sequence in (*self._running, *self._waiting)
            if sequence.ending is None and self._remainder(sequence, starts)
        ]
        if self._outstanding:
            here = (*starts, *self._running, *self._waiting)
            if not self.plan_ahead or len(self._outstanding) > 1 or any(sequence.request.alone for sequence in here):
                return None
            candidates = self._ahead(candidates, starts, full_step)
        rows: list[Row] = []
        sequences: list[Sequence] = []
        budget, room = TokenBudget(full_step, self.step_tokens - full_step), True
        full = bool(self._outstanding)
        if not full and len(candidates) > 1:
            full = sum(s.num_tokens - s.prefix_tokens for s in (*self._running, *self._waiting)) > full_step
        for sequence in self._turns.order({s: self._uncached(s, starts) for s in candidates}):
            if budget.tokens == 0:
                break
            if sequences and not full:
                tokens = min(self._uncached(sequence, starts), budget.tokens)
                if not self._fit.pays(tokens, len(sequences), len(candidates) - len(sequences)):
                    break
            if sequences and (sequence.request.alone or sequences[0].request.alone):
                continue
            if budget.scored == 0 and sequence.request.sampling.prompt_logprobs is not None:
                continue
            if sequence.state is State.WAITING:
                room = room and self._start(sequence, now)
                if not room:
                    continue
            start = starts.get(sequence, sequence.num_computed)
            reach = min(sequence.num_tokens, self.layout.positions_in(len(sequence.block_ids)))
            if reach <= start:  # it waits for blocks
                continue
            end = start + budget.take(sequence, reach - start)
            self._turns.computes(sequence, end - start)
            rows.append(sequence.next_row(start, end))
            sequences.append(sequence)
            sequence.step_id = self._next_step
        if not rows:
            return None
        plan = StepPlan(self._next_step, tuple(rows))
        self.steps_ahead += bool(self._outstanding)
        self._outstanding.append((plan, sequences, now))
        self._next_step += 1
        return plan

    def rows_of(self, step_id: int) -> list[tuple[Row, Sequence]]:
        """Returns the rows of an outstanding step with their sequences; none if the step is not outstanding."""
        return [
            (row, sequence)
            for plan, sequences, _ in self._outstanding
            if plan.step_id == step_id
            for row, sequence in zip(plan.rows, sequences, strict=True)
        ]

    def runs_alone(self, plan: StepPlan) -> SequenceId | None:
        """Returns the only sequence of an outstanding step if its request is to be computed alone."""
        return next((sequence.id for _, sequence in self.rows_of(plan.step_id) if sequence.request.alone), None)

    @staticmethod
    def _remainder(sequence: Sequence, starts: Mapping[Sequence, int]) -> int:
        """Returns how many tokens of a sequence are in no row yet; `starts`: where outstanding rows end."""
        return sequence.num_tokens - starts.get(sequence, sequence.num_computed)

    @property
    def _tokens_under_way(self) -> int:
        return self.step_tokens * (STEPS_AHEAD if self.plan_ahead else 1)

    def _extend(self, sequence: Sequence) -> None:
        """Allocates as many columns as a running sequence has given back and still needs, or as many as there are free
        blocks for: then none are left for a prompt to start."""
        window, has = self.window, len(sequence.block_ids) // self.window.groups
        limit = sequence.num_dropped - len(sequence.retired) // window.sliding + self._columns_at_once
        needed = min(window.columns(sequence.num_tokens), limit) - has
        if needed <= 0 or sequence.ending is not None:
            return
        count = min(needed, self.blocks.num_free // window.groups)
        sequence.block_ids += self.blocks.allocate(count * window.groups, sequence.holder) or ()
        if sequence.send_pinned:
            self.blocks.hold(self._to_send(sequence, has), Holder("send", sequence.id))

    def _promised(self) -> int:
        """Returns how many free blocks the running sequences will need besides as many as they give back."""
        window = self.window
        if not window.full:
            return 0
        columns = (window.columns(s.num_tokens) - len(s.block_ids) // window.groups for s in self._running)
        return window.full * sum(columns)

    def _to_send(self, sequence: Sequence, first_column: int = 0) -> tuple[int, ...]:
        """Returns the blocks of a sequence whose KV a hand-over may send, in the columns from `first_column` on."""
        return self.window.needed_from(sequence.request.num_prefill_tokens, sequence.block_ids, first_column)

    def _full_step(self, now: float) -> int:
        """Returns how many tokens a full step has."""
        self._arrived_at = {tenant: at for tenant, at in self._arrived_at.items() if now - at < ACTIVE_S}
        costs = self._fit.costs() if len(self._arrived_at) > 1 else None
        if costs is None or not costs[1]:
            return self.step_tokens
        return min(self.step_tokens, max(round(costs[0] / costs[1] / FIXED_SHARE), LEAST_TOKENS))

    def _ahead(self, candidates: list[Sequence], starts: Mapping[Sequence, int], full_step: int) -> list[Sequence]:
        """Returns which candidates to compute after the outstanding step: none unless it continues a prompt or is full.
        A prompt that begins like one being computed is left out: it waits for that one's blocks in the cache."""
        computing = set(map(self._beginning, starts))
        after = [
            sequence
            for sequence in candidates
            if sequence.state is not State.WAITING
            or not self.cache.enabled
            or self._beginning(sequence) not in computing
        ]
        if any(sequence.state is not State.WAITING for sequence in after):
            return after
        return after if self._fill(after, full_step) else []

    def _fill(self, waiting: list[Sequence], full_step: int) -> bool:
        """Returns whether waiting sequences fill a step, of which those start that the free blocks suffice for."""
        budget, free = TokenBudget(full_step), self.blocks.num_free - self._promised()
        turns = self._turns.copy()
        for sequence in turns.order({s: self._uncached(s, {}) for s in waiting}):
            free -= self.cache.blocks_needed(sequence, self._max_columns)
            if budget.tokens == 0 or free < 0:
                break
            turns.computes(sequence, budget.take(sequence, self._uncached(sequence, {})))
        return budget.tokens == 0

    def _beginning(self, sequence: Sequence) -> tuple[str, str, str, tuple[int, ...]]:
        """Returns what two sequences that could share cached blocks have in common."""
        request = sequence.request
        return request.tenant, request.cache_salt, request.adapter, sequence.tokens(0, self.layout.block_size)

    def _uncached(self, sequence: Sequence, starts: Mapping[Sequence, int]) -> int:
        """Returns how many tokens of a sequence are in no row and not cached."""
        cached = self.cache.num_matching_tokens(sequence) if sequence.state is State.WAITING else 0
        return self._remainder(sequence, starts) - cached

    def _start(self, sequence: Sequence, now: float) -> bool:
        """Allocates the blocks of a waiting sequence. Returns False if too few are free."""
        holder = sequence.holder
        if not self.cache.allocate(sequence, holder, holder, leave=self._promised(), max_columns=self._max_columns):
            return False
        if sequence.send_pinned:
            self.blocks.hold(self._to_send(sequence), Holder("send", sequence.id))
        self.prompt_tokens_cached += sequence.prefix_tokens
        sequence.computed_step = self._done_step
        sequence.on(Started(), now)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return True

    def finish_step(self, outcome: StepOutcome, now: float) -> PrefillResult:
        """Applies the outcome of the oldest outstanding step.

        Raises:
            InvariantError: the outcome is not that of the oldest outstanding step.
        """
        plan = check_outcome(self._outstanding[0][0] if self._outstanding else None, outcome)
        _, sequences, begun_at = self._outstanding.popleft()
        self._done_step, num_tokens = plan.step_id, plan.num_tokens
        self._recent_s = _DECAY * self._recent_s + outcome.elapsed_s
        self._recent_tokens = _DECAY * self._recent_tokens + num_tokens
        wall_s, self._done_at = now - max(begun_at, self._done_at), now
        if wall_s > 0.0 and all(row.end <= self.step_tokens for row in plan.rows):
            self._fit.observe(num_tokens, wall_s)
        progress: list[Progress] = []
        ended: list[SequenceEnded] = []
        for index, (row, sampled) in enumerate(zip(plan.rows, outcome.sampled, strict=True)):
            sequence = sequences[index]
            last = sequence.step_id == plan.step_id  # else the next step has a row of it, too
            if last:
                sequence.step_id = None
            unsampled = index in outcome.unsampled
            sequence.computed_step = plan.step_id
            sequence.num_computed = row.end - unsampled  # then the last token is computed again
            self.prompt_tokens_computed += len(row.tokens)
            if not sequence.kv_suspect:
                self.cache.store_full_blocks(sequence)
            sequence.prompt_logprobs += outcome.scored_of(index)
            if row.pooling:
                sequence.add_pooled(outcome.pooled[index])
            if sequence.ending is not None:
                if last:
                    self._leave(sequence)
                continue
            cached = sequence.prefix_tokens
            if sequence.request.pooling and row.end == sequence.num_tokens:
                progress.append(Progress(sequence.id, row.end, cached=cached, pooled=sequence.pooled_vector()))
                sequence.computed_at = now
                ended.append(SequenceEnded(sequence.id, "stop", stamps=sequence.prefill_stamps()))
                self._leave(sequence)
                continue
            if not row.num_sampled:
                progress.append(Progress(sequence.id, row.end, cached=cached))
                continue
            if unsampled:
                if (failed := outcome.unsampled[index]) is not None:
                    ended.append(grammar_failed(sequence.id, failed, sequence.prefill_stamps()))
                    self._leave(sequence)
                continue
            token, (logprob,) = sampled[0], outcome.logprobs_of(index) or (None,)
            self.tokens_generated += 1
            sequence.computed_at = now
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            progress.append(Progress(sequence.id, row.end, token, row.output_index, cached, logprob, prompt_logprobs))
            reason = sequence.append(token, logprob)
            if reason is not None:
                ended.append(SequenceEnded(sequence.id, reason, stamps=sequence.prefill_stamps()))
                self._leave(sequence)
            elif sequence.send_pinned:
                self._running.remove(sequence)
                self._release_own(sequence)
                sequence.on(Prefilled())
            else:
                message = "the hand-over was given up before the sequence ended"
                stamps = sequence.prefill_stamps()
                ended.append(SequenceEnded(sequence.id, "error", ErrorCode.HANDOFF_FAILED, message, stamps))
                self._leave(sequence)
        if self.window.size:
            for sequence in sequences:
                if sequence.state is State.PREFILLING and sequence.ending is None:
                    self.cache.give_back(sequence, sequence.holder)
        return PrefillResult(tuple(progress), tuple(ended))

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self.sequences[sequence_id].block_ids

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self.sequences)

    def begin_attempt(self, sequence: Sequence, attempt: int) -> None:
        """Gives a sequence its next attempt, and the name that goes with it: its KV is offered again.

        Raises:
            DuplicateRequest: this attempt is already on this worker.
        """
        old = sequence.id
        if old._replace(attempt=attempt) in self.sequences:
            raise DuplicateRequest(f"attempt {attempt} of sequence {old} is already on this worker")
        del self.sequences[old]
        sequence.begin_attempt(attempt)
        self.sequences[sequence.id] = sequence
        for kind, blocks in self._holds(sequence):
            self.blocks.convert(blocks, Holder(kind, old), Holder(kind, sequence.id))

    def abort(self, sequence_id: SequenceId) -> bool:
        """Aborts a sequence; its blocks are free once its outstanding row is done and its send pin is dropped.

        Returns False if the sequence is unknown.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        if sequence.ending is None and not sequence.finished:
            sequence.ending = "aborted"
            if sequence.step_id is None:
                self._leave(sequence)
        return True

    def mark_kv_suspect(self, sequence_id: SequenceId) -> None:
        """Removes the blocks of a sequence from the prefix cache and keeps later ones out: its KV may be damaged."""
        if (sequence := self.sequences.get(sequence_id)) is not None:
            sequence.kv_suspect = True
            self.cache.drop_blocks_of(sequence)

    def release_send(self, sequence_id: SequenceId) -> None:
        """Drops the send pin: the hand-over has ended, and its blocks are not read any more."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or not sequence.send_pinned:
            return
        sequence.send_pinned = False
        self.blocks.release(self._to_send(sequence), Holder("send", sequence_id))
        if sequence.state is State.PREFILLED:
            sequence.on(Finished())
        self._forget(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the queues and releases its own hold on the blocks."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        if sequence.state is not State.PREFILLED:
            self._release_own(sequence)
        sequence.on(Finished())
        self._forget(sequence)

    def _release_own(self, sequence: Sequence) -> None:
        self.blocks.release(self.cache.held(sequence) + sequence.retired, sequence.holder)
        sequence.retired = ()

    def _forget(self, sequence: Sequence) -> None:
        if sequence.finished and not sequence.send_pinned:
            del self.sequences[sequence.id]

    def _holds(self, sequence: Sequence) -> list[tuple[HolderKind, tuple[int, ...]]]:
        """Returns as what a sequence holds which blocks."""
        holds: list[tuple[HolderKind, tuple[int, ...]]] = []
        if sequence.state is State.PREFILLING:
            holds.append(("sequence", self.cache.held(sequence) + sequence.retired))
        if sequence.send_pinned:
            holds.append(("send", self._to_send(sequence)))
        return holds

    def check_idle(self) -> None:
        """Checks, in constant time, a scheduler without sequences.

        Raises:
            InvariantError: a block is not free, or a queue is not empty.
        """
        self.blocks.check_idle()
        self.cache.check_idle()
        if self._waiting or self._running:
            raise InvariantError(f"no sequence is left, but {[*self._waiting, *self._running]} are queued")

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: a block is not held by exactly the sequences that need it, a queue and the states disagree,
                or a finished sequence was not removed.
        """
        self.blocks.check()
        self.cache.check()
        if not self.sequences:
            self.check_idle()
        held: set[tuple[int, Holder]] = set()
        for sequence_id, sequence in self.sequences.items():
            if sequence.finished and not sequence.send_pinned:
                raise InvariantError(f"{sequence_id} has finished but was not removed")
            held |= {(b, Holder(kind, sequence_id)) for kind, blocks in self._holds(sequence) for b in blocks}
        self.blocks.check_held(held)
        for queue, state in ((self._waiting, State.WAITING), (self._running, State.PREFILLING)):
            if set(queue) != {s for s in self.sequences.values() if s.state is state} or len(queue) != len(set(queue)):
                raise InvariantError(f"the {state.value} queue and the sequences' states disagree: {queue}")
