"""Blocks kept after use because a later request may begin with the same tokens.

A full block is stored under its key (baton.core.prefix_keys) while its sequence still runs; from then on the cache is
one of its holders, and nobody writes into it again. A request that begins with the same tokens holds the same blocks.
When its other holders have let go the block is idle: it counts as free and goes to whoever needs it, the longest idle
first. So the cache costs no memory that anybody else could use, and there is no size to configure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.blocks import BlockTable, Holder
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents
from baton.core.prefix_keys import HINT_BYTES
from baton.core.request import SequenceId

CACHE = Holder("cache", SequenceId(""))
MAX_EVENTS = 4096  # hints in one message


class PrefixCache:
    """Complete state: the block stored under each key and the key of each stored block; for the events, which hints
    have been sent and which may have changed since. With `enabled` false nobody takes from it or leaves anything there
    (baton.core.prefix_use)."""

    def __init__(self, blocks: BlockTable, block_size: int, model_digest: str = "", *, enabled: bool = True) -> None:
        self.blocks, self.block_size, self.model_digest = blocks, block_size, model_digest
        self.enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._hints: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        self._cleared = False
        self.evictions = 0
        blocks.on_evict = self._forget

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} blocks, {self.evictions} evicted>"

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The blocks of the longest prefix that is stored, in order. Hold them before anything is allocated."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keeps blocks whose KV is complete: `block_ids[i]` holds the tokens that `keys[i]` names. Where another block
        holds the same already, that one stays."""
        new: dict[bytes, int] = {}
        for key, block in zip(keys, block_ids, strict=True):
            if key not in self._block_of:
                new.setdefault(key, block)
        self.blocks.hold(new.values(), CACHE)
        for key, block in new.items():
            self._block_of[key] = block
            self._key_of[block] = key
            self._count(key, 1)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Keeps none of these blocks any longer: what is in them is in doubt."""
        for block in block_ids:
            if block in self._key_of:
                self.blocks.release((block,), CACHE)
                self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        self.evictions += 1
        self._count(key, -1)

    def _count(self, key: bytes, change: int) -> None:
        hint = key[:HINT_BYTES]
        self._hints[hint] = self._hints.get(hint, 0) + change
        if not self._hints[hint]:
            del self._hints[hint]
        self._changed[hint] = None

    def restart_events(self) -> None:
        """The next subscriber knows nothing yet."""
        self._reported.clear()
        self._changed = dict.fromkeys(self._hints)
        self._cleared = True

    def take_events(self) -> KVCacheEvents | None:
        """What has become or stopped being reusable since the last time, MAX_EVENTS hints at most: the rest is for the
        next time. None when there is nothing to say."""
        stored: list[bytes] = []
        evicted: list[bytes] = []
        while self._changed and len(stored) + len(evicted) < MAX_EVENTS:
            hint = next(iter(self._changed))
            del self._changed[hint]
            if hint in self._hints and hint not in self._reported:
                self._reported.add(hint)
                stored.append(hint)
            elif hint not in self._hints and hint in self._reported:
                self._reported.remove(hint)
                evicted.append(hint)
        cleared, self._cleared = self._cleared, False
        return KVCacheEvents(tuple(stored), tuple(evicted), cleared) if stored or evicted or cleared else None

    def check_idle(self) -> None:
        """Checks, in constant time, the cache of a pool that no sequence uses: its blocks are the idle ones.

        Raises:
            InvariantError: they are not as many.
        """
        if not self.blocks.num_idle == len(self._key_of) == len(self._block_of):
            stored = f"{len(self._key_of)} blocks with a key, {len(self._block_of)} keys"
            raise InvariantError(f"the cache holds {self.blocks.num_idle} blocks and knows {stored}")

    def check(self) -> None:
        """Proves that invariants hold, with those of the blocks.

        Raises:
            InvariantError: a stored block is not held by the cache, or one held by it is not stored, or two keys and
                their blocks do not name each other.
        """
        if self._key_of != {block: key for key, block in self._block_of.items()}:
            raise InvariantError("keys and blocks of the prefix cache do not name each other")
        if set(self.blocks.held_by(CACHE)) != set(self._key_of):
            raise InvariantError(f"the cache holds {self.blocks.held_by(CACHE)} and knows {sorted(self._key_of)}")
        hints = [key[:HINT_BYTES] for key in self._block_of]
        if sum(self._hints.values()) != len(hints) or set(hints) != set(self._hints):
            raise InvariantError("the hints of the prefix cache are not those of its keys")
