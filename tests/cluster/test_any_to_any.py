"""Any number of prefill ranks hands over to any number of decode ranks, in blocks of one or two sizes: same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.rank_tokens import COUNT, REQUESTS, eight_heads, same_tokens_as_one_rank

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

QUICK = [(1, 2, 1)]  # (prefill ranks, decode ranks, KV heads): a head on both; the last test has two prefill ranks
GRID = [(p, d, heads) for p in (1, 2, 4) for d in (1, 2, 4) for heads in (2, 4, 8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns a function that creates the model with a number of KV heads, in one directory for all tests."""
    where = tmp_path_factory.mktemp("any-to-any")

    @cache
    def make(kv_heads: int) -> Path:
        return eight_heads(where / str(kv_heads), kv_heads)

    return make


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "kv_heads"), QUICK)
async def test_tokens_equal_those_of_one_rank(
    prefill_tp: int, decode_tp: int, kv_heads: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(kv_heads), prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "kv_heads"), [g for g in GRID if g not in QUICK])
async def test_tokens_equal_those_of_one_rank_for_every_rank_and_kv_head_count(
    prefill_tp: int, decode_tp: int, kv_heads: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(kv_heads), prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.mark.long  # the test of draft tokens has such edges, too
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_kv_sent_over_ipc_edges_gives_the_tokens_of_one_rank(
    prefill_tp: int, decode_tp: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(4), edge_kind="ipc", prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.mark.parametrize("edge_kind", ["ipc", pytest.param("gloo", marks=pytest.mark.long)])
async def test_a_decode_worker_of_two_ranks_verifies_draft_tokens(
    edge_kind: str, checkpoint: Callable[[int], Path]
) -> None:
    """The draft is the model itself, unsharded at the leader; its tokens differ from the target's only at near ties."""
    model = checkpoint(2)
    running = await same_tokens_as_one_rank(model, decode_tp=2, draft=str(model), draft_tokens=4, edge_kind=edge_kind)
    counts = running["decode-0"]["speculation"]
    assert counts["accepted_tokens"] > 0.9 * counts["drafted_tokens"] > 0
    assert counts["steps"] < REQUESTS * (COUNT - 1) / 3


@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), pytest.param(32, 16, marks=pytest.mark.long)])
async def test_pools_with_different_block_sizes_give_the_tokens_of_one_rank(
    prefill: int, decode: int, checkpoint: Callable[[int], Path]
) -> None:
    sizes = {"prefill_block_size": prefill, "decode_block_size": decode}
    await same_tokens_as_one_rank(checkpoint(2), prefill_tp=2 if prefill < decode else 1, **sizes)
