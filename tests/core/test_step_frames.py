"""Followers receive of a step only what they compute with."""

from __future__ import annotations

from baton.core.plan_tables import PlanTables
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import History, Row, StepPlan
from baton.runtime.frames import encode


def test_followers_get_no_sampling_parameters() -> None:
    """54 rows that each allow as many tokens as Qwen has would not fit into a frame."""
    sampling = SamplingParams(allowed_token_ids=tuple(range(151_936)), logit_bias=(), seed=7)
    history = History((1, 2, 3), (4,), (0,))
    rows = tuple(Row(SequenceId(f"r{i}"), 100, (5,), (1, 2), sampling, 1, 4, history) for i in range(256))
    plan = StepPlan(1, rows).to_compute()
    assert len(encode(PlanTables().shorten(plan))) < 64 * 1024
    for sent, row in zip(plan.rows, rows, strict=True):
        assert (sent.tokens, sent.start, sent.block_ids, sent.num_sampled) == (row.tokens, 100, (1, 2), 1)
