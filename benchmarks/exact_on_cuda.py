"""Exact mode as on CUDA: does a row have the same bits in every shape of step?

    python benchmarks/exact_on_cuda.py                    on the CPU, in Triton's interpreter
    python benchmarks/exact_on_cuda.py --device cuda      on a GPU, compiled and captured
    python benchmarks/exact_on_cuda.py --not-exact        the counter-check: without --exact hashes differ

First each kernel by itself: 131 rows at once, and in pieces. Then, for each tiny model and dtype, the logits of every
position of a sequence are computed in one row, and then in each of the shapes that the tests of `--exact` on CPU use:
chunks, single tokens, verification rows, an attempt resumed amid its output, a batch of nine sequences that starts with
all prompts and shrinks, other block sizes. Decode steps are those that a GPU captures, padded to 1, 2, 4, 8 or 16 rows
of 1, 3 or 9 tokens. Each line of the table is a hash of the bits of the results at the same positions: it must be that
of the row alone. Exits with 1 if one differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import triton
from torch import Tensor

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.runner import Runner
from benchmarks.kit import parser, report, table
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import GREEDY, Job, all_logits, random_tokens, run, tiny_runner
from tests.support.exact_kernels import PIECES, ROWS, bits, in_pieces, interpreted_runner, kernels

_SMALL = {"num_layers": 2, "max_position_embeddings": 640}
"""Enough for all shapes: each layer, and each split that a context might have, takes the interpreter time."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "arch": "llama"},
    "mistral": {**_SMALL, "arch": "mistral"},
    "qwen2": {**_SMALL, "arch": "qwen2", "intermediate_size": 176},
    "qwen3": {**_SMALL, "arch": "qwen3", "head_dim": 24, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 333},
}
BATCH = {5: 100, 33: 7, 100: 16, 130: 64, 17: 1, 64: 33, 1: 512, 90: 40, 48: 16}
"""Prompt lengths, each with the length of its chunks, of a batch whose sequences also generate tokens."""
DECODE = {"decode_rows": 16, "decode_lengths": (1, 3, 9)}
CHUNKS = ((7,), (16,), (64,), (512,), (90, 1, 1, 1), (100, 1, 7, 1, 1, 64), (255, 1, 7, 40))
INTERPRETED = """Not run on a GPU. The interpreter shows which keys and inputs a program reads, in which tiles, and in
which order it adds them up. It does not show what a compiler makes of the kernels. All programs of a launch are
interpreted at once, and matrix products are sums front to back (tests/support/interpreter.py): numpy's own differ in
the last bit with the place of a row in a tile."""
Make = Callable[..., Runner]


@dataclass(frozen=True)
class Line:
    """Hashes of the same positions in one shape, and of the row alone."""

    shape: str
    positions: int
    computed: str
    expected: str


def verified(runner: Runner, tokens: list[int], start: int, length: int) -> Tensor:
    """The logits of the last `length` tokens in one verification row, in a step with other rows, after the others as a
    prompt in one row."""
    size = runner.layout.block_size
    blocks = tuple(range(1, 1 + -(-len(tokens) // size)))
    mate = tuple(range(len(blocks) + 1, len(blocks) + 3))
    prompt = Row(SequenceId("v"), 0, tuple(tokens[:start]), blocks, GREEDY, 0)
    runner.step_logits(StepPlan(0, (prompt,)))
    row = Row(SequenceId("v"), start, tuple(tokens[start : start + length]), blocks, GREEDY, length)
    other = Row(SequenceId("o"), 0, (3,), mate, GREEDY, 1)
    return runner.step_logits(StepPlan(1, (other, row)))[1]


def lines(make: Make, length: int, outputs: int) -> Iterator[Line]:
    runner = make()
    tokens = random_tokens(length)
    alone = all_logits(runner, tokens, [length], seed=1)

    def line(shape: str, computed: Tensor, first: int = 0) -> Line:
        return Line(shape, len(computed), bits(computed), bits(alone[first : first + len(computed)]))

    yield line("in one row", alone)
    for chunks in CHUNKS:
        if max(chunks) < length:
            shown = f"chunks of {chunks[0]}" if len(chunks) == 1 else f"chunks of {', '.join(map(str, chunks))}"
            yield line(shown, all_logits(runner, tokens, list(chunks), seed=2))
    few = tokens[:140]
    yield line(f"{len(few)} decode steps", all_logits(runner, few, [1], seed=3))
    for k in (1, 4, 8):
        start = len(few) - 1 - k
        yield line(f"verification of {k} draft tokens beside another row", verified(runner, few, start, 1 + k), start)
    for size in (8, 24, 64, 128):
        yield line(f"chunks of 70, blocks of {size}", all_logits(make(block_size=size), few, [70]))
    job = Job(random_tokens(40), 30)
    run(runner, [job])
    resumed = Job(job.tokens[:55], 15, resumed=15)
    run(runner, [resumed], seed=9)
    same = bits(torch.cat(job.logits[15:]))
    yield Line("30 tokens after a prompt of 40, resumed at 15", 15, bits(torch.cat(resumed.logits)), same)
    together = [Job(random_tokens(count, seed=count), outputs, chunk=chunk) for count, chunk in BATCH.items()]
    run(runner, together)
    for job in together[::3]:
        computed = bits(torch.cat(job.logits))
        for chunk in (16, 512):
            again = Job(job.prompt, outputs, chunk=chunk)
            run(runner, [again], seed=chunk)
            shape = f"prompt of {len(job.prompt)} in a batch of nine; alone in chunks of {chunk}"
            yield Line(shape, outputs, computed, bits(torch.cat(again.logits)))


def kernel_lines(dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    for name, kernel in kernels(dtype, device).items():
        whole = kernel(0, ROWS).cpu()
        yield Line(name, ROWS, bits(whole), bits(whole))
        for lengths in PIECES:
            computed = in_pieces(kernel, lengths).cpu()
            yield Line(f"{name}, pieces of {', '.join(map(str, lengths))}", ROWS, bits(computed), bits(whole))


def interpreting(device: str) -> AbstractContextManager[None]:
    if device == "cuda":
        return nullcontext()
    from tests.support.interpreter import lockstep

    return lockstep()


def main() -> None:
    options = parser(__doc__, "exact-on-cuda.md")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options.add_argument("--no-kernels", dest="kernels", action="store_false", help="models alone")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options.add_argument("--length", type=int, default=530, help="tokens of the sequence")
    options.add_argument("--outputs", type=int, default=24, help="tokens that each sequence of the batch generates")
    options.add_argument("--not-exact", action="store_true")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    parts, differing, started = list[str](), 0, time.monotonic()

    def show(name: str, dtype: str, compared: Iterator[Line]) -> None:
        nonlocal differing
        rows = []
        for line in compared:
            same = line.computed == line.expected
            differing += not same
            rows.append([line.shape, str(line.positions), line.computed, "equal" if same else line.expected])
            print(name, dtype, *rows[-1], sep=" | ", flush=True)
        headings = ("shape", "positions", "hash of the logits" if name in MODELS else "hash", "of the row alone")
        parts.append(f"## {name}, {dtype}\n\n{table(headings, rows)}")

    with tempfile.TemporaryDirectory() as directory, interpreting(arguments.device):
        for dtype in arguments.dtypes if arguments.kernels else ():
            show("kernels", dtype, kernel_lines(getattr(torch, dtype), torch.device(arguments.device)))
        for name in arguments.models:
            path = make_checkpoint(Path(directory) / name, **MODELS[name])
            for dtype in arguments.dtypes:

                def make(path: Path = path, dtype: str = dtype, **more: Any) -> Runner:
                    chosen = {"exact": not arguments.not_exact, "dtype": dtype, **DECODE, **more}
                    if arguments.device == "cpu":
                        return interpreted_runner(path, **chosen)
                    return tiny_runner(path, device="cuda", **chosen)

                show(name, dtype, lines(make, arguments.length, arguments.outputs))
    where = "compiled, on a GPU" if arguments.device == "cuda" else "in Triton's interpreter, on the CPU"
    kind = "Without exact mode" if arguments.not_exact else "Exact mode"
    title = f"{kind}: the bits of a row in every shape of step, {where}"
    total = f"{differing} of {sum(part.count(chr(10)) - 3 for part in parts)} hashes differ."
    shown = [total] if arguments.device == "cuda" else [total, INTERPRETED]
    about = f"torch {torch.__version__}, triton {triton.__version__}, {time.monotonic() - started:.0f} s."
    report(arguments.out, title, *shown, *parts, about=about)
    raise SystemExit(1 if differing and not arguments.not_exact else 0)


if __name__ == "__main__":
    main()
