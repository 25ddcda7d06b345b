"""The runs of tests/engine/test_exact_ways.py outside exact mode: how often an output depends on how it is computed.

    python benchmarks/exactness_ways.py                      the built-in pair in bf16, 200 requests in every way
    python benchmarks/exactness_ways.py --requests 40 --dtype float32

Each request is first computed alone, then in every way: with a draft model, n-grams or no drafts; with 1, 4 or 8 draft
tokens or as many as pay; in a batch of 32, in chunks, from caches, preempted. Where an output first differs from that
of the run alone, the two best noised logits (recomputed in one row) must have been closer than 0.5, or one of the two
tokens was cut by top_k, top_p or min_p: such places are counted separately. A larger gap is a bug and makes this
program fail. Writes a report to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.request import GenerateRequest
from baton.core.step import History, Row, StepPlan
from baton.engine.draw import Draw
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.processors import process
from baton.engine.runner import Runner
from baton.engine.sampler import noised_logits
from baton.runtime.model_source import builtin_directory
from benchmarks.kit import RESULTS, parser, report, table
from tests.support.exact_jobs import requests, source_text
from tests.support.pair_drive import ALONE, WAYS, Answers, Pair

LIMIT = 0.5
EOS = (1,)


def gap(runner: Runner, request: GenerateRequest, output: tuple[int, ...], tokens: tuple[int, int]) -> float | None:
    """The gap of the two best noised logits after `output`; None if one of the two `tokens` is no candidate there."""
    known = request.prompt + output
    blocks = tuple(range(runner.layout.blocks_for(len(known))))
    history = History(request.prompt, output, request.end_token_ids)
    row = Row(request.sequence_id, 0, known, blocks, request.sampling, 1, len(output), history)
    (logits,) = runner.step_logits(StepPlan(0, (row,)))
    draw = Draw(request.sampling, 0, len(output), history)
    ids, values = noised_logits(process(logits, [draw])[0].numpy(), draw)
    if not set(tokens) <= set(ids.tolist()):
        return None
    best = np.sort(values)[-2:]
    return float(best[1] - best[0])


def differences(runner: Runner, some: list[GenerateRequest], alone: Answers, other: Answers) -> list[float | None]:
    """The gap at the first place where each answer differs from the one alone."""
    found: list[float | None] = []
    for request in some:
        mine, theirs = alone.tokens[request.request_id], other.tokens[request.request_id]
        index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if index is not None:
            found.append(gap(runner, request, mine[:index], (mine[index], theirs[index])))
    return found


def load(model: Path, arguments: argparse.Namespace) -> Runner:
    options = EngineOptions(
        model_dir=model, device="cpu", dtype=arguments.dtype, block_size=4, kv_memory_bytes=64 << 20, threads=1
    )
    return load_runner(options)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = options.parse_args()
    target, draft = builtin_directory("target"), builtin_directory("draft")
    pair = Pair(load(target, arguments), load(target, arguments), load(draft, arguments))
    vocab_size = pair.decode.model_config.vocab_size
    some = requests(arguments.requests, source_text(target, vocab_size), vocab_size, EOS)
    alone = pair.answer(some, ALONE)
    rows, gaps, identical = [], list[float](), 0
    for name, way in WAYS.items():
        answers = pair.answer(some, way, alone.tokens)
        found = differences(pair.decode, some, alone, answers)
        near = [g for g in found if g is not None]
        gaps += near
        identical += len(some) - len(found)
        figures = [f"{statistics.median(near):.4f}", f"{max(near):.4f}"] if near else ["–", "–"]
        counters = answers.counters
        share = f"{counters.accepted_tokens / counters.drafted_tokens:.2f}" if counters.drafted_tokens else "–"
        same, edges = f"{len(some) - len(found)} of {len(some)}", str(len(found) - len(near))
        rows.append([name, same, str(len(near)), *figures, edges, share, str(answers.preemptions)])
        print(rows[-1], flush=True)
    runs, over = len(some) * len(WAYS), sum(g >= LIMIT for g in gaps)
    what = (
        f"{len(some)} requests: half greedy, half at T = 0.8, with penalties, biases, bad words and stops; prompts of 3"
        " to 140 tokens of Python source, 8 to 40 tokens of output. Reference: each alone, its prompt in one row, no"
        " draft, no cache. Gap: between the two best noised logits where an answer first differs; edges: there one of"
        " the two tokens was cut by top_k, top_p or min_p."
    )
    names = ("way", "identical", "near ties", "median gap", "largest gap", "edges", "accepted", "preemptions")
    total = f"{identical} of {runs} answers identical; {over} of {len(gaps)} gaps are {LIMIT} or more."
    title = f"Does an answer depend on how it is computed? ({arguments.dtype}, built-in pair)"
    about = f"Kernels: {pair.decode.kernels}, one thread."
    report(RESULTS / f"exactness-ways-{arguments.dtype}.md", title, what, table(names, rows), total, about=about)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
