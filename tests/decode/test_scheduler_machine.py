"""DecodeScheduler under random offers, writes, steps, draft tokens and aborts, against a model of its contract.

The model tracks the KV in both pools. A row may only be computed on KV that has been written for the tokens before it.
As long as that holds, sequences may share blocks.
"""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import Holder
from baton.core.errors import DuplicateRequest, Unavailable
from baton.core.prefix_cache import CACHE
from baton.core.request import GenerateRequest, SequenceId, finish_reason
from baton.core.step import DraftRow, Row, StepOutcome, StepPlan
from baton.core.window import Window
from decode.speculation.drafts import Drafts, ModelDrafts, NgramDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import EOS, make_decode, make_layout, make_request
from tests.support.decode_contract import Tracked, WrittenKV

sampled_tokens = st.sampled_from([EOS, 7, 7, 8, 9])


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 4),
        kind=st.sampled_from(["none", "ngram", "model"]),
        draft_blocks=st.integers(1, 8),
        length=st.integers(0, 4),
        prefix_cache=st.sampled_from([True, True, False]),
        step_tokens=st.sampled_from([3, 512]),
        window=st.sampled_from([0, 0, 1, 3, 6]),
        full=st.integers(0, 1),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        kind: str,
        draft_blocks: int,
        length: int,
        prefix_cache: bool,
        step_tokens: int,
        window: int,
        full: int,
    ) -> None:
        drafts: Drafts | None = NgramDrafts() if kind == "ngram" else None
        if kind == "model":
            drafts = ModelDrafts(make_layout(block_size), draft_blocks, 40)
        speculation = Speculation(drafts, StepModel(step_tokens=step_tokens), fixed_length=length)
        self.size = block_size
        self.scheduler = make_decode(
            num_blocks,
            block_size=block_size,
            max_running=max_running,
            speculation=speculation,
            prefix_cache=prefix_cache,
            window=window,
            full=full,
        )
        self.window = Window.of(self.scheduler.layout)
        self.most_tokens = max(step_tokens, 16)
        self.ever: list[tuple[int, ...]] = [tuple(range(1000, 1012))]
        self.sequences: dict[SequenceId, Tracked] = {}
        self.kv, self.draft_kv = WrittenKV(block_size, self.window), WrittenKV(block_size)
        self.plan: StepPlan | None = None
        self.now = 0.0
        self.reserved = self.generated = 0

    def in_phase(self, *phases: str, writing: bool | None = None, aborted: bool | None = None) -> list[SequenceId]:
        return sorted(
            sequence
            for sequence, tracked in self.sequences.items()
            if tracked.phase in phases and writing in (None, tracked.writing) and aborted in (None, tracked.aborted)
        )

    @rule(
        prompt=st.integers(1, 12),
        output=st.integers(0, 3),
        more=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from(["", "", "s"]),
        data=st.data(),
    )
    def reserve(self, prompt: int, output: int, more: int, priority: int, salt: str, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.ever))[:prompt]
        self.offer(known, output, more, priority, salt)

    @rule(
        prompt=st.integers(1, 12),
        output=st.integers(0, 3),
        more=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 1]),
        data=st.data(),
    )
    def submit(self, prompt: int, output: int, more: int, priority: int, data: st.DataObject) -> None:
        """A sequence whose prompt is computed here."""
        request = self.request(data.draw(st.sampled_from(self.ever))[:prompt], output, more, priority, "")
        limit = self.window.max_blocks(request.max_kv_tokens, self.most_tokens)
        exceeds = limit > self.scheduler.blocks.num_blocks
        try:
            self.scheduler.submit(request, self.now)
        except Unavailable as error:
            assert error.code == "exceeds_pool" and exceeds
            return
        assert not exceeds and not self.scheduler.block_ids(request.sequence_id)
        given = list(request.output)
        self.sequences[request.sequence_id] = Tracked(request, given, len(given), phase="here")

    def request(self, tokens: tuple[int, ...], output: int, more: int, priority: int, salt: str) -> GenerateRequest:
        self.reserved += 1
        return make_request(
            f"r{self.reserved}",
            tokens,
            output + more,
            output=range(500, 500 + output),
            priority=priority,
            cache_salt=salt,
        )

    def offer(self, tokens: tuple[int, ...], output: int, more: int, priority: int, salt: str) -> None:
        prompt, request = len(tokens), self.request(tokens, output, more, priority, salt)
        pool, layout = self.scheduler.blocks, self.scheduler.layout
        needed = layout.blocks_for(prompt + output)
        limit = self.window.max_blocks(prompt + output + more - 1, self.most_tokens)
        start = self.window.first_position(prompt + output)
        try:
            blocks = self.scheduler.reserve(request, self.now).block_ids
        except Unavailable as error:
            assert (error.code == "exceeds_pool") == (limit > pool.num_blocks)
            assert self.sequences or error.code == "exceeds_pool", "an idle worker takes all that could ever fit"
            return
        assert len(blocks) == needed and limit <= pool.num_blocks
        tracked = self.sequences[request.sequence_id] = Tracked(request, list(request.output), len(request.output))
        cached = self.scheduler.sequences[request.sequence_id].prefix_tokens
        least = 0 if self.window.full else start
        assert cached == least or (cached % self.size == 0 and least < cached < len(tracked.tokens))
        self.kv.check(tracked, blocks, cached, start)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        with pytest.raises(DuplicateRequest):
            self.scheduler.reserve(self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))].request, 0.0)

    @precondition(lambda self: self.in_phase("receiving", writing=False))
    @rule(data=st.data())
    def write_begins(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_phase("receiving", writing=False)))
        assert self.scheduler.receiving(sequence)
        self.sequences[sequence].writing = True

    @precondition(lambda self: self.in_phase("receiving", writing=True))
    @rule(data=st.data())
    def write_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_phase("receiving", writing=True)))
        self.scheduler.receive_ended(sequence)
        self.sequences[sequence].writing = False
        if self.sequences[sequence].aborted:
            del self.sequences[sequence]

    @precondition(lambda self: self.in_phase("receiving", aborted=False))
    @rule(data=st.data())
    def chunk_arrives(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.in_phase("receiving", aborted=False)))
        tracked = self.sequences[sequence]
        start = max(tracked.received, self.scheduler.sequences[sequence].prefix_tokens)
        end = data.draw(st.integers(start, len(tracked.tokens) - 1))
        self.write_received(sequence, start, end)
        self.scheduler.tokens_received(sequence, end)
        tracked.received = end

    @precondition(lambda self: self.in_phase("receiving"))
    @rule(data=st.data(), token=sampled_tokens)
    def last_chunk_arrives(self, data: st.DataObject, token: int) -> None:
        self.arrive(data.draw(st.sampled_from(self.in_phase("receiving"))), token)

    def arrive(self, sequence: SequenceId, token: int) -> None:
        tracked = self.sequences[sequence]
        start = max(tracked.received, self.scheduler.sequences[sequence].prefix_tokens)
        self.write_received(sequence, start, len(tracked.tokens))
        ended = self.scheduler.received(sequence, token, self.now)
        tracked.output.append(token)
        reason = "aborted" if tracked.aborted else finish_reason(tracked.request, len(tracked.output), token)
        assert (ended and ended.reason) == reason
        tracked.phase, tracked.writing = "here", False
        if reason:
            del self.sequences[sequence]

    def write_received(self, sequence: SequenceId, start: int, end: int) -> None:
        tracked, blocks = self.sequences[sequence], self.scheduler.block_ids(sequence)
        window_start = self.window.first_position(len(tracked.tokens))
        self.write(self.kv, sequence, blocks, start, tracked.tokens[start:end], window_start)

    def write(
        self,
        kv: WrittenKV,
        sequence: SequenceId,
        blocks: tuple[int, ...],
        start: int,
        tokens: tuple[int, ...],
        window_start: int = 0,
    ) -> None:
        end = kv.write(self.sequences[sequence], blocks, start, tokens, window_start)
        if kv is self.kv:
            columns = blocks[start // self.size * self.window.groups : -(-end // self.size) * self.window.groups]
            for block in set(columns) - {self.scheduler.cache.null_block}:
                others = [o for o in self.sequences if o != sequence and block in self.scheduler.block_ids(o)]
                assert not others, "written into a shared block"

    def check_context(self, kv: WrittenKV, row: Row | DraftRow) -> None:
        start = self.window.first_position(row.start) if kv is self.kv else 0
        kv.check(self.sequences[row.sequence_id], row.block_ids, row.start, start)

    @rule(passed=st.sampled_from([0.0, 0.1, 2.0]))
    def begin(self, passed: float) -> None:
        self.now += passed
        plan = self.scheduler.begin_step(self.now)
        if self.plan is not None:
            assert plan is None
            return
        self.plan = plan
        rows = plan.rows if plan else ()
        assert len({row.sequence_id for row in rows}) == len(rows) <= self.scheduler.max_running
        for row in rows:
            self.sequences[row.sequence_id].check_row(row)
            assert row.end <= self.scheduler.layout.positions_in(len(row.block_ids))
            self.check_context(self.kv, row)
            self.write(self.kv, row.sequence_id, row.block_ids, row.start, row.tokens)
        for draft in plan.drafts if plan else ():
            self.check_context(self.draft_kv, draft)
            tracked = self.sequences[draft.sequence_id]
            end = draft.start + len(draft.tokens)
            assert draft.tokens and draft.tokens == tracked.tokens[draft.start : end]
            assert end == len(tracked.tokens) or not draft.num_draft_tokens
            self.write(self.draft_kv, draft.sequence_id, draft.block_ids, draft.start, draft.tokens)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_with(lambda: data.draw(sampled_tokens))

    def finish_with(self, draw: object) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None and callable(draw)
        requested = {d.row: d for d in plan.drafts if d.num_draft_tokens}
        draft_tokens = tuple(
            tuple(draw() for _ in range(requested[i].num_draft_tokens)) if i in requested else ()
            for i in range(len(plan.rows))
        )
        for index, draft in requested.items():  # the draft computes all its draft tokens but the last
            start = draft.start + len(draft.tokens)
            self.write(self.draft_kv, draft.sequence_id, draft.block_ids, start, draft_tokens[index][:-1])
        final = plan.with_draft_tokens(draft_tokens if requested else ())
        for row in final.rows:
            self.write(self.kv, row.sequence_id, row.block_ids, row.start, row.tokens)
        sampled = tuple(tuple(draw() for _ in range(row.num_sampled)) for row in final.rows)
        result = self.scheduler.finish_step(
            StepOutcome(plan.step_id, sampled, draft_tokens=draft_tokens if requested else ()), self.now
        )
        tokens, ended = [], []
        for row, own in zip(final.rows, sampled, strict=True):
            tracked = self.sequences[row.sequence_id]
            if tracked.aborted:
                del self.sequences[row.sequence_id]
                continue
            proposed = row.tokens[len(row.tokens) - max(0, row.num_sampled - 1) :]
            reason = None
            for position, token in enumerate(own):
                tracked.output.append(token)
                self.generated += 1
                reason = finish_reason(tracked.request, len(tracked.output), token)
                if reason or position == len(proposed) or proposed[position] != token:
                    break
            if own:
                tokens.append((row.sequence_id, tracked.reported, tuple(tracked.output[tracked.reported :])))
                tracked.reported = len(tracked.output)
            if reason:
                self.ever.append(tracked.tokens)
                ended.append((row.sequence_id, reason))
                del self.sequences[row.sequence_id]
        assert [(e.sequence, e.first_index, e.tokens) for e in result.tokens] == tokens
        assert [(e.sequence, e.reason) for e in result.ended] == ended

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), claim=st.booleans())
    def abort(self, data: st.DataObject, claim: bool) -> None:
        """`claim`: the caller reports a write in flight even if there is none, and later reports its end."""
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        tracked = self.sequences[sequence]
        first_of_a_write = tracked.writing and not tracked.aborted
        assert self.scheduler.abort(sequence, in_flight=claim or first_of_a_write)
        tracked.aborted = True
        tracked.writing = tracked.phase == "receiving" and (claim or tracked.writing)
        stepping = self.plan is not None and any(row.sequence_id == sequence for row in self.plan.rows)
        if not tracked.writing and not stepping:
            del self.sequences[sequence]

    @rule(prompt=st.integers(1, 12), more=st.integers(2, 20))
    def arrive_whole(self, prompt: int, more: int) -> None:
        known = set(self.sequences)
        self.offer(self.ever[-1][:prompt], 0, more, 0, "")
        for sequence in set(self.sequences) - known:
            self.arrive(sequence, 7)

    @rule(tokens=st.lists(sampled_tokens, min_size=8, max_size=24), count=st.integers(1, 6))
    def several_steps(self, tokens: list[int], count: int) -> None:
        source = cycle(tokens)
        for _ in range(count):
            if self.plan is None:
                self.begin(0.0)
            if self.plan is not None:
                self.finish_with(lambda: next(source))

    @rule()
    def unknown_sequences_are_ignored(self) -> None:
        assert not self.scheduler.abort(SequenceId("nobody"))
        assert not self.scheduler.receiving(SequenceId("nobody"))
        self.scheduler.receive_ended(SequenceId("nobody"))

    @invariant()
    def matches_the_tracked_state(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert set(self.scheduler.sequence_ids()) == set(self.sequences)
        assert self.scheduler.tokens_generated == self.generated
        for sequence, tracked in self.sequences.items():
            assert self.scheduler.receiving(sequence) == (tracked.phase == "receiving" and not tracked.aborted)

    @invariant()
    def blocks_belong_to_one_sequence_or_are_cached(self) -> None:
        used: list[int] = []
        for sequence, tracked in self.sequences.items():
            blocks, receiving = self.scheduler.block_ids(sequence), tracked.phase == "receiving"
            first = (
                max(tracked.received, self.scheduler.sequences[sequence].prefix_tokens) // self.size if receiving else 0
            )
            null, groups = self.scheduler.cache.null_block, self.window.groups
            for index, block in enumerate(blocks):
                if block == null:
                    assert index // groups < self.scheduler.sequences[sequence].num_dropped
                    assert index % groups >= self.window.full
                    continue
                holders = self.scheduler.blocks.holders(block)
                assert (
                    Holder("receiving" if receiving and index // groups >= first else "sequence", sequence) in holders
                )
                assert len(holders) == 1 or CACHE in holders
            used += [b for b in blocks if b != null and CACHE not in self.scheduler.blocks.holders(b)]
        assert len(used) == len(set(used)), "two sequences share a block"

    def teardown(self) -> None:
        """In any state, all sequences finish once all writes have ended and all KV has arrived."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in self.in_phase("receiving", aborted=True):
            self.scheduler.receive_ended(sequence)
            del self.sequences[sequence]
        for sequence in self.in_phase("receiving", aborted=False):
            self.arrive(sequence, 7)
        steps = 0
        while self.plan is not None or self.scheduler.num_sequences:
            if self.plan is None:
                self.begin(0.1)
            assert self.plan is not None, "sequences that nothing will ever compute"
            self.finish_with(lambda: 7)
            steps += 1
            assert steps < 40 * (self.reserved + 1)
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks
        self.scheduler.check()


DecodeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestDecodeScheduler = DecodeMachine.TestCase
