"""The gain of speculation: decode time of one or more clients with and without draft tokens, in turns on one machine.

    python benchmarks/speculation.py                                     the built-in pair, bf16
    python benchmarks/speculation.py --model DIR --draft DIR --force-acceptance 0.8

Measures decode alone: scheduler and engine step by step, with precomputed prompts, no links and no event loop. Runs
with and without draft tokens alternate; figures are medians of the compute thread's own processor time, which other
processes on the machine disturb less than wall time. Writes a report to `benchmarks/results/`.

The gain is compared with the ideal: the largest (1 + p + ... + p^k) * step without draft tokens / step with k. In each
pair the same requests also run with a fixed number of draft tokens, for each k in turn. These runs give the cost of a
step with k draft tokens for every row, accepted or not (mean over steps in which all clients took part and no prompt
was filled into the draft; a ratio to plain steps of the same pair, median over pairs), independent of the policy's
estimates. p is accepted draft tokens / draft tokens that followed only accepted ones, in all runs of a line that draft;
with forced acceptance it is the forced rate. The cost of the draft's prompts is part of the gain but not of the ideal.
"Best fixed" is the gain of the best of those k over a whole run, prompts included, chosen afterwards.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.errors import Unavailable
from baton.core.request import GenerateRequest, SamplingParams
from baton.core.step import Row, StepPlan
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime.config import WorkerConfig
from baton.runtime.model_source import resolve_model
from benchmarks.exactness import prompts
from benchmarks.kit import RESULTS, by_turns, parser, report, table
from decode.scheduler import DecodeScheduler
from decode.speculation.draft_length import MAX_DRAFT_TOKENS
from decode.speculation.draft_model import prepare
from decode.speculation.drafts import ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation

SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "T = 0.8": SamplingParams(temperature=0.8)}


@dataclass(frozen=True)
class Timing:
    """One run, in processor time: milliseconds per token and stream, and per step that drafted `length` tokens for
    every client and filled no draft (nan without such a step); draft tokens accepted and made, and how often one that
    followed only accepted ones was wrong."""

    tpot_ms: float
    step_ms: float
    accepted: int
    drafted: int
    wrong: int


@dataclass
class Pair:
    """The same requests in every way: without draft tokens, with as many as the policy chooses, and with each k."""

    plain: Timing
    num_drafted: Timing
    fixed: dict[int, Timing]

    @property
    def gain(self) -> float:
        return self.plain.tpot_ms / self.num_drafted.tpot_ms


def acceptance_rate(accepted: int, wrong: int) -> float:
    """p: the probability that a draft token after only accepted ones is right, when `accepted` such tokens were right
    and `wrong` were not. Draft tokens after a wrong one do not count. 0.0 without any."""
    seen = accepted + wrong
    return accepted / seen if seen else 0.0


def ideal_gain(rate: float, plain_s: float, step_s: Mapping[int, float]) -> tuple[float, int]:
    """The gain of the best fixed number of draft tokens k, and that k: a step with k draft tokens for each row
    generates 1 + p + ... + p^k tokens of each in `step_s[k]` seconds, a step without any generates one in `plain_s`.

    k = 0 is a choice as well, so the gain is never below 1. The best k is known from the first step on, and the draft's
    prompt costs nothing: a policy that uses only p and prices cannot gain more.

    Raises:
        ValueError: `rate` is no probability, or a time is not positive.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{rate} is no probability")
    best, best_length = 1.0, 0
    for length, seconds in sorted(step_s.items()):
        if min(plain_s, seconds) <= 0.0:
            raise ValueError(f"a step with {length} draft tokens took {seconds} s, one without {plain_s} s")
        gain = sum(rate**depth for depth in range(length + 1)) * plain_s / seconds
        if gain > best:
            best, best_length = gain, length
    return best, best_length


def measure(
    runner: Runner,
    speculation: Speculation,
    engine: SpeculativeEngine,
    requests: Sequence[GenerateRequest],
    length: int = -1,
) -> Timing:
    """Decodes all requests in one batch. The time per token counts from the first step to the last."""
    scheduler = DecodeScheduler(runner.layout, runner.num_blocks, len(requests), speculation)
    for request in requests:
        try:
            blocks = scheduler.reserve(request, 0.0).block_ids
        except Unavailable as error:
            raise SystemExit(f"too many clients for the KV pool: {error.message}") from None
        row = Row(request.sequence_id, 0, request.prompt, blocks, request.sampling, 1, 0)
        scheduler.received(request.sequence_id, runner.step(StepPlan(0, (row,))).sampled[0][0], 0.0)
    before, tokens, wrong = speculation.counters, 0, 0
    steps_s: list[float] = []
    started = ended = time.thread_time()
    while scheduler.num_sequences:
        began = ended
        plan = scheduler.begin_step(time.perf_counter())
        if plan is None:
            continue
        outcome = engine.step(plan)
        result = scheduler.finish_step(outcome, time.perf_counter())
        tokens += sum(len(event.tokens) for event in result.tokens)
        ended = time.thread_time()
        made = [row.num_sampled - 1 for row in plan.with_draft_tokens(outcome.draft_tokens).rows]
        if made == [length] * len(requests) and all(draft.num_draft_tokens for draft in plan.drafts):
            steps_s.append(ended - began)
        taken = {event.sequence: len(event.tokens) for event in result.tokens}
        wrong += sum(taken[row.sequence_id] <= n for row, n in zip(plan.rows, made, strict=True))
    after = speculation.counters
    return Timing(
        (ended - started) * 1e3 * len(requests) / tokens,
        statistics.fmean(steps_s) * 1e3 if steps_s else math.nan,
        after.accepted_tokens - before.accepted_tokens,
        after.drafted_tokens - before.drafted_tokens,
        wrong,
    )


def measure_pair(
    runner: Runner,
    guessing: Speculation,
    engine: SpeculativeEngine,
    requests: Sequence[GenerateRequest],
    lengths: Sequence[int],
) -> Pair:
    """Runs every way once, one after the other."""
    plain = measure(runner, Speculation(), SpeculativeEngine(runner, None), requests, 0)
    num_drafted = measure(runner, guessing, engine, requests)
    fixed: dict[int, Timing] = {}
    for length in lengths:
        drafts = guessing.drafts
        if isinstance(drafts, ModelDrafts):
            drafts = ModelDrafts(drafts.layout, drafts.blocks.num_blocks, drafts.max_positions)
        elif drafts is not None:
            drafts = NgramDrafts()
        # With a price model of its own: the policy must not learn from these runs.
        always = Speculation(drafts, fixed_length=length, forced_rate=guessing.forced_rate)
        fixed[length] = measure(runner, always, engine, requests, length)
    return Pair(plain, num_drafted, fixed)


def cells(name: str, clients: int, pairs: Sequence[Pair], forced_rate: float | None) -> tuple[list[str], list[str]]:
    """A row of the gains, measured and ideal, and a row of the costs of steps."""
    gains = sorted(pair.gain for pair in pairs)
    runs = [run for pair in pairs for run in (pair.num_drafted, *pair.fixed.values())]
    rate = acceptance_rate(sum(run.accepted for run in runs), sum(run.wrong for run in runs))
    rate = rate if forced_rate is None else forced_rate
    lengths = [k for k in pairs[0].fixed if not any(math.isnan(pair.fixed[k].step_ms) for pair in pairs)]
    dearer = {k: statistics.median(pair.fixed[k].step_ms / pair.plain.step_ms for pair in pairs) for k in lengths}
    ideal, ideal_length = ideal_gain(rate, 1.0, dearer)
    whole = {k: statistics.median(pair.plain.tpot_ms / pair.fixed[k].tpot_ms for pair in pairs) for k in lengths}
    fixed_length, fixed_gain = max({0: 1.0, **whole}.items(), key=lambda item: item[1])
    gain = statistics.median(gains)
    accepted, drafted = (
        sum(pair.num_drafted.accepted for pair in pairs),
        sum(pair.num_drafted.drafted for pair in pairs),
    )
    plain, chosen = (statistics.median(getattr(pair, of).tpot_ms for pair in pairs) for of in ("plain", "num_drafted"))
    row = [name, str(clients), f"{plain:.2f} ms", f"{chosen:.2f} ms", f"**{gain:.2f}x**"]
    row += [f"{gains[0]:.2f}x, {gains[-1]:.2f}x", f"{accepted} of {drafted}", f"{rate:.3f}"]
    row += [
        f"{fixed_gain:.2f}x (k = {fixed_length})",
        f"{ideal:.2f}x (k = {ideal_length})",
        f"**{gain / ideal:.2f}**",
    ]
    plain_ms = statistics.median(pair.plain.step_ms for pair in pairs)
    costs = [f"{dearer[k]:.2f}" if k in dearer else "" for k in pairs[0].fixed]
    return row, [name, str(clients), f"{plain_ms:.2f} ms", *costs]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="builtin")
    options.add_argument("--draft", default="auto")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--lengths", type=int, nargs="*", default=list(range(1, MAX_DRAFT_TOKENS + 1)), metavar="K")
    options.add_argument("--force-acceptance", type=float, default=-1.0)
    options.add_argument("--output", type=Path, default=RESULTS / "speculation.md")
    arguments = options.parse_args()
    directory = resolve_model(arguments.model)
    runner = load_runner(
        EngineOptions(
            model_dir=directory, device="cpu", dtype="bfloat16", threads=1, kv_memory_bytes=1 << 29, max_model_len=2048
        )
    )
    config = WorkerConfig(
        step_tokens=512,
        model=arguments.model,
        draft=arguments.draft,
        force_acceptance=arguments.force_acceptance,
        max_running=64,
    )
    with_draft_tokens, engine = prepare(config, runner, None).speculation(config, runner)
    texts = prompts(resolve_model("builtin"), 64, min(runner.model_config.vocab_size, 4096))
    gained, costs = [], []
    for (name, sampling), clients in product(SAMPLINGS.items(), arguments.clients):
        pairs: list[Pair] = []
        for pair in range(arguments.pairs):
            chosen = random.Random(pair).sample(texts, clients)
            batch = [
                GenerateRequest(f"r{i}", tuple(text[:200]), arguments.tokens, replace(sampling, seed=pair * 100 + i))
                for i, text in enumerate(chosen)
            ]
            pairs.append(measure_pair(runner, with_draft_tokens, engine, batch, by_turns(pair, arguments.lengths)))
        row, cost = cells(name, clients, pairs, with_draft_tokens.forced_rate)
        gained.append(row)
        costs.append(cost)
        print(row, cost, sep="\n", flush=True)
    names = ["sampling", "clients", "TPOT without", "with", "gain", "worst, best pair", "accepted", "p", "best fixed"]
    steps = ["sampling", "clients", "plain step", *(f"k = {k}" for k in arguments.lengths)]
    forced = " Acceptance was forced: the output was not real." if arguments.force_acceptance >= 0 else ""
    setting = (
        f"{arguments.pairs} pairs, {arguments.tokens} tokens each after prompts of up to 200. Decode alone: scheduler "
        f"and engine, no links, no event loop. Times are processor time.{forced}"
    )
    beside = "A step with k draft tokens for every client, as a multiple of one without, measured in the same runs:"
    parts = (setting, table([*names, "ideal", "gain / ideal"], gained), beside, table(steps, costs))
    about = f"1 thread, bf16, kernels {runner.kernels}."
    report(arguments.output, "What speculation gains", *parts, about=about)


if __name__ == "__main__":
    main()
