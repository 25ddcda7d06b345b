"""One rank's engine: `load_runner` brings a checkpoint up, `Runner.step` computes a plan of rows.

A runner belongs to one compute thread. It holds no sequence state: everything a step needs is in its plan, and what it
leaves behind is KV in the blocks that the plan names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.core.errors import InvariantError, StartupError
from baton.core.kv_layout import KVLayout
from baton.core.model_config import ModelConfig
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepOutcome, StepPlan
from baton.engine.attention import Attention, FastAttention
from baton.engine.attention_exact import KEY_STEP, ExactAttention
from baton.engine.batch import Batch, Limits, make_batch
from baton.engine.checkpoint import Checkpoint, model_digest, read_model_config
from baton.engine.device import choose_device, choose_dtype, default_kv_bytes
from baton.engine.kv_pool import KVPool, plan_blocks
from baton.engine.layers import EXACT, FAST, Rotary
from baton.engine.model import Model
from baton.engine.sampler import sample
from baton.engine.selftest import prove_row_invariance
from baton.engine.tp import TPGroup
from baton.engine.weights import WeightReader

OnStage = Callable[[str, float], None]

_DEFAULT_SEQUENCES = 256  # without a given KV memory, no more than this many sequences of full length


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to bring up a model. None means: decide from the machine and the checkpoint.

    `exact` makes the bits of a row's logits independent of its batch (CPU, float32, slower). `threads` is the number
    of compute threads of this process. `max_num_tokens` bounds the tokens of one step.
    """

    model_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    exact: bool = False
    threads: int = 1
    block_size: int = 16
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_tokens: int = 8192


class Runner:
    """A loaded model with its KV pool. Facts that others read: `model_config`, `layout`, `num_blocks`,
    `max_model_len` (positions per sequence), `dtype_name`, `digest` (of the checkpoint), `kv`."""

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        kv: KVPool,
        attention: Attention,
        options: EngineOptions,
        *,
        max_model_len: int,
        digest: str,
        device: torch.device,
    ) -> None:
        self.model_config = model_config
        self.layout: KVLayout = kv.layout
        self.num_blocks = kv.num_blocks
        self.max_model_len = max_model_len
        self.dtype_name: str = kv.layout.layers[0].dtype
        self.digest = digest
        self.exact = options.exact
        self.kv = kv
        self._model = model
        self._attention = attention
        self._limits = Limits(kv.layout.block_size, kv.num_blocks, model_config.vocab_size, max_model_len)
        self._max_num_tokens = options.max_num_tokens
        # Exact mode never computes a single row: kernels may treat a product of one row differently.
        self._min_tokens = 2 if options.exact else 1
        self._device = device

    def step(self, plan: StepPlan) -> StepOutcome:
        """Computes the plan's rows and samples from them. Raises InvariantError for a plan that does not fit."""
        started = time.perf_counter()
        batch = self._batch(plan)
        tokens = iter(sample(self._forward(batch), batch.draws))
        sampled = tuple(tuple(next(tokens) for _ in range(row.num_sampled)) for row in plan.rows)
        return StepOutcome(plan.step_id, sampled, time.perf_counter() - started)

    def step_logits(self, plan: StepPlan) -> list[Tensor]:
        """Computes the plan's rows and returns, per row, the logits [num_sampled, vocab] instead of sampling."""
        logits = self._forward(self._batch(plan)).cpu()
        return list(torch.split(logits, [row.num_sampled for row in plan.rows]))

    def _batch(self, plan: StepPlan) -> Batch:
        if plan.num_tokens > self._max_num_tokens:
            raise InvariantError(f"step {plan.step_id}: {plan.num_tokens} tokens, more than {self._max_num_tokens}")
        return make_batch(plan, self._limits, self._device, self._min_tokens)

    @torch.no_grad()
    def _forward(self, batch: Batch) -> Tensor:
        if not batch.spans:
            return torch.empty((0, self.model_config.vocab_size))
        return self._model.forward(batch, self.kv, self._attention)


def load_runner(options: EngineOptions, on_stage: OnStage | None = None) -> Runner:
    """Loads a checkpoint onto this machine; `on_stage` hears of each finished stage and its seconds.

    Raises StartupError, one plain line, for everything that is wrong with the directory or does not fit the machine.
    """
    torch.set_num_threads(options.threads)
    device = choose_device(options.device, options.exact)
    dtype = choose_dtype(options.dtype, device, options.exact)
    if options.exact and KEY_STEP % options.block_size:
        raise StartupError(f"exact mode: block-size must divide {KEY_STEP}, not {options.block_size}")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with _stage("check", on_stage), torch.no_grad():
        config = read_model_config(options.model_dir)
        weights = WeightReader(Checkpoint.open(options.model_dir), config, TPGroup(), torch_dtype, device)
        longest = _longest(config, options)
        digest = model_digest(options.model_dir)
    with _stage("load", on_stage), torch.no_grad():
        rotary = Rotary(config, longest, torch_dtype, device)
        model = Model(config, weights, TPGroup(), rotary, EXACT if options.exact else FAST)
    with _stage("kv", on_stage), torch.no_grad():
        layout = config.kv_layout(options.block_size, dtype)
        budget = options.kv_memory_bytes
        if budget is None:
            enough = layout.blocks_for(longest) * layout.bytes_per_block * _DEFAULT_SEQUENCES
            budget = min(default_kv_bytes(device), enough)
        kv = KVPool(layout, plan_blocks(layout, budget, options.max_model_len), device)
    attention: Attention
    if options.exact:
        attention = ExactAttention(config, options.block_size, kv.zero_block, device)
    else:
        attention = FastAttention(config, options.block_size, kv.zero_block, torch_dtype, device)
    max_model_len = min(longest, kv.num_blocks * options.block_size)
    runner = Runner(model, config, kv, attention, options, max_model_len=max_model_len, digest=digest, device=device)
    with _stage("warm-up", on_stage):
        _warm_up(runner)
    if options.exact:
        with _stage("self-test", on_stage):
            prove_row_invariance(runner.step_logits, kv, config.vocab_size, max_model_len, options.max_num_tokens)
    return runner


def _longest(config: ModelConfig, options: EngineOptions) -> int:
    longest = options.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise StartupError(
            f"max-model-len {longest} is more than the model's max_position_embeddings {config.max_position_embeddings}"
        )
    return longest


def _warm_up(runner: Runner) -> None:
    """One prefill and one decode step, so that kernels are compiled before the first request. Leaves KV in block 0,
    which nobody owns yet."""
    length = min(runner.layout.block_size, runner.max_model_len)
    for start, tokens in ((0, (0,) * length), (length - 1, (0,))):
        row = Row(SequenceId("warm-up"), start, tokens, (0,), SamplingParams(temperature=0.0), num_sampled=1)
        runner.step(StepPlan(0, (row,)))


@contextmanager
def _stage(name: str, on_stage: OnStage | None) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if on_stage is not None:
        on_stage(name, time.perf_counter() - started)
