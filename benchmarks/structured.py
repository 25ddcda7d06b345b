"""What structured output costs: masks over 150,000 token ids one by one, and a step at batch 8.

    python benchmarks/structured.py [--rows 7] [--turns 5] [--shape 152k]

First the masks of some grammars, each followed for 300 random tokens, with a vocabulary of 151,936 made-up words. Then
a cluster with a checkpoint of that vocabulary: gaps of a plain stream beside rows that are plain, or have to match a
JSON schema, in turns. Writes `benchmarks/results/structured.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.engine.grammars import Automaton, compile_grammar, load_tokenizer
from benchmarks.large_vocabulary import gaps
from benchmarks.serving import BATON, ROOT, commit, machine, ready_url
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
GRAMMARS = {
    "any JSON object": Constraint("json_schema", '{"type":"object"}', ""),
    "a schema of four fields": Constraint("json_schema", json.dumps(MANY), ""),
    "one of 4,000 values": Constraint("choice", json.dumps([f"value {i} {i * 7}" for i in range(4000)]), ""),
    "a regular expression": Constraint("regex", "([a-z]+ ){100,}", ""),
}


def masks(model: Path) -> list[str]:
    """Rows of a table: seconds of masks by grammar."""
    began = time.perf_counter()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = load_tokenizer(model, vocabulary)
    lines = [f"{vocabulary:,} ids. Loading the tokenizer took {time.perf_counter() - began:.2f} s.", ""]
    lines += ["| grammar | first | p50 | p90 | p99 | mean |", "|---|---|---|---|---|---|"]
    chosen = random.Random(0)
    for name, constraint in GRAMMARS.items():
        automaton, output, took = (
            Automaton(tokenizer, compile_grammar(tokenizer, to_grammar(constraint))),
            (),
            list[float](),
        )
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
        lines.append(f"| {name} | " + " | ".join(f"{s * 1e6:,.0f} us" for s in shown) + " |")
    return lines


def steps(model: Path, directory: Path, rows: int, turns: int) -> dict[str, list[float]]:
    """The median gap of each turn by kind of the rows beside."""
    found: dict[str, list[float]] = {"plain": [], "structured": []}
    extra = {"plain": {}, "structured": {"structured_outputs": {"json": MANY}, "ignore_eos": False}}
    flags = ["--model", str(model), "--port", "0", "--grpc-port", "0", "--control-port", "0", "--draft", "none"]
    command = [*BATON, "up", *flags, "--run-dir", f"{directory}/run"]
    cluster = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        url = ready_url(cluster, directory / "run" / "cluster.json")
        for turn in range(turns):
            for kind in found if turn % 2 == 0 else reversed(found):
                found[kind].append(statistics.median(asyncio.run(gaps(url, rows, extra[kind]))))
                print(turn, kind, f"{found[kind][-1] * 1e3:.2f} ms", flush=True)
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=7)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shape", default="152k", help="of tools/make_checkpoint.py")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "structured.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        subprocess.run([sys.executable, "tools/make_checkpoint.py", arguments.shape, str(model)], cwd=ROOT, check=True)
        table = masks(model)
        found = steps(model, directory, arguments.rows, arguments.turns)
    shown = {kind: " ".join(f"{gap * 1e3:.2f}" for gap in medians) for kind, medians in found.items()}
    ratio = statistics.median(b / a for a, b in zip(found["plain"], found["structured"], strict=True))
    lines = [
        "# Structured output",
        "",
        f"    python benchmarks/structured.py --rows {arguments.rows} --turns {arguments.turns}"
        f" --shape {arguments.shape}",
        "",
        f"Commit {commit()}, {datetime.date.today()}. {machine()}. shape {arguments.shape}.",
        "",
        "## Masks",
        "",
        *table,
        "",
        "## A step",
        "",
        f"Gaps of a plain stream beside {arguments.rows} rows, median of each turn:",
        "",
        *[f"- {kind}: {values} ms" for kind, values in shown.items()],
        "",
        f"Ratio, median over turns: {ratio:.2f} (bar: {BAR}).",
        "",
    ]
    arguments.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
