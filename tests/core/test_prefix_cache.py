"""The prefix cache: what matches, what is evicted, what is reported; rules one by one and against a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.blocks import HINT_BYTES, BlockTable, Holder, KeyChain
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents
from baton.core.prefix_cache import CACHE, PrefixCache
from baton.core.request import SequenceId

SEQ_A, SEQ_B = Holder("sequence", SequenceId("a")), Holder("sequence", SequenceId("b"))


def keys(
    tokens: tuple[int, ...], *, model: str = "m", tenant: str = "", salt: str = "", adapter: str = "", size: int = 2
) -> list[bytes]:
    return KeyChain(model, tenant, salt, adapter, size).grow(lambda start, end: tokens[start:end], len(tokens))


def stored(table: BlockTable, cache: PrefixCache, tokens: tuple[int, ...], holder: Holder = SEQ_A) -> tuple[int, ...]:
    """Blocks of `tokens`, cached and then released by their sequence."""
    named = keys(tokens)
    blocks = table.allocate(len(named), holder) or ()
    cache.store(named, blocks)
    table.release(blocks, holder)
    return blocks


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys((5,) * n)) for n in range(5)] == [0, 0, 1, 1, 2]


def test_key_depends_on_all_tokens_of_the_prefix() -> None:
    assert keys((1, 2, 3, 4))[0] == keys((1, 2, 9, 9))[0]
    assert keys((1, 2, 3, 4))[1] != keys((9, 2, 3, 4))[1]
    assert keys((1, 2, 1, 2))[0] != keys((1, 2, 1, 2))[1]


@given(st.lists(st.integers(0, 200_000), max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_keys_do_not_depend_on_how_the_chain_was_grown(tokens: list[int], stops: list[int]) -> None:
    chain = KeyChain("m", "", "s", "", 3)
    for stop in stops:
        asked = min(stop, len(tokens))
        assert len(chain.grow(lambda a, b: tuple(tokens[a:b]), asked)) == asked // 3
    grown = chain.grow(lambda a, b: tuple(tokens[a:b]), len(tokens))
    assert grown == keys(tuple(tokens), salt="s", size=3)


@pytest.mark.parametrize(
    "other", [{"model": "n"}, {"salt": "s"}, {"tenant": "t"}, {"adapter": "t"}, {"model": "ms", "salt": ""}]
)
def test_other_model_tenant_salt_or_adapter_shares_no_key(other: dict[str, str]) -> None:
    tokens = (1, 2, 3, 4, 5, 6)
    assert not set(keys(tokens)) & set(keys(tokens, **other))  # type: ignore[arg-type]


def test_model_tenant_and_salt_are_delimited_in_keys() -> None:
    assert keys((1, 2), model="ab", salt="c") != keys((1, 2), model="a", salt="bc")
    assert keys((1, 2), tenant="ab", salt="c") != keys((1, 2), tenant="a", salt="bc")
    assert keys((1, 2), tenant="a") != keys((1, 2), salt="a")


def test_longest_stored_prefix_matches() -> None:
    table = BlockTable(4)
    cache = PrefixCache(table, 2)
    blocks = stored(table, cache, (1, 2, 3, 4, 5, 6))
    assert cache.match(keys((1, 2, 3, 4, 9, 9))) == blocks[:2]
    assert cache.match(keys((9, 2, 3, 4))) == ()
    cache.check()


def test_first_block_stored_under_a_key_is_kept() -> None:
    table = BlockTable(2)
    cache = PrefixCache(table, 2)
    (first,), (second,) = table.allocate(1, SEQ_A) or (), table.allocate(1, SEQ_B) or ()
    cache.store(keys((1, 2)), (first,))
    cache.store(keys((1, 2)), (second,))
    assert cache.match(keys((1, 2))) == (first,)
    assert table.release((second,), SEQ_B) == 1
    assert len(cache) == 1
    cache.check()


def test_evicted_block_no_longer_matches_and_its_prefix_still_does() -> None:
    table = BlockTable(2)
    cache = PrefixCache(table, 2)
    blocks = stored(table, cache, (1, 2, 3, 4))
    table.hold(blocks[:1], SEQ_B)
    assert table.allocate(1, SEQ_A) == blocks[1:]
    assert cache.match(keys((1, 2, 3, 4))) == blocks[:1]
    cache.check()


def test_dropped_blocks_no_longer_match_and_stay_with_their_holders() -> None:
    table = BlockTable(3)
    cache = PrefixCache(table, 2)
    blocks = stored(table, cache, (1, 2, 3, 4))
    table.hold(blocks[:1], SEQ_A)
    cache.drop((*blocks, 2))
    assert cache.match(keys((1, 2, 3, 4))) == ()
    assert table.holders(blocks[0]) == {SEQ_A}
    assert table.num_free == 2
    cache.check()


def test_events_report_each_change_once_and_everything_after_a_restart() -> None:
    table = BlockTable(2)
    cache = PrefixCache(table, 2)
    hints = tuple(k[:HINT_BYTES] for k in keys((1, 2, 3, 4)))
    stored(table, cache, (1, 2, 3, 4))
    assert cache.take_events() == KVCacheEvents(stored=hints)
    assert cache.take_events() is None
    table.allocate(1, SEQ_B)
    assert cache.take_events() == KVCacheEvents(evicted=hints[1:])
    cache.restart_events()
    assert cache.take_events() == KVCacheEvents(stored=hints[:1], cleared=True)


def test_events_are_bounded_and_the_rest_follows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.core.prefix_cache.MAX_EVENTS", 2)
    table = BlockTable(5)
    cache = PrefixCache(table, 2)
    stored(table, cache, tuple(range(10)))
    taken = [cache.take_events() for _ in range(4)]
    assert [len(n.stored) if n else None for n in taken] == [2, 2, 1, None]


@pytest.mark.parametrize("spoil", ["leak", "loss", "names", "hints"])
def test_check_detects_an_inconsistent_cache(spoil: str) -> None:
    table = BlockTable(3)
    cache = PrefixCache(table, 2)
    blocks = stored(table, cache, (1, 2, 3, 4))
    free = next(b for b in range(3) if b not in blocks)
    table.allocate(1, SEQ_A)
    {
        "leak": lambda: table.hold((free,), CACHE),
        "loss": lambda: table.release(blocks[:1], CACHE),
        "names": lambda: cache._key_of.update({blocks[0]: b"other"}),
        "hints": lambda: cache._hints.clear(),
    }[spoil]()
    with pytest.raises(InvariantError):
        cache.check()


@pytest.mark.parametrize("spoil", ["leak", "loss"])
def test_idle_check_detects_leaked_and_lost_cache_blocks(spoil: str) -> None:
    table = BlockTable(3)
    cache = PrefixCache(table, 2)
    blocks = stored(table, cache, (1, 2, 3, 4))
    cache.check_idle()
    if spoil == "leak":
        more = table.allocate(1, SEQ_A) or ()
        table.hold(more, CACHE)
        table.release(more, SEQ_A)
    else:
        table.release(blocks[:1], CACHE)
    with pytest.raises(InvariantError, match="idle blocks, but"):
        cache.check_idle()


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences start and end over few blocks and fewer distinct tokens. The model is the content of the pool: the
    tokens written into each block. Matched blocks must hold exactly the requested tokens."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.table = BlockTable(num_blocks)
        self.cache = PrefixCache(self.table, 2)
        self.written: dict[int, tuple[int, ...]] = {}
        self.running: dict[Holder, tuple[int, ...]] = {}
        self.received: set[bytes] = set()
        self.number = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), complete=st.booleans())
    def run(self, tokens: tuple[int, ...], complete: bool) -> None:
        named = keys(tokens)
        found = self.cache.match(named)
        for index, block in enumerate(found):
            assert self.written[block] == tokens[: 2 * index + 2], "what matched is another prefix"
        needed = -(-len(tokens) // 2) - len(found)
        if needed > self.table.num_free_besides(found):
            return
        self.number += 1
        holder = Holder("sequence", SequenceId(f"s{self.number}"))
        self.table.hold(found, holder)
        new = self.table.allocate(needed, holder)
        assert new is not None and not set(new) & set(found), "room was promised"
        blocks = found + new
        for index, block in enumerate(new, start=len(found)):
            self.written[block] = tokens[: 2 * index + 2]
        full = len(named) if complete else len(found)
        self.cache.store(named[:full], blocks[:full])
        self.running[holder] = blocks

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.running)))
        self.table.release(self.running.pop(holder), holder)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.cache.drop(data.draw(st.lists(st.integers(0, self.table.num_blocks - 1), max_size=2, unique=True)))

    @rule()
    def restart_events(self) -> None:
        self.cache.restart_events()

    @rule()
    def report_events(self) -> None:
        cache_events = self.cache.take_events()
        if cache_events is not None:
            if cache_events.cleared:
                self.received.clear()
            self.received -= set(cache_events.evicted)
            self.received |= set(cache_events.stored)
        assert self.received == {key[:HINT_BYTES] for key in self.cache._block_of}

    @invariant()
    def invariants_hold(self) -> None:
        self.table.check()
        self.cache.check()
        self.table.check_held({(block, holder) for holder, blocks in self.running.items() for block in blocks})

    def teardown(self) -> None:
        for holder, blocks in getattr(self, "running", {}).items():
            self.table.release(blocks, holder)
        if hasattr(self, "table"):
            assert self.table.num_free == self.table.num_blocks


PrefixCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPrefixCache = PrefixCacheMachine.TestCase
