"""The rank of a process, from its environment; its cores and its KV layout."""

from __future__ import annotations

import pytest

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.ranks import Ranks
from baton.core.reshard import local_heads, local_layout

ENV = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


def test_ranks_are_read_from_the_environment_of_torchrun() -> None:
    assert Ranks.from_environment(ENV) == Ranks(3, 4, 1, 2)
    assert not Ranks.from_environment(ENV).leads
    assert Ranks.from_environment({}) == Ranks.from_environment({"WORLD_SIZE": "1"}) == Ranks(0, 1, 0, 1)
    assert Ranks().leads


def test_ranks_divide_the_cores_of_their_machine() -> None:
    assert [Ranks(r, 4, r % 2, 2).cores([3, 5, 7]) for r in range(4)] == [(3,), (5, 7), (3,), (5, 7)]
    assert [Ranks(r, 3, r, 3).cores([3, 5]) for r in range(3)] == [(3,), (5,), (3,)]
    assert Ranks().cores([1, 2]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "4"), ("RANK", "-1"), ("RANK", ""), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "5"), ("WORLD_SIZE", "x")],
)
def test_invalid_rank_variables_are_refused(name: str, value: str) -> None:
    with pytest.raises(StartupError, match="environment: "):
        Ranks.from_environment({**ENV, name: value})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_ranks_layout_has_its_own_heads(tp: int) -> None:
    layout = KVLayout(16, (LayerKV(4, 64, "float32"), LayerKV(8, 32, "bfloat16", window=100)))
    for rank in range(tp):
        local = local_layout(layout, tp, rank)
        assert local.block_size == 16
        for whole, mine in zip(layout.layers, local.layers, strict=True):
            assert mine.num_kv_heads == len(local_heads(whole.num_kv_heads, tp, rank))
            assert (mine.head_dim, mine.dtype, mine.window) == (whole.head_dim, whole.dtype, whole.window)
