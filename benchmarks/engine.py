"""Times the engine's steps on CPU, kernels against kernels, interleaved: prefill, decode, verification, sampling.

    python benchmarks/engine.py MODEL_DIR [--kernels auto,torch] [--model-impl auto] [--dtype auto] [--threads 1]

Prints a table: for each shape, the median wall time of a step with each kind of kernels, and the least processor time
of the computing thread (with one thread), which other programs disturb less. The memory bandwidth, measured in the same
turns, and the size of the weights give the lower bound of a decode step. For a model with experts a second table
compares the step with the bytes of the experts that it read, and of all weights that it read, at that bandwidth.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
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
PACKED = "baton_packed"


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
    "decode 1 at 128": decode(1, 128),
    "decode 8 at 128": decode(8, 128),
    "prefill 512": prefill(512),
    "prefill 1,024 after 2,900": prefill(1024, 2900),
    "decode 1 at 512": decode(1, 512),
    "decode 8 at 512": decode(8, 512),
    "decode 8 at 512, T 0.8": decode(8, 512, sampling=SamplingParams(temperature=0.8, seed=1)),
    "decode 8 at 512, T 0.8, top_p 0.95": decode(8, 512, sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
    "decode 8 at 2,000": decode(8, 2000),
    "verify 1 x 5 at 512": decode(1, 512, 5),
}


class Memory:
    """What one thread reads, in bytes per second."""

    def __init__(self) -> None:
        self._data = torch.ones(64 << 20, dtype=torch.float32)
        self.rate()

    def rate(self) -> float:
        started = time.thread_time()
        self._data.sum()
        return self._data.numel() * 4 / (time.thread_time() - started)


class Experts:
    """The experts that the kernels compute for a runner; none for a model without."""

    def __init__(self, runner: Runner) -> None:
        model = getattr(runner.adapters._model, "_model", None)  # of transformers
        modules = model.modules() if isinstance(model, torch.nn.Module) else ()
        modules = [m for m in modules if PACKED in m.__dict__ and hasattr(m, "num_experts")]
        self._packed = [module.__dict__[PACKED] for module in modules]
        self.number = sum(module.num_experts for module in modules)
        self.bytes_each = sum(
            parameter[0].numel() * parameter.element_size()
            for module in modules[:1]
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 3
        )

    def calls(self) -> int:
        return sum(each.calls for each in self._packed)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one runner: median wall time and least processor time of a step in ms, the most bytes per second that
    were read in the same turns, and how many experts a step read."""

    wall_ms: float
    busy_ms: float
    rate: float
    experts: int


def measure(runners: dict[str, Runner], plan: StepPlan, repeat: int, memory: Memory) -> dict[str, Measured]:
    """Runs the step of each runner by turns."""
    wall: dict[str, list[float]] = {name: [] for name in runners}
    busy: dict[str, list[float]] = {name: [] for name in runners}
    experts = {name: Experts(runner) for name, runner in runners.items()}
    rates: list[float] = []
    before = dict.fromkeys(runners, 0)
    for round_ in range(repeat + 1):
        rates.append(memory.rate())
        for name, runner in runners.items():
            clock, thread, before[name] = time.perf_counter(), time.thread_time(), experts[name].calls()
            runner.step(plan)
            if round_:  # the first warms up
                wall[name].append(time.perf_counter() - clock)
                busy[name].append(time.thread_time() - thread)
    return {
        name: Measured(
            statistics.median(wall[name]) * 1e3,
            min(busy[name]) * 1e3,
            max(rates),
            experts[name].calls() - before[name],
        )
        for name in runners
    }


def beside_bytes(shape: str, name: str, runner: Runner, step: Measured) -> list[str]:
    """A row: a step beside the bytes of its experts, and of all its weights, at the bandwidth of the same turns."""
    experts = Experts(runner)
    of_experts = step.experts * experts.bytes_each
    of_all = runner.parameter_bytes - experts.number * experts.bytes_each + of_experts
    ms = [each / step.rate * 1e3 for each in (of_experts, of_all)]
    cells = [f"{each:.1f} ({step.busy_ms / each:.2f})" for each in ms]
    return [shape, name, f"{step.experts} of {experts.number}", f"{step.busy_ms:.1f}", *cells]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--kernels", default="auto,torch")
    options.add_argument("--model-impl", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeat", type=int, default=10)
    options.add_argument("--only", default="", help="only steps whose name contains this, such as `decode`")
    given = options.parse_args()
    engine = EngineOptions(model_dir=given.model, dtype=given.dtype, threads=given.threads, kv_memory_bytes=1 << 30)
    runners = {
        f"{impl} {name}": load_runner(replace(engine, kernels=name, model_impl=impl))
        for impl in given.model_impl.split(",")
        for name in given.kernels.split(",")
    }
    weights = next(iter(runners.values())).parameter_bytes
    memory = Memory()
    print(f"weights {weights / 1e6:.0f} MB; one thread reads {memory.rate() / 1e9:.1f} GB/s")
    rows, of_experts = [], []
    for shape, plan in SHAPES.items():
        if given.only and given.only not in shape:
            continue
        steps = measure(runners, plan, given.repeat, memory)
        rows.append([shape, *(f"{each.wall_ms:.1f} ({each.busy_ms:.1f})" for each in steps.values())])
        of_experts += [beside_bytes(shape, name, runners[name], each) for name, each in steps.items() if each.experts]
        print(*rows[-1], flush=True)
    names = [f"{name} ({runner.kernels}), ms wall (processor)" for name, runner in runners.items()]
    print(f"\n{table(['step', *names], rows)}")
    if of_experts:
        headings = [
            "step",
            "runner",
            "experts read",
            "processor ms",
            "their bytes, ms (times)",
            "all weights, ms (times)",
        ]
        print(f"\n{table(headings, of_experts)}")


if __name__ == "__main__":
    main()
