"""Where a request goes whose prefix some workers hold already."""

from __future__ import annotations

from baton.core.events import KVCacheEvents
from coordinator.policy.dispatch import PREFIX_SLACK, Dispatcher, Ticket
from coordinator.policy.pool import HeldBlocks, Worker
from tests.support.builders import make_dispatcher

HINTS = tuple(bytes([n]) * 8 for n in range(10))


def dispatcher(*workers: str, step_tokens: int = 40) -> Dispatcher:
    return make_dispatcher(*workers, blocks=1000, step_tokens=step_tokens)[0]


def worker(d: Dispatcher, name: str) -> Worker:
    found = d._workers.get(name)
    assert found is not None
    return found


def placed(d: Dispatcher, name: str, tokens: int = 41, prefix: tuple[bytes, ...] = HINTS) -> tuple[str, str | None]:
    d.submit(Ticket(name, tokens, tokens + 4, prefix={4: prefix}))
    (placement,) = d.place()
    d.check()
    return placement.prefill, placement.decode


def test_the_worker_that_holds_the_prefix_computes_the_rest() -> None:
    d = dispatcher("p0", "p1", "d0")
    worker(d, "p1").update_held(KVCacheEvents(stored=HINTS))
    assert placed(d, "a")[0] == "p1"
    assert worker(d, "p1").backlog_tokens == 1
    d.prefilled("a")
    assert worker(d, "p1").backlog_tokens == 0


def test_a_long_backlog_outweighs_a_short_prefix() -> None:
    d = dispatcher("p0", "p1", "d0")
    worker(d, "p1").update_held(KVCacheEvents(stored=HINTS[:2]))
    assert placed(d, "a", prefix=HINTS[:2])[0] == "p1"
    assert placed(d, "b", prefix=HINTS[:2])[0] == "p0"


def test_a_request_of_which_little_is_left_fits_under_the_cap() -> None:
    d = dispatcher("p0", "d0", step_tokens=40)
    assert placed(d, "a", tokens=60, prefix=())[0] == "p0"
    d.submit(Ticket("b", 41, 45, prefix={4: HINTS}))
    assert d.place() == []
    worker(d, "p0").update_held(KVCacheEvents(stored=HINTS))
    assert [p.name for p in d.place()] == ["b"]
    d.check()


def test_only_a_prefix_counts_and_only_while_it_is_held() -> None:
    held = HeldBlocks(100)
    held.update(KVCacheEvents(stored=HINTS[:3] + HINTS[4:6]))
    assert held.count(HINTS) == 3
    held.update(KVCacheEvents(evicted=HINTS[1:2]))
    assert held.count(HINTS) == 1
    held.update(KVCacheEvents(stored=HINTS[1:2], cleared=True))
    assert (held.count(HINTS), held.count(HINTS[1:])) == (0, 1)


def test_what_a_worker_can_claim_to_hold_is_bounded_by_its_pool() -> None:
    held = HeldBlocks(4)
    for _ in range(3):
        held.update(KVCacheEvents(stored=HINTS))
    assert len(held) <= 4


def test_decode_goes_where_the_prefix_is_until_that_worker_is_much_fuller() -> None:
    d = dispatcher("p0", "d0", "d1", step_tokens=10_000)
    worker(d, "d1").update_held(KVCacheEvents(stored=HINTS))
    went = [placed(d, f"r{n}")[1] for n in range(PREFIX_SLACK + 3)]
    assert went == ["d1"] * (PREFIX_SLACK + 1) + ["d0", "d1"]


def test_a_prefix_is_computed_for_the_block_sizes_of_workers_that_hold_anything() -> None:
    d = dispatcher("p0", "d0")
    assert not d.held_block_sizes
    worker(d, "p0").update_held(KVCacheEvents(stored=HINTS))
    assert d.held_block_sizes == {4}
    worker(d, "p0").state = "lost"
    assert not d.held_block_sizes
