"""BlockTable against a plain dict: any calls, in any order, have the same effect or are refused alike."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.request import SequenceId

HOLDERS = [Holder(kind, SequenceId(name)) for kind in ("sequence", "send", "receiving", "cache") for name in "ab"]
holders = st.sampled_from(HOLDERS)
picks = st.lists(st.integers(-1, 8), max_size=5)


class BlockTableMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.table = BlockTable(num_blocks)
        self.evicted: list[int] = []
        self.table.on_evict = self.evicted.append
        self.idle: list[int] = []
        self.held: dict[int, set[Holder]] = {block: set() for block in range(num_blocks)}

    def refuses(self, allowed: bool, method: str, *args: object) -> bool:
        """Calls `method`, which must raise exactly when the model does not allow it."""
        if allowed:
            getattr(self.table, method)(*args)
            return False
        with pytest.raises(InvariantError):
            getattr(self.table, method)(*args)
        return True

    def sane(self, blocks: list[int]) -> bool:
        return len(set(blocks)) == len(blocks) and all(block in self.held for block in blocks)

    @rule(count=st.integers(0, 9), holder=holders)
    def allocate(self, count: int, holder: Holder) -> None:
        free = {block for block, held in self.held.items() if not held}
        self.evicted.clear()
        taken = self.table.allocate(count, holder)
        assert (taken is None) == (count > len(free) + len(self.idle))
        must_go = max(0, count - len(free)) if taken is not None else 0
        assert self.evicted == self.idle[:must_go], "the longest idle go first, and none before it must"
        for block in taken or ():
            assert block in free or block in self.evicted
            self.held[block] = {holder}
        assert taken is None or len(set(taken)) == count

    @rule(blocks=picks, holder=holders)
    def hold(self, blocks: list[int], holder: Holder) -> None:
        allowed = self.sane(blocks) and all(
            self.held[b]
            and holder not in self.held[b]
            and "receiving" not in {holder.kind, *(h.kind for h in self.held[b])}
            for b in blocks
        )
        if not self.refuses(allowed, "hold", blocks, holder):
            for block in blocks:
                self.held[block].add(holder)

    @rule(blocks=picks, old=holders, new=holders)
    def convert(self, blocks: list[int], old: Holder, new: Holder) -> None:
        allowed = self.sane(blocks) and all(
            old in self.held[b] and new not in self.held[b] and (new.kind != "receiving" or self.held[b] == {old})
            for b in blocks
        )
        if not self.refuses(allowed, "convert", blocks, old, new):
            for block in blocks:
                self.held[block] = self.held[block] - {old} | {new}

    @rule(blocks=picks, holder=holders)
    def release(self, blocks: list[int], holder: Holder) -> None:
        allowed = self.sane(blocks) and all(holder in self.held[b] for b in blocks)
        if not self.refuses(allowed, "release", blocks, holder):
            for block in blocks:
                self.held[block].discard(holder)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release_held_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, held in self.held.items() if held]))
        holder = data.draw(st.sampled_from(sorted(self.held[block])))
        self.held[block].discard(holder)
        newly = {h.kind for h in self.held[block]} <= {"cache"} and (not self.held[block] or holder.kind != "cache")
        was_idle = block in self.idle
        assert self.table.release([block], holder) == (newly and not was_idle)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), new=holders)
    def convert_held_block(self, data: st.DataObject, new: Holder) -> None:
        block = data.draw(st.sampled_from([b for b, held in self.held.items() if held]))
        old = data.draw(st.sampled_from(sorted(self.held[block])))
        self.convert([block], old, new)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def hold_by_the_cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, held in self.held.items() if held]))
        kinds = {h.kind for h in self.held[block]}
        if "receiving" not in kinds and HOLDERS[-1] not in self.held[block]:
            self.table.hold([block], HOLDERS[-1])
            self.held[block].add(HOLDERS[-1])

    @precondition(lambda self: any(len(held) > 1 for held in self.held.values()))
    @rule(data=st.data())
    def release_to_the_cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, held in self.held.items() if held]))
        for holder in [h for h in self.held[block] if h.kind != "cache"]:
            self.held[block].discard(holder)
            self.table.release([block], holder)

    @invariant()
    def idle_blocks_keep_their_order(self) -> None:
        now = {block for block, held in self.held.items() if held and all(h.kind == "cache" for h in held)}
        order = list(self.table._idle)
        assert set(order) == now
        assert [b for b in order if b in self.idle] == [b for b in self.idle if b in now]
        self.idle = order

    @invariant()
    def table_is_consistent_and_equals_the_model(self) -> None:
        self.table.check()
        assert {b: set(self.table.holders(b)) for b in self.held} == self.held
        assert self.table.num_free == sum({h.kind for h in held} <= {"cache"} for held in self.held.values())
        for holder in HOLDERS:
            assert self.table.held_by(holder) == tuple(b for b, held in self.held.items() if holder in held)

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        kinds = [{h.kind for h in held} for held in self.held.values()]
        counts = self.table.counts()
        assert counts.free == sum(k <= {"cache"} for k in kinds)
        assert counts.receiving == sum("receiving" in k for k in kinds)
        assert counts.pinned == sum("send" in k for k in kinds)

    def teardown(self) -> None:
        for block, held in getattr(self, "held", {}).items():
            for holder in held:
                self.table.release([block], holder)
        if hasattr(self, "table"):
            self.table.check()
            assert self.table.num_free == self.table.num_blocks


BlockTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlockTable = BlockTableMachine.TestCase
