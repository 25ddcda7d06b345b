"""Sets up speculation at startup: chooses the source of draft tokens, loads the draft model, measures step costs."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from baton.core.errors import InvariantError, StartupError
from baton.core.kv_layout import DType, KVLayout
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import GenerateRequest, SamplingParams, SequenceId
from baton.core.step import Row, StepOutcome, StepPlan
from baton.engine.checkpoint import read_model_config
from baton.engine.loading import load_runner
from baton.engine.memory import draft_share
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime.config import WorkerConfig
from baton.runtime.model_source import resolve_draft, resolve_model
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import CATCH_UP, Drafts, ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel

log = logging.getLogger("baton.worker")

MEASURING_S = 1.5
"""Time limit of each measurement at startup; larger steps are extrapolated."""

_PLAIN_S = 0.5  # the same for the target's own steps: of a slow model, steps of 32 and 128 tokens give the line

_CONTEXT = 256
_ROW = 8
_SIZES = (1, 9, 32, 128, 4, 16, 64, 512, 2, 256)  # far apart first: a slow model does not get through all of them
_REPEATS = 5
_MANY = 6  # draft tokens in the longer of the two calls whose difference gives the time of a later pass
_PASS_ROWS = (1, 4, 16, 64)
_TIMED_ROWS = (*_PASS_ROWS, 1, 4, 1, 1, 4, 1)  # short steps more often: their difference is easily lost in noise
_TURNS = 24  # of planning with and without draft tokens, and of steps after the draft model and after a step
_IN_A_ROW, _SHORT_ROWS = 3, 4  # consecutive timings of a step with at most _SHORT_ROWS rows
_DRAFT_TOKENS = 4  # per row, in the longer of the two steps whose difference gives the price of a draft token


class DraftSetup(NamedTuple):
    """What a worker drafts with, whenever it is a decode worker: the draft model, if one drafts, and the costs
    of steps, which it goes on to measure."""

    draft: Runner | None
    costs: StepModel

    def speculation(self, config: WorkerConfig, runner: Runner) -> tuple[Speculation, SpeculativeEngine]:
        """Sets up what one decode worker drafts with."""
        drafts: Drafts | None = NgramDrafts() if config.draft == "ngram" else None
        if (draft := self.draft) is not None:
            drafts = ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
        forced = config.force_acceptance if config.force_acceptance >= 0.0 else None
        if forced is not None:
            log.warning("--force-acceptance %g is for benchmarks only: the output is not real", forced)
        speculation = Speculation(drafts, self.costs, fixed_length=config.draft_tokens, forced_rate=forced)
        return speculation, SpeculativeEngine(runner, draft)


def prepare(config: WorkerConfig, runner: Runner, kept: KeptBlocks | None) -> DraftSetup:
    """Loads the draft model and measures steps, according to the worker's options. A worker that had another role
    before (`kept`) measures for a shorter time, as requests wait, and its cache loses the blocks that this overwrites.

    Raises:
        StartupError: the draft model is missing, has another vocabulary, or does not fit.
    """
    limit_s = MEASURING_S if kept is None else MEASURING_S / 8
    if kept is not None:
        kept.cache.drop(_blocks(runner, _CONTEXT + _ROW + 1))
    draft = load_draft(config, runner)
    drafts = draft is not None or config.draft == "ngram"
    costs, first, later, rows, per_draft_token = [(1, 1e-6)], *(list[tuple[int, float]]() for _ in range(4))
    if draft is not None:
        costs, (first, later) = measure_fills(draft, config.step_tokens, limit_s), measure_passes(draft, limit_s)
        if not first:  # each draft token takes a step of the draft model
            first = later = measure_steps(draft, config.step_tokens, limit_s)
    if drafts:
        rows, per_draft_token = measure_rows(runner, limit_s)
    planning_s = measure_planning(runner, limit_s) if drafts else 0.0
    switching_s = measure_switching(draft, runner, limit_s) if draft is not None else 0.0
    model = StepModel(
        measure_steps(runner, config.step_tokens, min(limit_s, _PLAIN_S)),
        costs,
        later,
        first,
        rows=rows,
        per_draft_token=per_draft_token,
        planning_s=planning_s,
        switching_s=switching_s,
        budget_s=config.step_budget_ms / 1e3,
        step_tokens=config.step_tokens,
    )
    log.info("measured step times: %r", model)
    return DraftSetup(draft, model)


def load_draft(config: WorkerConfig, runner: Runner) -> Runner | None:
    """Loads the draft model; returns None if no model drafts. It runs on the leader only, with the worker's threads,
    and its pool has as many blocks as sequences can use of the target's pool."""
    directory = resolve_draft(config.draft, resolve_model(config.model))
    if directory is None:
        return None
    draft_config, target_config = read_model_config(directory), runner.model_config
    if draft_config.vocab_size != target_config.vocab_size:
        raise StartupError(
            f"draft {directory.name}: its vocabulary has {draft_config.vocab_size} tokens, the model's"
            f" {target_config.vocab_size}; they must be the same"
        )
    of_target: DType = runner.dtype_name  # type: ignore[assignment]
    share = draft_share(
        directory,
        draft_config,
        runner.max_model_len,
        runner.layout.block_size,
        of_target,
        config.max_running,
        config.kv_dtype,
    )
    started = time.monotonic()
    draft = load_runner(
        EngineOptions(
            model_dir=directory,
            device=config.device,
            dtype=runner.dtype_name,
            kv_dtype=config.kv_dtype,
            threads=runner.threads,
            block_size=runner.layout.block_size,
            kv_memory_bytes=share.num_blocks(runner.num_blocks) * share.layout.bytes_per_block,
            max_model_len=share.max_model_len,
            kernels=config.kernels,
            activations=config.activations,
            attention="triton" if config.attention == "triton" else "auto",  # flashinfer is asked of the model
            max_num_tokens=max(config.step_tokens + 2 * CATCH_UP * config.max_running, 512),
            decode_rows=config.max_running,
            decode_lengths=(1, 2),  # after a step whose draft tokens were all accepted the draft is two tokens behind
        )
    )
    log.info("draft %s: %d blocks, loaded in %.2f s", directory.name, draft.num_blocks, time.monotonic() - started)
    return draft


def measure_steps(runner: Runner, max_tokens: int, limit_s: float = MEASURING_S) -> list[tuple[int, float]]:
    """Measures the seconds of steps by number of tokens, in short rows at a medium context length. Writes KV into
    blocks that are not in use yet."""
    context = min(_CONTEXT, runner.max_model_len - _ROW - 1)
    if context < 1:
        return [(1, 1e-3)]
    blocks = _blocks(runner, context + _ROW + 1)
    return _by_size(runner.step, max(max_tokens, 9), lambda tokens: _rows(tokens, context, blocks), limit_s)


def measure_fills(draft: Runner, max_tokens: int, limit_s: float = MEASURING_S) -> list[tuple[int, float]]:
    """Measures the seconds of steps that fill draft KV, by number of tokens: one row without sampling. Steps that
    sample at every token take three times as long. Writes KV into blocks that are not in use yet."""
    longest = min(draft.max_model_len, draft.layout.positions_in(draft.num_blocks))
    max_tokens = min(max(max_tokens, 9), longest)
    start = min(_CONTEXT // 2, longest - max_tokens)
    blocks = _blocks(draft, start + max_tokens)

    def plan(tokens: int) -> StepPlan:
        return StepPlan(0, (Row(SequenceId("measure"), start, (0,) * tokens, blocks, SamplingParams(), 0),))

    return _by_size(draft.step, max_tokens, plan, limit_s)  # on a GPU it waits even if nothing is sampled


def _by_size(
    step: Callable[[StepPlan], object], max_tokens: int, plan: Callable[[int], StepPlan], limit_s: float
) -> list[tuple[int, float]]:
    fastest_s: dict[int, float] = {}
    deadline = time.perf_counter() + limit_s
    for _ in range(_REPEATS):  # all sizes in turn: a temporary load of the machine affects them alike
        for tokens in (n for n in _SIZES if n <= max_tokens):
            if len(fastest_s) >= 2 and time.perf_counter() + fastest_s.get(tokens, max(fastest_s.values())) > deadline:
                return sorted(fastest_s.items())
            fastest_s[tokens] = min(fastest_s.get(tokens, math.inf), _took(partial(step, plan(tokens))))
    return sorted(fastest_s.items())


def measure_rows(
    runner: Runner, limit_s: float = MEASURING_S
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Measures the seconds of steps by number of one-token rows, and the cost of one more draft token in each of them.
    A slow model is measured with few rows only. Writes KV into blocks that are not in use yet."""
    context = min(_CONTEXT, runner.max_model_len - _DRAFT_TOKENS - 1)
    if context < 1:
        return [], []
    blocks, step = _blocks(runner, context + _DRAFT_TOKENS + 1), runner.step
    fastest_s: dict[tuple[int, int], float] = {}
    deadline = time.perf_counter() + limit_s
    for _ in range(_REPEATS):
        for rows, tokens in ((n, tokens) for n in _TIMED_ROWS for tokens in (1, 1 + _DRAFT_TOKENS)):
            if (1, 1 + _DRAFT_TOKENS) in fastest_s and time.perf_counter() > deadline:
                break
            row = Row(SequenceId("measure"), context, (0,) * tokens, blocks, SamplingParams(temperature=0.0), tokens)
            plan = StepPlan(0, (row,) * rows)
            # In operation a step follows steps like it; after one of another size less is in the processor's caches.
            for _ in range(_IN_A_ROW if rows <= _SHORT_ROWS else 1):
                fastest_s[rows, tokens] = min(fastest_s.get((rows, tokens), math.inf), _took(partial(step, plan)))
    sizes = [n for n in _PASS_ROWS if (n, 1 + _DRAFT_TOKENS) in fastest_s]
    more = [(n, max(fastest_s[n, 1 + _DRAFT_TOKENS] - fastest_s[n, 1], 0.0) / _DRAFT_TOKENS) for n in sizes]
    return [(n, fastest_s[n, 1]) for n in sizes], more


def measure_passes(
    draft: Runner, limit_s: float = MEASURING_S
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Measures the seconds of a first draft pass and of a later one, by number of rows, if the draft model makes draft
    tokens in one call; else returns none. A slow one is timed for few rows. Writes KV into blocks not in use yet."""
    context = min(_CONTEXT, draft.max_model_len - _MANY - 1)
    if not draft.can_propose or context < 1:
        return [], []
    blocks = _blocks(draft, context + _MANY + 1)
    row = Row(SequenceId("measure"), context, (0,), blocks, SamplingParams(temperature=0.0), 1)
    first: list[tuple[int, float]] = []
    later: list[tuple[int, float]] = []
    deadline = time.perf_counter() + limit_s
    for rows in _PASS_ROWS:
        plan = StepPlan(0, (row,) * rows)
        if draft.kernels.startswith("torch"):  # on a GPU the first call of a shape may load kernels
            draft.propose(plan, [_MANY] * rows)
        one = many = math.inf
        for _ in range(_REPEATS):
            one = min(one, _drafting_took(draft, plan, 1))
            many = min(many, _drafting_took(draft, plan, _MANY))
            if time.perf_counter() > deadline:
                break
        first.append((rows, one))
        later.append((rows, max((many - one) / (_MANY - 1), 1e-6)))
        if time.perf_counter() > deadline:
            break
    return first, later


def measure_planning(runner: Runner, limit_s: float = MEASURING_S) -> float:
    """Measures the seconds that planning and accounting for draft tokens adds to a step: a scheduler of one sequence
    that drafts (always wrong) against one that never does, each with the model's own step between plan and outcome,
    which evicts their code from the caches as in operation. A slow model runs few steps only."""
    context = min(_CONTEXT // 2, runner.max_model_len - _TURNS)
    if context < 1:
        return 0.0
    request = GenerateRequest("measure", (0,) * context, _TURNS, SamplingParams(temperature=0.0))
    between = StepPlan(0, (Row(request.sequence_id, 0, (0,), _blocks(runner, 1), request.sampling, 1),))
    deadline = time.perf_counter() + limit_s / 4
    took: tuple[list[float], list[float]] = [], []
    schedulers = [_scheduler_of_one(runner.layout, request, draft_tokens) for draft_tokens in (False, True)]
    while all(scheduler.num_sequences for scheduler in schedulers):
        for scheduler in schedulers:
            began = time.perf_counter()
            plan = scheduler.begin_step(0.0)
            planned = time.perf_counter()
            if plan is None:
                raise InvariantError("nothing to plan for a sequence that has not ended")
            runner.step(between)
            made = tuple((1,) * draft.num_draft_tokens for draft in plan.drafts if draft.num_draft_tokens)
            sampled = tuple((0,) * row.num_sampled for row in plan.with_draft_tokens(made).rows)
            outcome = StepOutcome(plan.step_id, sampled, 1e-3, draft_tokens=made)
            settling = time.perf_counter()
            scheduler.finish_step(outcome, 1e-3)
            if bool(made) == (scheduler is schedulers[1]):
                took[bool(made)].append(time.perf_counter() - settling + planned - began)
        if time.perf_counter() > deadline:
            break
    return max(statistics.median(took[1]) - statistics.median(took[0]), 0.0) if all(took) else 0.0


def measure_switching(draft: Runner, runner: Runner, limit_s: float = MEASURING_S) -> float:
    """Measures how much longer a step of one row with a draft token takes after a draft pass than after a step: on a
    CPU the weights of both models compete for its caches. Writes KV into blocks that are not in use yet."""
    context = min(_CONTEXT, runner.max_model_len - 2, draft.max_model_len - 2)
    if draft.can_queue_draft_tokens or not draft.can_propose or context < 1:
        return 0.0
    row = Row(SequenceId("measure"), context, (0, 0), _blocks(runner, context + 2), SamplingParams(temperature=0.0), 2)
    step = partial(runner.step, StepPlan(0, (row,)))
    drafting = StepPlan(0, (replace(row, tokens=(0,), block_ids=_blocks(draft, context + 2), num_sampled=1),))
    alone, after = list[float](), list[float]()
    deadline = time.perf_counter() + limit_s / 4
    step()
    for _ in range(_TURNS):
        alone.append(_took(step))
        draft.propose(drafting, [1])
        after.append(_took(step))
        step()
        if time.perf_counter() > deadline:
            break
    return max(statistics.median(after) - statistics.median(alone), 0.0)


def _scheduler_of_one(layout: KVLayout, request: GenerateRequest, draft_tokens: bool) -> DecodeScheduler:
    """Returns a decode scheduler with one sequence whose KV has arrived; draft tokens are almost free to it."""
    num_blocks = layout.blocks_for(request.max_kv_tokens)
    drafts = ModelDrafts(layout, num_blocks, request.max_kv_tokens) if draft_tokens else None
    model = StepModel(((1, 1e-3), (64, 1e-3)), ((1, 1e-6),), rows=((1, 1e-3),), per_draft_token=((1, 1e-6),))
    speculation = Speculation(drafts, model)
    scheduler = DecodeScheduler(layout, num_blocks, 1, speculation, prefix_cache=False)
    scheduler.reserve(request, 0.0)
    scheduler.received(request.sequence_id, 0, 0.0)
    return scheduler


def _blocks(runner: Runner, positions: int) -> tuple[int, ...]:
    return tuple(index % runner.num_blocks for index in range(runner.layout.blocks_for(positions)))


def _rows(tokens: int, context: int, blocks: tuple[int, ...]) -> StepPlan:
    sampling = SamplingParams(temperature=0.0)
    row = Row(SequenceId("measure"), context, (0,) * min(tokens, _ROW + 1), blocks, sampling, min(tokens, _ROW + 1))
    if tokens <= _ROW + 1:
        return StepPlan(0, (row,))
    row = replace(row, tokens=(0,) * _ROW, num_sampled=_ROW)
    return StepPlan(0, (row,) * (tokens // _ROW))


def _drafting_took(draft: Runner, plan: StepPlan, count: int) -> float:
    """Times one call for `count` draft tokens after each row. If they stay on a device, the device's own timing counts,
    as in operation."""
    counts = [count] * len(plan.rows)
    if not draft.can_queue_draft_tokens:
        return _took(partial(draft.propose, plan, counts))
    queued = draft.queue_draft_tokens(plan, counts)
    queued.ended.synchronize()
    return queued.seconds


def _took(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
