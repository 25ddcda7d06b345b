"""Which sequences a decode worker advances next: continuous batching, pure.

A sequence reserves at its offer all blocks it can ever need (prompt and every output token), so what was accepted can
always finish. While its KV arrives it is RECEIVING and holds its blocks exclusively; with the last chunk it is READY
and joins the batch at the next step, starting at token 2. Sequences join and leave between steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import DuplicateRequest, InvariantError, Unavailable
from baton.core.events import SequenceEnded, StageStamps, TokenEvent
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.sequence import Sequence, State
from baton.core.step import Row, StepOutcome, StepPlan, check_outcome


@dataclass(frozen=True, slots=True)
class DecodeResult:
    tokens: tuple[TokenEvent, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()


@dataclass(slots=True)
class _Times:
    reserved_at: float
    received_at: float | None = None
    running_at: float | None = None


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    times: _Times
    # Output index from which tokens are still to be told; the first event repeats the token that prefill sampled.
    untold: int = field(default=0)
    # KV is still being written into the blocks of an aborted sequence.
    in_flight: bool = False


class DecodeScheduler:
    """Complete state: `_ready` and `_running` in order, `_entries` for these and the receiving, `blocks`, and the one
    outstanding `_plan`."""

    def __init__(self, layout: KVLayout, num_blocks: int, max_running: int) -> None:
        self.layout = layout
        self.blocks = BlockTable(num_blocks)
        self.max_running = max_running
        self._ready: deque[SequenceId] = deque()
        self._running: list[SequenceId] = []
        self._entries: dict[SequenceId, _Entry] = {}
        self._plan: StepPlan | None = None
        self._next_step = 1
        self.prompt_tokens_computed = 0
        self.tokens_generated = 0

    def __repr__(self) -> str:
        receiving = len(self._entries) - len(self._ready) - len(self._running)
        return (
            f"<DecodeScheduler {len(self._running)} running, {len(self._ready)} ready, {receiving} receiving"
            f" | {self.blocks!r} | step {self._next_step - 1}>"
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not generate yet: receiving or ready."""
        return len(self._entries) - len(self._running)

    @property
    def num_sequences(self) -> int:
        return len(self._entries)

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._running)

    def reserve(self, request: GenerateRequest, now: float) -> tuple[int, ...]:
        """Takes the blocks of a sequence whose KV is to come, and returns them in order.

        Raises:
            DuplicateRequest: this attempt is already here.
            Unavailable: not enough free blocks now (`no_free_blocks`) or ever (`exceeds_pool`).
        """
        sequence_id = request.sequence_id
        if sequence_id in self._entries:
            raise DuplicateRequest(f"sequence {sequence_id} is already on this worker")
        needed = self.layout.blocks_for(request.max_total_tokens)
        if needed > self.blocks.num_blocks:
            raise Unavailable(
                f"{request.max_total_tokens} tokens need {needed} KV blocks; this decode worker has"
                f" {self.blocks.num_blocks}",
                code="exceeds_pool",
            )
        blocks = self.blocks.allocate(needed, Holder("receiving", sequence_id))
        if blocks is None:
            raise Unavailable(f"{needed} KV blocks needed, {self.blocks.num_free} free", code="no_free_blocks")
        sequence = Sequence(request, State.RECEIVING, now, block_ids=blocks)
        self._entries[sequence_id] = _Entry(sequence, _Times(now), untold=len(request.output))
        return blocks

    def received(
        self, sequence_id: SequenceId, first_token: int, now: float, first_logprob: TokenLogprob | None = None
    ) -> SequenceEnded | None:
        """All KV up to the first token has arrived: the sequence joins the batch at the next step.

        Returns its end when there is nothing left to generate (the abort came first, or the token ends it).
        """
        entry = self._entries[sequence_id]
        sequence = entry.sequence
        self.blocks.convert(sequence.block_ids, Holder("receiving", sequence_id), Holder("sequence", sequence_id))
        sequence.move(State.READY)
        sequence.num_computed = sequence.num_tokens
        entry.times.received_at = now
        self._ready.append(sequence_id)
        reason = sequence.append(first_token, first_logprob)
        if sequence.ending is not None or reason is not None:
            ended = SequenceEnded(sequence_id, sequence.ending or reason or "aborted", stamps=self.stamps(sequence_id))
            self._leave(entry)
            return ended
        return None

    def begin_step(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing runs (or the last step is still out)."""
        if self._plan is not None:
            return None
        while self._ready and len(self._running) < self.max_running:
            entry = self._entries[self._ready.popleft()]
            entry.sequence.move(State.RUNNING)
            entry.times.running_at = now
            self._running.append(entry.sequence.id)
        rows: list[Row] = []
        for sequence_id in self._running:
            sequence = self._entries[sequence_id].sequence
            if sequence.ending is not None:
                continue
            start, end = sequence.num_computed, sequence.num_tokens
            rows.append(sequence.row(start, end, num_sampled=1))
            sequence.step_id = self._next_step
            self.prompt_tokens_computed += max(0, min(end, len(sequence.request.prompt)) - start)
        if not rows:
            return None
        self._plan = StepPlan(self._next_step, tuple(rows))
        self._next_step += 1
        return self._plan

    def finish_step(self, outcome: StepOutcome, now: float) -> DecodeResult:
        """Takes in the tokens of the outstanding step.

        Raises:
            InvariantError: the outcome is not that of the outstanding step.
        """
        plan = check_outcome(self._plan, outcome)
        self._plan = None
        tokens: list[TokenEvent] = []
        ended: list[SequenceEnded] = []
        for index, (row, sampled) in enumerate(zip(plan.rows, outcome.sampled, strict=True)):
            entry = self._entries[row.sequence_id]
            sequence = entry.sequence
            sequence.step_id = None
            sequence.num_computed = row.end
            if sequence.ending is not None:
                self._leave(entry)
                continue
            reason = sequence.append(sampled[0], *outcome.logprobs_of(index))
            self.tokens_generated += 1
            tokens.append(sequence.told(entry.untold))
            entry.untold = len(sequence.output)
            if reason is not None:
                ended.append(SequenceEnded(sequence.id, reason, stamps=self._stamps(entry, now)))
                self._leave(entry)
        return DecodeResult(tuple(tokens), tuple(ended))

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self._entries[sequence_id].sequence.block_ids

    def generations(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self.blocks.generations(self.block_ids(sequence_id))

    def knows(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._entries

    def receiving(self, sequence_id: SequenceId) -> bool:
        """Whether KV of this sequence is still welcome."""
        entry = self._entries.get(sequence_id)
        return entry is not None and entry.sequence.state is State.RECEIVING and entry.sequence.ending is None

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._entries)

    def abort(self, sequence_id: SequenceId, *, in_flight: bool = False) -> bool:
        """Ends a sequence. Its blocks are free at once, unless a row of it is out, or `in_flight`: KV is being written
        into them. Then the next finish_step, or `receive_ended`, frees them, and a second abort does not. False when
        the sequence is not known."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            return False
        sequence = entry.sequence
        sequence.ending = sequence.ending or "aborted"
        entry.in_flight = sequence.state is State.RECEIVING and (in_flight or entry.in_flight)
        if sequence.step_id is None and not entry.in_flight:
            self._leave(entry)
        return True

    def receive_ended(self, sequence_id: SequenceId) -> None:
        """No write into the blocks of an aborted, receiving sequence is under way any more."""
        entry = self._entries.get(sequence_id)
        if entry is not None and entry.sequence.state is State.RECEIVING and entry.sequence.ending is not None:
            self._leave(entry)

    def stamps(self, sequence_id: SequenceId) -> StageStamps:
        return self._stamps(self._entries[sequence_id], None)

    def _stamps(self, entry: _Entry, now: float | None) -> StageStamps:
        received, running = entry.times.received_at, entry.times.running_at
        if received is None:
            return StageStamps()
        transfer_s = received - entry.times.reserved_at
        if running is None:
            return StageStamps(transfer_s=transfer_s)
        decode_s = 0.0 if now is None else now - running
        return StageStamps(transfer_s=transfer_s, decode_queue_s=running - received, decode_s=decode_s)

    def _leave(self, entry: _Entry) -> None:
        sequence = entry.sequence
        if sequence.state is State.READY and sequence.id in self._ready:
            self._ready.remove(sequence.id)
        elif sequence.state is State.RUNNING:
            self._running.remove(sequence.id)
        receiving = sequence.state is State.RECEIVING
        holder = Holder("receiving", sequence.id) if receiving else Holder("sequence", sequence.id)
        self.blocks.release(sequence.block_ids, holder)
        sequence.move(State.FINISHED)
        del self._entries[sequence.id]

    def check(self) -> None:
        """Proves that the books balance.

        Raises:
            InvariantError: a block is not held by exactly the sequence here that owns it, or a queue and the states
                disagree.
        """
        self.blocks.check()
        held: set[tuple[int, Holder]] = set()
        for sequence_id, entry in self._entries.items():
            receiving = entry.sequence.state is State.RECEIVING
            holder = Holder("receiving" if receiving else "sequence", sequence_id)
            held |= {(block, holder) for block in entry.sequence.block_ids}
        self.blocks.check_held(held)
        for queue, state in ((self._ready, State.READY), (self._running, State.RUNNING)):
            if sorted(queue) != sorted(i for i, e in self._entries.items() if e.sequence.state is state):
                raise InvariantError(f"the {state.value} queue and the sequences' states disagree: {list(queue)}")
