"""Times steps whose rows have LoRA adapters beside the same steps without.

    python benchmarks/adapters.py MODEL_DIR [--adapters 16] [--rank 16] [--dtype bfloat16 float32] [--repeat 15]

One runner, one thread; both kinds of steps by turns. Adapters are of all linear layers. A ratio is the processor time
of the computing thread without adapters / with them, within a turn: the throughput that remains. The table has the
median over turns of both and of the ratio. Writes `benchmarks/results/adapters.md`.

    decode 16       a token of each of 16 sequences at 512, every one of another adapter
    prefill 512     the first 512 tokens of one prompt, of one adapter
    prefill 4 x 128 the first 128 tokens of each of four prompts, every one of another adapter
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from benchmarks.kit import by_turns, parser, report, table
from tests.support.adapters import load_adapter, make_adapter

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 16
BAR = 0.7


def rows(number: int, tokens: int, start: int = 0) -> tuple[Row, ...]:
    """Rows of `tokens` tokens each, from position `start` on."""
    each = -(-(start + tokens) // BLOCK)
    ids = tuple(300 + i * 7 % 4000 for i in range(tokens))
    return tuple(
        Row(SequenceId(str(n)), start, ids, tuple(range(n * each, (n + 1) * each)), GREEDY, 1) for n in range(number)
    )


SHAPES = {"decode 16": rows(16, 1, 512), "prefill 512": rows(1, 512), "prefill 4 x 128": rows(4, 128)}


def seconds(runner: Runner, of: Sequence[Row]) -> float:
    began = time.thread_time()
    runner.step(StepPlan(1, tuple(of)))
    return time.thread_time() - began


def measure(runner: Runner, digests: Sequence[str], repeat: int) -> list[list[str]]:
    shown = []
    for shape, plain in SHAPES.items():
        adapted = [replace(row, adapter=digests[n % len(digests)]) for n, row in enumerate(plain)]
        sides = (plain, adapted)
        runs = [{side: seconds(runner, sides[side]) for side in by_turns(turn, (0, 1))} for turn in range(repeat)]
        without, beside = (statistics.median(run[side] for run in runs[1:]) * 1e3 for side in (0, 1))
        ratios = sorted(run[0] / run[1] for run in runs[1:])  # the first warms up
        ratio = statistics.median(ratios)
        spread = f"{ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        met = "yes" if ratio >= BAR else "**no**"
        shown.append([runner.dtype_name, shape, f"{without:.1f}", f"{beside:.1f}", spread, f"at least {BAR}", met])
        print(*shown[-1], flush=True)
    return shown


def main() -> None:
    options = parser(__doc__, "adapters.md")
    options.add_argument("model", type=Path)
    options.add_argument("--adapters", type=int, default=16)
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    options.add_argument("--kernels", default="auto")
    options.add_argument("--repeat", type=int, default=15)
    given = options.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for dtype in given.dtype:
            engine = EngineOptions(
                model_dir=given.model, dtype=dtype, kernels=given.kernels, threads=1, kv_memory_bytes=1 << 30
            )
            runner = load_runner(engine)
            digests = []
            for seed in range(given.adapters):
                place = make_adapter(Path(directory) / str(seed), given.model, seed=seed, size=0.1, r=given.rank)
                digests.append(load_adapter(runner, place))
            lines += measure(runner, digests, given.repeat + 1)
    about = f"{given.adapters} adapters of rank {given.rank}, kernels {runner.kernels}, one thread."
    headings = ("dtype", "step", "without, ms", "with, ms", "ratio, median (range)", "bar", "met")
    report(given.out, "Steps with LoRA adapters beside none", table(headings, lines), about=about)


if __name__ == "__main__":
    main()
