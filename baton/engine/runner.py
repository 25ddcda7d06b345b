"""One rank's engine: `Runner.step` computes a plan of rows (loading.py creates it).

A runner belongs to one compute thread. It holds no sequence state: everything a step needs is in its plan, and it
leaves only KV in the plan's blocks (and counts of seen tokens, which can be rebuilt). Under tensor parallelism every
rank has a runner and computes the same plans; only the leader's gets logits and samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.core.compatibility import Compatibility
from baton.core.errors import InvariantError
from baton.core.step import StepOutcome, StepPlan
from baton.engine.adapters import Adapters
from baton.engine.batch import Batch, RowLimits, make_batch
from baton.engine.block_tables import BlockTables
from baton.engine.device_stream import StepMarks
from baton.engine.draft_tokens_device import DeviceDraftTokens, Queued
from baton.engine.grammars import Grammars
from baton.engine.kv_pool import KVPool
from baton.engine.launches import Launched, Launches
from baton.engine.options import EngineOptions
from baton.engine.outputs import pool_rows
from baton.engine.parallel import TPGroup
from baton.engine.processors import ApplyMasks, SeenTables, apply_masks
from baton.engine.sampler import Choose, Decide
from baton.models.model_config import AnyConfig

Propose = Callable[[Batch, Sequence[int]], list[list[int]]]
ComputeInTwo = Callable[[Batch, int, Callable[[], None]], Tensor]


@dataclass(frozen=True, slots=True)
class Computing:
    """The functions that compute a model's steps (computing.py). `compute` returns the logits [S, vocab] of a batch,
    `compute_pooled` also the final hidden states [N, hidden] of its pooled tokens;
    `choose` samples tokens from them, `decide` does so on their device; `mask` masks the tokens that grammars do not
    allow; `propose` drafts a draft model's tokens in one call; `compute_in_two` is `compute` with a callback when the
    given number of layers have written their KV. None means that only the plain way is available. `prepare` is called
    once after loading, for preparations that must precede the first request. `row_lengths` has a length of each kind of
    rows that different kernels compute. `tables` are those that batches must be made with. Batches have `min_tokens` or
    more, with padding."""

    compute: Callable[[Batch], Tensor]
    choose: Choose | None = None
    decide: Decide | None = None
    mask: ApplyMasks | None = None
    propose: Propose | None = None
    compute_in_two: ComputeInTwo | None = None
    prepare: Callable[[], None] | None = None
    row_lengths: tuple[int, ...] = (1,)
    tables: BlockTables | None = None
    min_tokens: int = 1
    compute_pooled: Callable[[Batch], tuple[Tensor, Tensor]] | None = None


class Runner:
    """A loaded model with its KV pool. Public attributes: `model_config`, `layout` (the whole model's), `num_blocks`,
    `max_model_len` (positions per sequence), `max_num_tokens` (of a step), `dtype_name`, `threads`, `facts` (what it is
    compared by), `kv` (this rank's pool), `group`, `parameter_bytes` (of this rank's weights), `kernels` (which, and
    why), `adapters` (LoRA), `launches_ahead` (whether steps are launched and then collected, as on a GPU: without a
    draft model, a step may be launched while another computes; with one, a single wait covers draft tokens and
    tokens)."""

    def __init__(
        self,
        computing: Computing,
        model_config: AnyConfig,
        kv: KVPool,
        options: EngineOptions,
        *,
        kernels: str,
        max_model_len: int,
        facts: Compatibility,
        group: TPGroup,
        parameter_bytes: int,
        adapters: Adapters,
        grammars: Grammars | None = None,
        classifier: Tensor | None = None,
    ) -> None:
        """`classifier` float64 [labels, hidden]: the classification head, if the model has one."""
        self.model_config = model_config
        self.dtype_name = facts.dtype
        self.layout = facts.layout
        self.num_blocks = kv.num_blocks
        self.max_model_len = max_model_len
        self.facts = facts
        self.threads = options.threads
        self.kv = kv
        self.group = group
        self.parameter_bytes = parameter_bytes
        self.kernels = kernels
        self.adapters = adapters
        self.launches_ahead = kv.device.type == "cuda"
        self.marks = StepMarks(kv.device)
        self.launches = Launches(kv.device, group, computing.decide, computing.choose)
        self.propose_calls = 0  # number of calls
        self._seen = SeenTables(grammars=grammars, apply_masks=computing.mask or apply_masks)
        self._announce: Callable[[StepPlan], None] | None = None
        self._compute, self._compute_pooled = computing.compute, computing.compute_pooled
        self._classifier = classifier
        self._propose = computing.propose
        self._compute_in_two = computing.compute_in_two
        self._first_layers: tuple[Callable[[StepPlan], int], Callable[[int, int], None]] | None = None
        self._limits = RowLimits(
            kv.layout.block_size, kv.num_blocks, model_config.vocab_size, max_model_len, kv.layout.groups
        )
        self._tables = computing.tables or self._limits.new_tables()
        self.max_num_tokens = options.max_num_tokens
        self._min_tokens = computing.min_tokens

    def lead(self, announce: Callable[[StepPlan], None]) -> None:
        """Sets `announce`, which sends every plan to the followers before it is computed here."""
        self._announce = announce

    def set_first_layers_callback(
        self, count_layers: Callable[[StepPlan], int], notify: Callable[[int, int], None]
    ) -> None:
        """Sets `notify(step_id, layers)`, which is called on the compute thread when the first `count_layers(plan)`
        layers of a step (0: none) have written their KV, before the rest of the step is computed. It is never called
        where a step cannot be computed in two parts: with torch's kernels, on a GPU, on several ranks, or with a row
        that is pooled."""
        self._first_layers = count_layers, notify

    def clear_first_layers_callback(self) -> None:
        self._first_layers = None

    def start_grammars(self) -> None:
        """Begins to load the tokenizer for grammars, which takes 1 s for 150,000 tokens, in another process."""
        if self._seen.grammars.processes is not None:
            self._seen.grammars.processes.start()

    def step(self, plan: StepPlan) -> StepOutcome:
        """Computes the plan's rows and samples from them; a follower samples nothing. Raises InvariantError for a plan
        that does not fit, RankLost when another rank is lost."""
        if self.group.leads:
            return self.launches.finish(self._launch(plan))
        self._forward(self._batch(plan), plan)
        return StepOutcome(plan.step_id, ())

    def launch(self, plan: StepPlan, draft_tokens: Queued | None = None) -> None:
        """The first half of `step`, on the leader: on a GPU it returns before the step is computed, and the next one
        may be launched, whose rows take their tokens from this one's rows (`StepPlan.token_sources`). `draft_tokens`
        are those to verify (`StepPlan.drafted`), made on the same device. Raises as `step` does."""
        self.launches.add(self._launch(plan, draft_tokens))

    def _launch(self, plan: StepPlan, draft_tokens: Queued | None = None) -> Launched:
        started = time.perf_counter()
        batch = self._batch(plan)
        self._seen.grammars.begin(batch.draws)
        logits, pooled = self._forward(batch, plan, draft_tokens)
        return self.launches.queue(plan, batch, logits, self._seen, started, draft_tokens, pooled)

    def collect(self) -> StepOutcome:
        """The second half of `step`, for the oldest launched step: waits until it is computed."""
        return self.launches.collect()

    @property
    def can_propose(self) -> bool:
        """Whether `propose` is available: with compiled kernels, or on a GPU, on one rank."""
        return self._propose is not None

    def propose(self, plan: StepPlan, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Computes the plan's rows and drafts `counts[i]` tokens after row i, autoregressively, in one call: the tokens
        that one step per token would sample, except for draws that are too close to decide. Rows with a count sample
        one token, with draws that change no logits; the others none.

        Raises:
            InvariantError: the plan does not fit, or this runner needs one step per token.
        """
        batch, make = self._to_propose(plan, counts)
        draft_tokens = iter(make(batch, [count for count in counts if count]))
        return [tuple(next(draft_tokens)) if count else () for count in counts]

    @property
    def can_queue_draft_tokens(self) -> bool:
        """Whether `queue_draft_tokens` is available: on a GPU, on one rank."""
        return isinstance(self._propose, DeviceDraftTokens)

    def queue_draft_tokens(self, plan: StepPlan, counts: Sequence[int]) -> Queued:
        """Like `propose`, with any draws, but leaves the tokens on the device for the step that verifies them, without
        a wait. With no counts it only computes the rows. Raises as `propose` does."""
        batch, make = self._to_propose(plan, counts)
        if not isinstance(make, DeviceDraftTokens):
            raise InvariantError(f"step {plan.step_id}: {self.kernels} do not support drafting on the device")
        return make.queue(batch, [count for count in counts if count])

    def _to_propose(self, plan: StepPlan, counts: Sequence[int]) -> tuple[Batch, Propose]:
        if self._propose is None:
            raise InvariantError(f"step {plan.step_id}: {self.kernels} do not support drafting in one call")
        batch = self._batch(plan)
        for row, count in zip(plan.rows, counts, strict=True):
            reach = min(self.layout.positions_in(len(row.block_ids)), self.max_model_len)
            if row.num_sampled != (count > 0) or row.end + count - 1 > reach:
                raise InvariantError(
                    f"{row.sequence_id}: cannot draft {count} tokens after {row.end} of {reach} positions"
                )
        self.propose_calls += 1
        return batch, self._propose

    def step_logits(self, plan: StepPlan) -> list[Tensor]:
        """Computes the plan's rows and returns, per row, the logits [num_sampled, vocab] instead of sampling; followers
        have none."""
        batch = self._batch(plan)
        logits = self._forward(batch, plan)[0][batch.num_scored if self.group.leads else 0 :].cpu()
        return list(torch.split(logits, [row.num_sampled if self.group.leads else 0 for row in plan.rows]))

    def _batch(self, plan: StepPlan) -> Batch:
        if plan.num_tokens > self.max_num_tokens:
            raise InvariantError(f"step {plan.step_id}: {plan.num_tokens} tokens, more than {self.max_num_tokens}")
        return make_batch(plan, self._limits, self.kv.device, self._min_tokens, self._tables)

    def _forward(
        self, batch: Batch, plan: StepPlan, draft_tokens: Queued | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits, and the vectors that rows pool, if any do."""
        self.launches.check(plan, draft_tokens)  # before followers receive a plan and would wait for its tokens
        if self._announce is not None:
            self._announce(plan.to_compute())
        # The last column of a row is its newest, so it may have the highest id so far.
        self.kv.expect([block for row in plan.rows for block in row.block_ids[-self.layout.groups :]])
        if not batch.rows:
            return torch.empty((0, self.model_config.vocab_size)), None
        if any(row.pooling for row in batch.rows):
            if self._compute_pooled is None:
                raise InvariantError(f"step {plan.step_id}: {self.kernels} do not support pooling")
            logits, states = self._compute_pooled(batch)
            self.marks.record(plan.step_id)
            return logits, pool_rows(batch, states, self._classifier)
        if self._first_layers is not None and self._compute_in_two is not None:
            count_layers, notify = self._first_layers
            if layers := count_layers(plan):
                return self._compute_in_two(batch, layers, partial(notify, plan.step_id, layers)), None
        logits = self._compute(
            self.launches.feed(batch, plan, draft_tokens) if plan.token_sources or plan.drafted else batch
        )
        self.marks.record(plan.step_id)
        return logits, None
