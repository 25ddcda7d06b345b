"""PrefillScheduler under random submits, steps, aborts and hand-overs, against a model that knows only the contract."""

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
class Life:
    """What the contract says about one submitted sequence."""

    request: GenerateRequest
    number: int
    pinned: bool
    computed: int = 0
    blocks: tuple[int, ...] = ()
    aborted: bool = False
    parked: bool = False
    ended: bool = False

    @property
    def total(self) -> int:
        return self.request.num_prefill_tokens

    @property
    def queued(self) -> bool:
        return not (self.parked or self.ended or self.aborted)


class PrefillMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 4), step_tokens=st.integers(1, 20))
    def start(self, num_blocks: int, block_size: int, step_tokens: int) -> None:
        self.scheduler = make_prefill(num_blocks, block_size=block_size, step_tokens=step_tokens)
        self.lives: dict[SequenceId, Life] = {}
        self.plan: StepPlan | None = None
        self.submitted = self.computed = 0

    def pick(self, data: st.DataObject) -> Life:
        return self.lives[data.draw(st.sampled_from(sorted(self.lives)))]

    def stepping(self, life: Life) -> bool:
        return self.plan is not None and any(r.sequence_id == life.request.sequence_id for r in self.plan.rows)

    def forget_what_is_over(self) -> None:
        for sequence, life in list(self.lives.items()):
            over = life.ended or life.parked or life.aborted
            if over and not life.pinned and not self.stepping(life):
                del self.lives[sequence]

    @rule(prompt=st.integers(1, 20), output=st.integers(0, 4), more=st.integers(1, 3), hand_over=st.booleans())
    def submit(self, prompt: int, output: int, more: int, hand_over: bool) -> None:
        self.submitted += 1
        request = make_request(f"r{self.submitted}", prompt, output + more, output=range(500, 500 + output))
        if self.scheduler.layout.blocks_for(prompt + output) > self.scheduler.blocks.num_blocks:
            with pytest.raises(Unavailable, match="KV blocks"):
                self.scheduler.submit(request, 0.0, hand_over=hand_over)
            return
        self.scheduler.submit(request, 0.0, hand_over=hand_over)
        self.lives[request.sequence_id] = Life(request, self.submitted, hand_over)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        with pytest.raises(DuplicateRequest):
            self.scheduler.submit(self.pick(data).request, 0.0, hand_over=True)

    @rule()
    def begin(self) -> None:
        plan = self.scheduler.begin_step(0.0)
        if self.plan is not None:
            assert plan is None
        elif plan is None:
            waiting = [life for life in self.lives.values() if life.queued]
            assert all(not life.blocks for life in waiting)
            for life in waiting[:1]:
                assert self.scheduler.layout.blocks_for(life.total) > self.scheduler.blocks.num_free
        else:
            self.plan = plan
            self.check_plan(plan)

    def check_plan(self, plan: StepPlan) -> None:
        lives = [self.lives[row.sequence_id] for row in plan.rows]
        for row, life in zip(plan.rows, lives, strict=True):
            self.check_row(row, life)
        assert [life.number for life in lives] == sorted({life.number for life in lives}), "not first come first served"
        assert plan.num_tokens <= self.scheduler.step_tokens
        assert all(row.end == life.total for row, life in zip(plan.rows[:-1], lives, strict=False))
        if plan.num_tokens < self.scheduler.step_tokens:
            assert plan.rows[-1].end == lives[-1].total
            assert all(not life.queued or life in lives or not life.blocks for life in self.lives.values())

    def check_row(self, row: Row, life: Life) -> None:
        request = life.request
        assert life.queued and row.tokens
        assert row.start == life.computed, "each position is computed exactly once"
        assert row.tokens == (request.prompt + request.output)[row.start : row.end]
        assert row.num_sampled == (row.end == life.total)
        assert row.output_index == len(request.output)
        assert len(row.block_ids) == self.scheduler.layout.blocks_for(life.total)
        assert row.block_ids == (life.blocks or row.block_ids)
        life.blocks = row.block_ids

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        outcome = make_outcome(plan, lambda _: data.draw(st.sampled_from([EOS, 7])))
        result = self.scheduler.finish_step(outcome, 1.0)
        progress, ended = [], []
        for row, sampled in zip(plan.rows, outcome.sampled, strict=True):
            life = self.lives[row.sequence_id]
            life.computed = row.end
            self.computed += len(row.tokens)
            if life.aborted:
                continue
            token = sampled[0] if sampled else None
            index = len(life.request.output)
            progress.append((row.sequence_id, row.end, token, index if sampled else None))
            if token is not None:
                reason = finish_reason(life.request, index + 1, token) or ("" if life.pinned else "error")
                life.ended, life.parked = bool(reason), not reason
                ended += [(row.sequence_id, reason)] if reason else []
        assert [self.summary(p) for p in result.progress] == progress
        assert [(e.sequence, e.reason) for e in result.ended] == ended
        self.forget_what_is_over()

    def summary(self, p: Progress) -> tuple[SequenceId, int, int | None, int | None]:
        return p.sequence_id, p.computed, p.first_token, None if p.first_token is None else p.output_index

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        life = self.pick(data)
        assert self.scheduler.abort(life.request.sequence_id)
        life.aborted = True
        self.forget_what_is_over()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def hand_over_ends(self, data: st.DataObject) -> None:
        life = self.pick(data)
        self.scheduler.release_send(life.request.sequence_id)
        life.pinned = False
        self.forget_what_is_over()

    @rule()
    def unknown_sequences_are_left_alone(self) -> None:
        assert not self.scheduler.abort(SequenceId("nobody"))
        self.scheduler.release_send(SequenceId("nobody"))

    @invariant()
    def agrees_with_the_contract(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert set(self.scheduler.sequence_ids()) == set(self.lives)
        assert self.scheduler.prompt_tokens_computed == self.computed
        waiting = [life for life in self.lives.values() if life.queued or self.stepping(life)]
        assert self.scheduler.backlog_tokens == sum(life.total - life.computed for life in waiting)
        assert self.scheduler.has_work == bool(waiting)

    @invariant()
    def blocks_in_use_are_held(self) -> None:
        blocks = getattr(self, "scheduler", make_prefill()).blocks
        used: list[int] = []
        for sequence, life in getattr(self, "lives", {}).items():
            computing = life.blocks and (life.queued or self.stepping(life))
            used += life.blocks if computing or life.pinned else ()
            for block in life.blocks:
                assert (Holder("sequence", sequence) in blocks.holders(block)) == bool(computing)
                assert (Holder("send", sequence) in blocks.holders(block)) == life.pinned
        assert len(used) == len(set(used)), "two sequences share a block"

    def teardown(self) -> None:
        """Whatever has happened, ending every hand-over as it comes lets all remaining work finish."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5 * self.submitted * 25 + 5):
            plan = self.plan or self.scheduler.begin_step(2.0)
            self.plan = None
            if plan is not None:
                self.scheduler.finish_step(make_outcome(plan), 3.0)
            else:
                for sequence in self.scheduler.sequence_ids():
                    if self.scheduler.block_ids(sequence) or not self.scheduler.has_work:
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
