"""Steps of a decode scheduler without its planning, many at once, where all that they do is certain: each adds a token
to each sequence, and before the last one none ends."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.errors import InvariantError
from baton.core.request import SequenceId
from baton.core.sequence import Admitted, Sequence, State
from decode.scheduler import DecodeScheduler

MOST_STEPS = 1 << 20


class Plain(NamedTuple):
    """The `steps` next steps are certain to be alike, one token for each of the `running` sequences, none of which ends
    before the last one. In the first they attend to `context` positions."""

    running: list[Sequence]
    steps: int
    context: int


def admit(scheduler: DecodeScheduler, now: float) -> None:
    """Admits ready sequences to the batch as the next step would; leaves that to the step if others wait for blocks."""
    states = [s.state for s in scheduler.sequences.values()]
    room = scheduler.max_running - states.count(State.RUNNING)
    if State.READY not in states or State.PREEMPTED in states or State.WAITING in states or room <= 0:
        return
    ready = [s for s in scheduler.sequences.values() if s.state is State.READY]
    for s in sorted(ready, key=lambda s: s.rank)[:room]:
        s.on(Admitted(), now)


def plain_steps(scheduler: DecodeScheduler, leave: int = 0, *, to_ends: bool = True) -> Plain | None:
    """Returns what the next steps of a scheduler without an outstanding one will be, if nothing else happens: up to the
    first in which a sequence ends, or unless `to_ends` the one before; none starts, and `leave` blocks stay free.
    None if the scheduler has to plan the next one: so with draft tokens, whose number differs from step to step."""
    if scheduler.speculation.drafts is not None:
        return None
    running: list[Sequence] = []
    lengths: list[int] = []
    ready, left = False, MOST_STEPS
    for s in scheduler.sequences.values():
        state = s.state
        if state is State.RUNNING:
            request, produced = s.request, len(s.output)
            tokens = len(request.prompt) + produced
            if tokens - s.num_computed != 1 or produced == len(request.output):  # it computes known tokens
                return None
            if s.ending is not None or s.boosted or request.alone:
                return None
            left = min(left, request.max_tokens - produced)
            running.append(s)
            lengths.append(tokens)
        elif state is State.READY:
            ready = True
        elif state is not State.RECEIVING:
            return None
    if not running or (ready and len(running) < scheduler.max_running):  # it starts: see `admit`
        return None
    free = scheduler.blocks.num_free - max(leave, (len(running) + 1) // 2)  # with fewer, sequences may be throttled
    size = scheduler.layout.block_size
    count = left if to_ends else left - 1
    if count and len(running) * (count // size + 1) <= free:  # no sequence lacks more
        return Plain(running, count, sum(lengths))
    while count > 0:
        more = 0
        for s, tokens in zip(running, lengths, strict=True):
            lacking = -(-(tokens + count - 1) // size) - len(s.block_ids)
            if lacking > 0:
                more += lacking
        if more <= free:
            return Plain(running, count, sum(lengths))
        count = min(count - 1, (free // len(running)) * size)
    return None


def advance(
    scheduler: DecodeScheduler, running: list[Sequence], steps: int, token: int, now: float
) -> list[SequenceId]:
    """Does what the next `steps` steps, at most those of `plain_steps`, would do if each sampled `token` and the last
    of them ended at `now`. Returns the names of the sequences that end in it, by their length."""
    tokens, size, ended = [token] * steps, scheduler.layout.block_size, list[SequenceId]()
    for s in running:
        s.num_computed = end = s.num_tokens + steps - 1
        lacking = -(-end // size) - len(s.block_ids)
        if lacking > 0:
            blocks = scheduler.blocks.allocate(lacking, s.holder)
            if blocks is None:
                raise InvariantError(f"{s.id} lacks {lacking} blocks: {scheduler.blocks!r}")
            s.block_ids += blocks
        s.output += tokens
        s.next_emit_index, s.last_token_at = len(s.output), now
        if s.next_emit_index >= s.request.max_tokens:
            ended.append(s.id)
    scheduler.tokens_generated += steps * len(running)
    for sequence in ended:
        scheduler.abort(sequence)  # which removes it at once, like its end
    return ended
