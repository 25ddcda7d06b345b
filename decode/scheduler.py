"""Which sequences a decode worker advances next: continuous batching, pure.

A sequence is accepted when blocks for its prompt are free and it could finish here alone. The start of its KV may be in
cached blocks: it shares these, and only the rest is sent. While that arrives it is RECEIVING and holds the other blocks
exclusively, until they are full; with the last chunk it is READY and joins the batch at the next step, starting at
token 2. Blocks are allocated as tokens come. When none is free, the lowest-ranked sequence is preempted (PREEMPTED) and
frees its blocks; later, what is no longer cached is recomputed, as long rows in chunks that fit the step's time. Full
blocks stay cached after use, with generated tokens too: the next turn of a conversation starts with them. In layers
with a window, blocks behind it are given back after each step (`baton.core.window`), and only the others are received.

A sequence may also come without KV: its prompt is computed here, as the same long rows. It is WAITING until blocks for
all of it are free; what others would need for a block each stays free, and hand-overs do not take what it waits for.
While a running sequence computes tokens that its prompt begins with, it waits for these in the cache. Long rows share
a step by turn, as at prefill (`baton.core.long_rows`), and take so much of it that its measured time stays within the
budget: streams are delayed by that much at most, whatever prompts arrive.

Sequences rank by their `priority` number, lower first, then boosted ones first (`anti_starvation.py`), then by age,
older first. A running sequence that needs a block preempts the lowest-ranked sequence, so the highest-ranked one always
makes progress. A preempted sequence resumes when free blocks, or blocks of lower-priority sequences, suffice; a boosted
one may also take the blocks of its own priority. A boost ends after BOOST_TOKENS tokens and passes to the sequence that
has waited longest, so every sequence eventually finishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.blocks import BlockTable, Holder
from baton.core.codes import ErrorCode
from baton.core.errors import DuplicateRequest, InvalidRequest, Unavailable
from baton.core.events import PromptCost, SequenceEnded, TokenEvent, grammar_failed
from baton.core.kv_layout import KVLayout
from baton.core.long_rows import Turns
from baton.core.prefix_cache import KeptBlocks, PrefixCache
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.sequence import Admitted, Finished, KVReceived, Preempted, Sequence, State
from baton.core.step import Row, StepOutcome, StepPlan
from baton.core.window import Window
from decode.ahead import OutstandingSteps, ahead_plan, next_rows, waits_for
from decode.anti_starvation import BOOST_TOKENS, AntiStarvation, num_unthrottled, throttled
from decode.held_blocks import HeldBlocks
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import LEAST_LONG_TOKENS

_ROOM_TOKENS = 64  # an unboosted preempted sequence resumes only with blocks for this many new tokens as well
_HOLDING = (State.READY, State.RUNNING)


@dataclass(frozen=True, slots=True)
class DecodeResult:
    tokens: tuple[TokenEvent, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()


class DecodeScheduler:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        max_running: int,
        speculation: Speculation | None = None,
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
        self._held = HeldBlocks(layout, self.cache, self.window)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.max_running = max_running
        self.speculation = speculation or Speculation()
        self._anti_starvation = AntiStarvation()
        # Outstanding steps: one, or with `plan_ahead`, which excludes drafting, up to two.
        self._outstanding = OutstandingSteps()
        self.plan_ahead = plan_ahead and self.speculation.drafts is None
        self.steps_ahead = self.rows_discarded = 0
        self._last_was_alone = False
        self._turns = Turns()
        self._next_step = kept.next_step if kept else 1
        self._next_number = 1
        self.prompt_tokens_computed = 0
        self.tokens_generated = 0
        self.bytes_reused = 0  # KV that was not received, because it was cached here
        slides = [layer.bytes_per_token for layer in layout.layers if layer.window] if self.window.size else []
        self._sliding_bytes = sum(slides)  # of a token, in layers of which only the window is received
        self._full_bytes = layout.bytes_per_token - self._sliding_bytes
        self.prompt_tokens_cached = 0
        self.preemptions = 0

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self._in(s))} {s.value}" for s in (State.RUNNING, State.READY, State.RECEIVING))
        return f"<DecodeScheduler {counts} | {self.blocks!r} | step {self._next_step - 1}>"

    @property
    def kept(self) -> KeptBlocks:
        return KeptBlocks(self.cache, self._next_step)

    @property
    def num_running(self) -> int:
        return self._number(State.RUNNING)

    @property
    def num_waiting(self) -> int:
        """Sequences that are in no step now: waiting, receiving, ready or preempted."""
        return len(self.sequences) - self.num_running

    @property
    def num_preempted(self) -> int:
        return self._number(State.PREEMPTED)

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def backlog_tokens(self) -> int:
        """Uncomputed tokens of the prompts that are computed here."""
        return sum(s.num_uncomputed for s in self._in(State.WAITING, State.RUNNING) if s.computes_prompt)

    @property
    def prompt_cost(self) -> PromptCost:
        model, running = self.speculation.model, self._in(State.RUNNING)
        generating = sum(s.num_uncomputed <= 1 for s in running)
        tokens = self._long_row_tokens(generating + 1, 1)
        return PromptCost(model.recompute_token_s(), tokens, model.short.seconds(generating))

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self.sequences[sequence_id].block_ids

    def has_sequence(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self.sequences

    def receiving(self, sequence_id: SequenceId) -> bool:
        """Whether KV of this sequence is still accepted."""
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.state is State.RECEIVING and sequence.ending is None

    def generating(self, sequence_id: SequenceId) -> bool:
        """Whether all KV of this sequence has arrived and it has not ended."""
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.state is not State.RECEIVING and sequence.ending is None

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Returns the sequences whose end is not reported yet."""
        return tuple(sequence_id for sequence_id, sequence in self.sequences.items() if not sequence.end_reported)

    def _in(self, *states: State) -> list[Sequence]:
        return [sequence for sequence in self.sequences.values() if sequence.state in states]

    def _number(self, state: State) -> int:
        return [sequence.state for sequence in self.sequences.values()].count(state)

    def _ranked(self, *states: State) -> list[Sequence]:
        return sorted(self._in(*states), key=lambda sequence: sequence.rank)

    def reserve(self, request: GenerateRequest, now: float) -> Sequence:
        """Adds a sequence with the blocks for its incoming KV. One block for each sequence that is here must stay free,
        and preempted sequences take precedence.

        Raises:
            DuplicateRequest: this attempt is already on this worker.
            Unavailable: not enough free blocks now (`no_free_blocks`) or ever (`exceeds_pool`).
        """
        self._check_new(request)
        states = [s.state for s in self.sequences.values()]
        waiting, here, due = states.count(State.PREEMPTED), len(states), 0
        if State.WAITING in states:
            due = sum(self._max_blocks(s.num_tokens) for s in self._in(State.WAITING))
        sequence = Sequence(request, State.RECEIVING, now, self._next_number)
        window, start = self.window, self.window.first_position(sequence.num_tokens)
        leave = here * window.groups + due
        holders = sequence.holder, Holder("receiving", sequence.id)
        if waiting or not self.cache.allocate(sequence, *holders, leave=leave, start=start):
            needed = self.layout.blocks_for(sequence.num_tokens) - window.sliding * (start // self.layout.block_size)
            counts = f"{self.blocks.num_free} free, {here} sequences growing, {waiting} preempted"
            counts += f", {due} for prompts that wait" if due else ""
            raise Unavailable(f"{needed} KV blocks needed, {counts}", code=ErrorCode.NO_FREE_BLOCKS)
        self._add(sequence)
        in_window = max(sequence.prefix_tokens - start, 0)
        self.bytes_reused += self._full_bytes * sequence.prefix_tokens + self._sliding_bytes * in_window
        return sequence

    def submit(self, request: GenerateRequest, now: float) -> Sequence:
        """Adds a sequence whose prompt is computed here; it waits for its blocks.

        Raises:
            DuplicateRequest: this attempt is already on this worker.
            InvalidRequest: the request has no token to compute.
            Unavailable: the request needs more blocks than the whole pool has (`exceeds_pool`).
        """
        if not request.num_prefill_tokens:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        self._check_new(request)
        sequence = Sequence(request, State.WAITING, now, self._next_number, last_token_at=now)
        sequence.reuses_prefix = not request.reads_all_positions
        here = self._in(State.WAITING, State.RUNNING, State.PREEMPTED)
        self._turns.arrives(sequence, (s for s in here if s.computes_prompt))
        self._add(sequence)
        return sequence

    def _check_new(self, request: GenerateRequest) -> None:
        if request.sequence_id in self.sequences:
            raise DuplicateRequest(f"sequence {request.sequence_id} is already on this worker")
        blocks, total = self._max_blocks(request.max_kv_tokens), self.blocks.num_blocks
        if blocks > total:
            raise Unavailable(
                f"KV of {request.max_kv_tokens} tokens needs {blocks} blocks; this decode worker has {total}",
                code=ErrorCode.EXCEEDS_POOL,
            )

    def _max_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks a sequence of so many tokens holds at once, at most."""
        return self.window.max_blocks(num_tokens, self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(self.speculation.model.step_tokens, LEAST_LONG_TOKENS)

    @property
    def _columns_at_once(self) -> int:
        return self.window.columns_at_once(self._most_tokens)

    def _add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self._next_number += 1
        self.speculation.open(sequence)

    def tokens_received(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Records that KV of the first `num_tokens` positions of a receiving sequence, but not all, has arrived."""
        self._held.kv_arrived(self.sequences[sequence_id], num_tokens)

    def received(
        self, sequence_id: SequenceId, first_token: int, now: float, score: TokenLogprob | None = None, cached: int = 0
    ) -> SequenceEnded | None:
        """Records that all KV has arrived, `cached` tokens of it cached at prefill; the sequence joins the next step.

        Returns its end if there is nothing left to generate (it was aborted before, or the first token ends it).
        """
        sequence = self.sequences[sequence_id]
        self._held.kv_arrived(sequence, sequence.num_tokens)
        sequence.on(KVReceived(), now)
        reason = sequence.append(first_token, score)
        sequence.cached_tokens = cached
        if sequence.ending is not None or reason is not None:
            stamps = sequence.decode_stamps(None)
            ended = SequenceEnded(sequence_id, sequence.ending or reason or "aborted", stamps=stamps)
            self._leave(sequence)
            return ended
        return None

    def begin_step(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to compute, or nothing before the tokens of the
        outstanding step are known."""
        if self._outstanding:
            return self._begin_ahead(now) if self.plan_ahead and len(self._outstanding) == 1 else None
        waiting = self._in(State.PREEMPTED)
        self._anti_starvation.update(waiting, now, self.speculation.model.recompute_token_s() if waiting else 0.0)
        self._admit(now)
        rows, sequences, stuck = self._next_rows(now)
        if not rows and stuck and self._number(State.READY):  # older ones have the blocks, and wait for its place
            self._preempt(stuck[-1])
            self._admit(now)
            rows, sequences, _ = self._next_rows(now)
        plan = self.speculation.extend(StepPlan(self._next_step, tuple(rows)), sequences, self._held.extend_for_drafts)
        return self._register(plan, now) if plan.rows or plan.drafts else None

    def _begin_ahead(self, now: float) -> StepPlan | None:
        """Returns the step after the outstanding one, or None if it cannot be planned before that one is done."""
        out = self._outstanding.newest
        if self.num_preempted or waits_for(out, self._in(State.RUNNING)):
            return None
        self._admit(now)
        running = self._ranked(State.RUNNING)
        if any(s.request.alone for s in running):
            return None
        nexts = next_rows(out, running, self._share)
        needed = [self._held.needed(n.sequence, n.end) for n in nexts]
        free = self.blocks.num_free
        if not nexts or sum(n for n in needed if n > 0) > free or self._throttled(running, now):
            return None
        for n, blocks in zip(nexts, needed, strict=True):
            self._held.extend(n.sequence, blocks)
        self.steps_ahead += 1
        return self._register(ahead_plan(self._next_step, out, nexts), now)

    def runs_alone(self, plan: StepPlan) -> SequenceId | None:
        """Returns the only sequence of a step if its request is to be computed alone."""
        return next((r.sequence_id for r in plan.rows if self.sequences[r.sequence_id].request.alone), None)

    def _register(self, plan: StepPlan, now: float) -> StepPlan:
        for row in plan.rows:
            sequence = self.sequences[row.sequence_id]
            sequence.step_id = plan.step_id
            known = row.end - max(row.num_sampled - 1, 0)
            if (of_prompt := min(known, len(sequence.request.prompt)) - row.start) > 0:
                self.prompt_tokens_computed += of_prompt
                self._turns.computes(sequence, of_prompt)
        self._outstanding.begin(plan, now)
        self._next_step += 1
        return plan

    def finish_step(self, outcome: StepOutcome, now: float) -> DecodeResult:
        """Applies the outcome of the oldest outstanding step.

        Raises:
            InvariantError: the outcome is not that of the oldest step.
        """
        plan, wall_s = self._outstanding.end(outcome, now)
        self.speculation.model.observe(plan, outcome, wall_s)
        tokens: list[TokenEvent] = []
        ended: list[SequenceEnded] = []
        for index, row in enumerate(plan.rows):
            sequence = self.sequences[row.sequence_id]
            last = sequence.step_id == plan.step_id  # else the next step has a row of it, too
            if last:
                sequence.step_id = None
            if sequence.ending is not None or sequence.discard_result:
                self.rows_discarded += 1
                sequence.discard_result = False
                if last and sequence.ending is not None:
                    self._leave(sequence)
                continue
            sequence.prompt_logprobs += outcome.scored_of(index)
            if index in outcome.unsampled:
                sequence.num_computed = row.end - row.num_sampled
                if (failed := outcome.unsampled[index]) is not None:
                    ended.append(grammar_failed(sequence.id, failed, sequence.decode_stamps(now)))
                    self._leave(sequence)
                continue
            sequence.discard_result = index in outcome.corrected and not last
            taken = self.speculation.verify(sequence, row, outcome.sampled[index])
            sequence.num_computed = row.end - row.num_sampled + len(taken)
            if sequence.computes_prompt:
                self.cache.store_full_blocks(sequence)
                sequence.computed_at = now
            if sequence.request.pooling:
                if row.pooling:
                    sequence.add_pooled(outcome.pooled[index])
                if row.end == sequence.num_tokens:
                    cached, vector = sequence.cached_tokens, sequence.pooled_vector()
                    tokens.append(TokenEvent(sequence.id, 0, (), cached_tokens=cached, pooled=vector))
                    ended.append(SequenceEnded(sequence.id, "stop", stamps=sequence.decode_stamps(now)))
                    self._leave(sequence)
                continue
            if not taken:
                continue
            sequence.reuses_prefix = True  # what is asked of the prompt is known
            reason, logprobs = None, outcome.logprobs_of(index)
            for position, token in enumerate(taken):
                reason = sequence.append(token, logprobs[position] if logprobs else None)
                self.tokens_generated += 1
                if reason is not None:
                    break
            tokens.append(sequence.next_tokens_event())
            sequence.last_token_at = now
            if reason is not None:
                ended.append(SequenceEnded(sequence.id, reason, stamps=sequence.decode_stamps(now)))
                if last:
                    self._leave(sequence)
                else:
                    sequence.ending, sequence.end_reported = reason, True
        if self.window.size:
            for row in plan.rows:
                if (here := self.sequences.get(row.sequence_id)) is not None and here.ending is None:
                    self.cache.give_back(here, here.holder)
        return DecodeResult(tuple(tokens), tuple(ended))

    def abort(self, sequence_id: SequenceId, *, in_flight: bool = False) -> bool:
        """Aborts a sequence. Its blocks are freed immediately, unless a row of it is outstanding or, with `in_flight`,
        KV is being written into them. Then the next finish_step, or `receive_ended`, frees them, and a second abort
        does not. Returns False if the sequence is unknown."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        sequence.ending = sequence.ending or "aborted"
        sequence.in_flight = sequence.state is State.RECEIVING and (in_flight or sequence.in_flight)
        if sequence.step_id is None and not sequence.in_flight:
            self._leave(sequence)
        return True

    def receive_ended(self, sequence_id: SequenceId) -> None:
        """Frees the blocks of an aborted, receiving sequence: nothing is being written into them any more."""
        sequence = self.sequences.get(sequence_id)
        if sequence is not None and sequence.state is State.RECEIVING and sequence.ending is not None:
            self._leave(sequence)

    # Admission, preemption and allocation.

    def _next_rows(self, now: float) -> tuple[list[Row], list[Sequence], list[Sequence]]:
        """Returns the rows of the next step with their sequences, and the running sequences that cannot grow. Sequences
        that are to be computed alone take turns, each in a step of its own; every other step is for all others."""
        running, stuck = self._ranked(State.RUNNING), list[Sequence]()
        alone = [[s] for s in running if s.request.alone]
        alone.sort(key=lambda group: group[0].last_token_at)
        together = [s for s in running if not s.request.alone]
        groups = [together, *alone] if self._last_was_alone else [*alone[:1], together, *alone[1:]]
        for group in groups:
            rows, sequences, short = self._rows(group, now)
            stuck += short
            if rows:
                self._last_was_alone = group is not together
                return rows, sequences, stuck
        return [], [], stuck

    def _rows(self, running: list[Sequence], now: float) -> tuple[list[Row], list[Sequence], list[Sequence]]:
        """Returns the rows of a step of these running sequences, and those of them that cannot grow."""
        rows: list[Row] = []
        sequences: list[Sequence] = []
        stuck: list[Sequence] = []
        throttled_ids = self._throttled(running, now)
        long = {s: s.num_uncomputed for s in running if s.num_uncomputed > 1}
        if long:
            long = self._share(long, len(running) - len(throttled_ids))
        for sequence in running:
            if sequence.state is not State.RUNNING or sequence.id in throttled_ids:
                continue  # preempted by a higher-ranked sequence, or throttled
            count = long.get(sequence, min(sequence.num_uncomputed, 1))
            start, end = sequence.num_computed, sequence.num_computed + count
            if count == 0:
                continue
            if not self._grow(sequence, end):
                stuck.append(sequence)
                continue
            rows.append(sequence.next_row(start, end))
            sequences.append(sequence)
            sequence.step_id = self._next_step
        return rows, sequences, stuck

    def _share(self, long: Mapping[Sequence, int], running: int) -> dict[Sequence, int]:
        return self._turns.share(long, self._long_row_tokens(running, len(long)))

    def _long_row_tokens(self, running: int, long: int) -> int:
        """Returns how many tokens of long rows a step of `running` sequences computes at most, `long` of which have
        such rows: all that a step may have if no stream is here, or about to be."""
        model, prompts = self.speculation.model, (State.WAITING, State.RUNNING)
        streams = running > long or not all(s.computes_prompt and s.state in prompts for s in self.sequences.values())
        return model.long_tokens(running - long) if streams else model.step_tokens

    def _throttled(self, running: list[Sequence], now: float) -> set[SequenceId]:
        """Returns which of the running sequences, given by rank, are throttled now: none unless blocks are short."""
        if 2 * self.blocks.num_free >= self.window.groups * len(running):
            return set()
        here = self._in(State.PREEMPTED, *_HOLDING)
        return throttled(running, num_unthrottled(here, self.speculation.model.recompute_token_s()), now)

    def _admit(self, now: float) -> None:
        """Admits sequences to the batch by rank: ready ones have their blocks, the others need new ones."""
        room = self.max_running - self.num_running
        blocked = False
        for sequence in self._ranked(State.READY, State.PREEMPTED, State.WAITING):
            if room <= 0:
                return
            if sequence.state is State.PREEMPTED:
                room_tokens = BOOST_TOKENS if sequence.boosted else _ROOM_TOKENS
                end = min(sequence.num_tokens + room_tokens, sequence.request.max_kv_tokens)
                if blocked or not self._resume(sequence, end):
                    blocked = True
                    continue
            elif sequence.state is State.WAITING:
                if blocked or self._shares_with_running(sequence):
                    continue
                if not self._start(sequence):
                    blocked = True
                    continue
            elif sequence.state is not State.READY:
                continue  # preempted by a higher-ranked sequence
            sequence.on(Admitted(), now)
            room -= 1

    def _start(self, sequence: Sequence) -> bool:
        """Allocates the blocks of a waiting sequence. Returns False if too few are free: what the sequences that have
        blocks need for one more each stays free."""
        holder, groups = sequence.holder, self.window.groups
        here = self._number(State.RUNNING) + self._number(State.READY) + self._number(State.RECEIVING)
        limit = self._columns_at_once if self.window.size else None
        if not self.cache.allocate(sequence, holder, holder, leave=here * groups, max_columns=limit):
            return False
        self.prompt_tokens_cached += sequence.prefix_tokens
        return True

    def _shares_with_running(self, sequence: Sequence) -> bool:
        """Returns whether a running sequence still computes full blocks of tokens that a waiting one begins with."""
        if not self.cache.enabled or not sequence.reuses_prefix:
            return False
        mine, size = sequence.request, self.layout.block_size
        first, last = sequence.tokens(0, size), (sequence.num_tokens - 1) // size * size
        for other in self._in(State.RUNNING):
            theirs, end = other.request, min(last, other.num_tokens // size * size)
            same = (mine.tenant, mine.cache_salt, mine.adapter) == (theirs.tenant, theirs.cache_salt, theirs.adapter)
            if not same or other.num_uncomputed <= 1 or end <= other.num_computed or first != other.tokens(0, size):
                continue
            start = other.num_computed // size * size
            if sequence.tokens(0, start + size) == other.tokens(0, start + size):
                return True
        return False

    def _resume(self, sequence: Sequence, end: int) -> bool:
        """Allocates blocks for [0, end) of a preempted sequence, cached ones where possible. False if it cannot."""
        self.cache.reuse(sequence, sequence.holder)
        columns = sequence.num_dropped + self._columns_at_once
        if not self._grow(sequence, min(end, columns * self.layout.block_size)):
            self._held.release(sequence)
            return False
        return True

    def _grow(self, sequence: Sequence, end: int) -> bool:
        """Allocates blocks for positions [0, end), preempting lower-ranked sequences if necessary; False if it cannot.
        A preempted, unboosted sequence preempts none of its own priority: that one would have to be recomputed."""
        needed = self._held.needed(sequence, end)
        if needed > self.blocks.num_free:
            whole = sequence.boosted or sequence.state is not State.PREEMPTED
            before = sequence.rank if whole else (sequence.rank[0] + 1, False, 0)
            behind = [s for s in self._ranked(*_HOLDING) if s.rank > before and s.step_id is None]
            holders = {s.holder for s in behind}
            theirs = (block for s in behind for block in self.cache.held(s))
            if needed > self.blocks.num_free_without(holders, theirs):
                return False
            while needed > self.blocks.num_free:
                self._preempt(behind.pop())
        self._held.extend(sequence, needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._held.release(sequence)
        sequence.on(Preempted())
        if sequence.computes_prompt:  # all of it is computed again
            sequence.prompt_logprobs, sequence.pooled = [], None
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        self._held.release(sequence)
        sequence.on(Finished())
        self.speculation.close(sequence)
        del self.sequences[sequence.id]

    def check_idle(self) -> None:
        """Checks, in constant time, a scheduler without sequences; does nothing while any is left.

        Raises:
            InvariantError: a block is not free, in the pool or the draft model's, or speculation state of a sequence
                is left.
        """
        if self.sequences:
            return
        self.blocks.check_idle()
        self.cache.check_idle()
        self.speculation.check_idle()

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: a block is not held by exactly the sequence that owns it, or a sequence is in an impossible
                state.
        """
        self.blocks.check()
        self.cache.check()
        if not self.sequences:
            self.check_idle()
        self._held.check(self.sequences.values())
        self.speculation.check(self.sequences)
