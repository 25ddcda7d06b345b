"""How long is a stream silent when the decode pool is half as large as its streams need?

    python benchmarks/half_pool.py [--streams 8 16 32] [--prompt 64] [--output 256] [--runs 3] [--clock cpu]

The built-in target on one core, without draft tokens: the decode scheduler on a real engine, in one process. All
streams start together with computed prompts, first in a pool that fits all of them, then in half of it; the tokens must
be the same. A silence is the time between two tokens of one stream. With `--clock cpu`, scheduler, engine and figures
all use processor time, which other load hardly affects. Writes `benchmarks/results/half-pool.md`.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import GenerateRequest, SamplingParams
from baton.core.step import Row, StepPlan
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime.model_source import builtin_directory
from benchmarks.kit import parser, report, table
from decode.scheduler import DecodeScheduler
from decode.speculation.draft_model import measure_steps
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel

STEP_TOKENS, BUDGET_S = 512, 0.05
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Found:
    """One run: tokens by request, seconds to the end of all streams and of each on average, the longest silence, tokens
    computed again, preemptions."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended_at: list[float] = field(default_factory=list)
    silence_s: float = 0.0
    recomputed: int = 0
    preemptions: int = 0


def streams(count: int, prompt: int, output: int, vocab_size: int) -> list[GenerateRequest]:
    generator = random.Random(count)
    sampling = [SamplingParams(temperature=0.8, seed=index) for index in range(count)]
    return [
        GenerateRequest(f"s{i}", tuple(generator.choices(range(6, vocab_size), k=prompt)), output, sampling[i])
        for i in range(count)
    ]


def run(
    runner: Runner, requests: list[GenerateRequest], costs: list[tuple[int, float]], blocks: int, clock: Clock
) -> Found:
    """Runs all requests at once in a pool of `blocks` blocks."""
    speculation = Speculation(model=StepModel(costs, budget_s=BUDGET_S, step_tokens=STEP_TOKENS))
    scheduler = DecodeScheduler(runner.layout, blocks, len(requests), speculation, prefix_cache=True)
    found, last_token_at = Found(), dict[str, float]()
    first: dict[str, int] = {}
    for request in requests:
        taken = scheduler.reserve(request, clock())
        row = Row(request.sequence_id, 0, request.prompt, taken, request.sampling, 1, 0)
        first[request.request_id] = runner.step(StepPlan(0, (row,))).sampled[0][0]
    began = clock()
    for request in requests:
        scheduler.received(request.sequence_id, first[request.request_id], began)
        last_token_at[request.request_id], found.tokens[request.request_id] = began, []
    while scheduler.num_sequences:
        plan = scheduler.begin_step(clock())
        if plan is None:
            raise RuntimeError(f"nobody goes on: {scheduler!r}")
        result = scheduler.finish_step(runner.step(plan), clock())
        now = clock()
        found.recomputed += plan.num_tokens - sum(row.num_sampled for row in plan.rows)
        for event in result.tokens:
            name = event.sequence.request_id
            found.silence_s = max(found.silence_s, now - last_token_at[name])
            last_token_at[name] = now
            found.tokens[name][event.first_index :] = event.tokens
        found.ended_at += [now - began] * len(result.ended)
    scheduler.check()
    if scheduler.blocks.num_free != blocks:
        raise RuntimeError(f"blocks are lost: {scheduler.blocks!r}")
    found.preemptions = scheduler.preemptions
    return found


def main() -> int:
    options = parser(__doc__, "half-pool.md")
    options.add_argument("--streams", type=int, nargs="+", default=[8, 16, 32])
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--output", type=int, default=256)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    arguments = options.parse_args()
    clock = CLOCKS[arguments.clock]
    engine = EngineOptions(model_dir=builtin_directory("target"), device="cpu", threads=1, kv_memory_bytes=128 << 20)
    runner = load_runner(engine)
    costs = measure_steps(runner, STEP_TOKENS)
    rows, same = [], True
    for count in arguments.streams:
        requests = streams(count, arguments.prompt, arguments.output, runner.model_config.vocab_size)
        whole = count * runner.layout.blocks_for(arguments.prompt + arguments.output)
        for name, blocks in (("whole", whole + count), ("half", whole // 2)):
            founds = [run(runner, requests, costs, blocks, clock) for _ in range(arguments.runs)]
            if name == "whole":
                plain = founds[0].tokens
            identical = all(found.tokens == plain for found in founds)
            same &= identical
            seconds = [
                max(found.silence_s for found in founds),
                statistics.median(max(found.ended_at) for found in founds),
                statistics.median(statistics.mean(found.ended_at) for found in founds),
            ]
            counts = [statistics.median(getattr(f, kind) for f in founds) for kind in ("recomputed", "preemptions")]
            figures = [*(f"{value:.2f} s" for value in seconds), *(f"{value:.0f}" for value in counts)]
            rows.append([str(count), name, *figures, "yes" if identical else "NO"])
            print(rows[-1], flush=True)
    about = f"Kernels: {runner.kernels}, {runner.dtype_name}, one thread. Clock: {arguments.clock}."
    what = (
        f"Streams of {arguments.prompt} + {arguments.output} tokens; the longest silence is that of {arguments.runs}"
        f" runs, the rest are medians. Load average {os.getloadavg()[0]:.1f}."
    )
    names = ("streams", "pool", "longest silence", "end", "end, mean", "computed again", "preemptions", "same tokens")
    report(arguments.out, "Half a pool", what, table(names, rows), about=about)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
