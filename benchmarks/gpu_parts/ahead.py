"""Decode steps planned and launched ahead against steps one by one: the time from one step's tokens to the next's.

    python -m benchmarks.gpu_parts.ahead --host [--batch 1,64,256] [--context 1024,30000]
    python -m benchmarks.gpu_parts.ahead MODEL_DIR [--draft DIR] [--device auto] [--batch 1,8] [--context 512]
        [--steps 60] [--rounds 3]

Runs a real scheduler, step thread and engine on sequences whose KV has arrived; the two modes alternate in one process.
The time of a step includes all of planning, launching, sampling, waiting and processing its outcome. On a GPU a step
planned ahead should take as long as the device computes. On a CPU nothing is gained; the result shows that planning
ahead works, and its cost. With `--draft`, on a GPU, also measures steps with draft tokens: with separate waits for
draft tokens and tokens, and with one wait for both. `gpu.py` measures the same on a GPU.

`--host` measures, on a CPU, the host's part of such steps: everything that a decode worker on a GPU does for a step,
with captured steps that compute nothing and tokens that are always 0. On a GPU the calls of CUDA come on top.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.request import GenerateRequest, SamplingParams, SequenceId
from baton.core.step import DraftRow, Draw, Row, StepPlan
from baton.engine.adapters import Adapters
from baton.engine.batch import RowLimits
from baton.engine.kv_pool import KVPool
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.runner import Computing, Runner
from baton.models.model_config import parse_model_config
from baton.runtime.step_thread import StepThread
from benchmarks.kit import parser, table
from decode.scheduler import DecodeScheduler
from decode.speculation.engine import SpeculativeEngine

WARM_UP = 8  # steps at least: shapes are captured in the first ones
DRAFT_TOKENS = 4
BARS = {1: 0.5e-3, 64: 1e-3, 256: 2.5e-3}
"""Seconds of the host's part of a step, by the most sequences."""


async def step_times(
    runner: Runner,
    batch: int,
    context: int,
    steps: int,
    *,
    ahead: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of a clock between the outcomes of consecutive steps, for `steps` steps in which all `batch` sequences
    run."""
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
        outcome = await compute.collect()
        scheduler.finish_step(outcome, time.monotonic())
        ends.append(clock())
    compute.close()
    if ahead and scheduler.steps_ahead < steps:
        raise SystemExit(f"only {scheduler.steps_ahead} of {len(ends)} steps were planned ahead")
    return [b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)][:steps]


def fill_with_zeros(runner: Runner) -> None:
    """Zeroes all KV, so that it is finite although no prompt was computed."""
    for pair in runner.kv.storage:
        for tensor in pair:
            tensor.zero_()


def both(runner: Runner, batch: int, context: int, steps: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, one by one and planned ahead, measured in turns."""
    fill_with_zeros(runner)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for ahead, times in seconds.items():
            times += asyncio.run(step_times(runner, batch, context, steps, ahead=ahead))
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def compare(runner: Runner, shapes: list[tuple[int, int]], steps: int = 100, rounds: int = 3) -> str:
    """A table: milliseconds of steps one by one, ahead, and their ratio."""
    rows = []
    for batch, context in shapes:
        alone, ahead = both(runner, batch, context, steps, rounds)
        rows.append(_cells(batch, context, alone, ahead))
    return table(("sequences", "context", "one by one", "planned ahead", "ratio"), rows)


def _cells(batch: int, context: int, one: float, other: float) -> list[str]:
    return [str(batch), str(context), f"{one * 1e3:.2f} ms", f"{other * 1e3:.2f} ms", f"{other / one:.2f}"]


def drafting(target: Runner, draft: Runner, batch: int, context: int, steps: int, rounds: int) -> list[float]:
    """Steps in which each of `batch` sequences has DRAFT_TOKENS draft tokens: the median seconds with separate waits
    for draft tokens and tokens, and with one wait for both, measured in turns; and how often the host waits in a step
    of the second kind."""
    fill_with_zeros(target)
    fill_with_zeros(draft)
    each = target.layout.blocks_for(context + DRAFT_TOKENS + 1)
    rows, drafts = [], []
    for number in range(batch):
        sequence, blocks = SequenceId(f"s{number}"), tuple(range(number * each, (number + 1) * each))
        rows.append(Row(sequence, context, (5,), blocks, SamplingParams(temperature=0.8, seed=number), 1))
        drafts.append(DraftRow(sequence, context, (5,), blocks, DRAFT_TOKENS, number))
    plan, engine = StepPlan(1, tuple(rows), tuple(drafts)), SpeculativeEngine(target, draft)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    waits = 0
    for _ in range(rounds):
        for at_once, times in seconds.items():
            target.launches_ahead = at_once
            for number in range(WARM_UP + steps):
                started, before = time.perf_counter(), target.launches.waits
                engine.step(plan)
                if number >= WARM_UP:
                    times.append(time.perf_counter() - started)
                    waits += (target.launches.waits - before) if at_once else 0
    return [statistics.median(seconds[False]), statistics.median(seconds[True]), waits / (rounds * steps)]


def compare_drafting(
    target: Runner, draft: Runner, shapes: list[tuple[int, int]], steps: int = 100, rounds: int = 3
) -> str:
    rows = []
    for batch, context in shapes:
        two, one, waits = drafting(target, draft, batch, context, steps, rounds)
        rows.append([*_cells(batch, context, two, one), f"{waits:.2f}"])
    return table(("sequences", "context", "two waits", "one wait", "ratio", "waits a step"), rows)


class NoModel:
    """In the place of a model whose steps compute nothing."""

    windows = (0,)


def idle_device(batch: int, context: int) -> Runner:
    """A runner like that of a GPU, on CPU, whose captured steps and samples compute nothing."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.decode_graphs import Captured, DecodeGraphs, Shape

    longest = 131_072
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8192,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": longest,
        }
    )
    layout = config.kv_layout(16, "bfloat16")
    kv = KVPool(layout, batch * layout.blocks_for(context + 200) + 1, torch.device("cpu"))

    class Graphs(DecodeGraphs):
        def _capture(self, shape: Shape) -> Captured:
            captured, logits = super()._capture(shape), torch.zeros(shape.tokens, 8)
            return replace(captured, replay=lambda: logits)

    tables = RowLimits(16, kv.num_blocks, config.vocab_size, longest).new_tables(2 * batch)
    attention = TritonAttention(config, 16, torch.bfloat16, kv.device)
    graphs = Graphs(NoModel(), kv, attention, tables, longest, batch)  # type: ignore[arg-type]
    graphs.capture(8)

    def decide(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return torch.zeros(len(draws), dtype=torch.int64)

    computing = Computing(graphs.compute, decide=decide, tables=tables)
    options = EngineOptions(model_dir=Path(), decode_rows=batch)
    layout = config.kv_layout(16, "bfloat16")
    facts = Compatibility(
        PROTOCOL_VERSION,
        "",
        False,
        "bfloat16",
        "bfloat16",
        "none",
        "baton",
        "gloo",
        "",
        "",
        config.vocab_size,
        longest,
        layout,
    )
    sizes = {"max_model_len": longest, "parameter_bytes": 0}
    group = TPGroup(0, 1)
    adapters = Adapters(None, config, group, torch.empty(0))
    named = {"kernels": "none", "facts": facts, "group": group, "adapters": adapters}
    runner = Runner(computing, config, kv, options, **named, **sizes)
    runner.launches_ahead = True
    return runner


def host_times(batches: list[int], contexts: list[int], steps: int, rounds: int) -> str:
    rows = []
    for batch in batches:
        for context in contexts:
            runner = idle_device(batch, context)
            gc.collect()
            gc.freeze()  # as in a worker, whose collections skip what was loaded at its start
            clocks = {"processor": time.process_time, "wall": time.perf_counter}
            # The least of several medians: other processes of the machine disturb both.
            medians = {
                name: min(
                    statistics.median(asyncio.run(step_times(runner, batch, context, steps, ahead=True, clock=clock)))
                    for _ in range(rounds)
                )
                for name, clock in clocks.items()
            }
            bar = next(bar for limit, bar in BARS.items() if batch <= limit)
            met = "yes" if medians["processor"] <= bar else "**no**"
            shown = [f"{seconds * 1e3:.2f} ms" for seconds in (*medians.values(), bar)]
            rows.append([str(batch), str(context), *shown, met])
    return table(("sequences", "context", *clocks, "bar", "met"), rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path, nargs="?")
    options.add_argument("--host", action="store_true", help="the host's part alone; needs no model")
    options.add_argument("--draft", type=Path)
    options.add_argument("--device", default="auto")
    options.add_argument("--batch", default="1,8")
    options.add_argument("--context", default="512")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    batches, contexts = ([int(number) for number in text.split(",")] for text in (given.batch, given.context))
    if given.host:
        print(host_times(batches, contexts, given.steps, given.rounds))
        return
    if given.model is None:
        options.error("a model, or --host")
    runner = load_runner(EngineOptions(model_dir=given.model, device=given.device))
    shapes = [(batch, context) for batch in batches for context in contexts]
    print(compare(runner, shapes, given.steps, given.rounds), flush=True)
    if given.draft is not None and runner.launches_ahead:
        draft = load_runner(EngineOptions(model_dir=given.draft, device=given.device, dtype=runner.dtype_name))
        print(f"\n{compare_drafting(runner, draft, shapes, given.steps, given.rounds)}", flush=True)


if __name__ == "__main__":
    main()
