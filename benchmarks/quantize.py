"""The effect of int8 weights against bf16: loss and best tokens on held-out text, logits, memory, times of steps.

    python -m benchmarks.quantize [MODEL_DIR ...] [--text tests/builtin/excerpt.txt] [--repeat 8]

Each model is loaded three times: in bf16, in int8 with its head in bf16, and entirely in int8. The text (the
built-in model was not trained on it) is tokenised by the model's tokenizer; models with random weights get random
tokens and no loss. Steps are timed in turns, so that other load affects all equally; only the ratios are meaningful.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine import quantize
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime.model_source import resolve_model
from benchmarks.engine import BLOCK, SHAPES, measure
from benchmarks.kit import ROOT, parser, table

TIMED = ("decode 1 at 512", "decode 8 at 512", "prefill 512")
KINDS = {"bf16": ("none", True), "int8, head bf16": ("int8", False), "int8": ("int8", True)}
RANDOM_TOKENS = 512


def load(model: Path, kind: str) -> Runner:
    mode, quantize.QUANTIZE_HEAD = KINDS[kind]
    options = EngineOptions(model_dir=model, dtype="bfloat16", quantize=mode, kv_memory_bytes=256 << 20)
    return load_runner(options)


def logits_of(runner: Runner, tokens: list[int]) -> Tensor:
    """The logits [len(tokens), vocab] of the text, computed in independent windows of 512."""
    parts: list[Tensor] = []
    for start in range(0, len(tokens), 512):
        window = tuple(tokens[start : start + 512])
        blocks = tuple(range(512 // BLOCK))
        row = Row(SequenceId("x"), 0, window, blocks, SamplingParams(temperature=0.0), len(window))
        parts += runner.step_logits(StepPlan(0, (row,)))
    return torch.cat(parts).double()


def compare(found: Tensor, full: Tensor, tokens: list[int], trained: bool) -> list[str]:
    difference, spread = found - full, full - full.mean(1, keepdim=True)
    error = (difference.square().mean() / spread.square().mean()).sqrt().item()
    divergence = F.kl_div(found.log_softmax(1), full.log_softmax(1), log_target=True, reduction="batchmean").item()
    same = (found.argmax(1) == full.argmax(1)).double().mean().item()
    loss = loss_of(found, tokens)
    return [f"{loss:.4f} ({loss.exp():.3f})" if trained else "-", f"{same:.2%}", f"{divergence:.2e}", f"{error:.3%}"]


def loss_of(logits: Tensor, tokens: list[int]) -> Tensor:
    """Mean loss of the next token within each window of 512."""
    scored = [i for i in range(len(tokens) - 1) if i % 512 != 511]
    return F.cross_entropy(logits[scored], torch.tensor([tokens[i + 1] for i in scored]))


def tokens_of(model: Path, text: Path, trained: bool, vocab_size: int) -> list[int]:
    if not trained:
        return random.Random(0).choices(range(vocab_size), k=RANDOM_TOKENS)
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8")).input_ids
    return ids


def report(name: str, model: Path, text: Path, trained: bool, repeat: int) -> None:
    runners = {kind: load(model, kind) for kind in KINDS}
    tokens = tokens_of(model, text, trained, runners["bf16"].model_config.vocab_size)
    full = logits_of(runners["bf16"], tokens)
    print(f"\n## {name}: {len(tokens):,} tokens, kernels {runners['int8'].kernels}, one thread\n", flush=True)
    rows = []
    for kind, runner in runners.items():
        found = full if kind == "bf16" else logits_of(runner, tokens)
        size = f"{runner.parameter_bytes / (1 << 20):.1f}"
        rows.append([kind, size, *compare(found, full, tokens, trained)])
    names = ("weights", "MiB", "loss (perplexity)", "same best token", "KL to bf16", "logits' error")
    print(f"{table(names, rows)}\n", flush=True)
    rows = []
    for shape in TIMED:
        times = measure(runners, SHAPES[shape], repeat)
        base = times["bf16"][1]
        rows.append([shape, *(f"{busy:.2f} ({busy / base:.2f})" for _, busy in times.values())])
    print(table(["step", *(f"{kind}, ms (ratio)" for kind in runners)], rows), flush=True)
    runners.clear()
    gc.collect()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="*", help="checkpoints with random weights, beside the built-in")
    options.add_argument("--text", type=Path, default=ROOT / "tests" / "builtin" / "excerpt.txt")
    options.add_argument("--repeat", type=int, default=8)
    given = options.parse_args()
    report("built-in", resolve_model("builtin"), given.text, True, given.repeat)
    for model in given.models:
        report(model.name, model, given.text, False, given.repeat)


if __name__ == "__main__":
    main()
