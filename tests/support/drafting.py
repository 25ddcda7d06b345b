"""Speculation in virtual time: the decode scheduler with a draft model, on a simulated engine: which draft tokens are
right is given, and `Prices` determines the step times. The scheduler observes noisy times; runs are judged by the times
without noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SamplingParams, SequenceId
from baton.core.step import StepOutcome, StepPlan
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import ModelDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from sim.cluster import LAYERS

PROMPT = 160
_RIGHT, _WRONG, _END = 7, 8, 9


@dataclass(frozen=True)
class Prices:
    """The parts of a step's time, in seconds. A target pass takes `target_s`, plus `sequence_s` for each row and
    `token_s` for each draft token in it; draft tokens take `first_s`, plus `next_s` for each further pass and `row_s`
    for each row beyond the first of a pass; each token that the draft must compute before it can draft takes
    `behind_s`; the overhead of a step is `around_s`, plus `around_draft_tokens_s` if it has draft tokens.

    `noise` is the standard deviation of the logarithm of each part; one in `one_in` parts takes `stall_s` longer.
    `load(now)` multiplies everything."""

    target_s: float = 0.9e-3
    sequence_s: float = 0.38e-3
    token_s: float = 0.2e-3
    first_s: float = 0.40e-3
    next_s: float = 0.10e-3
    row_s: float = 0.09e-3
    behind_s: float = 0.045e-3
    around_s: float = 1.2e-3
    around_draft_tokens_s: float = 0.0
    noise: float = 0.25
    one_in: int = 50
    stall_s: float = 8e-3
    load: Callable[[float], float] = field(default=lambda now: 1.0)

    def target(self, plan: StepPlan) -> float:
        more = self.sequence_s * len(plan.rows) + self.token_s * (plan.num_tokens - len(plan.rows))
        return self.target_s + more if plan.rows else 0.0

    def draft(self, plan: StepPlan) -> float:
        if not plan.drafts:
            return 0.0
        longest = max(row.num_draft_tokens for row in plan.drafts)
        passes = self.first_s + self.next_s * max(0, longest - 1)
        more_rows = sum(max(row.num_draft_tokens, 1) for row in plan.drafts) - max(longest, 1)
        behind = sum(len(row.tokens) - 1 for row in plan.drafts)
        return passes + self.row_s * more_rows + self.behind_s * behind

    def around(self, plan: StepPlan) -> float:
        return self.around_s + self.around_draft_tokens_s * any(row.num_draft_tokens for row in plan.drafts)

    def model(self, wrong: float = 1.0) -> StepModel:
        """The step model that a worker measures at its start; `wrong` multiplies the price of a further token, as a
        measurement on a busy machine may."""
        sizes = (1, 4, 16, 64)
        plain = [(n, self.target_s + self.sequence_s * n) for n in sizes]
        per_draft_token = [(n, self.token_s * n * wrong) for n in sizes]
        long = [(n, self.target_s + self.token_s * n) for n in (1, 4, 9, 16, 32, 64, 128, 512)]
        fills = [(n, self.first_s + self.behind_s * (n - 1)) for n in (1, 4, 9, 16, 32, 64, 128, 512)]
        first = [(n, self.first_s + self.row_s * (n - 1)) for n in (1, 4, 16, 64)]
        later = [(n, self.next_s + self.row_s * (n - 1)) for n in (1, 4, 16, 64)]
        return StepModel(
            long,
            fills,
            later,
            first,
            rows=plain,
            per_draft_token=per_draft_token,
            planning_s=self.around_draft_tokens_s,
        )


@dataclass
class SimResult:
    """The result of one run: tokens, the seconds that they took without noise, steps, steps with draft tokens, draft
    tokens and how many were right, tokens that the draft computed without drafting after them, trials begun, and a
    histogram of draft lengths."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafting: int = 0
    draft_tokens: int = 0
    right: int = 0
    filled: int = 0
    trials: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def serve(
    streams: Sequence[Sequence[bool]],
    prices: Prices,
    *,
    clients: int = 1,
    length: int | None = None,
    model: StepModel | None = None,
    seed: int = 1,
    max_tokens: int = 0,
) -> SimResult:
    """Serves `streams` in order, `clients` at a time. With `length` None the policy chooses the draft length; 0 means
    no draft; another number is the draft length in every step. Requests allow `max_tokens` tokens, by default as many
    as their stream has; an answer ends with its stream. Time in which nothing decodes is not counted."""
    layout = KVLayout(16, LAYERS)
    model = model or prices.model()
    drafts = ModelDrafts(layout, clients * 64, 4096) if length != 0 else None
    speculation = Speculation(drafts, model, fixed_length=length or 0)
    scheduler = DecodeScheduler(layout, clients * 64, clients, speculation, prefix_cache=False)
    noise, result, now = random.Random(seed), SimResult(), 0.0
    waiting, here = list(enumerate(streams)), dict[str, Sequence[bool]]()

    def noisy(seconds: float) -> float:
        stall = prices.stall_s if noise.randrange(prices.one_in) == 0 else 0.0
        return seconds and seconds * math.exp(noise.gauss(0.0, prices.noise)) + stall

    while waiting or scheduler.num_sequences:
        arriving: list[SequenceId] = []
        while waiting and scheduler.num_sequences < clients:
            index, bits = waiting.pop(0)
            prompt, greedy = tuple(range(1000, 1000 + PROMPT)), SamplingParams(temperature=0.0)
            request = GenerateRequest(f"s{index}", prompt, max(max_tokens, len(bits)), greedy, (_END,))
            scheduler.reserve(request, now)
            arriving.append(request.sequence_id)
            here[f"s{index}"] = bits
        for _ in range(3 if arriving else 1):  # KV arrives while the other sequences decode
            plan = scheduler.begin_step(now)
            if plan is None:
                break
            outcome = _outcome(plan, here)
            load = prices.load(now)
            draft_s, target_s = (
                prices.draft(plan) * load,
                prices.target(plan.with_draft_tokens(outcome.draft_tokens)) * load,
            )
            seen_draft, seen_target = noisy(draft_s), noisy(target_s)
            outcome = replace(outcome, draft_s=seen_draft, elapsed_s=seen_draft + seen_target)
            around_s = prices.around(plan) * load
            if plan.rows:
                result.seconds += (draft_s + target_s + around_s) / load
            _count(result, plan)
            now += outcome.elapsed_s + noisy(around_s)
            events = scheduler.finish_step(outcome, now)
            result.tokens += sum(len(event.tokens) for event in events.tokens)
        for sequence_id in arriving:
            scheduler.received(sequence_id, _RIGHT, now)
    scheduler.check()
    result.right, result.trials = speculation.counters.accepted_tokens, speculation.trials.started
    return result


def _outcome(plan: StepPlan, streams: dict[str, Sequence[bool]]) -> StepOutcome:
    """Every right token has the same id; a wrong draft token has another."""
    draft_tokens: list[tuple[int, ...]] = [()] * len(plan.rows)
    for draft in plan.drafts:
        if draft.num_draft_tokens:
            row = plan.rows[draft.row]
            bits, first = streams[row.sequence_id.request_id], row.output_index - 1
            right = [*bits[first : first + draft.num_draft_tokens], *[False] * draft.num_draft_tokens]
            draft_tokens[draft.row] = tuple(_RIGHT if bit else _WRONG for bit in right[: draft.num_draft_tokens])
    made = tuple(draft_tokens) if any(draft_tokens) else ()
    sampled = [
        tuple(
            _END if index == len(streams[row.sequence_id.request_id]) - 1 else _RIGHT
            for index in range(row.output_index, row.output_index + row.num_sampled)
        )
        for row in plan.with_draft_tokens(made).rows
    ]
    return StepOutcome(plan.step_id, tuple(sampled), draft_tokens=made)


def _count(result: SimResult, plan: StepPlan) -> None:
    made = sum(draft.num_draft_tokens for draft in plan.drafts)
    result.steps += 1
    result.drafting += made > 0
    result.draft_tokens += made
    result.filled += sum(len(draft.tokens) for draft in plan.drafts if not draft.num_draft_tokens)
    for draft in plan.drafts:
        if draft.num_draft_tokens:
            result.lengths[draft.num_draft_tokens] = result.lengths.get(draft.num_draft_tokens, 0) + 1
