"""The cost of structured output: single masks over 150,000 token ids, and a step at batch 8.

    python benchmarks/structured.py [--rows 7] [--turns 5] [--shape 152k]

First the masks of some grammars, each followed for 300 random tokens, with a vocabulary of 151,936 made-up words. Then
a cluster with a checkpoint of that vocabulary: gaps of a plain stream beside rows that are plain or must match a JSON
schema, in turns. Writes `benchmarks/results/structured.md`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.engine.grammar_automaton import Automaton, Lexers, load_tokenizer
from benchmarks.kit import checkpoint, cluster, parser, report, table
from benchmarks.large_vocabulary import by_kind, ratio
from coordinator.structured_output import Constraint, to_grammar
from launch.bench.stats import percentile

BAR = 1.1
TOKENS = 300
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
MANY: dict[str, Any] = {"type": "array", "items": PERSON, "minItems": 4000}
EXTRA: dict[str, dict[str, Any]] = {
    "plain": {},
    "structured": {"structured_outputs": {"json": MANY}, "ignore_eos": False},
}
GRAMMARS = {
    "any JSON object": Constraint("json_schema", '{"type":"object"}', ""),
    "a schema of four fields": Constraint("json_schema", json.dumps(MANY), ""),
    "one of 4,000 values": Constraint("choice", json.dumps([f"value {i} {i * 7}" for i in range(4000)]), ""),
    "a regular expression": Constraint("regex", "([a-z]+ ){100,}", ""),
}


def masks(model: Path) -> list[str]:
    """The loading time of the tokenizer, and a table of the times of masks by grammar."""
    began = time.perf_counter()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = load_tokenizer(model, vocabulary)
    loading = f"{vocabulary:,} ids. Loading the tokenizer took {time.perf_counter() - began:.2f} s."
    chosen, rows = random.Random(0), []
    for name, constraint in GRAMMARS.items():
        automaton = Automaton(Lexers(tokenizer), to_grammar(constraint))
        output: tuple[int, ...] = ()
        took: list[float] = []
        while len(took) < TOKENS:
            began = time.perf_counter()
            (bits,) = automaton.masks(output, (), (1,))
            took.append(time.perf_counter() - began)
            assert bits is not None
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            token = int(chosen.choice(allowed.tolist()))
            output = () if token == 1 else (*output, token)
        ranked = sorted(took[1:])
        shown = [took[0], *(percentile(ranked, p) for p in (50, 90, 99)), statistics.mean(ranked)]
        rows.append([name, *(f"{s * 1e6:,.0f} us" for s in shown)])
    return [loading, table(("grammar", "first", "p50", "p90", "p99", "mean"), rows)]


def main() -> None:
    options = parser(__doc__, "structured.md")
    options.add_argument("--rows", type=int, default=7)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--shape", default="152k", help="of tools/make_checkpoint.py")
    arguments = options.parse_args()
    with checkpoint(arguments.shape) as model:
        shown = masks(model)
        with cluster("--model", str(model), "--draft", "none") as running:
            found = by_kind(running.url, arguments.rows, arguments.turns, EXTRA)
    kinds = [
        f"- {kind}: {' '.join(f'{statistics.median(run) * 1e3:.2f}' for run in runs)} ms"
        for kind, runs in found.items()
    ]
    beside = f"Gaps of a plain stream beside {arguments.rows} rows, median of each turn:"
    over = f"Ratio, median over turns: {ratio(*found.values()):.2f} (bar: {BAR})."
    parts = ("## Masks", *shown, "## A step", beside, "\n".join(kinds), over)
    report(arguments.out, "Structured output", *parts, about=f"Shape {arguments.shape}.")


if __name__ == "__main__":
    main()
