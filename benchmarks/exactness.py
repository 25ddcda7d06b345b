"""How often bf16 output changes with batching, and how near a tie the logits were where it changed.

    python benchmarks/exactness.py                       the built-in model, bf16, 100 completions of 128 tokens
    python benchmarks/exactness.py --exact               float32 in exact mode: no output may change

Each completion is first computed alone with its prompt in one row, then in batches, in chunks, and with KV from the
other kind of row. Where a run first differs from the reference, both had nearly the same logits, so the two best noised
logits must have been close: a gap of 0.5 or more is a bug and makes this program fail. With top_p there is a second
cause: a token at the edge of the kept mass is a candidate in one run and not in the other; such places are counted
separately. Writes a report to `benchmarks/results/`.
"""

from __future__ import annotations

import random
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import SamplingParams
from baton.core.step import Draw
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.engine.sampler import noised_logits
from benchmarks.kit import RESULTS, ROOT, parser, report, table
from tests.support.engine_driver import Job, run

LIMIT = 0.5
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T = 0.8": SamplingParams(temperature=0.8),
    "T = 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
}


@dataclass(frozen=True)
class Completion:
    """Tokens of one completion and, at each, the gap between the two best noised logits, and the ids that top_p left
    (None: all)."""

    tokens: list[int]
    gaps: list[float]
    kept: list[frozenset[int] | None]


@dataclass(frozen=True)
class Difference:
    """First places where a variant differs from the reference. `gaps`: the larger of the two runs' gaps at each;
    `edges`: the number of other places, at which one run's token was no candidate in the other."""

    identical: int
    gaps: list[float]
    edges: int


def completions(runner: Runner, jobs: list[Job], batch: int, seed: int) -> list[Completion]:
    """Runs jobs `batch` at a time."""
    for first in range(0, len(jobs), batch):
        run(runner, jobs[first : first + batch], seed)
    done = []
    for job in jobs:
        gaps = []
        kept: list[frozenset[int] | None] = []
        for index, logits in enumerate(job.logits):
            ids, values = noised_logits(logits.numpy(), Draw(job.sampling, 0, job.resumed + index))
            kept.append(frozenset(ids.tolist()) if job.sampling.top_p < 1.0 else None)
            best = np.sort(np.partition(values, -2)[-2:]) if len(values) > 1 else np.array([-np.inf, 0.0])
            gaps.append(float(best[1] - best[0]))
        done.append(Completion(job.output, gaps, kept))
        job.logits.clear()
    return done


def compare(reference: list[Completion], variant: list[Completion], skip: int = 0) -> Difference:
    """`variant` begins at output token `skip` of the reference."""
    gaps = []
    edges = 0
    for expected, actual in zip(reference, variant, strict=True):
        for index, token in enumerate(actual.tokens):
            other = expected.tokens[skip + index]
            if token != other:
                mine, theirs = actual.kept[index], expected.kept[skip + index]
                if mine is not None and theirs is not None and (other not in mine or token not in theirs):
                    edges += 1
                else:
                    gaps.append(max(expected.gaps[skip + index], actual.gaps[index]))
                break
    return Difference(len(reference) - len(gaps) - edges, gaps, edges)


def prompts(model_dir: Path, count: int, vocab_size: int) -> list[list[int]]:
    """Pieces of the standard library's source, 16 to 400 tokens long, the same on every run of one interpreter."""
    generator = random.Random(7)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    pieces: list[list[int]] = []
    while len(pieces) < count:
        text = generator.choice(files).read_text(encoding="utf-8", errors="replace")
        start = generator.randrange(max(1, len(text) - 4000))
        ids = [token for token in tokenizer.encode(text[start : start + 4000]).ids if token < vocab_size]
        length = generator.randint(16, 400)
        if len(ids) >= length:
            pieces.append(ids[:length])
    return pieces


def measure(runner: Runner, texts: list[list[int]], sampling: SamplingParams, length: int) -> dict[str, Difference]:
    """Every variant against the reference under one sampling setting (each completion with its own seed)."""
    params = [SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, seed) for seed in range(len(texts))]

    def jobs(chunk: int = 1 << 30) -> list[Job]:
        return [Job(text, length, params[index], chunk) for index, text in enumerate(texts)]

    reference = completions(runner, jobs(), 1, seed=0)
    variants: dict[str, Callable[[], list[Completion]]] = {
        "batch of 8": lambda: completions(runner, jobs(), 8, seed=1),
        "batch of 32, chunks of 64": lambda: completions(runner, jobs(64), 32, seed=2),
        "alone, chunks of 16": lambda: completions(runner, jobs(16), 1, seed=3),
        "prompt's KV by 1-token rows": lambda: completions(runner, jobs(1), 8, seed=5),
    }
    differences = {}
    for name, compute in variants.items():
        differences[name] = compare(reference, compute())
        print(f"  {name}: {differences[name].identical} of {len(texts)} identical", flush=True)
    half = length // 2
    resumed = [
        Job(text + done.tokens[:half], length - half, params[index], resumed=half)
        for index, (text, done) in enumerate(zip(texts, reference, strict=True))
    ]
    differences[f"resumed at token {half}: KV by one long row"] = compare(
        reference, completions(runner, resumed, 1, seed=6), half
    )
    return differences


def rows(results: dict[str, dict[str, Difference]], count: int) -> Iterator[list[str]]:
    for sampling, variants in results.items():
        for name, difference in variants.items():
            gaps = difference.gaps
            figures = [f"{statistics.median(gaps):.4f}", f"{max(gaps):.4f}"] if gaps else ["–", "–"]
            same, edges = f"{difference.identical} of {count}", str(difference.edges)
            yield [sampling, name, same, str(len(gaps)), *figures, edges]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=ROOT / "baton" / "builtin" / "target")
    options.add_argument("--completions", type=int, default=100)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--exact", action="store_true", help="float32 in exact mode instead of bf16")
    options.add_argument("--output", type=Path, help="report file (default: benchmarks/results/exactness-MODE.md)")
    arguments = options.parse_args()
    count, dtype = arguments.completions, "float32" if arguments.exact else "bfloat16"
    runner = load_runner(
        EngineOptions(
            model_dir=arguments.model, device="cpu", dtype=dtype, exact=arguments.exact, threads=arguments.threads,
            kv_memory_bytes=1 << 30, max_num_tokens=1 << 16,
        )
    )  # fmt: skip
    texts = prompts(arguments.model, count, runner.model_config.vocab_size)
    results: dict[str, dict[str, Difference]] = {}
    for name, sampling in SAMPLINGS.items():
        print(name, flush=True)
        results[name] = measure(runner, texts, sampling, arguments.tokens)
    differences = [difference for variants in results.values() for difference in variants.values()]
    gaps = [gap for difference in differences for gap in difference.gaps]
    identical, over = sum(difference.identical for difference in differences), sum(gap >= LIMIT for gap in gaps)
    setting = (
        f"Model: {arguments.model.name}, digest {runner.facts.model_digest}. {count} completions of"
        f" {arguments.tokens} tokens,"
        " prompts of 16 to 400 tokens of Python source, EOS ignored. Reference: each alone, its prompt in one row."
    )
    gap = (
        "Gap: between the two best noised logits (logit + T * Gumbel noise) where a run first differs from the "
        f"reference, the larger of the two runs'. Every gap must be under {LIMIT}. Edge: the run first differs where "
        "one of the two tokens was cut by top_p in the other run."
    )
    names = ("sampling", "computed", "identical", "near ties", "median gap", "largest gap", "edges of top_p")
    total = f"{identical} of {count * len(differences)} runs identical; {over} of {len(gaps)} gaps are {LIMIT} or more."
    title = f"Does output change with batching? ({'float32, exact mode' if arguments.exact else runner.dtype_name})"
    output = arguments.output or RESULTS / f"exactness-{'exact' if arguments.exact else dtype}.md"
    about = f"{arguments.threads} thread(s)."
    report(output, title, setting, gap, table(names, rows(results, count)), total, about=about)
    return int(over > 0 or (arguments.exact and identical < count * len(differences)))


if __name__ == "__main__":
    sys.exit(main())
