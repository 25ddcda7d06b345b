"""Decode steps planned and launched ahead against steps one by one: the time from one step's tokens to the next's.

    python benchmarks/ahead.py MODEL_DIR [--device auto] [--batch 1,8] [--context 512] [--steps 60] [--rounds 3]

A real scheduler, step thread and engine, with sequences whose KV has arrived; both ways by turns in one process. What
is measured is a step with all that surrounds it: planning, launching, sampling, waiting, settling. On a GPU the second
way should take what the device takes. On CPU there is nothing to gain; it shows that this runs, and what it costs.
`gpu.py` measures the same on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from baton.core.request import GenerateRequest, SamplingParams
from baton.engine.runner import EngineOptions, Runner, load_runner
from baton.rpc.step_thread import StepThread
from decode.scheduler import DecodeScheduler

WARM_UP = 8  # steps, at the least: shapes are captured in the first


async def step_times(runner: Runner, batch: int, context: int, steps: int, *, ahead: bool) -> list[float]:
    """Seconds from outcome to outcome of that many steps of `batch` sequences, all of them running."""
    scheduler = DecodeScheduler(runner.layout, runner.num_blocks, batch, prefix_cache=False, plan_ahead=ahead)
    sampling, length = SamplingParams(temperature=0.8, seed=1), steps + 2 * WARM_UP
    for number in range(batch):
        prompt = tuple((number + 7 * i) % 4000 for i in range(context))
        request = GenerateRequest(f"s{number}", prompt, length, sampling)
        scheduler.reserve(request, 0.0)
        scheduler.received(request.sequence_id, 5, 0.0)
    compute = StepThread(runner.step, runner if ahead else None)
    ends: list[float] = []
    while scheduler.num_sequences:
        plan = scheduler.begin_step(time.monotonic())
        if plan is not None:
            compute.begin(plan)
            if not compute.full:
                continue
        _, outcome = await compute.collect()
        scheduler.finish_step(outcome, time.monotonic())
        ends.append(time.perf_counter())
    compute.close()
    if ahead and scheduler.steps_ahead < steps:
        raise SystemExit(f"only {scheduler.steps_ahead} of {len(ends)} steps were planned ahead")
    return [b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)][:steps]


def both(runner: Runner, batch: int, context: int, steps: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, one by one and planned ahead, in turns."""
    for pair in runner.kv.storage:
        for tensor in pair:
            tensor.zero_()  # whatever the prompts were, their KV is finite
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for ahead, times in found.items():
            times += asyncio.run(step_times(runner, batch, context, steps, ahead=ahead))
    return statistics.median(found[False]), statistics.median(found[True])


def lines(runner: Runner, shapes: list[tuple[int, int]], steps: int = 100, rounds: int = 3) -> list[str]:
    """Rows of a table: batch, context, milliseconds one by one, ahead, and their ratio."""
    found = []
    for batch, context in shapes:
        alone, ahead = both(runner, batch, context, steps, rounds)
        found.append(f"| {batch} | {context} | {alone * 1e3:.2f} ms | {ahead * 1e3:.2f} ms | {ahead / alone:.2f} |")
    return found


HEAD = ["| sequences | context | one by one | planned ahead | ratio |", "|---|---|---|---|---|"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runner = load_runner(EngineOptions(model_dir=options.model, device=options.device))
    shapes = [(int(batch), options.context) for batch in options.batch.split(",")]
    print("\n".join([*HEAD, *lines(runner, shapes, options.steps, options.rounds)]))


if __name__ == "__main__":
    main()
