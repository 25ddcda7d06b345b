"""Which worker of a pool a choice would go to. Pure.

The chosen prefill worker is the one that would compute the prompt first: it has the fewest tokens to compute, counting
its backlog and the part of this prompt that it has not cached. The chosen decode worker is the one that holds the
longest prefix, unless more than PREFIX_SLACK more sequences run there than on the emptiest one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from coordinator.policy.choice import Choice
from coordinator.policy.pool import ANY_ROOM, ORDER_BITS, RUNNING_SHIFT, Pool, Worker

PREFIX_SLACK = 4
_COMPARED = 8
"""Workers with room that are compared for a prompt."""


def tokens_to_compute(worker: Worker, choice: Choice) -> int:
    """Returns how many tokens of a prompt the worker has to compute: at least the last one."""
    held = worker.cached.count(choice.prefix.get(worker.block_size, ())) * worker.block_size
    return max(1, choice.request.num_prefill_tokens - held)


def pick_prefill(choice: Choice, pool: Pool, room: int | None = None) -> Worker | None:
    """Returns the worker with room and the fewest tokens to compute; an idle one accepts a prompt of any length,
    and one without room those of other tenants that have their turn soon. `room`: the least room, instead of that
    for the tokens to compute."""
    tokens, adapter = choice.request.num_prefill_tokens, choice.request.adapter
    best: tuple[int, int] | None = None
    for held, workers in itertools.chain(pool.holders(choice.prefix), ((0, None),)):
        need = max(1, tokens - held)
        if best is not None and best[0] < need:
            break  # workers that hold less have more to compute, even without a backlog
        least = dict.fromkeys(pool.block_sizes, need if room is None else room)
        if workers is None:  # all of them
            rank = next(pool.by_rank(tokens, least, adapter), None)
        else:
            rank = min(pool.fitting(workers, tokens, least, adapter), default=None)
        if rank is not None:
            score = (rank >> ORDER_BITS) + need, rank
            best = score if best is None else min(best, score)
    if best is None and room is None:
        return pick_by_turn(choice, pool, tokens, dict.fromkeys(pool.block_sizes, ANY_ROOM))
    return None if best is None else pool.ranked(best[1])


def pick_by_turn(choice: Choice, pool: Pool, total: int, room: Mapping[int, int]) -> Worker | None:
    """Returns the worker, of some with the least to do and some that hold the longest prefix, that accepts the
    prompt and would compute it first, in the turns of the tenants there."""
    tenant, adapter = choice.request.tenant, choice.request.adapter
    ranks = list(itertools.islice(pool.by_rank(total, room, adapter), _COMPARED))
    for _, holders in itertools.islice(pool.holders(choice.prefix), 1):
        ranks += sorted(pool.fitting(holders, total, room, adapter))[:_COMPARED]
    computing = [w for w in map(pool.ranked, ranks) if w.role == "prefill" or w.computes_prompts]
    tokens_at = {w: tokens_to_compute(w, choice) for w in computing}
    able = (w for w, count in tokens_at.items() if w.accepts_prompt(tenant, count))
    return min(able, key=lambda w: (w.before(tenant, tokens_at[w]) + tokens_at[w], w.rank), default=None)


def pick_decode(choice: Choice, pool: Pool, room: Mapping[int, int]) -> tuple[Worker, ...]:
    """Returns the worker with room that holds the longest prefix and is not much fuller than others, and a spare if
    there is one; nothing if no worker has room."""
    request = choice.request
    total, adapter = request.max_kv_tokens, request.adapter
    fits = pool.by_rank(total, room, adapter)
    first = next(fits, None)
    if first is None:
        return ()
    much_fuller = pool.ranked(first).running + PREFIX_SLACK + 1 << RUNNING_SHIFT
    chosen: list[int] = []
    for _, workers in pool.holders(choice.prefix):
        near = pool.fitting(workers, total, room, adapter)
        while near and len(chosen) < 2 and (rank := min(near)) < much_fuller:
            chosen.append(rank)
            near.remove(rank)
        if len(chosen) > 1:
            break
    for rank in itertools.chain((first,), fits):
        if len(chosen) > 1:
            break
        if rank not in chosen:
            chosen.append(rank)
    return tuple(map(pool.ranked, chosen))
