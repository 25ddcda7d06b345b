"""Quantised weights against bf16: error of the logits, memory, and processor time of steps.

    python -m benchmarks.quantization errors [MODEL_DIR]
    python -m benchmarks.quantization steps [--shape 1b]
    python -m benchmarks.quantization kv [MODEL_DIR]
    python -m benchmarks.quantization activations FILE.gguf

`errors` rounds the linear layers of a trained checkpoint (the built-in one) in several ways, and compares the logits of
Python sources with those of the checkpoint. `steps` times decode steps of random weights, the kinds by turns, so that
other load affects all equally. `kv` does both for KV in FP8 against KV in bf16, with a checkpoint's own weights.
`activations` converts a GGUF file to Q8_0 and does both for activations in 8 bits against bf16, logits against float32.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.checkpoint import Checkpoint
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.quantize import quantize
from baton.engine.runner import Runner
from baton.gguf.files import checkpoint_directory
from baton.runtime.model_source import builtin_directory
from benchmarks.gpu_parts.random_weights import RandomTensors, config_of, write_config
from benchmarks.kit import ROOT, parser, table
from benchmarks.peers import converted

GREEDY, BLOCK, WINDOW = SamplingParams(temperature=0.0), 16, 512
TEXTS = (ROOT / "tests" / "builtin" / "excerpt.txt", *sorted((ROOT / "baton" / "core").glob("*.py")))


def rounded(weight: Tensor, group: int, symmetric: bool) -> Tensor:
    """Nearest of 16 steps for each `group` inputs, scale and minimum in float16."""
    values = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scale = (values.abs().amax(2, keepdim=True) / 7.5).half().float()
        steps, minimum = (values / scale).add(8).round().clamp(0, 15), -8 * scale
    else:
        least, greatest = torch.aminmax(values, dim=2, keepdim=True)
        scale, minimum = ((greatest - least) / 15).half().float(), least.half().float()
        steps = ((values - minimum) / scale).round().clamp(0, 15)
    return (steps * scale + minimum).flatten(1)


def int8(weight: Tensor) -> Tensor:
    steps, scale = quantize(weight)
    return steps * scale[:, None]


def fp8(weight: Tensor) -> Tensor:
    scale = weight.float().abs().max() / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8, one scale for each output": int8,
    "int4, groups of 32, with minima": lambda weight: rounded(weight, 32, False),
    "int4, groups of 32, symmetric": lambda weight: rounded(weight, 32, True),
    "int4, groups of 64, with minima": lambda weight: rounded(weight, 64, False),
    "int4, groups of 64, symmetric": lambda weight: rounded(weight, 64, True),
    "fp8 (e4m3), one scale for each tensor": fp8,
}


class Rounded(Checkpoint):
    """A checkpoint whose linear layers are rounded."""

    def __init__(self, directory: Path, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__(directory)
        self._way = way

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        weight = super().read(name, rows)
        return (self._way(weight) if name.endswith("_proj.weight") else weight)[..., columns]


def load(directory: Path, kind: str, tensors: Any = None, **options: Any) -> Runner:
    given = {"dtype": "bfloat16", "quantize": kind, "kv_memory_bytes": 512 << 20, **options}
    return load_runner(EngineOptions(model_dir=directory, **given), tensors=tensors)


def logits_of(runner: Runner, tokens: list[int]) -> Tensor:
    """The logits [len(tokens), vocab] of a text, in windows of their own."""
    parts: list[Tensor] = []
    for start in range(0, len(tokens), WINDOW):
        window = tuple(tokens[start : start + WINDOW])
        row = Row(SequenceId("x"), 0, window, tuple(range(WINDOW // BLOCK)), GREEDY, len(window))
        parts += runner.step_logits(StepPlan(0, (row,)))
    return torch.cat(parts).float()


def compare(logits: Tensor, full: Tensor, tokens: list[int]) -> list[str]:
    spread = full - full.mean(1, keepdim=True)
    error = ((logits - full).square().mean() / spread.square().mean()).sqrt().item()
    divergence = F.kl_div(logits.log_softmax(1), full.log_softmax(1), log_target=True, reduction="batchmean").item()
    same = (logits.argmax(1) == full.argmax(1)).double().mean().item()
    scored = [i for i in range(len(tokens) - 1) if i % WINDOW != WINDOW - 1]
    loss = F.cross_entropy(logits[scored], torch.tensor([tokens[i + 1] for i in scored])).item()
    return [f"{loss:.4f}", f"{same:.2%}", f"{divergence:.2e}", f"{error:.2%}"]


def text_of(directory: Path, count: int) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(directory)("".join(map(Path.read_text, TEXTS))).input_ids[:count]
    return ids


def errors(directory: Path, count: int) -> None:
    ids = text_of(directory, count)
    full = logits_of(load(directory, "none"), ids)
    rows = [["bf16", *compare(full, full, ids)]]
    for name, way in WAYS.items():
        rows.append([name, *compare(logits_of(load(directory, "none", Rounded(directory, way)), ids), full, ids)])
        print(rows[-1], flush=True)
    for kind in ("int8", "int4"):
        rows.append([f"`--quantize {kind}`", *compare(logits_of(load(directory, kind), ids), full, ids)])
    print(f"{len(ids)} tokens\n")
    print(table(("weights", "loss", "same best token", "KL to bf16", "logits' error"), rows))


def kv(directory: Path, count: int, repeat: int) -> None:
    ids = text_of(directory, count)
    kinds = {"bf16": "auto", "fp8": "fp8"}
    runners = {kind: load(directory, "none", kv_dtype=option) for kind, option in kinds.items()}
    full = logits_of(runners["bf16"], ids)
    rows = [[kind, *compare(logits_of(runner, ids), full, ids)] for kind, runner in runners.items()]
    print(f"{len(ids)} tokens\n\n{table(('KV', 'loss', 'same best token', 'KL to bf16', 'logits error'), rows)}\n")
    print(timed(runners, ((1, 512, 1), (1, 4096, 1), (8, 512, 1), (8, 2048, 1)), repeat))


def timed(runners: dict[str, Runner], shapes: Sequence[tuple[int, int, int]], repeat: int) -> str:
    """Times the steps of two runners by turns; a shape is rows, their context, and tokens of each."""
    times = []
    for number, context, tokens in shapes:
        blocks = (context + tokens) // BLOCK + 1
        plan = StepPlan(
            0,
            tuple(
                Row(
                    SequenceId(str(i)),
                    context,
                    tuple(range(i, i + tokens)),
                    tuple(range(i * blocks, (i + 1) * blocks)),
                    GREEDY,
                    1,
                )
                for i in range(number)
            ),
        )
        busy_s: dict[str, list[float]] = {kind: [] for kind in runners}
        for _ in range(repeat):
            for kind, runner in runners.items():
                started = time.process_time()
                runner.step_logits(plan)
                busy_s[kind].append(time.process_time() - started)
        least = {kind: 1e3 * min(of) for kind, of in busy_s.items()}
        one, other = least.values()
        shape = f"{number} at {context}" if tokens == 1 else f"{number} of {tokens} tokens at {context}"
        times.append([shape, f"{one:.1f}", f"{other:.1f}", f"{one / other:.2f}"])
    return table(("step: rows at context, processor ms", *runners, "times as fast"), times)


def activations(file: Path, count: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = checkpoint_directory(converted(file, "Q8_0", Path(made)))
        ids = text_of(directory, count)
        full = logits_of(load(directory, "none", dtype="float32"), ids)
        kinds = {"bf16": "bfloat16", "int8": "auto"}
        runners = {kind: load(directory, "none", activations=option) for kind, option in kinds.items()}
        print(*(runner.kernels for runner in runners.values()), sep="\n")
        rows = [["float32", *compare(full, full, ids)]]
        rows += [[kind, *compare(logits_of(runner, ids), full, ids)] for kind, runner in runners.items()]
        headings = ("activations", "loss", "same best token", "KL to float32", "logits' error")
        print(f"{len(ids)} tokens\n\n{table(headings, rows)}\n")
        decode = [(number, 512, 1) for number in (1, 2, 4, 8, 12, 16)]
        print(timed(runners, [*decode, (1, 512, 5), (1, 256, 64), (1, 0, 512)], repeat))


class RandomMatrices(RandomTensors):
    def blocks(self, *part: Any) -> None:
        return None


def steps(shape: str, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        write_config(directory, shape)
        config = config_of(shape)
        runners = {}
        for kind in ("none", "int8", "int4"):
            tensors = RandomMatrices(config, torch.device("cpu"), torch.bfloat16)
            runners[kind] = load(directory, kind, tensors)
            gc.collect()
        rows = []
        for number in (1, 2, 4, 8):
            blocks = 128 // BLOCK + 1
            plan = StepPlan(
                0,
                tuple(
                    Row(SequenceId(str(i)), 128, (i,), tuple(range(i * blocks, (i + 1) * blocks)), GREEDY, 1)
                    for i in range(number)
                ),
            )
            times = {kind: [(9e9, 9e9)] for kind in runners}
            for _ in range(repeat):
                for kind, runner in runners.items():
                    started, busy = time.perf_counter(), time.process_time()
                    runner.step_logits(plan)
                    times[kind].append((time.perf_counter() - started, time.process_time() - busy))
            least = {kind: [1e3 * min(column) for column in zip(*of, strict=True)] for kind, of in times.items()}
            base = least["none"]
            rows.append(
                [
                    f"decode, {number} at 128",
                    *(
                        f"{wall:.1f}, {busy:.1f} ({base[0] / wall:.2f}, {base[1] / busy:.2f})"
                        for wall, busy in least.values()
                    ),
                ]
            )
            print(rows[-1], flush=True)
        sizes = [f"{runner.parameter_bytes / (1 << 20):.0f} MiB" for runner in runners.values()]
        print(table(("step: wall, processor ms (times as fast)", "bf16", "int8", "int4"), [["weights", *sizes], *rows]))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=("errors", "steps", "kv", "activations"))
    options.add_argument("model", type=Path, nargs="?")
    options.add_argument("--shape", default="1b")
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--repeat", type=int, default=12)
    given = options.parse_args()
    with torch.no_grad():
        if given.part == "errors":
            errors(given.model or builtin_directory("target"), given.tokens)
        elif given.part == "activations":
            activations(given.model or options.error("activations needs a GGUF file"), given.tokens, given.repeat)
        elif given.part == "kv":
            kv(given.model or builtin_directory("target"), given.tokens, given.repeat)
        else:
            steps(given.shape, given.repeat)


if __name__ == "__main__":
    main()
