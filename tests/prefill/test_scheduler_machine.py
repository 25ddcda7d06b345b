"""PrefillScheduler under random submits, steps, aborts and hand-overs, against a model of its contract."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import Holder
from baton.core.errors import DuplicateRequest, Unavailable
from baton.core.request import GenerateRequest, SequenceId, finish_reason
from baton.core.step import Row, StepPlan
from prefill.scheduler import Progress
from tests.support.builders import EOS, make_outcome, make_prefill, make_request


@dataclass
class Tracked:
    """The state of one submitted sequence according to the contract."""

    request: GenerateRequest
    number: int
    pinned: bool
    cached: int = 0
    computed: int = 0
    planned: int = 0
    blocks: tuple[int, ...] = ()
    aborted: bool = False
    parked: bool = False
    ended: bool = False

    @property
    def total(self) -> int:
        return self.request.num_prefill_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.request.prompt + self.request.output

    @property
    def queued(self) -> bool:
        return not (self.parked or self.ended or self.aborted)


class PrefillMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        step_tokens=st.integers(1, 20),
        prefix_cache=st.booleans(),
        plan_ahead=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, step_tokens: int, prefix_cache: bool, plan_ahead: bool) -> None:
        self.prefix_cache, self.plan_ahead = prefix_cache, plan_ahead
        self.scheduler = make_prefill(
            num_blocks,
            block_size=block_size,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            plan_ahead=plan_ahead,
        )
        # The salt and tokens of the KV in each block.
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.sequences: dict[SequenceId, Tracked] = {}
        self.plans: list[StepPlan] = []
        self.submitted = self.computed = 0

    def pick(self, data: st.DataObject) -> Tracked:
        return self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]

    def stepping(self, tracked: Tracked) -> bool:
        return any(row.sequence_id == tracked.request.sequence_id for plan in self.plans for row in plan.rows)

    def drop_ended_sequences(self) -> None:
        for sequence, tracked in list(self.sequences.items()):
            over = tracked.ended or tracked.parked or tracked.aborted
            if over and not tracked.pinned and not self.stepping(tracked):
                del self.sequences[sequence]

    @rule(
        prompt=st.integers(1, 12),
        first=st.integers(0, 1),
        output=st.integers(0, 4),
        more=st.integers(1, 3),
        hand_over=st.booleans(),
        salt=st.sampled_from(["", "s"]),
    )
    def submit(self, prompt: int, first: int, output: int, more: int, hand_over: bool, salt: str) -> None:
        tokens = (first, *range(1001, 1000 + prompt))
        self.submit_tokens(tokens, tuple(range(500, 500 + output)), more, hand_over, salt)

    def submit_tokens(
        self, prompt: tuple[int, ...], output: tuple[int, ...], more: int, hand_over: bool, salt: str
    ) -> None:
        self.submitted += 1
        name = f"r{self.submitted}"
        request = make_request(name, prompt, len(output) + more, output=output, cache_salt=salt)
        if self.scheduler.layout.blocks_for(request.num_prefill_tokens) > self.scheduler.blocks.num_blocks:
            with pytest.raises(Unavailable, match="KV blocks"):
                self.scheduler.submit(request, 0.0, hand_over=hand_over)
            return
        self.scheduler.submit(request, 0.0, hand_over=hand_over)
        self.sequences[request.sequence_id] = Tracked(request, self.submitted, hand_over)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        with pytest.raises(DuplicateRequest):
            self.scheduler.submit(self.pick(data).request, 0.0, hand_over=True)

    @rule()
    def begin(self) -> None:
        plan = self.scheduler.begin_step(0.0)
        if plan is not None and self.plans:
            assert self.plan_ahead and len(self.plans) == 1
            self.check_ahead(plan)
            self.plans.append(plan)
        elif self.plans:
            unfinished = [t for t in self.sequences.values() if t.queued and t.blocks and t.planned < t.total]
            assert not unfinished or not self.plan_ahead or len(self.plans) == 2, "a prompt was not continued"
        elif plan is None:
            waiting = [tracked for tracked in self.sequences.values() if tracked.queued]
            assert all(not tracked.blocks for tracked in waiting)
            free = self.scheduler.blocks.num_free
            assert not waiting or any(self.scheduler.layout.blocks_for(tracked.total) > free for tracked in waiting)
        else:
            self.check_plan(plan)
            self.plans.append(plan)

    def check_ahead(self, plan: StepPlan) -> None:
        """A step after an outstanding one continues a prompt or is full, and starts no prompt that could share blocks
        with one being computed."""
        sequences = [self.sequences[row.sequence_id] for row in plan.rows]
        begun = [tracked for tracked in sequences if tracked.blocks]
        assert begun or plan.num_tokens == self.scheduler.step_tokens
        size = self.scheduler.layout.block_size
        computing = {
            (self.sequences[row.sequence_id].request.cache_salt, self.sequences[row.sequence_id].tokens[:size])
            for row in self.plans[0].rows
        }
        for tracked in sequences:
            if tracked not in begun and self.prefix_cache:
                assert (tracked.request.cache_salt, tracked.tokens[:size]) not in computing
        assert plan.num_tokens <= self.scheduler.step_tokens
        for row, tracked in zip(plan.rows, sequences, strict=True):
            self.check_row(row, tracked)

    def check_plan(self, plan: StepPlan) -> None:
        sequences = [self.sequences[row.sequence_id] for row in plan.rows]
        for row, tracked in zip(plan.rows, sequences, strict=True):
            self.check_row(row, tracked)
        turns = [(tracked.total - tracked.computed, tracked.number) for tracked in sequences]
        assert turns == sorted(turns), "not the one with the least left first"
        assert len({tracked.number for tracked in sequences}) == len(sequences)
        assert plan.num_tokens <= self.scheduler.step_tokens
        assert all(row.end == tracked.total for row, tracked in zip(plan.rows[:-1], sequences, strict=False))
        for tracked in self.sequences.values():
            if tracked.queued and tracked.blocks and tracked not in sequences:
                assert plan.num_tokens == self.scheduler.step_tokens, "budget was left for one that had started"
                assert (tracked.total - tracked.computed, tracked.number) > turns[-1]

    def check_row(self, row: Row, tracked: Tracked) -> None:
        request = tracked.request
        assert tracked.queued and row.tokens
        if not tracked.blocks:
            self.check_prefix(row, tracked)
        assert row.start == tracked.planned, "each position is computed exactly once"
        tracked.planned = row.end
        assert row.tokens == (request.prompt + request.output)[row.start : row.end]
        assert row.num_sampled == (row.end == tracked.total)
        assert row.output_index == len(request.output)
        assert len(row.block_ids) == self.scheduler.layout.blocks_for(tracked.total)
        assert row.block_ids == (tracked.blocks or row.block_ids)
        tracked.blocks = row.block_ids
        size = self.scheduler.layout.block_size
        for index in range(row.start // size, -(-row.end // size)):
            others = [other for other in self.sequences.values() if other is not tracked and other.blocks]
            assert all(row.block_ids[index] not in other.blocks[: other.computed // size] for other in others)
            self.written[row.block_ids[index]] = (
                request.cache_salt,
                tracked.tokens[: min(row.end, (index + 1) * size)],
            )

    def check_prefix(self, row: Row, tracked: Tracked) -> None:
        """A first row may skip only whole blocks that already hold the KV of its own tokens."""
        size = self.scheduler.layout.block_size
        assert row.start % size == 0 and row.start < tracked.total
        assert self.prefix_cache or row.start == 0
        for index in range(row.start // size):
            known = (tracked.request.cache_salt, tracked.tokens[: (index + 1) * size])
            assert self.written[row.block_ids[index]] == known, "the block holds something else"
        tracked.cached = tracked.computed = tracked.planned = row.start

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        plan = self.plans.pop(0)
        outcome = make_outcome(plan, lambda _: data.draw(st.sampled_from([EOS, 7])))
        result = self.scheduler.finish_step(outcome, 1.0)
        progress, ended = [], []
        for row, sampled in zip(plan.rows, outcome.sampled, strict=True):
            tracked = self.sequences[row.sequence_id]
            tracked.computed = row.end
            self.computed += len(row.tokens)
            if tracked.aborted:
                continue
            token = sampled[0] if sampled else None
            index = len(tracked.request.output)
            progress.append((row.sequence_id, row.end, tracked.cached, token, index if sampled else None))
            if token is not None:
                reason = finish_reason(tracked.request, index + 1, token) or ("" if tracked.pinned else "error")
                tracked.ended, tracked.parked = bool(reason), not reason
                ended += [(row.sequence_id, reason)] if reason else []
        assert [self.summary(p) for p in result.progress] == progress
        assert [(e.sequence, e.reason) for e in result.ended] == ended
        self.drop_ended_sequences()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), again=st.booleans())
    def compute_all_and_maybe_resubmit_one(self, data: st.DataObject, again: bool) -> None:
        tracked = self.pick(data)
        while True:
            self.begin()
            if not self.plans:
                break
            self.finish(data)
        if again:
            tokens, salt = tracked.tokens, tracked.request.cache_salt
            self.submit_tokens(tokens[: data.draw(st.integers(1, len(tokens)))], (), 1, True, salt)

    def summary(self, p: Progress) -> tuple[SequenceId, int, int, int | None, int | None]:
        return p.sequence_id, p.computed, p.cached, p.first_token, None if p.first_token is None else p.output_index

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        tracked = self.pick(data)
        assert self.scheduler.abort(tracked.request.sequence_id)
        tracked.aborted = True
        self.drop_ended_sequences()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def hand_over_ends(self, data: st.DataObject) -> None:
        tracked = self.pick(data)
        self.scheduler.release_send(tracked.request.sequence_id)
        tracked.pinned = False
        self.drop_ended_sequences()

    @rule()
    def unknown_sequences_are_ignored(self) -> None:
        assert not self.scheduler.abort(SequenceId("nobody"))
        self.scheduler.release_send(SequenceId("nobody"))

    @invariant()
    def matches_the_tracked_state(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert set(self.scheduler.sequence_ids()) == set(self.sequences)
        assert self.scheduler.prompt_tokens_computed == self.computed
        waiting = [tracked for tracked in self.sequences.values() if tracked.queued or self.stepping(tracked)]
        assert self.scheduler.backlog_tokens == sum(tracked.total - tracked.computed for tracked in waiting)
        assert bool(self.scheduler.num_running + self.scheduler.num_waiting) == bool(waiting)

    @invariant()
    def blocks_in_use_are_held(self) -> None:
        blocks = self.scheduler.blocks
        used: list[int] = []
        for sequence, tracked in self.sequences.items():
            computing = tracked.blocks and (tracked.queued or self.stepping(tracked))
            size = self.scheduler.layout.block_size
            used += (
                tracked.blocks[tracked.cached // size :]
                if (computing or tracked.pinned) and not self.prefix_cache
                else ()
            )
            for block in tracked.blocks:
                assert (Holder("sequence", sequence) in blocks.holders(block)) == bool(computing)
                assert (Holder("send", sequence) in blocks.holders(block)) == tracked.pinned
        assert len(used) == len(set(used)), "two sequences share a block"

    def teardown(self) -> None:
        """In any state, all remaining work finishes if every hand-over is ended as it comes up."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5 * self.submitted * 25 + 5):
            plan = self.plans.pop(0) if self.plans else self.scheduler.begin_step(2.0)
            if plan is not None:
                self.scheduler.finish_step(make_outcome(plan), 3.0)
            else:
                for sequence in self.scheduler.sequence_ids():
                    left = self.scheduler.num_running + self.scheduler.num_waiting
                    if self.scheduler.block_ids(sequence) or not left:
                        self.scheduler.release_send(sequence)
            if not self.scheduler.num_sequences:
                break
            self.scheduler.check()
        for sequence in self.scheduler.sequence_ids():
            self.scheduler.release_send(sequence)
        assert self.scheduler.num_sequences == 0
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks


PrefillMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestPrefillScheduler = PrefillMachine.TestCase
