"""Many steps of a decode scheduler at once, where all of them are certain to be alike."""

from __future__ import annotations

from baton.core.blocks import Holder
from baton.core.request import SequenceId
from baton.core.sequence import Admitted, Sequence, State
from decode.scheduler import DecodeScheduler

MOST_STEPS = 1 << 20


def admit(scheduler: DecodeScheduler, now: float) -> None:
    """Admits ready sequences to the batch as the next step would; leaves that to the step if others wait for blocks."""
    states = [s.state for s in scheduler.sequences.values()]
    room = scheduler.max_running - states.count(State.RUNNING)
    if State.READY not in states or State.PREEMPTED in states or State.WAITING in states or room <= 0:
        return
    ready = [s for s in scheduler.sequences.values() if s.state is State.READY]
    for s in sorted(ready, key=lambda s: s.rank)[:room]:
        s.on(Admitted(), now)


def plain_steps(scheduler: DecodeScheduler, leave: int = 0) -> int:
    """Returns how many of the next steps of a scheduler without an outstanding one are certain to be alike, if nothing
    else happens: one token for each running sequence, none ends, none starts, and `leave` blocks stay free. `advance`
    does as many at once. 0 with draft tokens, whose number differs from step to step."""
    if scheduler.speculation.drafts is not None:
        return 0
    running, ready, steps = list[Sequence](), False, MOST_STEPS
    for s in scheduler.sequences.values():
        if s.state is State.RUNNING:
            if s.num_uncomputed != 1 or s.ending is not None or s.boosted or s.request.alone:
                return 0
            steps = min(steps, s.request.max_tokens - len(s.output) - 1)
            running.append(s)
        elif s.state is State.READY:
            ready = True
        elif s.state is not State.RECEIVING:
            return 0
    if not running or (ready and len(running) < scheduler.max_running):  # it starts: see `admit`
        return 0
    free = scheduler.blocks.num_free - max(leave, (len(running) + 1) // 2)  # with fewer, sequences may be throttled
    size = scheduler.layout.block_size
    while steps > 0:
        more = 0
        for s in running:
            more += max(0, -(-(s.num_tokens + steps - 1) // size) - len(s.block_ids))
        if more <= free:
            return steps
        steps = min(steps - 1, (free // len(running)) * size)
    return 0


def running_context(scheduler: DecodeScheduler) -> tuple[int, int]:
    """Returns how many sequences run, and how many positions all of them attend to in the next step."""
    lengths = [s.num_tokens for s in scheduler.sequences.values() if s.state is State.RUNNING]
    return len(lengths), sum(lengths)


def advance(scheduler: DecodeScheduler, steps: int, token: int, now: float) -> list[SequenceId]:
    """Does what the next `steps` steps, at most `plain_steps`, would do if each sampled `token`, which ends no
    sequence, and the last of them ended at `now`. Returns the sequences."""
    running = [s for s in scheduler.sequences.values() if s.state is State.RUNNING]
    for s in running:
        end = s.num_tokens + steps - 1
        more = scheduler.layout.blocks_for(end) - len(s.block_ids)
        if more > 0:
            s.block_ids += scheduler.blocks.allocate(more, Holder("sequence", s.id)) or ()
        s.output += [token] * steps
        s.num_computed = end
        s.next_emit_index, s.last_token_at = len(s.output), now
    scheduler.tokens_generated += steps * len(running)
    return [s.id for s in running]
