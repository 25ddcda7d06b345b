"""The cost of structured output: single masks over 150,000 token ids, and a step at batch 8.

    python benchmarks/structured.py [--rows 7] [--turns 5] [--shape 152k]

First the masks of some grammars, each followed for 300 random tokens, with a vocabulary of 151,936 made-up words. Then
a cluster with a checkpoint of that vocabulary: gaps of a plain stream beside rows that are plain or must match a JSON
schema, in turns. Writes `benchmarks/results/structured.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.engine.grammar_automaton import Automaton, Lexers, load_tokenizer
from benchmarks.kit import by_turns, checkpoint, cluster, parser, report, table
from coordinator.structured_output import Constraint, to_grammar
from sim.stats import percentile

BAR = 1.1
WARM_UP_S, WINDOW_S, LIMIT_S = 1.0, 6.0, 120.0
TOGETHER = 8  # bodies that are sent at the same time
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
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
            token = int(chosen.choice(allowed.tolist()))
            output = () if token == 1 else (*output, token)
        ranked = sorted(took[1:])
        shown = [took[0], *(percentile(ranked, p) for p in (50, 90, 99)), statistics.mean(ranked)]
        rows.append([name, *(f"{s * 1e6:,.0f} us" for s in shown)])
    return [loading, table(("grammar", "first", "p50", "p90", "p99", "mean"), rows)]


async def gaps(url: str, rows: int, extra: dict[str, Any]) -> list[float]:
    """Seconds between events of a plain stream while `rows` others, with `extra` in their bodies, run."""
    body = {"prompt": [300, 301, 302], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    large = json.dumps(body | extra).encode()
    headers = {"content-type": "application/json"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    times: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits, trust_env=False) as client:

        async def read(content: bytes, note: list[float] | None) -> None:
            async with client.stream("POST", "/v1/completions", content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    raise SystemExit(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
                async for _ in answer.aiter_raw():
                    if note is not None:
                        note.append(time.monotonic())

        tasks = [asyncio.create_task(read(json.dumps(body).encode(), times))]
        for first in range(0, rows, TOGETHER):
            count = min(TOGETHER, rows - first)
            tasks += [asyncio.create_task(read(large, None)) for _ in range(count)]
            await until_running(client, tasks, 1 + first + count)
        await asyncio.sleep(WARM_UP_S)
        begin = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        for task in tasks:
            if task.done():
                task.result()
                raise SystemExit("a stream ended in the window")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_running(client, [], 0)
    return [b - a for a, b in itertools.pairwise(times) if a >= begin]


async def until_running(client: httpx.AsyncClient, tasks: list[asyncio.Task[None]], count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for task in tasks:
            if task.done():
                task.result()
        workers = (await client.get("/workers")).json()["workers"]
        if next(worker["running"] for worker in workers if worker["role"] == "decode") == count:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{count} sequences did not run within {LIMIT_S:g} s")


def by_kind(url: str, rows: int, turns: int, extra: Mapping[str, dict[str, Any]]) -> dict[str, list[list[float]]]:
    """The gaps of each turn by kind of the rows beside the stream; `extra`: what each kind adds to their bodies."""
    measured: dict[str, list[list[float]]] = {kind: [] for kind in extra}
    for turn in range(turns):
        for kind in by_turns(turn, extra):
            measured[kind].append(asyncio.run(gaps(url, rows, extra[kind])))
            print(turn, kind, f"{statistics.median(measured[kind][-1]) * 1e3:.2f} ms", flush=True)
    return measured


def ratio(before: list[list[float]], after: list[list[float]]) -> float:
    """The ratio of the medians of a turn; the median over turns."""
    return statistics.median(statistics.median(b) / statistics.median(a) for a, b in zip(before, after, strict=True))


def main() -> None:
    options = parser(__doc__, "structured.md")
    options.add_argument("--rows", type=int, default=7)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--shape", default="152k", help="of benchmarks/make_checkpoint.py")
    arguments = options.parse_args()
    with checkpoint(arguments.shape) as model:
        shown = masks(model)
        with cluster("--model", str(model), "--draft", "none") as running:
            measured = by_kind(running.url, arguments.rows, arguments.turns, EXTRA)
    kinds = [
        f"- {kind}: {' '.join(f'{statistics.median(run) * 1e3:.2f}' for run in runs)} ms"
        for kind, runs in measured.items()
    ]
    beside = f"Gaps of a plain stream beside {arguments.rows} rows, median of each turn:"
    over = f"Ratio, median over turns: {ratio(*measured.values()):.2f} (bar: {BAR})."
    parts = ("## Masks", *shown, "## A step", beside, "\n".join(kinds), over)
    report(arguments.out, "Structured output", *parts, about=f"Shape {arguments.shape}.")


if __name__ == "__main__":
    main()
