"""Where the wall time of a decode step goes: the model's forward pass, and everything around it.

    python benchmarks/step_profile.py DIR [--clients 8] [--prompt 512] [--tokens 64] [--runs 5]

A real decode worker without its links: its scheduler plans, its step thread computes, and its events are serialized as
for the coordinator, but not sent. A step lasts from one plan to the next. Its parts: planning; waking the thread and
then the event loop; making the batch, choosing tokens and log-probabilities; the model; processing the outcome and
serializing events. Everything but the model is compared with 15 % of a step. Medians over the steps of all runs. Writes
`benchmarks/results/step-profile.md`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import GenerateRequest, SamplingParams
from baton.core.step import Row, StepPlan
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime import codec
from baton.runtime.config import WorkerConfig
from baton.runtime.step_thread import StepThread
from baton.transfer.edge_endpoint import LocalEndpoints
from baton.v1 import worker_pb2
from benchmarks.kit import parser, report, table
from decode.worker import DecodeWorker

BAR = 0.15
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "T = 0.8": SamplingParams(temperature=0.8),
    "T = 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "greedy, 5 log-probabilities, repetition 1.1": replace(GREEDY, logprobs=5, repetition_penalty=1.1),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one step."""

    plan: float
    wake: float
    around: float
    model: float
    events: float

    @property
    def whole(self) -> float:
        return sum(astuple(self))


class Timed:
    """A runner whose forward passes are timed: `model_s` is the time of the last one."""

    def __init__(self, runner: Runner) -> None:
        self.model_s = 0.0
        self._compute: Callable[[Any], Any] = runner._compute
        runner._compute = self._timed

    def _timed(self, batch: Any) -> Any:
        began = time.perf_counter()
        logits = self._compute(batch)
        self.model_s = time.perf_counter() - began
        return logits


async def steps(runner: Runner, timed: Timed, requests: list[GenerateRequest]) -> list[Parts]:
    """The parts of each step in which all requests have a row."""
    ends = LocalEndpoints(runner.kv.layers, runner.layout.block_size, "127.0.0.1")
    worker = DecodeWorker(
        WorkerConfig(step_tokens=512, worker_id="decode-0", max_running=64), runner, runner.facts, (1,), ends
    )
    for request in requests:
        blocks = worker.scheduler.reserve(request, 0.0).block_ids
        row = Row(request.sequence_id, 0, request.prompt, blocks, GREEDY, 1, 0)
        worker.scheduler.received(request.sequence_id, runner.step(StepPlan(0, (row,))).sampled[0][0], 0.0)
    compute, measured = StepThread(runner.step), []
    try:
        while worker.scheduler.num_sequences:
            began = time.perf_counter()
            plan = worker.begin_step(time.monotonic())
            if plan is None:
                raise RuntimeError("sequences are left, and no step is planned for them")
            planned = time.perf_counter()
            compute.begin(plan)
            outcome = await compute.collect()
            computed = time.perf_counter()
            events = worker.finish_step(outcome, time.monotonic())
            codec.wrap(worker_pb2.SessionRequest, events).SerializeToString()
            ended = time.perf_counter()
            if len(plan.rows) == len(requests):
                wake = computed - planned - outcome.elapsed_s
                around = outcome.elapsed_s - timed.model_s
                measured.append(Parts(planned - began, wake, around, timed.model_s, ended - computed))
    finally:
        compute.close()
        await worker.close()
    return measured


def measure(runner: Runner, clients: int, prompt: int, tokens: int, runs: int) -> str:
    timed, draw, rows = Timed(runner), random.Random(0), []
    parts: dict[str, list[Parts]] = {name: [] for name in SAMPLINGS}
    for _ in range(runs):  # in turns: the machine's load changes
        for name, sampling in SAMPLINGS.items():
            batch = [
                GenerateRequest(
                    f"r{i}",
                    tuple(draw.randrange(300, runner.model_config.vocab_size) for _ in range(prompt)),
                    tokens,
                    replace(sampling, seed=i),
                )
                for i in range(clients)
            ]
            parts[name] += asyncio.run(steps(runner, timed, batch))
    for name, measured in parts.items():
        ms = [1e3 * statistics.median(getattr(p, field) for p in measured) for field in Parts.__dataclass_fields__]
        plan, wake, around, model, events = (f"{value:.2f} ms" for value in ms)
        whole = 1e3 * statistics.median(p.whole for p in measured)
        share = statistics.median(1 - p.model / p.whole for p in measured)
        met = "yes" if share < BAR else "**no**"
        rows.append([name, f"{whole:.1f} ms", model, around, wake, plan, events, f"**{share:.1%}**", f"{BAR:.0%}", met])
    names = ("sampling", "step", "model", "batch, choosing", "waking", "planning", "events", "all but the model")
    return table((*names, "bar", "met"), rows)


def main() -> None:
    options = parser(__doc__, "step-profile.md")
    options.add_argument("model", type=Path)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--runs", type=int, default=5)
    arguments = options.parse_args()
    runner = load_runner(EngineOptions(model_dir=arguments.model, device="cpu", threads=1, kv_memory_bytes=1 << 30))
    shown = measure(runner, arguments.clients, arguments.prompt, arguments.tokens, arguments.runs)
    setting = (
        f"{arguments.clients} streams of {arguments.prompt} tokens and up, one thread, {runner.dtype_name}, kernels "
        f"{runner.kernels}, no draft tokens. Medians over steps."
    )
    report(arguments.out, "Where a decode step's time goes", setting, shown)


if __name__ == "__main__":
    main()
