"""Speculation at start: which source of draft tokens, the draft model loaded beside the target, what steps cost
here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from baton.core.config import WorkerConfig
from baton.core.errors import StartupError
from baton.core.model_config import DType
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.checkpoint import read_model_config
from baton.engine.loading import load_runner
from baton.engine.memory import draft_share
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.model_source import resolve_draft, resolve_model
from decode.speculation.drafts import CATCH_UP, Drafts, ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel

log = logging.getLogger("baton.worker")
_Size = TypeVar("_Size")

MEASURING_S = 1.5
"""Longest that each of the measurements here may take at start; longer steps are extrapolated."""

_CONTEXT = 256
_SIZES = (1, 9, 32, 128, 4, 16, 64, 512, 2, 256)  # far apart first: a slow model has no time for all of them
_REPEATS = 5
_MANY = 6  # draft tokens in the longer of the two calls that a pass is timed by
_PASS_ROWS = (1, 4, 16, 64)
_TIMED_ROWS = (*_PASS_ROWS, 1, 4, 1, 1, 4, 1)  # short steps more often: a difference of two is soon lost in noise
_IN_A_ROW, _SHORT_ROWS = 3, 4  # times that a step of so many rows at most is timed at once
_DRAFT_TOKENS = 4  # in each row of the longer of the two steps that the price of a draft token is taken from


def prepare(config: WorkerConfig, runner: Runner) -> tuple[Speculation, SpeculativeEngine]:
    """What a decode worker drafts with, as its options say.

    Raises:
        StartupError: the draft is not there, has another vocabulary, or does not fit.
    """
    draft = load_draft(config, runner)
    drafts: Drafts | None = NgramDrafts() if config.draft == "ngram" else None
    fills, first, later, rows, per_draft_token = [(1, 1e-6)], *(list[tuple[int, float]]() for _ in range(4))
    if draft is not None:
        drafts = ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
        fills, (first, later) = measure_fills(draft, config.step_tokens), measure_passes(draft)
        if not first:  # each draft token is a step
            first = later = measure_rows(draft)[0]
    if drafts is not None:
        rows, per_draft_token = measure_rows(runner)
    model = StepModel(
        measure_fills(runner, config.step_tokens),
        fills,
        later,
        first,
        rows=rows,
        per_draft_token=per_draft_token,
        budget_s=config.step_budget_ms / 1e3,
        step_tokens=config.step_tokens,
    )
    log.info("steps: %r", model)
    forced = config.force_acceptance if config.force_acceptance >= 0.0 else None
    if forced is not None:
        log.warning("--force-acceptance %g: for benchmarks; the output is not real", forced)
    speculation = Speculation(drafts, model, fixed_length=config.draft_tokens, forced_rate=forced)
    return speculation, SpeculativeEngine(runner, draft)


def load_draft(config: WorkerConfig, runner: Runner) -> Runner | None:
    """The draft model, or None where none drafts. It computes on the leader alone, with the worker's threads,
    and has a pool of as many blocks as sequences can use of the target's."""
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
    share = draft_share(draft_config, runner.max_model_len, runner.layout.block_size, of_target, config.max_running)
    started = time.monotonic()
    draft = load_runner(
        EngineOptions(
            model_dir=directory,
            device=config.device,
            dtype=runner.dtype_name,
            threads=runner.threads,
            block_size=runner.layout.block_size,
            kv_memory_bytes=share.num_blocks(runner.num_blocks) * share.layout.bytes_per_block,
            max_model_len=share.max_model_len,
            kernels=config.kernels,
            max_num_tokens=max(config.step_tokens + 2 * CATCH_UP * config.max_running, 512),
            decode_rows=config.max_running,
        )
    )
    log.info("draft %s: %d blocks, loaded in %.2f s", directory.name, draft.num_blocks, time.monotonic() - started)
    return draft


def measure_fills(runner: Runner, most: int) -> list[tuple[int, float]]:
    """Seconds of steps that compute KV alone, of a preempted sequence again or of a draft that falls behind its own, by
    their number of tokens: one row of which nothing is sampled. Leaves KV in blocks that nobody owns yet."""
    longest = min(runner.max_model_len, runner.num_blocks * runner.layout.block_size)
    most = min(max(most, 9), longest)
    start = min(_CONTEXT // 2, longest - most)
    blocks, step = _blocks(runner, start + most), runner.step  # which waits on a GPU, too

    def timed(tokens: int) -> float:
        row = Row(SequenceId("measure"), start, (0,) * tokens, blocks, SamplingParams(), 0)
        return _took(partial(step, StepPlan(0, (row,))))

    return sorted(_least(timed, [tokens for tokens in _SIZES if tokens <= most]).items())


def measure_rows(runner: Runner) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Seconds of steps by their number of rows of one token, and what one draft token more in each of them costs. Of a
    slow model few rows only. Leaves KV in blocks that nobody owns yet."""
    context = min(_CONTEXT, runner.max_model_len - _DRAFT_TOKENS - 1)
    if context < 1:
        return [], []
    blocks, step, sampling = _blocks(runner, context + _DRAFT_TOKENS + 1), runner.step, SamplingParams(0.0)

    def timed(size: tuple[int, int]) -> float:
        rows, tokens = size
        row = Row(SequenceId("measure"), context, (0,) * tokens, blocks, sampling, tokens)
        plan = StepPlan(0, (row,) * rows)
        # In work a step follows others of its kind; behind one of another size it finds less in the caches.
        return min(_took(partial(step, plan)) for _ in range(_IN_A_ROW if rows <= _SHORT_ROWS else 1))

    found = _least(timed, [(rows, tokens) for rows in _TIMED_ROWS for tokens in (1, 1 + _DRAFT_TOKENS)])
    sizes = [n for n in _PASS_ROWS if (n, 1 + _DRAFT_TOKENS) in found]
    more = [(n, max(found[n, 1 + _DRAFT_TOKENS] - found[n, 1], 0.0) / _DRAFT_TOKENS) for n in sizes]
    return [(n, found[n, 1]) for n in sizes], more


def measure_passes(draft: Runner) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Seconds of a first pass of draft tokens and of one behind it, by number of rows, where draft tokens are made at
    once; else none. A slow draft is timed for few rows only. Leaves KV in blocks that nobody owns yet."""
    context = min(_CONTEXT, draft.max_model_len - _MANY - 1)
    if not draft.drafts_at_once or context < 1:
        return [], []
    row = Row(SequenceId("measure"), context, (0,), _blocks(draft, context + _MANY + 1), SamplingParams(0.0), 1)

    def timed(size: tuple[int, int]) -> float:
        rows, count = size
        return _drafting_took(draft, StepPlan(0, (row,) * rows), count)

    if draft.kernels.startswith("torch"):  # on a GPU the first call of a shape makes its graphs
        for rows in _PASS_ROWS:
            timed((rows, _MANY))
    found = _least(timed, [(rows, count) for rows in _PASS_ROWS for count in (1, _MANY)])
    sizes = [n for n in _PASS_ROWS if (n, _MANY) in found]
    later = [(n, max((found[n, _MANY] - found[n, 1]) / (_MANY - 1), 1e-6)) for n in sizes]
    return [(n, found[n, 1]) for n in sizes], later


def _least(timed: Callable[[_Size], float], sizes: Sequence[_Size]) -> dict[_Size, float]:
    """The least seconds of each size, in turn: what disturbs the machine for a while disturbs them alike. The first two
    in any case, the others as far as they will end within MEASURING_S."""
    found: dict[_Size, float] = {}
    deadline = time.perf_counter() + MEASURING_S
    for _ in range(_REPEATS):
        for size in sizes:
            if len(found) >= 2 and time.perf_counter() + found.get(size, max(found.values())) > deadline:
                return found
            found[size] = min(found.get(size, math.inf), timed(size))
    return found


def _blocks(runner: Runner, positions: int) -> tuple[int, ...]:
    return tuple(range(min(runner.num_blocks, -(-positions // runner.layout.block_size))))


def _drafting_took(draft: Runner, plan: StepPlan, count: int) -> float:
    """Seconds of one call for `count` draft tokens behind each row. Where they stay on a device it says how long, as
    it does of draft tokens in work."""
    counts = [count] * len(plan.rows)
    if not draft.draft_tokens_stay:
        return _took(partial(draft.propose, plan, counts))
    queued = draft.queue_draft_tokens(plan, counts)
    queued.ended.synchronize()
    return queued.seconds


def _took(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
