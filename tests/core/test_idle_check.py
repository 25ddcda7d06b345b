"""What a worker without sequences checks on its event loop ten times a second, where it may delay requests."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from baton.core.blocks import Holder
from baton.core.errors import InvariantError
from baton.core.request import SequenceId
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import ModelDrafts
from decode.speculation.policy import Speculation
from prefill.scheduler import PrefillScheduler
from tests.support.builders import fill_cache, make_decode, make_layout, make_prefill, make_request

LEAKED = Holder("send", SequenceId("leaked"))


def with_draft_model(num_blocks: int) -> DecodeScheduler:
    return make_decode(num_blocks, speculation=Speculation(ModelDrafts(make_layout(), num_blocks, 1000)))


@pytest.mark.parametrize("make", [make_prefill, make_decode, with_draft_model])
def test_idle_check_is_fast_with_many_blocks(make: Callable[[int], PrefillScheduler | DecodeScheduler]) -> None:
    scheduler = make(100_000)
    fill_cache(scheduler, 0.8)
    took_s = []
    for _ in range(3):
        began = time.thread_time()
        scheduler.check_idle()
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.002  # block by block it takes 0.1 s and more
    scheduler.check()


@pytest.mark.parametrize("make", [make_prefill, make_decode])
def test_idle_check_detects_a_leaked_block(make: Callable[[int], PrefillScheduler | DecodeScheduler]) -> None:
    scheduler = make(8)
    fill_cache(scheduler, 0.5)
    scheduler.check_idle()
    scheduler.blocks.allocate(1, LEAKED)
    with pytest.raises(InvariantError, match="leaked"):
        scheduler.check_idle()


def test_idle_check_detects_a_leaked_block_of_a_draft_model() -> None:
    scheduler = with_draft_model(8)
    drafts = scheduler.speculation.drafts
    assert isinstance(drafts, ModelDrafts)
    drafts.blocks.allocate(1, LEAKED)
    with pytest.raises(InvariantError, match="leaked"):
        scheduler.check_idle()


def test_idle_check_detects_a_queue_that_is_not_empty() -> None:
    scheduler = make_prefill()
    scheduler.submit(make_request("left"), 0.0, hand_over=False)
    scheduler.sequences.clear()
    with pytest.raises(InvariantError, match="left"):
        scheduler.check_idle()
