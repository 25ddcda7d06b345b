"""The cost of the second turn of a chat, with its history cached and without.

    python benchmarks/prefix_reuse.py --model DIR [--history 2000] [--rounds 5] [--out FILE.md]

Starts `baton up` with one prefill and one decode worker. Every round is a separate chat: a first turn of `--history`
random tokens and an answer, then the second turn (all of that and a question), then the same second turn under another
`cache_salt`, so that none of it is cached: three requests, one after the other, so drift affects all equally. TTFT is
from sending the request to the first event with text. The report has the median over the rounds, the bytes sent from
prefill to decode, and whether the two second turns generated the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import parser, report, table
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster

QUESTION = 32


@dataclass(frozen=True)
class Turn:
    ttft_s: float
    tokens: tuple[int, ...]
    cached: int
    kv_bytes: int


async def ask(client: Client, running: Cluster, prompt: Sequence[int], count: int, salt: str) -> Turn:
    """Sends one streamed request; returns its times, tokens and the bytes that it moved."""
    before = sent(running)
    started, first, ids, cached = time.perf_counter(), 0.0, [], 0
    options = {"stream_options": {"include_usage": True}, "cache_salt": salt, "model": None}
    async for event in client.events(prompt, count, **options):
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            if choice.get("token_ids"):
                first = first or time.perf_counter()
                ids += choice["token_ids"]
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    await client.idle(running, timeout_s=30.0)
    return Turn(first - started, tuple(ids), cached, sent(running) - before)


def sent(running: Cluster) -> int:
    return sum(int(fields["kv_bytes_sent"]) for fields in running.workers().values())


async def measure(args: argparse.Namespace) -> list[tuple[Turn, Turn, Turn]]:
    rounds = []
    with cluster(args.model, exact=args.exact, start_timeout_s=300) as running:
        async with Client(running, timeout_s=300.0) as client:
            for number in range(args.rounds + 1):  # the first warms up
                draw = random.Random(number)
                history = draw.choices(range(256), k=args.history)
                question = draw.choices(range(256), k=QUESTION)
                one = await ask(client, running, history, args.answer, f"chat {number}")
                second = [*history, *one.tokens, *question]
                two = await ask(client, running, second, args.answer, f"chat {number}")
                cold = await ask(client, running, second, args.answer, f"chat {number}, cold")
                rounds.append((one, two, cold))
    return rounds[1:]


def table_of(history: int, answer: int, rounds: list[tuple[Turn, Turn, Turn]]) -> str:
    rows, base = [], statistics.median(r[0].ttft_s for r in rounds)
    for index, name in enumerate(("first turn", "second turn", "second turn, nothing cached")):
        turns = [r[index] for r in rounds]
        ttft = statistics.median(t.ttft_s for t in turns)
        prompt, cached = history + (answer + QUESTION if index else 0), turns[0].cached
        megabytes = statistics.median(t.kv_bytes for t in turns) / 1e6
        rows.append([name, str(prompt), str(cached), f"{ttft * 1e3:.1f}", f"{megabytes:.2f}", f"{ttft / base:.3f}"])
    return table(("", "prompt tokens", "of these cached", "TTFT ms", "KV MB sent", "TTFT / first turn"), rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--history", type=int, default=2000)
    options.add_argument("--answer", type=int, default=32)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--exact", action="store_true")
    options.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "prefix-reuse.md")
    args = options.parse_args()
    rounds = asyncio.run(measure(args))
    ratios = ", ".join(f"{ratio:.3f}" for ratio in sorted(two.ttft_s / one.ttft_s for one, two, _ in rounds))
    same = sum(two.tokens == cold.tokens for _, two, cold in rounds)
    what = (
        f"Median of {len(rounds)} chats, one prefill and one decode worker; answers of {args.answer} tokens, a question"
        f" of {QUESTION}."
    )
    found = (
        f"Second turn over first, chat by chat: {ratios}.\n"
        f"Tokens equal with and without the cache in {same} of {len(rounds)} chats."
    )
    shown = table_of(args.history, args.answer, rounds)
    report(args.out, "Prefix reuse: the second turn of a chat", what, shown, found)


if __name__ == "__main__":
    main()
