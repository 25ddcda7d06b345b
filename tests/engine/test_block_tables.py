"""Block tables of steps: always those of the rows, and written only where they have changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.batch import RowLimits, make_batch
from baton.engine.block_tables import BlockTables, BlockTablesMirror

CPU = torch.device("cpu")
WIDTH, BLOCKS, SPARE = 12, 500, 777
SAMPLING = SamplingParams(seed=1)


def row(name: str, blocks: tuple[int, ...]) -> Row:
    return Row(SequenceId(name), 0, (1,), blocks, SAMPLING)


class Rows:
    """A scheduler's sequences: they get blocks, end, are preempted, and return with others."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.number = 0

    def next(self, most: int) -> list[Row]:
        chance = self.chance
        while len(self.blocks) < 2 * most and chance.random() < 0.7:
            self.number += 1
            self.blocks[f"s{self.number}"] = self._new()
        for name in list(self.blocks):
            kind = chance.random()
            if kind < 0.05:
                del self.blocks[name]
            elif kind < 0.1:
                self.blocks[name] = self._new()
            elif kind < 0.15:
                self.blocks[name] = self.blocks[name][:-1] or self._new()
            elif kind < 0.4:
                self.blocks[name] += (chance.randrange(BLOCKS),)  # may be more than the width
            elif kind < 0.5:
                self.blocks[name] = (*self.blocks[name][:-1], self.blocks[name][-1])  # equal, not the same
        names = chance.sample(list(self.blocks), min(len(self.blocks), chance.randint(1, most)))
        if chance.random() < 0.6:
            names.sort()
        rows = [row(name, self.blocks[name]) for name in names]
        if chance.random() < 0.1:  # a sequence twice, with other blocks
            rows.append(row(names[0], self._new()))
        return rows

    def _new(self) -> tuple[int, ...]:
        return tuple(self.chance.randrange(BLOCKS) for _ in range(self.chance.randint(1, WIDTH)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lines", [4, 64])
def test_each_row_has_a_line_of_its_own_with_its_blocks_on_the_host_and_on_the_device(seed: int, lines: int) -> None:
    tables, rows = BlockTables(WIDTH, BLOCKS, lines), Rows(seed)
    mirror = BlockTablesMirror(tables, SPARE, CPU)
    address, larger = mirror.table.data_ptr(), 0
    for step in range(300):
        some = rows.next(9)
        placed = tables.place(some)
        larger += len(tables.array) > lines
        if step % 3:  # other steps are launched without graphs
            mirror.update()
        for line, each in zip(placed, some, strict=True):
            blocks = list(each.block_ids[:WIDTH])
            assert tables.array[line, : len(blocks)].tolist() == blocks
            if step % 3 and line < lines:
                assert mirror.table[line, : len(blocks)].tolist() == blocks
        owners = {}
        for line, each in zip(placed, some, strict=True):
            assert owners.setdefault(line, each.sequence_id) == each.sequence_id
        assert mirror.table.data_ptr() == address and mirror.table[lines].tolist() == [SPARE] * WIDTH
    assert (larger > 0) == (lines == 4), "more rows than lines"
    after = tables.place([row("one", (1,))])
    assert len(tables.array) == lines and after[0] < lines
    free = set(tables._free) | set(tables._to_free) | {line.number for line in tables._of.values()}
    assert free == set(range(lines)) and len(tables._free) == len(set(tables._free)), "no line is lost"


def test_step_writes_only_new_blocks_whatever_the_context() -> None:
    """64 sequences of 30,000 tokens: a step in which four of them get a block writes four entries, on the device in one
    copy. Blocks that were checked once are not looked at again."""
    tables = BlockTables(2000, 200_000)
    mirror = BlockTablesMirror(tables, 0, CPU)
    rows = [row(f"s{n}", tuple(range(n * 1875, (n + 1) * 1875))) for n in range(64)]
    tables.place(rows)
    assert sum(end - first for _, first, end in tables.take_changes()) == 64 * 1875
    tables.place(rows)
    assert tables.take_changes() == []
    for n in (3, 20, 40, 63):
        rows[n] = Row(rows[n].sequence_id, 0, (1,), (*rows[n].block_ids, 199_999), SAMPLING)
    lines = tables.place(rows)
    changes = tables.take_changes()
    assert changes == [(lines[n], 1875, 1876) for n in (3, 20, 40, 63)]
    del rows[10]
    tables.place(rows)
    mirror.update()
    assert tables.take_changes() == [], "an ended sequence does not move the others"


def test_what_a_mirror_has_not_taken_is_bounded_however_many_steps_it_has_no_part_in() -> None:
    """No step is captured as long as every batch has an adapter."""
    tables, rows = BlockTables(WIDTH, BLOCKS, 4), Rows(1)
    mirror = BlockTablesMirror(tables, SPARE, CPU)
    for _ in range(500):
        tables.place(rows.next(9))
        assert len(tables._changes or ()) <= tables.lines
    placed = tables.place(some := [row("last", (1, 2, 3)), row("one", (4,))])
    mirror.update()
    for line, each in zip(placed, some, strict=True):
        assert mirror.table[line, : len(each.block_ids)].tolist() == list(each.block_ids)


def test_batches_share_tables_and_a_refused_plan_leaves_them_valid() -> None:
    limits = RowLimits(block_size=4, num_blocks=50, vocab_size=100, max_model_len=40)
    tables = limits.new_tables()
    one = Row(SequenceId("a"), 5, (7,), (11, 12), SAMPLING, 1)
    bad = Row(SequenceId("b"), 5, (7,), (13, 51), SAMPLING, 1)
    for _ in range(2):
        with pytest.raises(InvariantError, match=r"b/0#1: block id outside the pool of 50"):
            make_batch(StepPlan(1, (one, bad)), limits, CPU, 1, tables)
        batch = make_batch(StepPlan(1, (one,)), limits, CPU, 1, tables)
        assert batch.slots.tolist() == [12 * 4 + 1] and batch.lines == [tables._of[one.sequence_id].number]
        good = Row(SequenceId("b"), 5, (7,), (13, 49), SAMPLING, 1)
        both = make_batch(StepPlan(1, (good, one)), limits, CPU, 1, tables)
        assert both.slots.tolist() == [49 * 4 + 1, 12 * 4 + 1]
        assert np.shares_memory(both.block_ids, tables.array)


def test_null_block_may_be_in_a_table_but_not_be_written() -> None:
    limits = RowLimits(block_size=4, num_blocks=50, vocab_size=100, max_model_len=40)
    row = Row(SequenceId("a"), 5, (7,), (50, 12), SAMPLING, 1)
    assert make_batch(StepPlan(1, (row,)), limits, CPU).block_ids[:2].tolist() == [50, 12]
    bad = Row(SequenceId("a"), 5, (7,), (50, 50), SAMPLING, 1)
    with pytest.raises(InvariantError, match="its block at position 5 was given back"):
        make_batch(StepPlan(1, (bad,)), limits, CPU)
