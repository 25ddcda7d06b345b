"""DecodeScheduler under random offers, writes, steps and aborts, against a model that knows only the contract."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import Holder
from baton.core.errors import DuplicateRequest, Unavailable
from baton.core.request import GenerateRequest, SequenceId, finish_reason
from baton.core.step import Row, StepPlan
from tests.support.builders import EOS, make_decode, make_outcome, make_request

sampled_tokens = st.sampled_from([EOS, 7, 8, 9])


@dataclass
class Life:
    """What the contract says about one reserved sequence. `writing`: KV may be landing in its blocks."""

    request: GenerateRequest
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    told: int = 0
    phase: str = "receiving"
    writing: bool = False
    aborted: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output)


class DecodeMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 16), block_size=st.integers(1, 4), max_running=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int, max_running: int) -> None:
        self.scheduler = make_decode(num_blocks, block_size=block_size, max_running=max_running)
        self.lives: dict[SequenceId, Life] = {}
        self.ready: list[SequenceId] = []
        self.running: list[SequenceId] = []
        self.plan: StepPlan | None = None
        self.reserved = self.generated = 0

    def some(self, *phases: str, writing: bool | None = None, aborted: bool | None = None) -> list[SequenceId]:
        return sorted(
            sequence
            for sequence, life in self.lives.items()
            if life.phase in phases and writing in (None, life.writing) and aborted in (None, life.aborted)
        )

    def gone(self, sequence: SequenceId) -> None:
        del self.lives[sequence]
        self.ready = [s for s in self.ready if s != sequence]
        self.running = [s for s in self.running if s != sequence]

    @rule(prompt=st.integers(1, 12), output=st.integers(0, 3), more=st.integers(1, 8))
    def reserve(self, prompt: int, output: int, more: int) -> None:
        self.reserved += 1
        request = make_request(f"r{self.reserved}", prompt, output + more, output=range(500, 500 + output))
        pool, needed = self.scheduler.blocks, self.scheduler.layout.blocks_for(prompt + output + more)
        if needed > pool.num_free:
            with pytest.raises(Unavailable) as caught:
                self.scheduler.reserve(request, 0.0)
            assert caught.value.code == ("exceeds_pool" if needed > pool.num_blocks else "no_free_blocks")
            return
        blocks = self.scheduler.reserve(request, 0.0)
        assert len(blocks) == needed
        generations = self.scheduler.generations(request.sequence_id)
        self.lives[request.sequence_id] = Life(request, blocks, generations, list(request.output), len(request.output))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        with pytest.raises(DuplicateRequest):
            self.scheduler.reserve(self.lives[data.draw(st.sampled_from(sorted(self.lives)))].request, 0.0)

    @precondition(lambda self: self.some("receiving", writing=False))
    @rule(data=st.data())
    def write_begins(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.some("receiving", writing=False)))
        assert self.scheduler.receiving(sequence)
        self.lives[sequence].writing = True

    @precondition(lambda self: self.some("receiving", writing=True))
    @rule(data=st.data())
    def write_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.some("receiving", writing=True)))
        self.scheduler.receive_ended(sequence)
        self.lives[sequence].writing = False
        if self.lives[sequence].aborted:
            self.gone(sequence)

    @precondition(lambda self: self.some("receiving"))
    @rule(data=st.data(), token=sampled_tokens)
    def last_chunk_arrives(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.some("receiving")))
        life = self.lives[sequence]
        ended = self.scheduler.received(sequence, token, 1.0)
        life.output.append(token)
        reason = "aborted" if life.aborted else finish_reason(life.request, len(life.output), token)
        assert (ended and ended.reason) == reason
        life.phase, life.writing = "ready", False
        self.ready.append(sequence)
        if reason:
            self.gone(sequence)

    @rule()
    def begin(self) -> None:
        plan = self.scheduler.begin_step(2.0)
        if self.plan is not None:
            assert plan is None
            return
        room = self.scheduler.max_running - len(self.running)
        self.running += self.ready[:room]
        self.ready = self.ready[room:]
        for sequence in self.running:
            self.lives[sequence].phase = "running"
        assert [row.sequence_id for row in (plan.rows if plan else ())] == self.running
        self.plan = plan
        for row in plan.rows if plan else ():
            self.check_row(row, self.lives[row.sequence_id])

    def check_row(self, row: Row, life: Life) -> None:
        assert (row.start, row.tokens) == (len(life.tokens) - 1, life.tokens[-1:])
        assert (row.num_sampled, row.output_index) == (1, len(life.output))
        assert row.block_ids == life.blocks
        assert row.end <= len(row.block_ids) * self.scheduler.layout.block_size

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        outcome = make_outcome(plan, lambda _: data.draw(sampled_tokens))
        result = self.scheduler.finish_step(outcome, 3.0)
        tokens, ended = [], []
        for row, (token,) in zip(plan.rows, outcome.sampled, strict=True):
            life = self.lives[row.sequence_id]
            if life.aborted:
                self.gone(row.sequence_id)
                continue
            life.output.append(token)
            tokens.append((row.sequence_id, life.told, tuple(life.output[life.told :])))
            life.told = len(life.output)
            reason = finish_reason(life.request, len(life.output), token)
            if reason:
                ended.append((row.sequence_id, reason))
                self.gone(row.sequence_id)
        self.generated += len(tokens)
        assert [(e.sequence, e.first_index, e.tokens) for e in result.tokens] == tokens
        assert [(e.sequence, e.reason) for e in result.ended] == ended

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), claim=st.booleans())
    def abort(self, data: st.DataObject, claim: bool) -> None:
        """`claim`: the caller says that a write is under way even when none is; it then also reports its end."""
        sequence = data.draw(st.sampled_from(sorted(self.lives)))
        life = self.lives[sequence]
        first_of_a_write = life.writing and not life.aborted
        assert self.scheduler.abort(sequence, in_flight=claim or first_of_a_write)
        life.aborted = True
        life.writing = life.phase == "receiving" and (claim or life.writing)
        stepping = self.plan is not None and any(row.sequence_id == sequence for row in self.plan.rows)
        if not life.writing and not stepping:
            self.gone(sequence)

    @rule()
    def unknown_sequences_are_left_alone(self) -> None:
        assert not self.scheduler.abort(SequenceId("nobody"))
        assert not self.scheduler.receiving(SequenceId("nobody"))
        self.scheduler.receive_ended(SequenceId("nobody"))

    @invariant()
    def agrees_with_the_contract(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert set(self.scheduler.sequence_ids()) == set(self.lives)
        assert self.scheduler.prompt_tokens_computed == 0
        assert self.scheduler.tokens_generated == self.generated
        assert (self.scheduler.num_running, self.scheduler.has_work) == (
            len(self.running),
            bool(self.running or self.ready),
        )
        for sequence, life in self.lives.items():
            assert self.scheduler.receiving(sequence) == (life.phase == "receiving" and not life.aborted)

    @invariant()
    def blocks_belong_to_one_sequence_from_offer_to_end(self) -> None:
        used: list[int] = []
        for sequence, life in getattr(self, "lives", {}).items():
            used += life.blocks
            holder = Holder("receiving" if life.phase == "receiving" else "sequence", sequence)
            assert all(self.scheduler.blocks.holders(block) == {holder} for block in life.blocks)
            assert self.scheduler.generations(sequence) == life.generations
        assert len(used) == len(set(used)), "two sequences share a block"

    def teardown(self) -> None:
        """Whatever has happened, when writes end and KV arrives everything finishes."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in self.some("receiving", aborted=True):
            self.scheduler.receive_ended(sequence)
        for sequence in self.some("receiving", aborted=False):
            self.scheduler.received(sequence, 7, 4.0)
        for _ in range(20 * (self.reserved + 1)):
            plan = self.plan or self.scheduler.begin_step(5.0)
            self.plan = None
            if plan is None:
                break
            self.scheduler.finish_step(make_outcome(plan), 6.0)
        assert self.scheduler.num_sequences == 0
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks


DecodeMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestDecodeScheduler = DecodeMachine.TestCase
