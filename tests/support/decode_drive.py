"""Drives a decode scheduler on a real engine, without links and without a coordinator: prompts are computed by the same
runner straight into the blocks that the scheduler reserved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.errors import Unavailable
from baton.core.events import SpeculationCounters
from baton.core.request import GenerateRequest
from baton.core.step import Row, StepPlan
from baton.engine.runner import Runner
from decode.drafts import Drafts, ModelDrafts, NgramDrafts
from decode.scheduler import DecodeScheduler
from decode.speculation import Speculation
from decode.speculative_engine import SpeculativeEngine


@dataclass
class Run:
    """What came of a drive."""

    outputs: dict[str, list[int]]
    counters: SpeculationCounters
    steps: int = 0
    preemptions: int = 0
    longest_silence_s: float = 0.0
    told: dict[str, int] = field(default_factory=dict)


def make_drafts(kind: str, draft: Runner | None) -> Drafts | None:
    if kind == "model":
        assert draft is not None
        return ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
    return NgramDrafts() if kind == "ngram" else None


def decode_all(
    target: Runner,
    requests: Sequence[GenerateRequest],
    *,
    speculation: Speculation | None = None,
    draft: Runner | None = None,
    engine: SpeculativeEngine | None = None,
    batch: int = 32,
    num_blocks: int | None = None,
    each_step: Callable[[DecodeScheduler], None] | None = None,
) -> Run:
    """Generates all requests, at most `batch` at a time, and checks the books at the end."""
    scheduler = DecodeScheduler(target.layout, num_blocks or target.num_blocks, batch, speculation)
    engine = engine or SpeculativeEngine(target, draft)
    run = Run({r.request_id: [] for r in requests}, SpeculationCounters())
    queue = deque(requests)
    heard = dict.fromkeys(run.outputs, 0.0)
    while queue or scheduler.num_sequences:
        while queue and scheduler.num_sequences < batch and _hand_over(scheduler, target, queue[0], run):
            heard[queue.popleft().request_id] = time.monotonic()
        plan = scheduler.begin_step(time.monotonic())
        if plan is None:
            continue
        result = scheduler.finish_step(engine.step(plan), time.monotonic())
        now = time.monotonic()
        for event in result.tokens:
            name = event.sequence.request_id
            run.outputs[name][event.first_index :] = event.tokens
            run.longest_silence_s = max(run.longest_silence_s, now - heard[name])
            heard[name] = now
        run.steps += 1
        if each_step is not None:
            each_step(scheduler)
    scheduler.check()
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    run.counters, run.preemptions = scheduler.speculation.counters, scheduler.preemptions
    return run


def _hand_over(scheduler: DecodeScheduler, target: Runner, request: GenerateRequest, run: Run) -> bool:
    try:
        blocks = scheduler.reserve(request, time.monotonic())
    except Unavailable as error:
        assert error.code == "no_free_blocks"
        return False
    row = Row(request.sequence_id, 0, request.prompt, blocks, request.sampling, 1, 0)
    first = target.step(StepPlan(0, (row,))).sampled[0][0]
    run.outputs[request.request_id].append(first)
    scheduler.received(request.sequence_id, first, time.monotonic())
    return True
