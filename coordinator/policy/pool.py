"""The workers of one role in one class, and the routing state of each. Pure.

Each worker keeps the state that decides about placements as two plain values: `room`, how much more it can accept, and
`rank`, the order of preference among suitable workers. Both are derived from its state, its load and what is placed on
it. A pool keeps the ranks sorted, so that a placement usually compares the first few workers and not all of them. An
index of block hints finds the workers that have cached a prefix without asking each one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from operator import attrgetter

from baton.core.commands import AdapterStates, Join, Role
from baton.core.errors import InvariantError
from baton.core.events import GpuUsage, KVCacheEvents, Load, PromptCost
from baton.core.window import STEPS_AHEAD, Window
from coordinator.policy.membership import DRAINING, LEFT, LOST, READY, Event, Member

BACKLOG_STEPS = 2
LONG_STEPS = 2 * BACKLOG_STEPS
"""A prompt of more steps than these is placed beside those of other tenants. With a lower limit tenants would take
turns in the middle of prompts of similar length, and all of them would be done later."""
AHEAD_SHARE = 8
_NO_LIMIT = 1 << 30
ANY_ROOM = 1 - _NO_LIMIT
"""Every ready worker has at least this much."""
ALL = -1
"""The mask of all slots."""
ORDER_BITS, RUNNING_SHIFT = 24, 72
"""Layout of a rank: the low ORDER_BITS are the position by name; running sequences (decode) start at RUNNING_SHIFT."""
_ORDER_MASK = (1 << ORDER_BITS) - 1
# Hints (baton.core.blocks) of a request's full blocks, by block size, which may differ between the two pools.
Prefix = Mapping[int, tuple[bytes, ...]]


class CachedIndex:
    """Finds the workers that have cached a block, by its hint."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}  # one bit for each worker that holds the block

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, hint: bytes, bit: int) -> None:
        self._masks[hint] = self._masks.get(hint, 0) | bit

    def discard(self, hint: bytes, bit: int) -> None:
        if left := self._masks.get(hint, 0) & ~bit:
            self._masks[hint] = left
        else:
            self._masks.pop(hint, None)

    def with_prefix(self, prefix: tuple[bytes, ...]) -> list[tuple[int, int]]:
        """Returns (blocks, mask of the workers that have exactly that many of the first blocks), the longest first."""
        holders, so_far = [], 0
        for count, known in enumerate(map(self._masks.get, prefix)):
            if known == so_far:  # nearly always: workers that have a prefix have all of it
                continue
            mask = known or 0
            if count:
                mask &= so_far
                if mask != so_far:
                    holders.append((count, so_far & ~mask))
            so_far = mask
            if not mask:
                break
        if so_far:
            holders.append((len(prefix), so_far))
        return holders[::-1]


class CachedBlocks:
    """The blocks that one worker can reuse. Events take time to arrive and a block may be evicted before a request
    arrives, so routing uses this only as a hint."""

    def __init__(self, limit: int, index: CachedIndex | None = None, bit: int = 1) -> None:
        self._limit, self._bit = limit, bit  # the size of the worker's pool, and its bit in the index
        self._index = CachedIndex() if index is None else index
        self._hints: set[bytes] = set()  # in the index too

    def __len__(self) -> int:
        return len(self._hints)

    def update(self, events: KVCacheEvents) -> None:
        if events.cleared:
            self.clear()
        for hint in events.evicted:
            if hint in self._hints:
                self._hints.remove(hint)
                self._index.discard(hint, self._bit)
        for hint in events.stored[: max(0, self._limit - len(self._hints))]:
            self._hints.add(hint)
            self._index.add(hint, self._bit)

    def clear(self) -> None:
        for hint in self._hints:
            self._index.discard(hint, self._bit)
        self._hints.clear()

    def count(self, prefix: tuple[bytes, ...]) -> int:
        """Returns how many leading blocks of `prefix` (hints in order) the worker has cached."""
        for count, hint in enumerate(prefix):
            if hint not in self._hints:
                return count
        return len(prefix)


class Worker(Member):
    """One incarnation of a worker, as a member of its pool. `load` is its latest report.

    `reserved_blocks`, `backlog_tokens`, `running` and `growth` are the sums of what choices hold here (`Choice.held`):
    reserved blocks only until the KV has arrived, after which the worker's own report includes them; growth in further
    blocks that the sequences are expected to need.

    `room` is derived from all of these: the tokens that a prefill worker, or the blocks that a decode worker, can still
    accept; negative while it accepts nothing. `rank` orders suitable workers, the lowest first: by backlog, or by
    running sequences and reserved blocks, then by name. It is one number, so that the pool can keep the ranks sorted.
    """

    # Python keeps so many attributes in a large dict for each object otherwise, and placements read those of many.
    __slots__ = (
        *("_columns_at_once", "_counted_before", "_full", "_join", "_load", "_order", "_sliding"),
        *("adapter_failures", "adapters", "backlog_of", "backlog_tokens", "block_size", "blocks_of_column", "cached"),
        *("computes_prompts", "gpu", "growth", "incarnation", "max_model_len", "max_running", "max_tokens", "pool"),
        *("rank", "reserved_blocks", "role", "room", "running", "slot", "step_tokens", "worker_id"),
    )

    def __init__(self, join: Join, since: float, lease_until: float, pool: Pool) -> None:
        super().__init__(since, lease_until)
        self.reserved_blocks = self.backlog_tokens = self.running = self.growth = 0
        self.backlog_of: dict[str, int] = {}  # `backlog_tokens` by tenant
        self._load: Load | None = None
        # What it had counted before: its first report, if it comes from an earlier run of the coordinator.
        self._counted_before: Load | None = None if join.run_id else Load()
        self.gpu: GpuUsage | None = None
        self.adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters that it has
        self.adapter_failures: dict[str, str] = {}  # why it cannot load others, by digest
        self._join, self.pool = join, pool
        self.slot, self._order = pool.add(self), 0
        self.cached = CachedBlocks(join.blocks_total, pool.index, 1 << self.slot)
        self.room = self.rank = 0
        self.join = join
        pool.sort()

    def __repr__(self) -> str:
        placed = f"{self.reserved_blocks} blocks, {self.backlog_tokens} tokens, {self.running} running"
        return f"<Worker {self.worker_id} {self.state.value} | {placed}>"

    @property
    def join(self) -> Join:
        return self._join

    @join.setter
    def join(self, join: Join) -> None:
        self._join = join
        self.worker_id, self.role, self.incarnation = join.worker_id, join.role, join.incarnation
        self.block_size = join.facts.layout.block_size
        self.computes_prompts = join.computes_prompts
        self.step_tokens = max(join.step_tokens, 1)
        window, longest = Window.of(join.facts.layout), join.facts.max_model_len
        fits = window.max_tokens(join.blocks_total, STEPS_AHEAD * self.step_tokens)
        self._full, self._sliding = window.full, window.sliding
        self._columns_at_once = window.columns_at_once(STEPS_AHEAD * self.step_tokens)
        self.blocks_of_column = window.groups
        self.max_tokens = min(longest, fits)
        """Tokens whose KV an idle worker can hold for one sequence."""
        self.max_model_len = min(longest, fits + 1)
        """Tokens of the longest prompt and output together: the last token needs no KV."""
        running = join.max_running
        self.max_running = running + max(running // AHEAD_SHARE, 1) if running else _NO_LIMIT
        """Sequences that may be placed here: those that run at once, and some whose prompts are computed meanwhile, so
        that no slot stays empty. Further ones wait in the queue, from which any worker can take them."""
        self.pool.add_block_size(self)
        self.pool.changed()
        self._recount()

    def on(self, event: Event, now: float) -> None:
        before = self.state
        super().on(event, now)
        if self.state is not before:
            if self.state is LOST or self.state is LEFT:
                self.pool.remove(self)
            self._recount()
            self.pool.changed()

    @property
    def load(self) -> Load | None:
        return self._load

    @load.setter
    def load(self, load: Load | None) -> None:
        self._load = load
        self._counted_before = self._counted_before or load
        self._update_room()

    def counted(self) -> dict[str, float]:
        """Returns by how much each counter of TOTALS has risen since it joined."""
        load, before = self._load or Load(), self._counted_before or Load()
        return {name: getattr(load, name) - getattr(before, name) for name in TOTALS}

    def update_adapters(self, states: AdapterStates) -> None:
        self.adapters = frozenset(states.loaded)
        self.adapter_failures = {failure.digest: failure.reason for failure in states.failed}
        self.pool.changed()

    def has(self, adapter: str) -> bool:
        """Returns whether it has the LoRA adapter of a request; empty: the request has none."""
        return not adapter or adapter in self.adapters

    def count(
        self, *, backlog: int = 0, tenant: str = "", running: int = 0, reserved: int = 0, growth: int = 0
    ) -> None:
        """Adds to the counters of what is placed here; negative numbers subtract. The backlog is one of `tenant`."""
        self.backlog_tokens += backlog
        if backlog:
            self.backlog_of[tenant] = self.backlog_of.get(tenant, 0) + backlog
            if not self.backlog_of[tenant]:
                del self.backlog_of[tenant]
        self.running += running
        self.reserved_blocks += reserved
        self.growth += growth
        if backlog < 0 and self.role == "decode":  # it may accept another prompt
            self.pool.grown = True
        if backlog or running or reserved:
            self._recount()
        else:  # growth is no part of the rank
            self._update_room()

    def take_order(self, order: int) -> None:
        """Sets its position by name among the workers of its pool, which sorts the ranks afterwards."""
        self._order = order
        self.rank = self.rank >> ORDER_BITS << ORDER_BITS | order

    def update_cached(self, events: KVCacheEvents) -> None:
        self.cached.update(events)
        if self.role == "prefill":  # a request that found no room may now have less to compute
            self.pool.grown = True

    def _recount(self) -> None:
        if self.role == "prefill":
            rank = self.backlog_tokens << ORDER_BITS | self._order
        else:
            rank = self.running << RUNNING_SHIFT | self.reserved_blocks << ORDER_BITS | self._order
        if rank != self.rank:
            self.pool.reorder(self, rank)
            self.rank = rank
        self._update_room()

    def _update_room(self) -> None:
        if self.state is not READY:
            room = -_NO_LIMIT
        elif self.role == "prefill":
            # An idle worker accepts a prompt of any length.
            room = BACKLOG_STEPS * self.step_tokens - self.backlog_tokens if self.backlog_tokens else _NO_LIMIT
        elif self.running >= self.max_running:
            room = -1
        elif self.running == 0:
            room = self._join.blocks_total
        elif (load := self._load) is None:
            room = self._join.blocks_total - self.reserved_blocks - self.growth
        else:  # preempted sequences wait for blocks
            room = 0 if load.preempted else load.blocks_free - self.reserved_blocks - self.growth
        if room > self.room and room >= self.pool.awaited:
            self.pool.grown = True
        self.room = room

    def blocks_for(self, tokens: int) -> int:
        """Returns how many blocks a sequence of so many tokens holds at once, at most: it gives back those behind the
        window (`Window.max_blocks`, of which this is the fast form)."""
        columns = -(-tokens // self.block_size)
        if columns <= self._columns_at_once:
            return self.blocks_of_column * columns
        return self._full * columns + self._sliding * self._columns_at_once

    def before(self, tenant: str, tokens: int) -> int:
        """Returns how many tokens are computed here before a prompt of a tenant, with `tokens` tokens to compute, is
        done: those of its tenant that are here, and of another tenant no more than of its own, since they take turns
        (`baton.core.long_rows.Turns`)."""
        own = self.backlog_of.get(tenant, 0)
        peers = (theirs for other, theirs in self.backlog_of.items() if other != tenant)
        return own + sum(min(theirs, own + tokens) for theirs in peers)

    def accepts_prompt(self, tenant: str, tokens: int) -> bool:
        """Whether a prompt of a tenant, with `tokens` tokens to compute, may be placed here: with what is computed
        before it, it takes BACKLOG_STEPS at most. An idle worker accepts any prompt; one with nothing of the tenant,
        and with BACKLOG_STEPS at most, a long one."""
        limit = BACKLOG_STEPS * self.step_tokens
        if not self.backlog_tokens or self.before(tenant, tokens) + tokens <= limit:
            return True
        long = tokens > LONG_STEPS * self.step_tokens
        return long and self.backlog_tokens <= limit and tenant not in self.backlog_of

    @property
    def prompt_cost(self) -> PromptCost | None:
        return None if self._load is None else self._load.prompt_cost

    def row(self, now: float) -> dict[str, object]:
        """Returns one row of `/workers`."""
        load = self.load or Load()
        return {
            "id": self.worker_id,
            "role": self.role,
            "revision": self.join.revision,
            "domain": self.join.domain,
            "protocol_version": self.join.facts.protocol_version,
            "version": self.join.facts.code_version,
            "tensor_parallel": self.join.tensor_parallel,
            "host": self.join.host,
            "dtype": self.join.facts.dtype,
            "kv_dtype": self.join.facts.kv_dtype,
            "quantize": self.join.facts.quantize,
            "model_impl": self.join.facts.model_impl,
            "block_size": self.join.facts.layout.block_size,
            "max_model_len": self.max_model_len,
            "step_tokens": self.step_tokens,
            "max_running": self.join.max_running,
            "state": self.state.value,
            "since_s": round(max(now - self.since, 0.0), 1),
            "incarnation": self.incarnation,
            "pids": list(self.join.pids),
            "address": self.join.link_address or self.join.host,
            "blocks_total": load.blocks_total or self.join.blocks_total,
            **{name: getattr(load, name) for name in LOAD_COLUMNS},
            "speculation": None if load.speculation is None else asdict(load.speculation),
            "prompt_cost": None if load.prompt_cost is None else asdict(load.prompt_cost),
            "adapters": sorted(self.adapters),
            "gpu": None if self.gpu is None else asdict(self.gpu),
        }


_NOT_COLUMNS = {"blocks_total", "backlog_tokens", "hand_overs", "preempted", "speculation", "prompt_cost"}
LOAD_COLUMNS = tuple(field.name for field in fields(Load) if field.name not in _NOT_COLUMNS)
"""The columns of a `/workers` row that a worker reports itself."""
TOTALS = ("prompt_tokens_computed", "prompt_tokens_cached", "tokens_generated", "steps", "step_s", "preemptions")
"""Those of them that a pool adds up over its workers."""


class Pool:
    """The present workers of one role in one class."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.workers: list[Worker] = []  # sorted by name
        self.index = CachedIndex()
        self.grown = True  # a choice that had no room may have some now: a worker gained `awaited`, or cached blocks
        self.awaited = ANY_ROOM  # the least room for which a choice has waited since then
        self.changes = 0  # how often a worker joined, left or changed its state or adapters
        self.block_sizes: set[int] = set()
        # By block size, one with the longest steps, whose `blocks_for` are the most.
        self.most_blocks: dict[int, Worker] = {}
        # The least and greatest `max_model_len` of the workers that do not drain, or of the last ones that did not.
        self.lengths: tuple[int, int] | None = None
        self._slots: list[Worker | None] = []  # by bit in the index
        self._ranks: list[int] = []  # those of `workers`, sorted
        self._capacity: dict[str, int] = {}  # cached, by adapter
        self.worker_s = 0.0  # time that workers were present, added up over all of them
        self._ended = dict.fromkeys(TOTALS, 0.0)  # of workers that are no longer present

    def add(self, worker: Worker) -> int:
        """Adds a worker and returns its slot. Called only by `Worker`."""
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._slots[slot : slot + 1] = [worker]
        self.workers.append(worker)
        return slot

    def remove(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._ended = {name: count + worker.counted()[name] for name, count in self._ended.items()}
            worker.cached.clear()
            self._slots[worker.slot] = None
            self.sort()
            self.block_sizes, self.most_blocks = set(), {}
            for present in self.workers:
                self.add_block_size(present)
            self.changed()

    def add_block_size(self, worker: Worker) -> None:
        self.block_sizes.add(worker.block_size)
        known = self.most_blocks.get(worker.block_size)
        if known is None or known.step_tokens < worker.step_tokens:
            self.most_blocks[worker.block_size] = worker

    @property
    def longest_step(self) -> int:
        """The tokens of the longest step of its workers; 0 without workers."""
        return max((worker.step_tokens for worker in self.most_blocks.values()), default=0)

    def totals(self) -> dict[str, float]:
        """Returns TOTALS and `worker_s`, over the present workers and those that have left: they never fall."""
        counted = [self._ended, *(worker.counted() for worker in self.workers)]
        return {"worker_s": self.worker_s, **{name: sum(each[name] for each in counted) for name in TOTALS}}

    def sort(self) -> None:
        """Sorts the workers by name, which breaks ties between equal ones."""
        self.workers.sort(key=attrgetter("worker_id"))
        for order, worker in enumerate(self.workers):
            worker.take_order(order)
        self._ranks = sorted(worker.rank for worker in self.workers)

    def reorder(self, worker: Worker, rank: int) -> None:
        """Moves a worker to the place of its new rank. One that has left is not here: its old rank may be another's."""
        if self._slots[worker.slot] is worker:
            del self._ranks[bisect_left(self._ranks, worker.rank)]
            insort(self._ranks, rank)

    def changed(self) -> None:
        """Drops the cached limits: a worker joined, left or changed state, or its adapters changed."""
        self.changes += 1
        self._capacity = {}
        # Not lazily: a restarted worker has the same limits, and requests are admitted meanwhile.
        if lengths := [w.max_model_len for w in self.workers if w.state is not DRAINING]:
            self.lengths = min(lengths), max(lengths)

    def wait_for(self, room: int) -> None:
        """Records that a choice waits until a worker has that much room."""
        self.awaited = room if self.grown else min(room, self.awaited)
        self.grown = False

    def capacity(self, adapter: str = "") -> int:
        """Tokens whose KV one worker that has the adapter can hold for a sequence, ignoring draining workers; 0 if
        there is none."""
        if adapter not in self._capacity:
            able = (w.max_tokens for w in self.workers if w.state is not DRAINING and w.has(adapter))
            self._capacity[adapter] = max(able, default=0)
        return self._capacity[adapter]

    def free(self) -> int:
        """Returns the tokens that prefill workers, or the blocks that decode workers, can still accept in all."""
        if self.role == "prefill":
            return sum(max(BACKLOG_STEPS * w.step_tokens - w.backlog_tokens, 0) for w in self.workers if w.ready)
        return sum(max(w.room, 0) for w in self.workers)

    def by_rank(self, tokens: int, room: Mapping[int, int], adapter: str, among: int = ALL) -> Iterator[Worker]:
        """Yields, in ascending order of their ranks, the workers at the slots of a mask that can hold `tokens` tokens,
        have `room`, by block size, left, and have the adapter."""
        workers, least = self.workers, min(room.values(), default=0)
        # Of k of n workers in any order, the first is expected after n / k; sorting the k by rank looks at k.
        few = among != ALL and among.bit_count() ** 2 <= len(workers)
        for rank in sorted(worker.rank for worker in self._at(among)) if few else self._ranks:
            worker = workers[rank & _ORDER_MASK]
            if (
                worker.room >= least
                and among >> worker.slot & 1
                and worker.max_tokens >= tokens
                and worker.room >= room[worker.block_size]
                and (not adapter or adapter in worker.adapters)
            ):
                yield worker

    def check(self) -> None:
        """Raises InvariantError if the sorted ranks are not those of the workers."""
        if self._ranks != sorted(worker.rank for worker in self.workers):
            raise InvariantError(f"{self.role} workers: the sorted ranks are not theirs")

    def with_prefix(self, prefix: Prefix) -> Iterator[tuple[int, int]]:
        """Yields (tokens, mask of the slots whose workers have exactly that many of the prefix), the longest first.
        Blocks of different sizes have different hints."""
        if len(self.block_sizes) == 1:
            (size,) = self.block_sizes
            for blocks, mask in self.index.with_prefix(prefix.get(size, ())):
                yield blocks * size, mask
            return
        by_tokens: Counter[int] = Counter()
        for size in self.block_sizes & set(prefix):
            for blocks, mask in self.index.with_prefix(prefix[size]):
                by_tokens[blocks * size] |= mask
        yield from sorted(by_tokens.items(), reverse=True)

    def _at(self, mask: int) -> Iterator[Worker]:
        """Yields the workers at the slots of a mask. The bit of an empty slot is never set."""
        while mask:
            worker = self._slots[(mask & -mask).bit_length() - 1]
            mask &= mask - 1
            if worker is not None:
                yield worker
