"""The holders of KV blocks. A block is free, receiving (exclusive), or held by sequences, send pins and the cache.

A block with a transfer in flight becomes free only when its transfer has ended or its edge is closed: holders of kind
`send` and `receiving` represent such transfers. `check()` verifies the invariants block by block; `check_idle()`
verifies from totals, in constant time, that all blocks of a pool without sequences are free.

A block that only the cache holds is idle: it counts as free, and is evicted when no other block is free, longest idle
first. `on_evict` is called for each evicted block before the block gets its new holder.

Blocks are named by their content: the key of a full block is a keyed hash over its tokens and the key of the block
before it, so it represents all tokens from the first on; the hash is keyed by the model's digest and the request's
tenant, salt and LoRA adapter, so that equal keys mean equal KV and requests of different tenants, salts or adapters
share no key. The coordinator computes the same keys as the workers.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.core.errors import InvariantError
from baton.core.request import SequenceId

HolderKind = Literal["sequence", "send", "receiving", "cache"]


class Holder(NamedTuple):
    kind: HolderKind
    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """`free` includes the blocks that only the cache holds."""

    total: int
    free: int
    receiving: int
    pinned: int


class BlockTable:
    """The blocks of one KV pool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        self._free: deque[int] = deque(range(num_blocks))  # oldest first
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._holders: list[set[Holder]] = [set() for _ in range(num_blocks)]
        self._num_held: dict[Holder, int] = {}  # without the cache

    def __repr__(self) -> str:
        c = self.counts()
        held = c.total - c.free
        return f"<BlockTable {held} held, {c.receiving} receiving, {c.pinned} pinned, {c.free} free of {c.total}>"

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free outright, or idle in the cache."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that only the cache holds."""
        return len(self._idle)

    def num_free_besides(self, shared: Iterable[int]) -> int:
        """Returns how many blocks can be allocated once `shared`, which are cached blocks, are held."""
        return self.num_free - sum(block in self._idle for block in shared)

    def num_free_without(self, holders: Collection[Holder], blocks: Iterable[int]) -> int:
        """Returns how many blocks could be allocated if `holders` released `blocks`; other holders keep theirs."""
        held = [self._holders[block] for block in set(blocks) if block not in self._idle]
        freed = sum(bool(theirs) and all(h.kind == "cache" or h in holders for h in theirs) for theirs in held)
        return self.num_free + freed

    def counts(self) -> BlockCounts:
        receiving = sum(any(h.kind == "receiving" for h in hs) for hs in self._holders)
        pinned = sum(any(h.kind == "send" for h in hs) for hs in self._holders)
        return BlockCounts(self.num_blocks, self.num_free, receiving, pinned)

    def allocate(self, count: int, holder: Holder) -> tuple[int, ...] | None:
        """Allocates `count` free blocks to `holder`, or allocates none and returns None. Idle blocks are evicted when
        too few others are free."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            block, _ = self._idle.popitem(last=False)
            self._holders[block].clear()
            self._free.append(block)
            self.on_evict(block)
        taken = tuple(self._free.popleft() for _ in range(count))
        for block in taken:
            self._holders[block].add(holder)
            self._update_free(block)
        self._count(holder, count)
        return taken

    def hold(self, blocks: Iterable[int], holder: Holder) -> None:
        """Adds a holder to blocks that are already held.

        Raises:
            InvariantError: a block is free, receiving or already held by `holder`, or `holder` is to receive into a
                block that has other holders. Nothing has changed then.
        """
        blocks = self._distinct(blocks)
        for block in blocks:
            holders = self._holders[block]
            if not holders:
                raise InvariantError(f"block {block} is free and cannot be held by {holder}")
            if holder.kind == "receiving" or _being_received(holders):
                raise InvariantError(f"block {block} is held by {sorted(holders)}; receiving is exclusive")
            if holder in holders:
                raise InvariantError(f"block {block} is already held by {holder}")
        for block in blocks:
            self._holders[block].add(holder)
            self._update_free(block)
        self._count(holder, len(blocks))

    def convert(self, blocks: Iterable[int], old: Holder, new: Holder) -> None:
        """Replaces one holder by another, for example when receiving has ended and the sequence takes over the blocks.

        Raises:
            InvariantError: `old` does not hold a block, `new` already does, or `new` is to receive into a block that
                has other holders. Nothing has changed then.
        """
        blocks = self._distinct(blocks)
        for block in blocks:
            holders = self._holders[block]
            if old not in holders:
                raise InvariantError(f"block {block} is not held by {old}")
            if new in holders:
                raise InvariantError(f"block {block} is already held by {new}")
            if new.kind == "receiving" and len(holders) > 1:
                raise InvariantError(f"block {block} is held by {sorted(holders)}; receiving is exclusive")
        for block in blocks:
            self._holders[block].remove(old)
            self._holders[block].add(new)
            self._update_free(block)
        self._count(old, -len(blocks))
        self._count(new, len(blocks))

    def release(self, blocks: Iterable[int], holder: Holder) -> int:
        """Removes `holder` from the blocks; blocks that no holder but the cache keeps become free. Returns how many
        more blocks can be allocated than before. Of the cached blocks, later ones count as longer idle and are evicted
        first: a prefix is useful without its continuation, but not the reverse.

        Raises:
            InvariantError: the holder does not hold a block (a double free). Nothing has changed then.
        """
        blocks = self._distinct(blocks)
        for block in blocks:
            if holder not in self._holders[block]:
                raise InvariantError(f"block {block} is not held by {holder}")
        before = self.num_free
        self._free.extend(block for block in blocks if len(self._holders[block]) == 1)
        for block in reversed(blocks):
            self._holders[block].remove(holder)
            self._update_free(block)
        self._count(holder, -len(blocks))
        return self.num_free - before

    def _count(self, holder: Holder, change: int) -> None:
        if holder.kind != "cache":
            held = self._num_held.get(holder, 0) + change
            if held:
                self._num_held[holder] = held
            else:
                self._num_held.pop(holder, None)

    def _update_free(self, block: int) -> None:
        """Appends a block to the idle list, or removes it, after its holders changed."""
        if _only_cached(self._holders[block]):
            self._idle.setdefault(block)
        else:
            self._idle.pop(block, None)

    def _distinct(self, blocks: Iterable[int]) -> tuple[int, ...]:
        blocks = tuple(blocks)
        if len(set(blocks)) != len(blocks) or any(not 0 <= block < self.num_blocks for block in blocks):
            raise InvariantError(f"blocks {blocks} are not distinct blocks of a pool of {self.num_blocks}")
        return blocks

    def holders(self, block: int) -> frozenset[Holder]:
        return frozenset(self._holders[block])

    def held_by(self, holder: Holder) -> tuple[int, ...]:
        return tuple(b for b, holders in enumerate(self._holders) if holder in holders)

    def check_idle(self) -> None:
        """Checks a pool that no sequence uses: no holder but the cache keeps a block, and every block is free. Uses
        totals, in constant time; `check` verifies that the totals match the blocks.

        Raises:
            InvariantError: a holder still has blocks (a leak; the message names the holder), or the number of free
                blocks is not the number of blocks.
        """
        if self._num_held:
            raise InvariantError(f"blocks are still held although no sequence is left: {self._num_held}")
        if self.num_free != self.num_blocks:
            raise InvariantError(f"{self.num_free} of {self.num_blocks} blocks are free, and the others have no holder")

    def check(self) -> None:
        """Checks the invariants, block by block.

        Raises:
            InvariantError: a block is both free and held, neither, free twice, received by one of several holders, or
                idle and not held by the cache alone; or the count of a holder's blocks is wrong.
        """
        if self._num_held != Counter(h for holders in self._holders for h in holders if h.kind != "cache"):
            raise InvariantError(f"the holders' block counts are wrong: {self._num_held}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        for block, holders in enumerate(self._holders):
            if bool(holders) == (block in free):
                raise InvariantError(f"block {block} is held by {sorted(holders)} and free={block in free}")
            if len(holders) > 1 and any(h.kind == "receiving" for h in holders):
                raise InvariantError(f"block {block} is receiving and held by {sorted(holders)}")
            if (bool(holders) and all(h.kind == "cache" for h in holders)) != (block in self._idle):
                raise InvariantError(f"block {block} is held by {sorted(holders)} and idle={block in self._idle}")

    def check_held(self, expected: set[tuple[int, Holder]]) -> None:
        """Checks that the holders, apart from the cache, are exactly `expected`.

        Raises:
            InvariantError: a block has an unexpected holder, or lacks an expected one.
        """
        held = {(b, holder) for b, holders in enumerate(self._holders) for holder in holders if holder.kind != "cache"}
        if held != expected:
            raise InvariantError(
                f"held but not expected: {sorted(held - expected)}; expected but not held: {sorted(expected - held)}"
            )


def _being_received(holders: set[Holder]) -> bool:
    return len(holders) == 1 and next(iter(holders)).kind == "receiving"


def _only_cached(holders: set[Holder]) -> bool:
    """A plain loop, for speed: it checks hundreds of blocks before the first step of a long sequence."""
    for holder in holders:
        if holder.kind != "cache":
            return False
    return bool(holders)


KEY_BYTES = 32
HINT_BYTES = 8  # as much of a key as routing needs: a collision there only costs a recomputation


class KeyChain:
    """The keys of a sequence's full blocks, `keys`, as far as they have been computed."""

    __slots__ = ("_block_size", "_root", "keys")

    def __init__(self, model_digest: str, tenant: str, salt: str, adapter: str, block_size: int) -> None:
        named = hashlib.blake2b(digest_size=32, person=b"baton prefix")
        for part in map(str.encode, (model_digest, tenant, salt, adapter)):
            named.update(struct.pack("<Q", len(part)) + part)
        self._root = named.digest()
        self._block_size = block_size
        self.keys: list[bytes] = []

    def grow(self, tokens: Callable[[int, int], tuple[int, ...]], num_tokens: int) -> list[bytes]:
        """Returns the keys of the full blocks among the first `num_tokens` positions; `tokens(start, end)` returns the
        tokens at [start, end), the same in every call."""
        num_blocks, size = num_tokens // self._block_size, self._block_size
        start = len(self.keys) * size
        new = tokens(start, num_blocks * size) if start < num_blocks * size else ()
        for first in range(0, len(new), size):
            before = self.keys[-1] if self.keys else b""
            packed = struct.pack(f"<{size}I", *new[first : first + size])
            self.keys.append(hashlib.blake2b(before + packed, digest_size=KEY_BYTES, key=self._root).digest())
        return self.keys[:num_blocks]
