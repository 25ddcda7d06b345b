"""KV blocks kept after use because a later request may begin with the same tokens.

A full block is stored under its key (baton.core.blocks) while its sequence still runs; from then on the cache is
one of its holders, and the block is never written again. A request that begins with the same tokens holds the same
blocks. When its other holders have released a block it is idle: it counts as free and is evicted on demand, longest
idle first. The cache therefore uses only memory that is otherwise free, and has no size to configure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.core.blocks import HINT_BYTES, KEY_BYTES, BlockTable, Holder, KeyChain
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.window import Window

CACHE = Holder("cache", SequenceId(""))
MAX_EVENTS = 4096  # hints in one message


class KeptBlocks(NamedTuple):
    """What a worker that changes its role keeps of its KV: the cached blocks, and the number of its next step, as the
    other ranks order packing and unpacking by steps."""

    cache: PrefixCache
    next_step: int


class PrefixCache:
    """With `enabled` false, sequences neither reuse nor store blocks. With a `window`, what is reused of a prefix is
    what its next token attends to: the null block takes the place of blocks before that. A key of a column identifies
    its block of the first group; those of other groups have the group's number in theirs."""

    def __init__(
        self,
        blocks: BlockTable,
        block_size: int,
        model_digest: str = "",
        *,
        enabled: bool = True,
        window: Window | None = None,
    ) -> None:
        self.blocks, self.block_size, self.model_digest = blocks, block_size, model_digest
        self.enabled = enabled
        self.window = window or Window(0, block_size)
        self.null_block = blocks.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # For the events: how many stored keys begin with each hint, which hints the subscriber has, which may have
        # changed since, and whether it has to drop all it has.
        self._hints: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        self._cleared = False
        self.evictions = 0
        self.blocks_given_back = 0
        blocks.on_evict = self._forget

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} blocks, {self.evictions} evicted>"

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: list[bytes]) -> tuple[int, ...]:
        """Returns the columns of `keys`, in order, as far as all their blocks are stored. Hold them before any
        allocation."""
        return self._table(keys, self._run(keys, 0, range(self.window.groups)), 0)

    def _run(self, keys: list[bytes], first: int, groups: Iterable[int]) -> int:
        """Returns the first column from `first` on of which a block of `groups` is not stored."""
        end = max(first, len(keys))
        for group in groups:
            for index in range(first, end):
                if _key_in(group, keys[index]) not in self._block_of:
                    end = index
                    break
        return end

    def _match(self, sequence: Sequence, start: int) -> tuple[int, int]:
        """Returns how many columns `matching` has, and in how many the null block is in place of blocks of groups with
        a window."""
        window, dropped = self.window, start // self.block_size
        reuses = self.enabled and sequence.reuses_prefix
        if not reuses and not start:
            return 0, 0
        keys = self._keys(sequence, sequence.num_tokens - 1) if reuses else []
        with_full = self._run(keys, 0, range(window.full)) if window.full else len(keys)
        sliding = range(window.full, window.groups)
        if start:
            columns = self._run(keys, dropped, sliding)
            return min(columns, with_full) if window.full else columns, dropped
        if not window.size:
            return min(with_full, self._run(keys, 0, sliding)), 0
        # The longest prefix of which the blocks within the window of its end are stored.
        end = with_full if self._block_of else 0
        for index in range(end - 1, -1, -1):
            if any(_key_in(group, keys[index]) not in self._block_of for group in sliding):
                end = index
            elif index <= (dropped := window.num_behind(end * self.block_size)):
                return end, dropped
        return 0, 0

    def _table(self, keys: list[bytes], columns: int, dropped: int) -> tuple[int, ...]:
        groups, full = self.window.groups, self.window.full
        return tuple(
            self.null_block if index < dropped and group >= full else self._block_of[_key_in(group, keys[index])]
            for index in range(columns)
            for group in range(groups)
        )

    def store(self, keys: list[bytes], block_ids: tuple[int, ...], first_whole: int = 0) -> None:
        """Stores blocks whose KV is complete: column i of `block_ids` holds the tokens that `keys[i]` identifies, and
        only from `first_whole` on in groups with a window. A key that is stored already keeps its present block."""
        new: dict[bytes, int] = {}
        columns = (block_ids[at : at + self.window.groups] for at in range(0, len(block_ids), self.window.groups))
        for index, (column_key, column) in enumerate(zip(keys, columns, strict=True)):
            for group, block in enumerate(column if index >= first_whole else column[: self.window.full]):
                if (key := _key_in(group, column_key)) not in self._block_of and block != self.null_block:
                    new.setdefault(key, block)
        self.blocks.hold(new.values(), CACHE)
        for key, block in new.items():
            self._block_of[key] = block
            self._key_of[block] = key
            self._count(key, 1)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Removes these blocks from the cache: their content may be invalid."""
        for block in block_ids:
            if block in self._key_of:
                self.blocks.release((block,), CACHE)
                self._forget(block)

    def drop_blocks_of(self, sequence: Sequence) -> None:
        """Removes the blocks of a sequence from the cache, also those that it has given back."""
        self.drop(self.held(sequence))
        if sequence.num_dropped:
            keys = self._keys(sequence, sequence.num_dropped * self.block_size)
            all_keys = [_key_in(group, key) for key in keys for group in range(self.window.groups)]
            self.drop([block for key in all_keys if (block := self._block_of.get(key)) is not None])

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        self.evictions += 1
        self._count(key, -1)

    def _count(self, key: bytes, change: int) -> None:
        if len(key) > KEY_BYTES:  # of a further group
            return
        hint = key[:HINT_BYTES]
        self._hints[hint] = self._hints.get(hint, 0) + change
        if not self._hints[hint]:
            del self._hints[hint]
        self._changed[hint] = None

    def restart_events(self) -> None:
        """Resets the events for a new subscriber, which has no hints yet."""
        self._reported.clear()
        self._changed = dict.fromkeys(self._hints)
        self._cleared = True

    def take_events(self) -> KVCacheEvents | None:
        """Returns the hints that became or stopped being reusable since the last call, at most MAX_EVENTS: the next
        call returns the rest. None when there is nothing to report."""
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

    # What sequences reuse and store.

    def matching(self, sequence: Sequence, start: int = 0) -> tuple[int, ...]:
        """Returns the cached columns that hold the first tokens of a sequence; with `start`, in groups with a window,
        those from that position on, behind the null block. Its last token is never included: that token is computed (or
        sent) again in any case, and needs a block that is not shared."""
        return self._matching(sequence, *self._match(sequence, start))

    def _matching(self, sequence: Sequence, columns: int, dropped: int) -> tuple[int, ...]:
        return self._table(self._keys(sequence, columns * self.block_size), columns, dropped) if columns else ()

    def num_matching_tokens(self, sequence: Sequence) -> int:
        """Returns how many positions `matching` covers now."""
        return self._match(sequence, 0)[0] * self.block_size

    def held(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the blocks of a sequence's table, without the null block."""
        return self.without_null(sequence.block_ids) if sequence.num_dropped else sequence.block_ids

    def without_null(self, table: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(block for block in table if block != self.null_block)

    def reuse(self, sequence: Sequence, shared: Holder, start: int = 0) -> None:
        """Assigns the blocks of `matching` to the sequence, which has none, with `shared` as a further holder. Their
        positions, and those before `start` if no group needs them, count as computed."""
        columns, dropped = self._match(sequence, start)
        self._assign(sequence, self._matching(sequence, columns, dropped), dropped, shared, start)

    def _assign(self, sequence: Sequence, table: tuple[int, ...], dropped: int, shared: Holder, start: int) -> None:
        sequence.block_ids, sequence.num_dropped = table, dropped
        if table:
            self.blocks.hold(self.held(sequence), shared)
        covered = len(table) // self.window.groups * self.block_size
        sequence.num_computed = sequence.prefix_tokens = covered if self.window.full else max(start, covered)
        sequence.num_offered = self.window.columns(sequence.num_computed)
        sequence.first_whole = self.window.columns(start)

    def blocks_needed(self, sequence: Sequence, max_columns: int | None = None) -> int:
        """Returns how many free blocks `allocate` uses now: new ones, and cached ones that no other sequence uses; and
        those that groups without a window need later."""
        cached, _, _, needed, later = self._needs(sequence, 0, max_columns)
        return needed + later + self.blocks.num_free - self.blocks.num_free_besides(self.without_null(cached))

    def _needs(
        self, sequence: Sequence, start: int, max_columns: int | None
    ) -> tuple[tuple[int, ...], int, int, int, int]:
        """Returns the cached table, how many of its columns are dropped, how many new ones are behind the window, and
        how many blocks `allocate` needs now and later."""
        window, (matched, dropped) = self.window, self._match(sequence, start)
        cached, columns = self._matching(sequence, matched, dropped), window.columns(sequence.num_tokens)
        new = columns - matched
        if max_columns is not None:
            sliding = self.without_null(window.of_sliding(cached))
            idle = self.blocks.num_free - self.blocks.num_free_besides(sliding) == len(sliding)
            new = min(new, max_columns - max(matched - dropped, 0) if idle else max_columns)
        in_window = min(new, max(matched + new - dropped, 0))
        needed = window.full * new + window.sliding * in_window
        return cached, dropped, new - in_window, needed, window.full * (columns - matched - new)

    def allocate(
        self,
        sequence: Sequence,
        shared: Holder,
        own: Holder,
        *,
        leave: int = 0,
        start: int = 0,
        max_columns: int | None = None,
    ) -> bool:
        """Assigns a table for all its tokens to the sequence: the columns of `matching`, as `reuse` does, and free
        blocks held by `own`. With `max_columns` the table is shorter: it has at most so many columns whose blocks, in
        groups with a window, no other sequence uses now. Assigns none and returns False if fewer than `leave` blocks
        would stay free, besides those that groups without a window need for columns that it lacks."""
        cached, dropped, behind, needed, later = self._needs(sequence, start, max_columns)
        free = self.blocks.num_free_besides(self.without_null(cached)) if cached else self.blocks.num_free
        if needed + later + leave > free:
            return False
        self._assign(sequence, cached, dropped, shared, start)
        allocated = self.blocks.allocate(needed, own)
        if allocated is None:
            raise InvariantError(f"{needed} blocks for {sequence.id} could not be allocated: {self.blocks!r}")
        if behind:
            nulls = (self.null_block,) * self.window.sliding  # then `full` is 1
            first = tuple(entry for block in allocated[:behind] for entry in (block, *nulls))
            allocated = first + allocated[behind:]
        sequence.block_ids += allocated
        return True

    def store_full_blocks(self, sequence: Sequence) -> None:
        """Stores the blocks of a sequence that have become full."""
        if not self.enabled:
            return
        # Draft tokens after the token that ended the sequence may count as computed.
        keys = self._keys(sequence, min(sequence.num_computed, sequence.num_tokens))
        first, groups = sequence.num_offered, self.window.groups
        self.store(keys[first:], sequence.block_ids[first * groups : len(keys) * groups], sequence.first_whole - first)
        sequence.num_offered = len(keys)

    def give_back(self, sequence: Sequence, holder: Holder) -> None:
        """Releases the blocks that are behind the window of its next token; those that an outstanding step has in its
        table only when it is called after that step. Full ones stay cached until they are evicted."""
        self.blocks.release(sequence.retired, holder)
        sequence.retired = ()
        dropped, behind = sequence.num_dropped, self.window.num_behind(sequence.num_computed)
        if behind <= dropped:
            return
        if not sequence.kv_suspect:
            self.store_full_blocks(sequence)
        groups, table = self.window.groups, sequence.block_ids
        columns = table[dropped * groups : behind * groups]
        sequence.retired = self.window.of_sliding(columns)
        kept = (b if index % groups < self.window.full else self.null_block for index, b in enumerate(columns))
        sequence.block_ids = (*table[: dropped * groups], *kept, *table[behind * groups :])
        sequence.num_dropped = behind
        self.blocks_given_back += len(sequence.retired)
        if sequence.step_id is None:
            self.blocks.release(sequence.retired, holder)
            sequence.retired = ()

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        chain = sequence.block_keys
        if chain is None:
            request = sequence.request
            chain = KeyChain(self.model_digest, request.tenant, request.cache_salt, request.adapter, self.block_size)
            sequence.block_keys = chain
        return chain.grow(sequence.tokens, num_tokens)

    def check_idle(self) -> None:
        """Checks, in constant time, the cache of a pool that no sequence uses: its blocks are the idle ones.

        Raises:
            InvariantError: their numbers differ.
        """
        if not self.blocks.num_idle == len(self._key_of) == len(self._block_of):
            stored = f"{len(self._key_of)} blocks with a key, {len(self._block_of)} keys"
            raise InvariantError(f"prefix cache: {self.blocks.num_idle} idle blocks, but {stored}")

    def check(self) -> None:
        """Checks the invariants, including those shared with the block table.

        Raises:
            InvariantError: a stored block is not held by the cache, a block that the cache holds is not stored, keys
                and blocks do not map to each other, or the hints are not those of the keys.
        """
        if self._key_of != {block: key for key, block in self._block_of.items()}:
            raise InvariantError("prefix cache: keys and blocks do not map to each other")
        if set(self.blocks.held_by(CACHE)) != set(self._key_of):
            raise InvariantError(
                f"prefix cache: holds {self.blocks.held_by(CACHE)}, but has keys for {sorted(self._key_of)}"
            )
        hints = [key[:HINT_BYTES] for key in self._block_of if len(key) == KEY_BYTES]
        if sum(self._hints.values()) != len(hints) or set(hints) != set(self._hints):
            raise InvariantError("prefix cache: hints do not match its keys")


def _key_in(group: int, column_key: bytes) -> bytes:
    """Returns the key of a column's block of one group."""
    return column_key + group.to_bytes(2, "little") if group else column_key
