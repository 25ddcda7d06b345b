"""Packing a plan: where each value is placed, and that an invalid row is refused with its sequence id."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.batch import Batch, RowLimits, make_batch

LIMITS = RowLimits(block_size=4, num_blocks=50, vocab_size=1000, max_model_len=400)
SAMPLING = SamplingParams(seed=3)
FITS = Row(SequenceId("a"), 6, (7, 8, 9), (11, 12, 13), SAMPLING, 2, 5)


def packed(*rows: Row, min_tokens: int = 1) -> Batch:
    return make_batch(StepPlan(1, rows), LIMITS, torch.device("cpu"), min_tokens)


def test_rows_are_packed_consecutively() -> None:
    scored = Row(SequenceId("b"), 0, (1, 2, 3, 4), (20,), SAMPLING, 1, 0, None, (2, 3))
    batch = packed(FITS, scored, Row(SequenceId("c"), 4, (5,), (30, 31), SAMPLING))
    assert batch.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 5]
    assert batch.sampled.tolist() == [3, 4, 1, 2, 6] and batch.num_scored == 2
    assert [(d.output_index, d.drafts) for d in batch.draws] == [(5, ()), (6, (9,)), (0, ())]
    assert (
        batch.firsts.tolist() == [0, 3, 7]
        and batch.starts.tolist() == [6, 0, 4]
        and batch.lengths.tolist() == [3, 4, 1]
    )
    assert batch.positions.tolist() == [6, 7, 8, 0, 1, 2, 3, 4]
    assert batch.slots.tolist() == [12 * 4 + 2, 12 * 4 + 3, 13 * 4, 80, 81, 82, 83, 31 * 4]
    assert [(span.first, span.start, span.end) for span in batch.spans] == [(0, 6, 9), (3, 0, 4), (7, 4, 5)]


@pytest.mark.parametrize("beside", [{}, {"num_sampled": 0}, {"tokens": (7,), "num_sampled": 1}], ids=str)
def test_plan_with_host_and_device_draft_tokens_is_refused(beside: dict[str, object]) -> None:
    drafting = replace(FITS, tokens=(7, 0, 0), num_sampled=3)
    plan = StepPlan(1, (drafting, replace(FITS, **beside)), drafted=(2, 0))  # type: ignore[arg-type]
    if not beside:
        with pytest.raises(InvariantError, match="2 samples do not match 0 draft tokens on the device"):
            make_batch(plan, LIMITS, torch.device("cpu"))
    else:
        draws = make_batch(plan, LIMITS, torch.device("cpu")).draws
        assert [d.output_index for d in draws] == [5, 6, 7, 5][: len(draws)] and not any(d.drafts for d in draws)
    for wrong, message in (
        ((1, 0), "3 samples do not match 1 draft tokens"),
        ((2,), "draft tokens for 1 rows, but it has 2 rows"),
    ):
        with pytest.raises(InvariantError, match=message):
            make_batch(replace(plan, drafted=wrong), LIMITS, torch.device("cpu"))


def test_padding_tokens_are_computed_but_not_stored() -> None:
    batch = packed(replace(FITS, tokens=(7,), num_sampled=1), min_tokens=3)
    assert batch.tokens.tolist() == [7, 0, 0] and batch.positions.tolist() == [6, 0, 0]
    assert batch.slots.tolist() == [12 * 4 + 2] and batch.sampled.tolist() == [0]
    assert packed(min_tokens=3).tokens.tolist() == []


@pytest.mark.parametrize("beside", [0, 200], ids=["few", "many"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": ()}, "positions"),
        ({"start": -1}, "positions"),
        ({"start": 398, "block_ids": tuple(range(49)) * 3}, "positions"),
        ({"num_sampled": 4}, "4 samples of 3"),
        ({"num_sampled": -1}, "-1 samples of 3"),
        ({"scored": (1, 2, 3, 4)}, "to score"),
        ({"scored": (1000,)}, "to score"),
        ({"block_ids": (11, 51, 13)}, "outside the pool"),
        ({"block_ids": (11, -1, 13)}, "outside the pool"),
        ({"block_ids": (11, 12)}, "do not cover"),
        ({"tokens": (7, 1000, 9)}, "outside the vocabulary"),
        ({"tokens": (7, -1, 9)}, "outside the vocabulary"),
    ],
    ids=str,
)
def test_invalid_row_is_refused_with_its_sequence_id(change: dict[str, object], what: str, beside: int) -> None:
    others = [replace(FITS, sequence_id=SequenceId(f"s{i}")) for i in range(beside)]
    packed(*others, FITS)
    with pytest.raises(InvariantError, match=what) as error:
        packed(*others, replace(FITS, **change))  # type: ignore[arg-type]
    assert str(error.value).startswith("a/0#1: ")
