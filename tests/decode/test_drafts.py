"""The draft model's KV beside that of its sequence, rule by rule."""

from __future__ import annotations

from dataclasses import replace

from baton.core.request import SequenceId
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import CATCH_UP, ModelDrafts
from decode.speculation.policy import Speculation
from tests.support.builders import make_decode, make_layout, make_outcome, make_request

PROMPT = 3 * CATCH_UP


def scheduler_with_drafts() -> DecodeScheduler:
    speculation = Speculation(ModelDrafts(make_layout(4), 64, 1000), fixed_length=2)
    return make_decode(num_blocks=64, block_size=4, max_running=1, speculation=speculation)


def test_draft_kv_filled_while_a_sequence_waits_leaves_a_token_for_the_draft_row() -> None:
    """A draft row has at least one token: no engine computes an empty row."""
    scheduler = scheduler_with_drafts()
    for name, tokens in (("a", 8), ("b", 20)):
        scheduler.reserve(make_request(name, PROMPT, tokens, eos=()), 0.0)
        assert scheduler.received(SequenceId(name), 5, 0.0) is None
    filled = drafted = 0
    while scheduler.num_sequences:
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        for draft in plan.drafts:
            assert draft.tokens
            waits = draft.sequence_id not in {row.sequence_id for row in plan.rows}
            filled += len(draft.tokens) * waits
            drafted += draft.num_draft_tokens
        requested = {draft.row: draft.num_draft_tokens for draft in plan.drafts if draft.num_draft_tokens}
        draft_tokens = tuple((7,) * requested.get(index, 0) for index in range(len(plan.rows))) if requested else ()
        scheduler.finish_step(
            replace(make_outcome(plan.with_draft_tokens(draft_tokens)), draft_tokens=draft_tokens), 0.0
        )
        scheduler.check()
    assert filled > CATCH_UP and drafted > 0
