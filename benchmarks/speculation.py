"""What speculation gains: tokens of one or more clients with and without guesses, in turns on one machine.

    python benchmarks/speculation.py                                     the built-in pair, bf16
    python benchmarks/speculation.py --model DIR --draft DIR --force-acceptance 0.8

Measures decode alone: scheduler and engine step by step, prompts computed beforehand, no links and no event loop. Runs
with and without guesses alternate; figures are medians of the compute thread's own processor time, which other
processes on the machine disturb less than the clock. Writes a report to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.config import WorkerConfig
from baton.core.errors import Unavailable
from baton.core.request import GenerateRequest, SamplingParams
from baton.core.step import Row, StepPlan
from baton.engine.runner import EngineOptions, Runner, load_runner
from baton.model_source import resolve_model
from benchmarks.exactness import cpu_name, prompts
from decode.draft_model import prepare
from decode.scheduler import DecodeScheduler
from decode.speculation import Speculation
from decode.speculative_engine import SpeculativeEngine

ROOT = Path(__file__).resolve().parent.parent
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "T = 0.8": SamplingParams(temperature=0.8)}


@dataclass(frozen=True)
class Timing:
    """Of one run: milliseconds of processor time per token and stream, guesses right, guesses made."""

    tpot_ms: float
    accepted: int
    drafted: int


def measure(
    runner: Runner, speculation: Speculation, engine: SpeculativeEngine, requests: Sequence[GenerateRequest]
) -> Timing:
    """Decodes all requests in one batch. Tokens per second and stream count from the first step to the last."""
    scheduler = DecodeScheduler(runner.layout, runner.num_blocks, len(requests), speculation)
    for request in requests:
        try:
            blocks = scheduler.reserve(request, 0.0)
        except Unavailable as error:
            raise SystemExit(f"too many clients for the KV pool: {error.message}") from None
        row = Row(request.sequence_id, 0, request.prompt, blocks, request.sampling, 1, 0)
        scheduler.received(request.sequence_id, runner.step(StepPlan(0, (row,))).sampled[0][0], 0.0)
    before, tokens = speculation.counters, 0
    started = time.thread_time()
    while scheduler.num_sequences:
        plan = scheduler.begin_step(time.perf_counter())
        if plan is None:
            continue
        outcome = engine.step(plan)
        result = scheduler.finish_step(outcome, time.perf_counter())
        tokens += sum(len(event.tokens) for event in result.tokens)
    spent = time.thread_time() - started
    after = speculation.counters
    return Timing(
        spent * 1e3 * len(requests) / tokens,
        after.accepted_tokens - before.accepted_tokens,
        after.drafted_tokens - before.drafted_tokens,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--force-acceptance", type=float, default=-1.0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "speculation.md")
    arguments = parser.parse_args()
    directory = resolve_model(arguments.model)
    runner = load_runner(
        EngineOptions(
            model_dir=directory, device="cpu", dtype="bfloat16", threads=1, kv_memory_bytes=1 << 29, max_model_len=2048
        )
    )
    config = WorkerConfig(
        model=arguments.model, draft=arguments.draft, force_acceptance=arguments.force_acceptance, max_running=64
    )
    with_guesses, engine = prepare(config, runner)
    texts = prompts(resolve_model("builtin"), 64, min(runner.model_config.vocab_size, 4096))
    lines = [
        "| sampling | clients | TPOT without | with | gain | worst, best pair | accepted |",
        "|---" * 7 + "|",
    ]
    for name, sampling in SAMPLINGS.items():
        for clients in arguments.clients:
            pairs: list[tuple[Timing, Timing]] = []
            for pair in range(arguments.pairs):
                chosen = random.Random(pair).sample(texts, clients)
                batch = [
                    GenerateRequest(
                        f"r{i}", tuple(text[:200]), arguments.tokens, replace(sampling, seed=pair * 100 + i)
                    )
                    for i, text in enumerate(chosen)
                ]
                plain = measure(runner, Speculation(), SpeculativeEngine(runner, None), batch)
                pairs.append((plain, measure(runner, with_guesses, engine, batch)))
            gains = sorted(plain.tpot_ms / guessed.tpot_ms for plain, guessed in pairs)
            accepted, drafted = sum(g.accepted for _, g in pairs), sum(g.drafted for _, g in pairs)
            lines.append(
                f"| {name} | {clients} | {statistics.median(p.tpot_ms for p, _ in pairs):.2f} ms "
                f"| {statistics.median(g.tpot_ms for _, g in pairs):.2f} ms | **{statistics.median(gains):.2f}x** "
                f"| {gains[0]:.2f}x, {gains[-1]:.2f}x | {accepted} of {drafted} |"
            )
            print(lines[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    head = [
        "# What speculation gains",
        "",
        f"Commit {commit.strip()}, {datetime.date.today()}, {cpu_name()}, 1 thread, bf16, kernels {runner.kernels}. "
        f"`python benchmarks/speculation.py {' '.join(sys.argv[1:])}`".rstrip(),
        f"{arguments.pairs} pairs, {arguments.tokens} tokens each after prompts of up to 200. Decode alone: scheduler "
        "and engine, no links, no event loop. Times are processor time; the machine was busy.",
        *(["Acceptance was forced: the output was not real."] if arguments.force_acceptance >= 0 else []),
        "",
        *lines,
        "",
    ]
    arguments.output.write_text("\n".join(head), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
