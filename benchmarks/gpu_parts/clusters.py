"""The parts of gpu.py with running clusters, and tokens against the CPU's."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT
from benchmarks.gpu_parts.setting import DEVICE, QUICK, REHEARSAL, Checks, bar, check, edge_kind

LOGITS_WITHIN = 1e-3
"""Float32 logits of a GPU differ from the CPU's by at most this much; a greedy choice is compared as long as the CPU's
two best logits differ by more than twice that."""
NEAR_TIE_BF16 = 0.5
"""In bfloat16 a greedy choice may differ only where the CPU's two best float32 logits differ by less."""


async def served(
    model: Path | str, settings: dict[str, Any], streams: int, tokens: int, prompt: int
) -> tuple[float, float, float]:
    """Streams from a running cluster: seconds, tokens per second, the median time to the first token."""
    from tests.support.client import Client
    from tests.support.cluster import cluster as running_cluster

    with running_cluster(model, **settings) as running:
        workers = running.workers()
        print(f"- workers: {', '.join(workers)}")
        async with Client(running) as client:
            await client.complete([5] * prompt, 2)

            async def stream(seed: int) -> tuple[float, int]:
                began, first, count = time.perf_counter(), 0.0, 0
                async for event in client.events([seed] * prompt, tokens, ignore_eos=True):
                    if event != "[DONE]" and event.get("choices"):
                        first = first or time.perf_counter() - began
                        count += len(event["choices"][0].get("token_ids") or ())
                return first, count

            started = time.perf_counter()
            streamed = await asyncio.gather(*(stream(6 + number) for number in range(streams)))
            took_s = time.perf_counter() - started
            counts = [count for _, count in streamed]
            check(all(count == tokens for count in counts), f"tokens: {counts}, not {tokens}")
            await client.idle(running)
    return took_s, streams * tokens / took_s, statistics.median(first for first, _ in streamed)


def up(checks: Checks) -> None:
    """What a user runs first: nothing is set but the device."""
    settings: dict[str, Any] = {"device": DEVICE, "served_model_name": "m"}
    if REHEARSAL:
        settings |= {"kv_memory_gib": 0.1}
    for name in [name for name in os.environ if name.startswith(("BATON_REHEARSE", "BATON_GPU"))]:
        del os.environ[name]  # `baton` refuses variables that it does not know
    with checks.step("baton up serves 8 streams"):
        seconds, per_s, ttft = asyncio.run(served("builtin", settings, 8, 16 if REHEARSAL else 128, 50))
        print(f"- 8 streams: TTFT p50 {ttft * 1e3:.0f} ms, {per_s:.0f} tokens/s in {seconds:.1f} s")
        bar("baton up serves 8 streams", f"{per_s:.0f} tokens/s", "all streams end", True)


def tokens(checks: Checks) -> None:
    from baton.runtime.model_source import builtin_directory
    from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner

    model, count = builtin_directory("target"), 8 if REHEARSAL else 64
    plain = tiny_runner(model, kernels="torch", kv_memory_bytes=64 << 20)
    vocab = plain.model_config.vocab_size
    prompts = [random_tokens(n, seed=n, vocab_size=vocab) for n in ((1, 17) if REHEARSAL else (1, 17, 130, 700))]
    for dtype, within, name in (
        ("float32", 2 * LOGITS_WITHIN, "float32 tokens of the CPU"),
        ("bfloat16", NEAR_TIE_BF16, "bfloat16 tokens of the CPU"),
    )[: 1 if QUICK else 2]:
        with checks.step(name):
            runner = tiny_runner(model, device=DEVICE, dtype=dtype, kernels="torch", kv_memory_bytes=64 << 20)
            if dtype == "float32":
                logits, expected = (all_logits(each, prompts[-1], [64]) for each in (runner, plain))
                apart = float((logits - expected).abs().max())
                print(f"- logits differ from the CPU's by at most {apart:.2e} (bound {LOGITS_WITHIN:g})")
                check(apart <= LOGITS_WITHIN, f"logits differ by {apart:.2e}")
            jobs = [Job(prompt, count, chunk=64) for prompt in prompts]
            run(runner, jobs)
            compared = sum(agreeing(plain, job, within, all_logits) for job in jobs)
            print(f"- {compared} of {count * len(jobs)} greedy tokens compared, all equal; others follow a near tie")
            bar(name, f"{compared} equal", f"except where the two best are within {within:g}", compared > 0)


def agreeing(plain: Any, job: Any, within: float, all_logits: Any) -> int:
    """How many tokens of a job equal the CPU's before its first near tie. Raises Failed if one before it differs."""
    logits = all_logits(plain, job.tokens[:-1], [64])[len(job.prompt) - 1 :]
    best = logits.topk(2).values
    for index, token in enumerate(job.output):
        if float(best[index, 0] - best[index, 1]) < within:
            return index
        check(token == int(logits[index].argmax()), f"token {index} is {token}, not {int(logits[index].argmax())}")
    return len(job.output)


def cluster(checks: Checks) -> None:
    from tests.support.one_gpu import one_gpu_settings
    from tests.support.rank_tokens import eight_heads, same_tokens_as_one_rank

    with tempfile.TemporaryDirectory() as directory:
        model, kind = eight_heads(Path(directory) / "m", 4), edge_kind()
        name = "tokens through a hand-over"
        with checks.step(f"{name}, {kind}"):
            asyncio.run(same_tokens_as_one_rank(model, **{**one_gpu_settings(), "edge_kind": kind}))
            bar(name, f"equal, over {kind}", "those of transformers", True)
        if QUICK:
            return
        large = Path(directory) / "large"
        size = "tiny" if REHEARSAL else "135m"
        subprocess.run([sys.executable, "benchmarks/make_checkpoint.py", size, str(large)], cwd=ROOT, check=True)
        print("\n| edge kind | ITL p50 | p99 | p99 beside hand-overs | hand-overs | KV bytes | per s |")
        print("|---|---|---|---|---|---|---|")
        for each in dict.fromkeys((kind, "ipc")):
            with checks.step(f"ITL beside hand-overs, {each}"):
                asyncio.run(beside_hand_overs(large, each))


def kill(checks: Checks) -> None:
    from tests.support.one_gpu import one_gpu_settings
    from tests.support.rank_tokens import eight_heads, silent_peer

    settings = {**one_gpu_settings(), "edge_kind": edge_kind()}
    with tempfile.TemporaryDirectory() as directory:
        model = eight_heads(Path(directory) / "m", 4)
        for how in (signal.SIGKILL, signal.SIGSTOP)[: 2 - QUICK]:
            with checks.step(f"a decode worker gets {how.name}"):
                took_s = asyncio.run(silent_peer(how, model, settings))
                print(f"- {how.name}: seen as lost after {took_s:.2f} s; its requests' blocks are free, edges rebuilt")
                if how is signal.SIGKILL:
                    bar("killed worker detected within 5 s", f"{took_s:.2f} s", "5 s", took_s <= 5.0)


def two_ranks(checks: Checks) -> None:
    from tests.support.one_gpu import one_gpu_settings
    from tests.support.rank_tokens import eight_heads, same_tokens_as_one_rank

    name = "tokens of 2 decode ranks"
    with tempfile.TemporaryDirectory() as directory, checks.step(name):
        model = eight_heads(Path(directory) / "m", 4)
        settings = {**one_gpu_settings(), "edge_kind": edge_kind(), "decode_tp": 2}
        asyncio.run(same_tokens_as_one_rank(model, **settings))
        bar(name, "equal", "those of transformers", True)


async def beside_hand_overs(model: Path, kind: str) -> None:
    """Streams alone, then the same streams while prompts are handed over one after the other."""
    from sim.stats import percentile
    from tests.support.client import Client
    from tests.support.cluster import cluster as running_cluster
    from tests.support.one_gpu import one_gpu_settings

    streams, tokens, prompt = (2, 30, 60) if REHEARSAL else (8, 300, 4000)
    dtype = "float32" if REHEARSAL else "bfloat16"
    settings = {**one_gpu_settings(), "edge_kind": kind, "dtype": dtype, "kv_memory_gib": 0.1 if REHEARSAL else 8}
    with running_cluster(model, **settings) as running:
        async with Client(running) as client:
            await client.complete([5] * prompt, 2)

            async def stream(seed: int) -> list[float]:
                times = []
                async for event in client.events([seed] * 20, tokens):
                    if event != "[DONE]":
                        times.append(time.perf_counter())
                return [b - a for a, b in itertools.pairwise(times)]

            async def together() -> list[float]:
                gaps = await asyncio.gather(*(stream(seed) for seed in range(6, 6 + streams)))
                return [gap for some in gaps for gap in some]

            alone = await together()
            await client.idle(running)
            before = running.workers()["prefill-0"]["kv_bytes_sent"]
            done = asyncio.Event()

            async def prompts() -> tuple[int, float]:
                count, started = 0, time.perf_counter()
                while not done.is_set():
                    await client.complete([7 + count % 200, *[9] * prompt], 2)
                    count += 1
                return count, time.perf_counter() - started

            asking = asyncio.create_task(prompts())
            beside = await together()
            done.set()
            count, took_s = await asking
            await client.idle(running)  # the last sends are counted by then
            sent = running.workers()["prefill-0"]["kv_bytes_sent"] - before
    p50, p99, p99_beside = percentile(sorted(alone), 50), percentile(sorted(alone), 99), percentile(sorted(beside), 99)
    print(
        f"| {kind} | {p50 * 1e3:.2f} ms | {p99 * 1e3:.2f} ms | {p99_beside * 1e3:.2f} ms | {count} |"
        f" {sent / 1e6:.0f} MB | {sent / took_s / 1e9:.2f} GB |"
    )
    check(count > 0 and sent > 0, "nothing was handed over")
