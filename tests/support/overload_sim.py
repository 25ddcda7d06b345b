"""More requests than the decode pool can hold, in virtual time: the coordinator's dispatcher and a decode worker's
scheduler, with an engine whose step times follow a cost curve. Prompts arrive computed, some time after their
dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import Unavailable
from baton.core.events import Load
from baton.core.request import GenerateRequest
from coordinator.policy.choice import Choice
from coordinator.policy.dispatch import OutputExpectation
from coordinator.policy.workers import WorkerTable
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import add_worker, make_decode, make_outcome
from tests.support.placing import Placing

HAND_OVER_S = 0.05
COSTS = ((1, 0.010), (8, 0.012), (64, 0.030), (512, 0.200))
"""Seconds of a step by its tokens: approximately the built-in pair on one slow core."""


@dataclass
class Overload:
    """The result of a run: preemptions, tokens recomputed after them, refusals by the decode worker, the widest step,
    the longest time (and number of steps) between two tokens of one sequence, and the end."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    refused: int = 0
    widest: int = 0
    longest_silence_s: float = 0.0
    longest_silence_steps: int = 0
    steps: int = 0
    ended_at: float = 0.0
    lengths: dict[str, int] = field(default_factory=dict)


def make_worker(num_blocks: int) -> DecodeScheduler:
    speculation = Speculation(model=StepModel(COSTS, budget_s=0.05))
    return make_decode(num_blocks, block_size=16, max_running=64, speculation=speculation, prefix_cache=False)


def overload(
    worker: DecodeScheduler,
    requests: Sequence[GenerateRequest],
    lengths: Sequence[int],
    expectation: OutputExpectation | None = None,
) -> Overload:
    """Submits all requests at once; the i-th answer has `lengths[i]` tokens, whatever its max_tokens. Every block must
    be free at the end."""
    size, result = worker.layout.block_size, Overload()
    table = WorkerTable(3.0)
    placing = Placing(table)
    placing.dispatcher.expectation = expectation or placing.dispatcher.expectation
    add_worker(table, "p0", blocks=1 << 20, block_size=size, step_tokens=1 << 20)
    decode = add_worker(table, "d0", blocks=worker.blocks.num_blocks, block_size=size)
    by_name = {request.request_id: request for request in requests}
    length_of = {request.request_id: length for request, length in zip(requests, lengths, strict=True)}
    for request in requests:
        placing.submit(Choice(request, 0, 0.0, 1e9))
    now, arriving, last_token_at = 0.0, list[tuple[float, GenerateRequest]](), dict[str, tuple[float, int]]()
    while len(result.lengths) < len(requests):
        for placement in placing.place():
            arriving.append((now + HAND_OVER_S, by_name[placement.name]))
        for entry in [e for e in arriving if e[0] <= now]:
            request = entry[1]
            try:
                worker.reserve(request, now)
            except Unavailable:
                result.refused += 1
                continue
            arriving.remove(entry)
            worker.received(request.sequence_id, 7, now)
            placing.handed_over(request.request_id)
            last_token_at[request.request_id] = now, result.steps
        plan = worker.begin_step(now)
        if plan is None:
            now += 0.01
            assert now < 1e5, f"no end: {worker!r}"
            continue
        result.steps += 1
        result.widest = max(result.widest, len(plan.rows))
        result.recomputed_tokens += plan.num_tokens - sum(row.num_sampled for row in plan.rows)
        now += worker.speculation.model.short.seconds(plan.num_tokens)
        for event in worker.finish_step(make_outcome(plan), now).tokens:
            name, produced = event.sequence.request_id, event.first_index + len(event.tokens)
            at, step = last_token_at[name]
            result.longest_silence_s = max(result.longest_silence_s, now - at)
            result.longest_silence_steps = max(result.longest_silence_steps, result.steps - step)
            last_token_at[name] = now, result.steps
            placing.produced(name, produced)
            if produced >= length_of[name]:
                result.lengths[name] = produced
                worker.abort(event.sequence)
                placing.finish(name)
        worker.check()
        decode.load = Load(blocks_free=worker.blocks.num_free, preempted=worker.num_preempted)
    placing.check()
    assert worker.blocks.num_free == worker.blocks.num_blocks
    result.preemptions, result.ended_at = worker.preemptions, now
    return result
