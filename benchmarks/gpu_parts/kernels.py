"""The parts of gpu.py about the device and its kernels, without a whole model."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu import ROOT
from benchmarks.gpu_parts.random_weights import RandomTensors, config_of
from benchmarks.gpu_parts.setting import DEVICE, QUICK, REHEARSAL, Checks, bar, check, copy_bandwidth, median_s, pytest

IMPORTS = ("baton.engine.runner", "prefill.worker", "decode.worker", "coordinator.serving", "launch.up")


def environment(checks: Checks) -> None:
    print(
        f"- Python {sys.version.split()[0]}; compiler for Triton: {shutil.which('cc') or shutil.which('gcc') or 'NONE'}"
    )
    text = (ROOT / "pyproject.toml").read_text()
    required = re.findall(r'^  "([A-Za-z0-9_-]+)(?:\[[^]]*\])?>=([\d.]+)', text, re.MULTILINE)
    missing = []
    for name, least in dict(required).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name} (>={least})")
            continue
        if _numbers(installed) < _numbers(least):
            missing.append(f"{name} {installed} (>={least})")
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


def kernels(checks: Checks) -> None:
    with checks.step("Triton kernels equal their plain twins"):
        pytest("tests/gpu/test_attention_cuda.py", "9-3-64 or sums_over or checksums" if QUICK else "")


def kernel_times(checks: Checks) -> None:
    import torch

    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import RowSpan
    from tests.support.attention import shape

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
        spans = [RowSpan(row, context - 1, context, tuple(range(row * each, (row + 1) * each))) for row in range(batch)]
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


def flashinfer(checks: Checks) -> None:
    """Long rows by both, and whether its decode kernel is ahead of ours, which only a device can tell."""
    if importlib.util.find_spec("flashinfer") is None:
        print("- not installed: pip install 'baton-serve[gpu]', before the time of the device counts")
        return
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    from baton.engine.attention_flashinfer import FlashInferRows
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import RowSpan
    from tests.support.attention import shape

    config, dtype, device = shape(32, 8, 128), torch.bfloat16, torch.device(DEVICE)
    started = time.perf_counter()
    paged = FlashInferRows(config, 16, dtype, device)
    print(f"- kernels of long rows built or loaded in {time.perf_counter() - started:.1f} s")
    ours = TritonAttention(config, 16, dtype, device)
    theirs = TritonAttention(config, 16, dtype, device, paged=paged)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    print(
        "\n| attention of one layer, 32 heads on 8 of 128, bf16 | ours | FlashInfer | its plan | largest difference |"
    )
    print("|---|---|---|---|---|")
    shapes = [(1, 0, 8192), (1, 30_000, 2048), (4, 0, 2048), (16, 0, 128), (1, 8191, 1), (64, 1023, 1), (8, 16_383, 1)]
    for batch, start, length in shapes:
        with checks.step(f"{batch} rows of {length} tokens after {start}"):
            each, ends = -(-(start + length) // 16), range(batch + 1)
            keys, values = (torch.randn(batch * each + 1, 16, 8, 128, device=device, dtype=dtype) for _ in range(2))
            queries = torch.randn(batch * length, 32, 128, device=device, dtype=dtype)
            spans = [
                RowSpan(row * length, start, start + length, tuple(range(row * each, (row + 1) * each)))
                for row in range(batch)
            ]
            if length == 1:
                pages = [torch.tensor([each * end for end in ends], dtype=torch.int32)]
                pages += [torch.arange(batch * each, dtype=torch.int32), torch.full((batch,), start % 16 + 1).int()]

                def plan(pages: list[torch.Tensor] = pages) -> None:
                    decode.plan(*pages, 32, 8, 128, 16, q_data_type=dtype, kv_data_type=dtype)

                def run(q: torch.Tensor = queries, k: torch.Tensor = keys, v: torch.Tensor = values) -> torch.Tensor:
                    return decode.run(q, (k, v)).flatten(1)
            else:
                prepared = theirs.prepare(spans, 0)

                def plan(spans: list[RowSpan] = spans) -> None:
                    theirs.prepare(spans, 0)

                def run(
                    q: torch.Tensor = queries, k: torch.Tensor = keys, v: torch.Tensor = values, p: Any = prepared
                ) -> torch.Tensor:
                    return theirs.attend(q, k, v, p)

            planned = median_s(plan, 5)
            before = ours.prepare(spans, 0)
            own = median_s(lambda q=queries, k=keys, v=values, p=before: ours.attend(q, k, v, p), 10, inner=20)
            took = median_s(run, 10, inner=20)
            differ = float((run().float() - ours.attend(queries, keys, values, before).float()).abs().max())
            check(differ < 0.05, f"FlashInfer's result differs by {differ:.2g}")
            print(
                f"| {batch} rows of {length} after {start} | {own * 1e6:.1f} us | {took * 1e6:.1f} us |"
                f" {planned * 1e6:.0f} us | {differ:.1e} |",
                flush=True,
            )


def graphs(checks: Checks) -> None:
    import torch

    from baton.core.request import SamplingParams, SequenceId
    from baton.core.step import Row, StepPlan
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.batch import RowLimits, make_batch
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
    limits, most_rows = RowLimits(16, blocks, config.vocab_size, longest), 4 if REHEARSAL else 64
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
            context = min(each * 16, longest) - 6
            length = (1, 1, 4, 5)[number % 4]
            rows = tuple(
                Row(
                    SequenceId(f"s{number}-{r}"),
                    (context * (r + 1) // batch),
                    tuple((number + r + j) % 300 for j in range(length if r % 2 == 0 else 1)),
                    tuple(range(r * each, (r + 1) * each)),
                    greedy,
                    1,
                )
                for r in range(batch)
            )
            step = make_batch(StepPlan(number, rows), limits, device, 1, tables)
            with torch.no_grad():
                logits = made.compute(step).clone()
                churn.append(torch.full((1 + number * 7919 % 3_000_000,), float("nan"), device=device))
                if len(churn) > 5:
                    churn.pop(number % 5)
                if number % 20 == 19 and not REHEARSAL:
                    churn.clear()
                    torch.cuda.empty_cache()
                expected = model.forward(step, pools[1], attentions[1])
            worst = max(worst, float((logits - expected).abs().max()))
            check(bool(torch.isfinite(logits).all()), f"replay {number}: logits are not finite")
            check(worst < 2e-3, f"replay {number}: logits differ by {worst:.2g}")
        check(made.replayed == replays, f"{made.replayed} of {replays} steps were replayed")
        print(f"- {replays} replays of {batch} and fewer rows; logits differ by at most {worst:.1e}")


def engine(checks: Checks) -> None:
    with checks.step("tests/gpu/test_engine_cuda.py"):
        once = "not mistral and not qwen2 and (not chosen_on_the_device or min_p)"
        pytest("tests/gpu/test_engine_cuda.py", once if QUICK else "")


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
