"""The parts of gpu.py with an 8 B shape: in the engine, over HTTP, and with transformers."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import ahead
from benchmarks.gpu_parts.clusters import served
from benchmarks.gpu_parts.random_weights import RandomTensors, config_of, random_model, write_config
from benchmarks.gpu_parts.setting import (
    DEVICE,
    REHEARSAL,
    Checks,
    bar,
    check,
    copy_bandwidth,
    matrix_rate,
    median_s,
    synchronize,
)

PROMPT, BATCH, CONTEXT = (64, 4, 40) if REHEARSAL else (8192, 64, 1024)


def make_runner(bandwidth: float = 0.0, **options: Any) -> Any:
    """A runner of an 8 B shape with random weights, made on the device."""
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
            # FlashInfer may compile for minutes; it has a part of its own.
            "attention": "triton" if DEVICE == "cuda" else "auto",
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
    from benchmarks.engine import decode

    bandwidth = copy_bandwidth()
    small = {"max_model_len": CONTEXT, "max_num_tokens": min(512, PROMPT), "decode_rows": 1}
    runner = make_runner(**small, kv_memory_bytes=(16 << 20) if REHEARSAL else (1 << 30))
    plan, floor = decode(1, CONTEXT // 2), runner.parameter_bytes / bandwidth
    took = median_s(lambda: runner.step(plan), 2 if REHEARSAL else 20)
    print(f"- decode step, batch 1 at {CONTEXT // 2}: {took * 1e3:.2f} ms; weights / bandwidth {floor * 1e3:.2f} ms")
    bar("decode step, batch 1, in 1.2 of its floor", f"{took / floor:.2f}", "1.20", took <= 1.2 * floor)


def steps(checks: Checks) -> None:
    from baton.core.request import SamplingParams
    from baton.engine.loading import load_runner
    from baton.engine.options import EngineOptions
    from baton.runtime.model_source import builtin_directory
    from benchmarks.engine import decode, prefill

    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"- copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    runner = make_runner()
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
    for name, plan, floor, floor_name, limit, repeat, of_table in (
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
                f"| {name} | {took * 1e3:.2f} ms | {floor * 1e3:.2f} ms ({floor_name}) | {took / floor:.2f}"
                f" | {of} | {met} |"
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


def profile_steps(checks: Checks) -> None:
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.engine import decode, prefill

    runner = make_runner()
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
            with profile(activities=[activity]) as profiled:
                runner.step(plan)
                synchronize()
            rows = sorted(profiled.key_averages(), key=lambda row: -getattr(row, column))[:12]
            print(f"\n| {name}: kernel | calls | us |\n|---|---|---|")
            for row in rows:
                print(f"| `{row.key[:90]}` | {row.count} | {getattr(row, column):.0f} |")
            print()


def over_http(checks: Checks) -> None:
    """Workers with random weights, so no checkpoint has to be written and read."""
    from tests.support.one_gpu import one_gpu_settings

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "m"
        random_model(model, "tiny" if REHEARSAL else "8b")
        settings = {**one_gpu_settings(), "program": (sys.executable, "-m", "benchmarks.gpu_parts.random_weights")}
        settings |= {"edge_kind": "auto", "dtype": "float32" if REHEARSAL else "bfloat16", "draft": "none"}
        settings["kv_memory_gib"] = 0.1 if REHEARSAL else 6
        with checks.step("8 B over HTTP"):
            streams, tokens, prompt = (2, 8, 40) if REHEARSAL else (16, 200, 1000)
            seconds, per_s, ttft = asyncio.run(served(model, settings, streams, tokens, prompt))
            print(f"- {streams} streams of {tokens} tokens after {prompt}: TTFT p50 {ttft * 1e3:.0f} ms,")
            print(f"  {per_s:.0f} tokens/s in {seconds:.1f} s")
            bar("8 B over HTTP", f"{per_s:.0f} tokens/s", f"{streams} streams end", True)


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
