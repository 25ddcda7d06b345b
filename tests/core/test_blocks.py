"""Rules of the block table, one by one. `test_blocks_machine` searches for violations that these do not cover."""

from __future__ import annotations

import pytest

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.request import SequenceId

A, B = SequenceId("a"), SequenceId("b")
SEQ_A, SEQ_B, SEND_A = Holder("sequence", A), Holder("sequence", B), Holder("send", A)
RECEIVING_A, RECEIVING_B, CACHE = Holder("receiving", A), Holder("receiving", B), Holder("cache", A)


def test_allocate_is_all_or_nothing() -> None:
    table = BlockTable(3)
    assert table.allocate(4, SEQ_A) is None
    assert table.num_free == 3
    assert sorted(table.allocate(3, SEQ_A) or ()) == [0, 1, 2]


def test_block_is_free_only_when_its_last_holder_releases_it() -> None:
    table = BlockTable(2)
    blocks = table.allocate(2, SEQ_A) or ()
    table.hold(blocks, SEND_A)
    assert table.release(blocks, SEQ_A) == 0
    assert table.num_free == 0
    assert table.release(blocks, SEND_A) == 2


@pytest.mark.parametrize("blocks", [(0,), (0, 0), (-1,), (5,)])
def test_release_of_a_block_that_is_not_held_is_refused_and_changes_nothing(blocks: tuple[int, ...]) -> None:
    table = BlockTable(3)
    table.allocate(1, SEQ_B)
    kept = table.allocate(1, SEQ_A) or ()
    with pytest.raises(InvariantError):
        table.release((*kept, *blocks), SEQ_A)
    assert table.held_by(SEQ_A) == kept
    table.check()


@pytest.mark.parametrize("method", ["hold", "convert", "release"])
def test_block_named_twice_is_refused_and_changes_nothing(method: str) -> None:
    table = BlockTable(1)
    block = (table.allocate(1, SEQ_A) or ())[0]
    holders = {"hold": [SEND_A], "convert": [SEQ_A, SEND_A], "release": [SEQ_A]}[method]
    with pytest.raises(InvariantError, match="distinct"):
        getattr(table, method)([block, block], *holders)
    assert table.holders(block) == {SEQ_A}


def test_double_free_is_refused() -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, SEQ_A) or ()
    table.release(blocks, SEQ_A)
    with pytest.raises(InvariantError, match="not held"):
        table.release(blocks, SEQ_A)


@pytest.mark.parametrize(("first", "second"), [(RECEIVING_A, SEQ_B), (RECEIVING_A, CACHE), (SEQ_A, RECEIVING_B)])
def test_receiving_holder_is_exclusive(first: Holder, second: Holder) -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, first) or ()
    with pytest.raises(InvariantError, match="exclusive"):
        table.hold(blocks, second)
    assert table.holders(blocks[0]) == {first}


def test_shared_block_does_not_become_receiving() -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, SEQ_A) or ()
    table.hold(blocks, CACHE)
    with pytest.raises(InvariantError, match="exclusive"):
        table.convert(blocks, SEQ_A, RECEIVING_A)
    table.check()


def test_free_block_cannot_be_held() -> None:
    with pytest.raises(InvariantError, match="free"):
        BlockTable(1).hold([0], SEQ_A)


def test_holder_cannot_hold_a_block_twice() -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, SEQ_A) or ()
    with pytest.raises(InvariantError, match="already"):
        table.hold(blocks, SEQ_A)


def test_convert_neither_loses_nor_merges_holders() -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, SEQ_A) or ()
    table.hold(blocks, SEND_A)
    with pytest.raises(InvariantError, match="already"):
        table.convert(blocks, SEQ_A, SEND_A)
    assert table.holders(blocks[0]) == {SEQ_A, SEND_A}


def test_cached_block_without_other_holders_counts_as_free() -> None:
    table = BlockTable(3)
    blocks = table.allocate(2, SEQ_A) or ()
    table.hold(blocks, CACHE)
    assert table.release(blocks[:1], SEQ_A) == 1
    assert (table.num_free, table.counts().free) == (2, 2)
    assert table.num_free_besides(blocks) == 1


def test_idle_blocks_are_allocated_last_and_a_prefix_is_evicted_from_its_end() -> None:
    table = BlockTable(4)
    evicted: list[int] = []
    table.on_evict = evicted.append
    first, second, third = table.allocate(3, SEQ_A) or ()
    table.hold((first, second, third), CACHE)
    table.release((first, second, third), SEQ_A)
    table.hold((first,), SEQ_A)
    table.release((first,), SEQ_A)
    assert table.allocate(1, SEQ_B) == (3,)
    assert evicted == []
    assert table.allocate(2, SEQ_B) == (third, second)
    assert evicted == [third, second]
    assert table.holders(second) == {SEQ_B}


def test_blocks_that_preemption_would_free_exclude_those_that_others_share() -> None:
    table = BlockTable(6)
    shared, own = table.allocate(2, SEQ_A) or (), table.allocate(2, SEQ_B) or ()
    table.hold(shared, SEQ_B)
    table.hold((*shared, own[0]), CACHE)
    mine = (*shared, *own)
    assert table.num_free_without({SEQ_B}, mine) == 2 + 2
    assert table.num_free_without({SEQ_A, SEQ_B}, (*mine, *shared)) == 2 + 4
    table.release(mine, SEQ_B)
    assert table.num_free == 4
    assert table.num_free_without({SEQ_A}, mine) == 4 + 2


def test_cached_block_is_reallocated_only_when_it_has_no_other_holder() -> None:
    table = BlockTable(1)
    blocks = table.allocate(1, SEQ_A) or ()
    table.hold(blocks, CACHE)
    assert table.allocate(1, SEQ_B) is None
    table.convert(blocks, SEQ_A, SEND_A)
    assert table.allocate(1, SEQ_B) is None
    table.release(blocks, SEND_A)
    assert table.allocate(1, SEQ_B) == blocks


def test_repr_is_one_line() -> None:
    table = BlockTable(4)
    table.allocate(1, RECEIVING_A)
    table.hold(table.allocate(1, SEQ_B) or (), Holder("send", B))
    assert repr(table) == "<BlockTable 2 held, 1 receiving, 1 pinned, 2 free of 4>"


@pytest.mark.parametrize("spoil", ["forget", "free_twice", "free_held", "share_receiving", "idle", "uncounted"])
def test_check_detects_an_inconsistent_table(spoil: str) -> None:
    table = BlockTable(2)
    table.allocate(1, RECEIVING_A)
    {
        "forget": lambda: table._free.clear(),
        "free_twice": lambda: table._free.append(1),
        "free_held": lambda: table._free.append(0),
        "share_receiving": lambda: table._holders[0].add(SEQ_B),
        "idle": lambda: table._idle.setdefault(0),
        "uncounted": lambda: table._num_held.clear(),
    }[spoil]()
    with pytest.raises(InvariantError):
        table.check()


@pytest.mark.parametrize("expected", [set(), {(0, SEQ_A), (1, SEQ_A)}, {(0, SEQ_B)}])
def test_check_held_detects_a_leaked_and_a_lost_block(expected: set[tuple[int, Holder]]) -> None:
    table = BlockTable(2)
    table.allocate(1, SEQ_A)
    table.check_held({(0, SEQ_A)})
    with pytest.raises(InvariantError):
        table.check_held(expected)


@pytest.mark.parametrize("leaked", [SEQ_A, SEND_A, RECEIVING_A])
def test_idle_check_detects_a_leaked_block_and_names_its_holder(leaked: Holder) -> None:
    table = BlockTable(3)
    cached = table.allocate(1, SEQ_B) or ()
    table.hold(cached, CACHE)
    table.release(cached, SEQ_B)
    table.check_idle()
    blocks = table.allocate(2, leaked) or ()
    with pytest.raises(InvariantError, match=f"kind='{leaked.kind}'"):
        table.check_idle()
    table.release(blocks, leaked)
    table.check_idle()


@pytest.mark.parametrize("spoil", ["forget", "free_twice"])
def test_idle_check_counts_the_blocks(spoil: str) -> None:
    table = BlockTable(2)
    {"forget": lambda: table._free.pop(), "free_twice": lambda: table._free.append(1)}[spoil]()
    with pytest.raises(InvariantError, match="of 2 blocks are free"):
        table.check_idle()
