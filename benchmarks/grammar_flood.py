"""How long small schemas of one client wait while another client floods the coordinator with large ones.

    python benchmarks/grammar_flood.py [--loops 12] [--properties 3000] [--seconds 60]

Runs the coordinator's compiler with its child processes and the built-in model's tokenizer, without a front: `--loops`
loops of always new schemas with `--properties` properties, and one loop of new schemas with one property, 0.2 s apart.
The small schemas are measured alone, then beside the flood of another API key, then with neither client using a key, so
that both share one queue, as before clients took turns. Prints the content of `benchmarks/results/grammar-flood.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.errors import BatonError
from baton.runtime.model_source import builtin_directory
from benchmarks.kit import commit, machine
from coordinator.structured_output import Constraint, GrammarCompiler

PAUSE_S = 0.2
_NUMBERS = itertools.count()


def schema(properties: int) -> Constraint:
    """A schema that was never used before."""
    number = next(_NUMBERS)
    names = {f"p{number}_{index}": {"type": "integer"} for index in range(properties)}
    return Constraint("json_schema", json.dumps({"type": "object", "properties": names}, separators=(",", ":")), "f")


async def timed(compiler: GrammarCompiler, properties: int, client: str) -> float:
    """Seconds until a new schema is compiled; negative if it was refused."""
    began = time.monotonic()
    try:
        await compiler.compile(schema(properties), client)
    except BatonError:
        return -1.0
    return time.monotonic() - began


async def measured(loops: int, properties: int, seconds: float, clients: tuple[str, str]) -> str:
    compiler = GrammarCompiler(builtin_directory("target"), 4096)
    await timed(compiler, 1, "")  # the child has started
    large: list[float] = []

    async def flood() -> None:
        while True:
            if (took := await timed(compiler, properties, clients[0])) >= 0:
                large.append(took)

    floods = [asyncio.create_task(flood()) for _ in range(loops)]
    small, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(PAUSE_S)
        small.append(await timed(compiler, 1, clients[1]))
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    compiler.close()
    served = [took for took in small if took >= 0] or [float("nan")]
    median, worst = statistics.median(served) * 1e3, max(served) * 1e3
    return f"{len(small)} | {median:.0f} | {worst:.0f} | {small.count(-1.0)} | {len(large)}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=12)
    parser.add_argument("--properties", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    print(f"# A flood of large schemas\n\n{machine()}. Commit {commit()}, {datetime.date.today().isoformat()}.\n")
    print(" ".join(["    python benchmarks/grammar_flood.py", *sys.argv[1:]]))
    print("\n| beside | small schemas | median, ms | worst, ms | refused | large schemas |\n|---|---|---|---|---|---|")
    for what, loops, clients in (
        ("nothing", 0, ("", "")),
        ("the flood of another API key", asked.loops, ("flood", "small")),
        ("the flood, both without keys", asked.loops, ("", "")),
    ):
        print(f"| {what} | {await measured(loops, asked.properties, asked.seconds, clients)} |")


if __name__ == "__main__":
    asyncio.run(main())
