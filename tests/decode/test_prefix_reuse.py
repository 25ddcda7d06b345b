"""Which blocks of sequences a decode worker keeps and reuses for later ones: the rules one by one."""

from __future__ import annotations

import pytest

from baton.core.errors import Unavailable
from baton.core.events import SequenceEnded
from baton.core.request import GenerateRequest
from baton.core.step import StepOutcome
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import NgramDrafts
from decode.speculation.policy import Speculation
from tests.support.builders import EOS, make_decode, make_outcome, make_request


def offered(scheduler: DecodeScheduler, request: GenerateRequest) -> int:
    """Reserves blocks; returns how many tokens need not be sent."""
    scheduler.reserve(request, 0.0)
    scheduler.check()
    return scheduler.sequences[request.sequence_id].prefix_tokens


def ready(scheduler: DecodeScheduler, request: GenerateRequest) -> int:
    cached = offered(scheduler, request)
    assert scheduler.received(request.sequence_id, 5, 0.0) is None
    return cached


def step(scheduler: DecodeScheduler, now: float = 0.0) -> tuple[SequenceEnded, ...]:
    plan = scheduler.begin_step(now)
    assert plan is not None
    ended = scheduler.finish_step(make_outcome(plan, 7), now).ended
    scheduler.check()
    return ended


def finish(scheduler: DecodeScheduler, request: GenerateRequest) -> int:
    cached = ready(scheduler, request)
    while scheduler.has_sequence(request.sequence_id):
        step(scheduler)
    return cached


def test_prompt_and_generated_tokens_of_a_finished_sequence_are_cached() -> None:
    scheduler = make_decode(num_blocks=16)
    assert finish(scheduler, make_request("turn 1", 6, 6)) == 0
    history = (*range(1000, 1006), 5, 7, 7, 7, 7, 7)  # the last token's KV was never computed
    assert finish(scheduler, make_request("turn 2", (*history, 1, 2, 3), 2)) == 8
    assert finish(scheduler, make_request("turn 3", (*history, 1, 2, 3), 2)) == 12
    assert scheduler.bytes_reused == 20 * scheduler.layout.bytes_per_token
    assert scheduler.blocks.num_free == 16


def test_received_prompt_is_shared_while_its_sequence_runs_except_for_the_last_token() -> None:
    scheduler = make_decode(num_blocks=16)
    assert ready(scheduler, make_request("a", 8)) == 0
    assert ready(scheduler, make_request("b", 8)) == 4
    assert ready(scheduler, make_request("c", 9)) == 8
    a, b, c = (scheduler.block_ids(make_request(n).sequence_id) for n in "abc")
    assert (a[0], a[1]) == (b[0], c[1]) and b[1] not in a
    assert scheduler.blocks.num_free == 16 - 2 - 1 - 1


def test_prompt_that_is_still_arriving_is_not_shared() -> None:
    scheduler = make_decode(num_blocks=16)
    assert [offered(scheduler, make_request(name, 9)) for name in "ab"] == [0, 0]


def test_blocks_of_an_arriving_prompt_are_shared_as_soon_as_they_are_complete() -> None:
    scheduler = make_decode(num_blocks=16)
    a = make_request("a", 15)
    assert offered(scheduler, a) == 0
    for received, receiving, cached in ((3, 4, 0), (7, 3, 4), (12, 1, 12), (14, 1, 12)):
        scheduler.tokens_received(a.sequence_id, received)
        assert scheduler.blocks.counts().receiving == receiving
        later = make_request(f"at {received}", 15)
        assert offered(scheduler, later) == cached
        scheduler.abort(later.sequence_id)
    assert scheduler.received(a.sequence_id, 5, 0.0) is None
    assert scheduler.blocks.counts().receiving == 0
    assert step(scheduler) == ()


def test_received_blocks_of_an_aborted_prompt_are_free_and_cached() -> None:
    scheduler = make_decode(num_blocks=8)
    a = make_request("a", 15)
    offered(scheduler, a)
    scheduler.tokens_received(a.sequence_id, 9)
    scheduler.abort(a.sequence_id)
    scheduler.check()
    assert scheduler.blocks.num_free == 8
    assert offered(scheduler, make_request("b", 15)) == 8


def test_aborted_receiving_sequence_releases_its_shared_blocks() -> None:
    scheduler = make_decode(num_blocks=8)
    finish(scheduler, make_request("a", 8, 2))
    b = make_request("b", 12)
    assert offered(scheduler, b) == 8
    scheduler.abort(b.sequence_id)
    scheduler.check()
    assert scheduler.blocks.num_free == 8
    assert offered(scheduler, make_request("c", 12)) == 8


def test_different_cache_salts_share_no_blocks() -> None:
    scheduler = make_decode(num_blocks=16)
    finish(scheduler, make_request("a", 9, 2, cache_salt="s"))
    assert finish(scheduler, make_request("b", 9, 2)) == 0
    assert finish(scheduler, make_request("c", 9, 2, cache_salt="s")) == 8


def test_disabled_prefix_cache_keeps_no_blocks() -> None:
    scheduler = make_decode(num_blocks=16, prefix_cache=False)
    assert [finish(scheduler, make_request(name, 9, 2)) for name in "ab"] == [0, 0]


def test_cached_blocks_are_evicted_for_a_prompt_and_counted_once_when_shared() -> None:
    scheduler = make_decode(num_blocks=4)
    finish(scheduler, make_request("a", 8, 2))
    assert offered(scheduler, make_request("b", range(15), 1)) == 0
    scheduler.abort(make_request("b").sequence_id)
    finish(scheduler, make_request("a again", 8, 2))

    offered(scheduler, make_request("c", 12, 2))
    with pytest.raises(Unavailable, match="2 KV blocks needed"):
        scheduler.reserve(make_request("d", (9,) * 8, 2), 0.0)


def test_preempted_sequence_recomputes_only_tokens_that_are_no_longer_cached() -> None:
    scheduler = make_decode(num_blocks=8)
    ready(scheduler, make_request("first", 8, 16))
    ready(scheduler, make_request("second", range(8), 12))
    while not scheduler.num_preempted:
        step(scheduler)
    computed = scheduler.prompt_tokens_computed
    ended = []
    while scheduler.num_sequences:
        ended += step(scheduler)
    assert [e.sequence.request_id for e in ended] == ["first", "second"]
    assert scheduler.prompt_tokens_computed - computed < 8, "its prompt was in part still there"


def test_draft_tokens_after_the_end_token_are_not_cached() -> None:
    scheduler = make_decode(num_blocks=16, speculation=Speculation(NgramDrafts(), fixed_length=4))
    prompt = (1, 2, 3, EOS, 4, 4, 4, 1, 2)
    request = make_request("a", prompt, 20)
    scheduler.reserve(request, 0.0)
    assert scheduler.received(request.sequence_id, 3, 0.0) is None
    plan = scheduler.begin_step(0.0)
    assert plan is not None and plan.rows[0].tokens == (3, EOS, 4, 4, 4)
    assert scheduler.finish_step(StepOutcome(plan.step_id, ((EOS, 4, 4, 4, 9),)), 0.0).ended
    scheduler.check()
    assert finish(scheduler, make_request("b", (*prompt, 3, EOS, 4, 4, 4), 2)) == 8
