"""Drives a decode scheduler on a real engine, without links or a coordinator: the same runner computes prompts directly
into the blocks that the scheduler reserved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.errors import Unavailable
from baton.core.events import SpeculationCounters
from baton.core.request import GenerateRequest, TokenLogprob
from baton.core.step import History, Row, StepPlan
from baton.engine.runner import Runner
from baton.runtime.step_thread import Launcher
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import Drafts, ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation


@dataclass
class Run:
    """The result of a drive."""

    outputs: dict[str, list[int]]
    counters: SpeculationCounters
    steps: int = 0
    preemptions: int = 0
    longest_silence_s: float = 0.0
    reported: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    steps_ahead: int = 0
    rows_discarded: int = 0


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
    launcher: Launcher | None = None,
) -> Run:
    """Generates all requests, at most `batch` at a time, and checks the scheduler's invariants at the end. With a
    `launcher`, steps are planned ahead and launched there."""
    blocks = num_blocks or target.num_blocks
    scheduler = DecodeScheduler(target.layout, blocks, batch, speculation, plan_ahead=launcher is not None)
    engine = engine or SpeculativeEngine(target, draft)
    run = Run({r.request_id: [] for r in requests}, SpeculationCounters())
    queue, out = deque(requests), 0
    last_token_at = dict.fromkeys(run.outputs, 0.0)
    while queue or scheduler.num_sequences:
        while queue and scheduler.num_sequences < batch and _hand_over(scheduler, target, queue[0], run):
            last_token_at[queue.popleft().request_id] = time.monotonic()
        plan = scheduler.begin_step(time.monotonic())
        if launcher is not None:
            if plan is not None:
                launcher.launch(plan)
                out += 1
            if not out or (plan is not None and out == 1):
                continue
            outcome, out = launcher.collect(), out - 1
        elif plan is None:
            continue
        else:
            outcome = engine.step(plan)
        result = scheduler.finish_step(outcome, time.monotonic())
        now = time.monotonic()
        run.ended |= {ended.sequence.request_id: ended.reason for ended in result.ended}
        for event in result.tokens:
            name = event.sequence.request_id
            run.logprobs.setdefault(name, []).extend(event.logprobs)
            run.outputs[name][event.first_index :] = event.tokens
            run.longest_silence_s = max(run.longest_silence_s, now - last_token_at[name])
            last_token_at[name] = now
        run.steps += 1
        if each_step is not None:
            each_step(scheduler)
    scheduler.check()
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    run.counters, run.preemptions = scheduler.speculation.counters, scheduler.preemptions
    run.steps_ahead, run.rows_discarded = scheduler.steps_ahead, scheduler.rows_discarded
    return run


def _hand_over(scheduler: DecodeScheduler, target: Runner, request: GenerateRequest, run: Run) -> bool:
    try:
        blocks = scheduler.reserve(request, time.monotonic()).block_ids
    except Unavailable as error:
        assert error.code == "no_free_blocks"
        return False
    history = History(request.prompt, (), request.end_token_ids) if request.sampling.grammar else None
    row = Row(request.sequence_id, 0, request.prompt, blocks, request.sampling, 1, 0, history)
    made = target.step(StepPlan(0, (row,)))
    while made.unsampled:
        made = target.step(StepPlan(0, (row,)))
    first = made.sampled[0][0]
    run.outputs[request.request_id].append(first)
    logprobs = made.logprobs_of(0)
    ended = scheduler.received(request.sequence_id, first, time.monotonic(), logprobs[0] if logprobs else None)
    if ended is not None:
        run.ended[request.request_id] = ended.reason
    return True
