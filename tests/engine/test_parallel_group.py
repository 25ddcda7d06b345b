"""The group of ranks by itself: three real ranks as three threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvariantError, RankLost, StartupError
from baton.core.ranks import Ranks
from baton.engine import parallel
from baton.engine.parallel import TPGroup, connect, open_store
from baton.transfer.rendezvous import EdgeStore

SIZE = 3


class Group:
    """The ranks of one group; `each(f)` calls f(group) on all concurrently and returns their results by rank."""

    def __init__(self, port: int, round_: int) -> None:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(round_)}

        def join(rank: int) -> TPGroup:
            return connect(open_store(env, 5.0), Ranks(rank, SIZE, rank, SIZE), torch.device("cpu"), "127.0.0.1")

        self.ranks = run_concurrently([lambda rank=rank: join(rank) for rank in range(SIZE)])  # type: ignore[misc]

    def each(self, do: Callable[[TPGroup], Any]) -> list[Any]:
        return run_concurrently([lambda group=group: do(group) for group in self.ranks])  # type: ignore[misc]


def run_concurrently(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except (RankLost, StartupError, InvariantError) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    store = EdgeStore("127.0.0.1")
    yield Group(store.port, 1)
    store.close()


def partial(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(37, 64, generator=generator) * 10.0**rank).to(dtype)


@pytest.mark.parametrize("large", [1, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_adds_partial_sums_in_rank_order(
    group: Group, dtype: torch.dtype, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_LARGE_SUM", large)
    expected = partial(0, dtype).float()
    for rank in range(1, SIZE):
        expected = expected + partial(rank, dtype).float()
    for found in group.each(lambda g: g.all_reduce(partial(g.rank, dtype))):
        assert found.dtype == dtype
        assert torch.equal(found, expected.to(dtype))
    for found in group.each(lambda g: g.all_reduce(partial(g.rank, dtype)[5:6, 3:])):  # not contiguous either
        assert torch.equal(found, expected.to(dtype)[5:6, 3:])


def test_leader_gathers_parts_in_rank_order(group: Group) -> None:
    whole = torch.cat([partial(rank) for rank in range(SIZE)], dim=-1)
    leader, *followers = group.each(lambda g: g.gather(partial(g.rank)))
    assert torch.equal(leader, whole)
    assert followers == [None] * (SIZE - 1)


def test_ranks_agree_on_the_minimum(group: Group) -> None:
    assert group.each(lambda g: g.minimum(100 - g.rank, "blocks")) == [98] * SIZE


def test_two_threads_on_one_group_raise_an_invariant_error(group: Group) -> None:
    first = group.ranks[0]
    waiting = threading.Thread(target=lambda: first.barrier("one"))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(InvariantError, match="tensor-parallel two: another thread is using the group"):
        first.barrier("two")
    run_concurrently([lambda g=g: g.barrier("one") for g in group.ranks[1:]])  # type: ignore[misc]
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_all_reduce_times_out_when_other_ranks_do_not_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "RANK_SUM_LIMIT_S", 0.3)
    store = EdgeStore("127.0.0.1")
    group = Group(store.port, 1)
    started = time.monotonic()
    with pytest.raises(RankLost, match="tensor-parallel all-reduce of rank 0 failed: "):
        group.ranks[0].all_reduce(partial(0))
    assert time.monotonic() - started < 5.0
    store.close()


def test_single_rank_needs_no_peers() -> None:
    alone = TPGroup()
    x = partial(0)
    assert alone.all_reduce(x) is x and alone.gather(x) is x
    assert alone.minimum(5, "blocks") == 5
    assert connect(None, Ranks(), torch.device("cpu"), "nowhere").size == 1


def test_shards_cover_every_index_once() -> None:
    for size in (1, 2, 4, 8):
        ranks = [TPGroup(rank, size) for rank in range(size)]
        assert [i for g in ranks for i in range(*g.part(48, "x").indices(48))] == list(range(48))
        for vocab in (320, 333, 5):
            shards = [g.vocabulary_part(vocab) for g in ranks]
            assert [i for ids, _ in shards for i in range(*ids.indices(vocab))] == list(range(vocab))
            assert {rows for _, rows in shards} == {-(-vocab // size)}


def test_missing_or_unreachable_store_is_refused() -> None:
    with pytest.raises(StartupError, match="MASTER_ADDR and MASTER_PORT"):
        open_store({})
    with pytest.raises(StartupError, match=r"cannot connect to the store at 127\.0\.0\.1:1: "):
        open_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, 1.0)
    several_nodes = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    with pytest.raises(StartupError, match=r"--local-addr on each node\)$"):
        open_store({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **several_nodes}, 1.0)
