"""The parts of gpu.py, one per process: `python benchmarks/gpu_parts.py NAME`. A part prints Markdown as it runs, and
its rows of the table of bars; it exits with 0 if all its checks passed. With BATON_REHEARSE=1 it runs on the CPU, on
tiny shapes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu import BAR, EDGE_KIND, FAULT, PARTS  # noqa: E402

REHEARSAL, QUICK = (os.environ.get(f"BATON_REHEARSE{more}") == "1" for more in ("", "_QUICK"))
DEVICE = "cpu" if REHEARSAL else "cuda"
PROMPT, BATCH, CONTEXT = (64, 4, 40) if REHEARSAL else (8192, 64, 1024)
TERMINATED = 128 + signal.SIGTERM
IMPORTS = ("baton.engine.runner", "prefill.worker", "decode.worker", "coordinator.serving", "launch.up")


class Failed(Exception):
    """A check failed; the rest of the part still runs where possible."""


class Checks:
    """Runs the steps of a part one by one; a step that fails does not stop the others."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code == TERMINATED:
                raise
            self.failed.append(name)
            print(f"- **{name}: failed**: {type(error).__name__}: {str(error).strip()[:2000]}")
            if not isinstance(error, Failed):
                traceback.print_exc(limit=-12)
        else:
            print(f"- {name}: ok, {time.monotonic() - started:.1f} s")


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def bar(name: str, measured: str, limit: str, met: bool) -> None:
    """A row of the table of bars; the name is one of the part's `bars` in gpu.py."""
    row = {"name": name, "measured": measured, "limit": limit, "met": "yes" if met else "**no**"}
    print(f"{BAR}{json.dumps(row)}", flush=True)


def edge_kind() -> str:
    """The kind of edge of a part that uses NCCL, unless NCCL has failed before."""
    return os.environ.get(EDGE_KIND) or ("gloo" if REHEARSAL else "nccl")


# ---- environment


def environment(checks: Checks) -> None:
    print(
        f"- Python {sys.version.split()[0]}; compiler for Triton: {shutil.which('cc') or shutil.which('gcc') or 'NONE'}"
    )
    text = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'^  "([A-Za-z0-9_-]+)(?:\[[^]]*\])?>=([\d.]+)', text, re.MULTILINE)
    missing = []
    for name, least in dict(wanted).items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name} (>={least})")
            continue
        if _numbers(found) < _numbers(least):
            missing.append(f"{name} {found} (>={least})")
    print(f"- missing, or older than pyproject.toml says: {', '.join(missing) or 'nothing'}")
    with checks.step("torch and its devices"):
        import torch

        nccl = "none"
        if torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"- torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            print(
                f"- cuda:{index}: {facts.name}, capability {facts.major}.{facts.minor},"
                f" {facts.multi_processor_count} multiprocessors, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            )
        check(REHEARSAL or torch.cuda.is_available(), "torch finds no CUDA device")
    with checks.step("triton"):
        import triton

        from baton.engine.kernels.rank_sum import sum_by_rank

        ones = torch.ones(2, 1024, device=DEVICE)
        check(bool((sum_by_rank(ones) == 2).all()), "a Triton kernel computed something else")
        print(f"- triton {triton.__version__} compiles and runs")
    from launch.gpus import visible_gpus

    print(f"- GPUs that the launcher would hand out: {', '.join(visible_gpus()) or 'none'}")
    for module in IMPORTS:
        with checks.step(f"import {module}"):
            importlib.import_module(module)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# ---- kernels


def kernels(checks: Checks) -> None:
    with checks.step("Triton kernels equal their plain twins"):
        pytest("tests/gpu/test_attention_cuda.py", "9-3-64 or sums_over or checksums" if QUICK else "")


def kernel_times(checks: Checks) -> None:
    import torch

    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import Span
    from tests.engine.test_attention_triton import shape

    least = 1.0
    config = shape(32, 8, 128)
    print("\n| attention of one layer, 32 heads on 8 of 128, bf16 | time | read | share of copy bandwidth |")
    print("|---|---|---|---|")
    bandwidth = copy_bandwidth()
    dtype = torch.float16 if REHEARSAL else torch.bfloat16
    shapes = [(1, 512), (1, 8192), (64, 1024), (64, 1025), (8, 16384), (1, 100_000)]
    for batch, context in [(1, 40), (3, 40)][: 2 - QUICK] if REHEARSAL else shapes:
        each = -(-context // 16)
        keys, values = (torch.randn(batch * each + 1, 16, 8, 128, device=DEVICE).to(dtype) for _ in range(2))
        spans = [Span(row, context - 1, context, tuple(range(row * each, (row + 1) * each))) for row in range(batch)]
        attention = TritonAttention(config, 16, dtype, torch.device(DEVICE))
        prepared, queries = attention.prepare(spans, 0), torch.randn(batch, 32, 128, device=DEVICE).to(dtype)
        took = median_s(
            lambda a=attention, q=queries, k=keys, v=values, p=prepared: a.attend(q, k, v, p),
            2 if REHEARSAL else 10,
            inner=20,
        )
        read = batch * context * 2 * 8 * 128 * 2
        share = read / took / bandwidth
        print(f"| {batch} at {context} | {took * 1e6:.1f} us | {read / 1e6:.1f} MB | {share:.2f} |", flush=True)
        if batch * context >= (0 if REHEARSAL else 1 << 16):  # smaller ones fit into the GPU's cache, or fill no GPU
            least = min(least, share)
    bar("attention reads at 60 % of copy bandwidth", f"{least:.2f}", "0.60", least >= 0.6)


# ---- graphs


def graphs(checks: Checks) -> None:
    import torch

    from baton.core.request import SamplingParams, SequenceId
    from baton.core.step import Row, StepPlan
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import Limits, make_batch
    from baton.engine.decode_graphs import DecodeGraphs
    from baton.engine.kernels.fused import fused
    from baton.engine.kv_pool import KVPool
    from baton.engine.layers import Rotary
    from baton.engine.model import Model
    from baton.engine.parallel import TPGroup
    from baton.engine.weights import WeightReader

    device, longest, blocks = torch.device(DEVICE), 256 if REHEARSAL else 16_384, 80 if REHEARSAL else 4000
    config = config_of("tiny" if REHEARSAL else "135m")
    group, greedy = TPGroup(), SamplingParams(temperature=0.0)
    weights = WeightReader(RandomTensors(config, device, torch.float32), config, group, torch.float32, device)
    with torch.no_grad():
        model = Model(config, weights, group, fused(Rotary(config, longest, torch.float32, device)))
    pools = [KVPool(config.kv_layout(16, "float32"), blocks, device) for _ in range(2)]
    attentions = [TritonAttention(config, 16, torch.float32, device) for _ in range(2)]
    limits, most_rows = Limits(16, blocks, config.vocab_size, longest), 4 if REHEARSAL else 64
    tables = limits.new_tables(2 * most_rows)
    made = DecodeGraphs(model, pools[0], attentions[0], tables, longest, most_rows, (1, 5))
    started = time.perf_counter()
    with torch.no_grad():
        made.capture(config.vocab_size)
    memory = "" if REHEARSAL else f", {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved"
    print(f"- {len(made.shapes())} shapes captured in {time.perf_counter() - started:.1f} s{memory}")
    replays, churn, worst = (2 if QUICK else 6) if REHEARSAL else 200, [], 0.0
    with checks.step(f"{replays} replays while memory is allocated and freed"):
        for pool in pools:
            for pair in pool.storage:
                for number, tensor in enumerate(pair):
                    generator = torch.Generator(device).manual_seed(number)
                    tensor[:-1] = torch.randn(tensor[:-1].shape, generator=generator, device=device)
        for number in range(replays):
            batch = (1, 3, 4, 2)[number % 4] * (1 if REHEARSAL else (1, 5, 8)[number % 3])
            each = blocks // batch
            most = min(each * 16, longest) - 6
            length = (1, 1, 4, 5)[number % 4]
            rows = tuple(
                Row(
                    SequenceId(f"s{number}-{r}"),
                    (most * (r + 1) // batch),
                    tuple((number + r + j) % 300 for j in range(length if r % 2 == 0 else 1)),
                    tuple(range(r * each, (r + 1) * each)),
                    greedy,
                    1,
                )
                for r in range(batch)
            )
            step = make_batch(StepPlan(number, rows), limits, device, 1, tables)
            with torch.no_grad():
                found = made.compute(step).clone()
                churn.append(torch.full((1 + number * 7919 % 3_000_000,), float("nan"), device=device))
                if len(churn) > 5:
                    churn.pop(number % 5)
                if number % 20 == 19 and not REHEARSAL:
                    churn.clear()
                    torch.cuda.empty_cache()
                expected = model.forward(step, pools[1], attentions[1])
            worst = max(worst, float((found - expected).abs().max()))
            check(bool(torch.isfinite(found).all()), f"replay {number}: logits are not finite")
            check(worst < 2e-3, f"replay {number}: logits differ by {worst:.2g}")
        check(made.replayed == replays, f"{made.replayed} of {replays} steps were replayed")
        print(f"- {replays} replays of {batch} and fewer rows; logits differ by at most {worst:.1e}")


# ---- engine


def engine(checks: Checks) -> None:
    with checks.step("tests/gpu/test_engine_cuda.py"):
        once = "not mistral and not qwen2 and (not chosen_on_the_device or min_p)"
        pytest("tests/gpu/test_engine_cuda.py", once if QUICK else "")


# ---- 8 B


def eight_b_runner(bandwidth: float = 0.0, **options: Any) -> Any:
    """A runner of an 8 B shape with random weights, made on the device."""
    import ahead
    import torch

    from baton.engine.loading import load_runner
    from baton.engine.options import EngineOptions

    name, dtype = ("tiny", "float32") if REHEARSAL else ("8b", "bfloat16")
    config = config_of(name)
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), name)
        chosen = {
            "max_model_len": PROMPT + 16,
            "max_num_tokens": PROMPT,
            "decode_rows": BATCH,
            "kv_memory_bytes": (16 << 20) if REHEARSAL else (24 << 30),
            **options,
        }
        made = EngineOptions(model_dir=Path(directory), device=DEVICE, dtype=dtype, kernels="torch", **chosen)
        tensors = RandomTensors(config, torch.device(DEVICE), getattr(torch, dtype))
        started = time.perf_counter()
        runner = load_runner(made, lambda stage, took: print(f"- load, stage {stage}: {took:.1f} s"), tensors=tensors)
    ahead.fill_with_zeros(runner)  # memory that was never written may hold NaN
    took_s, weights = time.perf_counter() - started, runner.parameter_bytes
    print(f"- {weights / 1e9:.1f} GB of weights and {runner.num_blocks} blocks in {took_s:.1f} s", flush=True)
    return runner


def first_step(checks: Checks) -> None:
    """Before anything else: does a model run, and how long does a step of one sequence take?"""
    from engine import decode

    bandwidth = copy_bandwidth()
    small = {"max_model_len": CONTEXT, "max_num_tokens": min(512, PROMPT), "decode_rows": 1}
    runner = eight_b_runner(**small, kv_memory_bytes=(16 << 20) if REHEARSAL else (1 << 30))
    plan, floor = decode(1, CONTEXT // 2), runner.parameter_bytes / bandwidth
    took = median_s(lambda: runner.step(plan), 2 if REHEARSAL else 20)
    print(f"- decode step, batch 1 at {CONTEXT // 2}: {took * 1e3:.2f} ms; weights / bandwidth {floor * 1e3:.2f} ms")
    bar("decode step, batch 1, in 1.2 of its floor", f"{took / floor:.2f}", "1.20", took <= 1.2 * floor)


def eight_b(checks: Checks) -> None:
    import ahead
    from engine import decode, prefill

    from baton.core.request import SamplingParams
    from baton.engine.loading import load_runner
    from baton.engine.options import EngineOptions
    from baton.runtime.model_source import builtin_directory

    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"- copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    runner = eight_b_runner()
    config, weights = runner.model_config, runner.parameter_bytes
    kv = BATCH * CONTEXT * runner.layout.bytes_per_token
    body = weights // (4 if REHEARSAL else 2) - 2 * config.vocab_size * config.hidden_size

    def work(tokens: int) -> int:
        attention = 2 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
        return 2 * body * tokens + attention + 2 * config.vocab_size * config.hidden_size

    print("\n| work | median | floor | ratio | bar | met |\n|---|---|---|---|---|---|")
    noisy = SamplingParams(temperature=0.8, seed=1)
    nucleus = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    short = min(512, PROMPT)
    batch64, whole = "decode step, batch 64, in 1.4 of its floor", "prefill of 8,192 at 60 % of matrix rate"
    for name, plan, floor, what, limit, repeat, of_table in (
        ("decode, batch 1", decode(1, CONTEXT // 2), weights / bandwidth, "weights / bandwidth", 1.2, 30, ""),
        (f"decode, batch {BATCH}", decode(BATCH, CONTEXT), (weights + kv) / bandwidth, "bytes", 1.4, 20, batch64),
        (f"prefill of {PROMPT}", prefill(PROMPT), work(PROMPT) / rate, "FLOP / matrix rate", 1 / 0.6, 5, whole),
        (f"prefill of {short}", prefill(short), work(short) / rate, "FLOP / matrix rate", 0.0, 10, ""),
        (f"decode {BATCH}, T 0.8", decode(BATCH, CONTEXT, 1, noisy), (weights + kv) / bandwidth, "bytes", 0.0, 20, ""),
        (
            f"decode {BATCH}, top_p",
            decode(BATCH, CONTEXT, 1, nucleus),
            (weights + kv) / bandwidth,
            "bytes",
            0.0,
            20,
            "",
        ),
        ("verify 1 x 5", decode(1, CONTEXT // 2, 5), weights / bandwidth, "weights / bandwidth", 0.0, 20, ""),
    ):
        with checks.step(name):
            took = median_s(lambda p=plan, r=runner: r.step(p), 2 if REHEARSAL else repeat)
            met = "" if not limit else "yes" if took <= limit * floor else "**no**"
            of = f"{limit:.2f}" if limit else ""
            print(
                f"| {name} | {took * 1e3:.2f} ms | {floor * 1e3:.2f} ms ({what}) | {took / floor:.2f} | {of} | {met} |"
            )
            if of_table:
                bar(of_table, f"{took / floor:.2f}", of, met == "yes")
    with checks.step("steps one by one and planned ahead"):
        shapes = [(1, 32)] if REHEARSAL else [(1, 512), (16, CONTEXT), (BATCH, CONTEXT)]
        steps, rounds = (4, 1) if REHEARSAL else (60, 2)
        print(f"\n{ahead.compare(runner, shapes, steps, rounds)}")
    del runner
    with checks.step("steps of the built-in pair with draft tokens"):
        pair = [
            load_runner(
                EngineOptions(
                    model_dir=builtin_directory(name), device=DEVICE, kv_memory_bytes=256 << 20, decode_rows=16
                )
            )
            for name in ("target", "draft")
        ]
        check(REHEARSAL or pair[0].launches_ahead, "the pair does not run on the GPU")
        if not REHEARSAL:
            print(f"\n{ahead.compare_drafting(*pair, [(1, 256), (16, 256)], 40, 2)}")


def eight_b_profile(checks: Checks) -> None:
    from engine import decode, prefill
    from torch.profiler import ProfilerActivity, profile

    runner = eight_b_runner()
    activity = ProfilerActivity.CPU if REHEARSAL else ProfilerActivity.CUDA
    column = "self_cpu_time_total" if REHEARSAL else "self_device_time_total"
    for name, plan in (
        ("decode 1", decode(1, CONTEXT // 2)),
        (f"decode {BATCH}", decode(BATCH, CONTEXT)),
        (f"prefill {PROMPT}", prefill(PROMPT)),
    ):
        with checks.step(name):
            for _ in range(3):
                runner.step(plan)
            synchronize()
            with profile(activities=[activity]) as found:
                runner.step(plan)
                synchronize()
            rows = sorted(found.key_averages(), key=lambda row: -getattr(row, column))[:12]
            print(f"\n| {name}: kernel | calls | us |\n|---|---|---|")
            for row in rows:
                print(f"| `{row.key[:90]}` | {row.count} | {getattr(row, column):.0f} |")
            print()


def eight_b_http(checks: Checks) -> None:
    """Workers with random weights, so no checkpoint has to be written and read."""
    from tests.gpu.where import one_gpu_settings

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "m"
        random_model(model, "tiny" if REHEARSAL else "8b")
        settings = {**one_gpu_settings(), "program": (sys.executable, "-m", "benchmarks.gpu_random_up")}
        settings |= {"edge_kind": "auto", "dtype": "float32" if REHEARSAL else "bfloat16", "draft": "none"}
        settings["kv_memory_gib"] = 0.1 if REHEARSAL else 6
        with checks.step("8 B over HTTP"):
            streams, tokens, prompt = (2, 8, 40) if REHEARSAL else (16, 200, 1000)
            seconds, per_s, ttft = asyncio.run(served(model, settings, streams, tokens, prompt))
            print(f"- {streams} streams of {tokens} tokens after {prompt}: TTFT p50 {ttft * 1e3:.0f} ms,")
            print(f"  {per_s:.0f} tokens/s in {seconds:.1f} s")
            bar("8 B over HTTP", f"{per_s:.0f} tokens/s", f"{streams} streams end", True)


def random_model(directory: Path, name: str) -> None:
    """A model directory without weights, with the tokenizer of the built-in model."""
    from baton.runtime.model_source import builtin_directory

    directory.mkdir()
    for file in builtin_directory("target").iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    write_config(directory, name)


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
            found = await asyncio.gather(*(stream(6 + number) for number in range(streams)))
            took_s = time.perf_counter() - started
            check(all(count == tokens for _, count in found), f"tokens: {[count for _, count in found]}, not {tokens}")
            await client.idle(running)
    return took_s, streams * tokens / took_s, statistics.median(first for first, _ in found)


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


# ---- tokens


LOGITS_WITHIN = 1e-3
"""Float32 logits of a GPU differ from the CPU's by at most this much; a greedy choice is compared as long as the CPU's
two best logits differ by more than twice that."""
NEAR_TIE_BF16 = 0.5
"""In bfloat16 a greedy choice may differ only where the CPU's two best float32 logits differ by less."""


def tokens(checks: Checks) -> None:
    from baton.runtime.model_source import builtin_directory
    from tests.engine.driver import Job, all_logits, random_tokens, run, tiny_runner

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
                found, expected = (all_logits(each, prompts[-1], [64]) for each in (runner, plain))
                apart = float((found - expected).abs().max())
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


# ---- cluster


def cluster(checks: Checks) -> None:
    from tests.cluster.test_any_to_any import eight_heads, same_tokens_as_one_rank
    from tests.gpu.where import one_gpu_settings

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
        subprocess.run([sys.executable, "tools/make_checkpoint.py", size, str(large)], cwd=ROOT, check=True)
        print("\n| edge kind | ITL p50 | p99 | p99 beside hand-overs | hand-overs | KV bytes | per s |")
        print("|---|---|---|---|---|---|---|")
        for each in dict.fromkeys((kind, "ipc")):
            with checks.step(f"ITL beside hand-overs, {each}"):
                asyncio.run(beside_hand_overs(large, each))


def kill(checks: Checks) -> None:
    from tests.cluster.test_any_to_any import eight_heads
    from tests.gpu.test_nccl import silent_peer
    from tests.gpu.where import one_gpu_settings

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
    from tests.cluster.test_any_to_any import eight_heads, same_tokens_as_one_rank
    from tests.gpu.where import one_gpu_settings

    name = "tokens of 2 decode ranks"
    with tempfile.TemporaryDirectory() as directory, checks.step(name):
        model = eight_heads(Path(directory) / "m", 4)
        settings = {**one_gpu_settings(), "edge_kind": edge_kind(), "decode_tp": 2}
        asyncio.run(same_tokens_as_one_rank(model, **settings))
        bar(name, "equal", "those of transformers", True)


async def beside_hand_overs(model: Path, kind: str) -> None:
    """Streams alone, then the same streams while prompts are handed over one after the other."""
    from launch.bench.stats import percentile
    from tests.gpu.where import one_gpu_settings
    from tests.support.client import Client
    from tests.support.cluster import cluster as running_cluster

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


# ---- transformers


def transformers(checks: Checks) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), "tiny" if REHEARSAL else "8b")
        config = AutoConfig.from_pretrained(directory)
    with torch.device(DEVICE):
        twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    print("| work | median |\n|---|---|")
    with torch.inference_mode():
        ids = torch.randint(0, 300, (1, PROMPT), device=DEVICE)
        for batch, context in ((1, CONTEXT // 2), (BATCH, CONTEXT)):
            with checks.step(f"decode, batch {batch}"):
                cache = DynamicCache(config=config)
                twin(ids[:, :context].repeat(batch, 1), past_key_values=cache, logits_to_keep=1)

                def step(cache: Any = cache, batch: int = batch, context: int = context) -> None:
                    twin(ids[:, :1].repeat(batch, 1), past_key_values=cache)
                    cache.crop(-1)

                print(f"| decode, batch {batch} at {context} | {median_s(step, 2 if REHEARSAL else 10) * 1e3:.2f} ms |")
        with checks.step("prefill"):
            took = median_s(lambda: twin(ids, logits_to_keep=1), 2 if REHEARSAL else 3)
            print(f"| prefill of {PROMPT} | {took * 1e3:.1f} ms |")


# ---- what they share


class RandomTensors:
    """A checkpoint of random weights that are generated on the device; see checkpoint.Checkpoint."""

    def __init__(self, config: Any, device: Any, dtype: Any) -> None:
        from types import SimpleNamespace

        from baton.engine.weights import expected_tensors

        self._device, self._dtype = device, dtype
        self.tensors = {
            name: SimpleNamespace(shape=size, file=Path("random")) for name, size in expected_tensors(config).items()
        }

    def verify(self, expected: Any, dtype: Any) -> None:
        if set(expected) != set(self.tensors):
            raise Failed("random weights of another model")

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Any:
        import torch

        size = self.tensors[name].shape
        if len(size) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)[rows]
        generator = torch.Generator(self._device).manual_seed(hash_of(name))
        made = torch.randn(size, device=self._device, dtype=self._dtype, generator=generator)
        return made.mul_(size[1] ** -0.5)[rows, columns]


def hash_of(name: str) -> int:
    import zlib

    return zlib.crc32(name.encode())


def write_config(directory: Path, name: str) -> None:
    """The config.json of one of the shapes of tools/make_checkpoint.py."""
    import json

    from tests.support.checkpoints import Shape, make_config
    from tools.make_checkpoint import SHAPES

    more = {"vocab_size": 4096} if name == "tiny" else {}
    (directory / "config.json").write_text(json.dumps(make_config("llama", Shape(**SHAPES[name], **more))))


def config_of(name: str) -> Any:
    from baton.engine.checkpoint import read_model_config

    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), name)
        return read_model_config(Path(directory))


def synchronize() -> None:
    import torch

    if not REHEARSAL:
        torch.cuda.synchronize()


def median_s(work: Callable[[], object], repeat: int, inner: int = 1) -> float:
    """Median seconds of `work`, the device idle before and after each `inner` calls."""
    inner = 1 if REHEARSAL else inner
    times = []
    for _ in range(repeat + 2):
        synchronize()
        started = time.perf_counter()
        for _ in range(inner):
            work()
        synchronize()
        times.append((time.perf_counter() - started) / inner)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large copy."""
    import torch

    source = torch.empty(64 << 20 if REHEARSAL else 4 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), 5)


def matrix_rate() -> float:
    """FLOP per second of a square bf16 product."""
    import torch

    size = 256 if REHEARSAL else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_s(lambda: a @ b, 10)


def pytest(path: str, named: str = "") -> None:
    """Runs the tests of `path`, or those that match `named`, without plugins; unknown settings of pyproject.toml are
    ignored."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-p", "no:asyncio"]  # the machine may lack the plugin; the tests of tests/gpu do not need it
    process = subprocess.Popen(
        [*command, "-v", "--durations=8", "-m", "gpu", "-k", named, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last = ""
    for line in process.stdout or ():
        last = line.strip() or last
        print(f"    {line.rstrip()}")
    code = process.wait()
    check(code == 0, f"pytest {path} ended with {code}")
    check(bool(re.search(r"\b\d+ passed", last)), f"pytest {path} ran no test: {last}")


def compile_kernels() -> int:
    """Compiles the kernels of all parts into Triton's cache, each model in a process of its own."""
    import torch

    from benchmarks.kernels_compiled import MODELS

    if not torch.cuda.is_available():
        return 1
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels_compiled.py"), "--json", "--arch", arch, "--only"]
    running = [subprocess.Popen([*command, model.name]) for model in MODELS]
    return max(process.wait() for process in running)


def plant(name: str) -> None:
    """The fault that FAULT plants in this part, if any."""
    planted = dict(entry.split(":") for entry in os.environ.get(FAULT, "").split(",") if entry)
    match planted.get(name):
        case "hang":
            print("made to hang", flush=True)
            time.sleep(3600)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "cuda" if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            raise Failed("CUDA error: an illegal memory access was encountered (planted)")
        case "fail":
            raise Failed("made to fail")


FUNCTIONS: dict[str, Callable[[Checks], None]] = {
    "environment": environment,
    "kernel-times": kernel_times,
    "first-step": first_step,
    "first-edge": lambda checks: edges().first(checks),
    "up": up,
    "tokens": tokens,
    "kernels": kernels,
    "graphs": graphs,
    "8b": eight_b,
    "8b-profile": eight_b_profile,
    "8b-http": eight_b_http,
    "edges-ipc": lambda checks: edges().run(checks, "ipc"),
    "edges-nccl": lambda checks: edges().run(checks, "gloo" if REHEARSAL else "nccl"),
    "cluster": cluster,
    "kill": kill,
    "engine": engine,
    "tp2": two_ranks,
    "transformers": transformers,
}


def edges() -> Any:
    import gpu_edges

    return gpu_edges


def main() -> int:
    name = sys.argv[1]
    if name == "edge-peer":
        return int(edges().peer(*sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    if name == "compile":
        return compile_kernels()
    assert {part.name for part in PARTS} == set(FUNCTIONS)
    plant(name)
    checks = Checks()
    FUNCTIONS[name](checks)
    if checks.failed:
        print(f"\nfailed: {', '.join(checks.failed)}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a worker does: C++ threads of torch may abort a process during a normal exit
