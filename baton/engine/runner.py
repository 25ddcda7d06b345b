"""One rank's engine: `load_runner` brings a checkpoint up, `Runner.step` computes a plan of rows.

A runner belongs to one compute thread. It holds no sequence state: everything a step needs is in its plan, and what it
leaves behind is KV in the blocks that the plan names (and counts of tokens seen, which it could make anew). Under
tensor parallelism every rank has a runner and computes the same plans; only the leader's gets logits and samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import InvariantError, StartupError
from baton.core.kv_layout import KVLayout
from baton.core.model_config import ModelConfig
from baton.core.ranks import Ranks
from baton.core.request import SamplingParams, SequenceId, TokenBias, TokenLogprob
from baton.core.reshard import local_layout
from baton.core.step import History, Row, StepOutcome, StepPlan, without_unsampled
from baton.engine.attention_exact import KEY_STEP
from baton.engine.batch import Batch, Limits, make_batch
from baton.engine.checkpoint import Checkpoint, model_digest, read_model_config
from baton.engine.computing import Computing, Propose, how_to_compute
from baton.engine.device import choose_device, choose_dtype
from baton.engine.draft_share import draft_share
from baton.engine.draft_tokens_device import DeviceDraftTokens, Queued
from baton.engine.grammars import Grammars
from baton.engine.kernels.native import choose_kernels, row_invariant
from baton.engine.kv_pool import KVPool, default_budget, plan_blocks
from baton.engine.launches import Launches
from baton.engine.layers import Arithmetic, Rotary, exact, fast
from baton.engine.logprobs import asked, sampled_rows, scored_rows
from baton.engine.memory_report import MemoryReport, memory_report
from baton.engine.model import Model
from baton.engine.model_native import NativeModel
from baton.engine.parallel import LOAD_TIMEOUT_S, TPGroup, connect
from baton.engine.processors import SeenTables
from baton.engine.quantize import check_quantize
from baton.engine.rank_options import agree, must_agree
from baton.engine.sampler import sample
from baton.engine.sampler_device import decide
from baton.engine.sampler_native import chooser
from baton.engine.selftest import prove_row_invariance
from baton.engine.step_marks import StepMarks
from baton.engine.weights import Tensors, WeightReader

OnStage = Callable[[str, float], None]
_LONG_ROW = 128
"""Tokens of a row that is computed as prompts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to bring up a model. None means: decide from the machine and the checkpoint.

    `exact` makes the bits of a row's logits independent of its batch (CPU; float32, or bfloat16 where compiled kernels
    multiply it), and proves it at start. `threads` is the number of compute threads of this process. `kv_memory_bytes`
    is the worker's, all ranks together. `max_num_tokens` bounds the tokens of one step. `host` is this machine's
    address for the worker's other ranks, `edge_kind` how KV goes to other workers, `staging_bytes` the most of it on
    its way at once, all ranks together. `kernels` is `auto` (the best compiled ones that this processor has, else
    torch's), `torch`, or the level of compiled ones. `quantize` is `none` or `int8` (weights of linear layers and head;
    CPU). torch's kernels keep int8 widened: then the memory report says less than is used. `version` is the code's.
    `draft_dir` is the draft that this rank loads afterwards, for `max_running` sequences. `decode_rows` is the most
    sequences of a decode step, for which steps are captured on a GPU; 0 captures none. `gpu_share` is the share of its
    GPU's memory that a rank may use, 0: all, or an even part where ranks of this worker share a GPU. What ranks must
    have alike: `rank_options`.
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
    host: str = "127.0.0.1"
    kernels: str = "auto"
    edge_kind: str = "auto"
    staging_bytes: int = 0
    quantize: str = "none"
    version: str = ""
    draft_dir: Path | None = None
    max_running: int = 0
    decode_rows: int = 0
    gpu_share: float = 0.0


class Runner:
    """A loaded model with its KV pool. Facts that others read: `model_config`, `layout` (the whole model's),
    `local_layout` (this rank's part of it, which `kv` has), `num_blocks`, `max_model_len` (positions per sequence),
    `dtype_name`, `threads`, `digest` (of the checkpoint), `kv`, `group`, `memory`, `kernels` (which, and why),
    `launches_ahead` (whether steps are launched and then collected, as on a GPU: without a draft one may be launched
    while another computes; with a draft, draft tokens and tokens are waited for together)."""

    def __init__(
        self,
        computing: Computing,
        model_config: ModelConfig,
        kv: KVPool,
        options: EngineOptions,
        *,
        kernels: str,
        max_model_len: int,
        digest: str,
        device: torch.device,
        group: TPGroup,
        memory: MemoryReport,
        grammars: Grammars | None = None,
    ) -> None:
        self.model_config = model_config
        self.local_layout: KVLayout = kv.layout
        self.layout = model_config.kv_layout(kv.layout.block_size, kv.layout.layers[0].dtype)
        self.num_blocks = kv.num_blocks
        self.max_model_len = max_model_len
        self.dtype_name: str = kv.layout.layers[0].dtype
        self.digest = digest
        self.exact = options.exact
        self.threads = options.threads
        self.kv = kv
        self.group = group
        self.memory = memory
        self._seen = SeenTables(grammars=grammars)
        self._announce: Callable[[StepPlan], None] | None = None
        self.kernels = kernels
        self._compute, self._choose = computing.compute, computing.choose
        self._propose: Propose | None = computing.propose
        self._compute_in_two = computing.compute_in_two
        self._first_layers: tuple[Callable[[StepPlan], int], Callable[[int, int], None]] | None = None
        self.drafted_at_once = 0  # calls
        self._limits = Limits(kv.layout.block_size, kv.num_blocks, model_config.vocab_size, max_model_len)
        self._max_num_tokens = options.max_num_tokens
        # Exact mode never lets torch compute a single row: its kernels may treat a product of one row differently.
        self._min_tokens = 2 if options.exact and kernels.startswith("torch") else 1
        self._device = device
        self.launches_ahead = device.type == "cuda"
        self.marks = StepMarks(device)
        self.launches = Launches(device, group, decide if device.type == "cuda" else None, self._choose)

    def lead(self, announce: Callable[[StepPlan], None]) -> None:
        """From now on every plan goes to `announce`, which tells the followers, before it is computed here."""
        self._announce = announce

    def tell_first_layers(self, wanted: Callable[[StepPlan], int], notify: Callable[[int, int], None]) -> None:
        """From now on `notify(step_id, layers)` is called on the compute thread when the first `wanted(plan)` layers
        (0:
        none) of a step have written their KV; the rest of the step is computed behind it. Never where a step is not
        computed layer by layer here: with torch's kernels, on a GPU, on several ranks."""
        self._first_layers = wanted, notify

    def step(self, plan: StepPlan) -> StepOutcome:
        """Computes the plan's rows and samples from them; a follower samples nothing. Raises InvariantError for a plan
        that does not fit, RankLost when another rank is gone."""
        started = time.perf_counter()
        batch = self._batch(plan)
        self._begin_masks(batch)
        logits = self._forward(batch, plan)
        if not self.group.leads:
            return StepOutcome(plan.step_id, (), time.perf_counter() - started)
        if not batch.sampled_at:
            self.marks.wait_last()  # nothing of it comes to the host: its time would be that of its launch
        scored: tuple[tuple[TokenLogprob, ...], ...] = ()
        if batch.num_scored:
            scored, logits = scored_rows(plan, logits[: batch.num_scored]), logits[batch.num_scored :]
        wanted = asked(plan)
        lines = logits[wanted] if 0 < len(wanted) < len(logits) else logits
        needs_raw = bool(wanted) and lines is logits
        tokens = iter(sample(logits, batch.draws, self._seen, self._choose, in_place=not needs_raw))
        sampled = tuple([tuple(islice(tokens, row.num_sampled)) for row in plan.rows])
        logprobs = sampled_rows(plan, lines, sampled)
        made = StepOutcome(plan.step_id, sampled, time.perf_counter() - started, logprobs, scored)
        return without_unsampled(plan, made, self._seen.grammars.take_unsampled())

    def launch(self, plan: StepPlan, draft_tokens: Queued | None = None) -> None:
        """The first half of `step`, on the leader: on a GPU it returns before the step is computed, and the next one
        may be launched, whose rows name their tokens by this one's rows (`StepPlan.token_sources`). `draft_tokens` are
        those that the plan verifies (`StepPlan.drafted`), made on the same device. Raises as `step` does."""
        started = time.perf_counter()
        batch = self._batch(plan)
        if batch.num_scored:
            raise InvariantError(f"step {plan.step_id} scores known tokens: nothing is launched ahead of that")
        self._begin_masks(batch)
        logits = self._forward(batch, plan, draft_tokens)
        self.launches.launched(plan, batch, logits, self._seen, started, draft_tokens)

    def collect(self) -> StepOutcome:
        """The second half, of the oldest step launched: waits until it is computed."""
        return self.launches.collect()

    @property
    def drafts_at_once(self) -> bool:
        """Whether `propose` is there: compiled kernels, or a GPU, on one rank."""
        return self._propose is not None

    def propose(self, plan: StepPlan, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Computes the plan's rows and `counts[i]` tokens behind row i, each from those before it, in one call: what a
        step for each token would sample, but for draws that are too close to decide at once. Rows with a count sample
        one token, by draws that change no logits; the others none.

        Raises:
            InvariantError: the plan does not fit, or this runner takes a step for each token.
        """
        batch, make = self._to_propose(plan, counts)
        draft_tokens = iter(make(batch, [count for count in counts if count]))
        return [tuple(next(draft_tokens)) if count else () for count in counts]

    @property
    def draft_tokens_stay(self) -> bool:
        """Whether `queue_draft_tokens` is there: on a GPU."""
        return isinstance(self._propose, DeviceDraftTokens)

    def queue_draft_tokens(self, plan: StepPlan, counts: Sequence[int]) -> Queued:
        """What `propose` makes, by any draws, left on the device for a step that verifies it: nothing waits. With no
        counts it only computes the rows. Raises as `propose` does."""
        batch, make = self._to_propose(plan, counts)
        if not isinstance(make, DeviceDraftTokens):
            raise InvariantError(f"step {plan.step_id}: {self.kernels} leave no draft tokens on a device")
        return make.queue(batch, [count for count in counts if count])

    def _to_propose(self, plan: StepPlan, counts: Sequence[int]) -> tuple[Batch, Propose]:
        if self._propose is None:
            raise InvariantError(f"step {plan.step_id}: {self.kernels} make no draft tokens at once")
        batch = self._batch(plan)
        for row, count in zip(plan.rows, counts, strict=True):
            reach = min(len(row.block_ids) * self.layout.block_size, self.max_model_len)
            if row.num_sampled != (count > 0) or row.end + count - 1 > reach:
                raise InvariantError(f"{row.sequence_id}: {count} draft tokens behind {row.end} of {reach} positions")
        self.drafted_at_once += 1
        return batch, self._propose

    def step_logits(self, plan: StepPlan) -> list[Tensor]:
        """Computes the plan's rows and returns, per row, the logits [num_sampled, vocab] instead of sampling; a
        follower has none."""
        batch = self._batch(plan)
        logits = self._forward(batch, plan)[batch.num_scored if self.group.leads else 0 :].cpu()
        return list(torch.split(logits, [row.num_sampled if self.group.leads else 0 for row in plan.rows]))

    def _begin_masks(self, batch: Batch) -> None:
        if self.group.leads:
            self._seen.grammars.begin(batch.draws)

    def _batch(self, plan: StepPlan) -> Batch:
        if plan.num_tokens > self._max_num_tokens:
            raise InvariantError(f"step {plan.step_id}: {plan.num_tokens} tokens, more than {self._max_num_tokens}")
        return make_batch(plan, self._limits, self._device, self._min_tokens)

    def _forward(self, batch: Batch, plan: StepPlan, draft_tokens: Queued | None = None) -> Tensor:
        self.launches.check(plan, draft_tokens)  # before followers hear of a plan that they would wait in
        if self._announce is not None:
            self._announce(plan.to_compute())
        # The last block of a row is its newest: the one that may be the highest so far.
        self.kv.expect([row.block_ids[-1] for row in plan.rows])
        if not batch.rows:
            return torch.empty((0, self.model_config.vocab_size))
        if self._first_layers is not None and self._compute_in_two is not None:
            wanted, notify = self._first_layers
            if layers := wanted(plan):
                return self._compute_in_two(batch, layers, partial(notify, plan.step_id, layers))
        logits = self._compute(
            self.launches.feed(batch, plan, draft_tokens) if plan.token_sources or plan.drafted else batch
        )
        self.marks.record(plan.step_id)
        return logits


def load_runner(
    options: EngineOptions,
    on_stage: OnStage | None = None,
    *,
    ranks: Ranks | None = None,
    store: Any = None,
    tensors: Tensors | None = None,
) -> Runner:
    """Loads a checkpoint onto this machine; `on_stage` hears of each finished stage and its seconds. Several `ranks`
    load their shares at the same time and meet in `store`. With `tensors` the weights come from there, and of the
    model's directory only its config is read: for benchmarks of shapes that nobody has on disk.

    Raises StartupError, one plain line, for everything that is wrong with the directory or does not fit the machine,
    RankLost when another rank gives up.
    """
    torch.set_num_threads(options.threads)
    ranks = ranks or Ranks()
    device = choose_device(options.device, options.exact, ranks.local_rank)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    check_quantize(options.quantize, device)
    if options.exact and KEY_STEP % options.block_size:
        raise StartupError(f"exact mode: block-size must divide {KEY_STEP}, not {options.block_size}")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with _stage("check", on_stage), torch.no_grad():
        config = read_model_config(options.model_dir)
        share = TPGroup(ranks.rank, ranks.size)  # says who has what; connected further down
        int8 = options.quantize == "int8"
        checkpoint = Checkpoint.open(options.model_dir) if tensors is None else tensors
        weights = WeightReader(checkpoint, config, share, torch_dtype, device, int8=int8)
        longest = config.longest(options.max_model_len)
        digest = model_digest(options.model_dir) if tensors is None else ""
    kernels, kernels_name = choose_kernels(options.kernels, device, config.architecture)
    if int8 and kernels is None and options.kernels != "torch":
        raise StartupError(f"quantize int8 needs compiled kernels, and there is only {kernels_name}: leave it at none")
    if options.exact and not row_invariant(kernels, torch_dtype):
        raise StartupError(
            f"exact mode in {dtype} needs compiled kernels, and there is only {kernels_name}:"
            " leave dtype at auto or float32"
        )
    level = "torch" if kernels is None else kernels.level
    agreed = must_agree(options, device=device, dtype=dtype, kernels=level, digest=digest, max_model_len=longest)
    with _stage("connect", on_stage if ranks.size > 1 else None):
        agree(store, ranks, agreed, LOAD_TIMEOUT_S)
        group = connect(store, ranks, device, options.host)
    with _stage("load", on_stage), torch.no_grad():
        model: Model | NativeModel
        if kernels is not None:
            model = NativeModel(config, weights, group, kernels, longest, torch_dtype, options.threads)
        else:
            model = Model(config, weights, group, _arithmetic(Rotary(config, longest, torch_dtype, device), options))
    with _stage("kv", on_stage), torch.no_grad():
        layout = config.kv_layout(options.block_size, dtype)
        mine = local_layout(layout, ranks.size, ranks.rank)
        if options.kv_memory_bytes is None:
            draft = None
            if options.draft_dir is not None:
                of_draft = read_model_config(options.draft_dir)
                draft = draft_share(of_draft, longest, options.block_size, dtype, options.max_running)
            budget = default_budget(mine, longest, device, ranks.local_size, draft, options.gpu_share)
        else:
            budget = options.kv_memory_bytes // ranks.size
        num_blocks = group.minimum(plan_blocks(mine, budget, options.max_model_len), "KV blocks")
        kv = KVPool(mine, num_blocks, device)
    grammars = None
    if group.leads and tensors is None:
        grammars = Grammars.load(options.model_dir, config.vocab_size)
    max_model_len = min(longest, kv.num_blocks * options.block_size)
    choose = None if kernels is None else chooser(kernels, options.threads)
    computing = how_to_compute(
        model, kv, config, group, choose, exact=options.exact, longest=longest, decode_rows=options.decode_rows
    )
    runner = Runner(
        computing,
        config,
        kv,
        options,
        kernels=kernels_name,
        max_model_len=max_model_len,
        digest=digest,
        device=device,
        group=group,
        memory=memory_report(weights, kv, layout, ranks.size),
        grammars=grammars,
    )
    with _stage("warm-up", on_stage):
        _warm_up(runner)
    if computing.prepare is not None:
        with _stage("capture", on_stage):
            computing.prepare()
    if options.exact:
        with _stage("self-test", on_stage):
            limits = (config.vocab_size, runner.max_model_len, options.max_num_tokens)
            prove_row_invariance(runner.step_logits, kv, *limits)
    group.barrier("end of loading")
    return runner


def _arithmetic(rotary: Rotary, options: EngineOptions) -> Arithmetic:
    if rotary.device.type != "cuda":
        return exact(rotary) if options.exact else fast(rotary)
    from baton.engine.kernels.fused import fused

    return fused(rotary)


def _warm_up(runner: Runner) -> None:
    """One prefill and one decode step, so that kernels are compiled. Leaves KV in block 0, which nobody owns yet."""
    length = min(runner.layout.block_size, runner.max_model_len)
    for start, tokens in ((0, (0,) * length), (length - 1, (0,))):
        row = Row(SequenceId("warm-up"), start, tokens, (0,), SamplingParams(temperature=0.0), num_sampled=1)
        runner.step(StepPlan(0, (row,)))
    if runner.launches_ahead:
        for plan in load_kernels(runner):
            runner.step(plan)


def load_kernels(runner: Runner) -> list[StepPlan]:
    """Steps of every kind of a first request, for a GPU: it loads a kernel when it is first used, and may stop for that
    until a receive that somebody has posted is served. A long row, and draws that use every way of changing logits."""
    length = max(min(_LONG_ROW, runner.max_model_len - 2), 1)
    blocks = tuple(range(min(runner.num_blocks, runner.layout.blocks_for(length + 2))))
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias=(TokenBias(0, 1.0),),
        bad_words=((1,),),
        logprobs=1,
    )
    long = Row(SequenceId("warm-up"), 0, (0,) * length, blocks, SamplingParams(), 1)
    history = History((0,) * length, (0,), ())
    drawn = Row(SequenceId("warm-up"), length, (0,), blocks, sampling, 1, 1, history)
    greedy = Row(SequenceId("other"), length, (0,), blocks, SamplingParams(temperature=0.0), 1, 1)
    return [StepPlan(0, (long,)), StepPlan(0, (drawn, greedy)), StepPlan(0, (greedy,))]


@contextmanager
def _stage(name: str, on_stage: OnStage | None) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if on_stage is not None:
        on_stage(name, time.perf_counter() - started)
