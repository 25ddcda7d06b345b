"""Times the engine's steps on CPU, kernels against kernels, interleaved: prefill, decode, verification, sampling.

    python benchmarks/engine.py MODEL_DIR [--kernels auto,torch] [--model-impl auto] [--dtype auto] [--threads 1]

Prints a table: for each shape, the median wall time of a step with each kind of kernels, and the least processor time
of the computing thread (with one thread), which other programs disturb less. The memory bandwidth, measured in the same
run, and the size of the weights give the lower bound of a decode step.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from benchmarks.kit import parser, table

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 16


def prefill(tokens: int, start: int = 0) -> StepPlan:
    blocks = tuple(range(-(-(start + tokens) // BLOCK)))
    ids = tuple(i * 7 % 4000 for i in range(tokens))
    return StepPlan(1, (Row(SequenceId("p"), start, ids, blocks, GREEDY, 1),))


def decode(batch: int, context: int, tokens: int = 1, sampling: SamplingParams = GREEDY) -> StepPlan:
    each = context // BLOCK + 2
    return StepPlan(
        1,
        tuple(
            Row(SequenceId(str(i)), context, (5,) * tokens, tuple(range(i * each, (i + 1) * each)), sampling, tokens)
            for i in range(batch)
        ),
    )


SHAPES = {
    "prefill 512": prefill(512),
    "prefill 1,024 after 2,900": prefill(1024, 2900),
    "decode 1 at 512": decode(1, 512),
    "decode 8 at 512": decode(8, 512),
    "decode 8 at 512, T 0.8": decode(8, 512, sampling=SamplingParams(temperature=0.8, seed=1)),
    "decode 8 at 512, T 0.8, top_p 0.95": decode(8, 512, sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
    "decode 8 at 2,000": decode(8, 2000),
    "verify 1 x 5 at 512": decode(1, 512, 5),
}


def bandwidth() -> float:
    """Bytes per second that one thread reads."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    data.sum()
    started = time.thread_time()
    data.sum()
    return data.numel() * 4 / (time.thread_time() - started)


def measure(runners: dict[str, Runner], plan: StepPlan, repeat: int) -> dict[str, tuple[float, float]]:
    """Median wall time and least processor time of a step, in milliseconds, by name of the runner."""
    wall: dict[str, list[float]] = {name: [] for name in runners}
    busy: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(repeat + 1):
        for name, runner in runners.items():
            clock, thread = time.perf_counter(), time.thread_time()
            runner.step(plan)
            if round_:  # the first warms up
                wall[name].append(time.perf_counter() - clock)
                busy[name].append(time.thread_time() - thread)
    return {name: (statistics.median(wall[name]) * 1e3, min(busy[name]) * 1e3) for name in runners}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--kernels", default="auto,torch")
    options.add_argument("--model-impl", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeat", type=int, default=10)
    given = options.parse_args()
    engine = EngineOptions(model_dir=given.model, dtype=given.dtype, threads=given.threads, kv_memory_bytes=1 << 30)
    runners = {
        f"{impl} {name}": load_runner(replace(engine, kernels=name, model_impl=impl))
        for impl in given.model_impl.split(",")
        for name in given.kernels.split(",")
    }
    weights = next(iter(runners.values())).parameter_bytes
    print(f"weights {weights / 1e6:.0f} MB; one thread reads {bandwidth() / 1e9:.1f} GB/s")
    rows = []
    for shape, plan in SHAPES.items():
        found = measure(runners, plan, given.repeat)
        rows.append([shape, *(f"{wall:.1f} ({busy:.1f})" for wall, busy in found.values())])
        print(*rows[-1], flush=True)
    names = [f"{name} ({runner.kernels}), ms wall (processor)" for name, runner in runners.items()]
    print(f"\n{table(['step', *names], rows)}")


if __name__ == "__main__":
    main()
