"""Which worker of a pool a choice would go to. Pure.

The chosen prefill worker is the one that would compute the prompt first: it has the fewest tokens to compute, counting
its backlog and the part of this prompt that it has not cached. The chosen decode worker is the one that has cached
the longest prefix, unless more than PREFIX_SLACK more sequences run there than on the emptiest one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from coordinator.policy.choice import Choice
from coordinator.policy.pool import ALL, ANY_ROOM, RUNNING_SHIFT, Pool, Worker

WithTokens = tuple[Worker, int]
"""A worker, and how many tokens of a prompt it has to compute."""
PREFIX_SLACK = 4
_COMPARED = 8
"""Workers with room that are compared for a prompt."""


def tokens_to_compute(worker: Worker, choice: Choice) -> int:
    """Returns how many tokens of a prompt the worker has to compute: at least the last one."""
    cached = worker.cached.count(choice.prefix.get(worker.block_size, ())) * worker.block_size
    return max(1, choice.request.num_prefill_tokens - cached)


def pick_prefill(choice: Choice, pool: Pool, room: int | None = None) -> WithTokens | None:
    """Returns the worker with room and the fewest tokens to compute; an idle one accepts a prompt of any length,
    and one without room those of other tenants that have their turn soon. `room`: the least room, instead of that
    for the tokens to compute."""
    tokens, adapter = choice.request.num_prefill_tokens, choice.request.adapter
    best: tuple[int, int, int] | None = None
    worker: Worker | None
    for cached, among in itertools.chain(pool.with_prefix(choice.prefix), ((0, ALL),)):
        need = max(1, tokens - cached)
        if best is not None and best[0] < need:
            break  # workers that have cached less have more to compute, even without a backlog
        least = dict.fromkeys(pool.block_sizes, need if room is None else room)
        if (worker := next(pool.by_rank(tokens, least, adapter, among), None)) is not None:
            score = worker.backlog_tokens + need, worker.rank, need
            if best is None or score < best:
                best, chosen = score, worker
    if best is not None:
        return chosen, best[2]
    return None if room is not None else pick_by_turn(choice, pool, tokens, dict.fromkeys(pool.block_sizes, ANY_ROOM))


def pick_by_turn(choice: Choice, pool: Pool, total: int, room: Mapping[int, int]) -> WithTokens | None:
    """Returns the worker, of some with the least to do and some that have the longest prefix, that accepts the
    prompt and would compute it first, in the turns of the tenants there."""
    tenant, adapter = choice.request.tenant, choice.request.adapter
    workers = list(itertools.islice(pool.by_rank(total, room, adapter), _COMPARED))
    for _, among in itertools.islice(pool.with_prefix(choice.prefix), 1):
        workers += itertools.islice(pool.by_rank(total, room, adapter, among), _COMPARED)
    computing = [w for w in workers if w.role == "prefill" or w.computes_prompts]
    tokens_at = {w: tokens_to_compute(w, choice) for w in computing}
    able = ((w, count) for w, count in tokens_at.items() if w.accepts_prompt(tenant, count))
    return min(able, key=lambda at: (at[0].before(tenant, at[1]) + at[1], at[0].rank), default=None)


def pick_decode(choice: Choice, pool: Pool, room: Mapping[int, int]) -> tuple[Worker, ...]:
    """Returns the worker with room that has the longest prefix and is not much fuller than others, and a spare if
    there is one; nothing if no worker has room."""
    request = choice.request
    total, adapter = request.max_kv_tokens, request.adapter
    fits = pool.by_rank(total, room, adapter)
    first = next(fits, None)
    if first is None:
        return ()
    much_fuller = first.running + PREFIX_SLACK + 1 << RUNNING_SHIFT
    chosen: list[Worker] = []
    for _, among in pool.with_prefix(choice.prefix):
        for worker in pool.by_rank(total, room, adapter, among):
            if len(chosen) > 1 or worker.rank >= much_fuller:
                break
            chosen.append(worker)
        if len(chosen) > 1:
            break
    for worker in itertools.chain((first,), fits):
        if len(chosen) > 1:
            break
        if worker not in chosen:
            chosen.append(worker)
    return tuple(chosen)
