"""Which prompt tokens a prefill worker computes next: pure, values in and values out.

Prompts are computed in chunks under the step's token budget, several prompts per step. The prompt with the fewest
uncomputed tokens comes first, and waiting counts as if AGEING_TOKENS_PER_S had been computed meanwhile. So the turn of
a prompt is fixed by its arrival and its remaining tokens, and only prompts that arrive within left /
AGEING_TOKENS_PER_S after it can overtake it: short prompts do not wait behind long ones, and no prompt starves. At its
first chunk a prompt is given all its blocks: the cached blocks of its prefix, which are not computed again, and free
blocks for the rest. If too few are free it waits, and no other prompt starts before it. The first token is sampled
with the last chunk, so the last token is always computed, in a block that is not shared.

From its start a request with a hand-over also holds a send pin on its blocks, which the worker drops when the
hand-over has ended (all of it acknowledged, or given up). So the KV outlives the computation for as long as it may
still be read. After that its full blocks stay cached until they are evicted.

A request that is to be computed alone has each of its chunks in a step without others.

With `plan_ahead` a step may be planned while the one before it computes, so that a GPU has it at once: all tokens of a
prompt are known. A sequence then continues where its outstanding row ends, and keeps its blocks until its last row is
done. A step that neither continues a prompt nor is full is not planned ahead: what arrives meanwhile would miss it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.blocks import BlockTable, Holder
from baton.core.codes import ErrorCode
from baton.core.errors import DuplicateRequest, InvalidRequest, InvariantError, Unavailable
from baton.core.events import SequenceEnded, StageStamps, grammar_failed
from baton.core.kv_layout import KVLayout
from baton.core.prefix_cache import PrefixCache, PrefixUse
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.sequence import Sequence, State
from baton.core.step import Row, StepOutcome, StepPlan, check_outcome

MAX_SCORED_TOKENS = 256
"""Limit of prompt tokens per step that need log-probabilities: each needs the logits of the whole vocabulary."""

AGEING_TOKENS_PER_S = 2048.0


@dataclass(frozen=True, slots=True)
class Progress:
    """KV of positions [0, computed) of a sequence is complete; the first `cached` of them came from the prefix cache.
    `first_token`, the output `output_index`, is set with the last position, together with the log-probabilities that
    the request asks for."""

    sequence_id: SequenceId
    computed: int
    first_token: int | None = None
    output_index: int = 0
    cached: int = 0
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a step changed. A sequence in `ended` is finished on this worker; one with a first token that is not in
    `ended` is kept until its hand-over has ended. Aborted sequences are in neither: the caller aborted them."""

    progress: tuple[Progress, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    prefix: PrefixUse
    number: int
    pinned: bool = False
    kv_suspect: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    started_at: float | None = None
    computed_at: float | None = None


class PrefillScheduler:
    """Complete state: `_waiting` and `_running`, `_entries` for both and for prefilled sequences, `blocks` and their
    `cache`, and the outstanding plans `_out`, oldest first: one, or with `plan_ahead` up to two. `steps_ahead` counts
    the steps that were planned while another was outstanding."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        step_tokens: int,
        *,
        model_digest: str = "",
        prefix_cache: bool = True,
        plan_ahead: bool = False,
    ) -> None:
        self.layout = layout
        self.blocks = BlockTable(num_blocks)
        self.cache = PrefixCache(self.blocks, layout.block_size, model_digest, enabled=prefix_cache)
        self.step_tokens = step_tokens
        self._waiting: list[SequenceId] = []
        self._running: list[SequenceId] = []
        self._entries: dict[SequenceId, _Entry] = {}
        self.plan_ahead = plan_ahead
        self.steps_ahead = 0
        self._out: deque[StepPlan] = deque()
        self._next_step = 1
        self._submitted = 0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.tokens_generated = 0

    def __repr__(self) -> str:
        prefilled = len(self._entries) - len(self._waiting) - len(self._running)
        return (
            f"<PrefillScheduler {len(self._running)} running, {len(self._waiting)} waiting, {prefilled} prefilled"
            f" | {self.blocks!r} | step {self._next_step - 1}>"
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        return len(self._entries)

    @property
    def backlog_tokens(self) -> int:
        """Uncomputed tokens of all accepted requests."""
        return sum(self._entries[i].sequence.num_uncomputed for i in (*self._waiting, *self._running))

    def submit(self, request: GenerateRequest, now: float, *, hand_over: bool) -> None:
        """Accepts a request. With `hand_over` its blocks stay pinned until `release_send`.

        Raises:
            DuplicateRequest: this attempt is already on this worker.
            InvalidRequest: the request has no token to compute.
            Unavailable: the prompt needs more blocks than the whole pool has.
        """
        if request.sequence_id in self._entries:
            raise DuplicateRequest(f"sequence {request.sequence_id} is already on this worker")
        if not request.num_prefill_tokens:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        needed = self.layout.blocks_for(request.num_prefill_tokens)
        if needed > self.blocks.num_blocks:
            raise Unavailable(
                f"a prompt of {request.num_prefill_tokens} tokens needs {needed} KV blocks;"
                f" this prefill worker has {self.blocks.num_blocks}",
                code=ErrorCode.PROMPT_EXCEEDS_POOL,
            )
        self._submitted += 1
        sequence = Sequence(request, State.WAITING, now)
        # Log-probabilities of the prompt need the logits of all its positions, so none may come from the cache.
        prefix = PrefixUse(self.cache, sequence, take=request.sampling.prompt_logprobs is None)
        self._entries[sequence.id] = _Entry(sequence, prefix, self._submitted, pinned=hand_over)
        self._waiting.append(request.sequence_id)

    def begin_step(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to compute, or nothing before an outstanding step is
        done."""
        starts = {row.sequence_id: row.end for plan in self._out for row in plan.rows}
        candidates = [
            entry
            for entry in (self._entries[i] for i in (*self._running, *self._waiting))
            if entry.sequence.ending is None and self._left(entry, starts)
        ]
        if self._out:
            here = (*starts, *self._running, *self._waiting)
            if not self.plan_ahead or len(self._out) > 1 or any(map(self._alone, here)):
                return None
            candidates = self._ahead(candidates, starts)
        candidates.sort(key=lambda entry: self._turn(entry, starts))
        rows: list[Row] = []
        budget, scorable, room = self.step_tokens, MAX_SCORED_TOKENS, True
        for entry in candidates:
            if budget == 0:
                break
            sequence = entry.sequence
            if rows and (sequence.request.alone or self._alone(rows[0].sequence_id)):
                continue
            scores = sequence.request.sampling.prompt_logprobs is not None
            if scores and scorable == 0:
                continue
            if sequence.state is State.WAITING:
                room = room and self._start(entry, now)
                if not room:
                    continue
            count = min(budget, scorable if scores else budget, self._left(entry, starts))
            scorable -= count if scores else 0
            start = starts.get(sequence.id, sequence.num_computed)
            end = start + count
            last = end == sequence.num_tokens
            rows.append(sequence.row(start, end, num_sampled=int(last), score=True))
            sequence.step_id = self._next_step
            budget -= count
        if not rows:
            return None
        plan = StepPlan(self._next_step, tuple(rows))
        self.steps_ahead += bool(self._out)
        self._out.append(plan)
        self._next_step += 1
        return plan

    def runs_alone(self, plan: StepPlan) -> SequenceId | None:
        """Returns the only sequence of a step if its request is to be computed alone."""
        return next((row.sequence_id for row in plan.rows if self._alone(row.sequence_id)), None)

    def _alone(self, sequence_id: SequenceId) -> bool:
        return self._entries[sequence_id].sequence.request.alone

    @staticmethod
    def _left(entry: _Entry, starts: Mapping[SequenceId, int]) -> int:
        """Returns how many tokens of a sequence are in no row yet; `starts`: where outstanding rows end."""
        sequence = entry.sequence
        return sequence.num_tokens - starts.get(sequence.id, sequence.num_computed)

    def _ahead(self, candidates: list[_Entry], starts: Mapping[SequenceId, int]) -> list[_Entry]:
        """Returns what to compute after the outstanding step: nothing unless it continues a prompt or is full. A prompt
        that begins like one being computed is left out: it waits for that one's blocks in the cache."""
        computing = {self._beginning(self._entries[i]) for i in starts}
        found = [
            entry
            for entry in candidates
            if entry.sequence.state is not State.WAITING
            or not self.cache.enabled
            or self._beginning(entry) not in computing
        ]
        if any(entry.sequence.state is not State.WAITING for entry in found):
            return found
        tokens = sum(self._left(entry, starts) - entry.prefix.num_findable for entry in found)
        return found if tokens >= self.step_tokens else []

    def _beginning(self, entry: _Entry) -> tuple[str, tuple[int, ...]]:
        """Returns what two sequences that could share cached blocks have in common."""
        return entry.sequence.request.cache_salt, entry.sequence.tokens(0, self.layout.block_size)

    def _turn(self, entry: _Entry, starts: Mapping[SequenceId, int]) -> tuple[float, int]:
        """Sort key: the entry with the lowest one is computed first."""
        sequence = entry.sequence
        waiting = sequence.state is State.WAITING
        left = self._left(entry, starts) - (entry.prefix.num_findable if waiting else 0)
        return sequence.arrived_at + left / AGEING_TOKENS_PER_S, entry.number

    def _start(self, entry: _Entry, now: float) -> bool:
        """Allocates the blocks of a waiting sequence. Returns False if too few are free."""
        sequence, holder = entry.sequence, Holder("sequence", entry.sequence.id)
        if not entry.prefix.claim(self.layout.blocks_for(sequence.num_tokens), holder, holder):
            return False
        if entry.pinned:
            self.blocks.hold(sequence.block_ids, Holder("send", sequence.id))
        self.prompt_tokens_cached += entry.prefix.cached
        sequence.move(State.PREFILLING)
        entry.started_at = now
        self._waiting.remove(sequence.id)
        self._running.append(sequence.id)
        return True

    def finish_step(self, outcome: StepOutcome, now: float) -> PrefillResult:
        """Applies the outcome of the oldest outstanding step.

        Raises:
            InvariantError: the outcome is not that of the oldest outstanding step.
        """
        plan = check_outcome(self._out[0] if self._out else None, outcome)
        self._out.popleft()
        progress: list[Progress] = []
        ended: list[SequenceEnded] = []
        for index, (row, sampled) in enumerate(zip(plan.rows, outcome.sampled, strict=True)):
            entry = self._entries[row.sequence_id]
            sequence = entry.sequence
            last = sequence.step_id == plan.step_id  # else the next step has a row of it, too
            if last:
                sequence.step_id = None
            unsampled = index in outcome.unsampled
            sequence.num_computed = row.end - unsampled  # then the last token is computed again
            self.prompt_tokens_computed += len(row.tokens)
            if not entry.kv_suspect:
                entry.prefix.store()
            entry.prompt_logprobs += outcome.scored_of(index)
            if sequence.ending is not None:
                if last:
                    self._leave(entry)
                continue
            if not row.num_sampled:
                progress.append(Progress(sequence.id, row.end, cached=entry.prefix.cached))
                continue
            if unsampled:
                if (failed := outcome.unsampled[index]) is not None:
                    ended.append(grammar_failed(sequence.id, failed, self.stamps(sequence.id)))
                    self._leave(entry)
                continue
            token, (logprob,) = sampled[0], outcome.logprobs_of(index) or (None,)
            self.tokens_generated += 1
            entry.computed_at = now
            prompt_logprobs = tuple(entry.prompt_logprobs)
            cached = entry.prefix.cached
            progress.append(Progress(sequence.id, row.end, token, row.output_index, cached, logprob, prompt_logprobs))
            reason = sequence.append(token)
            if reason is not None:
                ended.append(SequenceEnded(sequence.id, reason, stamps=self.stamps(sequence.id)))
                self._leave(entry)
            elif entry.pinned:
                self._running.remove(sequence.id)
                self.blocks.release(sequence.block_ids, Holder("sequence", sequence.id))
                sequence.move(State.PREFILLED)
            else:
                message = "the hand-over was given up before the sequence ended"
                stamps = self.stamps(sequence.id)
                ended.append(SequenceEnded(sequence.id, "error", ErrorCode.HANDOFF_FAILED, message, stamps))
                self._leave(entry)
        return PrefillResult(tuple(progress), tuple(ended))

    def num_computed(self, sequence_id: SequenceId) -> int:
        """Returns how many positions of a sequence have KV, without those of outstanding rows."""
        return self._entries[sequence_id].sequence.num_computed

    def block_ids(self, sequence_id: SequenceId) -> tuple[int, ...]:
        return self._entries[sequence_id].sequence.block_ids

    def hands_over(self, sequence_id: SequenceId) -> bool:
        return self._entries[sequence_id].pinned

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._entries)

    def stamps(self, sequence_id: SequenceId) -> StageStamps:
        entry = self._entries[sequence_id]
        arrived, started, computed = entry.sequence.arrived_at, entry.started_at, entry.computed_at
        if started is None:
            return StageStamps()
        return StageStamps(queue_s=started - arrived, prefill_s=0.0 if computed is None else computed - started)

    def abort(self, sequence_id: SequenceId) -> bool:
        """Aborts a sequence; its blocks are free once its outstanding row is done and its send pin is dropped.

        Returns False if the sequence is unknown.
        """
        entry = self._entries.get(sequence_id)
        if entry is None:
            return False
        sequence = entry.sequence
        if sequence.ending is None and not sequence.finished:
            sequence.ending = "aborted"
            if sequence.step_id is None:
                self._leave(entry)
        return True

    def mark_kv_suspect(self, sequence_id: SequenceId) -> None:
        """Removes the blocks of a sequence from the prefix cache and keeps later ones out: its KV may be damaged."""
        if (entry := self._entries.get(sequence_id)) is not None:
            entry.kv_suspect = True
            self.cache.drop(entry.sequence.block_ids)

    def release_send(self, sequence_id: SequenceId) -> None:
        """Drops the send pin: the hand-over has ended, and its blocks are not read any more."""
        entry = self._entries.get(sequence_id)
        if entry is None or not entry.pinned:
            return
        entry.pinned = False
        sequence = entry.sequence
        if sequence.block_ids:
            self.blocks.release(sequence.block_ids, Holder("send", sequence_id))
        if sequence.state is State.PREFILLED:
            sequence.move(State.FINISHED)
        self._forget(entry)

    def _leave(self, entry: _Entry) -> None:
        """Removes a sequence from the queues and releases its own hold on the blocks."""
        sequence = entry.sequence
        if sequence.id in self._running:
            self._running.remove(sequence.id)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence.id)
        if sequence.block_ids and sequence.state is not State.PREFILLED:
            self.blocks.release(sequence.block_ids, Holder("sequence", sequence.id))
        sequence.move(State.FINISHED)
        self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        if entry.sequence.finished and not entry.pinned:
            del self._entries[entry.sequence.id]

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
        if not self._entries:
            self.check_idle()
        held: set[tuple[int, Holder]] = set()
        for sequence_id, entry in self._entries.items():
            if entry.sequence.finished and not entry.pinned:
                raise InvariantError(f"{sequence_id} has finished but was not removed")
            computing = entry.sequence.state is State.PREFILLING
            holds = [Holder("send", sequence_id)] * entry.pinned + [Holder("sequence", sequence_id)] * computing
            held |= {(block, holder) for block in entry.sequence.block_ids for holder in holds}
        self.blocks.check_held(held)
        for queue, state in ((self._waiting, State.WAITING), (self._running, State.PREFILLING)):
            if sorted(queue) != sorted(i for i, e in self._entries.items() if e.sequence.state is state):
                raise InvariantError(f"the {state.value} queue and the sequences' states disagree: {list(queue)}")
